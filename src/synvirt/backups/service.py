"""Jobs, runs and restore points as data, and the threads that do the runs.

    run(job) ─▶ queued ─▶ preparing ─▶ transferring ─▶ committing ─▶ completed, its restore points registered
                                └──────── any error, or a cancel ────────▶ failed, cancelled

A run that the service's end cuts off is failed at the next start: nothing of it counts, and what it has stored already is not
stored again by the next run. A point is registered after its manifest is there; those of a repository used again are then.
"""

import contextlib
import shutil
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from uuid import UUID, uuid4

import structlog

from synvirt.backups import garbage, source
from synvirt.backups.disk import ChunkWriter, PointReader
from synvirt.backups.manifest import DiskMap, Manifest, Named, Sealed, Shown
from synvirt.backups.model import (
    ENDS,
    BackupJob,
    BackupJobRequest,
    BackupProgress,
    BackupRepository,
    BackupRepositoryRequest,
    BackupRun,
    PointDisk,
    RestorePoint,
    RestoreRequest,
    Status,
    Trouble,
)
from synvirt.backups.repositories import Repositories
from synvirt.backups.repository import Session
from synvirt.backups.source import Guest
from synvirt.backups.verify import verify_point
from synvirt.copying import Copied, copy
from synvirt.disks.new_file import new_file
from synvirt.errors import (
    BackupBadRequest,
    BackupConflict,
    BackupNotFound,
    Cancelled,
    DiskWriteFailed,
    Internal,
    Interrupted,
    RepositoryDamaged,
    SynvirtError,
)
from synvirt.model import now
from synvirt.store.backups import BackupRows

# Each reads with a thread a core: more would only take turns.
RUNS_AT_ONCE = 2
# All that a session writes becomes durable with its manifest: there is nothing to flush before.
NEVER_S = 1e9

_log = structlog.get_logger("synvirt.backups")

# Gives the guest of that name or UUID, at rest, for as long as it is held.
OpenGuest = Callable[[str], contextlib.AbstractContextManager[Guest]]


class Backups:
    def __init__(
        self, rows: BackupRows, repositories: Repositories, *, host: str, open_guest: OpenGuest, exports: Path
    ) -> None:
        self._rows, self.repositories, self._host = rows, repositories, host
        self._open_guest, self._exports = open_guest, exports
        self._pool = ThreadPoolExecutor(RUNS_AT_ONCE, thread_name_prefix="backup")
        self._lock = threading.Lock()
        self._stops: dict[UUID, threading.Event] = {}
        self._closing = False
        self._figures: dict[UUID, BackupProgress] = {}

    def start(self) -> None:
        """Once, before anything is asked: what the last service left under way has failed."""
        open_ = tuple(str(status) for status in Status if status not in ENDS)
        for text in self._rows.all("run", host=self._host, states=open_):
            run = BackupRun.model_validate_json(text)
            self._end(run, Interrupted("the service ended while the run was under way", hint="start the run again"))

    def close(self) -> None:
        """Runs under way stop; the next start says that they were cut off."""
        with self._lock:
            self._closing = True
            for stop in self._stops.values():
                stop.set()
        self._pool.shutdown(wait=True, cancel_futures=True)

    # ── repositories and jobs ────────────────────────────────────────────────────────────────────────────────────────

    def add_repository(self, asked: BackupRepositoryRequest) -> BackupRepository:
        made = self.repositories.add(asked)
        self._adopt(made)
        return made

    def _adopt(self, known: BackupRepository) -> None:
        repository = self.repositories.opened(known.id)
        for point_id in repository.point_ids():
            try:
                point = _point(repository.manifest(point_id), known, stored_bytes=0)
            except SynvirtError as error:
                _log.warning("a restore point cannot be read", point=str(point_id), detail=error.detail)
                continue
            self._put_point(point)

    def forget_repository(self, repository_id: UUID) -> None:
        """BackupConflict while a job writes to it. Its points are forgotten, and stay where they are."""
        self.repositories.get(repository_id)
        if any(job.repository_id == repository_id for job in self._jobs()):
            raise BackupConflict("jobs write to this repository", hint="remove them first")
        for point in self._points():
            if point.repository_id == repository_id:
                self._rows.remove("point", point.id, host=self._host)
        self.repositories.forget(repository_id)

    def add_job(self, asked: BackupJobRequest) -> BackupJob:
        self.repositories.get(asked.repository_id)
        job = BackupJob(id=uuid4(), created_at=now(), **{name: getattr(asked, name) for name in type(asked).model_fields})
        self._rows.put("job", job.id, job.model_dump_json(), host=self._host)
        return job

    def job(self, job_id: UUID) -> BackupJob:
        return BackupJob.model_validate_json(self._rows.get("job", job_id, host=self._host))

    def remove_job(self, job_id: UUID) -> None:
        """Its restore points stay. BackupConflict while it runs."""
        with self._lock:
            self._check_idle(self.job(job_id))
            self._rows.remove("job", job_id, host=self._host)

    def _jobs(self) -> list[BackupJob]:
        return [BackupJob.model_validate_json(text) for text in self._rows.all("job", host=self._host)]

    # ── runs ─────────────────────────────────────────────────────────────────────────────────────────────────────────

    def run_job(self, job_id: UUID) -> BackupRun:
        with self._lock:
            job = self.job(job_id)
            self._check_idle(job)
            run = BackupRun(id=uuid4(), job_id=job_id, created_at=now())
            self._rows.put("job", job_id, job.model_copy(update={"last_run_id": run.id}).model_dump_json(), host=self._host)
            return self._begin(run, lambda under_way: self._back_up(under_way, job))

    def _check_idle(self, job: BackupJob) -> None:
        if job.last_run_id is not None and self.run(job.last_run_id).status not in ENDS:
            raise BackupConflict(f"job {job.name} runs already: run {job.last_run_id}", hint="wait for it, or cancel it")

    def run(self, run_id: UUID) -> BackupRun:
        return self._with_figures(BackupRun.model_validate_json(self._rows.get("run", run_id, host=self._host)))

    def runs(self, *, limit: int, cursor: int | None) -> tuple[list[BackupRun], int | None]:
        texts, following = self._rows.page("run", host=self._host, limit=limit, cursor=cursor)
        return [self._with_figures(BackupRun.model_validate_json(text)) for text in texts], following

    def jobs(self, *, limit: int, cursor: int | None) -> tuple[list[BackupJob], int | None]:
        texts, following = self._rows.page("job", host=self._host, limit=limit, cursor=cursor)
        return [BackupJob.model_validate_json(text) for text in texts], following

    def cancel(self, run_id: UUID) -> BackupRun:
        """BackupConflict, where it has ended."""
        with self._lock:
            run = self.run(run_id)
            if run.status in ENDS:
                raise BackupConflict(f"run {run_id} has ended: it is {run.status}")
            self._stops.get(run_id, threading.Event()).set()
        return run

    def _with_figures(self, run: BackupRun) -> BackupRun:
        figures = self._figures.get(run.id)
        return run if figures is None or run.status in ENDS else run.model_copy(update={"progress": figures})

    def _begin(self, run: BackupRun, work: Callable[["_UnderWay"], None]) -> BackupRun:
        """With the lock held."""
        if self._closing:
            raise BackupConflict("the service is being stopped")
        self._save(run)
        self._stops[run.id] = threading.Event()
        self._pool.submit(self._do, run, work)
        return run

    def _do(self, run: BackupRun, work: Callable[["_UnderWay"], None]) -> None:
        under_way = _UnderWay(run, self._stops[run.id].is_set, self._save, self._figures)
        try:
            under_way.move(Status.PREPARING, started_at=now())
            work(under_way)
            self._end(under_way.run, None)
        except Exception as error:
            if self._closing:
                return
            known = error if isinstance(error, SynvirtError) else Internal("something unexpected went wrong in the run")
            if known is not error:
                _log.error("a backup run broke", run=str(run.id), exc_info=error)
            with contextlib.suppress(SynvirtError):  # the store is gone: the next start will say it
                self._end(under_way.run, known)
        finally:
            self._stops.pop(run.id, None)
            self._figures.pop(run.id, None)

    def _end(self, run: BackupRun, error: SynvirtError | None) -> None:
        status = Status.COMPLETED if error is None else Status.CANCELLED if isinstance(error, Cancelled) else Status.FAILED
        progress = self._figures.get(run.id, run.progress)
        if error is not None and run.path is not None:
            shutil.rmtree(self._exports / Path(run.path).name, ignore_errors=True)
        trouble = None if error is None else Trouble(code=error.code, message=error.detail, hint=error.hint)
        self._save(run.model_copy(update={"status": status, "finished_at": now(), "progress": progress, "error": trouble}))

    def _save(self, run: BackupRun) -> None:
        self._rows.put("run", run.id, run.model_dump_json(), host=self._host, state=str(run.status))

    # ── a backup ─────────────────────────────────────────────────────────────────────────────────────────────────────

    def _back_up(self, under_way: "_UnderWay", job: BackupJob) -> None:
        known = self.repositories.get(job.repository_id)
        repository = self.repositories.opened(job.repository_id)
        for vm_id in job.vm_ids:
            session = repository.session()
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
            self._put_point(_point(manifest, known, stored_bytes=session.stored_bytes))
            under_way.move(Status.COMMITTING, restore_point_ids=(*under_way.run.restore_point_ids, manifest.shown.id))
            self._retire(under_way, job, manifest.sealed.vm_id)

    def _retire(self, under_way: "_UnderWay", job: BackupJob, vm_id: str) -> None:
        """The new point is there: what goes wrong from here on is a warning."""
        mine = [point for point in self._points() if point.job_id == job.id and point.vm_id == vm_id]
        staying = garbage.kept(((point.id, point.created_at) for point in mine), job.retention)
        repository = self.repositories.opened(job.repository_id)
        try:
            for point in mine:
                if point.id not in staying:
                    repository.remove(point.id)
                    self._rows.remove("point", point.id, host=self._host)
            garbage.collect(repository, now=now().timestamp())
        except SynvirtError as error:
            under_way.warn(error.code, f"old restore points were not removed: {error.detail}", vm_id)

    # ── restore points ───────────────────────────────────────────────────────────────────────────────────────────────

    def point(self, point_id: UUID) -> RestorePoint:
        return RestorePoint.model_validate_json(self._rows.get("point", point_id, host=self._host))

    def points(self, *, limit: int, cursor: int | None) -> tuple[list[RestorePoint], int | None]:
        texts, following = self._rows.page("point", host=self._host, limit=limit, cursor=cursor)
        return [RestorePoint.model_validate_json(text) for text in texts], following

    def _points(self) -> list[RestorePoint]:
        return [RestorePoint.model_validate_json(text) for text in self._rows.all("point", host=self._host)]

    def _put_point(self, point: RestorePoint) -> None:
        self._rows.put("point", point.id, point.model_dump_json(), host=self._host)

    def remove_point(self, point_id: UUID) -> None:
        """Its bytes are collected by a later run of a job that writes there."""
        point = self.point(point_id)
        self.repositories.opened(point.repository_id).remove(point_id)
        self._rows.remove("point", point_id, host=self._host)

    def verify(self, point_id: UUID) -> BackupRun:
        with self._lock:
            self.point(point_id)
            run = BackupRun(id=uuid4(), kind="verify", created_at=now(), restore_point_ids=(point_id,))
            return self._begin(run, lambda under_way: self._verify(under_way, point_id))

    def _verify(self, under_way: "_UnderWay", point_id: UUID) -> None:
        point = self.point(point_id)
        under_way.move(Status.TRANSFERRING)
        try:
            wrong = verify_point(
                self.repositories.opened(point.repository_id),
                point_id,
                stop=under_way.stop,
                on_progress=lambda count: under_way.figure(point.size_bytes, count),
            )
        except (BackupNotFound, RepositoryDamaged) as error:
            wrong = error.detail
        self._put_point(point.model_copy(update={"state": "damaged" if wrong else "ok", "verified_at": now()}))
        if wrong:
            raise RepositoryDamaged(wrong, hint="back the guest up anew; other points may be whole: verify them")

    def restore(self, point_id: UUID, asked: RestoreRequest) -> BackupRun:
        with self._lock:
            point = self.point(point_id)
            unknown = set(asked.disks) - {disk.target for disk in point.disks}
            if unknown:
                raise BackupBadRequest(f"the restore point has no disk {sorted(unknown)[0]}")
            run_id = uuid4()
            folder = self._exports / (asked.name or str(run_id))
            try:
                folder.mkdir(parents=True, mode=0o750)  # the run's own from here on: what fails is swept with it
            except FileExistsError as error:
                raise BackupConflict(f"exports/{folder.name} is there already", hint="choose another name") from error
            except OSError as error:
                raise BackupBadRequest(f"exports/{folder.name} cannot be made: {error.strerror}") from error
            run = BackupRun(
                id=run_id, kind="restore", created_at=now(), restore_point_ids=(point_id,), path=f"exports/{folder.name}"
            )
            return self._begin(run, lambda under_way: self._export(under_way, point, asked.disks, folder))

    def _export(self, under_way: "_UnderWay", point: RestorePoint, targets: tuple[str, ...], folder: Path) -> None:
        repository = self.repositories.opened(point.repository_id)
        manifest = repository.manifest(point.id)
        try:
            (folder / "domain.xml").write_text(manifest.sealed.domain_xml)
        except OSError as error:
            raise DiskWriteFailed(f"exports/{folder.name} cannot be written: {error.strerror}") from error
        under_way.move(Status.TRANSFERRING)
        done = _Sum(under_way)
        for number, (disk, named) in enumerate(zip(manifest.shown.disks, manifest.sealed.disks, strict=True)):
            if targets and named.target not in targets:
                continue
            reader = PointReader(repository, disk)
            # The target comes from a domain's XML: of it only what a file name may have.
            name = f"{number}-{''.join(letter for letter in named.target if letter.isalnum())}.raw"
            with new_file(folder / name, disk.size_bytes) as writer:
                copy(reader, writer, stop=under_way.stop, on_progress=done.next_disk())


def _copied(guest: Guest, session: Session, under_way: "_UnderWay") -> list[DiskMap]:
    maps, done = [], _Sum(under_way)
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


def _point(manifest: Manifest, known: BackupRepository, *, stored_bytes: int) -> RestorePoint:
    shown, inside = manifest.shown, manifest.sealed
    return RestorePoint.model_validate(
        {
            **{name: getattr(inside, name) for name in ("vm_id", "vm_name", "job_id", "run_id", "quiesced", "consistency")},
            "id": shown.id,
            "created_at": shown.created_at,
            "repository_id": known.id,
            "repository_kind": known.kind,
            "disks": tuple(PointDisk(target=disk.target, size_bytes=disk.size_bytes) for disk in inside.disks),
            "size_bytes": sum(disk.size_bytes for disk in inside.disks),
            "stored_bytes": stored_bytes,
        }
    )


class _UnderWay:
    """A run as its own thread sees it."""

    def __init__(
        self,
        run: BackupRun,
        stop: Callable[[], bool],
        save: Callable[[BackupRun], None],
        figures: dict[UUID, BackupProgress],
    ) -> None:
        self.run, self.stop = run, stop
        self._save, self._figures = save, figures

    def move(self, status: Status, **changes: Any) -> None:
        """Cancelled, where that is asked."""
        if self.stop():
            raise Cancelled
        progress = self._figures.get(self.run.id, self.run.progress)
        self.run = self.run.model_copy(update={"status": status, "progress": progress, **changes})
        self._save(self.run)

    def warn(self, code: str, message: str, vm_id: str) -> None:
        trouble = Trouble(code=code, message=message, vm_id=vm_id)
        self.run = self.run.model_copy(update={"warnings": (*self.run.warnings, trouble)})
        self._save(self.run)

    def figure(self, total: int, done: int) -> None:
        self._figures[self.run.id] = BackupProgress(bytes_total=max(total, done), bytes_done=done)


class _Sum:
    """The figures of several copies, one after the other."""

    def __init__(self, under_way: _UnderWay) -> None:
        self._under_way = under_way
        self._each: list[Copied] = []

    def next_disk(self) -> Callable[[Copied], None]:
        number = len(self._each)
        self._each.append(Copied(0, 0, 0, 0))

        def progressed(copied: Copied) -> None:
            self._each[number] = copied
            self._under_way.figure(sum(one.bytes_total for one in self._each), sum(one.bytes_done for one in self._each))

        return progressed


@contextlib.contextmanager
def running(backups: Backups) -> Iterator[Backups]:
    backups.start()
    try:
        yield backups
    finally:
        backups.close()
