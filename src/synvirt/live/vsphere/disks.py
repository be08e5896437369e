"""A vSphere disk by its backing: its place, its parents, whether a snapshot freezes it. No I/O.

Names are those of the vSphere Web Services API: `VirtualDevice`, `VirtualDiskFlatVer2BackingInfo`.
"""

from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Final

from synvirt.machines.boot_order import by_bus
from synvirt.model.machine import DiskBus

# Flat for the base, and for any sparse format above it: a property of the same type has the format of a snapshot's disk.
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
# The endings of the files with a disk's bytes (`fileName` is the descriptor's): of its base, and of both kinds of snapshot.
_EXTENTS: Final = ("-flat.vmdk", "-delta.vmdk", "-sesparse.vmdk")
# vSphere's own limit is 32 snapshots.
CHAIN_MAX: Final = 64
# Files on these stores are objects, whose bytes /folder does not have.
OBJECT_STORES: Final = frozenset({"vsan", "vsanD", "VVOL"})


def type_name(thing: Any) -> str:
    """For pyvmomi's `vim.vm.device.VirtualDisk.FlatVer2BackingInfo`: VirtualDiskFlatVer2BackingInfo."""
    name: str = getattr(type(thing), "_wsdlName", type(thing).__name__)
    return name


def shared_buses(devices: Sequence[Any]) -> list[Any]:
    """The controllers whose disks other VMs may use, too: vSphere takes no snapshot of a VM with one."""
    return [device for device in devices if getattr(device, "sharedBus", None) not in (None, "noSharing")]


def passed_through(devices: Sequence[Any]) -> list[Any]:
    """The host's own devices, whose state no snapshot can save; a shared graphics card (Vmiop) is not one of them."""
    return [
        device
        for device in devices
        if type_name(device) in ("VirtualPCIPassthrough", "VirtualSriovEthernetCard")
        and type_name(getattr(device, "backing", None)) != "VirtualPCIPassthroughVmiopBackingInfo"
    ]


def virtual_disks(devices: Sequence[Any]) -> list[Any]:
    return [device for device in devices if type_name(device) == "VirtualDisk"]


def by_place(devices: Sequence[Any]) -> list[Any]:
    """The disks as firmware finds them: by the numbers of their controllers and units. The list has them as they were added."""
    placed = [(disk, controller_of(disk, devices)) for disk in virtual_disks(devices)]

    def place(one: tuple[Any, Any]) -> tuple[int, ...]:
        disk, controller = one
        return int(getattr(controller, "busNumber", 0)), int(disk.unitNumber or 0)

    return [disk for disk, _ in by_bus(placed, lambda one: bus_of(one[1]), place)]


def label(device: Any) -> str:
    return str(getattr(device.deviceInfo, "label", None) or f"device {device.key}")


def split(name: str, stores: Iterable[str] = ()) -> tuple[str, str]:
    """A file's name in vSphere's form, «[store] folder/file», as its datastore and its path there. Both may have a «] » in
    them, as in «[[SSD] fast] web/web.vmdk»; `stores`: the names of datastores, one of which it is."""
    for store in sorted(stores, key=len, reverse=True):
        if name.startswith(before := f"[{store}] "):
            return store, name.removeprefix(before)
    store, _, path = name.removeprefix("[").partition("] ")
    return store, path


def store_of(disk: Any, stores: Iterable[str]) -> str:
    """The name of the datastore of its newest file. `stores`: see `split`."""
    return split(str(getattr(disk.backing, "fileName", "")), stores)[0]


def bus_of(controller: Any) -> DiskBus:
    return next((bus for end, bus in _BUSES if type_name(controller).endswith(end)), "scsi")


def controller_of(device: Any, devices: Sequence[Any]) -> Any:
    return next((one for one in devices if one.key == device.controllerKey), None)


def not_tracked(device: Any, devices: Sequence[Any], settings: Sequence[Any]) -> str | None:
    """The setting (of `config.extraConfig`) that excludes this one disk from tracking, though its VM is tracked."""
    controller = controller_of(device, devices)
    name = f"{bus_of(controller)}{getattr(controller, 'busNumber', 0)}:{device.unitNumber}.ctkEnabled"
    off = (str(one.value).strip() for one in settings if str(one.key).lower() == name.lower())
    return next((f"{name} is {value}" for value in off if value.lower() in ("false", "0", "no")), None)


def place_name(device: Any, devices: Sequence[Any]) -> str:
    """The place where it is attached, in the form of exports: ParaVirtualSCSIController0:1."""
    controller = controller_of(device, devices)
    return f"{type_name(controller)}{getattr(controller, 'busNumber', 0)}:{device.unitNumber}"


def backings(disk: Any) -> Iterator[Any]:
    """The backings of all its files, the newest first."""
    backing = disk.backing
    for _ in range(CHAIN_MAX):
        if backing is None:
            return
        yield backing
        backing = getattr(backing, "parent", None)


def capacity_of(disk: Any) -> int:
    return int(disk.capacityInBytes or disk.capacityInKB * 1024)


def allocated_of(disk: Any, files: Sequence[Any]) -> int | None:
    """The space that the disk's files take, in bytes, from the platform's list of its VM's files (`layoutEx.file`); None, where
    one is missing there.

    The list has the present size of a thin disk's file, not its largest one."""
    sizes = {str(file.name): int(file.size) for file in files if file.type == "diskExtent"}
    stems = [str(getattr(backing, "fileName", "") or "").removesuffix(".vmdk") for backing in backings(disk)]
    taken = [next((sizes[stem + end] for end in _EXTENTS if stem + end in sizes), None) for stem in stems]
    known = [size for size in taken if size is not None]
    return min(capacity_of(disk), sum(known)) if len(known) == len(taken) else None


def deltas_of(disk: Any, files: Sequence[Any], stores: Iterable[str]) -> dict[str, int]:
    """By datastore, the bytes of the disk's files above its lowest one: a removal of all snapshots writes them again, to the
    datastore of the lowest. Files that are missing in `layoutEx.file` count as nothing. `stores`: see `split`."""
    sizes = {str(file.name): int(file.size) for file in files if file.type == "diskExtent"}
    *above, lowest = [str(getattr(backing, "fileName", "") or "") for backing in backings(disk)] or [""]
    names = (name.removesuffix(".vmdk") + end for name in above for end in _EXTENTS)
    return {split(lowest, stores)[0]: sum(sizes.get(name, 0) for name in names)}


def stores_of(disks: Sequence[Any]) -> list[Any]:
    """The datastores of their files: snapshots may be on other datastores than their base."""
    found = [getattr(backing, "datastore", None) for disk in disks for backing in backings(disk)]
    return list({store._moId: store for store in found if store is not None}.values())  # noqa: SLF001 - pyvmomi's own name


def encrypted(disk: Any) -> bool:
    """Whether the disk itself is encrypted, and not only the other files of its VM, as with a virtual TPM."""
    return any(getattr(backing, "keyId", None) is not None for backing in backings(disk))


def chain(backing: Any) -> list[Any] | None:
    """The disk's files from the newest snapshot's down to the flat one; None, where /folder does not give their bytes."""
    found: list[Any] = []
    while getattr(backing, "parent", None) is not None:
        kept_by_array = getattr(backing, "deltaDiskFormat", None) == "nativeFormat"
        if type_name(backing) != _FLAT or kept_by_array or len(found) == CHAIN_MAX:
            return None
        found.append(backing)
        backing = backing.parent
    return [*found, backing] if type_name(backing) == _FLAT else None


def not_held(disk: Any) -> str | None:
    """Why no snapshot freezes it; None: they do."""
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
