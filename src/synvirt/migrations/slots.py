"""So many jobs at once read from a source's host: it has guests to serve, and its disks one head each. asyncio.

A cut-over never waits: its guest is off.
"""

import threading
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import NamedTuple
from uuid import UUID

# Jobs run in event loops of several threads, so a free slot is looked for, not awaited.
LOOK_EVERY_S = 0.2


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
