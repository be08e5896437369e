"""A worker process as the service sees it: started, given its order, heard, stopped. asyncio; a thread uses `asyncio.run`.

    async with started() as worker:                       gone at the end of the block, whatever it was doing
        ended = await worker.carry_out(order, hear, stopped)
        ended.check()                                     raises what it failed with

`Workers` is how callers name it, so that tests may carry out orders in their own process.
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

from synvirt.errors import Cancelled, Internal, SynvirtError, from_code
from synvirt.jobs.stalling import Stall, Stalled
from synvirt.jobs.wire import KEEPALIVE_S, SILENCE_S, Broken, Flushed, Moved, Order, Result, Watched, WireModel, message_of

log = structlog.get_logger(__name__)

# A worker stops at its next request, which takes seconds at the most; then it is ended.
STOP_GRACE_S = 10.0
STOP_POLL_S = 0.1
# One message is a few hundred bytes; a line beyond this is not a message.
LINE_BYTES_MAX = 1 << 20
STDERR_KEPT_CHARS = 2000
# The service's environment may hold secrets; a worker reads hostile images.
ENVIRONMENT = ("PATH", "HOME", "LANG", "TMPDIR", "PYTHONPATH")


class WorkerDied(Internal):
    """The worker ended without a last message."""


@dataclass(frozen=True)
class Ended:
    """How an order ended. `broken`: what the worker said of it; `returncode` is negative for a signal. `stalled_s`: it was
    ended since it brought nothing for so long."""

    broken: Broken | None = None
    returncode: int = 0
    stderr: str = ""
    stalled_s: float | None = None

    def check(self, answered: Mapping[str, type[SynvirtError]] | None = None) -> None:
        """Raise what it failed with: `answered` names the classes that a caller tells apart from others of their code. A stop
        that was not asked for is WorkerDied: someone ended the worker from outside."""
        if self.stalled_s is not None:
            raise Stalled(self.stalled_s)
        if self.broken is not None and answered and self.broken.kind in answered:
            raise answered[self.broken.kind](self.broken.detail, hint=self.broken.hint)
        if self.broken is not None and self.broken.code not in (Cancelled.code, "E_BAK_CANCELLED"):
            raise from_code(self.broken.code, self.broken.detail, self.broken.hint)
        if self.returncode != 0 or self.broken is not None:
            how = f"signal {-self.returncode}" if self.returncode < 0 else f"exit code {self.returncode}"
            log.error("worker died", how=how, stderr=self.stderr)
            raise WorkerDied(f"the worker was ended by {how}", hint="the service's log has what it said; memory may be short")


Hear = Callable[[Moved | Flushed | Result], Awaitable[None]]


class Worker(Protocol):
    """Carries out one order. `hear` gets each message but Broken; what it raises ends the worker and is raised. `stopped` is
    asked often: once it is True the worker is asked to stop, and ended where it does not. `send`: a further line."""

    async def carry_out(self, order: WireModel, hear: Hear, stopped: Callable[[], bool]) -> Ended: ...
    async def send(self, line: WireModel) -> None: ...


Workers = Callable[[], AbstractAsyncContextManager[Worker]]


@asynccontextmanager
async def started(silence_s: float = SILENCE_S, *, stalled_s: float | None = None) -> AsyncIterator[Worker]:
    """One that waits for its order: it takes as long to start as disks to be opened, so both go on at once. `silence_s`: for
    tests, whose leases are shorter. `stalled_s`: an order that brings nothing for so long fails."""
    child = await asyncio.create_subprocess_exec(
        sys.executable,
        "-P",  # no module out of the folder that the service was started in
        "-m",
        "synvirt.worker",
        str(silence_s),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        limit=LINE_BYTES_MAX,
        env={key: os.environ[key] for key in ENVIRONMENT if key in os.environ},
        start_new_session=True,
    )
    try:
        yield _Process(child, keepalive_s=silence_s * KEEPALIVE_S / SILENCE_S, stalled_s=stalled_s)
    finally:
        await _end(child)


class _Process:
    def __init__(self, child: asyncio.subprocess.Process, *, keepalive_s: float, stalled_s: float | None) -> None:
        self._child, self._keepalive_s, self._stalled_s = child, keepalive_s, stalled_s
        self._stall = Stall(Watched.NEVER, None)

    async def send(self, line: WireModel) -> None:
        if self._child.stdin is None:
            raise RuntimeError("a worker has pipes")
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            self._child.stdin.write(line.to_line())
            await self._child.stdin.drain()
        self._stall.answered()

    async def carry_out(self, order: WireModel, hear: Hear, stopped: Callable[[], bool]) -> Ended:
        stderr = asyncio.create_task(_tail(self._child))
        self._stall = stall = Stall(order.watched if isinstance(order, Order) else Watched.NEVER, self._stalled_s)
        stopper = asyncio.create_task(_end_when(lambda: stall.look() or stopped(), self._child))
        heartbeat = asyncio.create_task(self._keep_alive())
        try:
            broken = await self._converse(order, hear)
            returncode = await self._child.wait()
        finally:
            stopper.cancel()
            heartbeat.cancel()
            await _end(self._child)
            said = await stderr
        return Ended(broken, returncode, said, stall.after_s if stall.is_over else None)

    async def _keep_alive(self) -> None:
        """Empty lines: a worker whose service says nothing ends itself."""
        while True:
            await asyncio.sleep(self._keepalive_s)
            if self._child.stdin is not None:
                with contextlib.suppress(BrokenPipeError, ConnectionResetError):
                    self._child.stdin.write(b"\n")

    async def _converse(self, order: WireModel, hear: Hear) -> Broken | None:
        await self.send(order)
        if self._child.stdout is None:
            raise RuntimeError("a worker has pipes")
        while line := await self._child.stdout.readline():
            message = message_of(line)
            if isinstance(message, Broken):
                return message
            await hear(message)
            self._stall.heard(message)
        return None


async def _end(child: asyncio.subprocess.Process) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(child.pid, signal.SIGKILL)
    await child.wait()


async def _tail(child: asyncio.subprocess.Process) -> str:
    """The end of what the worker says on stderr; reading it keeps its pipe from filling."""
    text = ""
    while child.stderr is not None and (part := await child.stderr.read(4096)):
        text = (text + part.decode(errors="replace"))[-STDERR_KEPT_CHARS:]
    return text.strip()


async def _end_when(stopped: Callable[[], bool], child: asyncio.subprocess.Process) -> None:
    while not stopped():
        await asyncio.sleep(STOP_POLL_S)
    with contextlib.suppress(ProcessLookupError):
        child.terminate()
        await asyncio.sleep(STOP_GRACE_S)
        child.kill()
