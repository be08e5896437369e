"""A gzip file at any offset, after a fault of what it is read from."""

import gzip
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from synvirt.disks.packed.gzipped import BLOCK_BYTES, GzippedReader
from synvirt.errors import DiskReadFailed
from tests.cases import cases
from tests.fakes.disks import MemoryReader, ReaderWrapper

CONTENT = random.Random(1).randbytes(5 * BLOCK_BYTES + 77)
PACKED = gzip.compress(CONTENT, 1)


class Shaky(ReaderWrapper):
    """Fails one read, if it is told to: the network was away for a moment."""

    fails_in = -1

    def read_into(self, offset: int, buffer: memoryview) -> None:
        self.fails_in -= 1
        if self.fails_in == 0:
            raise DiskReadFailed("away")
        super().read_into(offset, buffer)


@given(
    first=st.integers(0, len(CONTENT) - 1),
    fails_in=st.integers(1, 150),
    then=st.lists(st.integers(0, len(CONTENT) - 1), min_size=1, max_size=4),
)
@cases(40)
def test_after_a_failed_read_the_next_ones_are_right(first: int, fails_in: int, then: list[int]) -> None:
    packed = MemoryReader("")
    packed.content, packed.size = PACKED, len(PACKED)
    shaky = Shaky(packed)
    reader = GzippedReader(shaky, len(CONTENT), "disk.gz")
    buffer = memoryview(bytearray(1000))
    shaky.fails_in = fails_in
    for offset in [first, *then]:
        into = buffer[: min(len(buffer), len(CONTENT) - offset)]
        try:
            reader.read_into(offset, into)
        except DiskReadFailed as error:
            assert error.detail == "away"  # noqa: PT017 - it may fail, once
        else:
            assert bytes(into) == CONTENT[offset : offset + len(into)]


def test_a_block_is_right_after_the_one_before_it_failed() -> None:
    packed = MemoryReader("")
    packed.content, packed.size = PACKED, len(PACKED)
    shaky = Shaky(packed)
    reader = GzippedReader(shaky, len(CONTENT), "disk.gz")
    shaky.fails_in = 10
    buffer = memoryview(bytearray(BLOCK_BYTES))
    with pytest.raises(DiskReadFailed, match="away"):
        reader.read_into(0, buffer)
    reader.read_into(BLOCK_BYTES, buffer)
    assert bytes(buffer) == CONTENT[BLOCK_BYTES : 2 * BLOCK_BYTES]


def test_the_saved_states_stay_as_they_are_when_reads_fail() -> None:
    packed = MemoryReader("")
    packed.content, packed.size = PACKED, len(PACKED)
    shaky = Shaky(packed)
    reader = GzippedReader(shaky, len(CONTENT), "disk.gz")
    buffer = memoryview(bytearray(BLOCK_BYTES))
    for fails_in in (3, 5):
        shaky.fails_in = fails_in
        with pytest.raises(DiskReadFailed, match="away"):
            reader.read_into(0, buffer)
    for number in (0, 3, 1):
        reader.read_into(number * BLOCK_BYTES, buffer)
        assert bytes(buffer) == CONTENT[number * BLOCK_BYTES : (number + 1) * BLOCK_BYTES]
