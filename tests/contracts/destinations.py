"""The laws of Destination, as one suite. A destination joins by a subclass whose fixture `case` makes one that is empty."""

import contextlib
import subprocess
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from tempfile import NamedTemporaryFile
from uuid import UUID, uuid4

import pytest

from synvirt.blocks import DiskReader
from synvirt.destinations import Destination
from synvirt.disks import open_reader, open_writer
from synvirt.disks.specs import AsideWriterSpec, ImageSpec, RawSpec, RbdSpec, RbdWriterSpec, written
from synvirt.errors import DiskWriteFailed

MIB = 1 << 20
# Of no block size in use a multiple.
SIZE = 3 * MIB + 513


@dataclass(frozen=True, slots=True)
class DestinationCase:
    """`another`: a second destination over the same place, as the service has after a restart. `volumes()`: all that there is
    in the place, as somebody who looks from outside sees it."""

    destination: Destination
    another: Callable[[], Destination]
    volumes: Callable[[], list[str]]


def write(destination: Destination, name: str, size: int, offset: int, data: bytes) -> None:
    writer = open_writer(destination.open(name, size))
    try:
        writer.write(offset, memoryview(data))
        writer.flush()
    finally:
        writer.close()


def read(destination: Destination, name: str, offset: int, length: int) -> bytes:
    buffer = bytearray(length)
    with contextlib.closing(whole(destination, name)) as reader:
        reader.read_into(offset, memoryview(buffer))
    return bytes(buffer)


def whole(destination: Destination, name: str) -> DiskReader:
    """All of the device that a domain opens: a volume may be larger than the disk. What lies aside of it is folded first."""
    spec = destination.open(name, SIZE)
    if isinstance(spec, AsideWriterSpec):
        if not spec.folds:
            return open_reader(written(spec))
        open_writer(spec).close()
    if isinstance(spec, RbdWriterSpec):
        return open_reader(RbdSpec(place=spec.place, image=spec.image))
    return open_reader(RawSpec(path=destination.device(name)))


def read_clone(destination: Destination, name: str, to: str, offset: int, length: int) -> bytes:
    """As a guest that is started from it."""
    if destination.backing_file(name, to) is None:
        return read(destination, to, offset, length)
    spec = ImageSpec(format="qcow2", over=RawSpec(path=destination.device(to)), root="/", name=destination.device(to)[1:])
    buffer = bytearray(length)
    with contextlib.closing(open_reader(spec)) as reader:
        reader.read_into(offset, memoryview(buffer))
    return bytes(buffer)


def write_clone(destination: Destination, name: str, to: str, offset: int, data: bytes) -> None:
    if destination.backing_file(name, to) is None:
        write(destination, to, SIZE, offset, data)
        return
    with NamedTemporaryFile() as file:
        file.write(data)
        file.flush()
        put = f"write -q -s {file.name} {offset} {len(data)}"
        subprocess.run(["qemu-io", "-f", "qcow2", "-c", put, destination.device(to)], check=True)


class DestinationContract:
    @pytest.fixture
    def case(self) -> DestinationCase:
        raise NotImplementedError

    def volume(self, case: DestinationCase, label: str = "Hard disk 1", *, job: UUID | None = None, size: int = SIZE) -> str:
        name = case.destination.volume_name(job or uuid4(), label)
        case.destination.create(name, size)
        return name

    def test_a_new_volume_reads_as_zeros_and_is_as_large_as_the_disk(self, case: DestinationCase) -> None:
        name = self.volume(case)
        with contextlib.closing(whole(case.destination, name)) as reader:
            end = reader.size
        assert SIZE <= end < SIZE + MIB
        assert read(case.destination, name, 0, end) == bytes(end)
        assert case.destination.open(name, SIZE).size_bytes == SIZE
        assert case.destination.device_type in ("file", "block", "rbd")

    def test_made_again_it_is_the_same_volume(self, case: DestinationCase) -> None:
        name = self.volume(case)
        write(case.destination, name, SIZE, 70_000, b"kept")
        case.another().create(name, SIZE)
        assert read(case.destination, name, 70_000, 4) == b"kept"

    def test_it_says_whether_a_volume_is_there(self, case: DestinationCase) -> None:
        job = uuid4()
        name = case.destination.volume_name(job, "Hard disk 1")
        assert not case.destination.is_there(name)
        other = self.volume(case, "Hard disk 2", job=job)
        assert not case.destination.is_there(name)
        case.destination.create(name, SIZE)
        assert case.another().is_there(name)
        case.destination.destroy(name)
        assert [case.another().is_there(one) for one in (name, other)] == [False, True]

    def test_a_volume_of_another_size_is_refused_and_left_alone(self, case: DestinationCase) -> None:
        name = self.volume(case)
        write(case.destination, name, SIZE, 0, b"kept")
        with pytest.raises(DiskWriteFailed, match=str(SIZE + 1)) as caught:
            case.destination.create(name, SIZE + 1)
        assert caught.value.hint
        assert read(case.destination, name, 0, 4) == b"kept"

    def test_the_name_comes_from_job_and_label_alone(self, case: DestinationCase) -> None:
        job = uuid4()
        assert case.destination.volume_name(job, "a b") == case.another().volume_name(job, "a b")
        names = [case.destination.volume_name(one, label) for one in (job, uuid4()) for label in ("a b", "a_b", "", "é", "..")]
        assert len(set(names)) == len(names)

    def test_disks_of_a_job_lie_beside_each_other(self, case: DestinationCase) -> None:
        job, labels = uuid4(), ("a b", "a_b", "Ärger/../x", "-", "x" * 300)
        names = [self.volume(case, label, job=job) for label in labels]
        for number, name in enumerate(names):
            write(case.destination, name, SIZE, 0, b"disk %d" % number)
        for number, name in enumerate(names):
            assert read(case.destination, name, 0, 6) == b"disk %d" % number
        for name in names:
            case.destination.destroy(name)
        assert case.volumes() == []

    def test_what_is_destroyed_is_gone_and_can_be_made_again(self, case: DestinationCase) -> None:
        job = uuid4()
        name, other = self.volume(case, job=job), self.volume(case, "other", job=job)
        write(case.destination, name, SIZE, 0, b"old")
        case.destination.destroy(name)
        case.another().destroy(name)
        assert len(case.volumes()) == 1
        case.destination.create(name, SIZE)
        assert read(case.destination, name, 0, 3) == bytes(3)
        for one in (name, other):
            case.destination.destroy(one)
        assert case.volumes() == []

    def test_a_volume_that_never_was_is_destroyed_too(self, case: DestinationCase) -> None:
        case.destination.destroy(case.destination.volume_name(uuid4(), "disk"))

    @pytest.mark.parametrize("name", ["../../etc/passwd", "elsewhere/disk", "", "a/../../b", "/etc/passwd", "x@y", "-r", "%"])
    def test_names_that_are_not_of_this_destination_are_refused(self, case: DestinationCase, name: str) -> None:
        destination, good = case.destination, case.destination.volume_name(uuid4(), "disk")
        calls: tuple[Callable[[], object], ...] = (
            lambda: destination.create(name, SIZE),
            lambda: destination.destroy(name),
            lambda: destination.device(name),
            lambda: destination.open(name, SIZE),
            lambda: destination.clone(name, good),
            lambda: destination.clone(good, name),
            lambda: destination.unclone(good, name),
        )
        for call in calls:
            with pytest.raises(DiskWriteFailed):
                call()

    def test_a_clone_is_the_volume_of_that_moment(self, case: DestinationCase) -> None:
        name, to = self.volume(case), case.destination.volume_name(uuid4(), "Hard disk 1")
        write(case.destination, name, SIZE, 70_000, b"before")
        if case.destination.why_no_clones() is not None:
            with pytest.raises(DiskWriteFailed) as caught:
                case.destination.clone(name, to)
            assert caught.value.hint
        else:
            case.destination.clone(name, to)
            beneath = case.destination.backing_file(name, to)
            assert beneath in (None, case.destination.device(name))
            write(case.destination, name, SIZE, 70_000, b"after ")
            assert read_clone(case.destination, name, to, 70_000, 6) == b"before"
            write_clone(case.destination, name, to, 70_000, b"rehear")
            assert read(case.another(), name, 70_000, 6) == b"after "
            assert read_clone(case.another(), name, to, 70_000, 6) == b"rehear"
            assert case.destination.open(name, SIZE).size_bytes == SIZE
            assert len(case.volumes()) == 2
            case.another().unclone(name, to)
            assert read(case.another(), name, 70_000, 6) == b"after "
            case.another().clone(name, to)
            assert read_clone(case.destination, name, to, 70_000, 6) == b"after "
        for _ in range(2):
            case.another().unclone(name, to)
        assert len(case.volumes()) == 1
        assert case.destination.backing_file(name, to) is None
        assert read(case.destination, name, 70_000, 1) in b"ab"
        case.destination.destroy(name)
        case.destination.unclone(name, to)
        assert case.volumes() == []

    def test_a_clone_is_made_anew_where_a_service_that_was_killed_had_made_it(self, case: DestinationCase) -> None:
        if case.destination.why_no_clones() is not None:
            return
        name, to = self.volume(case), case.destination.volume_name(uuid4(), "disk")
        write(case.destination, name, SIZE, 0, b"before")
        case.destination.clone(name, to)
        write_clone(case.destination, name, to, 0, b"rehear")
        case.another().clone(name, to)
        assert read_clone(case.destination, name, to, 0, 6) == b"before"
        case.destination.unclone(name, to)
        case.destination.destroy(name)
        assert case.volumes() == []

    def test_a_volume_has_several_clones(self, case: DestinationCase) -> None:
        if case.destination.why_no_clones() is not None:
            return
        name, clones = self.volume(case), [case.destination.volume_name(uuid4(), "disk") for _ in range(2)]
        for number, to in enumerate(clones):
            # One that must stay as it is cannot be cloned in two states.
            if number == 0 or case.destination.backing_file(name, clones[0]) is None:
                write(case.destination, name, SIZE, 0, b"%d" % number)
            case.destination.clone(name, to)
        same = case.destination.backing_file(name, clones[0]) is not None
        case.destination.unclone(name, clones[0])
        assert read_clone(case.destination, name, clones[1], 0, 1) == (b"0" if same else b"1")
        case.destination.unclone(name, clones[1])
        case.destination.destroy(name)
        assert case.volumes() == []

    def test_a_volume_that_is_released_is_written_itself(self, case: DestinationCase) -> None:
        if case.destination.why_no_clones() is not None:
            return
        name, to = self.volume(case), case.destination.volume_name(uuid4(), "disk")
        case.destination.clone(name, to)
        write(case.destination, name, SIZE, 0, b"aside, where there is a side")
        case.destination.release(name)
        write(case.destination, name, SIZE, 0, b"itself")
        assert not isinstance(case.destination.open(name, SIZE), AsideWriterSpec)
        assert read(case.destination, name, 0, 12) == b"itself where"
        case.destination.unclone(name, to)
        case.destination.destroy(name)
        assert case.volumes() == []

    def test_free_is_what_can_be_written(self, case: DestinationCase) -> None:
        assert MIB < case.destination.free_bytes() < 1 << 60

    def test_jobs_make_volumes_at_the_same_time(self, case: DestinationCase) -> None:
        barrier = threading.Barrier(4, timeout=60)
        job = uuid4()

        def make(number: int) -> str:
            barrier.wait()
            return self.volume(case, f"disk {number}", job=job if number < 2 else None)

        with ThreadPoolExecutor(4) as pool:
            names = list(pool.map(make, range(4)))
            assert len(case.volumes()) == 4
            list(pool.map(case.destination.destroy, names))
        assert case.volumes() == []
