"""Where a reader's bytes lie in files, for ranges in any order: it turns an image's mapping into places of the disk."""

from bisect import bisect_left, bisect_right
from collections.abc import Iterator
from itertools import islice

from synvirt.blocks import DiskReader, Place, Placed

# Some 100 bytes each. A file in more pieces is copied from there on, instead of shared.
_PLACES_MAX = 65536


class FilePlaces:
    """The places of one reader; none, where its bytes do not lie unchanged in a file."""

    def __init__(self, reader: DiskReader | None) -> None:
        placed: Iterator[Place] = reader.places() if isinstance(reader, Placed) else iter(())
        self._places = list(islice(placed, _PLACES_MAX))
        self._starts = [place.start for place in self._places]

    def between(self, start: int, end: int, at: int) -> Iterator[Place]:
        """Where the reader's bytes from start to end lie in a file, for the disk's bytes from `at` on."""
        for number in range(max(0, bisect_right(self._starts, start) - 1), bisect_left(self._starts, end)):
            place = self._places[number]
            first, last = max(start, place.start), min(end, place.start + place.length)
            if first < last:
                yield Place(at + first - start, last - first, place.descriptor, place.at + first - place.start)
