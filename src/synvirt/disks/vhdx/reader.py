"""VHDX images, fixed, dynamic and differencing: [MS-VHDX] revision 8.0, Virtual Hard Disk v2 (VHDX) File Format.

    0       64 KiB     128 KiB    192 KiB        256 KiB        1 MiB …
    │ file   │ header 1  │ header 2  │ region table │ region table │ log, metadata, BAT, payload and bitmap blocks,
    │ type   │           │           │              │ again        │ each on a boundary of 1 MiB, in any order

    VhdxReader ── header        headers, region table, metadata
               ── log           a non-empty log, replayed in memory: all but the headers is read through it
               ── _Table        the BAT, for a BlockMap
               ── parents       the parent's file of a differencing image

Everything is little-endian. The reader never writes or repairs.

Where the specification leaves a choice: undefined or unmapped blocks read as zeros, like the missing blocks of a fixed or
dynamic image. Bitmap entries of the BAT are used only in differencing images: elsewhere they have no meaning, and QEMU before
8.1 left wrong ones there.
"""

from array import array
from collections.abc import Iterator
from typing import Final

from synvirt.blocks import DiskReader
from synvirt.disks.blockmap import PARENT, WINDOW_ENTRIES, ZERO, Bitmap, BlockMap, MappedDisk, MappedImage, Run, partly
from synvirt.disks.entries import Entries, entries_of
from synvirt.disks.layers import Layer, layer_of
from synvirt.disks.parents import Chain, Reference, open_parent
from synvirt.disks.specs import ImageRoot
from synvirt.disks.vhdx.header import (
    HEADER_SECTION_BYTES,
    Header,
    Metadata,
    Region,
    Regions,
    read_bytes,
    read_header,
    read_metadata,
    read_regions,
)
from synvirt.disks.vhdx.log import replay
from synvirt.errors import MalformedArchive
from synvirt.sizes import MIB


class State:
    """Section 2.5.1.1: states of a payload block; 4 and 5 are reserved."""

    # Plain numbers, as they are compared with each entry: a member of an enumeration takes several times as long.
    NOT_PRESENT: Final = 0
    UNDEFINED: Final = 1
    ZERO: Final = 2
    UNMAPPED: Final = 3
    FULLY_PRESENT: Final = 6
    PARTIALLY_PRESENT: Final = 7


_BITMAP_PRESENT: Final = 6
_STATE: Final = 7
# Bits 20 to 63 are the offset in MiB: masked, they are the offset in bytes. Bits 3 to 19 are reserved; QEMU ignores them too.
_OFFSET: Final = 0xFFFF_FFFF_FFF0_0000
_BITMAP_BYTES: Final = MIB
# Section 2.6.2.6.3: where a locator has a parent's path, and whether that is absolute, in the order in which they are tried.
PARENT_KEYS: Final = {"relative_path": False, "volume_path": True, "absolute_win32_path": True}


class VhdxReader(MappedImage):
    """The guest's disk in the VHDX image whose bytes are `over`, which it owns: close() closes it, and its parent.

    `root` and `name` are ImageSpec's: the image's path under the import root. `chain` is given for images that are parents.
    `replayed`: the number of replayed log entries, 0 for an image that was closed. `alone`: a differencing image without its
    parent; its extents are only its own data.
    """

    def __init__(
        self,
        over: DiskReader,
        *,
        root: ImageRoot | None = None,
        name: str = "",
        chain: Chain | None = None,
        alone: bool = False,
    ) -> None:
        self._name = name or "the VHDX image"
        chain = chain or Chain()
        self.header: Header = read_header(over, self._name)
        self.replayed = 0
        if self.header.log_guid is not None:
            over = replayed = replay(over, self.header, self._name)
            self.replayed = replayed.entries
        regions = read_regions(over, self.header, self._name)
        self.metadata: Metadata = read_metadata(over, regions.metadata, self._name)
        self._file, self._table = over, _Table(over, regions.bat, self.metadata, self._name)
        size, block_bytes = self.metadata.size, self.metadata.block_bytes
        windows, place_of = self._table.windows(), self._table.place_of
        blocks = BlockMap(size, block_bytes, windows, place_of, self._name, stride=block_bytes, runs_before=chain.runs)
        blocks.check_places(over.size, [*_taken(self.header, regions), *self._table.bitmap_regions()])
        parent: VhdxReader | None = None
        if alone and self.metadata.parent is None:
            raise MalformedArchive(f"{self._name} is not a differencing image: it does not say what it leaves out")
        if self.metadata.parent is not None and not alone:
            chain = Chain(chain.files, chain.depth, blocks.runs_with_before)
            parent = _open_parent(root, self._name, self.metadata, self.metadata.parent, chain)
        self._disk = MappedDisk(over, blocks, name=self._name, parent=parent, partial=self._partial, alone=alone)

    def _partial(self, run: Run) -> Iterator[Run]:
        chunk, skipped = divmod(run.start, self.metadata.chunk_blocks * self.metadata.block_bytes)
        bitmap = Bitmap(self._file, self._table.bitmaps[chunk], self.metadata.sector_bytes, "little", PARENT)
        return bitmap.runs(run, skipped)

    def layer(self) -> Layer:
        metadata = self.metadata
        facts = {
            "subformat": "differencing" if metadata.parent is not None else "fixed" if metadata.fixed else "dynamic",
            "block_bytes": metadata.block_bytes,
            "sector_bytes": metadata.sector_bytes,
            "physical_sector_bytes": metadata.physical_sector_bytes,
            "log": f"dirty: {self.replayed} entries are replayed in memory" if self.replayed else "clean",
        }
        return Layer(name=self._name, format="vhdx", size_bytes=self.size, facts=facts, beneath=layer_of(self._disk.parent))


def _taken(header: Header, regions: Regions) -> list[Region]:
    """The ranges that blocks may not overlap (section 2.5.1)."""
    headers = Region(0, HEADER_SECTION_BYTES, "the headers")
    return [headers, header.log, regions.bat, regions.metadata, *regions.others]


class _Table:
    """The BAT (section 2.5), read a window at a time: the payload entries of each chunk, then one for its bitmap.

    `bitmaps`: the offset of each chunk's bitmap in the file, 0 where there is none; it grows with each window. The 16384
    chunks of the largest disk take 128 KiB.
    """

    def __init__(self, over: DiskReader, region: Region, metadata: Metadata, name: str) -> None:
        self._over, self._region, self._metadata, self._name = over, region, metadata, name
        self._file_bytes = over.size
        if metadata.table_entries * 8 > region.end - region.start:
            raise MalformedArchive(
                f"{name}: a BAT of {region.end - region.start} bytes cannot map {metadata.blocks} blocks,"
                f" which need {metadata.table_entries} entries of 8"
            )
        self.bitmaps = array("q")

    def windows(self) -> Iterator[Entries]:
        """The entries of all payload blocks, in order."""
        chunk_blocks, over_parent = self._metadata.chunk_blocks, self._metadata.parent is not None
        at_once = max(1, WINDOW_ENTRIES // (chunk_blocks + 1)) * (chunk_blocks + 1)
        left = self._metadata.blocks
        for first in range(0, self._metadata.table_entries, at_once):
            count = min(at_once, self._metadata.table_entries - first)
            content = read_bytes(self._over, self._region.start + first * 8, count * 8, "the BAT", self._name)
            entries = entries_of(content, "Q", "little")
            if over_parent:
                self._keep_bitmaps(entries[chunk_blocks :: chunk_blocks + 1])
            del entries[chunk_blocks :: chunk_blocks + 1]
            # A last chunk that is not full has entries for the rest of it, too.
            del entries[left:]
            left -= len(entries)
            yield entries

    def place_of(self, entry: int, block: int) -> int:
        """The place of a payload block. MalformedArchive, where its state cannot be, or its data is not in the file."""
        state, offset = entry & _STATE, entry & _OFFSET
        if state == State.FULLY_PRESENT and offset <= self._file_bytes:
            return offset
        if state < State.FULLY_PRESENT:
            if state > State.UNMAPPED:
                raise self._wrong(entry, block, "which is reserved")
            return PARENT if state == State.NOT_PRESENT and self._metadata.parent is not None else ZERO
        if offset > self._file_bytes:
            raise self._wrong(entry, block, "beyond the end of the file")
        if self._metadata.parent is None:
            raise self._wrong(entry, block, "which only a differencing image can have")
        if not self.bitmaps[block // self._metadata.chunk_blocks]:
            raise self._wrong(entry, block, "and its chunk has no bitmap")
        return partly(offset)

    def _wrong(self, entry: int, block: int, why: str) -> MalformedArchive:
        return MalformedArchive(
            f"{self._name}: block {block} is in state {entry & _STATE} at {entry & _OFFSET} of the file, {why}"
        )

    def _keep_bitmaps(self, entries: Entries) -> None:
        for entry in entries:
            present, offset = entry & _STATE == _BITMAP_PRESENT, entry & _OFFSET
            if present and offset > self._file_bytes - _BITMAP_BYTES:
                raise MalformedArchive(
                    f"{self._name}: the bitmap of chunk {len(self.bitmaps)} lies at {offset},"
                    f" the file ends at {self._file_bytes}"
                )
            self.bitmaps.append(offset if present else 0)

    def bitmap_regions(self) -> Iterator[Region]:
        for chunk, start in enumerate(self.bitmaps):
            if start:
                yield Region(start, start + _BITMAP_BYTES, f"the bitmap of chunk {chunk}")


def _open_parent(root: ImageRoot | None, name: str, metadata: Metadata, locator: dict[str, str], chain: Chain) -> VhdxReader:
    """The parent of a differencing image (section 2.6.2.6.3). MalformedArchive, if the found file is another one."""
    references = [Reference(locator[key], absolute) for key, absolute in PARENT_KEYS.items() if key in locator]
    over, parent_name, chain = open_parent(root, name, references, chain)
    try:
        parent = VhdxReader(over, root=root, name=parent_name, chain=chain)
    except BaseException:
        over.close()
        raise
    wanted = {locator.get(key, "").strip("{}").lower() for key in ("parent_linkage", "parent_linkage2")}
    problem = ""
    if parent.header.data_write_guid not in wanted:
        problem = f"was made over another state of its parent: {parent_name} has the identity {parent.header.data_write_guid}"
    elif parent.metadata.sector_bytes != metadata.sector_bytes:
        problem = f"has sectors of {metadata.sector_bytes} bytes, its parent {parent_name} of {parent.metadata.sector_bytes}"
    if problem:
        parent.close()
        raise MalformedArchive(
            f"{name} {problem}", hint="Copy the parent that belongs to it: one that was changed or made again does not fit."
        )
    return parent
