"""UEFI variables of a XenServer VM and of a vSphere one in OVMF's hands: a guest that nothing but its own boot entry finds."""

import gzip
import os
import re
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from uuid import UUID
from xml.etree import ElementTree as ET

import pytest

from synvirt.guests.inside.looking import loaders_of
from synvirt.hypervisor import Volume
from synvirt.hypervisor.libvirt_host import LibvirtHost
from synvirt.kvm.connection import load
from synvirt.live.vsphere import nvram as vsphere_nvram
from synvirt.live.xen import nvram as xen_nvram
from synvirt.machines import boot_entries, disk_drivers
from synvirt.migrations.landing import machine_of
from synvirt.model.machine import Disk, GuestOs, VmManifest
from synvirt.sample import disk as sample_disk
from synvirt.sample import pieces
from synvirt.sizes import MIB
from tests.contracts.hypervisors import job, never
from tests.fakes.xenserver import varstored
from tests.fakes.xenserver.varstored import GLOBAL, NV_BS_RT
from tests.live.vsphere.test_vim_variables import Variable, written
from tests.needs import need

PARTITION = UUID("5ec0ffee-0000-4000-8000-000000000018")
START, SECTORS = 2048, 120 * 2048
BOOT_TIMEOUT_S = 240

INIT = """\
#!/bin/busybox sh
export PATH=/bin
mount -t devtmpfs dev /dev; mount -t proc proc /proc; mount -t sysfs sys /sys
[ -d /sys/firmware/efi ] || { echo "not by UEFI"; poweroff -f; }
kept=/sys/firmware/efi/efivars vendor=8be4df61-93ca-11d2-aa0d-00e098032b8c
for module in $(cat /modules/order.0); do insmod /modules/$module; done
mount -t efivarfs efivarfs $kept
# Four bytes of attributes, then the variable: UEFI 2.10, 3.3.
booted=$(hexdump -n 6 -e '6/1 "%02x"' $kept/BootCurrent-$vendor)
[ "$booted" = 060000000700 ] || { echo "booted by $booted"; poweroff -f; }
[ -e $kept/Boot0007-$vendor ] || { echo "its entry is gone"; poweroff -f; }
grep -q by-its-own-entry /proc/cmdline || { echo "by another way"; poweroff -f; }
until ! grep -q disks-by-ide /proc/cmdline || [ -b /dev/sda ]; do sleep 0.1; done
printf "\\nDebian GNU/Linux 12 uefi ttyS0\\n\\nuefi login: "
while :; do sleep 3600; done
"""


def of_xenserver(variables: list[Variable]) -> bytes | None:
    return xen_nvram.as_store({"NVRAM": varstored.nvram(variables), "platform": {"secureboot": "false"}})


def of_vsphere(variables: list[Variable]) -> bytes | None:
    return vsphere_nvram.as_store(
        written((name, vendor, how, data) for name, vendor, how, data in variables), secure_boot=False
    )


def _system_partition(image: Path) -> str:
    """Makes a disk with an empty one, and gives it in the words of mtools."""
    with image.open("wb") as file:
        file.truncate((START + SECTORS + 2048) * 512)
    table = f"label: gpt\nstart={START}, size={SECTORS}, type=C12A7328-F81F-11D2-BA4B-00A0C93EC93B, uuid={PARTITION}\n"
    subprocess.run([need("sfdisk", "fdisk"), image], input=table.encode(), check=True, capture_output=True)
    partition = f"{image}@@{START * 512}"
    subprocess.run(["mformat", "-i", partition, "-F", "-T", str(SECTORS), "::"], check=True, capture_output=True)
    return partition


@pytest.mark.slow
@pytest.mark.timeout(400)
@pytest.mark.parametrize("kept_by", [of_xenserver, of_vsphere])
def test_a_guest_boots_by_the_entry_that_it_had_before(
    host: LibvirtHost, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kept_by: Callable[[list[Variable]], bytes | None]
) -> None:
    """Its loader lies where no default looks, the entry before its own names a disk of Xen's, and it sees its variables. One
    has drivers for IDE alone, as dracut leaves it on XenServer."""
    need("mcopy", "mtools")
    by_ide = kept_by is of_xenserver
    monkeypatch.setattr(sample_disk, "INITRAMFS_INIT", INIT)
    monkeypatch.setattr(pieces, "MODULES", (("efivarfs", "ata_piix", "sd_mod"),))
    parts = pieces.gather(pieces.cache_dir())
    (tmp_path / "initrd.gz").write_bytes(gzip.compress(sample_disk._initramfs(parts), 1))
    image = tmp_path / "uefi.raw"
    partition = _system_partition(image)
    subprocess.run(["mmd", "-i", partition, "::EFI", "::EFI/own"], check=True, capture_output=True)
    for source, name in ((parts.kernel, "EFI/own/vmlinuz.efi"), (tmp_path / "initrd.gz", "initrd.gz")):
        subprocess.run(["mcopy", "-i", partition, source, f"::{name}"], check=True, capture_output=True)

    own = varstored.on_partition(1, START, SECTORS, PARTITION, r"\EFI\own\vmlinuz.efi")
    words = f"by-its-own-entry {'disks-by-ide' if by_ide else ''} {sample_disk.EMULATED}"
    line = rf"initrd=\initrd.gz console=ttyS0 quiet {words}".encode("utf-16-le") + b"\0\0"
    content = kept_by(
        [
            ("BootOrder", GLOBAL, NV_BS_RT, b"\x00\x00\x07\x00"),
            ("Boot0000", GLOBAL, NV_BS_RT, varstored.boot_entry("UEFI Xen Virtual Block", varstored.of_xen())),
            ("Boot0007", GLOBAL, NV_BS_RT, varstored.boot_entry("own", own, line)),
            ("Timeout", GLOBAL, NV_BS_RT, b"\0\0"),
        ]
    )
    assert content is not None
    manifest = VmManifest(
        vm_id="x",
        name="by its own entry",
        firmware="uefi",
        # OVMF measures into it all that it starts. Once is enough: it has no part in the variables.
        tpm=not by_ide,
        guest_os=GuestOs(family="linux"),
        disks=(Disk(key="d", label="d", capacity_bytes=image.stat().st_size, boot_order=1),),
        memory_bytes=512 * MIB,
    )
    if by_ide:
        manifest = disk_drivers.noted(manifest, {"drivers in /boot/initramfs-5.14.0-427.el9.img": "ata_piix, sd_mod"})
    migration = job(manifest)
    assert host.keep_variables(migration.id, content)
    domain = host.domain_xml(machine_of(migration), [Volume("d", str(image), "file")])
    host.define(domain)
    host.start(UUID(domain.uuid))
    assert host.wait_until_booted(UUID(domain.uuid), BOOT_TIMEOUT_S, never) == "console"
    host.undefine(UUID(domain.uuid), migration.id)
    host.forget_variables(migration.id)


@pytest.mark.slow
@pytest.mark.timeout(400)
@pytest.mark.parametrize("secure_boot", [False, True])
def test_a_loader_that_no_firmware_finds_gets_an_entry(host: LibvirtHost, tmp_path: Path, *, secure_boot: bool) -> None:
    """As of a Debian whose own entries did not come along. With Secure Boot the firmware refuses to start it, as it is not
    signed, and says so; it was found."""
    need("mcopy", "mtools")
    parts, image = pieces.gather(pieces.cache_dir()), tmp_path / "uefi.raw"
    partition = _system_partition(image)
    subprocess.run(["mmd", "-i", partition, "::EFI", "::EFI/debian"], check=True, capture_output=True)
    subprocess.run(["mcopy", "-i", partition, parts.kernel, "::EFI/debian/grubx64.efi"], check=True, capture_output=True)
    manifest = VmManifest(
        vm_id="x",
        name="without entries",
        firmware="uefi",
        secure_boot=secure_boot,
        guest_os=GuestOs(family="linux"),
        disks=(Disk(key="d", label="d", capacity_bytes=image.stat().st_size, boot_order=1),),
        memory_bytes=512 * MIB,
    )
    migration, (loader,) = job(manifest), loaders_of([str(image)])
    assert host.add_entries(migration.id, boot_entries.entries([loader]), secure=secure_boot)
    domain = host.domain_xml(machine_of(migration), [Volume("d", str(image), "file")])
    host.define(domain)
    host.start(UUID(domain.uuid))
    log, until = host.console_log(UUID(domain.uuid)), time.monotonic() + BOOT_TIMEOUT_S
    wanted = rb"failed to load Boot0000 .debian. from .*: Access Denied" if secure_boot else rb"starting Boot0000 .debian."
    while not (seen := re.search(wanted, log.read_bytes() if log.exists() else b"")) and time.monotonic() < until:
        time.sleep(0.5)
    shown = log.read_bytes()
    host.undefine(UUID(domain.uuid), migration.id)
    host.forget_variables(migration.id)
    assert seen is not None, shown[-3000:]


def test_variables_of_a_guest_that_is_gone_are_not_the_next_ones(host: LibvirtHost, tmp_path: Path) -> None:
    """libvirt names the file after the domain, and takes one that is there: `virsh undefine --keep-nvram` leaves it, and a
    guest that was renamed still has it."""
    (image := tmp_path / "disk.raw").write_bytes(bytes(MIB))
    disk = Disk(key="disk", label="disk", capacity_bytes=MIB)
    manifest = VmManifest(vm_id="x", name="twice", firmware="uefi", memory_bytes=64 * MIB, disks=(disk,))
    mark, found, left = b"another guest's!", list[bytes](), list[Path]()
    for migration in (job(manifest), job(manifest)):
        domain = host.domain_xml(machine_of(migration), [Volume("disk", str(image), "file")])
        host.define(domain)
        host.start(UUID(domain.uuid))
        defined = host._find(domain.uuid)
        assert defined is not None
        variables = Path(ET.fromstring(defined.XMLDesc()).findtext("os/nvram", ""))
        found.append(variables.read_bytes()[-len(mark) :])
        defined.destroy()
        with variables.open("r+b") as file:
            file.seek(-len(mark), os.SEEK_END)
            file.write(mark)
        host.define(domain)
        assert variables.read_bytes().endswith(mark), "its own stay"
        defined.undefineFlags(load().VIR_DOMAIN_UNDEFINE_KEEP_NVRAM)
        left.append(variables)
    for one in left:
        one.unlink(missing_ok=True)
    assert mark not in found
