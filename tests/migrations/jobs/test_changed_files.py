"""A file that is written to, or replaced, while a job reads it: also one that only an image names. Two halves are no disk."""

import asyncio
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from synvirt.disks.specs import RawSpec
from synvirt.errors import DiskReadFailed
from synvirt.jobs.stop import Stop
from synvirt.migrations.files import refuse_changed
from synvirt.migrations.job import Job
from synvirt.migrations.memory import JobMemory, noting
from synvirt.migrations.passes import PassDisk
from synvirt.model.job import Migration
from synvirt.model.kinds import State
from synvirt.programs import run
from synvirt.remote import Remote
from synvirt.sizes import MIB
from tests.fakes.workers import in_process
from tests.house import House, offline_plan
from tests.migrations.jobs.running import error_code, flushed, run_until_death

SIZE = 8 * MIB


@pytest.fixture
def house(tmp_path: Path) -> Iterator[House]:
    house = House(tmp_path, real_importers=True, workers=in_process)
    yield house
    house.close()


@pytest.fixture
def base(house: House) -> Path:
    """The backing file of `top.qcow2`."""
    base = house.imports / "base.raw"
    base.write_bytes(os.urandom(SIZE))
    top = house.imports / "top.qcow2"
    run(["qemu-img", "create", "-q", "-f", "qcow2", "-b", base.name, "-F", "raw", str(top)], timeout_s=60)
    return base


def submitted(house: House) -> Migration:
    """A job that has not read all of it at its first watermark."""
    return house.intake.submit(offline_plan(house.imports / "top.qcow2", kind="qcow2", limits={"bandwidth_bps": 2 * SIZE}))


def rewritten(path: Path) -> None:
    """Its last MiB, a second after its last change."""
    last = path.stat().st_mtime_ns
    with path.open("r+b") as file:
        file.seek(SIZE - MIB)
        file.write(bytes(MIB))
    os.utime(path, ns=(last, last + 1_000_000_000))


def replaced(path: Path) -> None:
    new = path.with_name("new")
    new.write_bytes(os.urandom(SIZE))
    new.rename(path)


def at_the_first_watermark(house: House, job: Migration, do: Callable[[], None]) -> None:
    def committed() -> None:
        house.store.on_commit = lambda: None
        if flushed(house, job):
            do()
        else:
            house.store.on_commit = committed

    house.store.on_commit = committed


def assert_failed(house: House, job: Migration, *words: str) -> None:
    assert (job.state, error_code(job)) == (State.FAILED, "E_MIG_DISK_READ_FAILED")
    assert job.last_error is not None
    for word in words:
        assert word in job.last_error.message
    assert house.leftovers() == []


@pytest.mark.timeout(60)
def test_a_backing_file_that_is_written_to_fails_the_job_at_its_next_watermark(house: House, base: Path) -> None:
    job = submitted(house)
    at_the_first_watermark(house, job, lambda: rewritten(base))
    ended = house.run(job.id)
    assert_failed(house, ended, "disk disk0: base.raw was changed while it was read")
    assert ended.progress.bytes_done < SIZE, "the rest was not copied in vain"


@pytest.mark.timeout(60)
@pytest.mark.parametrize("change", [rewritten, replaced])
def test_a_backing_file_that_is_another_after_a_restart_fails_the_job(
    house: House, base: Path, change: Callable[[Path], None]
) -> None:
    job = submitted(house)
    run_until_death(house, job, lambda: flushed(house, job))
    change(base)
    assert_failed(house, house.run(job.id), "disk disk0: base.raw was changed or replaced since its copy began")


@pytest.mark.timeout(60)
def test_a_job_goes_on_with_the_files_that_it_began_with(house: House, base: Path) -> None:
    job = submitted(house)
    run_until_death(house, job, lambda: flushed(house, job))
    ended = house.run(job.id)
    assert (ended.state, ended.last_error) == (State.COMPLETED, None)
    assert house.volume(ended, ended.disks[0].key).read_bytes() == base.read_bytes()


@pytest.mark.timeout(60)
def test_an_image_that_is_changed_between_two_starts_is_named_with_its_disk(house: House, base: Path) -> None:
    job = submitted(house)
    run_until_death(house, job, lambda: flushed(house, job))
    replaced_image = house.imports / "top.qcow2"
    last = replaced_image.stat().st_mtime_ns
    os.utime(replaced_image, ns=(last, last + 1))
    assert_failed(house, house.run(job.id), "disk disk0: top.qcow2 was changed or replaced")


@pytest.mark.timeout(60)
@pytest.mark.parametrize("changes", [False, True])
def test_a_job_that_an_earlier_version_began_knows_its_files(house: House, base: Path, changes: bool) -> None:
    """It noted them as one text."""
    top = house.imports / "top.qcow2"
    job = submitted(house)
    run_until_death(house, job, lambda: flushed(house, job))
    status = top.stat()
    earlier = repr([(str(top), status.st_size, status.st_mtime_ns, status.st_ino)])
    change = house.store.memory.change(job.id, JobMemory, lambda before: noting(before, files=None, source_files=earlier))
    assert change.files is None
    if changes:
        os.utime(top, ns=(status.st_mtime_ns, status.st_mtime_ns + 1))
        assert_failed(house, house.run(job.id), "disk disk0: top.qcow2 was changed or replaced")
    else:
        assert house.run(job.id).state == State.COMPLETED


@pytest.mark.parametrize("note", ["now", "earlier"])
def test_of_a_remote_file_that_changed_the_name_is_said_and_not_its_version(house: House, base: Path, note: str) -> None:
    """A name and a version may both have blanks, and one name may be the beginning of another."""
    job = Job(submitted(house), house.rooms, Stop())
    one, other = "Disk 1", "Disk 1 1"

    def disks(version: str) -> list[PassDisk]:
        readers = {
            key: RawSpec(path=key, remote=Remote(url="https://files.example/"), version=known)
            for key, known in ((one, '9 "a"'), (other, version))
        }
        return [PassDisk(key, reader, key, 9) for key, reader in readers.items()]

    if note == "earlier":
        texts = repr([f'https://files.example/{one} 9 "a"', f'https://files.example/{other} 9 "b c"'])
        house.store.memory.change(job.id, JobMemory, lambda before: noting(before, source_files=texts))
    for _ in range(2):
        asyncio.run(refuse_changed(job, disks('9 "b c"')))
    with pytest.raises(DiskReadFailed) as refused:
        asyncio.run(refuse_changed(job, disks('8 "b c"')))
    words = "was changed or replaced while it was being imported"
    assert refused.value.detail == f"disk {other}: https://files.example/{other} {words}"
