"""The service's side of a worker process: it starts the worker, gives it an order, reads its messages and stops it.
asyncio; a thread uses `asyncio.run`.

    async with started() as worker:                       at the end of the block the process has ended
        ended = await worker.carry_out(order, on_message, stopped)
        ended.check()                                     raises the worker's error

Callers take a `Workers`, so that tests can carry out orders in their own process.
"""

import asyncio
import contextlib
import os
import signal
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass
from typing import Protocol

import structlog

from synvirt.cage.scratch import sweep_of
from synvirt.errors import Cancelled, Internal, SynvirtError, from_code
from synvirt.jobs.shortage import HINT
from synvirt.jobs.stalling import Stall, Stalled
from synvirt.jobs.wire import (
    KEEPALIVE_S,
    SHORT,
    SILENCE_S,
    Broken,
    CarriedOut,
    Flushed,
    Moved,
    Order,
    Result,
    Watched,
    WireModel,
    message_of,
)
from synvirt.programs import inherited

log = structlog.get_logger(__name__)

# How long a worker may take to stop, at its next request. Then it is killed.
STOP_GRACE_S = 10.0
STOP_POLL_S = 0.1
# The most bytes of a line. A message has a few hundred.
LINE_BYTES_MAX = 1 << 20
STDERR_KEPT_CHARS = 2000
# The service's environment may hold secrets; a worker reads hostile images.
ENVIRONMENT = ("PATH", "HOME", "LANG", "TMPDIR", "PYTHONPATH")


class WorkerDied(Internal):
    """The worker ended without a last message, could not be started, or had too little of what the system gives."""


class WorkerKept(Internal):
    """A killed worker has not ended. Nothing that it made can be removed before, as it may still write."""

    def __init__(self) -> None:
        super().__init__(
            "a worker was killed and has not ended: the kernel waits for a file system that does not answer",
            hint="the job ends when that file system's server answers, or after `umount -f` of its mount on this host; where a "
            "pool of zfs is suspended, after `zpool clear`",
        )


@dataclass(frozen=True)
class Ended:
    """How an order ended. `last`: the worker's last message; None: it ended without one. `returncode` is negative for a signal.
    `stalled_s`: the worker was ended because it made no progress for this long."""

    last: Broken | CarriedOut | None = None
    returncode: int = 0
    stderr: str = ""
    stalled_s: float | None = None

    def check(self, answered: Mapping[str, type[SynvirtError]] | None = None) -> None:
        """Raises the worker's error. `answered`: classes that are raised as such, not only by their code. WorkerDied, where the
        worker was ended from outside."""
        if self.stalled_s is not None:
            raise Stalled(self.stalled_s)
        broken = self.last if isinstance(self.last, Broken) else None
        if broken is not None and broken.kind == SHORT:
            raise WorkerDied(broken.detail, hint=broken.hint)
        if broken is not None and answered and broken.kind in answered:
            raise answered[broken.kind](broken.detail, hint=broken.hint)
        if broken is not None and broken.code not in (Cancelled.code, "E_BAK_CANCELLED"):
            raise from_code(broken.code, broken.detail, broken.hint)
        if self.returncode != 0 or not isinstance(self.last, CarriedOut):
            how = f"signal {-self.returncode}" if self.returncode < 0 else f"exit code {self.returncode}"
            log.error("worker died", how=how, stderr=self.stderr)
            raise WorkerDied(
                f"the worker was ended by {how}", hint="the service's log has its last messages; memory may be short"
            )


OnMessage = Callable[[Moved | Flushed | Result], Awaitable[None]]


OnKept = Callable[[WorkerKept], Awaitable[None]]


async def log_kept(_kept: WorkerKept) -> None:
    """The log has it already."""


class Worker(Protocol):
    """Carries out one order. `on_message` gets each message except the last one; what it raises ends the worker and is raised.
    `stopped` is asked often: once it is True the worker is asked to stop, and killed if it does not. `on_kept`: it was killed,
    and does not end. `send`: sends one more line."""

    async def carry_out(
        self, order: WireModel, on_message: OnMessage, stopped: Callable[[], bool], on_kept: OnKept = log_kept
    ) -> Ended: ...
    async def send(self, line: WireModel) -> None: ...


Workers = Callable[[], AbstractAsyncContextManager[Worker]]


@asynccontextmanager
async def started(silence_s: float = SILENCE_S, *, stalled_s: float | None = None) -> AsyncIterator[Worker]:
    """A started worker that waits for its order. It can start while the disks are opened, as both take about as long.
    `silence_s`: for tests, whose leases are shorter. `stalled_s`: an order without progress for this long fails. WorkerDied,
    where this host has no more processes, descriptors or memory for it."""
    child = await _child(silence_s)
    try:
        yield _Process(child, keepalive_s=silence_s * KEEPALIVE_S / SILENCE_S, stalled_s=stalled_s)
    finally:
        await _end(child)
        sweep_of(child.pid)


async def _child(silence_s: float) -> asyncio.subprocess.Process:
    try:
        return await asyncio.create_subprocess_exec(
            sys.executable,
            "-P",  # no modules from the folder in which the service was started
            "-m",
            "synvirt.worker",
            str(silence_s),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            limit=LINE_BYTES_MAX,
            env=inherited(ENVIRONMENT),
            start_new_session=True,
        )
    except OSError as error:
        raise WorkerDied(f"a worker cannot be started: {error.strerror}", hint=HINT) from error


class _Process:
    def __init__(self, child: asyncio.subprocess.Process, *, keepalive_s: float, stalled_s: float | None) -> None:
        self._child, self._keepalive_s, self._stalled_s = child, keepalive_s, stalled_s
        self._stall = Stall(Watched.NEVER, None)
        self._naming: asyncio.Task[None] | None = None

    async def send(self, line: WireModel) -> None:
        if self._child.stdin is None:
            raise RuntimeError("a worker has pipes")
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            self._child.stdin.write(line.to_line())
            await self._child.stdin.drain()
        self._stall.answered()

    async def carry_out(
        self, order: WireModel, on_message: OnMessage, stopped: Callable[[], bool], on_kept: OnKept = log_kept
    ) -> Ended:
        stderr = asyncio.create_task(_tail(self._child))
        self._stall = stall = Stall(order.watched if isinstance(order, Order) else Watched.NEVER, self._stalled_s)
        stopper = asyncio.create_task(
            _end_when(lambda: stall.look() or stopped(), self._child, lambda: self._name_kept(on_kept))
        )
        heartbeat = asyncio.create_task(self._keep_alive())
        try:
            last = await self._converse(order, on_message)
            returncode = await self._child.wait()
        finally:
            stopper.cancel()
            heartbeat.cancel()
            naming = self._name_kept(on_kept)
            await _end(self._child)
            await naming  # not cancelled: it may be writing to the store
            messages = await stderr
        return Ended(last, returncode, messages, stall.after_s if stall.is_over else None)

    def _name_kept(self, on_kept: OnKept) -> asyncio.Task[None]:
        if self._naming is None:
            self._naming = asyncio.create_task(_name_kept(self._child, on_kept))
        return self._naming

    async def _keep_alive(self) -> None:
        """Sends empty lines. A worker that gets none ends itself."""
        while True:
            await asyncio.sleep(self._keepalive_s)
            if self._child.stdin is not None:
                with contextlib.suppress(BrokenPipeError, ConnectionResetError):
                    self._child.stdin.write(b"\n")

    async def _converse(self, order: WireModel, on_message: OnMessage) -> Broken | CarriedOut | None:
        """Gives the order and handles the messages; returns the last one."""
        await self.send(order)
        if self._child.stdout is None:
            raise RuntimeError("a worker has pipes")
        while line := await self._child.stdout.readline():
            message = message_of(line)
            if isinstance(message, Broken | CarriedOut):
                return message
            await on_message(message)
            self._stall.on_message(message)
        return None


async def _end(child: asyncio.subprocess.Process) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(child.pid, signal.SIGKILL)
    await child.wait()
    if child.stdin is not None:
        # asyncio keeps the error of a write that found the worker gone, and would log it as one that nobody looked at.
        if not child.stdin.is_closing():
            child.stdin.transport.abort()
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            await child.stdin.wait_closed()


async def _name_kept(child: asyncio.subprocess.Process, on_kept: OnKept) -> None:
    """Says that a killed worker has not ended."""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(STOP_GRACE_S):
            await child.wait()
            return
    kept = WorkerKept()
    log.warning("a killed worker has not ended", pid=child.pid, cause=kept.detail, hint=kept.hint)
    with contextlib.suppress(SynvirtError):  # the store may be on that file system, too
        await on_kept(kept)


async def _tail(child: asyncio.subprocess.Process) -> str:
    """The end of the worker's stderr. It must be read, so that its pipe does not fill up."""
    text = ""
    while child.stderr is not None and (part := await child.stderr.read(4096)):
        text = (text + part.decode(errors="replace"))[-STDERR_KEPT_CHARS:]
    return text.strip()


async def _end_when(stopped: Callable[[], bool], child: asyncio.subprocess.Process, killed: Callable[[], object]) -> None:
    while not stopped():
        await asyncio.sleep(STOP_POLL_S)
    with contextlib.suppress(ProcessLookupError):
        child.terminate()
        await asyncio.sleep(STOP_GRACE_S)
        child.kill()
        killed()
