"""A window's runs say of each grain what its own entry says, however many of them were looked at together; and its entries are
those of its own tables, wherever these lie."""

from array import array
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from synvirt.disks.blockmap import PARENT, ZERO
from synvirt.disks.vmdk.sparse import SECTOR, Sparse
from synvirt.disks.vmdk.tables import Tables
from synvirt.disks.vmdk.windows import Window, Windows
from synvirt.errors import MalformedArchive

GRAIN_SECTORS = 8
FILE_BYTES = 1 << 60
HOSTED = Sparse("hosted", 1 << 40, GRAIN_SECTORS * SECTOR, 512, SECTOR, zeroed_grains=True)
SE_SPARSE = Sparse("sesparse", 1 << 40, 8 * SECTOR, 4096, SECTOR)


def grain_of(number: int) -> int:
    """The entry of seSparse for a grain."""
    return 3 << 60 | (number & 0xFFF) << 48 | number >> 12


# (first entry, number of entries, difference): mostly in order, at the edges of what an entry holds too.
hosted = st.tuples(
    st.sampled_from([0, 1, 2, 800, 804, 80_000, (1 << 32) - 2048]), st.integers(1, 600), st.sampled_from([0, 8, 8, 9])
)
se_sparse = st.tuples(
    st.sampled_from([0, 1 << 60, 2 << 60, grain_of(0), grain_of(4000), grain_of(1 << 20), grain_of((1 << 40) - 1)]),
    st.integers(1, 600),
    st.sampled_from([0, 1 << 48, 1 << 48]),
)


def entries(code: str, stretches: list[tuple[int, int, int]]) -> "array[int]":
    most = (1 << 8 * array(code).itemsize) - 1
    return array(code, [min(first + at * step, most) for first, count, step in stretches for at in range(count)])


def place_of_hosted(entry: int) -> int:
    return {0: PARENT, 1: ZERO}.get(entry, entry * SECTOR)


def place_of_se_sparse(entry: int) -> int | None:
    """None: no entry says so."""
    state, number = entry >> 60, (entry >> 48) % 4096 + entry % (1 << 48) * 4096
    if state == 3:
        return number * 8 * SECTOR if number < 1 << 40 else None
    return {0: PARENT if entry == 0 else None, 1: ZERO, 2: ZERO}.get(state)


def expected(places: list[int | None], least: int) -> list[int | None] | None:
    """The places; None, where one is wrong or two overlap."""
    held = sorted(place for place in places if place is not None and place >= 0)
    if None in places or any(second - first < least for first, second in pairwise(held)):
        return None
    return places


def window_of(sparse: Sparse, table: "array[int]") -> Window | None:
    try:
        return Windows(sparse, FILE_BYTES, "disk.vmdk").window(0, array(table.typecode, table))
    except MalformedArchive:
        return None


def places_of(window: Window, grain_bytes: int) -> list[int]:
    return [
        place + at * grain_bytes if place >= 0 else place
        for first, end, place in zip(window.firsts, window.firsts[1:], window.places, strict=False)
        for at in range(end - first)
    ]


@given(st.lists(hosted, min_size=1, max_size=6))
def test_of_a_hosted_extent(stretches: list[tuple[int, int, int]]) -> None:
    table = entries("I", stretches)
    wanted = expected([place_of_hosted(entry) for entry in table], HOSTED.grain_bytes)
    window = window_of(HOSTED, table)
    assert (window and places_of(window, HOSTED.grain_bytes)) == wanted
    assert window is None or window.held == sum(entry > 1 for entry in table)


@given(st.lists(se_sparse, min_size=1, max_size=6))
def test_of_a_se_sparse_extent(stretches: list[tuple[int, int, int]]) -> None:
    table = entries("Q", stretches)
    wanted = expected([place_of_se_sparse(entry) for entry in table], SE_SPARSE.grain_bytes)
    window = window_of(SE_SPARSE, table)
    assert (window and places_of(window, SE_SPARSE.grain_bytes)) == wanted


@pytest.mark.parametrize("zeroed_grains", [False, True])
@given(stretches=st.lists(hosted, min_size=1, max_size=6))
def test_of_a_compressed_extent(zeroed_grains: bool, stretches: list[tuple[int, int, int]]) -> None:
    sparse = Sparse("hosted", 1 << 40, 4096, 512, SECTOR, compressed=True, zeroed_grains=zeroed_grains)
    table = entries("I", stretches)
    special = 1 if zeroed_grains else 0
    held = [entry for entry in table if entry > special]
    window = window_of(sparse, table)
    if len(set(held)) < len(held):
        assert window is None
        return
    assert window is not None
    shown = places_of(window, 4096)
    assert shown == [at * 4096 if entry > special else (ZERO if entry else PARENT) for at, entry in enumerate(table)]
    assert list(window.sectors) == [entry if entry > special else 0 for entry in table]
    assert window.held == len(held)


class Held:
    """A file in memory."""

    max_readers = 64

    def __init__(self, content: bytes) -> None:
        self._content, self.size = content, len(content)

    def read_into(self, offset: int, buffer: memoryview) -> None:
        buffer[:] = self._content[offset : offset + len(buffer)]


# Of 128 entries, a sector each.
TABLE_ENTRIES = 128


@given(st.permutations(range(6)), st.sets(st.integers(0, 5)), st.integers(1, 6 * TABLE_ENTRIES))
def test_tables_are_read_from_where_they_lie_whatever_lies_beside_them(order: list[int], absent: set[int], grains: int) -> None:
    """They are made as their grains are written: a table may lie right behind that of other grains, with none between."""
    contents = [array("I", [1000 * number + at for at in range(TABLE_ENTRIES)]) for number in range(6)]
    places = {number: 2 + at for at, number in enumerate(one for one in order if one not in absent)}
    directory = array("I", [places.get(number, 0) for number in range(6)])
    laid = b"".join(contents[number].tobytes() for number in places)
    file = bytes(SECTOR) + directory.tobytes().ljust(SECTOR, b"\0") + laid
    over: Any = Held(file)
    found = Tables(over, Sparse("hosted", grains * SECTOR, SECTOR, TABLE_ENTRIES, SECTOR), "disk.vmdk")
    none = array("I", bytes(4 * TABLE_ENTRIES))
    expected = [entry for number in range(6) for entry in (contents[number] if number in places else none)]
    assert list(found.entries(0)) == expected[:grains]
    assert found.empty(0) == (not any(number in places for number in range(-(-grains // TABLE_ENTRIES))))
