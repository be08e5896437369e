"""vim_api against VMware's own simulator: the laws of LiveAdapter, then what it reports of VMs, privileges and sessions.

What this proves: the order of calls, VMware's types, the bytes. What it cannot: VMware's own change tracking, locks and speed.
"""

import asyncio
from pathlib import Path
from typing import Any

import pytest

from synvirt import __version__
from synvirt.live.vsphere.adapter import VimApi
from synvirt.live.vsphere.privileges import PRIVILEGES
from synvirt.model.machine import VmManifest
from tests.contracts.live import LiveCase, LiveContract
from tests.fakes.vcenter import DISK_BYTES, USER, VCenter
from tests.live.vsphere.api.asking import BLOCK, VM, ask, write

# The simulator is built by whoever comes first.
pytestmark = pytest.mark.timeout(600)


class TestLaws(LiveContract):
    @pytest.fixture
    def case(self, platform: VCenter, disk: Path) -> LiveCase:
        def restart() -> None:
            ask(platform.access(), lambda adapter: adapter.power_on(VM))
            ask(platform.access(), lambda adapter: adapter.shutdown(VM))

        return LiveCase(
            open=lambda: VimApi(platform.access()),
            vm_id=VM,
            content=disk.read_bytes,
            write=lambda offset, data: write(disk, offset, data),
            snapshots=platform.snapshots,
            lose_tracking=lambda: platform.control("reset", vm=VM),
            restart=restart,
            tracked_bytes=BLOCK,
        )


def test_the_inventory_is_listed_with_its_folders(platform: VCenter, disk: Path) -> None:
    rows = ask(platform.access(), lambda adapter: adapter.list_vms())
    # One walk for all VMs, one for their folders and one for their hosts, however many there are: none a VM.
    assert (platform.calls("CreateContainerView"), platform.calls("RetrievePropertiesEx")) == (3, 3)
    assert all(row.host for row in rows)
    assert (rows[0].vm_id, rows[0].name, rows[0].power_state, rows[0].folder) == (VM, "DC0_H0_VM0", "on", "DC0")
    assert rows[0].cpu_count == 1
    assert rows[0].memory_bytes == 32 << 20
    assert len(rows) == 2


def test_a_datastores_space_is_looked_at(platform: VCenter, disk: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the machine has that the tests run on: none is enough."""
    monkeypatch.setattr("synvirt.live.vsphere.concerns.LOW_SPACE", 2)
    monkeypatch.setattr("synvirt.live.vsphere.concerns.capacity_of", lambda _: 1 << 62)
    concerns = ask(platform.access(), lambda adapter: adapter.inspect(VM)).concerns
    assert "vim.store_full:LocalDS_0" in [concern.id for concern in concerns]


def test_folders_are_reported_but_for_those_that_nobody_named(platform: VCenter, disk: Path) -> None:
    """One that somebody did call «vm», and one with a slash."""

    async def use(adapter: VimApi) -> str:
        session = adapter._session

        def moved(content: Any) -> None:
            folder = session.properties(session.machine(VM), ("parent",), what="look")["parent"]
            for name in ("vm", "a%2fb"):
                folder = folder.CreateFolder(name)
            session.wait(folder.MoveIntoFolder_Task([session.machine(VM)]), what="move", timeout_s=20)

        await asyncio.to_thread(session.call, "move it", moved)
        return next(row.folder for row in await adapter.list_vms() if row.vm_id == VM)

    assert ask(platform.access(), use) == "DC0/vm/a/b"


def test_a_manifest_has_what_the_platform_knows(platform: VCenter, disk: Path) -> None:
    manifest = ask(platform.access(), lambda adapter: adapter.inspect(VM))
    assert (manifest.name, manifest.firmware, manifest.power_state) == ("DC0_H0_VM0", "bios", "on")
    assert manifest.host == "DC0_H0"
    assert (manifest.cpu_count, manifest.memory_bytes) == (1, 32 << 20)
    one = manifest.disks[0]
    assert (one.capacity_bytes, one.format, one.source_path) == (DISK_BYTES, "vmdk", "[LocalDS_0] DC0_H0_VM0/disk1.vmdk")
    assert one.bus == "scsi"
    assert not one.cbt_enabled
    assert manifest.nics[0].mac
    assert manifest.nics[0].model == "e1000"
    assert (manifest.cbt_available, manifest.cbt_reason) == (True, None)
    assert [concern.id for concern in manifest.concerns] == ["vim.read_by"]


def test_networks_and_names_are_reported_as_people_know_them(platform: VCenter, disk: Path) -> None:
    """A distributed port group, which its card knows by a key; one of NSX, which it knows by an id; a name with a slash."""

    async def renamed(adapter: VimApi) -> VmManifest:
        session = adapter._session
        await asyncio.to_thread(session.call, "rename it", lambda _: session.machine(VM).Rename_Task("web%2f01"))
        return await adapter.inspect(VM)

    before = platform.calls("RetrievePropertiesEx")
    assert ask(platform.access(), lambda adapter: adapter.inspect(VM)).nics[0].network == "DC0_DVPG0"
    assert platform.calls("RetrievePropertiesEx") - before <= 3  # not one a network, nor one a datastore
    platform.control("opaque", vm=VM, id="0f1e2d3c-nsx", name="segment %2f 12")
    one = ask(platform.access(), renamed)
    assert (one.name, one.nics[0].network) == ("web/01", "segment / 12")
    assert ask(platform.access(), lambda adapter: adapter.list_vms())[0].name == "web/01"


def test_a_network_that_is_not_for_us_to_see_is_reported_by_what_its_card_holds(
    platform: VCenter, disk: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("synvirt.live.vsphere.session.VimSession.each", lambda *_, **__: {})
    assert ask(platform.access(), lambda adapter: adapter.inspect(VM)).nics[0].network.startswith("dvportgroup-")


def test_privileges_are_asked_for_one_by_one(platform: VCenter) -> None:
    about = ask(platform.access(), lambda adapter: adapter.about())
    assert about.product == "VMware vCenter Server"
    assert [check.name for check in about.checks] == [f"privilege {name}" for name, _ in PRIVILEGES]


def test_a_privilege_that_is_missing_is_a_failed_check(platform: VCenter) -> None:
    platform.fault("HasPrivilegeOnEntities", "deny:VirtualMachine.State.CreateSnapshot")
    checks = ask(platform.access(), lambda adapter: adapter.about()).checks
    missing = [check for check in checks if not check.ok]
    assert [check.name for check in missing] == ["privilege VirtualMachine.State.CreateSnapshot"]
    assert USER in missing[0].detail
    assert "role" in str(missing[0].hint)


@pytest.mark.parametrize(
    ("denied", "options", "failed", "warned"),
    [
        ("Datastore.Browse", {}, [], ["Datastore.Browse"]),
        ("Datastore.Browse,VApp.Export", {}, ["Datastore.Browse"], []),
        ("VApp.Export", {}, [], []),
        ("Datastore.Browse", {"transport": "datastore"}, ["Datastore.Browse"], []),
        ("VApp.Export,Datastore.Browse", {"transport": "lease"}, ["VApp.Export"], []),
    ],
)
def test_without_files_an_export_lease_is_reported_as_the_way_that_is_left(
    platform: VCenter, denied: str, options: dict[str, str], failed: list[str], warned: list[str]
) -> None:
    platform.fault("HasPrivilegeOnEntities", f"deny:{denied}")
    access = platform.access(fingerprint_sha256=platform.fingerprint, **options)
    checks = ask(access, lambda adapter: adapter.about()).checks
    assert [check.name for check in checks if not check.ok] == [f"privilege {one}" for one in failed]
    warnings = [check for check in checks if check.warning]
    assert [check.name for check in warnings] == [f"privilege {one}" for one in warned]
    assert all(check.ok and "export lease" in check.detail and check.hint for check in warnings)


def test_a_host_that_does_not_tell_privileges_is_no_failure(platform: VCenter) -> None:
    platform.fault("HasPrivilegeOnEntities", "NotSupported")
    checks = ask(platform.access(), lambda adapter: adapter.about()).checks
    assert [(check.name, check.ok) for check in checks] == [("privileges", True)]


def test_closing_ends_the_session(platform: VCenter) -> None:
    ask(platform.access(), lambda adapter: adapter.list_vms())
    assert platform.sessions() == 0


def test_an_administrator_sees_whose_session_it_is(platform: VCenter) -> None:
    """As every client is listed in vCenter's monitor of sessions."""

    async def use(adapter: VimApi) -> str:
        session = adapter._session
        return str(
            await asyncio.to_thread(session.call, "say who we are", lambda one: one.sessionManager.currentSession.userAgent)
        )

    assert ask(platform.access(), use) == f"SynVirt/{__version__}"


def test_snapshots_of_the_operator_forbid_switching_the_tracking_on(platform: VCenter, disk: Path) -> None:
    async def theirs(adapter: VimApi) -> None:
        await adapter.snapshot(VM, "before the upgrade")

    ask(platform.access(), theirs)
    manifest = ask(platform.access(), lambda adapter: adapter.inspect(VM))
    assert [snapshot.name for snapshot in manifest.snapshots] == ["before the upgrade"]
    assert "snapshots" in str(manifest.cbt_reason)
    ask(platform.access(), lambda adapter: adapter.cleanup(VM, "synvirt-x-1"))
    assert platform.snapshots() == ["before the upgrade"]
