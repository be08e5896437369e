"""What goes wrong on a node while disks are read: the guest is left alone, the error says it, and nothing stays behind."""

import asyncio
import os
import random
import signal
import subprocess
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import TypeVar
from uuid import uuid4

import pytest

from synvirt.disks import open_reader
from synvirt.errors import CbtReset, DiskReadFailed, SnapshotFailed, SourceUnreachable
from synvirt.live import SnapshotRef
from synvirt.live.proxmox import bitmaps
from synvirt.live.proxmox.adapter import PveApi
from synvirt.live.proxmox.cluster import Cluster
from synvirt.live.proxmox.reading import Reading
from synvirt.sizes import MIB
from tests.contracts.live import in_session, read
from tests.fakes.pve.cluster import Vm
from tests.needs import need
from tests.servers.libvirt_lab import until
from tests.servers.pve_lab import PveLab, pve_lab

T = TypeVar("T")


@pytest.fixture(scope="module")
def lab() -> Iterator[PveLab]:
    with pve_lab("pve1", "pve2") as running:
        yield running
        assert running.server.wrong == []


@pytest.fixture
def vm(lab: PveLab) -> Iterator[Vm]:
    vm = lab.vm("8M")
    lab.start(vm.vmid)
    lab.write(vm, "scsi0", 0, random.Random(5).randbytes(MIB))
    yield vm
    # Emulated, it takes some thousandths of a core even where it does nothing.
    lab.kill_all()


def ask(lab: PveLab, use: Callable[[PveApi], Awaitable[T]]) -> T:
    return in_session(lambda: PveApi(lab.access()), use)


async def copied(adapter: PveApi, vm: Vm, snapshot: SnapshotRef, since: str | None, onto: bytes | None = None) -> bytes:
    disk = (await adapter.inspect(str(vm.vmid))).disks[0]
    spec = await adapter.open_disk(str(vm.vmid), snapshot, disk, since)
    return (await asyncio.to_thread(read, spec, onto))[0]


def name() -> str:
    return f"synvirt-{uuid4()}-1"


def test_a_backup_at_the_same_time_disturbs_nobody(lab: PveLab, vm: Vm, tmp_path: Path) -> None:
    """QEMU's own backup job over the disk that is being read, as vzdump's is."""
    target, machine, ours, before = tmp_path / "backup.raw", lab.machines[vm.vmid], name(), lab.content(vm, "scsi0")
    subprocess.run(["truncate", "-s", "8M", target], check=True)

    async def use(adapter: PveApi) -> bytes:
        snapshot = await adapter.snapshot(str(vm.vmid), ours)
        lab.write(vm, "scsi0", 0, b"between the two")
        node = next(one["inserted"]["node-name"] for one in machine.ask("query-block") if one["qdev"] == "scsi0")
        file = {"driver": "file", "filename": str(target)}
        machine.ask("blockdev-add", **{"driver": "raw", "node-name": "backup", "file": file})
        machine.ask("blockdev-backup", **{"job-id": "vzdump", "device": node, "target": "backup", "sync": "full"})
        lab.write(vm, "scsi0", 4 * MIB, b"after both")
        copy = await copied(adapter, vm, snapshot, None)
        until(lambda: machine.ask("query-jobs") == [])
        return copy

    assert ask(lab, use) == before
    assert target.read_bytes()[:15] == b"between the two"
    assert target.read_bytes()[4 * MIB : 4 * MIB + 10] == bytes(10)
    machine.ask("blockdev-del", **{"node-name": "backup"})
    ask(lab, lambda adapter: adapter.cleanup(str(vm.vmid), ours))
    assert lab.leftovers(vm) == []


def test_who_has_backup_access_already_is_left_alone(lab: PveLab) -> None:
    """vzdump, or another tool: QEMU lets only one in. The disks are read all the same, by QEMU's own filters."""
    vm, ours = lab.vm("8M"), name()
    lab.with_access.add(vm.vmid)
    lab.start(vm.vmid)
    lab.write(vm, "scsi0", 0, b"before")
    access = lab.machines[vm.vmid].access
    assert access is not None
    access.active = "Proxmox"
    before = lab.content(vm, "scsi0")

    async def use(adapter: PveApi) -> bytes:
        snapshot = await adapter.snapshot(str(vm.vmid), ours)
        lab.write(vm, "scsi0", 0, b"after!")
        return await copied(adapter, vm, snapshot, None)

    assert ask(lab, use) == before
    ask(lab, lambda adapter: adapter.cleanup(str(vm.vmid), ours))
    assert access.active == "Proxmox"
    assert lab.leftovers(vm) == []


def test_a_backup_access_that_was_cut_off_in_the_middle_is_started_over(lab: PveLab, monkeypatch: pytest.MonkeyPatch) -> None:
    """As by kill -9 before any reader had its nodes' names: nothing was served yet."""
    vm, ours = lab.vm("8M", "8M"), name()
    lab.with_access.add(vm.vmid)
    lab.start(vm.vmid)
    access = lab.machines[vm.vmid].access
    assert access is not None

    def killed(*_: object) -> None:
        raise KeyboardInterrupt

    async def cut_off() -> None:
        adapter = PveApi(lab.access())
        await adapter.connect()
        with monkeypatch.context() as patched:
            patched.setattr(bitmaps, "_serve", killed)
            patched.setattr(Reading, "release", lambda *_: None)
            with pytest.raises(KeyboardInterrupt):
                await adapter.snapshot(str(vm.vmid), ours)
        await adapter.close()

    asyncio.run(cut_off())
    assert access.active == ours
    assert lab.leftovers(vm) != []
    lab.write(vm, "scsi0", 0, b"meanwhile")
    before = lab.content(vm, "scsi0")
    assert ask(lab, lambda adapter: _of_now(adapter, lab, vm, ours)) == before
    ask(lab, lambda adapter: adapter.cleanup(str(vm.vmid), ours))
    assert access.held == {}
    assert lab.leftovers(vm) == []


async def _of_now(adapter: PveApi, lab: PveLab, vm: Vm, ours: str) -> bytes:
    snapshot = await adapter.snapshot(str(vm.vmid), ours)
    lab.write(vm, "scsi0", 0, b"later")
    return await copied(adapter, vm, snapshot, None)


def test_a_full_scratch_folder_costs_us_the_snapshot_and_never_the_guest(lab: PveLab, vm: Vm) -> None:
    ours, small = name(), lab.folder / "small"
    small.mkdir()
    # What is mounted here is seen by QEMU and by the test; the node's own commands see the folder below it.
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1M", "tmpfs", str(small)], check=True)
    try:
        overlay = small / "overlay.qcow2"

        async def use(adapter: PveApi) -> None:
            subprocess.run(["qemu-img", "create", "-q", "-f", "qcow2", str(overlay), "8M"], check=True)
            (lab.folder / "pve1/scratch" / f"{ours}.scsi0.overlay").symlink_to(overlay)
            snapshot = await adapter.snapshot(str(vm.vmid), ours)
            for at in range(4):
                lab.write(vm, "scsi0", at * MIB, random.Random(at).randbytes(MIB))
            with pytest.raises((DiskReadFailed, SnapshotFailed)):
                await copied(adapter, vm, snapshot, None)

        ask(lab, use)
        assert lab.content(vm, "scsi0")[:MIB] == random.Random(0).randbytes(MIB)
        assert lab.status(vm.vmid) == "running"
        ask(lab, lambda adapter: adapter.cleanup(str(vm.vmid), ours))
        assert lab.leftovers(vm) == []
    finally:
        subprocess.run(["umount", "-l", str(small)], check=True)


def test_a_session_that_is_cut_off_is_taken_up_by_the_next(lab: PveLab, vm: Vm) -> None:
    """As after kill -9: nobody closed anything; the guest writes on meanwhile."""
    ours, before = name(), lab.content(vm, "scsi0")

    async def abandoned() -> SnapshotRef:
        adapter = PveApi(lab.access())
        await adapter.connect()
        snapshot = await adapter.snapshot(str(vm.vmid), ours)
        for node in adapter._nodes.values():
            node.close()
        return snapshot

    snapshot = asyncio.run(abandoned())
    lab.write(vm, "scsi0", 0, b"meanwhile")
    assert ask(lab, lambda adapter: copied(adapter, vm, snapshot, None)) == before
    ask(lab, lambda adapter: adapter.cleanup(str(vm.vmid), ours))
    assert lab.leftovers(vm) == []
    lab.write(vm, "scsi0", 0, b"and after")


def test_a_vm_that_moved_to_another_node_is_read_again_there(lab: PveLab, vm: Vm) -> None:
    job = uuid4()
    first, second = f"synvirt-{job}-1", f"synvirt-{job}-2"
    snapshot = ask(lab, lambda adapter: adapter.snapshot(str(vm.vmid), first))
    start = ask(lab, lambda adapter: adapter.last_start(str(vm.vmid)))
    lab.kill(vm.vmid)
    vm.node = "pve2"
    lab.start(vm.vmid)
    with pytest.raises(SnapshotFailed, match="moved to another node"):
        ask(lab, lambda adapter: copied(adapter, vm, snapshot, None))
    again = ask(lab, lambda adapter: adapter.snapshot(str(vm.vmid), second))
    with pytest.raises(CbtReset, match="what changed since"):
        ask(lab, lambda adapter: copied(adapter, vm, again, first))
    assert ask(lab, lambda adapter: copied(adapter, vm, again, None)) == lab.content(vm, "scsi0")
    assert ask(lab, lambda adapter: adapter.last_start(str(vm.vmid))) != start
    for one in (first, second):
        ask(lab, lambda adapter: adapter.cleanup(str(vm.vmid), one))  # noqa: B023
    assert lab.leftovers(vm) == []


def test_a_lock_is_waited_for_and_leaves_nothing(lab: PveLab, vm: Vm) -> None:
    vm.config["lock"] = "backup"
    with pytest.raises(SourceUnreachable, match=r"locked by Proxmox VE \(backup\)"):
        ask(lab, lambda adapter: adapter.snapshot(str(vm.vmid), name()))
    del vm.config["lock"]
    assert lab.leftovers(vm) == []


def test_a_vm_under_ha_stays_off_and_its_last_changes_are_known(lab: PveLab, vm: Vm) -> None:
    job, vm.ha = uuid4(), "started"
    first, second = f"synvirt-{job}-1", f"synvirt-{job}-2"

    async def full(adapter: PveApi) -> bytes:
        snapshot = await adapter.snapshot(str(vm.vmid), first)
        copy = await copied(adapter, vm, snapshot, None)
        await adapter.release(str(vm.vmid), first)
        return copy

    copy = ask(lab, full)
    lab.write(vm, "scsi0", 3 * MIB, b"the last words")
    ask(lab, lambda adapter: adapter.shutdown(str(vm.vmid)))
    assert vm.ha == "stopped"

    async def final(adapter: PveApi) -> tuple[bytes, int]:
        snapshot = await adapter.snapshot(str(vm.vmid), second)
        disk = (await adapter.inspect(str(vm.vmid))).disks[0]
        spec = await adapter.open_disk(str(vm.vmid), snapshot, disk, first)
        return await asyncio.to_thread(read, spec, copy)

    found, data_bytes = ask(lab, final)
    assert found == lab.content(vm, "scsi0")
    assert 0 < data_bytes <= 65536
    for one in (first, second):
        ask(lab, lambda adapter: adapter.cleanup(str(vm.vmid), one))  # noqa: B023
    assert lab.leftovers(vm) == []
    assert lab.servers() == []
    ask(lab, lambda adapter: adapter.power_on(str(vm.vmid)))
    assert vm.ha == "started"


def test_a_reader_that_is_killed_on_the_node_is_started_again(lab: PveLab) -> None:
    vm, ours = lab.vm("8M", fmt="qcow2"), name()

    async def use(adapter: PveApi) -> None:
        snapshot = await adapter.snapshot(str(vm.vmid), ours)
        disk = (await adapter.inspect(str(vm.vmid))).disks[0]
        spec = await adapter.open_disk(str(vm.vmid), snapshot, disk, None)
        for pid in lab.servers():
            os.kill(pid, signal.SIGKILL)
        with pytest.raises(SourceUnreachable):
            open_reader(spec)
        assert await copied(adapter, vm, snapshot, None) == lab.content(vm, "scsi0")
        await adapter.cleanup(str(vm.vmid), ours)

    ask(lab, use)
    assert lab.leftovers(vm) == []
    assert lab.servers() == []


@pytest.mark.parametrize("command", ["ls", "pkill"])
def test_what_is_left_on_a_node_is_not_forgotten_as_ssh_is_killed(
    lab: PveLab, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: str
) -> None:
    """By the kernel, as memory was short here: neither is the scratch folder missing, nor has the reader ended."""
    vm, ours, ssh, killed = lab.vm("8M", fmt="qcow2"), name(), tmp_path / "ssh", tmp_path / "killed"
    killed.touch()
    kill, run = f"case $* in *' -- '*' {command} '*) [ -e {killed} ] || kill -9 $$ ;; esac", need("ssh", "openssh-client")
    ssh.write_text(f'#!/bin/sh\n{kill}\nexec {run} "$@"\n')
    ssh.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)

    async def use(adapter: PveApi) -> None:
        snapshot = await adapter.snapshot(str(vm.vmid), ours)
        assert await copied(adapter, vm, snapshot, None) == lab.content(vm, "scsi0")
        killed.unlink()
        with pytest.raises(SourceUnreachable, match="ssh was ended by SIGKILL"):
            await adapter.cleanup(str(vm.vmid), ours)
        killed.touch()
        await adapter.cleanup(str(vm.vmid), ours)

    ask(lab, use)
    assert lab.leftovers(vm) == []
    assert lab.servers() == []


def test_a_guest_that_cannot_be_powered_off_runs_on_and_is_recorded(
    lab: PveLab, vm: Vm, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It does not shut down when it is asked, so it was stopped; then its node did not power it off."""
    job = uuid4()
    first, second = f"synvirt-{job}-1", f"synvirt-{job}-2"

    async def full(adapter: PveApi) -> bytes:
        copy = await copied(adapter, vm, await adapter.snapshot(str(vm.vmid), first), None)
        await adapter.release(str(vm.vmid), first)
        return copy

    def refuse(*_: object) -> None:
        raise SourceUnreachable("VM is locked (backup)")

    copy = ask(lab, full)
    with monkeypatch.context() as patched:
        patched.setattr(Cluster, "off_by_force", refuse)
        with pytest.raises(SourceUnreachable, match="locked"):
            ask(lab, lambda adapter: adapter.shutdown(str(vm.vmid), timeout_s=0.1))
    assert lab.machines[vm.vmid].ask("query-status")["status"] == "running"
    lab.write(vm, "scsi0", 3 * MIB, b"it went on")

    async def final(adapter: PveApi) -> bytes:
        found = await copied(adapter, vm, await adapter.snapshot(str(vm.vmid), second), first, copy)
        for one in (first, second):
            await adapter.cleanup(str(vm.vmid), one)
        return found

    assert ask(lab, final) == lab.content(vm, "scsi0")
    assert lab.leftovers(vm) == []


def test_what_a_bitmap_did_not_record_is_not_taken_for_unchanged(lab: PveLab, vm: Vm) -> None:
    """A service was killed while it read what changed until the guest's end, and the guest went on."""
    job = uuid4()
    first, second = f"synvirt-{job}-1", f"synvirt-{job}-2"

    async def cut_off(adapter: PveApi) -> None:
        await adapter.snapshot(str(vm.vmid), first)
        await adapter.release(str(vm.vmid), first)

    ask(lab, cut_off)
    machine, bitmap = lab.machines[vm.vmid], f"{first}.scsi0"
    nodes = machine.ask("query-named-block-nodes", flat=True)
    node = next(one["node-name"] for one in nodes for found in one.get("dirty-bitmaps", ()) if found["name"] == bitmap)
    machine.ask("stop")
    machine.ask("block-dirty-bitmap-disable", node=node, name=bitmap)
    ask(lab, lambda adapter: adapter.power_on(str(vm.vmid)))
    assert machine.ask("query-status")["status"] == "running"
    lab.write(vm, "scsi0", 3 * MIB, b"nobody records it")

    async def delta(adapter: PveApi) -> None:
        snapshot = await adapter.snapshot(str(vm.vmid), second)
        with pytest.raises(CbtReset):
            await copied(adapter, vm, snapshot, first)
        await adapter.release(str(vm.vmid), second)
        await adapter.shutdown(str(vm.vmid), timeout_s=0.1)
        with pytest.raises(CbtReset):
            await copied(adapter, vm, await adapter.snapshot(str(vm.vmid), f"synvirt-{job}-3"), first)
        for number in (1, 2, 3):
            await adapter.cleanup(str(vm.vmid), f"synvirt-{job}-{number}")

    ask(lab, delta)
    assert lab.leftovers(vm) == []
