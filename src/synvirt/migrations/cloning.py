"""A rehearsal's clones of a job's volumes. The job makes them between two passes: then its volumes are complete, of one moment
of the source, and not being written to.

    a waiting rehearsal ─▶ the job, between two passes ─▶ clones ─▶ the rehearsal prepares them, the job goes on

Where a clone is an overlay (`Destination.backing_file`), the volume stays as it is while it exists, and the passes of that time
write to a side file. A worker folds it into the volume when that need not stay any more: before the next pass, before the next
clone, and at the latest before the last pass. So the volume of a job that has cut over is complete.
"""

import asyncio
from datetime import timedelta
from uuid import UUID

import structlog

from synvirt.disks.specs import AsideWriterSpec, ChangedSpec, written
from synvirt.errors import Cancelled, PersistFailed, SynvirtError
from synvirt.jobs.orders import CopyOrder, DiskOrder
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
    if await job.in_thread(job.rooms.store.rehearsals.waiting, job.id) is None:
        return
    trouble: SynvirtError | None = None
    try:
        await _fold(job)
    except (Cancelled, PersistFailed):
        raise
    except SynvirtError as error:
        trouble = error
    await job.in_thread(_clone, job, trouble)


async def _fold(job: Job) -> None:
    """Folds what the passes during an earlier rehearsal have written aside: an order to copy nothing more."""

    def orders() -> list[DiskOrder]:
        opened = [(disk.key, job.destination.open(volume, disk.capacity_bytes)) for disk, volume in job.copied_disks]
        return [
            DiskOrder(key=key, reader=ChangedSpec(over=written(spec), areas=()), writer=spec, fresh=False)
            for key, spec in opened
            if isinstance(spec, AsideWriterSpec) and spec.folds
        ]

    async def on_message(message: object) -> None:
        """Ignores the worker's messages: they belong to no pass."""

    if disks := await job.in_thread(orders):
        async with job.rooms.workers() as worker:
            ended = await worker.carry_out(CopyOrder(disks=tuple(disks)), on_message, job.stop.is_set)
        job.stop.check()
        ended.check()


def _clone(job: Job, trouble: SynvirtError | None) -> None:
    rows = job.rooms.store.rehearsals
    with job.rooms.cloning:
        rehearsal = rows.waiting(job.id)
        if rehearsal is None:
            return
        try:
            if trouble is not None:
                raise trouble
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


async def settle(job: Job) -> None:
    """Call it before the last pass: from here on the volumes themselves are written, as the guest starts from them. A rehearsed
    guest that still reads one is cancelled, and has mostly ended while the source shut down."""

    def stay() -> bool:
        opened = [job.destination.open(volume, disk.capacity_bytes) for disk, volume in job.copied_disks]
        return any(isinstance(spec, AsideWriterSpec) and not spec.folds for spec in opened)

    if await job.in_thread(stay):
        await job.stop.or_stop(wait_until_gone(job))
        await job.in_thread(_end_guests, job)
        await release(job)


def _end_guests(job: Job) -> None:
    """Ends rehearsed guests that run on: each has a lock on its volume, and the job's own guest would not start. What else they
    left is swept later."""
    for rehearsal in job.rooms.store.rehearsals.of(job.id):
        if not rehearsal.ended:
            try:
                job.rooms.hypervisor.undefine(rehearsal.id, rehearsal.id)
            except SynvirtError as error:
                log.warning("a rehearsed guest runs on", rehearsal=str(rehearsal.id), cause=error.detail)


async def make_room(job: Job, error: SynvirtError) -> bool:
    """Ends the job's rehearsals, where a pass could not be written: what their guests write may have filled the destination.
    Whether there were any, and they are gone."""
    if not await job.in_thread(job.rooms.store.rehearsals.has_unended, job.id):
        return False
    log.warning("the rehearsal is ended, as the copy cannot be written", job=str(job.id), cause=error.detail)
    await job.stop.or_stop(wait_until_gone(job))
    return not await job.in_thread(job.rooms.store.rehearsals.has_unended, job.id)


async def release(job: Job) -> None:
    """No reader needs the old bytes of the volumes now: what lies beside them is removed, if folded. After the last pass."""

    def each() -> None:
        for _, volume in job.copied_disks:
            job.destination.release(volume)

    await job.in_thread(each)


async def wait_until_gone(job: Job) -> None:
    """Cancels the job's rehearsals and waits for their end, ENDS_WITHIN at most: a volume cannot be removed while a clone of it
    exists. What is left then is swept later."""
    rows, until = job.rooms.store.rehearsals, now() + ENDS_WITHIN
    await call_off(job)
    while now() < until and await job.in_thread(rows.has_unended, job.id):
        await asyncio.sleep(POLL_S)
