"""The runner: it runs every unended job of this host to its end, through crashes and restarts. asyncio, in a thread.

    begin(job) ─┐
    reconcile ──┴─▶ a task a job ─▶ run(job) ─▶ ended: gone
                                       └─ the store is away: again after a pause

A job runs again from what the store has: its state, watermarks and ledger. So the runner itself stores nothing. The next look
finds a job that was lost in a crash, or that was never begun. All jobs share one event loop; blocking code runs in threads.
"""

import asyncio
import threading
import time
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import TypeVar
from uuid import UUID

import structlog

from synvirt.errors import PersistFailed
from synvirt.store.hosts import LeaseLost

log = structlog.get_logger(__name__)

T = TypeVar("T")

# Seconds between two looks for jobs that were not begun: a service died after it wrote a job's row, or a job was taken over.
RECONCILE_EVERY_S = 30.0
# Threads of the event loop that all jobs share: one for each job that waits for a boot or a conversion, and some for the store.
THREADS = 256
# The pause while the store is away (a full disk, a database that restarts). The job waits for as long as that takes.
STORE_PAUSE_S = 2.0
# How often the log says so of each job: it may lie on the disk that is full.
STORE_SAID_EVERY_S = 60.0
# A step that hangs at a source does not hold up the end of the service: the next start runs it again. A worker stops within
# 10 s; after a lost lease 50 s remain before another host may begin.
END_TIMEOUT_S = 12.0


async def _nothing() -> None:
    pass


class Threads(ThreadPoolExecutor):
    """Where the host has no more threads, work waits for one of those that there are. Python's own says that it failed, and
    does it all the same, later: what failed would be undone, and then be done."""

    def _adjust_thread_count(self) -> None:
        try:
            super()._adjust_thread_count()
        except RuntimeError:
            if not self._threads:
                self._work_queue.get_nowait()  # nobody does it, now or later
                raise


async def in_a_thread(work: Callable[[], T], let_go: Callable[[], None] = lambda: None) -> T:
    """The result of blocking `work` in a thread. It ends only when the thread ends, even if its task is cancelled: two threads
    of one job would both write. `let_go` asks the thread to end. What comes of it then, an error too, is not the task's."""
    doing, cancelled = asyncio.ensure_future(asyncio.to_thread(work)), False
    while not doing.done():
        try:
            await asyncio.wait([doing])
        except asyncio.CancelledError:
            cancelled = True
            let_go()
    if cancelled:
        doing.exception()  # else asyncio logs it as one that nobody looked at
        raise asyncio.CancelledError
    return doing.result()


class Runner:
    """`run(job_id)` runs one job to its end; it may raise only PersistFailed, and is then called again. `unended()` gives the
    unended jobs of this host, oldest first; it blocks. `on_begin` is called in the event loop before jobs run there, `on_end`
    after they were stopped; each may be called several times, in turns."""

    def __init__(
        self,
        run: Callable[[UUID], Awaitable[None]],
        unended: Callable[[], list[UUID]],
        *,
        name: str,
        on_begin: Callable[[], None] = lambda: None,
        on_end: Callable[[], Awaitable[None]] = _nothing,
    ) -> None:
        self._on_begin, self._on_end = on_begin, on_end
        self._run, self._unended, self._name = run, unended, name
        # Made with its thread, so that a runner that is never started has no descriptors.
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread = threading.Thread(target=self._serve, name=name, daemon=True)
        self._tasks: dict[UUID, asyncio.Task[None]] = {}
        self._closing = self._paused = False
        self._look_now = asyncio.Event()

    def start(self) -> None:
        """Starts the thread and its event loop, and looks for jobs at once. Where the host has no thread or no descriptor for
        them, it raises that, and may be called again."""
        self._loop = asyncio.new_event_loop()
        try:
            self._thread.start()
        except RuntimeError:
            self._loop.close()
            self._loop = None
            raise
        self._soon(self._on_begin)
        self._soon(self._look)

    def begin(self, job_id: UUID) -> None:
        """Runs the job, if it does not run already. From any thread; returns at once. Before `start` it does nothing: the start
        finds the job."""
        if not self._closing:
            with suppress(RuntimeError):  # closed meanwhile: the next start finds the job
                self._soon(self._begin, job_id)

    def stop(self, job_id: UUID) -> None:
        """Stops one job where it is, as a crash would, and looks for jobs again. From any thread; returns at once."""
        self._soon(self._stop, job_id)

    def pause(self) -> None:
        """Stops the jobs where they are, as a crash would, and begins none until `resume`. Their workers have ended when it
        returns."""
        self._paused = True
        self._end_all()

    def resume(self) -> None:
        """Runs jobs again after `pause`: the host holds its lease."""
        self._paused = False
        self._soon(self._on_begin)
        self._soon(self._look_now.set)

    def running(self) -> set[UUID]:
        return set(self._tasks)

    def close(self) -> None:
        """Stops the jobs where they are, as a crash would. They go on at the next start. Workers end with their tasks."""
        if self._closing:
            return
        self._closing = True
        if self._loop is None:
            return
        self._end_all()
        self._soon(self._loop.stop)
        self._thread.join(END_TIMEOUT_S)

    def _soon(self, call: Callable[..., object], *arguments: object) -> None:
        if self._loop is not None:
            self._loop.call_soon_threadsafe(call, *arguments)

    def _end_all(self) -> None:
        if self._loop is not None:
            with suppress(TimeoutError):
                asyncio.run_coroutine_threadsafe(self._let_go(), self._loop).result(END_TIMEOUT_S)

    def _serve(self) -> None:
        assert self._loop is not None
        asyncio.set_event_loop(self._loop)
        self._loop.set_default_executor(Threads(THREADS, thread_name_prefix=self._name))
        try:
            self._loop.run_forever()
        finally:
            self._loop.close()

    def _begin(self, job_id: UUID) -> None:
        if job_id not in self._tasks and not self._closing and not self._paused:
            self._tasks[job_id] = task = asyncio.get_running_loop().create_task(self._until_its_end(job_id))
            task.add_done_callback(lambda _: self._tasks.pop(job_id, None))

    def _stop(self, job_id: UUID) -> None:
        if (task := self._tasks.get(job_id)) is not None:
            task.add_done_callback(lambda _: self._look_now.set())
            task.cancel()

    def _look(self) -> None:
        self._looking = asyncio.get_running_loop().create_task(self._reconcile())

    async def _until_its_end(self, job_id: UUID) -> None:
        said_at: float | None = None
        while True:
            try:
                await self._run(job_id)
            except LeaseLost as error:
                log.warning("the job is not this process's any more", job=str(job_id), cause=error.detail)
                return
            except PersistFailed as error:
                if said_at is None or time.monotonic() >= said_at + STORE_SAID_EVERY_S:
                    said_at = time.monotonic()
                    log.warning("the store is away; the job waits", job=str(job_id), cause=error.detail)
                await asyncio.sleep(STORE_PAUSE_S)
            except Exception:
                # A mistake of ours; the next look runs the job again.
                log.exception("a job cannot be run", job=str(job_id))
                return
            else:
                return

    async def _reconcile(self) -> None:
        while True:
            pause_s = RECONCILE_EVERY_S
            self._look_now.clear()
            try:
                for job_id in await asyncio.to_thread(self._unended):
                    self._begin(job_id)
            except PersistFailed as error:
                log.warning("cannot see which jobs have not ended", cause=error.detail)
                pause_s = STORE_PAUSE_S
            except Exception:  # for example no thread: without this task, no lost job would be found before the next start
                log.exception("cannot look for jobs that have not ended")
                pause_s = STORE_PAUSE_S
            with suppress(TimeoutError):
                await asyncio.wait_for(self._look_now.wait(), pause_s)

    async def _let_go(self) -> None:
        tasks = list(self._tasks.values())
        if self._closing:
            tasks.append(self._looking)
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks, timeout=END_TIMEOUT_S)
        await self._on_end()
