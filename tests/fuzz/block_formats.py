"""What VHDX, VHD and VDI readers owe to hostile files: to read, twice the same, or to refuse by an error of ours, in bounds.

Fields are overwritten where they lie, and the checksums over them are then put right, so that the code behind them is reached.
"""

import time
import tracemalloc
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import islice

from hypothesis import event
from hypothesis import strategies as st

from synvirt.blocks import DiskReader
from synvirt.errors import SynvirtError
from synvirt.sizes import KIB, MIB
from tests.disks.block_images import bytes_of

# Seconds of the processor for one small file: a hundred times what an honest one takes here. The longest that one can ask for
# is the BAT of 64 TiB in blocks of 1 MiB: 512 MiB of zeros beyond the end that a log says the file has.
TIME_MAX_S = 30
MEMORY_MAX_BYTES = 64 * MIB

_EDGES = [0, 1, 2, 3, 4, 5, 6, 7, 127, 511, 512, 513, 4095, 4096, 4097, 65535, 65536, 1 << 20, 3 << 20, 1 << 28, (1 << 31) - 1]
_EDGES += [
    1 << 31,
    (1 << 32) - 2,
    (1 << 32) - 1,
    1 << 40,
    1 << 46,
    1 << 47,
    (1 << 63) - 1,
    1 << 63,
    (1 << 64) - (1 << 20),
    (1 << 64) - 1,
]
numbers = st.one_of(
    st.sampled_from(_EDGES), st.integers(0, 40).map(lambda n: n << 20), st.integers(0, 5000), st.integers(0, (1 << 64) - 1)
)


@dataclass(frozen=True)
class Area:
    """Where fields lie: `count` of them from `start`, `step` bytes apart, each `length` bytes."""

    start: int
    length: int
    count: int = 1
    step: int = 0


@dataclass(frozen=True)
class Damage:
    """Bytes to put at a place of the file."""

    at: int
    content: bytes


_widths = st.sampled_from([1, 2, 4, 8])


def damages(areas: Sequence[Area], order: str) -> st.SearchStrategy[Damage]:
    return _damages(st.sampled_from(areas), order)


@st.composite
def _damages(draw: st.DrawFn, areas: st.SearchStrategy[Area], order: str) -> Damage:
    """What they are drawn of is made once: to make it takes Hypothesis longer than to draw."""
    area = draw(areas)
    at = area.start + draw(st.integers(0, area.count - 1)) * area.step
    if area.length > 8:  # no field, but a place full of them
        within = draw(st.integers(0, area.length - 1))
        if draw(st.booleans()):
            return Damage(at + within, draw(st.binary(min_size=1, max_size=min(16, area.length - within))))
        width = draw(_widths)
        at, length = at + within // width * width, width
    else:
        length = area.length
    number = draw(numbers) & (1 << length * 8) - 1
    return Damage(at, number.to_bytes(length, "big" if order == "big" else "little"))


def outcome(open_image: Callable[[], DiskReader], places: Sequence[tuple[float, int]]) -> str:
    """Open it, ask for its extents, read some: whatever it says must be consistent."""
    try:
        reader = open_image()
    except SynvirtError as problem:
        return type(problem).__name__
    try:
        assert 0 <= reader.size < 1 << 63
        at = 0
        for extent in islice(reader.extents(), 300):
            assert extent.start == at
            assert extent.length > 0
            at = extent.end
            assert at <= reader.size
            for start in {extent.start, max(extent.start, extent.end - 4 * KIB)}:
                content = bytes_of(reader, start, min(4 * KIB, extent.end - start))
                assert not extent.zero or content == bytes(len(content))
        for fraction, wanted in places:
            start = int(fraction * reader.size)
            length = max(0, min(wanted, reader.size - start))
            assert bytes_of(reader, start, length) == bytes_of(reader, start, length)
    except SynvirtError as problem:
        return f"{type(problem).__name__} while reading"
    else:
        return "reads"
    finally:
        reader.close()


def assert_bounded(work: Callable[[], str]) -> None:
    began = time.process_time()
    tracemalloc.start()
    try:
        event(work())
        peak = tracemalloc.get_traced_memory()[1]
        assert peak < MEMORY_MAX_BYTES, f"{peak} bytes"
    finally:
        tracemalloc.stop()
    assert time.process_time() - began < TIME_MAX_S
