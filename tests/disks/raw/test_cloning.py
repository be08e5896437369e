"""Sharing instead of copying: on real reflinks (XFS, Btrfs), and by laws on a kernel call that is played."""

import errno
import fcntl
import os
import struct
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from synvirt.blocks import Extent, Place
from synvirt.copying import copy
from synvirt.disks.raw import cloning
from synvirt.disks.raw.cloning import Rest, clone
from synvirt.disks.raw.files import RawReader, open_file_writer
from synvirt.disks.vdi import VdiReader
from synvirt.errors import Cancelled
from tests.contracts.readers import check_extents, read_all
from tests.devices import loop_device
from tests.disks.vdi_images import FREE, Vdi
from tests.fakes.disks import BLOCK_BYTES, MemoryReader, MemoryWriter, extents_of
from tests.needs import need, need_root

MIB = 1 << 20
BLOCK = 4096


@contextmanager
def mounted(file_system: str, folder: Path) -> Iterator[Path]:
    """A new file system with reflinks, in a file."""
    need_root("mount")
    make = {"xfs": ["mkfs.xfs", "-q", "-m", "reflink=1"], "btrfs": ["mkfs.btrfs", "-q"]}[file_system]
    program = need(make[0], {"xfs": "xfsprogs", "btrfs": "btrfs-progs"}[file_system])
    image, place = folder / "file-system", folder / "mounted"
    place.mkdir()
    with image.open("wb") as file:
        file.truncate(400 * MIB)
    with loop_device(image) as device:
        subprocess.run([program, *make[1:], device], check=True, capture_output=True)
        subprocess.run(["mount", device, place], check=True)
        try:
            yield place
        finally:
            subprocess.run(["umount", place], check=True)


def played(monkeypatch: pytest.MonkeyPatch, allowed: Callable[[int], bool] = lambda call: True) -> list[tuple[int, int, int]]:
    """Clones are copies, which insist on whole blocks as the kernel does. The calls: (at, length, start)."""
    calls: list[tuple[int, int, int]] = []

    def ficlonerange(descriptor: int, request: int, argument: bytes) -> None:
        source, at, length, start = struct.unpack("=qQQQ", argument)
        assert request == 0x4020940D
        if at % BLOCK or length % BLOCK or start % BLOCK or length == 0:
            raise OSError(errno.EINVAL, "unaligned")
        if not allowed(len(calls)):
            raise OSError(errno.EOPNOTSUPP, "not supported")
        calls.append((at, length, start))
        os.pwrite(descriptor, os.pread(source, length, at), start)

    monkeypatch.setattr(fcntl, "ioctl", ficlonerange)
    return calls


def files(folder: Path, content: bytes, offset: int, length: int) -> tuple[RawReader, Path]:
    source, target = folder / "source.raw", folder / "target.raw"
    with source.open("wb") as file:
        for at in range(0, len(content), BLOCK):
            block = content[at : at + BLOCK]
            if block != bytes(len(block)):
                os.pwrite(file.fileno(), block, at)
        file.truncate(len(content))
    with target.open("wb") as file:
        file.truncate(length)
    return RawReader(str(source), offset, length), target


@given(
    blocks=st.lists(st.sampled_from([b"\0", b"a", b"b"]), max_size=40),
    offset=st.sampled_from([0, BLOCK, 3 * BLOCK, 512, BLOCK + 1536]),
    tail=st.integers(0, 5000),
    granted=st.integers(0, 4),
    step=st.sampled_from([BLOCK, 3 * BLOCK, 1 << 30]),
)
@settings(deadline=None, max_examples=100)
def test_the_clone_and_a_copy_of_the_rest_are_the_disk(
    tmp_path_factory: pytest.TempPathFactory, blocks: list[bytes], offset: int, tail: int, granted: int, step: int
) -> None:
    """However many clones the file system grants, and however the range lies in its file."""
    folder = tmp_path_factory.mktemp("clone")
    content = b"".join(block * BLOCK for block in blocks) + b"t" * (tail + 8192)
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(cloning, "STEP_BYTES", step)
        calls = played(monkeypatch, lambda call: call < granted)
        reader, target = files(folder, content, min(offset, len(content)), len(content) - min(offset, len(content)))
        writer = open_file_writer(str(target), reader.size)
        rest = clone(reader, writer)
        assert rest.bytes_cloned == sum(length for _, length, _ in calls)
        data = sum(extent.length for extent in reader.extents() if not extent.zero)
        check_extents(list(rest.extents()), read_all(rest), whole=False)
        assert sum(extent.length for extent in rest.extents() if not extent.zero) == data - rest.bytes_cloned
        copied = copy(rest, writer)
        assert copied.bytes_done == data - rest.bytes_cloned
        assert target.read_bytes() == content[min(offset, len(content)) :]
        rest.close()
        writer.close()


@given(start=st.integers(0, 3 * BLOCK), length=st.integers(1, 6 * BLOCK), shift=st.sampled_from([-BLOCK, 0, 5 * BLOCK, 512, 1]))
@settings(deadline=None)
def test_all_whole_blocks_of_a_place_are_cloned_and_no_byte_beside_it(start: int, length: int, shift: int) -> None:
    """What is beside it belongs to something else, on both sides. The place itself may begin and end anywhere."""
    place = Place(start + BLOCK, length, 7, start + BLOCK + shift)
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(cloning, "STEP_BYTES", 2 * BLOCK)
        pieces = list(cloning._pieces(iter([place]), BLOCK))
    assert all(
        (one.at - one.start, one.descriptor, one.start % BLOCK, one.length % BLOCK) == (shift, 7, 0, 0) for one in pieces
    )
    cloned = [at for one in pieces for at in range(one.start, one.start + one.length, BLOCK)]
    whole = [at for at in range(0, 16 * BLOCK, BLOCK) if place.start <= at and at + BLOCK <= place.start + length]
    assert cloned == ([] if shift % BLOCK else whole)


@given(
    blocks=st.text("AB-.", max_size=30),
    cloned=st.lists(st.integers(0, 30 * BLOCK_BYTES), max_size=8, unique=True).map(sorted),
)
@settings(deadline=None)
def test_the_rest_is_what_was_not_cloned(blocks: str, cloned: list[int]) -> None:
    size = len(blocks) * BLOCK_BYTES
    edges = [min(at, size) for at in cloned]
    ranges = [(start, end) for start, end in zip(edges[::2], edges[1::2], strict=False) if start < end]
    rest = Rest(MemoryReader(blocks), ranges)
    covered = bytearray(size)
    for extent in rest.extents():
        covered[extent.start : extent.end] = (b"z" if extent.zero else b"d") * extent.length
    expected = bytearray(size)
    for extent in extents_of(blocks):
        expected[extent.start : extent.end] = (b"z" if extent.zero else b"d") * extent.length
    for start, end in ranges:
        expected[start:end] = bytes(end - start)
    assert covered == expected
    check_extents(list(rest.extents()), bytes(size), whole=False)


def test_readers_and_writers_without_places_are_copied(tmp_path: Path) -> None:
    reader = MemoryReader("A-B")
    rest = clone(reader, MemoryWriter(reader.size))
    assert rest.bytes_cloned == 0
    assert list(rest.extents()) == list(reader.extents())


def test_a_file_system_without_reflinks_is_asked_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []

    def refused(descriptor: int, request: int, argument: bytes) -> None:
        calls.append(argument)
        raise OSError(errno.EOPNOTSUPP, "not supported")

    monkeypatch.setattr(fcntl, "ioctl", refused)
    reader, target = files(tmp_path, (b"a" * BLOCK + bytes(BLOCK)) * 10, 0, 20 * BLOCK)
    monkeypatch.setattr(RawReader, "places", lambda self: pytest.fail("on tmpfs, each page of the file is looked at for them"))
    assert clone(reader, open_file_writer(str(target), reader.size)).bytes_cloned == 0
    assert len(calls) == 1


@pytest.mark.parametrize(("data_at", "blocks_cloned"), [(MIB, 2), (MIB + 512, 0)])
def test_an_images_blocks_are_cloned_where_the_file_system_has_an_edge(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, data_at: int, blocks_cloned: int
) -> None:
    """VirtualBox begins a VDI's data at 1 MiB, QEMU at any sector: then there is nothing that a clone could be of."""
    played(monkeypatch)
    image = Vdi(entries=(1, FREE, 0), size=3 * 64 * 1024, data_at=data_at)
    content = image.file(seed=1)
    (tmp_path / "source.vdi").write_bytes(content)
    reader = VdiReader(RawReader(str(tmp_path / "source.vdi")))
    target = tmp_path / "target.raw"
    with target.open("wb") as file:
        file.truncate(reader.size)
    writer = open_file_writer(str(target), reader.size)
    rest = clone(reader, writer)
    assert rest.bytes_cloned == blocks_cloned * image.block_bytes
    copy(rest, writer)
    assert target.read_bytes() == image.disk(content)
    rest.close()
    writer.close()


def test_a_cancel_is_looked_at_before_each_clone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = played(monkeypatch)
    reader, target = files(tmp_path, (b"a" * BLOCK + bytes(BLOCK)) * 10, 0, 20 * BLOCK)
    with pytest.raises(Cancelled):
        clone(reader, open_file_writer(str(target), reader.size), stop=lambda: len(calls) >= 3)
    assert len(calls) == 3


@pytest.mark.parametrize("file_system", ["xfs", "btrfs"])
def test_real_reflinks_take_no_room(file_system: str, tmp_path: Path) -> None:
    with mounted(file_system, tmp_path) as folder:
        content = os.urandom(16 * MIB + 1234)
        reader, target = files(folder, content, 0, len(content))
        os.sync()
        free = os.statvfs(folder).f_bavail * os.statvfs(folder).f_frsize
        writer = open_file_writer(str(target), reader.size)
        rest = clone(reader, writer)
        copied = copy(rest, writer)
        assert rest.bytes_cloned == len(content) // BLOCK * BLOCK
        assert list(rest.extents()) == [Extent(rest.bytes_cloned, 1234 % BLOCK)]
        assert copied.bytes_done == 1234
        os.sync()
        assert free - os.statvfs(folder).f_bavail * os.statvfs(folder).f_frsize < 8 * MIB
        (folder / "source.raw").unlink()
        assert target.read_bytes() == content
        rest.close()
        writer.close()
