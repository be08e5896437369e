"""A job from a live plan to its end, in a house of fakes with real volumes and store; the first by processes."""

import contextlib
import itertools
import random
import sqlite3
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from synvirt.hypervisor.hardware import uuid_of
from synvirt.migrations.landing import machine_of
from synvirt.migrations.memory import PassMemory
from synvirt.model.job import Migration
from synvirt.model.kinds import Mode, State
from synvirt.model.machine import VmManifest
from synvirt.sizes import KIB, MIB
from tests.fakes.hypervisor import FakeHypervisor
from tests.fakes.live import FakeAdapter
from tests.fakes.workers import in_process
from tests.house import VM, House, live_plan, states
from tests.migrations.jobs.running import (
    DISK,
    Died,
    crash_when,
    error_code,
    flushed,
    run,
    run_until_death,
    some_disk,
    source_bytes,
)
from tests.patience import quick_tries


class Guest:
    """Runs inside the fake VM: keeps writing to its disk, until it is shut down or the test says stop."""

    def __init__(self, house: House, *, bytes_a_write: int = 4 * KIB, pause_s: float = 0.01) -> None:
        self._house, self._bytes, self._pause_s = house, bytes_a_write, pause_s
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._live, daemon=True)

    def __enter__(self) -> "Guest":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stopped.set()
        self._thread.join()

    def _live(self) -> None:
        source, size = random.Random(5), self._house.platform.vm(VM)["sizes"][DISK]
        while not self._stopped.wait(self._pause_s):
            self._house.platform.guest_writes(VM, DISK, source.randrange(size - self._bytes), source.randbytes(self._bytes))


def test_a_warm_job_moves_a_guest_that_keeps_writing(house_with_processes: House) -> None:
    house = house_with_processes
    house.platform.add_vm(VM, {DISK: some_disk(8 * MIB)})
    with Guest(house):
        # Any delta is small enough, so that a slow machine takes no more passes than a fast one.
        job = run(house, live_plan(warm={"delta_threshold_bytes": 64 * MIB}))
    assert states(job) == [
        State.QUEUED,
        State.COPYING_FULL,
        State.DELTA_SYNCING,
        State.CUTTING_OVER,
        State.STARTING,
        State.COMPLETED,
    ]
    assert house.volume(job).read_bytes() == source_bytes(house)
    assert job.mode_effective == Mode.WARM
    assert [one.kind for one in job.passes] == ["full", "delta", "final"]
    vm = house.platform.vm(VM)
    assert vm["power"] == "off"
    assert vm["snapshots"] == {}
    assert len(vm["marks"]) == 1


def test_a_delta_reads_what_changed_and_no_more(house: House) -> None:
    house.platform.add_vm(VM, {DISK: some_disk(8 * MIB)})
    job = house.intake.submit(live_plan())
    wrote: list[bool] = []

    def after_the_full_copy() -> None:
        house.store.on_commit = lambda: None
        if house.store.get(job.id).state == State.DELTA_SYNCING and not wrote:
            wrote.append(house.platform.guest_writes(VM, DISK, 5 * MIB, b"x" * 100))
        house.store.on_commit = after_the_full_copy

    house.store.on_commit = after_the_full_copy
    ended = house.run(job.id)
    assert wrote == [True]
    assert [one.bytes for one in ended.passes[1:]] == [64 * KIB, 0]
    assert house.volume(ended).read_bytes() == source_bytes(house)


def test_zeros_that_a_guest_writes_over_data_arrive(house: House) -> None:
    """A delta does not meet a fresh volume: zeros must be written, not left out."""
    house.platform.add_vm(VM, {DISK: random.Random(3).randbytes(2 * MIB)})
    job = house.intake.submit(live_plan())

    def after_the_full_copy() -> None:
        house.store.on_commit = lambda: None
        if house.store.get(job.id).state == State.DELTA_SYNCING:
            house.platform.guest_writes(VM, DISK, 256 * KIB, bytes(512 * KIB))
        else:
            house.store.on_commit = after_the_full_copy

    house.store.on_commit = after_the_full_copy
    ended = house.run(job.id)
    assert house.volume(ended).read_bytes() == source_bytes(house)
    assert source_bytes(house)[256 * KIB : 768 * KIB] == bytes(512 * KIB)


def test_a_cold_job_shuts_the_source_down_before_it_copies(house: House) -> None:
    house.platform.add_vm(VM, {DISK: some_disk()})
    with Guest(house):
        job = run(house, live_plan("Cold"))
    assert states(job) == [State.QUEUED, State.COPYING_FULL, State.STARTING, State.COMPLETED]
    assert house.volume(job).read_bytes() == source_bytes(house)
    assert house.platform.vm(VM)["snapshots"] == {}


@pytest.mark.parametrize("why", ["adapter", "manifest"])
def test_a_source_that_cannot_track_changes_is_copied_cold_and_the_job_says_so(house: House, why: str) -> None:
    house.platform.add_vm(VM, {DISK: some_disk()}, cbt=why != "manifest")
    house.platform.set_supports_warm(why != "adapter")
    with Guest(house):
        job = run(house, live_plan("Warm"))
    assert states(job) == [State.QUEUED, State.COPYING_FULL, State.STARTING, State.COMPLETED]
    assert job.mode_effective == Mode.COLD
    assert job.last_error is not None
    assert (job.last_error.code, job.last_error.fatal) == ("E_MIG_CBT_UNSUPPORTED", False)
    assert house.volume(job).read_bytes() == source_bytes(house)


def test_a_guest_that_changes_too_much_fails_the_job_and_is_left_as_it_was(house: House) -> None:
    house.platform.add_vm(VM, {DISK: some_disk(4 * MIB)})
    with Guest(house, bytes_a_write=256 * KIB, pause_s=0.002):
        job = run(house, live_plan(warm={"max_passes": 2, "delta_threshold_bytes": 0}))
        assert (job.state, error_code(job)) == (State.FAILED, "E_MIG_DELTA_TOO_LARGE")
        assert states(job)[-2] == State.DELTA_SYNCING
        assert len([one for one in job.passes if one.kind == "delta"]) == 2
        assert set(house.leftovers(VM)) == house.copies()
        assert house.platform.vm(VM)["power"] == "on"


def _when(house: House, job: Migration, state: State, do: Callable[[], object]) -> None:
    """Do it once, at the first commit that finds the job in the state."""

    def committed() -> None:
        house.store.on_commit = lambda: None
        if house.store.get(job.id).state == state:
            do()
        else:
            house.store.on_commit = committed

    house.store.on_commit = committed


def test_change_tracking_lost_once_costs_a_pass_over_the_whole_disk(house: House) -> None:
    house.platform.add_vm(VM, {DISK: some_disk(4 * MIB)})
    job = house.intake.submit(live_plan())

    def lose() -> None:
        house.platform.guest_writes(VM, DISK, 0, b"not in any journal", tracked=False)
        house.platform.lose_change_ids(VM)

    _when(house, job, State.DELTA_SYNCING, lose)
    ended = house.run(job.id)
    assert ended.state == State.COMPLETED
    assert ended.last_error is None, "the pass made it good while the guest ran"
    assert [one.whole for one in ended.passes] == [False, True, False]
    assert ended.passes[1].bytes > 2 * MIB
    assert house.volume(ended).read_bytes() == source_bytes(house)


def test_change_tracking_lost_after_a_pass_that_ended_well_costs_another_pass(house: House) -> None:
    house.platform.add_vm(VM, {DISK: some_disk(4 * MIB)})
    job = house.intake.submit(live_plan(warm={"delta_threshold_bytes": 0, "max_passes": 20}))
    left = {1: False, 2: True, 3: False}  # the passes that are released: is what is written then tracked?

    def committed() -> None:
        house.store.on_commit = lambda: None
        released = [one for one in left if house.store.memory.get(job.id, PassMemory, one).released_at is not None]
        for number in released:
            tracked = left.pop(number)
            house.platform.guest_writes(VM, DISK, 0, f"released {number}".encode(), tracked=tracked)
            if not tracked:
                house.platform.lose_change_ids(VM)
        house.store.on_commit = committed

    house.store.on_commit = committed
    ended = house.run(job.id)
    assert (ended.state, ended.last_error, left) == (State.COMPLETED, None, {})
    assert [one.whole for one in ended.passes][:4] == [False, True, False, True]
    assert house.volume(ended).read_bytes() == source_bytes(house)


def test_change_tracking_lost_again_fails_the_job(house: House) -> None:
    house.platform.add_vm(VM, {DISK: some_disk(4 * MIB)})
    house.platform.fault("no_change_ids", 10)
    job = run(house, live_plan(warm={"delta_threshold_bytes": 0}))
    assert (job.state, error_code(job)) == (State.FAILED, "E_MIG_CBT_RESET")
    assert job.last_error is not None
    assert job.last_error.fatal
    assert set(house.leftovers(VM)) == house.copies()
    assert house.platform.vm(VM)["power"] == "on"


@pytest.mark.parametrize(
    ("fault", "code"),
    [
        ("snapshot_failed", "E_MIG_SNAPSHOT_FAILED"),
        ("wrong_password", "E_MIG_AUTH_FAILED"),
    ],
)
def test_a_source_that_fails_leaves_a_job_with_its_code_and_nothing_else(house: House, fault: str, code: str) -> None:
    house.platform.add_vm(VM, {DISK: some_disk()})
    house.platform.fault(fault, 1)
    job = run(house, live_plan())
    assert (job.state, error_code(job)) == (State.FAILED, code)
    assert house.leftovers(VM) == []
    assert house.platform.vm(VM)["power"] == "on"


def test_an_unknown_vm_is_said_so(house: House) -> None:
    assert error_code(run(house, live_plan())) == "E_MIG_VM_NOT_FOUND"


def test_a_failed_cutover_keeps_the_replica_and_powers_the_source_on_again(tmp_path: Path) -> None:
    house = House(tmp_path, hypervisor=FakeHypervisor(fail="boot"), workers=in_process)
    house.platform.add_vm(VM, {DISK: some_disk()})
    job = run(house, live_plan())
    assert (job.state, error_code(job)) == (State.FAILED, "E_MIG_GUEST_BOOT_FAILED")
    assert house.volume(job).read_bytes() == source_bytes(house)
    assert house.platform.vm(VM)["power"] == "on"
    assert house.platform.vm(VM)["snapshots"] == {}
    assert house.hypervisor.domains == {}
    house.close()


def test_a_source_that_was_off_stays_off_when_the_job_fails(tmp_path: Path) -> None:
    house = House(tmp_path, hypervisor=FakeHypervisor(fail="boot"), workers=in_process)
    house.platform.add_vm(VM, {DISK: some_disk()})
    house.platform.power(VM, "off")
    assert run(house, live_plan("Cold")).state == State.FAILED
    assert house.platform.vm(VM)["power"] == "off"
    house.close()


def test_a_held_job_keeps_syncing_and_cuts_over_when_asked(house: House) -> None:
    house.platform.add_vm(VM, {DISK: some_disk()})
    job = house.intake.submit(live_plan(warm={"cutover": "manual", "interval_s": 0.1}))
    operator = threading.Thread(target=_cut_over_after, args=(house, job, 3))
    operator.start()
    with Guest(house):
        ended = house.run(job.id)
    operator.join()
    assert ended.state == State.COMPLETED
    assert len([one for one in ended.passes if one.kind == "delta"]) >= 3
    assert house.volume(ended).read_bytes() == source_bytes(house)


def _cut_over_after(house: House, job: Migration, deltas: int) -> None:
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        if len([one for one in house.store.get(job.id).passes if one.kind == "delta"]) >= deltas:
            house.intake.cutover(job.id)
            return
        time.sleep(0.05)


def test_a_source_powered_on_while_the_service_was_away_is_copied_once_more(house: House) -> None:
    house.platform.add_vm(VM, {DISK: some_disk()})
    job = house.intake.submit(live_plan())

    def in_the_final_pass() -> bool:
        now = house.store.get(job.id)
        return now.state == State.CUTTING_OVER and now.passes[-1].kind == "final"

    run_until_death(house, job, in_the_final_pass)
    house.platform.power(VM, "on")
    assert house.platform.guest_writes(VM, DISK, MIB, b"written after the final snapshot")
    ended = house.run(job.id)
    assert ended.state == State.COMPLETED
    assert house.volume(ended).read_bytes() == source_bytes(house)
    assert house.platform.vm(VM)["power"] == "off"


def test_a_volume_that_is_removed_during_the_first_pass_is_copied_again(house: House) -> None:
    house.platform.add_vm(VM, {DISK: some_disk()})
    job = house.intake.submit(live_plan())
    run_until_death(house, job, lambda: flushed(house, job))
    house.volume(house.store.get(job.id)).unlink()
    ended = house.run(job.id)
    assert ended.state == State.COMPLETED
    assert house.volume(ended).read_bytes() == source_bytes(house)


def test_a_cancelled_job_names_no_volume_that_is_gone(house: House) -> None:
    house.platform.add_vm(VM, {DISK: some_disk()})
    job = house.intake.submit(live_plan())
    run_until_death(house, job, lambda: flushed(house, job))
    made = house.volume(house.store.get(job.id))
    assert made.exists()
    house.intake.cancel(job.id)
    ended = house.run(job.id)
    assert (ended.state, made.exists()) == (State.CANCELLED, False)
    assert [disk.volume for disk in ended.disks] == [None]


@pytest.mark.parametrize("state", [State.COPYING_FULL, State.DELTA_SYNCING])
def test_a_volume_that_is_removed_after_the_first_pass_fails_its_job(house: House, state: State) -> None:
    house.platform.add_vm(VM, {DISK: some_disk()})
    job = house.intake.submit(live_plan())

    def first_pass_is_done() -> bool:
        now = house.store.get(job.id)
        return bool(now.state == state and now.passes and now.passes[0].finished_at is not None)

    run_until_death(house, job, first_pass_is_done)
    house.volume(house.store.get(job.id)).unlink()
    ended = house.run(job.id)
    assert (ended.state, error_code(ended)) == (State.FAILED, "E_MIG_DISK_WRITE_FAILED")
    assert house.platform.vm(VM)["power"] == "on"


@pytest.mark.parametrize("told", [True, False])
@pytest.mark.parametrize("mode", ["Warm", "Cold"])
def test_whenever_a_source_that_is_off_wakes_up_nothing_it_writes_is_lost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mode: str, told: bool
) -> None:
    """The service dies at each moment of which there is a trace while the source is off, and somebody starts the source: the
    job copies what it wrote since, or says that it did not. `told`: whether the platform tells its last start."""
    if not told:

        async def nothing(*_: object) -> str:
            return ""

        monkeypatch.setattr(FakeAdapter, "last_start", nothing)
    moments = list(
        itertools.takewhile(lambda moment: _woken(House(tmp_path / str(moment), workers=in_process), mode, moment), range(100))
    )
    assert 5 < len(moments) < 100


def _woken(house: House, mode: str, moment: int) -> bool:
    """False: the job was over before that moment came."""
    house.platform.add_vm(VM, {DISK: some_disk(MIB)})
    job = house.intake.submit(live_plan(mode))
    seen = 0

    def is_it() -> bool:
        nonlocal seen
        seen += house.platform.vm(VM)["power"] == "off" and house.store.get(job.id).boot_sign is None
        return seen > moment

    house.store.on_commit = crash_when(house, is_it)
    with contextlib.suppress(Died):
        house.run(job.id)
    house.store.on_commit = lambda: None
    if died := seen > moment:
        house.platform.power(VM, "on")
        assert house.platform.guest_writes(VM, DISK, 64 * KIB, b"written after it was off")
        assert house.platform.guest_writes(VM, DISK, 512 * KIB, bytes(64 * KIB))  # over data
        ended = house.run(job.id)
        if ended.state == State.COMPLETED:
            assert house.volume(ended).read_bytes() == source_bytes(house), f"at moment {moment}"
            assert house.platform.vm(VM)["power"] == "off"
        else:
            assert error_code(ended) == "E_MIG_CONFLICT", ended.last_error
            assert house.platform.vm(VM)["power"] == "on"
    house.close()
    return died


def test_a_source_that_does_not_say_whether_it_is_on_is_waited_for(house: House, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its host may be away for a moment: nothing is shut down, started or given up on a guess."""
    quick_tries(monkeypatch)
    house.platform.add_vm(VM, {DISK: some_disk(MIB)})
    job = house.intake.submit(live_plan("Cold"))
    inspect, asked = FakeAdapter.inspect, itertools.count()

    async def unsure(adapter: FakeAdapter, vm_id: str) -> VmManifest:
        found = await inspect(adapter, vm_id)
        return found if next(asked) not in (1, 2) else found.model_copy(update={"power_state": "unknown"})

    monkeypatch.setattr(FakeAdapter, "inspect", unsure)
    ended = house.run(job.id)
    assert ended.state == State.COMPLETED, ended.last_error
    assert house.volume(ended).read_bytes() == source_bytes(house)
    assert next(asked) > 3


@pytest.mark.parametrize("power", ["on", "suspended"])
def test_a_guest_whose_source_lives_again_is_not_started(house: House, monkeypatch: pytest.MonkeyPatch, power: str) -> None:
    """A suspended one has memory that would go on with old disks."""
    house.platform.add_vm(VM, {DISK: some_disk(MIB)})
    job = house.intake.submit(live_plan("Cold"))
    inspect = FakeAdapter.inspect

    async def woken(adapter: FakeAdapter, vm_id: str) -> VmManifest:
        found = await inspect(adapter, vm_id)
        is_starting = house.store.get(job.id).state == State.STARTING
        return found.model_copy(update={"power_state": power}) if is_starting else found

    monkeypatch.setattr(FakeAdapter, "inspect", woken)
    ended = house.run(job.id)
    assert (ended.state, error_code(ended)) == (State.FAILED, "E_MIG_CONFLICT")
    assert house.hypervisor.domains == {}


def test_a_live_job_goes_by_the_name_that_people_know(house: House, monkeypatch: pytest.MonkeyPatch) -> None:
    """The platform's id of a VM (vm-98) tells its owner nothing, on a list or in the note that is left on the source."""
    inspect = FakeAdapter.inspect

    async def named(adapter: FakeAdapter, vm_id: str) -> VmManifest:
        return (await inspect(adapter, vm_id)).model_copy(update={"name": "mail server"})

    monkeypatch.setattr(FakeAdapter, "inspect", named)
    house.platform.add_vm(VM, {DISK: some_disk()})
    job = house.intake.submit(live_plan("Cold"))
    assert job.name == VM
    ended = house.run(job.id)
    assert (ended.state, ended.name) == (State.COMPLETED, "mail server")
    assert house.platform.vm(VM)["marks"] == [f"migrated to mail server ({job.id})"]


@pytest.mark.parametrize("cancelled", [False, True])
@pytest.mark.parametrize("moment", [State.QUEUED, State.COPYING_FULL, State.CUTTING_OVER, State.STARTING])
def test_a_store_put_back_from_before_its_guest_leaves_the_guest_alone(
    house: House, tmp_path: Path, moment: State, cancelled: bool
) -> None:
    """Else the guest's disks would be copied over while it runs, or be removed; and its source be powered on beside it."""
    house.platform.add_vm(VM, {DISK: some_disk()})
    job, old = house.intake.submit(live_plan()), tmp_path / "old.db"

    def copied(of: Path, to: Path) -> None:
        with contextlib.closing(sqlite3.connect(of)) as store, contextlib.closing(sqlite3.connect(to)) as copy:
            store.backup(copy)

    def kept() -> None:
        if house.store.get(job.id).state is moment and not any(one.kind == "domain" for one in house.store.ledger(job.id)):
            copied(tmp_path / "store.db", old)

    house.store.on_commit = kept
    kept()
    ended = house.run(job.id)
    assert ended.state is State.COMPLETED
    volume = house.volume(ended)
    with volume.open("r+b") as disk:
        disk.write(b"what the guest has written here")
    written = volume.read_bytes()
    house.store.close()
    copied(old, tmp_path / "store.db")

    again = House(tmp_path, workers=in_process, hypervisor=house.hypervisor)
    again.platform = house.platform
    if cancelled:
        again.intake.cancel(job.id)
    found = again.run(job.id)
    assert volume.read_bytes() == written
    assert [domain.running for domain in house.hypervisor.domains.values()] == [True]
    assert house.platform.vm(VM)["power"] == "off"
    assert house.platform.vm(VM)["snapshots"] == {}
    assert again.store.ledger(job.id) == []
    assert found.state is (State.CANCELLED if cancelled else State.FAILED)
    assert {disk.volume for disk in found.disks} <= {None}
    if not cancelled:
        assert found.last_error is not None
        assert "older than the guest" in found.last_error.message
    again.close()


def test_a_stranger_with_the_guests_uuid_is_not_taken_for_the_guest(house: House) -> None:
    """Defined by somebody during the copy: the job fails as it does for a name, and its source is on again."""
    house.platform.add_vm(VM, {DISK: some_disk()})
    job = house.intake.submit(live_plan())

    def defined() -> None:
        if house.store.get(job.id).state is State.CUTTING_OVER:
            house.store.on_commit = lambda: None
            house.hypervisor.add_foreign("stranger", uuid_of(machine_of(house.store.get(job.id))))

    house.store.on_commit = defined
    ended = house.run(job.id)
    assert ended.last_error is not None
    assert (ended.state, "stranger" in ended.last_error.message) == (State.FAILED, True)
    assert house.platform.vm(VM)["power"] == "on"
