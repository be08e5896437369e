"""Inflates compressed grains, the form of every OVA: Virtual Disk Format 1.1, «Stream-Optimized Compressed Sparse Extents».

One call reads contiguous grains into a buffer that each thread keeps. From there they are inflated into the caller's buffer,
without the interpreter's lock. So threads inflate on as many cores, and Python needs few microseconds per grain.
"""

from collections.abc import Iterator, Sequence
from typing import Final, TypeAlias

from synvirt.blocks import DiskReader, Extent
from synvirt.disks.packed import Damaged
from synvirt.disks.packed.batches import Batches, Stream
from synvirt.disks.packed.inflate import inflate_each_zlib
from synvirt.disks.vmdk.grains import GrainMap
from synvirt.disks.vmdk.sparse import RECORD, SECTOR, record_bytes_max
from synvirt.errors import DiskReadFailed
from synvirt.sizes import MIB

# The size of one read: mostly the grains of a request of copy().
_BATCH_BYTES: Final = 4 * MIB
# The last grain of a read ends where the next begins: how far to look for that, instead of reading the longest possible.
_LOOKED_AHEAD: Final = 16


# (place, end, at): where a grain's record begins in the file, where it surely has ended, and the grain's offset in the disk. A
# plain tuple, as a disk has millions.
_Wanted: TypeAlias = tuple[int, int, int]


class Inflated:
    """A disk's address space; only ranges with grains may be read."""

    def __init__(self, over: DiskReader, grains: GrainMap, name: str) -> None:
        self.size, self.max_readers = grains.size, over.max_readers
        self._over, self._grains, self._name = over, grains, name
        self._unpacking = Batches(inflate_each_zlib)

    def extents(self) -> Iterator[Extent]:
        yield Extent(0, self.size)

    def read_into(self, offset: int, buffer: memoryview) -> None:
        for batch in _batches(self._wanted(offset, offset + len(buffer))):
            start, end = batch[0][0], batch[-1][1]
            records = self._unpacking.buffer("records", max(end - start, _BATCH_BYTES))[: end - start]
            self._over.read_into(start, records)
            streams = [self._stream(records, wanted, start, offset) for wanted in batch]
            try:
                self._unpacking.unpack(records, streams, buffer)
            except Damaged as error:
                raise self._damaged(next(each for each in batch if each[2] == offset + error.at), str(error)) from error

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
                wanted.append((place, following if place < following < end_max else end_max, number * grain_bytes))
            following = place or following
        wanted.reverse()
        return wanted

    def _stream(self, records: memoryview, wanted: _Wanted, start: int, offset: int) -> Stream:
        """The grain's stream in the file's bytes from `start` on, for a buffer from `offset` of the disk on."""
        place, end, at = wanted
        sector, size = RECORD.unpack_from(records, place - start)
        if sector * SECTOR != at:
            raise self._damaged(wanted, f"its marker is of sector {sector}")
        if not 0 < size <= end - place - RECORD.size:
            raise self._damaged(wanted, f"its marker announces {size} bytes, which do not fit")
        return place - start + RECORD.size, size, at - offset, min(self._grains.grain_bytes, self.size - at)

    def _damaged(self, wanted: _Wanted, why: str) -> DiskReadFailed:
        return DiskReadFailed(
            f"its grain for offset {wanted[2]}, compressed at {wanted[0]} of the file, is damaged: {why}",
            hint="Compare the file's checksum with the original's, and copy it again.",
        )

    def close(self) -> None:
        self._over.close()


def _batches(wanted: Sequence[_Wanted]) -> Iterator[list[_Wanted]]:
    """Grains with ascending records, in groups for one call."""
    batch: list[_Wanted] = []
    for each in wanted:
        place, end, _ = each
        if batch and not (batch[-1][1] == place and end - batch[0][0] <= _BATCH_BYTES):
            yield batch
            batch = []
        batch.append(each)
    if batch:
        yield batch
