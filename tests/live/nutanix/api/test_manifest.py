"""What is in a manifest, and in the list of VMs."""

from dataclasses import replace
from typing import Any

import pytest

from synvirt.live.nutanix.machines import manifest as described
from synvirt.live.nutanix.machines import of_central, of_element
from synvirt.live.nutanix.ways import Way
from tests.fakes.prism.server import Prisms
from tests.fakes.prism.state import VmState
from tests.live.nutanix.api.lab import SIZE, ask, machine


@pytest.mark.parametrize("which", ["central", "element"])
def test_a_manifest_has_what_the_platform_knows(cluster: Prisms, which: str) -> None:
    vm = machine(cluster, uefi=True, secure_boot=True, tpm=True, tools=True, guest="Microsoft Windows Server 2022", gpus=1)
    vm.disks.append(replace(vm.disks[0], id="g", device=vm.id, index=7, group=cluster.state.cluster_id))
    manifest = ask(cluster.access(which), lambda adapter: adapter.inspect(vm.id))
    assert (manifest.name, manifest.uuid, manifest.firmware, manifest.secure_boot, manifest.tpm) == (
        "web",
        vm.id,
        "uefi",
        True,
        True,
    )
    assert (manifest.cpu_count, manifest.memory_bytes, manifest.guest_os.family) == (2, 1 << 30, "windows")
    assert [(disk.key, disk.bus, disk.capacity_bytes) for disk in manifest.disks] == [
        ("scsi.0", "scsi", SIZE),
        ("sata.1", "sata", 1 << 20),
    ]
    assert manifest.disks[0].source_path.startswith("default/")
    nic = manifest.nics[0]
    assert (nic.mac, nic.network, nic.ip_addresses, nic.model) == ("50:6b:8d:aa:bb:cc", "vlan 12", ("10.1.2.3",), "virtio")
    found = {concern.id: concern.category for concern in manifest.concerns}
    group = f"nutanix.volume_group:{cluster.state.cluster_id}"
    assert {group: "Critical", "nutanix.gpu:0": "Warning", "nutanix.vtpm": "Warning"}.items() <= found.items()


@pytest.mark.parametrize("which", ["central", "element"])
def test_a_guest_keeps_the_uuid_that_it_sees(cluster: Prisms, which: str) -> None:
    """A VM that was moved to AHV, or restored, has another than its own id; older versions do not name it."""
    vm = machine(cluster, bios_uuid="967df1ba-2c00-4998-9f1b-d60bcc0c4b90")
    found = ask(cluster.access(which), lambda adapter: adapter.inspect(vm.id))
    assert (found.uuid, found.vm_id) == (vm.bios_uuid, vm.id)
    assert found.serial is None, "which of the two UUIDs it is, no source says"


@pytest.mark.parametrize("which", ["central", "element"])
def test_a_guest_keeps_the_serial_number_that_it_sees(cluster: Prisms, which: str) -> None:
    """AHV gives it the VM's id, in capital letters."""
    vm = machine(cluster)
    assert ask(cluster.access(which), lambda adapter: adapter.inspect(vm.id)).serial == vm.id.upper()


def test_settings_that_the_guest_does_not_have_here_are_named() -> None:
    """By both Prisms: a clock that is not in UTC, pinned processors, more serial ports, and a disc in a drive."""
    place = {"device_type": "CDROM", "disk_address": {"adapter_type": "IDE", "device_index": 0}}
    disc = {"device_properties": place, "data_source_reference": {"kind": "image"}}
    resources = {
        "hardware_clock_timezone": "Europe/Berlin",
        "is_vcpu_hard_pinned": True,
        "serial_port_list": [{}, {}],
        "disk_list": [disc, {"device_properties": place}],
    }
    vm = {
        "hardwareClockTimezone": "Europe/Berlin",
        "isVcpuHardPinningEnabled": True,
        "serialPorts": [{}, {}],
        "cdRoms": [{"diskAddress": {"busType": "IDE", "index": 0}, "backingInfo": {"diskExtId": "x"}}, {"diskAddress": {}}],
    }
    for found in (of_element({"status": {"resources": resources}}), of_central(vm, {}, {})):
        named = {one.id: one.assessment for one in described(found, Way("nfs")).concerns}
        assert named["settings-not-taken-over"].endswith(
            "here: a hardware clock in Europe/Berlin, pinned processors, 2 serial ports."
        )
        assert "has a disc at ide.0 in a CD-ROM" in named["media-left-out"]


@pytest.mark.parametrize("which", ["central", "element"])
def test_disks_of_a_bus_are_in_the_order_of_their_indices_as_the_firmware_boots_them(cluster: Prisms, which: str) -> None:
    """The list has them as they were attached."""
    vm = machine(cluster)
    first = vm.disks[0]
    vm.disks.insert(0, replace(first, id="00000000-0000-0000-0000-00000000000a", index=3))
    manifest = ask(cluster.access(which), lambda adapter: adapter.inspect(vm.id))
    assert [disk.key for disk in manifest.disks] == ["scsi.0", "scsi.3", "sata.1"]


@pytest.mark.parametrize("which", ["central", "element"])
def test_what_does_not_come_along_is_a_concern_with_its_name(cluster: Prisms, which: str) -> None:
    """GPUs each, devices by their number, a volume group once however many disks it has; nothing of a VM that has none."""
    plain = machine(cluster)
    vm = machine(cluster, gpus=2, passed_through=3 if which == "central" else 0)
    group = cluster.state.cluster_id
    vm.disks += [replace(vm.disks[0], id=str(number), device=vm.id, index=number, group=group) for number in (7, 8)]
    manifest = ask(cluster.access(which), lambda adapter: adapter.inspect(vm.id))
    reported = {concern.id: (concern.category, concern.assessment) for concern in manifest.concerns}
    assert reported["nutanix.gpu:0"] == ("Warning", "The guest has vGPU of its host; here it has none.")
    assert "nutanix.gpu:1" in reported
    assert reported[f"nutanix.volume_group:{group}"][0] == "Critical"
    assert group in reported[f"nutanix.volume_group:{group}"][1]
    assert [name for name in reported if name.startswith("nutanix.volume_group")] == [f"nutanix.volume_group:{group}"]
    # v3 has no word for them.
    assert reported.get("nutanix.passthrough") == (
        ("Warning", "3 devices of its host stay behind.") if which == "central" else None
    )
    # What is not moved is not among the disks.
    assert [disk.key for disk in manifest.disks] == ["scsi.0", "sata.1"]
    others = ask(cluster.access(which), lambda adapter: adapter.inspect(plain.id)).concerns
    assert {one.id for one in others} == {"nutanix.read_by", "nutanix.guest_tools"}


@pytest.mark.parametrize("which", ["central", "element"])
@pytest.mark.parametrize(
    ("fields", "state"),
    [
        ({}, "They are not seen: snapshots are as after a crash."),
        ({"tools": True}, "They are installed, and freeze its file systems for a snapshot."),
        ({"tools": True, "holds_still": False}, "They are installed, and do not freeze its file systems."),
        ({"tools": True, "power": "OFF"}, "They are installed, and do not freeze its file systems: it does not run."),
    ],
)
def test_the_state_of_guest_tools_is_reported(cluster: Prisms, which: str, fields: dict[str, Any], state: str) -> None:
    vm = machine(cluster, **fields)
    manifest = ask(cluster.access(which), lambda adapter: adapter.inspect(vm.id))
    assert [one.assessment for one in manifest.concerns if one.id == "nutanix.guest_tools"] == [state]


@pytest.mark.parametrize("which", ["central", "element"])
def test_2000_vms_are_listed_page_by_page(cluster: Prisms, which: str) -> None:
    for number in range(1203):
        vm = VmState(f"00000000-0000-0000-0000-{number:012}", f"vm {number}", [])
        cluster.state.vms[vm.id] = vm
    rows = ask(cluster.access(which), lambda adapter: adapter.list_vms())
    assert [row.name for row in rows] == [f"vm {number}" for number in range(1203)]
    assert rows[0].power_state == "on"
