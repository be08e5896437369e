"""Whole jobs by a lease: downgrades, broken streams, files that are closed on the way, kill -9."""

import contextlib
import random
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from synvirt.migrations import passes
from synvirt.migrations.memory import PassMemory
from synvirt.model.kinds import Mode, State
from tests.fakes.vcenter import VCenter
from tests.live.vsphere.lease.lab import LeaseHouse
from tests.live.vsphere.test_vim_jobs import VM, VimHouse, busy, plan, same
from tests.running import forked
from tests.running.processes import until

pytestmark = pytest.mark.timeout(600)


def test_a_warm_plan_runs_cold_and_says_why(house: LeaseHouse, platform: VCenter, disk: Path) -> None:
    job = house.run(house.intake.submit(plan("Warm")).id)
    assert job.state is State.COMPLETED, job.last_error
    assert job.mode_effective is Mode.COLD
    assert job.last_error is not None
    assert (job.last_error.code, job.last_error.fatal) == ("E_MIG_CBT_UNSUPPORTED", False)
    assert "export lease" in job.last_error.message
    assert same(house, job, disk)
    assert (platform.leases(), platform.snapshots(), platform.sessions()) == (0, [], 0)


@pytest.mark.parametrize("kind", ["cut", "refuse", "starve"])
def test_a_stream_that_breaks_costs_a_new_lease_and_loses_nothing(
    house: LeaseHouse, platform: VCenter, disk: Path, kind: str
) -> None:
    platform.next_leases(timeout_ms=3000)
    platform.fault("nfc", kind)
    if kind == "starve":
        platform.fault("HttpNfcLeaseProgress", "Timedout", times=1)
    job = house.run(house.intake.submit(plan("Cold")).id)
    assert job.state is State.COMPLETED, job.last_error
    assert same(house, job, disk)
    assert platform.calls("ExportSnapshot") >= 2
    assert (platform.leases(), platform.snapshots(), platform.sessions()) == (0, [], 0)


@pytest.mark.parametrize(("kind", "code"), [("empty", "E_MIG_DISK_READ_FAILED"), ("page", "E_MIG_MALFORMED_ARCHIVE")])
def test_a_guest_is_not_held_off_for_a_host_that_sends_no_disk(
    house: LeaseHouse, platform: VCenter, disk: Path, kind: str, code: str
) -> None:
    """Asked again it would send the same: the job ends at once, and the guest runs again."""
    platform.fault("nfc", kind, times=1000)
    job = house.run(house.intake.submit(plan("Cold")).id)
    assert job.state is State.FAILED
    assert job.last_error is not None
    assert (job.last_error.code, job.last_error.hint is None) == (code, False)
    assert platform.calls("ExportSnapshot") == 1
    assert platform.guest_writes(VM, 0, b"it runs")
    assert (platform.leases(), platform.snapshots(), platform.sessions()) == (0, [], 0)


def close_files_once(house: VimHouse, platform: VCenter, happened: Callable[[], bool]) -> None:
    """From the first commit on that finds it so, the datastore's files are not for us."""

    def committed() -> None:
        house.store.on_commit = lambda: None
        if happened():
            platform.fault("folder", "status:403", times=100_000)
        else:
            house.store.on_commit = committed

    house.store.on_commit = committed


def test_files_that_are_closed_in_the_middle_are_followed_by_a_lease_at_the_watermark(
    by_any_way: VimHouse, platform: VCenter, disk: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    house = by_any_way
    orders: list[tuple[str, int]] = []
    ordered = passes._order

    def watched(*args: Any, **options: Any) -> Any:
        order = ordered(*args, **options)
        orders.extend((type(one.reader).__name__, one.since_bytes) for one in order.disks)
        return order

    monkeypatch.setattr(passes, "_order", watched)
    # Slowly, so that there is a middle of some seconds.
    job = house.intake.submit(plan("Cold", limits={"bandwidth_bps": 512 << 10}))
    close_files_once(house, platform, lambda: any(one.offset_bytes for one in house.store.watermarks(job.id, 1).values()))
    ended = house.run(job.id)
    assert ended.state is State.COMPLETED, ended.last_error
    assert same(house, ended, disk)
    assert [name for name, _ in orders] == ["DatastoreSpec", "LeaseSpec"]
    assert orders[0][1] == 0 < orders[1][1]
    assert (platform.leases(), platform.snapshots(), platform.sessions()) == (0, [], 0)


def test_files_that_are_closed_before_a_delta_leave_whole_disks_to_compare_and_it_is_reported(
    by_any_way: VimHouse, platform: VCenter, disk: Path
) -> None:
    house = by_any_way
    job = house.intake.submit(plan())
    close_files_once(house, platform, lambda: house.store.memory.get(job.id, PassMemory, 2).snapshot is not None)
    with busy(platform):
        ended = house.run(job.id)
    assert ended.state is State.COMPLETED, ended.last_error
    assert same(house, ended, disk)
    assert ended.last_error is not None
    assert (ended.last_error.code, ended.last_error.fatal) == ("E_MIG_CBT_UNSUPPORTED", False)
    assert "export lease" in ended.last_error.message
    assert [(one.kind, one.whole) for one in ended.passes] == [("full", False), ("delta", True), ("final", True)]
    assert (platform.leases(), platform.snapshots(), platform.sessions()) == (0, [], 0)


def test_files_that_are_closed_and_no_lease_either_is_reported_at_once(
    by_any_way: VimHouse, platform: VCenter, disk: Path
) -> None:
    platform.fault("folder", "status:403", times=100_000)
    platform.fault("ExportSnapshot", "NoPermission", times=100)
    job = by_any_way.run(by_any_way.intake.submit(plan("Cold")).id)
    assert job.state is State.FAILED
    assert job.last_error is not None
    assert job.last_error.code == "E_MIG_AUTH_FAILED"
    assert "403" in job.last_error.message
    assert platform.snapshots() == []


def test_a_service_killed_in_the_middle_leaves_no_lease_and_its_job_goes_on(
    house: LeaseHouse, platform: VCenter, disk: Path, tmp_path: Path
) -> None:
    # The host sends half, and holds the rest back for as long as the service lives.
    platform.fault("nfc", "hold")
    job = house.intake.submit(plan("Cold"))
    house.close()
    argv = [sys.executable, "-m", "tests.live.vsphere.lease.service", str(house.folder), str(job.id)]
    argv += [platform.url, platform.fingerprint, platform._control]
    with forked.Popen(argv, cwd=Path(__file__).parents[4], start_new_session=True) as service:
        try:
            until(lambda: platform.calls("nfc") or service.poll() is not None)
            assert service.poll() is None
            assert platform.leases() == 1
        finally:
            service.kill()
    until(lambda: platform.leases() == 0 and platform.sessions() == 0)
    assert platform.calls("HttpNfcLeaseAbort") == 1
    with contextlib.closing(LeaseHouse(house.folder, platform)) as again:
        ended = again.run(job.id)
        assert ended.state is State.COMPLETED, ended.last_error
        assert same(again, ended, disk)
    assert (platform.leases(), platform.snapshots(), platform.sessions()) == (0, [], 0)


def test_every_disk_of_a_cold_job_is_read_by_its_key(house: LeaseHouse, platform: VCenter, disk: Path) -> None:
    data = platform.add_disk(VM, random.Random(5).randbytes(1 << 20), place=1)
    job = house.run(house.intake.submit(plan("Cold")).id)
    assert job.state is State.COMPLETED, job.last_error
    found = [house.volume(job, one.key).read_bytes() for one in job.disks]
    assert found == [disk.read_bytes(), data.read_bytes()]
