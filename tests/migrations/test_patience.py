"""What passes by itself costs a job nothing but time: a source that is away, another tool's backup, a changed password."""

import random
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from synvirt.errors import SynvirtError
from synvirt.migrations import passes, patience
from synvirt.migrations.patience import Patience
from synvirt.model import KIB, MIB, Migration, Problem, State
from tests.fakes.live import FakeAdapter
from tests.house import VM, Crash, House, live_plan
from tests.patience import no_patience, quick_tries

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
    house = House(tmp_path)
    house.platform.add_vm(VM, {DISK: random.Random(1).randbytes(3 * MIB)})
    yield house
    house.close()


def code(told: Problem | None) -> tuple[str, bool] | None:
    return None if told is None else (told.code, told.fatal)


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


@pytest.mark.parametrize("trouble", CODES)
def test_a_held_job_waits_until_its_source_is_well_again(house: House, trouble: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(patience, "TOLD_FROM_S", 0.0)
    job, reached = held(house)
    told: list[tuple[str, bool] | None] = []

    def looked(now: Migration) -> bool:
        if not told:
            if reached(now):
                house.platform.guest_writes(VM, DISK, 0, bytes(64 * KIB))
                house.platform.fault(trouble, FOR_EVER)
                told.append(None)
            return False
        if now.last_error is None:
            return False
        told.append(code(now.last_error))
        assert now.last_error.message.count("It is tried again every") == 1
        house.platform.fault(trouble, 0)
        house.intake.cutover(job.id)
        return True

    at_commits(house, job, looked)
    ended = house.run(job.id)
    assert told == [None, (CODES[trouble], False)]
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


def test_what_was_told_before_stands_there_again(house: House, monkeypatch: pytest.MonkeyPatch) -> None:
    """And a job that is cancelled while it waits is cancelled at once."""
    monkeypatch.setattr(patience, "TOLD_FROM_S", 0.0)
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


def test_a_service_that_died_while_it_waited_takes_back_what_it_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    quick_tries(monkeypatch)
    monkeypatch.setattr(patience, "TOLD_FROM_S", 0.0)
    house = House(tmp_path)
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

    house = House(tmp_path)
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
    monkeypatch.setattr(passes, "time", SimpleNamespace(monotonic=lambda: time.monotonic() + away_s))
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
