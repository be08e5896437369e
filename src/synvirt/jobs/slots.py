"""How many jobs work at once: here (Turns), and on one host of a source (Slots). asyncio.

A host has guests to serve, and its disks one head each. A cut-over never waits: its guest is off.
"""

import asyncio
import threading
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from contextlib import asynccontextmanager, suppress
from itertools import islice
from typing import Any, NamedTuple
from uuid import UUID

# Jobs run in event loops of several threads, so a free slot is looked for, not awaited. Who waits for its turn is called: there
# may be thousands. The look beside that is for a loop that ended.
LOOK_EVERY_S, TURN_EVERY_S = 0.2, 30.0


class SourceHost(NamedTuple):
    """A registered source, and which of its hosts; empty where it is one."""

    source_id: UUID
    host: str


class Slots:
    """`most` readers a host; those of a cut-over come on top."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._lock = threading.Lock()
        self._taken: Counter[SourceHost] = Counter()

    @asynccontextmanager
    async def held(
        self, where: SourceHost, sleep: Callable[[float], Awaitable[None]], *, urgent: bool = False
    ) -> AsyncIterator[None]:
        """`sleep` may raise: then it waits no longer."""
        while not self._take(where, urgent=urgent):
            await sleep(LOOK_EVERY_S)
        try:
            yield
        finally:
            with self._lock:
                self._taken[where] -= 1

    def _take(self, where: SourceHost, *, urgent: bool) -> bool:
        with self._lock:
            if not urgent and self._taken[where] >= self._most:
                return False
            self._taken[where] += 1
            return True


class Turns:
    """`most` jobs work, the others wait for their turn in the order they came. A job has its turn until it leaves it: at its
    end, and for as long as it only waits, for its cut-over or for a source that is away."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._lock = threading.Lock()
        self._working: set[UUID] = set()
        # In their order; each is called in its own event loop.
        self._waiting: dict[UUID, asyncio.Future[None]] = {}

    async def taken(
        self, job_id: UUID, or_stop: Callable[[Coroutine[Any, Any, None]], Awaitable[None]], *, urgent: bool = False
    ) -> None:
        """At once, where the job has it already. `or_stop` awaits, and may raise: then the job waits no longer."""
        try:
            while (called := self._take(job_id, urgent=urgent)) is not None:
                await or_stop(_until(called, TURN_EVERY_S))
        finally:
            with self._lock:
                self._waiting.pop(job_id, None)
                self._call()

    def left(self, job_id: UUID) -> None:
        with self._lock:
            self._working.discard(job_id)
            self._call()

    def _take(self, job_id: UUID, *, urgent: bool) -> "asyncio.Future[None] | None":
        """None: it is the job's turn. Else it is in the line, and the future is done when it is to look again."""
        with self._lock:
            if job_id in self._working:
                return None
            called: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self._waiting[job_id] = called  # where it stands already it keeps its place
            if not urgent and job_id not in self._next():
                return called
            self._working.add(job_id)
            return None

    def _next(self) -> list[UUID]:
        return list(islice(self._waiting, max(self._most - len(self._working), 0)))

    def _call(self) -> None:
        for job_id in self._next():
            called = self._waiting[job_id]
            with suppress(RuntimeError):  # its loop has ended
                called.get_loop().call_soon_threadsafe(_done, called)


async def _until(called: "asyncio.Future[None]", seconds: float) -> None:
    await asyncio.wait({called}, timeout=seconds)


def _done(called: "asyncio.Future[None]") -> None:
    if not called.done():
        called.set_result(None)
