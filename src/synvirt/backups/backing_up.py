"""A backup run: each guest of the job, held at one moment, into a session of the repository, and its point registered."""

import contextlib
from collections.abc import Callable
from uuid import UUID, uuid4

from synvirt.backups import garbage, source
from synvirt.backups.disk import ChunkWriter
from synvirt.backups.manifest import DiskMap, Manifest, Named, Sealed, Shown
from synvirt.backups.model import BackupJob, Status
from synvirt.backups.points import Points, point_of
from synvirt.backups.repositories import Repositories
from synvirt.backups.repository import Session
from synvirt.backups.source import Guest
from synvirt.backups.under_way import Sum, UnderWay
from synvirt.copying import copy
from synvirt.errors import SynvirtError
from synvirt.model import now

# All that a session writes becomes durable with its manifest: there is nothing to flush before.
NEVER_S = 1e9

# Gives the guest of that name or UUID, at rest, for as long as it is held.
OpenGuest = Callable[[str], contextlib.AbstractContextManager[Guest]]


class BackingUp:
    def __init__(self, repositories: Repositories, points: Points, open_guest: OpenGuest) -> None:
        self._repositories, self._points, self._open_guest = repositories, points, open_guest

    def back_up(self, under_way: UnderWay, job: BackupJob) -> None:
        known = self._repositories.get(job.repository_id)
        repository = self._repositories.opened(job.repository_id)
        for vm_id in job.vm_ids:
            session = repository.session()
            under_way.storing(session)
            with self._open_guest(vm_id) as guest:
                if guest.has_tpm:
                    text = f"the state of {guest.name}'s TPM is not part of the restore point"
                    under_way.warn("E_BAK_TPM_LEFT_OUT", text, vm_id)
                under_way.move(Status.TRANSFERRING)
                maps = _copied(guest, session, under_way)
                guest.check_unchanged()
                under_way.move(Status.COMMITTING)
                manifest = _manifest(guest, maps, job, under_way.run.id)
                session.commit(manifest)
            self._points.put(point_of(manifest, known, stored_bytes=session.stored_bytes))
            under_way.move(Status.COMMITTING, restore_point_ids=(*under_way.run.restore_point_ids, manifest.shown.id))
            self._retire(under_way, job, manifest.sealed.vm_id)

    def _retire(self, under_way: UnderWay, job: BackupJob, vm_id: str) -> None:
        """The new point is there: what goes wrong from here on is a warning."""
        mine = [point for point in self._points.all() if point.job_id == job.id and point.vm_id == vm_id]
        staying = garbage.kept(((point.id, point.created_at) for point in mine), job.retention)
        repository = self._repositories.opened(job.repository_id)
        try:
            for point in mine:
                if point.id not in staying:
                    repository.remove(point.id)
                    self._points.forget(point.id)
            garbage.collect(repository, now=now().timestamp())
        except SynvirtError as error:
            under_way.warn(error.code, f"old restore points were not removed: {error.detail}", vm_id)


def _copied(guest: Guest, session: Session, under_way: UnderWay) -> list[DiskMap]:
    maps, done = [], Sum(under_way)
    for disk in guest.disks:
        reader = source.open_disk(disk)
        try:
            writer = ChunkWriter(session, reader.size)
            # Not fresh: every byte of the disk comes, zeros as zeros, so that each chunk knows when it is whole.
            copy(reader, writer, fresh=False, flush_every_s=NEVER_S, stop=under_way.stop, on_progress=done.next_disk())
            maps.append(writer.finish())
        finally:
            reader.close()
    return maps


def _manifest(guest: Guest, maps: list[DiskMap], job: BackupJob, run_id: UUID) -> Manifest:
    named = tuple(
        Named(target=disk.target, path=disk.path, size_bytes=one.size_bytes)
        for disk, one in zip(guest.disks, maps, strict=True)
    )
    sealed = Sealed(
        vm_id=guest.vm_id,
        vm_name=guest.name,
        consistency="offline",
        job_id=job.id,
        run_id=run_id,
        domain_xml=guest.domain_xml,
        nvram=guest.nvram,
        disks=named,
    )
    return Manifest(shown=Shown(id=uuid4(), created_at=now(), disks=tuple(maps)), sealed=sealed)
