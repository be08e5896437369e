"""What passes by itself costs a job nothing but time: a source that is away, another tool's backup, a changed password."""

import asyncio
import random
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from synvirt.destinations import DestinationAway
from synvirt.errors import SynvirtError
from synvirt.migrations import advance, hearing, patience
from synvirt.migrations.patience import Patience
from synvirt.model.job import Migration
from synvirt.model.kinds import State
from synvirt.sizes import KIB, MIB
from tests.fakes.hypervisor import FakeHypervisor
from tests.fakes.live import FakeAdapter
from tests.fakes.workers import in_process
from tests.house import VM, Crash, House, live_plan
from tests.migrations.patience.waiting import CODES, DISK, FOR_EVER, at_commits, code, copied_once, held, refused_once_off
from tests.patience import no_patience, quick_tries


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


def test_a_destination_that_is_away_is_waited_for_by_the_whole_step_alone() -> None:
    """What waits within the step would wait as long once more."""
    tried: list[Patience] = []

    async def attempt(patience: Patience) -> None:
        tried.append(patience)
        raise DestinationAway("nothing is mounted")

    async def show_no_more() -> None: ...

    job: Any = SimpleNamespace(show_no_more=show_no_more)
    with pytest.raises(DestinationAway):
        asyncio.run(patience.patiently(job, attempt, 60))
    assert len(tried) == 1


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


def test_a_source_that_is_away_as_its_turn_comes_is_waited_for(house: House) -> None:
    """Of a wave of hundreds each would fail in a second, while a vCenter restarts at night."""
    job = house.intake.submit(live_plan())
    house.platform.fault("unreachable", 3)
    assert house.run(job.id).state is State.COMPLETED


def test_a_source_that_stays_away_as_its_turn_comes_ends_the_job(house: House, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(patience, "GUEST_OFF_S", 0.1)
    job = house.intake.submit(live_plan())
    house.platform.fault("unreachable", FOR_EVER)
    ended = house.run(job.id)
    assert (ended.state, code(ended.last_error)) == (State.FAILED, (CODES["unreachable"], True))
    house.platform.fault("unreachable", 0)
    assert house.leftovers(VM) == []
    assert house.platform.vm(VM)["power"] == "on"


def test_a_libvirtd_that_restarts_as_the_guest_starts_is_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As by an update of the host's packages. The guest is off at its source meanwhile, and its copy is whole."""
    quick_tries(monkeypatch)
    hypervisor = FakeHypervisor()
    house = House(tmp_path, hypervisor=hypervisor, workers=in_process)
    house.platform.add_vm(VM, {DISK: random.Random(1).randbytes(3 * MIB)})
    job = house.intake.submit(live_plan())

    def looked(now: Migration) -> bool:
        hypervisor.away = 3 if now.state is State.STARTING else 0
        return now.state is State.STARTING

    at_commits(house, job, looked)
    ended = house.run(job.id)
    assert (ended.state, ended.last_error, hypervisor.away) == (State.COMPLETED, None, 0)
    assert copied_once(house, ended)
    assert len(hypervisor.domains) == 1
    house.close()


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


def test_what_is_found_as_the_trouble_passes_stands_there_after_it(house: House, monkeypatch: pytest.MonkeyPatch) -> None:
    """A host that crashed is away for a while, and then has forgotten the changes: the operator sees why the outage is long."""
    monkeypatch.setattr(patience, "SHOWN_FROM_S", 0.0)
    job = house.intake.submit(live_plan())
    seen: list[tuple[str, bool] | None] = []

    def looked(now: Migration) -> bool:
        if not seen and now.state is State.CUTTING_OVER and house.platform.vm(VM)["power"] == "off":
            house.platform.lose_change_ids(VM)
            house.platform.fault("unreachable", 5)
            seen.append(None)
        elif seen and code(now.last_error) != seen[-1]:
            seen.append(code(now.last_error))
        return now.state is State.STARTING

    at_commits(house, job, looked)
    ended = house.run(job.id)
    assert seen == [None, ("E_MIG_SOURCE_UNREACHABLE", False), ("E_MIG_CBT_RESET", False)]
    assert (ended.state, code(ended.last_error)) == (State.COMPLETED, ("E_MIG_CBT_RESET", False))
    assert ended.passes[-1].whole


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
