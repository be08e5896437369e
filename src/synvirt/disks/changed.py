"""A delta as a reader: the areas of another disk that a platform's change tracking lists.

vSphere's QueryChangedDiskAreas, Nutanix's changed regions and XenServer's changed blocks all give such a list.
"""

from collections.abc import Iterable, Iterator
from typing import Final

from synvirt.blocks import DiskReader, Extent
from synvirt.errors import MalformedArchive

# A pass's order contains each area, in some 20 bytes. If every second block of a disk changed, neighbouring areas are joined.
AREAS_MAX: Final = 1 << 17


class Over:
    """The common part of readers that have other extents than the disk under them, and read its bytes."""

    def __init__(self, over: DiskReader) -> None:
        self._over = over

    @property
    def size(self) -> int:
        return self._over.size

    @property
    def max_readers(self) -> int:
        return self._over.max_readers

    def read_into(self, offset: int, buffer: memoryview) -> None:
        self._over.read_into(offset, buffer)

    def close(self) -> None:
        self._over.close()


class ChangedReader(Over):
    """`over`, with only the extents of `areas` (start, length). Areas may touch, overlap and come in any order, as platforms
    list them; beyond the disk's end is an error. `read_into` reads anywhere."""

    def __init__(self, over: DiskReader, areas: Iterable[tuple[int, int]]) -> None:
        super().__init__(over)
        self._areas = tuple(_joined(areas, over.size))

    def extents(self) -> Iterator[Extent]:
        """Known zeros of the disk in an area stay zeros. Both lists ascend, so one walk merges them."""
        beneath = self._over.extents()
        extent = next(beneath, None)
        for start, end in self._areas:
            while extent is not None and extent.end <= start:
                extent = next(beneath, None)
            while extent is not None and extent.start < end:
                yield Extent(max(start, extent.start), min(end, extent.end) - max(start, extent.start), extent.zero)
                if extent.end > end:
                    break
                extent = next(beneath, None)


class AllocatedReader(Over):
    """`over`, with zeros outside of `areas` (start, length). `read_into` reads the real bytes, to check the platform."""

    def __init__(self, over: DiskReader, areas: Iterable[tuple[int, int]]) -> None:
        super().__init__(over)
        self._areas = tuple(_joined(areas, over.size))

    def extents(self) -> Iterator[Extent]:
        at = 0
        for start, end in self._areas:
            if start > at:
                yield Extent(at, start - at, zero=True)
            yield Extent(start, end - start)
            at = end
        if at < self.size:
            yield Extent(at, self.size - at, zero=True)


class UnchangedReader(Over):
    """The parts that the extents of `over` leave out. Zeros there are not known."""

    def extents(self) -> Iterator[Extent]:
        at = 0
        for extent in self._over.extents():
            if extent.start > at:
                yield Extent(at, extent.start - at)
            at = extent.end
        if at < self.size:
            yield Extent(at, self.size - at)


def coarser(areas: list[tuple[int, int]], most: int) -> tuple[tuple[int, int], ...]:
    """The same bytes; with more areas than `most`, also the gaps between near ones: reading too much does no harm."""
    gap = 0
    joined = sorted(areas)
    while len(joined) > most:
        gap = max(2 * gap, 65536)
        wider: list[tuple[int, int]] = []
        for start, length in joined:
            last_start, last_length = wider[-1] if wider else (start, 0)
            if wider and start <= last_start + last_length + gap:
                wider[-1] = (last_start, max(last_length, start + length - last_start))
            else:
                wider.append((start, length))
        joined = wider
    return tuple(joined)


def _joined(areas: Iterable[tuple[int, int]], size: int) -> Iterator[tuple[int, int]]:
    start = end = 0
    for area_start, length in sorted(areas):
        if area_start < 0 or length < 0 or area_start + length > size:
            raise MalformedArchive(f"changed area at {area_start}, {length} bytes, leaves the disk of {size} bytes")
        if area_start > end:
            if end > start:
                yield start, end
            start = area_start
        end = max(end, area_start + length)
    if end > start:
        yield start, end
