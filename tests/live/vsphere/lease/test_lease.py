"""A lease: kept alive, waited for, given up, ended; and the URLs that it names."""

import asyncio
import os
import random
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from synvirt.disks.specs import LeaseSpec, ReaderSpec
from synvirt.errors import (
    AuthFailed,
    Internal,
    SourceUnreachable,
    UnsupportedFormat,
)
from synvirt.live import SourceAccess
from synvirt.live.vsphere.adapter import VimApi
from synvirt.live.vsphere.lease import ExportLease
from synvirt.live.vsphere.session import library
from tests.contracts.live import read
from tests.fakes.vcenter import DISK_BYTES, VCenter
from tests.live.vsphere.lease.lab import ask, by_lease, forgotten, opened
from tests.live.vsphere.test_vim_jobs import VM

pytestmark = pytest.mark.timeout(600)


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


def test_a_lease_whose_guard_could_not_be_started_is_asked_for_again(
    platform: VCenter, disk: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(_session: object) -> None:
        raise OSError("Cannot allocate memory")

    async def use(adapter: VimApi) -> ReaderSpec:
        with monkeypatch.context() as patched:
            patched.setattr("synvirt.live.vsphere.lease.LeaseGuard", full)
            with pytest.raises(OSError, match="allocate"):
                await opened(adapter)
        return await opened(adapter)

    assert isinstance(ask(by_lease(platform), use), LeaseSpec)
    assert platform.leases() == 0


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
