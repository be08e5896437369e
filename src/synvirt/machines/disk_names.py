"""The names by which a Linux guest itself finds its disks, in its /etc/fstab and others, as the facts of its disks have them.

A kernel names a disk by the bus that it is on. Where the bus is another one here, such a line finds no disk: systemd waits for
it for 90 s, and then stops in emergency mode. LVM, where it has a list of its disks, uses no others.
"""

import re
from collections.abc import Iterable, Iterator, Mapping
from typing import NamedTuple

from synvirt.model.facts import NOT_READ
from synvirt.model.machine import Concern, VmManifest
from synvirt.nearest import in_short

_PREFIX = "disk-names:"
NAMED_AS_SCSI, LISTED_BY_LVM = f"{_PREFIX}sd", f"{_PREFIX}lvm"
_FSTAB, _LVM, _BOOT = "/etc/fstab", "/etc/lvm/", "/boot/"
# What names disks of virtio, of SCSI, SATA and USB, of old IDE drivers, of Xen's, and of NVMe; by serial number and by place.
# A filter of LVM may have the beginning of a name.
_DEVICE = re.compile(r"/dev/(?:(vd|sd|hd|xvd|nvme)(?:[a-z0-9]+|[a-z0-9]*\*)|disk/(by-id|by-path)/(?!dm-|lvm-|md-)\S+)")
# QEMU's disks of virtio and of SCSI, with their serial numbers.
_BY_ID = re.compile(r"/dev/disk/by-id/(virtio-|scsi-0QEMU_QEMU_HARDDISK_)(\S+?)(-part\d+)?")
# LVM's ids of disks (lvmdevices(8)): their numbers at the platform, their serial numbers, the names of those that have neither.
_LVM_ID = re.compile(r"(sys_wwid|wwid_naa|wwid_eui|wwid_t10|sys_serial|devname|mpath_uuid) (\S+)")
_LVM_QEMU = re.compile(r"t10\.QEMU_+QEMU_HARDDISK_+(\S+)")
# A mount that the guest waits for, of a file system whose number and label a fact «volume» has (guests/inside/superblocks.py).
_BY_NUMBER = re.compile(r'(UUID|LABEL)="?([^"\s]+)"? (?:ext[234]|xfs|btrfs)')
_QUOTED = {"UUID": "{}", "LABEL": "«{}»"}
_SPACE = r"\040"  # fstab(5)
# What libvirt takes, and SCSI carries; disks of other buses carry less.
_SERIAL = re.compile(r"[A-Za-z0-9_.+-]{1,36}", re.ASCII)
OTHER_SERIAL_CHARS, SCSI_SERIAL_CHARS = 20, 36


class _Named(NamedTuple):
    """A disk as a file of the guest names it. `kind`: the beginning of its name: vd, sd, hd, xvd, nvme; or by-id, by-path, and
    lvm, where no disk here is called so."""

    file: str
    device: str
    kind: str


def disk_serial(text: object) -> str | None:
    """A disk's serial number, where a disk here can have the same."""
    return str(text) if text is not None and _SERIAL.fullmatch(str(text)) else None


def noted(manifest: VmManifest, facts: Mapping[str, str]) -> VmManifest:
    """The manifest of a Linux guest with a concern, where what it needs is named by devices that may have other names here.
    `facts`: of its disks (model/facts.py)."""
    found = list(_named(manifest, facts))
    if all(disk.bus == "virtio" for disk in manifest.disks):
        found = [one for one in found if one.kind != "sd"]  # no disk of the VM: they have other names at the source, too
    as_scsi = [one for one in found if one.kind == "sd" and all(other.kind != "vd" for other in found)]
    nowhere = [one for one in found if one.kind not in ("sd", "vd")]
    by_lvm = [one for one in nowhere if one.file.startswith(_LVM)]
    otherwise = [one for one in nowhere if one not in by_lvm]
    concerns = (
        *([_named_as_scsi(as_scsi)] if as_scsi else []),
        *([_named_otherwise(min(one.kind for one in otherwise), otherwise)] if otherwise else []),
        *([_listed_by_lvm(by_lvm)] if by_lvm else []),
        *([_missing(missing)] if (missing := list(_not_there(facts))) else []),
    )
    return manifest.with_concerns(concerns, in_place_of=lambda id_: id_.startswith(_PREFIX))


def _named(manifest: VmManifest, facts: Mapping[str, str]) -> Iterator[_Named]:
    for fact, value in facts.items():
        kind, _, what = fact.partition(" ")
        file = _FSTAB if kind == "mount" else what.partition(" ")[0]
        if kind == "finds" and (listed := _LVM_ID.fullmatch(value)) is not None and file.startswith(_LVM):
            yield from _of_lvm(file, listed, manifest)
        elif kind in ("mount", "finds") and (device := _DEVICE.fullmatch(value.partition(" ")[0])) is not None:
            yield _Named(file, device[0], _kind(device, manifest))


def _not_there(facts: Mapping[str, str]) -> Iterator[str]:
    """What the guest mounts and waits for, by the number or label of a file system that no disk has; nothing, where a part of
    the disks was not read."""
    there = [value.lower() for fact, value in facts.items() if fact.startswith("volume ")]
    if not there or any(fact.startswith(NOT_READ) for fact in facts):
        return
    for fact, value in facts.items():
        mounted = _BY_NUMBER.fullmatch(value) if fact.startswith("mount ") else None
        if mounted is None:
            continue
        named = _QUOTED[mounted[1]].format(mounted[2].replace(_SPACE, " ").lower())
        if not any(named in volume for volume in there):
            yield f"{mounted[1]}={mounted[2]}"


def _of_lvm(file: str, listed: re.Match[str], manifest: VmManifest) -> Iterator[_Named]:
    by, name = listed.groups()
    if (device := _DEVICE.fullmatch(name)) is not None:
        yield _Named(file, name, _kind(device, manifest))
    elif by == "sys_serial":
        yield _Named(file, name, "vd" if _is_kept(name, OTHER_SERIAL_CHARS, manifest) else "lvm")
    elif by != "devname":  # else it is no disk of the platform: what the guest itself makes of them
        qemu = _LVM_QEMU.fullmatch(name)
        yield _Named(file, name, "sd" if qemu is not None and _is_kept(qemu[1], SCSI_SERIAL_CHARS, manifest) else "lvm")


def _kind(device: re.Match[str], manifest: VmManifest) -> str:
    """How it is named. A disk that has its serial number here is found by that, on the bus of its name."""
    if (by_id := _BY_ID.fullmatch(device[0])) is not None:
        kind, chars = ("vd", OTHER_SERIAL_CHARS) if by_id[1] == "virtio-" else ("sd", SCSI_SERIAL_CHARS)
        if _is_kept(by_id[2], chars, manifest):
            return kind
    return device[1] or device[2]


def _is_kept(serial: str, chars: int, manifest: VmManifest) -> bool:
    return any(disk.serial is not None and disk.serial[:chars] == serial for disk in manifest.disks)


def are_as_scsi(manifest: VmManifest) -> bool:
    return any(concern.id == NAMED_AS_SCSI for concern in manifest.concerns)


def _files(named: Iterable[_Named]) -> str:
    files = sorted({one.file for one in named})
    return f"{', '.join(files[:-1])} and {files[-1]} name" if len(files) > 1 else f"{files[0]} names"


def _devices(named: Iterable[_Named]) -> str:
    return in_short(sorted({one.device for one in named}))


def _remedy(named: Iterable[_Named]) -> str:
    files = sorted({one.file for one in named})
    tables = [file for file in files if not file.startswith((_BOOT, _LVM))]
    parts = [f"Write UUID= into the guest's {' and '.join(tables)} (blkid shows it)."] if tables else []
    parts += [_BOOT_REMEDY] if any(file.startswith(_BOOT) for file in files) else []
    return " ".join([*parts, *([_LVM_REMEDY] if any(file.startswith(_LVM) for file in files) else [])])


_BOOT_REMEDY = (
    "Have its kernel's command line say root=UUID= (grubby --update-kernel=ALL, or /etc/default/grub and update-grub)."
)
_LVM_REMEDY = (
    "Let the guest's LVM use all disks: use_devicesfile = 0 and no filter in /etc/lvm/lvm.conf, then dracut -f (or "
    "update-initramfs -u)."
)


def _named_as_scsi(named: list[_Named]) -> Concern:
    return Concern(
        id=NAMED_AS_SCSI,
        category="Information",
        label="Disks named by their device",
        assessment=f"The guest's {_files(named)} {_devices(named)}. So its disks come by SCSI, where they are called so; by "
        "virtio it would not find them, and stop in emergency mode, or in its initramfs.",
        remedy=f"{_remedy(named)} Then target.disk_bus may be virtio.",
    )


def _named_otherwise(kind: str, named: list[_Named]) -> Concern:
    return Concern(
        id=f"{_PREFIX}{kind}",
        category="Warning",
        label="Disks named by a device that is not here",
        assessment=f"The guest's {_files(named)} {_devices(named)}, and no disk is called so here: it waits for them, and then "
        "stops in emergency mode, or in its initramfs, unless they have the option nofail, or are swap, which it does without.",
        remedy=f"{_remedy(named)[:-1]}, at the source or here on its console.",
    )


def _listed_by_lvm(named: list[_Named]) -> Concern:
    return Concern(
        id=LISTED_BY_LVM,
        category="Warning",
        label="LVM looks for disks that are not here",
        assessment=f"The guest's {_files(named)} {_devices(named)}, and no disk is called so here: LVM may leave the volumes "
        "on them off, and the guest then stops in emergency mode, or in its initramfs.",
        remedy=f"At the source: {_LVM_REMEDY[0].lower()}{_LVM_REMEDY[1:]} Or have the guest converted, which takes the list of "
        "devices away (conversion: always; of a RHEL 9 by virt-v2v 2.4 or newer). Here on its console: rm "
        "/etc/lvm/devices/system.devices, vgchange -ay, vgimportdevices --all, dracut -f.",
    )


def _missing(devices: list[str]) -> Concern:
    return Concern(
        id=f"{_PREFIX}missing",
        category="Warning",
        label="File systems that are on no disk here",
        assessment=f"The guest's {_FSTAB} mounts {in_short(sorted(devices))}, and no disk that came along has such a file "
        "system: it waits for that, and then stops in emergency mode.",
        remedy="Bring the disk along (skip_disks), or attach it here where it was attached from elsewhere. Or give the line in "
        f"{_FSTAB} the option nofail, at the source or here on its console.",
    )
