"""What each exporter writes, description by description: a test an oddity."""

import pytest

from synvirt.errors import MalformedArchive, UnsupportedFormat
from synvirt.model.machine import VmManifest
from synvirt.sizes import GIB, MIB
from tests.offline import appliances
from tests.offline import parsing as ovf

SCSI_DISK = (
    "<Item><rasd:InstanceID>4</rasd:InstanceID><rasd:Parent>3</rasd:Parent><rasd:ResourceType>17</rasd:ResourceType>"
    "<rasd:HostResource>ovf:/disk/vmdisk1</rasd:HostResource></Item>"
)


def manifest(name: str) -> VmManifest:
    return ovf.parse(appliances.description(name), f"{name}.ovf").manifest


def concern_ids(vm: VmManifest) -> set[str]:
    return {concern.id for concern in vm.concerns}


def edited(name: str, *changes: tuple[str, str]) -> VmManifest:
    text = appliances.description(name).decode()
    for old, new in changes:
        assert old in text
        text = text.replace(old, new)
    return ovf.parse(text.encode(), f"{name}.ovf").manifest


def test_ovftool() -> None:
    vm = manifest("ovftool")
    assert (vm.name, vm.vm_id, vm.firmware, vm.secure_boot, vm.tpm) == ("winsrv", "winsrv", "uefi", True, True)
    assert (vm.cpu_count, vm.cores_per_socket, vm.memory_bytes) == (4, 2, 8 * GIB)
    assert (vm.guest_os.family, vm.guest_os.id) == ("windows", "windows2019srv_64Guest")
    first, second = vm.disks
    assert (first.label, first.bus, first.controller, first.unit, first.source_path) == (
        "Hard Disk 1",
        "scsi",
        "scsi0",
        0,
        "disk1.vmdk",
    )
    assert (first.capacity_bytes, first.used_bytes) == (8 * MIB, 2621440)
    assert (second.bus, second.controller, second.unit, second.capacity_bytes) == ("nvme", "nvme0", 1, 16 * MIB)
    (nic,) = vm.nics
    assert (nic.mac, nic.model, nic.network, nic.connected) == (None, "vmxnet3", "VM Network", True)
    assert nic.linux_name == "ens192"
    assert concern_ids(vm) >= {"disk-independent:vmdisk2", "uefi-state-lost", "secure-boot", "tpm"}


@pytest.mark.parametrize(
    ("policy", "serial", "named"),
    [
        ("", None, None),
        ("<SerialNumberPolicy>0</SerialNumberPolicy>", None, "its host's serial number"),
        ("<SerialNumberPolicy>1</SerialNumberPolicy>", "5f0d7c4e-28c0-44a6-9d0d-3a1cf5a0e0a7", None),
        ("<SerialNumberPolicy>2</SerialNumberPolicy><CustomSerialNumber>AB 7</CustomSerialNumber>", "AB 7", None),
        ("<TimeZone>Europe/Berlin</TimeZone>", None, "a clock in Europe/Berlin"),
        ("<TimeZone>Etc/GMT</TimeZone>", None, None),
    ],
)
def test_ovirts_serial_number_is_the_hosts_the_vms_id_or_a_given_one(
    policy: str, serial: str | None, named: str | None
) -> None:
    vm = edited("ovirt", ("<VmType>1<", f"{policy}<VmType>1<"))
    assert vm.serial == serial
    found = [one.assessment for one in vm.concerns if one.id == "settings-not-taken-over"]
    assert found == ([f"The VM has settings that it does not have here: {named}."] if named else [])


@pytest.mark.parametrize(
    ("old", "new", "named"),
    [
        ("<IsReadOnly>false<", "<IsReadOnly>true<", "can only be read"),
        ('ovf:read-only="false"', 'ovf:read-only="true"', "can only be read"),
        ("<IsPlugged>true<", "<IsPlugged>false<", "is not plugged in"),
    ],
)
def test_a_disk_that_its_guest_may_not_write_or_does_not_have_is_named(old: str, new: str, named: str) -> None:
    vm = edited("ovirt", (old, new))
    assert any(f"here: rhel8_Disk1 {named}." in one.assessment for one in vm.concerns)


def test_vmware_boot_order_names_items_not_places() -> None:
    assert {disk.key: disk.boot_order for disk in manifest("ovftool").disks} == {"vmdisk1": 2, "vmdisk2": 1}


def test_disks_of_a_controller_are_in_the_order_of_their_units_as_the_firmware_boots_them() -> None:
    """VirtualBox writes items as its disks were attached; and an item of a deployment option replaces one further up."""
    vm = edited(
        "ovftool",
        ("<rasd:Parent>5<", "<rasd:Parent>3<"),
        (
            "0</rasd:AddressOnParent>\n        <rasd:ElementName>Hard",
            "2</rasd:AddressOnParent>\n        <rasd:ElementName>Hard",
        ),
    )
    assert [(disk.key, disk.controller, disk.unit) for disk in vm.disks] == [("vmdisk2", "scsi0", 1), ("vmdisk1", "scsi0", 2)]


def test_vmware_bios_is_the_default() -> None:
    vm = edited(
        "ovftool",
        ('vmw:value="efi"', 'vmw:value="bios"'),
        ('SecureBootEnabled" vmw:value="true"', 'SecureBootEnabled" vmw:value="false"'),
    )
    assert (vm.firmware, vm.secure_boot) == ("bios", False)
    assert "uefi-state-lost" not in concern_ids(vm)


@pytest.mark.parametrize(
    ("name", "uefi", "bios"),
    [("ovftool", 'vmw:value="efi"', 'vmw:value="bios"'), ("xenserver", "firmware=uefi;order", "firmware=bios;order")],
)
def test_a_bios_that_is_stated_is_one_whatever_is_left_of_secure_boot(name: str, uefi: str, bios: str) -> None:
    """vSphere and XenServer keep the option of a VM whose firmware was changed back."""
    assert manifest(name).secure_boot
    vm = edited(name, (uefi, bios))
    assert (vm.firmware, vm.secure_boot) == ("bios", False)
    assert not {"uefi-state-lost", "secure-boot"} & concern_ids(vm)


def test_which_guests_read_their_uuid_in_reverse_depends_on_who_wrote_the_file() -> None:
    setting = '<vmw:ExtraConfig vmw:key="uuid.bios" vmw:value="42 1f 24 5c 7f a8 60 fa-6a f6 a4 63 51 ce d0 eb"/>'
    firmware = '<vmw:Config ovf:required="false" vmw:key="firmware" vmw:value="efi"/>'
    vmware = edited("ovftool", (firmware, firmware + setting))
    assert vmware.uuid == "421f245c-7fa8-60fa-6af6-a46351ced0eb"
    assert vmware.serial == "VMware-42 1f 24 5c 7f a8 60 fa-6a f6 a4 63 51 ce d0 eb"
    of_host = '<vmw:ExtraConfig vmw:key="serialNumber.reflectHost" vmw:value="TRUE"/>'
    reflecting = edited("ovftool", (firmware, firmware + setting + of_host))
    assert reflecting.serial is None
    assert any("here: serialnumber.reflecthost." in one.assessment for one in reflecting.concerns)
    assert manifest("virtualbox").serial is None
    newer = '<Firmware type="EFI"><AutoSerialNumGen enabled="true"/></Firmware><AudioAdapter enabled="true"/>'
    newest = edited("virtualbox", ('<Firmware type="EFI"/>', newer))
    assert newest.serial == f"VirtualBox-{newest.uuid}"
    assert any("sound" in one.assessment for one in newest.concerns if one.id == "settings-not-taken-over")
    found = {name: manifest(name).uuid_reversed_for for name in ("virtualbox", "xenserver", "ovirt")}
    assert found | {"vmware": vmware.uuid_reversed_for} == {
        "virtualbox": ("windows",),
        "xenserver": ("windows",),
        "ovirt": (),
        "vmware": ("windows", "linux", "other"),
    }


def test_vmware_pci_passthrough() -> None:
    vm = edited("ovftool", ("<rasd:ResourceSubType>vmware.vtpm<", "<rasd:ResourceSubType>vmware.pci.passthrough<"))
    assert "passthrough-device:Virtual TPM" in concern_ids(vm)
    assert not vm.tpm


def test_virtualbox() -> None:
    vm = manifest("virtualbox")
    assert (vm.name, vm.uuid) == ("Debian 12", "3bd3d2a7-9d8b-4a3c-9a44-2b1f5c6f4d10")
    assert (vm.firmware, vm.tpm, vm.cpu_count, vm.memory_bytes) == ("uefi", True, 2, 2 * GIB)
    assert (vm.guest_os.family, vm.guest_os.id) == ("linux", "Debian_64")
    (disk,) = vm.disks
    assert (disk.label, disk.bus, disk.controller, disk.unit) == ("disk1", "sata", "sata0", 0)


def test_virtualbox_keeps_macs_in_its_own_part_only() -> None:
    (nic,) = manifest("virtualbox").nics
    assert (nic.mac, nic.model, nic.network, nic.linux_name) == ("08:00:27:f3:c2:aa", "e1000", "NAT", "enp0s3")


def test_xenserver() -> None:
    vm = manifest("xenserver")
    assert (vm.name, vm.uuid) == ("web01", "c7dc3ff6-2a6b-42f9-8e2b-fd5b15aa05ab")
    assert (vm.firmware, vm.secure_boot, vm.guest_os.family) == ("uefi", True, "windows")
    (disk,) = vm.disks
    assert disk.key == "Xen:c7dc3ff6-2a6b-42f9-8e2b-fd5b15aa05ab/58b2e9c9-6c62-4b8a-b1f5-6dbf62f9dd5a"
    assert (disk.format, disk.bus, disk.unit, disk.boot_order) == ("vhd", "ide", 0, 1)
    assert (vm.nics[0].mac, vm.nics[0].network) == ("26:5a:1c:0f:33:91", "XenNetwork 0")


def test_ovirt() -> None:
    vm = manifest("ovirt")
    assert (vm.name, vm.uuid) == ("rhel8", "5f0d7c4e-28c0-44a6-9d0d-3a1cf5a0e0a7")
    assert (vm.firmware, vm.secure_boot, vm.cpu_count, vm.cores_per_socket) == ("uefi", True, 4, 2)
    (disk,) = vm.disks
    assert (disk.key, disk.format, disk.bus, disk.boot_order) == ("1a6ae4a5-5e0e-4f0d-a4fb-6ed6a4f4df63", "qcow2", "scsi", 1)
    assert (disk.capacity_bytes, disk.used_bytes) == (GIB, 196608)
    assert (vm.nics[0].mac, vm.nics[0].model) == ("56:6f:c2:7a:00:05", "virtio")


@pytest.mark.parametrize(
    ("bios_type", "uefi", "secure"), [(0, False, False), (2, False, False), (3, True, False), (4, True, True)]
)
def test_ovirt_numbers_its_firmware(bios_type: int, uefi: bool, secure: bool) -> None:
    vm = edited("ovirt", ("<BiosType>4<", f"<BiosType>{bios_type}<"))
    assert (vm.firmware == "uefi", vm.secure_boot) == (uefi, secure)


def test_ovirt_before_4_4_numbered_it_otherwise() -> None:
    vm = edited("ovirt", ('version="4.4.0.0"', 'version="4.3.0.0"'), ("<BiosType>4<", "<BiosType>2<"))
    assert (vm.firmware, vm.secure_boot) == ("uefi", False)


def test_ovirt_storage_domain_gives_gibibytes_and_names_files_by_href() -> None:
    vm = manifest("ovirt_storage_domain")
    (disk,) = vm.disks
    assert (disk.capacity_bytes, disk.bus, disk.format, disk.boot_order) == (GIB, "virtio", "raw", 1)
    assert disk.source_path == "90b62105-4ae8-4a4b-826b-dfe970ae28d9/25534d4f-d07d-459d-a9ef-3ed733cbcdef"
    assert (vm.name, vm.cpu_count, vm.guest_os.family, vm.nics[0].mac) == ("guest7", 1, "linux", "52:54:00:01:02:03")
    assert "disk-unattached" not in str(concern_ids(vm))


def test_aws_prefixes_every_name_with_a_generated_prefix() -> None:
    vm = manifest("aws")
    assert (vm.name, vm.guest_os.family, vm.cpu_count, vm.memory_bytes) == ("export-i-0123456789abcdef0", "linux", 1, GIB)
    assert (vm.disks[0].capacity_bytes, vm.disks[0].bus, vm.nics[0].model) == (8 * MIB, "scsi", "e1000")


def test_vcloud_puts_a_single_vm_into_a_collection_with_sections_of_its_own() -> None:
    vm = manifest("vcloud")
    assert (vm.name, vm.guest_os.family, vm.cpu_count, vm.cores_per_socket, vm.memory_bytes) == (
        "shop-web",
        "linux",
        4,
        2,
        4 * GIB,
    )
    (disk,) = vm.disks
    assert (disk.label, disk.bus, disk.controller, disk.used_bytes) == ("Hard disk 1", "scsi", "scsi0", 2621440)
    (nic,) = vm.nics
    assert (nic.mac, nic.model, nic.network) == ("00:50:56:01:0a:7f", "vmxnet3", "org-net")
    assert vm.concerns == ()


def test_ovf_0_9_has_sections_by_type_and_another_namespace() -> None:
    vm = manifest("vmware_0_9")
    assert (vm.name, vm.guest_os.family, vm.memory_bytes) == ("oldvm", "windows", 512 * MIB)
    (disk,) = vm.disks
    assert (disk.controller, disk.unit) == ("ide1", 1)
    assert (vm.nics[0].model, vm.nics[0].connected) == ("pcnet32", False)


def test_ovf_2_storage_and_ethernet_items() -> None:
    vm = manifest("ovf_2")
    assert (vm.disks[0].controller, vm.disks[0].unit) == ("sata0", 2)
    assert vm.nics[0].mac == "00:16:8b:db:00:5e"


def test_ovf_2_deployment_options_choose_the_default_and_range_markers_are_skipped() -> None:
    vm = manifest("ovf_2")
    assert (vm.cpu_count, vm.memory_bytes) == (8, 16 * GIB)
    small = edited("ovf_2", (' ovf:default="true"', ""))
    assert (small.cpu_count, small.memory_bytes) == (1, 2 * GIB)


def test_ovf_2_capacity_may_be_a_property() -> None:
    assert manifest("ovf_2").disks[0].capacity_bytes == 8 * MIB
    with pytest.raises(MalformedArchive, match=r"property 'disk.mebibytes', which has no default"):
        edited("ovf_2", ('ovf:value="8"', 'ovf:value=""'))


def test_a_qemu_users_handmade_description() -> None:
    vm = manifest("qemu_user")
    assert (vm.name, vm.memory_bytes, vm.disks[0].key, vm.disks[0].capacity_bytes) == ("handmade", GIB, "d1", 8 * MIB)
    assert "guest-unknown" in concern_ids(vm)


def test_two_machines_in_a_collection_are_named() -> None:
    with pytest.raises(UnsupportedFormat, match="holds 2 virtual machines: 'web server', 'db'"):
        manifest("two_systems")


def test_a_collection_without_machines() -> None:
    with pytest.raises(MalformedArchive, match="describes no virtual system"):
        ovf.parse(b'<Envelope><VirtualSystemCollection id="x"/></Envelope>', "a.ovf")


def test_one_machine_in_a_collection_is_that_machine() -> None:
    text = appliances.description("ovftool").replace(b"<VirtualSystem ", b"<VirtualSystemCollection><VirtualSystem ")
    text = text.replace(b"</VirtualSystem>", b"</VirtualSystem></VirtualSystemCollection>")
    assert ovf.parse(text, "a.ovf").manifest == manifest("ovftool")


def test_cdrom_only_is_a_critical_concern() -> None:
    vm = manifest("cdrom_only")
    assert vm.disks == ()
    assert {concern.id for concern in vm.concerns if concern.category == "Critical"} == {"no-disks"}
    assert "CD/DVD drive 1" in next(concern.assessment for concern in vm.concerns if concern.id == "media-left-out")


def test_no_hardware_at_all() -> None:
    vm = ovf.parse(b"<Envelope><VirtualSystem id='x'/></Envelope>", "a.ovf").manifest
    assert (vm.name, vm.cpu_count, vm.memory_bytes, vm.disks) == ("x", 1, GIB, ())
    assert {"no-disks", "hardware-incomplete:processors", "hardware-incomplete:memory", "guest-unknown"} <= concern_ids(vm)


def test_a_disk_that_no_item_names_comes_last() -> None:
    vm = edited("ovftool", ("<rasd:HostResource>ovf:/disk/vmdisk1</rasd:HostResource>", ""))
    assert [disk.key for disk in vm.disks] == ["vmdisk2", "vmdisk1"]
    assert "disk-unattached:vmdisk1" in concern_ids(vm)


def test_two_disks_at_one_address_get_places_of_their_own() -> None:
    vm = edited("ovftool", ("<rasd:Parent>5<", "<rasd:Parent>3<"), ("<rasd:AddressOnParent>1<", "<rasd:AddressOnParent>0<"))
    assert [(disk.controller, disk.unit) for disk in vm.disks] == [("scsi0", 0), ("scsi0", 1)]


def test_two_disks_of_one_name_get_labels_of_their_own() -> None:
    vm = edited("ovftool", ("Hard Disk 2", "Hard Disk 1"))
    assert [disk.label for disk in vm.disks] == ["Hard Disk 1", "Hard Disk 1 (vmdisk2)"]


def test_controllers_without_addresses_are_numbered_in_order() -> None:
    vm = edited(
        "ovftool",
        ("<rasd:Address>0</rasd:Address>", ""),
        ("<rasd:ResourceSubType>vmware.nvme.controller<", "<rasd:ResourceSubType>AHCI<"),
    )
    assert [disk.controller for disk in vm.disks] == ["scsi0", "sata1"]


@pytest.mark.parametrize(
    ("subtype", "bus"),
    [
        ("AHCI", "sata"),
        ("vmware.sata.ahci", "sata"),
        ("vmware.nvme.controller", "nvme"),
        ("NVMe", "nvme"),
        ("VirtioSCSI", "scsi"),
        ("", "sata"),
    ],
)
def test_other_storage_devices_say_what_they_are_in_the_subtype(subtype: str, bus: str) -> None:
    vm = edited("virtualbox", ("<rasd:ResourceSubType>AHCI<", f"<rasd:ResourceSubType>{subtype}<"))
    assert vm.disks[0].bus == bus


@pytest.mark.parametrize("address", ["080027F3C2AA", "08:00:27:f3:c2:aa", "08-00-27-F3-C2-AA"])
def test_macs_in_every_spelling(address: str) -> None:
    vm = edited("xenserver", ("26:5a:1c:0f:33:91", address))
    assert vm.nics[0].mac == "08:00:27:f3:c2:aa"


def test_an_address_that_is_no_mac() -> None:
    assert edited("xenserver", ("26:5a:1c:0f:33:91", "0000:00:1f.6")).nics[0].mac is None


def test_names_with_line_breaks_become_one_line() -> None:
    assert edited("ovftool", ("<Name>winsrv<", "<Name>\n  win\tsrv\n  \u202e2 <")).name == "win srv 2"


def test_a_topology_that_does_not_come_out_even_is_none() -> None:
    assert (
        edited("ovftool", ('required="false">2</vmw:CoresPerSocket', 'required="false">3</vmw:CoresPerSocket')).cores_per_socket
        == 1
    )


def test_utf_16_with_a_byte_order_mark() -> None:
    text = appliances.description("ovftool").decode().replace('encoding="UTF-8"', 'encoding="UTF-16"')
    assert ovf.parse(text.encode("utf-16"), "a.ovf").manifest == manifest("ovftool")


@pytest.mark.parametrize(
    ("old", "new", "says"),
    [
        ('ovf:fileRef="file1"', 'ovf:fileRef="file9"', "lies in file 'file9', which References does not have"),
        ('ovf:diskId="vmdisk2"', 'ovf:diskId="vmdisk1"', "two disks have the id 'vmdisk1'"),
        ('ovf:id="file2"', 'ovf:id="file1"', "two files have the id 'file1'"),
        ('ovf:href="disk1.vmdk" ', "", "the file 'file1' has no href"),
        ('capacity="8"', 'capacity="eight"', "'eight' is not a size"),
        ('capacity="8"', 'capacity="-8"', "'-8' is not a size"),
        ('capacity="8"', 'capacity="99999999999999"', "is more than any disk"),
        ("byte * 2^20", "furlong", "'furlong' is not a unit of bytes"),
        ("byte * 2^20", "byte * 2^99", "is not a unit of bytes"),
        ("<rasd:VirtualQuantity>8192<", "<rasd:VirtualQuantity>0<", "0 bytes is not a size of a VM's memory"),
        ("<rasd:VirtualQuantity>4<", "<rasd:VirtualQuantity>many<", "VirtualQuantity is 'many'"),
    ],
)
def test_what_is_wrong_is_said(old: str, new: str, says: str) -> None:
    with pytest.raises(MalformedArchive, match=says.replace("^", r"\^")):
        edited("ovftool", (old, new))


def test_not_an_envelope() -> None:
    with pytest.raises(MalformedArchive, match="its root element is 'html'"):
        ovf.parse(b"<html/>", "a.ovf")


def test_no_system() -> None:
    with pytest.raises(MalformedArchive, match="describes no virtual system"):
        ovf.parse(b"<Envelope/>", "a.ovf")


def test_the_line_of_a_syntax_error() -> None:
    with pytest.raises(MalformedArchive, match=r"a.ovf is not well-formed XML: line 3, column"):
        ovf.parse(b"<Envelope>\n<a>\n</b>\n</Envelope>", "a.ovf")


BILLION_LAUGHS = b"""<?xml version="1.0"?><!DOCTYPE lolz [<!ENTITY lol "lol">%s]><Envelope>&lol9;</Envelope>""" % b"".join(
    b'<!ENTITY lol%d "%s">' % (number, b"&lol%d;" % (number - 1) * 10 if number > 1 else b"&lol;" * 10)
    for number in range(1, 10)
)


@pytest.mark.parametrize(
    "text",
    [
        BILLION_LAUGHS,
        b'<!DOCTYPE x [<!ENTITY e SYSTEM "file:///etc/passwd">]><Envelope>&e;</Envelope>',
        b'<!DOCTYPE x SYSTEM "http://127.0.0.1:1/x.dtd"><Envelope/>',
        b'<!DOCTYPE x [<!ENTITY %% p "x">%p;]><Envelope/>',
    ],
)
def test_entities_and_dtds_are_refused_unread(text: bytes) -> None:
    with pytest.raises(MalformedArchive):
        ovf.parse(text, "a.ovf")


def test_a_document_that_is_too_large() -> None:
    with pytest.raises(MalformedArchive, match="a description of a VM has 4194304 at most"):
        ovf.parse(b"<Envelope>" + b" " * (4 << 20) + b"</Envelope>", "a.ovf")


def test_a_document_of_elements_only() -> None:
    with pytest.raises(MalformedArchive, match="over 100000 elements"):
        ovf.parse(b"<Envelope>" + b"<a/>" * 200_001 + b"</Envelope>", "a.ovf")


def test_a_document_200000_deep() -> None:
    deep = b"<VirtualSystemCollection>" * 90_000 + b"</VirtualSystemCollection>" * 90_000
    with pytest.raises(MalformedArchive):
        ovf.parse(b"<Envelope>" + deep[: 4 << 20] + b"</Envelope>", "a.ovf")


@pytest.mark.parametrize(
    ("name", "old", "new"),
    [
        ("ovftool", "<rasd:AutomaticAllocation>true", "<rasd:AutomaticAllocation>false"),
        ("ovirt", "<rasd:Linked>true", "<rasd:Linked>false"),
        ("ovirt", "<BootOrder>0</BootOrder>", "<BootOrder>0</BootOrder><IsPlugged>false</IsPlugged>"),
        ("virtualbox", 'MACAddress="080027F3C2AA"', 'MACAddress="080027F3C2AA" cable="false"'),
    ],
)
def test_a_card_without_a_link_has_none_here(name: str, old: str, new: str) -> None:
    """It may be one whose address another machine has now. VirtualBox's items are all «allocated automatically»; a pulled cable
    is in its own part alone."""
    assert [nic.connected for nic in manifest(name).nics] == [True]
    assert [(nic.connected, nic.mac) for nic in edited(name, (old, new)).nics] == [(False, manifest(name).nics[0].mac)]


def test_ovirts_threads_are_processors_of_their_socket() -> None:
    """For the guest they are; and Windows for clients uses two sockets alone, whatever they have."""
    threads = ("<rasd:threads_per_cpu>1", "<rasd:threads_per_cpu>2")
    vm = edited("ovirt", threads, ("<rasd:VirtualQuantity>4<", "<rasd:VirtualQuantity>8<"))
    assert (vm.cpu_count, vm.cores_per_socket) == (8, 4)
    vm = edited("ovirt", threads, ("<rasd:VirtualQuantity>4</rasd:VirtualQuantity>", ""))
    assert (vm.cpu_count, vm.cores_per_socket) == (8, 4)
    vm = edited("ovirt", ("<rasd:threads_per_cpu>1", "<rasd:threads_per_cpu>3"))
    assert (vm.cpu_count, vm.cores_per_socket) == (4, 2)
