"""The table entries of a sparse VMDK extent, a window of grains at a time.

They are read from its tables, or made from the markers of a stream.
"""

from array import array
from collections.abc import Iterator
from itertools import pairwise
from typing import Final, Protocol

from synvirt.blocks import DiskReader
from synvirt.disks.entries import Entries, entries_of
from synvirt.disks.vmdk.sparse import MARKER, RECORD, SECTOR, Marker, Sparse, cut_off, read_at
from synvirt.errors import MalformedArchive, UnsupportedFormat
from synvirt.sizes import MIB

# The number of entries in 64 hosted tables, or in 8 of the others.
WINDOW_GRAINS: Final = 32 << 10
# The walk over a stream keeps 8 bytes per grain: 1 TiB of disk in 128 MiB.
_WALKED_GRAINS_MAX: Final = 16 << 20
_WALK_READ_BYTES: Final = 4 * MIB
# Sectors of any file: 64 bits hold one, and a grain's number in its window.
_SECTOR_BITS: Final = 48
_SECTOR_MASK: Final = (1 << _SECTOR_BITS) - 1


class Source(Protocol):
    """Gives the table entries of a window's grains; `empty`: surely nothing there, known without reading."""

    def empty(self, window: int) -> bool: ...
    def entries(self, window: int) -> Entries: ...


# ── through directory and tables ─────────────────────────────────────────────────────────────────────────────────────


class Tables:
    """The directory, in memory; tables are read."""

    def __init__(self, over: DiskReader, sparse: Sparse, name: str) -> None:
        assert sparse.directory_at is not None
        self._over, self._sparse, self._name = over, sparse, name
        raw = read_at(over, sparse.directory_at, sparse.directory_bytes, name, "grain directory")
        self._directory = entries_of(raw, sparse.entry, "little")

    def empty(self, window: int) -> bool:
        return not any(self._named(*self._range(window)))

    def _range(self, window: int) -> tuple[int, int]:
        """The first grain of a window, and how many there are."""
        first = window * WINDOW_GRAINS
        return first, min(WINDOW_GRAINS, self._sparse.grains - first)

    def _named(self, first: int, count: int) -> Entries:
        """The directory's entries for `count` grains from grain `first` on."""
        each = self._sparse.table_entries
        return self._directory[first // each : -(-(first + count) // each)]

    def entries(self, window: int) -> Entries:
        first, count = self._range(window)
        each = self._sparse.table_entries
        table = first // each
        content = bytearray((-(-(first + count) // each) - table) * self._sparse.table_bytes)
        with memoryview(content) as view:
            for number, at, length in self._stretches(first, count):
                start = (number - table) * self._sparse.table_bytes
                self._over.read_into(at, view[start : start + length])
        skipped = first - table * each
        return entries_of(content, self._sparse.entry, "little")[skipped : skipped + count]

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
        entries = self._named(first, count)
        if self._sparse.kind != "sesparse":
            return [entry * SECTOR for entry in entries]
        for entry in entries:
            if entry and entry >> 32 != _SE_TABLE:
                raise MalformedArchive(f"{self._name}: {entry:#x} in its grain directory")
        return [self._sparse.tables_at + (entry & 0xFFFF_FFFF) * self._sparse.table_bytes if entry else 0 for entry in entries]


# The top half of a seSparse directory's entry.
_SE_TABLE: Final = 0x1000_0000


# ── by the markers of a stream ───────────────────────────────────────────────────────────────────────────────────────


class Walked:
    """The entries by a stream's markers, which are read once from its first grain to its end: for streams without their
    directory.

    A stream without its end-of-stream marker was cut off, which is refused: missing data must not become zeros.
    """

    def __init__(self, over: DiskReader, sparse: Sparse, name: str) -> None:
        self._grains = sparse.grains
        # Each grain's number in its window and its sector, as one number. A hosted extent has at most 64 Ki windows.
        self._windows: dict[int, Entries] = {}
        before, ascend = -1, True
        for count, (grain, sector) in enumerate(_walk(over, sparse, name)):
            if count >= _WALKED_GRAINS_MAX:
                raise UnsupportedFormat(f"{name} has no grain directory, and more than {_WALKED_GRAINS_MAX} grains")
            window, number = divmod(grain, WINDOW_GRAINS)
            if window not in self._windows:
                self._windows[window] = array("Q")
            self._windows[window].append(number << _SECTOR_BITS | sector)
            ascend = ascend and before < grain
            before = grain
        if not ascend:
            self._refuse_twice(name)

    def _refuse_twice(self, name: str) -> None:
        for window, records in self._windows.items():
            numbers = sorted(record >> _SECTOR_BITS for record in records)
            for number, following in pairwise(numbers):
                if number == following:
                    raise MalformedArchive(f"{name}: grain {window * WINDOW_GRAINS + number} is in the stream twice")

    def empty(self, window: int) -> bool:
        return window not in self._windows

    def entries(self, window: int) -> Entries:
        entries = array("Q", bytes(8 * min(WINDOW_GRAINS, self._grains - window * WINDOW_GRAINS)))
        for record in self._windows.get(window, ()):
            entries[record >> _SECTOR_BITS] = record & _SECTOR_MASK
        return entries


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
