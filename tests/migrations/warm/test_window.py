"""A warm job whose plan names a window cuts over by itself, and within it alone."""

from collections.abc import Iterator
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from synvirt.errors import Conflict, InvalidPlan, OutageTooLong
from synvirt.migrations import overrun
from synvirt.migrations.warm import deciding
from synvirt.migrations.warm import window as of_window
from synvirt.model.job import Migration
from synvirt.model.kinds import State
from synvirt.model.values import now
from synvirt.model.windows import Window
from tests.fakes.hypervisor import FakeHypervisor
from tests.fakes.workers import in_process
from tests.house import VM, House, live_plan, states
from tests.migrations.planning.test_outage import done_job
from tests.migrations.warm.warm_house import (
    DISK,
    content,
    failed_as_it_was,
    in_state,
    once,
    too_late_after_a_crash_in_the_last_copy,
)

# A night, by the clock that a test sets.
NIGHT = Window(
    id="night",
    name="The night",
    start=datetime.fromisoformat("2030-01-01T22:00:00"),
    end=datetime.fromisoformat("2030-01-02T04:00:00"),
)
DAY, LATE = datetime(2030, 1, 1, 12, tzinfo=UTC), datetime(2030, 1, 2, 3, 59, 55, tzinfo=UTC)


def local(at: datetime) -> datetime:
    return at.replace(tzinfo=None)


def open_for(hours: float) -> Window:
    """A window by the real clock: from a day ago on."""
    return Window(id="night", name="n", start=local(now()) - timedelta(days=1), end=local(now()) + timedelta(hours=hours))


@pytest.fixture
def house(tmp_path: Path) -> Iterator[House]:
    house = House(tmp_path, workers=in_process)
    house.platform.add_vm(VM, {DISK: content()})
    yield house
    house.close()


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[datetime]:
    at = [DAY]
    monkeypatch.setattr(of_window, "now", lambda: at[0])
    return at


def submitted(house: House, window: Window = NIGHT, **warm: Any) -> Migration:
    house.store.windows.add(window)
    for _ in range(9):
        house.store.add(done_job(1, 1, 1), host="local")
    return house.intake.submit(live_plan(warm={"window_id": window.id, "interval_s": 0.01} | warm))


def held(job: Migration) -> bool:
    return job.state is State.DELTA_SYNCING and len(job.passes) > 3


def test_it_holds_until_the_window_opens_and_then_cuts_over(house: House) -> None:
    later = Window(id="night", name="n", start=local(now()) + timedelta(days=300), end=local(now()) + timedelta(days=301))
    job, powers = submitted(house, later), list[str]()

    def opens() -> None:
        powers.append(house.platform.vm(VM)["power"])
        house.store.windows.change("night", lambda before: open_for(10))

    once(house, job, held, opens)
    ended = house.run(job.id)
    assert powers == ["on"]
    assert (ended.state, ended.last_error) == (State.COMPLETED, None)
    assert house.platform.vm(VM)["power"] == "off"
    assert not house.store.cutover_requested(job.id), "nobody asked"
    house.prove(ended)


def test_a_window_that_is_open_for_too_short_is_let_pass(house: House, clock: list[datetime]) -> None:
    house.store.windows.add(NIGHT)
    clock[0] = LATE  # five seconds before its end, and a first outage may take minutes
    job = house.intake.submit(live_plan(warm={"window_id": "night", "interval_s": 0.01}))
    notes: list[str] = []

    def noted(found: Migration) -> bool:
        return found.last_error is not None and found.last_error.code == OutageTooLong.code

    def closes() -> None:
        found = house.store.get(job.id)
        assert found.last_error is not None
        notes.append(found.last_error.message)
        assert house.platform.vm(VM)["power"] == "on"
        clock[0] = LATE + timedelta(hours=1)
        house.store.request_cancel(job.id)
        house.wake(job.id)

    once(house, job, noted, closes)
    assert states(house.run(job.id))[-2:] == [State.DELTA_SYNCING, State.CANCELLED]
    (note,) = notes
    assert "window night is open for 5 s more" in note
    assert "p95" in note


def test_a_delta_that_the_window_opens_on_is_followed_by_another_in_each_window(
    house: House, clock: list[datetime], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a delta of hours left to copy is not copied while the guest is off, also where an earlier window was too short."""
    monkeypatch.setattr(deciding, "FRESH_S", 0.0)
    house.store.windows.add(NIGHT)
    clock[0] = LATE
    job, opened = house.intake.submit(live_plan(warm={"window_id": "night", "interval_s": 0.01})), list[int]()

    def too_short(found: Migration) -> bool:
        return found.last_error is not None and found.last_error.code == OutageTooLong.code

    def by_day() -> None:
        clock[0] = DAY
        asked = house.store.get(job.id).passes[-1].number
        for _ in range(9):
            house.store.add(done_job(1, 1, 1), host="local")
        once(house, job, lambda found: found.passes[-1].number == asked + 3 and found.passes[-1].finished_at is None, opens)

    def opens() -> None:
        clock[0] = now()
        house.store.windows.change("night", lambda before: open_for(10))
        opened.append(house.store.get(job.id).passes[-1].number)

    once(house, job, too_short, by_day)
    ended = house.run(job.id)
    assert (ended.state, ended.last_error) == (State.COMPLETED, None)
    assert [(one.kind, one.number - opened[0]) for one in ended.passes[-2:]] == [("delta", 1), ("final", 2)]
    house.prove(ended)


def test_a_window_that_is_gone_or_over_never_lets_it_cut_over(house: House, clock: list[datetime]) -> None:
    job = submitted(house)
    clock[0] = datetime(2031, 1, 1, tzinfo=UTC)

    def stop(one: Migration) -> None:
        assert house.platform.vm(VM)["power"] == "on"
        house.store.request_cancel(one.id)
        house.wake(one.id)

    once(house, job, held, lambda: stop(job))
    assert house.run(job.id).state is State.CANCELLED
    house.store.windows.remove("night")
    again = house.intake.submit(live_plan(warm={"window_id": "night", "interval_s": 0.01}))
    once(house, again, held, lambda: stop(again))
    assert states(house.run(again.id))[-2:] == [State.DELTA_SYNCING, State.CANCELLED]


@pytest.mark.parametrize("closed", [timedelta(hours=-5), timedelta(0)], ids=["changed to before", "at this moment"])
def test_a_window_that_closes_during_the_cut_over_rolls_it_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, closed: timedelta
) -> None:
    monkeypatch.setattr(overrun, "LOOK_S", 0.01)
    house = House(tmp_path, workers=in_process, hypervisor=FakeHypervisor(fail="silent"))
    house.rooms = replace(house.rooms, boot_timeout_s=60)
    house.platform.add_vm(VM, {DISK: content()})
    job = submitted(house, open_for(10))

    def close() -> None:
        house.store.windows.change("night", lambda before: before.model_copy(update={"end": local(now() + closed)}))

    once(house, job, in_state(State.STARTING), close)
    ended = house.run(job.id)
    assert ended.state is State.FAILED
    assert ended.last_error is not None
    assert (ended.last_error.code, ended.last_error.state) == (OutageTooLong.code, State.STARTING)
    assert "window night closed before the cut-over" in ended.last_error.message
    assert house.platform.vm(VM)["power"] == "on"
    assert house.hypervisor.domains == {}
    assert house.volume(ended).read_bytes() == content()
    house.close()


def test_a_service_that_comes_back_after_the_window_does_not_cut_over_then(house: House) -> None:
    job = submitted(house, open_for(10))

    def close() -> None:
        house.store.windows.change("night", lambda before: before.model_copy(update={"end": local(now())}))

    too_late_after_a_crash_in_the_last_copy(house, job, close)
    with pytest.raises(InvalidPlan, match="no window called 'nigth'"):
        house.intake.retry(job.id, {"warm": {"window_id": "nigth"}})
    house.store.windows.add(open_for(10).model_copy(update={"id": "next"}))
    retried = house.intake.retry(job.id, {"warm": {"window_id": "next"}})
    assert (retried.plan.warm.window_id, retried.plan.warm.cutover) == ("next", "manual")
    assert house.run(retried.id).state is State.COMPLETED


def test_a_longer_window_lets_a_cut_over_go_on(house: House, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(overrun, "LOOK_S", 0.01)
    job = submitted(house, open_for(10))
    longer = open_for(20)
    once(house, job, in_state(State.CUTTING_OVER), lambda: house.store.windows.change("night", lambda before: longer))
    assert house.run(job.id).state is State.COMPLETED


def test_a_guest_whose_changes_cannot_be_listed_is_not_shut_down_for_a_cold_copy(house: House) -> None:
    house.platform.fault("cannot_track", 1)
    job = submitted(house, open_for(10))
    ended = house.run(job.id)
    failed_as_it_was(house, ended, "E_MIG_OUTAGE_TOO_LONG")
    assert "within window night alone" in (ended.last_error.message if ended.last_error else "")
    assert ended.passes == ()


def test_an_operator_is_told_that_the_window_asks(house: House) -> None:
    job = submitted(house)
    with pytest.raises(Conflict, match="by itself, within window night"):
        house.intake.cutover(job.id)


def test_a_plan_with_a_window_is_held_by_a_version_that_knows_none() -> None:
    warm = live_plan(warm={"window_id": "night", "cutover": "auto", "untracked": "cold"}).warm
    assert (warm.cutover, warm.untracked) == ("manual", "fail")
    assert (live_plan().warm.cutover, live_plan().warm.untracked, live_plan().warm.window_id) == ("auto", "cold", None)
    scheduled = live_plan(warm={"window_id": "n", "schedule": {"rrule": "FREQ=DAILY", "start": "2030-01-01T01:00:00"}})
    assert scheduled.warm.schedule is not None
    with pytest.raises(ValidationError, match=r"warm\.window_id is for mode Warm of a Live source"):
        live_plan("Cold", warm={"window_id": "night"})
    for wrong in ("", "a b", "x" * 65, "../night"):
        with pytest.raises(ValidationError):
            live_plan(warm={"window_id": wrong})
