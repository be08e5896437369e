"""One pass of a Live job. It handles a snapshot that is gone, and change tracking that was lost (`setbacks`). asyncio.

    snapshot n ─▶ noted ─▶ read (since snapshot n - 1) ─▶ n - 1 is removed ─▶ n is released: only its change ids stay
                              │ gone? taken again            only after n is copied: pass n builds on snapshot n - 1
                              │ change tracking lost, or found wrong? whole disks are compared

Change tracking is not trusted: each pass also reads samples of what it leaves out (`disks.checking.sampling`).
"""

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

import structlog

from synvirt.disks.specs import comes_once, leaves_unwritten_out, read_whole
from synvirt.errors import Cancelled, CbtReset, DiskWriteFailed, PersistFailed, SynvirtError
from synvirt.live import LiveAdapter, SnapshotRef
from synvirt.migrations import source_vm
from synvirt.migrations.cloning import clone_asked, make_room
from synvirt.migrations.job import Job, named
from synvirt.migrations.passes import PassDisk, run_opened_pass
from synvirt.migrations.patience import Patience, patiently
from synvirt.migrations.source_vm import at_source
from synvirt.migrations.warm.forecasting import forecast_cut_over
from synvirt.migrations.warm.setbacks import SETBACKS, is_whole, note_setback, take_reset_back
from synvirt.migrations.warm.snapshots import Kind, snapshot_name, snapshot_of
from synvirt.model.job import Pass
from synvirt.model.machine import Disk
from synvirt.model.values import now

log = structlog.get_logger(__name__)


async def copy_pass(job: Job, number: int, kind: Kind) -> Pass:
    """Copies pass `number`, again if a snapshot or change tracking fails; then removes what is not needed any more."""
    done = next((one for one in job.migration.passes if one.number == number and one.finished_at is not None), None)

    async def tried(patience: Patience) -> Pass | None:
        if kind == "final" or not job.is_warm:  # `_copy_while_off` holds the slots
            return await _tried(job, number, kind, patience)
        # A snapshot that exists already is read at once: it grows.
        async with job.slots(urgent=(await job.memory_of(number)).snapshot is not None):
            return await _tried(job, number, kind, patience)

    while done is None:
        # A job that waits holds no slot: other VMs are read meanwhile.
        done = await patiently(job, tried)
    if kind == "final" or not job.is_warm:
        # The guest is down, so what is left at the source is removed when it is up again. (Some platforms lock the VM while its
        # disks are read. It cannot be started then, and its snapshots may stay.)
        return done
    if not await is_whole(job, await job.memory_of(number)):
        await job.note(cbt_resets=0)
    await let_go(job, number)
    await forecast_cut_over(job)
    await clone_asked(job)
    return done


async def _tried(job: Job, number: int, kind: Kind, patience: Patience) -> Pass | None:
    """The copied pass; None, if it must be tried again from what was noted. Nothing in here waits for a source."""
    snapshot = await snapshot_of(job, number, kind)
    noted = await job.memory_of(number)
    whole = await is_whole(job, noted)
    before = (await job.memory_of(number - 1)).snapshot if number > 1 and not whole else None
    verify = any(one.number == number and one.verify for one in job.migration.passes)

    @asynccontextmanager
    async def opened() -> AsyncIterator[Sequence[PassDisk]]:
        async with job.session() as adapter:
            yield await job.stop.or_stop(_opened_disks(job, adapter, snapshot, before, number, whole=whole, verify=verify))

    new = Pass(number=number, kind=kind, snapshot_at=noted.snapshot_at, whole=whole and number > 1)
    # Only at a first pass that was not begun before the volumes still read as zeros.
    fresh = number == 1 and noted.retakes is None
    try:
        return await run_opened_pass(job, new, opened, patience, fresh=fresh)
    except SETBACKS as error:
        await note_setback(job, number, kind, error)
    except DiskWriteFailed as error:
        if not await make_room(job, error):
            raise
    return None


async def _opened_disks(
    job: Job,
    adapter: LiveAdapter,
    snapshot: SnapshotRef,
    before: SnapshotRef | None,
    number: int,
    *,
    whole: bool,
    verify: bool,
) -> list[PassDisk]:
    """`whole`: read whole disks, and do not trust what the source calls unchanged or never written. `verify`: trust it, and
    compare all of it."""

    async def opened(disk: Disk, volume: str) -> PassDisk:
        since = None if before is None else before.change_ids.get(disk.key)
        if before is not None and since is None:
            raise CbtReset(
                f"{named(disk)} of {job.manifest.name} was not tracked when snapshot {before.id} was made",
                hint="the whole disk is compared once; a disk that was attached anew, or moved to another storage, does this",
            )
        reader = await adapter.open_disk(job.vm_id, snapshot, disk, since)
        if whole:
            reader = read_whole(reader)
        doubted = (since is not None and not comes_once(reader)) or leaves_unwritten_out(reader)
        sample = f"{job.id} {number} {disk.key}" if doubted else None
        return PassDisk(
            disk.key,
            reader,
            volume,
            disk.capacity_bytes,
            compare=since is None and (number > 1 or job.migration.retry_of is not None),
            sample=sample,
            verify=since is not None and verify,
        )

    return [await opened(disk, volume) for disk, volume in job.copied_disks]


async def let_go(job: Job, number: int) -> None:
    """Removes the snapshots of earlier passes at the source, and keeps only the change ids of this one. What cannot be removed
    now is removed before the next pass, or at the end."""
    await take_reset_back(job)
    name = snapshot_name(job, number)
    try:
        for entry in await job.in_thread(job.rooms.store.ledger, job.id):
            if entry.kind == "snapshot" and entry.name != name:
                await at_source(job, lambda adapter: adapter.cleanup(job.vm_id, entry.name), source_vm.LATER_S)  # noqa: B023
                await job.strike("snapshot", entry.name)
        await at_source(job, lambda adapter: adapter.release(job.vm_id, name), source_vm.LATER_S)
    except (PersistFailed, Cancelled):
        raise
    except SynvirtError as error:
        log.warning("a snapshot is not released now", job=str(job.id), number=number, cause=error.detail)
    else:
        await job.note_of(number, released_at=now())
        await job.fold_passes(number)
