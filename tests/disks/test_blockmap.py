"""Runs of long tables: the same places as entry by entry, and no overlap that a comparison of all pairs would find."""

from array import array
from collections.abc import Sequence
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from synvirt.disks.blockmap import PARENT, ZERO, BlockMap, partly
from synvirt.errors import MalformedArchive
from tests.cases import cases

BLOCK = 64
# Entries of these tables: three marks, or the number of a block in the file, or that of a partly present one.
_ZEROS, _MORE_ZEROS, _MISSING, _PARTLY = 0, 1, 2, 1 << 20
_FIRST = 10


def place_of(entry: int, block: int) -> int:
    if entry >= _PARTLY:
        return partly((entry - _PARTLY) * BLOCK)
    return {_ZEROS: ZERO, _MORE_ZEROS: ZERO, _MISSING: PARENT}.get(entry, entry * BLOCK)


def of(entries: Sequence[int], size: int, *, stride: int = 1, window: int = 1000, code: str = "I") -> BlockMap:
    windows = [array(code, entries[at : at + window]) for at in range(0, len(entries), window)]
    return BlockMap(size, BLOCK, windows, place_of, "a.img", stride=stride)


@st.composite
def tables(draw: st.DrawFn) -> list[int]:
    """Long stretches in order or of one mark, with other entries between and in them."""
    entries: list[int] = []
    for _ in range(draw(st.integers(0, 6))):
        count = draw(st.sampled_from([1, 2, 3, 255, 256, 257, 700]))
        first = draw(st.sampled_from([_ZEROS, _MORE_ZEROS, _MISSING, _FIRST, 500, 1211, _PARTLY + 7]))
        entries += [first] * count if first < _FIRST else range(first, first + count)
    for _ in range(draw(st.integers(0, 3)) if entries else 0):
        entries[draw(st.integers(0, len(entries) - 1))] = draw(st.integers(0, 2000))
    return entries


@cases(150)
@given(
    tables(),
    st.integers(0, BLOCK - 1),
    st.sampled_from([0, 1]),
    st.sampled_from([256, 300, 1000]),
    st.sampled_from("IQ"),
    st.data(),
)
def test_runs_are_the_places_of_all_entries(
    entries: list[int], missing: int, stride: int, window: int, code: str, data: st.DataObject
) -> None:
    size = max(0, len(entries) * BLOCK - missing)
    blocks = of(entries, size, stride=stride, window=window, code=code)
    start = data.draw(st.integers(0, size))
    at = start
    for run in blocks.runs(start, end := data.draw(st.integers(start, size))):
        assert run.start == at < run.end
        for offset in {*range(run.start, run.end, BLOCK), run.end - 1}:
            whole = place_of(entries[offset // BLOCK], 0)
            skipped, further = offset % BLOCK, offset - run.start
            if whole >= 0:
                assert run.place + further == whole + skipped
            elif whole < PARENT:
                assert run.place - further == whole - skipped
                assert run.end - offset <= BLOCK - skipped
            else:
                assert run.place == whole
        at = run.end
    assert at == end
    # Neighbours of one kind are one run.
    for one, other in pairwise(blocks.runs(0, size)):
        assert one.place < PARENT or other.place != (one.place + one.end - one.start if one.place >= 0 else one.place)


@cases(150)
@given(tables(), st.lists(st.tuples(st.integers(0, 2000 * BLOCK), st.integers(0, 5 * BLOCK)), max_size=2))
def test_an_overlap_is_refused_wherever_it_is(entries: list[int], others: list[tuple[int, int]]) -> None:
    starts = [
        place if place >= 0 else ~place for place in (place_of(entry, 0) for entry in entries) if place not in (ZERO, PARENT)
    ]
    parts = [(start, start + BLOCK) for start in starts] + [(at, at + length) for at, length in others if length]
    blocks = of(entries, len(entries) * BLOCK)
    taken = [(at, at + length, f"the table {number}") for number, (at, length) in enumerate(others)]
    if any(other[0] < one[1] for one, other in pairwise(sorted(parts))):
        with pytest.raises(MalformedArchive, match="both lie at"):
            blocks.check_places(1 << 40, taken)
    else:
        blocks.check_places(1 << 40, taken)


def test_a_block_beyond_the_end_is_named() -> None:
    blocks = of([_FIRST, _ZEROS, 500, 501], 4 * BLOCK - 1)
    blocks.check_places(502 * BLOCK - 1, [])
    with pytest.raises(MalformedArchive, match="block 2 lies at 32000 to 32127, the file ends at 32126"):
        blocks.check_places(502 * BLOCK - 2, [])
