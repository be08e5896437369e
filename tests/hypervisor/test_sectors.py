"""Disks whose sectors have another size than 512 bytes: what their guest gets here."""

from dataclasses import replace
from xml.etree import ElementTree as ET

import pytest

from synvirt.hypervisor import hardware
from synvirt.migrations.landing import machine_of
from synvirt.model.machine import DiskBus, GuestOs, VmManifest
from tests.fakes.hypervisor import HOST
from tests.hypervisor.test_domain_xml import LINUX, build, fixed, ladder, volumes


def of_sectors(sector_bytes: int, key: str = "data") -> VmManifest:
    disks = (one.model_copy(update={"sector_bytes": sector_bytes}) if one.key == key else one for one in LINUX.disks)
    return LINUX.model_copy(update={"disks": tuple(disks)})


@pytest.mark.parametrize(("bus", "given"), [("virtio", True), ("scsi", True), ("sata", False), ("ide", False)])
def test_a_disk_has_the_sectors_that_its_guest_knows(bus: DiskBus, *, given: bool) -> None:
    manifest = of_sectors(4096)
    domain = build(fixed(manifest, disk_bus=bus), volumes(manifest), HOST)
    data, system = ET.fromstring(domain.xml).iterfind("devices/disk")
    sectors = {"logical_block_size": "4096", "physical_block_size": "4096"}
    assert [dict(one.attrib) for one in data.iterfind("blockio")] == ([sectors] if given else [])
    assert system.find("blockio") is None
    lost = [(one.what, one.source, one.here) for one in domain.differences if one.what.startswith("sectors")]
    assert lost == ([] if given else [("sectors of disk data", "4096 bytes", "512 bytes")])


def test_a_bus_whose_disks_have_sectors_of_512_bytes_is_no_rung_for_others() -> None:
    manifest = of_sectors(4096)
    assert ladder(fixed(manifest)) == ("virtio", "scsi")
    other = manifest.model_copy(update={"guest_os": GuestOs()})
    assert ladder(fixed(other)) == ("virtio", "scsi")
    old = manifest.model_copy(update={"guest_os": GuestOs(family="windows", name="Windows 2000")})
    assert ladder(fixed(old)) == ("virtio", "scsi")
    assert ladder(fixed(manifest, disk_bus="sata")) == ("sata",), "the plan has waived a critical concern for it"
    skipped = machine_of(fixed(manifest))
    assert hardware.ladder(replace(skipped, skipped=frozenset({"data"}))) == ladder(fixed(LINUX))
