"""What the table entries of a window of grains say: runs, checked.

    plain extent:      neighbours in the file are one run, and so are neighbours of which nothing is here
    compressed extent: the runs say only what is here, in the disk's offsets; `sectors` says where each grain's record begins

Where grains lie in order, whole parts of a table are compared as one long number. Elsewhere Python works once per entry, with
one comparison and one addition.
"""

import sys
from array import array
from collections.abc import Callable, Sequence
from functools import partial
from itertools import groupby
from typing import Final, NamedTuple

from synvirt.disks.blockmap import PARENT, ZERO
from synvirt.disks.entries import STRETCH, Entries, goes_on
from synvirt.disks.vmdk.sparse import RECORD, SECTOR, Sparse, cut_off
from synvirt.errors import MalformedArchive


class Window(NamedTuple):
    """`firsts`: the grain with which each run begins, counted from the window's first; at the end, the number of all grains.

    `places`: where each run lies (see `grains`). `held`: the number of grains in the file. `sectors`: of a compressed extent,
    the sector of each grain's record; 0: none.
    """

    firsts: Entries
    places: Sequence[int]
    held: int
    sectors: Entries


class Windows:
    """Makes the windows of an extent in a file of `file_bytes`."""

    def __init__(self, sparse: Sparse, file_bytes: int, name: str) -> None:
        self._sparse, self._file_bytes, self._name = sparse, file_bytes, name
        make, self._step = (_se_place, _SE_STEP) if sparse.kind == "sesparse" else (_hosted_place, sparse.grain_bytes // SECTOR)
        self._place = make(sparse, name)

    def window(self, first: int, entries: Entries) -> Window:
        """The window whose first grain is `first`; the entries are its own. MalformedArchive, where grains lie outside the file
        or overlap: shared grains would let a small file become any amount of data.
        """
        return self._compressed(first, entries) if self._sparse.compressed else self._plain(first, entries)

    # ── plain ────────────────────────────────────────────────────────────────────────────────────────────────────────

    def _plain(self, first: int, entries: Entries) -> Window:
        if self._sparse.kind == "sesparse":
            self._check_states(entries)
        firsts, places = self._joined(entries)
        return Window(firsts, places, self._check_plain(first, firsts, places), _NONE)

    def _check_states(self, entries: Entries) -> None:
        """Checks the state of every entry, because only the first of a run is decoded: counting on may reach a wrong state."""
        tops = entries.tobytes()[_SE_TOP::8]
        wrong = tops.translate(None, _SE_TOPS)
        if wrong:
            self._place(entries[tops.index(wrong[0])])

    def _joined(self, entries: Entries) -> tuple[Entries, "array[int]"]:
        """Where runs begin, and their places."""
        firsts, places = array("I"), array("q")
        place_of = self._place
        # A run's entries differ by `step`: by a grain, or by nothing where nothing is here.
        expected, step = -1, 0
        for begin in range(0, len(entries), STRETCH):
            part = entries[begin : begin + STRETCH]
            if goes_on(part, expected, step):
                expected += len(part) * step
                continue
            for at, entry in enumerate(part, begin):
                if entry == expected:
                    expected += step
                    continue
                place = place_of(entry)
                firsts.append(at)
                places.append(place)
                step = self._step if place >= 0 else 0
                expected = entry + step
        firsts.append(len(entries))
        return firsts, places

    def _check_plain(self, first: int, firsts: Entries, places: Sequence[int]) -> int:
        """The number of grains in the file."""
        grain, size = self._sparse.grain_bytes, self._sparse.size
        held, reached, ascend = 0, 0, True
        for begin, end, place in zip(firsts, firsts[1:], places, strict=False):
            if place < 0:
                continue
            held += end - begin
            ascend = ascend and reached <= place
            reached = place + (end - begin) * grain
            if reached <= self._file_bytes:
                continue
            # The last grain of a disk may be incomplete.
            if place + min((first + end) * grain, size) - (first + begin) * grain > self._file_bytes:
                number = first + begin + max(self._file_bytes - place, 0) // grain
                at = place + (number - first - begin) * grain
                needed = min(grain, size - number * grain)
                raise cut_off(self._name, f"grain {number}", at, at + needed, self._file_bytes)
        if not ascend:
            self._check_overlaps(first, firsts, places)
        return held

    def _check_overlaps(self, first: int, firsts: Entries, places: Sequence[int]) -> None:
        grain = self._sparse.grain_bytes
        before, reached = 0, 0
        for at in sorted((at for at, place in enumerate(places) if place >= 0), key=places.__getitem__):
            place = places[at]
            if place < reached:
                one = firsts[before] + (place - places[before]) // grain
                raise self._clash(first + one, first + firsts[at], place)
            before, reached = at, place + (firsts[at + 1] - firsts[at]) * grain

    def _clash(self, one: int, other: int, place: int) -> MalformedArchive:
        return MalformedArchive(f"{self._name}: grains {one} and {other} both lie at {place} of the file")

    # ── compressed ───────────────────────────────────────────────────────────────────────────────────────────────────

    def _compressed(self, first: int, entries: Entries) -> Window:
        firsts, places, held = array("I"), array("q"), list[int]()
        # 0, 1 for zeros, or a grain.
        kind: Callable[[int], int] = partial(min, 2) if self._sparse.zeroed_grains else bool
        at = 0
        for _, group in groupby(entries, kind):
            run = list(group)
            place = self._place(run[0])
            firsts.append(at)
            places.append((first + at) * self._sparse.grain_bytes if place >= 0 else place)
            if place >= 0:
                held += run
            elif place == ZERO:
                entries[at : at + len(run)] = array(entries.typecode, bytes(len(run) * entries.itemsize))
            at += len(run)
        firsts.append(at)
        if held:
            self._check_compressed(first, entries, held)
        return Window(firsts, places, len(held), entries)

    def _check_compressed(self, first: int, sectors: Entries, held: list[int]) -> None:
        least = RECORD.size + 1
        if max(held) * SECTOR + least > self._file_bytes:
            at = next(at for at, sector in enumerate(sectors) if sector * SECTOR + least > self._file_bytes)
            place = sectors[at] * SECTOR
            raise cut_off(self._name, f"grain {first + at}", place, place + least, self._file_bytes)
        if len(set(held)) == len(held):
            return
        seen: dict[int, int] = {}
        for at, sector in enumerate(sectors):
            if sector and sector in seen:
                raise self._clash(first + seen[sector], first + at, sector * SECTOR)
            seen[sector] = at


# ── an entry ─────────────────────────────────────────────────────────────────────────────────────────────────────────

_Place = Callable[[int], int]


def _hosted_place(sparse: Sparse, name: str) -> _Place:
    """For COWD too: sectors of the file, and numbers that are not sectors."""
    special = {0: PARENT, 1: ZERO} if sparse.zeroed_grains else {0: PARENT}
    return lambda entry: special.get(entry, entry * SECTOR)


# The top 4 bits; where the top byte is, and which ones entries of known states have.
_SE_ABSENT, _SE_UNMAPPED, _SE_ZEROS, _SE_GRAIN = range(4)
_SE_TOP: Final = 7 if sys.byteorder == "little" else 0
_SE_TOPS: Final = bytes(range(_SE_GRAIN + 1 << 4))
# The next grain, unless the low 12 bits are full.
_SE_STEP: Final = 1 << 48


def _se_place(sparse: Sparse, name: str) -> _Place:
    def place(entry: int) -> int:
        state = entry >> 60
        # 60 bits; the low 12 are stored above the others.
        grain = entry >> 48 & 0xFFF | (entry & 0xFFFF_FFFF_FFFF) << 12
        if state > _SE_GRAIN or (state == _SE_ABSENT and entry) or (state == _SE_GRAIN and grain >= 1 << 40):
            raise MalformedArchive(f"{name}: {entry:#x} in a grain table")
        if state == _SE_GRAIN:
            return sparse.grains_at + grain * sparse.grain_bytes
        return ZERO if entry else PARENT

    return place


_NONE: Final = array("I")
