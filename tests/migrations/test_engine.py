"""The durable engine in a real process that is killed with SIGKILL, on SQLite and on a real PostgreSQL."""

import random
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from uuid import UUID

import pytest

from synvirt.jobs.course import Course
from synvirt.migrations.memory import CourseMemory
from synvirt.model.job import Migration
from synvirt.model.kinds import State
from synvirt.model.plan import Limits
from synvirt.sizes import KIB, MIB
from tests.house import VM, House, give_to, live_plan, offline_plan
from tests.running.processes import children, ready, until, workers


def content() -> bytes:
    return random.Random(4).randbytes(4 * MIB) + bytes(MIB) + b"end"


def service(folder: Path, url: str, lease_s: float = 60) -> AbstractContextManager[subprocess.Popen[str]]:
    """The engine's process."""
    module = "tests.migrations.engine_process"
    return ready(module, str(folder), url, log=folder / "service.log", LEASE_S=str(lease_s))


def ended(house: House, job_id: UUID) -> Migration:
    until(lambda: house.store.get(job_id).ended)
    return house.store.get(job_id)


def slow_offline_job(house: House, seconds: float = 3) -> Migration:
    folder = house.imports / "appliance"
    folder.mkdir()
    (folder / "disk-0.raw").write_bytes(content())
    return house.intake.submit(offline_plan(folder, limits={"bandwidth_bps": int(4 * MIB / seconds)}))


def without_limits(job: Migration) -> Migration:
    return job.model_copy(update={"plan": job.plan.model_copy(update={"limits": Limits()})})


@pytest.fixture
def house(tmp_path: Path, database_url: str) -> Iterator[House]:
    house = House(tmp_path, store_url=database_url)
    yield house
    house.close()


def test_a_killed_service_goes_on_from_its_watermark(house: House, tmp_path: Path, database_url: str) -> None:
    job = slow_offline_job(house)
    before = Course().with_sample(time.time() - 60, 0)
    house.store.memory.change(job.id, CourseMemory, lambda _: CourseMemory(course=before))
    marks: list[int] = []
    for _ in range(2):
        with service(tmp_path, database_url) as process:
            until(lambda: sum(mark.offset_bytes for mark in house.store.watermarks(job.id, 1).values()) > sum(marks[-1:]))
            process.kill()
            process.wait()
            # A worker hears of its service's end by its pipe, and leaves.
            until(lambda: not workers())
            marks.append(house.store.watermarks(job.id, 1)["disk-0"].offset_bytes)
    with service(tmp_path, database_url):
        last = ended(house, job.id)
        until(lambda: house.store.memory.get(job.id, CourseMemory).course.samples[-1].bytes_done == last.progress.bytes_done)
    assert last.state == State.COMPLETED
    assert house.volume(last).read_bytes() == content()
    house.prove(last)
    assert house.store.memory.get(job.id, CourseMemory).course.samples[0] == before.samples[0]
    assert 0 < marks[0] < marks[1]
    assert [visit.state for visit in last.history].count(State.COPYING_FULL) == 1


def test_a_warm_job_survives_kills_while_its_guest_writes(house: House, tmp_path: Path, database_url: str) -> None:
    house.platform.add_vm(VM, {"disk-0": content()})
    plan = live_plan(warm={"delta_threshold_bytes": 64 * MIB}, limits={"bandwidth_bps": 4 * MIB})
    job = house.intake.submit(plan)
    moments: list[Callable[[], bool]] = [
        lambda: bool(house.store.watermarks(job.id, 1)),
        lambda: house.store.get(job.id).state == State.DELTA_SYNCING,
        lambda: house.store.get(job.id).state in (State.CUTTING_OVER, State.COMPLETED),
    ]
    for number, moment in enumerate(moments):
        with service(tmp_path, database_url) as process:
            until(moment)
            process.kill()
        house.platform.guest_writes(VM, "disk-0", number * 64 * KIB, b"written while the service was dead")
    with service(tmp_path, database_url):
        last = ended(house, job.id)
    assert last.state == State.COMPLETED
    assert house.volume(last).read_bytes() == house.platform.disk_path(VM, "disk-0").read_bytes()
    house.prove(last)
    assert house.platform.vm(VM)["snapshots"] == {}


def test_a_job_is_cancelled_by_another_process_and_leaves_nothing(house: House, tmp_path: Path, database_url: str) -> None:
    job = slow_offline_job(house, seconds=30)
    with service(tmp_path, database_url) as process:
        until(lambda: bool(house.store.watermarks(job.id, 1)))
        house.store.request_cancel(job.id)
        assert ended(house, job.id).state == State.CANCELLED
        assert workers(process.pid) == []
        assert not any((tmp_path / "volumes").rglob("*"))


def test_jobs_wait_their_turn(house: House, tmp_path: Path, database_url: str) -> None:
    jobs = []
    for number in range(5):
        folder = house.imports / f"appliance-{number}"
        folder.mkdir()
        (folder / "disk-0.raw").write_bytes(content())
        jobs.append(house.intake.submit(offline_plan(folder, limits={"bandwidth_bps": 8 * MIB})))
    most = 0
    with service(tmp_path, database_url) as process:
        until(lambda: bool(workers(process.pid)))
        while not all(house.store.get(job.id).ended for job in jobs):
            most = max(most, len(workers(process.pid)))
            time.sleep(0.02)
    assert 1 <= most <= 2
    assert [house.store.get(job.id).state for job in jobs] == [State.COMPLETED] * 5


def test_a_stopped_service_leaves_its_jobs_to_the_next(house: House, tmp_path: Path, database_url: str) -> None:
    """SIGTERM is an operator's restart, not a failure of the jobs."""
    job = slow_offline_job(house)
    with service(tmp_path, database_url) as process:
        until(lambda: bool(house.store.watermarks(job.id, 1)))
        process.send_signal(signal.SIGTERM)
        process.wait(60)
    until(lambda: not workers())
    assert house.store.get(job.id).state == State.COPYING_FULL
    with service(tmp_path, database_url):
        assert ended(house, job.id).state == State.COMPLETED


def test_no_process_is_left(house: House, tmp_path: Path, database_url: str) -> None:
    job = slow_offline_job(house, seconds=1)
    with service(tmp_path, database_url) as process:
        assert ended(house, job.id).state == State.COMPLETED
        until(lambda: children(process.pid) == {})
    assert not any("synvirt.migrations" in command for command in children().values())


def test_a_service_that_stood_still_writes_nothing_after_another_took_its_job(tmp_path: Path, postgresql_url: str) -> None:
    house = House(tmp_path, store_url=postgresql_url)
    job = slow_offline_job(house, seconds=20)
    store = house.store
    with service(tmp_path, postgresql_url, lease_s=12) as process:
        until(lambda: bool(store.watermarks(job.id, 1)))
        process.send_signal(signal.SIGSTOP)
        (row,) = store.hosts.all()
        epoch = row.epoch
        assert store.hosts.fence_expired(grace_s=-1000, silent={row.id: row.seen_at}) == ["local"]
        give_to(store, job.id, "another")
        left = store.watermarks(job.id, 1)
        process.send_signal(signal.SIGCONT)
        until(lambda: store.hosts.all()[0].epoch == epoch + 2)
        until(lambda: workers(process.pid) == [])
        assert store.watermarks(job.id, 1) == left
        assert store.get(job.id).state == State.COPYING_FULL
        # What is still its own it takes up. Nobody waits for its slow copy any more.
        give_to(store, job.id, "local")
        store.change(job.id, State.COPYING_FULL, without_limits)
        store.hosts.fence("local")
        assert ended(house, job.id).state == State.COMPLETED
    assert house.volume(store.get(job.id)).read_bytes() == content()
    house.close()
