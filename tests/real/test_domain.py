"""Domains as libvirt and QEMU take them: the golden documents, as many disks as anybody has, a guest that boots by UEFI."""

import gzip
import subprocess
from pathlib import Path
from uuid import UUID
from xml.etree import ElementTree as ET

import pytest

from synvirt.hypervisor import Volume
from synvirt.hypervisor.libvirt_host import LibvirtHost
from synvirt.kvm.connection import load
from synvirt.model import MIB, Disk, GuestOs, Nic, VmManifest
from synvirt.sample import disk as sample_disk
from synvirt.sample import pieces
from tests.contracts.hypervisors import job, never
from tests.needs import need

GOLDEN = sorted((Path(__file__).parent.parent / "hypervisor/golden").glob("*.xml"))
BOOT_TIMEOUT_S = 240


@pytest.mark.parametrize("document", GOLDEN, ids=lambda path: path.stem)
def test_libvirt_defines_every_golden_document_and_keeps_what_it_says(host: LibvirtHost, document: Path) -> None:
    """Its schema takes more than its drivers do. Nothing is started."""
    text = document.read_text()
    if not Path("/dev/kvm").exists():  # libvirt refuses what no guest here could run by
        text = text.replace('type="kvm"', 'type="qemu"').replace('mode="host-model"', 'mode="maximum"')
    wanted = ET.fromstring(text)
    domain = host._connection.use().defineXML(text)
    try:
        found = ET.fromstring(domain.XMLDesc(load().VIR_DOMAIN_XML_INACTIVE))
        for path in ("devices/disk/target", "devices/disk/serial", "devices/disk/boot", "devices/interface/mac"):
            assert [(one.attrib, one.text and one.text.strip()) for one in found.findall(path)] == [
                (one.attrib, one.text) for one in wanted.findall(path)
            ]
        models = [one.get("type") for one in found.findall("devices/interface/model")]
        assert models == [one.get("type") for one in wanted.findall("devices/interface/model")]
        assert found.findtext("vcpu") == wanted.findtext("vcpu")
        enlightened = [{one.tag: one.attrib for one in root.findall("features/hyperv/*")} for root in (found, wanted)]
        assert enlightened[0] == enlightened[1]
    finally:
        domain.undefineFlags(load().VIR_DOMAIN_UNDEFINE_NVRAM)


@pytest.mark.parametrize(("bus", "count"), [("virtio", 28), ("scsi", 40), ("sata", 14), ("ide", 7)])
def test_qemu_starts_with_as_many_disks_as_anybody_has(host: LibvirtHost, tmp_path: Path, bus: str, count: int) -> None:
    disks = tuple(Disk(key=f"d{number}", label="x", capacity_bytes=MIB) for number in range(count))
    cards = tuple(Nic(key=f"n{number}", network="lan") for number in range(4))
    volumes = []
    for disk in disks:
        (path := tmp_path / f"{disk.key}.raw").write_bytes(bytes(MIB))
        volumes.append(Volume(disk.key, str(path), "file"))
    manifest = VmManifest(vm_id="x", name=f"many {bus}", disks=disks, nics=cards, memory_bytes=64 * MIB)
    migration = job(manifest, disk_bus=bus)
    domain = host.domain_xml(migration, volumes)
    host.define(domain)
    started = host._find("lookupByUUIDString", domain.uuid)
    assert started is not None
    started.createWithFlags(load().VIR_DOMAIN_START_PAUSED)
    paths = [one.get("file") for one in ET.fromstring(started.XMLDesc()).findall("devices/disk/source")]
    assert paths == [volume.path for volume in volumes], "in the order that they had"
    host.undefine(UUID(domain.uuid), migration.id)


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_a_guest_boots_by_uefi(host: LibvirtHost, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Debian's kernel is a UEFI program; the firmware's shell, which its default boot order ends with, starts it."""
    need("mcopy", "mtools")
    monkeypatch.setattr(sample_disk, "INITRAMFS_INIT", UEFI_INIT)
    parts = pieces.gather(pieces.cache_dir())
    (tmp_path / "initrd.gz").write_bytes(gzip.compress(sample_disk._initramfs(parts), 1))
    (tmp_path / "startup.nsh").write_text("\\vmlinuz.efi initrd=\\initrd.gz console=ttyS0 quiet\r\n")
    with (image := tmp_path / "uefi.raw").open("wb") as file:
        file.truncate(64 * MIB)
    subprocess.run(["mformat", "-i", image, "-F", "::"], check=True, capture_output=True)
    for source, name in ((parts.kernel, "vmlinuz.efi"), (tmp_path / "initrd.gz", "initrd.gz"), (tmp_path / "startup.nsh", "")):
        subprocess.run(["mcopy", "-i", image, source, f"::{name}"], check=True, capture_output=True)
    manifest = VmManifest(
        vm_id="x",
        name="by uefi",
        firmware="uefi",
        tpm=True,
        guest_os=GuestOs(family="linux"),
        disks=(Disk(key="d", label="d", capacity_bytes=64 * MIB),),
        memory_bytes=512 * MIB,
    )
    migration = job(manifest)
    domain = host.domain_xml(migration, [Volume("d", str(image), "file")])
    host.define(domain)
    host.start(UUID(domain.uuid))
    assert host.wait_until_booted(UUID(domain.uuid), BOOT_TIMEOUT_S, never) == "console"
    host.undefine(UUID(domain.uuid), migration.id)


UEFI_INIT = """\
#!/bin/busybox sh
/bin/busybox --install -s /bin
mount -t devtmpfs dev /dev; mount -t proc proc /proc; mount -t sysfs sys /sys
[ -d /sys/firmware/efi ] || { echo "not by UEFI"; poweroff -f; }
printf "\\nDebian GNU/Linux 12 uefi ttyS0\\n\\nuefi login: "
while :; do sleep 3600; done
"""
