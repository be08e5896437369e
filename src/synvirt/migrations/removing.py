"""The removal of ended jobs: their rows, and the kept volumes of a failed one if an operator says so. Blocking code.

Completed, Cancelled, Failed without a copy ─▶ the rows are deleted
Failed, its copy kept                       ─▶ keep: the volumes stay, without a job │ destroy: they are removed first
Failed, its volumes not removed yet         ─▶ keep: they stay, without a job, as where their pool is lost for good
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Literal
from uuid import UUID

import structlog

from synvirt.errors import Conflict, NotFound, PersistFailed, SynvirtError
from synvirt.migrations.planning.repairable import refuse_second
from synvirt.migrations.planning.retrying import is_taken_up, kept_on_failure
from synvirt.model.job import Migration
from synvirt.model.kinds import ENDS, State
from synvirt.model.values import now
from synvirt.repeating import repeated
from synvirt.store import Store
from synvirt.store.documents import readable
from synvirt.store.filters import Only
from synvirt.store.tables import OWED_KINDS

log = structlog.get_logger(__name__)

Volumes = Literal["keep", "destroy"]
# Seconds between two looks. Jobs are kept for days, so an hour more does not matter.
LOOK_EVERY_S = 3600.0
# Jobs that are read at a time: some MiB.
PAGE = 100


class Removal:
    """`destroy(job)` removes a job's volumes, `forget(job)` what else was kept; both idempotent. `here`: this host."""

    def __init__(
        self, store: Store, *, here: str, destroy: Callable[[Migration], None], forget: Callable[[Migration], None]
    ) -> None:
        self.store, self._here, self._destroy, self._forget = store, here, destroy, forget

    def remove(self, job_id: UUID, volumes: Volumes | None) -> None:
        """Removes a job; called again after a crash it goes on. NotFound. Conflict, where the job has not ended, belongs to
        another host, still has something to tidy up, or has kept volumes and `volumes` is None."""
        store = self.store
        job = store.get(job_id)
        self._refuse(job, volumes)
        kept = has_kept_volumes(store, job)
        if kept and volumes is None:
            raise Conflict(
                f"job {job.id} failed and kept its volumes: {', '.join(volumes_of(job))}",
                hint="say what becomes of them: keep or destroy",
            )
        if job.state is State.COMPLETED and volumes == "destroy":
            raise Conflict(f"the volumes of job {job.id} are the disks of its guest", hint="keep them, or remove the guest")
        if kept and volumes == "destroy":
            # From now on no other job takes over its copy. A retry notes its job before it adds it: this is not in between.
            with store.adding():
                store.change(job.id, job.state, lambda found: _given_up(store, found))
            self._destroy(job)
        if job.state is not State.COMPLETED:
            self._forget(job)
        store.remove(job.id)
        log.info("job removed", job=str(job.id), volumes=volumes if kept else None)

    def remove_older(self, days: float) -> None:
        """Removes the jobs of this host that ended this many days ago and have no kept volumes. Never raises."""
        before = now() - timedelta(days=days)
        try:
            for job in self._ended():
                if job.finished_at is not None and job.finished_at < before:
                    self._remove_old(job)
        except SynvirtError as error:
            log.warning("old jobs cannot be removed now", cause=error.detail)

    def _remove_old(self, job: Migration) -> None:
        """What keeps one job keeps no other. PersistFailed."""
        try:
            self.remove(job.id, None)
        except (Conflict, NotFound):  # it has kept volumes, for example
            pass
        except PersistFailed:
            raise
        except SynvirtError as error:
            log.warning("an old job cannot be removed now", job=str(job.id), cause=error.detail)

    def _ended(self) -> Iterator[Migration]:
        """The ended jobs of this host, newest first, a page at a time: there may be tens of thousands."""
        cursor, only = None, Only(states=tuple(ENDS), host=self._here)
        while True:
            documents, cursor = self.store.documents(limit=PAGE, cursor=cursor, only=only)
            yield from readable(Migration, documents)
            if cursor is None:
                return

    def _refuse(self, job: Migration, volumes: Volumes | None) -> None:
        if self.store.rehearsals.has_unended(job.id):
            raise Conflict(f"a rehearsal of job {job.id} has not ended", hint="what it made is being removed: try again soon")
        if not job.ended:
            raise Conflict(f"job {job.id} has not ended: it is {job.state}", hint="cancel it first")
        refuse_second(self.store, job.id)
        if (host := self.store.host_of(job.id)) != self._here:
            raise Conflict(f"job {job.id} ran on host {host}", hint="ask that host to remove it")
        left = [entry for entry in self.store.ledger(job.id) if _is_owed(job, entry.kind)]
        if volumes == "keep":
            left = [entry for entry in left if entry.kind != "volume"]
        if left:
            only_volumes = all(entry.kind == "volume" for entry in left)
            raise Conflict(
                f"job {job.id} still has to tidy up: {', '.join(f'{entry.kind} {entry.name}' for entry in left)}",
                hint="it is tried again and again; "
                + ("if they are out of reach for good, keep them" if only_volumes else "make sure that its source answers"),
            )


@contextmanager
def retained(remove_older: Callable[[float], None], days: float) -> Iterator[None]:
    """Calls `remove_older(days)` again and again while the block runs. 0 days: never."""
    if not days:
        yield
        return
    with repeated(lambda: remove_older(days), name="retention", every_s=LOOK_EVERY_S, ends_within_s=1.0):
        yield


def has_kept_volumes(store: Store, job: Migration) -> bool:
    """Whether a failed job has left a copy that no other job has taken over."""
    kept = job.state is State.FAILED and "volume" in kept_on_failure(job) and bool(volumes_of(job))
    return kept and not _taken_up(store, job)


def _taken_up(store: Store, job: Migration) -> bool:
    return job.retried_by != job.id and is_taken_up(store, job)


def _given_up(store: Store, job: Migration) -> Migration:
    if _taken_up(store, job):
        raise Conflict(f"job {job.id} is continued by job {job.retried_by}", hint="look at that job")
    return job.model_copy(update={"retried_by": job.id})


def volumes_of(job: Migration) -> list[str]:
    return [disk.volume for disk in job.disks if disk.volume is not None]


def _is_owed(job: Migration, kind: str) -> bool:
    return kind in OWED_KINDS if job.state is State.COMPLETED else kind != "claim"
