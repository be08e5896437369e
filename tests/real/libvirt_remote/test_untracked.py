"""Disks and domains of a real libvirt host that cannot be tracked, or that only seem so."""

import asyncio
import re
import subprocess
from typing import Any
from uuid import uuid4

import pytest

from synvirt.errors import (
    CbtReset,
    CbtUnsupported,
    SnapshotFailed,
)
from synvirt.live import LiveAdapter
from synvirt.sizes import MIB
from tests.contracts.live import read
from tests.real.libvirt_remote.one_job import OneJob, inspected, local
from tests.servers.libvirt_lab import LibvirtLab, until


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


def test_disks_that_change_places_between_passes_are_no_trap(host: LibvirtLab) -> None:
    """Each image has a bitmap of the checkpoint's name: that of vdb was taken for what had changed on vda."""
    import libvirt

    one, other = host.disk("64M"), host.disk("64M")
    domain = host.domain(one, other)
    domain.create()
    host.write(domain, "vda", 5 * MIB, b"the one")
    host.write(domain, "vdb", 9 * MIB, b"the other")
    job = OneJob(host, domain, keys=("vda", "vdb"))
    job.pass_(1, since=None)
    domain.destroyFlags(libvirt.VIR_DOMAIN_DESTROY_GRACEFUL)
    xml = domain.XMLDesc(libvirt.VIR_DOMAIN_XML_INACTIVE).replace(str(one), "/between").replace(str(other), str(one))
    host.connection.defineXML(xml.replace("/between", str(other))).create()
    job.begin(2)
    with pytest.raises(CbtReset, match="its image was that of vdb"):
        job.read(2, since=1)
    job.read(2, since=None)
    assert job.copy == host.content(domain, "vda")
    job.clean()


def test_a_guest_that_is_off_has_the_memory_of_its_configuration_also_while_it_is_read(host: LibvirtLab, domain: Any) -> None:
    """libvirt reports all that it may get, as no system in it has a balloon."""
    domain.destroy()
    xml = domain.XMLDesc(0).replace("<memballoon model='none'/>", "<memballoon model='virtio'/>")
    present = re.sub("(<currentMemory unit='KiB'>)[0-9]+", r"\g<1>32768", xml)
    host.connection.defineXML(present)
    before = inspected(host, domain).memory_bytes
    job = OneJob(host, domain)
    job.begin(1)
    assert domain.isActive()
    assert (before, inspected(host, domain).memory_bytes) == (32 * MIB, 32 * MIB)
    job.clean()
