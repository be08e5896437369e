"""Compares two disks: where they first differ, like `qemu-img compare`, in any two formats.

    extents of both ─▶ pieces that are data in one of them ─▶ threads: read, memcmp ─▶ the first sector that differs

Where both disks report zeros, nothing is read. The shorter disk counts as zeros behind its end, as in QEMU and for a guest.
"""

from collections.abc import Callable, Iterator
from typing import Final, NamedTuple

from synvirt.blocks import DiskReader, Extent, coalesced
from synvirt.copying import default_threads
from synvirt.disks.checking.looking import PIECE_BYTES, first_found
from synvirt.disks.memory import equal, is_zero

# qemu-img gives the first sector that differs, not the byte.
SECTOR_BYTES: Final = 512
# An offset behind any disk's end.
_NEVER: Final = 1 << 64


class Piece(NamedTuple):
    """`length` bytes from `start`, and which of the two disks must be read: the other has zeros there, or has ended."""

    start: int
    length: int
    first: bool
    second: bool


def first_difference(
    first: DiskReader,
    second: DiskReader,
    *,
    threads: int | None = None,
    stop: Callable[[], bool] = lambda: False,
) -> int | None:
    """The offset of the first sector of 512 bytes in which the disks differ, None where they have the same content.

    DiskReadFailed; Cancelled, once `stop()` is true.
    """

    def look(piece: Piece, buffer: memoryview, other: memoryview) -> int | None:
        one, two = buffer[: piece.length], other[: piece.length]
        if piece.first:
            first.read_into(piece.start, one)
        if piece.second:
            second.read_into(piece.start, two)
        both = piece.first and piece.second
        within = piece.start % SECTOR_BYTES
        differs = _first_differing(one, two, within) if both else _first_non_zero(one if piece.first else two, within)
        return None if differs is None else piece.start + differs

    at_once = min(first.max_readers, second.max_readers)
    return first_found(
        _pieces(first, second),
        look,
        threads=1 if at_once <= 1 else min(threads or default_threads(), at_once),
        stop=stop,
    )


def _pieces(first: DiskReader, second: DiskReader) -> Iterator[Piece]:
    """All ranges that at least one of them does not report as zeros, ascending, cut at multiples of PIECE_BYTES."""
    for start, end, in_first, in_second in _merged(first, second):
        at = start
        while at < end:
            stop = min(end, at - at % PIECE_BYTES + PIECE_BYTES)
            yield Piece(at, stop - at, in_first, in_second)
            at = stop


def _merged(first: DiskReader, second: DiskReader) -> Iterator[tuple[int, int, bool, bool]]:
    mine, theirs = _Data(first), _Data(second)
    at = 0
    while True:
        at = min(mine.next_data(at), theirs.next_data(at))
        in_first, in_second = mine.holds(at), theirs.holds(at)
        if not in_first and not in_second:
            return
        end = min(mine.changes_after(at), theirs.changes_after(at))
        yield at, end, in_first, in_second
        at = end


class _Data:
    """A walk over a disk's data extents, for ascending offsets. After the last one there is no data."""

    def __init__(self, reader: DiskReader) -> None:
        self._extents = (extent for extent in coalesced(reader.extents()) if not extent.zero)
        self._now: Extent | None = next(self._extents, None)

    def _upto(self, at: int) -> Extent | None:
        while self._now is not None and self._now.end <= at:
            self._now = next(self._extents, None)
        return self._now

    def next_data(self, at: int) -> int:
        now = self._upto(at)
        return _NEVER if now is None else max(at, now.start)

    def holds(self, at: int) -> bool:
        now = self._upto(at)
        return now is not None and now.start <= at

    def changes_after(self, at: int) -> int:
        now = self._upto(at)
        return _NEVER if now is None else now.end if now.start <= at else now.start


def _first_differing(one: memoryview, two: memoryview, within: int) -> int | None:
    return _first_sector(len(one), within, lambda start, end: equal(one[start:end], two[start:end]))


def _first_non_zero(view: memoryview, within: int) -> int | None:
    return _first_sector(len(view), within, lambda start, end: is_zero(view[start:end]))


def _first_sector(length: int, within: int, as_it_should_be: Callable[[int, int], bool]) -> int | None:
    """Where the first wrong sector of a piece begins: the whole piece is compared, and halved where it is wrong. A piece that
    begins `within` bytes behind the beginning of a sector, as a file ended there, may begin with the rest of a wrong one: the
    answer is negative then."""
    if as_it_should_be(0, length):
        return None
    start, end = -within, length
    while end - start > SECTOR_BYTES:
        middle = start + max((end - start) // SECTOR_BYTES // 2, 1) * SECTOR_BYTES
        if as_it_should_be(max(start, 0), middle):
            start = middle
        else:
            end = middle
    return start
