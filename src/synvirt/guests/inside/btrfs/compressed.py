"""Compressed extents of a Btrfs: zlib, LZO and Zstandard. A module of its own, as what unpacks them takes long to load."""

from collections.abc import Callable, Mapping
from types import MappingProxyType

from synvirt.disks.packed import Damaged, lzo, zstd
from synvirt.disks.packed.inflate import inflate_zlib
from synvirt.errors import DiskReadFailed


def plain(compression: int, packed: bytes, plain_bytes: int, sector_bytes: int) -> bytes:
    """The extent's content, of `plain_bytes` at most. DiskReadFailed."""
    if compression not in _COMPRESSIONS:
        raise DiskReadFailed(f"an extent of {plain_bytes} bytes, compressed by {compression}, is none of Btrfs")
    content = bytearray(plain_bytes)
    try:
        filled = _COMPRESSIONS[compression](memoryview(bytearray(packed)), memoryview(content), sector_bytes)
    except Damaged as error:
        raise DiskReadFailed(f"a compressed extent of it is damaged: {error}") from error
    return bytes(content[:filled])


def _lzo(stream: memoryview, into: memoryview, sector_bytes: int) -> int:
    """One piece per sector, each after its length, which never crosses a sector's end; before them all, the total length."""
    end, at, filled = min(_length(stream, 0), len(stream)), 4, 0
    while at < end and filled < len(into):
        left = sector_bytes - at % sector_bytes
        at += left if left < 4 else 0
        length = _length(stream, at)
        at += 4
        filled += lzo.decompress(stream[at : at + length], into[filled : filled + sector_bytes])
        at += length
    return filled


def _length(stream: memoryview, at: int) -> int:
    if at + 4 > len(stream):
        raise Damaged("it ends before its time")
    return int.from_bytes(stream[at : at + 4], "little")


_COMPRESSIONS: Mapping[int, Callable[[memoryview, memoryview, int], int]] = MappingProxyType(
    {
        1: lambda stream, into, _: inflate_zlib(stream, into),
        2: _lzo,
        3: lambda stream, into, _: zstd.decompress(stream, into),
    }
)
