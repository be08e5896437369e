"""A worker in this very process: loops that crash or cancel at each commit carry out hundreds of orders, and a process takes a
second to start on a busy machine. One scenario of each loop keeps processes."""

import asyncio
import contextlib
import queue
import threading
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor

from synvirt.errors import SynvirtError
from synvirt.jobs import process
from synvirt.jobs.process import Ended, OnKept, OnMessage, log_kept
from synvirt.jobs.wire import Broken, CarriedOut, Message, WireModel, message_of
from synvirt.jobs.worker import Tasks, carry_out, read_order
from synvirt.worker import TASKS


class Gone(BaseException):
    """Nobody hears the worker any more: as a process it would be killed."""


class InProcess:
    """`tasks`: those of the product, or a test's. What goes over the wire is written and read as a process would."""

    def __init__(self, tasks: Tasks = TASKS) -> None:
        self._tasks = tasks
        self._lines: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        self._stopping = threading.Event()
        self._gone = False
        self._error: BaseException | None = None
        self._say: Callable[[Message], None] = lambda message: None

    async def send(self, line: WireModel) -> None:
        self._lines.put(line.to_line())

    async def carry_out(
        self, order: WireModel, on_message: OnMessage, stopped: Callable[[], bool], on_kept: OnKept = log_kept
    ) -> Ended:
        loop = asyncio.get_running_loop()
        last: Broken | CarriedOut | None = None

        async def received(message: Message) -> None:
            nonlocal last
            if isinstance(message, Broken | CarriedOut):
                last = message
            else:
                await on_message(message)

        def say(message: Message) -> None:
            if self._gone:
                raise Gone
            try:
                line = message.to_line()
                assert len(line) <= process.LINE_BYTES_MAX, "the line of a process would not be read any more"
                asyncio.run_coroutine_threadsafe(received(message_of(line)), loop).result()
            except BaseException as error:  # the service's own: the order did not fail
                self._error = error
                raise Gone from error

        self._say = say
        stopper = asyncio.create_task(self._stop_when(stopped))
        with ThreadPoolExecutor(1, "worker") as pool:
            work = loop.run_in_executor(pool, self._work, order.to_line())
            try:
                code = await asyncio.shield(work)
            finally:
                stopper.cancel()
                self._gone = True
                self._stopping.set()
                self._lines.put(None)
                await asyncio.wait([work])
        if self._error is not None:
            raise self._error
        return Ended(last, code)

    def _work(self, line: bytes) -> int:
        task, order = read_order(line, self._tasks)
        try:
            carry_out(task, order, self)
        except SynvirtError:
            return 1
        except Gone:
            return -9
        return 0

    async def _stop_when(self, stopped: Callable[[], bool]) -> None:
        while not stopped():
            await asyncio.sleep(0.02)
        self._stopping.set()

    # ── the worker's end of the wire ─────────────────────────────────────────────────────────────────────────────────

    def say(self, message: Message) -> None:
        self._say(message)

    def stop(self) -> bool:
        return self._stopping.is_set()

    def next_line(self) -> bytes:
        line = self._lines.get()
        if line is None:
            raise Gone
        return line


@contextlib.asynccontextmanager
async def in_process() -> AsyncIterator[InProcess]:
    yield InProcess()
