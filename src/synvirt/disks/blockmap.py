"""Disks that a file stores in blocks of one size with one table: the common part of VHDX, VHD and VDI.

    block number ─▶ place ─▶ BlockMap: runs, neighbours joined ─▶ MappedDisk: extents and reads

A place is one number: a block's offset in the file, or ZERO, or PARENT, or `partly(offset)` for a block at `offset` with a
bitmap that says for each sector whether it is here or the parent's. The table is read as arrays, a window at a time, and kept
as runs. A nearly empty TiB is a few runs, and Python works once per run, not once per block.
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import Final, Literal, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from synvirt.blocks import DiskReader, Extent, ExtentCursor, Place, coalesced
from synvirt.disks.places import FilePlaces
from synvirt.disks.raw.holes import Holes
from synvirt.errors import DiskReadFailed, MalformedArchive, UnsupportedFormat

Places = NDArray[np.int64]

ZERO: Final = -1
PARENT: Final = -2  # read from the parent; zeros without one

# Table entries decoded at once: 1 MiB of 64-bit ones.
WINDOW_ENTRIES: Final = 128 << 10
# A run takes 12 bytes, and six times that while runs are checked: 288 MiB for 4 TiB in blocks of 1 MiB without neighbours.
RUNS_MAX: Final = 4 << 20
_ZEROS: Final = bytes(1 << 20)


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
    """The runs of the blocks of a disk of `size` bytes. `windows` yields the places of all blocks, in order; `runs_before` is
    the number of runs of the images above this one in its chain, which share the limit.
    """

    def __init__(self, size: int, block_bytes: int, windows: Iterable[Places], name: str, *, runs_before: int = 0) -> None:
        self.size, self.block_bytes, self._name = size, block_bytes, name
        firsts, places = [], []
        block, count, previous = 0, runs_before, None
        for window in windows:
            begins = self._begins(window, previous)
            firsts.append((begins + block).astype(np.uint32))
            places.append(window[begins])
            block, count = block + len(window), count + len(begins)
            if count > RUNS_MAX:
                raise UnsupportedFormat(
                    f"{name}: its blocks lie in more than {RUNS_MAX} pieces, more than are kept in memory",
                    hint="Convert it with the program that made it, which puts its blocks in order.",
                )
            if len(window):
                previous = int(window[-1])
        if block != -(-size // block_bytes):
            raise MalformedArchive(f"{name}: {block} blocks of {block_bytes} bytes for a disk of {size}")
        self._blocks, self.runs_with_before = block, count
        self._firsts = np.concatenate(firsts) if firsts else np.empty(0, np.uint32)
        self._places: Places = np.concatenate(places) if places else np.empty(0, np.int64)

    def _begins(self, window: Places, previous: int | None) -> Places:
        """Where runs begin in the window: every place that does not continue the one before it."""
        before = np.empty_like(window)
        if len(window):
            before[0] = window[0] if previous is None else previous
            before[1:] = window[:-1]
        goes_on = (window == np.where(before >= 0, before + self.block_bytes, before)) & (window >= PARENT)
        if previous is None and len(window):
            goes_on[0] = False
        return np.flatnonzero(~goes_on)

    def runs(self, start: int, end: int) -> Iterator[Run]:
        """The runs from `start` to `end`, cut to that range, partly present blocks unchanged."""
        if start >= end:
            return
        first_block = start // self.block_bytes
        # With the array's own type: for a Python number numpy would convert the whole array first.
        at = int(np.searchsorted(self._firsts, np.uint32(first_block), "right")) - 1
        # In slices, so that a scan of the whole disk holds only a few as Python numbers, and a small read even less.
        count = min(1024, -(-end // self.block_bytes) - first_block)
        while start < end:
            firsts = self._firsts[at : at + count + 1].tolist()
            places = self._places[at : at + count].tolist()
            if len(firsts) == len(places):
                firsts.append(self._blocks)
            for first, following, place in zip(firsts, firsts[1:], places, strict=False):
                run_end = min(following * self.block_bytes, end)
                skipped = start - first * self.block_bytes
                yield Run(start, run_end, _forward(place, skipped))
                start = run_end
                if start >= end:
                    return
            at += len(places)

    def check_places(self, file_bytes: int, taken: Iterable[tuple[int, int, str]], *, ahead: int = 0) -> None:
        """MalformedArchive, unless every block lies in the file and none overlaps another, or a range in `taken` (start, end,
        name). `ahead`: bytes before each block that belong to it (its bitmap).

        No program that writes these formats shares blocks. If they were allowed, a small file could stand for any amount of
        data.
        """
        held = (self._places >= 0) | (self._places < PARENT)
        starts = self._places[held]
        np.invert(starts, out=starts, where=starts < PARENT)
        # In place where possible: 32 MiB per array, at the limit of runs.
        ends = np.diff(self._firsts, append=np.uint32(self._blocks)).astype(np.int64)
        ends *= self.block_bytes
        if len(ends):
            ends[-1] -= self._blocks * self.block_bytes - self.size
        ends = ends[held]
        ends += starts
        beyond = int(ends.max(initial=0))
        if beyond > file_bytes:
            where = int(np.argmax(ends))
            raise MalformedArchive(
                f"{self._name}: block {self._firsts[held][where]} lies at {starts[where]} to {beyond},"
                f" the file ends at {file_bytes}",
                hint="The file seems to be cut off: compare its size with the original's.",
            )
        starts -= ahead
        order = np.argsort(starts, kind="stable")
        starts, ends = starts[order], ends[order]
        self._check_overlaps(starts, ends, lambda at: f"block {self._firsts[held][order[at]]}", taken)

    def _check_overlaps(
        self, starts: Places, ends: Places, called: Callable[[int], str], taken: Iterable[tuple[int, int, str]]
    ) -> None:
        """Checks ascending ranges of the file for overlaps among themselves, and with `taken`."""
        clash = np.flatnonzero(starts[1:] < ends[:-1])
        if len(clash):
            at = int(clash[0])
            one, other = sorted((called(at), called(at + 1)))
            raise MalformedArchive(f"{self._name}: {one} and {other} both lie at {starts[at + 1]} of the file")
        before = (0, 0, "")
        for start, end, what in sorted(taken):
            if start < end:
                at = int(np.searchsorted(ends, start, "right"))
                if at < len(starts) and starts[at] < end:
                    lies = max(start, int(starts[at]))
                    raise MalformedArchive(f"{self._name}: {called(at)} and {what} both lie at {lies} of the file")
                if start < before[1]:
                    raise MalformedArchive(f"{self._name}: {before[2]} and {what} both lie at {start} of the file")
                before = (start, end, what)


def _forward(place: int, count: int) -> int:
    """The place `count` bytes further."""
    if place >= 0:
        return place + count
    return place - count if place < PARENT else place


@dataclass(frozen=True, slots=True)
class Bitmap:
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
        present = np.unpackbits(np.frombuffer(content, np.uint8), bitorder=self.order)[first % 8 : last - first // 8 * 8]
        edges = np.flatnonzero(present[1:] != present[:-1]) + 1
        first_sector = run.start - skipped % self.sector_bytes
        here, start = bool(present[0]), run.start
        for edge in [*(first_sector + edges * self.sector_bytes).tolist(), run.end]:
            yield Run(start, edge, data + (start - run.start) if here else self.absent)
            start, here = edge, not here


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

    def extents(self) -> Iterator[Extent]:
        return coalesced(self._extents())

    def _extents(self) -> Iterator[Extent]:
        holes = Holes(self._over)
        parent, parent_end = (ExtentCursor(self.parent.extents()), self.parent.size) if self.parent else (None, 0)
        for start, end, place in self._runs(0, self.size):
            if place >= 0:
                # A block that was never written, like most of a fixed image, may be a hole of the file, and is zeros.
                in_hole = holes.cover(place, place + end - start)
                if in_hole is not None:
                    yield Extent(start, end - start, zero=in_hole)
                    continue
                pieces = holes.split(place, place + end - start)
                for (piece, zero), (stop, _) in pairwise([*pieces, (place + end - start, False)]):
                    yield Extent(start + piece - place, stop - piece, zero)
            elif place == ZERO or not self._alone:
                at = start
                if place == PARENT and parent is not None:
                    at = max(start, min(end, parent_end))
                    yield from parent.between(start, at)
                if at < end:
                    yield Extent(at, end - at, zero=True)

    def places(self) -> Iterator[Place]:
        """Where the disk's bytes lie unchanged in files (see `disks.cloning`); nothing, where the image itself is no file."""
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

    def extents(self) -> Iterator[Extent]:
        return self._disk.extents()

    def places(self) -> Iterator[Place]:
        return self._disk.places()

    def read_into(self, offset: int, buffer: memoryview) -> None:
        self._disk.read_into(offset, buffer)

    def close(self) -> None:
        self._disk.close()


def fill_zeros(into: memoryview) -> None:
    """Overwrites the memory with zeros."""
    for at in range(0, len(into), len(_ZEROS)):
        into[at : at + len(_ZEROS)] = _ZEROS[: len(into) - at]
