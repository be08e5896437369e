"""A pass: a worker process copies one disk after another, each from its watermark. asyncio.

    readers, writers and watermarks ─▶ an order ─▶ worker ─▶ messages ─▶ store and board

When a worker is killed, or a source does not answer for a while, the pass goes on from the last watermark. Only attempts that
move no watermark count as failures.
"""

import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass, field, replace

import structlog

from synvirt.disks.checking.sampling import ChangesMissed, would_see
from synvirt.disks.specs import ChecksumSpec, ReaderSpec
from synvirt.disks.vsphere.datastore import FileClosed, FileGone, ReadForbidden
from synvirt.errors import SynvirtError
from synvirt.jobs.orders import WANTED_RATE, CopyOrder, DiskOrder, HashesOrder, WantedRate
from synvirt.jobs.process import WorkerDied
from synvirt.jobs.rate import Rate
from synvirt.jobs.wire import Flushed, Moved, Result
from synvirt.migrations.job import Job
from synvirt.migrations.patience import Patience, patiently
from synvirt.migrations.proof.receipts import hashes_orders
from synvirt.migrations.sharing import Turns, sharing
from synvirt.model.job import DiskProgress, Pass, Progress
from synvirt.model.values import now
from synvirt.store import Watermark

log = structlog.get_logger(__name__)

# Passes in the job's document, besides the first. A held job has thousands of them, and writes its document at each watermark.
PASSES_KEPT = 20
# Pauses after attempts in a row that moved no watermark: the worker died, or files could not be read. A job waits longer for a
# source that is away.
RETRY_PAUSES_S = (1, 2, 4, 8, 16, 32, 60)
# Errors of a worker that are raised as their own class, not only by their code: callers treat them in their own way.
ANSWERED: dict[str, type[SynvirtError]] = {kind.__name__: kind for kind in (ChangesMissed, ReadForbidden, FileClosed, FileGone)}


@dataclass(frozen=True, slots=True)
class PassDisk:
    """A disk of a pass, ready to be read and written. `compare`, `sample` and `verify`: see the worker's DiskOrder."""

    key: str
    reader: ReaderSpec
    volume: str
    size_bytes: int
    checksums: tuple[ChecksumSpec, ...] = ()
    compare: bool = False
    sample: str | None = None
    verify: bool = False


# Opens the disks of a pass for one attempt: a reader is good only while its session with the source lasts.
Opened = Callable[[], AbstractAsyncContextManager[Sequence[PassDisk]]]


@dataclass
class Tally:
    """Bytes of a pass as its worker reports them, by disk key. `before`: bytes of all earlier passes, and zeros among them."""

    before: dict[str, tuple[int, int]]
    disks: dict[str, Moved | Flushed] = field(default_factory=dict)
    _rate: Rate = field(default_factory=Rate)

    def take(self, message: Moved | Flushed) -> None:
        """Takes a report. A flush reports what was done when it began; the later, higher figures stay."""
        so_far = self.disks.get(message.key, message)
        if isinstance(message, Flushed) and not message.finished and so_far.bytes_done > message.bytes_done:
            message = replace(
                message, bytes_total=so_far.bytes_total, bytes_done=so_far.bytes_done, bytes_zero=so_far.bytes_zero
            )
        self.disks[message.key] = message

    def take_up(self, marks: dict[str, Watermark]) -> None:
        """Sets what is durable, from before the service ended."""
        for mark in marks.values():
            self.take(_as_message(mark))

    def moved_bytes(self) -> int:
        """Bytes that this pass has copied."""
        return sum(disk.bytes_done for disk in self.disks.values())

    def checked_bytes(self) -> int:
        """Bytes that this pass has compared as samples."""
        return sum(disk.bytes_checked for disk in self.disks.values() if isinstance(disk, Flushed))

    def least_checked_bytes(self) -> int:
        """The least that was compared of any disk: all missed changes may be on that disk."""
        each = (disk.bytes_checked for disk in self.disks.values() if isinstance(disk, Flushed))
        return min((checked for checked in each if checked), default=0)

    def progress(self) -> Progress:
        """The figures of all disks together, with the rate and the time to go."""
        return self._rate.progress(
            total=sum(disk.bytes_total for disk in self.disks.values()),
            done=self.moved_bytes(),
            zero=sum(disk.bytes_zero for disk in self.disks.values()),
            before=(sum(done for done, _ in self.before.values()), sum(zero for _, zero in self.before.values())),
        )


async def run_pass(job: Job, new: Pass, disks: Sequence[PassDisk], *, fresh: bool, yields_to: str | None = None) -> Pass:
    """Copies until every disk of the pass is durable on its volume, and gives the finished pass. Errors name the disk. The job
    holds slots while it copies, and none while it waits for its source. `new`: the pass as it begins. `yields_to`: see
    CopyOrder."""

    @asynccontextmanager
    async def as_they_are() -> AsyncIterator[Sequence[PassDisk]]:
        yield disks

    async def tried(patience: Patience) -> Pass:
        async with job.slots():
            return await run_opened_pass(job, new, as_they_are, patience, fresh=fresh, yields_to=yields_to)

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
    waits is raised at once; `patience.over` is called when a watermark moves again."""
    begun = await _begin(job, new)
    if begun.finished_at is not None:
        return begun
    number, kind = begun.number, begun.kind
    marks = await job.in_thread(job.rooms.store.watermarks, job.id, number)
    tally = Tally(before=await job.in_thread(job.rooms.store.copied_before, job.id, number))
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
                        ended = await worker.carry_out(order, listener.hear, job.stop.is_set)
                    job.stop.check()
                    ended.check(ANSWERED)

    await again_and_again(listener, marks, attempt)
    return await _finish(job, number, tally, clock)


async def again_and_again(
    listener: "Listener", marks: dict[str, Watermark], attempt: Callable[[dict[str, Watermark]], Awaitable[None]]
) -> None:
    """Repeats `attempt`, which goes on from the watermarks, until it succeeds: as long as workers die or files cannot be read,
    but some attempts bring progress."""
    job, failures = listener.job, 0
    while True:
        listener.moved = False
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
        await job.change(passes=(first, *later[-PASSES_KEPT:]))
    return begun


async def _finish(job: Job, number: int, tally: Tally, clock: "Clock") -> Pass:
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
        hashes=hashes,
    )


def _as_message(mark: Watermark) -> Flushed:
    return Flushed(
        key=mark.disk_key,
        offset_bytes=mark.offset_bytes,
        bytes_total=mark.bytes_total,
        bytes_done=mark.bytes_done,
        bytes_zero=mark.bytes_zero,
        finished=mark.finished,
    )


def disk_progress(disks: tuple[DiskProgress, ...], tally: Tally, *, finished: bool = False) -> tuple[DiskProgress, ...]:
    """The disks with their figures; `finished`: all of them."""

    def now_at(disk: DiskProgress) -> DiskProgress:
        message = tally.disks.get(disk.key)
        if message is None:
            return disk.model_copy(update={"state": "copied"}) if finished and disk.state == "waiting" else disk
        copied = finished or (isinstance(message, Flushed) and message.finished)
        done, zero = tally.before.get(disk.key, (0, 0))
        return disk.model_copy(
            update={
                "state": "copied" if copied else "copying",
                "bytes_total": done + message.bytes_total,
                "bytes_done": done + message.bytes_done,
                "bytes_zero": zero + message.bytes_zero,
            }
        )

    return tuple(now_at(disk) for disk in disks)


class Clock:
    """Seconds of copying, including those before a restart. It runs as a context, and stops while the job waits for a
    source."""

    def __init__(self, seconds: float) -> None:
        self._before = seconds
        self._started: float | None = None

    def __enter__(self) -> None:
        self._started = time.monotonic()

    def __exit__(self, *_: object) -> None:
        self._before, self._started = self.seconds(), None

    def seconds(self) -> float:
        """The seconds so far, including the present turn."""
        running_s = 0.0 if self._started is None else time.monotonic() - self._started
        return round(self._before + running_s, 3)


class Listener:
    """Handles a worker's messages: progress goes to the board, watermarks to the store. `moved`: a watermark has moved."""

    def __init__(self, job: Job, number: int, tally: Tally, clock: Clock, patience: Patience) -> None:
        self.job, self.number, self.tally, self.clock, self.patience = job, number, tally, clock, patience
        self.watermarks = {key: disk.offset_bytes for key, disk in tally.disks.items() if isinstance(disk, Flushed)}
        self.moved = False
        self.turns: Turns | None = None

    async def hear(self, message: Moved | Flushed | Result) -> None:
        """Handles a message in the worker's order. A watermark is in the store on return."""
        if isinstance(message, Result):
            await self.result(message)
            return
        job = self.job
        self.tally.take(message)
        progress = self.tally.progress()
        disks = disk_progress(job.migration.disks, self.tally)
        job.rooms.board.pin(job.id, job.migration.state, progress, disks)
        if isinstance(message, Flushed):
            mark = Watermark(
                disk_key=message.key,
                pass_number=self.number,
                offset_bytes=message.offset_bytes,
                bytes_total=message.bytes_total,
                bytes_done=message.bytes_done,
                bytes_zero=message.bytes_zero,
                finished=message.finished,
            )
            await job.in_thread(job.rooms.store.put_watermark, job.id, mark)
            await job.change(
                progress=progress,
                disks=disks,
                passes=tuple(
                    one.model_copy(update={"bytes": self.tally.moved_bytes(), "seconds": self.clock.seconds()})
                    if one.number == self.number
                    else one
                    for one in job.migration.passes
                ),
            )
            if message.offset_bytes > self.watermarks.get(message.key, 0):
                self.watermarks[message.key] = message.offset_bytes
                self.moved = True
                await self.patience.over()

    async def result(self, message: Result) -> None:
        """Handles a result that only this kind of order has."""
        if message.name != WANTED_RATE or self.turns is None:
            raise TypeError(f"a copy has no result {message.name}")
        self.turns.want(WantedRate.of(message.content).bytes)
