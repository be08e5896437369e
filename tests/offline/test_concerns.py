"""Every kind reports each concern that its files can show: a row for each concern and kind."""

import struct
from collections.abc import Callable
from pathlib import Path

import pytest

from synvirt import programs, xml_document
from synvirt.machines import concerns
from synvirt.model.machine import VmManifest
from synvirt.offline.registry import detect
from synvirt.offline.vbox import machine as virtualbox
from synvirt.offline.vmx import configuration as vmx
from synvirt.offline.xva import ova_xml
from tests.offline import appliances, test_partitions, vbox_machines
from tests.offline import parsing as ovf
from tests.offline.xva import ova_xml_text
from tests.offline.xva.ova_xml_text import Value

Made = Callable[[Path], VmManifest]

OVFTOOL = appliances.description("ovftool")
WORKSTATION = (appliances.DESCRIPTIONS / "workstation.vmx").read_bytes()
SIZES = {"Ref:4": 10 << 30, "Ref:5": 1 << 30}


def an_ovf(*changes: tuple[str, str]) -> Made:
    return lambda _: ovf.parse(_changed(OVFTOOL, changes), "a.ovf").manifest


def a_vmx(more: str, *changes: tuple[str, str]) -> Made:
    return lambda _: vmx.parse(_changed(WORKSTATION, changes) + b"\n" + more.encode(), "a.vmx").manifest


def a_vbox(*changes: tuple[str, str]) -> Made:
    return lambda _: virtualbox.parse(_changed(vbox_machines.MACHINE, changes), "a.vbox").manifest


def an_ova_xml(data: bytes, name: str) -> VmManifest:
    return ova_xml.parse(xml_document.parse(data, name), name)


def an_xva(**changes: Value) -> Made:
    return lambda _: an_ova_xml(ova_xml_text.whole(SIZES, **changes), "ova.xml")


def _changed(text: bytes, changes: tuple[tuple[str, str], ...]) -> bytes:
    for old, new in changes:
        assert old.encode() in text
        text = text.replace(old.encode(), new.encode())
    return text


def a_disk(label: str, *types: str, at: int = 0, written: bytes = b"") -> Made:
    """A qcow2 of a disk with that partition table, and something written into it."""

    def made(folder: Path) -> VmManifest:
        file = test_partitions.disk(folder / "disk.raw", label, *types)
        with file.open("r+b") as disk:
            disk.seek(at)
            disk.write(written)
        path = appliances.image(folder, "disk.qcow2", "qcow2", file.read_bytes())
        return detect(path, folder).inspect(path, folder)

    return made


def an_encrypted_qcow2(folder: Path) -> VmManifest:
    path = appliances.image(folder, "disk.qcow2", "qcow2", appliances.raw_disk())
    image = bytearray(path.read_bytes())
    struct.pack_into(">I", image, 32, 1)  # crypt_method: AES (docs/interop/qcow2.txt)
    path.write_bytes(image)
    return detect(path, folder).inspect(path, folder)


def an_encrypted_medium(folder: Path) -> VmManifest:
    old = b'format="VMDK" type="Writethrough"/>'
    new = b'format="VMDK" type="Writethrough"><Property name="CRYPT/KeyStore" value="x"/></HardDisk>'
    path = vbox_machines.machine(folder / "web", vbox_machines.MACHINE.replace(old, new))
    return detect(path, folder).inspect(path, folder)


def a_vm_over_a_device(create_type: str, extent: str) -> Made:
    def made(folder: Path) -> VmManifest:
        (folder / "web").mkdir()
        (folder / "web/web.vmx").write_text('guestOS = "debian12-64"\nscsi0:0.fileName = "disk.vmdk"\n')
        (folder / "web/disk.vmdk").write_text(
            f'# Disk DescriptorFile\nversion=1\nCID=fffffffe\nparentCID=ffffffff\ncreateType="{create_type}"\n{extent}\n'
        )
        return detect(folder / "web", folder).inspect(folder / "web", folder)

    return made


def a_vm_with_a_snapshot(folder: Path) -> VmManifest:
    (folder / "web").mkdir()
    (folder / "web/web.vmx").write_text('guestOS = "debian12-64"\nscsi0:0.fileName = "disk.vmdk"\n')
    (folder / "web/web.vmsd").write_text('snapshot.numSnapshots = "1"\nsnapshot0.uid = "1"\n')
    appliances.image(folder / "web", "disk.vmdk", "vmdk", appliances.raw_disk())
    return detect(folder / "web", folder).inspect(folder / "web", folder)


def a_backing_file_on_the_network(folder: Path) -> VmManifest:
    argv = ["qemu-img", "create", "-u", "-q", "-f", "qcow2", "-b", "nbd://127.0.0.1/base", "-F", "qcow2"]
    programs.run([*argv, str(folder / "top.qcow2"), "8M"], timeout_s=30)
    return detect(folder / "top.qcow2", folder).inspect(folder / "top.qcow2", folder)


ESP, BASIC, LINUX = test_partitions.ESP, test_partitions.BASIC, test_partitions.LINUX

ROWS: list[tuple[str, str, str, Made]] = [
    # snapshots
    ("vmx_folder", "snapshots-present", "Information", a_vm_with_a_snapshot),
    ("vbox_folder", "snapshots-present", "Information", a_vbox()),
    (
        "xva_archive",
        "snapshots-present",
        "Information",
        lambda _: an_ova_xml(
            ova_xml_text.ova_xml(
                ("VM", "Ref:0", ova_xml_text.vm(VBDs=[])), ("VM", "Ref:1", ova_xml_text.vm(is_a_snapshot=True))
            ),
            "ova.xml",
        ),
    ),
    # encrypted
    ("qcow2", "disk-unreadable:disk0", "Critical", an_encrypted_qcow2),
    ("vbox_folder", "disk-unreadable:ide1:1", "Critical", an_encrypted_medium),
    ("qcow2", "disk-bitlocker:disk0", "Warning", a_disk("gpt", ESP, BASIC, at=9 << 20, written=b"\xeb\x58\x90-FVE-FS-")),
    ("qcow2", "disk-luks:disk0", "Information", a_disk("gpt", ESP, LINUX, at=9 << 20, written=b"LUKS\xba\xbe\0\2")),
    # raw device mapping
    *(
        ("vmx_folder", "disk-raw-device:scsi0:0", "Critical", a_vm_over_a_device(create_type, extent))
        for create_type, extent in (
            ("vmfsRawDeviceMap", 'RW 20971520 VMFSRDM "disk-rdm.vmdk"'),
            ("vmfsPassthroughRawDeviceMap", 'RW 20971520 VMFSRDM "disk-rdmp.vmdk"'),
            ("fullDevice", 'RW 20971520 FLAT "\\\\.\\PhysicalDrive0" 0'),
            ("partitionedDevice", 'RW 63 FLAT "disk-pt.vmdk" 0\nRW 20971457 FLAT "/dev/sda" 63'),
        )
    ),
    # shared, independent
    ("ovf", "disk-independent:vmdisk2", "Warning", an_ovf()),
    ("ovf", "disk-shared:vmdisk1", "Warning", an_ovf(('ovf:diskId="vmdisk1"', 'ovf:diskId="vmdisk1" ovf:shareable="true"'))),
    ("vmx_folder", "disk-independent:scsi0:1", "Warning", a_vmx("")),
    ("vmx_folder", "disk-shared:scsi0:0", "Warning", a_vmx('scsi0:0.sharing = "multi-writer"')),
    ("vmx_folder", "disk-shared:scsi0:1", "Warning", a_vmx('scsi0.sharedBus = "virtual"')),
    ("vbox_folder", "disk-independent:ide1:1", "Warning", a_vbox()),
    ("vbox_folder", "disk-shared:ide1:1", "Warning", a_vbox(('type="Writethrough"', 'type="Shareable"'))),
    (
        "xva_archive",
        "disk-shared:Ref:4",
        "Warning",
        lambda _: an_ova_xml(
            ova_xml_text.ova_xml(
                ("VM", "Ref:0", ova_xml_text.vm(VBDs=["Ref:10"])),
                ("VBD", "Ref:10", ova_xml_text.vbd("Ref:4", "0")),
                ("VDI", "Ref:4", ova_xml_text.vdi(1 << 30, "shared", sharable=True)),
            ),
            "ova.xml",
        ),
    ),
    # dynamic disks
    ("qcow2", "disk-dynamic:disk0", "Warning", a_disk("gpt", ESP, test_partitions.LDM_DATA)),
    ("qcow2", "disk-dynamic:disk0", "Warning", a_disk("dos", "42")),
    # suspended
    ("vmx_folder", "suspended", "Warning", a_vmx("", ('checkpoint.vmState = ""', 'checkpoint.vmState = "web.vmss"'))),
    ("vbox_folder", "suspended", "Warning", a_vbox(('snapshotFolder="Snapshots"', 'stateFile="Snapshots/1.sav"'))),
    ("xva_archive", "suspended", "Warning", an_xva(power_state="Suspended")),
    # firmware
    ("ovf", "uefi-state-lost", "Warning", an_ovf()),
    ("vmx_folder", "uefi-state-lost", "Warning", a_vmx("")),
    ("vbox_folder", "uefi-state-lost", "Warning", a_vbox()),
    ("xva_archive", "uefi-state-lost", "Warning", an_xva(HVM_boot_params={"firmware": "uefi"})),
    ("qcow2", "uefi-state-lost", "Warning", a_disk("gpt", ESP, LINUX)),
    ("ovf", "secure-boot", "Warning", an_ovf()),
    ("vmx_folder", "secure-boot", "Warning", a_vmx("")),
    (
        "xva_archive",
        "secure-boot",
        "Warning",
        an_xva(HVM_boot_params={"firmware": "uefi"}, platform={"secureboot": "true"}),
    ),
    ("ovf", "tpm", "Warning", an_ovf()),
    ("vmx_folder", "tpm", "Warning", a_vmx('vtpm.present = "TRUE"')),
    ("vbox_folder", "tpm", "Warning", a_vbox()),
    ("xva_archive", "tpm", "Warning", an_xva(VTPMs=["Ref:60"])),
    # unknown guest
    ("ovf", "guest-unknown", "Information", lambda _: ovf.parse(appliances.description("qemu_user"), "a.ovf").manifest),
    ("vmx_folder", "guest-unknown", "Information", a_vmx("", ('guestOS = "debian11-64"', 'guestOS = "other-64"'))),
    ("vbox_folder", "guest-unknown", "Information", a_vbox(('OSType="Debian_64"', 'OSType="Other_64"'))),
    ("xva_archive", "guest-unknown", "Information", an_xva(other_config={})),
    ("qcow2", "guest-unknown", "Information", a_disk("dos", "c")),
    # over the target's size
    ("any", "target-too-small", "Critical", lambda _: concerns.with_room(an_xva()(_), 1 << 20)),
    ("any", "target-may-fill", "Warning", lambda _: concerns.with_room(an_xva()(_), 1 << 30)),
    # passthrough
    (
        "ovf",
        "passthrough-device:Virtual TPM",
        "Warning",
        an_ovf(("<rasd:ResourceSubType>vmware.vtpm<", "<rasd:ResourceSubType>vmware.pci.passthrough<")),
    ),
    ("vmx_folder", "passthrough-device:pcipassthru0", "Warning", a_vmx('pciPassthru0.present = "TRUE"')),
    ("vmx_folder", "passthrough-device:scsi0:5", "Warning", a_vmx('scsi0:5.deviceType = "scsi-passthru"')),
    (
        "vbox_folder",
        "passthrough-device:00:1f.2",
        "Warning",
        a_vbox(("<Network>", '<HostPci enabled="true"><Devices><Device host="00:1f.2"/></Devices></HostPci><Network>')),
    ),
    ("xva_archive", "passthrough-device:0000:04:00.0", "Warning", an_xva(other_config={"pci": "0/0000:04:00.0"})),
    ("xva_archive", "passthrough-device:a virtual GPU", "Warning", an_xva(VGPUs=["Ref:70"])),
    # the rest
    ("xva_archive", "paravirtualised", "Critical", an_xva(PV_bootloader="pygrub")),
    ("ovf", "no-disks", "Critical", lambda _: ovf.parse(appliances.description("cdrom_only"), "a.ovf").manifest),
    ("qcow2", "disk-unreadable:disk0", "Critical", a_backing_file_on_the_network),
    ("qcow2", "hardware-assumed", "Information", a_disk("dos", "83")),
]


@pytest.mark.parametrize(("kind", "concern_id", "category", "made"), ROWS, ids=[f"{row[0]} {row[1]}" for row in ROWS])
def test_a_concern(kind: str, concern_id: str, category: str, made: Made, tmp_path: Path) -> None:
    found = {concern.id: concern for concern in made(tmp_path).concerns}
    assert concern_id in found
    concern = found[concern_id]
    assert concern.category == category
    assert concern.label
    for text in (concern.assessment, concern.remedy):
        assert text.strip().endswith((".", ")"))
        assert str(tmp_path) not in text


def test_a_vm_with_nothing_odd_has_no_concerns() -> None:
    assert an_xva()(Path()).concerns == ()
