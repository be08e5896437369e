"""Inflates compressed grains, the form of every OVA: Virtual Disk Format 1.1, «Stream-Optimized Compressed Sparse Extents».

One call reads contiguous grains into a buffer that each thread keeps. From there they are inflated into the caller's buffer,
without the interpreter's lock. So threads inflate on as many cores, and Python needs microseconds per grain.
"""

import threading
from collections.abc import Iterator, Sequence
from typing import Final, NamedTuple

from synvirt.blocks import DiskReader, Extent, new_buffer
from synvirt.disks.packed import Damaged
from synvirt.disks.packed.inflate import inflate_zlib
from synvirt.disks.vmdk.grains import GrainMap
from synvirt.disks.vmdk.sparse import RECORD, SECTOR, record_bytes_max
from synvirt.errors import DiskReadFailed
from synvirt.sizes import MIB

# The size of one read: mostly the grains of a request of copy().
_BATCH_BYTES: Final = 4 * MIB
# The last grain of a read ends where the next begins: how far to look for that, instead of reading the longest possible.
_LOOKED_AHEAD: Final = 16


class _Wanted(NamedTuple):
    """A grain's number, the start of its record, and an offset before which it surely ends."""

    grain: int
    place: int
    end: int


class Inflated:
    """A disk's address space; only ranges with grains may be read."""

    def __init__(self, over: DiskReader, grains: GrainMap, name: str) -> None:
        self.size, self.max_readers = grains.size, over.max_readers
        self._over, self._grains, self._name = over, grains, name
        self._own = threading.local()

    def extents(self) -> Iterator[Extent]:
        yield Extent(0, self.size)

    def read_into(self, offset: int, buffer: memoryview) -> None:
        end = offset + len(buffer)
        grain_bytes = self._grains.grain_bytes
        for batch in _batches(self._wanted(offset, end)):
            start = batch[0].place
            records = self._kept("records", max(batch[-1].end - start, _BATCH_BYTES))[: batch[-1].end - start]
            self._over.read_into(start, records)
            for wanted in batch:
                record = records[wanted.place - start : wanted.end - start]
                grain_at = wanted.grain * grain_bytes
                length = min(grain_bytes, self.size - grain_at)
                if grain_at >= offset and grain_at + length <= end:
                    self._inflate(wanted, record, buffer[grain_at - offset : grain_at - offset + length])
                    continue
                whole = self._kept("grain", grain_bytes)[:length]
                self._inflate(wanted, record, whole)
                begin = max(offset, grain_at)
                part = whole[begin - grain_at : end - grain_at]
                buffer[begin - offset : begin - offset + len(part)] = part

    def _wanted(self, offset: int, end: int) -> list[_Wanted]:
        grain_bytes, file_bytes = self._grains.grain_bytes, self._over.size
        first, last = offset // grain_bytes, -(-end // grain_bytes)
        sectors = self._grains.sectors(first, min(last + _LOOKED_AHEAD, -(-self.size // grain_bytes)))
        longest = record_bytes_max(grain_bytes)
        wanted: list[_Wanted] = []
        following = file_bytes
        for number in range(first + len(sectors) - 1, first - 1, -1):
            place = sectors[number - first] * SECTOR
            if number < last:
                if not place:
                    raise DiskReadFailed(f"{self._name} has no grain for offset {number * grain_bytes}")
                end_max = min(place + longest, file_bytes)
                wanted.append(_Wanted(number, place, following if place < following < end_max else end_max))
            following = place or following
        wanted.reverse()
        return wanted

    def _inflate(self, wanted: _Wanted, record: memoryview, into: memoryview) -> None:
        sector, size = RECORD.unpack_from(record)
        if sector * SECTOR != wanted.grain * self._grains.grain_bytes:
            raise self._damaged(wanted, f"its marker is of sector {sector}")
        if not 0 < size <= len(record) - RECORD.size:
            raise self._damaged(wanted, f"its marker announces {size} bytes, which do not fit")
        try:
            filled = inflate_zlib(record[RECORD.size : RECORD.size + size], into)
        except Damaged as error:
            raise self._damaged(wanted, str(error)) from error
        if filled < len(into):
            raise self._damaged(wanted, f"it inflates to {filled} bytes, not {len(into)}")

    def _damaged(self, wanted: _Wanted, why: str) -> DiskReadFailed:
        return DiskReadFailed(
            f"its grain for offset {wanted.grain * self._grains.grain_bytes}, compressed at {wanted.place} of the file, is"
            f" damaged: {why}",
            hint="Compare the file's checksum with the original's, and copy it again.",
        )

    def _kept(self, what: str, length: int) -> memoryview:
        """A buffer of this thread, which is kept: new memory for each read would cost as much as reading."""
        held: memoryview | None = getattr(self._own, what, None)
        if held is None or len(held) < length:
            held = new_buffer(length)
            setattr(self._own, what, held)
        return held[:length]

    def close(self) -> None:
        self._over.close()


def _batches(wanted: Sequence[_Wanted]) -> Iterator[list[_Wanted]]:
    """Grains with ascending records, in groups for one call."""
    batch: list[_Wanted] = []
    for grain in wanted:
        if batch and not (batch[-1].end == grain.place and grain.end - batch[0].place <= _BATCH_BYTES):
            yield batch
            batch = []
        batch.append(grain)
    if batch:
        yield batch
