"""Limits for callers' connections: a silent one is closed, and one address cannot take them all.

Uvicorn waits for a request without end, so some hundred silent connections would keep all other callers out.
"""

import asyncio
import resource
from collections import Counter
from typing import Any, ClassVar, Final

from uvicorn.protocols.http.h11_impl import H11Protocol

# A request's head is a few hundred bytes: even over a slow line around the world it arrives in this time.
HEAD_WITHIN_S: Final = 20.0
# A browser opens six, our own client one for each command and one for its stream; a proxy has its own limits, and many callers.
PER_ADDRESS_MAX: Final = 256
# Of the files that the service may open, this many are left for volumes, the store and its workers.
FILES_KEPT: Final = 256
CONNECTIONS_MAX: Final = 8192


class Held(H11Protocol):
    """One connection. Those by the Unix socket have no address, and count only in the total."""

    _addresses: ClassVar[Counter[str]] = Counter()
    _total: ClassVar[int] = 0
    _waiting: asyncio.TimerHandle | None = None
    _counted: str | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Counts the connection, and closes it if its address or the service has too many."""
        super().connection_made(transport)
        address = self.client[0] if self.client else ""
        self._counted = address
        Held._addresses[address] += 1
        Held._total += 1
        if (address and Held._addresses[address] > PER_ADDRESS_MAX) or Held._total > connections_max():
            transport.abort()
            return
        self._wait()

    def connection_lost(self, exc: Exception | None) -> None:
        """Counts the connection no more."""
        if self._counted is not None:
            Held._addresses[self._counted] -= 1
            if Held._addresses[self._counted] <= 0:
                del Held._addresses[self._counted]
            Held._total -= 1
            self._counted = None
        self._stop_waiting()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Handles the bytes. A request that is not complete yet has a time limit."""
        super().data_received(data)
        if self._is_answering():
            self._stop_waiting()
        elif self._waiting is None:
            self._wait()

    def _is_answering(self) -> bool:
        cycle: Any = self.cycle
        return cycle is not None and not cycle.response_complete

    def _wait(self) -> None:
        self._waiting = self.loop.call_later(HEAD_WITHIN_S, self._let_go)

    def _stop_waiting(self) -> None:
        if self._waiting is not None:
            self._waiting.cancel()
            self._waiting = None

    def _let_go(self) -> None:
        self._waiting = None
        if not self._is_answering() and not self.transport.is_closing():
            self.transport.abort()


def connections_max() -> int:
    return max(64, min(CONNECTIONS_MAX, resource.getrlimit(resource.RLIMIT_NOFILE)[0] - FILES_KEPT))


def allow_files() -> None:
    """Allows as many open files as the host permits: each connection needs one, and the shell's 1,024 are not enough."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = 4 * CONNECTIONS_MAX if hard == resource.RLIM_INFINITY else min(hard, 4 * CONNECTIONS_MAX)
    if soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
