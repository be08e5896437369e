"""What goes on while a job waits: cancels, other jobs, a changed source, guests that are held, platforms that hang."""

import asyncio
import random
import threading
from collections.abc import Awaitable, Callable, Collection
from datetime import datetime, timedelta
from typing import Any

import pytest

from synvirt.disks.specs import ReaderSpec
from synvirt.errors import SourceUnreachable, SynvirtError
from synvirt.jobs import stop
from synvirt.jobs.slots import Turns
from synvirt.live import SnapshotRef
from synvirt.migrations import advance, passes, patience, source_vm
from synvirt.migrations.memory import JobMemory
from synvirt.migrations.patience import Patience
from synvirt.migrations.tidying import Tidier
from synvirt.model.job import Migration
from synvirt.model.kinds import State
from synvirt.model.machine import Disk
from synvirt.model.plan import Shutdown
from synvirt.model.values import now
from synvirt.sizes import MIB
from tests.fakes.live import FakeAdapter
from tests.house import SOURCE_ID, VM, House, live_plan
from tests.migrations.patience.waiting import DISK, FOR_EVER, at_commits, held
from tests.running.processes import until


def test_who_waits_for_one_vm_keeps_no_other_from_being_read(house: House, monkeypatch: pytest.MonkeyPatch) -> None:
    house.platform.add_vm("vm-2", {DISK: random.Random(2).randbytes(MIB)})
    object.__setattr__(house.rooms, "jobs_per_source", 1)
    opened, away = FakeAdapter.open_disk, threading.Event()
    tried = threading.Event()

    async def locked(adapter: FakeAdapter, vm_id: str, snapshot: SnapshotRef, disk: Disk, since: str | None) -> ReaderSpec:
        if vm_id == VM and not away.is_set():
            tried.set()
            raise SourceUnreachable("its disk is locked")
        return await opened(adapter, vm_id, snapshot, disk, since)

    monkeypatch.setattr(FakeAdapter, "open_disk", locked)
    waits = house.intake.submit(live_plan())
    other = house.intake.submit(
        live_plan(source_ref={"kind": "live_vm", "source_id": str(SOURCE_ID), "vm_id": "vm-2"}, target={"name": "other"})
    )
    thread = threading.Thread(target=house.run, args=(waits.id,), daemon=True)
    thread.start()
    assert tried.wait(60)
    assert house.run(other.id).state is State.COMPLETED
    assert house.store.get(waits.id).state is State.COPYING_FULL
    away.set()
    thread.join(60)
    assert house.store.get(waits.id).state is State.COMPLETED


def test_a_delta_that_was_held_up_is_followed_by_another(house: House, monkeypatch: pytest.MonkeyPatch) -> None:
    """What changed meanwhile would be copied while the guest is off."""
    job = house.intake.submit(live_plan())
    held_up: list[int] = []

    def later() -> datetime:
        return now() + timedelta(hours=20 if held_up == [2] else 0)

    def looked(now: Migration) -> bool:
        if len(now.passes) == 2 and not held_up:
            held_up.append(2)
        if len(now.passes) == 2 and now.passes[-1].finished_at is not None:
            held_up.append(0)
        return len(held_up) == 2

    monkeypatch.setattr(passes, "now", later)
    at_commits(house, job, looked)
    ended = house.run(job.id)
    assert ended.state is State.COMPLETED
    assert [one.kind for one in ended.passes] == ["full", "delta", "delta", "final"]


def test_a_cancel_waits_for_the_call_that_it_cancels(house: House, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a platform is just making would stay, if it were tidied up before it is there."""
    snapshot, begun, ended = FakeAdapter.snapshot, threading.Event(), threading.Event()
    job = house.intake.submit(live_plan())

    async def slow(adapter: FakeAdapter, vm_id: str, name: str, disks: Collection[str]) -> SnapshotRef:
        begun.set()
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            await asyncio.sleep(0.5)  # its session's close waits for the call
            made = await snapshot(adapter, vm_id, name, disks)
            ended.set()
            return made
        raise AssertionError("nobody cancelled")

    monkeypatch.setattr(FakeAdapter, "snapshot", slow)
    thread = threading.Thread(target=house.run, args=(job.id,), daemon=True)
    thread.start()
    assert begun.wait(60)
    house.intake.cancel(job.id)
    thread.join(60)
    assert ended.is_set()
    assert house.store.get(job.id).state is State.CANCELLED
    assert house.platform.vm(VM)["snapshots"] == {}
    assert house.store.ledger(job.id) == []


def test_a_changed_source_is_tried_at_once(house: House, monkeypatch: pytest.MonkeyPatch) -> None:
    """A new password: nobody waits the five minutes until the next try."""
    monkeypatch.setattr(patience, "PAUSES_S", dict.fromkeys(patience.PAUSES_S, (3600.0,)))
    job, reached = held(house)
    refused: list[State] = []

    def looked(now: Migration) -> bool:
        if reached(now) and not refused:
            refused.append(now.state)
            house.platform.fault("wrong_password", FOR_EVER)
        if now.last_error is not None:
            threading.Thread(target=woken, daemon=True).start()
        return now.last_error is not None

    def woken() -> None:
        until(lambda: bool(house.rooms.waiting._stops))
        house.platform.fault("wrong_password", 0)
        house.intake.cutover(job.id)
        house.rooms.waiting.wake(SOURCE_ID)

    at_commits(house, job, looked)
    ended = house.run(job.id)
    assert (ended.state, ended.last_error) == (State.COMPLETED, None)
    assert refused
    assert not house.rooms.waiting._stops


@pytest.mark.parametrize(("mode", "given", "seconds"), [("Warm", {}, 300), ("Cold", {"shutdown_timeout_s": 7}, 7)])
def test_a_guest_that_is_held_is_waited_for_and_never_powered_off(
    house: House, mode: str, given: dict[str, float], seconds: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It installs updates for longer than any deadline: that is said, and what was said is taken back. The deadline is the
    plan's, or else the source's."""
    monkeypatch.setattr(patience, "SHOWN_FROM_S", 0.0)
    house.platform.fault("stays_on", 5)
    reported: list[str] = []

    def looked(now: Migration) -> bool:
        if now.last_error is not None and now.last_error.message not in reported:
            assert house.platform.vm(VM)["power"] == "on"
            reported.append(now.last_error.message)
        return now.ended

    job = house.intake.submit(live_plan(mode, shutdown="hold", **given))
    at_commits(house, job, looked)
    ended = house.run(job.id)
    assert (ended.state, ended.last_error) == (State.COMPLETED, None)
    assert f"{VM} was asked to shut down, and still runs after {seconds} s" in reported[0]
    assert house.platform.vm(VM)["power"] == "off"


def test_a_guest_that_is_held_can_be_cancelled_and_runs_on(house: House, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(patience, "PAUSES_S", dict.fromkeys(patience.PAUSES_S, (3600.0,)))
    house.platform.fault("stays_on", FOR_EVER)
    job = house.intake.submit(live_plan(shutdown="hold"))

    def looked(now: Migration) -> bool:
        if now.last_error is not None:
            threading.Thread(target=house.intake.cancel, args=(job.id,), daemon=True).start()
        return now.last_error is not None

    at_commits(house, job, looked)

    def woken() -> None:
        """As the engine does that sees the operator's wish."""
        until(lambda: house.store.cancel_requested(job.id))
        house.stops[job.id].set()

    waker = threading.Thread(target=woken)
    waker.start()
    ended = house.run(job.id)
    waker.join(60)
    assert ended.state is State.CANCELLED
    assert house.platform.vm(VM)["power"] == "on"
    assert house.platform.vm(VM)["snapshots"] == {}
    # It was asked to shut down, and may still do so: then it is powered on again.
    assert [entry.kind for entry in house.store.ledger(job.id)] == ["source_power"]


def test_a_guest_that_was_asked_again_after_hours_may_still_go_off(house: House, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each request counts, not the first alone: a cancelled job powers it on again. While it runs it has no downtime."""
    at, downtimes, asked = [now()], list[datetime | None](), list[datetime]()
    monkeypatch.setattr(patience, "SHOWN_FROM_S", 0.0)
    monkeypatch.setattr(source_vm, "now", lambda: at[0])
    shutdown, waited = FakeAdapter.shutdown, Patience.wait

    async def shut_down(adapter: FakeAdapter, vm_id: str, manner: Shutdown = "polite", timeout_s: float | None = None) -> None:
        asked.append(at[0])
        if len(asked) == 3:
            house.intake.cancel(job.id)
            house.stops[job.id].set()
        await shutdown(adapter, vm_id, manner, timeout_s)

    async def wait(one: Patience, trouble: SynvirtError) -> None:
        downtimes.append(house.store.memory.get(job.id, JobMemory).down_since)
        at[0] += timedelta(hours=1 if len(asked) < 3 else 0)
        await waited(one, trouble)

    monkeypatch.setattr(FakeAdapter, "shutdown", shut_down)
    monkeypatch.setattr(Patience, "wait", wait)
    house.platform.fault("stays_on", FOR_EVER)
    job = house.intake.submit(live_plan(shutdown="hold"))
    assert house.run(job.id).state is State.CANCELLED
    assert len(asked) == 3
    assert set(downtimes) == {None}
    assert [entry.kind for entry in house.store.ledger(job.id)] == ["source_power"]


@pytest.mark.parametrize("first", ["snapshot", "open_disk"])
def test_a_cancel_does_not_wait_for_a_platform_that_hangs(house: House, monkeypatch: pytest.MonkeyPatch, first: str) -> None:
    """What is left there stays in the ledger, and is tidied up once the platform answers."""
    monkeypatch.setattr(stop, "CANCEL_WITHIN_S", 0.2)
    monkeypatch.setattr(advance, "CANCELLED_CONNECT_S", 0.2)
    job, hangs, answers = house.intake.submit(live_plan()), threading.Event(), threading.Event()

    def hanging(name: str) -> Callable[..., Awaitable[Any]]:
        call = getattr(FakeAdapter, name)

        async def hang(adapter: FakeAdapter, *args: Any) -> Any:
            if name == first:
                hangs.set()
            if hangs.is_set():
                await asyncio.to_thread(answers.wait, 60)
            return await call(adapter, *args)

        return hang

    for name in ("connect", "inspect", "snapshot", "open_disk", "cleanup"):
        monkeypatch.setattr(FakeAdapter, name, hanging(name))
    running = threading.Thread(target=house.run, args=(job.id,), daemon=True)
    running.start()
    try:
        assert hangs.wait(60)
        house.intake.cancel(job.id)
        until(lambda: house.store.get(job.id).state is State.CANCELLED)
        assert {entry.kind for entry in house.store.ledger(job.id)} == {"snapshot", "tracking"}
    finally:
        answers.set()
    running.join(60)
    Tidier(house.rooms, host="local").look()
    assert house.platform.vm(VM)["snapshots"] == {}
    assert house.store.ledger(job.id) == []


def test_a_source_that_hangs_is_named_within_a_minute(house: House, monkeypatch: pytest.MonkeyPatch) -> None:
    """A platform that says nothing for 45 s has been waited for that long: no second try is needed to say so."""
    job, reached = held(house)
    reported: list[str] = []
    inspect, silent = FakeAdapter.last_start, [3]

    async def slow(adapter: FakeAdapter, vm_id: str) -> str:
        if silent[0]:
            silent[0] -= 1
            raise SourceUnreachable("the platform did not answer within 45 s", waited_s=45.0)
        return await inspect(adapter, vm_id)

    monkeypatch.setattr(FakeAdapter, "last_start", slow)

    def looked(now: Migration) -> bool:
        if now.last_error is not None and not reported:
            reported.append(now.last_error.message)
            assert silent[0] == 2
        if reached(now):
            house.intake.cutover(job.id)
        return now.ended

    at_commits(house, job, looked)
    ended = house.run(job.id)
    assert (ended.state, ended.last_error) == (State.COMPLETED, None)
    assert reported[0].startswith("the platform did not answer within 45 s. It is tried again every 0 s until")


def test_a_job_that_only_waits_lets_others_work(house: House, monkeypatch: pytest.MonkeyPatch) -> None:
    """Held for its cut-over, or by a source that is away: with one turn for all."""
    object.__setattr__(house.rooms, "turns", Turns(1))
    ids = [VM, "vm-2", "vm-3", "vm-4"]
    for number, vm_id in enumerate(ids[1:]):
        house.platform.add_vm(vm_id, {DISK: random.Random(number).randbytes(MIB)})
    opened, back = FakeAdapter.open_disk, threading.Event()

    async def away(adapter: FakeAdapter, vm_id: str, snapshot: SnapshotRef, disk: Disk, since: str | None) -> ReaderSpec:
        if vm_id == "vm-2" and not back.is_set():
            raise SourceUnreachable("it is away")
        return await opened(adapter, vm_id, snapshot, disk, since)

    monkeypatch.setattr(FakeAdapter, "open_disk", away)

    def submit(vm_id: str, **fields: Any) -> Migration:
        ref = {"kind": "live_vm", "source_id": str(SOURCE_ID), "vm_id": vm_id}
        return house.intake.submit(live_plan(source_ref=ref, target={"name": vm_id}, **fields))

    held = {"warm": {"cutover": "manual", "interval_s": 3600}}
    waiting = [submit(VM, **held), submit("vm-2"), submit("vm-3", **held)]
    threads = [threading.Thread(target=house.run, args=(job.id,), daemon=True) for job in waiting]
    for thread in threads:
        thread.start()
    assert house.run(submit("vm-4").id).state is State.COMPLETED
    until(lambda: all(len(house.store.get(waiting[at].id).passes) == 2 for at in (0, 2)))
    assert not any(house.store.get(job.id).ended for job in waiting)
    back.set()
    for job in (waiting[0], waiting[2]):
        house.intake.cutover(job.id)
    for thread in threads:
        thread.join(100)
    assert [house.store.get(job.id).state for job in waiting] == [State.COMPLETED] * 3


def test_a_trouble_that_lasts_is_one_event_however_often_it_is_tried(house: House, monkeypatch: pytest.MonkeyPatch) -> None:
    """An event has the whole job, and is kept as long as that: a vCenter that is away for a day is tried some 1,400 times by
    each of the jobs that are held."""
    monkeypatch.setattr(patience, "SHOWN_FROM_S", 0.0)
    job, reached = held(house)
    tries, wait = list[str](), Patience.wait

    async def counted(own: Patience, trouble: SynvirtError) -> None:
        tries.append(trouble.code)
        if len(tries) == 30:
            house.platform.fault("unreachable", 0)
            house.intake.cutover(job.id)
        await wait(own, trouble)

    def looked(now: Migration) -> bool:
        if reached(now):
            house.platform.fault("unreachable", FOR_EVER)
        return reached(now)

    monkeypatch.setattr(Patience, "wait", counted)
    at_commits(house, job, looked)
    assert house.run(job.id).state is State.COMPLETED
    assert len(tries) >= 30
    events = [Migration.model_validate_json(one.document) for one in house.store.events_after(0, job_id=job.id, limit=1000)]
    shown = [one.last_error for one in events if one.state is State.DELTA_SYNCING and one.last_error is not None]
    assert {one.code for one in shown} == {"E_MIG_SOURCE_UNREACHABLE"}
    assert len(shown) < 10
