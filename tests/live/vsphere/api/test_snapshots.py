"""Snapshots, the change tracking and consolidation when something goes wrong."""

import asyncio
from collections.abc import Iterable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from synvirt.errors import AuthFailed, CbtReset, CbtUnsupported, Internal, SnapshotFailed, SourceUnreachable, VmNotFound
from synvirt.live.vsphere import changes as vim_changes
from synvirt.live.vsphere.adapter import VimApi
from synvirt.live.vsphere.session import library
from tests.fakes.vcenter import VCenter
from tests.live.vsphere.api.asking import VM, ask, opened, tracked

# The simulator is built by whoever comes first.
pytestmark = pytest.mark.timeout(600)


def test_a_task_that_fails_is_reported_with_the_platforms_words(platform: VCenter, disk: Path) -> None:
    platform.fault("PowerOffVM_Task", "task:SystemError")
    platform.fault("ShutdownGuest", "ToolsUnavailable")
    with pytest.raises(Internal, match="power it off"):
        ask(platform.access(), lambda adapter: adapter.shutdown(VM))
    platform.fault("ShutdownGuest", "ToolsUnavailable")
    ask(platform.access(), lambda adapter: adapter.shutdown(VM))
    assert ask(platform.access(), lambda adapter: adapter.inspect(VM)).power_state == "off"


@pytest.mark.parametrize(("kind", "message"), [("TaskInProgress", "TaskInProgress"), ("InvalidState", "present state")])
def test_a_vm_that_cannot_be_asked_now_is_not_powered_off_by_force(
    platform: VCenter, disk: Path, kind: str, message: str
) -> None:
    platform.fault("ShutdownGuest", kind)
    with pytest.raises(SourceUnreachable, match=message):
        ask(platform.access(), lambda adapter: adapter.shutdown(VM))
    assert platform.calls("PowerOffVM_Task") == 0
    assert platform.guest_writes(VM, 0, b"it still runs")


@pytest.mark.parametrize("kind", ["task:SnapshotFault", "task:SystemError", "SnapshotFault", "NoPermission"])
def test_a_snapshot_that_fails_leaves_none(platform: VCenter, disk: Path, kind: str) -> None:
    platform.fault("CreateSnapshot_Task", kind)
    with pytest.raises(AuthFailed if kind == "NoPermission" else SnapshotFailed):
        ask(platform.access(), lambda adapter: adapter.snapshot(VM, "synvirt-a-1"))
    assert platform.snapshots() == []
    assert ask(platform.access(), lambda adapter: adapter.snapshot(VM, "synvirt-a-1")).id


@pytest.mark.parametrize(("kind", "error"), [("GenericVmConfigFault", CbtReset), ("NotSupported", CbtUnsupported)])
def test_a_host_that_cannot_say_what_changed_leaves_the_whole_disk_to_be_compared(
    platform: VCenter, disk: Path, kind: str, error: type[Exception]
) -> None:
    async def use(adapter: VimApi) -> None:
        await tracked(adapter)
        _, since = await opened(adapter, "synvirt-a-1")
        await adapter.snapshot(VM, "synvirt-a-2")
        platform.fault("QueryChangedDiskAreas", kind)
        with pytest.raises(error):
            await opened(adapter, "synvirt-a-2", since)
        for name in ("synvirt-a-1", "synvirt-a-2"):
            await adapter.cleanup(VM, name)

    ask(platform.access(), use)


@pytest.mark.parametrize("kind", ["TaskInProgress", "HostNotConnected", "FileLocked"])
def test_a_platform_that_is_busy_is_no_failure_of_a_snapshot_or_of_the_tracking(
    platform: VCenter, disk: Path, kind: str
) -> None:
    async def use(adapter: VimApi) -> None:
        await tracked(adapter)
        platform.fault("CreateSnapshot_Task", kind)
        with pytest.raises(SourceUnreachable, match=kind):
            await adapter.snapshot(VM, "synvirt-a-1")
        _, since = await opened(adapter, "synvirt-a-1")
        platform.fault("QueryChangedDiskAreas", kind)
        with pytest.raises(SourceUnreachable, match=kind):
            await opened(adapter, "synvirt-a-2", since)
        platform.fault("RemoveSnapshot_Task", kind)
        with pytest.raises(SourceUnreachable, match=kind):
            await adapter.cleanup(VM, "synvirt-a-1")
        for name in ("synvirt-a-1", "synvirt-a-2"):
            await adapter.cleanup(VM, name)

    ask(platform.access(), use)
    assert platform.snapshots() == []


def test_a_guest_that_is_not_quiet_in_time_is_snapshot_as_it_is_and_a_busy_one_later(platform: VCenter, disk: Path) -> None:
    platform.control("tools", vm=VM)
    platform.fault("CreateSnapshot_Task", "Timedout", match=">true</quiesce>")
    assert ask(platform.access(), lambda adapter: adapter.snapshot(VM, "synvirt-a-1")).id
    platform.fault("CreateSnapshot_Task", "TaskInProgress", match=">true</quiesce>")
    with pytest.raises(SourceUnreachable):
        ask(platform.access(), lambda adapter: adapter.snapshot(VM, "synvirt-a-2"))
    assert platform.snapshots() == ["synvirt-a-1"]


@pytest.mark.parametrize(
    ("task", "waited"),
    [("VirtualMachine.consolidateDisks", 1), ("VirtualMachine.createSnapshot", 1), ("VirtualMachine.reconfigure", 0)],
)
def test_tasks_on_the_disks_that_run_already_are_waited_for(task: str, waited: int) -> None:
    calls: list[str] = []

    def properties(_: object, paths: Iterable[str], **__: object) -> dict[str, Any]:
        return {"recentTask": ["task-1"]} if "recentTask" in paths else {"info.descriptionId": task, "info.state": "running"}

    session: Any = SimpleNamespace(machine=str, properties=properties, wait=lambda one, **_: calls.append(one))
    vim_changes._let_tasks_end(session, VM)
    assert len(calls) == waited


def test_a_guest_that_cannot_be_quiesced_is_snapshot_as_it_is(platform: VCenter, disk: Path) -> None:
    platform.control("tools", vm=VM)
    platform.fault("CreateSnapshot_Task", "task:SnapshotFault", match=">true</quiesce>")
    assert ask(platform.access(), lambda adapter: adapter.snapshot(VM, "synvirt-a-1")).id
    assert platform.calls("CreateSnapshot_Task") == 2
    assert platform.snapshots() == ["synvirt-a-1"]


def test_the_tracking_that_was_reset_is_known_before_it_is_asked(platform: VCenter, disk: Path) -> None:
    async def use(adapter: VimApi) -> None:
        await tracked(adapter)
        _, since = await opened(adapter, "synvirt-a-1")
        platform.control("reset", vm=VM)
        before = platform.calls("QueryChangedDiskAreas")
        with pytest.raises(CbtReset, match="restarted its change tracking"):
            await opened(adapter, "synvirt-a-2", since)
        assert platform.calls("QueryChangedDiskAreas") == before

    ask(platform.access(), use)


def test_a_change_id_that_the_platform_does_not_know(platform: VCenter, disk: Path) -> None:
    async def use(adapter: VimApi) -> None:
        await tracked(adapter)
        _, since = await opened(adapter, "synvirt-a-1")
        with pytest.raises(CbtReset, match="FileFault"):
            await opened(adapter, "synvirt-a-2", since.partition("/")[0] + "/0")

    ask(platform.access(), use)


def test_a_snapshot_that_somebody_removed_is_to_be_taken_again(platform: VCenter, disk: Path) -> None:
    async def use(adapter: VimApi) -> None:
        snapshot = await adapter.snapshot(VM, "synvirt-a-1")
        one = (await adapter.inspect(VM)).disks[0]
        await adapter.cleanup(VM, "synvirt-a-1")
        with pytest.raises(SnapshotFailed, match="no longer exists"):
            await adapter.open_disk(VM, snapshot, one, None)

    ask(platform.access(), use)


def test_disks_that_need_it_are_consolidated(platform: VCenter, disk: Path) -> None:
    ask(platform.access(), lambda adapter: adapter.snapshot(VM, "synvirt-a-1"))
    ask(platform.access(), lambda adapter: adapter.cleanup(VM, "synvirt-a-1"))
    assert platform.calls("ConsolidateVMDisks_Task") == 0
    platform.control("unconsolidated", vm=VM)
    for _ in range(2):
        ask(platform.access(), lambda adapter: adapter.cleanup(VM, "synvirt-a-1"))
    assert platform.calls("ConsolidateVMDisks_Task") == 1


@pytest.mark.parametrize("kind", ["FileLocked", "task:SnapshotFault", "task:SystemError"])
def test_disks_that_cannot_be_consolidated_are_no_failure_and_tried_again(platform: VCenter, disk: Path, kind: str) -> None:
    """A backup tool that holds them harms no copy."""
    platform.control("unconsolidated", vm=VM)
    platform.fault("ConsolidateVMDisks_Task", kind)
    assert "vim.consolidation" in [one.id for one in ask(platform.access(), lambda adapter: adapter.inspect(VM)).concerns]
    ask(platform.access(), lambda adapter: adapter.snapshot(VM, "synvirt-a-1"))
    ask(platform.access(), lambda adapter: adapter.cleanup(VM, "synvirt-a-1"))
    assert platform.snapshots() == []
    ask(platform.access(), lambda adapter: adapter.cleanup(VM, "synvirt-a-1"))
    assert platform.calls("ConsolidateVMDisks_Task") == 2
    assert "vim.consolidation" not in [one.id for one in ask(platform.access(), lambda adapter: adapter.inspect(VM)).concerns]


def test_a_vm_that_is_gone_needs_no_cleanup(platform: VCenter) -> None:
    ask(platform.access(), lambda adapter: adapter.cleanup("vm-4711", "synvirt-a-1"))
    for use in (lambda adapter: adapter.shutdown("vm-4711"), lambda adapter: adapter.power_on("vm-4711")):
        with pytest.raises(VmNotFound):
            ask(platform.access(), use)


@pytest.mark.parametrize("reported", ["of the VM", "of snapshots alone"])
def test_a_disk_is_tracked_once_it_has_a_change_id(platform: VCenter, disk: Path, reported: str) -> None:
    """Whatever the VM is set to: somebody switched its tracking on, and no stun came; later a disk was added."""
    if reported == "of snapshots alone":
        platform.control("silent")

    async def use(adapter: VimApi) -> None:
        session = adapter._session
        spec = library().vim.vm.ConfigSpec(changeTrackingEnabled=True)
        await asyncio.to_thread(session.call, "track it", lambda _: session.machine(VM).ReconfigVM_Task(spec))
        for number in (1, 2):
            platform.add_disk(VM, bytes(1 << 20), place=number - 1)
            assert not (await adapter.inspect(VM)).disks[-1].cbt_enabled
            await tracked(adapter)
            disks = (await adapter.inspect(VM)).disks
            assert [one.cbt_enabled for one in disks] == [reported == "of the VM"] * number
            assert set((await adapter.snapshot(VM, f"synvirt-a-{number}")).change_ids) == {one.key for one in disks}
            await adapter.cleanup(VM, f"synvirt-a-{number}")
        before = platform.calls("CreateSnapshot_Task")
        await tracked(adapter)
        assert platform.calls("CreateSnapshot_Task") == before + (reported != "of the VM")

    ask(platform.access(), use)
    assert platform.snapshots() == []


async def switched_off(adapter: VimApi) -> str:
    """The VM is set to be tracked, and its first disk not to be: the disk's key."""
    session, vim = adapter._session, library().vim
    setting = vim.option.OptionValue(key="scsi0:0.ctkEnabled", value="FALSE")
    spec = vim.vm.ConfigSpec(changeTrackingEnabled=True, extraConfig=[setting])
    await asyncio.to_thread(session.call, "set it", lambda _: session.machine(VM).ReconfigVM_Task(spec))
    return (await adapter.inspect(VM)).disks[0].key


def test_a_disk_whose_tracking_is_switched_off_is_named_with_the_setting(platform: VCenter, disk: Path) -> None:
    platform.add_disk(VM, bytes(1 << 20), place=1)

    async def use(adapter: VimApi) -> None:
        key = await switched_off(adapter)
        manifest = await adapter.inspect(VM)
        reported = [str(one.cbt_reason) for one in manifest.disks]
        assert "is not tracked: scsi0:0.ctkEnabled is FALSE" in reported[0]
        assert reported[1] == "None"
        assert manifest.cbt_reason_without([key]) is None
        with pytest.raises(CbtUnsupported, match=r"scsi0:0\.ctkEnabled is FALSE") as refused:
            await tracked(adapter)
        assert manifest.disks[0].label in refused.value.detail
        assert manifest.disks[1].label not in refused.value.detail
        await adapter.enable_cbt(VM, [manifest.disks[1].key])

    ask(platform.access(), use)
    assert platform.snapshots() == []


def test_a_crash_while_the_tracking_is_switched_on_leaves_no_snapshot(platform: VCenter, disk: Path) -> None:
    platform.fault("RemoveSnapshot_Task", "SystemError")
    with pytest.raises(SourceUnreachable):
        ask(platform.access(), tracked)
    assert platform.snapshots() == ["synvirt-tracking"]
    ask(platform.access(), lambda adapter: adapter.cleanup(VM, "synvirt-a-1"))
    assert platform.snapshots() == []


def test_what_an_answer_about_changes_leaves_out_is_read() -> None:
    """An answer may begin behind what was asked for: nobody knows what is between."""

    def described(start: int, length: int, *areas: tuple[int, int]) -> Any:
        changed = [SimpleNamespace(start=at, length=size) for at, size in areas]
        return SimpleNamespace(startOffset=start, length=length, changedArea=changed)

    answers = iter([described(0, 1000, (100, 50)), described(1200, 800, (1500, 100)), described(2500, 9000)])
    machine = SimpleNamespace(QueryChangedDiskAreas=lambda **asked: next(answers))
    session: Any = SimpleNamespace(
        host="vc", machine=lambda vm: machine, snapshot=lambda name: name, call=lambda what, ask: ask(None)
    )
    disk = SimpleNamespace(key=2000, capacityInBytes=3000)
    areas = vim_changes._areas(session, VM, "snapshot-1", disk, "a/1")
    assert set(areas) == {(100, 50), (1000, 200), (1500, 100), (2000, 500)}
