"""The bus that a Linux gets here by what its initramfs has."""

import pytest

from synvirt.hypervisor import domain_xml, hardware
from synvirt.machines import disk_drivers, disk_names
from synvirt.migrations.landing import machine_of
from synvirt.model.machine import Concern, VmManifest
from tests.fakes.hypervisor import HOST
from tests.hypervisor.test_domain_xml import LINUX, fixed, ladder, volumes

DEBIAN, DRACUT, ARCH = "/boot/initrd.img-6.1.0-28-amd64", "/boot/initramfs-5.14.0-427.el9.img", "/boot/initramfs-linux.img"


def noted(drivers: str, *, file: str = DEBIAN, firmware: str = "bios") -> VmManifest:
    return disk_drivers.noted(LINUX.model_copy(update={"firmware": firmware}), {f"drivers in {file}": drivers})


def concerns(manifest: VmManifest) -> list[Concern]:
    return [one for one in manifest.concerns if one.id.startswith("boot-drivers")]


@pytest.mark.parametrize(
    ("drivers", "firmware", "concern", "rungs"),
    [
        ("sd_mod, virtio_blk, virtio_pci", "bios", None, "virtio scsi sata ide"),
        ("sd_mod, virtio_pci, virtio_scsi", "bios", "scsi", "scsi virtio sata ide"),
        ("ahci, ata_piix, sd_mod", "bios", "sata", "sata virtio scsi ide"),
        ("ata_piix, sd_mod", "bios", "ide", "ide virtio scsi sata"),
        ("ata_piix, sd_mod", "uefi", "ide", "ide virtio scsi sata"),
        ("ahci, ata_piix, sd_mod", "uefi", "sata", "sata virtio scsi"),
        ("ahci", "bios", "none", "virtio scsi sata ide"),
        ("none for disks here", "bios", "none", "virtio scsi sata ide"),
    ],
)
def test_the_ladder_begins_with_a_bus_that_the_initramfs_has_a_driver_for(
    drivers: str, firmware: str, concern: str | None, rungs: str
) -> None:
    manifest = noted(drivers, firmware=firmware)
    assert [one.id for one in concerns(manifest)] == ([f"boot-drivers:{concern}"] if concern else [])
    assert " ".join(ladder(fixed(manifest))) == rungs
    assert " ".join(ladder(fixed(manifest, disk_bus="virtio"))) == "virtio", "the plan decides"
    again = disk_drivers.noted(manifest, {f"drivers in {DEBIAN}": "virtio_blk, virtio_pci"})
    assert not concerns(again), "what was noted before a conversion is not so after it"
    assert disk_drivers.noted(manifest, {}).concerns == again.concerns


def test_by_uefi_a_linux_with_drivers_for_ide_alone_gets_the_chipset_that_has_it() -> None:
    """As dracut makes them on Hyper-V of the second generation and on XenServer: ata_piix is in all of them."""
    job = fixed(noted("ata_piix, sd_mod", file=DRACUT, firmware="uefi"))
    built = domain_xml.build(machine_of(job), volumes(LINUX), HOST).xml
    assert ('machine="pc"' in built, 'bus="ide"' in built, 'type="pflash"' in built) == (True, True, True)
    assert 'bus="sata"' not in built


def test_secure_boot_has_no_ide() -> None:
    manifest = LINUX.model_copy(update={"firmware": "uefi", "secure_boot": True})
    manifest = disk_drivers.noted(manifest, {f"drivers in {DRACUT}": "ata_piix, sd_mod"})
    (concern,) = concerns(manifest)
    assert "has drivers only for IDE" in concern.assessment
    assert "Secure Boot off" in concern.remedy
    assert " ".join(ladder(fixed(manifest))) == "virtio scsi sata"
    assert " ".join(ladder(fixed(manifest, disk_bus="ide"))) == "sata"


def test_names_of_disks_do_not_lead_to_a_bus_without_a_driver() -> None:
    """By SATA they are called sda, too."""
    manifest = disk_names.noted(noted("ahci, sd_mod"), {"mount /": "/dev/sda1 ext4"})
    assert " ".join(ladder(fixed(manifest))) == "sata scsi virtio ide"
    assert "initramfs has a driver" in hardware.why_bus(machine_of(fixed(manifest)))


@pytest.mark.parametrize(
    ("file", "command"), [(DEBIAN, "update-initramfs -u"), (DRACUT, "dracut --force"), (ARCH, "mkinitcpio -P")]
)
def test_the_remedy_is_what_makes_that_initramfs(file: str, command: str) -> None:
    for drivers in ("ahci, sd_mod", "sd_mod"):
        (concern,) = concerns(noted(drivers, file=file))
        assert command in concern.remedy
        assert file in concern.assessment
