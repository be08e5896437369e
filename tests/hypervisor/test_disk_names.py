"""Disks that a Linux guest itself finds by a name or a serial number: what it gets here, so that it finds them."""

from xml.etree import ElementTree as ET

import pytest

from synvirt.hypervisor import hardware
from synvirt.machines import disk_names
from synvirt.migrations.landing import machine_of
from synvirt.model.machine import Disk, VmManifest
from synvirt.sizes import GIB
from tests.fakes.hypervisor import HOST
from tests.hypervisor.test_domain_xml import LINUX, build, fixed, ladder, volumes


def mounts(*devices: str) -> VmManifest:
    """A Linux with these devices in its fstab."""
    return disk_names.noted(LINUX, {f"mount /{number}": f"{device} ext4" for number, device in enumerate(devices)})


@pytest.mark.parametrize(
    ("manifest", "rungs"),
    [
        (mounts("/dev/sdb1"), "scsi sata virtio ide"),
        (mounts("/dev/sda1", "/dev/vdb1"), "virtio scsi sata ide"),
        (mounts("/dev/mapper/sda1"), "virtio scsi sata ide"),
        (mounts("/dev/xvdb"), "virtio scsi sata ide"),
    ],
)
def test_the_ladder_begins_with_the_bus_by_which_disks_have_their_names(manifest: VmManifest, rungs: str) -> None:
    assert " ".join(ladder(fixed(manifest))) == rungs


def test_a_name_that_no_disk_had_at_the_source_says_nothing() -> None:
    """A stick's, in a guest whose initramfs may have no driver but virtio's."""
    disks = (Disk(key="a", label="a", capacity_bytes=GIB, bus="virtio"),)
    manifest = LINUX.model_copy(update={"disks": disks})
    assert disk_names.noted(manifest, {"mount /media/stick": "/dev/sda1 vfat"}) == manifest


def missing(facts: dict[str, str]) -> list[str]:
    found = disk_names.noted(LINUX, facts).concerns
    return [one.assessment for one in found if one.id == "disk-names:missing"]


def test_a_file_system_that_no_disk_has_is_noted() -> None:
    """Of a disk that the plan skips, for example: the guest shows signs of life, and stops in emergency mode."""
    facts = {
        "volume disk 1 at 1048576": "ext4 «root» 6F1C3C0A-3c5f-4b52-9f57-7d8f4d3f6a01, 1 of 2 bytes",
        "mount /": "UUID=6f1c3c0a-3c5f-4b52-9f57-7d8f4d3f6a01 ext4",
        "mount /srv": "LABEL=root ext4",
        "volume disk 2": "xfs «old data» 0e, 1 of 2 bytes",
        "mount /old": r"LABEL=old\040data xfs",
        "mount /boot/efi": "UUID=1A2B-3C4D vfat",
        "mount /home": "/dev/mapper/vg-home xfs",
        "mount /backup": "UUID=0c xfs optional",
    }
    assert not missing(facts)
    facts |= {"mount /data": "UUID=0d xfs", "mount /more": 'LABEL="ro" btrfs'}
    (assessment,) = missing(facts)
    assert "mounts LABEL=ro, UUID=0d, and no disk" in assessment
    assert not missing(facts | {"not read disk 2": "it is encrypted"})
    assert not missing({fact: value for fact, value in facts.items() if not fact.startswith("volume")})


def test_the_bus_that_a_guest_names_its_disks_by_is_a_reason() -> None:
    assert "the guest itself names" in hardware.why_bus(machine_of(fixed(mounts("/dev/sdb1"))))
    assert "the guest itself names" not in hardware.why_bus(machine_of(fixed(mounts("/dev/sdb1"), disk_bus="virtio")))


def test_disks_have_the_serial_numbers_that_the_guest_finds_them_by() -> None:
    """As many characters as the bus carries; no two disks have the same."""
    long = "0123456789abcdef0123456789abcdef"
    disks = tuple(
        Disk(key=key, label=key, capacity_bytes=GIB, serial=serial)
        for key, serial in (("a", "DATA-01"), ("b", long), ("c", f"{long[:20]}x"), ("d", "not one"), ("e", None))
    )
    manifest = LINUX.model_copy(update={"disks": disks})
    for bus, second in (("virtio", long[:20]), ("sata", long[:20]), ("scsi", long)):
        for identity in ("keep", "new"):
            built = build(fixed(manifest, disk_bus=bus, identity=identity), volumes(manifest), HOST)
            serials = [one.text for one in ET.fromstring(built.xml).iterfind("devices/disk/serial")]
            assert serials[:2] == ["DATA-01", second]
            assert len(set(serials)) == len(disks)


@pytest.mark.parametrize(
    ("serial", "device", "noted"),
    [
        ("DATA-01", "virtio-DATA-01-part1", []),
        ("DATA-01", "scsi-0QEMU_QEMU_HARDDISK_DATA-01", ["disk-names:sd"]),
        ("0123456789abcdef0123456789abcdef", "virtio-0123456789abcdef0123", []),
        (None, "virtio-DATA-01-part1", ["disk-names:by-id"]),
        ("DATA-02", "scsi-36000c2962a1c2b3d4e5f60718293a4b5-part2", ["disk-names:by-id"]),
        (None, "dm-name-vg-data", []),
    ],
)
def test_a_guest_that_names_its_disks_by_their_serial_numbers_finds_them_where_they_are_kept(
    serial: str | None, device: str, noted: list[str]
) -> None:
    disks = (Disk(key="a", label="a", capacity_bytes=GIB, serial=serial),)
    facts = {"mount /data": f"/dev/disk/by-id/{device} ext4"}
    found = disk_names.noted(LINUX.model_copy(update={"disks": disks}), facts)
    assert [one.id for one in found.concerns] == noted


@pytest.mark.parametrize(
    "device", ["/dev/xvdb1", "/dev/nvme0n2p1", "/dev/hdb1", "/dev/disk/by-path/pci-0000:03:00.0-scsi-0:0:1:0"]
)
def test_disks_that_a_guest_calls_by_names_that_none_has_here_are_a_warning(device: str) -> None:
    (concern,) = mounts(device).concerns
    assert (concern.category, device in concern.assessment) == ("Warning", True)
    assert disk_names.noted(mounts(device), {"mount /0": f"{device} ext4"}) == mounts(device), "it is noted once"


def test_what_was_noted_before_a_conversion_is_not_so_after_it() -> None:
    """A retry of a file's job has the manifest of the failed one."""
    assert disk_names.noted(mounts("/dev/sdb1"), {"mount /0": "/dev/vdb1 ext4"}) == LINUX
    assert disk_names.noted(mounts("/dev/sdb1"), {"mount /0": "UUID=1 ext4"}) == LINUX


DEVICES_FILE = "/etc/lvm/devices/system.devices"


@pytest.mark.parametrize(
    ("file", "value", "noted"),
    [
        ("/etc/fstab", "/dev/sda2", ["disk-names:sd"]),
        ("/etc/fstab", "/dev/xvda2", ["disk-names:xvd"]),
        ("/etc/crypttab", "/dev/sdb1", ["disk-names:sd"]),
        ("/etc/crypttab", "/dev/vdb1", []),
        ("/boot/grub/grub.cfg", "/dev/sda1", ["disk-names:sd"]),
        ("/boot/loader/entries/abc.conf", "/dev/xvda2", ["disk-names:xvd"]),
        ("/boot/grub/grub.cfg", "/dev/mapper/rhel-root", []),
        ("/etc/crypttab", "UUID=1", []),
        ("/etc/lvm/lvm.conf", "/dev/sda*", ["disk-names:sd"]),
        ("/etc/lvm/lvm.conf", "/dev/xvd*", ["disk-names:lvm"]),
        (DEVICES_FILE, "devname /dev/sda3", ["disk-names:sd"]),
        (DEVICES_FILE, "devname /dev/vda3", []),
        (DEVICES_FILE, "devname /dev/xvda3", ["disk-names:lvm"]),
        (DEVICES_FILE, "sys_wwid naa.6000c29b1c2d3e4f5061728394a5b6c7", ["disk-names:lvm"]),
        (DEVICES_FILE, "sys_wwid eui.0025388500000001", ["disk-names:lvm"]),
        (DEVICES_FILE, "sys_wwid t10.QEMU_QEMU_HARDDISK_DATA-01", ["disk-names:sd"]),
        (DEVICES_FILE, "sys_wwid t10.QEMU____QEMU_HARDDISK___DATA-01", ["disk-names:sd"]),
        (DEVICES_FILE, "sys_wwid t10.ATA_QEMU_HARDDISK_QM00001", ["disk-names:lvm"]),
        (DEVICES_FILE, "sys_serial DATA-01", []),
        (DEVICES_FILE, "sys_serial DATA-02", ["disk-names:lvm"]),
        (DEVICES_FILE, "mpath_uuid mpath-36000c29b1c2d3e4f5061728394a5b6c7", ["disk-names:lvm"]),
        (DEVICES_FILE, "crypt_uuid CRYPT-LUKS2-0123456789abcdef-luks", []),
        (DEVICES_FILE, "devname /dev/mapper/other", []),
    ],
)
def test_a_guest_finds_disks_by_other_files_too(file: str, value: str, noted: list[str]) -> None:
    disks = (Disk(key="a", label="a", capacity_bytes=GIB, serial="DATA-01"),)
    found = disk_names.noted(LINUX.model_copy(update={"disks": disks}), {f"finds {file} it": value})
    assert [one.id for one in found.concerns] == noted
    for concern in found.concerns:
        assert f"{file} names {value.rpartition(' ')[2]}" in concern.assessment
        assert ("use_devicesfile" in concern.remedy, "UUID=" in concern.remedy) == (
            file.startswith("/etc/lvm"),
            not file.startswith("/etc/lvm"),
        )


def test_a_name_that_scsi_gives_hides_no_other_one() -> None:
    """SUSE's older installers wrote ids for what is mounted, and devices for swap."""
    facts = {
        "mount /": "/dev/disk/by-id/scsi-36000c2962a1c2b3d4e5f60718293a4b5-part2 ext4",
        "finds /etc/fstab swap 1": "/dev/sda1",
        f"finds {DEVICES_FILE} it": "sys_wwid naa.6000c2962a1c2b3d4e5f60718293a4b5",
    }
    found = {one.id: one for one in disk_names.noted(LINUX, facts).concerns}
    assert list(found) == ["disk-names:sd", "disk-names:by-id", "disk-names:lvm"]
    assert "by-id" not in found["disk-names:sd"].assessment
    assert ladder(fixed(disk_names.noted(LINUX, facts)))[0] == "scsi"
