"""Machines and disks of pyvmomi's own types, and their manifests."""

from typing import Any

from pyVmomi import vim

from synvirt.live.vsphere.machines import manifest
from synvirt.live.vsphere.ways import Way, WayName
from synvirt.model.machine import VmManifest

Backing = vim.vm.device.VirtualDisk.FlatVer2BackingInfo
Disk = vim.vm.device.VirtualDisk


def a_disk(key: int = 2000, backing: Any = None, **fields: Any) -> Any:
    return Disk(
        key=key,
        controllerKey=1000,
        unitNumber=key - 2000,
        capacityInBytes=1 << 30,
        capacityInKB=1 << 20,
        deviceInfo=vim.Description(label=f"Hard disk {key - 1999}", summary=""),
        backing=backing or Backing(fileName="[ds1] web/web.vmdk", diskMode="persistent"),
        **fields,
    )


def found(*devices: Any, **fields: Any) -> dict[str, Any]:
    """Properties as the collector gives them; a name's `__` is a dot."""
    scsi = vim.vm.device.ParaVirtualSCSIController(key=1000, busNumber=0)
    return {
        "name": "web",
        "runtime.powerState": "poweredOn",
        "config.version": "vmx-19",
        "config.hardware.device": [scsi, *devices],
    } | {name.replace("__", "."): value for name, value in fields.items()}


def described(*devices: Any, by: WayName = "datastore", stores: dict[str, str] | None = None, **fields: Any) -> VmManifest:
    ways = {str(device.key): Way(by) for device in devices}
    return manifest("vm-1", found(*devices, **fields), stores or {"ds1": "VMFS"}, ways)


def critical(one: VmManifest) -> list[str]:
    return [concern.id for concern in one.concerns if concern.category == "Critical"]


def a_file(name: str, size: int) -> Any:
    return vim.vm.FileLayoutEx.FileInfo(key=1, name=f"[ds1] web/{name}", type="diskExtent", size=size)
