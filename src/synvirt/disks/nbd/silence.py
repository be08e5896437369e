"""Ends a wait that only bytes from the other side would end: libnbd's waiting calls have no time limit.

The kernel knows when a connection's last byte came (tcp(7), TCP_INFO; the structure is in linux/tcp.h). A connection that is
silent for too long is shut down, and the waiting call fails.
"""

import contextlib
import os
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Final

# Looks per limit: a silence may last this fraction longer.
_LOOKS: Final = 10
# struct tcp_info: eight bytes, eleven numbers of 32 bits, then tcpi_last_data_recv in milliseconds.
_LAST_DATA: Final = struct.Struct("=52xI")


@dataclass(eq=False, slots=True)
class _Wait:
    connection: socket.socket
    since: float
    ended: bool = False

    def end_if_silent(self, limit_s: float) -> None:
        silent_s = time.monotonic() - self.since
        if silent_s > limit_s and self.connection.family != socket.AF_UNIX:
            info = self.connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _LAST_DATA.size)
            silent_s = min(silent_s, _LAST_DATA.unpack(info)[0] / 1000)
        if silent_s > limit_s:
            self.ended = True
            with contextlib.suppress(OSError):  # it has already ended
                self.connection.shutdown(socket.SHUT_RDWR)


class Watch:
    """Watches the waits of one reader. Its thread runs from the first wait to close()."""

    def __init__(self, limit_s: float) -> None:
        self._limit_s = limit_s
        self._changed = threading.Condition()
        self._waits: set[_Wait] = set()
        self._thread: threading.Thread | None = None
        self._closed = False

    @contextlib.contextmanager
    def over(self, descriptor: int) -> Iterator[Callable[[], bool]]:
        """While the block waits for this connection. Gives a function: whether the watch has ended the wait."""
        with socket.socket(fileno=os.dup(descriptor)) as connection:
            wait = _Wait(connection, time.monotonic())
            with self._changed:
                self._waits.add(wait)
                if self._thread is None:
                    self._thread = threading.Thread(target=self._look, name="silence", daemon=True)
                    self._thread.start()
            try:
                yield lambda: wait.ended
            finally:
                with self._changed:
                    self._waits.discard(wait)

    def close(self) -> None:
        """Ends the watch and its thread."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
            thread = self._thread
        if thread is not None:
            thread.join()

    def _look(self) -> None:
        with self._changed:
            while not self._closed:
                self._changed.wait(self._limit_s / _LOOKS)
                for wait in self._waits:
                    wait.end_if_silent(self._limit_s)
