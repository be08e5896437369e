"""A rehearsal's clones of a job's volumes. The job makes them between two passes: then its volumes are complete, of one moment
of the source, and not being written to.

    a waiting rehearsal ─▶ the job, between two passes ─▶ clones ─▶ the rehearsal prepares them, the job goes on
"""

import asyncio
from datetime import timedelta
from uuid import UUID

import structlog

from synvirt.errors import PersistFailed, SynvirtError
from synvirt.migrations.job import Job, volume_label
from synvirt.model.machine import Disk
from synvirt.model.rehearsal import Rehearsal, RehearsalState
from synvirt.model.values import now

log = structlog.get_logger(__name__)

# Stopping a guest and removing volumes take seconds. What takes longer is swept later.
ENDS_WITHIN = timedelta(seconds=60)
POLL_S = 0.1


def clones(job: Job, rehearsal_id: UUID) -> list[tuple[Disk, str, str]]:
    """Each copied disk with its volume and the name of the volume's clone."""
    return [
        (disk, volume, job.destination.volume_name(rehearsal_id, volume_label(disk, job.manifest)))
        for disk, volume in job.copied_disks
    ]


async def clone_asked(job: Job) -> None:
    """Makes the clones for the waiting rehearsal, if there is one. Call it between two passes. If a clone fails, the rehearsal
    fails, and the job goes on."""
    if await job.in_thread(job.rooms.store.rehearsals.waiting, job.id) is not None:
        await job.in_thread(_clone, job)


def _clone(job: Job) -> None:
    rows = job.rooms.store.rehearsals
    with job.rooms.cloning:
        rehearsal = rows.waiting(job.id)
        if rehearsal is None:
            return
        try:
            for _, volume, clone in clones(job, rehearsal.id):
                job.destination.clone(volume, clone)
        except PersistFailed:
            raise
        except SynvirtError as error:
            log.warning("the volumes cannot be cloned", job=str(job.id), rehearsal=str(rehearsal.id), cause=error.detail)
            change: dict[str, object] = {
                "state": RehearsalState.SWEEPING,
                "outcome": RehearsalState.FAILED,
                "error": job.problem(error, fatal=True),
            }
        else:
            done = [one for one in job.migration.passes if one.finished_at is not None]
            change = {"state": RehearsalState.PREPARING, "moment": done[-1].snapshot_at if done else None}
        change |= {"started_at": now(), "host": job.rooms.host}

        def changed(before: Rehearsal) -> Rehearsal:
            return before.model_copy(update=change)

        rows.change(rehearsal.id, RehearsalState.WAITING, changed)


async def call_off(job: Job) -> None:
    """Cancels the job's rehearsal before a cut-over: the real guest needs the memory."""
    if await job.in_thread(job.rooms.store.rehearsals.has_unended, job.id):
        await job.in_thread(job.rooms.store.rehearsals.cancel_of, job.id)


async def wait_until_gone(job: Job) -> None:
    """Cancels the job's rehearsals and waits for their end, ENDS_WITHIN at most: a volume cannot be removed while a clone of it
    exists. What is left then is swept later."""
    rows, until = job.rooms.store.rehearsals, now() + ENDS_WITHIN
    await call_off(job)
    while now() < until and await job.in_thread(rows.has_unended, job.id):
        await asyncio.sleep(POLL_S)
