"""Where the grains of a sparse VMDK extent lie: directories and tables, a window of them at a time.

    Tables ─┐                       ┌─▶ runs for MappedDisk
            ├─▶ Windows ─▶ GrainMap ┤
    Walked ─┘                       └─▶ sectors of compressed grains for Inflated

A place is an offset in the file, or ZERO, or PARENT (nothing here: the parent's, or zeros). For the whole disk only the
directory is in memory. A window is 32 Ki grains, 2 GiB of disk in grains of 64 KiB, and the last few are kept.
"""

import threading
from bisect import bisect_right
from collections.abc import Iterator
from functools import partial
from typing import Final

from synvirt.disks.blockmap import PARENT, Run
from synvirt.disks.entries import WindowCache
from synvirt.disks.vmdk.sparse import SECTOR, Sparse
from synvirt.disks.vmdk.tables import WINDOW_GRAINS, Source
from synvirt.disks.vmdk.windows import Window, Windows
from synvirt.errors import MalformedArchive

# At most 12 bytes a grain, where no two lie in order: 24 MiB, whatever the length of the chain.
WINDOWS_KEPT: Final = 64


class GrainMap:
    """A Mapping of an extent's grains. MalformedArchive, where a table or grain lies outside the file or overlaps another.

    The runs of a compressed extent have places in the disk, not in the file: `Inflated` reads by them.
    """

    def __init__(self, source: Source, sparse: Sparse, file_bytes: int, name: str, cache: WindowCache[Window]) -> None:
        self.size, self.grain_bytes = sparse.size, sparse.grain_bytes
        self._source, self._windows, self._cache = source, Windows(sparse, file_bytes, name), cache
        self._file_bytes, self._name = file_bytes, name
        self._least_bytes = SECTOR if sparse.compressed else sparse.grain_bytes
        self._counted: set[int] = set()
        self._allocated = 0
        self._lock = threading.Lock()

    def sectors(self, first: int, last: int) -> list[int]:
        """Of a compressed extent: the sectors where the records of the grains `first` to `last` begin; 0: there is none."""
        sectors: list[int] = []
        while first + len(sectors) < last:
            index, skipped = divmod(first + len(sectors), WINDOW_GRAINS)
            sectors += self._window(index).sectors[skipped : skipped + last - first - len(sectors)]
        return sectors

    def runs(self, start: int, end: int) -> Iterator[Run]:
        """The runs between two offsets of the disk, in bytes, ascending and without a gap."""
        grain = self.grain_bytes
        while start < end:
            index = start // grain // WINDOW_GRAINS
            begin = index * WINDOW_GRAINS * grain
            stop = min(end, begin + WINDOW_GRAINS * grain)
            if self._source.empty(index):
                yield Run(start, stop, PARENT)
                start = stop
                continue
            firsts, places, _, _ = self._window(index)
            at = bisect_right(firsts, (start - begin) // grain) - 1
            while start < stop:
                run_end = min(begin + firsts[at + 1] * grain, stop)
                place = places[at]
                yield Run(start, run_end, place + start - begin - firsts[at] * grain if place >= 0 else place)
                start = run_end
                at += 1

    def _window(self, index: int) -> Window:
        return self._cache.get(self, index, partial(self._load, index))

    def _load(self, index: int) -> Window:
        window = self._windows.window(index * WINDOW_GRAINS, self._source.entries(index))
        with self._lock:
            if index not in self._counted:
                self._counted.add(index)
                self._allocated += window.held
            if (self._allocated - 1) * self._least_bytes > self._file_bytes:
                raise MalformedArchive(
                    f"{self._name}: its tables name more grains than a file of {self._file_bytes} bytes holds"
                )
        return window
