"""What goes wrong with other libvirt hosts, each with a real one: what cannot be tracked, what is lost, who may not come in."""

import asyncio
import json
import os
import random
import signal
import subprocess
import sys
from collections.abc import Awaitable, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import urlsplit
from uuid import uuid4

import pytest

from synvirt.disks.specs import NbdSpec
from synvirt.errors import (
    AuthFailed,
    BadRequest,
    CbtReset,
    CbtUnsupported,
    SnapshotFailed,
    SourceUnreachable,
    SynvirtError,
)
from synvirt.live import GuestStaysOn, LiveAdapter, SnapshotRef, SourceAccess
from synvirt.live.libvirt import backup
from synvirt.live.libvirt.adapter import FORM, PROBE, libvirt_remote
from synvirt.live.libvirt.domain import start_to_read
from synvirt.live.libvirt.host import Host
from synvirt.live.ssh import key_fingerprint
from synvirt.migrations.sources.probing import probe
from synvirt.model.machine import VmManifest
from synvirt.model.sources import SourceCheck
from synvirt.sizes import MIB
from synvirt.transport import tls
from tests.contracts.live import read
from tests.libvirt_lab import LibvirtLab, lab, until
from tests.processes import command_line

T = TypeVar("T")


@pytest.fixture(scope="module")
def host() -> Iterator[LibvirtLab]:
    with lab() as running:
        yield running


@pytest.fixture
def domain(host: LibvirtLab) -> Any:
    """It runs, from one qcow2 disk of 8 MiB."""
    made = host.domain(host.disk("8M"))
    made.create()
    return made


def ask(access: SourceAccess, use: Callable[[LiveAdapter], Awaitable[T]]) -> T:
    async def session() -> T:
        adapter = libvirt_remote(access)
        try:
            await adapter.connect()
            return await use(adapter)
        finally:
            await adapter.close()

    return asyncio.run(session())


def local(host: LibvirtLab, use: Callable[[LiveAdapter], Awaitable[T]], **options: Any) -> T:
    return ask(host.access("local", **options), use)


class OneJob:
    """The passes of a job that copies vda alone, as the engine makes them."""

    def __init__(self, host: LibvirtLab, domain: Any, **options: Any) -> None:
        self.host, self.domain, self.vm_id, self.options = host, domain, domain.UUIDString(), options
        self.name = f"synvirt-{uuid4()}"
        self.refs: dict[int, SnapshotRef] = {}
        self.copy: bytes | None = None
        self.ask(lambda adapter: adapter.enable_cbt(self.vm_id, ["vda"]))

    def ask(self, use: Callable[[LiveAdapter], Awaitable[T]]) -> T:
        return local(self.host, use, **self.options)

    def begin(self, number: int) -> None:
        self.refs[number] = self.ask(lambda adapter: adapter.snapshot(self.vm_id, f"{self.name}-{number}", ["vda"]))

    def read(self, number: int, *, since: int | None) -> int:
        """How many bytes of data came."""

        async def use(adapter: LiveAdapter) -> int:
            disk = (await adapter.inspect(self.vm_id)).disks[0]
            change_id = None if since is None else self.refs[since].change_ids[disk.key]
            spec = await adapter.open_disk(self.vm_id, self.refs[number], disk, change_id)
            self.copy, data_bytes = await asyncio.to_thread(read, spec, None if since is None else self.copy)
            return data_bytes

        return self.ask(use)

    def pass_(self, number: int, *, since: int | None) -> int:
        self.begin(number)
        data_bytes = self.read(number, since=since)
        self.ask(lambda adapter: adapter.release(self.vm_id, f"{self.name}-{number}"))
        return data_bytes

    def clean(self) -> None:
        for number in range(1, 10):
            self.ask(lambda adapter: adapter.cleanup(self.vm_id, f"{self.name}-{number}"))  # noqa: B023
        assert self.host.snapshots(self.domain) == []
        assert list((self.host.folder / "scratch").glob(f"{self.name}*.scratch")) == []


def inspected(host: LibvirtLab, domain: Any) -> VmManifest:
    return local(host, lambda adapter: adapter.inspect(domain.UUIDString()))


# ── what cannot be tracked ───────────────────────────────────────────────────────────────────────────────────────────


def test_a_raw_disk_cannot_be_tracked_and_can_be_copied(host: LibvirtLab) -> None:
    domain = host.domain(host.disk("8M"), host.disk("4M", "raw"))
    domain.create()
    host.write(domain, "vdb", MIB, b"raw data")
    manifest = inspected(host, domain)
    assert not manifest.cbt_available
    assert "vdb is raw" in str(manifest.cbt_reason)
    with pytest.raises(CbtUnsupported, match="vdb is raw"):
        local(host, lambda adapter: adapter.enable_cbt(domain.UUIDString(), ["vda", "vdb"]))
    name = f"synvirt-{uuid4()}-1"

    async def copied(adapter: LiveAdapter) -> bytes:
        snapshot = await adapter.snapshot(domain.UUIDString(), name)
        assert snapshot.change_ids == {}
        spec = await adapter.open_disk(domain.UUIDString(), snapshot, manifest.disks[1], None)
        return (await asyncio.to_thread(read, spec))[0]

    assert local(host, copied) == host.content(domain, "vdb")
    local(host, lambda adapter: adapter.cleanup(domain.UUIDString(), name))
    assert host.snapshots(domain) == []


def test_a_raw_disk_that_is_left_out_hinders_no_warm_copy_of_the_others(host: LibvirtLab) -> None:
    """Nor a large one, for which the scratch folder has no room: neither is held still, and neither is tracked."""
    raw, large = host.disk("4M", "raw"), host.disk("4G")
    domain = host.domain(host.disk("8M"), raw, large)
    domain.create()
    host.write(domain, "vda", MIB, b"before")
    manifest = inspected(host, domain)
    assert manifest.cbt_reason_without(["vdb"]) is None
    assert "vdb is raw" in str(manifest.cbt_reason_without([]))
    small = host.folder / "small"
    job = OneJob(host, domain, scratch_dir=str(small))
    job.pass_(1, since=None)
    host.write(domain, "vda", 2 * MIB, b"after")
    for key in ("vdb", "vdc"):
        host.write(domain, key, 0, b"not asked for")
    job.begin(2)
    assert [path.name for path in small.glob("*.scratch")] == [f"{job.name}-2-vda.scratch"]
    assert list(job.refs[2].change_ids) == ["vda"]
    assert 0 < job.read(2, since=1) <= 65536
    assert job.copy == host.content(domain, "vda")
    checkpoints = [one.getXMLDesc(0) for one in domain.listAllCheckpoints(0)]
    assert [xml.count("checkpoint='bitmap'") for xml in checkpoints] == [1, 1]
    job.clean()
    domain.destroyFlags(1)  # QEMU closes its images, and writes bitmaps down
    assert "bitmaps" not in subprocess.run(["qemu-img", "info", str(large)], capture_output=True, text=True, check=True).stdout


def test_the_first_version_of_qcow2_holds_no_bitmap(host: LibvirtLab) -> None:
    """Its XML does not tell, so it shows by trying; and nothing of the attempt is left."""
    domain = host.domain(host.disk("8M", "qcow2", "-o", "compat=0.10"))
    for running in (False, True):
        if running:
            domain.create()
        with pytest.raises(CbtUnsupported, match="qcow2 v2"):
            local(host, lambda adapter: adapter.enable_cbt(domain.UUIDString(), ["vda"]))
        assert host.snapshots(domain) == []
        assert bool(domain.isActive()) == running


def test_a_transient_domain_is_critical(host: LibvirtLab) -> None:
    manifest = inspected(host, host.domain(host.disk("8M"), transient=True))
    assert not manifest.cbt_available
    assert [(one.id, one.category) for one in manifest.concerns] == [("transient-domain", "Critical")]


def test_saved_memory_is_critical_and_never_used_up(host: LibvirtLab, domain: Any) -> None:
    domain.managedSave(0)
    manifest = inspected(host, domain)
    assert [(one.id, one.category) for one in manifest.concerns] == [("saved-memory", "Critical")]
    with pytest.raises(SnapshotFailed, match="saved memory"):
        local(host, lambda adapter: adapter.snapshot(domain.UUIDString(), f"synvirt-{uuid4()}-1"))
    assert domain.hasManagedSaveImage()


def test_drives_are_no_disks(host: LibvirtLab) -> None:
    """A CD-ROM is raw, and neither copied nor a reason to copy cold."""
    image = host.disk("1M", "raw")
    drive = (
        f"<disk type='file' device='cdrom'><driver name='qemu' type='raw'/><source file='{image}'/>"
        "<target dev='sdz' bus='sata'/><readonly/></disk><disk type='file' device='cdrom'><target dev='sdy' bus='sata'/></disk>"
    )
    domain = host.domain(host.disk("8M"), extra=drive)
    domain.create()
    assert [disk.key for disk in inspected(host, domain).disks] == ["vda"]
    job = OneJob(host, domain)
    job.pass_(1, since=None)
    host.write(domain, "vda", MIB, b"changed")
    assert 0 < job.pass_(2, since=1) <= 65536
    assert job.copy == host.content(domain, "vda")
    job.clean()


def test_a_snapshot_of_somebody_is_no_trap(host: LibvirtLab, domain: Any) -> None:
    """One that was there, and one that is made between two passes."""
    domain.snapshotCreateXML("<domainsnapshot><name>before-upgrade</name></domainsnapshot>", 0)
    assert [one.name for one in inspected(host, domain).snapshots] == ["before-upgrade"]
    job = OneJob(host, domain)
    job.pass_(1, since=None)
    host.write(domain, "vda", MIB, b"between the snapshots")
    domain.snapshotCreateXML("<domainsnapshot><name>after-upgrade</name></domainsnapshot>", 0)
    host.write(domain, "vda", 5 * MIB, b"after both")
    assert 0 < job.pass_(2, since=1) <= 2 * 65536
    assert job.copy == host.content(domain, "vda")
    job.clean()
    assert len(domain.listAllSnapshots(0)) == 2


def test_an_overlay_that_comes_and_goes_between_passes_is_no_trap(host: LibvirtLab, domain: Any) -> None:
    """A snapshot into a file of its own, and its commit: libvirt takes the bitmaps along."""
    import libvirt

    job = OneJob(host, domain)
    job.pass_(1, since=None)
    host.write(domain, "vda", MIB, b"into the old file")
    overlay = host.folder / "disks" / f"{uuid4().hex}.qcow2"
    disks = f"<disks><disk name='vda' snapshot='external'><source file='{overlay}'/></disk></disks>"
    domain.snapshotCreateXML(
        f"<domainsnapshot><name>theirs</name>{disks}</domainsnapshot>", libvirt.VIR_DOMAIN_SNAPSHOT_CREATE_DISK_ONLY
    )
    host.write(domain, "vda", 5 * MIB, b"into the overlay")
    assert 0 < job.pass_(2, since=1) <= 2 * 65536
    assert job.copy == host.content(domain, "vda")
    host.write(domain, "vda", 3 * MIB, b"before the commit")
    domain.blockCommit("vda", None, None, 0, libvirt.VIR_DOMAIN_BLOCK_COMMIT_ACTIVE)
    until(lambda: "ready='yes'" in domain.XMLDesc(0))
    domain.blockJobAbort("vda", libvirt.VIR_DOMAIN_BLOCK_JOB_ABORT_PIVOT)
    host.write(domain, "vda", 6 * MIB, b"after the commit")
    assert 0 < job.pass_(3, since=2) <= 3 * 65536
    assert job.copy == host.content(domain, "vda")
    job.clean()


# ── what is lost, or somebody else's ─────────────────────────────────────────────────────────────────────────────────


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


# ── who may not come in, and who is killed ───────────────────────────────────────────────────────────────────────────


def connect(access: SourceAccess) -> None:
    async def nothing(_: LiveAdapter) -> None:
        return None

    ask(access, nothing)


def changed(access: SourceAccess, **options: Any) -> SourceAccess:
    return replace(access, options={key: value for key, value in {**access.options, **options}.items() if value is not None})


def test_another_ssh_host_key_is_refused(host: LibvirtLab) -> None:
    line = f"[127.0.0.1]:{host.ssh_port} {(host.folder / 'ssh/client.pub').read_text()}"
    with pytest.raises(SourceUnreachable, match="does not have the expected host key") as refused:
        connect(host.access("ssh", known_hosts=line))
    assert "ssh-keyscan" in str(refused.value.hint)


def test_an_ssh_host_that_nobody_pinned_is_refused(host: LibvirtLab, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    with pytest.raises(SourceUnreachable, match="does not have the expected host key"):
        connect(changed(host.access("ssh"), known_hosts=None))
    connect(changed(host.access("ssh"), known_hosts=None, verify_tls=False))


def test_an_ssh_host_key_is_pinned_by_its_fingerprint(host: LibvirtLab) -> None:
    public = (host.folder / "ssh/host.pub").read_text().split()
    fingerprint = key_fingerprint(f"host {public[0]} {public[1]}")
    connect(changed(host.access("ssh"), known_hosts=None, fingerprint_sha256=fingerprint))
    with pytest.raises(SourceUnreachable, match="has no SSH host key with the pinned"):
        connect(changed(host.access("ssh"), known_hosts=None, fingerprint_sha256="00" * 32))
    lines: list[str] = []

    async def look(_: LiveAdapter) -> None:
        lines.extend(command_line(int(entry.name)) for entry in Path("/proc").glob("[0-9]*"))

    # Also where nothing else is checked: the pin decides, in the connection that is used.
    ask(changed(host.access("ssh"), known_hosts=None, fingerprint_sha256=fingerprint, verify_tls=False), look)
    ours = [line for line in lines if line.startswith("ssh ") and f"-p {host.ssh_port}" in line]
    assert ours
    assert all("StrictHostKeyChecking=yes" in line for line in ours)


def test_a_key_that_the_host_does_not_know_is_refused(host: LibvirtLab, tmp_path: Path) -> None:
    subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(tmp_path / "other")], check=True)
    with pytest.raises(AuthFailed) as refused:
        connect(host.access("ssh", credentials={"private_key": (tmp_path / "other").read_text()}))
    assert "PRIVATE" not in refused.value.detail
    with pytest.raises(AuthFailed, match=r"not a private key|refused"):
        connect(host.access("ssh", credentials={"private_key": "this is no key"}))


def test_a_passphrase_opens_the_key_and_is_in_no_argument(host: LibvirtLab, tmp_path: Path) -> None:
    key = tmp_path / "sealed"
    key.write_text((host.folder / "ssh/client").read_text())
    key.chmod(0o600)
    subprocess.run(["ssh-keygen", "-q", "-p", "-P", "", "-N", "open sesame", "-f", str(key)], check=True)
    seen: list[str] = []

    async def look(_: LiveAdapter) -> None:
        seen.extend(command_line(int(entry.name)) for entry in Path("/proc").glob("[0-9]*"))

    ask(host.access("ssh", credentials={"private_key": key.read_text(), "password": "open sesame"}), look)
    assert any(f"-p {host.ssh_port}" in line for line in seen)
    assert not any("sesame" in line or "PRIVATE" in line for line in seen)
    with pytest.raises(AuthFailed):
        connect(host.access("ssh", credentials={"private_key": key.read_text(), "password": "open barley"}))


def test_a_user_who_may_only_look_gets_a_hint(host: LibvirtLab) -> None:
    access = host.access("local")
    about = ask(
        replace(access, endpoint=access.endpoint.replace("libvirt-sock", "libvirt-sock-ro")), lambda adapter: adapter.about()
    )
    refused = [check for check in about.checks if not check.ok]
    assert [check.name for check in refused] == ["privileges"]
    assert "read only access" in refused[0].detail
    assert "read-only socket" in str(refused[0].hint)


def test_a_libvirt_that_is_not_there_is_reported_by_its_socket(host: LibvirtLab) -> None:
    access = host.access("ssh")
    with pytest.raises(SourceUnreachable, match="libvirt does not answer at /nowhere/sock"):
        connect(replace(access, endpoint=access.endpoint.replace(host.socket, "/nowhere/sock")))
    with pytest.raises(SourceUnreachable, match="accepts no connection on port 1"):
        connect(SourceAccess("qemu+tcp://127.0.0.1:1/system"))


def test_a_certificate_of_others_is_refused(host: LibvirtLab, tmp_path: Path) -> None:
    argv = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes", "-subj", "/CN=other"]
    subprocess.run([*argv, "-keyout", tmp_path / "k", "-out", tmp_path / "ca"], check=True, capture_output=True)
    good = host.access("tls")
    with pytest.raises(SourceUnreachable, match=r"not trusted|cannot be reached"):
        connect(replace(good, credentials={**good.credentials, "ca_certificate": (tmp_path / "ca").read_text()}))
    with pytest.raises(SourceUnreachable, match="not the pinned one"):
        connect(changed(good, fingerprint_sha256="00" * 32))


def test_a_pin_is_enough_and_is_the_disks_too(host: LibvirtLab, domain: Any) -> None:
    """No authority is known, and who signed is not asked; but whose certificate it is, of libvirt and of QEMU."""
    good, vm_id = host.access("tls"), domain.UUIDString()
    unsigned = replace(good, credentials={key: pem for key, pem in good.credentials.items() if key != "ca_certificate"})
    with pytest.raises(AuthFailed, match="ca_certificate is missing") as refused:
        connect(unsigned)
    assert "fingerprint_sha256" in str(refused.value.hint)
    pin = tls.look("127.0.0.1", host.tls_port).fingerprint

    async def copied(adapter: LiveAdapter) -> bytes:
        name = f"synvirt-{uuid4()}-1"
        try:
            snapshot = await adapter.snapshot(vm_id, name)
            disk = (await adapter.inspect(vm_id)).disks[0]
            return (await asyncio.to_thread(read, await adapter.open_disk(vm_id, snapshot, disk, None)))[0]
        finally:
            await adapter.cleanup(vm_id, name)

    content = host.content(domain, "vda")
    assert ask(changed(unsigned, verify_tls=False), copied) == content
    pinned = changed(unsigned, verify_tls=False, fingerprint_sha256=pin)
    assert ask(pinned, copied) == content
    assert ask(changed(unsigned, fingerprint_sha256=pin), copied) == content
    with pytest.raises(SourceUnreachable, match="certificate") as refused_name:
        connect(replace(pinned, endpoint=pinned.endpoint.replace("127.0.0.1", "localhost")))
    assert "made out to localhost" in str(refused_name.value.hint)
    host.renew_certificate()  # QEMU reads it for each job, libvirtd has read the one before
    with pytest.raises(SnapshotFailed, match="certificate") as other:
        ask(pinned, copied)
    assert "backup_tls_x509_cert_dir: the certificate must be the pinned one" in str(other.value.hint)
    assert ask(changed(good, fingerprint_sha256=pin), copied) == content, "its disks' was signed by who we trust"
    assert host.snapshots(domain) == []


def test_testing_a_host_shows_its_certificate(host: LibvirtLab) -> None:
    def tested(access: SourceAccess) -> dict[str, SourceCheck]:
        place, _, options = FORM.read(access)
        result = asyncio.run(probe(libvirt_remote(access), place.reach, options, deep=False, vm_id=None))
        return {check.name: check for check in result.checks}

    good = host.access("tls")
    shown = tested(good)["certificate"]
    pin = tls.look("127.0.0.1", host.tls_port).fingerprint
    assert f"SHA-256 {pin}, of CN=server, signed by CN=lab, valid until 20" in shown.detail
    assert all(check.ok for check in tested(changed(good, fingerprint_sha256=pin)).values())
    other = tested(changed(good, fingerprint_sha256="00" * 32))
    assert list(other) == ["address", "port", "certificate"]
    assert "not the pinned one" in other["certificate"].detail
    assert "of CN=server" in other["certificate"].detail


def test_disks_come_by_the_address_that_is_meant_for_them(host: LibvirtLab, domain: Any) -> None:
    """Another one of that host's; or all of them, and then by the endpoint's."""

    async def copied(adapter: LiveAdapter) -> bytes:
        snapshot = await adapter.snapshot(domain.UUIDString(), name)
        disk = (await adapter.inspect(domain.UUIDString())).disks[0]
        spec = await adapter.open_disk(domain.UUIDString(), snapshot, disk, None)
        assert isinstance(spec, NbdSpec)
        assert urlsplit(spec.uri).hostname == reached
        return (await asyncio.to_thread(read, spec))[0]

    for address in ("127.0.0.2", "0.0.0.0"):
        name, access = f"synvirt-{uuid4()}-1", host.access("tcp", nbd_address=address)
        reached = "127.0.0.1" if address == "0.0.0.0" else address
        assert ask(access, copied) == host.content(domain, "vda")
        ask(access, lambda adapter: adapter.cleanup(domain.UUIDString(), name))  # noqa: B023
    with pytest.raises(SnapshotFailed, match="Cannot assign requested address") as refused:
        ask(host.access("tcp", nbd_address="192.0.2.1"), copied)
    assert "options.nbd_address" in str(refused.value.hint)
    assert host.snapshots(domain) == []


def test_disks_come_in_the_clear_only_where_the_operator_says_so(host: LibvirtLab, domain: Any) -> None:
    access = host.access("tcp", allow_plain_nbd=False)
    about = ask(access, lambda adapter: adapter.about())
    assert [check.name for check in about.checks if not check.ok] == ["encryption"]
    with pytest.raises(SnapshotFailed, match="in the clear"):
        ask(access, lambda adapter: adapter.snapshot(domain.UUIDString(), f"synvirt-{uuid4()}-1"))
    assert host.snapshots(domain) == []


@pytest.mark.parametrize(
    "endpoint",
    ["qemu:///embed?root=/x", "qemu+ssh://-oProxyCommand=x/system", "qemu+ssh://user:secret@host/system", "qemu+ssh:///system"],
)
def test_endpoints_that_are_none_are_refused(endpoint: str) -> None:
    with pytest.raises(BadRequest) as refused:
        libvirt_remote(SourceAccess(endpoint))
    assert "secret" not in refused.value.detail


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
        asked = killed.submit(backup.begin, domain, name, backup.Server(str(host.folder / "scratch")), track=["vda"])
        until(lambda: asked.done() or domain.listAllCheckpoints(0))
        local(host, lambda adapter: adapter.cleanup(domain.UUIDString(), name))
        asked.result()
    assert host.snapshots(domain) == []


def test_nothing_of_a_killed_service_stays(host: LibvirtLab, domain: Any) -> None:
    """Its tunnels end with it; its secrets go with the next session; its snapshot is found again by name, and goes too."""
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
    assert not folder.exists()
    ask(access, lambda adapter: adapter.cleanup(domain.UUIDString(), name))
    assert host.snapshots(domain) == []


def _tunnels(folder: Path) -> list[str]:
    lines = [command_line(int(entry.name)) for entry in Path("/proc").glob("[0-9]*")]
    return [line for line in lines if line.startswith("ssh ") and str(folder) in line]


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


def test_a_socket_of_a_tunnel_never_leads_elsewhere(host: LibvirtLab) -> None:
    """One that was lost is made again by another name, and the next one has yet another."""
    place, login, options = FORM.read(host.access("ssh"))
    session = Host(place, login, options)
    session.open()
    try:
        seen = [session.forwarded(f"/there/{name}") for name in "ab"]
        session._tunnels["/there/a"].close()
        seen += [session.forwarded(f"/there/{name}") for name in "ac"]
        assert len(set(seen)) == 4
    finally:
        session.close()


def test_a_lost_session_is_reported_and_a_new_one_goes_on(host: LibvirtLab, domain: Any) -> None:
    name = f"synvirt-{uuid4()}-1"

    async def use(adapter: LiveAdapter) -> None:
        await adapter.snapshot(domain.UUIDString(), name)
        for entry in Path("/proc").glob("[0-9]*"):
            line = command_line(int(entry.name))
            if line.startswith("ssh ") and f"-p {host.ssh_port}" in line:
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
