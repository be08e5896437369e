"""A vSphere disk by its backing: where it lies, what it lies over, whether a snapshot holds it. No I/O.

Names are those of the vSphere Web Services API: `VirtualDevice`, `VirtualDiskFlatVer2BackingInfo`.
"""

from collections.abc import Iterator, Sequence
from typing import Any, Final

from synvirt.model.machine import DiskBus

# Flat at its base, and of any sparse format above: the format of a snapshot's disk is a property of the same type.
_FLAT: Final = "VirtualDiskFlatVer2BackingInfo"
# VirtualController's subclasses, by the end of their names.
_BUSES: Final[tuple[tuple[str, DiskBus], ...]] = (
    ("IDEController", "ide"),
    ("AHCIController", "sata"),
    ("SATAController", "sata"),
    ("NVMEController", "nvme"),
    ("ParaVirtualSCSIController", "scsi"),
    ("SCSIController", "scsi"),
    ("LsiLogicController", "scsi"),
    ("LsiLogicSASController", "scsi"),
    ("BusLogicController", "scsi"),
)
# Of the files with a disk's bytes, where `fileName` is the descriptor's: its base's, and those of either kind of snapshot.
_EXTENTS: Final = ("-flat.vmdk", "-delta.vmdk", "-sesparse.vmdk")
# vSphere's own limit is 32 snapshots.
CHAIN_MAX: Final = 64
# Files of these stores are objects: /folder has no bytes of them.
OBJECT_STORES: Final = frozenset({"vsan", "vsanD", "VVOL"})


def type_name(thing: Any) -> str:
    """Of pyvmomi's `vim.vm.device.VirtualDisk.FlatVer2BackingInfo`: VirtualDiskFlatVer2BackingInfo."""
    name: str = getattr(type(thing), "_wsdlName", type(thing).__name__)
    return name


def shared_buses(devices: Sequence[Any]) -> list[Any]:
    """The controllers whose disks other VMs may have, too: of a VM with one vSphere takes no snapshot."""
    return [device for device in devices if getattr(device, "sharedBus", None) not in (None, "noSharing")]


def passed_through(devices: Sequence[Any]) -> list[Any]:
    """The host's own devices, whose state no snapshot can hold; a shared graphics card (Vmiop) is none of them."""
    return [
        device
        for device in devices
        if type_name(device) in ("VirtualPCIPassthrough", "VirtualSriovEthernetCard")
        and type_name(getattr(device, "backing", None)) != "VirtualPCIPassthroughVmiopBackingInfo"
    ]


def virtual_disks(devices: Sequence[Any]) -> list[Any]:
    return [device for device in devices if type_name(device) == "VirtualDisk"]


def label(device: Any) -> str:
    return str(getattr(device.deviceInfo, "label", None) or f"device {device.key}")


def store_of(disk: Any) -> str:
    """The name of the datastore that its newest file lies in."""
    return str(getattr(disk.backing, "fileName", "")).partition("]")[0].removeprefix("[")


def bus_of(controller: Any) -> DiskBus:
    return next((bus for end, bus in _BUSES if type_name(controller).endswith(end)), "scsi")


def controller_of(device: Any, devices: Sequence[Any]) -> Any:
    return next((one for one in devices if one.key == device.controllerKey), None)


def not_tracked(device: Any, devices: Sequence[Any], settings: Sequence[Any]) -> str | None:
    """The setting (of `config.extraConfig`) by which this one disk's changes are not tracked, though those of its VM are."""
    controller = controller_of(device, devices)
    name = f"{bus_of(controller)}{getattr(controller, 'busNumber', 0)}:{device.unitNumber}.ctkEnabled"
    off = (str(one.value).strip() for one in settings if str(one.key).lower() == name.lower())
    return next((f"{name} is {value}" for value in off if value.lower() in ("false", "0", "no")), None)


def place_name(device: Any, devices: Sequence[Any]) -> str:
    """Where it is plugged in, as exports name it: ParaVirtualSCSIController0:1."""
    controller = controller_of(device, devices)
    return f"{type_name(controller)}{getattr(controller, 'busNumber', 0)}:{device.unitNumber}"


def backings(disk: Any) -> Iterator[Any]:
    """Of all its files, the newest first."""
    backing = disk.backing
    for _ in range(CHAIN_MAX):
        if backing is None:
            return
        yield backing
        backing = getattr(backing, "parent", None)


def capacity_of(disk: Any) -> int:
    return int(disk.capacityInBytes or disk.capacityInKB * 1024)


def allocated_of(disk: Any, files: Sequence[Any]) -> int | None:
    """What the disk's files take, in bytes, by the platform's list of its VM's (`layoutEx.file`); None where one is not there.

    A file of a thin disk is listed with what it takes, not with what it may grow to."""
    sizes = {str(file.name): int(file.size) for file in files if file.type == "diskExtent"}
    stems = [str(getattr(backing, "fileName", "") or "").removesuffix(".vmdk") for backing in backings(disk)]
    taken = [next((sizes[stem + end] for end in _EXTENTS if stem + end in sizes), None) for stem in stems]
    known = [size for size in taken if size is not None]
    return min(capacity_of(disk), sum(known)) if len(known) == len(taken) else None


def deltas_of(disk: Any, files: Sequence[Any]) -> dict[str, int]:
    """By datastore, the bytes that the disk's files above its lowest one take: what a removal of all snapshots writes again, to
    where the lowest lies. Files that `layoutEx.file` does not list count as nothing."""
    sizes = {str(file.name): int(file.size) for file in files if file.type == "diskExtent"}
    *above, lowest = [str(getattr(backing, "fileName", "") or "") for backing in backings(disk)] or [""]
    names = (name.removesuffix(".vmdk") + end for name in above for end in _EXTENTS)
    return {lowest.partition("]")[0].removeprefix("["): sum(sizes.get(name, 0) for name in names)}


def stores_of(disks: Sequence[Any]) -> list[Any]:
    """The datastores that their files lie in: snapshots may lie elsewhere than what they are over."""
    found = [getattr(backing, "datastore", None) for disk in disks for backing in backings(disk)]
    return list({store._moId: store for store in found if store is not None}.values())  # noqa: SLF001 - pyvmomi's own name


def encrypted(disk: Any) -> bool:
    """Itself: not only the other files of its VM, as for one with a virtual TPM."""
    return any(getattr(backing, "keyId", None) is not None for backing in backings(disk))


def chain(backing: Any) -> list[Any] | None:
    """The disk's files from the newest snapshot's down to the flat one; None where they are not what /folder gives bytes of."""
    found: list[Any] = []
    while getattr(backing, "parent", None) is not None:
        kept_by_array = getattr(backing, "deltaDiskFormat", None) == "nativeFormat"
        if type_name(backing) != _FLAT or kept_by_array or len(found) == CHAIN_MAX:
            return None
        found.append(backing)
        backing = backing.parent
    return [*found, backing] if type_name(backing) == _FLAT else None


def not_held(disk: Any) -> str | None:
    """Why no snapshot holds it still; None: they do."""
    backing = disk.backing
    kind = type_name(backing)
    if kind.startswith("VirtualDiskRawDiskMapping") and getattr(backing, "compatibilityMode", "") == "physicalMode":
        return "is a raw device in physical mode"
    if str(getattr(backing, "diskMode", "") or "").startswith("independent"):
        return "is independent of snapshots"
    if getattr(backing, "sharing", None) == "sharingMultiWriter":
        return "is shared by several VMs"
    if not kind.startswith(("VirtualDiskFlatVer2", "VirtualDiskSeSparse", "VirtualDiskRawDiskMapping")):
        return f"is a {kind.removesuffix('BackingInfo')}"
    return None
