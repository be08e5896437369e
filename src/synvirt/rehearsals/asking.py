"""What the API and the page ask of rehearsals. Blocking code."""

from collections.abc import Callable
from typing import Protocol
from uuid import UUID, uuid4

from synvirt.acting import submitter
from synvirt.destinations import Destination
from synvirt.errors import Conflict, HostLacks, NotFound
from synvirt.model.job import Migration
from synvirt.model.kinds import Mode
from synvirt.model.rehearsal import Rehearsal, RehearsalRequest
from synvirt.model.values import now
from synvirt.rehearsals.steps import BEFORE_CUT_OVER
from synvirt.store import Store


class Engine(Protocol):
    """See Rehearsals."""

    def begin(self, rehearsal_id: UUID) -> None: ...
    def screenshot(self, rehearsal_id: UUID) -> bytes | None: ...


class Rehearsing:
    """`destination_named`: of this host, the default without a name. `wake(job_id)`: the job looks at once whether something is
    asked of it."""

    def __init__(
        self,
        store: Store,
        engine: Engine,
        *,
        host: str,
        destination_named: Callable[[str | None], Destination],
        wake: Callable[[UUID], None],
    ) -> None:
        self._store, self._rows, self._engine, self._host = store, store.rehearsals, engine, host
        self._destination_named, self._wake = destination_named, wake

    def ask(self, job_id: UUID, asked: RehearsalRequest) -> Rehearsal:
        """Of a job that copies warm and has not begun its cut-over. NotFound, Conflict, HostLacks."""
        job = self._store.get(job_id)
        if (why := why_not(job)) is not None:
            raise Conflict(f"job {job_id} cannot be rehearsed: {why}")
        here = self._store.host_of(job_id) == self._host
        if here:
            destination = self._destination_named(job.destination or job.plan.target.destination)
            if (lacks := destination.why_no_clones()) is not None:
                raise HostLacks(
                    f"job {job_id} cannot be rehearsed: {lacks}", hint="keep the volumes on zfs, XFS, Btrfs, or in Ceph"
                )
        rehearsal = Rehearsal(id=uuid4(), migration_id=job_id, asked=asked, submitted_by=submitter(), created_at=now())
        self._rows.add(rehearsal)
        if here:
            self._wake(job_id)
            self._engine.begin(rehearsal.id)
        return rehearsal

    def of(self, job_id: UUID) -> list[Rehearsal]:
        """Newest first. NotFound, where there is no such job."""
        return self._rows.of(self._store.get(job_id).id)

    def get(self, job_id: UUID, rehearsal_id: UUID) -> Rehearsal:
        """NotFound."""
        found = self._rows.get(rehearsal_id)
        if found.migration_id != job_id:
            raise NotFound(f"job {job_id} has no rehearsal {rehearsal_id}")
        return found

    def cancel(self, job_id: UUID, rehearsal_id: UUID) -> Rehearsal:
        """It ends as soon as what it made is gone. NotFound; Conflict, where it has ended."""
        self.get(job_id, rehearsal_id)
        self._rows.cancel(rehearsal_id)
        return self._rows.get(rehearsal_id)

    def screenshot(self, job_id: UUID, rehearsal_id: UUID) -> bytes:
        """A PNG. NotFound."""
        picture = self._engine.screenshot(self.get(job_id, rehearsal_id).id)
        if picture is None:
            raise NotFound(f"rehearsal {rehearsal_id} has no screenshot", hint="only a guest that was started leaves one")
        return picture


def why_not(job: Migration) -> str | None:
    """Why it cannot be rehearsed now; None, where it can."""
    if job.ended:
        return f"it has ended, as {job.state}"
    if job.mode_effective is not Mode.WARM:
        return "it copies cold, and its guest starts as soon as the copy is whole"
    if job.state not in BEFORE_CUT_OVER:
        return f"it is in {job.state}: its volumes are the guest's own by now"
    return None
