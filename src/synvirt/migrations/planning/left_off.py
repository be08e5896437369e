"""Guests that a job has shut down at their source, and that could not be powered on again when it failed or was cancelled."""

from datetime import timedelta
from uuid import UUID

from synvirt.migrations.planning.taken import is_of_same
from synvirt.model.job import Migration
from synvirt.model.kinds import State
from synvirt.model.values import now
from synvirt.store import Store
from synvirt.store.documents import readable

# Its owner wants it back soon. Later the owner may want it off, and has had the time to power it on.
POWER_ON_WITHIN = timedelta(days=1)
DONE_WITH = frozenset({State.FAILED, State.CANCELLED})


def is_too_late(job: Migration) -> bool:
    """Whether the job has ended too long ago to power its source on unasked."""
    return job.finished_at is None or now() - job.finished_at > POWER_ON_WITHIN


def is_moved_since(store: Store, job: Migration, *, but: UUID | None = None) -> bool:
    """Whether a later job moves the job's live VM, or has moved it here, by whichever source. A repair moves nothing. `but`: a
    job that does not count. Blocks."""
    cursor = None
    while True:
        documents, cursor = store.documents(limit=100, cursor=cursor)
        for other in readable(Migration, documents):
            if other.created_at <= job.created_at:
                return False
            if other.id != but and other.repair is None and other.state not in DONE_WITH and is_of_same(job, other):
                return True
        if cursor is None:
            return False


def is_left_off(store: Store, job: Migration, vm_id: str) -> bool:
    """Whether an earlier job has left the VM of this one off, so that this one is to power it on. Not, where that job may have
    left a guest that runs here, or another has moved it here since: two copies of one guest must never run at once. Blocks."""
    others = [one for one in store.owing_power(vm_id) if is_of_same(job, one) and not is_too_late(one)]
    if any(entry.kind == "domain" for one in others for entry in store.ledger(one.id)):
        return False
    return any(not is_moved_since(store, one, but=job.id) for one in others)
