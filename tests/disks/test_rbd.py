"""RBD images in a real Ceph cluster: the laws of readers, writers and destinations, and what a cluster does of its own."""

import subprocess
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from random import Random
from types import SimpleNamespace
from typing import Any
from uuid import uuid4

import pytest

from synvirt.destinations.rbd import RbdDestination
from synvirt.disks import open_reader, open_writer
from synvirt.disks.rbd import RbdPool
from synvirt.disks.specs import RbdPlace, RbdSpec
from synvirt.errors import DiskReadFailed, DiskWriteFailed
from tests.contracts.readers import ReaderCase, ReaderContract, read_all
from tests.contracts.writers import WriterCase, WriterContract
from tests.servers import ceph

MIB = 1 << 20
SIZE = 9 * MIB + 513
# A cluster takes 12 s to come up on an idle machine.
pytestmark = pytest.mark.timeout(300)


@pytest.fixture(scope="module")
def conf() -> Iterator[Path]:
    with ceph.cluster() as path:
        yield path


@pytest.fixture
def place(conf: Path) -> RbdPlace:
    """An empty pool."""
    place = RbdPlace(conf=str(conf), client="admin", pool=ceph.POOL)
    for image in images(place):
        ceph.rbd(Path(place.conf), "rm", image)
    return place


@pytest.fixture
def destination(place: RbdPlace) -> RbdDestination:
    return RbdDestination(place)


def images(place: RbdPlace) -> list[str]:
    return ceph.rbd(Path(place.conf), "ls").split()


def content(destination: RbdDestination, name: str) -> bytes:
    """By another program: QEMU, in the words that a domain has."""
    raw = Path(f"/tmp/{name}.raw")
    try:
        argv = ["qemu-img", "convert", "-f", "raw", "-O", "raw", destination.device(name), str(raw)]
        subprocess.run(argv, check=True, timeout=120, capture_output=True)
        return raw.read_bytes()
    finally:
        raw.unlink(missing_ok=True)


class TestWriter(WriterContract):
    @pytest.fixture
    def case(self, place: RbdPlace, destination: RbdDestination) -> WriterCase:
        name = destination.volume_name(uuid4(), "disk")
        destination.create(name, SIZE)
        spec = RbdSpec(place=place, image=name)

        def whole() -> bytes:
            reader = open_reader(spec)
            try:
                return read_all(reader)
            finally:
                reader.close()

        return WriterCase(open=lambda: open_writer(destination.open(name, SIZE)), content=whole)


class TestReader(ReaderContract):
    @pytest.fixture
    def case(self, place: RbdPlace, destination: RbdDestination) -> ReaderCase:
        name = destination.volume_name(uuid4(), "disk")
        destination.create(name, SIZE)
        random = Random(7)
        expected = bytearray(SIZE)
        writer = open_writer(destination.open(name, SIZE))
        for _ in range(12):
            length = random.choice([1, 4096, 100_000])
            offset = random.randrange(SIZE - length)
            data = random.randbytes(length)
            writer.write(offset, memoryview(data))
            expected[offset : offset + length] = data
        writer.close()
        return ReaderCase(open=lambda: open_reader(RbdSpec(place=place, image=name, size_bytes=SIZE)), content=bytes(expected))


def test_qemu_reads_what_was_written(destination: RbdDestination) -> None:
    name = destination.volume_name(uuid4(), "Hard disk 1")
    destination.create(name, SIZE)
    data = Random(1).randbytes(SIZE)
    writer = open_writer(destination.open(name, SIZE))
    writer.write(0, memoryview(data))
    writer.zero(MIB + 5, 5 * MIB)
    writer.flush()
    writer.close()
    expected = data[: MIB + 5] + bytes(5 * MIB) + data[6 * MIB + 5 :]
    found = content(destination, name)
    assert found[:SIZE] == expected
    assert not any(found[SIZE:])


def test_what_no_object_was_made_for_is_zero_and_takes_no_room(place: RbdPlace, destination: RbdDestination) -> None:
    name = destination.volume_name(uuid4(), "large")
    size = 5 << 40
    destination.create(name, size)
    writer = open_writer(destination.open(name, size))
    writer.write(3 << 40, memoryview(b"here"))
    writer.close()
    reader = open_reader(RbdSpec(place=place, image=name))
    # Not all 5,120 windows: what lies around the one object.
    walk = reader.extents()
    extents = [next(walk) for _ in range(3)]
    assert all(extent.zero for extent in extents)
    reader.close()
    assert destination.free_bytes() < size


def test_extents_cross_what_is_asked_at_once(place: RbdPlace, destination: RbdDestination) -> None:
    name = destination.volume_name(uuid4(), "windows")
    size = (2 << 30) + 5 * MIB
    destination.create(name, size)
    writer = open_writer(destination.open(name, size))
    for offset in (0, (1 << 30) - 2, size - 4):
        writer.write(offset, memoryview(b"here"))
    writer.close()
    reader = open_reader(RbdSpec(place=place, image=name, size_bytes=size))
    end = 0
    for extent in reader.extents():
        assert extent.start == end
        end = extent.end
        written = [offset for offset in (0, (1 << 30) - 2, size - 4) if extent.start < offset + 4 and offset < end]
        assert not extent.zero or not written, extent
    assert end == size
    reader.close()


def test_a_volume_is_written_by_one_alone(destination: RbdDestination, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("synvirt.disks.rbd.LOCK_TIMEOUT_S", 1)
    name = destination.volume_name(uuid4(), "disk")
    destination.create(name, SIZE)
    first = open_writer(destination.open(name, SIZE))
    with pytest.raises(DiskWriteFailed, match="being written by somebody else"):
        open_writer(destination.open(name, SIZE))
    monkeypatch.setattr("synvirt.disks.rbd.LOCK_TIMEOUT_S", 60)
    threading.Timer(0.5, first.close).start()
    second = open_writer(destination.open(name, SIZE))
    second.write(0, memoryview(b"second"))
    second.close()


def test_a_volume_in_use_is_not_removed_and_says_so(place: RbdPlace, destination: RbdDestination) -> None:
    name = destination.volume_name(uuid4(), "disk")
    destination.create(name, SIZE)
    writer = open_writer(destination.open(name, SIZE))
    with pytest.raises(DiskWriteFailed, match="cannot be removed: Device or resource busy"):
        destination.destroy(name)
    writer.close()
    destination.destroy(name)
    assert images(place) == []


def test_an_image_of_somebody_else_is_left_alone(place: RbdPlace, destination: RbdDestination) -> None:
    mine, theirs = (destination.volume_name(uuid4(), "disk") for _ in range(2))
    destination.create(mine, SIZE)
    ceph.rbd(Path(place.conf), "create", "--size", "1M", theirs)
    with pytest.raises(DiskWriteFailed, match="does not carry the mark"):
        destination.destroy(theirs)
    with pytest.raises(DiskWriteFailed, match="does not carry the mark"):
        destination.create(theirs, MIB)
    assert sorted(images(place)) == sorted([mine, theirs])


def test_a_kill_while_a_volume_is_made_leaves_nothing_that_stays(
    place: RbdPlace, destination: RbdDestination, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Killed(BaseException):
        pass

    def killed(*_: Any) -> None:
        raise Killed

    name = destination.volume_name(uuid4(), "disk")
    with monkeypatch.context() as at_once:
        at_once.setattr("synvirt.destinations.rbd.set_marks", killed)
        with pytest.raises(Killed):
            destination.create(name, SIZE)
    assert images(place) == [f"{name}.unmarked"]
    destination.destroy(name)
    assert images(place) == []
    with monkeypatch.context() as at_once:
        at_once.setattr("synvirt.destinations.rbd.set_marks", killed)
        with pytest.raises(Killed):
            destination.create(name, SIZE)
    destination.create(name, SIZE)
    assert images(place) == [name]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"pool": "no-such-pool"}, "the Ceph pool no-such-pool cannot be opened"),
        ({"client": "nobody"}, "cannot be reached"),
        ({"conf": "/nonexistent/ceph.conf"}, "cannot be reached"),
    ],
)
def test_a_cluster_that_cannot_be_used_says_why(place: RbdPlace, change: dict[str, str], words: str) -> None:
    wrong = replace(place, **change)
    with pytest.raises(DiskWriteFailed, match=words):
        RbdDestination(wrong).free_bytes()


def test_a_pool_that_has_no_figures_yet_is_no_success(place: RbdPlace) -> None:
    """It was «cannot be inspected: Success», right after a pool was made."""
    with RbdPool(place) as pool:
        real, pool._cluster = pool._cluster, SimpleNamespace(mon_command=lambda *_: (0, b'{"pools": []}', ""))
        try:
            with pytest.raises(DiskWriteFailed, match=r"`ceph df` does not list the pool") as refused:
                pool.free_bytes()
        finally:
            pool._cluster = real
    assert "ceph -s" in str(refused.value.hint)


def test_an_image_that_is_gone_is_named(place: RbdPlace) -> None:
    with pytest.raises(DiskReadFailed, match="the image gone cannot be opened: No such file or directory"):
        open_reader(RbdSpec(place=place, image="gone"))


def test_an_image_that_does_not_close_keeps_no_connection(place: RbdPlace, destination: RbdDestination) -> None:
    import rbd

    name = destination.volume_name(uuid4(), "disk")
    destination.create(name, MIB)
    reader: Any = open_reader(RbdSpec(place=place, image=name))
    image = reader._image

    class Stuck:
        def close(self) -> None:
            image.close()
            raise rbd.Timeout("it does not answer", errno=110)

    reader._image = Stuck()
    with pytest.raises(DiskReadFailed, match="cannot be closed"):
        reader.close()
    assert reader._pool._cluster.state == "shutdown"
    reader.close()
