"""Holes of an image's own file, as arrays: ranges that are allocated in the image and never written in the file are zeros.

Images are made so on purpose (qcow2 with preallocation, Proxmox' default; fixed VHDX). Without this all those zeros would be
read.
"""

from itertools import islice

import numpy as np
from numpy.typing import NDArray

from synvirt.blocks import DiskReader

Integers = NDArray[np.int64]

# 16 bytes each: 1 MiB of memory. In a file with more holes, the later ones are read as zeros.
_HOLES_MAX = 65536


class Holes:
    """The holes of one file, ascending and separate."""

    def __init__(self, file: DiskReader) -> None:
        holes = list(islice((extent for extent in file.extents() if extent.zero), _HOLES_MAX))
        self._starts = np.array([hole.start for hole in holes], np.int64)
        self._ends = np.array([hole.end for hole in holes], np.int64)

    def __bool__(self) -> bool:
        return len(self._starts) > 0

    def cover(self, starts: Integers, ends: Integers) -> tuple[NDArray[np.bool_], NDArray[np.bool_]]:
        """For each range of the file: whether it lies in a hole; whether only a part of it lies in holes."""
        first = np.searchsorted(self._ends, starts, "right")
        known = first < len(self._starts)
        at = np.minimum(first, len(self._starts) - 1)
        touched = known & (self._starts[at] < ends)
        within = touched & (self._starts[at] <= starts) & (self._ends[at] >= ends)
        return within, touched & ~within

    def split(self, start: int, end: int) -> list[tuple[int, bool]]:
        """A range of the file, cut at the edges of holes: (start of a piece, whether it is a hole)."""
        first = int(np.searchsorted(self._ends, start, "right"))
        last = int(np.searchsorted(self._starts, end, "left"))
        pieces: list[tuple[int, bool]] = []
        at = start
        for hole, hole_end in zip(self._starts[first:last].tolist(), self._ends[first:last].tolist(), strict=True):
            if at < hole:
                pieces.append((at, False))
            pieces.append((max(start, hole), True))
            at = hole_end
        if at < end:
            pieces.append((at, False))
        return pieces
