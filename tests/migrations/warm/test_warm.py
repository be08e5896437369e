"""The warm engine's laws, in a house of fakes: a source that forgets or grows, and how long it takes."""

import threading
import time
from collections.abc import Callable, Collection, Iterator
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from uuid import uuid4

import pytest
from hypothesis import given
from hypothesis import strategies as st
from sqlalchemy import select

from synvirt.errors import OutageTooLong, SourceUnreachable
from synvirt.jobs.process import started
from synvirt.jobs.slots import Resource, source, source_host
from synvirt.jobs.stop import Stop
from synvirt.live import SnapshotRef
from synvirt.migrations import source_vm
from synvirt.migrations.job import Job, named
from synvirt.migrations.memory import PassMemory
from synvirt.migrations.planning.forecast import forecast
from synvirt.migrations.warm import deciding, holding
from synvirt.model.job import Forecast, Migration, Pass
from synvirt.model.kinds import Mode, State
from synvirt.model.machine import Disk
from synvirt.model.plan import Shutdown
from synvirt.sizes import KIB, MIB
from synvirt.store.tables import memory
from tests.cases import cases
from tests.fakes.live import FakeAdapter
from tests.fakes.workers import in_process
from tests.house import SOURCE_ID, VM, House, live_plan, states
from tests.jobs.migrations import migration
from tests.migrations.planning.test_outage import done_job
from tests.migrations.warm.warm_house import DISK, content, error, failed_as_it_was, in_state, once, source_bytes
from tests.patience import quick_tries


@pytest.fixture
def house(tmp_path: Path) -> Iterator[House]:
    house = House(tmp_path, workers=in_process)
    yield house
    house.close()


# ── a source that forgets ────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("state", [State.COPYING_FULL, State.DELTA_SYNCING, State.CUTTING_OVER])
def test_a_snapshot_that_is_gone_is_taken_again(house: House, state: State) -> None:
    """The source's host was restarted in the middle of a pass, and its guest went on writing; the worker ends with it."""
    house.rooms = replace(house.rooms, workers=started)
    house.platform.add_vm(VM, {DISK: content(4 * MIB)})
    job = house.intake.submit(live_plan(limits={"bandwidth_bps": 16 * MIB}))

    def under_way(now: Migration) -> bool:
        return now.state == state and any(house.store.watermarks(job.id, number) for number in _open_passes(now))

    def restart() -> None:
        house.platform.lose_snapshots(VM)
        for offset in (0, MIB, 3 * MIB):
            house.platform.guest_writes(VM, DISK, offset, content(100 * KIB, offset))
        _kill_workers()

    if state is not State.COPYING_FULL:
        once(house, job, in_state(state), lambda: _write_and_then(house, job, under_way, restart))
    else:
        once(house, job, under_way, restart)
    ended = house.run(job.id)
    assert ended.state == State.COMPLETED
    assert house.volume(ended).read_bytes() == source_bytes(house)
    assert house.platform.vm(VM)["snapshots"] == {}


def test_a_first_pass_that_was_begun_before_writes_zeros_too(house: House) -> None:
    """The volume has a part of another moment of the guest, which has freed blocks since."""
    house.platform.add_vm(VM, {DISK: bytes(MIB) + content(MIB)})
    job = house.intake.submit(live_plan())

    def begun_before() -> None:
        house.store.memory.change(job.id, PassMemory, lambda before: before.model_copy(update={"retakes": 0}), 1)
        for disk in house.store.get(job.id).disks:
            assert disk.volume is not None
            house.destination.create(disk.volume, 2 * MIB)
            Path(house.destination.device(disk.volume)).write_bytes(b"x" * 2 * MIB)

    once(house, job, in_state(State.COPYING_FULL), begun_before)
    ended = house.run(job.id)
    # Not only after a sample has found what was left there.
    assert (ended.state, ended.last_error, ended.distrusted) == (State.COMPLETED, None, None)
    assert house.volume(ended).read_bytes() == source_bytes(house)


def _open_passes(job: Migration) -> list[int]:
    return [one.number for one in job.passes if one.finished_at is None]


def _write_and_then(house: House, job: Migration, happened: Callable[[Migration], bool], do: Callable[[], None]) -> None:
    house.platform.guest_writes(VM, DISK, 0, content(3 * MIB, 99))
    once(house, job, happened, do)


def _kill_workers() -> None:
    import os
    import signal

    from tests.running.processes import workers

    for pid in workers():
        os.kill(pid, signal.SIGKILL)


def test_change_ids_are_noted_before_the_older_snapshot_goes(house: House, monkeypatch: pytest.MonkeyPatch) -> None:
    house.platform.add_vm(VM, {DISK: content()})
    job = house.intake.submit(live_plan())
    seen: list[bool] = []
    cleanup = FakeAdapter.cleanup

    async def watched(adapter: FakeAdapter, vm_id: str, name: str) -> None:
        number = int(name.rpartition("-")[2])
        passes = house.store.get(job.id).passes
        if passes and number < passes[-1].number:
            seen.append(house.store.memory.get(job.id, PassMemory, number + 1).snapshot is not None)
        await cleanup(adapter, vm_id, name)

    monkeypatch.setattr(FakeAdapter, "cleanup", watched)
    assert house.run(job.id).state == State.COMPLETED
    assert seen
    assert all(seen)


def test_it_shows_by_trying_that_changes_cannot_be_tracked(house: House) -> None:
    house.platform.add_vm(VM, {DISK: content()})
    house.platform.fault("cannot_track", 1)
    ended = house.run(house.intake.submit(live_plan()).id)
    assert states(ended) == [State.QUEUED, State.COPYING_FULL, State.STARTING, State.COMPLETED]
    assert ended.mode_effective == Mode.COLD
    assert error(ended) == ("E_MIG_CBT_UNSUPPORTED", False)
    assert house.volume(ended).read_bytes() == source_bytes(house)
    assert house.platform.vm(VM)["snapshots"] == {}


def test_a_job_with_a_budget_does_not_go_cold(house: House) -> None:
    """Its guest would be away for the whole copy."""
    house.platform.add_vm(VM, {DISK: content()})
    house.platform.fault("cannot_track", 1)
    ended = house.run(house.intake.submit(live_plan(outage_budget_s=3600)).id)
    failed_as_it_was(house, ended, "E_MIG_OUTAGE_TOO_LONG")
    assert "3600 s are allowed" in (ended.last_error.message if ended.last_error else "")
    assert ended.passes == ()


# ── a source that grows ──────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("key", "new", "reported"),
    [
        ("disk-9", bytes(MIB), "disk disk-9 of 1048576 bytes was added"),
        (DISK, content(4 * MIB), "disk disk-0 was resized from 3145728 to 4194304 bytes"),
        ("disk-1", None, "disk disk-1 was removed"),
    ],
)
def test_other_disks_than_it_began_with_are_found(house: House, key: str, new: bytes | None, reported: str) -> None:
    house.platform.add_vm(VM, {DISK: content(), "disk-1": bytes(64 * KIB)})
    job = house.intake.submit(live_plan())
    once(house, job, in_state(State.DELTA_SYNCING), lambda: house.platform.resize(VM, key, new))
    ended = house.run(job.id)
    failed_as_it_was(house, ended, "E_MIG_CONFLICT")
    assert ended.last_error is not None
    assert reported in ended.last_error.message


def test_a_skipped_disk_may_grow_and_is_never_held_still(house: House, monkeypatch: pytest.MonkeyPatch) -> None:
    held: list[Collection[str] | None] = []
    snapshot = FakeAdapter.snapshot

    async def watched(adapter: FakeAdapter, vm_id: str, name: str, disks: Collection[str] | None = None) -> SnapshotRef:
        held.append(disks)
        return await snapshot(adapter, vm_id, name, disks)

    monkeypatch.setattr(FakeAdapter, "snapshot", watched)
    house.platform.add_vm(VM, {DISK: content(), "disk-1": bytes(64 * KIB)})
    job = house.intake.submit(live_plan(skip_disks=["disk-1"]))
    once(house, job, in_state(State.DELTA_SYNCING), lambda: house.platform.resize(VM, "disk-1", bytes(MIB)))
    assert house.run(job.id).state == State.COMPLETED
    assert len(held) > 1
    assert all(disks == [DISK] for disks in held)


@pytest.mark.parametrize("away", [1, 1000])
def test_a_snapshot_that_could_not_be_released_is_tried_again_before_the_guest_is_shut_down(
    house: House, monkeypatch: pytest.MonkeyPatch, away: int
) -> None:
    """Its source was away after the last delta. On some platforms what changed since is known only then. If it stays away, the
    cut-over does not wait for it."""
    quick_tries(monkeypatch)
    monkeypatch.setattr(source_vm, "LATER_S", 0.0)
    release, tried, left = FakeAdapter.release, list[tuple[str, str]](), [away]

    async def released(adapter: FakeAdapter, vm_id: str, name: str) -> None:
        if name.endswith("-2"):
            tried.append((house.platform.vm(VM)["power"], states(house.store.get(job.id))[-1]))
            left[0] -= 1
            if left[0] >= 0:
                raise SourceUnreachable("the fake platform is away")
        await release(adapter, vm_id, name)

    monkeypatch.setattr(FakeAdapter, "release", released)
    house.platform.add_vm(VM, {DISK: content()})
    job = house.intake.submit(live_plan())
    ended = house.run(job.id)
    assert (ended.state, ended.last_error) == (State.COMPLETED, None)
    assert tried == [("on", State.DELTA_SYNCING), ("on", State.CUTTING_OVER)]
    assert house.volume(ended).read_bytes() == source_bytes(house)
    assert house.platform.vm(VM)["snapshots"] == {}


# ── how long it takes ────────────────────────────────────────────────────────────────────────────────────────────────


def test_the_downtime_is_measured(house: House) -> None:
    house.platform.add_vm(VM, {DISK: content()})
    ended = house.run(house.intake.submit(live_plan()).id)
    off = next(visit.at for visit in ended.history if visit.state == State.CUTTING_OVER)
    assert ended.downtime_s is not None
    assert ended.finished_at is not None
    assert 0 < ended.downtime_s <= (ended.finished_at - off).total_seconds()


def test_a_guest_that_was_off_has_no_downtime(house: House) -> None:
    house.platform.add_vm(VM, {DISK: content()})
    house.platform.power(VM, "off")
    ended = house.run(house.intake.submit(live_plan("Cold")).id)
    assert (ended.state, ended.downtime_s) == (State.COMPLETED, None)


def test_a_job_that_cannot_converge_says_why(house: House) -> None:
    house.platform.add_vm(VM, {DISK: content(4 * MIB)})
    job = house.intake.submit(live_plan(warm={"max_passes": 2, "delta_threshold_bytes": 0}))

    def writes_at_every_commit() -> None:
        house.store.on_commit = lambda: None
        house.platform.guest_writes(VM, DISK, 0, content(2 * MIB, time.monotonic_ns()))
        house.store.on_commit = writes_at_every_commit

    house.store.on_commit = writes_at_every_commit
    ended = house.run(job.id)
    house.store.on_commit = lambda: None
    failed_as_it_was(house, ended, "E_MIG_DELTA_TOO_LARGE")
    assert ended.last_error is not None
    assert "its last deltas had 2.0, 2.0 MiB" in ended.last_error.message
    assert "MiB/s are copied" in ended.last_error.message
    assert ended.forecast is not None
    assert ended.forecast.change_rate_bps > 0


BEGAN = datetime(2026, 1, 1, tzinfo=UTC)


def passes(*sizes: int, every_s: float = 10, bps: float = 100 * MIB) -> list[Pass]:
    """The first pass is the full one; snapshots come at a steady pace, and are copied at a steady rate."""
    return [
        Pass(
            number=number,
            kind="full" if number == 1 else "delta",
            bytes=size,
            seconds=size / bps,
            snapshot_at=BEGAN + timedelta(seconds=every_s * number),
            finished_at=BEGAN + timedelta(seconds=every_s * number + size / bps),
        )
        for number, size in enumerate(sizes, 1)
    ]


def test_there_is_no_forecast_before_the_first_delta() -> None:
    assert forecast([], at=BEGAN) is None
    assert forecast(passes(100 * MIB), at=BEGAN) is None


@given(
    rate_mib=st.floats(0.1, 1000),
    bps_mib=st.floats(1, 1000),
    count=st.integers(1, 5),
    wait_s=st.floats(0, 600),
)
@cases(200)
def test_a_steady_guest_is_foreseen_exactly(rate_mib: float, bps_mib: float, count: int, wait_s: float) -> None:
    done = passes(100_000 * MIB, *([int(rate_mib * MIB * 10)] * count), every_s=10, bps=bps_mib * MIB)
    at = BEGAN + timedelta(seconds=10 * len(done) + wait_s)
    seen = forecast(done, at=at)
    assert seen is not None
    assert seen.change_rate_bps == pytest.approx(rate_mib * MIB, rel=0.01)
    assert seen.throughput_bps == pytest.approx(bps_mib * MIB, rel=0.01)
    assert seen.expected_delta_bytes == pytest.approx(rate_mib * MIB * wait_s, rel=0.01, abs=64 * KIB)
    assert seen.expected_downtime_s == pytest.approx(rate_mib * wait_s / bps_mib, rel=0.02, abs=0.1)
    assert seen.converges == (seen.change_rate_bps < seen.throughput_bps)


# ── the operator's moment ────────────────────────────────────────────────────────────────────────────────────────────


def test_an_old_snapshot_is_followed_by_one_more_before_the_guest_goes_down(
    house: House, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Asked after days of holding: what has changed meanwhile is not copied while the guest is off."""
    monkeypatch.setattr(deciding, "FRESH_S", 0.0)
    house.platform.add_vm(VM, {DISK: content()})
    job = house.intake.submit(live_plan(warm={"cutover": "manual", "interval_s": 600}))

    def holds(now: Migration) -> bool:
        return now.state == State.DELTA_SYNCING and now.forecast is not None and len(now.passes) == 2

    def ask() -> None:
        house.platform.guest_writes(VM, DISK, 0, content(2 * MIB, 8))
        house.intake.cutover(job.id)

    once(house, job, holds, ask)
    ended = house.run(job.id)
    assert ended.state == State.COMPLETED
    assert [(one.kind, one.bytes) for one in ended.passes[1:]] == [("delta", 0), ("delta", 2 * MIB), ("final", 0)]
    assert house.volume(ended).read_bytes() == source_bytes(house)


def test_nobody_is_shut_down_for_longer_than_the_budget_allows(house: House) -> None:
    """It holds, copies on, and says which part is too long; once there is reason to believe that it fits, it cuts over."""
    house.platform.add_vm(VM, {DISK: content()})
    job = house.intake.submit(live_plan(outage_budget_s=20, warm={"interval_s": 0.01}))
    powers: list[str] = []

    def holds(now: Migration) -> bool:
        return now.last_error is not None and now.last_error.code == OutageTooLong.code and len(now.passes) > 3

    def faster_now() -> None:
        """Jobs that completed here meanwhile took a second each."""
        held = house.store.get(job.id)
        assert held.last_error is not None
        assert "20 s are allowed" in held.last_error.message
        assert held.outage is not None
        assert held.outage.p95_s > 20
        powers.append(house.platform.vm(VM)["power"])
        for _ in range(9):
            house.store.add(done_job(1, 1, 1), host="local")

    once(house, job, holds, faster_now)
    ended = house.run(job.id)
    assert powers == ["on"]
    assert (ended.state, ended.last_error) == (State.COMPLETED, None)
    assert ended.outage is not None
    assert ended.outage.p95_s < 20
    assert [part.measured for part in ended.outage.parts if part.name != "last copy"] == [9, 9]
    assert ended.downtime_s is not None


def test_a_job_that_is_held_for_weeks_keeps_the_passes_that_matter(house: House, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("synvirt.migrations.passes.PASSES_KEPT", 2)
    for name in ("HOLD_LEAST_S", "HOLD_MOST_S", "HOLD_UNKNOWN_S"):
        monkeypatch.setattr(holding, name, 0.01)
    house.platform.add_vm(VM, {DISK: content()})
    job = house.intake.submit(live_plan(warm={"cutover": "manual", "interval_s": 0}))

    def often(now: Migration) -> bool:
        if now.state is State.DELTA_SYNCING:
            house.platform.guest_writes(VM, DISK, 0, content(64 * KIB, len(now.passes)))
        return bool(now.passes) and now.passes[-1].number == 6

    once(house, job, often, lambda: house.intake.cutover(job.id))
    ended = house.run(job.id)
    assert ended.state is State.COMPLETED
    assert [one.kind for one in ended.passes] == ["full", "delta", "final"]
    assert ended.passes[-1].number >= 7
    marks = [house.store.watermarks(job.id, number).values() for number in range(ended.passes[-1].number + 1)]
    # The first, the last two, and one for all between.
    assert len([one for one in marks if one]) <= 4
    with house.store._reading() as db:
        rows = db.execute(select(memory.c.kind, memory.c.number).where(memory.c.migration_id == str(job.id))).all()
    # The first pass, the last two, the job and its course.
    assert len([row for row in rows if row.kind == "pass"]) <= 3
    assert {row.kind for row in rows if row.number == 0} <= {"job", "course"}
    assert ended.progress.bytes_done == sum(mark.bytes_done for one in marks for mark in one)
    assert ended.progress.bytes_done == sum(disk.bytes_done for disk in ended.disks)
    assert house.volume(ended).read_bytes() == source_bytes(house)


def test_the_more_a_held_guest_changes_the_sooner_its_next_delta(house: House) -> None:
    plan = live_plan(warm={"cutover": "manual", "delta_threshold_bytes": 60 * MIB})

    def pause_s(change_rate_bps: float | None) -> float:
        fields = {"expected_delta_bytes": 0, "expected_downtime_s": 0.0, "converges": True, "at": datetime.now(UTC)}
        rate = {"change_rate_bps": change_rate_bps, "throughput_bps": 1.0}
        found = None if change_rate_bps is None else Forecast.model_validate(fields | rate)
        job = migration(plan=plan, forecast=found)
        return holding.held_pause_s(Job(job, house.rooms, Stop()))

    rates = [None, 0.0, 1.0, MIB / 20, 100 * MIB]
    assert [pause_s(rate) for rate in rates] == [600, 3600, 3600, 1200, 300]


# ── many jobs, one source ────────────────────────────────────────────────────────────────────────────────────────────


def test_a_guest_is_not_shut_down_before_it_may_be_read(house: House, monkeypatch: pytest.MonkeyPatch) -> None:
    house.platform.add_vm(VM, {DISK: content()})
    job = house.intake.submit(live_plan("Cold"))
    power: list[str] = []

    def none_is_free(*_: object, **__: object) -> bool:
        power.append(house.platform.vm(VM)["power"])
        house.intake.cancel(job.id)
        return False

    monkeypatch.setattr(house.store.slots, "take", none_is_free)
    assert house.run(job.id).state is State.CANCELLED
    assert set(power) == {"on"}


@pytest.mark.parametrize("taken", [source_host(SOURCE_ID, "", most=4), source(SOURCE_ID, most=16)], ids=("host", "source"))
def test_a_job_that_waits_for_its_source_can_be_cancelled(house: House, taken: Resource) -> None:
    """For a host of it, or for the vCenter in front of them all."""
    house.platform.add_vm(VM, {DISK: content()})
    job = house.intake.submit(live_plan())
    for _ in range(taken.most):
        assert house.store.slots.take(uuid4(), {taken.key: taken.most}, host="another")
    canceller = threading.Timer(0.5, lambda: house.intake.cancel(job.id))
    canceller.start()
    ended = house.run(job.id)
    canceller.join()
    assert ended.state == State.CANCELLED
    assert house.leftovers(VM) == []
    assert house.store.slots.count(taken.key) == (taken.most, 0)


def test_a_guest_that_stays_on_keeps_no_other_from_being_read(house: House, monkeypatch: pytest.MonkeyPatch) -> None:
    """It may install updates for hours: a slot is for a pass, not for a wait."""
    quick_tries(monkeypatch)
    house.platform.add_vm(VM, {DISK: content()})
    house.platform.fault("stays_on", 2)
    job = house.intake.submit(live_plan("Cold", shutdown="hold"))
    esxi, held = source_host(SOURCE_ID, "", most=4), list[tuple[int, int]]()
    shutdown, slept = FakeAdapter.shutdown, Stop.sleep_or_wake

    async def shutting_down(
        adapter: FakeAdapter, vm_id: str, manner: Shutdown = "polite", timeout_s: float | None = None
    ) -> None:
        held.append(house.store.slots.count(esxi.key))
        await shutdown(adapter, vm_id, manner, timeout_s)

    async def sleeping(stop: Stop, seconds: float) -> None:
        held.append(house.store.slots.count(esxi.key))
        await slept(stop, min(seconds, 0.01))

    monkeypatch.setattr(FakeAdapter, "shutdown", shutting_down)
    monkeypatch.setattr(Stop, "sleep_or_wake", sleeping)
    assert house.run(job.id).state is State.COMPLETED
    assert held == [(1, 0), (0, 0), (1, 0), (0, 0), (1, 0)]
    assert house.store.slots.count(esxi.key) == (0, 0)


@pytest.mark.parametrize(
    ("label", "named_so"), [("Hard disk 2", "disk 2001 (Hard disk 2)"), ("2001", "disk 2001"), ("", "disk 2001")]
)
def test_a_disk_is_named_as_skip_disks_takes_it_and_as_people_know_it(label: str, named_so: str) -> None:
    assert named(Disk(key="2001", label=label, capacity_bytes=MIB)) == named_so
