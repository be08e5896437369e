"""Manifests of machines that the simulator does not have: made of pyvmomi's own types, as a vCenter would send them."""

from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from pyVmomi import vim

from synvirt.disks import open_reader
from synvirt.disks.specs import DatastoreSpec, RawSpec
from synvirt.errors import InvalidPlan
from synvirt.live import SourceAccess
from synvirt.live.vsphere import files as vim_files
from synvirt.live.vsphere import privileges as vim_privileges
from synvirt.live.vsphere.adapter import VimApi
from synvirt.live.vsphere.disks import chain, virtual_disks
from synvirt.live.vsphere.machines import cbt_reason, manifest, network_names, row
from synvirt.live.vsphere.ways import Way, way
from synvirt.migrations.planning.critical import refuse_critical
from tests.house import live_plan
from tests.live.vsphere.machines.made import Backing, Disk, a_disk, critical, described, found


@pytest.mark.parametrize(
    ("hardware", "families"), [("vmx-10", ("windows",)), ("vmx-13", ("windows", "linux", "other")), ("", ("windows",))]
)
def test_which_guests_read_their_uuid_in_reverse_depends_on_the_hardware(hardware: str, families: tuple[str, ...]) -> None:
    uuid = "421f245c-7fa8-60fa-6af6-a46351ced0eb"
    one = described(config__uuid=uuid, config__version=hardware)
    assert (one.uuid, one.uuid_reversed_for) == (uuid, families)
    assert one.serial == "VMware-42 1f 24 5c 7f a8 60 fa-6a f6 a4 63 51 ce d0 eb"
    of_host = [vim.option.OptionValue(key="serialNumber.reflectHost", value="TRUE")]
    assert described(config__uuid=uuid, config__extraConfig=of_host).serial is None


def test_a_machine_of_many_parts() -> None:
    efi = vim.vm.BootOptions(
        efiSecureBootEnabled=True,
        bootOrder=[vim.vm.BootOptions.BootableDiskDevice(deviceKey=2001), vim.vm.BootOptions.BootableCdromDevice()],
    )
    card = vim.vm.device.VirtualVmxnet3(
        key=4000,
        macAddress="00:50:56:00:00:01",
        backing=vim.vm.device.VirtualEthernetCard.NetworkBackingInfo(deviceName="VM Network"),
        connectable=vim.vm.device.VirtualDevice.ConnectInfo(startConnected=False, connected=False, allowGuestControl=True),
        slotInfo=vim.vm.device.VirtualDevice.PciBusSlotInfo(pciSlotNumber=1184),
    )
    not_yet_on = vim.vm.device.VirtualE1000e(key=4001, macAddress="00:50:56:00:00:02", backing=card.backing)
    one = described(
        a_disk(2000),
        a_disk(2001, Backing(fileName="[ds1] web/web_1.vmdk")),
        card,
        not_yet_on,
        vim.vm.device.VirtualTPM(key=11000),
        config__firmware="efi",
        config__bootOptions=efi,
        config__guestId="windows2019srv_64Guest",
        config__guestFullName="Microsoft Windows Server 2019 (64-bit)",
        config__hardware__numCPU=8,
        config__hardware__numCoresPerSocket=4,
        config__hardware__memoryMB=16384,
        layoutEx__file=[
            vim.vm.FileLayoutEx.FileInfo(key=1, name="[ds1] web/web-flat.vmdk", type="diskExtent", size=12345),
        ],
        guest__net=[vim.vm.GuestInfo.NicInfo(deviceConfigId=4000, connected=True, ipAddress=["192.0.2.7", "2001:db8::7"])],
    )
    assert (one.firmware, one.secure_boot, one.tpm) == ("uefi", True, True)
    assert (one.cpu_count, one.cores_per_socket, one.memory_bytes) == (8, 4, 16 << 30)
    assert one.guest_os.family == "windows"
    assert [(disk.key, disk.boot_order, disk.used_bytes, disk.bus) for disk in one.disks] == [
        ("2000", None, 12345, "scsi"),
        ("2001", 1, None, "scsi"),
    ]
    nic = one.nics[0]
    assert (nic.model, nic.network, nic.connected, nic.ip_addresses) == (
        "vmxnet3", "VM Network", False, ("192.0.2.7", "2001:db8::7"),
    )  # fmt: skip
    assert [nic.linux_name for nic in one.nics] == ["ens161", None]
    assert one.cbt_available
    assert critical(one) == []


def test_disks_are_in_the_order_of_their_places_as_the_firmware_boots_them() -> None:
    """The list has them as they were added: a system disk that was taken off and put back is the last one."""
    second = vim.vm.device.ParaVirtualSCSIController(key=1001, busNumber=1)
    far, data, system = a_disk(2016), a_disk(2001), a_disk(2000)
    far.controllerKey, far.unitNumber = 1001, 0
    ways = {str(one.key): Way("datastore") for one in (far, data, system)}
    one = manifest("vm-1", found(second, far, data, system), {"ds1": "VMFS"}, ways)
    assert [(disk.controller[-1], disk.unit, disk.key) for disk in one.disks] == [
        ("0", 0, "2000"),
        ("0", 1, "2001"),
        ("1", 0, "2016"),
    ]


def test_an_option_for_uefi_makes_no_secure_boot_of_a_bios() -> None:
    """It stays when the firmware is changed back."""
    one = described(a_disk(2000), config__firmware="bios", config__bootOptions=vim.vm.BootOptions(efiSecureBootEnabled=True))
    assert (one.firmware, one.secure_boot) == ("bios", False)


@pytest.mark.parametrize(
    ("backing", "reason", "concern"),
    [
        (Backing(fileName="[ds1] a/a.vmdk", diskMode="independent_persistent"), "independent", "disk-not-held"),
        (Backing(fileName="[ds1] a/a.vmdk", sharing="sharingMultiWriter"), "shared", "disk-not-held"),
        (
            Disk.RawDiskMappingVer1BackingInfo(fileName="[ds1] a/a.vmdk", compatibilityMode="physicalMode"),
            "raw device",
            "disk-not-in-files",
        ),
        (
            Disk.RawDiskMappingVer1BackingInfo(fileName="[ds1] a/a.vmdk", compatibilityMode="virtualMode"),
            None,
            "disk-not-in-files",
        ),
        (Disk.SeSparseBackingInfo(fileName="[ds1] a/a.vmdk"), None, "disk-not-in-files"),
        (
            Backing(fileName="[n] a/a-1.vmdk", deltaDiskFormat="nativeFormat", parent=Backing(fileName="[n] a/a.vmdk")),
            None,
            "disk-not-in-files",
        ),
    ],
)
def test_disks_that_cannot_be_read_as_a_file(backing: Any, reason: str | None, concern: str) -> None:
    one = described(a_disk(backing=backing))
    assert (one.cbt_reason is None) == (reason is None)
    assert (reason or "") in (one.cbt_reason or "")
    assert critical(one) == [f"{concern}:2000"]
    if concern != "disk-not-held":
        assert chain(backing) is None


def test_disks_over_snapshots_are_read_from_all_their_files() -> None:
    base = Backing(fileName="[ds1] a/a.vmdk")
    over = Backing(fileName="[ds1] a/a-000001.vmdk", deltaDiskFormat="redoLogFormat", parent=base)
    newest = Backing(fileName="[ds1] a/a-000002.vmdk", deltaDiskFormat="seSparseFormat", parent=over)
    assert chain(newest) == [newest, over, base]
    assert critical(described(a_disk(backing=newest))) == []


def test_only_the_stores_of_disks_are_asked_whether_we_may_read_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not that of the image in the VM's drive; that of each snapshot's file, and each once."""
    home, old, images = (vim.Datastore(name) for name in ("datastore-1", "datastore-2", "datastore-3"))
    over = Backing(fileName="[home] a/a-1.vmdk", datastore=home, parent=Backing(fileName="[old] a/a.vmdk", datastore=old))
    drive = vim.vm.device.VirtualCdrom(
        key=3000, backing=vim.vm.device.VirtualCdrom.IsoBackingInfo(fileName="[images] a.iso", datastore=images)
    )
    disks = [a_disk(backing=over), a_disk(2001, Backing(fileName="[home] a/b.vmdk", datastore=home)), a_disk(2002)]
    store_ids: list[str] = []

    def may(_: object, privilege: str, stores: Sequence[Any]) -> bool:
        assert privilege == "Datastore.Browse"
        store_ids.extend(store._moId for store in stores)
        return images not in stores

    monkeypatch.setattr(vim_privileges, "may", may)
    adapter = VimApi(SourceAccess("https://vcenter", {"user": "u", "password": "p"}))
    ways = adapter._inventory.ways(virtual_disks([*disks, drive]), {"home": "VMFS", "old": "VMFS"})
    assert store_ids == ["datastore-1", "datastore-2"]
    assert {one.name for one in ways.values()} == {"datastore"}


@pytest.mark.parametrize(
    ("seen", "path"),
    [
        (("root", "folder", "datacenter", "stores", "pod"), "Werk%2fNord/Köln"),
        (("folder", "datacenter", "stores", "pod"), "Werk%2fNord/Köln"),
        (("datacenter", "stores", "pod"), "Köln"),
        (("datacenter", "stores"), "Köln"),
    ],
)
def test_a_datacenters_path_is_without_the_root_whatever_our_user_sees(seen: tuple[str, ...], path: str) -> None:
    """Of a datastore in a cluster of them, too. Names stay as vSphere escapes them: so its files are asked for."""
    root, folder, stores = (vim.Folder(f"group-{number}") for number in (1, 2, 3))
    datacenter, pod, store = vim.Datacenter("datacenter-1"), vim.StoragePod("group-p4"), vim.Datastore("datastore-5")
    things = {"root": root, "folder": folder, "datacenter": datacenter, "stores": stores, "pod": pod}
    names = {"root": "Datacenters", "folder": "Werk%2fNord", "datacenter": "Köln", "stores": "datastore", "pod": "pod"}
    above = [things[one] for one in seen]
    lies_in = dict(zip([*(one._moId for one in above[1:]), store._moId], above, strict=True))
    name_of = {things[one]._moId: names[one] for one in seen}

    def properties(thing: Any, _: object, **__: object) -> dict[str, Any]:
        parent = lies_in.get(thing._moId)
        return {"name": name_of.get(thing._moId, "ds")} | ({} if parent is None else {"parent": parent})

    session: Any = SimpleNamespace(properties=properties, content=SimpleNamespace(rootFolder=root))
    assert vim_files._datacenter(session, "vm-1", store) == path


@pytest.mark.parametrize("store", ["ds1", "[SSD] fast", "fast [SSD]", "fast] [SSD"])
@pytest.mark.parametrize("folder", ["web", "web [old] 2", "[SSD] web"])
def test_a_datastore_is_known_whatever_brackets_are_in_its_name(store: str, folder: str) -> None:
    """Its files are asked for by its name, and whether it has files at all is known by its type."""
    disk = a_disk(backing=Backing(fileName=f"[{store}] {folder}/web.vmdk"))
    chosen = way("auto", has_vddk=False, disk=disk, store_types={"ds2": "VMFS", store: "vsan"}, missing_privilege=None)
    assert chosen == Way("lease", f"it lies in {store}, of type vsan")
    assert critical(described(disk, stores={store: "vsan"})) == ["disk-in-objects:2000"]

    datastore, other = vim.Datastore("datastore-5"), vim.Datastore("datastore-6")
    things = {
        "vm-1": {"name": "web", "datastore": [other, datastore]},
        "datastore-5": {"name": store, "summary.name": store, "parent": vim.Datacenter("datacenter-1")},
        "datastore-6": {"summary.name": "ds2"},
        "datacenter-1": {"name": "Köln"},
    }
    session: Any = SimpleNamespace(
        host="vc",
        port=443,
        session_manager="",
        api_version="",
        login_=SimpleNamespace(user="u", password="p"),
        options=SimpleNamespace(verify_tls=True, fingerprint_sha256=None),
        content=SimpleNamespace(rootFolder=vim.Folder("group-1"), about=SimpleNamespace(apiType="HostAgent")),
        machine=vim.VirtualMachine,
        properties=lambda thing, _, **__: things[thing._moId],
        each=lambda wanted, **_: {one._moId: things[one._moId] for one, _paths in wanted},
    )
    spec = vim_files._file(session, "vm-1", Backing(fileName=f"[{store}] {folder}/web.vmdk", datastore=datastore), 1 << 30)
    assert (spec.datastore, spec.path) == (store, f"{folder}/web.vmdk")


@pytest.mark.parametrize("folder", ["", "web/", "Büro 1/web/"])
def test_a_snapshots_file_lies_beside_its_descriptor(folder: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also of a disk that lies in no folder of its datastore."""
    described = tmp_path / "web-000001.vmdk"
    described.write_text('# Disk DescriptorFile\nversion=1\ncreateType="seSparse"\nRW 8 SESPARSE "web-000001-sesparse.vmdk"\n')
    monkeypatch.setattr(vim_files, "open_reader", lambda _: open_reader(RawSpec(path=str(described))))
    at = DatastoreSpec(
        host="h", user="u", password="p", datacenter="DC", datastore="ds", path=f"{folder}web-000001.vmdk", size_bytes=None
    )
    assert vim_files._sparse_extent(at) == f"{folder}web-000001-sesparse.vmdk"


def test_each_disk_goes_its_own_way_and_says_so() -> None:
    """What is wrong with one of them hinders none of the others, once it is left out."""
    disks = [
        a_disk(2000),
        a_disk(2001, Backing(fileName="[vsan] a/a.vmdk")),
        a_disk(2002, Disk.SeSparseBackingInfo(fileName="[ds1] a/b.vmdk")),
        a_disk(2003, Backing(fileName="[ds1] a/c.vmdk", diskMode="independent_persistent")),
    ]
    stores = {"ds1": "VMFS", "vsan": "vsan"}
    ways = {str(disk.key): way("auto", has_vddk=False, disk=disk, store_types=stores, missing_privilege=None) for disk in disks}
    assert [one.name for one in ways.values()] == ["datastore", "lease", "lease", "datastore"]
    one = manifest("vm-1", found(*disks), stores, ways)
    assert not one.cbt_available
    reported = [disk.cbt_reason for disk in one.disks]
    assert reported[0] is None
    for part, reason in zip(
        ("Hard disk 2 is read by an export lease", "Hard disk 3 is read", "Hard disk 4 is ind"), reported[1:], strict=True
    ):
        assert part in str(reason)
        assert str(reason) in str(one.cbt_reason)
    assert one.cbt_reason_without(["2001", "2002", "2003"]) is None
    assert "vsan" in str(one.cbt_reason_without(["2002", "2003"]))
    assert critical(one) == ["disk-not-held:2003"]
    assert "Hard disk 1 by the datastore's files" in one.concerns[0].assessment
    assert "Hard disk 2 by an export lease" in one.concerns[0].assessment
    for skipped, refused in (((), True), (("2003",), False)):
        plan = live_plan(skip_disks=skipped)
        with pytest.raises(InvalidPlan) if refused else nullcontext():
            refuse_critical(plan, one)


def test_what_is_wrong_with_the_whole_machine_stays_whatever_is_left_out() -> None:
    one = described(a_disk(2000), a_disk(2001), config__version="vmx-04")
    assert "vmx-04" in str(one.cbt_reason_without(["2001"]))
    assert str(one.cbt_reason_without(["2001"])).count("vmx-04") == 1


def test_vddk_reads_what_is_no_file() -> None:
    over = Backing(fileName="[vsan] a/a-000001.vmdk", parent=Backing(fileName="[vsan] a/a.vmdk"))
    assert critical(described(a_disk(backing=over), stores={"vsan": "vsan"})) == ["disk-in-objects:2000"]
    assert critical(described(a_disk(backing=over), stores={"vsan": "vsan"}, by="vddk")) == []


@pytest.mark.parametrize(
    ("fields", "concern"),
    [
        ({"runtime__connectionState": "inaccessible"}, "vim.connection"),
        ({"config__template": True}, "vim.template"),
        ({"config__ftInfo": vim.vm.FaultToleranceConfigInfo(role=1)}, "vim.fault_tolerance"),
        ({"config__managedBy": vim.ext.ManagedByInfo(extensionKey="com.vmware.vim.eam", type="cluster-agent")}, "vim.agent"),
        ({"config__extraConfig": [vim.option.OptionValue(key="HDCS.agent", value="true")]}, "vim.agent"),
        ({"runtime__powerState": "suspended"}, "vim.suspended"),
    ],
)
def test_machines_that_cannot_be_moved_as_they_are(fields: dict[str, Any], concern: str) -> None:
    assert critical(described(a_disk(), **fields)) == [concern]


def test_a_vm_that_another_tool_made_is_moved() -> None:
    managed = vim.ext.ManagedByInfo(extensionKey="com.example.desktops", type="desktop")
    setting = vim.option.OptionValue(key="HDCS.agent", value="false")
    assert critical(described(a_disk(), config__managedBy=managed, config__extraConfig=[setting])) == []


def named(text: str) -> Any:
    return vim.Description(label=text, summary="")


@pytest.mark.parametrize(("sharing", "reported"), [("physicalSharing", True), ("virtualSharing", True), ("noSharing", False)])
def test_a_shared_bus_forbids_snapshots_whatever_is_left_out(sharing: str, reported: bool) -> None:
    controller = vim.vm.device.VirtualLsiLogicSASController(
        key=1001, busNumber=1, sharedBus=sharing, deviceInfo=named("SCSI controller 1")
    )
    one = described(a_disk(), a_disk(2001), controller)
    assert critical(one) == (["vim.shared_bus:1001"] if reported else [])
    assert ("SCSI controller 1 shares" in str(one.cbt_reason_without(["2000"]))) == reported
    assert one.cbt_available != reported


Passthrough = vim.vm.device.VirtualPCIPassthrough


@pytest.mark.parametrize(
    ("device", "reported"),
    [
        (Passthrough(key=13000, deviceInfo=named("PCI device 0"), backing=Passthrough.DeviceBackingInfo()), "PCI device 0 is"),
        (Passthrough(key=13000, backing=Passthrough.DynamicBackingInfo()), "device 13000 is"),
        (vim.vm.device.VirtualSriovEthernetCard(key=13000, deviceInfo=named("Network adapter 1")), "Network adapter 1 is"),
        (Passthrough(key=13000, backing=Passthrough.VmiopBackingInfo(vgpu="grid_t4-2q")), None),
    ],
)
def test_a_device_of_the_hosts_own_forbids_snapshots_while_it_runs(device: Any, reported: str | None) -> None:
    one = described(a_disk(), device)
    assert critical(one) == []
    # A shared graphics card is named as what stays at its host.
    assert [concern.id for concern in one.concerns[1:]] == ["vim.passthrough:13000" if reported else "reaches-into-its-host"]
    assert (reported or "None") in str(one.cbt_reason)
    assert one.cbt_available == (reported is None)


Card = vim.vm.device.VirtualEthernetCard


def test_what_the_guest_has_there_and_not_here_is_named() -> None:
    """Ports and devices of the host, discs in drives, sound; SMBIOS values by which licences of a maker are checked."""
    device, port = vim.vm.device, vim.vm.device.VirtualSerialPort
    made = (
        (port, port.FileBackingInfo(fileName="[ds] a.txt"), "Serial port 1"),
        (port, port.ThinPrintBackingInfo(), "Serial port 2"),
        (device.VirtualUSB, device.VirtualUSB.USBBackingInfo(deviceName="x"), "USB 1"),
        (device.VirtualPCIPassthrough, device.VirtualPCIPassthrough.VmiopBackingInfo(vgpu="grid"), "PCI device 0"),
        (device.VirtualCdrom, device.VirtualCdrom.IsoBackingInfo(fileName="[ds] iso/setup.iso"), "CD/DVD drive 1"),
        (device.VirtualCdrom, device.VirtualCdrom.IsoBackingInfo(fileName=""), "CD/DVD drive 2"),
        (
            device.VirtualCdrom,
            device.VirtualCdrom.RemotePassthroughBackingInfo(deviceName="", exclusive=False),
            "CD/DVD drive 3",
        ),
        (device.VirtualHdAudioCard, None, "Sound card"),
        (device.VirtualNVDIMM, None, "NVDIMM 1"),
    )
    devices = [
        kind(key=9000 + number, backing=backing, deviceInfo=vim.Description(label=label, summary=""))
        for number, (kind, backing, label) in enumerate(made)
    ]
    extra = [vim.option.OptionValue(key="smbios.reflectHost", value="TRUE"), vim.option.OptionValue(key="a", value="b")]
    fields: dict[str, Any] = {"config.extraConfig": extra}
    concerns = {one.id: one.assessment for one in described(*devices, **fields).concerns}
    assert concerns["reaches-into-its-host"] == "Serial port 1; USB 1; PCI device 0"
    assert "has setup.iso in a CD-ROM" in concerns["media-left-out"]
    assert concerns["settings-not-taken-over"].endswith("here: Sound card, smbios.reflecthost.")
    assert "NVDIMM 1 is persistent memory" in concerns["vim.nvdimm:9008"]


@pytest.mark.parametrize(
    ("backing", "reported"),
    [
        (Card.NetworkBackingInfo(deviceName="VM Network"), "VM Network"),
        (Card.DistributedVirtualPortBackingInfo(port=vim.dvs.PortConnection(switchUuid="s", portgroupKey="dvpg-1")), "Büro/2"),
        (Card.DistributedVirtualPortBackingInfo(port=vim.dvs.PortConnection(switchUuid="s", portgroupKey="dvpg-9")), "dvpg-9"),
        (Card.DistributedVirtualPortBackingInfo(port=vim.dvs.PortConnection(switchUuid="s")), ""),
        (Card.OpaqueNetworkBackingInfo(opaqueNetworkId="0f1e", opaqueNetworkType="nsx.LogicalSwitch"), "web 100%"),
        (Card.OpaqueNetworkBackingInfo(opaqueNetworkId="dead", opaqueNetworkType="nsx.LogicalSwitch"), "dead"),
        (None, ""),
    ],
)
def test_a_card_is_on_the_network_that_people_know(backing: Any, reported: str) -> None:
    """Of one that we may not see there is what the card holds."""
    opaque = vim.OpaqueNetwork.Summary(name="web 100%", opaqueNetworkId="0f1e", opaqueNetworkType="nsx.LogicalSwitch")
    names = network_names(
        [{"name": "Büro%2F2", "key": "dvpg-1"}, {"name": "web 100%25", "summary": opaque}, {"name": "VM Network"}, {}]
    )
    card = vim.vm.device.VirtualVmxnet3(key=4000, macAddress="00:50:56:00:00:01", backing=backing)
    assert manifest("vm-1", found(card), {}, {}, networks=names).nics[0].network == reported


KEY = vim.encryption.CryptoKeyId(keyId="k")


@pytest.mark.parametrize("layer", ["disk", "snapshot", "disk under a snapshot"])
def test_an_encrypted_disk_is_refused_and_hinders_no_other(layer: str) -> None:
    base = Backing(fileName="[ds1] a/a.vmdk", keyId=None if layer == "snapshot" else KEY)
    over = Backing(fileName="[ds1] a/a-000001.vmdk", keyId=KEY if layer == "snapshot" else None, parent=base)
    one = described(a_disk(), a_disk(2001, base if layer == "disk" else over), config__keyId=KEY)
    assert critical(one) == ["disk-encrypted:2001"]
    clone = ["vim.linked_clone"] if layer != "disk" else []  # it has no snapshot that would account for its second file
    assert [concern.id for concern in one.concerns] == ["vim.read_by", *clone, "disk-encrypted:2001"]
    refuse_critical(live_plan(skip_disks=("2001",)), one)


def test_a_virtual_tpm_encrypts_the_home_and_not_the_disks() -> None:
    one = described(a_disk(), vim.vm.device.VirtualTPM(key=11000), config__keyId=KEY)
    assert [(concern.id, concern.category) for concern in one.concerns[1:]] == [("vim.home_encrypted", "Information")]
    assert "is not migrated" in one.concerns[1].assessment


@pytest.mark.parametrize(
    ("fields", "reported"),
    [
        ({"config__version": "vmx-04"}, "vmx-04"),
        ({"capability__changeTrackingSupported": False}, "host"),
        ({"snapshot__rootSnapshotList": ["a snapshot"]}, "snapshots"),
        ({"snapshot__rootSnapshotList": ["a snapshot"], "config__changeTrackingEnabled": True}, None),
        ({}, None),
    ],
)
def test_why_changes_cannot_be_tracked(fields: dict[str, Any], reported: str | None) -> None:
    reason = cbt_reason(found(a_disk(), **fields))
    assert (reason is None) if reported is None else reported in str(reason)


def test_a_machine_of_which_the_platform_knows_little() -> None:
    """Its host is away: there is a name, and hardly more."""
    one = described(config__hardware__device=None, runtime__powerState=None)
    assert (one.power_state, one.disks, one.nics) == ("unknown", (), ())
    listed = row("vm-1", {"name": "web"}, "DC0", "")
    assert (listed.power_state, listed.cpu_count, listed.capacity_bytes) == ("unknown", None, None)
