"""Persistent dirty bitmaps of a qcow2 image: QEMU's docs/interop/qcow2.txt, section «Bitmaps».

    bitmaps extension ─▶ directory ─▶ a bitmap's table ─▶ clusters of bits, one per granule of the guest's disk

Each records what a guest wrote since it was made: the extents of an incremental backup. A bitmap that was in use when its
writer died cannot be relied on.
"""

import re
import struct
from collections.abc import Iterator
from functools import cache
from typing import NamedTuple

from synvirt.blocks import DiskReader, Extent, bytes_of, coalesced
from synvirt.disks.entries import entries_of
from synvirt.disks.qcow2.header import Autoclear, Header
from synvirt.errors import CbtReset, MalformedArchive, NotFound

# QEMU's own limits (block/qcow2-bitmap.c): 65535 bitmaps, names of 1023 bytes, granules of 512 bytes to 2 GiB, 512 MiB of bits.
_BITMAPS_MAX = 65535
_NAME_MAX = 1023
_GRANULARITY_BITS_MIN, _GRANULARITY_BITS_MAX = 9, 31
_BITS_BYTES_MAX = 512 << 20
# QEMU allows 64 MiB. A thousand bitmaps with the longest names take 1 MiB, and the directory is read in one piece.
_DIRECTORY_BYTES_MAX = 4 << 20

# One byte with a set bit, and the bytes behind it whose bits are all set.
_SOME_SET = rb"[\x01-\xff]\xff*"

_ENTRY = struct.Struct(">QIIBBHI")
_ENTRY_ALIGNMENT = 8
_DIRTY_TRACKING = 1
_IN_USE, _AUTO, _EXTRA_DATA_COMPATIBLE = 1, 2, 4
# A table's entry: the offset of a cluster of bits; 0: all of them clear, 1: all set.
_TABLE_OFFSET = 0x00FF_FFFF_FFFF_FE00
_ALL_SET = 1


class Bitmap(NamedTuple):
    """A dirty bitmap in the image's directory. `in_use`: it was not stored properly and cannot be relied on."""

    name: str
    granularity_bytes: int
    in_use: bool
    automatic: bool
    table_offset: int
    table_entries: int


def bitmaps(over: DiskReader, header: Header, name: str) -> tuple[Bitmap, ...]:
    """The image's dirty bitmaps; empty, where a writer without support for bitmaps has written the image since."""
    place = header.bitmaps
    if place is None or not header.autoclear & Autoclear.BITMAPS:
        return ()
    if not 0 < place.bitmaps <= _BITMAPS_MAX or place.directory_bytes > _DIRECTORY_BYTES_MAX:
        raise MalformedArchive(f"{name}: {place.bitmaps} bitmaps, in a directory of {place.directory_bytes} bytes")
    directory = _read(over, place.directory_offset, place.directory_bytes, f"{name}: the directory of bitmaps")
    found: list[Bitmap] = []
    at = 0
    while at < len(directory):
        if at + _ENTRY.size > len(directory):
            raise MalformedArchive(f"{name}: the directory of bitmaps is cut off")
        bitmap, length = _entry(directory, at, header, name)
        if bitmap is not None:
            found.append(bitmap)
        at += length
    return tuple(found)


def _entry(directory: bytes, at: int, header: Header, name: str) -> tuple[Bitmap | None, int]:
    """An entry of the directory and its length; None for one of another type."""
    table_offset, table_entries, flags, kind, granularity_bits, name_length, extra_length = _ENTRY.unpack_from(directory, at)
    name_at = at + _ENTRY.size + extra_length
    label = directory[name_at : name_at + name_length].decode("utf-8", "replace")
    if name_length > _NAME_MAX or name_at + name_length > len(directory):
        raise MalformedArchive(f"{name}: the name of a bitmap does not fit the directory")
    length = -(-(_ENTRY.size + extra_length + name_length) // _ENTRY_ALIGNMENT) * _ENTRY_ALIGNMENT
    if kind != _DIRTY_TRACKING or (extra_length and not flags & _EXTRA_DATA_COMPATIBLE):
        return None, length
    if not _GRANULARITY_BITS_MIN <= granularity_bits <= _GRANULARITY_BITS_MAX:
        raise MalformedArchive(f"{name}: the bitmap {label!r} has granules of 2^{granularity_bits} bytes")
    if table_offset % header.cluster_size:
        raise MalformedArchive(f"{name}: the table of the bitmap {label!r} lies on no cluster's boundary")
    # QEMU's table is exactly as long as the bits need; the rest of a longer one is not needed.
    bits = -(-header.size // (1 << granularity_bits))
    needed = -(-bits // (8 * header.cluster_size))
    if table_entries < needed or needed * header.cluster_size > _BITS_BYTES_MAX + header.cluster_size:
        raise MalformedArchive(f"{name}: the bitmap {label!r} has {table_entries} clusters of bits and needs {needed}")
    found = Bitmap(label, 1 << granularity_bits, bool(flags & _IN_USE), bool(flags & _AUTO), table_offset, needed)
    return found, length


def dirty_extents(over: DiskReader, header: Header, bitmap: Bitmap, name: str) -> Iterator[Extent]:
    """The bitmap's dirty ranges, ascending, lazily. CbtReset, when it cannot be relied on."""
    if bitmap.in_use:
        raise CbtReset(
            f"{name}: the dirty bitmap {bitmap.name!r} was in use when its writer ended, and is not to be relied on",
            hint="Make a full copy, and a new bitmap with it.",
        )
    return coalesced(_dirty(over, header, bitmap, name))


def _dirty(over: DiskReader, header: Header, bitmap: Bitmap, name: str) -> Iterator[Extent]:
    what = f"{name}: the bitmap {bitmap.name!r}"
    table = entries_of(_read(over, bitmap.table_offset, bitmap.table_entries * 8, what), "Q", "big")
    guest_bytes = header.cluster_size * 8 * bitmap.granularity_bytes
    for index, entry in enumerate(table):
        start = index * guest_bytes
        end = min(start + guest_bytes, header.size)
        offset = entry & _TABLE_OFFSET
        if offset:
            if offset % header.cluster_size:
                raise MalformedArchive(f"{what} has bits at {offset}, which is no cluster's boundary")
            bits = _read(over, offset, header.cluster_size, what)
            yield from _set_bits(bits, start, end, bitmap.granularity_bytes)
        elif entry & _ALL_SET:
            yield Extent(start, end - start)


def _set_bits(bits: bytes, start: int, end: int, granularity: int) -> Iterator[Extent]:
    """Those past the disk's end have no meaning. Lazy: a cluster of 2 MiB may be 8 million extents."""
    byte_granularity = 8 * granularity
    for found in re.finditer(_SOME_SET, bits):
        first, last = found.span()
        at = start + first * byte_granularity
        for low, high in _runs_of(bits[first]):
            if at + low * granularity < end:
                yield Extent(at + low * granularity, min((high - low) * granularity, end - at - low * granularity))
        full = at + byte_granularity
        if last > first + 1 and full < end:
            yield Extent(full, min((last - first - 1) * byte_granularity, end - full))


@cache
def _runs_of(byte: int) -> tuple[tuple[int, int], ...]:
    """The stretches of set bits, (first, behind the last); little-endian. At most 255 are kept."""
    edges = [bit for bit in range(9) if (byte << 1 ^ byte) >> bit & 1]
    return tuple(zip(edges[0::2], edges[1::2], strict=True))


def named(found: tuple[Bitmap, ...], bitmap: str, name: str) -> Bitmap:
    """The bitmap of that name. NotFound."""
    for candidate in found:
        if candidate.name == bitmap:
            return candidate
    raise NotFound(f"{name} has no dirty bitmap {bitmap!r}", hint=f"It has {[candidate.name for candidate in found]}.")


def _read(over: DiskReader, offset: int, length: int, what: str) -> bytes:
    if offset + length > over.size:
        raise MalformedArchive(f"{what} lies at {offset}, outside the file of {over.size} bytes")
    return bytes_of(over, offset, length)
