"""The guest of a restore in place as it is now: whether it runs, its definition, and where its disks are."""

import os
import shutil
import stat
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from synvirt.backups.restores import domain as restoring_domain
from synvirt.backups.restores.domain import Place, Rewritten
from synvirt.backups.restores.host import RestoreHost
from synvirt.destinations.zfs_command import Zfs
from synvirt.disks.raw.zvols import device_of, zvol_name
from synvirt.errors import BackupConflict, Conflict, DiskWriteFailed, Internal, SourceRunning, SourceUnsupported
from synvirt.kvm.connection import load, translated
from synvirt.kvm.identity import Identity, identity_of

FORMATS = ("raw", "qcow2")


def runs(domain: Any) -> bool:
    """Whether the guest runs, or its memory is saved. Internal."""
    with translated(Internal, "the hypervisor does not say whether the guest runs"):
        return bool(domain.isActive() or domain.hasManagedSaveImage())


def refuse_running(domain: Any) -> None:
    """SourceRunning, Internal."""
    if runs(domain):
        raise running(domain)


def running(domain: Any) -> SourceRunning:
    """The error for a guest that runs, or did so at a moment that counts."""
    return SourceRunning(
        f"{domain.name()} runs, or its memory is saved: its disks cannot be replaced",
        hint="shut it down first (saved memory: virsh managedsave-remove), or restore to a new domain",
    )


def xml_of(domain: Any) -> str:
    """The guest's definition, with its secrets. libvirtError."""
    libvirt = load()
    return str(domain.XMLDesc(libvirt.VIR_DOMAIN_XML_SECURE | libvirt.VIR_DOMAIN_XML_INACTIVE))


def definition(domain: Any) -> Rewritten:
    """The guest's definition. Internal."""
    with translated(Internal, "the hypervisor does not say how the guest is defined"):
        return restoring_domain.parsed(xml_of(domain))


def disks_of(now: Rewritten) -> Iterator[tuple[str, Place]]:
    """Each disk with data, by its target: where it is."""
    for disk in now.devices.iterfind("disk"):
        target = restoring_domain.target_of(disk)
        if target in restoring_domain.targets(now):
            source, driver = disk.find("source"), disk.find("driver")
            path = "" if source is None else source.get("file") or source.get("dev") or ""
            yield target, Place(path, disk.get("type", "file"), "raw" if driver is None else driver.get("type", "raw"))


def places(now: Rewritten, sizes: dict[str, int]) -> dict[str, Place]:
    """The present places of the disks with these sizes. BackupConflict, SourceUnsupported."""
    found = {}
    there = dict(disks_of(now))
    for target, size in sizes.items():
        if target not in there:
            raise BackupConflict(
                f"the guest has no disk {target} now", hint="restore to a new domain, or name the disks that it has"
            )
        place = there[target]
        if place.device_type not in ("file", "block") or place.format not in FORMATS or not place.path:
            raise SourceUnsupported(
                f"disk {target} is {place.device_type} of format {place.format}",
                hint="raw and qcow2 files and block devices are restored in place",
            )
        check_place(target, place, size)
        found[target] = place
    return found


def define(restore_host: RestoreHost, xml: str) -> None:
    """Defines the guest under the name that it has by now: libvirt refuses another one for its UUID. libvirtError, where
    libvirt does not accept the definition."""
    then = restoring_domain.read_here(xml)
    domain = restore_host.domain("lookupByUUIDString", then.findtext("uuid", ""))
    if domain is not None and domain.name() != then.findtext("name"):
        restoring_domain.renamed(renamed := Rewritten(then), domain.name())
        xml = renamed.xml
    restore_host.connection.use().defineXML(xml)


def check_addresses(restore_host: RestoreHost, domain: Any, then: str) -> None:
    """Checks that no other guest, nor this host, has a MAC address that the guest would get back. BackupConflict."""
    with translated(Internal, "the hypervisor does not say how the guest is defined"):
        now = identity_of(xml_of(domain))
    try:
        restore_host.hypervisor.check_free(Identity(name="", macs=identity_of(then).macs - now.macs))
    except Conflict as error:
        raise BackupConflict(
            error.detail,
            hint="restore to a new domain, which gets addresses of its own; or give that card or domain another address",
        ) from error


def check_place(target: str, place: Place, size: int) -> None:
    """Checks that a disk of `size` bytes can be written there. SourceUnsupported, BackupConflict."""
    try:
        mode = Path(place.path).stat().st_mode
        expected = stat.S_ISBLK if place.device_type == "block" else stat.S_ISREG
        if not expected(mode):
            raise SourceUnsupported(f"disk {target} is not the {place.device_type} that its domain says")
        if place.device_type == "block":
            if place.format != "raw":
                raise SourceUnsupported(f"disk {target} is a block device of format {place.format}")
            if size_of(place) < size:
                raise BackupConflict(
                    f"disk {target} has {size_of(place)} bytes now, and had {size}",
                    hint="grow the volume to what it was, or restore to a new domain",
                )
    except OSError as error:
        raise SourceUnsupported(f"disk {target} cannot be reached: {error.strerror}") from error


def check_room(disks: list[tuple[str, Place, int]]) -> None:
    """Checks that disks of that many bytes can all be written beside the present ones: those on one file system, or in one zfs
    pool, share its room. A device that is no zfs volume has nothing beside it. DiskWriteFailed."""
    targets, needed, free = defaultdict[_Shared, list[str]](list), defaultdict[_Shared, int](int), dict[_Shared, int]()
    for target, place, size in disks:
        found = _room_beside(target, place, size)
        if found is None:
            continue
        shared, room, taken = found
        free[shared] = min(room, free.get(shared, room))
        targets[shared].append(target)
        needed[shared] += taken
    for shared, there in targets.items():
        if needed[shared] > free[shared]:
            raise DiskWriteFailed(
                f"disk {' and '.join(there)} would be written beside what is there now: that needs {needed[shared]} bytes of "
                f"one {shared[0]}, and {free[shared]} are free",
                hint="free space there, or restore to a new domain",
            )


# What disks share the room of, in words, and which one.
_Shared = tuple[str, int | str]


def _room_beside(target: str, place: Place, size: int) -> tuple[_Shared, int, int] | None:
    """What has the room beside a disk, how many bytes are free there, and how many `size` bytes take. None: it is overwritten
    where it is."""
    if place.device_type == "file":
        try:
            folder = Path(place.path).resolve().parent
            return ("file system", folder.stat().st_dev), shutil.disk_usage(folder).free, size
        except OSError as error:
            raise DiskWriteFailed(f"disk {target} cannot be reached: {error.strerror}") from error
    volume = zfs_volume(place.path)
    if volume is None:
        return None
    # Its snapshot holds the present bytes meanwhile: without room for both, the restore would fill the pool on which other
    # guests write.
    found = Zfs().properties(volume, "available", "refcompressratio")
    taken = int(size / max(float(found["refcompressratio"]), 1))  # if they compress like the present ones
    return ("zfs pool", volume.partition("/")[0]), int(found["available"]), taken


def size_of(place: Place) -> int:
    """The size of a device in bytes. OSError."""
    with Path(device_of(place.path)).open("rb") as file:
        return file.seek(0, os.SEEK_END)


def zfs_volume(path: str) -> str | None:
    """The name of the zfs volume that the device is; None, where it is none. SourceUnsupported, if it cannot be opened: whether
    there is a way back must not be guessed."""
    try:
        descriptor = os.open(device_of(path), os.O_RDONLY | os.O_CLOEXEC)
    except OSError as error:
        raise SourceUnsupported(f"the device {path} cannot be opened: {error.strerror}") from error
    try:
        return zvol_name(descriptor)
    except OSError:
        return None
    finally:
        os.close(descriptor)
