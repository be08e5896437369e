"""Where the guest's bytes lie in a qcow2 image: QEMU's docs/interop/qcow2.txt, section «Cluster mapping».

    guest offset ─▶ L1 table ─▶ L2 table ─▶ cluster (or subcluster) of the file

The tables are read as arrays and turned into runs, so that Python works once per run and not once per cluster. A window is the
part of the mapping that is read, decoded and kept at a time: 64 KiB of L2 entries, which is a part of a large L2 table, or
several small L2 tables together.
"""

import threading
from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass
from enum import IntEnum
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from synvirt.blocks import DiskReader
from synvirt.disks.qcow2.errors import read_for_guest
from synvirt.disks.qcow2.header import Header
from synvirt.disks.raw.holes import Holes
from synvirt.errors import MalformedArchive

Integers = NDArray[np.int64]

# L1 and L2 entries, bits 9 to 55; the rest is reserved or a flag, and is ignored as in QEMU.
_OFFSET_MASK = 0x00FF_FFFF_FFFF_FE00
_COPIED, _COMPRESSED = 1 << 63, 1 << 62
_READS_AS_ZERO = 1
_SUBCLUSTERS = 32
_WINDOW_BYTES = 64 << 10


class Kind(IntEnum):
    """What a run is: not in this image (so the backing file's, or zeros), zeros, plain bytes, or one compressed cluster."""

    BACKING = 0
    ZERO = 1
    DATA = 2
    COMPRESSED = 3


class Run(NamedTuple):
    """Guest bytes `start` to `end`. `host`: their offset in the data file (DATA); the L2 entry (COMPRESSED), of whose cluster
    the first `skip` bytes are not wanted."""

    start: int
    end: int
    kind: int
    host: int
    skip: int


class Window(NamedTuple):
    """The runs of a window: run i is guest bytes starts[i] to starts[i + 1]."""

    starts: Integers
    kinds: NDArray[np.uint8]
    hosts: Integers

    @property
    def nbytes(self) -> int:
        return self.starts.nbytes + self.kinds.nbytes + self.hosts.nbytes


class WindowCache:
    """Decoded windows; the least recently used are dropped first. One for a whole backing chain, so that a long chain needs no
    more memory."""

    def __init__(self, bytes_max: int = 32 << 20) -> None:
        self._bytes_max = bytes_max
        self._bytes = 0
        self._windows: OrderedDict[tuple[int, int], Window] = OrderedDict()
        self._lock = threading.Lock()

    def get(self, key: tuple[int, int]) -> Window | None:
        """The window of that key, now marked as used; None: it is not kept."""
        with self._lock:
            window = self._windows.get(key)
            if window is not None:
                self._windows.move_to_end(key)
            return window

    def put(self, key: tuple[int, int], window: Window) -> None:
        """Keeps a window, and drops the least recently used ones."""
        with self._lock:
            if key in self._windows:
                return
            self._windows[key] = window
            self._bytes += window.nbytes
            while self._bytes > self._bytes_max and len(self._windows) > 1:
                self._bytes -= self._windows.popitem(last=False)[1].nbytes


@dataclass(frozen=True, slots=True)
class _Geometry:
    """Windows and tables: a table has several windows, or a window several tables; the other number is 1."""

    cluster_size: int
    entry_bytes: int

    @property
    def windows_a_table(self) -> int:
        return max(1, self.cluster_size // _WINDOW_BYTES)

    @property
    def tables_a_window(self) -> int:
        return max(1, _WINDOW_BYTES // self.cluster_size)

    @property
    def part_bytes(self) -> int:
        """How much of one table is in a window."""
        return min(self.cluster_size, _WINDOW_BYTES)

    @property
    def entries(self) -> int:
        return _WINDOW_BYTES // self.entry_bytes

    @property
    def guest_bytes(self) -> int:
        return self.entries * self.cluster_size


class Mapping:
    """Guest offsets to runs, for the active layer of one image. Any number of threads may ask at once."""

    def __init__(self, over: DiskReader, header: Header, name: str, cache: WindowCache) -> None:
        self._over, self._header, self._name, self._cache = over, header, name, cache
        self._geometry = _Geometry(header.cluster_size, header.l2_entry_bytes)
        self._l1 = _l1_table(over, header, name)

    def runs(self, offset: int, length: int) -> Iterator[Run]:
        """The runs of `length` bytes from `offset`, ascending, without a gap, cut to exactly that range."""
        at, end = offset, offset + length
        while at < end:
            index = at // self._geometry.guest_bytes
            window_end = min(end, (index + 1) * self._geometry.guest_bytes)
            window = self._window(index)
            if window is None:
                yield Run(at, window_end, Kind.BACKING, 0, 0)
            else:
                yield from _cut(window, at, window_end)
            at = window_end

    def spans(self, holes: Holes) -> Iterator[tuple[int, int, Kind]]:
        """The whole disk as (start, end, kind): like runs, but compressed clusters are DATA, ranges in `holes` of the data file
        are ZERO, and neighbours are joined.

        Lazy, window by window; parts without an L2 table are skipped at once.
        """
        for start, end, window in self._windows():
            if window is None:
                yield start, end, Kind.BACKING
                continue
            starts, kinds = _sorts(window, holes)
            edges = np.flatnonzero(_changes(kinds))
            begins = starts[edges].tolist()
            for first, last, kind in zip(begins, [*begins[1:], end], kinds[edges].tolist(), strict=True):
                if first < end:
                    yield first, min(last, end), Kind(kind)

    def all_runs(self) -> Iterator[Run]:
        """The runs of the whole disk; lazy, and as fast over unmapped parts as `spans`."""
        for start, end, window in self._windows():
            if window is None:
                yield Run(start, end, Kind.BACKING, 0, 0)
            else:
                yield from _cut(window, start, end)

    def _windows(self) -> Iterator[tuple[int, int, Window | None]]:
        """The whole disk as windows, (start, end, window), and as gaps of the greatest length, where the window is None."""
        at = 0
        for index in self._mapped_windows():
            start = index * self._geometry.guest_bytes
            if at < start:
                yield at, start, None
            at = min(start + self._geometry.guest_bytes, self._header.size)
            yield start, at, self._window(index)
        if at < self._header.size:
            yield at, self._header.size, None

    def _mapped_windows(self) -> Iterator[int]:
        tables = np.flatnonzero(self._l1)
        geometry = self._geometry
        if geometry.windows_a_table == 1:
            windows = tables // geometry.tables_a_window
            yield from windows[_changes(windows)].tolist()
            return
        count = -(-self._header.size // geometry.guest_bytes)
        for table in tables.tolist():
            first = table * geometry.windows_a_table
            yield from range(first, min(first + geometry.windows_a_table, count))

    def _window(self, index: int) -> Window | None:
        """None, where there is no L2 table."""
        geometry = self._geometry
        first = index // geometry.windows_a_table * geometry.tables_a_window
        tables = self._l1[first : first + geometry.tables_a_window]
        if not tables.any():
            return None
        window = self._cache.get((id(self), index))
        if window is None:
            # Two threads may decode the same window at once: this is harmless, and costs less than a lock.
            window = self._decoded(index, tables.tolist())
            self._cache.put((id(self), index), window)
        return window

    def _decoded(self, index: int, tables: list[int]) -> Window:
        geometry = self._geometry
        raw = bytearray(_WINDOW_BYTES)
        view = memoryview(raw)
        part = index % geometry.windows_a_table * geometry.part_bytes
        for place, table in enumerate(tables):
            if table:
                at = place * geometry.part_bytes
                into = view[at : at + geometry.part_bytes]
                guest = index * geometry.guest_bytes + place * self._header.cluster_size * self._header.l2_entries
                read_for_guest(self._over.read_into, table + part, into, name=self._name, guest=guest)
        words = np.frombuffer(raw, ">u8").astype(np.uint64)
        start = index * geometry.guest_bytes
        if self._header.extended_l2:
            return self._extended(words[0::2], words[1::2], start)
        return self._standard(words, start)

    def _standard(self, entries: NDArray[np.uint64], start: int) -> Window:
        compressed = (entries & np.uint64(_COMPRESSED)) != 0
        zero = (entries & np.uint64(_READS_AS_ZERO)) != 0
        kinds = np.where(self._allocated(entries), np.uint8(Kind.DATA), np.uint8(Kind.BACKING))
        kinds[zero] = Kind.ZERO
        kinds[compressed] = Kind.COMPRESSED
        self._check_clusters(entries, kinds == Kind.DATA, compressed, start)
        if self._header.version == 2:
            self._refuse(kinds == Kind.ZERO, start, "is marked as zeros, which a version 2 image cannot")
        hosts = _hosts(entries, compressed)
        return _window(kinds, hosts, start, self._header.cluster_size, np.flatnonzero(compressed))

    def _extended(self, entries: NDArray[np.uint64], bitmaps: NDArray[np.uint64], start: int) -> Window:
        compressed = (entries & np.uint64(_COMPRESSED)) != 0
        bits = np.unpackbits(bitmaps.astype("<u8").view(np.uint8), bitorder="little").reshape(-1, 2, _SUBCLUSTERS)
        # A compressed cluster's bitmap has no meaning.
        bits[compressed] = 0
        data, zero = bits[:, 0], bits[:, 1]
        allocated = data.max(axis=1) != 0
        self._refuse((data & zero).max(axis=1) != 0, start, "has subclusters that are both allocated and zeros")
        self._refuse(allocated & ~self._allocated(entries), start, "has allocated subclusters and no place in the file")
        self._check_clusters(entries, allocated, compressed, start)
        kinds = data * np.uint8(Kind.DATA) + zero * np.uint8(Kind.ZERO)
        kinds[compressed] = Kind.COMPRESSED
        subcluster_size = self._header.cluster_size // _SUBCLUSTERS
        hosts = np.repeat(_hosts(entries, compressed), _SUBCLUSTERS).reshape(-1, _SUBCLUSTERS)
        hosts[~compressed] += np.arange(_SUBCLUSTERS, dtype=np.int64) * subcluster_size
        firsts = np.flatnonzero(compressed) * _SUBCLUSTERS
        return _window(kinds.reshape(-1), hosts.reshape(-1), start, subcluster_size, firsts)

    def _allocated(self, entries: NDArray[np.uint64]) -> NDArray[np.bool_]:
        """Whether a cluster has a place in the file. In an external data file that may be 0; there the copied flag decides."""
        allocated: NDArray[np.bool_] = (entries & np.uint64(_OFFSET_MASK)) != 0
        if self._header.external_data:
            allocated |= (entries & np.uint64(_COPIED)) != 0
        return allocated

    def _check_clusters(
        self, entries: NDArray[np.uint64], data: NDArray[np.bool_], compressed: NDArray[np.bool_], start: int
    ) -> None:
        offsets = entries & np.uint64(_OFFSET_MASK)
        self._refuse(data & (offsets % np.uint64(self._header.cluster_size) != 0), start, "lies on no cluster's boundary")
        if self._header.external_data:
            self._refuse(compressed, start, "is compressed, which an external data file's cannot be")
            guest = np.uint64(start) + np.arange(len(entries), dtype=np.uint64) * np.uint64(self._header.cluster_size)
            self._refuse(data & (offsets != guest), start, "lies elsewhere in the external data file")

    def _refuse(self, wrong: NDArray[np.bool_], start: int, what: str) -> None:
        if wrong.any():
            guest = start + int(wrong.argmax()) * self._header.cluster_size
            raise MalformedArchive(f"{self._name}: the cluster at guest offset {guest} {what}")


def _l1_table(over: DiskReader, header: Header, name: str) -> Integers:
    """The L2 tables' offsets, 0 for none; aligned, in the file, each only once, and not over header or L1 table."""
    raw = bytearray(header.l1_entries_needed * 8)
    over.read_into(header.l1_offset, memoryview(raw))
    tables = (np.frombuffer(raw, ">u8").astype(np.uint64) & np.uint64(_OFFSET_MASK)).astype(np.int64)
    l1_end = header.l1_offset + len(raw)
    guest_bytes = header.cluster_size * header.l2_entries
    for wrong, what in (
        (tables % header.cluster_size != 0, "lies on no cluster's boundary"),
        (tables + header.cluster_size > over.size, f"lies outside the file of {over.size} bytes"),
        ((tables != 0) & (tables < l1_end) & (tables + header.cluster_size > header.l1_offset), "lies over the L1 table"),
    ):
        if wrong.any():
            index = int(wrong.argmax())
            raise MalformedArchive(
                f"{name}: the L2 table at {int(tables[index])}, for guest offset {index * guest_bytes}, {what}",
                hint="If the file was copied or uploaded, it may have been cut off: compare its size with the original's.",
            )
    present = np.sort(tables[tables != 0])
    # No program writes shared tables. If they were allowed, a small file could become any amount of data. (Sorted and compared:
    # the first call of np.unique loads a tenth of numpy, which shows in a conversion of an empty disk.)
    if (present[1:] == present[:-1]).any():
        raise MalformedArchive(f"{name}: two entries of the L1 table point to one L2 table")
    return tables


def _hosts(entries: NDArray[np.uint64], compressed: NDArray[np.bool_]) -> Integers:
    """Offsets in the file; for compressed clusters the entry without its flags, with offset and length."""
    mask = np.where(compressed, np.uint64(_COMPRESSED - 1), np.uint64(_OFFSET_MASK))
    return (entries & mask).astype(np.int64)


def _changes(kinds: NDArray[Any]) -> NDArray[np.bool_]:
    """True where a value differs from the one before it, and at the first."""
    changed = np.ones(len(kinds), np.bool_)
    np.not_equal(kinds[1:], kinds[:-1], out=changed[1:])
    return changed


def _window(kinds: NDArray[np.uint8], hosts: Integers, start: int, unit: int, compressed: Integers) -> Window:
    """Joins units of one size to runs. `compressed`: the first unit of each compressed cluster, always a run of its own."""
    begins = _changes(kinds)
    begins[1:] |= (kinds[1:] == Kind.DATA) & (hosts[1:] != hosts[:-1] + unit)
    begins[compressed] = True
    firsts = np.flatnonzero(begins)
    starts = np.append(firsts, len(kinds)) * unit + start
    return Window(starts, kinds[firsts], hosts[firsts])


def _sorts(window: Window, holes: Holes) -> tuple[Integers, NDArray[np.uint8]]:
    """The start of each run, and whether it is BACKING, ZERO or DATA; runs that are partly in holes are cut there."""
    starts, kinds = window.starts[:-1], np.minimum(window.kinds, np.uint8(Kind.DATA))
    if not holes:
        return starts, kinds
    plain = window.kinds == Kind.DATA
    ends = window.hosts + np.diff(window.starts)
    covers = [holes.cover(host, end) for host, end in zip(window.hosts.tolist(), ends.tolist(), strict=True)]
    within = np.array([cover is True for cover in covers], np.bool_)
    partly = np.array([cover is None for cover in covers], np.bool_)
    kinds[plain & within] = Kind.ZERO
    more_starts: list[int] = []
    more_kinds: list[int] = []
    for index in np.flatnonzero(plain & partly).tolist():
        host = int(window.hosts[index])
        for at, hole in holes.split(host, int(ends[index])):
            more_starts.append(int(starts[index]) + at - host)
            more_kinds.append(Kind.ZERO if hole else Kind.DATA)
    if more_starts:
        kept = ~(plain & partly)
        starts = np.concatenate([starts[kept], np.array(more_starts, np.int64)])
        kinds = np.concatenate([kinds[kept], np.array(more_kinds, np.uint8)])
        order = np.argsort(starts, kind="stable")
        starts, kinds = starts[order], kinds[order]
    return starts, kinds


def _cut(window: Window, start: int, end: int) -> Iterator[Run]:
    """The runs of a window that touch start to end, cut to that range."""
    first = int(np.searchsorted(window.starts, start, "right")) - 1
    last = int(np.searchsorted(window.starts, end, "left"))
    starts = window.starts[first : last + 1].tolist()
    kinds = window.kinds[first:last].tolist()
    hosts = window.hosts[first:last].tolist()
    for at, following, kind, host in zip(starts, starts[1:], kinds, hosts, strict=False):
        skip = max(0, start - at)
        place = host + skip if kind == Kind.DATA else host
        yield Run(at + skip, min(following, end), kind, place, skip)
