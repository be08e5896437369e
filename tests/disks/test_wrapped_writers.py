"""Writers over writers: one that rewrites nothing that is right already, and one that leaves nothing in memory."""

from pathlib import Path

import pytest

from synvirt.blocks import DiskWriter
from synvirt.disks.passing import WINDOW_BYTES, PassingWriter
from synvirt.disks.raw.files import RawReader, open_file_writer
from synvirt.disks.rewriting import ComparingWriter
from synvirt.sizes import MIB
from tests.contracts.writers import WriterCase, WriterContract
from tests.fakes.disks import FaultyReader, MemoryReader, MemoryWriter

SIZE = 3 * MIB + 4097


def volume(folder: Path) -> Path:
    path = folder / "volume.raw"
    with path.open("wb") as file:
        file.truncate(SIZE)
    return path


class TestComparingWriter(WriterContract):
    @pytest.fixture
    def case(self, tmp_path: Path) -> WriterCase:
        path = volume(tmp_path)

        def opened() -> DiskWriter:
            return ComparingWriter(open_file_writer(str(path), SIZE), RawReader(str(path)))

        return WriterCase(opened, path.read_bytes)


class TestPassingWriter(WriterContract):
    @pytest.fixture
    def case(self, tmp_path: Path) -> WriterCase:
        path = volume(tmp_path)
        return WriterCase(lambda: PassingWriter(open_file_writer(str(path), SIZE), str(path)), path.read_bytes)


def test_what_is_right_already_is_not_written() -> None:
    inner, there = MemoryWriter(4 * 65536), MemoryReader("AB-C")
    writer = ComparingWriter(inner, there)
    writer.write(0, memoryview(b"A" * 65536))
    writer.write(65536, memoryview(b"X" * 65536))
    writer.write(2 * 65536, memoryview(bytes(65536)))
    writer.write(3 * 65536 + 7, memoryview(b"C" * 100))
    assert inner.written == [(65536, 65536)]


def test_what_cannot_be_read_is_written() -> None:
    inner = MemoryWriter(4 * 65536)
    writer = ComparingWriter(inner, FaultyReader(MemoryReader("AAAA"), 65536))
    for at in range(0, 4 * 65536, 65536):
        writer.write(at, memoryview(b"A" * 65536))
    assert inner.written == [(65536, 65536)]


def test_more_than_the_window_passes_whole(tmp_path: Path) -> None:
    path, size = tmp_path / "large.raw", WINDOW_BYTES + 9 * MIB
    with path.open("wb") as file:
        file.truncate(size)
    writer = PassingWriter(open_file_writer(str(path), size), str(path))
    for number, offset in enumerate(range(0, size, MIB)):
        writer.write(offset, memoryview(bytes([number % 251]) * MIB))
    writer.flush()
    writer.close()
    with path.open("rb") as file:
        for number in range(size // MIB):
            assert file.read(MIB) == bytes([number % 251]) * MIB
