"""The laws of DiskWriter, as one suite. A writer joins by a subclass whose fixture `case` makes the volume."""

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from random import Random

import pytest

from synvirt.blocks import DiskWriter
from synvirt.errors import DiskWriteFailed

MIB = 1 << 20


@dataclass(frozen=True, slots=True)
class WriterCase:
    """How to open a volume for writing, again if need be, and how to see what it holds: all of it, beyond `size` too."""

    open: Callable[[], DiskWriter]
    content: Callable[[], bytes]


class WriterContract:
    @pytest.fixture
    def case(self) -> WriterCase:
        """Of at least 3 MiB, of a size that is no multiple of 4096, reading as zeros."""
        raise NotImplementedError

    def test_is_a_writer_of_a_fresh_volume(self, case: WriterCase) -> None:
        writer = case.open()
        assert isinstance(writer, DiskWriter)
        assert writer.max_writers >= 1
        assert writer.size >= 3 * MIB
        assert writer.size % 4096
        assert len(case.content()) >= writer.size
        content = case.content()
        assert content == bytes(len(content))
        writer.close()

    def test_holds_what_was_written_and_made_zero_last(self, case: WriterCase) -> None:
        writer = case.open()
        expected = bytearray(case.content())
        random = Random(writer.size)
        for turn in range(150):
            offset = random.choice([0, random.randrange(writer.size), random.randrange(writer.size) & ~0xFFFF])
            length = random.choice([0, 1, 4096, 1 << 16, random.randrange(2 * MIB), writer.size])
            length = min(length, writer.size - offset)
            if turn % 3:
                data = random.randbytes(length)
                writer.write(offset, memoryview(data))
                expected[offset : offset + length] = data
            else:
                writer.zero(offset, length)
                expected[offset : offset + length] = bytes(length)
        writer.flush()
        assert case.content() == expected
        writer.close()

    def test_does_not_keep_the_buffer(self, case: WriterCase) -> None:
        writer = case.open()
        buffer = bytearray(b"a" * MIB)
        writer.write(4096, memoryview(buffer))
        buffer[:] = b"b" * MIB
        writer.flush()
        assert case.content()[4096 : 4096 + MIB] == b"a" * MIB
        writer.close()

    def test_threads_may_write_at_once(self, case: WriterCase) -> None:
        writer = case.open()
        expected = bytearray(case.content())
        parties = min(writer.max_writers, 4)
        barrier = threading.Barrier(parties, timeout=100)
        share = writer.size // parties

        def write_some(part: int) -> bytes:
            random, mine = Random(part), bytearray(share)
            barrier.wait()
            for turn in range(40):
                at = random.randrange(share)
                length = min(random.randrange(1 << 18), share - at)
                data = random.randbytes(length) if turn % 4 else bytes(length)
                if turn % 4:
                    writer.write(part * share + at, memoryview(data))
                else:
                    writer.zero(part * share + at, length)
                mine[at : at + length] = data
            return bytes(mine)

        with ThreadPoolExecutor(parties) as pool:
            for part, mine in enumerate(pool.map(write_some, range(parties))):
                expected[part * share : (part + 1) * share] = mine
        writer.flush()
        assert case.content() == expected
        writer.close()

    def test_a_write_outside_fails_and_writes_nothing(self, case: WriterCase) -> None:
        writer = case.open()
        writer.write(0, memoryview(b"x" * writer.size))
        writer.flush()
        before = case.content()
        for offset in (writer.size, writer.size - 4, -1, writer.size + (1 << 40), -(1 << 70)):
            with pytest.raises(DiskWriteFailed, match=r"\d"):
                writer.write(offset, memoryview(b"yyyyyyyy"))
            with pytest.raises(DiskWriteFailed, match=r"\d"):
                writer.zero(offset, 8)
        with pytest.raises(DiskWriteFailed):
            writer.zero(0, -1)
        with pytest.raises(DiskWriteFailed):
            writer.write(1, memoryview(b"y" * writer.size))
        writer.flush()
        assert case.content() == before
        writer.close()

    def test_what_was_written_is_there_when_opened_again(self, case: WriterCase) -> None:
        writer = case.open()
        writer.write(12345, memoryview(b"here" * 1000))
        writer.flush()
        writer.close()
        again = case.open()
        again.write(0, memoryview(b"first"))
        again.flush()
        again.close()
        assert case.content()[12345 : 12345 + 4000] == b"here" * 1000
        assert case.content()[:5] == b"first"

    def test_closes_twice(self, case: WriterCase) -> None:
        writer = case.open()
        writer.close()
        writer.close()
