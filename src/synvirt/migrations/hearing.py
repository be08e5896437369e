"""What the worker of a pass says: progress goes to the board, watermarks to the store. asyncio.

Moved ──▶ Tally ─▶ figures of all disks together ─▶ board
Flushed ─▶ the same, and a watermark in the store, and the job's document
"""

import time
from dataclasses import dataclass, field, replace

from synvirt.disks.noted_files import names_of_changed
from synvirt.disks.raw.changes import HINT
from synvirt.errors import DiskReadFailed
from synvirt.http_answers import LEAST_BYTES
from synvirt.jobs.orders import PREPARING, SOURCE_FILES, WANTED_RATE, SourceFiles, WantedRate
from synvirt.jobs.rate import Rate
from synvirt.jobs.wire import Flushed, Moved, Result
from synvirt.migrations.job import Job
from synvirt.migrations.patience import Patience
from synvirt.migrations.sharing import Turns
from synvirt.model.job import DiskProgress, Progress
from synvirt.store import Watermark


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
    """Handles a worker's messages: progress goes to the board, watermarks to the store. `moved`: the watermarks have moved by
    LEAST_BYTES since the attempt began, or a disk is finished: a source that sends a byte to each attempt makes no progress."""

    def __init__(self, job: Job, number: int, tally: Tally, clock: Clock, patience: Patience) -> None:
        self.job, self.number, self.tally, self.clock, self.patience = job, number, tally, clock, patience
        self.watermarks = {key: disk.offset_bytes for key, disk in tally.disks.items() if isinstance(disk, Flushed)}
        self.begin_attempt()
        self.turns: Turns | None = None

    def begin_attempt(self) -> None:
        """A new worker begins: what was moved before is not its own progress."""
        self.moved, self._gained = False, 0

    async def on_message(self, message: Moved | Flushed | Result) -> None:
        """Handles a message in the worker's order. A watermark is in the store on return."""
        if isinstance(message, Result):
            if message.name == SOURCE_FILES:
                await self._refuse_others(SourceFiles.of(message.content))
            elif message.name != PREPARING:
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
            await job.change(
                mark,
                progress=progress,
                disks=disks,
                passes=tuple(
                    one.model_copy(update={"bytes": self.tally.moved_bytes(), "seconds": self.clock.seconds()})
                    if one.number == self.number
                    else one
                    for one in job.migration.passes
                ),
            )
            gained = message.offset_bytes - self.watermarks.get(message.key, 0)
            if gained > 0:
                self.watermarks[message.key] = message.offset_bytes
                self._gained += gained
                if message.finished or self._gained >= LEAST_BYTES:
                    self.moved = True
                    await self.patience.over()

    async def _refuse_others(self, opened: SourceFiles) -> None:
        """DiskReadFailed, where a worker before this one has read other files."""
        job = self.job
        noted = (await job.memory()).opened_files
        before = noted.get(opened.key)
        if before is None:
            await job.note(opened_files={**noted, opened.key: opened.files})
        elif before != opened.files:
            names = ", ".join(names_of_changed(before, opened.files))
            raise DiskReadFailed(f"disk {opened.key}: {names} was changed or replaced since its copy began", hint=HINT)

    async def result(self, message: Result) -> None:
        """Handles a result that only this kind of order has."""
        if message.name != WANTED_RATE or self.turns is None:
            raise TypeError(f"a copy has no result {message.name}")
        self.turns.want(WantedRate.of(message.content).bytes)
