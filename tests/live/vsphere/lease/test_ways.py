"""By which way disks are read, what is told of it, and disks that are mostly empty."""

import random
from pathlib import Path

import pytest

from synvirt.disks.specs import ChangedSpec, DatastoreSpec, LeaseSpec
from synvirt.disks.vsphere import datastore
from synvirt.errors import (
    CbtUnsupported,
)
from synvirt.live import SnapshotRef
from synvirt.live.vsphere.adapter import VimApi
from synvirt.live.vsphere.privileges import PRIVILEGES
from synvirt.migrations import passes
from synvirt.model.kinds import Mode, State
from tests.fakes.vcenter import DISK_BYTES, VCenter
from tests.live.vsphere.lease.lab import ask, by_lease, opened, way_of
from tests.live.vsphere.test_vim_jobs import VM, VimHouse, busy, plan, same

pytestmark = pytest.mark.timeout(600)


def test_files_are_read_where_they_can_be(platform: VCenter, disk: Path) -> None:
    assessment, reason, _ = way_of(platform.access())
    assert "/folder" in assessment
    assert reason is None


@pytest.mark.parametrize("kind", ["vsan", "VVOL"])
def test_disks_that_are_objects_are_read_by_a_lease(platform: VCenter, disk: Path, kind: str) -> None:
    platform.control("store", type=kind)
    assessment, reason, concerns = way_of(platform.access())
    assert "export lease" in assessment
    assert f"of type {kind}" in assessment
    assert "no deltas" in str(reason)
    assert concerns == ["vim.read_by"]
    assert isinstance(ask(platform.access(), opened), LeaseSpec)


def test_a_user_who_may_not_read_files_reads_by_a_lease(platform: VCenter, disk: Path) -> None:
    platform.fault("HasPrivilegeOnEntities", "deny:Datastore.Browse", times=100)
    assessment, reason, _ = way_of(platform.access())
    assert "Datastore.Browse" in assessment
    assert "no deltas" in str(reason)
    assert isinstance(ask(platform.access(), opened), LeaseSpec)


def test_files_that_no_host_opens_are_read_by_a_lease_but_deltas_wait_a_minute(
    platform: VCenter, disk: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("synvirt.disks.vsphere.datastore.RETRY_DELAYS_S", (0.01,))
    monkeypatch.setattr("synvirt.live.vsphere.reading.FILES_PAUSES_S", (0.01, 0.01))

    async def use(adapter: VimApi) -> None:
        one = (await adapter.inspect(VM)).disks[0]
        await adapter.enable_cbt(VM, [one.key])
        first = await adapter.snapshot(VM, "synvirt-a-1")
        platform.fault("folder", "status:500", times=2)
        assert isinstance(await adapter.open_disk(VM, first, one, None), LeaseSpec)
        assert isinstance(await adapter.open_disk(VM, first, one, None), DatastoreSpec)
        second = await adapter.snapshot(VM, "synvirt-a-2")
        platform.fault("folder", "status:500", times=4)
        assert isinstance(await adapter.open_disk(VM, second, one, first.change_ids[one.key]), ChangedSpec)
        platform.fault("folder", "status:500", times=6)
        with pytest.raises(CbtUnsupported, match="500"):
            await adapter.open_disk(VM, second, one, first.change_ids[one.key])

    ask(platform.access(), use)


def test_a_pass_knows_whatever_a_worker_says_of_a_datastores_file() -> None:
    assert {kind.__name__: kind for kind in datastore._FAILURES.values()}.items() <= passes.ANSWERED.items()


def test_a_platform_that_does_not_tell_privileges_is_tried_by_files(platform: VCenter, disk: Path) -> None:
    platform.fault("HasPrivilegeOnEntities", "NotSupported", times=100)
    assert "/folder" in way_of(platform.access())[0]
    assert isinstance(ask(platform.access(), opened), DatastoreSpec)


def test_the_operators_choice_goes_before_all(platform: VCenter, disk: Path) -> None:
    platform.control("store", type="vsan")
    access = platform.access(fingerprint_sha256=platform.fingerprint, transport="datastore")
    assert [one.partition(":")[0] for one in way_of(access)[2]] == ["vim.read_by", "disk-in-objects"]
    assert "export lease" in way_of(by_lease(platform))[0]


def test_a_delta_by_a_lease_is_refused(platform: VCenter, disk: Path) -> None:
    async def use(adapter: VimApi) -> None:
        snapshot: SnapshotRef = await adapter.snapshot(VM, "synvirt-a-1")
        one = (await adapter.inspect(VM)).disks[0]
        await adapter.open_disk(VM, snapshot, one, "52 de/1")

    with pytest.raises(CbtUnsupported, match="no deltas"):
        ask(by_lease(platform), use)


def test_the_privileges_asked_for_are_those_of_the_way(platform: VCenter) -> None:
    names = [check.name for check in ask(by_lease(platform), lambda adapter: adapter.about()).checks]
    assert "privilege VApp.Export" in names
    assert "privilege Datastore.Browse" not in names
    assert len(names) == len(PRIVILEGES) - 1


# ── disks that are mostly empty ──────────────────────────────────────────────────────────────────────────────────────


@pytest.fixture
def mostly_empty(platform: VCenter, disk: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The disk, of which the platform says that a quarter is allocated; not which."""
    monkeypatch.setattr("synvirt.live.vsphere.ways.SPARED_BYTES_LEAST", 1)
    platform.control("allocate", vm=VM, bytes=DISK_BYTES // 4)
    # Half of its stream is more than is fetched at once: what cuts it there cuts it in the middle of the copy.
    disk.write_bytes(random.Random(17).randbytes(3 << 20) + bytes(DISK_BYTES - (3 << 20)))
    return disk


@pytest.mark.parametrize(
    ("kind", "calls"),
    [("", {"nfc": 1, "folder": 1}), ("cut", {"nfc": 1}), ("status:404", {"nfc": 1}), ("no lease", {"nfc": 0})],
)
def test_a_cold_copy_of_a_mostly_empty_disk_fetches_what_is_allocated(
    by_any_way: VimHouse, platform: VCenter, mostly_empty: Path, kind: str, calls: dict[str, int]
) -> None:
    """And goes on by its file where the lease fails, which costs no second lease."""
    assert "vim.mostly_empty" in way_of(platform.access())[2]
    if kind == "no lease":
        platform.fault("ExportSnapshot", "NoPermission", times=1000)
    elif kind:
        platform.fault("nfc", kind, times=1000)
    job = by_any_way.run(by_any_way.intake.submit(plan("Cold")).id)
    assert (job.state, job.last_error) == (State.COMPLETED, None)
    assert same(by_any_way, job, mostly_empty)
    assert {name: platform.calls(name) for name in calls} == calls
    assert platform.calls("ExportSnapshot") == 1
    assert (platform.leases(), platform.snapshots()) == (0, [])


def test_two_mostly_empty_disks_wait_for_one_lease_that_never_comes(
    by_any_way: VimHouse, platform: VCenter, mostly_empty: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("synvirt.live.vsphere.lease.READY_TIMEOUT_S", 0.05)
    data = platform.add_disk(VM, random.Random(5).randbytes(1 << 20), place=1)
    platform.control("allocate", vm=VM, bytes=1)
    platform.next_leases(stuck=9)
    job = by_any_way.run(by_any_way.intake.submit(plan("Cold")).id)
    assert (job.state, job.last_error) == (State.COMPLETED, None)
    keys = [one.key for one in job.disks]
    assert [by_any_way.volume(job, key).read_bytes() for key in keys] == [mostly_empty.read_bytes(), data.read_bytes()]
    assert (platform.calls("ExportSnapshot"), platform.leases()) == (1, 0)


def test_a_warm_copy_and_one_by_the_operators_choice_need_no_lease(
    by_any_way: VimHouse, platform: VCenter, mostly_empty: Path
) -> None:
    """Not where the host does not say what is allocated either, as one may not of a disk on NFS."""
    platform.fault("QueryChangedDiskAreas", "FileFault")
    chosen = platform.access(fingerprint_sha256=platform.fingerprint, transport="datastore")
    assert isinstance(ask(chosen, opened), DatastoreSpec)
    ask(platform.access(), lambda adapter: adapter.cleanup(VM, "synvirt-a-1"))
    with busy(platform):
        job = by_any_way.run(by_any_way.intake.submit(plan()).id)
    assert (job.state, job.mode_effective) == (State.COMPLETED, Mode.WARM)
    assert same(by_any_way, job, mostly_empty)
    assert platform.calls("ExportSnapshot") == 0


def test_a_vm_that_cannot_be_exported_holds_no_cold_copy_up(
    by_any_way: VimHouse, platform: VCenter, mostly_empty: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One with a virtual TPM says so as another export that is under way does."""
    monkeypatch.setattr("synvirt.live.vsphere.reading.SPARER_BUSY_S", 0.2)
    platform.fault("ExportSnapshot", "InvalidState", times=1000)
    job = by_any_way.run(by_any_way.intake.submit(plan("Cold")).id)
    assert (job.state, job.last_error) == (State.COMPLETED, None)
    assert same(by_any_way, job, mostly_empty)
