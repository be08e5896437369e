"""Hyper-V exports: a test an oddity. The storage format itself is in test_vmcx_storage.py."""

import shutil
from datetime import UTC, datetime
from pathlib import Path
from typing import Any
from uuid import UUID

import pytest

from synvirt.disks import open_reader
from synvirt.errors import HostPathRejected, MalformedArchive, UnsupportedFormat
from synvirt.model.machine import VmManifest
from synvirt.offline.hyperv import machine as vmcx_machine
from synvirt.offline.hyperv.export import VmcxExport
from synvirt.offline.registry import detect
from synvirt.sizes import GIB, MIB
from tests.contracts.readers import read_all
from tests.disks.vhd import vhdx_images
from tests.offline import appliances
from tests.offline.hyperv import hyperv_exports
from tests.offline.hyperv.hyperv_exports import (
    BIOS,
    BIOS_GUID,
    BIOS_SERIAL,
    CHECKPOINT,
    MACHINE,
    Tree,
    configuration,
    drive,
    ethernet,
    laid_over,
)

VMCX = VmcxExport()


def parsed(tree: Tree, **known: Any) -> VmManifest:
    return vmcx_machine.machine(tree, "m.vmcx", **known).manifest


def described(**fields: Any) -> VmManifest:
    first = "scsi0:0" if fields.get("generation") == 2 else "ide0:0"
    return parsed(configuration(fields.pop("disks", {first: "C:\\VMs\\a.vhdx"}), **fields))


def concern_ids(vm: VmManifest) -> set[str]:
    return {concern.id for concern in vm.concerns}


def export(root: Path, raw: bytes | None = None, **fields: Any) -> Path:
    disk = appliances.image(root, "disk.vhdx", "vhdx", appliances.raw_disk() if raw is None else raw)
    return hyperv_exports.export(root / "web", {fields.pop("at", "ide0:0"): disk}, **fields)


def content(path: Path, root: Path, key: str = "ide0:0") -> bytes:
    reader = open_reader(VMCX.open_disk(path, root, key).reader)
    try:
        return read_all(reader)
    finally:
        reader.close()


# ── the machine ──────────────────────────────────────────────────────────────────────────────────────────────────────


def test_a_generation_1_machine() -> None:
    vm = described(disks={"ide0:0": "C:\\a.vhdx", "ide1:1": "C:\\b.vhdx", "scsi0:3": "C:\\c.vhdx"}, memory_mib=4096)
    assert (vm.name, vm.uuid, vm.vm_id) == ("web", BIOS_GUID, MACHINE.lower())
    assert (vm.firmware, vm.secure_boot, vm.tpm, vm.power_state) == ("bios", False, False, "off")
    assert (vm.cpu_count, vm.cores_per_socket, vm.memory_bytes) == (2, 2, 4 * GIB)
    assert [(disk.key, disk.label, disk.bus, disk.controller, disk.unit, disk.boot_order) for disk in vm.disks] == [
        ("ide0:0", "IDE 0:0", "ide", "ide0", 0, 1),
        ("ide1:1", "IDE 1:1", "ide", "ide1", 1, None),
        ("scsi0:3", "SCSI 0:3", "scsi", "scsi0", 3, None),
    ]
    assert concern_ids(vm) == {"guest-unknown"}


def test_a_machine_keeps_the_uuid_that_its_guest_sees() -> None:
    """The firmware's, which is another than the machine's id: licences, agents and cloud-init know the guest by it."""
    tree = configuration({"ide0:0": "C:\\a.vhdx"})
    assert (parsed(tree).uuid, parsed(tree).vm_id) == (BIOS_GUID, MACHINE.lower())
    assert parsed(tree).serial == BIOS_SERIAL
    assert parsed(laid_over(tree, {"configuration": {f"_{BIOS}_": {"bios_guid": ""}}})).uuid == MACHINE.lower()


def test_linux_of_generation_1_reads_its_uuid_in_reverse() -> None:
    found = [described(disks={"scsi0:0": "C:\\a.vhdx"}, generation=one).uuid_reversed_for for one in (1, 2)]
    assert found == [("linux",), ()]


def test_a_generation_2_machine_has_uefi_and_secure_boot() -> None:
    vm = described(disks={"scsi0:0": "C:\\a.vhdx"}, generation=2)
    assert (vm.firmware, vm.secure_boot, vm.disks[0].key) == ("uefi", True, "scsi0:0")
    assert concern_ids(vm) == {"uefi-state-lost", "secure-boot", "guest-unknown"}


def test_secure_boot_of_generation_1_is_a_key_without_meaning() -> None:
    bios = {f"_{hyperv_exports.BIOS}_": {"secure_boot_enabled": True}}
    assert not described(changes=bios).secure_boot


def test_a_firmware_that_trusts_windows_alone_starts_windows() -> None:
    bios = {f"_{hyperv_exports.BIOS}_": {"secure_boot_template_id": hyperv_exports.WINDOWS_TEMPLATE}}
    assert described(generation=2, changes=bios).guest_os.family == "windows"
    assert described(generation=1, changes=bios).guest_os.family == "other"
    off = {f"_{hyperv_exports.BIOS}_": {**bios[f"_{hyperv_exports.BIOS}_"], "secure_boot_enabled": False}}
    assert described(generation=2, changes=off).guest_os.family == "other"


def test_a_virtual_tpm() -> None:
    vm = described(generation=2, changes={"security": {"settings": {"tpm_enabled": True}}})
    assert vm.tpm
    assert "tpm" in concern_ids(vm)


@pytest.mark.parametrize("key", ["shielding_requested", "data_protection_requested"])
def test_a_shielded_machine_is_critical(key: str) -> None:
    vm = described(generation=2, changes={"security": {"settings": {"tpm_enabled": True, key: True}}})
    assert [concern.id for concern in vm.concerns if concern.category == "Critical"] == ["shielded"]


def test_dynamic_memory_starts_with_what_it_started_with() -> None:
    bank = {"dynamic_memory_enabled": True, "size": 2048, "reservation": 512, "limit": 8192}
    vm = described(changes={"settings": {"memory": {"bank": bank}}})
    assert vm.memory_bytes == 2 * GIB
    assessment = next(concern.assessment for concern in vm.concerns if concern.id == "dynamic-memory")
    assert "2048 MiB" in assessment
    assert "between 512 and 8192 MiB" in assessment


@pytest.mark.parametrize(
    ("processors", "per_node", "nodes", "cores"), [(8, 4, 1, 4), (8, 4, 2, 8), (6, 4, 1, 6), (2, 64, 1, 2), (1, 1, 1, 1)]
)
def test_cores_are_as_the_virtual_numa_has_them(processors: int, per_node: int, nodes: int, cores: int) -> None:
    vnuma = {"count_per_node": {"max": per_node}, "node_per_socket": {"max": nodes}}
    vm = described(processors=processors, changes={"settings": {"processors": {"vnuma": vnuma}}})
    assert (vm.cpu_count, vm.cores_per_socket) == (processors, cores)


def test_network_cards_with_static_dynamic_and_no_address_yet() -> None:
    tree = configuration(
        {"ide0:0": "C:\\a.vhdx"},
        adapters=(
            ethernet(MacAddressIsStatic=True),
            ethernet("00155D0A0B0C", SwitchName="", Connection={"AltSwitchName": "Internal"}),
            ethernet("00-00-00-00-00-00", IsConnected=False, Connection={"AltSwitchName": ""}),
        ),
        devices=(("5f5f5f5f-0000-4000-8000-000000000001", "Emulated Ethernet Port", ethernet("02-00-00-00-00-01")),),
    )
    assert [(nic.key, nic.mac, nic.model, nic.network, nic.connected) for nic in parsed(tree).nics] == [
        ("adapter0", "00:15:5d:01:07:dc", "netvsc", "External Switch", True),
        ("adapter1", "00:15:5d:0a:0b:0c", "netvsc", "Internal", True),
        ("adapter2", None, "netvsc", "438B7B13-6180-4155-B7BF-08709CCF234D", False),
        ("adapter3", "02:00:00:00:00:01", "tulip", "External Switch", True),
    ]


def test_cards_with_a_vlan_are_named() -> None:
    """Here the network decides on VLANs: a guest in one would be in the network of the host's own."""
    features = {"Feature_C885BFD1-ABB7-418F-8163-9F379C9F7166": {"Flags": 0}}
    vlan = {"Feature_952C5004-4465-451C-8CB8-FA9AB382B773": {"Flags": 0}}
    adapters = [ethernet(Connection={"AltSwitchName": "LAN", **more}) for more in (features, features | vlan)]
    tree = configuration({"ide0:0": "C:\\a.vhdx"}, adapters=tuple(adapters))
    (found,) = [one for one in parsed(tree).concerns if one.id == "settings-not-taken-over"]
    assert found.assessment == "The VM has settings that it does not have here: VLAN settings of adapter1 (LAN)."


def test_a_disc_in_a_drive_is_left_out_and_an_empty_drive_is_nothing() -> None:
    drives = {"ide1:0": drive("D:\\iso\\install.iso", "ISO"), "scsi0:1": drive("", "ISO"), "scsi0:2": drive("")}
    vm = described(drives=drives)
    assert [disk.key for disk in vm.disks] == ["ide0:0"]
    assert "install.iso" in next(concern.assessment for concern in vm.concerns if concern.id == "media-left-out")


def test_several_scsi_controllers_are_counted_in_the_manifests_order() -> None:
    vm = described(disks={"scsi0:0": "C:\\a.vhdx", "scsi1:0": "C:\\b.vhdx", "scsi1:63": "C:\\c.vhdx"}, generation=2)
    assert [(disk.controller, disk.unit) for disk in vm.disks] == [("scsi0", 0), ("scsi1", 0), ("scsi1", 63)]


def test_devices_of_the_host_are_named() -> None:
    devices: tuple[tuple[str, str, Tree], ...] = (
        ("2fcc454e-a36a-4c77-bb5e-a2d75a51f02c", "Virtual Pci Express Port", {"HostResources": {"count": 1}}),
        ("2fcc454e-a36a-4c77-bb5e-a2d75a51f02c", "Virtual Pci Express Port", {"HostResources": {"count": 1}}),
        ("99dcd00c-fbd6-42d3-9dfd-1b5ad7058f61", "GPU Partition", {"PoolID": ""}),
        ("5f5f5f5f-0000-4000-8000-000000000002", "Synthetic FibreChannel Port", {}),
    )
    passed = {concern.id for concern in described(devices=devices).concerns if concern.label == "Passthrough device"}
    assert passed == {
        "passthrough-device:a PCI Express device (2 times)",
        "passthrough-device:a GPU",
        "passthrough-device:Synthetic FibreChannel Port",
    }


def test_a_configuration_without_devices_is_none() -> None:
    with pytest.raises(MalformedArchive, match=r"m\.vmcx lists no devices"):
        parsed({"configuration": {"properties": {"name": "web"}}})


def test_keys_of_another_type_than_they_have_count_as_missing() -> None:
    settings = {"memory": {"bank": "1024"}, "processors": {"count": "two"}}
    vm = described(changes={"properties": {"name": 5}, "settings": settings})
    assert (vm.name, vm.cpu_count, vm.memory_bytes) == ("imported", 1, GIB)
    assert {"hardware-incomplete:memory", "hardware-incomplete:processors"} <= concern_ids(vm)


# ── the folder ───────────────────────────────────────────────────────────────────────────────────────────────────────


def test_an_export_by_its_folder_its_inner_folder_and_its_configuration(tmp_path: Path) -> None:
    folder = export(tmp_path)
    inner = folder / "Virtual Machines"
    whole = VMCX.inspect(folder, tmp_path)
    assert [(disk.format, disk.capacity_bytes, disk.source_path) for disk in whole.disks] == [("vhdx", 8 * MIB, "disk.vhdx")]
    for path in (folder, inner, inner / f"{MACHINE}.vmcx"):
        assert detect(path, tmp_path).kind == "vmcx_export"
        assert VMCX.inspect(path, tmp_path) == whole
        assert content(path, tmp_path) == appliances.raw_disk()


def test_the_xml_of_2012_says_the_same_as_the_vmcx(tmp_path: Path) -> None:
    new, old = tmp_path / "new", tmp_path / "old"
    new.mkdir()
    old.mkdir()
    whole = VMCX.inspect(export(new), tmp_path)
    folder = export(old, old=True)
    assert detect(folder, tmp_path).kind == "vmcx_export"
    assert detect(folder / "Virtual Machines" / f"{MACHINE}.xml", tmp_path).kind == "vmcx_export"
    assert VMCX.inspect(folder, tmp_path) == whole
    assert content(folder, tmp_path) == appliances.raw_disk()


def test_vhd_disks_of_old(tmp_path: Path) -> None:
    disk = appliances.image(tmp_path, "disk.vhd", "vpc", appliances.raw_disk())
    folder = hyperv_exports.export(tmp_path / "web", {"ide0:0": disk}, old=True)
    assert VMCX.inspect(folder, tmp_path).disks[0].format == "vhd"
    assert content(folder, tmp_path) == appliances.raw_disk()


def test_an_export_of_2008_says_how_it_can_be_read(tmp_path: Path) -> None:
    folder = export(tmp_path)
    inner = folder / "Virtual Machines"
    for file in list(inner.iterdir()):
        file.unlink()
    (inner / f"{MACHINE}.exp").write_text("<DECLARATIONS></DECLARATIONS>")
    assert detect(folder, tmp_path).kind == "vmcx_export"
    with pytest.raises(UnsupportedFormat, match="exported by Windows Server 2008"):
        VMCX.inspect(folder, tmp_path)


def test_names_are_found_in_whatever_case_they_are_written(tmp_path: Path) -> None:
    folder = export(tmp_path)
    (folder / "Virtual Machines").rename(folder / "VIRTUAL MACHINES")
    (folder / "Virtual Hard Disks").rename(folder / "virtual hard disks")
    (folder / "virtual hard disks" / "disk.vhdx").rename(folder / "virtual hard disks" / "DISK.VHDX")
    assert content(folder, tmp_path) == appliances.raw_disk()


def test_two_disks_of_one_name_are_distinguished_by_their_folders(tmp_path: Path) -> None:
    folder = tmp_path / "web"
    disks = {"ide0:0": "C:\\VMs\\Snapshots\\d.vhdx", "scsi0:0": "C:\\VMs\\Virtual Hard Disks\\d.vhdx"}
    hyperv_exports.described(folder, configuration(disks))
    for number, inner in enumerate(("Snapshots", "Virtual Hard Disks")):
        appliances.image(folder / inner, "d.vhdx", "vhdx", appliances.raw_disk(seed=number))
    assert content(folder, tmp_path, "ide0:0") == appliances.raw_disk(seed=0)
    assert content(folder, tmp_path, "scsi0:0") == appliances.raw_disk(seed=1)


@pytest.mark.parametrize(
    ("first", "mistaken"), [("C:\\VMs\\Virtual Hard Disks\\d.vhdx", {"scsi0:0"}), ("C:\\VMs\\d.vhdx", {"ide0:0", "scsi0:0"})]
)
def test_two_disks_of_one_name_are_never_one_file(first: str, mistaken: set[str], tmp_path: Path) -> None:
    folder = tmp_path / "web"
    hyperv_exports.described(folder, configuration({"ide0:0": first, "scsi0:0": "D:\\Data\\D.vhdx"}))
    appliances.image(folder / "Virtual Hard Disks", "d.vhdx", "vhdx", appliances.raw_disk())
    for key in ("ide0:0", "scsi0:0"):
        if key in mistaken:
            with pytest.raises(MalformedArchive, match=rf"disks {key} and (ide0|scsi0):0 are two files of one name"):
                VMCX.open_disk(folder, tmp_path, key)
        else:
            assert content(folder, tmp_path, key) == appliances.raw_disk()
    with pytest.raises(MalformedArchive, match="are two files of one name"):
        VMCX.inspect(folder, tmp_path)


def test_two_machines_in_one_folder_are_a_choice(tmp_path: Path) -> None:
    folder = export(tmp_path)
    inner = folder / "Virtual Machines"
    other = inner / f"{CHECKPOINT}.vmcx"
    shutil.copy(inner / f"{MACHINE}.vmcx", other)
    with pytest.raises(MalformedArchive, match="web has 2 configurations of machines") as problem:
        VMCX.inspect(folder, tmp_path)
    assert problem.value.hint == "Import the machine's .vmcx by its own path."
    assert VMCX.inspect(other, tmp_path).name == "web"


def test_a_missing_disk_says_which(tmp_path: Path) -> None:
    folder = export(tmp_path)
    (folder / "Virtual Hard Disks" / "disk.vhdx").unlink()
    with pytest.raises(MalformedArchive, match=r"disk ide0:0 is the file .*disk\.vhdx.*, and none of its name is in web"):
        VMCX.inspect(folder, tmp_path)


def test_a_disk_outside_the_root(tmp_path: Path) -> None:
    root = tmp_path / "imports"
    root.mkdir()
    folder = export(root)
    held = folder / "Virtual Hard Disks"
    shutil.move(held / "disk.vhdx", tmp_path / "disk.vhdx")
    (held / "disk.vhdx").symlink_to("../../../disk.vhdx")
    with pytest.raises(HostPathRejected):
        VMCX.inspect(folder, root)


def test_a_disk_of_the_host_and_a_vhd_set_are_critical_and_can_be_skipped(tmp_path: Path) -> None:
    disk = appliances.image(tmp_path, "disk.vhdx", "vhdx", appliances.raw_disk())
    drives = {"scsi0:0": drive("\\\\.\\PHYSICALDRIVE2", "PHYSICAL"), "scsi0:1": drive("C:\\shared.vhds")}
    folder = hyperv_exports.export(tmp_path / "web", {"ide0:0": disk}, drives=drives)
    vm = VMCX.inspect(folder, tmp_path)
    assert {concern.id for concern in vm.concerns if concern.category == "Critical"} == {
        "disk-raw-device:scsi0:0",
        "disk-unreadable:scsi0:1",
    }
    assert "disk-shared:scsi0:1" in concern_ids(vm)
    assert [disk.key for disk in vm.disks] == ["ide0:0", "scsi0:0", "scsi0:1"]
    assert content(folder, tmp_path) == appliances.raw_disk()
    with pytest.raises(UnsupportedFormat, match=r"disk scsi0:0 is a disk of its Hyper-V host"):
        VMCX.open_disk(folder, tmp_path, "scsi0:0")


def test_a_shared_vhdx_is_reported() -> None:
    drives = {"scsi0:0": drive("C:\\quorum.vhdx", persistent_reservations_supported=True)}
    assert "disk-shared:scsi0:0" in concern_ids(described(drives=drives))


# ── checkpoints, saved state ─────────────────────────────────────────────────────────────────────────────────────────


def chain(root: Path, *, apart: bool) -> tuple[Path, bytes]:
    """An export with a checkpoint: the newest image, in the folder Snapshots where they lie `apart`, over its parent."""
    locator = [("parent_linkage", f"{{{UUID(int=6)}}}"), ("absolute_win32_path", "C:\\VMs\\Virtual Hard Disks\\disk.vhdx")]
    parent = vhdx_images.Vhdx(size=8 * MIB, blocks=blocks(8, {0, 1, 5}), block_bytes=MIB, identity=UUID(int=6))
    child = vhdx_images.Vhdx(
        size=8 * MIB, blocks=blocks(8, {1, 7}), block_bytes=MIB, identity=UUID(int=8), locator=tuple(locator)
    )
    folder = root / "web"
    tree = configuration({"scsi0:0": "C:\\VMs\\Snapshots\\disk_0F6D.avhdx"}, generation=2)
    hyperv_exports.described(folder, tree)
    held = folder / "Virtual Hard Disks"
    held.mkdir()
    newest = (folder / "Snapshots" if apart else held) / "disk_0F6D.avhdx"
    vhdx_images.write(parent, held / "disk.vhdx", raw=root / "parent.raw", seed=1)
    vhdx_images.write(child, newest, raw=root / "child.raw", parent_raw=root / "parent.raw", seed=2)
    before = hyperv_exports.checkpoint(configuration({"scsi0:0": "C:\\VMs\\Virtual Hard Disks\\disk.vhdx"}, generation=2))
    (folder / "Snapshots" / f"{CHECKPOINT}.vmcx").write_bytes(hyperv_exports.storage(before))
    return folder, (root / "child.raw").read_bytes()


def blocks(count: int, full: set[int]) -> tuple[vhdx_images.Block, ...]:
    return tuple(
        vhdx_images.Block(vhdx_images.FULL, noise=((0, 64),)) if number in full else vhdx_images.Block(vhdx_images.NOT_PRESENT)
        for number in range(count)
    )


@pytest.mark.parametrize("apart", [False, True])
def test_the_present_state_is_read_through_its_checkpoints(tmp_path: Path, apart: bool) -> None:
    folder, seen = chain(tmp_path, apart=apart)
    vm = VMCX.inspect(folder, tmp_path)
    assert [(one.id, one.name, one.created_at) for one in vm.snapshots] == [
        (CHECKPOINT.lower(), "before the update", datetime(2021, 8, 22, 21, 41, 0, 717226, tzinfo=UTC))
    ]
    assert "snapshots-present" in concern_ids(vm)
    assert content(folder, tmp_path, "scsi0:0") == seen


def test_checkpoints_are_listed_by_their_age(tmp_path: Path) -> None:
    folder = export(tmp_path)
    for number, created in enumerate((3, 1, 2)):
        identity = f"{number}0000000-0000-4000-8000-000000000000"
        tree = hyperv_exports.checkpoint(configuration({}), f"taken {created}", identity)
        tree["configuration"]["properties"]["creation_time"] = (created * 10**17).to_bytes(8, "little")
        (folder / "Snapshots" / f"{identity}.vmcx").write_bytes(hyperv_exports.storage(tree))
    assert [one.name for one in VMCX.inspect(folder, tmp_path).snapshots] == ["taken 1", "taken 2", "taken 3"]


def test_a_checkpoint_by_its_own_path_is_the_machine_of_then(tmp_path: Path) -> None:
    folder, _ = chain(tmp_path, apart=True)
    path = folder / "Snapshots" / f"{CHECKPOINT}.vmcx"
    vm = VMCX.inspect(path, tmp_path)
    assert (vm.name, vm.disks[0].source_path) == ("before the update", "disk.vhdx")
    assert content(path, tmp_path, "scsi0:0") == (tmp_path / "parent.raw").read_bytes()


def test_a_damaged_checkpoint_does_not_keep_the_present_state_away(tmp_path: Path) -> None:
    folder, seen = chain(tmp_path, apart=False)
    (folder / "Snapshots" / f"{CHECKPOINT}.vmcx").write_bytes(b"torn")
    assert [one.id for one in VMCX.inspect(folder, tmp_path).snapshots] == [CHECKPOINT.lower()]
    assert content(folder, tmp_path, "scsi0:0") == seen


def test_a_missing_parent_says_which(tmp_path: Path) -> None:
    folder, _ = chain(tmp_path, apart=True)
    (folder / "Virtual Hard Disks" / "disk.vhdx").unlink()
    vm = VMCX.inspect(folder, tmp_path)
    critical = [concern for concern in vm.concerns if concern.category == "Critical"]
    assert [concern.id for concern in critical] == ["disk-unreadable:scsi0:0"]
    assert "disk.vhdx" in critical[0].assessment


def test_a_saved_machine_is_suspended(tmp_path: Path) -> None:
    folder = export(tmp_path)
    state = folder / "Virtual Machines" / f"{MACHINE}.vmrs"
    assert VMCX.inspect(folder, tmp_path).power_state == "off"
    state.write_bytes(hyperv_exports.storage(hyperv_exports.runtime(saved=True)))
    vm = VMCX.inspect(folder, tmp_path)
    assert vm.power_state == "suspended"
    assert "suspended" in concern_ids(vm)


def test_a_runtime_state_that_cannot_be_read_may_hold_a_memory(tmp_path: Path) -> None:
    folder = export(tmp_path)
    (folder / "Virtual Machines" / f"{MACHINE}.vmrs").write_bytes(b"torn")
    assert VMCX.inspect(folder, tmp_path).power_state == "suspended"


def test_folders_in_the_place_of_files(tmp_path: Path) -> None:
    """Of what the present state does not need, nothing keeps it away; of what it needs, the name is told."""
    folder = export(tmp_path)
    inner = folder / "Virtual Machines"
    (inner / f"{MACHINE}.vmrs").unlink()
    (inner / f"{MACHINE}.vmrs").mkdir()
    (folder / "Snapshots" / f"{CHECKPOINT}.vmcx").mkdir()
    vm = VMCX.inspect(folder, tmp_path)
    assert (vm.power_state, len(vm.snapshots)) == ("suspended", 1)
    shutil.rmtree(folder / "Snapshots")
    (folder / "Snapshots").write_bytes(b"")
    assert VMCX.inspect(folder, tmp_path).snapshots == ()
    (inner / f"{MACHINE}.vmcx").unlink()
    (inner / f"{MACHINE}.vmcx").mkdir()
    with pytest.raises(MalformedArchive, match=r"\.vmcx' is a folder in web"):
        VMCX.inspect(folder, tmp_path)


def test_a_saved_machine_of_2012(tmp_path: Path) -> None:
    folder = export(tmp_path, old=True)
    assert VMCX.inspect(folder, tmp_path).power_state == "off"
    state = folder / "Virtual Machines" / MACHINE
    state.mkdir()
    (state / f"{MACHINE}.vsv").write_bytes(b"state")
    assert VMCX.inspect(folder, tmp_path).power_state == "suspended"


def test_a_configuration_of_2012_that_names_its_saved_state() -> None:
    tree = configuration({}, changes={"savedstate": {"memlocation": "C:\\VMs\\a.bin", "vsvlocation": ""}})
    assert vmcx_machine.saved_state_files(tree)
    assert not vmcx_machine.saved_state_files(configuration({}))


def test_the_runtime_state_by_itself_is_none_of_any_kind(tmp_path: Path) -> None:
    folder = export(tmp_path)
    with pytest.raises(UnsupportedFormat, match="a state of a Hyper-V machine"):
        detect(folder / "Virtual Machines" / f"{MACHINE}.vmrs", tmp_path)


def test_the_guests_family_is_that_of_its_partitions(tmp_path: Path) -> None:
    folder = export(tmp_path, raw=linux_disk())
    assert VMCX.inspect(folder, tmp_path).guest_os.family == "linux"


def linux_disk() -> bytes:
    """A disk with a partition table of one Linux partition."""
    entry = bytes([0x80, 0, 2, 0, 0x83, 0, 0, 0]) + (2048).to_bytes(4, "little") + (4096).to_bytes(4, "little")
    return (bytes(446) + entry + bytes(48) + b"\x55\xaa").ljust(8 * MIB, b"\0")
