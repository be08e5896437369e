"""Backups as the API, the page and the command line meet them: jobs, runs, restore points and repositories.

    service.py ─┬─ repositories.py   where backups lie, and their keys
                ├─ points.py         the restore points that are known
                └─ runs.py           threads that do: backing_up.py, restoring.py, verify.py

A point is registered after its manifest is there; those of a repository that is used again are when it is added.
"""

import contextlib
from collections.abc import Iterator
from pathlib import Path
from uuid import UUID, uuid4

import structlog

from synvirt.backups.backing_up import BackingUp, OpenGuest
from synvirt.backups.boot_test import BootTesting
from synvirt.backups.ground import Ground
from synvirt.backups.model import (
    ENDS,
    BackupJob,
    BackupJobRequest,
    BackupRepository,
    BackupRepositoryRequest,
    BackupRun,
    RestoreRequest,
    Status,
)
from synvirt.backups.points import Points, point_of
from synvirt.backups.repositories import Repositories
from synvirt.backups.restoring import Restoring
from synvirt.backups.runs import Runs
from synvirt.backups.under_way import UnderWay
from synvirt.backups.verify import verify_point
from synvirt.errors import BackupBadRequest, BackupConflict, BackupNotFound, RepositoryDamaged, SynvirtError
from synvirt.model import now
from synvirt.store.backups import BackupRows, Row

_log = structlog.get_logger("synvirt.backups")


class Backups:
    """`exports`, and `export_roots` beside it: beneath which exports may be written. `ground`: what guests are restored on."""

    def __init__(
        self,
        rows: BackupRows,
        repositories: Repositories,
        *,
        host: str,
        open_guest: OpenGuest,
        exports: Path,
        export_roots: tuple[Path, ...] = (),
        ground: Ground | None = None,
    ) -> None:
        self._rows, self.repositories, self._host = rows, repositories, host
        self.points, self.runs = Points(rows, host=host), Runs(rows, host=host)
        self._backing_up = BackingUp(repositories, self.points, open_guest)
        self._restoring = Restoring(rows, host=host, roots=(exports, *export_roots), ground=ground)
        self._ground = ground

    def start(self) -> None:
        """Once, before anything is asked."""
        self.runs.start()
        self._restoring.undoing.sweep_all()
        if self._ground is not None:
            self._testing().forget({point.id for point in self.points.all()})

    def close(self) -> None:
        """Runs under way stop; the next start says that they were cut off."""
        self.runs.close()

    # ── repositories and their jobs ──────────────────────────────────────────────────────────────────────────────────

    def add_repository(self, asked: BackupRepositoryRequest) -> BackupRepository:
        made = self.repositories.add(asked)
        self._adopt(made)
        return made

    def _adopt(self, known: BackupRepository) -> None:
        repository = self.repositories.opened(known.id)
        for point_id in repository.point_ids():
            try:
                point = point_of(repository.manifest(point_id), known, stored_bytes=0)
            except SynvirtError as error:
                _log.warning("a restore point cannot be read", point=str(point_id), detail=error.detail)
                continue
            self.points.put(point)

    def forget_repository(self, repository_id: UUID) -> None:
        """BackupConflict while a job writes to it. Its points are forgotten, and stay where they are."""
        self.repositories.get(repository_id)
        if any(job.repository_id == repository_id for job in self._jobs()):
            raise BackupConflict("jobs write to this repository", hint="remove them first")
        for point in self.points.all():
            if point.repository_id == repository_id:
                self.points.forget(point.id)
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
        with self.runs.lock:
            self._check_idle(self.job(job_id))
            self._rows.remove("job", job_id, host=self._host)

    def _jobs(self) -> list[BackupJob]:
        return [BackupJob.model_validate_json(text) for text in self._rows.all("job", host=self._host)]

    def run_job(self, job_id: UUID) -> BackupRun:
        with self.runs.lock:
            job = self.job(job_id)
            self._check_idle(job)
            run = BackupRun(id=uuid4(), job_id=job_id, created_at=now())
            row = Row("job", job_id, job.model_copy(update={"last_run_id": run.id}).model_dump_json())
            return self.runs.begin(run, lambda under_way: self._backing_up.back_up(under_way, job), with_=(row,))

    def _check_idle(self, job: BackupJob) -> None:
        if job.last_run_id is not None and self.runs.get(job.last_run_id).status not in ENDS:
            raise BackupConflict(f"job {job.name} runs already: run {job.last_run_id}", hint="wait for it, or cancel it")

    def jobs(self, *, limit: int, cursor: int | None) -> tuple[list[BackupJob], int | None]:
        texts, following = self._rows.page("job", host=self._host, limit=limit, cursor=cursor)
        return [BackupJob.model_validate_json(text) for text in texts], following

    # ── restore points ───────────────────────────────────────────────────────────────────────────────────────────────

    def remove_point(self, point_id: UUID) -> None:
        """Its bytes are collected by a later run of a job that writes there."""
        point = self.points.get(point_id)
        self.repositories.opened(point.repository_id).remove(point_id)
        self.points.forget(point_id)

    def verify(self, point_id: UUID) -> BackupRun:
        with self.runs.lock:
            self.points.get(point_id)
            run = BackupRun(id=uuid4(), kind="verify", created_at=now(), restore_point_ids=(point_id,))
            return self.runs.begin(run, lambda under_way: self._verify(under_way, point_id))

    def _verify(self, under_way: UnderWay, point_id: UUID) -> None:
        point = self.points.get(point_id)
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
        self.points.put(point.model_copy(update={"state": "damaged" if wrong else "ok", "verified_at": now()}))
        if wrong:
            raise RepositoryDamaged(wrong, hint="back the guest up anew; other points may be whole: verify them")

    def restore(self, point_id: UUID, asked: RestoreRequest) -> BackupRun:
        point = self.points.get(point_id)
        run = BackupRun(id=uuid4(), kind="restore", created_at=now(), restore_point_ids=(point_id,))
        run, restore = self._restoring.prepared(run, point, asked)
        with self.runs.lock:
            return self.runs.begin(run, lambda under_way: restore(under_way, self.repositories.opened(point.repository_id)))

    def boot_test(self, point_id: UUID) -> BackupRun:
        point, testing = self.points.get(point_id), self._testing()
        run = BackupRun(id=uuid4(), kind="boot_test", created_at=now(), restore_point_ids=(point_id,))
        with self.runs.lock:
            return self.runs.begin(
                run, lambda under_way: testing.test(under_way, self.repositories.opened(point.repository_id), point)
            )

    def screenshot(self, point_id: UUID) -> bytes | None:
        """Of the point's last boot test."""
        self.points.get(point_id)
        return self._testing().screenshot(point_id)

    def _testing(self) -> BootTesting:
        if self._ground is None:
            raise BackupBadRequest("this service has no hypervisor to start a guest on")
        return BootTesting(self._ground, self._restoring.undoing, self.points)


@contextlib.contextmanager
def running(backups: Backups) -> Iterator[Backups]:
    backups.start()
    try:
        yield backups
    finally:
        backups.close()
