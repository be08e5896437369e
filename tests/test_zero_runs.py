"""Zeros within a request: found in blocks, and never where there is data."""

from hypothesis import given, settings
from hypothesis import strategies as st

from synvirt import copying
from synvirt.copying import zero_runs


@given(
    pieces=st.lists(st.tuples(st.booleans(), st.integers(1, 200_000)), min_size=1, max_size=6), offset=st.integers(0, 1 << 18)
)
@settings(deadline=None)
def test_zero_runs_alternate_and_are_zero(pieces: list[tuple[bool, int]], offset: int) -> None:
    content = b"".join((b"\0" if zero else b"x") * length for zero, length in pieces)
    buffer = memoryview(content + b"\0" * 100_000)  # what lies behind the request must not matter
    at, last = 0, None
    for start, end, zero in zero_runs(buffer, offset, len(content)):
        assert start == at < end
        assert zero is not last
        assert not zero or content.count(0, start, end) == end - start
        assert end == len(content) or (offset + end) % copying.ZERO_RUN_BYTES == 0
        at, last = end, zero
    assert at == len(content)
    for block in range(-offset % copying.ZERO_RUN_BYTES, len(content) - copying.ZERO_RUN_BYTES, copying.ZERO_RUN_BYTES):
        if content[block : block + copying.ZERO_RUN_BYTES] == copying.ZEROS:
            runs = list(zero_runs(buffer, offset, len(content)))
            assert any(start <= block < end and zero for start, end, zero in runs), "a zero block was not found"
