"""Where the guest's bytes lie in a qcow2 image: QEMU's docs/interop/qcow2.txt, section «Cluster mapping».

    guest offset ─▶ L1 table ─▶ L2 table ─▶ cluster (or subcluster) of the file

A window is the part of the mapping that is read and kept at a time: 64 KiB of L2 entries, which is a part of a large L2 table,
or several small L2 tables together. It is kept as the file has it. The entries that a request needs become runs: `entries`.
"""

import os
from array import array
from collections.abc import Iterable, Iterator
from functools import partial
from itertools import chain, pairwise
from typing import Final, NamedTuple

from synvirt.blocks import DiskReader
from synvirt.disks.entries import WindowCache, entries_of
from synvirt.disks.qcow2.entries import BACKING, COMPRESSED, DATA, OFFSET_MASK, ZERO, Begin, Entries, Words
from synvirt.disks.qcow2.errors import read_for_guest
from synvirt.disks.qcow2.header import Header
from synvirt.disks.raw.holes import Holes
from synvirt.errors import MalformedArchive

_WINDOW_BYTES: Final = 64 << 10
_WORD_BYTES: Final = 8
_NO_WORDS = array("Q")
# 32 MiB, which map 256 GiB in clusters of 64 KiB, as QEMU's cache does.
WINDOWS_KEPT: Final = (32 << 20) // _WINDOW_BYTES


class Run(NamedTuple):
    """Guest bytes `start` to `end`. `host`: their offset in the data file, where they are plain (DATA)."""

    start: int
    end: int
    kind: int
    host: int


class _Geometry(NamedTuple):
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

    def __init__(self, over: DiskReader, header: Header, name: str, cache: WindowCache[Words]) -> None:
        self._over, self._header, self._name, self._cache = over, header, name, cache
        self._geometry = _Geometry(header.cluster_size, header.l2_entry_bytes)
        self._entries = Entries(header, name)
        self._l1 = _l1_table(over, header, name)

    def runs(self, offset: int, length: int) -> Iterator[Run]:
        """The runs of `length` bytes from `offset`, ascending, without a gap, cut to exactly that range."""
        guest_bytes = self._geometry.guest_bytes
        at, end = offset, offset + length
        while at < end:
            index = at // guest_bytes
            window_end = min(end, (index + 1) * guest_bytes)
            yield from self._runs(index, at, window_end)
            at = window_end

    def all_runs(self) -> Iterator[Run]:
        """The runs of the whole disk; lazy, and as fast over unmapped parts as `spans`."""
        for start, end, index in self._windows():
            if index is None:
                yield Run(start, end, BACKING, 0)
            else:
                yield from self._runs(index, start, end)

    def _runs(self, index: int, start: int, end: int) -> Iterator[Run]:
        """The same within a window."""
        for (at, kind, host), (following, _, _) in pairwise(chain(self._begins(index, start, end), ((end, BACKING, 0),))):
            if following > start:
                skip = max(0, start - at)
                yield Run(at + skip, following, kind, host + skip)

    def clusters(self, run: Run) -> tuple[Words, int]:
        """The L2 entries of a run of compressed clusters, and the guest's offset where the first cluster begins."""
        words, guest = self._words(run.start // self._geometry.guest_bytes, run.start, run.end)
        return words[:: self._header.l2_entry_bytes // _WORD_BYTES], guest

    def spans(self, holes: Holes) -> Iterator[tuple[int, int, int]]:
        """The whole disk as (start, end, kind): like runs, but compressed clusters are DATA, ranges in `holes` of the data file
        are ZERO, and neighbours are joined.

        Lazy, window by window; parts without an L2 table are skipped at once.
        """
        for start, end, index in self._windows():
            at, held = start, BACKING
            if index is not None:
                begins = self._begins(index, start, end)
                for begin, kind in _cut_at_holes(begins, end, holes) if holes else _kinds(begins):
                    if kind != held:
                        if at < begin:
                            yield at, begin, held
                        at, held = begin, kind
            yield at, end, held

    def _windows(self) -> Iterator[tuple[int, int, int | None]]:
        """The whole disk as windows, (start, end, index), and as gaps of the greatest length, where the index is None."""
        at = 0
        for index in self._mapped_windows():
            start = index * self._geometry.guest_bytes
            if at < start:
                yield at, start, None
            at = min(start + self._geometry.guest_bytes, self._header.size)
            yield start, at, index
        if at < self._header.size:
            yield at, self._header.size, None

    def _mapped_windows(self) -> Iterator[int]:
        geometry = self._geometry
        count = -(-self._header.size // geometry.guest_bytes)
        following = 0
        for index, table in enumerate(self._l1):
            if table:
                first = index // geometry.tables_a_window * geometry.windows_a_table
                for window in range(max(first, following), min(first + geometry.windows_a_table, count)):
                    yield window
                    following = window + 1

    def _begins(self, index: int, start: int, end: int) -> Iterator[Begin]:
        """The beginnings of the runs from `start` to `end`, both in one window; the first may lie earlier in its cluster."""
        words, guest = self._words(index, start, end)
        return self._entries.begins(words, guest, end) if words else iter(((start, BACKING, 0),))

    def _words(self, index: int, start: int, end: int) -> tuple[Words, int]:
        """The L2 entries of the clusters from `start` to `end` in one window, none where there is no table; and where the first
        cluster begins."""
        window = self._window(index)
        cluster_size, words = self._header.cluster_size, self._header.l2_entry_bytes // _WORD_BYTES
        guest = index * self._geometry.guest_bytes
        first, last = (start - guest) // cluster_size, -(-(end - guest) // cluster_size)
        return window[first * words : last * words] if window is not None else _NO_WORDS, guest + first * cluster_size

    def _window(self, index: int) -> "Words | None":
        """None, where there is no L2 table."""
        geometry = self._geometry
        first = index // geometry.windows_a_table * geometry.tables_a_window
        tables = self._l1[first : first + geometry.tables_a_window]
        if not any(tables):
            return None
        return self._cache.get(self, index, partial(self._read, index, tables))

    def _read(self, index: int, tables: Words) -> Words:
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
        return entries_of(raw, "Q", "big")


def _l1_table(over: DiskReader, header: Header, name: str) -> Words:
    """The L2 tables' offsets, 0 for none; aligned, in the file, each only once, and not over header or L1 table."""
    raw = bytearray(header.l1_entries_needed * 8)
    over.read_into(header.l1_offset, memoryview(raw))
    tables = entries_of(raw, "Q", "big")
    cluster_size, l1_end = header.cluster_size, header.l1_offset + len(raw)
    previous, ascending = 0, True
    for index, entry in enumerate(tables):
        table = tables[index] = entry & OFFSET_MASK
        if not table:
            continue
        wrong = None
        if table % cluster_size:
            wrong = "lies on no cluster's boundary"
        elif table + cluster_size > over.size:
            wrong = f"lies outside the file of {over.size} bytes"
        elif table < l1_end and table + cluster_size > header.l1_offset:
            wrong = "lies over the L1 table"
        if wrong is not None:
            raise MalformedArchive(
                f"{name}: the L2 table at {table}, for guest offset {index * cluster_size * header.l2_entries}, {wrong}",
                hint="If the file was copied or uploaded, it may have been cut off: compare its size with the original's.",
            )
        ascending = ascending and table > previous
        previous = table
    # No program writes shared tables. If they were allowed, a small file could become any amount of data.
    if not ascending and _any_twice(tables, header.cluster_bits):
        raise MalformedArchive(f"{name}: two entries of the L1 table point to one L2 table")
    return tables


def _any_twice(tables: Words, cluster_bits: int) -> bool:
    """For tables in disorder. Their clusters' numbers go into many small sets, which a processor's cache holds: for the longest
    L1 table (4 Mi entries, of a disk with clusters of 512 bytes) that takes half a second; a sort, or one set, takes three."""
    # Drawn, so that no image can be made whose numbers are all in one set.
    count = 256 + os.urandom(1)[0] | 1
    numbers = [array("Q") for _ in range(count)]
    put = [one.append for one in numbers]
    for table in tables:
        if table:
            number = table >> cluster_bits
            put[number % count](number)
    return any(len(set(one)) < len(one) for one in numbers)


def _kinds(begins: Iterable[Begin]) -> Iterator[tuple[int, int]]:
    """The start of each run, and whether it is BACKING, ZERO or DATA."""
    for at, kind, _ in begins:
        yield at, DATA if kind == COMPRESSED else kind


def _cut_at_holes(begins: Iterable[Begin], end: int, holes: Holes) -> Iterator[tuple[int, int]]:
    """The same of runs up to `end`; those that are partly in holes are cut there."""
    for (start, kind, host), (following, _, _) in pairwise(chain(begins, ((end, BACKING, 0),))):
        if kind == DATA:
            host_end = host + following - start
            covered = holes.cover(host, host_end)
            if covered is None:
                for at, hole in holes.split(host, host_end):
                    yield start + at - host, ZERO if hole else DATA
            else:
                yield start, ZERO if covered else DATA
        else:
            yield start, DATA if kind == COMPRESSED else kind
