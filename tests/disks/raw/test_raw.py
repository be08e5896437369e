"""Raw files and devices: the contract suites, and each oddity of files that are holes, shrink, fill up or are no files."""

import errno
import os
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from synvirt.blocks import Extent
from synvirt.disks import open_reader, open_writer
from synvirt.disks.raw import files as raw
from synvirt.disks.raw.files import RawReader, RawWriter, open_file_writer
from synvirt.disks.specs import BlockWriterSpec, FileWriterSpec, RawSpec
from synvirt.errors import DiskReadFailed, DiskWriteFailed
from synvirt.sizes import WRITE_BYTES
from tests.contracts.readers import ReaderCase, ReaderContract, read_all
from tests.contracts.writers import WriterCase, WriterContract
from tests.devices import loop_device

MIB = 1 << 20


def sparse_file(path: Path, size: int, *pieces: tuple[int, bytes]) -> Path:
    with path.open("wb") as file:
        file.truncate(size)
        for at, data in pieces:
            file.seek(at)
            file.write(data)
    return path


class TestRawReader(ReaderContract):
    @pytest.fixture(params=["dense", "sparse", "hole at the end", "all a hole", "a range", "one byte"])
    def case(self, request: pytest.FixtureRequest, tmp_path: Path) -> ReaderCase:
        path = tmp_path / "disk.raw"
        noise = os.urandom(300_000)
        offset, length = 0, None
        match request.param:
            case "dense":
                sparse_file(path, 2 * MIB + 77, (0, os.urandom(2 * MIB + 77)))
            case "sparse":
                sparse_file(path, 9 * MIB + 1, (0, b"boot"), (3 * MIB, noise), (9 * MIB, b"x"))
            case "hole at the end":
                sparse_file(path, 9 * MIB, (MIB, noise))
            case "all a hole":
                sparse_file(path, 9 * MIB)
            case "a range":  # a tar member: any offset, data and holes of the archive around it
                sparse_file(path, 9 * MIB, (0, noise), (4 * MIB, noise))
                offset, length = 1536, 5 * MIB + 3
            case "one byte":
                sparse_file(path, 1, (0, b"!"))
        content = path.read_bytes()[offset : None if length is None else offset + length]
        return ReaderCase(open=lambda: RawReader(str(path), offset, length), content=content)


class TestFileWriter(WriterContract):
    @pytest.fixture(params=["holes", "no holes offered"])
    def case(self, request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> WriterCase:
        if request.param == "no holes offered":  # as on ext2 or NFS before 4.2

            def refuse(fd: int, offset: int, length: int) -> None:
                raise OSError(errno.EOPNOTSUPP, "not supported")

            monkeypatch.setattr(raw, "punch_hole", refuse)
        path = sparse_file(tmp_path / "volume.raw", 3 * MIB + 513)
        return WriterCase(open=lambda: open_file_writer(str(path), 3 * MIB + 513), content=path.read_bytes)


class TestAlignedZeroing(WriterContract):
    """As a device has it: only whole blocks can be made zero at once, the edges are written."""

    @pytest.fixture(params=[512, 4096, 65536])
    def case(self, request: pytest.FixtureRequest, tmp_path: Path) -> WriterCase:
        path = sparse_file(tmp_path / "volume.raw", 4 * MIB)

        def only_whole_blocks(fd: int, offset: int, length: int) -> None:
            assert length > 0
            assert offset % request.param == length % request.param == 0
            raw.punch_hole(fd, offset, length)

        def opened() -> RawWriter:
            fd = os.open(path, os.O_RDWR)
            return RawWriter(fd, "volume", 3 * MIB + 513, zeroings=(only_whole_blocks,), alignment=request.param)

        return WriterCase(open=opened, content=path.read_bytes)


def test_zero_makes_a_hole(tmp_path: Path) -> None:
    path = sparse_file(tmp_path / "volume.raw", 8 * MIB, (0, b"x" * (8 * MIB)))
    writer = open_file_writer(str(path), 8 * MIB)
    writer.zero(MIB, 7 * MIB)
    writer.close()
    assert path.stat().st_blocks * 512 <= MIB + 65536
    assert list(RawReader(str(path)).extents()) == [Extent(0, MIB), Extent(MIB, 7 * MIB, zero=True)]


def test_a_way_to_make_zeros_that_is_not_offered_is_tried_once(tmp_path: Path) -> None:
    path, offsets = sparse_file(tmp_path / "volume.raw", MIB, (0, b"x" * MIB)), []

    def not_offered(fd: int, offset: int, length: int) -> None:
        offsets.append(offset)
        raise OSError(errno.EOPNOTSUPP, "not supported")

    writer = RawWriter(os.open(path, os.O_RDWR), "volume", MIB, zeroings=(not_offered,))
    writer.zero(0, 4096)
    writer.zero(8192, 4096)
    writer.close()
    assert offsets == [0]
    assert path.read_bytes() == (bytes(4096) + b"x" * 4096) + bytes(4096) + b"x" * (MIB - 12288)


def test_no_write_is_longer_than_the_kernel_takes_well(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """See WRITE_BYTES: on ext4 and XFS a longer one costs several times as much."""
    taken: list[int] = []
    pwrite = os.pwrite

    def noted(descriptor: int, piece: memoryview, at: int) -> int:
        taken.append(len(piece))
        return pwrite(descriptor, piece, at)

    content = os.urandom(4 * MIB + 513)
    path = sparse_file(tmp_path / "disk.raw", 8 * MIB)
    writer = open_file_writer(str(path), 8 * MIB)
    monkeypatch.setattr(os, "pwrite", noted)
    writer.write(4096, memoryview(content))
    writer.close()
    assert path.read_bytes()[4096 : 4096 + len(content)] == content
    assert max(taken) == WRITE_BYTES


def test_what_the_kernel_takes_and_gives_in_parts_is_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """After a signal, or on a file system that is nearly full, a call may move less than was asked for."""
    path, content = sparse_file(tmp_path / "volume", 3000), os.urandom(3000)
    pwrite, preadv = os.pwrite, os.preadv
    monkeypatch.setattr(os, "pwrite", lambda descriptor, piece, at: pwrite(descriptor, piece[:999], at))
    monkeypatch.setattr(os, "preadv", lambda descriptor, pieces, at: preadv(descriptor, [pieces[0][:999]], at))
    with closing(open_writer(FileWriterSpec(path=str(path), size_bytes=3000))) as writer:
        writer.write(0, memoryview(content))
    assert path.read_bytes() == content
    with closing(RawReader(str(path))) as reader:
        assert read_all(reader) == content


def test_a_flush_reaches_the_disk_and_its_error_the_caller(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All durability of a copy rests on it. The kernel reports a write-back that failed once, and to nobody else."""
    path, synced, failing = sparse_file(tmp_path / "volume", MIB), list[int](), False

    def fdatasync(descriptor: int) -> None:
        synced.append(os.fstat(descriptor).st_ino)
        if failing:
            raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(os, "fdatasync", fdatasync)
    with closing(open_writer(FileWriterSpec(path=str(path), size_bytes=MIB))) as writer:
        writer.write(0, memoryview(b"x"))
        writer.flush()
        assert synced == [path.stat().st_ino]
        failing = True
        with pytest.raises(DiskWriteFailed, match="from the last watermark on") as caught:
            writer.flush()
        assert "kernel's log" in str(caught.value.hint)


def test_a_64_tib_hole_is_one_extent(tmp_path: Path) -> None:
    size = 15 << 40  # ext4's largest file has 16 TiB
    path = sparse_file(tmp_path / "huge.raw", size, (size // 2, b"data"))
    extents = list(RawReader(str(path)).extents())
    assert len(extents) == 3
    assert extents[0].zero
    assert extents[-1] == Extent(extents[1].end, size - extents[1].end, zero=True)


def test_a_file_that_shrank_is_an_error_and_not_zeros(tmp_path: Path) -> None:
    path = sparse_file(tmp_path / "disk.raw", 4 * MIB, (0, b"x" * (4 * MIB)))
    reader = RawReader(str(path))
    os.truncate(path, MIB)
    with pytest.raises(DiskReadFailed, match="ends before offset 1048576"):
        read_all(reader)
    with pytest.raises(DiskReadFailed, match="ends before offset 1048576"):
        list(reader.extents())
    reader.close()


def test_data_that_becomes_a_hole_while_extents_are_listed_is_no_empty_extent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = sparse_file(tmp_path / "disk.raw", 4 * MIB, (MIB, b"x" * MIB), (3 * MIB, b"y" * MIB))
    really, reader = os.lseek, RawReader(str(path))

    def punching(fd: int, at: int, whence: int) -> int:
        if (at, whence) == (MIB, os.SEEK_HOLE):
            with path.open("r+b") as file:
                raw.punch_hole(file.fileno(), MIB, MIB)
        return really(fd, at, whence)

    monkeypatch.setattr(os, "lseek", punching)
    extents = list(reader.extents())
    reader.close()
    assert all(extent.length > 0 for extent in extents)
    assert [(extent.start, extent.end) for extent in extents if not extent.zero] == [(3 * MIB, 4 * MIB)]


def test_a_range_beyond_the_end_is_refused_at_once(tmp_path: Path) -> None:
    path = sparse_file(tmp_path / "cut-off.ova", MIB)
    with pytest.raises(DiskReadFailed, match="but it ends at 1048576") as caught:
        RawReader(str(path), 4096, MIB)
    assert caught.value.hint
    assert str(tmp_path) not in caught.value.detail


@pytest.mark.parametrize("kind", ["absent", "folder", "fifo", "character device"])
def test_what_cannot_be_opened_is_named_without_its_path(kind: str, tmp_path: Path) -> None:
    path = tmp_path / "thing"
    match kind:
        case "folder":
            path.mkdir()
        case "fifo":
            os.mkfifo(path)
        case "character device":
            path.symlink_to("/dev/zero")
    for opened in (
        lambda: open_reader(RawSpec(path=str(path))),
        lambda: open_writer(FileWriterSpec(path=str(path), size_bytes=0)),
        lambda: open_writer(BlockWriterSpec(path=str(path), size_bytes=0)),
    ):
        with pytest.raises((DiskReadFailed, DiskWriteFailed), match=path.name) as caught:
            opened()
        assert str(tmp_path) not in caught.value.detail


def test_a_volume_of_another_size_is_refused(tmp_path: Path) -> None:
    path = sparse_file(tmp_path / "volume.raw", MIB)
    for size in (MIB - 1, MIB + 1):
        with pytest.raises(DiskWriteFailed, match=f"has {MIB} bytes, the disk {size}"):
            open_file_writer(str(path), size)


def test_a_read_error_names_offset_and_cause(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    reader = RawReader(str(sparse_file(tmp_path / "disk.raw", MIB)), 4096)

    def bad_sector(fd: int, buffers: list[memoryview], offset: int) -> int:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(os, "preadv", bad_sector)
    with pytest.raises(DiskReadFailed, match=r"disk\.raw cannot be read at offset 5096: Input/output error") as caught:
        reader.read_into(1000, memoryview(bytearray(10)))
    assert caught.value.hint
    reader.close()


def test_a_full_disk_names_offset_cause_and_hint() -> None:
    writer = RawWriter(os.open("/dev/full", os.O_RDWR), "volume.raw", MIB, zeroings=())
    with pytest.raises(DiskWriteFailed, match=r"volume\.raw: 4096 bytes at offset 8192 .*No space left on device") as caught:
        writer.write(8192, memoryview(bytes(4096)))
    assert caught.value.hint == "free space at the destination; if the job has failed, start it again then"
    with pytest.raises(DiskWriteFailed, match="at offset 100"):
        writer.zero(100, 10)
    writer.close()


class TestBlockDevice(WriterContract):
    """A loop device: real ioctls and a real block layer, with and without room behind the disk's end."""

    @pytest.fixture(params=[511, MIB])
    def case(self, request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[WriterCase]:
        size = 3 * MIB + 513
        with loop_device(sparse_file(tmp_path / "backing.raw", size + request.param)) as device:
            yield WriterCase(
                open=lambda: open_writer(BlockWriterSpec(path=device, size_bytes=size)), content=Path(device).read_bytes
            )


def test_a_device_reads_as_its_bytes_and_zeros_are_discarded(tmp_path: Path) -> None:
    backing = sparse_file(tmp_path / "backing.raw", 4 * MIB, (0, b"x" * (4 * MIB)))
    with loop_device(backing) as device:
        writer = open_writer(BlockWriterSpec(path=device, size_bytes=4 * MIB))
        writer.zero(MIB, 3 * MIB)
        writer.flush()
        writer.close()
        reader = open_reader(RawSpec(path=device))
        assert reader.size == 4 * MIB
        assert read_all(reader) == b"x" * MIB + bytes(3 * MIB)
        assert list(reader.extents()) == [Extent(0, 4 * MIB)]
        reader.close()
    assert backing.stat().st_blocks * 512 <= MIB + 65536


def test_a_device_in_use_is_refused(tmp_path: Path) -> None:
    with loop_device(sparse_file(tmp_path / "backing.raw", MIB)) as device:
        writer = open_writer(BlockWriterSpec(path=device, size_bytes=MIB))
        with pytest.raises(DiskWriteFailed, match="Device or resource busy") as caught:
            open_writer(BlockWriterSpec(path=device, size_bytes=MIB))
        assert caught.value.hint
        writer.close()
