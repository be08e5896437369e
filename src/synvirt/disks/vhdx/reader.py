"""VHDX images, fixed, dynamic and differencing: [MS-VHDX] revision 8.0, Virtual Hard Disk v2 (VHDX) File Format.

    0       64 KiB     128 KiB    192 KiB        256 KiB        1 MiB …
    │ file   │ header 1  │ header 2  │ region table │ region table │ log, metadata, BAT, payload and bitmap blocks,
    │ type   │           │           │              │ again        │ each on a boundary of 1 MiB, in any order

    VhdxReader ── header        headers, region table, metadata
               ── log           a non-empty log, replayed in memory: all but the headers is read through it
               ── _Table        the BAT, as places for a BlockMap
               ── parents       the parent's file of a differencing image

Everything is little-endian. The reader never writes or repairs.

Where the specification leaves a choice: undefined or unmapped blocks read as zeros, like the missing blocks of a fixed or
dynamic image. Bitmap entries of the BAT are used only in differencing images: elsewhere they have no meaning, and QEMU before
8.1 left wrong ones there.
"""

from collections.abc import Iterator
from enum import IntEnum
from typing import Final

import numpy as np
from numpy.typing import NDArray

from synvirt.blocks import DiskReader
from synvirt.disks.blockmap import PARENT, WINDOW_ENTRIES, ZERO, Bitmap, BlockMap, MappedDisk, MappedImage, Places, Run
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

Entries = NDArray[np.uint64]


class State(IntEnum):
    """Section 2.5.1.1: states of a payload block; 4 and 5 are reserved."""

    NOT_PRESENT = 0
    UNDEFINED = 1
    ZERO = 2
    UNMAPPED = 3
    FULLY_PRESENT = 6
    PARTIALLY_PRESENT = 7


_BITMAP_PRESENT: Final = 6
_STATE: Final = np.uint64(7)
# Bits 20 to 63 are the offset in MiB: masked, they are the offset in bytes. Bits 3 to 19 are reserved; QEMU ignores them too.
_OFFSET: Final = np.uint64(0xFFFF_FFFF_FFF0_0000)
_BITMAP_BYTES: Final = MIB


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
        blocks = BlockMap(
            self.metadata.size, self.metadata.block_bytes, self._table.windows(), self._name, runs_before=chain.runs
        )
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
        bitmap = Bitmap(self._file, int(self._table.bitmaps[chunk]), self.metadata.sector_bytes, "little", PARENT)
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
        return Layer(self._name, "vhdx", self.size, facts, layer_of(self._disk.parent))


def _taken(header: Header, regions: Regions) -> list[Region]:
    """The ranges that blocks may not overlap (section 2.5.1)."""
    headers = Region(0, HEADER_SECTION_BYTES, "the headers")
    return [headers, header.log, regions.bat, regions.metadata, *regions.others]


class _Table:
    """The BAT (section 2.5), decoded a window at a time: the payload entries of each chunk, then one for its bitmap.

    `bitmaps`: the offset of each chunk's bitmap in the file, 0 where there is none; filled while the windows are walked.
    """

    def __init__(self, over: DiskReader, region: Region, metadata: Metadata, name: str) -> None:
        self._over, self._region, self._metadata, self._name = over, region, metadata, name
        if metadata.table_entries * 8 > region.end - region.start:
            raise MalformedArchive(
                f"{name}: a BAT of {region.end - region.start} bytes cannot map {metadata.blocks} blocks,"
                f" which need {metadata.table_entries} entries of 8"
            )
        self.bitmaps: Places = np.zeros(-(-metadata.blocks // metadata.chunk_blocks), np.int64)

    def windows(self) -> Iterator[Places]:
        """The places of all payload blocks, in order."""
        entries_a_chunk = self._metadata.chunk_blocks + 1
        chunks_at_once = max(1, WINDOW_ENTRIES // entries_a_chunk)
        for chunk in range(0, len(self.bitmaps), chunks_at_once):
            first = chunk * entries_a_chunk
            count = min(chunks_at_once * entries_a_chunk, self._metadata.table_entries - first)
            content = read_bytes(self._over, self._region.start + first * 8, count * 8, "the BAT", self._name)
            entries = np.zeros(-(-count // entries_a_chunk) * entries_a_chunk, np.uint64)
            entries[:count] = np.frombuffer(content, "<u8")
            chunks = entries.reshape(-1, entries_a_chunk)
            first_block = chunk * self._metadata.chunk_blocks
            payload = chunks[:, :-1].reshape(-1)[: self._metadata.blocks - first_block]
            if self._metadata.parent is None:
                yield self._places(payload, first_block)
            else:
                self._keep_bitmaps(chunks[:, -1], chunk)
                yield self._places_over_parent(payload, first_block)

    def _places(self, payload: Entries, first: int) -> Places:
        states, offsets = self._checked(payload, first)
        self._refuse(states == State.PARTIALLY_PRESENT, payload, first, "which only a differencing image can have")
        return np.where(states == State.FULLY_PRESENT, offsets, ZERO)

    def _places_over_parent(self, payload: Entries, first: int) -> Places:
        states, offsets = self._checked(payload, first)
        partial = states == State.PARTIALLY_PRESENT
        chunks = (np.arange(first, first + len(payload))) // self._metadata.chunk_blocks
        self._refuse(partial & (self.bitmaps[chunks] == 0), payload, first, "and its chunk has no bitmap")
        places = np.where(states == State.NOT_PRESENT, PARENT, ZERO)
        return np.where(states == State.FULLY_PRESENT, offsets, np.where(partial, ~offsets, places))

    def _checked(self, payload: Entries, first: int) -> tuple[Entries, Places]:
        """States and offsets; those of present blocks lie in the file."""
        states, offsets = payload & _STATE, payload & _OFFSET
        self._refuse((states == 4) | (states == 5), payload, first, "which is reserved")
        self._refuse(
            (states >= State.FULLY_PRESENT) & (offsets > self._over.size), payload, first, "beyond the end of the file"
        )
        return states, offsets.astype(np.int64)

    def _refuse(self, wrong: NDArray[np.bool_], payload: Entries, first: int, why: str) -> None:
        if wrong.any():
            at = int(wrong.argmax())
            state, offset = int(payload[at] & _STATE), int(payload[at] & _OFFSET)
            raise MalformedArchive(f"{self._name}: block {first + at} is in state {state} at {offset} of the file, {why}")

    def _keep_bitmaps(self, entries: Entries, chunk: int) -> None:
        present, offsets = entries & _STATE == _BITMAP_PRESENT, entries & _OFFSET
        beyond = present & (offsets > max(0, self._over.size - _BITMAP_BYTES))
        if beyond.any():
            at = int(beyond.argmax())
            raise MalformedArchive(
                f"{self._name}: the bitmap of chunk {chunk + at} lies at {offsets[at]}, the file ends at {self._over.size}"
            )
        self.bitmaps[chunk : chunk + len(entries)] = np.where(present, offsets, 0)

    def bitmap_regions(self) -> Iterator[Region]:
        for chunk in np.flatnonzero(self.bitmaps).tolist():
            start = int(self.bitmaps[chunk])
            yield Region(start, start + _BITMAP_BYTES, f"the bitmap of chunk {chunk}")


def _open_parent(root: ImageRoot | None, name: str, metadata: Metadata, locator: dict[str, str], chain: Chain) -> VhdxReader:
    """The parent of a differencing image (section 2.6.2.6.3). MalformedArchive, if the found file is another one."""
    keys = (("relative_path", False), ("volume_path", True), ("absolute_win32_path", True))
    references = [Reference(locator[key], absolute) for key, absolute in keys if key in locator]
    over, parent_name, chain = open_parent(root, name, references, chain)
    try:
        parent = VhdxReader(over, root=root, name=parent_name, chain=chain)
    except BaseException:
        over.close()
        raise
    wanted = {locator.get(key, "").strip("{}").lower() for key in ("parent_linkage", "parent_linkage2")}
    problem = ""
    if str(parent.header.data_write_guid) not in wanted:
        problem = f"was made over another state of its parent: {parent_name} has the identity {parent.header.data_write_guid}"
    elif parent.metadata.sector_bytes != metadata.sector_bytes:
        problem = f"has sectors of {metadata.sector_bytes} bytes, its parent {parent_name} of {parent.metadata.sector_bytes}"
    if problem:
        parent.close()
        raise MalformedArchive(
            f"{name} {problem}", hint="Copy the parent that belongs to it: one that was changed or made again does not fit."
        )
    return parent
