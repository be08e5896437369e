"""The runner: every job of this host that has not ended is run to its end, through crashes and restarts. asyncio, in a thread.

    begin(job) ─┐
    reconcile ──┴─▶ a task a job ─▶ run(job) ─▶ ended: gone
                                       └─ the store is away: again after a pause

A job is run again from what the store says of it: its state, watermarks and ledger. So the runner stores nothing of its own.
A job that was lost in a crash, or never begun, is found by the next look. One event loop is shared by all jobs; what blocks
goes to threads.
"""

import asyncio
import threading
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from uuid import UUID

import structlog

from synvirt.errors import PersistFailed
from synvirt.store.hosts import LeaseLost

log = structlog.get_logger(__name__)

# Between two looks for jobs that nobody began: a service that died between a job's row and its begin, a host's jobs taken over.
RECONCILE_EVERY_S = 30.0
# Of the event loop that all jobs share: a thread each for those that wait for a boot or a conversion, and some for the store.
THREADS = 256
# The store is away (a full disk, a database that restarts): the job waits for it, whatever it takes.
STORE_PAUSE_S = 2.0
# A step that hangs at a source does not hold up the end of the service: the next start runs it again. A worker stops within
# 10 s; after a lost lease 50 s remain before another host may begin.
END_TIMEOUT_S = 12.0


async def _nothing() -> None:
    pass


async def in_a_thread(work: Callable[[], None], let_go: Callable[[], None] = lambda: None) -> None:
    """For a kind whose `run` blocks. It ends with its thread, however often its task is cancelled meanwhile: two threads of one
    job would both write. A thread hears of that by `let_go` alone, or by a flag that was set before."""
    doing, cancelled = asyncio.ensure_future(asyncio.to_thread(work)), False
    while not doing.done():
        try:
            await asyncio.shield(doing)
        except asyncio.CancelledError:
            cancelled = True
            let_go()
    if cancelled:
        raise asyncio.CancelledError


class Runner:
    """`run(job_id)` moves one job to its end; PersistFailed is the only error that may leave it, and it is then called again.
    `unended()` lists the jobs of this host that have not ended, oldest first; it blocks. `on_begin` is called in the event loop
    before jobs run there, `on_end` once they are let go of; in turns."""

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
        # Made with its thread: one that is never started holds no descriptors.
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread = threading.Thread(target=self._serve, name=name, daemon=True)
        self._tasks: dict[UUID, asyncio.Task[None]] = {}
        self._closing = self._paused = False
        self._look_now = asyncio.Event()

    def start(self) -> None:
        """Starts the thread and its event loop, and looks for jobs at once."""
        self._loop = asyncio.new_event_loop()
        self._thread.start()
        self._soon(self._on_begin)
        self._soon(self._look)

    def begin(self, job_id: UUID) -> None:
        """Run the job, if nobody does already; before the start, the start finds it. From any thread; returns at once."""
        if not self._closing:
            with suppress(RuntimeError):  # closed meanwhile: the next start finds the job
                self._soon(self._begin, job_id)

    def pause(self) -> None:
        """Let go of the jobs as a crash would, and begin none until `resume`: this host must not work now. Their workers are
        ended when it returns."""
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
        """Let go of the jobs as a crash would: they go on at the next start. Workers end with their tasks."""
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
        self._loop.set_default_executor(ThreadPoolExecutor(THREADS, thread_name_prefix=self._name))
        try:
            self._loop.run_forever()
        finally:
            self._loop.close()

    def _begin(self, job_id: UUID) -> None:
        if job_id not in self._tasks and not self._closing and not self._paused:
            self._tasks[job_id] = task = asyncio.get_running_loop().create_task(self._until_its_end(job_id))
            task.add_done_callback(lambda _: self._tasks.pop(job_id, None))

    def _look(self) -> None:
        self._looking = asyncio.get_running_loop().create_task(self._reconcile())

    async def _until_its_end(self, job_id: UUID) -> None:
        while True:
            try:
                await self._run(job_id)
            except LeaseLost as error:
                log.warning("the job is not this process's any more", job=str(job_id), cause=error.detail)
                return
            except PersistFailed as error:
                log.warning("the store is away; the job waits", job=str(job_id), cause=error.detail)
                await asyncio.sleep(STORE_PAUSE_S)
            except Exception:
                # Ours to mend; the next look runs the job again.
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
