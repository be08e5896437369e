"""A run's orders to a worker, from the run's own thread: given, followed, and given again if a worker was killed.

    order_of() ─▶ worker ─▶ on_message(message) ─▶ figures, watermarks; what it returns is the worker's next line

What was stored before a worker died is not done again: copies continue from their watermarks, and a disk being stored from its
journal.
"""

import asyncio
import contextlib
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from uuid import UUID

import structlog
from pydantic import RootModel

from synvirt.backups.memory import Memory
from synvirt.backups.orders import Measured, MeasureOrder, ServeOrder, Serving
from synvirt.backups.under_way import Sum, UnderWay
from synvirt.copying import Copied
from synvirt.errors import BackupInternal, Cancelled, SynvirtError, cause_of
from synvirt.jobs.orders import CopyOrder, DiskOrder
from synvirt.jobs.process import WorkerDied, Workers, started
from synvirt.jobs.shortage import HINT
from synvirt.jobs.wire import Flushed, Moved, Result, WireModel
from synvirt.repository.specs import PointSpec

# Pauses between attempts without progress: a host that ends workers again and again, or has no memory for them, is reported.
RETRY_PAUSES_S = (1.0, 4.0, 16.0)
STOP_POLL_S = 0.2
# After a kill, a restore copies at most this many seconds again.
FLUSH_EVERY_S = 5.0

Message = Moved | Flushed | Result
OnMessage = Callable[[Message], WireModel | None]

_log = structlog.get_logger("synvirt.backups")


@dataclass(frozen=True)
class Working:
    """`threads`: of one worker; None: one for each core."""

    workers: Workers = started
    threads: int | None = None

    def carry_out(self, order_of: Callable[[], WireModel], on_message: OnMessage, stop: Callable[[], bool]) -> None:
        """Executes the order. Cancelled, WorkerDied after several attempts without progress, and the worker's own error."""
        failures, best = 0, dict[str, int]()
        while True:
            moved = False

            def received(message: Message) -> WireModel | None:
                nonlocal moved
                moved = moved or _brought(message, best)
                return on_message(message)

            try:
                return asyncio.run(self._once(order_of(), received, stop))
            except WorkerDied as error:
                failures = 1 if moved else failures + 1
                if failures > len(RETRY_PAUSES_S):
                    raise
                _log.warning("a worker's order is given again", cause=error.detail, attempt=failures)
            wait(RETRY_PAUSES_S[failures - 1], stop)

    def data_bytes(self, disks: Iterable[PointSpec], stop: Callable[[], bool]) -> tuple[int, ...]:
        """For each disk its bytes that are not known to be zeros: what a new volume has to hold. Errors as in `carry_out`."""
        order, found = MeasureOrder(disks=tuple(disks)), Measured(data_bytes=())

        def on_message(message: Message) -> None:
            nonlocal found
            if isinstance(message, Result):
                found = Measured.of(message.content)

        self.carry_out(lambda: order, on_message, stop)
        return found.data_bytes

    @contextlib.contextmanager
    def serving(self, order: ServeOrder, stop: Callable[[], bool]) -> Iterator["Served"]:
        """Serves the disks within the block. Raises the worker's error, if it failed before. Cancelled, once `stop()` is true
        while it waits for them: a repository that hangs answers never."""
        served, ended = Served(), threading.Event()

        def on_message(message: Message) -> None:
            if isinstance(message, Result):
                served.uris = Serving.of(message.content).uris
                served.ready.set()

        def serve() -> None:
            try:
                asyncio.run(self._once(order, on_message, ended.is_set))
            except SynvirtError as error:
                served.failure = None if ended.is_set() else error
            except OSError as error:  # there is no descriptor for the loop, for example
                served.failure = BackupInternal(f"nothing can serve the disks: {cause_of(error)}", hint=HINT)
            finally:
                served.ended.set()
                served.ready.set()

        thread = threading.Thread(target=serve, name="backup-serve", daemon=True)
        thread.start()
        try:
            while not served.ready.wait(STOP_POLL_S):
                if stop():
                    raise Cancelled
            served.check()
            yield served
        finally:
            ended.set()
            thread.join()

    async def _once(self, order: WireModel, on_message: OnMessage, stop: Callable[[], bool]) -> None:
        async with self.workers() as worker:

            async def received(message: Message) -> None:
                line = on_message(message)
                if line is not None:
                    await worker.send(line)

            ended = await worker.carry_out(order, received, stop)
        if stop():
            raise Cancelled
        ended.check()


def _brought(message: Message, best: dict[str, int]) -> bool:
    """Whether an attempt has brought progress that the next one keeps: a higher watermark, a stored pack, or more checked
    data."""
    if isinstance(message, Flushed):
        return _is_more(message.key, message.offset_bytes, best)
    if isinstance(message, Result) and message.name == "looked":
        return _is_more("looked", message.content["looked"]["bytes_read"], best)
    return isinstance(message, Result) and message.name == "stored" and message.content["stored_bytes"] > 0


def _is_more(key: str, count: int, best: dict[str, int]) -> bool:
    before = best.get(key, 0)
    best[key] = max(before, count)
    return count > before


class Served:
    """`uris`: by the disk's number in its point. `ended`: they are served no more. `failure`: the error of a read, or of the
    worker."""

    def __init__(self) -> None:
        self.ready, self.ended = threading.Event(), threading.Event()
        self.uris: dict[int, str] = {}
        self.failure: SynvirtError | None = None

    def check(self, within_s: float = 0.0) -> None:
        """Raises the error that the worker ended with, if it did. `within_s`: or does in this time."""
        if within_s:
            self.ended.wait(within_s)
        if self.failure is not None:
            raise self.failure


def wait(seconds: float, stop: Callable[[], bool]) -> None:
    """Waits. Cancelled, once `stop()` is true."""
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        if stop():
            raise Cancelled
        time.sleep(STOP_POLL_S)


class _Marks(RootModel[dict[str, Flushed]]):
    """Watermarks by disk."""


class Watermarks:
    """How far each disk of a restore is durable on its volume, in the run's memory."""

    def __init__(self, memory: Memory) -> None:
        self._memory = memory

    def of(self, run_id: UUID) -> dict[str, Flushed]:
        """The watermarks by disk."""
        marks = self._memory.mark(run_id, _Marks)
        return {} if marks is None else marks.root

    def put(self, run_id: UUID, marks: dict[str, Flushed]) -> None:
        self._memory.put_mark(run_id, _Marks(marks))


@dataclass(frozen=True)
class Copying:
    """Copies of one restore: what is before a watermark is not written again. `slot`: held while a disk is copied. `yields_to`:
    the file that shows when a guest reads the same disks (jobs/activity.py)."""

    working: Working
    marks: Watermarks
    under_way: UnderWay
    done: Sum
    bandwidth_bps: int | None = None
    slot: Callable[[], contextlib.AbstractContextManager[None]] = contextlib.nullcontext
    yields_to: str | None = None

    def forget(self, key: str) -> None:
        """That disk will be copied from its first byte again."""
        run_id = self.under_way.run.id
        self.marks.put(run_id, {one: mark for one, mark in self.marks.of(run_id).items() if one != key})

    def have_all(self, keys: Iterable[str]) -> bool:
        """Whether these disks are complete and durable."""
        marks = self.marks.of(self.under_way.run.id)
        return all(key in marks and marks[key].finished for key in keys)

    def copy(self, disk: DiskOrder, stop: Callable[[], bool] | None = None) -> None:
        """Copies a disk; it is durable on return. `stop` replaces the run's own, if there are more reasons to stop."""
        figure, run_id = self.done.next_disk(), self.under_way.run.id

        def order() -> CopyOrder:
            mark = self.marks.of(run_id).get(disk.key)
            left = disk if mark is None else replace(disk, since_bytes=mark.offset_bytes)
            return CopyOrder(
                disks=(left,),
                threads=self.working.threads,
                bandwidth_bps=self.bandwidth_bps,
                flush_every_s=FLUSH_EVERY_S,
                yields_to=self.yields_to,
            )

        def on_message(message: Message) -> None:
            if isinstance(message, Result):
                raise TypeError("a copy has no results")
            figure(Copied(message.bytes_total, message.bytes_done, message.bytes_zero, 0))
            if isinstance(message, Flushed):
                self.marks.put(run_id, {**self.marks.of(run_id), disk.key: message})

        known = self.marks.of(run_id).get(disk.key)
        if known is not None and known.finished:
            figure(Copied(known.bytes_total, known.bytes_done, known.bytes_zero, 0))
            return
        with self.slot():
            self.working.carry_out(order, on_message, stop or self.under_way.stop)
