"""VDI images of VirtualBox, version 1.1: VDIHEADER1PLUS of VirtualBox's src/VBox/Storage/VDICore.h.

    0        72          offset_blocks          offset_data
    │ preheader │ header …  │ block map: 32 bits    │ blocks, each after `extra` bytes of its own
                               a block

A block's entry is its number in the data, or one of two marks: never written (then the parent's, or zeros), or discarded (then
zeros). Static images have the same map with every block in it. Everything is little-endian. The reader never writes or repairs.

A differencing image names its parent only by UUID, and only VirtualBox' media registry has its file: the caller passes in the
opened parent.
"""

import struct
from collections.abc import Iterator
from enum import IntEnum
from typing import Final, NamedTuple

from synvirt.blocks import DiskReader, bytes_of
from synvirt.disks.blockmap import PARENT, WINDOW_ENTRIES, ZERO, BlockMap, MappedDisk, MappedImage
from synvirt.disks.entries import Entries, entries_of
from synvirt.disks.guids import guid_le
from synvirt.disks.layers import Layer, layer_of
from synvirt.disks.specs import ImageRoot
from synvirt.errors import MalformedArchive, UnsupportedFormat
from synvirt.sizes import KIB, MIB

SIGNATURE: Final = 0xBEDA107F
# Preheader (64 bytes of text, signature, version) and header up to the parent's UUID; version 1.1 may add a geometry after it.
_HEADER = struct.Struct("<64sIIIII256sIIIIIIIQIIII16s16s16s16s")
_VERSION: Final = 0x0001_0001
# VirtualBox makes blocks of 1 MiB. Powers of two from 64 KiB on limit the map of a hostile small disk.
_BLOCK_BYTES_MIN, _BLOCK_BYTES_MAX = 64 * KIB, 256 * MIB
_SECTOR_BYTES: Final = 512
_FREE, _DISCARDED = 0xFFFF_FFFF, 0xFFFF_FFFE


class Kind(IntEnum):
    """The image types of VDICore.h; no released VirtualBox ever made undo images."""

    DYNAMIC = 1
    STATIC = 2
    UNDO = 3
    DIFFERENCING = 4


class Header(NamedTuple):
    """The header's fields, checked, so that each can be relied on. Offsets and sizes in bytes; `blocks`: those needed."""

    kind: Kind
    size: int
    block_bytes: int
    extra_bytes: int
    blocks: int
    map_at: int
    data_at: int
    uuid: str
    parent_uuid: str


class VdiReader(MappedImage):
    """The guest's disk in the VDI image whose bytes are `over`. It owns `over` and `parent`: close() closes both.

    `parent` is the disk under a differencing image. `root` is there for the common interface; a VDI names no files.
    """

    def __init__(
        self, over: DiskReader, *, root: ImageRoot | None = None, name: str = "", parent: DiskReader | None = None
    ) -> None:
        del root
        self._name = name or "the VDI image"
        self.header: Header = read_header(over, self._name)
        if self.header.kind is Kind.DIFFERENCING and parent is None:
            raise UnsupportedFormat(
                f"{self._name} holds only what differs from another image, with UUID {self.header.parent_uuid}",
                hint="Import the whole virtual machine from its .vbox file, which names that file, or clone the disk"
                " in VirtualBox: a clone is complete.",
            )
        size, block_bytes = self.header.size, self.header.block_bytes
        stride = 0 if self.header.extra_bytes else 1
        blocks = BlockMap(size, block_bytes, _windows(over, self.header), self._place_of, self._name, stride=stride)
        taken = [(0, _HEADER.size, "the header"), (self.header.map_at, self.header.map_at + self.header.blocks * 4, "the map")]
        blocks.check_places(over.size, taken, ahead=self.header.extra_bytes)
        self._disk = MappedDisk(over, blocks, name=self._name, parent=parent)

    def _place_of(self, entry: int, _block: int) -> int:
        header = self.header
        if entry == _FREE:
            return PARENT if header.kind is Kind.DIFFERENCING else ZERO
        if entry == _DISCARDED:
            return ZERO
        return header.data_at + header.extra_bytes + entry * (header.block_bytes + header.extra_bytes)

    def layer(self) -> Layer:
        header = self.header
        facts = {"subformat": header.kind.name.lower(), "block_bytes": header.block_bytes, "uuid": header.uuid}
        return Layer(name=self._name, format="vdi", size_bytes=self.size, facts=facts, beneath=layer_of(self._disk.parent))


def _windows(over: DiskReader, header: Header) -> Iterator[Entries]:
    for first in range(0, header.blocks, WINDOW_ENTRIES):
        length = min(WINDOW_ENTRIES, header.blocks - first) * 4
        yield entries_of(bytes_of(over, header.map_at + first * 4, length), "I", "little")


def read_header(over: DiskReader, name: str) -> Header:
    """The header of the image in `over`. MalformedArchive or UnsupportedFormat names the field and the error."""
    if over.size < _HEADER.size:
        raise MalformedArchive(f"{name} is not a VDI image: it has only {over.size} bytes")
    (
        _, signature, version, _, kind, _, _, map_at, data_at, _, _, _, sector_bytes, _,
        size, block_bytes, extra_bytes, blocks, _, uuid, _, parent_uuid, _,
    ) = _HEADER.unpack(bytes_of(over, 0, _HEADER.size))  # fmt: skip
    if signature != SIGNATURE:
        raise MalformedArchive(f"{name} is not a VDI image: its signature is {signature:#x}, not {SIGNATURE:#x}")
    if version != _VERSION:
        raise UnsupportedFormat(
            f"{name} is a VDI image of version {version >> 16}.{version & 0xFFFF}; version 1.1 is read",
            hint="Clone it in VirtualBox, which writes the present version.",
        )
    if kind not in (Kind.DYNAMIC, Kind.STATIC, Kind.DIFFERENCING):
        raise UnsupportedFormat(f"{name} is a VDI image of type {kind}; dynamic, static and differencing ones are read")
    if not _BLOCK_BYTES_MIN <= block_bytes <= _BLOCK_BYTES_MAX or block_bytes & (block_bytes - 1):
        raise MalformedArchive(f"{name}: blocks of {block_bytes} bytes; powers of two from 64 KiB to 256 MiB are read")
    # Old VirtualBox wrote 0 for «the usual».
    if sector_bytes not in (0, _SECTOR_BYTES):
        raise UnsupportedFormat(f"{name}: sectors of {sector_bytes} bytes; 512 are read")
    # VBoxManage makes disks of any size. A disk has whole sectors, so QEMU rounds up too, and the last block has the space.
    size = -(-size // _SECTOR_BYTES) * _SECTOR_BYTES
    needed = -(-size // block_bytes)
    if needed > blocks:
        raise MalformedArchive(f"{name}: {blocks} blocks of {block_bytes} bytes cannot hold a disk of {size}")
    if extra_bytes % _SECTOR_BYTES or extra_bytes > block_bytes:
        raise MalformedArchive(f"{name}: {extra_bytes} bytes before each block; whole sectors, less than a block, can be")
    if map_at < _HEADER.size or map_at + needed * 4 > over.size:
        raise MalformedArchive(
            f"{name}: a map of {needed} blocks at {map_at} does not fit between the header and the file's end at {over.size}",
            hint="The file seems to be cut off: compare its size with the original's.",
        )
    return Header(
        kind=Kind(kind),
        size=size,
        block_bytes=block_bytes,
        extra_bytes=extra_bytes,
        blocks=needed,
        map_at=map_at,
        data_at=data_at,
        uuid=guid_le(uuid),
        parent_uuid=guid_le(parent_uuid),
    )
