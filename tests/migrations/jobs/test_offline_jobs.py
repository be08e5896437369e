"""A job from an offline plan to its end, in a house of fakes with real volumes and store; the first by processes."""

import os
import random
import subprocess
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from uuid import UUID

import pytest

from synvirt.destinations.directory import DirectoryDestination
from synvirt.disks.specs import WriterSpec
from synvirt.errors import SynvirtError
from synvirt.jobs import copying_disks
from synvirt.migrations import patience
from synvirt.migrations.job import Job
from synvirt.model.job import DiskProgress, Progress
from synvirt.model.kinds import Mode, State
from synvirt.sizes import KIB, MIB
from tests.fakes.guests import MARK, FakePreparer
from tests.fakes.hypervisor import FakeHypervisor
from tests.fakes.workers import in_process
from tests.house import House, offline_plan, states
from tests.migrations.jobs.running import DISK, error_code, flushed, imported, run, run_until_death, some_disk
from tests.patience import quick_tries

# ── offline ─────────────────────────────────────────────────────────────────────────────────────────────


def test_an_offline_plan_ends_as_a_running_domain_with_the_same_bytes(house_with_processes: House) -> None:
    house = house_with_processes
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
    house = House(tmp_path, family="windows", workers=in_process)
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


@pytest.mark.parametrize(("family", "converted"), [("windows", "disk-1"), ("linux", DISK)])
def test_drivers_go_into_the_disk_that_windows_boots_from_and_a_linux_keeps_the_order_of_its_disks(
    tmp_path: Path, family: str, converted: str
) -> None:
    """Which may be any of them: an old system disk often comes first, as a disk for data. A Linux names its disks by their
    order, which its fstab is rewritten by."""
    house = House(tmp_path, family=family, workers=in_process)
    contents = {DISK: some_disk(seed=1), "disk-1": some_disk(seed=2)}
    folder = imported(house, contents)
    (folder / "boots-last").touch()
    job = run(house, offline_plan(folder, conversion="always"))
    assert job.state == State.COMPLETED
    marked = [key for key in contents if house.volume(job, key).read_bytes().startswith(MARK)]
    assert marked == [converted]
    house.close()


@pytest.mark.parametrize(
    ("family", "conversion", "prepared"),
    [("linux", "auto", False), ("linux", "always", True), ("windows", "auto", True), ("windows", "never", False)],
)
def test_the_plan_may_ask_for_a_conversion_or_forbid_it(tmp_path: Path, family: str, conversion: str, prepared: bool) -> None:
    house = House(tmp_path, family=family, workers=in_process)
    job = run(house, offline_plan(imported(house), conversion=conversion))
    assert job.state == State.COMPLETED
    assert (State.V2V_PROCESSING in states(job)) == prepared == bool(house.preparer.prepared)
    house.close()


def test_a_missing_conversion_tool_is_found_before_anything_is_copied(tmp_path: Path) -> None:
    house = House(tmp_path, family="windows", preparer=FakePreparer(missing=True), workers=in_process)
    job = run(house, offline_plan(imported(house)))
    assert states(job) == [State.QUEUED, State.FAILED]
    assert error_code(job) == "E_MIG_V2V_FAILED"
    assert house.leftovers() == []
    house.close()


def test_a_failed_conversion_keeps_the_copy_and_leaves_no_domain(tmp_path: Path) -> None:
    house = House(tmp_path, family="windows", preparer=FakePreparer(fails=True), workers=in_process)
    content = {DISK: some_disk()}
    job = run(house, offline_plan(imported(house, content)))
    assert job.state == State.FAILED
    assert error_code(job) == "E_MIG_V2V_FAILED"
    assert house.volume(job).read_bytes() == content[DISK]
    assert not list((tmp_path / "conversions").iterdir())
    assert house.hypervisor.domains == {}
    assert house.store.ledger(job.id) == []
    house.close()


@pytest.mark.parametrize("finished", [False, True])
def test_a_service_that_dies_while_it_converts_converts_once(tmp_path: Path, finished: bool) -> None:
    """A conversion that was begun is none; one that has ended is not done again."""
    house, content = House(tmp_path, family="windows", workers=in_process), {DISK: some_disk()}
    job = house.intake.submit(offline_plan(imported(house, content)))

    def so_far() -> bool:
        conversion = house.store.get(job.id).conversion
        return conversion is not None and (not finished or conversion.finished_at is not None)

    run_until_death(house, job, so_far)
    ended = house.run(job.id)
    assert ended.state == State.COMPLETED, ended.last_error
    assert house.volume(ended).read_bytes() == MARK + content[DISK][len(MARK) :]
    assert len(house.preparer.prepared) == 1
    house.close()


def test_a_conversion_that_finds_no_room_on_the_volumes_waits_and_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A volume has a part of it by then, so the copy would be lost with the job."""
    quick_tries(monkeypatch)
    monkeypatch.setattr(patience, "SHOWN_FROM_S", 0.0)
    shown = []
    show = Job.show

    async def noted(job: Job, error: SynvirtError) -> None:
        await show(job, error)
        shown.append(job.migration.last_error)

    monkeypatch.setattr(Job, "show", noted)
    house = House(tmp_path, family="windows", preparer=FakePreparer(full_for=2), workers=in_process)
    content = {DISK: some_disk()}
    job = run(house, offline_plan(imported(house, content)))
    assert job.state == State.COMPLETED
    assert job.last_error is None
    assert len(house.preparer.prepared) == 1
    assert house.volume(job).read_bytes() == MARK + content[DISK][len(MARK) :]
    assert not list((tmp_path / "conversions").iterdir())
    assert [(one.code, one.fatal) for one in shown if one is not None] == [("E_MIG_V2V_FAILED", False)] * 2
    assert "tried again" in str(shown[0])
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
    run_until_death(house, job, lambda: flushed(house, job))
    (folder / f"{DISK}.raw").write_bytes(some_disk(seed=99))
    ended = house.run(job.id)
    assert (ended.state, error_code(ended)) == (State.FAILED, "E_MIG_DISK_READ_FAILED")
    assert ended.last_error is not None
    assert "changed" in ended.last_error.message
    assert house.leftovers() == []


def _replaced(path: Path) -> None:
    """By another of its size and time."""
    was, other = path.stat(), path.with_suffix(".new")
    other.write_bytes(some_disk(seed=99))
    os.utime(other, ns=(was.st_atime_ns, was.st_mtime_ns))
    other.replace(path)


def _grown(path: Path) -> None:
    was = path.stat()
    os.truncate(path, was.st_size + 512)
    os.utime(path, ns=(was.st_atime_ns, was.st_mtime_ns))


@pytest.mark.parametrize(
    "change", [_replaced, _grown, lambda path: os.utime(path, (1, 1))], ids=["replaced", "grown", "written"]
)
def test_an_archive_that_changes_while_it_is_copied_is_not_mixed(house: House, change: Callable[[Path], None]) -> None:
    folder = imported(house)
    job = house.intake.submit(offline_plan(folder))

    def once_flushed() -> None:
        if flushed(house, job):
            house.store.on_commit = lambda: None
            change(folder / f"{DISK}.raw")

    house.store.on_commit = once_flushed
    ended = house.run(job.id)
    assert (ended.state, error_code(ended)) == (State.FAILED, "E_MIG_DISK_READ_FAILED")
    assert ended.last_error is not None
    assert "changed" in ended.last_error.message
    assert house.leftovers() == []


@pytest.mark.parametrize("finished", [False, True])
def test_a_volume_that_is_removed_while_the_service_is_down_is_copied_again(house: House, finished: bool) -> None:
    """A new one is empty: what was copied before the watermark would be zeros."""
    content = {DISK: some_disk(), "disk-1": some_disk(seed=2)}
    job = house.intake.submit(offline_plan(imported(house, content)))

    def copied() -> bool:
        passes = house.store.get(job.id).passes
        return flushed(house, job) and (not finished or passes[-1].finished_at is not None)

    run_until_death(house, job, copied)
    stopped = house.store.get(job.id)
    assert stopped.state == State.COPYING_FULL
    house.volume(stopped).unlink()
    ended = house.run(job.id)
    assert ended.state == State.COMPLETED
    assert [house.volume(ended, key).read_bytes() == content[key] for key in content] == [True, True]


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to mount a small tmpfs")
def test_no_volume_is_made_below_a_file_system_that_is_not_mounted_yet(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The host restarts, and the service is up before the file system is there."""
    quick_tries(monkeypatch)
    monkeypatch.setattr(patience, "SHOWN_FROM_S", 0.0)
    kept, point = tmp_path / "kept", tmp_path / "mounted"
    for folder in (kept, point):
        folder.mkdir()
    with mounted(kept, "-t", "tmpfs", "-o", "size=32m", "tmpfs"):
        (kept / "volumes").mkdir()
        house = House(tmp_path, destination=DirectoryDestination(point / "volumes", mount_point=point), workers=in_process)
        job = house.intake.submit(offline_plan(imported(house, {DISK: some_disk()})))
        with mounted(point, "--bind", str(kept)):
            run_until_death(house, job, lambda: flushed(house, job))
        waited: list[Path] = []

        def mount_late() -> None:
            """Once the job shows what it waits for."""
            if (error := house.store.get(job.id).last_error) is None or waited:
                return
            assert (error.code, error.fatal) == ("E_MIG_DISK_WRITE_FAILED", False)
            assert f"nothing is mounted at {point}" in error.message
            waited.extend([point, *point.iterdir()])
            late.enter_context(mounted(point, "--bind", str(kept)))

        house.store.on_commit = mount_late
        with ExitStack() as late:
            ended = house.run(job.id)
            house.store.on_commit = lambda: None
            assert waited == [point], "nothing is made below it meanwhile"
            assert (ended.state, ended.last_error) == (State.COMPLETED, None)
            assert house.volume(ended).read_bytes() == some_disk()
            assert len(ended.passes) == 1


class Going(DirectoryDestination):
    """Its file system goes just before the copy opens the volume there, once."""

    went = False

    def open(self, name: str, size_bytes: int) -> WriterSpec:
        spec = super().open(name, size_bytes)
        if not self.went and self._mount_point is not None:
            self.went = True
            subprocess.run(["umount", self._mount_point], check=True)
        return spec


def completes_once_mounted_again(house: House, kept: Path, point: Path) -> None:
    """A job whose destination at `point` goes away reports that, and completes when `kept` is mounted there again."""
    job = house.intake.submit(offline_plan(imported(house, {DISK: some_disk()})))
    reported: list[str] = []

    def mount_again() -> None:
        if (error := house.store.get(job.id).last_error) is not None and not reported:
            assert not error.fatal, error
            reported.append(error.message)
            subprocess.run(["mount", "--bind", kept, point], check=True)

    house.store.on_commit = mount_again
    ended = house.run(job.id)
    house.store.on_commit = lambda: None
    assert [f"nothing is mounted at {point}" in one for one in reported] == [True]
    assert (ended.state, ended.last_error) == (State.COMPLETED, None)
    assert house.volume(ended).read_bytes() == some_disk()


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to mount a small tmpfs")
def test_a_file_system_that_goes_while_it_is_written_is_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The copy itself sees only that its file is not there, or an input/output error."""
    quick_tries(monkeypatch)
    monkeypatch.setattr(patience, "SHOWN_FROM_S", 0.0)
    kept, point = tmp_path / "kept", tmp_path / "mounted"
    for folder in (kept, point):
        folder.mkdir()
    with mounted(kept, "-t", "tmpfs", "-o", "size=32m", "tmpfs"), ExitStack() as later:
        destination = Going(point / "volumes", mount_point=point)
        house = House(tmp_path, destination=destination)
        later.callback(lambda: subprocess.run(["umount", "--lazy", point], check=False, capture_output=True))
        subprocess.run(["mount", "--bind", kept, point], check=True)
        completes_once_mounted_again(house, kept, point)


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to mount a small tmpfs")
def test_a_file_system_that_goes_while_a_volume_is_read_back_is_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """For its hashes: the copy sees that a file cannot be read, and it is no file of the source."""
    quick_tries(monkeypatch)
    monkeypatch.setattr(patience, "SHOWN_FROM_S", 0.0)
    kept, point = tmp_path / "kept", tmp_path / "mounted"
    for folder in (kept, point):
        folder.mkdir()
    with mounted(kept, "-t", "tmpfs", "-o", "size=32m", "tmpfs"), ExitStack() as later:
        house = House(tmp_path, destination=DirectoryDestination(point / "volumes", mount_point=point), workers=in_process)
        later.callback(lambda: subprocess.run(["umount", "--lazy", point], check=False, capture_output=True))
        subprocess.run(["mount", "--bind", kept, point], check=True)
        fill = copying_disks._filled
        gone: list[Path] = []

        def without_its_file_system(*given: Any) -> None:
            if not gone:
                gone.append(point)
                subprocess.run(["umount", "--lazy", point], check=True)
            fill(*given)

        monkeypatch.setattr(copying_disks, "_filled", without_its_file_system)
        completes_once_mounted_again(house, kept, point)
        assert gone == [point]


@contextmanager
def mounted(at: Path, *what: str) -> Iterator[None]:
    subprocess.run(["mount", *what, at], check=True)
    try:
        yield
    finally:
        subprocess.run(["umount", at], check=True)


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to mount a small tmpfs")
def test_a_full_disk_while_copying_fails_with_its_cause_and_leaves_nothing(tmp_path: Path) -> None:
    small = tmp_path / "small"
    small.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=2m", "tmpfs", small], check=True)
    try:
        house = House(tmp_path, destination=DirectoryDestination(small), workers=in_process)
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


# ── the hypervisor ──────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(("fault", "code"), [("define", "E_MIG_DOMAIN_DEFINE_FAILED"), ("boot", "E_MIG_GUEST_BOOT_FAILED")])
def test_a_guest_that_does_not_come_up_keeps_its_copy_and_leaves_no_domain(tmp_path: Path, fault: str, code: str) -> None:
    house = House(tmp_path, hypervisor=FakeHypervisor(fail=fault), workers=in_process)
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
