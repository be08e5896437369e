"""vSphere's virtual machines as ours: a row of discovery, and the manifest. No I/O: the caller passes in what was read.

Names of properties are those of the vSphere Web Services API: `VirtualMachine`, `VirtualMachineConfigInfo`, `VirtualDevice`.
"""

import re
from collections.abc import Collection, Mapping, Sequence
from datetime import datetime
from typing import Any, Final, Literal

from synvirt.live import VmRow
from synvirt.live.vsphere.concerns import concerns_of, extra_settings
from synvirt.live.vsphere.disks import (
    allocated_of,
    bus_of,
    by_place,
    capacity_of,
    controller_of,
    label,
    not_held,
    not_tracked,
    passed_through,
    shared_buses,
    type_name,
)
from synvirt.live.vsphere.ways import Way
from synvirt.machines import card_names, smbios
from synvirt.model.machine import Disk, GuestOs, Nic, Snapshot, VmManifest
from synvirt.sizes import MIB

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
# The properties of a standard, a distributed and an NSX port group by which cards name them.
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
_ESCAPED: Final = re.compile("%(2f|5c|25)", re.IGNORECASE)
# VirtualMachineConfigInfo.version: change tracking came with hardware version 7.
_CBT_VERSION: Final = 7


def shown(name: object) -> str:
    """A name of the inventory in its original form: vSphere writes «/», «\\» and «%» in it as %2f, %5c and %25."""
    return _ESCAPED.sub(lambda found: chr(int(found[1], 16)), str(name))


def row(vm_id: str, found: Mapping[str, Any], folder: str, host: str) -> VmRow:
    """A VM for a source's list. `found`: its properties by name."""
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
    """`store_types`: each datastore's type, by its name. `ways`: the way to read each disk, by its key. `host`: the name of the
    VM's host. `networks`: see `network_names`. `may_export`: whether our user may request an export lease. `space`: each
    datastore's free bytes and its capacity, by its name. `now`: None, where the age of snapshots is not wanted."""
    devices: Sequence[Any] = found.get("config.hardware.device") or ()
    boot, uefi = found.get("config.bootOptions"), found.get("config.firmware") == "efi"
    disks = _disks(found, devices, boot, ways)
    snapshots = _snapshots(found.get("snapshot.rootSnapshotList") or ())
    reason = cbt_reason(found) or "; ".join(disk.cbt_reason for disk in disks if disk.cbt_reason) or None
    return VmManifest(
        vm_id=vm_id,
        name=shown(found.get("name") or vm_id),
        uuid=found.get("config.uuid"),
        uuid_reversed_for=smbios.of_vmware(str(found.get("config.version") or "")),
        serial=smbios.vmware_serial(found.get("config.uuid"), extra_settings(found)),
        host=host,
        power_state=_POWER.get(str(found.get("runtime.powerState")), "unknown"),
        firmware="uefi" if uefi else "bios",
        secure_boot=uefi and bool(getattr(boot, "efiSecureBootEnabled", False)),
        tpm=any(type_name(device) == "VirtualTPM" for device in devices),
        cpu_count=int(found.get("config.hardware.numCPU") or 1),
        cores_per_socket=int(found.get("config.hardware.numCoresPerSocket") or 1),
        memory_bytes=int(found.get("config.hardware.memoryMB") or 1024) * MIB,
        guest_os=_guest_os(found),
        cbt_available=reason is None,
        cbt_reason=reason,
        disks=disks,
        nics=_nics(found, devices, networks or {}),
        snapshots=tuple(snapshots),
        concerns=tuple(
            concerns_of(found, ways, snapshots, store_types=store_types, may_export=may_export, space=space or {}, now=now)
        ),
    )


def cbt_reason(found: Mapping[str, Any]) -> str | None:
    """Why no changes of the VM can be tracked; None: they can, if its disks can."""
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
    # If the whole VM is not tracked, its disks' settings do not matter: all are set again.
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
            # Not by the VM alone: this disk may have been added later, or the host may not yet have begun.
            cbt_enabled=tracked and bool(getattr(device.backing, "changeId", None)),
            cbt_reason=of_all or (f"{label(device)} {why}" if why else None),
            read_by=ways[str(device.key)].name,
        )

    return tuple(one(device) for device in by_place(devices))


def _nics(found: Mapping[str, Any], devices: Sequence[Any], networks: Mapping[str, str]) -> tuple[Nic, ...]:
    addresses = {nic.deviceConfigId: tuple(nic.ipAddress or ()) for nic in found.get("guest.net") or ()}
    return tuple(
        Nic(
            key=str(device.key),
            mac=device.macAddress,
            model=type_name(device).removeprefix("Virtual").lower(),
            network=_network(device.backing, networks),
            connected=bool(getattr(device.connectable, "startConnected", True)),
            linux_name=card_names.vmware(getattr(device.slotInfo, "pciSlotNumber", None)),
            ip_addresses=addresses.get(device.key, ()),
        )
        for device in devices
        if hasattr(device, "macAddress")
    )


def _network(backing: Any, networks: Mapping[str, str]) -> str:
    """The network's name for people; else the card's own id, where the platform reports no more."""
    port = getattr(backing, "port", None)
    key = getattr(port, "portgroupKey", None) or getattr(backing, "opaqueNetworkId", None)
    return networks.get(str(key)) or shown(getattr(backing, "deviceName", None) or key or "")


def network_names(found: Collection[Mapping[str, Any]]) -> dict[str, str]:
    """The names of networks by the ids in cards: a distributed port group's key, an opaque (NSX) network's id. `found`:
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
