"""A backup run: it holds each guest of the job at one moment, stores it in a session of the repository, and registers its
point."""

import contextlib
import re
from collections.abc import Callable
from functools import partial
from pathlib import Path
from uuid import UUID, uuid4, uuid5

from synvirt.backups.authors import Authors
from synvirt.backups.limits import Limits, held
from synvirt.backups.model import BackupJob, BackupRepository, BackupRun, DiskTaken, GuestTaken, RestorePoint, Status
from synvirt.backups.orders import Commit, DiskIsTaken, DiskToTake, Doubt, Ready, Signed, Stored, TakeOrder, ToSign
from synvirt.backups.points import Points, point_of
from synvirt.backups.repositories import Repositories
from synvirt.backups.retiring import Retiring
from synvirt.backups.sources.guest import SNAPSHOTS_LEFT_OUT, Ask, Guest
from synvirt.backups.under_way import Sum, UnderWay
from synvirt.backups.working import Message, Working
from synvirt.copying import Copied
from synvirt.errors import (
    BackupConflict,
    Cancelled,
    DeltaFallback,
    Internal,
    Interrupted,
    RepositoryFull,
    RepositoryUnreachable,
    SynvirtError,
)
from synvirt.jobs.wire import Moved, Result
from synvirt.model.values import now
from synvirt.repository.manifest import Manifest, Named, Sealed, Shown, statement
from synvirt.repository.repository import Repository
from synvirt.sizes import counted
from synvirt.store.store import StoreAway

# The newest points whose manifests are read to find one that changes can be counted from.
BASES_LOOKED_AT = 10

_HELD_ANEW = (
    "the service ended while its disks were read, so the moment at which they were held is gone: all is held and read again; "
    "what is stored is not stored twice"
)

# Gives a guest with its disks held at one moment, until the block ends.
OpenGuest = Callable[[Ask], contextlib.AbstractContextManager[Guest]]


_DIGEST = re.compile(r"[0-9a-f]{64}")


class BackingUp:
    """`collect`: removes what no point in a repository needs any more. `journals`: a folder where interrupted runs record what
    they have stored; None: each starts over. `adopt` registers points that a run has made and that are not registered yet.
    `unsure` gets each run that may have left such a point."""

    def __init__(
        self,
        repositories: Repositories,
        points: Points,
        retiring: Retiring,
        open_guest: OpenGuest,
        *,
        working: Working,
        collect: Callable[[UnderWay, UUID, int | None], None],
        journals: Path | None = None,
        adopt: Callable[[BackupRepository, BackupRun], None] = lambda known, run: None,
        unsure: Callable[[BackupRun], None] = lambda run: None,
        limits: Limits | None = None,
    ) -> None:
        self._unsure = unsure
        self._repositories, self._points, self._retiring, self._open_guest = repositories, points, retiring, open_guest
        self._working, self._collect, self._journals, self._adopt, self._limits = working, collect, journals, adopt, limits

    def back_up(self, under_way: UnderWay, job: BackupJob, *, goes_on: bool) -> None:
        """An error of one guest does not stop the backup of the others; the run fails at its end. `goes_on`: the run was
        begun before, and cut off by the service's end or a lost lease."""
        known = self._repositories.get(job.repository_id)
        repository = self._repositories.opened(job.repository_id)
        failed: list[tuple[str, SynvirtError]] = []
        has = self._taken_before(under_way, known) if goes_on else set[str]()
        for vm_id in job.vm_ids:
            if vm_id in has:
                continue
            try:
                # Before the guest's disks are held: while they are, the guest's host needs more and more space.
                with held(self._limits, under_way, repository, Limits.guests):
                    self._back_up_one(under_way, job, known, repository, vm_id)
            except (Cancelled, RepositoryUnreachable, RepositoryFull, StoreAway):
                raise
            except SynvirtError as error:
                if len(job.vm_ids) > 1:
                    under_way.warn(error.code, f"{vm_id} was not backed up: {error.detail}", vm_id)
                failed.append((vm_id, error))
        if under_way.run.restore_point_ids:
            self._collect_after(under_way, job)
        if failed:
            raise _combined(failed, len(job.vm_ids))

    def _taken_before(self, under_way: UnderWay, known: BackupRepository) -> set[str]:
        """The guests, by name and UUID, whose points the run made before it was cut off. If a point's registration was
        interrupted, the point is registered now."""
        run = under_way.run
        self._adopt(known, run)
        points = self._points.all({"job_id": [str(run.job_id)], "run_id": [str(run.id)]})
        has = {one for point in points for one in (point.vm_id, point.vm_name)}
        under_way.note(
            restore_point_ids=tuple(point.id for point in points),
            guests=tuple(guest for guest in run.guests if guest.vm_id in has),
        )
        return has

    def _back_up_one(
        self, under_way: UnderWay, job: BackupJob, known: BackupRepository, repository: Repository, vm_id: str
    ) -> None:
        journal = self._journal(job, vm_id)
        with self._open_guest(self._ask(under_way, job, repository, vm_id)) as guest:
            under_way.move(Status.TRANSFERRING)
            if under_way.run.resumed_count and guest.way != "offline":
                under_way.warn(Interrupted.code, _HELD_ANEW, guest.vm_id)
            taking = _Taking(guest, job, under_way, repository, self._repositories.authors)
            order = TakeOrder(
                repository=self._repositories.spec(job.repository_id),
                disks=tuple(
                    DiskToTake(key=disk.target, reader=disk.spec, changes=disk.changes, whole_because=disk.whole_because)
                    for disk in guest.disks
                ),
                base=None if guest.base is None else str(guest.base.shown.id),
                base_sha256=None if guest.base is None else guest.base.sha256,
                journal=None if journal is None else str(journal),
                moment=guest.moment,
                threads=self._working.threads,
                bandwidth_bps=job.bandwidth_bps,
            )
            try:
                self._working.carry_out(lambda: order, taking.on_message, taking.stop)
            except SynvirtError:
                if taking.manifest is not None:  # only the answer may be missing
                    self._unsure(under_way.run)
                raise
            guest.marks_kept()
        manifest = taking.manifest
        assert manifest is not None
        if journal is not None:
            journal.unlink(missing_ok=True)
        signed_by = None if manifest.sealed.signature is None else self._repositories.authors.fingerprint
        self._points.put(point_of(manifest, known, stored_bytes=taking.stored.stored_bytes, signed_by=signed_by))
        under_way.note(restore_point_ids=(*under_way.run.restore_point_ids, manifest.shown.id))
        self._retire(under_way, job, manifest.sealed.vm_id)

    def forget(self, job: BackupJob) -> None:
        """Removes what is kept for the next run of a removed job."""
        for vm_id in job.vm_ids:
            journal = self._journal(job, vm_id)
            if journal is not None:
                journal.unlink(missing_ok=True)

    def _journal(self, job: BackupJob, vm_id: str) -> Path | None:
        """The journal of the job's guest: the next run may continue there after an interrupted one."""
        if self._journals is None:
            return None
        self._journals.mkdir(parents=True, exist_ok=True, mode=0o700)
        return self._journals / f"{uuid5(job.id, vm_id)}.stored"

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
        """The newest point of the guest of that UUID from which changes can be counted. Its author must be known: its unchanged
        chunks become part of a point that this host signs."""
        damaged = self._points.all({"repository_id": [str(job.repository_id)], "state": ["damaged"]})
        mine = self._points.all({"job_id": [str(job.id)], "vm_id": [vm_id]})
        for point in trusted([*damaged, *mine], job, vm_id)[:BASES_LOOKED_AT]:
            with contextlib.suppress(SynvirtError):
                unread = repository.unread(point.id)
                # A point of the newest key takes nothing over from points of an older key.
                if self._repositories.authors.is_known(unread) and repository.is_current(point.id):
                    manifest = repository.parsed(unread)
                    if any(disk.mark is not None for disk in manifest.sealed.disks):
                        return manifest
        return None

    def _retire(self, under_way: UnderWay, job: BackupJob, vm_id: str) -> None:
        """The new point exists: an error from here on is only a warning."""
        try:
            self._retiring.retire(job, vm_id=vm_id)
        except SynvirtError as error:
            under_way.warn(error.code, f"old restore points were not removed: {error.detail}", vm_id)

    def _collect_after(self, under_way: UnderWay, job: BackupJob) -> None:
        try:
            if not under_way.stop():
                self._collect(under_way, job.repository_id, job.bandwidth_bps)
        except Cancelled:
            pass  # the points exist: the next run collects
        except SynvirtError as error:
            under_way.warn(error.code, f"garbage was not collected: {error.detail}")


def trusted(points: list[RestorePoint], job: BackupJob, vm_id: str) -> list[RestorePoint]:
    """The job's points of a guest, the newest first, from which unchanged chunks may be taken without reading. Damaged points
    are left out, and points that existed when damage was found and may share it: then everything is read, and damaged chunks
    are written again. So are points of a clock that was ahead: what they count from is gone with the next point."""
    there = [point for point in points if point.repository_id == job.repository_id]
    found = max((point.verified_at for point in there if point.state == "damaged" and point.verified_at), default=None)
    mine = [
        point
        for point in there
        if (point.job_id, point.vm_id) == (job.id, vm_id)
        and point.state != "damaged"
        and point.created_at <= now()
        and (found is None or max(point.created_at, point.verified_at or point.created_at) >= found)
    ]
    return sorted(mine, key=lambda point: point.created_at, reverse=True)


def _combined(failed: list[tuple[str, SynvirtError]], count: int) -> SynvirtError:
    vm_id, first = failed[0]
    if count == 1:
        return first
    first.detail = f"{len(failed)} of {count} guests were not backed up; {vm_id}: {first.detail}"
    return first


class _Taking:
    """Stores a guest's disks, as the worker reports them. `manifest`: set after the worker got its Commit."""

    def __init__(self, guest: Guest, job: BackupJob, under_way: UnderWay, repository: Repository, authors: Authors) -> None:
        self._authors = authors
        self._guest, self._job, self._under_way, self._repository = guest, job, under_way, repository
        self._id, self._disks_before = uuid4(), under_way.run.guests
        self._doubts: set[str] = set()
        self.manifest: Manifest | None = None
        self._begin()

    def _begin(self) -> None:
        done = Sum(self._under_way)
        self._figures = {disk.target: done.next_disk() for disk in self._guest.disks}
        self.stored = _Stored()
        self._under_way.storing(self.stored)

    def stop(self) -> bool:
        """Not after the worker may commit: the run must know whether the point exists."""
        return self.manifest is None and self._under_way.stop()

    def on_message(self, message: Message) -> Commit | Signed | None:
        if isinstance(message, Moved):
            self._figures[message.key](Copied(message.bytes_total, message.bytes_done, message.bytes_zero, 0))
        elif isinstance(message, Result):
            content = message.content
            match message.name:
                case "stored":
                    self.stored.now(Stored.of(content).stored_bytes)
                case "doubt":
                    self._doubt(Doubt.of(content))
                case "ready":
                    return self._judged(Ready.of(content).disks)
                case "to_sign":
                    return self._signed(ToSign.of(content).sha256)
        return None

    def _doubt(self, doubt: Doubt) -> None:
        """Warns once, however often the order is given."""
        if doubt.key not in self._doubts:
            self._doubts.add(doubt.key)
            self._under_way.warn(DeltaFallback.code, f"{doubt.why}: the whole disk was read", self._guest.vm_id)

    def _judged(self, taken: tuple[DiskIsTaken, ...]) -> Commit:
        """Judges the point. It exists once the worker has executed the Commit."""
        guest = self._guest
        guest.check_unchanged()
        self._warn_of_snapshots(taken)
        self._under_way.move(Status.COMMITTING, guests=(*self._disks_before, _guest_taken(guest, taken)))
        manifest = _manifest(guest, taken, self._job, self._under_way.run.id, self._id)
        guest.keep_marks()
        _refuse_lost_base(guest, taken, self._repository)
        self.manifest = manifest
        shown = manifest.shown.model_dump_json(exclude={"disks"})
        return Commit(shown=shown, sealed=manifest.sealed.model_dump_json())

    def _warn_of_snapshots(self, taken: tuple[DiskIsTaken, ...]) -> None:
        """Warns of snapshots that only an image knows: those that libvirt knows are named already."""
        guest, run = self._guest, self._under_way.run
        if any((one.code, one.vm_id) == (SNAPSHOTS_LEFT_OUT, guest.vm_id) for one in run.warnings):
            return
        for disk in taken:
            if disk.snapshots:
                has = f"the image of disk {disk.key} of {guest.name} has {counted(disk.snapshots, 'snapshot')}, not backed up"
                self._under_way.warn(SNAPSHOTS_LEFT_OUT, has, guest.vm_id)

    def _signed(self, digest: str) -> Signed:
        """Signs this judged point and no other: the content that its worker reports is signed as this host's."""
        if self.manifest is None or not _DIGEST.fullmatch(digest):
            raise Internal("a worker asks for a signature of what is no restore point")
        signature = self._authors.sign(statement(self._id, digest))
        self.manifest = self.manifest.model_copy(
            update={"sealed": self.manifest.sealed.model_copy(update={"signature": signature})}
        )
        return Signed(signature=None if signature is None else signature.model_dump_json())


class _Stored:
    """The growth of the repository, including sessions of killed workers."""

    def __init__(self) -> None:
        self._before = self._now = 0

    @property
    def stored_bytes(self) -> int:
        return self._before + self._now

    def now(self, stored_bytes: int) -> None:
        if stored_bytes < self._now:
            self._before += self._now
        self._now = stored_bytes


def _refuse_lost_base(guest: Guest, taken: tuple[DiskIsTaken, ...], repository: Repository) -> None:
    """Fails, if the base is gone: its chunks exist only as long as the base. What is collected later is checked again
    (garbage.py)."""
    if guest.base is None or all(one.whole for one in taken):
        return
    if guest.base.shown.id not in repository.point_ids():
        raise BackupConflict(
            f"restore point {guest.base.shown.id}, which this run builds on, was removed meanwhile",
            hint="start the run again: it builds on another, or reads everything",
        )


def _guest_taken(guest: Guest, taken: tuple[DiskIsTaken, ...]) -> GuestTaken:
    disks = (
        DiskTaken(
            target=disk.target,
            size_bytes=one.size_bytes,
            read_bytes=one.read_bytes + one.resumed_bytes,
            changes_only=not one.whole,
        )
        for disk, one in zip(guest.disks, taken, strict=True)
    )
    return GuestTaken(vm_id=guest.vm_id, vm_name=guest.name, way=guest.way, freeze_ms=guest.freeze_ms, disks=tuple(disks))


def _manifest(guest: Guest, taken: tuple[DiskIsTaken, ...], job: BackupJob, run_id: UUID, point_id: UUID) -> Manifest:
    named = tuple(
        Named(
            target=disk.target,
            path=disk.path,
            size_bytes=one.size_bytes,
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
    return Manifest(shown=Shown(id=point_id, created_at=guest.at, disks=()), sealed=sealed)
