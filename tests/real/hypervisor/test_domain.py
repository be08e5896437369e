"""Domains as libvirt and QEMU take them: the golden documents, and as many disks as anybody has."""

import json
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any
from uuid import UUID, uuid4
from xml.etree import ElementTree as ET

import libvirt_qemu
import pytest

from synvirt.hypervisor import Volume
from synvirt.hypervisor.libvirt_host import LibvirtHost
from synvirt.kvm.connection import load, short_root
from synvirt.migrations.landing import machine_of
from synvirt.model.machine import Disk, Nic, VmManifest
from synvirt.sizes import MIB
from tests.contracts.hypervisors import job
from tests.running.processes import until

GOLDEN = sorted((Path(__file__).parents[2] / "hypervisor/golden").glob("*.xml"))


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
    domain = host.domain_xml(machine_of(migration), volumes)
    host.define(domain)
    started = host._find(domain.uuid)
    assert started is not None
    started.createWithFlags(load().VIR_DOMAIN_START_PAUSED)
    found = ET.fromstring(started.XMLDesc())
    paths = [one.get("file") for one in found.findall("devices/disk/source")]
    assert paths == [volume.path for volume in volumes], "in the order that they had"
    models = {one.get("model") for one in found.findall("devices/controller[@type='scsi']")}
    assert models == ({"virtio-scsi"} if bus == "scsi" else set()), "each by the driver that the guest has"
    host.undefine(UUID(domain.uuid), migration.id)


def _asked(domain: Any, command: str, **arguments: str) -> Any:
    """QEMU's answer."""
    return json.loads(libvirt_qemu.qemuMonitorCommand(domain, json.dumps({"execute": command, "arguments": arguments}), 0))[
        "return"
    ]


@pytest.mark.parametrize("bus", ["virtio", "scsi"])
@pytest.mark.parametrize("size", [MIB, MIB + 512])
def test_qemu_gives_a_disk_the_sectors_that_its_guest_knows(host: LibvirtHost, tmp_path: Path, bus: str, size: int) -> None:
    (path := tmp_path / "disk.raw").write_bytes(bytes(size))
    disk = Disk(key="one", label="x", capacity_bytes=size, sector_bytes=4096)
    migration = job(VmManifest(vm_id="x", name="large sectors", disks=(disk,), memory_bytes=64 * MIB), disk_bus=bus)
    domain = host.domain_xml(machine_of(migration), [Volume("one", str(path), "file")])
    host.define(domain)
    try:
        started = host._find(domain.uuid)
        assert started is not None
        started.createWithFlags(load().VIR_DOMAIN_START_PAUSED)
        (device,) = _asked(started, "query-block")
        path_in_qemu = device["qdev"].removesuffix("/virtio-backend")
        for name in ("logical_block_size", "physical_block_size"):
            assert _asked(started, "qom-get", path=path_in_qemu, property=name) == 4096
    finally:
        host.undefine(UUID(domain.uuid), migration.id)


@pytest.mark.timeout(120)
def test_the_state_of_a_tpm_goes_where_its_domain_went_before_it(host: LibvirtHost, data_dir: Path, tmp_path: Path) -> None:
    """A killed service leaves it so: libvirt removes the state last, and not where a slow swtpm_setup still writes there."""
    guest = uuid4()
    root = short_root(host._connection.uri)
    assert root is not None
    state = data_dir / "libvirt/lib/swtpm" / str(guest) / "tpm2"
    state.mkdir(parents=True)
    shutil.copy(Path(sys.executable).resolve(), setup := tmp_path / "swtpm_setup")
    writes = "import pathlib, sys, time\nwhile not time.sleep(0.001): pathlib.Path(sys.argv[2], str(time.time_ns())).touch()"
    with subprocess.Popen([setup, "-c", writes, "--tpm-state", f"{root}/lib/swtpm/{guest}/tpm2"]) as writer:
        try:
            until(lambda: any(state.iterdir()), 60)
            host.undefine(guest, guest)
            assert not state.parent.exists()
            assert writer.wait(60) == -signal.SIGKILL
        finally:
            writer.kill()
