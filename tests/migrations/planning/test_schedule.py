"""Jobs that begin at a time, and held jobs that copy their changes by a schedule."""

import asyncio
import json
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from pydantic import ValidationError

from synvirt.errors import InvalidPlan
from synvirt.migrations import steps
from synvirt.migrations.engine import Engine
from synvirt.migrations.planning.foreseen import foresee
from synvirt.migrations.planning.schedule import check, next_sync
from synvirt.migrations.warm import deciding, holding, one_pass, snapshots
from synvirt.model.kinds import State
from synvirt.model.plan import MigrationPlan
from synvirt.model.values import now
from tests.fakes.workers import in_process
from tests.house import House, live_plan
from tests.running.processes import until

VM, DISK = "vm-1", "disk-0"


def at(text: str) -> datetime:
    return datetime.fromisoformat(text).replace(tzinfo=UTC)


def ruled(rrule: str, start: str, timezone: str = "UTC") -> MigrationPlan:
    return live_plan(warm={"cutover": "manual", "schedule": {"rrule": rrule, "start": start, "timezone": timezone}})


def test_a_rule_says_when_the_next_sync_is_by_the_clock_of_its_place() -> None:
    plan = ruled("FREQ=DAILY", "2026-01-01T22:00:00", "Europe/Berlin")
    assert next_sync(plan, at("2026-01-10T12:00:00")) == at("2026-01-10T21:00:00")
    assert next_sync(plan, at("2026-01-10T21:00:00")) == at("2026-01-11T21:00:00"), "after it, not at it"
    assert next_sync(plan, at("2026-07-10T12:00:00")) == at("2026-07-10T20:00:00"), "in summer an hour sooner"
    assert next_sync(plan, at("2025-01-01T00:00:00")) == at("2026-01-01T21:00:00"), "its start is the first"
    assert next_sync(plan, at("2001-01-01T00:00:00")) == at("2026-01-01T21:00:00"), "also where that is years from now"
    assert next_sync(ruled("FREQ=DAILY", "9999-12-31T22:00:00"), at("2001-01-01T00:00:00")) is None
    weekly = ruled("FREQ=WEEKLY;BYDAY=SA;UNTIL=20260131T000000", "2026-01-03T01:00:00", "Pacific/Auckland")
    assert next_sync(weekly, at("2026-01-03T00:00:00")) == at("2026-01-09T12:00:00")
    assert next_sync(weekly, at("2026-03-01T00:00:00")) is None


def test_an_interval_is_counted_from_its_start_and_not_from_the_last_sync() -> None:
    plan = live_plan(warm={"cutover": "manual"}, schedule={"start_at": at("2026-01-01T22:00:00"), "interval_s": 6 * 3600})
    assert next_sync(plan, at("2026-01-01T00:00:00")) == at("2026-01-01T22:00:00")
    assert next_sync(plan, at("2026-01-01T22:00:00")) == at("2026-01-02T04:00:00")
    assert next_sync(plan, at("2026-01-02T09:59:59")) == at("2026-01-02T10:00:00")
    assert next_sync(live_plan(), now()) is None


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"warm": {"schedule": {"rrule": "FREQ=DAILY", "start": "2026-01-01T22:00:00"}}}, "cutover manual"),
        (
            {
                "warm": {
                    "cutover": "manual",
                    "interval_s": 5,
                    "schedule": {"rrule": "FREQ=DAILY", "start": "2026-01-01T22:00:00"},
                }
            },
            "without interval_s",
        ),
        ({"warm": {"cutover": "manual", "schedule": {"rrule": "FREQ=DAILY", "start": "2026-01-01T22:00:00Z"}}}, "no offset"),
        ({"schedule": {"interval_s": 600}}, "start_at, which is missing"),
        ({"schedule": {"start_at": "2026-01-01T22:00:00"}}, "has no offset"),
        ({"schedule": {"start_at": "9999-12-31T23:59:59-14:00"}}, "outside of the calendar"),
        ({"schedule": {"start_at": "0001-01-01T00:00:00+14:00"}}, "outside of the calendar"),
        ({"schedule": {"start_at": "2026-01-01T22:00:00Z", "interval_s": 600}}, "only such jobs are held"),
    ],
)
def test_a_schedule_that_cannot_be_is_refused(fields: dict[str, Any], named: str) -> None:

    document = json.loads(live_plan().model_dump_json()) | fields
    with pytest.raises(ValidationError, match=named):
        MigrationPlan.model_validate_json(json.dumps(document))


def test_a_rule_that_cannot_be_or_has_ended_is_named_before_anything_begins(house: House) -> None:
    house.platform.add_vm(VM, {DISK: bytes(4096)})
    for rrule, named in (("FREQ=HOURLY", "FREQ=HOURLY"), ("FREQ=DAILY;UNTIL=20200101T000000", "within three years")):
        plan = ruled(rrule, "2019-01-01T22:00:00")
        with pytest.raises(InvalidPlan, match=named):
            check(plan, now())
        assert "warm.schedule" in refused(house, plan)
    assert "warm.schedule" not in refused(house, ruled("FREQ=DAILY", "2019-01-01T22:00:00"))


def refused(house: House, plan: MigrationPlan) -> list[str]:
    return [where for where, _ in foresee(house.rooms, plan).refused]


@pytest.fixture
def house(tmp_path: Path) -> Iterator[House]:
    made = House(tmp_path / "house", workers=in_process)
    yield made
    made.close()


class Clock:
    """Of the engine's waiting; it goes on by what a test says."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.later = timedelta(0)
        for module in (deciding, holding, one_pass, snapshots, steps):
            monkeypatch.setattr(module, "now", lambda: now() + self.later)


def test_a_held_job_syncs_at_its_times_alone_and_makes_up_for_what_it_missed(
    house: House, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = Clock(monkeypatch)
    house.platform.add_vm(VM, {DISK: bytes(65536)})
    engine = Engine(house.rooms, host="local")
    house.intake._begin, house.intake._wake = engine.begin, engine.wake
    # Twelve hours from now, each day.
    start = (now() - timedelta(days=3, hours=12)).replace(tzinfo=None, microsecond=0)
    job = house.intake.submit(ruled("FREQ=DAILY", start.isoformat()))
    engine.start()
    try:

        def deltas() -> int:
            found = house.store.get(job.id)
            return sum(one.kind == "delta" and one.finished_at is not None for one in found.passes)

        until(lambda: deltas() == 1 and house.store.get(job.id).held)
        engine.wake(job.id)  # whatever wakes it
        clock.later = timedelta(hours=6)
        engine.wake(job.id)
        assert deltas() == 1
        house.platform.guest_writes(VM, DISK, 0, b"night")
        clock.later = timedelta(hours=12, minutes=1)

        def synced() -> bool:
            engine.wake(job.id)
            return deltas() == 2

        until(synced)
        # The service was down for days: one sync, at once, for all that was missed.
        engine.close()
        clock.later = timedelta(days=9)
        engine = Engine(house.rooms, host="local")
        house.intake._begin, house.intake._wake = engine.begin, engine.wake
        engine.start()
        until(lambda: deltas() >= 3)
        house.intake.cutover(job.id)
        until(lambda: house.store.get(job.id).ended)
        ended = house.store.get(job.id)
        assert ended.state is State.COMPLETED, ended.last_error
        assert house.volume(ended).read_bytes()[:5] == b"night"
    finally:
        engine.close()


def test_a_job_begins_at_its_time_and_is_cancelled_before(house: House, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(monkeypatch)
    house.platform.add_vm(VM, {DISK: bytes(65536)})
    engine = Engine(house.rooms, host="local")
    house.intake._begin, house.intake._wake = engine.begin, engine.wake
    engine.start()
    try:
        job = house.intake.submit(live_plan(schedule={"start_at": now() + timedelta(hours=5)}))
        assert house.store.get(job.id).state is State.QUEUED
        assert house.store.get(job.id).manifest is None, "its source was not asked yet"
        clock.later = timedelta(hours=5, seconds=1)

        def ended() -> bool:
            engine.wake(job.id)
            return house.store.get(job.id).ended

        until(ended)
        assert house.store.get(job.id).state is State.COMPLETED
        clock.later = timedelta(0)
        house.platform.add_vm("vm-2", {DISK: bytes(65536)})
        ref = live_plan().source_ref.model_copy(update={"vm_id": "vm-2"})
        other = house.intake.submit(
            live_plan(schedule={"start_at": now() + timedelta(days=5)}).model_copy(update={"source_ref": ref})
        )
        house.intake.cancel(other.id)
        until(lambda: house.store.get(other.id).state is State.CANCELLED)
    finally:
        engine.close()


class SetClock:
    """A wall clock that may be set, and that goes on while a job sleeps."""

    def __init__(self, moment: datetime) -> None:
        self.moment, self.slept_s = moment, 0.0

    async def sleep(self, seconds: float) -> None:
        self.moment += timedelta(seconds=seconds)
        self.slept_s += seconds


@pytest.mark.parametrize("when", ["before the wait", "in the wait"])
@pytest.mark.parametrize("years", [-4, 0])
def test_a_clock_that_is_set_back_puts_the_next_sync_off_by_an_interval_at_most(
    monkeypatch: pytest.MonkeyPatch, years: int, when: str
) -> None:
    """A clock that was years ahead: the last snapshot has a time that is to come, and the job waited for it."""
    clock, copied = SetClock(at("2030-01-01T12:00:30")), at("2030-01-01T12:00:00")
    wrong_by = timedelta(days=365 * years)
    if when == "before the wait":
        clock.moment += wrong_by

    async def sleep_or_wake(seconds: float) -> None:
        if clock.slept_s == 0 and when == "in the wait":
            clock.moment += wrong_by
        await clock.sleep(seconds)

    async def nothing(*_: object) -> bool:
        return False

    monkeypatch.setattr(holding, "now", lambda: clock.moment)
    monkeypatch.setattr(holding, "clone_asked", nothing)
    monkeypatch.setattr(holding, "is_distrusted", nothing)
    monkeypatch.setattr(holding, "is_asked", nothing)
    plan = live_plan(warm={"cutover": "manual"}, schedule={"start_at": at("2020-01-01T22:00:00"), "interval_s": 3600})
    job: Any = SimpleNamespace(
        migration=SimpleNamespace(plan=plan, passes=[SimpleNamespace(snapshot_at=copied, finished_at=None)]),
        stop=SimpleNamespace(sleep_or_wake=sleep_or_wake),
        leave_turn=lambda: None,
        take_turn=nothing,
    )
    assert not asyncio.run(holding.asked_while_waiting(job))
    assert clock.slept_s <= 3600 + holding.HOLD_LOOK_S
