"""A guest that is shut off: its disks are at rest, and are read in their place.

If it is started while it is read, or a file of it changes, `check_unchanged` reports it, and nothing is kept. Formats are taken
from the domain's XML, never guessed: a guest can write anything into its disks.
"""

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from uuid import uuid4

from synvirt.backups import domain_parts
from synvirt.backups.sources.guest import Ask, Guest, SourceDisk
from synvirt.backups.sources.made import Made
from synvirt.disks.specs import ImageSpec, RawSpec
from synvirt.errors import Internal, SourceRunning, SourceUnsupported
from synvirt.kvm.connection import Connection, load, translated
from synvirt.live.libvirt.manifest import parse


class Offline:
    """The way to read a guest that is shut off."""

    name = "offline"

    def __init__(self, connection: Connection, tpm_folder: Callable[[], Path]) -> None:
        self._connection, self._tpm_folder = connection, tpm_folder

    def fits(self, domain: Any) -> str | None:
        with translated(Internal, "the hypervisor does not say how the guest is"):
            return "it runs" if domain.isActive() else None

    @contextlib.contextmanager
    def open(self, domain: Any, ask: Ask) -> Iterator[Guest]:
        """SourceRunning, SourceUnsupported."""
        libvirt, opened = load(), self._connection.use()
        started: list[int] = []

        def noticed(_connection: Any, _domain: Any, event: int, _detail: int, _opaque: Any) -> None:
            if event == libvirt.VIR_DOMAIN_EVENT_STARTED:
                started.append(event)

        with translated(Internal, f"the hypervisor does not say how {ask.vm_id} is"):
            watch = opened.domainEventRegisterAny(domain, libvirt.VIR_DOMAIN_EVENT_ID_LIFECYCLE, noticed, None)
        try:
            with translated(Internal, f"the hypervisor does not say how {ask.vm_id} is"):
                if domain.isActive() or domain.hasManagedSaveImage():
                    raise SourceRunning(
                        f"{domain.name()} was just started, or its memory is saved: its disks are not at rest",
                        hint="start the run again; saved memory goes by starting the guest, or with virsh managedsave-remove",
                    )
                xml = domain.XMLDesc(libvirt.VIR_DOMAIN_XML_SECURE | libvirt.VIR_DOMAIN_XML_INACTIVE)
                guest_id, name = domain.UUIDString(), domain.name()
            root = parse(xml)
            disks = tuple(_disks(root))
            before = _marks(disks)

            def check_unchanged() -> None:
                with translated(Internal, f"the hypervisor does not say how {ask.vm_id} is"):
                    running = domain.isActive()
                if running or started or _marks(disks) != before or not opened.isAlive():
                    raise SourceRunning(
                        f"{name} was started, or a disk of it changed, while it was read",
                        hint="start the run again",
                    )

            yield Guest(
                vm_id=guest_id,
                name=name,
                domain_xml=xml,
                nvram=domain_parts.nvram(root, self._tpm_folder()),
                tpm=domain_parts.tpm(root, self._tpm_folder()),
                disks=disks,
                check_unchanged=check_unchanged,
                # Files that were not written since are at the same moment; the content of a device can only be watched by
                # libvirt.
                moment=str(uuid4()) if any(Path(disk.path).is_block_device() for disk in disks) else f"{guest_id} {before}",
            )
        finally:
            with contextlib.suppress(libvirt.libvirtError):
                opened.domainEventDeregisterAny(watch)

    def end(self, made: Made) -> None:
        """This way makes nothing."""

    sweep = end


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


def _marks(disks: tuple[SourceDisk, ...]) -> list[tuple[int, ...]]:
    """What changes when a file is written. For a device nothing does: only libvirt knows."""
    found: list[tuple[int, ...]] = []
    for disk in disks:
        try:
            status = Path(disk.path).stat()
        except OSError as error:
            raise SourceUnsupported(f"disk {disk.target} cannot be reached: {error.strerror}") from error
        found.append((status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns))
    return found
