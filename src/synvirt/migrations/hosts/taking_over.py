"""Takes over the jobs of a lost host. Blocks.

    its lease is over for GRACE_S ─▶ fenced ─▶ each of its jobs that has not begun its cut-over:
        on a destination that this host reaches too ─▶ taken over: it goes on from its watermarks
        on disks of that host alone ─▶ waits for it; or, where plan or setting say so, a new job here begins from the start
        an operator has cancelled it ─▶ the same new job, which is cancelled before it does anything: else nobody would end it
    from CuttingOver on, or where the job has more than volumes on that host, an operator decides: `take_over`

A host that has its lease only for a short time fences no other: after a database's outage all leases are over, though all hosts
are alive. Nor is a host fenced that this one has seen renew its lease within SELF_FENCE_S: the database's clock may have been
set. If a job is restarted, what it made on the lost host stays in the old job's ledger, and is removed when that host is
back. What it made at its source belongs to the new job from then on.
"""

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from uuid import UUID, uuid4

import structlog

from synvirt.acting import submitter
from synvirt.destinations import shared_id_of
from synvirt.errors import Conflict, PersistFailed, SynvirtError
from synvirt.jobs.instant import is_started
from synvirt.jobs.lease import GRACE_S, SELF_FENCE_S, boot_clock
from synvirt.migrations.hosts.about import HostDestination
from synvirt.migrations.hosts.silence import Silence
from synvirt.migrations.planning.foreseen import refuse_unfit
from synvirt.migrations.rooms import Rooms
from synvirt.migrations.secrets import JobSecrets
from synvirt.model.job import Migration, StateVisit
from synvirt.model.kinds import State
from synvirt.model.plan import OnHostLost
from synvirt.model.problems import Problem
from synvirt.model.values import now
from synvirt.repeating import Pauses, repeated
from synvirt.store import LedgerEntry
from synvirt.store.hosts import Fence, HostRow

log = structlog.get_logger(__name__)

LOOK_EVERY_S = 10.0
# Pauses before a job that cannot be taken over is looked at again: a cluster may have been away, or a key was missing here.
FIRST_PAUSE_S, LONGEST_PAUSE_S = 10.0, 300.0
# In these states the guest is still its source's. Another host may go on without an operator.
BEFORE_CUT_OVER = frozenset({State.QUEUED, State.COPYING_FULL, State.DELTA_SYNCING})
# Kinds of ledger entries for things that every host reaches, or that are only an entry; and the hashes for the receipt, which
# the new host makes again, as their token names the host that wrote the volumes.
REACHED_BY_ALL = frozenset({"volume", "snapshot", "source_power", "mark", "tracking", "claim", "hashes"})


class TakingOver:
    """`held_for_s()`: for how long this host has held its lease without a break. `begin`: gives a job to the engine.
    `opens_source`: raises, where this host cannot open the source's credentials."""

    def __init__(
        self,
        rooms: Rooms,
        *,
        begin: Callable[[UUID], None],
        held_for_s: Callable[[], float],
        opens_source: Callable[[UUID], None],
        secrets: JobSecrets | None = None,
        on_host_lost: OnHostLost = "wait",
        grace_s: float = GRACE_S,
        silent_s: float = SELF_FENCE_S,
        clock: Callable[[], float] = boot_clock,
    ) -> None:
        self._rooms, self._store, self._host = rooms, rooms.store, rooms.host
        self._begin, self._held_for_s, self._opens_source, self._secrets = begin, held_for_s, opens_source, secrets
        self._on_host_lost, self._grace_s, self._silent_s = on_host_lost, grace_s, silent_s
        self._silence = Silence(clock, step_most_s=2 * LOOK_EVERY_S)
        self._pauses = Pauses[UUID](FIRST_PAUSE_S, LONGEST_PAUSE_S)

    def look(self) -> None:
        """Fences hosts that are lost, and takes over the jobs that may be."""
        try:
            self._silence.look(self._store.hosts.all())
            if self._held_for_s() < self._grace_s:
                return
            silent = self._silence.over(self._silent_s)
            for host in self._store.hosts.fence_expired(grace_s=self._grace_s, silent=silent):
                log.warning("a host is lost", host=host)
            waiting = self._store.lost_jobs.all(but=self._host)
            self._pauses.keep([job_id for job_id, _ in waiting])
            for job_id, lost in waiting:
                if self._pauses.is_over(job_id):
                    self._pauses.begin(job_id)
                    self._look_at(job_id, lost)
        except SynvirtError as error:
            log.warning("cannot look after the jobs of lost hosts", cause=error.detail)

    def _look_at(self, job_id: UUID, lost: Fence) -> None:
        try:
            job = self._store.get(job_id)
            if job.state not in BEFORE_CUT_OVER:
                raise Conflict(
                    f"it is in {job.state}: an operator decides", hint="make sure that its host is off, and take it over"
                )
            cancelled = self._store.cancel_requested(job_id)
            try:
                _refuse_bound(job, lost.host)
                self._refuse_to_go_on(job, lost)
            except Conflict:
                if not cancelled and (job.plan.on_host_lost or self._on_host_lost) != "restart_elsewhere":
                    raise
                self._restart(job, lost)
            else:
                self._go_on(job, lost)
        except PersistFailed:
            raise
        except SynvirtError as error:
            log.info("a job waits for its host", job=str(job_id), host=lost.host, cause=error.detail)

    def take_over(self, job_id: UUID, *, restart: bool) -> Migration:
        """Takes a job over for an operator, in any state: the job, or the new one in its place. Conflict, where its host may
        still be alive, or the job cannot go on here."""
        job, host = self._store.get(job_id), self._store.host_of(job_id)
        if job.ended:
            raise Conflict(f"job {job_id} has ended: it is {job.state}")
        if host == self._host:
            raise Conflict(f"job {job_id} is this host's")
        row = self._row(host)
        if not row.fenced:
            raise Conflict(
                f"host {host}, which has job {job_id}, is not fenced",
                hint=f"make sure that it is off, and then fence host {host}",
            )
        lost = Fence(row.id, row.epoch)
        if restart:
            return self._restart(job, lost)
        _refuse_bound(job, lost.host)
        self._refuse_to_go_on(job, lost)
        self._go_on(job, lost)
        return self._store.get(job_id)

    # ── from its watermarks ──────────────────────────────────────────────────────────────────────────────────────────

    def _refuse_to_go_on(self, job: Migration, lost: Fence) -> None:
        """Conflict, where the job has something on its host that cannot be reached from here."""
        theirs = _destinations(self._row(lost.host))
        name = job.destination or job.plan.target.destination or next(iter(theirs), "")
        shared_id = theirs[name].shared_id if name in theirs else None
        here = self._rooms.destinations.get(name)
        if shared_id is None or here is None or shared_id_of(here) != shared_id:
            raise Conflict(
                f"destination {name!r} of host {lost.host} is not reached from here",
                hint="wait for that host, or take it over by a restart",
            )
        self._refuse_left_behind(job, self._store.ledger(job.id), lost.host)
        self._refuse_source(job)
        refuse_unfit(self._rooms, job)

    def _refuse_left_behind(self, job: Migration, ledger: list[LedgerEntry], host: str) -> None:
        left = sorted({entry.kind for entry in ledger} - REACHED_BY_ALL)
        if left:
            raise Conflict(
                f"job {job.id} has its {', '.join(left)} on host {host}, in {job.state}",
                hint="wait for that host, or take it over by a restart",
            )

    def _go_on(self, job: Migration, lost: Fence) -> None:
        if not self._store.lost_jobs.take_over(job.id, lost, to=self._host):
            raise Conflict(
                f"job {job.id} cannot be taken over: its host is back, another took it, or a job here has its name or address"
            )
        log.warning("a job is taken over", job=str(job.id), state=job.state, host=lost.host)
        self._begin(job.id)

    # ── from the start ───────────────────────────────────────────────────────────────────────────────────────────────

    def _restart(self, job: Migration, lost: Fence) -> Migration:
        """Ends the old job as failed, and begins a new one of the same plan. Conflict, where it cannot run here either. The new
        job of one that is to be cancelled does not run: it only tidies up at the source."""
        created_at, secret, ref = now(), None, job.plan.source_ref
        cancelled = self._store.cancel_requested(job.id)
        if not cancelled:
            _refuse_bound(job, lost.host)
            self._refuse_source(job)
            if job.destination not in (None, *self._rooms.destinations):
                raise Conflict(f"this host has no destination {job.destination}", hint="submit the plan with another one")
            refuse_unfit(self._rooms, job)
            secret = self._rooms.secret_of(job.id) if ref.kind == "remote_url" else None
        elif ref.kind == "live_vm":
            self._opens_source(ref.source_id)
        again = Migration(
            id=uuid4(),
            name=job.name,
            plan=job.plan,
            mode_effective=job.plan.mode,
            attempt=job.attempt + 1,
            submitted_by=submitter() or job.submitted_by,
            host=self._host,
            created_at=created_at,
            history=(StateVisit(state=State.QUEUED, at=created_at),),
            restart_of=job.id,
            repair=job.repair,
        )
        problem = Problem(
            code=Conflict.code,
            message=f"host {lost.host} is lost; job {again.id} {'is cancelled' if cancelled else 'starts over'} on host "
            f"{self._host}{' in its place' if cancelled else ''}",
            hint="what it made on its host goes when that is back",
            at=created_at,
            state=job.state,
        )

        def failed(before: Migration) -> Migration:
            visit = StateVisit(state=State.FAILED, at=created_at)
            end = {"state": State.FAILED, "last_error": problem, "finished_at": created_at, "restarted_by": again.id}
            stopped = {"history": (*before.history, visit), "progress": before.progress.stopped()}
            return before.model_copy(update={**end, **stopped})

        if secret is None:
            done = self._store.lost_jobs.restart_elsewhere(job.id, lost, failed, again, to=self._host)
        elif self._secrets is None:
            raise Conflict(f"the credentials of job {job.id} cannot be sealed here")
        else:
            with self._secrets.sealed(again.id, secret) as sealed:
                done = self._store.lost_jobs.restart_elsewhere(job.id, lost, failed, again, to=self._host, sealed=sealed)
        if not done:
            raise Conflict(f"job {job.id} cannot be taken over: its host is back, or another took it")
        log.warning("a job is restarted", job=str(job.id), again=str(again.id), host=lost.host)
        self._begin(again.id)
        return again

    # ── both ─────────────────────────────────────────────────────────────────────────────────────────────────────────

    def _refuse_source(self, job: Migration) -> None:
        ref = job.plan.source_ref
        match ref.kind:
            case "live_vm":
                self._opens_source(ref.source_id)
            case "remote_url":
                self._rooms.secret_of(job.id)
            case _:
                raise Conflict(f"what job {job.id} reads are files of its host", hint="wait for that host")

    def _row(self, host: str) -> HostRow:
        for row in self._store.hosts.all():
            if row.id == host:
                return row
        raise Conflict(f"host {host} was never seen on this store")


def _refuse_bound(job: Migration, host: str) -> None:
    """Conflict, where the writes of its guest, or the receipt that it compares with, are only on that host."""
    if job.repair is not None:
        raise Conflict(
            f"job {job.id} compares volumes with a receipt, which is on host {host}",
            hint="wait for that host, or cancel the job",
        )
    if is_started(job.instant):
        raise Conflict(
            f"the guest of job {job.id} was started at once on host {host}, and what it wrote since is there alone",
            hint="wait for that host: it goes on there; or submit its plan again: that guest begins from its source",
        )


def _destinations(row: HostRow) -> dict[str, HostDestination]:
    """The host's destinations by name, the default first, from its last description."""
    found = (HostDestination.model_validate(one) for one in json.loads(row.document).get("destinations", ()))
    return {one.name: one for one in found}


@contextmanager
def looking(taking_over: TakingOver, *, among_hosts: bool, every_s: float = LOOK_EVERY_S) -> Iterator[None]:
    """Takes over jobs of lost hosts while the block runs. `among_hosts`: whether there may be other hosts at all."""
    if not among_hosts:
        yield
        return
    with repeated(taking_over.look, name="take-over", every_s=every_s, ends_within_s=1.0):
        yield
