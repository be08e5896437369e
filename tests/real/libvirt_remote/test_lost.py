"""What is lost on a real libvirt host between two passes, and what belongs to somebody else."""

import asyncio
import json
import os
import random
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest

from synvirt.errors import (
    CbtReset,
    SnapshotFailed,
    SourceUnreachable,
    SynvirtError,
)
from synvirt.kvm.library import TAKEN_UP_HINT
from synvirt.live import GuestStaysOn, LiveAdapter
from synvirt.live.folder import sweep_folders
from synvirt.live.libvirt import backup
from synvirt.live.libvirt.adapter import PROBE
from synvirt.live.libvirt.domain import start_to_read
from synvirt.sizes import MIB
from tests.real.libvirt_remote.one_job import OneJob, ask, inspected, local
from tests.running.processes import command_line, is_ssh
from tests.servers.libvirt_lab import LibvirtLab, until

# ── what is lost, or somebody else's ────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("ours", [False, True])
def test_another_backup_job_is_reported_at_once_and_left_alone(host: LibvirtLab, domain: Any, ours: bool) -> None:
    """libvirt itself would let us wait for 30 s, and then say something about a lock."""
    export = f"synvirt-{uuid4()}-1-vda" if ours else "backup-of-others"
    domain.backupBegin(
        f"<domainbackup mode='pull'><server transport='unix' socket='{host.folder}/{uuid4().hex}'/><disks>"
        f"<disk name='vda' backup='yes' type='file' exportname='{export}'>"
        f"<scratch file='{host.folder}/{uuid4().hex}'/></disk></disks></domainbackup>",
        None,
        0,
    )
    name = f"synvirt-{uuid4()}-1"
    with pytest.raises(SnapshotFailed, match="another backup job"):
        local(host, lambda adapter: adapter.snapshot(domain.UUIDString(), name))
    local(host, lambda adapter: adapter.cleanup(domain.UUIDString(), name))
    assert len(host.snapshots(domain)) == 1
    domain.abortJob()


def test_bitmaps_survive_a_guest_that_is_restarted(host: LibvirtLab, domain: Any) -> None:
    job = OneJob(host, domain)
    job.pass_(1, since=None)
    host.write(domain, "vda", MIB, b"before the restart")
    domain.destroyFlags(1)
    domain.create()
    host.write(domain, "vda", 5 * MIB, b"after the restart")
    assert 0 < job.pass_(2, since=1) <= 2 * 65536
    assert job.copy == host.content(domain, "vda")
    job.clean()


def test_a_bitmap_is_lost_when_qemu_is_killed(host: LibvirtLab, domain: Any) -> None:
    """«checkpoint inconsistent: missing or broken bitmap»: told as a reset, and the whole disk can be read at once."""
    job = OneJob(host, domain)
    job.pass_(1, since=None)
    host.kill(domain)
    domain.create()
    host.write(domain, "vda", 5 * MIB, b"after the crash")
    job.begin(2)
    with pytest.raises(CbtReset, match="bitmap lost"):
        job.read(2, since=1)
    job.read(2, since=None)
    assert job.copy == host.content(domain, "vda")
    local(host, lambda adapter: adapter.release(job.vm_id, f"{job.name}-2"))
    # Tracking has started over.
    host.write(domain, "vda", 2 * MIB, b"later")
    assert 0 < job.pass_(3, since=2) <= 65536
    assert job.copy == host.content(domain, "vda")
    job.clean()


def test_a_snapshot_that_died_with_qemu_is_gone_and_can_be_taken_again(host: LibvirtLab, domain: Any) -> None:
    job = OneJob(host, domain)
    job.pass_(1, since=None)
    job.begin(2)
    host.write(domain, "vda", MIB, bytes(range(256)) * 4096)  # into the scratch file
    host.kill(domain)
    # libvirt removes it, unless it was away itself when QEMU ended.
    (host.folder / "scratch" / f"{job.name}-2-vda.scratch").touch()
    with pytest.raises(SnapshotFailed, match="no longer exists"):
        job.read(2, since=1)
    local(host, lambda adapter: adapter.cleanup(job.vm_id, f"{job.name}-2"))
    assert list((host.folder / "scratch").glob(f"{job.name}-2-*.scratch")) == []
    job.begin(2)
    with pytest.raises(CbtReset):
        job.read(2, since=1)
    job.read(2, since=None)
    assert job.copy == host.content(domain, "vda")
    job.clean()


def test_a_pass_outlives_its_libvirtd(host: LibvirtLab, domain: Any) -> None:
    job = OneJob(host, domain)
    job.pass_(1, since=None)
    host.write(domain, "vda", MIB, b"changed")
    job.begin(2)
    host.stop_libvirtd()
    host.start_libvirtd()
    job.domain = host.connection.lookupByUUIDString(job.vm_id)
    assert 0 < job.read(2, since=1) <= 65536
    assert job.copy == host.content(job.domain, "vda")
    job.clean()


def test_a_way_that_is_closed_for_a_while_costs_no_snapshot(host: LibvirtLab, domain: Any) -> None:
    job = OneJob(host, domain)
    job.begin(1)
    socket = host.folder / "scratch" / f"{job.name}-1.sock"
    away = socket.rename(socket.with_suffix(".away"))
    with pytest.raises(SourceUnreachable, match="not served"):
        job.read(1, since=None)
    away.rename(socket)
    job.read(1, since=None)
    assert job.copy == host.content(domain, "vda")
    job.clean()


def test_the_last_delta_is_read_of_a_guest_that_is_off(host: LibvirtLab, domain: Any) -> None:
    """Started, and not run: so the bitmap that QEMU saved is at hand; and off again."""
    job = OneJob(host, domain)
    job.pass_(1, since=None)
    host.write(domain, "vda", 3 * MIB, b"its last words")
    local(host, lambda adapter: adapter.shutdown(job.vm_id))
    job.begin(2)
    assert inspected(host, domain).power_state == "off"
    assert domain.isActive()
    assert 0 < job.read(2, since=1) <= 65536
    local(host, lambda adapter: adapter.release(job.vm_id, f"{job.name}-2"))
    assert not domain.isActive()
    assert job.copy == host.content(domain, "vda")
    job.clean()
    assert not domain.isActive()
    assert "synvirt" not in domain.XMLDesc(0)


@pytest.mark.parametrize("end", ["release", "cleanup"])
def test_a_guest_that_was_started_to_see_whether_it_can_be_tracked_is_off_again(
    host: LibvirtLab, domain: Any, end: str
) -> None:
    """A service was killed in that moment: its note and its checkpoint are ours, whatever the next snapshot is called."""
    domain.destroy()
    start_to_read(domain, PROBE)
    domain.checkpointCreateXML(f"<domaincheckpoint><name>{PROBE}</name></domaincheckpoint>", 0)
    if end == "release":
        job = OneJob(host, domain)  # tracks its changes, though the checkpoint is there
        job.pass_(1, since=None)
        assert not domain.isActive()
        job.clean()
    else:
        local(host, lambda adapter: adapter.cleanup(domain.UUIDString(), f"synvirt-{uuid4()}-1"))
    assert not domain.isActive()
    assert domain.listAllCheckpoints(0) == []
    assert "synvirt" not in domain.XMLDesc(0)


@pytest.mark.parametrize("paused", [False, True])
def test_a_guest_that_is_held_is_asked_and_not_powered_off(host: LibvirtLab, domain: Any, paused: bool) -> None:
    """It has no system that would hear the power button; or it stands still, and hears nothing."""
    if paused:
        domain.suspend()
    vm_id = domain.UUIDString()

    async def use(adapter: LiveAdapter) -> None:
        with pytest.raises(GuestStaysOn, match="still runs"):
            await adapter.shutdown(vm_id, "hold")
        assert domain.isActive()
        await adapter.shutdown(vm_id, "force")
        assert not domain.isActive()
        await adapter.shutdown(vm_id, "hold")  # it is off: all is done

    local(host, use, shutdown_timeout_s=1)


def last_start(host: LibvirtLab, domain: Any) -> str:
    return local(host, lambda adapter: adapter.last_start(domain.UUIDString()))


def test_a_domain_that_is_held_was_not_started_by_a_libvirt_that_is(host: LibvirtLab, domain: Any) -> None:
    job = OneJob(host, domain)
    local(host, lambda adapter: adapter.shutdown(job.vm_id))
    job.begin(1)
    before = last_start(host, domain)
    host.stop_libvirtd()
    host.start_libvirtd()
    job.domain = again = host.connection.lookupByUUIDString(job.vm_id)
    assert last_start(host, again) == before
    job.read(1, since=None)
    assert last_start(host, again) == before
    local(host, lambda adapter: adapter.release(job.vm_id, f"{job.name}-1"))
    assert last_start(host, again) != before, "nobody would know of a start from here on"
    job.clean()


def test_an_operator_who_resumes_the_guest_is_believed(host: LibvirtLab, domain: Any) -> None:
    job = OneJob(host, domain)
    local(host, lambda adapter: adapter.shutdown(job.vm_id))
    job.begin(1)
    held = last_start(host, domain)
    domain.resume()
    assert inspected(host, domain).power_state == "on"
    # It stands still again, for a reason of theirs: what it has in memory must not be lost.
    until(lambda: domain.blockStats("vda")[0] > 0)
    domain.suspend()
    assert last_start(host, domain) != held
    manifest = inspected(host, domain)
    assert manifest.power_state == "suspended"
    assert [(one.id, one.category) for one in manifest.concerns] == [("suspended", "Critical")]
    local(host, lambda adapter: adapter.release(job.vm_id, f"{job.name}-1"))
    assert domain.isActive()
    job.clean()
    assert domain.isActive()


def test_disks_that_come_and_grow_are_seen(host: LibvirtLab, domain: Any) -> None:
    extra = host.disk("2M")
    domain.attachDevice(
        f"<disk type='file' device='disk'><driver name='qemu' type='qcow2'/><source file='{extra}'/>"
        "<target dev='vdb' bus='virtio'/></disk>"
    )
    domain.blockResize("vda", 16 * MIB, 1)
    assert {disk.key: disk.capacity_bytes for disk in inspected(host, domain).disks} == {"vda": 16 * MIB, "vdb": 2 * MIB}


def test_a_moved_vm_does_not_start_by_itself(host: LibvirtLab, domain: Any) -> None:
    domain.setAutostart(1)
    local(host, lambda adapter: adapter.mark(domain.UUIDString(), "migrated to web <42> & more"))
    assert not domain.autostart()
    assert "migrated to web &lt;42&gt; &amp; more" in domain.XMLDesc(2)


# ── who may not come in, and who is killed ──────────────────────────────────────────────────────────────

_HELD = """\
import asyncio, json, sys, time
from synvirt.live import SourceAccess
from synvirt.live.libvirt.adapter import libvirt_remote
async def hold():
    given = json.loads(sys.stdin.readline())
    adapter = libvirt_remote(SourceAccess(given["endpoint"], given["credentials"], given["options"]))
    await adapter.connect()
    snapshot = await adapter.snapshot(given["vm_id"], given["name"])
    disk = (await adapter.inspect(given["vm_id"])).disks[0]
    spec = await adapter.open_disk(given["vm_id"], snapshot, disk, None)
    print(spec.uri.partition("socket=")[2], flush=True)
    time.sleep(100)
asyncio.run(hold())
"""


def test_a_backup_that_is_just_beginning_is_waited_for(host: LibvirtLab, domain: Any) -> None:
    """A service was killed as soon as it had asked: libvirt begins it all the same, after we have looked."""
    name = f"synvirt-{uuid4()}-1"
    with ThreadPoolExecutor(1) as killed:
        beginning = killed.submit(backup.begin, domain, name, backup.Server(str(host.folder / "scratch")), track=["vda"])
        until(lambda: beginning.done() or domain.listAllCheckpoints(0))
        local(host, lambda adapter: adapter.cleanup(domain.UUIDString(), name))
        beginning.result()
    assert host.snapshots(domain) == []


def test_a_backup_that_its_libvirtd_lost_as_it_began_is_named(host: LibvirtLab, domain: Any) -> None:
    """libvirt 9.0 holds its lock, and neither goes on with it nor ends it."""
    record = host.folder / "run/qemu" / f"{domain.name()}.xml"
    host.stop_libvirtd()
    before, monitor, after = record.read_text().partition("<monitor ")
    job = f"<job type='none' async='backup' flags='0x0' asyncStarted='{time.time_ns() // 1_000_000}'/>"
    record.write_text(f"{before}{job}{monitor}{after}")
    host.start_libvirtd()
    domain = host.connection.lookupByUUIDString(domain.UUIDString())
    name = f"synvirt-{uuid4()}-1"
    with pytest.raises(SourceUnreachable, match="cannot acquire state change lock") as found:
        local(host, lambda adapter: adapter.snapshot(domain.UUIDString(), name))
    assert found.value.hint == TAKEN_UP_HINT
    # As the hint says.
    domain.destroy()
    host.stop_libvirtd()
    host.start_libvirtd()
    domain = host.connection.lookupByUUIDString(domain.UUIDString())
    domain.create()
    assert local(host, lambda adapter: adapter.snapshot(domain.UUIDString(), name)).id == name
    local(host, lambda adapter: adapter.cleanup(domain.UUIDString(), name))
    assert host.snapshots(domain) == []


def test_nothing_of_a_killed_service_stays(host: LibvirtLab, domain: Any) -> None:
    """Its tunnels end with it, its secrets go at the next start of a service, and its snapshot is found again by name."""
    access, name = host.access("ssh"), f"synvirt-{uuid4()}-1"
    given = {
        "endpoint": access.endpoint,
        "credentials": dict(access.credentials),
        "options": dict(access.options),
        "vm_id": domain.UUIDString(),
        "name": name,
    }
    with subprocess.Popen([sys.executable, "-c", _HELD], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as child:
        assert child.stdin is not None
        assert child.stdout is not None
        child.stdin.write(json.dumps(given) + "\n")
        child.stdin.flush()
        folder = Path(child.stdout.readline().strip()).parent
        assert (folder / "key").stat().st_mode & 0o777 == 0o600
        assert folder.stat().st_mode & 0o777 == 0o700
        child.kill()
    until(lambda: not _tunnels(folder))
    assert host.snapshots(domain) == [name]
    found = ask(access, lambda adapter: adapter.snapshot(domain.UUIDString(), name))
    assert found.id == name
    sweep_folders()
    assert not folder.exists()
    ask(access, lambda adapter: adapter.cleanup(domain.UUIDString(), name))
    assert host.snapshots(domain) == []


def _tunnels(folder: Path) -> list[str]:
    lines = [command_line(int(entry.name)) for entry in Path("/proc").glob("[0-9]*")]
    return [line for line in lines if is_ssh(line) and str(folder) in line]


def test_a_domain_that_was_removed_has_nothing_left(host: LibvirtLab, domain: Any) -> None:
    """Its owner does so as soon as it runs elsewhere; libvirt was away when its QEMU ended."""
    name, vm_id = f"synvirt-{uuid4()}-1", domain.UUIDString()
    local(host, lambda adapter: adapter.snapshot(vm_id, name))
    domain.destroy()
    domain.undefine()
    left = host.folder / "scratch" / f"{name}-vda.scratch"
    left.touch()
    for _ in range(2):
        local(host, lambda adapter: adapter.cleanup(vm_id, name))
        local(host, lambda adapter: adapter.mark(vm_id, "migrated to web (42)"))
    assert not left.exists()


def test_a_lost_session_is_reported_and_a_new_one_goes_on(host: LibvirtLab, domain: Any) -> None:
    name = f"synvirt-{uuid4()}-1"

    async def use(adapter: LiveAdapter) -> None:
        await adapter.snapshot(domain.UUIDString(), name)
        for entry in Path("/proc").glob("[0-9]*"):
            line = command_line(int(entry.name))
            if is_ssh(line) and f"-p {host.ssh_port}" in line:
                os.kill(int(entry.name), signal.SIGKILL)
        await asyncio.sleep(0.2)
        with pytest.raises(SourceUnreachable):
            await adapter.inspect(domain.UUIDString())

    ask(host.access("ssh"), use)
    assert ask(host.access("ssh"), lambda adapter: adapter.snapshot(domain.UUIDString(), name)).id == name
    ask(host.access("ssh"), lambda adapter: adapter.cleanup(domain.UUIDString(), name))


def test_a_scratch_folder_that_runs_full_costs_the_snapshot_and_not_the_guest(host: LibvirtLab, domain: Any) -> None:
    """QEMU would let the guest's own writes fail."""
    small, name = host.folder / "small", f"synvirt-{uuid4()}-1"
    host.write(domain, "vda", 0, random.Random(1).randbytes(8 * MIB))

    async def use(adapter: LiveAdapter) -> None:
        snapshot = await adapter.snapshot(domain.UUIDString(), name)
        disk = (await adapter.inspect(domain.UUIDString())).disks[0]
        await adapter.open_disk(domain.UUIDString(), snapshot, disk, None)
        (small / "other").write_bytes(bytes(10 * MIB))
        await asyncio.to_thread(until, lambda: host.snapshots(domain) == [])
        with pytest.raises(SnapshotFailed, match="lacked room"):
            await adapter.open_disk(domain.UUIDString(), snapshot, disk, None)
        host.write(domain, "vda", 0, random.Random(2).randbytes(6 * MIB))
        with pytest.raises(SnapshotFailed, match=r"bytes free, and 8388608 are needed"):
            await adapter.snapshot(domain.UUIDString(), name)
        await adapter.cleanup(domain.UUIDString(), name)

    try:
        local(host, use, scratch_dir=str(small))
    finally:
        (small / "other").unlink(missing_ok=True)
    assert host.content(domain, "vda")[: 6 * MIB] == random.Random(2).randbytes(6 * MIB)
    assert host.snapshots(domain) == []


def test_a_folder_that_is_theirs_stays_as_it_is(host: LibvirtLab, domain: Any) -> None:
    """Its mode, and a pool over it: libvirt would set the first again, and allows no second one."""
    small, name = host.folder / "small", f"synvirt-{uuid4()}-1"
    small.chmod(0o1777)
    pool = host.connection.storagePoolDefineXML(
        f"<pool type='dir'><name>images-{uuid4().hex[:8]}</name><target><path>{small}</path></target></pool>", 0
    )

    async def taken(adapter: LiveAdapter) -> None:
        await adapter.snapshot(domain.UUIDString(), name)
        await adapter.cleanup(domain.UUIDString(), name)

    try:
        for active in (False, True):
            if active:
                pool.create(0)
            local(host, taken, scratch_dir=str(small))
            assert small.stat().st_mode & 0o7777 == 0o1777
        (small / "other").write_bytes(bytes(10 * MIB))
        left = small / f"{name}-vda.scratch"
        left.touch()
        with pytest.raises(SnapshotFailed, match=r"bytes free, and 8388608 are needed"):
            local(host, taken, scratch_dir=str(small))
        local(host, lambda adapter: adapter.cleanup(domain.UUIDString(), name), scratch_dir=str(small))
        assert not left.exists()
        assert pool.isActive()
    finally:
        (small / "other").unlink(missing_ok=True)
        pool.destroy()
        pool.undefine()
    assert host.snapshots(domain) == []


def test_a_host_without_room_is_reported(host: LibvirtLab, domain: Any) -> None:
    """A scratch folder that cannot be made, nor written."""
    with pytest.raises(SynvirtError) as reported:
        local(
            host,
            lambda adapter: adapter.snapshot(domain.UUIDString(), f"synvirt-{uuid4()}-1"),
            scratch_dir="/proc/synvirt",
        )
    assert reported.value.code == "E_MIG_SNAPSHOT_FAILED"
    assert host.snapshots(domain) == []
