"""Hyper-V's virtual machines as ours: a row of discovery, and the manifest. No I/O: the caller passes in the scripts' answers.

Numbers are those of Hyper-V's cmdlets: VMState, ControllerType (0 IDE, 1 SCSI, 2 PMEM), VhdFormat.
"""

import re
from collections.abc import Mapping, Sequence
from typing import Any, Final, Literal

from synvirt import xml_document
from synvirt.errors import MalformedArchive
from synvirt.live import VmRow
from synvirt.live.hyperv import concerns
from synvirt.live.hyperv.guest_facts import guest_facts
from synvirt.machines import smbios
from synvirt.machines.guest_os import guest_os
from synvirt.machines.texts import clean, uuid_of, whole_number
from synvirt.model.machine import Concern, Disk, DiskBus, GuestOs, Nic, Snapshot, VmManifest

Power = Literal["on", "off", "suspended", "unknown"]
_OFF: Final = frozenset({3, 32786})
_ON: Final = frozenset({2, 4, 10, 11, 32777, 32781, 32782, 32784, 32785, 32787, 32790, 32791, 32794})
_BUSES: Final[Mapping[int, tuple[str, DiskBus]]] = {0: ("ide", "ide"), 1: ("scsi", "scsi"), 2: ("pmem", "scsi")}
# The first configuration version with change tracking: Windows Server 2016.
TRACKED_VERSION: Final = 8
_VHDX: Final = 3
_KVP_CHARS_MAX: Final = 65536


def power_of(state: object) -> Power:
    """The power state by the number of Hyper-V's VMState."""
    number = whole_number(str(state))
    if number in _OFF:
        return "off"
    if number in concerns.SAVED_STATES:
        return "suspended"
    return "on" if number in _ON else "unknown"


def row(found: Mapping[str, Any], node: str) -> VmRow:
    """A VM for a source's list. `node`: the host that has it."""
    return VmRow(
        vm_id=str(found["id"]).lower(),
        name=clean(str(found["name"])),
        power_state=power_of(found["state"]),
        folder=node,
        cpu_count=_count(found.get("cpus")),
        memory_bytes=_count(found.get("memory")),
        host=node,
    )


def manifest(vm_id: str, found: Mapping[str, Any], read_by: Concern, *, node: str = "") -> VmManifest:
    """`node`: its owner's name in a cluster. `read_by`: the way to read the disks."""
    disks = _disks(found)
    of_vm = untracked(found)
    reason = of_vm or "; ".join(disk.cbt_reason for disk in disks if disk.cbt_reason) or None
    if not disks:
        reason = reason or "it has no disk"
    guest = _guest_os(found)
    cpus = max(1, _count(found["cpus"]) or 1)
    socket = _count(found.get("cpus_per_socket")) or cpus
    return VmManifest(
        vm_id=vm_id,
        name=clean(str(found["name"])),
        # The guest sees the firmware's, and not the VM's id.
        uuid=uuid_of(str(found.get("bios_guid") or "")) or str(found["id"]).lower(),
        uuid_reversed_for=smbios.of_hyperv(generation=int(found["generation"])),
        serial=smbios.serial_of(str(found.get("bios_serial") or "")),
        host=node,
        power_state=power_of(found["state"]),
        firmware="uefi" if int(found["generation"]) == 2 else "bios",
        secure_boot=bool(found["firmware"]["secure_boot"]),
        tpm=bool(found["security"]["tpm"]),
        cpu_count=cpus,
        cores_per_socket=socket if 0 < socket <= cpus and cpus % socket == 0 else cpus,
        memory_bytes=_count(found["memory"]) or 0,
        guest_os=guest,
        cbt_available=reason is None,
        cbt_reason=reason,
        disks=disks,
        nics=tuple(_nic(one) for one in found["nics"]),
        snapshots=tuple(
            Snapshot(id=str(one["id"]), name=str(one["name"]), created_at=one["created"]) for one in found["checkpoints"]
        ),
        concerns=(
            read_by,
            *concerns.of_machine(found, guest),
            *(one for drive in found["drives"] for one in concerns.of_disk(key_of(drive), drive)),
        ),
    )


def place_of(drive: Mapping[str, Any]) -> tuple[int, int, int]:
    """Its bus, controller and location: the firmware boots IDE disks in this order, the cmdlets give them in any."""
    return int(drive["bus"]), int(drive["controller"]), int(drive["location"])


def key_of(drive: Mapping[str, Any]) -> str:
    """By the place where it is attached."""
    name = _BUSES.get(int(drive["bus"]), ("disk", "scsi"))[0]
    return f"{name}{drive['controller']}:{drive['location']}"


def untracked(found: Mapping[str, Any]) -> str | None:
    """Why no changes of the VM can be tracked; None: they can, if its disks can."""
    version = str(found["version"])
    number = whole_number(version.partition(".")[0])
    if number is not None and number < TRACKED_VERSION:
        return f"its configuration version is {version}; change tracking needs 8.0 (Update-VMVersion)"
    if int(found["checkpoint_type"]) == concerns.CHECKPOINTS_DISABLED:
        return "checkpoints are disabled for it (CheckpointType), and with them recovery snapshots"
    return None


def untracked_disk(drive: Mapping[str, Any]) -> str | None:
    """Why RCT cannot track this disk; None: it can."""
    if drive["physical"]:
        return "is a disk of the host itself"
    if drive["shared"]:
        return "is shared by several VMs"
    top = drive["chain"][0] if drive["chain"] else {}
    if top.get("error"):
        return f"cannot be inspected: {str(top['error'])[:200]}"
    return None if int(top.get("format") or 0) == _VHDX else "is not a VHDX, and only those are tracked"


# ── parts ────────────────────────────────────────────────────────────────────────────────────────────────────────────


def _disks(found: Mapping[str, Any]) -> tuple[Disk, ...]:
    of_all = untracked(found)
    drives = sorted(found["drives"], key=place_of)
    order = [key_of(one) for one in found["firmware"]["boot"]]
    if int(found["generation"]) != 2:
        order = [key_of(drive) for drive in drives if int(drive["bus"]) == 0][:1]

    def one(drive: Mapping[str, Any]) -> Disk:
        key, chain = key_of(drive), drive["chain"]
        name, bus = _BUSES.get(int(drive["bus"]), ("disk", "scsi"))
        why = untracked_disk(drive)
        return Disk(
            key=key,
            label=f"{name.upper()} {drive['controller']}:{drive['location']}",
            capacity_bytes=_count(chain[0].get("size")) or 0 if chain else 0,
            used_bytes=_used(chain),
            format="vhd" if chain and int(chain[0].get("format") or 0) == 2 else "vhdx",
            bus=bus,
            controller=f"{name}{drive['controller']}",
            unit=int(drive["location"]),
            boot_order=order.index(key) + 1 if key in order else None,
            source_path=str(drive["path"] or ""),
            sector_bytes=concerns.sector_bytes(drive),
            # Hyper-V tracks by itself, from the first reference point on.
            cbt_enabled=why is None and of_all is None,
            cbt_reason=of_all or (f"{key} {why}" if why else None),
        )

    return tuple(one(drive) for drive in drives)


def _used(chain: Sequence[Mapping[str, Any]]) -> int | None:
    if not chain or any(one.get("error") for one in chain):
        return None
    size = _count(chain[0].get("size")) or 0
    return min(size, sum(_count(one.get("file_size")) or 0 for one in chain))


def _nic(found: Mapping[str, Any]) -> Nic:
    digits = re.sub(r"[^0-9a-f]", "", str(found["mac"] or "").lower())
    # A dynamic address is all zeros until the machine starts for the first time.
    known = len(digits) == 12 and set(digits) != {"0"}
    return Nic(
        key=str(found["id"]).rpartition("\\")[2] or str(found["id"]),
        mac=":".join(re.findall("..", digits)) if known else None,
        model="tulip" if found["legacy"] else "netvsc",
        network=str(found["switch"] or ""),
        connected=bool(found["connected"]),
        ip_addresses=tuple(str(one) for one in found["addresses"] if one),
    )


def facts_of_guest(found: Mapping[str, Any]) -> dict[str, str]:
    """Facts of a guest, from the answer of the script `inspect`."""
    cards = [_nic(one) for one in found["nics"]]
    return guest_facts(_pairs(found), [(card.mac, card.ip_addresses) for card in cards if card.mac])


def _pairs(found: Mapping[str, Any]) -> dict[str, str]:
    return dict(filter(None, (_pair(str(one)) for one in found["kvp"] if one)))


def _guest_os(found: Mapping[str, Any]) -> GuestOs:
    """From the key-value pairs of the guest's integration services; else by the boot loaders that its firmware trusts."""
    pairs = _pairs(found)
    if name := pairs.get("OSName", ""):
        return guest_os(vendor_id=pairs.get("OSVersion", ""), description=name)
    if found["firmware"]["secure_boot"] and str(found["firmware"]["template"]) == "MicrosoftWindows":
        return GuestOs(family="windows", name="Windows (by the Secure Boot template)")
    return GuestOs()


def _pair(text: str) -> tuple[str, str] | None:
    """An Msvm_KvpExchangeDataItem as text (CIM DTD 2.0): its Name and Data. A guest wrote the Data."""
    if len(text) > _KVP_CHARS_MAX:
        return None
    try:
        root = xml_document.parse(text, "a key-value pair")
    except MalformedArchive:
        return None
    values = {one.get("NAME"): (one.findtext("VALUE") or "").strip() for one in root.iter("PROPERTY")}
    name, data = values.get("Name"), values.get("Data")
    return (name, clean(data)) if name and data else None


def _count(value: object) -> int | None:
    return value if isinstance(value, int) and value >= 0 else None
