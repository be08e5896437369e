"""Disks that a file stores in blocks of one size with one table: the common part of VHDX, VHD and VDI.

    table ─▶ entries ─▶ BlockMap: places of runs, neighbours joined ─▶ MappedDisk: extents and reads

An entry is one number of the table, and each format has its own. A place is one number too: a block's offset in the file, or
ZERO, or PARENT, or `partly(offset)` for a block at `offset` with a bitmap that says for each sector whether it is here or the
parent's. The table is read a window at a time. Only the first entry of a run is made a place; of the others it is enough that
they continue the run. A nearly empty TiB is a few runs.
"""

from array import array
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator
from itertools import chain, islice, pairwise
from typing import Final, Literal, NamedTuple, Protocol

from synvirt.blocks import DiskReader, Extent, ExtentCursor, Place, fill_zeros, piece_bytes
from synvirt.disks.entries import STRETCH, Entries, goes_on
from synvirt.disks.places import FilePlaces
from synvirt.disks.raw.holes import Holes
from synvirt.errors import DiskReadFailed, MalformedArchive, UnsupportedFormat

# The place of an entry, which is that of a block: (entry, the block's number).
PlaceOf = Callable[[int, int], int]

ZERO: Final = -1
PARENT: Final = -2  # read from the parent; zeros without one

# Table entries in memory at once: 1 MiB of 64-bit ones.
WINDOW_ENTRIES: Final = 128 << 10
# A run takes 12 bytes, and 80 while runs are checked: 320 MiB for 4 TiB in blocks of 1 MiB without neighbours.
RUNS_MAX: Final = 4 << 20
# Room for the number of a range in a key: for all runs, and for what else is in the file (a bitmap per 4 GiB, for example).
_INDEX_BITS: Final = 23
_INDEX_MASK: Final = (1 << _INDEX_BITS) - 1
# Unlike any entry, and a place that nothing continues.
_NO_ENTRY, _NOWHERE = -1, PARENT - 1


class Run(NamedTuple):
    """Bytes `start` to `end` of the disk, which lie from `place` on."""

    start: int
    end: int
    place: int


# Splits a partly present block into runs by its bitmap: absent sectors are the parent's, or zeros.
Partial = Callable[[Run], Iterator[Run]]


def partly(offset: int) -> int:
    """The place of a partly present block whose data begins at `offset` of the file (never its first bytes)."""
    return ~offset


class BlockMap:
    """The runs of the blocks of a disk of `size` bytes.

    `windows` yields the entries of all blocks, in order, and `place_of` makes an entry a place. If a block lies in the file
    directly after the one before it, its entry is larger by `stride` (0: blocks never lie so). `runs_before` is the number of
    runs of the images above this one in its chain, which share the limit.
    """

    def __init__(
        self,
        size: int,
        block_bytes: int,
        windows: Iterable[Entries],
        place_of: PlaceOf,
        name: str,
        *,
        stride: int,
        runs_before: int = 0,
    ) -> None:
        self.size, self.block_bytes, self._name = size, block_bytes, name
        self._firsts, self._places = array("I"), array("q")
        self._place_of, self._stride = place_of, stride
        # The entry that continues the present run, and the difference between that one and the next.
        self._follows, self._step = _NO_ENTRY, 0
        block = 0
        for window in windows:
            self._add(window, block)
            block += len(window)
            if runs_before + len(self._firsts) > RUNS_MAX:
                raise UnsupportedFormat(
                    f"{name}: its blocks lie in more than {RUNS_MAX} pieces, more than are kept in memory",
                    hint="Convert it with the program that made it, which puts its blocks in order.",
                )
        if block != -(-size // block_bytes):
            raise MalformedArchive(f"{name}: {block} blocks of {block_bytes} bytes for a disk of {size}")
        self._blocks, self.runs_with_before = block, runs_before + len(self._firsts)

    def _add(self, window: Entries, first: int) -> None:
        """Adds the runs of a window whose first block is `first`."""
        firsts, places, place_of, block_bytes = self._firsts, self._places, self._place_of, self.block_bytes
        follows, step = self._follows, self._step
        run_first, run_place = (firsts[-1], places[-1]) if firsts else (0, _NOWHERE)
        for at in range(0, len(window), STRETCH):
            stretch = window[at : at + STRETCH]
            if goes_on(stretch, follows, step):
                follows += step * STRETCH
                continue
            for block, entry in enumerate(stretch, first + at):
                if entry != follows:
                    place = place_of(entry, block)
                    # Entries may differ where places do not: in reserved bits, and in the offsets of blocks that are zeros.
                    if place < PARENT or place != (
                        run_place + (block - run_first) * block_bytes if run_place >= 0 else run_place
                    ):
                        firsts.append(block)
                        places.append(place)
                        run_first, run_place = block, place
                    step = self._stride if place >= 0 else 0
                    follows = entry if step or PARENT <= place < 0 else _NO_ENTRY
                follows += step
        self._follows, self._step = follows, step

    def runs(self, start: int, end: int) -> Iterator[Run]:
        """The runs from `start` to `end`, cut to that range, partly present blocks unchanged."""
        if start >= end:
            return
        block_bytes, first_block = self.block_bytes, start // self.block_bytes
        at = bisect_right(self._firsts, first_block) - 1
        count = min(1024, -(-end // block_bytes) - first_block)
        while start < end:
            firsts, places = self._firsts[at : at + count + 1], self._places[at : at + count]
            if len(firsts) == len(places):
                firsts.append(self._blocks)
            places[0] = _forward(places[0], start - firsts[0] * block_bytes)
            for following, place in zip(islice(firsts, 1, None), places, strict=True):
                stop = following * block_bytes
                if stop >= end:
                    yield Run(start, end, place)
                    return
                yield Run(start, stop, place)
                start = stop
            at += len(places)

    def check_places(self, file_bytes: int, taken: Iterable[tuple[int, int, str]], *, ahead: int = 0) -> None:
        """MalformedArchive, unless every block lies in the file and none overlaps another, or a range in `taken` (start, end,
        name). `ahead`: bytes before each block that belong to it (its bitmap).

        No program that writes these formats shares blocks. If they were allowed, a small file could stand for any amount of
        data.
        """
        # A number of each range: its start, and below it which one it is. Pairs would take twice the memory.
        keys, ends = list[int](), array("q")
        for block, start, end in self._ranges(ahead):
            if end > file_bytes:
                raise MalformedArchive(
                    f"{self._name}: block {block} lies at {start + ahead} to {end}, the file ends at {file_bytes}",
                    hint="The file seems to be cut off: compare its size with the original's.",
                )
            keys.append(start << _INDEX_BITS | len(ends))
            ends.append(end)
        blocks, others = len(ends), sorted(each for each in taken if each[0] < each[1])
        for start, end, _ in others:
            keys.append(start << _INDEX_BITS | len(ends))
            ends.append(end)
        keys.sort()
        before, before_end = 0, 0
        for key in keys:
            index = key & _INDEX_MASK
            if key >> _INDEX_BITS < before_end:
                one, other = (
                    f"block {next(islice(self._ranges(ahead), at, None))[0]}" if at < blocks else others[at - blocks][2]
                    for at in sorted((before, index))
                )
                raise MalformedArchive(f"{self._name}: {one} and {other} both lie at {key >> _INDEX_BITS} of the file")
            before, before_end = index, ends[index]

    def _ranges(self, ahead: int) -> Iterator[tuple[int, int, int]]:
        """(first block, start, end) of each run that lies in the file; start and end are offsets there."""
        block_bytes, blocks = self.block_bytes, self._blocks
        missing = blocks * block_bytes - self.size
        ends = chain(islice(self._firsts, 1, None), (blocks,))
        # An empty disk has an end and no run.
        for block, following, place in zip(self._firsts, ends, self._places, strict=False):
            if place >= 0 or place < PARENT:
                start = place if place >= 0 else ~place
                end = start + (following - block) * block_bytes
                yield block, start - ahead, end if following < blocks else end - missing


def _forward(place: int, count: int) -> int:
    """The place `count` bytes further."""
    if place >= 0:
        return place + count
    return place - count if place < PARENT else place


class Bitmap(NamedTuple):
    """Bits at `start` of the file, one per sector: whether it is here; absent sectors lie at `absent`.

    `order`: whether a byte's first sector is its highest bit ("big") or its lowest.
    """

    over: DiskReader
    start: int
    sector_bytes: int
    order: Literal["big", "little"]
    absent: int

    def runs(self, run: Run, skipped: int) -> Iterator[Run]:
        """The runs of a partly present run that begins `skipped` bytes into the bitmap's range."""
        first, last = skipped // self.sector_bytes, -(-(skipped + run.end - run.start) // self.sector_bytes)
        content = bytearray(-(-last // 8) - first // 8)
        self.over.read_into(self.start + first // 8, memoryview(content))
        data = ~run.place
        if content == b"\xff" * len(content):
            yield Run(run.start, run.end, data)
            return
        bits = f"{int.from_bytes(content, self.order):0{len(content) * 8}b}"
        sectors = (bits if self.order == "big" else bits[::-1])[first % 8 : last - first // 8 * 8]
        first_sector = run.start - skipped % self.sector_bytes
        here, start, edge = sectors[0] == "1", run.start, 0
        while start < run.end:
            edge = sectors.find("0" if here else "1", edge)
            stop = first_sector + edge * self.sector_bytes if edge >= 0 else run.end
            yield Run(start, stop, data + (start - run.start) if here else self.absent)
            start, here = stop, not here


class Mapping(Protocol):
    """The interface of a map for MappedDisk: the runs that fill start to end, in order and without a gap. Thread-safe."""

    size: int

    def runs(self, start: int, end: int) -> Iterator[Run]: ...


class MappedDisk:
    """Extents and reads of a disk whose map (a BlockMap, for example) gives the place of its bytes in `over`.

    `parent` is the disk under it. It may be smaller than this disk, which is then zeros behind its end. Without a parent, its
    parts are zeros; with `alone` they are in no extent. `partial` makes runs of a partly present block.
    """

    def __init__(
        self,
        over: DiskReader,
        blocks: Mapping,
        *,
        name: str,
        parent: DiskReader | None = None,
        partial: Partial | None = None,
        alone: bool = False,
    ) -> None:
        self._over, self._blocks, self._partial, self._name = over, blocks, partial, name
        self.parent, self._alone = parent, alone
        self.size = blocks.size

    @property
    def max_readers(self) -> int:
        return min(self._over.max_readers, self.parent.max_readers) if self.parent else self._over.max_readers

    @property
    def piece_bytes(self) -> int:
        return piece_bytes(self._over, self.parent) if self.parent else piece_bytes(self._over)

    def extents(self) -> Iterator[Extent]:
        # Joined before they are extents: a scattered disk has a million pieces, and few extents.
        begin, end, zeros = 0, 0, False
        for start, stop, zero in self._pieces():
            if start != end or zero != zeros:
                if begin < end:
                    yield Extent(begin, end - begin, zeros)
                begin, zeros = start, zero
            end = stop
        if begin < end:
            yield Extent(begin, end - begin, zeros)

    def _pieces(self) -> Iterator[tuple[int, int, bool]]:
        """(start, end, whether it is zeros), ascending."""
        holes = Holes(self._over)
        parent, parent_end = (ExtentCursor(self.parent.extents()), self.parent.size) if self.parent else (None, 0)
        for start, end, place in self._runs(0, self.size):
            if place >= 0:
                # A block that was never written, like most of a fixed image, may be a hole of the file, and is zeros.
                in_hole = holes.cover(place, place + end - start)
                if in_hole is not None:
                    yield start, end, in_hole
                    continue
                pieces = holes.split(place, place + end - start)
                for (piece, zero), (stop, _) in pairwise([*pieces, (place + end - start, False)]):
                    yield start + piece - place, start + stop - place, zero
            elif place == ZERO or not self._alone:
                at = start
                if place == PARENT and parent is not None:
                    at = max(start, min(end, parent_end))
                    for extent in parent.between(start, at):
                        yield extent.start, extent.end, extent.zero
                if at < end:
                    yield at, end, True

    def places(self) -> Iterator[Place]:
        """Where the disk's bytes lie unchanged in files (`disks.raw.cloning`); nothing, where the image itself is no file."""
        file = FilePlaces(self._over)
        parent = FilePlaces(self.parent) if self.parent else None
        for start, end, place in self._runs(0, self.size):
            if place >= 0:
                yield from file.between(place, place + end - start, start)
            elif place == PARENT and parent is not None:
                yield from parent.between(start, end, start)

    def _runs(self, start: int, end: int) -> Iterator[Run]:
        for run in self._blocks.runs(start, end):
            if run.place < PARENT:
                assert self._partial is not None, "the table has partly present blocks, and their bitmaps are not read"
                yield from self._partial(run)
            else:
                yield run

    def read_into(self, offset: int, buffer: memoryview) -> None:
        end = offset + len(buffer)
        if offset < 0 or end > self.size:
            raise DiskReadFailed(f"{self._name}: {len(buffer)} bytes at offset {offset} are outside its {self.size}")
        for start, stop, place in self._runs(offset, end):
            into = buffer[start - offset : stop - offset]
            if place >= 0:
                try:
                    self._over.read_into(place, into)
                except DiskReadFailed as error:
                    raise DiskReadFailed(
                        f"{self._name} cannot be read at offset {start}: {error.detail}", hint=error.hint
                    ) from error
            elif place == PARENT and self.parent is not None:
                held = max(0, min(len(into), self.parent.size - start))
                if held:
                    self.parent.read_into(start, into[:held])
                fill_zeros(into[held:])
            else:
                fill_zeros(into)

    def close(self) -> None:
        self._over.close()
        if self.parent is not None:
            self.parent.close()


class MappedImage:
    """Passes all calls of a block format's reader to its `MappedDisk`, except `layer()`, which each format has itself.

    A subclass sets `_disk` at the end of its `__init__`.
    """

    _disk: MappedDisk

    @property
    def size(self) -> int:
        return self._disk.size

    @property
    def max_readers(self) -> int:
        return self._disk.max_readers

    @property
    def piece_bytes(self) -> int:
        return self._disk.piece_bytes

    def extents(self) -> Iterator[Extent]:
        return self._disk.extents()

    def places(self) -> Iterator[Place]:
        return self._disk.places()

    def read_into(self, offset: int, buffer: memoryview) -> None:
        self._disk.read_into(offset, buffer)

    def close(self) -> None:
        self._disk.close()
