"""The steps of a repair: another job's volumes are compared with its receipt, and repaired from their source. asyncio.

    Queued (claim, look) ─▶ CopyingFull: worker ─▶ what differs ─▶ store ─▶ repaired ─▶ watermark ─▶ Completed

It makes nothing that would have to be removed. What it repaired stays repaired when it is cancelled, fails or is killed: each
block is either still as before, or repaired.
"""

from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Final

from synvirt.disks.specs import ReaderSpec, comes_once, read_whole
from synvirt.errors import Conflict, DiskReadFailed
from synvirt.jobs.orders import DIFFERING, LEFT, DiskRepairOrder, DiskSpans, Noted, RepairOrder
from synvirt.jobs.process import Worker
from synvirt.jobs.wire import Result
from synvirt.migrations import source_vm
from synvirt.migrations.files import disks_of_files
from synvirt.migrations.hearing import Clock, Listener, Tally
from synvirt.migrations.job import Job
from synvirt.migrations.passes import ANSWERED, again_and_again
from synvirt.migrations.patience import Patience, patiently
from synvirt.migrations.planning.repairable import ledgers_of, refuse_volumes
from synvirt.migrations.warm.snapshots import snapshot_of
from synvirt.model.machine import Disk
from synvirt.model.repair import DiskRepair, Repair, listed
from synvirt.model.values import now
from synvirt.store import Watermark

# The pass whose watermarks show the progress.
_NUMBER: Final = 1
_NAMED_MOST: Final = 8


async def begin(job: Job) -> None:
    """Reserves the volumes for this job while it runs. Conflict, if another repair has them, or a guest has written to them."""
    repair = _repair(job)
    hint = "wait for its end, or cancel it"
    await job.in_thread(job.rooms.store.claim, job.id, [f"volumes of job {repair.of}"], hint=hint)
    await _refuse(job)
    await job.change(started_at=now())


async def repair(job: Job) -> None:
    """Compares and repairs. DiskReadFailed, if the source differs from the receipt too."""

    async def tried(patience: Patience) -> None:
        async with job.slots():
            await _tried(job, patience)

    await patiently(job, tried)
    if job.migration.plan.source.Live is not None:
        await source_vm.tidy_up(job, "the volumes are compared")
    done = job.migration.progress.model_copy(update={"rate_bps": 0.0, "eta_s": 0.0})
    await job.change(progress=done)
    _refuse_left(_repair(job))


async def _tried(job: Job, patience: Patience) -> None:
    # Checked again: the guest may have been started while this waited.
    await _refuse(job)
    marks = await job.in_thread(job.rooms.store.watermarks, job.id, _NUMBER)
    tally = Tally(before={})
    tally.take_up(marks)
    listener = _Listener(job, _NUMBER, tally, Clock(0.0), patience)

    async def attempt(marks: dict[str, Watermark]) -> None:
        left = [one for one in job.copied_disks if one[0].key not in marks or not marks[one[0].key].finished]
        if not left:  # the snapshot that it was read from may be gone
            return
        async with job.rooms.workers() as worker, _sources(job) as sources:
            order = await job.in_thread(_order, job, left, sources, marks)
            listener.worker = worker
            ended = await worker.carry_out(order, listener.on_message, job.stop.is_set, patience.show)
            job.stop.check()
            ended.check(ANSWERED)

    await again_and_again(listener, marks, attempt)


async def _refuse(job: Job) -> None:
    repair = _repair(job)
    before = await job.in_thread(job.rooms.store.get, repair.of)
    await job.in_thread(refuse_volumes, job.rooms, before, repair)


@asynccontextmanager
async def _sources(job: Job) -> AsyncIterator[Mapping[str, ReaderSpec]]:
    """Readers by disk key; none, if nothing will be written."""
    if _repair(job).check_only:
        yield {}
    elif job.migration.plan.source.Live is None:
        yield _in_parts({disk.key: disk.reader for disk in await disks_of_files(job)})
    else:
        snapshot = await snapshot_of(job, _NUMBER, "full")
        async with job.session() as adapter:
            vm = job.vm_id
            opened = {disk.key: await adapter.open_disk(vm, snapshot, disk, None) for disk, _ in job.copied_disks}
            yield _in_parts({key: read_whole(reader) for key, reader in opened.items()})


def _in_parts(sources: Mapping[str, ReaderSpec]) -> Mapping[str, ReaderSpec]:
    """Conflict, if a reader cannot be read at any position."""
    for key, reader in sources.items():
        if comes_once(reader):
            raise Conflict(
                f"disk {key} comes from its source as one stream: no part of it can be read alone",
                hint="see what differs with check_only; if anything does, migrate it again",
            )
    return sources


def _order(
    job: Job, left: Sequence[tuple[Disk, str]], sources: Mapping[str, ReaderSpec], marks: Mapping[str, Watermark]
) -> RepairOrder:
    """Blocks."""
    before = job.rooms.store.get(_repair(job).of)
    ledgers = ledgers_of(job.rooms, before)
    return RepairOrder(
        disks=tuple(
            DiskRepairOrder(
                key=disk.key,
                ledger=ledgers[disk.key],
                volume=job.destination.open(volume, disk.capacity_bytes),
                source=sources.get(disk.key),
                since_bytes=marks[disk.key].offset_bytes if disk.key in marks else 0,
            )
            for disk, volume in left
        ),
        threads=job.rooms.copy_threads,
    )


class _Listener(Listener):
    """Stores what differs before the worker goes on."""

    worker: Worker

    async def result(self, message: Result) -> None:
        spans = DiskSpans.of(message.content)
        await self.job.change(repair=_with(_repair(self.job), message.name, spans))
        if message.name == DIFFERING:
            await self.worker.send(Noted(key=spans.key))


# The list of a disk's report for each of the worker's messages.
_LISTS: Final = {DIFFERING: "differs", LEFT: "left"}


def _with(before: Repair, name: str, found: DiskSpans) -> Repair:
    field = _LISTS[name]

    def changed(disk: DiskRepair) -> DiskRepair:
        if disk.key != found.key:
            return disk
        spans, more = listed(getattr(disk, field), found.spans)
        return disk.model_copy(update={field: spans, "more": disk.more or more})

    return before.model_copy(update={"disks": tuple(map(changed, before.disks))})


def _refuse_left(found: Repair) -> None:
    if found.check_only or found.is_right:
        return
    named = [f"disk {disk.key}: {span.length} bytes at {span.start}" for disk in found.disks for span in disk.left]
    more = " and more" if len(named) > _NAMED_MOST or any(disk.more for disk in found.disks) else ""
    raise DiskReadFailed(
        f"the source does not hold either what the receipt says: {'; '.join(named[:_NAMED_MOST])}{more}; nothing was written"
        " there",
        hint="the source has changed since it was copied: bring back the one that was copied, or migrate it again",
    )


def _repair(job: Job) -> Repair:
    assert job.migration.repair is not None
    return job.migration.repair
