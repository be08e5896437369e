"""The laws of DiskReader, as one suite. A reader joins by a subclass whose fixture `case` opens it:

class TestRaw(ReaderContract):
    @pytest.fixture(params=["aligned", "odd"])
    def case(self, request, tmp_path) -> ReaderCase:
        ...
        return ReaderCase(open=lambda: RawReader(str(path)), content=path.read_bytes())
"""

import json
import os
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from random import Random

import pytest

from synvirt.blocks import DiskReader, Extent, Placed
from synvirt.disks.layers import layer_of
from synvirt.errors import DiskReadFailed

STEP_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class ReaderCase:
    """How to open a reader, what it must read as, and whether its extents cover the whole disk (a delta's do not)."""

    open: Callable[[], DiskReader]
    content: bytes
    whole: bool = True


def read(reader: DiskReader, offset: int, length: int) -> bytes:
    """By way of a larger buffer of known bytes, so that a reader which writes beside its part is found out."""
    frame = bytearray(b"\xa5" * (length + 64))
    reader.read_into(offset, memoryview(frame)[32 : 32 + length])
    assert frame[:32] == frame[32 + length :] == b"\xa5" * 32
    return bytes(frame[32 : 32 + length])


def read_all(reader: DiskReader) -> bytes:
    """In ascending order, each byte once: any reader allows it."""
    return b"".join(read(reader, at, min(STEP_BYTES, reader.size - at)) for at in range(0, reader.size, STEP_BYTES))


def check_extents(extents: list[Extent], content: bytes, *, whole: bool = True) -> None:
    end = 0
    for extent in extents:
        assert extent.length > 0
        assert extent.start >= end
        assert not whole or extent.start == end, f"nothing is said about the bytes {end} to {extent.start}"
        end = extent.end
        if extent.zero:
            assert content.count(0, extent.start, end) == extent.length, f"{extent} is not all zeros"
    assert end <= len(content)
    assert not whole or end == len(content)


class ReaderContract:
    @pytest.fixture
    def case(self) -> ReaderCase:
        raise NotImplementedError

    def test_is_a_reader_of_the_right_size(self, case: ReaderCase) -> None:
        reader = case.open()
        assert isinstance(reader, DiskReader)
        assert reader.size == len(case.content)
        assert reader.max_readers >= 1
        reader.close()

    def test_extents_keep_their_laws_and_can_be_asked_again(self, case: ReaderCase) -> None:
        reader = case.open()
        extents = list(reader.extents())
        check_extents(extents, case.content, whole=case.whole)
        with ThreadPoolExecutor(1) as pool:
            assert pool.submit(lambda: list(reader.extents())).result() == extents
        halfway = reader.extents()
        next(halfway, None)
        assert list(reader.extents()) == extents, "a walk that is under way changes another"
        reader.close()

    def test_read_in_order_it_is_the_disk(self, case: ReaderCase) -> None:
        reader = case.open()
        assert read_all(reader) == case.content
        reader.close()

    def test_any_range_reads_as_the_same_bytes(self, case: ReaderCase) -> None:
        reader = case.open()
        if reader.max_readers > 1:
            random = Random(len(case.content))
            for _ in range(200):
                offset = random.randrange(len(case.content) + 1)
                length = random.choice([0, 1, 511, 4096, random.randrange(1 << 20), len(case.content)])
                length = min(length, len(case.content) - offset)
                assert read(reader, offset, length) == case.content[offset : offset + length], (offset, length)
        reader.close()

    def test_threads_may_read_at_once(self, case: ReaderCase) -> None:
        reader = case.open()
        barrier = threading.Barrier(min(reader.max_readers, 4), timeout=100)

        def read_some(seed: int) -> None:
            random = Random(seed)
            barrier.wait()
            for _ in range(50):
                offset = random.randrange(len(case.content))
                length = min(random.randrange(1 << 18), len(case.content) - offset)
                assert read(reader, offset, length) == case.content[offset : offset + length]
                next(reader.extents(), None)

        if reader.max_readers > 1:
            with ThreadPoolExecutor(barrier.parties) as pool:
                for future in [pool.submit(read_some, seed) for seed in range(barrier.parties)]:
                    future.result()
        reader.close()

    def test_a_read_outside_fails_by_name(self, case: ReaderCase) -> None:
        reader = case.open()
        for offset, length in [(reader.size, 1), (reader.size - 1, 2), (reader.size + (1 << 40), 1), (-1, 1), (-(1 << 70), 8)]:
            with pytest.raises(DiskReadFailed, match=r"\d"):
                reader.read_into(offset, memoryview(bytearray(length)))
        reader.close()

    def test_places_ascend_and_hold_the_disks_bytes(self, case: ReaderCase) -> None:
        """For a reader that says where in files its bytes lie: a volume that shares them is the disk."""
        reader = case.open()
        end = 0
        for place in reader.places() if isinstance(reader, Placed) else ():
            assert place.length > 0
            assert place.start >= end
            end = place.start + place.length
            assert os.pread(place.descriptor, place.length, place.at) == case.content[place.start : end], place
        reader.close()

    def test_can_say_what_it_reads(self, case: ReaderCase) -> None:
        reader = case.open()
        layer = layer_of(reader, "disk")
        assert layer is not None
        assert layer.size_bytes == reader.size
        for each in layer.chain():
            assert each.format
            assert json.loads(json.dumps(each.facts)) == each.facts
        reader.close()

    def test_closes_twice(self, case: ReaderCase) -> None:
        reader = case.open()
        reader.close()
        reader.close()
