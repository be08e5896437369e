"""What may go wrong with a VM of Proxmox VE, as a table: a line a concern. No I/O."""

from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, Final, Literal, NamedTuple

from synvirt.live.proxmox import config as settings
from synvirt.live.proxmox.config import VOLUME, Drive
from synvirt.model import Concern

if TYPE_CHECKING:
    from synvirt.live.proxmox.manifest import Seen

Category = Literal["Critical", "Warning", "Information"]


class _Line(NamedTuple):
    """`applies` says what it is about, as text for `{}` in the assessment; nothing where it does not apply."""

    id: str
    category: Category
    applies: Callable[["Seen"], object]
    label: str
    assessment: str
    remedy: str


def _set(name: str) -> Callable[["Seen"], object]:
    return lambda seen: seen.config.get(name)


def _numbered(*names: str) -> Callable[["Seen"], object]:
    return lambda seen: ", ".join(key for name in names for key in settings.numbered(seen.config, name))


def _lock(seen: "Seen") -> object:
    lock = seen.config.get("lock") or seen.status.get("lock")
    return lock if lock != "suspended" else None


def _ha(seen: "Seen") -> object:
    ha = seen.status.get("ha")
    managed = isinstance(ha, dict) and settings.is_on(ha.get("managed"))
    return (ha.get("state") or "managed") if isinstance(ha, dict) and managed else None


def _paused(seen: "Seen") -> object:
    return seen.power_state == "suspended" and seen.status.get("status") == "running"


def _asleep(seen: "Seen") -> object:
    return seen.power_state == "suspended" and seen.status.get("status") == "stopped"


def _template(seen: "Seen") -> object:
    return settings.is_on(seen.config.get("template", seen.row.get("template")))


def _custom_cpu(seen: "Seen") -> object:
    kind = settings.options(seen.config.get("cpu", ""), "cputype").get("cputype", "")
    return kind if kind.startswith("custom-") else None


TABLE: Final = (
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
        "it uses devices of its host ({}), which do not come along",
        "Give it such devices here after the migration.",
    ),
    _Line(
        "shared-folders",
        "Warning",
        _numbered("virtiofs"),
        "Folders of the host",
        "it mounts folders of its host ({}), which are not copied",
        "Copy their files by themselves.",
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
        "cloud-init",
        "Information",
        lambda seen: settings.cloud_init(seen.config),
        "Drive for cloud-init",
        "the drive {} is made by Proxmox VE for cloud-init, and is not copied: the guest keeps what it was set to",
        "Nothing, unless cloud-init in the guest sets its network anew at each start.",
    ),
    _Line(
        "unused-volumes",
        "Information",
        _numbered("unused"),
        "Volumes that are not used",
        "volumes that belong to it and are attached to nothing ({}) are not copied",
        "Attach those that are wanted.",
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


def concerns(seen: "Seen", drives: Sequence[Drive]) -> Iterator[Concern]:
    for line in TABLE:
        if found := line.applies(seen):
            yield _made(line.id, line.category, line.label, line.assessment.format(_short(found)), line.remedy)
    if seen.no_reading is None and drives:
        yield _made("pve.read_by", "Information", "How the disks are read", _read_by(seen, drives), "Nothing.")
    for drive in drives:
        yield from _of_disk(seen, drive)


def _read_by(seen: "Seen", drives: Sequence[Drive]) -> str:
    keys = ", ".join(drive.key for drive in drives)
    if seen.power_state == "off":
        return f"{keys}: by qemu-nbd on node {seen.row.get('node', '')} through SSH, read-only, while the VM is off"
    return (
        f"{keys}: from the QEMU of the VM on node {seen.row.get('node', '')} through SSH, held still by a copy-before-write "
        "filter, with dirty bitmaps; once the VM is off by qemu-nbd there"
    )


def _of_disk(seen: "Seen", drive: Drive) -> Iterator[Concern]:
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
            "Name it in skip_disks and copy it by itself.",
        )


def _made(concern_id: str, category: Category, label: str, assessment: str, remedy: str) -> Concern:
    return Concern(id=concern_id, category=category, label=label, assessment=assessment, remedy=remedy)


def _short(value: Any) -> str:
    return " ".join(str(value).split())[:120]
