"""Backup jobs and checkpoints of a domain: libvirt.org/formatbackup.html, formatcheckpoint.html. Blocking code.

    backupBegin(pull, since the last checkpoint) with a new checkpoint ─▶ an NBD export per disk, as it was at that moment,
                                                                         with a bitmap of what changed since

A snapshot of ours is such a job. Its name is the checkpoint's, and is part of the exports' names: by these the job is found
again after a crash. QEMU has one backup job per domain. A checkpoint stays after it, in a bitmap inside the qcow2 image.
"""

import re
import time
import zlib
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final
from xml.etree import ElementTree as ET  # only for writing: foreign XML is read by xml_document

from synvirt.errors import Internal, SnapshotFailed, SynvirtError
from synvirt.live.libvirt.host import library, unanswered
from synvirt.live.libvirt.manifest import backed_up_disks, data_disks, parse, path_of

PREFIX: Final = "synvirt-"
# A job ends in milliseconds on request; its scratch file is removed with it.
END_TIMEOUT_S: Final = 30.0
POLL_S: Final = 0.05
_PORT_TAKEN = re.compile(r"[Aa]ddress already in use")
_NO_BITMAP = re.compile(r"bitmap|checkpoint|snapshot", re.IGNORECASE)
_CONFINED = re.compile(r"[Pp]ermission denied")


# What an operator can do about a refusal of libvirt or QEMU, by its words.
_HINTS = {
    _CONFINED: (
        "QEMU may not use {scratch} on that host: let its user and AppArmor or SELinux in, "
        "or set options.scratch_dir (docs/platforms/libvirt.md)"
    ),
    re.compile("is too long"): "set options.scratch_dir to a folder with a shorter path: QEMU makes its socket there",
    re.compile("Cannot assign requested address"): (
        "{address} is not an address of that host: set options.nbd_address to one, or to 0.0.0.0 for all of them"
    ),
    re.compile("No space left"): "{scratch} on that host is full: it holds what guests overwrite while they are read",
    re.compile("inactive domain"): "its QEMU ended at that moment: the next try reads it as it is then, on or off",
    re.compile("tls|x509|certificate", re.IGNORECASE): (
        "set up backup_tls_x509_cert_dir in that host's /etc/libvirt/qemu.conf (docs/platforms/libvirt.md)"
    ),
}


@dataclass(frozen=True, slots=True)
class Server:
    """Where QEMU serves: a folder for a socket, or an address and a range of ports. `scratch` is a folder too."""

    scratch: str
    address: str | None = None
    ports: tuple[int, int] = (0, 0)
    tls: bool = False


@dataclass(frozen=True, slots=True)
class Export:
    """An NBD export of a disk: its name, and the dirty bitmap to request; None: the whole disk."""

    name: str
    bitmap: str | None


@dataclass(frozen=True, slots=True)
class Running:
    """A backup job in libvirt's present state. `snapshot` is None, where it is not ours; `since` is the checkpoint whose
    changes it has."""

    snapshot: str | None
    since: str | None
    path: str | None
    port: int | None
    exports: dict[str, Export]


def running(domain: Any) -> Running | None:
    """The backup job of a domain; None, where there is none."""
    libvirt = library()
    try:
        root = parse(domain.backupGetXMLDesc())
    except libvirt.libvirtError as error:
        if error.get_error_code() in (libvirt.VIR_ERR_NO_DOMAIN_BACKUP, libvirt.VIR_ERR_OPERATION_INVALID):
            return None
        raise
    server = root.find("server")
    exports, snapshots = {}, set()
    for disk in root.iterfind("disks/disk[@backup='yes']"):
        key, name = disk.get("name", ""), disk.get("exportname", "")
        exports[key] = Export(name, disk.get("exportbitmap"))
        snapshots.add(name.removesuffix(f"-{key}") if name.startswith(PREFIX) and name.endswith(f"-{key}") else None)
    port = server.get("port") if server is not None else None
    return Running(
        snapshot=snapshots.pop() if len(snapshots) == 1 else None,
        since=(root.findtext("incremental") or "").strip() or None,
        path=server.get("socket") if server is not None else None,
        port=int(port) if port is not None and port.isdecimal() else None,
        exports=exports,
    )


def backed_up(domain: Any, disks: Collection[str] | None) -> list[str]:
    """The keys of those of `disks` (None: all) that a backup job can freeze. SnapshotFailed, if it can freeze none of them."""
    found = [key for key, _ in backed_up_disks(parse(domain.XMLDesc(0))) if disks is None or key in disks]
    if not found:
        raise SnapshotFailed(f"{domain.name()} has no disk to read")
    return found


def begin(domain: Any, name: str, server: Server, *, disks: Collection[str] | None = None, track: Collection[str]) -> None:
    """Begins the job, with a checkpoint of the disks to `track`. SnapshotFailed; libvirtError, where it is `unanswered`.

    What libvirt may refuse is left out step by step: the delta (a checkpoint was lost: the caller sees it by `since`), then the
    checkpoint (the image cannot have one).
    """
    wanted = backed_up(domain, disks)
    track = [key for key in wanted if key in track]
    if track and name in _checkpoints(domain):
        # The data of an earlier job of that name is lost: its bitmap does not fit anything that was read.
        delete(domain, name)
    since = _before(domain, name) if track else None
    steps: list[tuple[str | None, bool]] = [(since, True)] if since else []
    steps += [(None, True)] if track else []
    steps += [(None, False)]
    failure: SynvirtError | None = None
    for incremental, checkpoint in steps:
        try:
            _begin_at_free_port(
                domain,
                name,
                server,
                {key: incremental if key in track else None for key in wanted},
                _checkpoint_xml(name, track) if checkpoint else None,
            )
        except library().libvirtError as error:
            if unanswered(error):
                raise
            message = error.get_error_message() or str(error)
            failure = SnapshotFailed(f"{domain.name()} cannot be read at one moment: {message}", hint=_hint(message, server))
            failure.__cause__ = error
            if not _NO_BITMAP.search(message):
                break
        else:
            return
    assert failure is not None
    raise failure


def _begin_at_free_port(
    domain: Any, name: str, server: Server, wanted: Mapping[str, str | None], checkpoint_xml: str | None
) -> None:
    libvirt = library()
    for port in _ports(name, server):
        try:
            domain.backupBegin(_backup_xml(name, wanted, server, port), checkpoint_xml, 0)
        except libvirt.libvirtError as error:
            if port is None or not _PORT_TAKEN.search(str(error)):
                raise
        else:
            return
    raise SnapshotFailed(
        f"every port from {server.ports[0]} to {server.ports[1]} is taken on {server.address}",
        hint="widen options.nbd_ports",
    )


def _ports(name: str, server: Server) -> Iterator[int | None]:
    """All ports. The first depends on the name, so that two jobs seldom try the same port first."""
    if server.address is None:
        yield None
        return
    first, last = server.ports
    count = last - first + 1
    start = zlib.crc32(name.encode()) % count
    yield from (first + (start + step) % count for step in range(count))


def _backup_xml(name: str, disks: Mapping[str, str | None], server: Server, port: int | None) -> str:
    """`disks`: each with the checkpoint for its changes, which is the same for all of them, or None for the whole disk. libvirt
    ignores a disk that is not listed."""
    root = ET.Element("domainbackup", mode="pull")
    if (since := next(filter(None, disks.values()), None)) is not None:
        ET.SubElement(root, "incremental").text = since
    if server.address is None:
        ET.SubElement(root, "server", transport="unix", socket=f"{server.scratch}/{name}.sock")
    else:
        made = ET.SubElement(root, "server", transport="tcp", name=server.address, port=str(port))
        if server.tls:
            made.set("tls", "yes")
    listed = ET.SubElement(root, "disks")
    for key, older in disks.items():
        disk = ET.SubElement(listed, "disk", name=key, backup="yes", type="file", exportname=f"{name}-{key}")
        if older is not None:
            disk.set("backupmode", "incremental")
            disk.set("incremental", older)
            disk.set("exportbitmap", f"{name}-{key}")
        elif since is not None:
            disk.set("backupmode", "full")
        ET.SubElement(disk, "driver", type="qcow2")
        ET.SubElement(disk, "scratch", file=f"{server.scratch}/{name}-{key}.scratch")
    return ET.tostring(root, encoding="unicode")


def _checkpoint_xml(name: str, track: Collection[str]) -> str:
    """libvirt makes no bitmap of a disk that is not listed."""
    root = ET.Element("domaincheckpoint")
    ET.SubElement(root, "name").text = name
    listed = ET.SubElement(root, "disks")
    for key in track:
        ET.SubElement(listed, "disk", name=key, checkpoint="bitmap")
    return ET.tostring(root, encoding="unicode")


def _hint(message: str, server: Server) -> str | None:
    found = next((hint for pattern, hint in _HINTS.items() if pattern.search(message)), None)
    return None if found is None else found.format(scratch=server.scratch, address=server.address)


# ── checkpoints ──────────────────────────────────────────────────────────────────────────────────────────────────────


def _checkpoints(domain: Any) -> list[str]:
    return [str(one.getName()) for one in domain.listAllCheckpoints(0)]


def has_checkpoint(domain: Any, name: str) -> bool:
    return name in _checkpoints(domain)


def any_checkpoint(domain: Any) -> bool:
    """Whether a checkpoint of ours is left, of any job."""
    return any(name.startswith(PREFIX) for name in _checkpoints(domain))


def _before(domain: Any, name: str) -> str | None:
    """The newest checkpoint of the same job that is older than `name`: their names end in ascending numbers."""
    job, _, number = name.rpartition("-")
    if not number.isdecimal():
        return None
    found = [one.rpartition("-") for one in _checkpoints(domain)]
    older = [int(last) for first, _, last in found if first == job and last.isdecimal() and int(last) < int(number)]
    return f"{job}-{max(older)}" if older else None


def delete(domain: Any, name: str) -> None:
    """Deletes checkpoint and bitmap of an active domain; does nothing where there is none. A lost bitmap is no error."""
    libvirt = library()
    try:
        checkpoint = domain.checkpointLookupByName(name)
    except libvirt.libvirtError as error:
        if error.get_error_code() == libvirt.VIR_ERR_NO_DOMAIN_CHECKPOINT:
            return
        raise
    try:
        checkpoint.delete(0)
    except libvirt.libvirtError as error:
        if unanswered(error) or not _NO_BITMAP.search(str(error)):
            raise
        _delete_by_disk(domain, name)


def _delete_by_disk(domain: Any, name: str) -> None:
    """Deletes a checkpoint whose bitmap an image has lost. libvirt keeps all of its bitmaps then, so each disk in turn becomes
    the only one of the checkpoint."""
    libvirt = library()
    root = parse(domain.checkpointLookupByName(name).getXMLDesc(0))
    if (parent := root.find("parent")) is not None and not has_checkpoint(domain, parent.findtext("name", "")):
        root.remove(parent)
    disks = [disk for disk in root.iterfind("disks/disk") if disk.get("checkpoint") == "bitmap"]
    forget(domain, name)
    for one in disks:
        for disk in root.iterfind("disks/disk"):
            disk.attrib.pop("bitmap", None)
            disk.set("checkpoint", "bitmap" if disk is one else "no")
        xml = ET.tostring(root, encoding="unicode")
        try:
            domain.checkpointCreateXML(xml, libvirt.VIR_DOMAIN_CHECKPOINT_CREATE_REDEFINE).delete(0)
        except libvirt.libvirtError as error:
            if unanswered(error):
                raise
            if has_checkpoint(domain, name):
                forget(domain, name)


def forget(domain: Any, name: str) -> None:
    """Deletes the checkpoint in libvirt alone: its bitmaps are in images that the guest uses on another host."""
    libvirt = library()
    domain.checkpointLookupByName(name).delete(libvirt.VIR_DOMAIN_CHECKPOINT_DELETE_METADATA_ONLY)


def image_was_of(domain: Any, key: str, since: str) -> str | None:
    """The other disk that had the image of this one when that checkpoint was made. Its bitmap has the same name, as all of a
    checkpoint's have, and libvirt takes it for this disk's."""
    if not has_checkpoint(domain, since):  # somebody has deleted it since the job began
        return None
    then = parse(domain.checkpointLookupByName(since).getXMLDesc(0)).find("domain")
    before = {} if then is None else {one: path_of(disk) for one, disk in data_disks(then)}
    now = next((path_of(disk) for one, disk in data_disks(parse(domain.XMLDesc(0))) if one == key), "")
    if before.get(key) == now:
        return None
    return next((one for one, path in before.items() if path and path == now), None)


def can_hold_checkpoint(domain: Any, name: str, track: Collection[str]) -> str | None:
    """None, or why these disks cannot: it makes a checkpoint and deletes it."""
    libvirt = library()
    delete(domain, name)  # a killed service may have left it
    try:
        domain.checkpointCreateXML(_checkpoint_xml(name, track), 0)
    except libvirt.libvirtError as error:
        if unanswered(error):
            raise
        return str(error.get_error_message() or error)
    delete(domain, name)
    return None


# ── the end of a job ─────────────────────────────────────────────────────────────────────────────────────────────────


def end(domain: Any, ours: Callable[[str], bool]) -> None:
    """Ends the backup job of a snapshot that is `ours`, and waits until it is gone; does nothing where there is none.

    It first waits for a job that a killed service had just started: libvirt still completes the request, and libvirt 9.0 itself
    crashed when its checkpoint was deleted at that moment."""
    libvirt = library()
    deadline = time.monotonic() + END_TIMEOUT_S
    while (found := running(domain)) is None and _is_beginning(domain) and time.monotonic() < deadline:
        time.sleep(POLL_S)
    if found is None or found.snapshot is None or not ours(found.snapshot):
        return
    try:
        domain.abortJob()
    except libvirt.libvirtError as error:
        if error.get_error_code() != libvirt.VIR_ERR_OPERATION_INVALID:  # it has already ended
            raise
    deadline = time.monotonic() + END_TIMEOUT_S
    while (now := running(domain)) is not None and now.snapshot == found.snapshot:
        if time.monotonic() > deadline:
            raise Internal(f"the backup job {found.snapshot} of {domain.name()} does not end", hint="virsh domjobabort ends it")
        time.sleep(POLL_S)


def _is_beginning(domain: Any) -> bool:
    """Whether libvirt has a job of this kind that it cannot show yet: «backup job data missing», or only its operation."""
    libvirt = library()
    try:
        stats = domain.jobStats()
    except libvirt.libvirtError as error:
        return "backup job data missing" in str(error)
    return bool(stats.get("operation") == libvirt.VIR_DOMAIN_JOB_OPERATION_BACKUP)
