"""A pass: a worker process copies one disk after another, each from its watermark. asyncio.

    readers, writers and watermarks ─▶ an order ─▶ worker ─▶ messages ─▶ store and board

When a worker is killed, or a source does not answer for a while, the pass goes on from the last watermark. Only attempts that
move no watermark count as failures.
"""

from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass, replace

import structlog

from synvirt.disks.checking.sampling import ChangesMissed, would_see
from synvirt.disks.specs import ChecksumSpec, ReaderSpec
from synvirt.disks.vsphere.datastore import FileClosed, FileGone, ReadForbidden
from synvirt.errors import SynvirtError
from synvirt.jobs.orders import CopyOrder, DiskOrder, HashesOrder
from synvirt.jobs.process import WorkerDied
from synvirt.migrations.hearing import Clock, Listener, Tally, disk_progress
from synvirt.migrations.job import Job
from synvirt.migrations.patience import Patience, patiently
from synvirt.migrations.proof.receipts import hashes_orders
from synvirt.migrations.sharing import sharing
from synvirt.model.job import Pass
from synvirt.model.values import now
from synvirt.store import Watermark

log = structlog.get_logger(__name__)

# Passes in the job's document, besides the first and the last comparison. A held job has thousands of them, and writes its
# document at each watermark.
PASSES_KEPT = 20
# Pauses after attempts in a row that moved no watermark: the worker died, or files could not be read. A job waits longer for a
# source that is away.
RETRY_PAUSES_S = (1, 2, 4, 8, 16, 32, 60)
# Errors of a worker that are raised as their own class, not only by their code: callers treat them in their own way.
ANSWERED: dict[str, type[SynvirtError]] = {kind.__name__: kind for kind in (ChangesMissed, ReadForbidden, FileClosed, FileGone)}


@dataclass(frozen=True, slots=True)
class PassDisk:
    """A disk of a pass, ready to be read and written. `compare`, `sample`, `verify` and `still`: see the worker's DiskOrder."""

    key: str
    reader: ReaderSpec
    volume: str
    size_bytes: int
    checksums: tuple[ChecksumSpec, ...] = ()
    compare: bool = False
    sample: str | None = None
    verify: bool = False
    still: bool = False


# Opens the disks of a pass for one attempt: a reader is good only while its session with the source lasts.
Opened = Callable[[], AbstractAsyncContextManager[Sequence[PassDisk]]]


async def run_pass(job: Job, new: Pass, disks: Sequence[PassDisk], *, yields_to: str | None = None) -> Pass:
    """Copies to new volumes until every disk of the pass is durable on its volume, and gives the finished pass. Errors name the
    disk. The job holds slots while it copies, and none while it waits for its source. `new`: the pass as it begins.
    `yields_to`: see CopyOrder."""

    @asynccontextmanager
    async def as_they_are() -> AsyncIterator[Sequence[PassDisk]]:
        yield disks

    async def tried(patience: Patience) -> Pass:
        async with job.slots():
            return await run_opened_pass(job, new, as_they_are, patience, fresh=True, yields_to=yields_to)

    return await patiently(job, tried)


async def run_opened_pass(
    job: Job,
    new: Pass,
    opened: Opened,
    patience: Patience,
    *,
    fresh: bool,
    yields_to: str | None = None,
) -> Pass:
    """Like `run_pass`, for disks that `opened` opens for each attempt, in slots of the caller. An error for which the caller
    waits is raised at once; `patience.over` is called when the copy makes progress again."""
    begun = await _begin(job, new)
    if begun.finished_at is not None:
        return begun
    number, kind = begun.number, begun.kind
    marks, before = await job.in_thread(job.rooms.store.copied, job.id, number)
    tally = Tally(before=before)
    tally.take_up(marks)
    clock = Clock(begun.seconds)
    listener = Listener(job, number, tally, clock, patience)
    rate = await job.in_thread(job.rooms.rate_of, job.migration)
    shared_bytes = None if rate is None else rate.piece_bytes(last=kind == "final")

    async def attempt(marks: dict[str, Watermark]) -> None:
        # A worker takes as long to start as the disks take to open: at a cut-over the guest waits for both.
        with clock:
            async with job.rooms.workers() as worker, opened() as disks:
                order = await job.in_thread(_order, job, kind, disks, marks, fresh=fresh, shared_bytes=shared_bytes)
                order = replace(order, yields_to=yields_to)
                if order.disks:
                    async with sharing(worker, rate, job.stop) as listener.turns:
                        ended = await worker.carry_out(order, listener.on_message, job.stop.is_set, patience.show)
                    job.stop.check()
                    ended.check(ANSWERED)

    await again_and_again(listener, marks, attempt)
    return await _finish(job, number, tally, clock)


async def again_and_again(
    listener: Listener, marks: dict[str, Watermark], attempt: Callable[[dict[str, Watermark]], Awaitable[None]]
) -> None:
    """Repeats `attempt`, which goes on from the watermarks, until it succeeds: as long as workers die or files cannot be read,
    but some attempts bring progress."""
    job, failures = listener.job, 0
    while True:
        listener.begin_attempt()
        try:
            await attempt(marks)
        except (WorkerDied, ReadForbidden, FileGone) as error:
            # A file that one way may not read can perhaps be opened by another way. A missing file may have moved.
            failures = 1 if listener.moved else failures + 1
            if failures > len(RETRY_PAUSES_S):
                raise
            log.warning("a pass is tried again", job=str(job.id), number=listener.number, cause=error.detail, attempt=failures)
            await job.stop.sleep(RETRY_PAUSES_S[failures - 1])
        else:
            return
        marks = await job.in_thread(job.rooms.store.watermarks, job.id, listener.number)


async def _begin(job: Job, new: Pass) -> Pass:
    """The pass in the job's document, with the moment that it copies. It is added if it is not there yet; one that was begun
    before keeps its figures."""
    passes = {one.number: one for one in job.migration.passes}
    begun = passes.get(new.number, new).model_copy(update={"snapshot_at": new.snapshot_at, "whole": new.whole})
    if passes.get(new.number) != begun:
        first, *later = (passes | {new.number: begun}).values()
        await job.change(passes=(first, *_kept(later)))
    return begun


def _kept(later: Sequence[Pass]) -> list[Pass]:
    """The newest passes, and the last one that compared everything: the next such pass is due by its age."""
    compared = [one for one in later if one.verify and one.finished_at is not None][-1:]
    newest = list(later[-PASSES_KEPT:])
    return newest if not compared or compared[0] in newest else [*compared, *newest]


async def _finish(job: Job, number: int, tally: Tally, clock: Clock) -> Pass:
    progress = tally.progress()
    begun = next(one for one in job.migration.passes if one.number == number)
    checked, least = tally.checked_bytes(), tally.least_checked_bytes()
    done = begun.model_copy(
        update={
            "bytes": tally.moved_bytes(),
            "bytes_checked": checked,
            # A full comparison leaves nothing to chance.
            "would_see": (0.0 if begun.verify else would_see(least, job.migration.plan.warm.confidence)) if checked else None,
            "seconds": clock.seconds(),
            "finished_at": now(),
        }
    )
    await job.change(
        passes=tuple(done if one.number == number else one for one in job.migration.passes),
        progress=progress.model_copy(update={"rate_bps": 0.0, "eta_s": 0.0, "bytes_total": progress.bytes_done}),
        disks=disk_progress(job.migration.disks, tally, finished=True),
    )
    job.rooms.board.pin(job.id, job.migration.state, job.migration.progress)
    return done


def _finished(marks: dict[str, Watermark], key: str) -> bool:
    return key in marks and marks[key].finished


def _order(
    job: Job, kind: str, disks: Sequence[PassDisk], marks: dict[str, Watermark], *, fresh: bool, shared_bytes: int | None
) -> CopyOrder:
    """The order for the rest of the pass. Blocks: a destination may have to wait for a device."""
    hashes = hashes_orders(job, kind)
    return CopyOrder(
        disks=tuple(
            _disk_order(job, disk, marks, fresh=fresh, hashes=hashes.get(disk.key))
            for disk in disks
            if not _finished(marks, disk.key)
        ),
        threads=job.rooms.copy_threads,
        bandwidth_bps=job.migration.plan.limits.bandwidth_bps,
        shared_bytes=shared_bytes,
        flush_every_s=job.rooms.flush_every_s,
    )


def _disk_order(job: Job, disk: PassDisk, marks: dict[str, Watermark], *, fresh: bool, hashes: HashesOrder | None) -> DiskOrder:
    return DiskOrder(
        key=disk.key,
        reader=disk.reader,
        writer=job.destination.open(disk.volume, disk.size_bytes),
        checksums=disk.checksums,
        since_bytes=marks[disk.key].offset_bytes if disk.key in marks else 0,
        fresh=fresh,
        compare=disk.compare,
        sample=disk.sample,
        verify=disk.verify,
        still=disk.still,
        hashes=hashes,
    )
