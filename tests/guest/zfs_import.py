"""Whole imports onto real zfs volumes: by the engine's own steps and its copy workers, killed and cancelled on the way."""

import os
import random
import signal
import sqlite3
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import pytest

from synvirt.destinations.zfs import ZfsDestination
from synvirt.model.job import Migration
from synvirt.model.kinds import State
from tests.fakes.workers import in_process
from tests.guest import forked_workers
from tests.guest.zvols import POOL, new_destination, root, small_pool, used_bytes, volumes
from tests.house import House, offline_plan
from tests.migrations.engine_process import serve

KIB, MIB = 1 << 10, 1 << 20
DISK = "disk-0"
# Two runs of data in a disk of zeros, the last of which ends in the middle of a block.
FIRST, HOLE, LAST = random.Random(1).randbytes(8 * MIB), bytes(12 * MIB), random.Random(2).randbytes(2 * MIB + 512)
CONTENT = FIRST + HOLE + LAST
DATA_BYTES = len(FIRST) + len(LAST)
TIMEOUT_S = 240


@pytest.fixture(scope="module")
def destination() -> ZfsDestination:
    """One for all: each has four datasets to make."""
    return new_destination()


@pytest.fixture
def house(tmp_path: Path, destination: ZfsDestination) -> Iterator[House]:
    """Its disks are copied in this process: a worker of its own takes half a minute here to begin."""
    house = of_few_flushes(House(tmp_path, destination=destination, workers=in_process))
    yield house
    house.close()


@pytest.fixture
def with_processes(tmp_path: Path, destination: ZfsDestination) -> Iterator[House]:
    house = of_few_flushes(House(tmp_path, destination=destination))
    yield house
    house.close()


def of_few_flushes(house: House) -> House:
    """Enough for a copy of seconds. Each is a commit of the pool's and one of the store's, and here they take long."""
    object.__setattr__(house.rooms, "flush_every_s", 0.5)
    return house


def submitted(house: House, content: bytes = CONTENT, **fields: Any) -> Migration:
    folder = house.imports / "appliance"
    folder.mkdir()
    (folder / f"{DISK}.raw").write_bytes(content)
    return house.intake.submit(offline_plan(folder, **fields))


def volume(job: Migration) -> str:
    name = job.disks[0].volume
    assert name is not None
    return name


def until(house: House, happened: Callable[[], bool]) -> None:
    """It is looked for after each commit to the store, by whatever process: a look takes long here."""
    seen, deadline = None, time.monotonic() + TIMEOUT_S
    with closing(sqlite3.connect(house.folder / "store.db")) as commits:
        while (now := commits.execute("PRAGMA data_version").fetchone()) == seen or not happened():
            seen = now
            assert time.monotonic() < deadline, "it did not happen in time"
            time.sleep(0.1)


def watermark(house: House, job: Migration) -> int:
    return sum(mark.offset_bytes for mark in house.store.watermarks(job.id, 1).values())


def test_a_disk_lands_on_a_volume_and_its_zeros_take_no_room(house: House) -> None:
    job = house.run(submitted(house).id)
    assert job.state == State.COMPLETED, job.last_error
    device = house.volume(job)
    assert str(device).startswith("/dev/zvol/")
    held = device.read_bytes()
    assert held[: len(CONTENT)] == CONTENT
    assert not any(held[len(CONTENT) :])
    assert DATA_BYTES <= used_bytes(volume(job)) < DATA_BYTES + MIB


def test_a_volume_that_was_damaged_is_repaired(house: House) -> None:
    job = house.run(submitted(house, target={"start": False}).id)
    assert job.state == State.COMPLETED, job.last_error
    with house.volume(job).open("r+b", buffering=0) as device:
        for place in (0, 9 * MIB, 20 * MIB + 4096):
            device.seek(place)
            device.write(b"damage".ljust(512))
        os.fsync(device.fileno())
    mended = house.run(house.intake.repair(job.id, check_only=False).id)
    assert mended.state == State.COMPLETED, mended.last_error
    assert mended.repair is not None
    (disk,) = mended.repair.disks
    assert [span.start // (4 * MIB) for span in disk.differs] == [0, 2, 5]
    assert house.volume(job).read_bytes()[: len(CONTENT)] == CONTENT


def test_a_copy_whose_worker_is_killed_goes_on_from_its_watermark(with_processes: House) -> None:
    house = with_processes
    job = submitted(house, limits={"bandwidth_bps": 2 * MIB})
    seen: list[int] = []

    def kill() -> None:
        until(house, lambda: watermark(house, job) > 2 * MIB)
        seen.append(watermark(house, job))
        os.kill(forked_workers.begun[-1], signal.SIGKILL)

    killer = threading.Thread(target=kill)
    killer.start()
    ended = house.run(job.id)
    killer.join()
    assert ended.state == State.COMPLETED, ended.last_error
    assert house.volume(ended).read_bytes()[: len(CONTENT)] == CONTENT
    # What was flushed before the kill was not read again.
    assert seen[0] > 0
    assert ended.progress.bytes_done <= len(CONTENT)


def test_a_job_whose_service_is_killed_goes_on(house: House, tmp_path: Path, destination: ZfsDestination) -> None:
    """kill -9 of the real engine in a process of its own; the next one goes on from the watermark."""
    job = submitted(house, limits={"bandwidth_bps": 2 * MIB})
    with engine(tmp_path, destination):
        until(house, lambda: watermark(house, job) > 2 * MIB)
    reached = watermark(house, job)
    with engine(tmp_path, destination):
        until(house, lambda: house.store.get(job.id).ended)
    ended = house.store.get(job.id)
    assert ended.state == State.COMPLETED, ended.last_error
    assert reached < ended.progress.bytes_done <= len(CONTENT)
    assert house.volume(ended).read_bytes()[: len(CONTENT)] == CONTENT
    assert DATA_BYTES <= used_bytes(volume(ended)) < DATA_BYTES + MIB


@contextmanager
def engine(folder: Path, destination: ZfsDestination) -> Iterator[int]:
    """The process id of one that is forked: a new Python would take a minute here to begin."""
    namespace = root(destination).removeprefix(f"{POOL}/").removesuffix("/migrations")
    reading_end, writing_end = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            sys.stdout = os.fdopen(writing_end, "w")
            serve(of_few_flushes(House(folder, destination=ZfsDestination(POOL, namespace))))
        finally:
            os._exit(1)
    os.close(writing_end)
    try:
        with os.fdopen(reading_end) as lines:
            assert lines.readline() == "ready\n"
        yield child
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)


def test_a_cancelled_job_leaves_no_dataset(house: House, destination: ZfsDestination) -> None:
    job, before = submitted(house, limits={"bandwidth_bps": MIB}), volumes(destination)

    def cancel() -> None:
        until(house, lambda: watermark(house, job) > MIB)
        house.intake.cancel(job.id)

    canceller = threading.Thread(target=cancel)
    canceller.start()
    ended = house.run(job.id)
    canceller.join()
    assert ended.state == State.CANCELLED
    assert volumes(destination) == before
    assert house.store.ledger(job.id) == []


def test_a_pool_that_runs_full_fails_the_job_and_leaves_no_dataset(tmp_path: Path) -> None:
    """The source says nothing of how much it uses, so it is not foreseen."""
    folder = tmp_path / "house"
    folder.mkdir()
    with small_pool("full", tmp_path / "small"):
        destination = new_destination("full")
        house = House(folder, destination=destination, workers=in_process)
        try:
            job = house.run(submitted(house, random.Random(3).randbytes(MIB) * 24).id)
            assert job.state == State.FAILED
            assert job.last_error is not None
            assert job.last_error.code == "E_MIG_DISK_WRITE_FAILED"
            assert "No space left" in job.last_error.message
            assert volumes(destination) == []
            assert root(destination).startswith("full/")
        finally:
            house.close()
