"""Completed jobs of this host, on which the next job's forecasts are based. Blocking code."""

from typing import Final

from synvirt.model.job import Migration
from synvirt.model.kinds import State
from synvirt.model.plan import MigrationPlan
from synvirt.store import Store
from synvirt.store.documents import readable
from synvirt.store.filters import Only

# Only the newest jobs count, as a site's network and storage change.
JOBS_LOOKED_AT: Final = 50


def completed(store: Store, plan: MigrationPlan) -> list[Migration]:
    """Jobs of the plan's live source, newest first; of all sources, if none of that source has completed."""
    ref = plan.source_ref
    of_source = Only(states=(State.COMPLETED,), source_id=ref.source_id if ref.kind == "live_vm" else None)
    for only in (of_source, Only(states=(State.COMPLETED,))):
        documents, _ = store.documents(limit=JOBS_LOOKED_AT, only=only)
        if found := [job for job in readable(Migration, documents) if job.repair is None]:
            return found
    return []
