"""What may go wrong with a VM of Proxmox VE, as a table: one line per concern. No I/O."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final, Literal, NamedTuple

from synvirt.live.proxmox import config as settings
from synvirt.live.proxmox import keys
from synvirt.live.proxmox.config import VOLUME, Drive
from synvirt.live.proxmox.seen import Seen, ha_state
from synvirt.machines.concerns import removable_media_left_out
from synvirt.model.machine import Concern
from synvirt.nearest import in_short

Category = Literal["Critical", "Warning", "Information"]


class _Line(NamedTuple):
    """`applies` gives the text for `{}` in the assessment; nothing, where the concern does not apply."""

    id: str
    category: Category
    applies: Callable[[Seen], object]
    label: str
    assessment: str
    remedy: str


def _set(name: str) -> Callable[[Seen], object]:
    return lambda seen: seen.config.get(name)


def _numbered(*names: str) -> Callable[[Seen], object]:
    return lambda seen: ", ".join(key for name in names for key in settings.numbered(seen.config, name))


def _lock(seen: Seen) -> object:
    lock = seen.config.get("lock") or seen.status.get("lock")
    return lock if lock != "suspended" else None


def _ha(seen: Seen) -> object:
    return ha_state(seen.status)


def _paused(seen: Seen) -> object:
    return seen.power_state == "suspended" and seen.status.get("status") == "running"


def _asleep(seen: Seen) -> object:
    return seen.power_state == "suspended" and seen.status.get("status") == "stopped"


def _template(seen: Seen) -> object:
    return settings.is_on(seen.config.get("template", seen.row.get("template")))


def _custom_cpu(seen: Seen) -> object:
    kind = settings.options(seen.config.get("cpu", ""), "cputype").get("cputype", "")
    return kind if kind.startswith("custom-") else None


def _balloon(seen: Seen) -> object:
    least = settings.number(seen.config.get("balloon"), 0)
    most = settings.number(settings.options(seen.config.get("memory", 512), "current").get("current"), 512)
    return f"{least} of {most} MiB" if 0 < least < most else None


def _arch(seen: Seen) -> object:
    arch = seen.config.get("arch")
    return arch if arch not in (None, "x86_64") else None


def _firewall(seen: Seen) -> object:
    return ", ".join(key for key, card in settings.nets(seen.config) if settings.is_on(card.get("firewall")))


def _not_taken_over(seen: Seen) -> object:
    config, found = seen.config, []
    windows = str(config.get("ostype", "")).startswith("w")
    for key in keys.not_taken_over(config):
        if key == "localtime":  # here a Windows has the local time, and no other guest
            found += [] if settings.is_on(config[key]) is windows else [f"{key}={config[key]}"]
        elif str(config[key]) != "0":  # off counts as not set: the vendor's own wizard writes numa=0
            found.append(key)
    return in_short([*found, *settings.parts_not_taken_over(config)])


TABLE: Final = (
    _Line(
        "other-processor",
        "Critical",
        _arch,
        "Another kind of processor",
        "it is made for {}, and runs here by emulation at best",
        "Move it to a host with such processors.",
    ),
    _Line(
        "disks-unreadable",
        "Critical",
        lambda seen: seen.no_reading,
        "Disks cannot be read",
        "{}",
        "Give the source credentials for SSH to its nodes: ssh_private_key, or ssh_password.",
    ),
    _Line(
        "template",
        "Critical",
        _template,
        "Template",
        "it is a template, which never runs, and its disks are the base of its linked clones",
        "Clone it, and move the clone.",
    ),
    _Line(
        "suspended",
        "Critical",
        _paused,
        "Suspended VM",
        "what it has in its memory is not moved, and is lost when it is powered off for the cut-over",
        "Resume it, or shut it down, at the source first.",
    ),
    _Line(
        "saved-memory",
        "Critical",
        _asleep,
        "Saved memory",
        "its memory was saved to a volume (hibernated), and the disks alone are not the whole VM",
        "Start it and shut it down.",
    ),
    _Line(
        "locked",
        "Warning",
        _lock,
        "Locked VM",
        "Proxmox VE holds a lock on it ({}): while it lasts nothing can be read, and a job waits",
        "Wait until the operation is over; `qm unlock ID` frees a lock that a failure left.",
    ),
    _Line(
        "host-devices",
        "Warning",
        _numbered("hostpci", "usb"),
        "Devices of the host",
        "it uses devices of its host ({}), which are not migrated",
        "Give it such devices here after the migration.",
    ),
    _Line(
        "shared-folders",
        "Warning",
        _numbered("virtiofs"),
        "Folders of the host",
        "it mounts folders of its host ({}), which are not copied",
        "Copy their files separately.",
    ),
    _Line(
        "qemu-arguments",
        "Warning",
        _set("args"),
        "Arguments of its own for QEMU",
        "it is started with arguments of its own (args), which are not taken over",
        "See what they are for, and set the same here after the migration.",
    ),
    _Line(
        "encrypted-memory",
        "Warning",
        lambda seen: seen.config.get("amd-sev") or seen.config.get("intel-tdx"),
        "Memory that its host cannot read",
        "it runs with encrypted memory ({}), and does not here; a guest that seals its disks with it does not open them",
        "Have its keys at hand.",
    ),
    _Line(
        "hook-script",
        "Warning",
        _set("hookscript"),
        "Script of the node",
        "its node runs {} when it starts and stops, and nothing does so here",
        "See what the script is for.",
    ),
    _Line(
        "replication",
        "Information",
        lambda seen: ", ".join(seen.replicated_to),
        "Replicated",
        "Proxmox VE copies its volumes to {}, and goes on doing so after the migration",
        "Remove the replication job there once the migration is done.",
    ),
    _Line(
        "ballooning",
        "Information",
        _balloon,
        "Memory that may shrink",
        "its host may take memory from it ({} are guaranteed); here it has all of it",
        "Give it less memory here if all of it is too much.",
    ),
    _Line(
        "network-rules",
        "Information",
        _firewall,
        "Firewall of the cluster",
        "the cluster's firewall protects {}, and its rules are not taken over",
        "Set the same here, or in the guest.",
    ),
    _Line(
        "settings-not-taken-over",
        "Information",
        _not_taken_over,
        "Settings that are not taken over",
        "it has settings that it does not have here: {}",
        "Set the same here after the migration, where they matter.",
    ),
    _Line(
        "settings-unknown",
        "Information",
        lambda seen: ", ".join(keys.unknown(seen.config)),
        "Settings that are not known",
        "a newer Proxmox VE gave it settings that this version of SynVirt does not know: {}",
        "See what they are for.",
    ),
    _Line(
        "cloud-init",
        "Information",
        lambda seen: settings.cloud_init(seen.config),
        "Drive for cloud-init",
        "the drive {} is made by Proxmox VE for cloud-init, and is not copied: the guest keeps what it was set to",
        "Nothing, unless cloud-init in the guest sets its network again at each start.",
    ),
    _Line(
        "unused-volumes",
        "Information",
        _numbered("unused"),
        "Volumes that are not used",
        "volumes that belong to it and are attached to nothing ({}) are not copied",
        "Attach those that are needed.",
    ),
    _Line(
        "ha",
        "Information",
        _ha,
        "Managed for high availability",
        "the cluster keeps it running ({}). The cut-over shuts it down by the cluster's own API, which sets its wished state "
        "to stopped, so that it is not started again; if the cut-over fails it is set to started",
        "Remove the resource there once the migration is done.",
    ),
    _Line(
        "custom-cpu",
        "Information",
        _custom_cpu,
        "CPU model of its own",
        "its CPU model {} is defined in the cluster, and is not taken over",
        "Choose a CPU model here, if the guest needs certain features.",
    ),
)


def concerns(seen: Seen, drives: Sequence[Drive]) -> Iterator[Concern]:
    """All concerns of a VM and its disks."""
    for line in TABLE:
        if found := line.applies(seen):
            yield _made(line.id, line.category, line.label, line.assessment.format(_short(found, 1000)), line.remedy)
    if media := settings.media(seen.config):
        yield removable_media_left_out(tuple(_short(one) for one in media))
    if seen.no_reading is None and drives:
        yield _made("pve.read_by", "Information", "How the disks are read", _read_by(seen, drives), "Nothing.")
    for drive in drives:
        yield from _of_disk(seen, drive)


def _read_by(seen: Seen, drives: Sequence[Drive]) -> str:
    disks = ", ".join(drive.key for drive in drives)
    if seen.power_state == "off":
        return f"{disks}: by qemu-nbd on node {seen.row.get('node', '')} through SSH, read-only, while the VM is off"
    held = _HELD.get(seen.way or "", "a copy-before-write filter of one kind or the other")
    return (
        f"{disks}: from the QEMU of the VM on node {seen.row.get('node', '')} through SSH, frozen by {held}, "
        "with dirty bitmaps; once the VM is off by qemu-nbd there"
    )


# By the value of Reading.way.
_HELD: Final = {
    "backup-access": "Proxmox VE's own backup access (backup-access-setup)",
    "qemu": "copy-before-write filters of QEMU's own",
}


def _of_disk(seen: Seen, drive: Drive) -> Iterator[Concern]:
    key = drive.key
    known = seen.volumes.get(drive.volume)
    if not (known.size_bytes if known is not None else drive.size_bytes):
        yield _made(
            f"disk-unknown-size:{key}",
            "Critical",
            "Disk of unknown size",
            f"neither the configuration nor the storage says how large disk {key} is",
            "`qm disk rescan` there; or name the disk in skip_disks.",
        )
    if why := settings.unreadable(seen.storages.get(drive.storage, "")):
        yield _made(
            f"disk-storage:{key}",
            "Critical",
            "Storage that cannot be read",
            f"disk {key} is on storage {drive.storage}, {why}",
            "Move the disk to another storage there, or name it in skip_disks and copy it separately.",
        )
    if drive.is_on("snapshot"):
        yield _made(
            f"disk-forgets:{key}",
            "Warning",
            "Disk that discards its changes",
            f"disk {key} loses what the guest wrote when the VM stops (snapshot=1), and does not do so here",
            "Nothing, if the guest may keep what it writes.",
        )
    if (drive.options.get("serial") and drive.serial is None) or drive.options.get("wwn"):
        yield _made(
            f"disk-number:{key}",
            "Information",
            "Serial number of a disk",
            f"disk {key} has a serial number or name of its own, and another one here",
            "Where the guest finds its disks by /dev/disk/by-id, have it find them by UUID.",
        )
    if drive.is_on("shared") and not VOLUME.fullmatch(drive.volume):
        yield _made(
            f"disk-shared:{key}",
            "Warning",
            "Shared disk",
            f"disk {key} may be shared with other VMs, which would go on writing to the old one",
            "Move the VMs that share it together, or name it in skip_disks.",
        )
    if not VOLUME.fullmatch(drive.volume):
        yield _made(
            f"disk-passed-through:{key}",
            "Critical",
            "Device of the node",
            f"disk {key} is {_short(drive.volume)}, a device or file of its node, and no volume of a storage: it is not read",
            "Name it in skip_disks and copy it separately.",
        )


def _made(concern_id: str, category: Category, label: str, assessment: str, remedy: str) -> Concern:
    return Concern(id=concern_id, category=category, label=label, assessment=assessment, remedy=remedy)


def _short(value: Any, most: int = 120) -> str:
    return " ".join(str(value).split())[:most]
