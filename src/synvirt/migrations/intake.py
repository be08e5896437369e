"""Intake: where a plan becomes a job, and an operator's wish reaches one. Blocking code; what the API calls.

A plan is refused here when it can be known at once that it cannot work (a path outside the import root, a file of another
kind): what takes longer to find out is found out by the job itself, in Queued.
"""

from collections.abc import Callable
from pathlib import Path
from uuid import UUID, uuid4

import structlog

from synvirt.disks.roots import connected
from synvirt.errors import Conflict, Internal, InvalidPlan, SynvirtError
from synvirt.hypervisor.domain_xml import safe_name
from synvirt.jobs.board import Board
from synvirt.kvm.identity import Identity, identity_of
from synvirt.machines.concerns import with_room
from synvirt.migrations.critical import refuse_critical
from synvirt.migrations.removing import Removal, Volumes
from synvirt.migrations.retrying import taken_up
from synvirt.migrations.rooms import Rooms
from synvirt.migrations.secrets import JobSecrets
from synvirt.model import Migration, MigrationPlan, State, StateVisit, VmManifest, now
from synvirt.offline.browsing import ELSEWHERE_WITHIN_S
from synvirt.offline.elsewhere import name_of, separated
from synvirt.offline.several import choosing
from synvirt.store import Store

log = structlog.get_logger(__name__)


class Intake:
    """`check(plan)` raises what is wrong with the plan; `begin(job_id)` hands the job to the engine, `wake(job_id)` tells the
    engine that the operator asked something of a running job. Both of the latter return at once and are idempotent."""

    def __init__(
        self,
        store: Store,
        board: Board,
        *,
        host: str,
        check: Callable[[MigrationPlan], None],
        begin: Callable[[UUID], None],
        wake: Callable[[UUID], None],
        secrets: JobSecrets | None = None,
        removal: Removal | None = None,
    ) -> None:
        self.store = store
        self.board = board
        self._host = host
        self._check = check
        self._begin = begin
        self._wake = wake
        self._secrets = secrets
        self._removal = removal

    def submit(self, plan: MigrationPlan) -> Migration:
        self._check(plan)
        secret = None
        if plan.source_ref.kind == "remote_url":
            public, secret = separated(plan.source_ref)
            plan = plan.model_copy(update={"source_ref": public})
        created_at = now()
        job = Migration(
            id=uuid4(),
            name=plan.name or plan.target.name or self._name_of(plan),
            plan=plan,
            mode_effective=plan.mode,
            created_at=created_at,
            history=(StateVisit(state=State.QUEUED, at=created_at),),
        )
        if secret is None:
            self.store.add(job, host=self._host)
        elif self._secrets is None:
            raise Internal("a plan with secrets, and no keyring to seal them")
        else:
            with self._secrets.sealed(job.id, secret) as sealed:
                self.store.add(job, host=self._host, sealed=sealed)
        self._begin(job.id)
        return job

    def retry(self, job_id: UUID, changes: dict[str, object]) -> Migration:
        """A new job that goes on with the whole copy of a failed one. Conflict, where there is none."""
        job = taken_up(self.store, job_id, changes, host=self._host)
        self._begin(job.id)
        return job

    def cancel(self, job_id: UUID) -> Migration:
        """Conflict when the job has ended; asking twice is asking once."""
        job = self.store.request_cancel(job_id)
        self._wake(job_id)
        return job

    def cutover(self, job_id: UUID) -> Migration:
        """Lets a job that holds in DeltaSyncing (`warm.cutover` manual) cut over. Conflict for a job that never will."""
        job = self.store.get(job_id)
        if job.plan.source.Live is None or job.plan.warm.cutover != "manual":
            raise Conflict(f"job {job_id} cuts over by itself", hint="plan it with warm.cutover manual to choose the moment")
        job = self.store.request_cutover(job_id)
        self._wake(job_id)
        return job

    def remove(self, job_id: UUID, volumes: Volumes | None) -> None:
        """An ended job, with what it kept where that is asked. Conflict, where it may not go yet."""
        if self._removal is None:
            raise Internal("this service removes no jobs")
        self._removal.remove(job_id, volumes)
        self.board.unpin(job_id)

    def _name_of(self, plan: MigrationPlan) -> str:
        match plan.source_ref.kind:
            case "live_vm":
                return plan.source_ref.vm_id[:255]
            case "offline_host_path":
                return Path(plan.source_ref.path).name[:255] or "import root"
            case "remote_url":
                return name_of(plan.source_ref)
            case "upload":
                return self.store.uploads.get(plan.source_ref.upload_id, host=self._host).filename


def check_identity(rooms: Rooms, plan: MigrationPlan, manifest: VmManifest | None) -> None:
    """Conflict, where the guest's name, UUID or a MAC address is taken here. The job claims them for good; this is to say so at
    once. A hypervisor that is away is no reason to refuse a plan: the job will meet it."""
    job = Migration(id=uuid4(), name="", plan=plan, manifest=manifest, mode_effective=plan.mode, created_at=now())
    try:
        if manifest is not None:
            rooms.hypervisor.check_free(identity_of(rooms.hypervisor.domain_xml(job, []).xml))
        elif plan.target.name is not None:
            rooms.hypervisor.check_free(Identity(safe_name(plan.target.name, fallback="")))
    except Conflict:
        raise
    except SynvirtError as error:
        log.warning("the hypervisor does not say whether a name is free", cause=error.detail)


def check_plan(rooms: Rooms, plan: MigrationPlan) -> None:
    """What can be said at once: the source is registered, or the file is there, is of the kind that the plan says, and nothing
    about it is critical."""
    free_bytes = rooms.destination_named(plan.target.destination).free_bytes()
    if plan.source.Live is not None and plan.source_ref.kind == "live_vm":
        rooms.check_source(plan.source.Live, plan.source_ref.source_id)
        check_identity(rooms, plan, None)
        return
    if plan.source.Offline is None or plan.source_ref.kind == "live_vm":
        raise RuntimeError("a plan's source fits its source_ref")
    importer = rooms.importers.get(plan.source.Offline)
    if importer is None:
        served = ", ".join(rooms.importers)
        raise InvalidPlan(f"offline kind {plan.source.Offline} is not served yet", hint=f"served are {served}")
    path, root = rooms.place(plan.source_ref)
    with connected(root, within_s=ELSEWHERE_WITHIN_S):
        found = rooms.detect(path, root)
        if found.kind != importer.kind:
            raise InvalidPlan(
                f"{path.name} is of kind {found.kind}, not {importer.kind}",
                hint=f"submit it as {{Offline: {found.kind}}}",
            )
        manifest = choosing(importer, plan.source_ref.vm).inspect(path, root)
    chosen = manifest.model_copy(update={"disks": tuple(disk for disk in manifest.disks if disk.key not in plan.skip_disks)})
    refuse_critical(plan, with_room(chosen, free_bytes))
    check_identity(rooms, plan, manifest)
