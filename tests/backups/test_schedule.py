"""Jobs that run by themselves: when, once each time, made up for after a time without the service."""

import threading
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import TypeAdapter, ValidationError
from sqlalchemy import event, update

from synvirt.backups import runs
from synvirt.backups.jobs import Jobs, due
from synvirt.backups.model import BackupJob, BackupJobChange, BackupRun
from synvirt.backups.schedule import Schedule, next_time
from synvirt.backups.scheduling import looking, running
from synvirt.errors import PersistFailed
from synvirt.store.backups import Row
from synvirt.store.tables import backups
from tests.backups.house import House, disk_content
from tests.running.processes import until

SCHEDULE: TypeAdapter[str] = TypeAdapter(Schedule)
START = datetime(2026, 3, 28, 12, tzinfo=UTC)
LONG_S = 60


@pytest.fixture
def house(house: House) -> House:
    house.image("web", disk_content())
    return house


@pytest.mark.parametrize(
    ("schedule", "expected"),
    [
        ("0 2 * * *", "2026-03-29T02:00"),
        ("*/15 * * * *", "2026-03-28T12:15"),
        ("0 22 * * mon-fri", "2026-03-30T22:00"),
        ("@daily", "2026-03-29T00:00"),
        ("30  1 1 * *", "2026-04-01T01:30"),
        ("0 0 29 2 *", "2028-02-29T00:00"),
    ],
)
def test_the_next_time(schedule: str, expected: str) -> None:
    assert next_time(SCHEDULE.validate_python(schedule), START).strftime("%Y-%m-%dT%H:%M") == expected


@pytest.mark.parametrize(
    "wrong", ["", "2", "0 2 * *", "* * * * * *", "61 * * * *", "0 0 31 2 *", "@reboot", "x x x x x", "²  * * * *"]
)
def test_what_is_no_schedule(wrong: str) -> None:
    with pytest.raises(ValidationError):
        SCHEDULE.validate_python(wrong)


@given(st.text(max_size=100))
def test_any_text_is_a_schedule_or_is_refused(text: str) -> None:
    try:
        schedule = SCHEDULE.validate_python(text)
    except ValidationError:
        return
    assert next_time(schedule, START) > START


def _scheduled(house: House, schedule: str = "0 2 * * *") -> BackupJob:
    return house.backups.change_job(house.job("web").id, BackupJobChange(schedule=schedule))


def _runs(house: House) -> list[BackupRun]:
    return [house.ended(run) for run in house.backups.runs.page(limit=100, cursor=None)[0]]


def test_a_job_runs_once_at_each_of_its_times(house: House) -> None:
    job = _scheduled(house)
    assert job.next_run_at is not None
    first = job.next_run_at
    assert house.backups.run_due(first - timedelta(seconds=1)) == []
    (run,) = house.backups.run_due(first)
    assert (house.ended(run).status, run.trigger, run.job_id) == ("completed", "schedule", job.id)
    for later in (0, 1, 3600):
        assert house.backups.run_due(first + timedelta(seconds=later)) == []
    assert house.backups.job(job.id).next_run_at == first + timedelta(days=1)
    assert len(house.backups.run_due(first + timedelta(days=1, seconds=5))) == 1


def test_a_time_without_the_service_is_made_up_for_by_one_run(house: House) -> None:
    job = _scheduled(house)
    assert job.next_run_at is not None
    away = job.next_run_at + timedelta(days=10, hours=3)
    house.close()
    again = House(house.folder)
    (run,) = again.backups.run_due(away)
    assert again.ended(run).status == "completed"
    assert again.backups.run_due(away + timedelta(seconds=10)) == []
    assert again.backups.job(job.id).next_run_at == job.next_run_at + timedelta(days=11)
    again.close()


def _held(house: House, opened: threading.Event) -> Callable[[], None]:
    """A gate that stays shut until the service ends."""

    def held() -> None:
        opened.set()
        until(lambda: all(stop.is_set() for stop in house.backups.runs._stops.values()))

    return held


def test_a_scheduled_run_that_the_services_end_cut_off_goes_on(house: House) -> None:
    job, opened = _scheduled(house), threading.Event()
    assert job.next_run_at is not None
    house.guests.gate = _held(house, opened)
    (run,) = house.backups.run_due(job.next_run_at)
    assert opened.wait(LONG_S)
    house.close()
    again = House(house.folder)
    found = again.ended(run)
    assert (found.status, found.resumed_count) == ("completed", 1)
    assert again.backups.run_due(job.next_run_at + timedelta(seconds=10)) == []
    again.close()


def test_a_run_that_ends_the_service_each_time_fails_and_is_made_again_once(
    house: House, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runs, "RESUMED_MAX", 1)
    job = _scheduled(house)
    assert job.next_run_at is not None
    moment, begun = job.next_run_at, []
    for _ in range(2):
        opened = threading.Event()
        house.guests.gate = _held(house, opened)
        (run,) = house.backups.run_due(moment)
        begun.append((run.trigger, run.attempt))
        for _ in range(2):
            assert opened.wait(LONG_S)
            house.close()
            opened = threading.Event()
            house = House(house.folder, started=False)
            house.guests.gate = _held(house, opened)
            house.backups.start()
        found = house.backups.runs.get(run.id)
        assert found.error is not None
        assert (found.status, found.error.code) == ("failed", "E_BAK_INTERRUPTED")
        moment += timedelta(seconds=10)
    assert begun == [("schedule", 1), ("again", 2)]
    assert house.backups.run_due(moment) == []
    house.close()


def test_a_job_that_still_runs_at_its_next_time_is_not_started_twice(house: House) -> None:
    job = _scheduled(house, "* * * * *")
    go = threading.Event()
    house.guests.gate = lambda: go.wait(LONG_S)
    assert job.next_run_at is not None
    (run,) = house.backups.run_due(job.next_run_at)
    assert house.backups.run_due(job.next_run_at + timedelta(minutes=5)) == []
    go.set()
    house.ended(run)
    assert house.backups.run_due(job.next_run_at + timedelta(minutes=5, seconds=1)) == [], "what it slept through is over"
    assert len(house.backups.run_due(job.next_run_at + timedelta(minutes=6))) == 1


def test_a_kill_between_run_and_time_is_not_possible(house: House, monkeypatch: pytest.MonkeyPatch) -> None:
    """They are one transaction: where it fails, neither is there."""
    job = _scheduled(house)
    assert job.next_run_at is not None

    with monkeypatch.context() as patched:
        patched.setattr(Jobs, "row", lambda _self, job: Row(cast("Any", None), job.id, job))
        with pytest.raises(PersistFailed):
            house.backups.run_due(job.next_run_at)
    assert (house.backups.job(job.id).last_run_id, house.backups.job(job.id).next_run_at) == (None, job.next_run_at)
    assert _runs(house) == []
    assert len(house.backups.run_due(job.next_run_at)) == 1


def test_a_look_asks_the_store_once_for_the_runs_of_all_jobs(house: House) -> None:
    """Each ten seconds, with all that begins a run waiting for it: one question for each of 500 jobs took seconds."""

    def statements_of_a_look() -> int:
        seen: list[object] = []

        def listen(*about: object) -> None:
            seen.append(about)

        event.listen(house.store._engine, "before_cursor_execute", listen)
        assert house.backups.run_due(START) == []
        event.remove(house.store._engine, "before_cursor_execute", listen)
        return len(seen)

    repository = house.repository()
    few = 0
    for number in range(4):
        job = house.job("web", repository=repository)
        house.run(house.backups.change_job(job.id, BackupJobChange(schedule="0 2 * * *")))
        few = few or statements_of_a_look()
        assert number == 0 or statements_of_a_look() == few


def test_a_job_whose_last_run_cannot_be_read_is_left_alone_and_the_others_are_not(house: House) -> None:
    """It may be running, by a later version of the service."""
    run = house.run(_scheduled(house))
    other = house.job("web", repository=run.repository_id)
    second = house.backups.change_job(other.id, BackupJobChange(schedule="0 2 * * *"))
    with house.store._writing() as db:
        db.execute(update(backups).where(backups.c.id == str(run.id)).values(version="9.0"))
    assert second.next_run_at is not None
    begun = house.backups.run_due(second.next_run_at)
    assert [one.job_id for one in begun] == [second.id]


def test_a_clock_that_was_years_ahead_does_not_silence_a_job(house: House) -> None:
    job = _scheduled(house)
    assert job.next_run_at is not None
    (run,) = house.backups.run_due(job.next_run_at + timedelta(days=30_000))
    house.ended(run)
    assert house.backups.run_due(job.next_run_at) == []
    assert len(house.backups.run_due(job.next_run_at + timedelta(days=1))) == 1


def test_a_clock_that_is_set_back_a_little_starts_nothing_twice(house: House) -> None:
    job = _scheduled(house)
    assert job.next_run_at is not None
    (run,) = house.backups.run_due(job.next_run_at + timedelta(seconds=5))
    house.ended(run)
    for second in range(-5, 5):
        assert house.backups.run_due(job.next_run_at + timedelta(seconds=second)) == []


def test_a_new_schedule_counts_from_now_and_none_stops_it(house: House) -> None:
    job = _scheduled(house)
    changed = house.backups.change_job(job.id, BackupJobChange(schedule=None))
    assert changed.next_run_at is None
    assert (changed.name, changed.vm_ids) == (job.name, job.vm_ids)
    assert house.backups.run_due(START + timedelta(days=30_000)) == []


@given(
    st.lists(st.integers(0, 5000), min_size=1, max_size=30),
    st.sampled_from(["* * * * *", "*/7 * * * *", "0 2 * * *", "30 4 * * 1"]),
)
def test_no_time_is_run_twice_and_none_is_left_out(steps: list[int], schedule: str) -> None:
    """Whenever it is looked at: a run begins exactly if a time has come since the last look."""
    job = BackupJob.model_validate(
        {
            "id": "00000000-0000-0000-0000-000000000001",
            "name": "x",
            "vm_ids": ["x"],
            "repository_id": "00000000-0000-0000-0000-000000000002",
            "quiesce": "off",
            "retention": {},
            "schedule": schedule,
            "created_at": START,
            "scheduled_to": START,
        }
    )
    before, moment = START, START
    for minutes in steps:
        moment += timedelta(minutes=minutes)
        expected = next_time(schedule, before) <= moment
        assert (due(job, None, moment) == "schedule") == expected
        if expected:
            job = job.model_copy(update={"scheduled_to": moment})
            before = moment


def test_the_thread_looks_again_after_an_error_and_ends() -> None:
    looks = threading.Semaphore(0)

    def look() -> None:
        looks.release()
        raise OSError("the store is away")

    with looking(look, every_s=0.01):
        assert all(looks.acquire(timeout=LONG_S) for _ in range(3))
    assert not [thread for thread in threading.enumerate() if thread.name == "backup-schedule"]


def test_a_service_starts_what_is_due(tmp_path: Path) -> None:
    house = House(tmp_path)
    house.image("web", disk_content())
    job = _scheduled(house)  # once a day: a minute may end while this runs
    house.backups._jobs.put(job.model_copy(update={"scheduled_to": job.created_at - timedelta(days=1)}))
    house.close()
    again = House(tmp_path, started=False)
    with running(again.backups):
        until(lambda: again.backups.runs.page(limit=1, cursor=None)[0])
        (run,) = _runs(again)
        assert (run.status, run.trigger) == ("completed", "schedule")
    again.close()
