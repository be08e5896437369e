"""The sample appliance is what an exporter would write, and its disk boots by itself."""

import hashlib
import re
import subprocess
import tarfile
from collections.abc import Iterator
from pathlib import Path
from uuid import UUID

import pytest

from synvirt.hypervisor import Volume
from synvirt.hypervisor.libvirt_host import LibvirtHost
from synvirt.migrations.landing import machine_of
from synvirt.model.machine import Disk, GuestOs, Nic, VmManifest
from synvirt.sample import ID_PATH, Sample, build
from synvirt.sample.disk import BOOT_START
from synvirt.sizes import MIB
from tests.contracts.hypervisors import job, never
from tests.needs import need
from tests.real.conftest import SAMPLE_PROGRAMS, passable

PAYLOAD_MIB = 8
# Emulated, on a busy machine; 11 s were measured on a quiet one.
BOOT_TIMEOUT_S = 240


@pytest.fixture(scope="module")
def sample(tmp_path_factory: pytest.TempPathFactory) -> Sample:
    for program, package in SAMPLE_PROGRAMS.items():
        need(program, package)
    return build(tmp_path_factory.mktemp("sample"), payload_mib=PAYLOAD_MIB)


@pytest.fixture(scope="module")
def raw(sample: Sample) -> Iterator[Path]:
    """Its disk, by QEMU's own reader of streamOptimized VMDK."""
    with passable() as folder:
        with tarfile.open(sample.ova) as archive:
            archive.extractall(folder)
        (vmdk,) = Path(folder).glob("*.vmdk")
        raw = Path(folder) / "disk.raw"
        subprocess.run(["qemu-img", "convert", "-f", "vmdk", "-O", "raw", str(vmdk), str(raw)], check=True)
        yield raw


@pytest.mark.timeout(300)
def test_the_archive_is_in_order_and_its_digests_are_right(sample: Sample) -> None:
    with tarfile.open(sample.ova) as archive:
        names = archive.getnames()
        assert [Path(name).suffix for name in names] == [".ovf", ".mf", ".vmdk"], "the descriptor first: DSP0243 section 5.3"
        contents = {name: archive.extractfile(name).read() for name in names}  # type: ignore[union-attr]
    digests = dict(re.findall(r"^SHA256\((.+)\)= ([0-9a-f]{64})$", contents[names[1]].decode(), re.MULTILINE))
    assert digests == {name: hashlib.sha256(contents[name]).hexdigest() for name in (names[0], names[2])}
    assert f'ovf:size="{len(contents[names[2]])}"'.encode() in contents[names[0]]
    assert str(sample.capacity_bytes).encode() in contents[names[0]]


def test_no_two_samples_are_the_same(sample: Sample, tmp_path: Path) -> None:
    assert build(tmp_path, payload_mib=0).id != sample.id


def test_nothing_but_the_archive_is_left(sample: Sample) -> None:
    assert [path.name for path in sample.ova.parent.iterdir()] == [sample.ova.name]


def test_its_loader_follows_few_clusters(raw: Path) -> None:
    """FAT's parameter block (ECMA-107, 9): bytes a sector at 11, sectors a cluster at 13. Each costs an emulated boot."""
    with raw.open("rb") as disk:
        disk.seek(BOOT_START)
        block = disk.read(16)
    assert int.from_bytes(block[11:13], "little") * block[13] == 32 << 10


@pytest.mark.timeout(400)
@pytest.mark.parametrize("bus", ["virtio", "scsi", "ide"])
def test_its_disk_boots_by_itself_and_its_agent_knows_its_id(host: LibvirtHost, sample: Sample, raw: Path, bus: str) -> None:
    """Debian's cloud kernel has no driver for SATA, so that bus is not among them."""
    manifest = VmManifest(
        vm_id="x",
        name=sample.ova.stem,
        memory_bytes=256 * MIB,
        guest_os=GuestOs(family="linux"),
        disks=(Disk(key="disk1", label="disk1", capacity_bytes=sample.capacity_bytes),),
        nics=(Nic(key="n", network="VM Network"),),
    )
    domain = host.domain_xml(machine_of(job(manifest, disk_bus=bus)), [Volume("disk1", str(raw), "file")])
    uuid = UUID(domain.uuid)
    host.define(domain)
    host.start(uuid)
    assert host.wait_until_booted(uuid, BOOT_TIMEOUT_S, never) == "agent"
    assert host.read_guest_file(uuid, ID_PATH).decode().strip() == sample.id
    sums = host.read_guest_file(uuid, "/payload.sha256").decode().splitlines()
    assert sums
    digest, name = sums[0].split()
    assert hashlib.sha256(host.read_guest_file(uuid, f"/{name}")).hexdigest() == digest
    host.undefine(uuid, uuid)
