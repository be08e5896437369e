"""The drivers that a kernel has for disks before it finds its root file system: in its initramfs, or built in. Pure, over files
of the guest's /boot.

An initramfs is archives of cpio («newc»), one after the other, with zeros between; each is plain or packed (Linux,
Documentation/driver-api/early-userspace/buffer-format.rst). Early ones have microcode, and newer tools put modules into a plain
one. What is not understood, is cut or takes too long gives no answer at all: an incomplete one would be wrong.
"""

import bz2
import ctypes
import lzma
import re
import time
import zlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any, Final, Protocol

import zstandard

from synvirt.errors import DiskReadFailed
from synvirt.sizes import GIB, KIB, MIB

# The drivers of the buses here, and what a kernel's configuration calls them (Linux, Kconfig).
DRIVERS: Mapping[str, str] = MappingProxyType(
    {
        "virtio_pci": "VIRTIO_PCI",
        "virtio_blk": "VIRTIO_BLK",
        "virtio_scsi": "SCSI_VIRTIO",
        "sd_mod": "BLK_DEV_SD",
        "ahci": "SATA_AHCI",
        "ata_piix": "ATA_PIIX",
    }
)
# With these a guest boots by the first rung, and nothing more is read.
_ENOUGH: Final = frozenset({"virtio_pci", "virtio_blk"})
# An initramfs with all modules and firmware has half a GiB, and is unpacked in some seconds.
WITHIN_S, UNPACKED_BYTES_MAX, MEMBERS_MAX = 15.0, 2 * GIB, 100_000
# Read at once: of the file, and by what unpacks it. 4 KiB of Zstandard may be 128 MiB.
_PIECE_BYTES, _PACKED_BYTES, _LIST_BYTES_MAX, _NAME_BYTES_MAX = 4 * MIB, 4 * KIB, MIB, 4 * KIB
_LZMA_BYTES_MAX: Final = 256 * MIB
# A header of newc: the magic and 13 numbers.
_MAGIC, _HEADER = b"070701", re.compile(rb"070701[0-9A-Fa-f]{104}")
_HEADER_BYTES, _SIZE_AT, _NAME_SIZE_AT = 110, 54, 94
_LAST: Final = "TRAILER!!!"
_MODULE: Final = re.compile(r"(?:^|/)([^/]+)\.ko(?:\.(?:gz|xz|zst|bz2|lz4))?$")
_BUILT_IN: Final = re.compile(r"(?:^|/)modules\.builtin$")
# dracut's own module «squash» puts all modules into an image of another kind.
_IMAGE: Final = re.compile(r"(?:^|/)(?:squashfs|squash|erofs)-root\.img$")
# lz4(1), «legacy format»: blocks of up to 8 MiB, each after its length.
_LZ4_BLOCK_BYTES: Final = 8 * MIB


class Decoder(Protocol):
    """As of zlib, bz2 and lzma."""

    @property
    def eof(self) -> bool: ...
    @property
    def unused_data(self) -> bytes: ...
    def decompress(self, data: bytes, /) -> bytes: ...


class _Lz4:
    """By the system's liblz4. The format has no end of its own: a length of nothing, or none of a block, is behind it."""

    def __init__(self) -> None:
        self.eof, self.unused_data, self._packed = False, b"", bytearray()
        self._library = ctypes.CDLL("liblz4.so.1")

    def decompress(self, data: bytes, /) -> bytes:
        self._packed += data
        content = b""
        while len(self._packed) >= 4:
            length = int.from_bytes(self._packed[:4], "little")
            if not 0 < length <= _LZ4_BLOCK_BYTES + _LZ4_BLOCK_BYTES // 255 + 16:
                self.eof, self.unused_data = True, bytes(self._packed)
                break
            if len(self._packed) < 4 + length:
                break
            content += self._block(bytes(self._packed[4 : 4 + length]))
            del self._packed[: 4 + length]
        return content

    def _block(self, packed: bytes) -> bytes:
        into = ctypes.create_string_buffer(_LZ4_BLOCK_BYTES)
        length = self._library.LZ4_decompress_safe(packed, into, len(packed), _LZ4_BLOCK_BYTES)
        if length < 0:
            raise DiskReadFailed("a block of LZ4 is damaged")
        return into.raw[:length]


# By the first bytes of what is packed: how many of them are no part of it, and what unpacks it.
_PACKED: Mapping[bytes, tuple[int, Callable[[], Decoder]]] = MappingProxyType(
    {
        b"\x1f\x8b": (0, lambda: zlib.decompressobj(wbits=31)),
        b"BZh": (0, bz2.BZ2Decompressor),
        b"\xfd7zXZ\0": (0, lambda: lzma.LZMADecompressor(memlimit=_LZMA_BYTES_MAX)),
        b"\x5d\0\0": (0, lambda: lzma.LZMADecompressor(memlimit=_LZMA_BYTES_MAX)),
        b"\x28\xb5\x2f\xfd": (0, lambda: zstandard.ZstdDecompressor().decompressobj()),
        b"\x02\x21\x4c\x18": (4, _Lz4),
    }
)
_DAMAGE: Final = (OSError, EOFError, ValueError, MemoryError, zlib.error, lzma.LZMAError, zstandard.ZstdError)


class _Bytes(ABC):
    """Bytes one after the other."""

    def __init__(self) -> None:
        self._held, self._at = b"", 0

    @abstractmethod
    def _more(self) -> bytes:
        """Some of the next ones; none at the end."""

    def look(self, length: int) -> bytes:
        """The next ones, which stay; short at the end."""
        while len(self._held) - self._at < length and (piece := self._more()):
            self._held, self._at = self._held[self._at :] + piece, 0
        return self._held[self._at : self._at + length]

    def take(self, length: int) -> bytes:
        found = self.look(length)
        self._at += len(found)
        return found

    def put_back(self, content: bytes) -> None:
        if content:
            self._held, self._at = content + self._held[self._at :], 0

    def skip(self, length: int) -> None:
        while length > 0 and (piece := self.look(1) and self._held[self._at : self._at + length]):
            self._at += len(piece)
            length -= len(piece)

    def skip_zeros(self) -> None:
        while self.look(1) == b"\0":
            held = self._held[self._at :]
            self._at += len(held) - len(held.lstrip(b"\0"))


class _Files(_Bytes):
    """The content of files, one after the other."""

    def __init__(self, files: Sequence[Any], until: float) -> None:
        super().__init__()
        self._files, self._until, self._offset = list(files), until, 0

    def _more(self) -> bytes:
        if time.monotonic() > self._until:
            raise DiskReadFailed("it takes too long")
        while self._files:
            length = min(self._files[0].get_size() - self._offset, _PIECE_BYTES)
            if length > 0:
                self._offset += length
                return bytes(self._files[0].read_buffer_at_offset(length, self._offset - length))
            del self._files[0]
            self._offset = 0
        return b""


class _Unpacked(_Bytes):
    """The content of what is packed in one way, which may be in several parts."""

    def __init__(self, packed: _Bytes, magic: bytes, until: float) -> None:
        super().__init__()
        self._packed, self._magic, self._until, self._left = packed, magic, until, UNPACKED_BYTES_MAX
        self._decoder = self._next()

    def _next(self) -> Decoder:
        skipped, decoder = _PACKED[self._magic]
        self._packed.skip(skipped)
        return decoder()

    def _more(self) -> bytes:
        while True:
            if self._decoder.eof:
                if self._packed.look(len(self._magic)) != self._magic:
                    return b""
                self._decoder = self._next()
            piece = self._packed.take(_PACKED_BYTES)
            if not piece:
                return b""  # cut, or the format has no end: the archive in it has one
            content = self._decoder.decompress(piece)
            self._packed.put_back(self._decoder.unused_data)
            self._left -= len(content)
            if self._left < 0 or time.monotonic() > self._until:
                raise DiskReadFailed("there is more in it than is read")
            if content:
                return content


def drivers_of(files: Sequence[Any], config: str | None) -> list[str] | None:
    """The drivers of DRIVERS, as far as needed: as soon as there are those of virtio, nothing more is read. None: they are not
    known. `files`: of libfsext and its like, the initramfs' parts in their order. `config`: the kernel's configuration."""
    built_in = None if config is None else {name for name, option in DRIVERS.items() if f"\nCONFIG_{option}=y\n" in config}
    found, until = set[str](), time.monotonic() + WITHIN_S
    has_modules = False
    try:
        for name, content in _members(_Files(files, until), until):
            if (module := _MODULE.search(name)) is not None:
                has_modules = True
                found |= {module[1].replace("-", "_")} & DRIVERS.keys()
            elif _BUILT_IN.search(name) is not None:
                found |= DRIVERS.keys() & set(_listed(content))
                built_in = built_in or set()
            elif _IMAGE.search(name) is not None:
                return None
            if _ENOUGH.issubset(found | (built_in or set())):
                return sorted(found | (built_in or set()))
    except (DiskReadFailed, *_DAMAGE):
        return None
    # One that has no modules at all is of a kind that is not known here.
    return sorted(found | built_in) if built_in is not None and (has_modules or built_in or found) else None


def _listed(content: bytes) -> Iterator[str]:
    """The modules of modules.builtin (kbuild): a path in each line."""
    for line in content.decode(errors="replace").splitlines():
        if (module := _MODULE.search(line)) is not None:
            yield module[1].replace("-", "_")


def _members(content: _Bytes, until: float, *, is_unpacked: bool = False) -> Iterator[tuple[str, bytes]]:
    """The names in all archives, each with its content where that is wanted."""
    while True:
        content.skip_zeros()
        begin = content.look(len(_MAGIC))
        if not begin:
            return
        if begin == _MAGIC:
            yield from _archive(content)
            continue
        magic = next((magic for magic in _PACKED if begin.startswith(magic)), None)
        if magic is None or is_unpacked:
            raise DiskReadFailed("it is packed in a way that is not known here")
        yield from _members(_Unpacked(content, magic, until), until, is_unpacked=True)


def _archive(content: _Bytes) -> Iterator[tuple[str, bytes]]:
    """One of cpio, to its end (cpio(5), «new ASCII format»)."""
    for _ in range(MEMBERS_MAX):
        header = content.take(_HEADER_BYTES)
        if _HEADER.fullmatch(header) is None:
            raise DiskReadFailed("an archive in it is damaged")
        size, length = (int(header[at : at + 8], 16) for at in (_SIZE_AT, _NAME_SIZE_AT))
        if length > _NAME_BYTES_MAX:
            raise DiskReadFailed("an archive in it is damaged")
        name = content.take(length).rstrip(b"\0").decode(errors="replace")
        content.skip(-(_HEADER_BYTES + length) % 4)
        if name == _LAST:
            return
        wanted = min(size, _LIST_BYTES_MAX) if _BUILT_IN.search(name) is not None else 0
        yield name, content.take(wanted)
        content.skip(size - wanted + -size % 4)
    raise DiskReadFailed("an archive in it has too many files")
