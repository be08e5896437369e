"""Holes of an image's own file, as arrays: what is allocated in the image and was never written in the file is zeros.

Images are made that way on purpose (qcow2 with preallocation, Proxmox' default; fixed VHDX), and their guests' disks would
otherwise be read, in full, as zeros.
"""

from itertools import islice

import numpy as np
from numpy.typing import NDArray

from synvirt.blocks import DiskReader

Integers = NDArray[np.int64]

# 16 bytes each: 1 MiB of memory. In a file with more holes than this, the later ones are read as the zeros they are.
_HOLES_MAX = 65536


class Holes:
    """The holes of one file: ascending and apart."""

    def __init__(self, file: DiskReader) -> None:
        holes = list(islice((extent for extent in file.extents() if extent.zero), _HOLES_MAX))
        self._starts = np.array([hole.start for hole in holes], np.int64)
        self._ends = np.array([hole.end for hole in holes], np.int64)

    def __bool__(self) -> bool:
        return len(self._starts) > 0

    def cover(self, starts: Integers, ends: Integers) -> tuple[NDArray[np.bool_], NDArray[np.bool_]]:
        """Of each range of the file: lies it within a hole; lies only part of it in holes."""
        first = np.searchsorted(self._ends, starts, "right")
        known = first < len(self._starts)
        at = np.minimum(first, len(self._starts) - 1)
        touched = known & (self._starts[at] < ends)
        within = touched & (self._starts[at] <= starts) & (self._ends[at] >= ends)
        return within, touched & ~within

    def split(self, start: int, end: int) -> list[tuple[int, bool]]:
        """A range of the file cut at the edges of holes: (where a piece begins, is it a hole)."""
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
