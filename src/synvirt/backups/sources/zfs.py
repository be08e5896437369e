"""A guest whose disks are all volumes of one zfs pool, running or not: read from an atomic snapshot of them.

The guest never waits for the backup's destination: it is frozen, if at all, only as long as `zfs snapshot` takes. Changes
survive restarts of the guest and crashes of the host, as zfs itself tracks them (zfs_moment.py).
"""

import contextlib
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from uuid import uuid4

from synvirt.backups import domain_parts
from synvirt.backups.sources.definition import definition
from synvirt.backups.sources.guest import Ask, Guest, Keeping, SourceDisk, new_name
from synvirt.backups.sources.made import Made, MadeRows
from synvirt.backups.sources.quiescing import Moment as Held
from synvirt.backups.sources.quiescing import held
from synvirt.backups.sources.zfs_moment import Moment
from synvirt.destinations.zfs_command import Zfs, ZfsRefused
from synvirt.destinations.zfs_links import Links
from synvirt.disks.raw.zvols import device_of, zvol_name
from synvirt.disks.specs import RawSpec
from synvirt.errors import DiskWriteFailed, SourceRunning, SourceSnapshotFailed
from synvirt.kvm.connection import translated
from synvirt.live.libvirt.manifest import data_disks, disk_format, parse
from synvirt.repository.manifest import Manifest, Mark


class OfZfs:
    """`name_of` gives the name of an open device's volume; OSError, if the device is no volume."""

    name = "zfs"

    def __init__(
        self,
        uri: str,
        ledger: MadeRows,
        *,
        tpm_folder: Callable[[], Path],
        zfs: Zfs | None = None,
        links: Links | None = None,
        name_of: Callable[[int], str] = zvol_name,
    ) -> None:
        self._uri, self._ledger, self._tpm_folder = uri, ledger, tpm_folder
        self._zfs, self._links, self._name_of = zfs or Zfs(), links or Links(), name_of

    def fits(self, domain: Any) -> str | None:
        with translated(SourceSnapshotFailed, "the hypervisor does not say how the guest is"):
            root = parse(domain.XMLDesc(0))
        found = [self._volume(disk) for _, disk in data_disks(root)]
        volumes = [volume for volume in found if volume is not None]
        if not found or len(volumes) < len(found):
            return "not all of its disks are volumes of zfs"
        if len({volume.partition("/")[0] for volume in volumes}) > 1:
            return "its volumes are in several pools, of which no snapshot at one moment can be made"
        return "it has a disk twice" if len(set(volumes)) < len(volumes) else None

    def _volume(self, disk: Any) -> str | None:
        """The volume of a raw disk, which has the same bytes. It is found by its device, which has many names."""
        if disk.get("type") != "block" or disk.get("device") == "lun" or disk_format(disk) != "raw":
            return None
        try:
            descriptor = os.open(device_of(_device(disk)), os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        except OSError:
            return None
        try:
            return self._name_of(descriptor)
        except OSError:
            return None
        finally:
            os.close(descriptor)

    @contextlib.contextmanager
    def open(self, domain: Any, ask: Ask) -> Iterator[Guest]:
        """QuiesceFailed, GuestStillFrozen, SourceSnapshotFailed, SourceRunning."""
        with translated(SourceSnapshotFailed, f"the hypervisor does not say how {ask.vm_id} is"):
            root = parse(domain.XMLDesc(0))
            vm_id, name = str(domain.UUIDString()), str(domain.name())
            if not domain.isActive() and domain.hasManagedSaveImage():
                raise SourceRunning(
                    f"the memory of {name} is saved: its disks are not at rest",
                    hint="start it and shut it down, or drop what is saved: virsh managedsave-remove NAME",
                )
        volumes = {key: str(self._volume(disk)) for key, disk in data_disks(root)}
        made = Made(
            id=uuid4(),
            job_id=ask.job_id,
            vm_id=vm_id,
            way="zfs",
            name=new_name(ask.job_id),
            volumes=tuple(volumes.values()),
        )
        base, moment = ask.base(vm_id), self._moment(made)
        with Keeping(self._ledger, self, made) as keeping:
            try:
                was = self._held(domain, ask, moment)
                disks = tuple(self._disks(root, volumes, moment, base))
            except (ZfsRefused, DiskWriteFailed) as error:
                raise SourceSnapshotFailed(f"the volumes of {name} cannot be held: {error.detail}", hint=error.hint) from error
            with translated(SourceSnapshotFailed, f"the hypervisor does not say how {name} is made"):
                xml = definition(domain, root)
            yield Guest(
                vm_id=vm_id,
                name=name,
                domain_xml=xml,
                nvram=domain_parts.nvram(root, self._tpm_folder()),
                tpm=domain_parts.tpm(root, self._tpm_folder()),
                disks=disks,
                check_unchanged=lambda: None,  # a snapshot does not change
                way="zfs",
                consistency=was.consistency,
                quiesced=was.quiesced,
                freeze_ms=was.freeze_ms,
                moment=made.name,
                base=base,
                keep_marks=keeping.keep,
                marks_kept=keeping.commit,
            )

    def _held(self, domain: Any, ask: Ask, moment: Moment) -> Held:
        """A guest that is shut off before and after was off at the moment itself, or was not up for long enough to write."""
        with translated(SourceSnapshotFailed, "the hypervisor does not say whether the guest runs"):
            if domain.isActive():
                with held(self._uri, domain, ask) as was:
                    moment.take()
                return was
            ask.move("snapshotting")
            moment.take()
            return Held(consistency="crash" if domain.isActive() else "offline")

    def _disks(self, root: Any, volumes: dict[str, str], moment: Moment, base: Manifest | None) -> Iterator[SourceDisk]:
        sealed = () if base is None else base.sealed.disks
        before = {disk.target: disk for disk in sealed if disk.mark is not None and disk.mark.kind == "bookmark"}
        for key, disk in data_disks(root):
            volume, old = volumes[key], before.get(key)
            changes = None
            if old is not None and old.mark is not None and old.mark.guid is not None:
                changes = moment.changed(volume, old.mark.name, old.mark.guid, old.size_bytes)
            yield SourceDisk(
                target=key,
                path=_device(disk),
                spec=RawSpec(path=moment.device(volume)),
                changes=changes,
                mark=Mark(kind="bookmark", name=moment.name, guid=moment.mark(volume)),
            )

    def end(self, made: Made) -> None:
        self._moment(made).end()

    def sweep(self, made: Made) -> None:
        self._moment(made).forget()

    def _moment(self, made: Made) -> Moment:
        return Moment(made, zfs=self._zfs, links=self._links)


def _device(disk: Any) -> str:
    return str(disk.find("source").get("dev", ""))
