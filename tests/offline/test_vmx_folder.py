"""Folders of VMware's VMs: a test an oddity."""

import re
import shutil
from datetime import UTC, datetime
from pathlib import Path

import pytest

from synvirt.disks import open_reader
from synvirt.disks.specs import ImageSpec
from synvirt.errors import HostPathRejected, MalformedArchive, UnsupportedFormat
from synvirt.model.machine import VmManifest
from synvirt.offline.registry import detect
from synvirt.offline.vmx import configuration as vmx
from synvirt.offline.vmx.folder import VmxFolder
from synvirt.sizes import GIB, MIB
from tests.contracts.readers import read_all
from tests.offline import appliances

VMX = VmxFolder()
WORKSTATION = (appliances.DESCRIPTIONS / "workstation.vmx").read_bytes()
SMALL = (
    'config.version = "8"\ndisplayName = "small"\nscsi0.present = "TRUE"\nscsi0:0.present = "TRUE"\nscsi0:0.fileName = "{}"\n'
)


def parsed(*changes: tuple[str, str], more: str = "") -> VmManifest:
    text = WORKSTATION.decode()
    for old, new in changes:
        assert old in text
        text = text.replace(old, new)
    return vmx.parse((text + more).encode(), "web.vmx").manifest


def concern_ids(vm: VmManifest) -> set[str]:
    return {concern.id for concern in vm.concerns}


def vm_folder(path: Path, file_name: str, *, raw: bytes, disk: str = "disk.vmdk") -> Path:
    """A folder with a VMX that names `file_name`, and a monolithic sparse VMDK called `disk`."""
    path.mkdir(parents=True, exist_ok=True)
    (path / "small.vmx").write_text(SMALL.format(file_name))
    appliances.image(path, disk, "vmdk", raw)
    return path


def content(path: Path, root: Path, key: str = "scsi0:0") -> bytes:
    reader = open_reader(VMX.open_disk(path, root, key).reader)
    try:
        return read_all(reader)
    finally:
        reader.close()


# ── the file ─────────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("hardware", "families"),
    [("12", ("windows",)), ("13", ("windows", "linux", "other")), ("21", ("windows", "linux", "other")), ("", ("windows",))],
)
def test_which_guests_read_their_uuid_in_reverse_depends_on_the_hardware(hardware: str, families: tuple[str, ...]) -> None:
    vm = parsed(('virtualHW.version = "19"', f'virtualHW.version = "{hardware}"'))
    assert (vm.uuid, vm.uuid_reversed_for) == ("564d0a1b-2c3d-4e5f-6071-8293a4b5c6d7", families)
    assert vm.serial == "VMware-56 4d 0a 1b 2c 3d 4e 5f-60 71 82 93 a4 b5 c6 d7"


@pytest.mark.parametrize(
    ("more", "serial", "named"),
    [
        ('serialNumber.reflectHost = "TRUE"', None, "serialnumber.reflecthost"),
        ('serialNumber.reflectHost = "FALSE"\nserialNumber = "C02X7"\nSMBIOS.use12CharSerialNumber = "TRUE"', "C02X7", None),
        ('SMBIOS.use12CharSerialNumber = "TRUE"', None, "smbios.use12charserialnumber"),
        ('hw.model = "MacPro7,1"\nboard-id = "Mac-27"\nserialNumber = "C02X7"', "C02X7", "board-id, hw.model"),
    ],
)
def test_a_serial_number_that_vmware_does_not_make_of_the_uuid(more: str, serial: str | None, named: str | None) -> None:
    """The host's, one that a person gave, and macOS' of twelve characters: the guest never had the one of the UUID."""
    vm = parsed(more=f"{more}\n")
    assert vm.serial == serial
    found = [one.assessment for one in vm.concerns if one.id == "settings-not-taken-over"]
    assert found == ([f"The VM has settings that it does not have here: {named}."] if named else [])


def test_workstation() -> None:
    vm = parsed()
    assert (vm.name, vm.uuid) == ('web "one"', "564d0a1b-2c3d-4e5f-6071-8293a4b5c6d7")
    assert (vm.cpu_count, vm.cores_per_socket, vm.memory_bytes) == (4, 2, 4 * GIB)
    assert (vm.firmware, vm.secure_boot, vm.tpm, vm.guest_os.family) == ("uefi", True, False, "linux")
    assert [(disk.key, disk.bus, disk.controller, disk.unit, disk.source_path) for disk in vm.disks] == [
        ("scsi0:0", "scsi", "scsi0", 0, "web.vmdk"),
        ("scsi0:1", "scsi", "scsi0", 1, "data/web data.vmdk"),
        ("nvme0:0", "nvme", "nvme0", 0, "fast.vmdk"),
    ]
    assert [disk.boot_order for disk in vm.disks] == [2, None, 1]
    assert [(nic.key, nic.mac, nic.model, nic.network, nic.connected) for nic in vm.nics] == [
        ("ethernet0", "00:0c:29:b5:c6:d7", "vmxnet3", "nat", True),
        ("ethernet1", "00:50:56:01:02:03", "e1000e", "VM Network", False),
    ]
    assert [nic.linux_name for nic in vm.nics] == ["ens160", None], "the second has no slot yet"
    assert concern_ids(vm) == {"disk-independent:scsi0:1", "uefi-state-lost", "secure-boot", "media-left-out"}


@pytest.mark.parametrize(
    ("line", "value"),
    [
        ('displayName = "plain"', "plain"),
        ("displayname=plain", "plain"),
        ("  DISPLAYNAME   =   plain   ", "plain"),
        ('displayName = "no end', "no end"),
        ('displayName = "hash # inside"', "hash # inside"),
        ("displayName = plain # remark", "plain"),
        ('displayName = "a|7Cb|22c|0A"', 'a|b"c\n'),
        ('displayName = ""', ""),
        ('displayName = "first"\ndisplayName = "second"', "second"),
        ('\r\ndisplayName = "windows"\r\n', "windows"),
        ('\ufeffjunk\n!!\n= nothing\ndisplayName = "x"', "x"),
    ],
)
def test_odd_lines(line: str, value: str) -> None:
    assert vmx.dictionary(line.encode(), "a.vmx")["displayname"] == value


@pytest.mark.parametrize(
    ("named", "python"),
    [
        ("UTF-8", "utf-8"),
        ("windows-1252", "cp1252"),
        ("windows-1251", "cp1251"),
        ("GBK", "gbk"),
        ("Shift_JIS", "shift_jis"),
        ("ISO-8859-1", "latin-1"),
    ],
)
def test_encodings(named: str, python: str) -> None:
    name = {"cp1251": "сервер", "gbk": "服务器", "shift_jis": "サーバー"}.get(python, "Müller")
    data = f'.encoding = "{named}"\ndisplayName = "{name}"\n'.encode(python)
    assert vmx.dictionary(data, "a.vmx")["displayname"] == name


def test_no_encoding_and_no_utf_8_is_western_windows() -> None:
    assert vmx.dictionary('displayName = "Müller €"'.encode("cp1252"), "a.vmx")["displayname"] == "Müller €"


@pytest.mark.parametrize("named", ["punycode", "idna", "zlib", "utf-7", "unicode_escape", "no-such", "cp0000"])
def test_encodings_that_no_host_has_are_not_used(named: str) -> None:
    assert vmx.dictionary(f'.encoding = "{named}"\na = "b"'.encode(), "a.vmx")["a"] == "b"


def test_an_encrypted_vm_is_refused_with_the_reason() -> None:
    text = b'.encoding = "UTF-8"\ndisplayName = "x"\nencryption.keySafe = "vmware:key/list/..."\nencryption.data = "abc"\n'
    with pytest.raises(UnsupportedFormat, match=r"web.vmx is encrypted: its hardware can be read with its password only"):
        vmx.parse(text, "web.vmx")


def test_a_vm_that_is_encrypted_for_its_tpm_only_is_readable() -> None:
    vm = parsed(more='\nvmx.encryptionType = "partial"\nencryption.data = "abc"\nvtpm.present = "TRUE"\n')
    assert vm.tpm
    assert len(vm.disks) == 3


def test_memory_and_processors_have_defaults() -> None:
    vm = vmx.parse(b'config.version = "8"\n', "a.vmx").manifest
    assert (vm.name, vm.cpu_count, vm.memory_bytes, vm.firmware) == ("imported", 1, 256 * MIB, "bios")
    assert "no-disks" in concern_ids(vm)


def test_a_controller_that_is_absent_takes_its_disks_along() -> None:
    assert [disk.key for disk in parsed(('scsi0.present = "TRUE"', 'scsi0.present = "FALSE"')).disks] == ["nvme0:0"]


def test_a_device_without_present_is_there_if_it_has_a_file() -> None:
    assert [disk.key for disk in vmx.parse(b'guestOS = "x"\nide0:0.fileName = "a.vmdk"\n', "a.vmx").manifest.disks] == [
        "ide0:0"
    ]


def test_more_than_nine_units_are_in_order() -> None:
    lines = "".join(f'scsi0:{unit}.fileName = "{unit}.vmdk"\n' for unit in (10, 2, 1))
    assert [disk.unit for disk in vmx.parse(f'guestOS = "x"\n{lines}'.encode(), "a.vmx").manifest.disks] == [1, 2, 10]


def test_a_disk_on_nvme_that_was_added_is_not_the_first() -> None:
    """Without `bios.hddOrder` nothing in the file says what the VM boots from."""
    places = ("nvme0:0", "scsi1:0", "scsi0:0", "sata0:0", "ide1:0")
    lines = "".join(f'{place}.fileName = "a.vmdk"\n' for place in places)
    disks = vmx.parse(f'guestOS = "x"\n{lines}'.encode(), "a.vmx").manifest.disks
    assert [disk.key for disk in disks] == ["ide1:0", "sata0:0", "scsi0:0", "scsi1:0", "nvme0:0"]


def test_shared_disks_and_passthrough_and_suspension() -> None:
    vm = parsed(
        ('checkpoint.vmState = ""', 'checkpoint.vmState = "web.vmss"'),
        more='scsi0:0.sharing = "multi-writer"\npciPassthru0.present = "TRUE"\npciPassthru1.present = "FALSE"\n',
    )
    assert {"disk-shared:scsi0:0", "passthrough-device:pcipassthru0", "suspended"} <= concern_ids(vm)
    assert vm.power_state == "suspended"


@pytest.mark.parametrize(
    ("guest", "family"), [("windows2019srv-64", "windows"), ("win31", "windows"), ("ubuntu-64", "linux"), ("other", "other")]
)
def test_guests(guest: str, family: str) -> None:
    assert parsed(('guestOS = "debian11-64"', f'guestOS = "{guest}"')).guest_os.family == family


def test_a_text_that_is_no_vmx() -> None:
    with pytest.raises(MalformedArchive, match="is not a VMX file"):
        vmx.parse(b"what = this\n", "a.vmx")


def test_a_vmx_that_is_too_large() -> None:
    with pytest.raises(MalformedArchive, match="1048576 at most"):
        vmx.parse(b"a" * (1 << 20) + b"a", "a.vmx")
    with pytest.raises(MalformedArchive, match="over 20000 entries"):
        vmx.parse(b"".join(b"k%d=1\n" % number for number in range(20_001)), "a.vmx")


# ── the folder ───────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    "subformat", ["monolithicSparse", "monolithicFlat", "twoGbMaxExtentSparse", "twoGbMaxExtentFlat", "streamOptimized"]
)
def test_every_way_in_which_vmware_lays_a_disk_out(subformat: str, tmp_path: Path) -> None:
    raw = appliances.raw_disk()
    folder = tmp_path / "web"
    folder.mkdir()
    (folder / "small.vmx").write_text(SMALL.format("disk.vmdk"))
    appliances.image(folder, "disk.vmdk", "vmdk", raw, f"subformat={subformat}")
    assert detect(folder, tmp_path).kind == "vmx_folder"
    vm = VMX.inspect(folder, tmp_path)
    assert (vm.name, vm.disks[0].capacity_bytes, vm.disks[0].format) == ("small", len(raw), "vmdk")
    assert content(folder, tmp_path) == raw


@pytest.mark.parametrize(
    "written",
    [
        "/vmfs/volumes/5f1a2b3c-4d5e6f70-8192-a3b4c5d6e7f8/web/disk.vmdk",
        "/vmfs/volumes/datastore1/web/disk.vmdk",
        "C:\\\\Users\\\\me\\\\VMs\\\\web\\\\disk.vmdk",
        "D:\\VMs\\disk.vmdk",
        "/home/me/vmware/web/disk.vmdk",
        "D:\\VMs\\Web\\DISK.VMDK",
        "Disk.vmdk",
    ],
)
def test_absolute_paths_of_another_machine_are_looked_for_beside_the_vmx(written: str, tmp_path: Path) -> None:
    raw = appliances.raw_disk()
    assert content(vm_folder(tmp_path / "web", written, raw=raw), tmp_path) == raw


def test_a_disk_of_another_datastore_folder_beside_this_one(tmp_path: Path) -> None:
    raw = appliances.raw_disk()
    folder = vm_folder(tmp_path / "web", "/vmfs/volumes/ssd/web_1/disk.vmdk", raw=raw)
    (tmp_path / "web_1").mkdir()
    shutil.move(folder / "disk.vmdk", tmp_path / "web_1" / "disk.vmdk")
    assert content(folder, tmp_path) == raw


TWO = SMALL.format("web.vmdk") + 'scsi0:1.present = "TRUE"\nscsi0:1.fileName = "{}"\n'


def two_disks(path: Path, second: str, *, at: str | None) -> Path:
    """A VM with web.vmdk beside its VMX, and a second disk that is called `second` there and lies in the folder `at` here."""
    path.mkdir(parents=True)
    (path / "small.vmx").write_text(TWO.format(second))
    appliances.image(path, "web.vmdk", "vmdk", appliances.raw_disk())
    if at is not None:
        (path / at).mkdir(parents=True, exist_ok=True)
        appliances.image(path / at, "web.vmdk", "vmdk", appliances.raw_disk(seed=7))
    return path


@pytest.mark.parametrize("at", ["web", "../ssd", None])
@pytest.mark.parametrize(
    "second", ["/vmfs/volumes/ssd/web/web.vmdk", "D:\\VMs\\web\\web.vmdk", "data/web.vmdk", "/ssd/web.vmdk"]
)
def test_a_disk_of_the_same_name_on_another_datastore_is_never_the_one_beside_the_vmx(
    second: str, at: str | None, tmp_path: Path
) -> None:
    """vSphere calls the first disk of a VM on each datastore alike."""
    folder = two_disks(tmp_path / "web", second, at=at)
    if (second.count("web") == 2 and at == "web") or (second == "/ssd/web.vmdk" and at == "../ssd"):
        assert content(folder, tmp_path) == appliances.raw_disk()
        assert content(folder, tmp_path, "scsi0:1") == appliances.raw_disk(seed=7)
        return
    with pytest.raises(MalformedArchive, match=r"disk scsi0:1 is the file .*, which is neither in web"):
        VMX.inspect(folder, tmp_path)
    with pytest.raises(MalformedArchive, match=r"disk scsi0:1 is the file .*, which is neither in web") as problem:
        VMX.open_disk(folder, tmp_path, "scsi0:1")
    assert "Where two disks have one name, rename one of them" in str(problem.value.hint)


def test_two_disks_that_only_their_datastores_tell_apart_are_not_guessed(tmp_path: Path) -> None:
    folder = two_disks(tmp_path / "web", "/vmfs/volumes/ssd/web/web.vmdk", at="web")
    text = (folder / "small.vmx").read_text()
    (folder / "small.vmx").write_text(text.replace('"web.vmdk"', '"/vmfs/volumes/hdd/web/web.vmdk"'))
    with pytest.raises(MalformedArchive, match=r"disk scsi0:0 is the file '/vmfs/volumes/hdd/web/web.vmdk', which is neither"):
        VMX.inspect(folder, tmp_path)


def test_a_disk_that_is_nowhere(tmp_path: Path) -> None:
    folder = vm_folder(tmp_path / "web", "/vmfs/volumes/ssd/web_1/other.vmdk", raw=appliances.raw_disk())
    with pytest.raises(
        MalformedArchive, match=r"scsi0:0 is the file '/vmfs/volumes/ssd/web_1/other.vmdk', which is neither in web"
    ):
        VMX.inspect(folder, tmp_path)


@pytest.mark.parametrize("written", ["/vmfs/volumes/ssd/web_1/other.vmdk", "C:\\VMs\\other\\other.vmdk"])
def test_a_disk_that_is_nowhere_in_a_root_without_another_folder(written: str, tmp_path: Path) -> None:
    """As where a person names the folder of the machine: nothing in it leads out."""
    folder = vm_folder(tmp_path, written, raw=appliances.raw_disk())
    with pytest.raises(MalformedArchive, match=r"scsi0:0 is the file '.*other.vmdk', which is neither in"):
        VMX.inspect(folder, folder)


@pytest.mark.parametrize("written", ["../../secret.vmdk", "link.vmdk"])
def test_a_disk_outside_the_root(written: str, tmp_path: Path) -> None:
    root = tmp_path / "imports"
    folder = vm_folder(root / "web", written, raw=appliances.raw_disk())
    shutil.move(folder / "disk.vmdk", tmp_path / "secret.vmdk")
    (folder / "link.vmdk").symlink_to("../../secret.vmdk")
    with pytest.raises(HostPathRejected):
        VMX.inspect(folder, root)
    with pytest.raises(HostPathRejected):
        VMX.open_disk(folder, root, "scsi0:0")


def test_the_vmx_names_the_newest_snapshot_of_the_disk(tmp_path: Path) -> None:
    """By hand, since qemu-img writes no VMware snapshots: an empty delta whose parent is the base."""
    raw = appliances.raw_disk()
    folder = vm_folder(tmp_path / "web", "disk-000001.vmdk", raw=raw)
    base = (folder / "disk.vmdk").read_bytes()
    cid = re.search(rb"\nCID=([0-9a-f]{1,8})", base)
    assert cid is not None
    sectors = len(raw) // 512
    delta = appliances.image(folder, "disk-000001-delta.vmdk", "vmdk", bytes(len(raw)))
    (folder / "disk-000001.vmdk").write_text(
        "# Disk DescriptorFile\nversion=1\nCID=11111111\n"
        f'parentCID={cid[1].decode()}\ncreateType="monolithicSparse"\nparentFileNameHint="disk.vmdk"\n'
        f'RW {sectors} SPARSE "{delta.name}"\n'
    )
    (folder / "small.vmsd").write_text(
        'snapshot.numSnapshots = "1"\nsnapshot.current = "1"\nsnapshot0.uid = "1"\n'
        'snapshot0.displayName = "before the update"\n'
        'snapshot0.createTimeHigh = "398435"\nsnapshot0.createTimeLow = "-1234567890"\nsnapshot0.disk0.fileName = "disk.vmdk"\n'
    )
    assert content(folder, tmp_path) == raw
    vm = VMX.inspect(folder, tmp_path)
    (snapshot,) = vm.snapshots
    assert (snapshot.id, snapshot.name) == ("1", "before the update")
    assert snapshot.created_at == datetime.fromtimestamp(((398435 << 32) + 3060399406) / 1e6, UTC)
    assert "snapshots-present" in concern_ids(vm)


def test_a_snapshot_list_with_nonsense_in_it() -> None:
    text = (
        b'snapshot.numSnapshots = "3"\nsnapshot0.uid = "1"\nsnapshot0.createTimeHigh = "x"\n'
        b'snapshot2.uid = "7"\nsnapshot2.createTimeHigh = "99999999999999"\nsnapshot2.createTimeLow="0"\n'
    )
    assert [(snapshot.id, snapshot.created_at) for snapshot in vmx.snapshots(text, "a.vmsd")] == [("1", None), ("7", None)]


def test_a_missing_extent_says_which(tmp_path: Path) -> None:
    folder = tmp_path / "web"
    folder.mkdir()
    (folder / "small.vmx").write_text(SMALL.format("disk.vmdk"))
    appliances.image(folder, "disk.vmdk", "vmdk", appliances.raw_disk(), "subformat=monolithicFlat")
    (folder / "disk-flat.vmdk").unlink()
    with pytest.raises(MalformedArchive, match=r"disk-flat.vmdk"):
        VMX.inspect(folder, tmp_path)


def test_two_vms_in_a_folder(tmp_path: Path) -> None:
    folder = vm_folder(tmp_path / "web", "disk.vmdk", raw=appliances.raw_disk())
    shutil.copy(folder / "small.vmx", folder / "other.vmx")
    with pytest.raises(MalformedArchive, match=r"web has 2 files with the suffix .vmx: other.vmx, small.vmx"):
        VMX.inspect(folder, tmp_path)
    assert VMX.inspect(folder / "other.vmx", tmp_path).name == "small"


def test_a_template(tmp_path: Path) -> None:
    folder = vm_folder(tmp_path / "web", "disk.vmdk", raw=appliances.raw_disk())
    (folder / "small.vmx").rename(folder / "small.vmtx")
    assert detect(folder, tmp_path).kind == "vmx_folder"
    assert VMX.inspect(folder, tmp_path).name == "small"


def test_lock_files_of_a_running_vm(tmp_path: Path) -> None:
    folder = vm_folder(tmp_path / "web", "disk.vmdk", raw=appliances.raw_disk())
    (folder / "small.vmx.lck").mkdir()
    assert "in-use" in concern_ids(VMX.inspect(folder, tmp_path))


def test_an_image_may_name_files_under_the_root(tmp_path: Path) -> None:
    folder = vm_folder(tmp_path / "a" / "web", "disk.vmdk", raw=appliances.raw_disk())
    spec = VMX.open_disk(folder, tmp_path, "scsi0:0").reader
    assert isinstance(spec, ImageSpec)
    assert (spec.root, spec.name) == (str(tmp_path), "a/web/disk.vmdk")


def test_cards_of_distributed_switches_are_in_networks_of_their_own() -> None:
    """ESX writes no name for them, only ids; with none at all a plan could not map one card's network without the other's."""
    more = "".join(
        f'ethernet{number}.present = "TRUE"\nethernet{number}.{key} = "{value}"\n'
        for number, key, value in (
            (3, "dvs.portgroupId", "dvportgroup-75"),
            (4, "dvs.portgroupId", "dvportgroup-80"),
            (5, "opaqueNetwork.id", "8e5b5eb2-8a3a-4c9e-91a4-6de1b2c8fa4e"),
        )
    )
    assert [nic.network for nic in parsed(more=more).nics] == [
        "nat",
        "VM Network",
        "dvportgroup-75",
        "dvportgroup-80",
        "8e5b5eb2-8a3a-4c9e-91a4-6de1b2c8fa4e",
    ]


@pytest.mark.parametrize(
    ("more", "named"),
    [
        ('smbios.reflectHost = "TRUE"', "smbios.reflecthost"),
        ('SMBIOS.assetTag = "A-7"', "smbios.assettag"),
        ('scsi0:0.mode = "independent-nonpersistent"', "scsi0:0 forgets"),
        ('sound.present = "TRUE"', "sound"),
    ],
)
def test_settings_that_the_guest_does_not_have_here_are_named(more: str, named: str) -> None:
    """A Windows with its maker's licence asks for its host's SMBIOS; a disk that forgets keeps what is written here."""
    (found,) = [one for one in parsed(more=f"{more}\n").concerns if one.id == "settings-not-taken-over"]
    assert found.assessment == f"The VM has settings that it does not have here: {named}."


def test_discs_in_drives_are_said_not_to_be_imported() -> None:
    """Images alone: a drive of the host is none, nor one that is not present."""
    more = (
        'floppy0.fileType = "file"\nfloppy0.fileName = "C:\\\\a b.flp"\nide0:1.present = "FALSE"\n'
        'ide0:1.deviceType = "cdrom-image"\nide0:1.fileName = "gone.iso"\n'
    )
    (found,) = [one for one in parsed(more=more).concerns if one.id == "media-left-out"]
    assert "has a b.flp, linux.iso in a CD-ROM" in found.assessment
