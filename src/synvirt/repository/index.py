"""The place of each chunk and page of a repository, in 16 bytes of memory each.

    name ─▶ its first 8 bytes ─▶ sorted arrays ─▶ (pack, number) … ─▶ that pack's footer ─▶ the entry of this very name

A name may be in several packs. New entries go into a dictionary, and into the arrays when there are many.
"""

import threading
from bisect import bisect_left
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from synvirt.repository import packs
from synvirt.repository.folder import Folder
from synvirt.repository.footers import Footers
from synvirt.repository.keys import NAME_BYTES

# The first 8 bytes of a name are a number in memory's byte order; the rest of an entry is not read here.
_PREFIXES = np.dtype([("prefix", "<u8"), ("rest", f"V{packs.ENTRY_BYTES - 8}")])
_PREFIX_BYTES = 8
_NAMES = np.dtype([("prefix", "<u8"), ("rest", f"V{NAME_BYTES - 8}")])
# A place is the pack's number, with the entry's number in the lowest bits.
_NUMBER_BITS = 16
_RECENT_MAX = 1 << 16

Words = NDArray[np.uint64]
_NO_WORDS: Words = np.empty(0, np.uint64)


@dataclass(frozen=True, slots=True)
class Place:
    """`number`: the entry's, in its pack's footer."""

    pack: str
    number: int
    entry: packs.Entry


def prefixes_of(names: bytes) -> Words:
    """The first 8 bytes of each of these joined names, as numbers."""
    found: Words = np.frombuffer(names, _NAMES)["prefix"]
    return found


class Index:
    """Safe from several threads."""

    def __init__(self, folder: Folder, cache: Path | None = None) -> None:
        self._footers = Footers(folder, cache)
        self._lock = threading.RLock()
        self._clear()

    def _clear(self) -> None:
        self._packs: list[str] = []
        self._sizes: dict[str, int] = {}
        self._set(_NO_WORDS, _NO_WORDS)
        self._recent: dict[int, tuple[int, ...]] = {}
        # Whether the arrays name packs that no longer exist.
        self._has_gone = False

    def sizes(self) -> dict[str, int]:
        """The sizes of the known packs."""
        with self._lock:
            return dict(self._sizes)

    def update(self, there: dict[str, int]) -> dict[str, str]:
        """Sets the known packs to exactly these. Gives the damaged ones of them, and why."""
        unreadable: dict[str, str] = {}
        with self._lock:
            for pack in [pack for pack, size_bytes in self._sizes.items() if there.get(pack) != size_bytes]:
                self._footers.forget(pack)
                del self._sizes[pack]
                self._has_gone = True
            new = {pack: size for pack, size in there.items() if pack not in self._sizes}
            prefixes, counts = bytearray(), dict[str, int]()
            for pack, footer in self._footers.all(new, unreadable):
                words = np.frombuffer(footer, _PREFIXES)["prefix"]
                prefixes += words.tobytes()
                counts[pack] = len(words)
            # Only once all are read, as the place may be away meanwhile: a pack that is known is never read again.
            places = bytearray()
            for pack, count in counts.items():
                places += self._numbered(pack, there[pack], count).tobytes()
            if prefixes:
                self._merge(prefixes, places)
        return unreadable

    def add(self, pack: str, size_bytes: int, tail: bytes) -> None:
        """Adds a pack that was just written; `tail` as in the pack."""
        with self._lock:
            if pack in self._sizes:
                return
            self._footers.keep(pack, size_bytes, tail)
            words = np.frombuffer(packs.footer_of(pack, size_bytes, tail), _PREFIXES)["prefix"].tolist()
            for prefix, place in zip(words, self._numbered(pack, size_bytes, len(words)).tolist(), strict=True):
                self._recent[prefix] = (*self._recent.get(prefix, ()), place)
            if len(self._recent) >= _RECENT_MAX:
                self._merge(bytearray(), bytearray())

    def _numbered(self, pack: str, size_bytes: int, count: int) -> Words:
        first = len(self._packs) << _NUMBER_BITS
        self._packs.append(pack)
        self._sizes[pack] = size_bytes
        return np.arange(first, first + count, dtype=np.uint64)

    def _merge(self, prefixes: bytearray, places: bytearray) -> None:
        """Merges these and the recent entries into the arrays. Arrays are freed as early as possible: for a large repository
        they are most of our memory."""
        recent = [(prefix, place) for prefix, many in self._recent.items() for place in many]
        prefixes += self._prefixes.tobytes() + np.array([prefix for prefix, _ in recent], np.uint64).tobytes()
        places += self._places.tobytes() + np.array([place for _, place in recent], np.uint64).tobytes()
        self._recent = {}
        self._set(_NO_WORDS, _NO_WORDS)
        joined = np.frombuffer(prefixes, np.uint64)
        order = np.argsort(joined)
        self._set(joined[order], np.frombuffer(places, np.uint64)[order])

    def _set(self, prefixes: Words, places: Words) -> None:
        self._prefixes, self._places, self._sorted = prefixes, places, memoryview(prefixes.data)

    def places(self, name: bytes) -> Iterator[Place]:
        """RepositoryDamaged, where a footer that existed is missing."""
        prefix = int.from_bytes(name[:_PREFIX_BYTES], "little")
        with self._lock:
            found = list(self._recent.get(prefix, ()))
            at = bisect_left(self._sorted, prefix)
            while at < len(self._sorted) and self._sorted[at] == prefix:
                found.append(int(self._places[at]))
                at += 1
            candidates = [self._place(place) for place in found if self._packs[place >> _NUMBER_BITS] in self._sizes]
        return (place for place in candidates if place.entry.name == name)

    def _place(self, place: int) -> Place:
        pack, number = self._packs[place >> _NUMBER_BITS], place & ((1 << _NUMBER_BITS) - 1)
        return Place(pack, number, packs.entry_of(self._footers.of(pack, self._sizes[pack]), number))

    def entries(self, pack: str) -> list[packs.Entry]:
        """The entries of a known pack."""
        with self._lock:
            return packs.entries_of(self._footers.of(pack, self._sizes[pack]))

    def lacking(self, names: bytes) -> list[int]:
        """The numbers of those of these joined names that are in no pack (by their first 8 bytes); zeros are left out."""
        prefixes = prefixes_of(names)
        with self._lock:
            if self._has_gone:
                sizes = self._sizes
                self._clear()
                self.update(sizes)
            elif self._recent:
                self._merge(bytearray(), bytearray())
            at = np.searchsorted(self._prefixes, prefixes)
            known = np.zeros(len(prefixes), bool)
            inside = at < len(self._prefixes)
            known[inside] = self._prefixes[at[inside]] == prefixes[inside]
        none = prefixes == 0  # a name that begins with 8 zero bytes and is not NONE: one in 2^64
        return np.flatnonzero(~known & ~none).tolist()

    def doubles(self) -> set[bytes]:
        """The names with several places."""
        with self._lock:
            self.lacking(b"")  # the arrays are complete after that
            same = np.flatnonzero(self._prefixes[1:] == self._prefixes[:-1])
            return {self._place(int(self._places[at])).entry.name for at in (*same.tolist(), *(same + 1).tolist())}

    def close(self) -> None:
        """Closes the copies of the footers."""
        with self._lock:
            self._footers.close()
