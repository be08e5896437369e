"""What may hinder the move of a VM of vSphere, as concerns of its manifest. No I/O."""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime, timedelta
from typing import Any, Final

from synvirt.live.vsphere.disks import (
    OBJECT_STORES,
    backings,
    capacity_of,
    chain,
    deltas_of,
    encrypted,
    label,
    not_held,
    passed_through,
    shared_buses,
    store_of,
    type_name,
    virtual_disks,
)
from synvirt.live.vsphere.ways import EXPORT, Way, mostly_empty_disks
from synvirt.machines import smbios
from synvirt.machines.concerns import left_out, removable_media_left_out, settings_left_out, snapshots_present
from synvirt.machines.texts import clean
from synvirt.model.machine import Concern, Snapshot
from synvirt.sizes import GIB, MIB

# The share of a datastore that must be free: with less, a concern calls a snapshot a risk. Our judgement; vSphere has no such
# limit.
LOW_SPACE: Final = 0.1
# VMware's advice (KB 1025279) is to keep no snapshot for longer than 72 hours; a week lets those of a weekend's work pass.
OLD_SNAPSHOT: Final = timedelta(days=7)
# How fast a host consolidates the snapshots of a running guest, on a busy array and on a fast one. Assumed, not measured.
CONSOLIDATED_BPS: Final = (30 * MIB, 200 * MIB)
# ManagedByInfo.extensionKey of ESX Agent Manager, which makes the agent VMs of vCLS, NSX and others.
AGENTS: Final = "com.vmware.vim.eam"
_PORTS: Final = frozenset({"VirtualSerialPort", "VirtualParallelPort"})
# A port without a backing is nothing of the host; a printer by ThinPrint is VMware's own.
_NO_PORTS: Final = frozenset({"NoneType", "VirtualSerialPortThinPrintBackingInfo"})
_DRIVES: Final = frozenset({"VirtualCdrom", "VirtualFloppy"})
_MORE: Final = frozenset({"VirtualHdAudioCard", "VirtualEnsoniq1371", "VirtualSoundBlaster16", "VirtualWDT"})
CLUSTER_AGENT: Final = "HDCS.agent"


def concerns_of(
    found: Mapping[str, Any],
    ways: Mapping[str, Way],
    snapshots: Sequence[Snapshot],
    *,
    store_types: Mapping[str, str],
    may_export: bool,
    space: Mapping[str, tuple[int, int]],
    now: datetime | None,
) -> Iterator[Concern]:
    """The concerns of a VM. `found`: its properties by name; `snapshots`: those that it has; the others as `manifest` takes
    them."""
    devices: Sequence[Any] = found.get("config.hardware.device") or ()
    disks = virtual_disks(devices)
    yield Concern(
        id="vim.read_by",
        category="Information",
        label="How the disks are read",
        assessment=_read_by(disks, ways),
        remedy="options.transport of the source chooses another way.",
    )
    yield from _of_machine(found, devices)
    yield from _of_what_stays(found, devices)
    if clones := _cloned(found, disks, snapshots):
        yield Concern(
            id="vim.linked_clone",
            category="Information",
            label="Linked clone",
            assessment=f"{', '.join(clones)} lies over files of another VM. Those are read too: what arrives is whole, "
            "and needs no other VM.",
            remedy="Let our user read the datastore of the other VM, too, and have room here for whole disks.",
        )
    if empty := mostly_empty_disks(found, ways):
        yield _of_empty_disks(empty, ways, may_export=may_export)
    for disk in disks:
        yield from _of_disk(disk, store_types, by_files=ways[str(disk.key)].name in ("datastore", "esxi"))
    yield from _of_stores(disks, space)
    yield from _of_leftovers(found, space)
    if snapshots:
        yield snapshots_present(len(snapshots))
    yield from _of_old_snapshots(found, snapshots, now, space)


def _critical(id_: str, label: str, assessment: str, remedy: str) -> Concern:
    return Concern(id=id_, category="Critical", label=label, assessment=assessment, remedy=remedy)


def _of_machine(found: Mapping[str, Any], devices: Sequence[Any]) -> Iterator[Concern]:
    if found.get("config.keyId") is not None and not any(encrypted(disk) for disk in virtual_disks(devices)):
        yield Concern(
            id="vim.home_encrypted",
            category="Information",
            label="Encrypted home",
            assessment="The VM's configuration is encrypted, as it is with a virtual TPM; its disks are not, and are read. "
            "The content of its TPM is not migrated.",
            remedy="Have recovery keys at hand where the guest keeps secrets in its TPM (BitLocker), or suspend BitLocker.",
        )
    if (state := found.get("runtime.connectionState")) not in (None, "connected"):
        yield _critical(
            "vim.connection", "Host is away", f"The VM is {state}.", "Bring its host back, or register the VM elsewhere."
        )
    if found.get("config.template"):
        yield _critical(
            "vim.template", "Template", "vSphere takes no snapshot of a template.", "Convert it to a VM, or deploy one from it."
        )
    if found.get("config.ftInfo") is not None:
        yield _critical(
            "vim.fault_tolerance",
            "Fault Tolerance",
            "vSphere keeps a second VM in step with this one, and takes snapshots of them only for certain backup tools.",
            "Turn Fault Tolerance off for it first; waive this where a snapshot without memory is known to work.",
        )
    if owner := _owner(found):
        yield _critical(
            "vim.agent",
            "vSphere's own VM",
            f"{owner}: it serves its cluster, which makes a new one if it is removed. It has no use anywhere else.",
            "Leave it. What keeps its cluster together (vCLS) goes with the cluster.",
        )
    for controller in shared_buses(devices):
        yield _critical(
            f"vim.shared_bus:{controller.key}",
            "Shared bus",
            f"{label(controller)} shares its disks with other VMs: vSphere takes no snapshot of such a VM, and we read no disk "
            "without one.",
            "Shut the VM and its cluster down, and set the controller's bus sharing to none.",
        )
    for device in passed_through(devices):
        yield Concern(
            id=f"vim.passthrough:{device.key}",
            category="Warning",
            label="Passthrough device",
            assessment=f"{label(device)} is the host's own: vSphere takes no snapshot of a VM that runs with it, and promises "
            "none of one that is off, which a cold copy needs. The guest here has no such device.",
            remedy="Take it out of the VM before it is moved; assign one of this host's afterwards if the guest needs it.",
        )
    if found.get("runtime.powerState") == "suspended":
        yield _critical(
            "vim.suspended",
            "Suspended VM",
            "What it has in its memory is not moved, and is lost when it is powered off for the cut-over.",
            "Resume it, or power it off, at the source first.",
        )


def _of_what_stays(found: Mapping[str, Any], devices: Sequence[Any]) -> Iterator[Concern]:
    """What the guest has there and not here."""
    for device in devices:
        if type_name(device) == "VirtualNVDIMM":
            yield Concern(
                id=f"vim.nvdimm:{device.key}",
                category="Warning",
                label="Persistent memory",
                assessment=f"{label(device)} is persistent memory with content of its own, which is not copied.",
                remedy="Copy its content onto a disk of the VM first.",
            )
    named = [(type_name(device), type_name(getattr(device, "backing", None)), device) for device in devices]
    of_host = [
        clean(label(device))
        for kind, backing, device in named
        if (kind in _PORTS and backing not in _NO_PORTS)
        or kind == "VirtualUSB"
        or backing.endswith("PassthroughVmiopBackingInfo")
    ]
    if of_host:
        yield left_out(of_host)
    files = [str(getattr(device.backing, "fileName", None) or "") for kind, _, device in named if kind in _DRIVES]
    if media := tuple(clean(file.rpartition("/")[2]) for file in files if file):
        yield removable_media_left_out(media)
    settings = [clean(label(device)) for kind, _, device in named if kind in _MORE]
    settings += map(clean, smbios.vmware_left_out(extra_settings(found)))
    if settings:
        yield settings_left_out(settings)


def extra_settings(found: Mapping[str, Any]) -> dict[str, str]:
    """The VM's ExtraConfig, keys in lower case."""
    return {str(one.key).lower(): str(one.value) for one in found.get("config.extraConfig") or ()}


def _cloned(found: Mapping[str, Any], disks: Sequence[Any], snapshots: Sequence[Snapshot]) -> list[str]:
    """The disks that have more backing files than the VM has snapshots. None, where files of old snapshots were left behind:
    those are backing files too."""
    if found.get("runtime.consolidationNeeded"):
        return []
    return [label(disk) for disk in disks if len(list(backings(disk))) - 1 > len(snapshots)]


def _owner(found: Mapping[str, Any]) -> str:
    """Why the VM belongs to the platform itself; empty, where it does not. Either ESX Agent Manager made it, or a setting marks
    it as an agent (vCLS)."""
    manager = found.get("config.managedBy")
    if str(getattr(manager, "extensionKey", "")) == AGENTS:
        return f"It is managed by {AGENTS}"
    marks = [str(one.value).strip().lower() for one in found.get("config.extraConfig") or () if str(one.key) == CLUSTER_AGENT]
    return f"Its setting {CLUSTER_AGENT} says that it is an agent of its cluster" if "true" in marks else ""


def _of_empty_disks(empty: Sequence[tuple[Any, int]], ways: Mapping[str, Way], *, may_export: bool) -> Concern:
    allocated = ", ".join(f"{taken} of {capacity_of(disk)} bytes of {label(disk)}" for disk, taken in empty)
    by_choice = any(ways[str(disk.key)].chosen for disk, _ in empty)
    if by_choice or not may_export:
        why = "options.transport says so" if by_choice else f"our user lacks the privilege {EXPORT}"
        read, remedy = f"all of them, as {why}", "by an export lease what is allocated alone would come over the network"
    else:
        read, remedy = (
            "what is allocated alone, by an export lease",
            "options.transport datastore reads all of them, by their files",
        )
    return Concern(
        id="vim.mostly_empty",
        category="Information",
        label="Mostly empty disks",
        assessment=f"Allocated are {allocated}, and their changes are not tracked. A cold copy reads {read}.",
        remedy=f"A warm copy reads what is allocated; {remedy}.",
    )


def _of_stores(disks: Sequence[Any], space: Mapping[str, tuple[int, int]]) -> Iterator[Concern]:
    """The datastores that a snapshot may fill. It grows to the size of its disks at most."""
    for store in dict.fromkeys(store_of(disk, space) for disk in disks):
        free, has = space.get(store, (0, 0))
        most = sum(capacity_of(disk) for disk in disks if store_of(disk, space) == store)
        if free < min(most, has * LOW_SPACE):
            yield Concern(
                id=f"vim.store_full:{store}",
                category="Warning",
                label="Datastore that is nearly full",
                assessment=f"{store} has {free} of {has} bytes free. A snapshot grows by what its guest writes, for one "
                "pass; guests on a full datastore are paused.",
                remedy="Free some space there first, or move the VM cold: a guest that is off writes nothing.",
            )


def _of_old_snapshots(
    found: Mapping[str, Any], snapshots: Sequence[Snapshot], now: datetime | None, space: Mapping[str, tuple[int, int]]
) -> Iterator[Concern]:
    old = [one for one in snapshots if now and one.created_at and now - one.created_at > OLD_SNAPSHOT]
    if now and old:
        named = ", ".join(f"«{one.name}» ({(now - one.created_at).days} days)" for one in old if one.created_at)
        yield Concern(
            id="vim.old_snapshots",
            category="Warning",
            label="Old snapshots",
            assessment=f"The VM keeps {named}. Reading through their files is slower; to remove them all, "
            f"{_removal(found, space)}",
            remedy="Remove those that are not needed, some time before the migration, with room on the datastore for it.",
        )


def _of_leftovers(found: Mapping[str, Any], space: Mapping[str, tuple[int, int]]) -> Iterator[Concern]:
    if found.get("runtime.consolidationNeeded"):
        yield Concern(
            id="vim.consolidation",
            category="Warning",
            label="Disks to consolidate",
            assessment="The disks still use files of snapshots that were removed. vSphere is asked to consolidate "
            f"them with the first snapshot that we remove: {_removal(found, space)}",
            remedy="Consolidate the disks in vSphere first; where that fails, see which backup tool holds them.",
        )


def _removal(found: Mapping[str, Any], space: Mapping[str, tuple[int, int]]) -> str:
    """The time and the room that vSphere needs to consolidate the VM's snapshots, as the end of a sentence. A thin backing file
    grows by at most the size of the snapshot's file, which is deleted only when all of it is written."""
    disks, files = virtual_disks(found.get("config.hardware.device") or ()), found.get("layoutEx.file") or ()
    room: Counter[str] = Counter()
    for disk in disks:
        room.update(deltas_of(disk, files, space))
    grown = room.total()
    if not grown:
        return "vSphere writes their data again, which may take hours and slow the guest."
    slow, fast = (max(1, round(grown / bps / 60)) for bps in CONSOLIDATED_BPS)
    parts = (
        f"{needed / GIB:.1f} GiB on {store}" + (f" ({space[store][0] / GIB:.1f} GiB are free)" if store in space else "")
        for store, needed in room.items()
        if needed
    )
    return (
        f"vSphere writes {grown / GIB:.1f} GiB again, expected to take {_time(fast)} to {_time(slow)}, slows the guest "
        f"meanwhile, and needs room for up to {', '.join(parts)}."
    )


def _time(minutes: int) -> str:
    return f"{minutes} min" if minutes < 120 else f"{minutes / 60:.0f} h"


def _of_disk(disk: Any, store_types: Mapping[str, str], *, by_files: bool) -> Iterator[Concern]:
    """The first concern of the disk, if it has one."""
    store, kind = store_of(disk, store_types), type_name(disk.backing).removesuffix("BackingInfo")
    if encrypted(disk):
        yield _critical(
            f"disk-encrypted:{disk.key}",
            "Encrypted disk",
            f"The files of {label(disk)} are encrypted, and cannot be read.",
            "Decrypt it in vSphere first, or leave it out by skip_disks.",
        )
    elif by_files and store_types.get(store) in OBJECT_STORES:
        yield _critical(
            f"disk-in-objects:{disk.key}",
            "Datastore of objects",
            f"{label(disk)} lies in {store}, of type {store_types[store]}: its bytes cannot be read as a file.",
            "Read it by an export lease (options.transport lease), move it to VMFS or NFS, or install VDDK.",
        )
    elif by_files and chain(disk.backing) is None:
        yield _critical(
            f"disk-not-in-files:{disk.key}",
            "Disk that is not kept in files",
            f"{label(disk)} is a {kind}: no file that we read has its bytes.",
            "Leave it out by skip_disks, read it by an export lease (options.transport lease), or install VDDK.",
        )
    elif why := not_held(disk):
        yield _critical(
            f"disk-not-held:{disk.key}",
            "Disk that no snapshot holds",
            f"{label(disk)} {why}: what is read from it changes meanwhile.",
            "Change its mode, leave it out by skip_disks, or shut the VM down and waive this.",
        )


def _read_by(disks: Sequence[Any], ways: Mapping[str, Way]) -> str:
    """How the disks are read, in a sentence: all by one way, or each by its own."""
    ways_of = {label(disk): ways[str(disk.key)].description for disk in disks}
    different = set(ways_of.values())
    if len(different) == 1:
        return f"By {different.pop()}."
    return "; ".join(f"{name} by {by}" for name, by in ways_of.items()) + "." if ways_of else "It has no disks."
