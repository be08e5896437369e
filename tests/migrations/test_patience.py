"""What passes by itself costs a job nothing but time: a source that is away, another tool's backup, a changed password."""

import asyncio
import random
import threading
import time
from collections.abc import Awaitable, Callable, Collection, Iterator
from datetime import datetime, timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from synvirt.disks.specs import ReaderSpec
from synvirt.errors import SourceUnreachable, SynvirtError
from synvirt.jobs import stop
from synvirt.jobs.slots import Turns
from synvirt.live import SnapshotRef
from synvirt.migrations import advance, hearing, passes, patience
from synvirt.migrations.patience import Patience
from synvirt.migrations.tidying import Tidier
from synvirt.model.job import Migration
from synvirt.model.kinds import State
from synvirt.model.machine import Disk
from synvirt.model.problems import Problem
from synvirt.model.values import now
from synvirt.sizes import KIB, MIB
from tests.fakes.live import FakeAdapter
from tests.fakes.workers import in_process
from tests.house import SOURCE_ID, VM, Crash, House, live_plan
from tests.patience import no_patience, quick_tries
from tests.processes import until

DISK = "disk-0"
CODES = {
    "unreachable": "E_MIG_SOURCE_UNREACHABLE",
    "snapshot_failed": "E_MIG_SNAPSHOT_FAILED",
    "wrong_password": "E_MIG_AUTH_FAILED",
}
FOR_EVER = 1_000_000


@pytest.fixture
def house(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[House]:
    quick_tries(monkeypatch)
    house = House(tmp_path, workers=in_process)
    house.platform.add_vm(VM, {DISK: random.Random(1).randbytes(3 * MIB)})
    yield house
    house.close()


def code(problem: Problem | None) -> tuple[str, bool] | None:
    return None if problem is None else (problem.code, problem.fatal)


def copied_once(house: House, job: Migration) -> bool:
    """Its first pass is all that was copied whole, and the volume is what the source is."""
    whole = [one.number for one in job.passes if one.bytes >= 3 * MIB or one.whole]
    return whole == [1] and house.volume(job).read_bytes() == house.platform.disk_path(VM, DISK).read_bytes()


def at_commits(house: House, job: Migration, looked: Callable[[Migration], bool]) -> None:
    """`looked` is shown the job at each commit, until it has seen enough."""

    def committed() -> None:
        house.store.on_commit = lambda: None
        if not looked(house.store.get(job.id)):
            house.store.on_commit = committed

    house.store.on_commit = committed


def held(house: House, *, first_delta_done: bool = True) -> tuple[Migration, Callable[[Migration], bool]]:
    job = house.intake.submit(live_plan(warm={"cutover": "manual", "interval_s": 1}))

    def reached(now: Migration) -> bool:
        return now.state is State.DELTA_SYNCING and len([one for one in now.passes if one.finished_at]) == 1 + first_delta_done

    return job, reached


def refused_once_off(house: House, job: Migration, *, times: int) -> None:
    """The source refuses its password as soon as the guest is off for the cut-over."""

    def looked(now: Migration) -> bool:
        off = now.state is State.CUTTING_OVER and house.platform.vm(VM)["power"] == "off"
        if off:
            house.platform.fault("wrong_password", times)
        return off

    at_commits(house, job, looked)


@pytest.mark.parametrize("trouble", CODES)
def test_a_held_job_waits_until_its_source_is_well_again(house: House, trouble: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(patience, "SHOWN_FROM_S", 0.0)
    job, reached = held(house)
    reported: list[tuple[str, bool] | None] = []

    def looked(now: Migration) -> bool:
        if not reported:
            if reached(now):
                house.platform.guest_writes(VM, DISK, 0, bytes(64 * KIB))
                house.platform.fault(trouble, FOR_EVER)
                reported.append(None)
            return False
        if now.last_error is None:
            return False
        reported.append(code(now.last_error))
        assert now.last_error.message.count("It is tried again every") == 1
        assert now.progress.rate_bps == 0.0
        house.platform.fault(trouble, 0)
        house.intake.cutover(job.id)
        return True

    at_commits(house, job, looked)
    ended = house.run(job.id)
    assert reported == [None, (CODES[trouble], False)]
    assert (ended.state, ended.last_error) == (State.COMPLETED, None)
    assert copied_once(house, ended)
    assert house.platform.vm(VM)["snapshots"] == {}


@pytest.mark.parametrize("trouble", CODES)
def test_a_trouble_that_lasts_too_long_is_the_job_s_end(house: House, trouble: str, monkeypatch: pytest.MonkeyPatch) -> None:
    no_patience(monkeypatch)
    job, reached = held(house)

    def looked(now: Migration) -> bool:
        if reached(now):
            house.platform.fault(trouble, FOR_EVER)
        return reached(now)

    at_commits(house, job, looked)
    ended = house.run(job.id)
    assert (ended.state, code(ended.last_error)) == (State.FAILED, (CODES[trouble], True))
    assert house.platform.vm(VM)["power"] == "on"


@pytest.mark.parametrize("trouble", ["snapshot_failed", "wrong_password"])
def test_what_fails_before_anything_is_copied_is_said_at_once(house: House, trouble: str) -> None:
    job = house.intake.submit(live_plan())

    def looked(now: Migration) -> bool:
        if now.state is State.COPYING_FULL:
            house.platform.fault(trouble, FOR_EVER)
        return now.state is State.COPYING_FULL

    at_commits(house, job, looked)
    ended = house.run(job.id)
    assert (ended.state, code(ended.last_error)) == (State.FAILED, (CODES[trouble], True))


def test_what_was_reported_before_stands_there_again(house: House, monkeypatch: pytest.MonkeyPatch) -> None:
    """And a job that is cancelled while it waits is cancelled at once."""
    monkeypatch.setattr(patience, "SHOWN_FROM_S", 0.0)
    house.platform.fault("cannot_track", 1)  # so the job runs cold, and says so
    job = house.intake.submit(live_plan())
    seen: list[str] = []

    def looked(now: Migration) -> bool:
        code_now = None if now.last_error is None else now.last_error.code
        if code_now is not None and [code_now] != seen[-1:]:
            seen.append(code_now)
            house.platform.fault("unreachable", 5 if len(seen) == 1 else 0)
        return now.state is State.STARTING

    at_commits(house, job, looked)
    ended = house.run(job.id)
    assert seen == ["E_MIG_CBT_UNSUPPORTED", "E_MIG_SOURCE_UNREACHABLE", "E_MIG_CBT_UNSUPPORTED"]
    assert (ended.state, code(ended.last_error)) == (State.COMPLETED, ("E_MIG_CBT_UNSUPPORTED", False))


def test_a_service_that_died_while_it_waited_takes_back_the_trouble_it_showed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    quick_tries(monkeypatch)
    monkeypatch.setattr(patience, "SHOWN_FROM_S", 0.0)
    house = House(tmp_path, workers=in_process)
    house.platform.add_vm(VM, {DISK: random.Random(1).randbytes(3 * MIB)})
    job, reached = held(house)

    def dies_when_told(now: Migration) -> bool:
        if now.last_error is not None:
            raise Crash
        if reached(now):
            house.platform.fault("unreachable", FOR_EVER)
        return False

    at_commits(house, job, dies_when_told)
    with pytest.raises(Crash):
        house.run(job.id)
    house.close()

    house = House(tmp_path, workers=in_process)
    assert code(house.store.get(job.id).last_error) == ("E_MIG_SOURCE_UNREACHABLE", False)
    house.platform.fault("unreachable", 0)
    house.intake.cutover(job.id)
    ended = house.run(job.id)
    assert (ended.state, ended.last_error) == (State.COMPLETED, None)
    assert copied_once(house, ended)
    house.close()


def test_a_snapshot_that_cannot_go_now_goes_later(house: House, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is copied is copied; and no snapshot before it is forgotten."""
    no_patience(monkeypatch)
    job, _ = held(house)
    refused: list[str] = []
    cleanup = FakeAdapter.cleanup

    async def refusing(adapter: FakeAdapter, vm_id: str, name: str) -> None:
        if name.endswith("-1") and len(refused) < 2:
            refused.append(name)
            house.platform.fault("unreachable", 1)
        await cleanup(adapter, vm_id, name)

    monkeypatch.setattr(FakeAdapter, "cleanup", refusing)
    left: list[list[str]] = []

    def looked(now: Migration) -> bool:
        deltas = [one for one in now.passes if one.kind == "delta" and one.finished_at]
        if len(deltas) == 2 and now.forecast is not None:
            left.append([name[-1] for name in house.platform.vm(VM)["snapshots"]])
        if len(deltas) == 3:
            house.intake.cutover(job.id)
        return len(deltas) == 3

    at_commits(house, job, looked)
    ended = house.run(job.id)
    assert len(refused) == 2
    assert "1" not in left[-1]
    assert (ended.state, ended.last_error) == (State.COMPLETED, None)
    assert copied_once(house, ended)


def test_change_tracking_may_be_lost_once_more_after_a_delta_that_went_well(house: House) -> None:
    job, _ = held(house)
    lost: list[int] = []

    def looked(now: Migration) -> bool:
        done = len([one for one in now.passes if one.finished_at])
        if done in (2, 5) and done not in lost:
            lost.append(done)
            house.platform.lose_change_ids(VM)
        if done == 7:
            house.intake.cutover(job.id)
        return done == 7

    at_commits(house, job, looked)
    ended = house.run(job.id)
    assert ended.state is State.COMPLETED
    assert len([one for one in ended.passes if one.whole]) == 2
    assert house.volume(ended).read_bytes() == house.platform.disk_path(VM, DISK).read_bytes()


def test_a_pass_takes_as_long_as_it_copies_however_long_its_source_was_away(
    house: House, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Forecasts are made of it."""
    away_s = 0.0
    wait = Patience.wait

    async def waited(self: Patience, trouble: SynvirtError) -> None:
        nonlocal away_s
        away_s += 10_000.0
        await wait(self, trouble)

    monkeypatch.setattr(Patience, "wait", waited)
    monkeypatch.setattr(hearing, "time", SimpleNamespace(monotonic=lambda: time.monotonic() + away_s))
    job = house.intake.submit(live_plan())

    def looked(now: Migration) -> bool:
        begun = bool(now.passes)
        if begun:
            house.platform.fault("unreachable", 3)
        return begun

    at_commits(house, job, looked)
    ended = house.run(job.id)
    assert ended.state is State.COMPLETED
    assert away_s == 30_000.0
    assert sum(one.seconds for one in ended.passes) < 10_000.0


def test_a_password_that_is_changed_while_the_guest_is_off_is_waited_for(house: House) -> None:
    """A failed job could not power the guest on either."""
    job = house.intake.submit(live_plan())
    refused_once_off(house, job, times=3)
    ended = house.run(job.id)
    assert (ended.state, ended.last_error) == (State.COMPLETED, None)
    assert copied_once(house, ended)


def test_a_refused_password_is_not_tried_again_at_once(house: House, monkeypatch: pytest.MonkeyPatch) -> None:
    """The account would be locked for it."""
    no_patience(monkeypatch)
    monkeypatch.setattr(advance, "SWEEP_PAUSES_S", (0.01,) * 5)
    job = house.intake.submit(live_plan())
    refused_once_off(house, job, times=100)
    ended = house.run(job.id)
    assert (ended.state, code(ended.last_error)) == (State.FAILED, ("E_MIG_AUTH_FAILED", True))
    left = [entry for entry in house.store.ledger(job.id) if entry.kind in ("source_power", "snapshot")]
    with house.platform._state() as state:
        assert 100 - state["faults"]["wrong_password"] <= 1 + len(left)
    assert ("source_power", VM) in [(entry.kind, entry.name) for entry in left]


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
