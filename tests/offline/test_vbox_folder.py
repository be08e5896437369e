"""Folders of VirtualBox machines: a test an oddity."""

import shutil
from datetime import UTC, datetime
from pathlib import Path
from uuid import UUID

import pytest

from synvirt.disks import open_reader
from synvirt.errors import HostPathRejected, MalformedArchive, UnsupportedFormat
from synvirt.model.machine import VmManifest
from synvirt.offline.registry import detect
from synvirt.offline.vbox import machine as virtualbox
from synvirt.offline.vbox.folder import VboxFolder
from synvirt.sizes import GIB
from tests.contracts.readers import read_all
from tests.disks.vhd import vhd_images
from tests.offline import appliances, vbox_machines
from tests.offline.vbox_machines import BASE, DATA, FIRST, MACHINE, SECOND, SEEN

VBOX = VboxFolder()


def parsed(*changes: tuple[str, str]) -> VmManifest:
    text = MACHINE.decode()
    for old, new in changes:
        assert old in text
        text = text.replace(old, new)
    return virtualbox.parse(text.encode(), "web.vbox").manifest


def concern_ids(vm: VmManifest) -> set[str]:
    return {concern.id for concern in vm.concerns}


def content(path: Path, root: Path, key: str = "sata0:0") -> bytes:
    reader = open_reader(VBOX.open_disk(path, root, key).reader)
    try:
        return read_all(reader)
    finally:
        reader.close()


def test_a_machine() -> None:
    vm = parsed()
    assert (vm.name, vm.uuid, vm.cpu_count, vm.memory_bytes) == ("web", "3bd3d2a7-9d8b-4a3c-9a44-2b1f5c6f4d10", 2, 2 * GIB)
    assert (vm.firmware, vm.tpm, vm.guest_os.family, vm.guest_os.id) == ("uefi", True, "linux", "Debian_64")
    assert [(disk.key, disk.label, disk.bus, disk.controller, disk.unit) for disk in vm.disks] == [
        ("ide1:1", "IDE 1-1", "ide", "ide1", 1),
        ("sata0:0", "SATA 0", "sata", "sata0", 0),
    ]
    assert [(nic.key, nic.mac, nic.model, nic.network, nic.connected) for nic in vm.nics] == [
        ("adapter0", "08:00:27:f3:c2:aa", "e1000", "NAT", True),
        ("adapter1", "08:00:27:00:00:02", "virtio", "eth0", False),
    ]
    assert [nic.linux_name for nic in vm.nics] == ["enp0s3", "enp0s8"]
    assert [(snapshot.name, snapshot.created_at) for snapshot in vm.snapshots] == [
        ("clean", datetime(2024, 1, 1, 10, tzinfo=UTC)),
        ("updated", datetime(2024, 2, 1, 10, tzinfo=UTC)),
    ]
    assert concern_ids(vm) == {"disk-independent:ide1:1", "uefi-state-lost", "tpm", "snapshots-present", "media-left-out"}


def test_a_machine_keeps_the_uuid_that_its_guest_sees() -> None:
    """A clone that keeps its hardware's UUID has its original's (VBoxManage clonevm --options KeepHwUUIDs, modifyvm
    --hardware-uuid)."""
    vm = parsed(("<Hardware>", '<Hardware uuid="{967df1ba-2c00-4998-9f1b-d60bcc0c4b90}">'))
    assert (vm.uuid, vm.vm_id) == ("967df1ba-2c00-4998-9f1b-d60bcc0c4b90", "3bd3d2a7-9d8b-4a3c-9a44-2b1f5c6f4d10")


def test_which_guests_read_their_uuid_in_reverse_depends_on_a_setting() -> None:
    assert parsed().uuid_reversed_for == ("windows",)
    newer = '<Hardware><BIOS><IOAPIC enabled="true"/><SmbiosUuidLittleEndian enabled="true"/></BIOS>'
    assert parsed(("<Hardware>", newer)).uuid_reversed_for == ("linux", "other")
    newest = '<Firmware type="EFI"><SmbiosUuidLittleEndian enabled="true"/></Firmware>'
    assert parsed(('<Firmware type="EFI"/>', newest)).uuid_reversed_for == ("linux", "other")


@pytest.mark.parametrize(
    ("change", "serial"),
    [
        (("<Hardware>", "<Hardware>"), None),
        (
            ("<Hardware>", '<Hardware><BIOS><AutoSerialNumGen enabled="true"/></BIOS>'),
            "VirtualBox-3bd3d2a7-9d8b-4a3c-9a44-2b1f5c6f4d10",
        ),
        (
            ('<Firmware type="EFI"/>', '<Firmware type="EFI"><AutoSerialNumGen enabled="true"/></Firmware>'),
            "VirtualBox-3bd3d2a7-9d8b-4a3c-9a44-2b1f5c6f4d10",
        ),
        (
            ("<Hardware>", '<ExtraData><ExtraDataItem name="{}" value="string:4711"/></ExtraData><Hardware>'),
            "4711",
        ),
    ],
)
def test_a_machine_keeps_the_serial_number_that_its_guest_sees(change: tuple[str, str], serial: str | None) -> None:
    given = "VBoxInternal/Devices/efi/0/Config/DmiSystemSerial"
    assert parsed((change[0], change[1].format(given))).serial == serial


def test_a_uuid_that_a_person_gave_to_the_firmware_is_the_guests() -> None:
    """Of the firmware that the machine has: the other one's is left over."""
    item = '<ExtraDataItem name="VBoxInternal/Devices/{}/0/Config/DmiSystemUuid" value="{}"/>'
    given, other = "967df1ba-2c00-4998-9f1b-d60bcc0c4b90", "11111111-2c00-4998-9f1b-d60bcc0c4b90"
    extra = f"<ExtraData>{item.format('pcbios', other)}{item.format('efi', given)}</ExtraData>"
    assert parsed(("<Hardware>", f"{extra}<Hardware>")).uuid == given


def test_processors_that_are_plugged_out_are_not_the_guests() -> None:
    plain = '<CPU count="2"><PAE enabled="false"/><LongMode enabled="true"/></CPU>'
    some = '<CPU count="8" hotplug="true"><CpuTree><Cpu id="0"/><Cpu id="1"/><Cpu id="5"/></CpuTree></CPU>'
    vm = parsed((plain, some))
    assert vm.cpu_count == 3
    assert any("here: processors to plug in." in one.assessment for one in vm.concerns)


def test_the_newest_version_has_its_processors_and_its_clock_in_the_platform() -> None:
    plain = '<CPU count="2"><PAE enabled="false"/><LongMode enabled="true"/></CPU>'
    moved = '<Platform architecture="x86"><RTC localOrUTC="local"/><CPU count="6"/></Platform><Hardware>'
    vm = parsed((plain, ""), ("    <Hardware>\n", f"{moved}\n"))
    assert vm.cpu_count == 6
    assert any("here: RTC local." in one.assessment for one in vm.concerns)


@pytest.mark.parametrize(("sort", "named"), [("Immutable", "ide1:1 forgets"), ("Readonly", "ide1:1 can only be read")])
def test_disks_that_keep_no_writes_are_named(sort: str, named: str) -> None:
    vm = parsed(('type="Writethrough"', f'type="{sort}"'))
    assert any(f"here: {named}." in one.assessment for one in vm.concerns)


def test_a_generic_card_is_in_a_network_of_its_own() -> None:
    """Its driver's name is none of a network; without any name a plan could map it to none."""
    generic = '<GenericInterface driver="UDPTunnel"><Property name="dport" value="10001"/></GenericInterface>'
    assert parsed(('<BridgedInterface name="eth0"/>', generic)).nics[1].network == "Generic"


@pytest.mark.parametrize(
    ("system", "hardware", "named"),
    [
        ("Debian_64", '<RTC localOrUTC="local"/>', "RTC local"),
        ("Windows11_64", '<RTC localOrUTC="UTC"/>', "RTC utc"),
        ("Debian_64", '<RTC localOrUTC="UTC"/>', None),
        ("Windows11_64", '<RTC localOrUTC="local"/>', None),
        ("Debian_64", '<AudioAdapter enabled="true" controller="AC97"/>', "sound"),
    ],
)
def test_settings_that_the_guest_does_not_have_here_are_named(system: str, hardware: str, named: str | None) -> None:
    """Here a Windows has the local time, and no other guest."""
    vm = parsed(
        ('OSType="Debian_64"', f'OSType="{system}"'), ('<Memory RAMSize="2048"/>', f'<Memory RAMSize="2048"/>{hardware}')
    )
    found = [one.assessment for one in vm.concerns if one.id == "settings-not-taken-over"]
    assert found == ([f"The VM has settings that it does not have here: {named}."] if named else [])
    assert any("has VBoxGuestAdditions.iso in a CD-ROM" in one.assessment for one in vm.concerns)


def test_the_present_state_is_read_through_all_its_snapshots(tmp_path: Path) -> None:
    folder = vbox_machines.machine(tmp_path / "web")
    assert detect(folder, tmp_path).kind == "vbox_folder"
    vm = VBOX.inspect(folder, tmp_path)
    assert [(disk.key, disk.format, disk.capacity_bytes, disk.source_path) for disk in vm.disks] == [
        ("ide1:1", "vmdk", 8 << 20, "data.vmdk"),
        ("sata0:0", "vdi", 6 << 20, f"{{{SECOND}}}.vdi"),
    ]
    assert content(folder, tmp_path) == vbox_machines.blocks(SEEN)


def test_disks_are_in_the_order_of_their_ports_as_the_firmware_boots_them() -> None:
    """VirtualBox writes them as they were attached: a system disk that was taken off and put back is the last one."""
    device = '<AttachedDevice type="HardDisk" port="{}" device="{}"><Image uuid="{{{}}}"/></AttachedDevice>'
    later = "".join(device.format(port, slave, FIRST) for port, slave in ((11, 0), (1, 0)))
    vm = parsed(('<AttachedDevice type="HardDisk" hotpluggable', f'{later}<AttachedDevice type="HardDisk" hotpluggable'))
    assert [disk.key for disk in vm.disks] == ["ide1:1", "sata0:0", "sata0:1", "sata0:11"]
    first = device.format(0, 1, FIRST) + device.format(0, 0, SECOND)
    vm = parsed(('<AttachedDevice type="HardDisk" port="1"', f'{first}<AttachedDevice type="HardDisk" port="1"'))
    assert [disk.key for disk in vm.disks] == ["ide0:0", "ide0:1", "ide1:1", "sata0:0"]


def test_a_newer_version_has_its_disks_in_hardware() -> None:
    """1.19 moved StorageControllers; both places are read."""
    moved = MACHINE.replace(b"</Hardware>\n    <StorageControllers>", b"<StorageControllers>")
    moved = moved.replace(b"</StorageControllers>\n  </Machine>", b"</StorageControllers></Hardware></Machine>")
    assert virtualbox.parse(moved, "a").manifest.disks == parsed().disks


def test_before_version_4_the_registry_is_elsewhere_and_uuids_are_looked_for(tmp_path: Path) -> None:
    start, end = MACHINE.index(b"<MediaRegistry>"), MACHINE.index(b"</MediaRegistry>") + len(b"</MediaRegistry>")
    folder = vbox_machines.machine(tmp_path / "web", MACHINE[:start] + MACHINE[end:])
    assert content(folder, tmp_path) == vbox_machines.blocks(SEEN)
    vmdk = folder / "data.vmdk"
    image = bytearray(vmdk.read_bytes())
    end = image.index(b"\0", image.index(b"ddb.adapterType"))
    line = f'ddb.uuid.image="{DATA}"\n'.encode()
    image[end : end + len(line)] = line
    vmdk.write_bytes(image)
    assert content(folder, tmp_path, "ide1:1") == appliances.raw_disk(seed=1)


def test_a_disk_that_was_renamed_is_found_by_its_uuid(tmp_path: Path) -> None:
    folder = vbox_machines.machine(tmp_path / "web")
    (folder / "web.vdi").rename(folder / "copy of web.vdi")
    assert content(folder, tmp_path) == vbox_machines.blocks(SEEN)


@pytest.mark.parametrize("location", ["C:\\VMs\\disks\\web.vdi", "/home/me/VirtualBox VMs/disks/web.vdi"])
def test_so_is_one_of_another_machines_folder_where_the_machines_folder_is_the_root(location: str, tmp_path: Path) -> None:
    folder = vbox_machines.machine(tmp_path, vbox_machines.MACHINE.replace(b'"web.vdi"', f'"{location}"'.encode()))
    (folder / "web.vdi").rename(folder / "copy of web.vdi")
    assert content(folder, folder) == vbox_machines.blocks(SEEN)


def vmdk_machine(folder: Path) -> Path:
    """VirtualBox makes snapshots in the format of the disk: a machine that came from an OVA has VMDKs throughout."""
    (folder / "Snapshots").mkdir(parents=True)
    (folder / "web.vbox").write_bytes(vbox_machines.one_disk(memory_mib=512, extension="vmdk"))
    (folder / "web.vmdk").write_bytes(vbox_machines.vmdk(vbox_machines.blocks("AAAA-A"), BASE))
    (folder / f"Snapshots/{{{FIRST}}}.vmdk").write_bytes(vbox_machines.vmdk(vbox_machines.blocks("-BC--D"), FIRST, BASE))
    return folder


def test_the_snapshots_of_a_vmdk_name_their_parent_by_uuid_alone(tmp_path: Path) -> None:
    folder = vmdk_machine(tmp_path / "web")
    vm = VBOX.inspect(folder, tmp_path)
    assert [(disk.format, disk.capacity_bytes) for disk in vm.disks] == [("vmdk", 6 << 20)]
    assert content(folder, tmp_path) == vbox_machines.blocks("ABCA-D")
    (folder / "web.vmdk").rename(folder / "renamed.vmdk")
    assert content(folder, tmp_path) == vbox_machines.blocks("ABCA-D")


def test_the_snapshots_of_a_vhd_say_where_their_parent_lies(tmp_path: Path) -> None:
    folder = tmp_path / "web"
    (folder / "Snapshots").mkdir(parents=True)
    (folder / "web.vbox").write_bytes(vbox_machines.one_disk(memory_mib=512, extension="vhd"))
    size = 64 << 10
    base = vhd_images.Vhd(size, vhd_images.FIXED, identity=UUID(BASE))
    blocks = (None, vhd_images.Block(0, 0xFF), *[None] * 14)
    locators = ((b"W2ru", "..\\web.vhd".encode("utf-16-le")),)
    newer = vhd_images.Vhd(
        size, vhd_images.DIFFERENCING, blocks=blocks, identity=UUID(FIRST), parent=UUID(BASE), locators=locators
    )
    (folder / "web.vhd").write_bytes(base.file(1))
    (folder / f"Snapshots/{{{FIRST}}}.vhd").write_bytes(newer.file(2))
    vm = VBOX.inspect(folder, tmp_path)
    assert [(disk.format, disk.capacity_bytes) for disk in vm.disks] == [("vhd", size)]
    assert content(folder, tmp_path) == newer.disk(newer.file(2), base.disk(base.file(1)))


def test_a_vmdk_snapshot_whose_parent_is_gone(tmp_path: Path) -> None:
    folder = vmdk_machine(tmp_path / "web")
    (folder / "web.vmdk").unlink()
    with pytest.raises(MalformedArchive, match=f"medium {BASE} is the file 'web.vmdk'"):
        VBOX.inspect(folder, tmp_path)


def test_a_vmdk_snapshot_by_itself_is_no_whole_disk(tmp_path: Path) -> None:
    """To every other reader it looks like one: VMware's word for a parent is left empty."""
    path = vmdk_machine(tmp_path / "web") / f"Snapshots/{{{FIRST}}}.vmdk"
    vm = detect(path, tmp_path).inspect(path, tmp_path)
    (critical,) = [concern for concern in vm.concerns if concern.category == "Critical"]
    assert (critical.id, BASE in critical.assessment) == ("disk-unreadable:disk0", True)
    with pytest.raises(UnsupportedFormat, match="holds only what differs from another image"):
        open_reader(detect(path, tmp_path).open_disk(path, tmp_path, "disk0").reader)


def test_a_parent_in_whose_place_another_image_lies_is_not_read(tmp_path: Path) -> None:
    folder = vbox_machines.machine(tmp_path / "web")
    (folder / "web.vdi").write_bytes(vbox_machines.vdi(vbox_machines.blocks("ZZZZZZ"), DATA))
    with pytest.raises(MalformedArchive, match=f"medium {BASE} is the file 'web.vdi', and no image with that UUID"):
        VBOX.inspect(folder, tmp_path)
    (folder / "kept.vdi").write_bytes(vbox_machines.vdi(vbox_machines.blocks(vbox_machines.CHAIN[BASE]), BASE))
    assert content(folder, tmp_path) == vbox_machines.blocks(SEEN)


def test_nor_is_one_that_is_called_by_the_parents_uuid(tmp_path: Path) -> None:
    """As snapshots are called. The UUID in the image itself says which it is."""
    folder = vbox_machines.machine(tmp_path / "web")
    (folder / f"Snapshots/{{{FIRST}}}.vdi").write_bytes(vbox_machines.vdi(vbox_machines.blocks("-Z----"), DATA, BASE))
    with pytest.raises(MalformedArchive, match=f"medium {FIRST} is the file 'Snapshots/.*', and no image with that UUID"):
        VBOX.inspect(folder, tmp_path)
    (folder / "kept.vdi").write_bytes(vbox_machines.vdi(vbox_machines.blocks(vbox_machines.CHAIN[FIRST]), FIRST, BASE))
    assert content(folder, tmp_path) == vbox_machines.blocks(SEEN)


def test_nor_is_one_in_a_file_with_another_suffix(tmp_path: Path) -> None:
    """VBoxManage makes images of any format in files of any name."""
    folder = vbox_machines.machine(tmp_path / "web", MACHINE.replace(b'location="web.vdi"', b'location="web.img"'))
    (folder / "web.vdi").rename(folder / "web.img")
    assert content(folder, tmp_path) == vbox_machines.blocks(SEEN)
    (folder / "web.img").write_bytes(vbox_machines.vdi(vbox_machines.blocks("ZZZZZZ"), DATA))
    with pytest.raises(MalformedArchive, match=f"medium {BASE} is the file 'web.img', and no image with that UUID"):
        VBOX.inspect(folder, tmp_path)


def test_a_disk_is_never_the_image_of_another_disk_of_the_same_name(tmp_path: Path) -> None:
    """Two folders of the machine's own host may each have a disk.vdi: the UUIDs in them say which is which."""
    text = MACHINE.replace(b"VirtualBox VMs/web/data.vmdk", b"disks/web.vdi")
    folder = vbox_machines.machine(tmp_path / "web", text)
    with pytest.raises(MalformedArchive, match=f"medium {DATA} is the file '/home/me/disks/web.vdi', and no image with that"):
        VBOX.open_disk(folder, tmp_path, "ide1:1")
    (folder / "other.vdi").write_bytes(vbox_machines.vdi(vbox_machines.blocks("ZZZZZZ"), DATA))
    assert content(folder, tmp_path, "ide1:1") == vbox_machines.blocks("ZZZZZZ")
    assert content(folder, tmp_path) == vbox_machines.blocks(SEEN)


def test_a_missing_snapshot_says_which(tmp_path: Path) -> None:
    folder = vbox_machines.machine(tmp_path / "web")
    (folder / f"Snapshots/{{{FIRST}}}.vdi").unlink()
    with pytest.raises(
        MalformedArchive, match=f"medium {FIRST} is the file 'Snapshots/.*', and no image with that UUID is in web"
    ):
        VBOX.inspect(folder, tmp_path)


def test_a_chain_that_is_a_loop(tmp_path: Path) -> None:
    folder = vbox_machines.machine(tmp_path / "web")
    (folder / "web.vdi").write_bytes(vbox_machines.vdi(vbox_machines.blocks(vbox_machines.CHAIN[BASE]), BASE, SECOND))
    with pytest.raises(MalformedArchive, match="or a loop of them"):
        VBOX.open_disk(folder, tmp_path, "sata0:0")


def test_a_disk_outside_the_root(tmp_path: Path) -> None:
    root = tmp_path / "imports"
    folder = vbox_machines.machine(root / "web")
    shutil.move(folder / "web.vdi", tmp_path / "web.vdi")
    (folder / "web.vdi").symlink_to("../../web.vdi")
    with pytest.raises(HostPathRejected):
        VBOX.inspect(folder, root)


def test_an_encrypted_disk_is_a_critical_concern(tmp_path: Path) -> None:
    old = b'format="VMDK" type="Writethrough"/>'
    assert old in MACHINE
    new = b'format="VMDK" type="Writethrough"><Property name="CRYPT/KeyStore" value="x"/></HardDisk>'
    folder = vbox_machines.machine(tmp_path / "web", MACHINE.replace(old, new))
    assert "disk-unreadable:ide1:1" in concern_ids(VBOX.inspect(folder, tmp_path))
    with pytest.raises(UnsupportedFormat, match="is encrypted"):
        VBOX.open_disk(folder, tmp_path, "ide1:1")


def test_an_encrypted_machine_is_refused_with_the_reason() -> None:
    text = b'<VirtualBox xmlns="http://www.virtualbox.org/" version="1.19-linux"><MachineEncrypted uuid="{x}"/></VirtualBox>'
    with pytest.raises(UnsupportedFormat, match="is encrypted: the machine can be read with its password only"):
        virtualbox.parse(text, "web.vbox")


def test_the_global_file_is_no_machine() -> None:
    with pytest.raises(MalformedArchive, match="VirtualBox' global file"):
        virtualbox.parse(b'<VirtualBox version="1.12"><Global/></VirtualBox>', "VirtualBox.xml")


def test_a_saved_state() -> None:
    vm = parsed(('snapshotFolder="Snapshots"', 'snapshotFolder="Snapshots" stateFile="Snapshots/2024.sav"'))
    assert vm.power_state == "suspended"
    assert "suspended" in concern_ids(vm)


@pytest.mark.parametrize(
    ("kind", "bus"),
    [
        ("PIIX3", "ide"),
        ("ICH6", "ide"),
        ("AHCI", "sata"),
        ("LsiLogic", "scsi"),
        ("BusLogic", "scsi"),
        ("LsiLogicSas", "scsi"),
        ("NVMe", "nvme"),
        ("VirtioSCSI", "scsi"),
    ],
)
def test_controllers(kind: str, bus: str) -> None:
    vm = parsed(('name="SATA" type="AHCI" PortCount', f'name="SATA" type="{kind}" PortCount'))
    assert vm.disks[1].bus == bus


@pytest.mark.parametrize(
    ("old", "new", "says"),
    [
        (f'{{{FIRST}}}" location', f'{{{BASE}}}" location', f"two hard disks have the UUID {BASE}"),
        (f'uuid="{{{DATA}}}" location', 'uuid="x" location', "has no UUID"),
        (
            'type="HardDisk" port="1" device="1"',
            'type="HardDisk" port="1" device="1"><Image uuid="{'
            + BASE
            + '}"/></AttachedDevice><AttachedDevice type="HardDisk" port="1" device="1"',
            "two disks are attached at ide1:1",
        ),
        ("<VirtualBox", "<x/><VirtualBox", "not well-formed"),
    ],
)
def test_damage_is_named(old: str, new: str, says: str) -> None:
    with pytest.raises(MalformedArchive, match=says):
        parsed((old, new))
