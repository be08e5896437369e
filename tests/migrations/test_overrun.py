"""A cut-over that takes longer than its budget: rolled back where the plan says so, at any of its states."""

import asyncio
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from uuid import UUID

import pytest
from pydantic import ValidationError

from synvirt.errors import Cancelled, OutageTooLong, PersistFailed
from synvirt.guests import OnMessage
from synvirt.jobs.stop import Stop
from synvirt.migrations.memory import JobMemory, noting
from synvirt.migrations.overrun import within_budget
from synvirt.migrations.states import Facts
from synvirt.model.job import Migration
from synvirt.model.kinds import State
from synvirt.model.machine import VmManifest
from synvirt.model.values import now
from tests.fakes.guests import FakePreparer
from tests.fakes.hypervisor import FakeHypervisor
from tests.fakes.workers import in_process
from tests.house import VM, House, live_plan
from tests.migrations.planning.test_outage import done_job
from tests.migrations.warm.warm_house import DISK, content, in_state, once, too_late_after_a_crash_in_the_last_copy
from tests.running.processes import until

BUDGET_S = 7200.0  # more than anything takes that nobody measured


EIGHT_SECONDS = SimpleNamespace(on_overrun="roll_back", outage_budget_s=8.0, warm=SimpleNamespace(window_id=None))


class EndlessPreparer(FakePreparer):
    """A conversion that ends by the stop alone."""

    def convert(
        self,
        name: str,
        manifest: VmManifest,
        devices: list[str],
        on_message: OnMessage,
        stop: Callable[[], bool],
        **backing: object,
    ) -> None:
        until(stop)
        raise Cancelled

    def wants(self, manifest: VmManifest) -> bool:
        return True


def submitted(house: House, **fields: Any) -> Migration:
    house.platform.add_vm(VM, {DISK: content()})
    for _ in range(9):
        house.store.add(done_job(1, 1, 1), host="local")
    return house.intake.submit(live_plan(outage_budget_s=BUDGET_S, warm={"interval_s": 0.01}, **fields))


def late(house: House, job_id: UUID) -> None:
    """As if the guest had been shut down this long ago."""
    since = now() - timedelta(seconds=BUDGET_S + 1)
    house.store.memory.change(job_id, JobMemory, lambda before: noting(before, down_since=since))


@pytest.fixture
def house(tmp_path: Path) -> Iterator[House]:
    house = House(tmp_path, workers=in_process, preparer=EndlessPreparer())
    yield house
    house.close()


@pytest.mark.parametrize("state", [State.V2V_PROCESSING, State.STARTING])
def test_it_is_rolled_back_and_the_copy_kept(tmp_path: Path, state: State) -> None:
    preparer = EndlessPreparer() if state is State.V2V_PROCESSING else FakePreparer()
    house = House(tmp_path, workers=in_process, preparer=preparer, hypervisor=FakeHypervisor(fail="silent"))
    house.rooms = replace(house.rooms, boot_timeout_s=60)
    job = submitted(house, on_overrun="roll_back")
    once(house, job, in_state(state), lambda: late(house, job.id))
    ended = house.run(job.id)
    assert ended.state is State.FAILED
    assert ended.last_error is not None
    assert (ended.last_error.code, ended.last_error.state) == (OutageTooLong.code, state)
    assert "7200 s" in ended.last_error.message
    assert house.platform.vm(VM)["power"] == "on"
    assert house.hypervisor.domains == {}
    assert house.volume(ended).read_bytes() == content()
    assert house.platform.vm(VM)["snapshots"] == {}
    assert {entry.kind for entry in house.store.ledger(job.id)} == set()
    house.close()


def test_also_where_the_service_was_killed_in_the_last_copy_and_comes_back_too_late(house: House) -> None:
    job = submitted(house, on_overrun="roll_back")

    too_late_after_a_crash_in_the_last_copy(house, job, lambda: late(house, job.id))


def test_else_it_goes_on(tmp_path: Path) -> None:
    house = House(tmp_path, workers=in_process)
    job = submitted(house)
    once(house, job, in_state(State.STARTING), lambda: late(house, job.id))
    ended = house.run(job.id)
    assert (ended.state, ended.last_error) == (State.COMPLETED, None)
    assert ended.downtime_s is not None
    assert ended.downtime_s > BUDGET_S
    house.close()


def test_a_guest_that_was_seen_here_is_not_rolled_back(tmp_path: Path) -> None:
    house = House(tmp_path, workers=in_process)
    job = submitted(house, on_overrun="roll_back")
    once(house, job, lambda now_: now_.boot_sign is not None, lambda: late(house, job.id))
    assert house.run(job.id).state is State.COMPLETED
    assert house.platform.vm(VM)["power"] == "off"
    house.close()


def starting(stop: Stop, memory: Callable[[], object], row: Callable[[str], object]) -> Any:
    """A job in Starting that may be off for 8 s. `memory`, `row`: what the store has of it."""

    async def in_thread(ask: Callable[[str], object], id_: str) -> object:
        return ask(id_)

    return SimpleNamespace(
        id="1",
        migration=SimpleNamespace(plan=EIGHT_SECONDS, state=State.STARTING),
        manifest=SimpleNamespace(name="web"),
        stop=stop,
        in_thread=in_thread,
        memory=memory,
        rooms=SimpleNamespace(store=SimpleNamespace(get=row)),
    )


def test_a_store_that_is_away_for_a_moment_does_not_end_the_watch(monkeypatch: pytest.MonkeyPatch) -> None:
    """The guest stayed off for as long as the step took, and the step's own end was lost in the watch's error."""
    monkeypatch.setattr("synvirt.migrations.overrun.AGAIN_S", 0.01)
    stop, asked = Stop(), []

    async def memory() -> SimpleNamespace:
        asked.append(1)
        if len(asked) == 1:
            raise PersistFailed("the store failed")
        return SimpleNamespace(down_since=now() - timedelta(seconds=9))

    async def step(_job: object) -> Facts:
        await stop.sleep(60)
        return Facts(warm=True)

    with pytest.raises(OutageTooLong):
        asyncio.run(within_budget(starting(stop, memory, lambda _: SimpleNamespace(boot_sign=None, plan=EIGHT_SECONDS)), step))


@pytest.mark.parametrize(("seen", "tries"), [("before the budget ends", 1), ("at the moment when it ends", 2), ("never", 1)])
def test_a_guest_seen_in_time_is_kept(seen: str, tries: int) -> None:
    """Each of the two places where it is looked: before the step is stopped, and after it was."""
    stop, rows, steps = Stop(), [None if seen != "before the budget ends" else "agent"], []

    def row(_id: str) -> SimpleNamespace:
        return SimpleNamespace(boot_sign=rows[-1], plan=EIGHT_SECONDS)

    async def memory() -> SimpleNamespace:
        return SimpleNamespace(down_since=now() - timedelta(seconds=9))

    async def step(_job: object) -> Facts:
        steps.append(1)
        if len(steps) == 1:
            try:
                await stop.sleep(0.3)
            except Cancelled:
                rows.append("agent" if seen == "at the moment when it ends" else None)
                raise
        return Facts(warm=True)

    job = starting(stop, memory, row)
    if seen == "never":
        with pytest.raises(OutageTooLong):
            asyncio.run(within_budget(job, step))
    else:
        assert asyncio.run(within_budget(job, step)) == Facts(warm=True)
    assert len(steps) == tries


def test_who_cancels_meanwhile_is_obeyed(house: House) -> None:
    job = submitted(house, on_overrun="roll_back")

    def both() -> None:
        late(house, job.id)
        house.intake.cancel(job.id)

    once(house, job, in_state(State.V2V_PROCESSING), both)
    ended = house.run(job.id)
    assert ended.state is State.CANCELLED
    assert house.platform.vm(VM)["power"] == "on"
    assert house.leftovers(VM) == []


@pytest.mark.parametrize(("cancelled", "goes_on"), [(False, True), (True, False)])
def test_a_stop_is_renewed_unless_the_operator_asked_for_it(cancelled: bool, goes_on: bool) -> None:
    stop = Stop()

    async def stopped() -> None:
        with pytest.raises(Cancelled):
            await stop.sleep(60)

    stop.expire()
    asyncio.run(stopped())
    if cancelled:
        stop.set()
    assert stop.renew() is goes_on
    assert stop.is_set() is not goes_on


def test_a_plan_that_rolls_back_says_when() -> None:
    with pytest.raises(ValidationError, match="needs outage_budget_s"):
        live_plan(on_overrun="roll_back")


@pytest.mark.parametrize("hours", [5, -5])
def test_a_clock_that_is_set_while_the_guest_is_off_makes_the_outage_neither_longer_nor_shorter(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, hours: int
) -> None:
    """It was rolled back after seconds, or reported a downtime below 0."""
    house = House(tmp_path, workers=in_process)
    job = submitted(house, on_overrun="roll_back")
    off = threading.Event()

    def clock_is_set() -> None:
        off.set()
        monkeypatch.setattr("synvirt.migrations.source_vm.now", lambda: now() + timedelta(hours=hours))

    once(house, job, in_state(State.STARTING), clock_is_set)
    ended = house.run(job.id)
    assert off.is_set()
    assert (ended.state, ended.last_error) == (State.COMPLETED, None)
    assert ended.downtime_s is not None
    assert 0 <= ended.downtime_s < 600
    house.close()


def test_a_budget_without_a_window_is_slept_for_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing that could be changed meanwhile: no wake-up each half minute."""
    stop, slept = Stop(), list[float]()
    monkeypatch.setattr("synvirt.migrations.overrun.LOOK_S", 0.5)
    watching = asyncio.Event()

    async def sleep(seconds: float) -> None:
        slept.append(seconds)
        watching.set()
        await asyncio.Event().wait()

    async def memory() -> SimpleNamespace:
        return SimpleNamespace(down_since=None)

    async def step(_job: object) -> Facts:
        await watching.wait()
        return Facts(warm=True)

    monkeypatch.setattr("synvirt.migrations.overrun.asyncio", SimpleNamespace(**vars(asyncio) | {"sleep": sleep}))
    assert asyncio.run(within_budget(starting(stop, memory, lambda _: None), step)) == Facts(warm=True)
    assert slept == [EIGHT_SECONDS.outage_budget_s]
