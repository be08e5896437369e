"""Block devices written past the page cache: the laws of a writer, on real loop devices."""

import errno
import fcntl
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from synvirt.disks import open_writer
from synvirt.disks.raw.direct import DirectWriter, open_direct_writer
from synvirt.disks.raw.files import RawWriter
from synvirt.disks.specs import BlockWriterSpec
from synvirt.errors import DiskWriteFailed
from tests.contracts.writers import WriterCase, WriterContract
from tests.devices import loop_device

MIB = 1 << 20
SIZE = 5 * MIB + 513


@pytest.fixture
def device(tmp_path: Path) -> Iterator[str]:
    backing = tmp_path / "backing"
    backing.touch()
    os.truncate(backing, 6 * MIB)
    with loop_device(backing) as device:
        yield device


class TestDirectWriter(WriterContract):
    @pytest.fixture
    def case(self, device: str) -> WriterCase:
        return WriterCase(
            open=lambda: open_writer(BlockWriterSpec(path=device, size_bytes=SIZE)), content=Path(device).read_bytes
        )


class TestWhereItIsRefused(WriterContract):
    """As on a device whose blocks are larger than a page."""

    @pytest.fixture
    def case(self, device: str, monkeypatch: pytest.MonkeyPatch) -> WriterCase:
        real = os.pwrite

        def pwrite(fd: int, data: memoryview, offset: int) -> int:
            if fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_DIRECT:
                raise OSError(errno.EINVAL, "Invalid argument")
            return real(fd, data, offset)

        monkeypatch.setattr(os, "pwrite", pwrite)
        return WriterCase(open=lambda: open_direct_writer(device, SIZE), content=Path(device).read_bytes)


def test_pages_go_past_the_page_cache(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    through_the_cache: list[tuple[int, int]] = []
    real = RawWriter.write

    def write(self: RawWriter, offset: int, buffer: memoryview) -> None:
        if len(buffer):
            through_the_cache.append((offset, len(buffer)))
        real(self, offset, buffer)

    monkeypatch.setattr(RawWriter, "write", write)
    writer = open_direct_writer(device, SIZE)
    assert isinstance(writer, DirectWriter)
    writer.write(1000, memoryview(os.urandom(3 * MIB)))
    writer.close()
    assert through_the_cache == [(1000, 4096 - 1000), (3 * MIB, 1000)]


def test_what_cannot_be_written_is_said_with_its_offset(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(fd: int, data: memoryview, offset: int) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    writer = open_direct_writer(device, SIZE)
    monkeypatch.setattr(os, "pwrite", full)
    with pytest.raises(DiskWriteFailed, match="offset 8192 cannot be written: No space left") as caught:
        writer.write(8192, memoryview(bytes(MIB)))
    assert caught.value.hint
    writer.close()


@pytest.mark.parametrize("refused_then", [False, True])
def test_what_the_device_takes_in_parts_is_whole(device: str, monkeypatch: pytest.MonkeyPatch, *, refused_then: bool) -> None:
    content, parts, real = os.urandom(MIB), list[int](), os.pwrite

    def pwrite(fd: int, data: memoryview, offset: int) -> int:
        if not fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_DIRECT:
            return real(fd, data, offset)
        if refused_then and parts:
            raise OSError(errno.EINVAL, "Invalid argument")
        parts.append(offset)
        return real(fd, data[: MIB // 4], offset)

    monkeypatch.setattr(os, "pwrite", pwrite)
    writer = open_direct_writer(device, SIZE)
    writer.write(4096, memoryview(content))
    writer.close()
    with Path(device).open("rb") as file:
        assert [file.read(2 * MIB) == bytes(4096) + content + bytes(MIB - 4096)] == [True]


def test_a_flush_reaches_the_device_and_its_error_the_caller(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Past the page cache too: the device has a cache of its own."""
    synced: list[int] = []

    def fdatasync(descriptor: int) -> None:
        synced.append(os.fstat(descriptor).st_rdev)
        raise OSError(errno.EIO, "Input/output error")

    writer = open_direct_writer(device, SIZE)
    monkeypatch.setattr(os, "fdatasync", fdatasync)
    with pytest.raises(DiskWriteFailed, match="Input/output error"):
        writer.flush()
    assert synced == [Path(device).stat().st_rdev]
    writer.close()


def test_a_file_is_no_device(tmp_path: Path) -> None:
    with pytest.raises(DiskWriteFailed, match="cannot be opened"):
        open_direct_writer(str(tmp_path / "none"), SIZE)
