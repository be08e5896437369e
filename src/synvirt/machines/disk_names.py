"""The names by which a Linux guest itself finds its disks: devices in its /etc/fstab, as the facts of its disks have them.

A kernel names a disk by the bus that it is on. Where the bus is another one here, such a line finds no disk: systemd waits for
it for 90 s, and then stops in emergency mode.
"""

import re
from collections.abc import Mapping

from synvirt.model.machine import Concern, VmManifest
from synvirt.nearest import in_short

_PREFIX = "disk-names:"
NAMED_AS_SCSI = f"{_PREFIX}sd"
# What names disks of virtio, of SCSI, SATA and USB, of old IDE drivers, of Xen's, and of NVMe; by serial number and by place.
_DEVICE = re.compile(r"/dev/(?:(vd|sd|hd|xvd|nvme)[a-z0-9]+|disk/(by-id|by-path)/(?!dm-|lvm-|md-)\S+)(?= )")
# QEMU's disks of virtio and of SCSI, with their serial numbers.
_BY_ID = re.compile(r"/dev/disk/by-id/(virtio-|scsi-0QEMU_QEMU_HARDDISK_)(\S+?)(-part\d+)?")
# What libvirt takes, and SCSI carries; disks of other buses carry less.
_SERIAL = re.compile(r"[A-Za-z0-9_.+-]{1,36}", re.ASCII)
OTHER_SERIAL_CHARS, SCSI_SERIAL_CHARS = 20, 36


def disk_serial(text: object) -> str | None:
    """A disk's serial number, where a disk here can have the same."""
    return str(text) if text is not None and _SERIAL.fullmatch(str(text)) else None


def noted(manifest: VmManifest, facts: Mapping[str, str]) -> VmManifest:
    """The manifest of a Linux guest with a concern, where what is mounted is named by devices that may have other names here.
    `facts`: of its disks (model/facts.py)."""
    found = [match for fact, value in facts.items() if fact.startswith("mount ") and (match := _DEVICE.match(value))]
    if all(disk.bus == "virtio" for disk in manifest.disks):
        found = [match for match in found if match[1] != "sd"]  # no disk of the VM: they have other names at the source, too
    kinds = {_kind(match, manifest) for match in found}
    others = tuple(one for one in manifest.concerns if not one.id.startswith(_PREFIX))
    if not found or "vd" in kinds:
        return manifest.model_copy(update={"concerns": others})
    kind, devices = min(kinds, key=lambda one: (one != "sd", one)), in_short(sorted({match[0] for match in found}))
    concern = _named_as_scsi(devices) if kind == "sd" else _named_otherwise(kind, devices)
    return manifest.model_copy(update={"concerns": (*others, concern)})


def _kind(device: re.Match[str], manifest: VmManifest) -> str:
    """How it is named. A disk that has its serial number here is found by that, on the bus of its name."""
    if (by_id := _BY_ID.fullmatch(device[0])) is not None:
        kind, chars = ("vd", OTHER_SERIAL_CHARS) if by_id[1] == "virtio-" else ("sd", SCSI_SERIAL_CHARS)
        if any(disk.serial is not None and disk.serial[:chars] == by_id[2] for disk in manifest.disks):
            return kind
    return device[1] or device[2]


def are_as_scsi(manifest: VmManifest) -> bool:
    return any(concern.id == NAMED_AS_SCSI for concern in manifest.concerns)


def _named_as_scsi(devices: str) -> Concern:
    return Concern(
        id=NAMED_AS_SCSI,
        category="Information",
        label="Disks named by their device",
        assessment=f"The guest's /etc/fstab names {devices}. So its disks come by SCSI, where they are called so; by virtio it "
        "would not find them, and stop in emergency mode.",
        remedy="Write UUID= into the guest's /etc/fstab (blkid shows it). Then target.disk_bus may be virtio.",
    )


def _named_otherwise(kind: str, devices: str) -> Concern:
    return Concern(
        id=f"{_PREFIX}{kind}",
        category="Warning",
        label="Disks named by a device that is not here",
        assessment=f"The guest's /etc/fstab names {devices}, and no disk is called so here: it waits for them, and then stops "
        "in emergency mode, unless they have the option nofail.",
        remedy="Write UUID= into the guest's /etc/fstab (blkid shows it), at the source or here on its console.",
    )
