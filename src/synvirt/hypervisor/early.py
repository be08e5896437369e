"""A guest that was started before its copy is complete, and how it moves onto its volumes while it runs. Blocking.

    before   guest ─▶ top.qcow2 ─▶ NBD export of the source                    the copy fills the volume meanwhile
    1        guest ─▶ top.qcow2 ─▶ NBD      mirrored, the overlay alone, to    between.qcow2 ─▶ volume
    2        guest ─▶ between.qcow2 ─▶ volume      committed, while the guest writes
    after    guest ─▶ volume

Only libvirt is asked where a disk is, each time: it writes its record of the guest, running or off, when it pivots. So each
step may be interrupted anywhere, and the next look goes on from there; where the embedded driver was killed within a call,
kvm/half_done.py has corrected its record. Until a pivot the guest's present layer has all that it wrote. A layer that it has
left is never read again.
"""

import contextlib
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal
from xml.etree import ElementTree as ET  # of libvirt's own answers: a domain that we defined

from synvirt.errors import Cancelled, DiskWriteFailed, Internal
from synvirt.hypervisor import Early, Volume, held_up
from synvirt.kvm.connection import load
from synvirt.kvm.identity import JOB_NAMESPACE
from synvirt.programs import NO_SPACE, ProgramFailed, run

POLL_S = 0.1
# A block job that ends by itself has failed, for example on a full disk. It is started again, at most this often.
TRIES = 3
# Seconds for a commit of the guest's writes, to a disk that may be slow.
COMMIT_TIMEOUT_S = 6 * 3600
CREATE_TIMEOUT_S = 60


def overlay(path: str, over: str, size_bytes: int) -> None:
    """Makes a new, empty overlay. DiskWriteFailed."""
    Path(path).unlink(missing_ok=True)
    _qemu_img(
        "create", "-q", "-f", "qcow2", "-F", "raw", "-b", over, path, str(size_bytes), into=path, within_s=CREATE_TIMEOUT_S
    )
    Path(path).chmod(0o600)  # only the guest may read what it writes


def onto_volume(find: Callable[[], Any], volume: Volume, give: Callable[[str], None], stop: Callable[[], bool]) -> None:
    """Moves the disk of a guest, on or off, onto its volume. `find` gives libvirt's domain; `give` gives an overlay to the user
    that QEMU runs as. DiskWriteFailed, where a block job fails again and again; Cancelled."""
    libvirt, begun = load(), 0
    while True:
        if stop():
            raise Cancelled
        domain = find()
        try:
            match _one_step(domain, volume, give, stop):
                case "done":
                    return
                case "begun":
                    begun += 1
                case "pivoted":
                    begun = 0
        except libvirt.libvirtError as error:
            # Another block job is just ending, or the guest went off: look again.
            passing = (libvirt.VIR_ERR_OPERATION_INVALID, libvirt.VIR_ERR_BLOCK_COPY_ACTIVE, libvirt.VIR_ERR_OPERATION_TIMEOUT)
            if error.get_error_code() not in passing and not _is_off(domain):
                raise DiskWriteFailed(
                    f"disk {volume.disk_key} does not get onto its volume: {error.get_error_message() or error}", hint=_KEPT
                ) from error
        if begun > TRIES:
            below, above = held_up.place_of(volume.path), held_up.place_of(_early(volume).between)
            raise DiskWriteFailed(
                f"disk {volume.disk_key} of {domain.name()} does not get onto its volume: the block job ends each time",
                hint=f"is there room in {below}, and in {above}?",
            )
        time.sleep(POLL_S)


def on_volumes(domain: Any, wanted: str, volumes: Sequence[Volume]) -> str:
    """The domain's definition with its disks on these volumes as in the `wanted` one. All else stays as it is, as its operator
    may have changed it while the guest was copied. libvirtError."""
    libvirt = load()
    root = ET.fromstring(domain.XMLDesc(libvirt.VIR_DOMAIN_XML_SECURE | libvirt.VIR_DOMAIN_XML_INACTIVE))  # noqa: S314 - libvirt's own
    for volume in volumes:
        there = _disk_of(wanted, volume)
        for disk in _disks_on(root, volume):  # none, if it was taken away meanwhile
            disk.set("type", there.get("type", ""))
            for part in [part for part in disk if part.tag in _OF_PLACE]:
                disk.remove(part)
            disk.extend(part for part in there if part.tag in _OF_PLACE)
    return ET.tostring(root, encoding="unicode")


def has_moved(domain: Any, volumes: Sequence[Volume]) -> bool:
    """Whether a disk of the guest, on or off, is on its volume already: then all of them were complete. libvirtError."""
    root = ET.fromstring(domain.XMLDesc())  # noqa: S314 - libvirt's own
    return any(_file(disk) == volume.path for volume in volumes for disk in _disks_on(root, volume))


_KEPT = "The guest is kept; it is tried again"
# What a disk has by its place, and not by what it is for its guest.
_OF_PLACE = frozenset(("driver", "source", "backingStore", "mirror"))


def _is_off(domain: Any) -> bool:
    """False, where libvirt does not say."""
    try:
        return not domain.isActive()
    except load().libvirtError:
        return False


def _one_step(
    domain: Any, volume: Volume, give: Callable[[str], None], stop: Callable[[], bool]
) -> Literal["done", "begun", "pivoted", "under way"]:
    if not domain.isActive():
        return "done" if _commit_offline(domain, volume, stop) else "under way"
    _let_go(domain)  # a service may have ended during the pause of a pivot
    if held_up.is_held_up(domain):
        # The block jobs need nothing of the source. Afterwards the guest reads the volume instead of it.
        domain.resume()
    disk = _disk_of(domain.XMLDesc(), volume)
    mirror, target = disk.find("mirror"), disk.find("target")
    name = "" if target is None else target.get("dev", "")
    if mirror is not None:
        if mirror.get("ready") != "yes":
            return "under way"
        _pivot(domain, name)
        return "pivoted"
    if (source := _file(disk)) == volume.path:
        return "done"
    _begin(domain, name, source, volume, give)
    return "begun"


def _pivot(domain: Any, name: str) -> None:
    """Pivots while the guest is paused for milliseconds: QEMU 7.2 may crash when a write comes to a disk on SATA at that moment
    (bdrv_co_write_req_prepare: Assertion `child->perm & BLK_PERM_WRITE' failed)."""
    libvirt = load()
    if domain.state()[0] == libvirt.VIR_DOMAIN_RUNNING:  # else its operator has paused it, and will resume it
        _mark(domain, f"<held xmlns='{_HELD}'/>")
        domain.suspend()
    try:
        domain.blockJobAbort(name, libvirt.VIR_DOMAIN_BLOCK_JOB_ABORT_PIVOT)
    finally:
        with contextlib.suppress(libvirt.libvirtError):  # it went off; or the next step tries again
            _let_go(domain)


# A mark in libvirt's record of the running guest: we have paused it. The mark stays after the service's end, until the guest's.
_HELD = f"{JOB_NAMESPACE}/held"


def _mark(domain: Any, mark: str | None) -> None:
    libvirt = load()
    domain.setMetadata(libvirt.VIR_DOMAIN_METADATA_ELEMENT, mark, "held", _HELD, libvirt.VIR_DOMAIN_AFFECT_LIVE)


def _let_go(domain: Any) -> None:
    """Resumes the guest, if we have paused it."""
    if _HELD in domain.XMLDesc():
        if domain.state()[0] == load().VIR_DOMAIN_PAUSED:
            domain.resume()
        _mark(domain, None)


def _begin(domain: Any, name: str, source: str | None, volume: Volume, give: Callable[[str], None]) -> None:
    libvirt, early = load(), _early(volume)
    if source == early.between:
        domain.blockCommit(name, None, None, 0, libvirt.VIR_DOMAIN_BLOCK_COMMIT_ACTIVE)
        return
    # As large as the guest's disk is now: a volume may be larger, rounded up to its blocks, and QEMU wants both sides alike.
    overlay(early.between, volume.path, domain.blockInfo(name)[0])
    give(early.between)
    flags = ("SHALLOW", "REUSE_EXT", "TRANSIENT_JOB")
    domain.blockCopy(name, _between_xml(volume), {}, sum(getattr(libvirt, f"VIR_DOMAIN_BLOCK_COPY_{flag}") for flag in flags))


def _between_xml(volume: Volume) -> str:
    disk = ET.Element("disk", type="file")
    ET.SubElement(disk, "driver", name="qemu", type="qcow2")
    ET.SubElement(disk, "source", file=_early(volume).between)
    backing = ET.SubElement(disk, "backingStore", type=volume.device_type)
    ET.SubElement(backing, "format", type="raw")
    ET.SubElement(backing, "source", {"dev" if volume.device_type == "block" else "file": volume.path})
    ET.SubElement(backing, "backingStore")
    return ET.tostring(disk, encoding="unicode")


def _commit_offline(domain: Any, volume: Volume, stop: Callable[[], bool]) -> bool:
    """Commits the layers of a guest that is off; idempotent, as a committed overlay keeps its data (-d). False, where the guest
    was started meanwhile and QEMU has the overlay's lock."""
    early, disk = _early(volume), _disk_of(domain.XMLDesc(load().VIR_DOMAIN_XML_INACTIVE), volume)
    if (source := _file(disk)) == volume.path:
        return True
    try:
        if source == early.top:
            rebase = ("rebase", "-q", "-u", "-f", "qcow2", "-F", "raw", "-b", volume.path, early.top)
            _qemu_img(*rebase, into=early.top, within_s=CREATE_TIMEOUT_S)
        _qemu_img("commit", "-q", "-d", "-f", "qcow2", str(source), into=volume.path, within_s=COMMIT_TIMEOUT_S, stop=stop)
    except DiskWriteFailed:
        if domain.isActive():
            return False
        raise
    return True


def _disk_of(xml: str, volume: Volume) -> ET.Element:
    """The disk whose source is one of the volume's layers."""
    for disk in _disks_on(ET.fromstring(xml), volume):  # noqa: S314 - libvirt's own
        return disk
    raise Internal(f"the guest has no disk on the layers of {volume.disk_key}")


def _disks_on(root: ET.Element, volume: Volume) -> list[ET.Element]:
    early = _early(volume)
    return [disk for disk in root.iterfind("devices/disk") if _file(disk) in (early.top, early.between, volume.path)]


def _file(element: ET.Element) -> str | None:
    source = element.find("source")
    return None if source is None else source.get("file") or source.get("dev")


def _early(volume: Volume) -> Early:
    if volume.early is None:
        raise Internal(f"the guest never ran before volume {volume.disk_key} was whole")
    return volume.early


def _qemu_img(*arguments: str, into: str, within_s: float, stop: Callable[[], bool] | None = None) -> None:
    """`into`: the file that it writes."""
    try:
        run(["qemu-img", *arguments], timeout_s=within_s, guarded=True, stop=stop, missing=DiskWriteFailed)
    except ProgramFailed as error:
        hint = f"free space in {held_up.place_of(into)}" if NO_SPACE in error.detail else None
        raise DiskWriteFailed(f"an overlay of the guest cannot be kept: {error.detail}", hint=hint) from error
