"""How many jobs work at once: here (Turns), and on one host of a source (Slots). asyncio.

A host has guests to serve, and its disks one head each. A cut-over never waits: its guest is off.
"""

import threading
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from itertools import islice
from typing import NamedTuple
from uuid import UUID

# Jobs run in event loops of several threads, so a free slot, and one's turn, is looked for, not awaited. Hundreds may wait for
# their turn, and hours.
LOOK_EVERY_S, TURN_EVERY_S = 0.2, 1.0


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
        self._waiting: dict[UUID, None] = {}

    async def taken(self, job_id: UUID, sleep: Callable[[float], Awaitable[None]], *, urgent: bool = False) -> None:
        """At once, where the job has it already. `sleep` may raise: then it waits no longer."""
        try:
            while not self._take(job_id, urgent=urgent):
                await sleep(TURN_EVERY_S)
        finally:
            with self._lock:
                self._waiting.pop(job_id, None)

    def left(self, job_id: UUID) -> None:
        with self._lock:
            self._working.discard(job_id)

    def _take(self, job_id: UUID, *, urgent: bool) -> bool:
        with self._lock:
            if job_id not in self._working:
                self._waiting[job_id] = None
                free = max(self._most - len(self._working), 0)
                if not urgent and job_id not in islice(self._waiting, free):
                    return False
                self._working.add(job_id)
            return True
