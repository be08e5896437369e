"""Facts of a machine's hardware, at its source and here, by the names of `model/facts.py`. Pure."""

from collections.abc import Collection, Mapping
from xml.etree import ElementTree as ET  # for its type: what is read goes through xml_document

from synvirt import xml_document
from synvirt.errors import Internal
from synvirt.hypervisor.hardware import disk_serials, macs
from synvirt.hypervisor.machine import Machine
from synvirt.model.machine import Disk, VmManifest
from synvirt.sizes import MIB


def of_source(machine: Machine) -> dict[str, str]:
    """The facts in its manifest, without what the plan leaves out."""
    manifest = machine.manifest
    disks = [disk for disk in manifest.disks if disk.key not in machine.skipped]
    return {
        "firmware": _firmware(manifest.firmware, secure=manifest.secure_boot),
        "boot order": _order(sorted(disks, key=lambda disk: disk.boot_place)),
        "processors": str(manifest.cpu_count),
        "memory": _mib(manifest.memory_bytes),
        **{f"disk {disk.key}": f"{disk.capacity_bytes} bytes" for disk in disks},
        **{f"network card {nic.key}": _mac(nic.mac) for nic in manifest.nics},
    }


def of_domain(xml: str, machine: Machine, sizes: Mapping[str, int]) -> dict[str, str]:
    """The facts of the domain as it is defined. `sizes`: of its disks in bytes, by the name of their target."""
    root = xml_document.parse(xml, "the hypervisor's description of a domain", wrong=Internal)
    loader = root.find("os/loader")
    disks, order = _disks(root, machine.manifest, machine)
    uefi = (loader is not None and loader.get("type") == "pflash") or root.find("os[@firmware='efi']") is not None
    found = {
        "firmware": _firmware("uefi" if uefi else "bios", secure=loader is not None and loader.get("secure") == "yes"),
        "boot order": _order([disk for _, disk in sorted(order, key=lambda one: one[0])]),
        "processors": root.findtext("vcpu", ""),
        "memory": _mib(_bytes(root.find("memory"))),
    }
    found |= {f"disk {disk.key}": f"{sizes[target]} bytes" for target, disk in disks.items() if target in sizes}
    present = {mac.get("address", "").lower() for mac in root.iterfind("devices/interface/mac")}
    own = macs(machine)
    return found | {f"network card {nic.key}": own[nic.key] for nic in machine.manifest.nics if own[nic.key] in present}


def _disks(root: ET.Element, manifest: VmManifest, machine: Machine) -> tuple[dict[str, Disk], list[tuple[int, Disk]]]:
    """The disks by target, and their boot order. Our disks are found by their serial numbers."""
    serials = disk_serials(machine)
    known = {serials[disk.key]: disk for disk in manifest.disks}
    disks, order = {}, []
    for element in root.iterfind("devices/disk"):
        disk, boot = known.get(element.findtext("serial", "")), element.find("boot")
        target = element.find("target")
        if disk is not None and target is not None:
            disks[target.get("dev", "")] = disk
            order += [(int(boot.get("order", "0")), disk)] if boot is not None else []
    return disks, order


def _firmware(kind: str, *, secure: bool) -> str:
    return f"{kind}, secure boot" if secure else kind


def _order(disks: Collection[Disk]) -> str:
    return ", ".join(disk.key for disk in disks)


def _mac(mac: str | None) -> str:
    return (mac or "none").strip().lower().replace("-", ":")


def _mib(count: int) -> str:
    return f"{count / MIB:.12g} MiB"  # `g` alone says 2.09715e+06 of two TiB


_UNITS = {"bytes": 1, "b": 1, "KiB": 1 << 10, "k": 1 << 10, "MiB": 1 << 20, "M": 1 << 20, "GiB": 1 << 30, "G": 1 << 30}


def _bytes(element: ET.Element | None) -> int:
    """libvirt's unit is KiB where none is named (Domain XML format, «memory»)."""
    if element is None or not (element.text or "").strip().isdigit():
        return 0
    return int((element.text or "").strip()) * _UNITS.get(element.get("unit", "KiB"), 1 << 10)
