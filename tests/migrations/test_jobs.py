"""A job from a plan to its end, in a house of fakes with real workers, volumes and store."""

import contextlib
import itertools
import os
import random
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from uuid import UUID

import pytest

from synvirt.destinations.directory import DirectoryDestination
from synvirt.jobs.wire import Flushed, Moved
from synvirt.migrations.hearing import Tally
from synvirt.migrations.memory import PassMemory
from synvirt.model.job import DiskProgress, Migration, Progress
from synvirt.model.kinds import Mode, State
from synvirt.model.machine import VmManifest
from synvirt.model.plan import MigrationPlan
from synvirt.sizes import KIB, MIB
from synvirt.store import Store
from tests.fakes.guests import MARK, FakePreparer
from tests.fakes.hypervisor import FakeHypervisor
from tests.fakes.live import FakeAdapter
from tests.fakes.workers import in_process
from tests.house import VM, House, live_plan, offline_plan, states
from tests.processes import workers

DISK = "disk-0"


def some_disk(size: int = 3 * MIB, seed: int = 1) -> bytes:
    """Data and zeros in turn, of a size that is a whole number of nothing."""
    source = random.Random(seed)
    blocks = [source.randbytes(64 * KIB) if source.random() < 0.6 else bytes(64 * KIB) for _ in range(size // (64 * KIB))]
    return b"".join(blocks) + source.randbytes(1536)


@pytest.fixture
def house(tmp_path: Path) -> Iterator[House]:
    house = House(tmp_path)
    yield house
    house.close()


def imported(house: House, disks: dict[str, bytes] | None = None) -> Path:
    folder = house.imports / "appliance"
    folder.mkdir()
    for key, content in (disks or {DISK: some_disk()}).items():
        (folder / f"{key}.raw").write_bytes(content)
    return folder


def run(house: House, plan: MigrationPlan) -> Migration:
    return house.run(house.intake.submit(plan).id)


def error_code(job: Migration) -> str | None:
    return job.last_error.code if job.last_error else None


# ── offline ──────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_an_offline_plan_ends_as_a_running_domain_with_the_same_bytes(house: House) -> None:
    contents = {DISK: some_disk(seed=1), "disk-1": some_disk(seed=2, size=MIB)}
    job = run(house, offline_plan(imported(house, contents)))
    assert states(job) == [State.QUEUED, State.COPYING_FULL, State.STARTING, State.COMPLETED]
    for key, content in contents.items():
        assert house.volume(job, key).read_bytes() == content
    assert job.last_error is None
    assert job.boot_sign is not None
    assert job.domain is not None
    assert list(map(str, house.hypervisor.domains)) == [job.domain.uuid]
    assert job.progress.bytes_done == job.progress.bytes_total > 0
    assert [one.kind for one in job.passes] == ["full"]
    assert all(disk.state == "copied" for disk in job.disks)


def test_the_rows_of_its_disks_are_as_new_as_its_progress(house: House, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is stored is as old as the last flush."""
    seen = []
    pin = house.board.pin

    def pinned(job_id: UUID, state: State, progress: Progress, disks: tuple[DiskProgress, ...] = ()) -> None:
        pin(job_id, state, progress, disks)
        seen.append(house.board.current(house.store.get(job_id)))

    monkeypatch.setattr(house.board, "pin", pinned)
    job = run(house, offline_plan(imported(house)))
    assert job.state == State.COMPLETED
    assert seen
    for one in seen:
        assert sum(disk.bytes_done for disk in one.disks) == one.progress.bytes_done
    assert all(disk.volume for one in seen for disk in one.disks)


def test_zeros_take_no_room_on_the_volume(house: House) -> None:
    job = run(house, offline_plan(imported(house, {DISK: bytes(8 * MIB) + b"end"})))
    assert job.state == State.COMPLETED
    assert house.volume(job).stat().st_size == 8 * MIB + 3
    assert house.volume(job).stat().st_blocks * 512 <= 64 * KIB


def test_a_windows_guest_is_prepared_before_it_starts(tmp_path: Path) -> None:
    house = House(tmp_path, family="windows")
    job = run(house, offline_plan(imported(house)))
    assert states(job) == [State.QUEUED, State.COPYING_FULL, State.V2V_PROCESSING, State.STARTING, State.COMPLETED]
    assert house.volume(job).read_bytes().startswith(MARK)
    assert house.preparer.prepared == ["appliance"]
    assert job.conversion is not None
    assert job.conversion.finished_at is not None
    assert [(one.kind, one.text) for one in job.conversion.messages] == [
        ("message", "Opening the source"),
        ("info", "This guest has virtio drivers installed."),
    ]
    assert not list((tmp_path / "conversions").iterdir())
    house.close()


@pytest.mark.parametrize(
    ("family", "conversion", "prepared"),
    [("linux", "auto", False), ("linux", "always", True), ("windows", "auto", True), ("windows", "never", False)],
)
def test_the_plan_may_ask_for_a_conversion_or_forbid_it(tmp_path: Path, family: str, conversion: str, prepared: bool) -> None:
    house = House(tmp_path, family=family)
    job = run(house, offline_plan(imported(house), conversion=conversion))
    assert job.state == State.COMPLETED
    assert (State.V2V_PROCESSING in states(job)) == prepared == bool(house.preparer.prepared)
    house.close()


def test_a_missing_conversion_tool_is_found_before_anything_is_copied(tmp_path: Path) -> None:
    house = House(tmp_path, family="windows", preparer=FakePreparer(missing=True))
    job = run(house, offline_plan(imported(house)))
    assert states(job) == [State.QUEUED, State.FAILED]
    assert error_code(job) == "E_MIG_V2V_FAILED"
    assert house.leftovers() == []
    house.close()


def test_a_failed_conversion_keeps_the_copy_and_leaves_no_domain(tmp_path: Path) -> None:
    house = House(tmp_path, family="windows", preparer=FakePreparer(fails=True))
    content = {DISK: some_disk()}
    job = run(house, offline_plan(imported(house, content)))
    assert job.state == State.FAILED
    assert error_code(job) == "E_MIG_V2V_FAILED"
    assert house.volume(job).read_bytes() == content[DISK]
    assert not list((tmp_path / "conversions").iterdir())
    assert house.hypervisor.domains == {}
    assert house.store.ledger(job.id) == []
    house.close()


def test_start_false_defines_the_domain_and_leaves_it_off(house: House) -> None:
    job = run(house, offline_plan(imported(house), target={"start": False}))
    assert job.state == State.COMPLETED
    assert job.boot_sign is None
    assert [domain.running for domain in house.hypervisor.domains.values()] == [False]


def test_skipped_disks_are_not_copied(house: House) -> None:
    folder = imported(house, {DISK: some_disk(), "disk-1": some_disk()})
    job = run(house, offline_plan(folder, skip_disks=["disk-1"]))
    assert job.state == State.COMPLETED
    assert [disk.state for disk in job.disks] == ["copied", "skipped"]
    assert len(list((house.folder / "volumes").rglob("*.raw"))) == 1


@pytest.mark.parametrize("skip", [["disk-9"], [DISK]])
def test_a_plan_that_skips_what_is_not_there_or_everything_is_refused(house: House, skip: list[str]) -> None:
    job = run(house, offline_plan(imported(house), skip_disks=skip))
    assert (job.state, error_code(job)) == (State.FAILED, "E_MIG_INVALID_PLAN")
    assert house.leftovers() == []


def test_a_warm_offline_plan_says_that_it_runs_cold(house: House) -> None:
    job = run(house, offline_plan(imported(house), mode="Warm"))
    assert job.state == State.COMPLETED
    assert job.mode_effective == Mode.COLD
    assert error_code(job) == "E_MIG_CBT_UNSUPPORTED"


def test_a_wrong_checksum_fails_the_job_and_leaves_nothing(house: House) -> None:
    folder = imported(house)
    (folder / "wrong").touch()
    job = run(house, offline_plan(folder))
    assert (job.state, error_code(job)) == (State.FAILED, "E_MIG_MALFORMED_ARCHIVE")
    assert job.last_error is not None
    assert "disk-0" in job.last_error.message
    assert house.leftovers() == []


def test_a_path_outside_the_import_root_is_refused(house: House, tmp_path: Path) -> None:
    job = run(house, offline_plan(tmp_path / "elsewhere"))
    assert (job.state, error_code(job)) == (State.FAILED, "E_MIG_HOST_PATH_REJECTED")


def test_an_archive_that_changes_while_the_service_is_down_is_not_mixed(house: House) -> None:
    """Half of one export and half of another is a disk that never was."""
    folder = imported(house)
    job = house.intake.submit(offline_plan(folder))
    house.store.on_commit = _crash_when(house, lambda: _flushed(house, job))
    with pytest.raises(BaseException, match="died"):
        house.run(job.id)
    house.store.on_commit = lambda: None
    (folder / f"{DISK}.raw").write_bytes(some_disk(seed=99))
    ended = house.run(job.id)
    assert (ended.state, error_code(ended)) == (State.FAILED, "E_MIG_DISK_READ_FAILED")
    assert ended.last_error is not None
    assert "changed" in ended.last_error.message
    assert house.leftovers() == []


class Died(BaseException):
    pass


def _crash_when(house: House, happened: Callable[[], bool]) -> Callable[[], None]:
    def committed() -> None:
        house.store.on_commit = lambda: None
        if happened():
            raise Died("the service died")
        house.store.on_commit = committed

    return committed


def _flushed(house: House, job: Migration) -> bool:
    return bool(house.store.watermarks(job.id, 1))


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to mount a small tmpfs")
def test_a_full_disk_while_copying_fails_with_its_cause_and_leaves_nothing(tmp_path: Path) -> None:
    small = tmp_path / "small"
    small.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=2m", "tmpfs", small], check=True)
    try:
        house = House(tmp_path, destination=DirectoryDestination(small))
        content = random.Random(1).randbytes(6 * MIB)
        job = run(house, offline_plan(imported(house, {DISK: content})))
        assert (job.state, error_code(job)) == (State.FAILED, "E_MIG_DISK_WRITE_FAILED")
        assert job.last_error is not None
        assert "No space left" in job.last_error.message
        assert "disk-0" in job.last_error.message
        assert job.last_error.hint is not None
        assert list(small.rglob("*")) == []
        house.close()
    finally:
        subprocess.run(["umount", small], check=True)


# ── the hypervisor ───────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(("fault", "code"), [("define", "E_MIG_DOMAIN_DEFINE_FAILED"), ("boot", "E_MIG_GUEST_BOOT_FAILED")])
def test_a_guest_that_does_not_come_up_keeps_its_copy_and_leaves_no_domain(tmp_path: Path, fault: str, code: str) -> None:
    house = House(tmp_path, hypervisor=FakeHypervisor(fail=fault))
    job = run(house, offline_plan(imported(house)))
    assert (job.state, error_code(job)) == (State.FAILED, code)
    assert house.volume(job).read_bytes() == some_disk()
    assert house.hypervisor.domains == {}
    house.close()


def test_a_name_that_is_taken_is_refused_before_anything_is_copied(house: House) -> None:
    first = run(house, offline_plan(imported(house)))
    assert first.state == State.COMPLETED
    second = run(house, offline_plan(house.imports / "appliance"))
    assert states(second) == [State.QUEUED, State.FAILED]
    assert error_code(second) == "E_MIG_CONFLICT"


# ── live ─────────────────────────────────────────────────────────────────────────────────────────────────────────────


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


def source_bytes(house: House) -> bytes:
    return house.platform.disk_path(VM, DISK).read_bytes()


def test_a_warm_job_moves_a_guest_that_keeps_writing(house: House) -> None:
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
        assert house.leftovers(VM) == []
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
    assert house.leftovers(VM) == []
    assert house.platform.vm(VM)["power"] == "on"


@pytest.mark.parametrize(
    ("fault", "code"),
    [
        ("snapshot_failed", "E_MIG_SNAPSHOT_FAILED"),
        ("wrong_password", "E_MIG_AUTH_FAILED"),
        ("unreachable", "E_MIG_SOURCE_UNREACHABLE"),
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
    house = House(tmp_path, hypervisor=FakeHypervisor(fail="boot"))
    house.platform.add_vm(VM, {DISK: some_disk()})
    job = run(house, live_plan())
    assert (job.state, error_code(job)) == (State.FAILED, "E_MIG_GUEST_BOOT_FAILED")
    assert house.volume(job).read_bytes() == source_bytes(house)
    assert house.platform.vm(VM)["power"] == "on"
    assert house.platform.vm(VM)["snapshots"] == {}
    assert house.hypervisor.domains == {}
    house.close()


def test_a_source_that_was_off_stays_off_when_the_job_fails(tmp_path: Path) -> None:
    house = House(tmp_path, hypervisor=FakeHypervisor(fail="boot"))
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

    house.store.on_commit = _crash_when(house, in_the_final_pass)
    with pytest.raises(BaseException, match="died"):
        house.run(job.id)
    house.store.on_commit = lambda: None
    house.platform.power(VM, "on")
    assert house.platform.guest_writes(VM, DISK, MIB, b"written after the final snapshot")
    ended = house.run(job.id)
    assert ended.state == State.COMPLETED
    assert house.volume(ended).read_bytes() == source_bytes(house)
    assert house.platform.vm(VM)["power"] == "off"


@pytest.mark.parametrize("mode", ["Warm", "Cold"])
def test_whenever_a_source_that_is_off_wakes_up_nothing_it_writes_is_lost(tmp_path: Path, mode: str) -> None:
    """The service dies at each moment of which there is a trace while the source is off, and somebody starts the source: the
    job copies what it wrote since, or says that it did not."""
    moments = list(
        itertools.takewhile(lambda moment: _woken(House(tmp_path / str(moment), workers=in_process), mode, moment), range(100))
    )
    assert 5 < len(moments) < 100


def _woken(house: House, mode: str, moment: int) -> bool:
    """False: the job was over before so many moments."""
    house.platform.add_vm(VM, {DISK: some_disk(MIB)})
    job = house.intake.submit(live_plan(mode))
    seen = 0

    def is_it() -> bool:
        nonlocal seen
        seen += house.platform.vm(VM)["power"] == "off" and house.store.get(job.id).boot_sign is None
        return seen > moment

    house.store.on_commit = _crash_when(house, is_it)
    with contextlib.suppress(Died):
        house.run(job.id)
    house.store.on_commit = lambda: None
    if died := seen > moment:
        house.platform.power(VM, "on")
        assert house.platform.guest_writes(VM, DISK, 64 * KIB, b"written after it was off")
        ended = house.run(job.id)
        if ended.state == State.COMPLETED:
            assert house.volume(ended).read_bytes() == source_bytes(house), f"at moment {moment}"
            assert house.platform.vm(VM)["power"] == "off"
        else:
            assert error_code(ended) == "E_MIG_CONFLICT", ended.last_error
            assert house.platform.vm(VM)["power"] == "on"
    house.close()
    return died


# ── workers ──────────────────────────────────────────────────────────────────────────────────────────────────────────


def _kill_workers(store: Store, job: Migration, times: int, killed: list[int]) -> None:
    deadline = time.monotonic() + 60
    while len(killed) < times and time.monotonic() < deadline:
        for worker in workers():
            marks = store.watermarks(job.id, 1)
            if worker not in killed and marks and marks[DISK].offset_bytes > len(killed) * MIB:
                os.kill(worker, signal.SIGKILL)
                killed.append(worker)
        time.sleep(0.01)


def test_a_killed_worker_costs_nothing_but_the_bytes_since_its_watermark(house: House) -> None:
    content = some_disk(8 * MIB)
    plan = offline_plan(imported(house, {DISK: content}), limits={"bandwidth_bps": 3 * MIB // 2})
    job = house.intake.submit(plan)
    killed: list[int] = []
    killer = threading.Thread(target=_kill_workers, args=(house.store, job, 2, killed))
    killer.start()
    ended = house.run(job.id)
    killer.join()
    assert len(killed) == 2
    assert ended.state == State.COMPLETED
    assert house.volume(ended).read_bytes() == content
    assert workers() == []


def test_progress_never_goes_back_and_ends_whole(house: House) -> None:
    content = some_disk(6 * MIB)
    job = house.intake.submit(offline_plan(imported(house, {DISK: content}), limits={"bandwidth_bps": 2 * MIB}))
    seen: list[tuple[int, int]] = []
    ended = threading.Event()

    def look() -> None:
        while not ended.wait(0.05):
            for _, progress in house.board.latest().values():
                seen.append((progress.bytes_done, progress.bytes_total))

    watcher = threading.Thread(target=look)
    watcher.start()
    last = house.run(job.id)
    ended.set()
    watcher.join()
    done = [figures[0] for figures in seen]
    assert done == sorted(done)
    assert len(set(done)) >= 4
    assert all(figures[0] <= figures[1] for figures in seen)
    assert last.progress.bytes_done == last.progress.bytes_total


def test_what_moves_during_a_flush_is_not_taken_back_by_its_end() -> None:
    tally = Tally(before={})
    tally.take(Moved(key="d", bytes_total=9, bytes_done=3, bytes_zero=1))
    tally.take(Moved(key="d", bytes_total=9, bytes_done=5, bytes_zero=2))
    tally.take(Flushed(key="d", offset_bytes=3, bytes_total=9, bytes_done=3, bytes_zero=1))
    assert (tally.progress().bytes_done, tally.progress().bytes_zero) == (5, 2)
    # Another worker goes on from the watermark: what the one before it did since is lost, and said to be.
    tally.take(Moved(key="d", bytes_total=9, bytes_done=3, bytes_zero=1))
    assert tally.progress().bytes_done == 3
    tally.take(Flushed(key="d", offset_bytes=9, bytes_total=9, bytes_done=9, bytes_zero=2, finished=True, bytes_checked=4))
    assert (tally.progress().bytes_done, tally.checked_bytes()) == (9, 4)


def test_a_pass_says_what_it_would_see_of_the_disk_that_it_saw_least_of() -> None:
    tally = Tally(before={})
    for key, checked in (("a", 8), ("b", 4), ("c", 0)):
        tally.take(
            Flushed(key=key, offset_bytes=9, bytes_total=9, bytes_done=9, bytes_zero=0, finished=True, bytes_checked=checked)
        )
    assert (tally.checked_bytes(), tally.least_checked_bytes()) == (12, 4)


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
