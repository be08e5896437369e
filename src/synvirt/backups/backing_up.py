"""A backup run: each guest of the job, held at one moment, into a session of the repository, and its point registered."""

import contextlib
from collections.abc import Callable
from functools import partial
from uuid import UUID, uuid4

from synvirt.backups.model import BackupJob, BackupRepository, DiskTaken, GuestTaken, RestorePoint, Status
from synvirt.backups.points import Points, point_of
from synvirt.backups.repositories import Repositories
from synvirt.backups.retiring import Retiring
from synvirt.backups.source import Ask, Guest
from synvirt.backups.taking import Taken, take
from synvirt.backups.under_way import Sum, UnderWay
from synvirt.errors import (
    BackupConflict,
    Cancelled,
    DeltaFallback,
    RepositoryFull,
    RepositoryUnreachable,
    SynvirtError,
)
from synvirt.model import now
from synvirt.repository import garbage
from synvirt.repository.manifest import Manifest, Named, Sealed, Shown
from synvirt.repository.repository import Repository, Session

# Of so many of the newest points the manifests are read, to find one that changes can be counted from.
BASES_LOOKED_AT = 10

# Gives the guest that is asked for, its disks held at one moment, for as long as it is held.
OpenGuest = Callable[[Ask], contextlib.AbstractContextManager[Guest]]


class BackingUp:
    def __init__(self, repositories: Repositories, points: Points, retiring: Retiring, open_guest: OpenGuest) -> None:
        self._repositories, self._points, self._retiring, self._open_guest = repositories, points, retiring, open_guest

    def back_up(self, under_way: UnderWay, job: BackupJob) -> None:
        """What is wrong with one guest keeps none of the others from being backed up; the run fails at its end."""
        known = self._repositories.get(job.repository_id)
        repository = self._repositories.opened(job.repository_id)
        failed: list[tuple[str, SynvirtError]] = []
        for vm_id in job.vm_ids:
            try:
                self._back_up_one(under_way, job, known, repository, vm_id)
            except (Cancelled, RepositoryUnreachable, RepositoryFull):
                raise
            except SynvirtError as error:
                if len(job.vm_ids) > 1:
                    under_way.warn(error.code, f"{vm_id} was not backed up: {error.detail}", vm_id)
                failed.append((vm_id, error))
        if under_way.run.restore_point_ids:
            self._collect(under_way, repository)
        if failed:
            raise _told_of_all(failed, len(job.vm_ids))

    def _back_up_one(
        self, under_way: UnderWay, job: BackupJob, known: BackupRepository, repository: Repository, vm_id: str
    ) -> None:
        session = repository.session()
        under_way.storing(session)
        with self._open_guest(self._ask(under_way, job, repository, vm_id)) as guest:
            under_way.move(Status.TRANSFERRING)
            taken = _taken(guest, repository, session, under_way)
            guest.check_unchanged()
            under_way.move(Status.COMMITTING, guests=(*under_way.run.guests, _told(guest, taken)))
            manifest = _manifest(guest, taken, job, under_way.run.id)
            guest.keep_marks()
            _refuse_lost_base(guest, taken, repository)
            session.commit(manifest)
            guest.marks_kept()
        self._points.put(point_of(manifest, known, stored_bytes=session.stored_bytes))
        under_way.note(restore_point_ids=(*under_way.run.restore_point_ids, manifest.shown.id))
        self._retire(under_way, job, manifest.sealed.vm_id)

    def _ask(self, under_way: UnderWay, job: BackupJob, repository: Repository, vm_id: str) -> Ask:
        return Ask(
            vm_id=vm_id,
            job_id=job.id,
            quiesce=job.quiesce,
            base=partial(self._base, job, repository),
            move=lambda status: under_way.move(Status(status)),
            warn=lambda code, message: under_way.warn(code, message, vm_id),
            stop=under_way.stop,
        )

    def _base(self, job: BackupJob, repository: Repository, vm_id: str) -> Manifest | None:
        """Of the guest of that UUID the newest point that changes can be counted from."""
        for point in trusted(self._points.all(), job, vm_id)[:BASES_LOOKED_AT]:
            with contextlib.suppress(SynvirtError):
                manifest = repository.manifest(point.id)
                if any(disk.mark is not None for disk in manifest.sealed.disks):
                    return manifest
        return None

    def _retire(self, under_way: UnderWay, job: BackupJob, vm_id: str) -> None:
        """The new point is there: what goes wrong from here on is a warning."""
        try:
            self._retiring.retire(job, vm_id=vm_id)
        except SynvirtError as error:
            under_way.warn(error.code, f"old restore points were not removed: {error.detail}", vm_id)

    def _collect(self, under_way: UnderWay, repository: Repository) -> None:
        try:
            garbage.collect(repository, now=now().timestamp())
        except SynvirtError as error:
            under_way.warn(error.code, f"garbage was not collected: {error.detail}")


def trusted(points: list[RestorePoint], job: BackupJob, vm_id: str) -> list[RestorePoint]:
    """The job's points of a guest, the newest first, from which unchanged chunks may be taken unread. None that is damaged, nor
    one that was there when damage was found, and may share it: then all is read, and what is damaged is written again."""
    there = [point for point in points if point.repository_id == job.repository_id]
    found = max((point.verified_at for point in there if point.state == "damaged" and point.verified_at), default=None)
    mine = [
        point
        for point in there
        if (point.job_id, point.vm_id) == (job.id, vm_id)
        and point.state != "damaged"
        and (found is None or max(point.created_at, point.verified_at or point.created_at) >= found)
    ]
    return sorted(mine, key=lambda point: point.created_at, reverse=True)


def _told_of_all(failed: list[tuple[str, SynvirtError]], count: int) -> SynvirtError:
    vm_id, first = failed[0]
    if count == 1:
        return first
    first.detail = f"{len(failed)} of {count} guests were not backed up; {vm_id}: {first.detail}"
    return first


def _taken(guest: Guest, repository: Repository, session: Session, under_way: UnderWay) -> list[Taken]:
    done = Sum(under_way)
    return [
        take(
            disk,
            guest.base,
            repository,
            session,
            stop=under_way.stop,
            on_progress=done.next_disk(),
            doubt=lambda why: under_way.warn(DeltaFallback.code, f"{why}: the whole disk was read", guest.vm_id),
        )
        for disk in guest.disks
    ]


def _refuse_lost_base(guest: Guest, taken: list[Taken], repository: Repository) -> None:
    """What it has of the base is there for as long as the base is; what is collected later is looked at again (garbage.py)."""
    if guest.base is None or all(one.whole for one in taken):
        return
    if guest.base.shown.id not in repository.point_ids():
        raise BackupConflict(
            f"restore point {guest.base.shown.id}, which this run builds on, was removed meanwhile",
            hint="start the run again: it builds on another, or reads everything",
        )


def _told(guest: Guest, taken: list[Taken]) -> GuestTaken:
    disks = (
        DiskTaken(target=disk.target, size_bytes=one.disk.size_bytes, read_bytes=one.read_bytes, changes_only=not one.whole)
        for disk, one in zip(guest.disks, taken, strict=True)
    )
    return GuestTaken(vm_id=guest.vm_id, vm_name=guest.name, way=guest.way, freeze_ms=guest.freeze_ms, disks=tuple(disks))


def _manifest(guest: Guest, taken: list[Taken], job: BackupJob, run_id: UUID) -> Manifest:
    named = tuple(
        Named(
            target=disk.target,
            path=disk.path,
            size_bytes=one.disk.size_bytes,
            mark=disk.mark,
            checked_to=one.checked_to,
        )
        for disk, one in zip(guest.disks, taken, strict=True)
    )
    sealed = Sealed(
        vm_id=guest.vm_id,
        vm_name=guest.name,
        consistency=guest.consistency,
        quiesced=guest.quiesced,
        freeze_ms=guest.freeze_ms,
        job_id=job.id,
        run_id=run_id,
        domain_xml=guest.domain_xml,
        nvram=guest.nvram,
        tpm=guest.tpm,
        disks=named,
    )
    return Manifest(shown=Shown(id=uuid4(), created_at=guest.at, disks=tuple(one.disk for one in taken)), sealed=sealed)
