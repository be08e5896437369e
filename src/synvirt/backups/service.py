"""Backups for the API, the page and the command line: jobs, runs, restore points and repositories.

    service.py ─┬─ repositories.py   where backups lie, and their keys
                ├─ jobs.py           what is asked for, and when by itself (scheduling.py)
                ├─ points.py         the restore points that are known, and which of them go (retiring.py)
                └─ runs.py           threads that do what a run's kind says (kinds.py)

A point is registered after its manifest exists; points of an existing repository are registered when it is added.
"""

import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from datetime import datetime, timedelta
from pathlib import Path
from typing import Literal
from uuid import UUID, uuid4

import structlog

from synvirt.acting import bring, submitter
from synvirt.backups import jobs as of_jobs
from synvirt.backups.adopting import Adopting
from synvirt.backups.backing_up import BackingUp, OpenGuest
from synvirt.backups.jobs import Jobs
from synvirt.backups.kinds import READS, Kinds, being_read
from synvirt.backups.limits import Limits
from synvirt.backups.memory import Memory
from synvirt.backups.model import (
    ENDS,
    BackupJob,
    BackupJobChange,
    BackupJobRequest,
    BackupRepository,
    BackupRepositoryChange,
    BackupRepositoryRequest,
    BackupRun,
    CollectRequest,
    PointFate,
    RestorePoint,
    RestorePointChange,
    RestoreRequest,
    Trigger,
)
from synvirt.backups.offers import Offers
from synvirt.backups.points import Points
from synvirt.backups.repositories import Check, Repositories, unchecked
from synvirt.backups.restores.boot_test import BootTesting
from synvirt.backups.restores.host import RestoreHost
from synvirt.backups.restores.restoring import Restoring
from synvirt.backups.retiring import Retiring
from synvirt.backups.runs import RUNS_AT_ONCE, Runs
from synvirt.backups.upkeep import Upkeep
from synvirt.backups.working import Working
from synvirt.errors import BackupBadRequest, BackupConflict, BackupNotFound, SynvirtError
from synvirt.model.values import now
from synvirt.store.backups import BackupRows, Row
from synvirt.store.documents import Unreadable

_log = structlog.get_logger("synvirt.backups")

# After a lost lease: seconds between checks whether all interrupted runs have ended.
RESUME_EVERY_S = 2.0


class Backups:
    """`exports` and `export_roots`: the folders that exports may be written to. `restore_host`: where guests are restored.
    `guest_id`: the id of the guest with a name or UUID; BackupNotFound, if there is none. `forget_job`: removes what is kept of
    guests for a job's next run. `working`: the workers that copy. `journals`: see BackingUp. `limits`: how many runs of all
    hosts copy at once; None: no limit. `offers`: what this host stores for others. `not_renewed`: the
    failure of the store that keeps this host from having a lease."""

    def __init__(
        self,
        rows: BackupRows,
        repositories: Repositories,
        *,
        host: str,
        open_guest: OpenGuest,
        guest_id: Callable[[str], str] = str,
        exports: Path,
        export_roots: tuple[Path, ...] = (),
        restore_host: RestoreHost | None = None,
        forget_job: Callable[[UUID], None] = lambda _: None,
        working: Working | None = None,
        journals: Path | None = None,
        limits: Limits | None = None,
        offers: Offers | None = None,
        not_renewed: Callable[[], SynvirtError | None] = lambda: None,
    ) -> None:
        self.offers, self.not_renewed = offers or Offers(), not_renewed
        self.repositories, self._forget_job, self._guest_id = repositories, forget_job, guest_id
        self._working, self._limits = working or Working(), limits
        self.points, self._memory = Points(rows, host=host), Memory(rows, host=host)
        self._jobs, self._adopting = Jobs(rows, host=host), Adopting(repositories, self.points)
        self.retiring = Retiring(repositories, self.points, self.remove_point, in_use=lambda: being_read(self.runs.not_ended()))
        upkeep = Upkeep(repositories, self.points, self._memory, self._working, limits=limits)
        self._cut_off: list[BackupRun] = []
        self._backing_up = BackingUp(
            repositories,
            self.points,
            self.retiring,
            open_guest,
            working=self._working,
            collect=upkeep.collect_after,
            journals=journals,
            adopt=self._adopting.adopt,
            unsure=self._cut_off.append,
            limits=limits,
        )
        roots = (exports, *export_roots)
        self._restoring = Restoring(
            rows,
            self._memory,
            repositories,
            self._working,
            host=host,
            roots=roots,
            restore_host=restore_host,
            limits=limits,
        )
        self._kinds = Kinds(
            self._jobs,
            self.points,
            self._memory,
            self._backing_up,
            self._restoring,
            upkeep,
            testing=self._testing,
            succeeded=self._succeeded,
        )
        self.runs = Runs(
            rows,
            self._kinds.all(),
            host=host,
            at_once=RUNS_AT_ONCE if limits is None else limits.per_host,
            lease_lost=self._lease_lost,
            memory=self._memory,
            ledger=self._restoring.ledger,
            kept=self._restoring.kept,
        )
        self._restore_host = restore_host
        self._pauses = 0
        # The points that are being removed from their repositories.
        self._leaving: set[UUID] = set()
        # Jobs whose points are being removed, and repositories whose key is being changed: no run of them begins meanwhile.
        self._held: set[UUID] = set()

    # ── start, pause, end ────────────────────────────────────────────────────────────────────────────────────────────

    def start(self) -> None:
        """Call it once, before any request."""
        self._cut_off += self.runs.start()
        if self._restore_host is not None:
            self._testing().forget(self.points.ids())

    def pause(self) -> None:
        """This host has lost its lease: on return none of its runs goes on, and none begins."""
        self._pauses += 1
        self.runs.pause()

    def _lease_lost(self) -> SynvirtError:
        lost = BackupConflict("this host has lost its lease", hint="see the list of hosts; it gets a new lease by itself")
        return self.not_renewed() or lost

    def resume(self) -> None:
        """The lease is held again. Returns at once: the runs continue as soon as the interrupted ones have ended."""
        threading.Thread(target=self._resume, args=(self._pauses,), name="backup-resume", daemon=True).start()

    def _resume(self, pauses: int) -> None:
        while self._pauses == pauses:  # else the lease was lost once more
            try:
                if self.runs.let_go(RESUME_EVERY_S):
                    with self.runs.lock:
                        if self._pauses == pauses:
                            self.runs.resumed()
                            self._cut_off += self.runs.start(counted=False)
                    return
            except Exception as error:  # nobody else takes them up
                _log.warning("runs cannot be taken up yet", cause=str(error), exc_info=not isinstance(error, SynvirtError))
                time.sleep(RESUME_EVERY_S)

    def look(self) -> None:
        """Called now and then, in a thread of its own: it may take as long as a repository does."""
        self._look_after_cut_off()
        self.run_due(now())

    def _look_after_cut_off(self) -> None:
        """Between a point's manifest and its registration the service may be killed, or the repository go away: that leaves a
        complete point that is not registered."""
        while self._cut_off:
            run = self._cut_off[-1]
            if run.kind == "backup" and run.repository_id is not None:
                try:
                    self._adopting.adopt(self.repositories.get(run.repository_id), run)
                except BackupNotFound:
                    pass  # it was forgotten meanwhile
                except SynvirtError as error:
                    _log.warning("what a run left cannot be looked for", run=str(run.id), detail=error.detail)
                    return  # the repository is away: tried again the next time
            self._cut_off.remove(run)

    def close(self) -> None:
        """Stops the runs; the next start notes that they were interrupted."""
        self.runs.close()
        self.repositories.close()

    # ── repositories and their jobs ──────────────────────────────────────────────────────────────────────────────────

    def add_repository(self, asked: BackupRepositoryRequest) -> BackupRepository:
        """Registers a repository, and the restore points in it."""
        made = self.repositories.add(asked)
        self._adopting.adopt(made)
        return made

    def change_key(self, repository_id: UUID) -> str:
        """Changes the key and returns the new recovery key. BackupConflict, while a run uses the old one."""
        with self._no_run_of(repository_id, lambda: self._check_unused(repository_id)):
            return self.repositories.change_key(repository_id)

    def change_repository(self, id_: UUID, asked: BackupRepositoryChange, check: Check = unchecked) -> BackupRepository:
        """Renames it, or says where it lies now, and registers the points there. BackupConflict, while a run uses it."""
        with self._no_run_of(id_, lambda: self._check_unused(id_)):
            made = self.repositories.change(id_, asked, check)
            if asked.path is not None or asked.peer is not None:
                self._adopting.adopt(made)
            return made

    @contextlib.contextmanager
    def _no_run_of(self, id_: UUID, check: Callable[[], object]) -> Iterator[None]:
        """Within the block no run of that job or repository begins. `check` raises, where one is under way. The block itself is
        without the lock: a server that hangs must not keep all runs from beginning."""
        with self.runs.lock:
            check()
            self._held.add(id_)
        try:
            yield
        finally:
            self._held.discard(id_)

    def _refuse_held(self, *ids: UUID | None) -> None:
        if not self._held.isdisjoint(ids):
            raise BackupConflict(
                "the repository is being forgotten, or is being changed, or points of the job are being removed",
                hint="try again when that is done",
            )

    def _check_unused(self, repository_id: UUID) -> None:
        self._refuse_held(repository_id)
        busy = [run for run in self.runs.not_ended() if self._kinds.uses(run, repository_id)]
        if busy:
            raise BackupConflict(f"run {busy[0].id} uses this repository", hint="wait for it, or cancel it")

    def forget_repository(self, repository_id: UUID, check: Check = unchecked) -> None:
        """BackupConflict, while a job writes to it, or a run uses it. Its points stay there; only the store forgets them."""
        self.repositories.get(repository_id)
        with self._no_run_of(repository_id, lambda: self._check_unused(repository_id)):
            check(*self.repositories.stored(repository_id))
            if any(job.repository_id == repository_id for job in self._jobs.all()):  # no job is added within this block
                raise BackupConflict("jobs write to this repository", hint="remove them first")
            gone = {point.id for point in self.points.all({"repository_id": [str(repository_id)]})}
            for point_id in gone:
                self.points.forget(point_id)
            self.repositories.forget(repository_id)
        self._adopting.forgotten(gone)

    def add_job(self, asked: BackupJobRequest) -> BackupJob:
        """BackupNotFound: its repository. BackupConflict: another job has its name. BackupBadRequest: its guests."""
        self.repositories.get(asked.repository_id)
        self._check_guests(asked.vm_ids)
        with self.runs.lock:
            self._refuse_held(asked.repository_id)
            self.repositories.get(asked.repository_id)  # it may have been forgotten since the check
            self._check_name(asked.name)
            return self._jobs.add(asked)

    def _check_name(self, name: str) -> None:
        if any(job.name == name for job in self._jobs.all()):
            raise BackupConflict(f"a job is named {name!r} already", hint="choose another name, or change that job")

    def _check_guests(self, vm_ids: tuple[str, ...]) -> None:
        """Checks that each guest exists, and none comes twice: its two points of one run would be the same."""
        named: dict[str, str] = {}
        for vm_id in vm_ids:
            try:
                guest = self._guest_id(vm_id)
            except BackupNotFound as error:
                raise BackupBadRequest(f"vm_ids: {error.detail}", hint=error.hint) from error
            if guest in named:
                raise BackupBadRequest(f"vm_ids: {named[guest]} and {vm_id} are one guest", hint="name each guest once")
            named[guest] = vm_id

    def job(self, job_id: UUID) -> BackupJob:
        """BackupNotFound."""
        return self._jobs.get(job_id)

    def jobs(self, *, limit: int, cursor: int | None) -> tuple[list[BackupJob], int | None]:
        return self._jobs.page(limit=limit, cursor=cursor)

    def all_jobs(self) -> list[BackupJob]:
        return self._jobs.all()

    def change_job(
        self, job_id: UUID, asked: BackupJobChange, *, check: Callable[[BackupJob], None] = lambda job: None
    ) -> BackupJob:
        """BackupNotFound; BackupConflict, BackupBadRequest as for a new job. `check`: raises, where the job as it is stays."""
        job = self.job(job_id)
        if "vm_ids" in asked.model_fields_set and asked.vm_ids != job.vm_ids:
            self._check_guests(asked.vm_ids)
        with self.runs.lock:
            if "name" in asked.model_fields_set and asked.name != self.job(job_id).name:
                self._check_name(asked.name)
            return self._jobs.change(job_id, asked, check)

    def remove_job(self, job_id: UUID, *, check: Callable[[BackupJob], None] = lambda job: None) -> None:
        """Its restore points stay. BackupConflict, while it runs. `check`: as for a change."""
        with self.runs.lock:
            self._check_idle(self.job(job_id))
            job = self.job(job_id)
            self._jobs.remove(job_id, check)
        self._backing_up.forget(job)
        self._forget_job(job_id)

    def run_job(self, job_id: UUID) -> BackupRun:
        """Begins a run of the job at once. BackupConflict, if one is running."""
        with self.runs.lock:
            job = self.job(job_id)
            self._check_idle(job)
            return self._run(job, "asked")

    def remove_run(self, run_id: UUID) -> None:
        """BackupConflict, if it has not ended."""
        with self.runs.lock:
            run = self.runs.get(run_id)
            if run.status not in ENDS:
                raise BackupConflict(f"run {run_id} has not ended: it is {run.status}", hint="cancel it first")
            self._jobs.forget_run(run_id)  # first: the schedule looks their last runs up
            self.runs.remove(run_id)

    def remove_older_runs(self, days: float) -> None:
        """Removes the runs of this host that ended this many days ago, but the last one of each job. Never raises."""
        try:
            last = {job.last_run_id for job in self._jobs.all()}
            for run in self.runs.ended_before(now() - timedelta(days=days)):
                with contextlib.suppress(BackupConflict, BackupNotFound):
                    if run.id not in last:
                        self.remove_run(run.id)
        except SynvirtError as error:
            _log.warning("old runs cannot be removed now", cause=error.detail)

    def run_due(self, moment: datetime) -> list[BackupRun]:
        """Runs the jobs whose time has come. A run is written with the note that its time is done: so none runs twice."""
        begun = []
        with self.runs.lock:
            jobs = self._jobs.all()
            last_runs = self.runs.as_stored([job.last_run_id for job in jobs if job.schedule and job.last_run_id])
            for known in jobs:
                job = of_jobs.righted(known, moment)
                if not self._held.isdisjoint({job.id, job.repository_id}):
                    continue  # its time stays: it begins at a later look
                last = None if job.last_run_id is None else last_runs.get(job.last_run_id)
                if isinstance(last, Unreadable):
                    _log.warning("a backup job is left alone", job=str(job.id), cause=last.detail)
                    continue
                trigger = of_jobs.due(job, last, moment)
                if trigger is not None:
                    begun.append(self._run(job.model_copy(update={"scheduled_to": moment}), trigger))
                elif of_jobs.time_has_come(job, moment):
                    _log.warning("a backup job still runs when its time has come again", job=str(job.id), name=job.name)
                    self._jobs.put(job.model_copy(update={"scheduled_to": moment}))
                elif job != known:
                    self._jobs.put(job)
        return begun

    def _run(self, job: BackupJob, trigger: Trigger) -> BackupRun:
        self._refuse_held(job.id, job.repository_id)
        run = BackupRun(
            id=uuid4(),
            submitted_by=submitter(),
            job_id=job.id,
            repository_id=job.repository_id,
            trigger=trigger,
            attempt=2 if trigger == "again" else 1,
            created_at=now(),
        )
        row = self._jobs.row(job.model_copy(update={"last_run_id": run.id}))
        return self.runs.begin(run, with_=(row,))

    def _succeeded(self, job_id: UUID) -> None:
        with self.runs.lock:  # the job may have been changed meanwhile
            self._jobs.put(self.job(job_id).model_copy(update={"last_success_at": now()}))

    def _check_idle(self, job: BackupJob) -> None:
        self._refuse_held(job.id)
        if job.last_run_id is not None and self.runs.get(job.last_run_id).status not in ENDS:
            raise BackupConflict(f"job {job.name} runs already: run {job.last_run_id}", hint="wait for it, or cancel it")

    def retire(self, job_id: UUID) -> list[PointFate]:
        """Applies retention, as at each run's end. BackupConflict, while it runs."""
        with self._no_run_of(job_id, lambda: self._check_idle(self.job(job_id))):
            return self.retiring.retire(self.job(job_id))

    # ── restore points ───────────────────────────────────────────────────────────────────────────────────────────────

    def remove_point(self, point_id: UUID, *, check: Callable[[RestorePoint], None] = lambda point: None) -> None:
        """Removes the point. A later run of a job that writes there collects its bytes. BackupConflict, while a run reads it,
        or if it is protected. `check`: raises, where the point as it is stays."""
        with self.runs.lock:
            check(point := self.points.get(point_id))
            if point_id in self._leaving:
                raise BackupConflict(f"restore point {point_id} is being removed already")
            if (run := being_read(self.runs.not_ended()).get(point_id)) is not None:
                raise BackupConflict(
                    f"restore point {point_id} is being {READS[run.kind]} by run {run.id}",
                    hint="wait for that run, or cancel it",
                )
            self._leaving.add(point_id)  # from here on no run begins to read it
        try:
            # Without the lock: a server that hangs must not keep all runs from beginning.
            self.repositories.opened(point.repository_id).remove(point_id)
            self.points.forget(point_id)
        finally:
            self._leaving.discard(point_id)

    def protect(
        self, point_id: UUID, asked: RestorePointChange, *, check: Callable[[RestorePoint], None] = lambda point: None
    ) -> RestorePoint:
        """Protects a point, or ends that. `check`: raises, where the point as it is stays."""
        return self.retiring.protect(point_id, check, protected=asked.protected)

    def verify(self, point_id: UUID) -> BackupRun:
        """Begins a run that reads every chunk of a restore point."""
        return self._begin(self._of_point("verify", self.points.get(point_id)))

    def verify_repository(self, repository_id: UUID) -> BackupRun:
        """Begins a run that reads all of a repository."""
        known = self.repositories.get(repository_id)
        run = BackupRun(id=uuid4(), submitted_by=submitter(), kind="verify", created_at=now(), repository_id=known.id)
        return self._begin(run)

    def collect(self, repository_id: UUID, *, dry_run: bool, bandwidth_bps: int | None = None) -> BackupRun:
        """Begins a run that removes what no restore point needs; with `dry_run` it only counts it."""
        known = self.repositories.get(repository_id)
        run = BackupRun(id=uuid4(), submitted_by=submitter(), kind="collect", created_at=now(), repository_id=known.id)
        asked = CollectRequest(dry_run=dry_run, bandwidth_bps=bandwidth_bps)
        return self._begin(run, Memory.request(run.id, asked))

    def restore(self, point_id: UUID, asked: RestoreRequest) -> BackupRun:
        """Begins a restore. An impossible one is refused at once."""
        point = self.points.get(point_id)
        bring(asked)
        run = self._of_point("restore", point)
        return self._begin(self._restoring.asked(run, point, asked), Memory.request(run.id, asked), asked=asked)

    def boot_test(self, point_id: UUID) -> BackupRun:
        """Begins a boot test of a restore point."""
        point = self.points.get(point_id)
        self._testing()
        return self._begin(self._of_point("boot_test", point))

    @staticmethod
    def _of_point(kind: Literal["verify", "restore", "boot_test"], point: RestorePoint) -> BackupRun:
        return BackupRun(
            id=uuid4(),
            submitted_by=submitter(),
            kind=kind,
            created_at=now(),
            restore_point_ids=(point.id,),
            repository_id=point.repository_id,
        )

    def _begin(self, run: BackupRun, *with_: Row, asked: RestoreRequest | None = None) -> BackupRun:
        with self.runs.lock:
            self._refuse_held(run.repository_id)
            for point_id in run.restore_point_ids:
                self.points.get(point_id)  # it may have been removed since the check
                if point_id in self._leaving:
                    raise BackupNotFound(f"restore point {point_id} is being removed")
            if asked is not None:
                self._kinds.refuse_same(run, asked, self.runs.not_ended())
            return self.runs.begin(run, with_=with_)

    def screenshot(self, point_id: UUID) -> bytes | None:
        """The picture of the point's last boot test."""
        self.points.get(point_id)
        return self._testing().screenshot(point_id)

    def _testing(self) -> BootTesting:
        if self._restore_host is None:
            raise BackupBadRequest("this service has no hypervisor to start a guest on")
        return BootTesting(
            self._restore_host,
            self.points,
            self._working,
            self.repositories,
            ledger=self._restoring.ledger,
            memory=self._memory,
            limits=self._limits,
        )
