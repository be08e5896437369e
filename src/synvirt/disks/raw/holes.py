"""Holes of an image's own file: ranges that are allocated in the image and never written in the file are zeros.

Images are made so on purpose (qcow2 with preallocation, Proxmox' default; fixed VHDX). Without this all those zeros would be
read.
"""

from array import array
from bisect import bisect_left, bisect_right
from itertools import islice

from synvirt.blocks import DiskReader

# 16 bytes each: 1 MiB of memory. In a file with more holes, the later ones are read as zeros.
_HOLES_MAX = 65536


class Holes:
    """The holes of one file, ascending and separate."""

    def __init__(self, file: DiskReader) -> None:
        self._starts, self._ends = array("q"), array("q")
        for hole in islice((extent for extent in file.extents() if extent.zero), _HOLES_MAX):
            self._starts.append(hole.start)
            self._ends.append(hole.end)

    def __bool__(self) -> bool:
        return len(self._starts) > 0

    def cover(self, start: int, end: int) -> bool | None:
        """Whether a range of the file lies in a hole; None: a part of it does."""
        at = bisect_right(self._ends, start)
        if at == len(self._starts) or self._starts[at] >= end:
            return False
        return True if self._starts[at] <= start and self._ends[at] >= end else None

    def split(self, start: int, end: int) -> list[tuple[int, bool]]:
        """A range of the file, cut at the edges of holes: (start of a piece, whether it is a hole)."""
        first = bisect_right(self._ends, start)
        last = bisect_left(self._starts, end)
        pieces: list[tuple[int, bool]] = []
        at = start
        for hole, hole_end in zip(self._starts[first:last], self._ends[first:last], strict=True):
            if at < hole:
                pieces.append((at, False))
            pieces.append((max(start, hole), True))
            at = hole_end
        if at < end:
            pieces.append((at, False))
        return pieces
