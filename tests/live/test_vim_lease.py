"""Disks read by export leases, against VMware's own simulator with the lease that it lacks (tests/fakes/vcsim/leases.go).

What this proves: our calls, our reading of the stream, that a lease is kept alive and ended. What it cannot: how a real host
orders, compresses and paces its stream.
"""

import asyncio
import contextlib
import os
import random
import sys
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, TypeVar

import pytest

from synvirt.disks import open_reader
from synvirt.disks.specs import ChangedSpec, DatastoreSpec, LeaseSpec, RawSpec, ReaderSpec
from synvirt.disks.vsphere import datastore
from synvirt.errors import (
    AuthFailed,
    CbtUnsupported,
    DiskReadFailed,
    Internal,
    MalformedArchive,
    SourceUnreachable,
    UnsupportedFormat,
)
from synvirt.live import SnapshotRef, SourceAccess
from synvirt.live.vsphere.adapter import VimApi
from synvirt.live.vsphere.lease import ExportLease
from synvirt.live.vsphere.privileges import PRIVILEGES
from synvirt.live.vsphere.session import library
from synvirt.migrations import passes
from synvirt.migrations.memory import PassMemory
from synvirt.model.kinds import Mode, State
from tests import forked
from tests.contracts.live import in_session, read
from tests.contracts.readers import ReaderCase, ReaderContract
from tests.fakes.vcenter import DISK_BYTES, VCenter
from tests.live.test_vim_jobs import VM, VimHouse, busy_guest, plan, same
from tests.needs import need
from tests.processes import until

pytestmark = pytest.mark.timeout(600)

T = TypeVar("T")


@pytest.fixture
def disk(platform: VCenter) -> Path:
    """The running VM's disk: data with holes, the last MiB among them, in grains that are not all whole."""
    need("qemu-img", "qemu-utils")
    generator = random.Random(11)
    content = bytearray(DISK_BYTES)
    content[: 1 << 20] = generator.randbytes(1 << 20)
    content[(1 << 20) + 70_000 : (1 << 20) + 70_100] = generator.randbytes(100)
    content[2 << 20 : 3 << 20] = b"compresses well " * 65536
    return platform.add_disk(VM, bytes(content))


@pytest.fixture(autouse=True)
def _no_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("synvirt.live.vsphere.lease.READY_POLL_S", 0.02)
    monkeypatch.setattr("synvirt.live.vsphere.lease.BUSY_POLL_S", 0.05)
    monkeypatch.setattr("synvirt.migrations.passes.RETRY_PAUSES_S", (0.05, 0.05, 0.05))


def by_lease(platform: VCenter) -> SourceAccess:
    return platform.access(fingerprint_sha256=platform.fingerprint, transport="lease")


def ask(access: SourceAccess, use: Callable[[VimApi], Awaitable[T]]) -> T:
    return in_session(lambda: VimApi(access), use)


async def opened(adapter: VimApi, name: str = "synvirt-a-1") -> ReaderSpec:
    snapshot = await adapter.snapshot(VM, name)
    one = (await adapter.inspect(VM)).disks[0]
    return await adapter.open_disk(VM, snapshot, one, None)


def forgotten(adapter: VimApi) -> ExportLease:
    """Its lease, which the adapter does not end."""
    disks = adapter._disks
    lease, disks._lease = disks._lease, None
    assert lease is not None
    assert lease._guard is not None
    lease._guard.leave()
    return lease


@pytest.fixture
def spec(platform: VCenter, disk: Path) -> LeaseSpec:
    """Of a lease that lives, with nobody who says its progress, until the test ends."""

    async def use(adapter: VimApi) -> ReaderSpec:
        found = await opened(adapter)
        forgotten(adapter)
        adapter._session.close = adapter._session._forget  # type: ignore[method-assign]
        return found

    found = ask(by_lease(platform), use)
    assert isinstance(found, LeaseSpec)
    return found


class TestReader(ReaderContract):
    @pytest.fixture(params=["lease", "lease, then a file"])
    def case(
        self,
        request: pytest.FixtureRequest,
        platform: VCenter,
        spec: LeaseSpec,
        disk: Path,
        monkeypatch: pytest.MonkeyPatch,
    ) -> ReaderCase:
        # What is lost lies in the middle, and not in the first that is fetched.
        monkeypatch.setattr("synvirt.disks.vsphere.exported._BUFFER_BYTES", 4096)
        if request.param == "lease":
            return ReaderCase(open=lambda: open_reader(spec), content=disk.read_bytes())
        platform.fault("nfc", "cut", times=1000)
        either = replace(spec, instead=RawSpec(path=str(disk)))
        return ReaderCase(open=lambda: open_reader(either), content=disk.read_bytes())


def test_what_neither_way_reads_is_reported(
    platform: VCenter, spec: LeaseSpec, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("synvirt.disks.vsphere.exported._BUFFER_BYTES", 4096)
    platform.fault("nfc", "cut")
    reader = open_reader(replace(spec, instead=RawSpec(path=str(tmp_path / "none"))))
    reader.read_into(0, memoryview(bytearray(4096)))
    with pytest.raises(DiskReadFailed, match="none"):
        reader.read_into(4096, memoryview(bytearray(reader.size - 4096)))
    for _ in range(2):
        reader.close()


# ── which way, and what is told of it ────────────────────────────────────────────────────────────────────────────────


def way_of(access: SourceAccess) -> tuple[str, str | None, list[str]]:
    manifest = ask(access, lambda adapter: adapter.inspect(VM))
    return manifest.concerns[0].assessment, manifest.cbt_reason, [one.id for one in manifest.concerns]


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
    with busy_guest(platform):
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


# ── the lease ────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_the_disk_is_read_and_the_lease_completed(platform: VCenter, disk: Path) -> None:
    async def use(adapter: VimApi) -> bytes:
        spec = await opened(adapter)
        assert isinstance(spec, LeaseSpec)
        assert platform.leases() == 1
        assert spec.target not in repr(spec)
        assert spec.cookie
        assert spec.cookie not in repr(spec)
        return (await asyncio.to_thread(read, spec, os.urandom(DISK_BYTES)))[0]

    assert ask(by_lease(platform), use) == disk.read_bytes()
    assert platform.leases() == 0
    assert platform.calls("HttpNfcLeaseComplete") == 1
    assert platform.calls("HttpNfcLeaseAbort") == 0
    assert platform.sessions() == 0


def test_a_lease_is_over_before_its_snapshot_goes(platform: VCenter, disk: Path) -> None:
    async def use(adapter: VimApi) -> None:
        await opened(adapter)
        await adapter.cleanup(VM, "synvirt-a-1")
        assert platform.leases() == 0

    ask(by_lease(platform), use)
    assert platform.snapshots() == []


def test_two_disks_are_read_by_one_lease_each_by_its_place(platform: VCenter, disk: Path) -> None:
    data = platform.add_disk(VM, random.Random(5).randbytes(1 << 20), place=1)

    async def use(adapter: VimApi) -> list[bytes]:
        snapshot = await adapter.snapshot(VM, "synvirt-a-1")
        disks = (await adapter.inspect(VM)).disks
        specs = [await adapter.open_disk(VM, snapshot, one, None) for one in disks]
        return [(await asyncio.to_thread(read, spec))[0] for spec in reversed(specs)]

    assert ask(by_lease(platform), use) == [data.read_bytes(), disk.read_bytes()]
    assert platform.calls("ExportSnapshot") == 1


def test_a_lease_is_kept_alive_while_its_disk_is_read(platform: VCenter, disk: Path) -> None:
    """The host sends half, and the rest once it was told thrice that somebody is there. Not the lease before it."""
    platform.next_leases(timeout_ms=4000)
    platform.fault("nfc", "hold")

    async def use(adapter: VimApi) -> bytes:
        await opened(adapter)
        return (await asyncio.to_thread(read, await opened(adapter, "synvirt-a-2")))[0]

    assert ask(by_lease(platform), use) == disk.read_bytes()
    assert platform.calls("HttpNfcLeaseProgress") >= 3


@pytest.mark.parametrize(("kind", "lives"), [("Timedout", False), ("TaskInProgress", True), ("HostNotConnected", True)])
def test_a_lease_that_ran_out_is_not_renewed_and_one_of_a_busy_host_is(kind: str, lives: bool) -> None:
    vmware = library()
    session = VimApi(SourceAccess("https://vcenter", {"user": "u", "password": "p"}))._session
    session._content = object()

    def refuse(**_: object) -> None:
        raise getattr(vmware.vim.fault, kind, None) or getattr(vmware.vmodl.fault, kind)

    lease = ExportLease(session, "snapshot-1")
    lease._lease = SimpleNamespace(HttpNfcLeaseProgress=refuse)
    assert lease.renew() is lives


def test_a_lease_that_runs_out_in_the_middle_is_lost_and_nothing_reads_as_zeros(platform: VCenter, disk: Path) -> None:
    platform.next_leases(timeout_ms=2000)
    platform.fault("nfc", "starve")
    platform.fault("HttpNfcLeaseProgress", "status:503", times=100)

    async def use(adapter: VimApi) -> None:
        with pytest.raises(SourceUnreachable, match="export lease"):
            await asyncio.to_thread(read, await opened(adapter))

    ask(by_lease(platform), use)
    assert platform.leases() == 0


def test_a_lease_that_is_never_ready_is_given_up_and_aborted(
    platform: VCenter, disk: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("synvirt.live.vsphere.lease.READY_TIMEOUT_S", 0.1)
    platform.next_leases(stuck=1)
    with pytest.raises(SourceUnreachable, match="not ready"):
        ask(by_lease(platform), opened)
    assert platform.leases() == 0
    assert platform.calls("HttpNfcLeaseAbort") == 1


def test_a_lease_that_a_crash_left_is_waited_for(platform: VCenter, disk: Path) -> None:
    platform.next_leases(timeout_ms=4000)

    async def crash(adapter: VimApi) -> None:
        await opened(adapter)
        forgotten(adapter)

    ask(by_lease(platform), crash)
    assert isinstance(ask(by_lease(platform), opened), LeaseSpec)
    assert platform.calls("ExportSnapshot") > 2


def test_a_vm_that_something_else_exports_for_hours(
    platform: VCenter, disk: Path, spec: LeaseSpec, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("synvirt.live.vsphere.lease.BUSY_TIMEOUT_S", 0.1)
    with pytest.raises(SourceUnreachable, match="TaskInProgress"):
        ask(by_lease(platform), opened)


@pytest.mark.parametrize(("kind", "error"), [("NoPermission", AuthFailed), ("FileFault", Internal)])
def test_an_export_that_is_refused_says_why(platform: VCenter, disk: Path, kind: str, error: type[Exception]) -> None:
    platform.fault("ExportSnapshot", kind)
    with pytest.raises(error, match="export a snapshot"):
        ask(by_lease(platform), opened)


# ── the stream ───────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(("kind", "error"), [("refuse", SourceUnreachable), ("cut", SourceUnreachable),
                                             ("empty", DiskReadFailed), ("page", MalformedArchive),
                                             ("status:503", SourceUnreachable), ("status:404", SourceUnreachable),
                                             ("status:403", DiskReadFailed)])  # fmt: skip
def test_a_stream_that_does_not_come_or_ends_early(
    platform: VCenter, spec: LeaseSpec, kind: str, error: type[Exception]
) -> None:
    platform.fault("nfc", kind)
    with pytest.raises(error):
        read(spec)


def test_a_host_with_another_certificate_is_sent_nothing(platform: VCenter, spec: LeaseSpec) -> None:
    platform.control("certificate")
    before = platform.calls("nfc")
    for one in (spec, replace(spec, fingerprint_sha256=None)):
        with pytest.raises(SourceUnreachable, match="is not the pinned one"):
            open_reader(one)
    assert platform.calls("nfc") == before


def test_a_host_is_known_by_the_thumbprint_of_its_platform(spec: LeaseSpec, disk: Path) -> None:
    assert spec.thumbprint is not None
    assert read(replace(spec, fingerprint_sha256=None, verify_tls=True))[0] == disk.read_bytes()
    with pytest.raises(SourceUnreachable, match="not trusted"):
        open_reader(replace(spec, fingerprint_sha256=None, thumbprint=None, verify_tls=True))


def test_what_lies_before_a_watermark_is_passed_over(spec: LeaseSpec, disk: Path) -> None:
    reader = open_reader(spec)
    start = (1 << 20) + 70_050
    buffer = bytearray(DISK_BYTES - start)
    reader.read_into(start, memoryview(buffer))
    assert buffer == disk.read_bytes()[start:]
    with pytest.raises(DiskReadFailed, match="passed already"):
        reader.read_into(0, memoryview(bytearray(1)))
    reader.close()


# ── URLs ─────────────────────────────────────────────────────────────────────────────────────────────────────────────


def lease_of(*urls: tuple[str, str]) -> Any:
    options = SimpleNamespace(verify_tls=True, fingerprint_sha256="AB")
    session: Any = SimpleNamespace(host="vcenter.test", port=8443, options=options, cookie="vmware_soap_session=x")
    lease = ExportLease(session, "snapshot-1")
    lease._urls = [SimpleNamespace(key=key, url=url, sslThumbprint="") for key, url in urls]
    return lease


class VirtualDisk(SimpleNamespace):
    pass


class ParaVirtualSCSIController(SimpleNamespace):
    pass


DEVICES = [
    ParaVirtualSCSIController(key=1000, busNumber=0),
    *(
        VirtualDisk(
            key=2000 + unit, controllerKey=1000, unitNumber=unit, capacityInBytes=512, backing=SimpleNamespace(fileName="f")
        )
        for unit in range(2)
    ),
]


def test_no_host_but_the_platform_is_shown_our_session() -> None:
    key = "/vm-1/ParaVirtualSCSIController0:1"
    own = lease_of((key, "https://*/nfc/1/disk-0.vmdk")).disk(DEVICES[2], DEVICES)
    assert (own.host, own.port, own.target) == ("vcenter.test", 8443, "/nfc/1/disk-0.vmdk")
    assert (own.cookie, own.fingerprint_sha256) == ("vmware_soap_session=x", "AB")
    other = lease_of((key, "https://esxi.test/nfc/1/disk-0.vmdk?a=b")).disk(DEVICES[2], DEVICES)
    assert (other.host, other.port, other.target) == ("esxi.test", 443, "/nfc/1/disk-0.vmdk?a=b")
    assert (other.cookie, other.fingerprint_sha256) == ("", None)


def test_a_disk_that_the_lease_has_not_is_refused_rather_than_guessed() -> None:
    two = lease_of(("/vm-1/x", "https://*/1"), ("/vm-1/y", "https://*/2"))
    with pytest.raises(UnsupportedFormat, match="ParaVirtualSCSIController0:0"):
        two.disk(DEVICES[1], DEVICES)
    assert lease_of(("/vm-1/x", "https://*/1")).disk(DEVICES[1], DEVICES[:2]).target == "/1"
    for url in ("http://*/1", "https:///1", "https://u:p@h/1"):
        with pytest.raises(UnsupportedFormat, match="HTTPS"):
            lease_of(("/vm-1/x", url)).disk(DEVICES[1], DEVICES[:2])


# ── whole jobs ───────────────────────────────────────────────────────────────────────────────────────────────────────


class LeaseHouse(VimHouse):
    async def connect(self, kind: Any, source_id: Any) -> Any:
        return VimApi(by_lease(self.vcenter))


@pytest.fixture
def house(tmp_path: Path, platform: VCenter) -> Iterator[LeaseHouse]:
    folder = tmp_path / "house"
    folder.mkdir()
    with contextlib.closing(LeaseHouse(folder, platform)) as made:
        yield made


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


@pytest.fixture
def by_any_way(tmp_path: Path, platform: VCenter) -> Iterator[VimHouse]:
    folder = tmp_path / "any"
    folder.mkdir()
    with contextlib.closing(VimHouse(folder, platform)) as made:
        yield made


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
    with busy_guest(platform):
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
    argv = [sys.executable, "-m", "tests.live.lease_service", str(house.folder), str(job.id)]
    argv += [platform.url, platform.fingerprint, platform._control]
    with forked.Popen(argv, cwd=Path(__file__).parents[2], start_new_session=True) as service:
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
