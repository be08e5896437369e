"""vSphere's virtual machines as ours: a line of discovery, and the manifest. No I/O: what is read is handed in.

Names of properties are those of the vSphere Web Services API: `VirtualMachine`, `VirtualMachineConfigInfo`, `VirtualDevice`.
"""

import re
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from datetime import datetime, timedelta
from typing import Any, Final, Literal

from synvirt.live import VmRow
from synvirt.live.vsphere.disks import (
    OBJECT_STORES,
    allocated_of,
    backings,
    bus_of,
    capacity_of,
    chain,
    controller_of,
    deltas_of,
    encrypted,
    label,
    not_held,
    not_tracked,
    passed_through,
    shared_buses,
    store_of,
    type_name,
    virtual_disks,
)
from synvirt.live.vsphere.ways import EXPORT, Way, mostly_empty
from synvirt.model.machine import Concern, Disk, GuestOs, Nic, Snapshot, VmManifest
from synvirt.sizes import GIB, MIB

LISTED: Final = (
    "name",
    "parent",
    "runtime.powerState",
    "runtime.host",
    "summary.config.template",
    "summary.config.numCpu",
    "summary.config.memorySizeMB",
    "summary.config.guestFullName",
    "summary.storage.committed",
    "summary.storage.uncommitted",
)
INSPECTED: Final = (
    "name",
    "parent",
    "runtime.powerState",
    "runtime.connectionState",
    "runtime.consolidationNeeded",
    "runtime.host",
    "capability.changeTrackingSupported",
    "config.changeTrackingEnabled",
    "config.extraConfig",
    "config.version",
    "config.uuid",
    "config.firmware",
    "config.bootOptions",
    "config.keyId",
    "config.template",
    "config.ftInfo",
    "config.managedBy",
    "config.guestId",
    "config.guestFullName",
    "config.hardware.numCPU",
    "config.hardware.numCoresPerSocket",
    "config.hardware.memoryMB",
    "config.hardware.device",
    "guest.net",
    "guest.toolsRunningStatus",
    "snapshot.rootSnapshotList",
    "layoutEx.file",
    "datastore",
    "network",
)
# Of a standard port group, a distributed one and one of NSX; of each what its cards name it by.
NETWORK_PATHS: Final[dict[str, tuple[str, ...]]] = {
    "Network": ("name",),
    "DistributedVirtualPortgroup": ("name", "key"),
    "OpaqueNetwork": ("name", "summary"),
}

_POWER: Final[dict[str, Literal["on", "off", "suspended"]]] = {"poweredOn": "on", "poweredOff": "off", "suspended": "suspended"}
_LINUX: Final = (
    "linux", "ubuntu", "debian", "rhel", "centos", "sles", "suse", "fedora", "coreos", "photon", "asianux", "mandr", "turbo",
    "rocky", "alma",
)  # fmt: skip
# Of a datastore: with less of it free a snapshot is a risk, and a concern says so. Our judgement, and no limit of vSphere's.
LOW_SPACE: Final = 0.1
# VMware's advice (KB 1025279) is to keep no snapshot for longer than 72 hours; a week lets those of a weekend's work pass.
OLD_SNAPSHOT: Final = timedelta(days=7)
# How fast a host joins snapshots under a guest that runs, on a busy array and on a quick one: an assumption, no measurement.
CONSOLIDATED_BPS: Final = (30 * MIB, 200 * MIB)
_ESCAPED: Final = re.compile("%(2f|5c|25)", re.IGNORECASE)
# ManagedByInfo.extensionKey of ESX Agent Manager: vCLS, NSX and others have their agents made by it.
AGENTS: Final = "com.vmware.vim.eam"
CLUSTER_AGENT: Final = "HDCS.agent"
# VirtualMachineConfigInfo.version: change tracking came with hardware version 7.
_CBT_VERSION: Final = 7


def shown(name: object) -> str:
    """A name of the inventory as people wrote it: vSphere hands out «/», «\\» and «%» in it as %2f, %5c and %25."""
    return _ESCAPED.sub(lambda found: chr(int(found[1], 16)), str(name))


def row(vm_id: str, found: Mapping[str, Any], folder: str, host: str) -> VmRow:
    """A VM as a list of a source shows it. `found`: its properties by name."""
    memory_mib = found.get("summary.config.memorySizeMB")
    stored = [found.get(f"summary.storage.{which}") for which in ("committed", "uncommitted")]
    return VmRow(
        vm_id=vm_id,
        name=shown(found.get("name", "")),
        power_state=_POWER.get(str(found.get("runtime.powerState")), "unknown"),
        folder=folder,
        cpu_count=found.get("summary.config.numCpu"),
        memory_bytes=None if memory_mib is None else int(memory_mib) * MIB,
        capacity_bytes=None if stored == [None, None] else sum(int(part or 0) for part in stored),
        guest_os=str(found.get("summary.config.guestFullName") or ""),
        host=host,
    )


def manifest(
    vm_id: str,
    found: Mapping[str, Any],
    store_types: Mapping[str, str],
    ways: Mapping[str, Way],
    *,
    host: str = "",
    networks: Mapping[str, str] | None = None,
    may_export: bool = False,
    space: Mapping[str, tuple[int, int]] | None = None,
    now: datetime | None = None,
) -> VmManifest:
    """`store_types`: of each datastore's name, its type. `ways`: of each disk's key, by which way it will be read. `host`: the
    name of the one it is on. `networks`: see `network_names`. `may_export`: our user may ask for an export
    lease. `space`: of each datastore's name, its free bytes, and all that it has. `now`: None where
    the age of snapshots is not wanted."""
    devices: Sequence[Any] = found.get("config.hardware.device") or ()
    boot = found.get("config.bootOptions")
    disks = _disks(found, devices, boot, ways)
    reason = cbt_reason(found) or "; ".join(disk.cbt_reason for disk in disks if disk.cbt_reason) or None
    return VmManifest(
        vm_id=vm_id,
        name=shown(found.get("name") or vm_id),
        uuid=found.get("config.uuid"),
        host=host,
        power_state=_POWER.get(str(found.get("runtime.powerState")), "unknown"),
        firmware="uefi" if found.get("config.firmware") == "efi" else "bios",
        secure_boot=bool(getattr(boot, "efiSecureBootEnabled", False)),
        tpm=any(type_name(device) == "VirtualTPM" for device in devices),
        cpu_count=int(found.get("config.hardware.numCPU") or 1),
        cores_per_socket=int(found.get("config.hardware.numCoresPerSocket") or 1),
        memory_bytes=int(found.get("config.hardware.memoryMB") or 1024) * MIB,
        guest_os=_guest_os(found),
        cbt_available=reason is None,
        cbt_reason=reason,
        disks=disks,
        nics=_nics(found, devices, networks or {}),
        snapshots=tuple(_snapshots(found.get("snapshot.rootSnapshotList") or ())),
        concerns=(
            *_concerns(found, devices, store_types, ways, may_export=may_export),
            *_of_stores(virtual_disks(devices), space or {}),
            *_of_leftovers(found, space or {}),
            *_of_old_snapshots(found, now, space or {}),
        ),
    )


def cbt_reason(found: Mapping[str, Any]) -> str | None:
    """Why no changes of the VM can be tracked; None: they can, as far as its disks can be."""
    version = str(found.get("config.version") or "")
    digits = version.removeprefix("vmx-")
    if digits.isdecimal() and int(digits) < _CBT_VERSION:
        return f"its virtual hardware is {version}; change tracking needs vmx-07"
    if found.get("capability.changeTrackingSupported") is False:
        return "its host cannot track changes"
    devices = found.get("config.hardware.device") or ()
    for kept, why in (
        (shared_buses(devices), "shares its disks with other VMs"),
        (passed_through(devices), "is the host's own"),
    ):
        if kept:
            return f"its {label(kept[0])} {why}, and vSphere takes no snapshot of such a VM"
    if not found.get("config.changeTrackingEnabled") and found.get("snapshot.rootSnapshotList"):
        return "it has snapshots, and tracking can only be switched on without: remove them first"
    return None


# ── parts ────────────────────────────────────────────────────────────────────────────────────────────────────────────


def _disks(found: Mapping[str, Any], devices: Sequence[Any], boot: Any, ways: Mapping[str, Way]) -> tuple[Disk, ...]:
    of_all = cbt_reason(found)
    tracked = bool(found.get("config.changeTrackingEnabled"))
    # Where the whole VM is not tracked, what its disks are set to says nothing: it is all set again.
    settings = (found.get("config.extraConfig") or ()) if tracked else ()
    order = [one.deviceKey for one in getattr(boot, "bootOrder", None) or () if hasattr(one, "deviceKey")]
    files = found.get("layoutEx.file") or ()

    def one(device: Any) -> Disk:
        controller = controller_of(device, devices)
        kind = type_name(controller) if controller is not None else ""
        switched_off = not_tracked(device, devices, settings)
        why = not_held(device) or ways[str(device.key)].no_deltas
        why = why or (f"is not tracked: {switched_off} in the VM's configuration parameters" if switched_off else None)
        return Disk(
            key=str(device.key),
            label=label(device),
            capacity_bytes=capacity_of(device),
            used_bytes=allocated_of(device, files),
            format="vmdk",
            bus=bus_of(controller),
            controller=f"{kind} {getattr(controller, 'busNumber', 0)}".strip(),
            unit=int(device.unitNumber or 0),
            boot_order=order.index(device.key) + 1 if device.key in order else None,
            source_path=str(getattr(device.backing, "fileName", "") or ""),
            # Not by the VM alone: this disk may have been added since, or nothing have happened that made the host begin.
            cbt_enabled=tracked and bool(getattr(device.backing, "changeId", None)),
            cbt_reason=of_all or (f"{label(device)} {why}" if why else None),
            read_by=ways[str(device.key)].name,
        )

    return tuple(one(device) for device in virtual_disks(devices))


def _nics(found: Mapping[str, Any], devices: Sequence[Any], networks: Mapping[str, str]) -> tuple[Nic, ...]:
    addresses = {nic.deviceConfigId: tuple(nic.ipAddress or ()) for nic in found.get("guest.net") or ()}
    return tuple(
        Nic(
            key=str(device.key),
            mac=device.macAddress,
            model=type_name(device).removeprefix("Virtual").lower(),
            network=_network(device.backing, networks),
            connected=bool(getattr(device.connectable, "startConnected", True)),
            ip_addresses=addresses.get(device.key, ()),
        )
        for device in devices
        if hasattr(device, "macAddress")
    )


def _network(backing: Any, networks: Mapping[str, str]) -> str:
    """By the name that people know it by; by what the card holds, where the platform does not say more."""
    port = getattr(backing, "port", None)
    key = getattr(port, "portgroupKey", None) or getattr(backing, "opaqueNetworkId", None)
    return networks.get(str(key)) or shown(getattr(backing, "deviceName", None) or key or "")


def network_names(found: Collection[Mapping[str, Any]]) -> dict[str, str]:
    """The names of networks by what cards hold of them: a distributed port group's key, an opaque (NSX) network's id. `found`:
    NETWORK_PATHS of each."""
    keys = [one.get("key") or getattr(one.get("summary"), "opaqueNetworkId", None) for one in found]
    return {str(key): shown(one["name"]) for key, one in zip(keys, found, strict=True) if key and one.get("name")}


def _snapshots(trees: Sequence[Any]) -> list[Snapshot]:
    found: list[Snapshot] = []
    for tree in trees:
        found.append(Snapshot(id=tree.snapshot._moId, name=tree.name, created_at=tree.createTime))  # noqa: SLF001
        found += _snapshots(tree.childSnapshotList or ())
    return found


def _guest_os(found: Mapping[str, Any]) -> GuestOs:
    guest_id, name = str(found.get("config.guestId") or ""), str(found.get("config.guestFullName") or "")
    family: Literal["windows", "linux", "other"] = "other"
    if guest_id.lower().startswith("win"):
        family = "windows"
    elif any(part in f"{guest_id} {name}".lower() for part in _LINUX):
        family = "linux"
    return GuestOs(family=family, id=guest_id, name=name)


def _concerns(
    found: Mapping[str, Any],
    devices: Sequence[Any],
    store_types: Mapping[str, str],
    ways: Mapping[str, Way],
    *,
    may_export: bool,
) -> Iterator[Concern]:
    disks = virtual_disks(devices)
    yield Concern(
        id="vim.read_by",
        category="Information",
        label="How the disks are read",
        assessment=_read_by(disks, ways),
        remedy="options.transport of the source chooses another way.",
    )
    yield from _of_machine(found, devices)
    if clones := _cloned(found, disks):
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


def _critical(id_: str, label: str, assessment: str, remedy: str) -> Concern:
    return Concern(id=id_, category="Critical", label=label, assessment=assessment, remedy=remedy)


def _of_machine(found: Mapping[str, Any], devices: Sequence[Any]) -> Iterator[Concern]:
    if found.get("config.keyId") is not None and not any(encrypted(disk) for disk in virtual_disks(devices)):
        yield Concern(
            id="vim.home_encrypted",
            category="Information",
            label="Encrypted home",
            assessment="The VM's configuration is encrypted, as it is with a virtual TPM; its disks are not, and are read. "
            "What a TPM holds does not come along.",
            remedy="Have recovery keys at hand where the guest keeps secrets in its TPM (BitLocker), or suspend BitLocker.",
        )
    if (state := found.get("runtime.connectionState")) not in (None, "connected"):
        yield _critical(
            "vim.connection", "Host is away", f"The VM is {state}.", "Bring its host back, or register the VM elsewhere."
        )
    if found.get("config.template"):
        yield _critical(
            "vim.template", "Template", "A template cannot be snapshot.", "Convert it to a VM, or deploy one from it."
        )
    if found.get("config.ftInfo") is not None:
        yield _critical(
            "vim.fault_tolerance",
            "Fault Tolerance",
            "vSphere keeps a second VM in step with this one, and takes no snapshot of the two but for certain backup tools.",
            "Turn Fault Tolerance off for it first; waive this where a snapshot without memory is known to work.",
        )
    if owner := _owner(found):
        yield _critical(
            "vim.agent",
            "vSphere's own VM",
            f"{owner}: it serves its cluster, which makes another where it goes away, and is of no use anywhere else.",
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


def _cloned(found: Mapping[str, Any], disks: Sequence[Any]) -> list[str]:
    """The disks with more files over one another than the VM's snapshots, and none left behind, can account for."""
    snapshots = len(_snapshots(found.get("snapshot.rootSnapshotList") or ()))
    if found.get("runtime.consolidationNeeded"):
        return []
    return [label(disk) for disk in disks if len(list(backings(disk))) - 1 > snapshots]


def _owner(found: Mapping[str, Any]) -> str:
    """Why the VM belongs to the platform itself: made by ESX Agent Manager, or marked as an agent, as vCLS VMs are."""
    manager = found.get("config.managedBy")
    if str(getattr(manager, "extensionKey", "")) == AGENTS:
        return f"It is managed by {AGENTS}"
    marks = [str(one.value).strip().lower() for one in found.get("config.extraConfig") or () if str(one.key) == CLUSTER_AGENT]
    return f"Its setting {CLUSTER_AGENT} says that it is an agent of its cluster" if "true" in marks else ""


def mostly_empty_disks(found: Mapping[str, Any], ways: Mapping[str, Way]) -> list[tuple[Any, int]]:
    """The mostly empty disks that are read from files, with how much of each is allocated, where it is not known which parts
    are: of a disk that is tracked, and has a change id, the platform lists them."""
    files = found.get("layoutEx.file") or ()
    disks = [
        disk for disk in virtual_disks(found.get("config.hardware.device") or ()) if ways[str(disk.key)].name == "datastore"
    ]
    allocated = [(disk, allocated_of(disk, files)) for disk in disks if not getattr(disk.backing, "changeId", None)]
    return [(disk, taken) for disk, taken in allocated if taken is not None and mostly_empty(capacity_of(disk), taken)]


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
    """Those that a snapshot may fill: by no more than the disks over which it lies."""
    for store in dict.fromkeys(store_of(disk) for disk in disks):
        free, has = space.get(store, (0, 0))
        most = sum(capacity_of(disk) for disk in disks if store_of(disk) == store)
        if free < min(most, has * LOW_SPACE):
            yield Concern(
                id=f"vim.store_full:{store}",
                category="Warning",
                label="Datastore that is nearly full",
                assessment=f"{store} has {free} of {has} bytes free. A snapshot grows by what its guest writes, for one "
                "pass; on a datastore that is full guests stand still.",
                remedy="Free some space there first, or move the VM cold: a guest that is off writes nothing.",
            )


def _of_old_snapshots(
    found: Mapping[str, Any], now: datetime | None, space: Mapping[str, tuple[int, int]]
) -> Iterator[Concern]:
    kept = _snapshots(found.get("snapshot.rootSnapshotList") or ())
    old = [one for one in kept if now and one.created_at and now - one.created_at > OLD_SNAPSHOT]
    if now and old:
        named = ", ".join(f"«{one.name}» ({(now - one.created_at).days} days)" for one in old if one.created_at)
        yield Concern(
            id="vim.old_snapshots",
            category="Warning",
            label="Old snapshots",
            assessment=f"The VM keeps {named}. Reading through their files is slower; to remove them all, "
            f"{_removal(found, space)}",
            remedy="Remove those that nobody needs, some time before the migration, with room on the datastore for it.",
        )


def _of_leftovers(found: Mapping[str, Any], space: Mapping[str, tuple[int, int]]) -> Iterator[Concern]:
    if found.get("runtime.consolidationNeeded"):
        yield Concern(
            id="vim.consolidation",
            category="Warning",
            label="Disks to consolidate",
            assessment="Files of snapshots that are no more are in use still. vSphere is asked to consolidate them with "
            f"the first snapshot that we remove: {_removal(found, space)}",
            remedy="Consolidate the disks in vSphere first; where that fails, see which backup tool holds them.",
        )


def _removal(found: Mapping[str, Any], space: Mapping[str, tuple[int, int]]) -> str:
    """What it takes for vSphere to join the VM's snapshots, as the end of a sentence. A thin file below grows by no more than
    what lies above it, which goes only when all is written."""
    disks, files = virtual_disks(found.get("config.hardware.device") or ()), found.get("layoutEx.file") or ()
    room: Counter[str] = Counter()
    for disk in disks:
        room.update(deltas_of(disk, files))
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
    """The first that hinders."""
    store, kind = store_of(disk), type_name(disk.backing).removesuffix("BackingInfo")
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
    """All by one way, or each by its own."""
    ways_of = {label(disk): ways[str(disk.key)].description for disk in disks}
    different = set(ways_of.values())
    if len(different) == 1:
        return f"By {different.pop()}."
    return "; ".join(f"{name} by {by}" for name, by in ways_of.items()) + "." if ways_of else "It has no disks."
