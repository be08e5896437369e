"""Where the grains of a sparse VMDK extent lie: directories and tables as arrays, a window of them at a time.

    Tables ─┐
            ├─▶ GrainMap: places of any grains, runs for MappedDisk
    Walked ─┘

A place is an offset in the file, or ZERO, or PARENT (nothing here: the parent's, or zeros). For the whole disk only the
directory is in memory. A window is 32 Ki grains, 2 GiB of disk in grains of 64 KiB, and the last few are kept.
"""

import struct
import threading
from array import array
from collections import OrderedDict
from collections.abc import Callable, Iterator
from typing import Any, Final, Protocol

import numpy as np
from numpy.typing import NDArray

from synvirt.blocks import DiskReader
from synvirt.disks.blockmap import PARENT, ZERO, Places, Run
from synvirt.disks.vmdk.sparse import SECTOR, Kind, Marker, Sparse, cut_off, read_at
from synvirt.errors import MalformedArchive, UnsupportedFormat
from synvirt.sizes import MIB

# The number of entries in 64 hosted tables, or in 8 of the others.
WINDOW_GRAINS: Final = 32 << 10
# 256 KiB each: 16 MiB, whatever the length of the chain.
_WINDOWS_KEPT: Final = 64
# A compressed grain's record: (first sector of the grain: u64, length of the data: u32), the data.
RECORD = struct.Struct("<QI")
# A marker that is not a grain's: (sectors that follow: u64, 0: u32, type: u32).
MARKER = struct.Struct("<QII")
# The walk over a stream keeps 8 bytes per grain: 1 TiB of disk in 128 MiB.
_WALKED_GRAINS_MAX: Final = 16 << 20
_WALK_READ_BYTES: Final = 4 * MIB


def record_bytes_max(grain_bytes: int) -> int:
    """The largest size of a compressed grain: deflate's worst coding of a byte has 9 bits (RFC 1951, 3.2.6)."""
    return RECORD.size + grain_bytes + grain_bytes // 8 + SECTOR


class GrainSource(Protocol):
    """Gives the places of grains, and reads what it needs; `empty`: surely nothing there, known without reading."""

    def empty(self, first: int, count: int) -> bool: ...
    def places(self, first: int, count: int) -> Places: ...


class WindowCache:
    """The most recently used windows of all extents of a chain."""

    def __init__(self) -> None:
        self._windows: OrderedDict[tuple[object, int], Places] = OrderedDict()
        self._lock = threading.Lock()

    def get(self, owner: object, index: int, load: Callable[[int], Places]) -> Places:
        """The window of an extent; `load` loads it, where it is not kept."""
        key = (owner, index)
        with self._lock:
            held = self._windows.get(key)
            if held is not None:
                self._windows.move_to_end(key)
                return held
        loaded = load(index)  # outside the lock: two threads may load the same one, which costs less than waiting
        with self._lock:
            self._windows[key] = loaded
            if len(self._windows) > _WINDOWS_KEPT:
                self._windows.popitem(last=False)
        return loaded


class GrainMap:
    """A Mapping of an extent's grains. MalformedArchive, where a table or grain lies outside the file or overlaps another.

    The runs of a compressed extent have places in the disk, not in the file: `Inflated` reads by them.
    """

    def __init__(self, source: GrainSource, sparse: Sparse, file_bytes: int, name: str, cache: WindowCache) -> None:
        self.size, self.grain_bytes = sparse.size, sparse.grain_bytes
        self._source, self._sparse, self._file_bytes, self._name, self._cache = source, sparse, file_bytes, name, cache
        self._counted: set[int] = set()
        self._allocated = 0
        self._lock = threading.Lock()

    def places(self, first: int, last: int) -> Places:
        """The places of the grains from `first` up to `last`."""
        parts = []
        while first < last:
            index, skipped = divmod(first, WINDOW_GRAINS)
            part = self._window(index)[skipped : skipped + last - first]
            parts.append(part)
            first += len(part)
        return parts[0] if len(parts) == 1 else np.concatenate(parts)

    def runs(self, start: int, end: int) -> Iterator[Run]:
        """The runs between two offsets of the disk, in bytes, ascending and without a gap."""
        while start < end:
            index = start // self.grain_bytes // WINDOW_GRAINS
            first = index * WINDOW_GRAINS
            stop = min(end, (first + WINDOW_GRAINS) * self.grain_bytes)
            if self._source.empty(first, min(WINDOW_GRAINS, self._sparse.grains - first)):
                yield Run(start, stop, PARENT)
            else:
                from_grain, to_grain = start // self.grain_bytes, -(-stop // self.grain_bytes)
                yield from self._joined(from_grain, self._window(index)[from_grain - first : to_grain - first], start, stop)
            start = stop

    def _joined(self, first: int, places: Places, start: int, end: int) -> Iterator[Run]:
        """Joins neighbours that are contiguous, or both missing, to one run; cut to start and end."""
        grain = self.grain_bytes
        if self._sparse.compressed:
            places = np.where(places >= 0, np.arange(first, first + len(places)) * grain, places)
        before = places[:-1]
        edges = np.flatnonzero(places[1:] != np.where(before >= 0, before + grain, before)) + 1
        begins = np.concatenate(([0], edges))
        ends = ((first + edges) * grain).tolist()
        for at, place, run_end in zip((first + begins).tolist(), places[begins].tolist(), [*ends, end], strict=True):
            begin = max(at * grain, start)
            yield Run(begin, run_end, place + begin - at * grain if place >= 0 else place)

    def _window(self, index: int) -> Places:
        return self._cache.get(self, index, self._load)

    def _load(self, index: int) -> Places:
        first = index * WINDOW_GRAINS
        places = self._source.places(first, min(WINDOW_GRAINS, self._sparse.grains - first))
        self._check(first, places)
        with self._lock:
            if index not in self._counted:
                self._counted.add(index)
                self._allocated += int(np.count_nonzero(places >= 0))
            least = SECTOR if self._sparse.compressed else self.grain_bytes
            if (self._allocated - 1) * least > self._file_bytes:
                raise MalformedArchive(
                    f"{self._name}: its tables name more grains than a file of {self._file_bytes} bytes holds"
                )
        return places

    def _check(self, first: int, places: Places) -> None:
        """Checks that they lie in the file without overlaps: shared grains would let a small file become any amount of data."""
        here = np.flatnonzero(places >= 0)
        if not len(here):
            return
        starts = places[here]
        least = RECORD.size + 1 if self._sparse.compressed else self.grain_bytes
        beyond = here[starts + least > self._file_bytes]
        for at in beyond[:2].tolist():
            # The last grain of a disk may be incomplete.
            needed = least if self._sparse.compressed else min(least, self.size - (first + at) * self.grain_bytes)
            if places[at] + needed > self._file_bytes:
                raise cut_off(self._name, f"grain {first + at}", int(places[at]), int(places[at]) + needed, self._file_bytes)
        step = 1 if self._sparse.compressed else self.grain_bytes
        if (np.diff(starts) >= step).all():
            return
        order = np.argsort(starts, kind="stable")
        clash = np.flatnonzero(np.diff(starts[order]) < step)
        if len(clash):
            one, other = here[order[clash[0]]], here[order[clash[0] + 1]]
            raise MalformedArchive(
                f"{self._name}: grains {first + one} and {first + other} both lie at {places[other]} of the file"
            )


# ── through directory and tables ─────────────────────────────────────────────────────────────────────────────────────


class Tables:
    """The directory, in memory; tables are read."""

    def __init__(self, over: DiskReader, sparse: Sparse, name: str) -> None:
        assert sparse.directory_at is not None
        self._over, self._sparse, self._name = over, sparse, name
        raw = read_at(over, sparse.directory_at, sparse.directory_bytes, name, "grain directory")
        self._directory: NDArray[Any] = np.frombuffer(raw, sparse.entry)

    def empty(self, first: int, count: int) -> bool:
        return not self._entries(first, count).any()

    def _entries(self, first: int, count: int) -> NDArray[Any]:
        each = self._sparse.table_entries
        return self._directory[first // each : -(-(first + count) // each)]

    def places(self, first: int, count: int) -> Places:
        """The places of `count` grains from grain `first` on."""
        each = self._sparse.table_entries
        table = first // each
        entries = np.zeros((-(-(first + count) // each) - table) * each, self._sparse.entry)
        view = entries.view(np.uint8).data
        for number, at, length in self._stretches(first, count):
            start = (number - table) * self._sparse.table_bytes
            self._over.read_into(at, view[start : start + length])
        return _PLACES[self._sparse.kind](entries[first - table * each :][:count], self._sparse, self._name)

    def _stretches(self, first: int, count: int) -> Iterator[tuple[int, int, int]]:
        """(number of the first table, its offset, bytes): contiguous tables as one."""
        length = self._sparse.table_bytes
        held: tuple[int, int, int] | None = None
        for number, at in enumerate(self._tables_at(first, count), first // self._sparse.table_entries):
            if at == 0:
                continue
            if at + length > self._over.size:
                raise cut_off(self._name, f"grain table {number}", at, at + length, self._over.size)
            if held and held[0] * length + held[2] == number * length and held[1] + held[2] == at:
                held = (held[0], held[1], held[2] + length)
                continue
            if held:
                yield held
            held = (number, at, length)
        if held:
            yield held

    def _tables_at(self, first: int, count: int) -> list[int]:
        """The tables' offsets; 0: there is none."""
        entries: list[int] = self._entries(first, count).tolist()
        if self._sparse.kind != "sesparse":
            return [entry * SECTOR for entry in entries]
        for entry in entries:
            if entry and entry >> 32 != _SE_TABLE:
                raise MalformedArchive(f"{self._name}: {entry:#x} in its grain directory")
        return [self._sparse.tables_at + (entry & 0xFFFF_FFFF) * self._sparse.table_bytes if entry else 0 for entry in entries]


# The top half of a seSparse directory's entry; the top 4 bits of a table's entry.
_SE_TABLE: Final = 0x1000_0000
_SE_ABSENT, _SE_UNMAPPED, _SE_ZEROS, _SE_GRAIN = range(4)


def _hosted_places(entries: NDArray[Any], sparse: Sparse, name: str) -> Places:
    places = entries.astype(np.int64) * SECTOR
    places[entries == 0] = PARENT
    if sparse.zeroed_grains:
        places[entries == 1] = ZERO
    return places


def _se_places(entries: NDArray[Any], sparse: Sparse, name: str) -> Places:
    state = entries >> np.uint64(60)
    # 60 bits; the low 12 are stored above the others.
    grain = ((entries >> np.uint64(48)) & np.uint64(0xFFF)) | ((entries & np.uint64(0xFFFF_FFFF_FFFF)) << np.uint64(12))
    wrong = (state > _SE_GRAIN) | ((state == _SE_ABSENT) & (entries != 0)) | ((state == _SE_GRAIN) & (grain >= 1 << 40))
    if wrong.any():
        raise MalformedArchive(f"{name}: {int(entries[np.flatnonzero(wrong)[0]]):#x} in a grain table")
    places = np.where(state == _SE_GRAIN, sparse.grains_at + grain.astype(np.int64) * sparse.grain_bytes, ZERO)
    places[state == _SE_ABSENT] = PARENT
    return places


_PLACES: dict[Kind, Callable[[NDArray[Any], Sparse, str], Places]] = {
    "hosted": _hosted_places,
    "cowd": _hosted_places,
    "sesparse": _se_places,
}


# ── by the markers of a stream ───────────────────────────────────────────────────────────────────────────────────────


class Walked:
    """The places by a stream's markers, which are read once from its first grain to its end: for streams without their
    directory.

    A stream without its end-of-stream marker was cut off, which is refused: missing data must not become zeros.
    """

    def __init__(self, over: DiskReader, sparse: Sparse, name: str) -> None:
        grains, sectors = array("I"), array("I")
        for grain, sector in _walk(over, sparse, name):
            if len(grains) >= _WALKED_GRAINS_MAX:
                raise UnsupportedFormat(f"{name} has no grain directory, and more than {_WALKED_GRAINS_MAX} grains")
            grains.append(grain)
            sectors.append(sector)
        numbers = np.frombuffer(grains, np.uint32)
        order = np.argsort(numbers, kind="stable")
        self._grains, self._sectors = numbers[order], np.frombuffer(sectors, np.uint32)[order]
        twice = np.flatnonzero(self._grains[1:] == self._grains[:-1])
        if len(twice):
            raise MalformedArchive(f"{name}: grain {self._grains[twice[0]]} is in the stream twice")

    def empty(self, first: int, count: int) -> bool:
        start, end = np.searchsorted(self._grains, np.array((first, first + count), np.uint32))
        return bool(start == end)

    def places(self, first: int, count: int) -> Places:
        """The places of `count` grains from grain `first` on."""
        start, end = np.searchsorted(self._grains, np.array((first, first + count), np.uint32))
        places = np.full(count, PARENT, np.int64)
        places[self._grains[start:end].astype(np.int64) - first] = self._sectors[start:end].astype(np.int64) * SECTOR
        return places


def _walk(over: DiskReader, sparse: Sparse, name: str) -> Iterator[tuple[int, int]]:
    """(grain, the file's sector where its record begins), in the order of the file."""
    text_at, text_length = sparse.descriptor
    at = max(sparse.overhead, text_at + text_length, SECTOR)
    buffer, start, held = bytearray(_WALK_READ_BYTES), 0, 0
    while at + SECTOR <= over.size:
        if not start <= at <= start + held - SECTOR:
            start, held = at, min(len(buffer), over.size - at)
            over.read_into(start, memoryview(buffer)[:held])
        value, size, kind = MARKER.unpack_from(buffer, at - start)
        if size:
            yield _grain_number(value, sparse, at, name), at // SECTOR
            at += -(-(RECORD.size + size) // SECTOR) * SECTOR
        elif kind == Marker.END:
            return
        elif kind in (Marker.TABLE, Marker.DIRECTORY, Marker.FOOTER):
            at += SECTOR + value * SECTOR
        else:
            raise MalformedArchive(f"{name}: a marker of unknown type {kind} at {at}")
    raise cut_off(name, "end-of-stream marker", at, at + SECTOR, over.size)


def _grain_number(sector: int, sparse: Sparse, at: int, name: str) -> int:
    grain, rest = divmod(sector * SECTOR, sparse.grain_bytes)
    if rest or grain >= sparse.grains:
        raise MalformedArchive(f"{name}: the marker at {at} is of sector {sector}, which begins no grain of the disk")
    return grain
