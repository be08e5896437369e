"""ova.xml, the description in an XVA archive: XenAPI objects written as an XML-RPC value (xapi, `ocaml/xapi/export.ml`).

    {version: {…}, objects: [{class: "VM", id: "Ref:0", snapshot: {name_label: …, VBDs: ["Ref:1"], …}}, {class: "VBD", …}, …]}

Ids are valid only in the archive; a disk's id is also the folder of its pieces. Exporters add and drop fields from version to
version, so every field has a default.
"""

from typing import Any
from xml.etree.ElementTree import Element

from synvirt.errors import MalformedArchive, UnsupportedFormat
from synvirt.machines import xenapi
from synvirt.machines.texts import clean, is_true
from synvirt.machines.xenapi import Record, Records, text
from synvirt.model.machine import VmManifest
from synvirt.nearest import in_short
from synvirt.xml_document import children, local

# Real ones nest twelve deep; a deeper one was made to exhaust the stack.
_DEPTH_MAX = 40


def parse(root: Element, name: str) -> VmManifest:
    """The manifest; a disk's key is the folder of its pieces. MalformedArchive, UnsupportedFormat (several VMs)."""
    objects = _objects(root, name)
    vm_id, vm = _the_vm(objects, name)
    described = xenapi.manifest(objects, vm_id, disk_key=lambda reference, _: reference)
    # If it was exported while it ran (from a snapshot), the VM in the file is off.
    state = "suspended" if text(vm, "power_state") == "Suspended" else "off"
    return described.model_copy(
        update={"power_state": state, "cbt_reason": "an offline import is a copy of files: nothing changes in them"}
    )


def _objects(root: Element, name: str) -> Records:
    content = _value(root, 0, name)
    listed = content.get("objects") if isinstance(content, dict) else None
    if not isinstance(listed, list):
        raise MalformedArchive(f"{name} has no list of objects")
    found = Records()
    for each in listed:
        fields = each.get("snapshot") if isinstance(each, dict) else None
        if not isinstance(fields, dict) or not isinstance(each.get("class"), str) or not isinstance(each.get("id"), str):
            raise MalformedArchive(f"{name} has an object without class, id or fields")
        found.by_class.setdefault(each["class"], {})[each["id"]] = fields
    return found


def _value(element: Element, depth: int, name: str) -> Any:
    """An XML-RPC value. A value without a type is a string; numbers stay strings, as XenAPI sends most of them as strings."""
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


def _the_vm(objects: Records, name: str) -> tuple[str, Record]:
    """The archive has a VM's snapshots too; a template is exported like any other VM."""
    vms = {key: vm for key, vm in objects.of("VM").items() if not is_true(text(vm, "is_a_snapshot"))} or objects.of("VM")
    vms = {key: vm for key, vm in vms.items() if not is_true(text(vm, "is_control_domain"))}
    if not vms:
        raise MalformedArchive(f"{name} describes no VM")
    if len(vms) > 1:
        names = in_short([repr(clean(text(vm, "name_label"))) for vm in vms.values()])
        raise UnsupportedFormat(f"{name} holds {len(vms)} virtual machines: {names}", hint="Export each VM separately.")
    return next(iter(vms.items()))
