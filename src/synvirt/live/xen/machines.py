"""XenServer's VMs as ours: a row of discovery, and the manifest with the facts that only a pool has. Blocking code."""

import time
from collections.abc import Mapping
from typing import Any, Final, NamedTuple

from synvirt.errors import Internal, VmNotFound
from synvirt.live import VmRow
from synvirt.live.odd import OddAnswer
from synvirt.live.xen import guest_facts as xen_guest
from synvirt.live.xen import nvram
from synvirt.live.xen.session import XapiFailure, XenSession
from synvirt.live.xen.ways import THICK_STORES, Seen, Transport, Way, seen, way
from synvirt.machines import xenapi
from synvirt.machines.texts import clean, is_true, whole_number
from synvirt.machines.xenapi import NULL, Record, Records, listed, table, text
from synvirt.model.machine import Concern, Disk, VmManifest
from synvirt.sizes import GIB

# The storage manager refuses a snapshot of a disk with this many layers; it joins them over time.
CHAIN_MAX: Final = 30
# Our judgement: a warm job's snapshots add at most two, and others may take some, too.
CHAIN_RISKY: Final = 24
# The share of a store that must be free, if its snapshots grow with writes: with less, a snapshot is a risk. Our judgement.
LOW_SPACE: Final = 0.1
LEAST_FREE_BYTES: Final = 1 * GIB
# The pauses before a VM is read again that was changed meanwhile. What is still missing then is a reference that leads nowhere.
READ_AGAIN_PAUSES_S: Final = (0.5, 2.0)
_OF_DEVICES: Final = frozenset({"VBD", "VDI", "VIF"})
# Concerns about UEFI variables that are not copied.
_OF_VARIABLES: Final = {"uefi-state-lost", "secure-boot"}


class Machine(NamedTuple):
    """A VM and all its records. `vdis`: its disks' references by our key, their UUID."""

    reference: str
    record: Record
    records: Records
    vdis: Mapping[str, str]


def vm_ref(session: XenSession, vm_id: str) -> str:
    """VmNotFound."""
    try:
        return str(session.asked("VM.get_by_uuid", vm_id))
    except XapiFailure as failure:
        if failure.code in ("UUID_INVALID", "HANDLE_INVALID"):
            hint = "list its VMs: it may have been exported and imported again"
            raise VmNotFound(f"{session.host} has no VM {vm_id[:60]}", hint=hint) from failure
        raise session.as_ours(f"look for {vm_id[:60]}", failure) from failure


def vm_record(session: XenSession, vm_id: str) -> Record:
    """VmNotFound."""
    record: Record = session.call(f"describe {vm_id[:60]}", "VM.get_record", vm_ref(session, vm_id))
    return record


def guest_facts(session: XenSession, vm_id: str) -> dict[str, str]:
    """The facts that the VM's Xen tools report."""
    vm = machine(session, vm_id)
    macs = {text(vif, "device"): text(vif, "MAC") for one in listed(vm.record, "VIFs") if (vif := vm.records.at("VIF", one))}
    return xen_guest.guest_facts(vm.records.at("VM_guest_metrics", text(vm.record, "guest_metrics")), macs)


def rows(session: XenSession) -> list[VmRow]:
    """All VMs, without templates, snapshots and a host's own domain."""
    what = "list its VMs"
    found = {kind: session.records(what, kind, fields) for kind, fields in _OF_ROWS.items()}
    vms, guests, vdis, hosts = (found[kind] for kind in ("VM", "VM_guest_metrics", "VDI", "host"))
    records = Records(found)

    def row(vm: Record) -> VmRow:
        os_name = text(table(guests.get(text(vm, "guest_metrics"), {}), "os_version"), "name").split("|")[0]
        sizes = [whole_number(text(vdis[text(vbd, "VDI")], "virtual_size")) for vbd in xenapi.disk_vbds(records, vm)]
        return VmRow(
            vm_id=text(vm, "uuid"),
            name=clean(text(vm, "name_label")),
            power_state=xenapi.power_state(vm),
            cpu_count=whole_number(text(vm, "VCPUs_at_startup")),
            memory_bytes=whole_number(text(vm, "memory_static_max")),
            capacity_bytes=sum(size or 0 for size in sizes),
            guest_os=clean(os_name or text(table(vm, "other_config"), "base_template_name")),
            host=clean(text(hosts.get(text(vm, "resident_on"), {}), "name_label")),
        )

    return [row(vm) for vm in vms.values() if not any(is_true(text(vm, trait)) for trait in _NO_MACHINES)]


_NO_MACHINES: Final = ("is_a_template", "is_a_snapshot", "is_control_domain")
# The fields that a row is made of, by class. A VM's whole record has 128 KiB of UEFI variables.
_OF_ROWS: Final = {
    "VM": (
        *("uuid", "name_label", "power_state", "VCPUs_at_startup", "memory_static_max", "guest_metrics", "other_config"),
        *("resident_on", "VBDs", *_NO_MACHINES),
    ),
    "VM_guest_metrics": ("os_version",),
    "VBD": ("type", "VDI", "userdevice", "device"),
    "VDI": ("virtual_size",),
    "host": ("name_label",),
}


def machine(session: XenSession, vm_id: str) -> Machine:
    """VmNotFound."""
    reference, what = vm_ref(session, vm_id), f"describe {vm_id}"
    for pause_s in (*READ_AGAIN_PAUSES_S, None):
        vm, found, whole = _read(session, reference, what)
        if whole or pause_s is None:
            break
        time.sleep(pause_s)
    records = Records(found)
    disks = [text(vbd, "VDI") for vbd in xenapi.disk_vbds(records, vm)]
    for disk in disks:
        vdi_bytes(session.host, records.at("VDI", disk))
    return Machine(reference, vm, records, {text(records.at("VDI", one), "uuid"): one for one in disks})


def _read(session: XenSession, reference: str, what: str) -> tuple[Record, dict[str, dict[str, Record]], bool]:
    """A VM, the records it leads to, by class, and whether all its devices and disks were found. They are read one after the
    other: a disk that is attached anew meanwhile, or moved to another storage, would be missing. VmNotFound."""
    vm: Record = session.call(what, "VM.get_record", reference)
    found: dict[str, dict[str, Record]] = {"VM": {reference: vm}}
    gone: set[str] = set()

    def fetch(kind: str, wanted: str) -> Record:
        kept = found.setdefault(kind, {})
        if wanted and wanted != NULL and wanted not in kept:
            try:
                kept[wanted] = session.asked(f"{kind}.get_record", wanted)
            except XapiFailure as failure:
                if failure.code != "HANDLE_INVALID":  # it was removed meanwhile
                    raise session.as_ours(what, failure) from failure
                gone.add(kind)
        return kept.get(wanted, {})

    for one in listed(vm, "snapshots"):
        fetch("VM", one)
    for one in listed(vm, "VIFs"):
        fetch("network", text(fetch("VIF", one), "network"))
    for one in listed(vm, "VBDs"):
        vbd = fetch("VBD", one)
        if text(vbd, "type") != "CD" and (vdi := text(vbd, "VDI")):
            fetch("SR", text(fetch("VDI", vdi), "SR"))
    fetch("VM_guest_metrics", text(vm, "guest_metrics"))
    fetch("host", text(vm, "resident_on"))
    return vm, found, not gone & _OF_DEVICES


def vdi_bytes(host: str, vdi: Record) -> int:
    """The size of a disk. OddAnswer: a copy must not take an unknown size for an empty disk."""
    size = whole_number(text(vdi, "virtual_size"))
    if size is None:
        raise OddAnswer(host, "VDI.get_record", f"no number of bytes in virtual_size: {str(vdi.get('virtual_size'))[:80]!r}")
    return size


def ways(session: XenSession, vm: Machine, wished: Transport) -> dict[str, Way]:
    """For each disk, by its key."""
    restrictions: Record = {}
    pools: Mapping[str, Record] = session.call("say what its licence allows", "pool.get_all_records")
    for pool in pools.values():
        restrictions = table(pool, "restrictions")
    return {key: way(wished, _seen(session, vm, reference, wished, restrictions)) for key, reference in vm.vdis.items()}


def _seen(session: XenSession, vm: Machine, vdi_ref: str, wished: Transport, restrictions: Record) -> Seen:
    vdi = vm.records.at("VDI", vdi_ref)
    offers, no_nbd = False, "no network of the pool has the purpose nbd"
    if wished != "export":
        try:
            offers = bool(session.asked("VDI.get_nbd_info", vdi_ref))
        except XapiFailure as failure:
            no_nbd = f"the pool offers no NBD: {failure.text}"
    return seen(vdi, vm.records.at("SR", text(vdi, "SR")), offers_nbd=offers, no_nbd=no_nbd, restrictions=restrictions)


def manifest(vm_id: str, vm: Machine, chosen: Mapping[str, Way], chains: Mapping[str, int]) -> VmManifest:
    """`chains`: the number of layers of each disk, as far as it is known."""
    base = xenapi.manifest(vm.records, vm.reference, disk_key=lambda _, vdi: text(vdi, "uuid"))
    disks = tuple(_disk(disk, vm, chosen[disk.key]) for disk in base.disks)
    reason = "; ".join(disk.cbt_reason for disk in disks if disk.cbt_reason) or None
    snapshots = tuple(one.model_copy(update={"id": text(vm.records.at("VM", one.id), "uuid")}) for one in base.snapshots)
    # The concern about a suspended VM is written for exports in files; in a pool the operator can still act.
    idle = {"suspended"} | (_OF_VARIABLES if variables_come(vm.record) else set())
    kept = tuple(one for one in base.concerns if one.id not in idle)
    return base.model_copy(
        update={
            "vm_id": vm_id,
            "host": clean(text(vm.records.at("host", text(vm.record, "resident_on")), "name_label")),
            "cbt_available": reason is None,
            "cbt_reason": reason,
            "disks": disks,
            "nics": tuple(one.model_copy(update={"key": text(vm.records.at("VIF", one.key), "uuid")}) for one in base.nics),
            "snapshots": snapshots,
            "concerns": (*kept, *_concerns(vm, disks, chosen, chains)),
        }
    )


def variables_come(vm: Record) -> bool:
    """Whether the VM's UEFI variables can be turned into OVMF's form."""
    try:
        return nvram.as_store(vm) is not None
    except Internal:  # an unknown form: the machine's variables are not copied, and a concern says so
        return False


def _disk(disk: Disk, vm: Machine, chosen: Way) -> Disk:
    vdi = vm.records.at("VDI", vm.vdis[disk.key])
    return disk.model_copy(
        update={
            "format": "vhd" if chosen.bytes != "raw" else "raw",
            "source_path": text(vm.records.at("SR", text(vdi, "SR")), "name_label"),
            "cbt_enabled": is_true(text(vdi, "cbt_enabled")),
            "cbt_reason": None if chosen.deltas else f"{disk.label} has no deltas: {chosen.why}",
        }
    )


def _concerns(vm: Machine, disks: tuple[Disk, ...], chosen: Mapping[str, Way], chains: Mapping[str, int]) -> list[Concern]:
    found = [
        Concern(
            id="xen.read_by",
            category="Information",
            label="How the disks are read",
            assessment=". ".join(f"{disk.label}: {chosen[disk.key].description}" for disk in disks)
            or "There are no disks to read",
            remedy="options.transport of the source chooses another way.",
        )
    ]
    if xenapi.power_state(vm.record) == "suspended":
        found.append(
            Concern(
                id="xen.suspended",
                category="Critical",
                label="Suspended VM",
                assessment=f"The VM is {text(vm.record, 'power_state').lower()}: what it has in memory is not moved.",
                remedy="Resume it, or shut it down, first.",
            )
        )
    found += [_long_chain(disk, chains[disk.key]) for disk in disks if chains.get(disk.key, 0) >= CHAIN_RISKY]
    stores = {text(vm.records.at("VDI", one), "SR") for one in vm.vdis.values()}
    full = {reference: lacking for reference in stores if (lacking := lacking_space(vm, reference)) is not None}
    return found + [_full_store(vm.records.at("SR", reference), lacking) for reference, lacking in full.items()]


def _long_chain(disk: Disk, layers: int) -> Concern:
    return Concern(
        id=f"xen.chain:{disk.key}",
        category="Warning",
        label="Long chain of snapshots",
        assessment=f"{disk.label} lies on {layers} layers; XenServer refuses a snapshot at {CHAIN_MAX}.",
        remedy="Remove snapshots that are not needed, and let the storage join its layers (rescan the SR) first.",
    )


def _full_store(sr: Record, lacking: str) -> Concern:
    return Concern(
        id=f"xen.store_full:{clean(text(sr, 'uuid'))}",
        category="Warning",
        label="Storage is nearly full",
        assessment=f"{clean(text(sr, 'name_label'))} {lacking}.",
        remedy="Make room there before the move: a snapshot grows, or takes as much as the disk, while it is read.",
    )


def lacking_space(vm: Machine, sr_ref: str, keys: Any = None) -> str | None:
    """The text about a store that may not have room for the snapshots of these disks (None: all); None, where it has."""
    sr = vm.records.at("SR", sr_ref)
    size, used = whole_number(text(sr, "physical_size")) or 0, whole_number(text(sr, "physical_utilisation")) or 0
    if size <= 0:
        return None  # some drivers do not report it
    wanted = [
        whole_number(text(vm.records.at("VDI", one), "virtual_size")) or 0
        for key, one in vm.vdis.items()
        if (keys is None or key in keys) and text(vm.records.at("VDI", one), "SR") == sr_ref
    ]
    free = max(0, size - used)
    if text(sr, "type") in THICK_STORES and free < sum(wanted):
        return f"has {free} bytes free, and snapshots of its disks take {sum(wanted)} there"
    if wanted and free < min(size * LOW_SPACE, LEAST_FREE_BYTES):
        return f"has {free} of {size} bytes free"
    return None


def chain_lengths(session: XenSession, vm: Machine) -> dict[str, int]:
    """By our key: the number of layers of each disk, from the storage manager's notes (`sm_config`, vhd-parent)."""
    found: dict[str, int] = {}
    for key, reference in vm.vdis.items():
        parent, length = text(table(vm.records.at("VDI", reference), "sm_config"), "vhd-parent"), 1
        while parent and length <= CHAIN_MAX:
            try:
                record: Record = session.asked("VDI.get_record", session.asked("VDI.get_by_uuid", parent))
            except XapiFailure:
                break
            parent, length = text(table(record, "sm_config"), "vhd-parent"), length + 1
        found[key] = length
    return found
