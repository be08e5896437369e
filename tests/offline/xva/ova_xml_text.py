"""ova.xml as xapi writes it: XenAPI objects as an XML-RPC value on one line, most numbers as strings."""

from collections.abc import Mapping, Sequence
from xml.sax.saxutils import escape

Value = str | bool | int | Sequence["Value"] | Mapping[str, "Value"]

NULL = "OpaqueRef:NULL"


def xml_rpc(value: Value) -> str:
    match value:
        case bool():
            return f"<value><boolean>{int(value)}</boolean></value>"
        case str():
            return f"<value>{escape(value)}</value>"
        case int():
            return f"<value>{value}</value>"
        case Mapping():
            members = "".join(f"<member><name>{escape(key)}</name>{xml_rpc(inner)}</member>" for key, inner in value.items())
            return f"<value><struct>{members}</struct></value>"
        case _:
            return f"<value><array><data>{''.join(map(xml_rpc, value))}</data></array></value>"


def ova_xml(*objects: tuple[str, str, Mapping[str, Value]]) -> bytes:
    version = {
        "hostname": "xcp1",
        "date": "2024-04-02",
        "product_version": "8.3.0",
        "product_brand": "XCP-ng",
        "build_number": "cloud",
        "xapi_major": "1",
        "xapi_minor": "20",
        "export_vsn": "2",
    }
    listed: list[Value] = [{"class": kind, "id": key, "snapshot": fields} for kind, key, fields in objects]
    return xml_rpc({"version": version, "objects": listed}).encode()


def vm(**changes: Value) -> dict[str, Value]:
    """A VM of two disks, a CD drive and two NICs, as XCP-ng 8.3 exports it; fields that no importer reads are left out."""
    return {
        "uuid": "6a3f2c51-3f9e-8d6b-1f0c-0f4a2c9b7e11",
        "power_state": "Halted",
        "name_label": "web 1",
        "name_description": "",
        "is_a_template": False,
        "is_a_snapshot": False,
        "is_control_domain": False,
        "suspend_VDI": NULL,
        "memory_overhead": "20971520",
        "memory_static_max": "4294967296",
        "memory_dynamic_max": "4294967296",
        "memory_dynamic_min": "4294967296",
        "memory_static_min": "1073741824",
        "VCPUs_max": "4",
        "VCPUs_at_startup": "4",
        "VIFs": ["Ref:20", "Ref:21"],
        "VBDs": ["Ref:12", "Ref:10", "Ref:11"],
        "VTPMs": [],
        "snapshots": [],
        "PV_bootloader": "",
        "PV_kernel": "",
        "HVM_boot_policy": "BIOS order",
        "HVM_boot_params": {"order": "cdn", "firmware": "bios"},
        "platform": {
            "cores-per-socket": "2",
            "viridian": "false",
            "secureboot": "false",
            "device-model": "qemu-upstream-compat",
        },
        "other_config": {"base_template_name": "Debian Bookworm 12", "mac_seed": "d0ed9a3e"},
        **changes,
    }


def vbd(vdi: str, device: str, *, kind: str = "Disk", bootable: bool = False) -> dict[str, Value]:
    return {
        "VM": "Ref:0",
        "VDI": vdi,
        "device": f"xvd{chr(ord('a') + int(device))}",
        "userdevice": device,
        "bootable": bootable,
        "mode": "RW",
        "type": kind,
        "empty": vdi == NULL,
    }


def vdi(size: int, label: str, **changes: Value) -> dict[str, Value]:
    return {"name_label": label, "virtual_size": str(size), "physical_utilisation": "1234567", "sharable": False, **changes}


def vif(device: str, mac: str) -> dict[str, Value]:
    return {"device": device, "network": "Ref:30", "VM": "Ref:0", "MAC": mac, "MTU": "1500"}


def whole(sizes: Mapping[str, int], **changes: Value) -> bytes:
    """The VM above with disks of these sizes, by the folders of their pieces: Ref:4 first and bootable, then Ref:5."""
    first, second = sizes["Ref:4"], sizes["Ref:5"]
    return ova_xml(
        ("VM", "Ref:0", vm(**changes)),
        ("VBD", "Ref:10", vbd("Ref:4", "0", bootable=True)),
        ("VBD", "Ref:11", vbd("Ref:5", "1")),
        ("VBD", "Ref:12", vbd(NULL, "3", kind="CD")),
        ("VIF", "Ref:20", vif("1", "26:5A:1C:0F:33:92")),
        ("VIF", "Ref:21", vif("0", "26:5a:1c:0f:33:91")),
        ("VDI", "Ref:4", vdi(first, "system")),
        ("VDI", "Ref:5", vdi(second, "data")),
        ("network", "Ref:30", {"name_label": "Pool-wide network associated with eth0", "bridge": "xenbr0"}),
        ("SR", "Ref:40", {"name_label": "Local storage"}),
    )


def one_disk(size: int, *, memory_bytes: int) -> bytes:
    """The VM above with the disk Ref:4 alone."""
    return ova_xml(
        ("VM", "Ref:0", vm(VBDs=["Ref:10"], VIFs=[], VCPUs_at_startup="1", platform={}, memory_static_max=str(memory_bytes))),
        ("VBD", "Ref:10", vbd("Ref:4", "0", bootable=True)),
        ("VDI", "Ref:4", vdi(size, "system")),
    )
