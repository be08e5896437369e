"""A guest of this host, as a run reads it: its domain's XML, NVRAM, and a reader for each of its disks.

Only a guest that is shut off: nothing here can freeze the disks of one that runs at one moment, and a copy of disks that change
is no backup. Should it be started while it is read, or a file of it change, `check_unchanged` says so, and nothing is kept.

Formats are taken from the domain's XML, never guessed: a guest writes what it likes into its disks.
"""

import base64
import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from defusedxml import ElementTree

from synvirt.blocks import DiskReader
from synvirt.disks import open_reader
from synvirt.disks.specs import ImageSpec, RawSpec, ReaderSpec
from synvirt.errors import BackupNotFound, Internal, SourceRunning, SourceUnsupported
from synvirt.hypervisor.connection import Connection, load, translated

# A UEFI variable store has 64 KiB to 4 MiB.
NVRAM_BYTES_MAX = 16 << 20


@dataclass(frozen=True, slots=True)
class SourceDisk:
    target: str
    path: str
    spec: ReaderSpec


@dataclass(frozen=True)
class Guest:
    vm_id: str
    name: str
    domain_xml: str
    nvram: str | None
    has_tpm: bool
    disks: tuple[SourceDisk, ...]
    check_unchanged: Callable[[], None]


@contextlib.contextmanager
def shut_off(connection: Connection, vm_id: str) -> Iterator[Guest]:
    """The guest of that name or UUID. BackupNotFound, SourceRunning, SourceUnsupported."""
    libvirt = load()
    opened = connection.use()
    domain = _found(opened, vm_id)
    started: list[int] = []

    def noticed(_connection: Any, _domain: Any, event: int, _detail: int, _opaque: Any) -> None:
        if event == libvirt.VIR_DOMAIN_EVENT_STARTED:
            started.append(event)

    with translated(Internal, f"the hypervisor does not say how {vm_id} is"):
        watch = opened.domainEventRegisterAny(domain, libvirt.VIR_DOMAIN_EVENT_ID_LIFECYCLE, noticed, None)
    try:
        with translated(Internal, f"the hypervisor does not say how {vm_id} is"):
            if domain.isActive() or domain.hasManagedSaveImage():
                raise SourceRunning(
                    f"{domain.name()} runs, or its memory is saved: its disks are not at rest",
                    hint="shut it down first: guests that run are not backed up yet",
                )
            xml = domain.XMLDesc(libvirt.VIR_DOMAIN_XML_SECURE | libvirt.VIR_DOMAIN_XML_INACTIVE)
            guest_id, name = domain.UUIDString(), domain.name()
        root = ElementTree.fromstring(xml)
        disks = tuple(_disks(root))
        before = _marks(disks)

        def check_unchanged() -> None:
            with translated(Internal, f"the hypervisor does not say how {vm_id} is"):
                running = domain.isActive()
            if running or started or _marks(disks) != before or not opened.isAlive():
                raise SourceRunning(
                    f"{name} was started, or a disk of it changed, while it was read",
                    hint="leave it shut off until the run has ended, and start the run again",
                )

        yield Guest(
            vm_id=guest_id,
            name=name,
            domain_xml=xml,
            nvram=_nvram(root),
            has_tpm=root.find("devices/tpm") is not None,
            disks=disks,
            check_unchanged=check_unchanged,
        )
    finally:
        with contextlib.suppress(libvirt.libvirtError):
            opened.domainEventDeregisterAny(watch)


def open_disk(disk: SourceDisk) -> DiskReader:
    return open_reader(disk.spec)


def _found(connection: Any, vm_id: str) -> Any:
    libvirt = load()
    for lookup in ("lookupByName", "lookupByUUIDString"):
        try:
            return getattr(connection, lookup)(vm_id)
        except libvirt.libvirtError as error:
            if error.get_error_code() not in (libvirt.VIR_ERR_NO_DOMAIN, libvirt.VIR_ERR_INVALID_ARG):
                raise Internal(f"the hypervisor does not say whether it has {vm_id}: {error}") from error
    raise BackupNotFound(f"this host has no domain {vm_id}", hint="vm_ids are names or UUIDs of this host's libvirt")


def _disks(root: Any) -> Iterator[SourceDisk]:
    for disk in root.iterfind("devices/disk"):
        target = disk.find("target").get("dev", "")
        if disk.get("device", "disk") in ("cdrom", "floppy"):
            continue
        source, driver = disk.find("source"), disk.find("driver")
        path = None if source is None else source.get("file") or source.get("dev")
        format_ = "raw" if driver is None else driver.get("type", "raw")
        if disk.get("type") not in ("file", "block") or path is None or format_ not in ("raw", "qcow2"):
            raise SourceUnsupported(
                f"disk {target} is {disk.get('type')} of format {format_}",
                hint="raw and qcow2 files and block devices are backed up",
            )
        raw = RawSpec(path=path)
        image = ImageSpec(format="qcow2", over=raw, root=str(Path(path).parent), name=Path(path).name)
        yield SourceDisk(target, path, raw if format_ == "raw" else image)


def _nvram(root: Any) -> str | None:
    path = root.findtext("os/nvram")
    if not path:
        return None
    try:
        with Path(path).open("rb") as file:
            content = file.read(NVRAM_BYTES_MAX + 1)
    except FileNotFoundError:  # it was never started
        return None
    except OSError as error:
        raise SourceUnsupported(f"the guest's UEFI variables cannot be read: {error.strerror}") from error
    if len(content) > NVRAM_BYTES_MAX:
        raise SourceUnsupported(f"the guest's UEFI variables have over {NVRAM_BYTES_MAX} bytes")
    return base64.b64encode(content).decode()


def _marks(disks: tuple[SourceDisk, ...]) -> list[tuple[int, ...]]:
    """What changes when a file is written. A device's do not: of it libvirt's word is all there is."""
    found: list[tuple[int, ...]] = []
    for disk in disks:
        try:
            status = Path(disk.path).stat()
        except OSError as error:
            raise SourceUnsupported(f"disk {disk.target} cannot be reached: {error.strerror}") from error
        found.append((status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns))
    return found
