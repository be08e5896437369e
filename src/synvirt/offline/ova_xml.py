"""ova.xml, the description in an XVA archive: XenAPI objects written as an XML-RPC value (xapi, `ocaml/xapi/export.ml`).

    {version: {…}, objects: [{class: "VM", id: "Ref:0", snapshot: {name_label: …, VBDs: ["Ref:1"], …}}, {class: "VBD", …}, …]}

Ids name objects within the archive only; a disk's id is also the folder of its pieces. Exporters add and leave out fields
from version to version, so everything is asked for with a default.
"""

from dataclasses import dataclass, field
from typing import Any
from xml.etree.ElementTree import Element

from synvirt.errors import MalformedArchive, UnsupportedFormat
from synvirt.model import GIB, Concern, Disk, DiskBus, Nic, Snapshot, VmManifest
from synvirt.offline import concerns
from synvirt.offline.guest_os import guest_os
from synvirt.offline.texts import clean, is_true, uuid_of, whole_number
from synvirt.xml_document import children, local

# Real ones nest twelve deep; deeper is made to exhaust the stack.
_DEPTH_MAX = 40
_NULL = "OpaqueRef:NULL"


@dataclass(frozen=True, slots=True)
class _Objects:
    """The archive's objects: class → id → fields."""

    by_class: dict[str, dict[str, dict[str, Any]]] = field(default_factory=dict)

    def of(self, kind: str) -> dict[str, dict[str, Any]]:
        return self.by_class.get(kind, {})


def parse(root: Element, name: str) -> VmManifest:
    """The manifest; a disk's key is the folder of its pieces. MalformedArchive, UnsupportedFormat (several VMs)."""
    objects = _objects(root, name)
    vm_id, vm = _the_vm(objects, name)
    return _manifest(objects, vm_id, vm)


def _objects(root: Element, name: str) -> _Objects:
    content = _value(root, 0, name)
    listed = content.get("objects") if isinstance(content, dict) else None
    if not isinstance(listed, list):
        raise MalformedArchive(f"{name} has no list of objects")
    found = _Objects()
    for each in listed:
        fields = each.get("snapshot") if isinstance(each, dict) else None
        if not isinstance(fields, dict) or not isinstance(each.get("class"), str) or not isinstance(each.get("id"), str):
            raise MalformedArchive(f"{name} has an object without class, id or fields")
        found.by_class.setdefault(each["class"], {})[each["id"]] = fields
    return found


def _value(element: Element, depth: int, name: str) -> Any:
    """An XML-RPC value. What has no type is a string; numbers stay strings, since XenAPI sends most of them as such."""
    if depth > _DEPTH_MAX:
        raise MalformedArchive(f"{name} nests values more than {_DEPTH_MAX} deep")
    inner = next(iter(element), None)
    if inner is None:
        return (element.text or "").strip()
    match local(inner.tag):
        case "struct":
            members = {}
            for member in children(inner, "member"):
                key, value = next(children(member, "name"), None), next(children(member, "value"), None)
                if key is None or value is None:
                    raise MalformedArchive(f"{name} has a member of a structure without name or value")
                members[(key.text or "").strip()] = _value(value, depth + 1, name)
            return members
        case "array":
            data = next(children(inner, "data"), inner)
            return [_value(value, depth + 1, name) for value in children(data, "value")]
        case "value":
            return _value(inner, depth + 1, name)
        case _:
            return (inner.text or "").strip()


def _the_vm(objects: _Objects, name: str) -> tuple[str, dict[str, Any]]:
    """Snapshots travel in the archive beside their VM; a template is exported as a VM like any other."""
    vms = {key: vm for key, vm in objects.of("VM").items() if not is_true(_text(vm, "is_a_snapshot"))} or objects.of("VM")
    vms = {key: vm for key, vm in vms.items() if not is_true(_text(vm, "is_control_domain"))}
    if not vms:
        raise MalformedArchive(f"{name} describes no VM")
    if len(vms) > 1:
        names = ", ".join(repr(clean(_text(vm, "name_label"))) for vm in list(vms.values())[:20])
        raise UnsupportedFormat(f"{name} holds {len(vms)} virtual machines: {names}", hint="Export each VM by itself.")
    return next(iter(vms.items()))


def _manifest(objects: _Objects, vm_id: str, vm: dict[str, Any]) -> VmManifest:
    boot, platform, other = (_table(vm, key) for key in ("HVM_boot_params", "platform", "other_config"))
    uefi = _text(boot, "firmware").lower() == "uefi"
    secure_boot = uefi and _text(platform, "secureboot").lower() == "true"
    tpm = bool(_list(vm, "VTPMs")) or is_true(_text(platform, "vtpm"))
    windows = is_true(_text(platform, "viridian")) or _text(platform, "device_id") == "0002"
    guest = guest_os(description=clean(_text(other, "base_template_name") or ("Windows (viridian)" if windows else "")))
    cpus = whole_number(_text(vm, "VCPUs_at_startup")) or whole_number(_text(vm, "VCPUs_max")) or 1
    cores = whole_number(_text(platform, "cores-per-socket")) or 1
    memory = whole_number(_text(vm, "memory_static_max")) or whole_number(_text(vm, "memory_dynamic_max"))
    disks, found = _disks(objects, vm)
    if not disks:
        found.append(concerns.no_disks())
    if memory is None:
        found.append(concerns.hardware_incomplete("memory"))
    snapshots = tuple(
        Snapshot(id=key, name=clean(_text(each, "name_label")))
        for key, each in objects.of("VM").items()
        if key != vm_id and is_true(_text(each, "is_a_snapshot"))
    )
    found += concerns.of_machine(uefi=uefi, secure_boot=secure_boot, tpm=tpm, guest=guest, snapshots=len(snapshots))
    if _text(vm, "power_state") == "Suspended":
        found.append(concerns.suspended())
    found += [concerns.passthrough_device(name) for name in _passed_through(vm, other)]
    if _text(vm, "PV_bootloader") or _text(vm, "PV_kernel"):
        found.append(concerns.paravirtualised())
    name = clean(_text(vm, "name_label")) or "imported"
    return VmManifest(
        vm_id=vm_id,
        name=name,
        uuid=uuid_of(_text(vm, "uuid")),
        power_state="suspended" if _text(vm, "power_state") == "Suspended" else "off",
        firmware="uefi" if uefi else "bios",
        secure_boot=secure_boot,
        tpm=tpm,
        cpu_count=cpus,
        cores_per_socket=cores if cpus % cores == 0 else 1,
        memory_bytes=memory or GIB,
        guest_os=guest,
        cbt_reason="an offline import is a copy of files: nothing changes in them",
        disks=disks,
        nics=_nics(objects, vm),
        snapshots=snapshots,
        concerns=tuple(found),
    )


def _passed_through(vm: dict[str, Any], other: dict[str, Any]) -> list[str]:
    """PCI devices as xl and xapi write them («0/0000:04:00.0,0/0000:04:00.1»), and virtual GPUs."""
    devices = [device.strip().rpartition("/")[2] for device in _text(other, "pci").split(",")[:20]]
    return [clean(device) for device in devices if device] + (["a virtual GPU"] if _list(vm, "VGPUs") else [])


def _disks(objects: _Objects, vm: dict[str, Any]) -> tuple[tuple[Disk, ...], list[Concern]]:
    """In the order of their device numbers, in which XenServer's firmware boots them."""
    attached = [objects.of("VBD").get(key, {}) for key in _list(vm, "VBDs")]
    attached = [vbd for vbd in attached if _text(vbd, "type") != "CD" and _text(vbd, "VDI") in objects.of("VDI")]
    disks: dict[str, Disk] = {}
    found: list[Concern] = []
    for order, vbd in enumerate(sorted(attached, key=_device)):
        key = _text(vbd, "VDI")
        vdi = objects.of("VDI")[key]
        if key in disks:
            continue
        # The first four are IDE disks to firmware and guest, until its Xen drivers take over; the others they alone see.
        bus: DiskBus = "ide" if order < 4 else "scsi"
        label = clean(_text(vdi, "name_label")) or f"disk {_device(vbd)}"
        disks[key] = Disk(
            key=key,
            label=label if label not in {disk.label for disk in disks.values()} else f"{label} ({_device(vbd)})",
            capacity_bytes=whole_number(_text(vdi, "virtual_size")) or 0,
            used_bytes=whole_number(_text(vdi, "physical_utilisation")),
            format="xva",
            bus=bus,
            controller=f"{bus}{order // 2 if bus == 'ide' else 0}",
            unit=order % 2 if bus == "ide" else order - 4,
            boot_order=1 if is_true(_text(vbd, "bootable")) and not any(disk.boot_order for disk in disks.values()) else None,
            source_path=key,
        )
        if is_true(_text(vdi, "sharable")):
            found.append(concerns.shared_disk(key))
    return tuple(disks.values()), found


def _nics(objects: _Objects, vm: dict[str, Any]) -> tuple[Nic, ...]:
    vifs = {key: objects.of("VIF")[key] for key in _list(vm, "VIFs") if key in objects.of("VIF")}
    return tuple(
        Nic(
            key=key,
            mac=_text(vif, "MAC").lower() or None,
            network=clean(_text(objects.of("network").get(_text(vif, "network"), {}), "name_label")),
        )
        for key, vif in sorted(vifs.items(), key=lambda each: _device(each[1]))
    )


def _device(attached: dict[str, Any]) -> int:
    return whole_number(_text(attached, "userdevice") or _text(attached, "device")) or 0


def _text(fields: dict[str, Any], key: str) -> str:
    value = fields.get(key, "")
    return value if isinstance(value, str) and value != _NULL else ""


def _table(fields: dict[str, Any], key: str) -> dict[str, Any]:
    value = fields.get(key)
    return value if isinstance(value, dict) else {}


def _list(fields: dict[str, Any], key: str) -> list[str]:
    value = fields.get(key)
    return [each for each in value if isinstance(each, str)] if isinstance(value, list) else []
