"""Intake: a plan becomes a job here, and an operator's request reaches a job. Blocking code, called by the API.

A plan is refused here if a quick check shows that it cannot work (a path outside the import root, a file of another kind). The
job itself does the slower checks, in Queued.
"""

from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any
from uuid import UUID, uuid4

from synvirt.acting import bring, submitter
from synvirt.errors import Conflict, Internal
from synvirt.jobs.board import Board
from synvirt.jobs.instant import GuestWrites, refuse_loss
from synvirt.machines.texts import clean
from synvirt.migrations.hosts.taking_over import TakingOver
from synvirt.migrations.planning.cutting_over import check_window
from synvirt.migrations.planning.foreseen import DryRun, Foreseen, foresee, networks_and_host, refuse
from synvirt.migrations.planning.repairable import refuse_second
from synvirt.migrations.planning.retrying import corrected, has_kept_copy, is_taken_up, taken_up
from synvirt.migrations.planning.taken import refuse_taken
from synvirt.migrations.removing import Removal, Volumes
from synvirt.migrations.rooms import Rooms
from synvirt.migrations.secrets import JobSecrets
from synvirt.model.job import DiskProgress, Migration, Progress, StateVisit
from synvirt.model.kinds import Mode, State
from synvirt.model.machine import VmManifest
from synvirt.model.plan import MigrationPlan
from synvirt.model.repair import Repair
from synvirt.model.submitter import Submitter
from synvirt.model.values import now
from synvirt.offline.elsewhere import name_of, separated
from synvirt.store import Store


class Intake:
    """`check(plan)` raises what is wrong with the plan, and gives its machine, if that is known by now; `dry_run(plan)` lists
    it; `check_corrected(plan, manifest)` raises what is wrong with the plan of a machine that is copied already; `claim(plan)`
    raises Conflict, if another job has its VM; `repair(job, check_only)` gives what a repair of that job's volumes reads, or
    raises Conflict, if it is not allowed.
    `begin(job_id)` gives the job to the engine, `wake(job_id)` makes the engine read an operator's request to a running job:
    both return at once and are idempotent."""

    def __init__(
        self,
        store: Store,
        board: Board,
        *,
        host: str,
        check: Callable[[MigrationPlan], VmManifest | None],
        begin: Callable[[UUID], None],
        wake: Callable[[UUID], None],
        secrets: JobSecrets | None = None,
        removal: Removal | None = None,
        dry_run: Callable[[MigrationPlan], DryRun] | None = None,
        check_corrected: Callable[[MigrationPlan, VmManifest | None], None] = lambda plan, manifest: None,
        claim: Callable[[MigrationPlan], None] = lambda plan: None,
        repair: Callable[[Migration, bool], Repair] | None = None,
        taking_over: TakingOver | None = None,
    ) -> None:
        self.store = store
        self.board = board
        self._host = host
        self._check = check
        self._begin = begin
        self._wake = wake
        self._secrets = secrets
        self._removal = removal
        self._dry_run = dry_run
        self._check_corrected = check_corrected
        self._claim = claim
        self._repair = repair
        self._taking_over = taking_over

    @property
    def figures_elsewhere(self) -> Callable[[], dict[UUID, tuple[State, Progress]]] | None:
        """Gives the state and the progress of the jobs that other hosts copy, as they are stored; it blocks. None: this host
        has the store alone."""
        return self._figures_elsewhere if self.store.is_shared else None

    def _figures_elsewhere(self) -> dict[UUID, tuple[State, Progress]]:
        return {job.id: (job.state, job.progress) for job in self.as_now(self.store.copying_elsewhere(host=self._host))}

    def standing(self) -> frozenset[UUID]:
        """The jobs that wait for a host that is lost: their stored rate is of the moment before."""
        return self.store.lost_jobs.standing(but=self._host)

    def as_now(self, jobs: Iterable[Migration]) -> list[Migration]:
        """The stored jobs with their newest figures."""
        found = [self.board.current(job) for job in jobs]
        ask = any(job.progress.rate_bps and job.host != self._host and not job.ended for job in found)
        standing = self.standing() if ask else frozenset()
        return [still(job) if job.id in standing else job for job in found]

    def dry_run(self, plan: MigrationPlan) -> DryRun:
        """The plan as its job would run, with all that is wrong with it. Nothing is stored."""
        if self._dry_run is None:
            raise Internal("this service does not check plans in advance")
        found = self._dry_run(plan)
        if plan.source_ref.kind == "remote_url":
            found = found.model_copy(update={"plan": plan.model_copy(update={"source_ref": separated(plan.source_ref)[0]})})
        return found

    def submit(
        self, plan: MigrationPlan, *, job_id: UUID | None = None, submitted_by: Submitter | None = None, attempt: int = 1
    ) -> Migration:
        """Makes a job of the plan. `job_id`: of a job that is stored already; `submitted_by`: for whom, if the service acts
        for one; `attempt`: how often the plan is tried with this one."""
        manifest = self._check(plan)
        secret = None
        if plan.source_ref.kind == "remote_url":
            public, secret = separated(plan.source_ref)
            plan = plan.model_copy(update={"source_ref": public})
        created_at = now()
        job = Migration(
            id=job_id or uuid4(),
            name=plan.name or plan.target.name or self._name_of(plan, manifest),
            plan=plan,
            mode_effective=plan.mode,
            attempt=attempt,
            submitted_by=submitter() or submitted_by,
            host=self._host,
            created_at=created_at,
            history=(StateVisit(state=State.QUEUED, at=created_at),),
        )
        # The check waits for the source: of two plans for one VM that are checked at once, the second is refused here.
        with self.store.adding():
            self._claim(plan)
            self._add(job, secret)
        bring(plan)
        self._begin(job.id)
        return job

    def _add(self, job: Migration, secret: bytes | None) -> None:
        if secret is None:
            self.store.add(job, host=self._host)
        elif self._secrets is None:
            raise Internal("a plan with secrets, and no keyring to seal them")
        else:
            with self._secrets.sealed(job.id, secret) as sealed:
                self.store.add(job, host=self._host, sealed=sealed)

    def retry(self, job_id: UUID, patch: Mapping[str, Any]) -> Migration:
        """Tries a failed job again, with its plan patched. The new job goes on with the copy if that was kept (`retry_of`),
        else it begins from the start. Conflict, InvalidPlan."""
        if (host := self.store.host_of(job_id)) != self._host:
            raise Conflict(f"the copy of job {job_id} is on host {host}", hint="ask that host to continue it")
        before = self.store.get(job_id)
        if before.state is not State.FAILED:
            raise Conflict(f"job {job_id} is {before.state}: only a failed job is tried again")
        if before.repair is not None:
            raise Conflict(f"job {job_id} is a repair", hint=f"ask for another repair of job {before.repair.of}")
        plan = corrected(before, patch)
        if not has_kept_copy(before):
            if plan.source_ref.kind == "remote_url":
                raise Conflict(
                    f"job {job_id} has left no whole copy, and the credentials of {plan.source_ref.url} are not kept",
                    hint="submit its plan again",
                )
            return self.submit(plan, attempt=before.attempt + 1)
        if plan.source.Live is not None or patch:
            self._check_corrected(plan, before.manifest)
        return self._take_up(before, plan, uuid4(), submitter())

    def go_on_from(self, before_id: UUID, plan: MigrationPlan, *, job_id: UUID, submitted_by: Submitter | None) -> Migration:
        """`submit`, for a plan whose job failed before. It uses that job's volumes, if they were kept on this host and no other
        job has taken them over."""
        before = self.store.get(before_id) if self.store.is_of(before_id, self._host) else None
        if before is None or not has_kept_copy(before) or is_taken_up(self.store, before):
            attempt = 1 if before is None else before.attempt + 1
            return self.submit(plan, job_id=job_id, submitted_by=submitted_by, attempt=attempt)
        self._check_corrected(plan, before.manifest)
        return self._take_up(before, plan, job_id, submitted_by)

    def _take_up(self, before: Migration, plan: MigrationPlan, job_id: UUID, submitted_by: Submitter | None) -> Migration:
        with self.store.adding():
            self._claim(plan)
            job = taken_up(self.store, before, plan, job_id=job_id, host=self._host, submitted_by=submitted_by)
        bring(plan)
        self._begin(job.id)
        return job

    def repair(self, job_id: UUID, *, check_only: bool) -> Migration:
        """A new job that compares a completed job's volumes with its receipt, and repairs differences from their source.
        Conflict, if that is not allowed; SourceUnreachable."""
        if (host := self.store.host_of(job_id)) != self._host:
            raise Conflict(f"the volumes of job {job_id} are on host {host}", hint="ask that host to repair them")
        if self._repair is None:
            raise Internal("this service repairs nothing")
        before, created_at = self.store.get(job_id), now()
        repair = self._repair(before, check_only)
        compared = {disk.key for disk in repair.disks}
        job = Migration(
            id=uuid4(),
            name=before.name,
            plan=before.plan,
            mode_effective=Mode.COLD,
            repair=repair,
            manifest=before.manifest,
            disks=tuple(
                DiskProgress(key=disk.key, label=disk.label, state="waiting" if disk.key in compared else "skipped")
                for disk in before.disks
            ),
            destination=before.destination,
            submitted_by=submitter(),
            host=self._host,
            created_at=created_at,
            history=(StateVisit(state=State.QUEUED, at=created_at),),
        )
        with self.store.adding():
            refuse_second(self.store, job_id)
            if not check_only:
                self._claim(before.plan)
            self.store.add(job, host=self._host)
        self._begin(job.id)
        return job

    def take_over(self, job_id: UUID, *, restart: bool) -> Migration:
        """Continues or restarts here the job of a fenced host. Conflict, if it cannot."""
        if self._taking_over is None:
            raise Conflict("this service takes no jobs over: it shares its store with no other host")
        return self._taking_over.take_over(job_id, restart=restart)

    def cancel(self, job_id: UUID, *, guest_writes: GuestWrites = "keep") -> Migration:
        """Cancels the job; idempotent. Conflict, if it has ended, or if it would lose what a guest wrote since its instant
        start and the request does not allow that."""
        refuse_loss(f"job {job_id}", self.store.get(job_id).instant, guest_writes)
        job = self.store.request_cancel(job_id)
        self._wake(job_id)
        return job

    def cutover(self, job_id: UUID) -> Migration:
        """Lets a job that holds in DeltaSyncing (`warm.cutover` manual) cut over. Conflict for a job that never holds."""
        job = self.store.get(job_id)
        by_itself = job.plan.source.Live is None or job.plan.warm.cutover != "manual" or job.repair is not None
        if not job.ended and not by_itself and (window_id := job.plan.warm.window_id) is not None:
            raise Conflict(
                f"job {job_id} cuts over by itself, within window {window_id}",
                hint=f"change the window, if it is to be open now: PUT /windows/{window_id}",
            )
        if not job.ended and by_itself:
            raise Conflict(f"job {job_id} cuts over by itself", hint="plan it with warm.cutover manual to choose the moment")
        job = self.store.request_cutover(job_id)
        self._wake(job_id)
        return job

    def remove(self, job_id: UUID, volumes: Volumes | None) -> None:
        """Removes an ended job, on request with what it kept. Conflict, if it may not be removed yet."""
        if self._removal is None:
            raise Internal("this service removes no jobs")
        self._removal.remove(job_id, volumes)
        self.board.unpin(job_id)

    def _name_of(self, plan: MigrationPlan, manifest: VmManifest | None) -> str:
        """The machine's, as its domain has it; by its source, where the machine is not known yet. One line: names of machines
        and files may have any character, and lists and logs show them."""
        return clean("" if manifest is None else manifest.name) or clean(self._source_name(plan)) or "import"

    def _source_name(self, plan: MigrationPlan) -> str:
        match plan.source_ref.kind:
            case "live_vm":
                return plan.source_ref.vm_id[:255]
            case "offline_host_path":
                return Path(plan.source_ref.path).name[:255] or "import root"
            case "remote_url":
                return name_of(plan.source_ref)
            case "upload":
                return self.store.uploads.get(plan.source_ref.upload_id, host=self._host).filename


def still(job: Migration) -> Migration:
    """The job without a rate."""
    return job.model_copy(update={"progress": job.progress.stopped()})


def check_plan(rooms: Rooms, plan: MigrationPlan) -> VmManifest | None:
    """Reports at once what no job could get past (see `foreseen`). Gives the plan's machine; None, if it is not known yet."""
    found = foresee(rooms, plan)
    refuse(found)
    return found.manifest


def check_corrected(rooms: Rooms, plan: MigrationPlan, manifest: VmManifest | None) -> None:
    """The same for a plan whose machine is copied already: its source may not exist any more."""
    found = Foreseen(plan, manifest)
    with found.at("warm.window_id"):
        check_window(rooms, plan)
    networks_and_host(rooms, found)
    refuse(found)


def check_free(rooms: Rooms, plan: MigrationPlan) -> None:
    """Conflict, if another job works on the plan's VM; UploadNotFound, if its upload was removed meanwhile. Quick: it asks only
    the store."""
    match plan.source_ref.kind:
        case "live_vm":
            refuse_taken(rooms, plan.source_ref)
        case "upload":
            rooms.upload_path(plan.source_ref.upload_id)
