"""A streamOptimized VMDK that comes once and from front to back: Virtual Disk Format 1.1, «Stream-Optimized Compressed Sparse
Extents».

    header, descriptor │ marker, grain │ marker, grain │ … │ marker, table │ … │ footer │ end-of-stream marker

Hosts export grains in ascending order. The directory comes last. So a gap between two grains is known to be zeros only when the
later one has come, and the rest behind the last grain only at the end-of-stream marker: a cut stream never reads as zeros.
"""

from collections.abc import Callable
from typing import Final, NamedTuple

from synvirt.disks.packed import Damaged
from synvirt.disks.packed.inflate import inflate_zlib
from synvirt.disks.vmdk.sparse import MARKER, RECORD, SECTOR, Marker, record_bytes_max, stream_header
from synvirt.errors import DiskReadFailed, MalformedArchive
from synvirt.sizes import MIB

# Fills the whole buffer with the next bytes, or raises.
Fill = Callable[[memoryview], None]

# The part before the grains: mostly 64 KiB, with the empty directory of a large disk a few MiB.
_OVERHEAD_BYTES_MAX: Final = 64 * MIB
# The most behind one marker: the directory of 62 TiB takes 8 MiB.
_SKIPPED_BYTES_MAX: Final = 64 * MIB


class _Grain(NamedTuple):
    """It begins at `start` of the disk and covers `length` bytes of it; its record has `packed` bytes of deflate."""

    start: int
    length: int
    packed: int

    @property
    def end(self) -> int:
        return self.start + self.length


class VmdkFlow:
    """Reads ascend, and each byte is read at most once; skipped grains are not inflated."""

    def __init__(self, fill: Fill, name: str) -> None:
        """MalformedArchive, UnsupportedFormat; what `fill` raises."""
        self._fill, self._name = fill, name
        sector = memoryview(bytearray(SECTOR))
        fill(sector)
        sparse = stream_header(sector, name)
        overhead = max(sparse.overhead, sum(sparse.descriptor), SECTOR)
        if overhead > _OVERHEAD_BYTES_MAX:
            raise MalformedArchive(f"{name}: {overhead} bytes before its first grain; VMware's streams have 65536")
        self.size, self._grain_bytes = sparse.size, sparse.grain_bytes
        self._record = memoryview(bytearray(-(-record_bytes_max(self._grain_bytes) // SECTOR) * SECTOR))
        self._whole = memoryview(bytearray(self._grain_bytes))
        # The grain whose record is in memory, and whether `_whole` has it inflated; all before `_at` was read.
        self._held: _Grain | None = None
        self._inflated = self._ended = False
        self._at = 0
        self._skip(overhead - SECTOR)

    def read_into(self, offset: int, buffer: memoryview) -> None:
        """DiskReadFailed, MalformedArchive; errors of `fill`."""
        if offset < self._at:
            raise DiskReadFailed(f"{self._name}: offset {offset} was passed already, at {self._at} of a stream")
        at, end = offset, offset + len(buffer)
        while at < end:
            grain = self._grain_behind(at)
            if grain is None or grain.start >= end:
                buffer[at - offset :] = bytes(end - at)
                break
            if grain.start > at:
                buffer[at - offset : grain.start - offset] = bytes(grain.start - at)
                at = grain.start
            stop = min(grain.end, end)
            self._take(grain, at, buffer[at - offset : stop - offset])
            at = stop
        self._at = end

    def _take(self, grain: _Grain, at: int, into: memoryview) -> None:
        if not self._inflated:
            if len(into) == grain.length:
                self._inflate(grain, into)
                return
            self._inflate(grain, self._whole[: grain.length])
            self._inflated = True
        into[:] = self._whole[at - grain.start : at - grain.start + len(into)]

    def _inflate(self, grain: _Grain, into: memoryview) -> None:
        try:
            filled = inflate_zlib(self._record[RECORD.size : RECORD.size + grain.packed], into)
        except Damaged as error:
            raise DiskReadFailed(f"{self._name}: its grain for offset {grain.start} is damaged: {error}") from error
        if filled < grain.length:
            raise DiskReadFailed(f"{self._name}: its grain for offset {grain.start} is cut: {filled} of {grain.length} bytes")

    # ── markers ──────────────────────────────────────────────────────────────────────────────────────────────────────

    def _grain_behind(self, at: int) -> _Grain | None:
        """The first grain that ends behind `at`; None at the stream's end."""
        while not self._ended and (self._held is None or self._held.end <= at):
            self._next()
        return None if self._ended else self._held

    def _next(self) -> None:
        self._fill(self._record[:SECTOR])
        value, size, kind = MARKER.unpack_from(self._record)
        if size:
            self._next_grain(value * SECTOR, size)
        elif kind == Marker.END:
            self._ended = True
        elif kind in (Marker.TABLE, Marker.DIRECTORY, Marker.FOOTER) and value * SECTOR <= _SKIPPED_BYTES_MAX:
            self._skip(value * SECTOR)
        else:
            raise MalformedArchive(f"{self._name}: a marker of type {kind} and {value} sectors, which no stream has")

    def _next_grain(self, start: int, packed: int) -> None:
        if start % self._grain_bytes or start >= self.size:
            raise MalformedArchive(f"{self._name}: a marker of offset {start}, where no grain of the disk begins")
        if self._held is not None and start <= self._held.start:
            raise MalformedArchive(
                f"{self._name}: its grain for offset {start} comes after that for {self._held.start}; grains must ascend",
                hint="options.transport datastore or vddk reads the disk another way",
            )
        length = -(-(RECORD.size + packed) // SECTOR) * SECTOR
        if length > len(self._record):
            raise MalformedArchive(f"{self._name}: its grain for offset {start} takes {packed} bytes, more than it can")
        if length > SECTOR:
            self._fill(self._record[SECTOR:length])
        self._held = _Grain(start, min(self._grain_bytes, self.size - start), packed)
        self._inflated = False

    def _skip(self, length: int) -> None:
        while length > 0:
            part = min(length, len(self._record))
            self._fill(self._record[:part])
            length -= part
