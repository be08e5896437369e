"""Descriptions that real exporters write and that were once read wrong: a test a class of them."""

from pathlib import Path

import pytest

from synvirt.cli.disk.images import disks_in
from synvirt.disks import open_reader
from synvirt.errors import MalformedArchive, UnsupportedFormat
from synvirt.model.machine import VmManifest
from synvirt.offline.known_by import root_of
from synvirt.offline.ovf import disks
from synvirt.offline.ovf.description import Description
from synvirt.offline.ovf.folder import OvfFolder
from synvirt.offline.vmx import configuration as vmx
from synvirt.sizes import GIB, MIB
from synvirt.xml_document import parse as parse_xml
from tests.offline import appliances
from tests.offline import parsing as ovf
from tests.offline.hyperv import hyperv_exports


def parsed(*changes: tuple[str, str], name: str = "ovftool", vm: str | None = None) -> Description:
    text = appliances.description(name).decode()
    for old, new in changes:
        assert old in text
        text = text.replace(old, new)
    return ovf.parse(text.encode(), f"{name}.ovf", vm)


def ids(manifest: VmManifest) -> set[str]:
    return {concern.id for concern in manifest.concerns}


# ── encodings ────────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("declared", "written", "is_wrong"),
    [
        ("utf-16", "utf-8", True),
        ("utf-16", "utf-8-sig", True),
        ("UTF-16", "utf-8", True),
        ("utf-8", "utf-16", True),
        ("utf-8", "utf-16-le", True),
        ("utf-8", "utf-16-be", True),
        ("utf-16", "utf-16", False),
        ("utf-8", "utf-8", False),
        ("utf-8", "utf-8-sig", False),
    ],
)
def test_the_bytes_are_believed_over_the_declaration(declared: str, written: str, is_wrong: bool) -> None:
    """XenCenter writes UTF-8 and declares utf-16."""
    text = appliances.description("xenserver").decode().replace('encoding="utf-8"', f'encoding="{declared}"')
    assert f'encoding="{declared}"' in text
    vm = ovf.parse(text.replace("<ovf:Name>web01<", "<ovf:Name>wéb01<").encode(written), "x.ovf").manifest
    assert vm.name == "wéb01"
    assert ("encoding-wrong" in ids(vm)) is is_wrong


def test_a_damaged_document_in_two_byte_characters_is_malformed() -> None:
    with pytest.raises(MalformedArchive):
        parse_xml("<?xml version='1.0' encoding='utf-8'?><a><b></a>".encode("utf-16"), "x.ovf")


# ── XenServer ────────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("system_type", "policy", "pv"),
    [
        ("xen-3.0-unknown", "", True),
        ("xen-3.0-unknown", "BIOS order", False),
        ("hvm-3.0-unknown", "BIOS order", False),
    ],
)
def test_a_paravirtualised_guest(system_type: str, policy: str, pv: bool) -> None:
    changes = (("hvm-3.0-unknown", system_type), (">BIOS order<", f">{policy}<"))
    assert ("paravirtualised" in ids(parsed(*changes, name="xenserver").manifest)) is pv


def test_a_paravirtualised_guest_by_its_boot_loader() -> None:
    changes = (
        ('"HVM_boot_policy"><xenovf:Value>BIOS order<', '"PV_bootloader"><xenovf:Value>pygrub<'),
        ("hvm-3.0-unknown", "unknown"),
    )
    assert "paravirtualised" in ids(parsed(*changes, name="xenserver").manifest)


# ── what is no disk, and what is one ─────────────────────────────────────────────────────────────────────────────────


def _item(instance: str, kind: int, resource: str, *more: str) -> str:
    return (
        f"<Item><rasd:ElementName>Thing {instance}</rasd:ElementName><rasd:HostResource>{resource}</rasd:HostResource>"
        f"<rasd:InstanceID>{instance}</rasd:InstanceID>{''.join(more)}<rasd:ResourceType>{kind}</rasd:ResourceType></Item>"
    )


def _envelope(disks: str, items: str, *, collection: str = "", files: str = "") -> bytes:
    system = (
        f'<VirtualSystem ovf:id="web"><Name>web</Name><VirtualHardwareSection>{items}</VirtualHardwareSection></VirtualSystem>'
    )
    inner = f'<VirtualSystemCollection ovf:id="shop">{collection}{system}</VirtualSystemCollection>' if collection else system
    return (
        '<Envelope xmlns="http://schemas.dmtf.org/ovf/envelope/1" xmlns:ovf="http://schemas.dmtf.org/ovf/envelope/1" '
        'xmlns:rasd="http://schemas.dmtf.org/wbem/wscim/1/cim-schema/2/CIM_ResourceAllocationSettingData">'
        f'<References><File ovf:href="a.vmdk" ovf:id="a"/><File ovf:href="b.iso" ovf:id="b"/>{files}</References>'
        f"<DiskSection>{disks}</DiskSection>{inner}</Envelope>"
    ).encode()


def _quantity(instance: int, kind: int, quantity: int) -> str:
    return (
        f"<Item><rasd:InstanceID>{instance}</rasd:InstanceID><rasd:ResourceType>{kind}</rasd:ResourceType>"
        f"<rasd:VirtualQuantity>{quantity}</rasd:VirtualQuantity></Item>"
    )


MEMORY = _quantity(2, 4, 1024)
CPU = _quantity(1, 3, 1)
DISK = '<Disk ovf:diskId="system" ovf:fileRef="a" ovf:capacity="8388608"/>'
SYSTEM_ITEM = _item("4", 17, "ovf:/disk/system")


@pytest.mark.parametrize(
    ("format_uri", "kind"),
    [
        ("http://www.ecma-international.org/publications/standards/Ecma-119.htm", 15),
        ("http://www.ecma-international.org/publications/standards/Ecma-119.htm", 16),
        ("", 15),
        ("", 16),
        ("http://www.ecma-international.org/publications/standards/Ecma-119.htm", 0),
    ],
)
def test_a_cd_image_is_no_hard_disk(format_uri: str, kind: int) -> None:
    """Known by the drive that it lies in, or by its format where no drive names it."""
    cd = f'<Disk ovf:diskId="cd" ovf:fileRef="b" ovf:capacity="1048576" ovf:format="{format_uri}"/>'
    items = CPU + MEMORY + SYSTEM_ITEM + (_item("9", kind, "ovf:/disk/cd") if kind else "")
    vm = ovf.parse(_envelope(DISK + cd, items), "x.ovf").manifest
    assert [disk.key for disk in vm.disks] == ["system"]
    assert ("media-left-out" in ids(vm)) is bool(kind)
    assert not any(each.startswith("disk-unattached") for each in ids(vm))


@pytest.mark.parametrize(("attribute", "known"), [("RAW", "raw"), ("COW", "qcow2"), ("", "vmdk")])
def test_ovirt_says_what_a_volume_is_beside_a_format_that_never_fits(attribute: str, known: str) -> None:
    disk = (
        '<Disk ovf:diskId="system" ovf:fileRef="a" ovf:size="1" ovf:format="http://www.vmware.com/specifications/vmdk.html#sparse"'
        f' ovf:volume-format="{attribute}"/>'
    )
    found = disks.parse(_envelope(disk, CPU + MEMORY + SYSTEM_ITEM), "x.ovf")
    assert found.disks["system"].source.format == known


def test_a_raw_disk_of_ovirt_is_read(tmp_path: Path) -> None:
    content = appliances.raw_disk()
    (tmp_path / "a.vmdk").write_bytes(content)
    disk = (
        f'<Disk ovf:diskId="system" ovf:fileRef="a" ovf:capacity="{len(content)}"'
        ' ovf:format="http://www.vmware.com/specifications/vmdk.html#sparse" ovf:volume-format="RAW"/>'
    )
    (tmp_path / "web.ovf").write_bytes(_envelope(disk, CPU + MEMORY + SYSTEM_ITEM))
    manifest = OvfFolder().inspect(tmp_path, tmp_path)
    assert (manifest.disks[0].format, manifest.disks[0].capacity_bytes) == ("raw", len(content))
    assert not any(each.startswith("disk-unreadable") for each in ids(manifest))


def test_a_lun_of_ovirt_is_never_a_blank_disk(tmp_path: Path) -> None:
    lun = '<Disk ovf:diskId="system" ovf:size="1" ovf:disk_storage_type="LUN"/>'
    (tmp_path / "web.ovf").write_bytes(_envelope(lun, CPU + MEMORY + SYSTEM_ITEM))
    assert "disk-unreadable:system" in ids(OvfFolder().inspect(tmp_path, tmp_path))
    with pytest.raises(UnsupportedFormat, match="LUN"):
        OvfFolder().open_disk(tmp_path, tmp_path, "system")


@pytest.mark.parametrize("vapp", [False, True])
def test_an_nvdimm_is_a_disk_that_an_item_names(vapp: bool) -> None:
    collection = '<Name>shop</Name><VirtualSystem ovf:id="other"><Name>other</Name></VirtualSystem>' if vapp else ""
    nvdimm = _item("4", 20, "ovf:/disk/system", "<rasd:ResourceSubType>vmware.nvdimm</rasd:ResourceSubType>")
    vm = ovf.parse(_envelope(DISK, CPU + MEMORY + nvdimm, collection=collection), "x.ovf", "web").manifest
    assert [disk.key for disk in vm.disks] == ["system"]
    assert not any(each.startswith("disk-unattached") for each in ids(vm))


def test_a_controller_of_type_20_stays_one() -> None:
    controller = (
        "<Item><rasd:InstanceID>3</rasd:InstanceID><rasd:ResourceSubType>AHCI</rasd:ResourceSubType>"
        "<rasd:ResourceType>20</rasd:ResourceType></Item>"
    )
    disk = _item("4", 17, "ovf:/disk/system", "<rasd:Parent>3</rasd:Parent>")
    vm = ovf.parse(_envelope(DISK, CPU + MEMORY + controller + disk), "x.ovf").manifest
    assert (vm.disks[0].bus, vm.disks[0].controller) == ("sata", "sata0")


def test_two_items_of_one_disk_are_reported() -> None:
    items = CPU + MEMORY + SYSTEM_ITEM + _item("5", 17, "ovf:/disk/system") + _item("6", 17, "ovf:/disk/system")
    vm = ovf.parse(_envelope(DISK, items), "x.ovf").manifest
    assert len(vm.disks) == 1
    assert [concern.id for concern in vm.concerns].count("disk-named-twice:system") == 1


# ── what a description leaves out ────────────────────────────────────────────────────────────────────────────────────


def _properties(value: str) -> str:
    return f'<ProductSection><Property ovf:key="size" ovf:type="int" ovf:value="{value}"/></ProductSection>'


def test_a_capacity_that_is_a_property_of_the_collection() -> None:
    disk = '<Disk ovf:diskId="system" ovf:fileRef="a" ovf:capacity="${size}" ovf:capacityAllocationUnits="byte * 2^20"/>'
    vm = ovf.parse(_envelope(disk, CPU + MEMORY + SYSTEM_ITEM, collection=_properties("8")), "x.ovf").manifest
    assert vm.disks[0].capacity_bytes == 8 * MIB


def test_a_memory_item_without_a_quantity() -> None:
    memory = "<Item><rasd:InstanceID>2</rasd:InstanceID><rasd:ResourceType>4</rasd:ResourceType></Item>"
    vm = ovf.parse(_envelope(DISK, CPU + memory + SYSTEM_ITEM), "x.ovf").manifest
    assert vm.memory_bytes == GIB
    assert "hardware-incomplete:memory" in ids(vm)


@pytest.mark.parametrize(
    ("said", "count", "given"),
    [
        ("", 1, False),
        ("<rasd:VirtualQuantity/>", 1, False),
        ("<rasd:VirtualQuantity>1</rasd:VirtualQuantity>", 1, True),
        ("<rasd:num_of_sockets>2</rasd:num_of_sockets>", 2, True),
    ],
)
def test_a_processor_item_without_a_quantity(said: str, count: int, given: bool) -> None:
    item = f"<Item><rasd:InstanceID>1</rasd:InstanceID><rasd:ResourceType>3</rasd:ResourceType>{said}</Item>"
    vm = ovf.parse(_envelope(DISK, item + MEMORY + SYSTEM_ITEM), "x.ovf").manifest
    assert (vm.cpu_count, "hardware-incomplete:processors" not in ids(vm)) == (count, given)


@pytest.mark.parametrize(("line", "given"), [("", False), ('memsize = "512"\n', True)])
def test_a_vmx_without_memory(line: str, given: bool) -> None:
    text = f'config.version = "8"\ndisplayName = "web"\nguestOS = "debian12-64"\n{line}'
    vm = vmx.parse(text.encode(), "web.vmx").manifest
    assert ("hardware-incomplete:memory" in ids(vm)) is not given


# ── where the files lie ──────────────────────────────────────────────────────────────────────────────────────────────


def test_an_export_of_hyper_v_is_a_whole_folder_whichever_file_names_it(tmp_path: Path) -> None:
    for inner in ("Virtual Machines", "Snapshots", "Elsewhere"):
        (tmp_path / inner).mkdir()
    assert root_of(tmp_path / "Virtual Machines/1.vmcx") == tmp_path
    assert root_of(tmp_path / "Snapshots/2.XML") == tmp_path
    assert root_of(tmp_path / "Elsewhere/1.vmcx") == tmp_path / "Elsewhere"
    assert root_of(tmp_path / "Virtual Machines/disk.vhdx") == tmp_path / "Virtual Machines"
    assert root_of(tmp_path / "Elsewhere") == tmp_path / "Elsewhere"


def test_an_export_of_hyper_v_by_its_configuration_outside_the_import_root(tmp_path: Path) -> None:
    """Its disks lie in a folder beside the configuration's own."""
    raw = appliances.raw_disk()
    export = hyperv_exports.export(tmp_path / "web", {"ide0:0": appliances.image(tmp_path, "a.vhdx", "vhdx", raw)})
    configuration = export / "Virtual Machines" / f"{hyperv_exports.MACHINE}.vmcx"
    (found,) = disks_in(configuration)
    assert open_reader(found.reader).size == len(raw)
    (export / "Virtual Hard Disks" / "a.vhdx").unlink()
    with pytest.raises(MalformedArchive, match=r"a\.vhdx.*none of its name is in"):
        disks_in(configuration)
