"""Limits for callers' connections: a silent one is closed, and one caller cannot take them all.

Uvicorn waits for a request without end, and for a caller to read its answer: some hundred such connections would keep all other
callers out, and the answers in memory.
"""

import asyncio
import errno
import os
import resource
import socket
import struct
import time
from collections import Counter
from typing import Any, ClassVar, Final

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

from synvirt.api.callers.networks import network_of
from synvirt.api.problems import problem
from synvirt.errors import BadRequest
from synvirt.sizes import KIB

# A request's head is a few hundred bytes: even over a slow line around the world it arrives in this time.
HEAD_WITHIN_S: Final = 20.0
# TLS is up after two turns of a few kilobytes. No caller is known before, so a silent one may not hold a place for long.
HANDSHAKE_WITHIN_S: Final = 10.0
# Of an answer that waits to be read, a caller takes this much in this time, even over the slowest line.
TAKEN_WITHIN_S, TAKEN_LEAST_BYTES = 30.0, 16 * KIB
# A browser opens six, our own client one for each command and one for its stream; a proxy has its own limits, and many callers.
PER_CALLER_MAX: Final = 256
# Of the files that the service may open, this many are left for volumes, the store and its workers.
FILES_KEPT: Final = 256
CONNECTIONS_MAX: Final = 8192
# What a host says that has no descriptor or memory for one more connection (accept(2)).
NO_MORE: Final = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM})
# Shorter than asyncio's pause (asyncio.constants.ACCEPT_RETRY_DELAY).
SHUT_S: Final = 0.5
# struct ucred of unix(7): process, user, group.
_CREDENTIALS: Final = struct.Struct("3i")


class Door(socket.socket):
    """A listening socket that counts its callers from the first moment: one that says nothing before TLS takes a file, too.
    Those by the Unix socket have no address, and count only in the total. They are admins without a password, so the kernel is
    asked who they are: root and the service's user alone come in. The socket's mode does not keep out a process that may open
    others' files, as a confined reader may. Only in the event loop."""

    callers: ClassVar[Counter[str]] = Counter()
    total: ClassVar[int] = 0
    _shut_until = 0.0

    def accept(self) -> tuple[socket.socket, Any]:
        """ConnectionAbortedError, which asyncio ignores: the caller or the service has too many, or the caller is a stranger,
        and this one is closed. An error of NO_MORE, after which asyncio waits a second: callers wait as long."""
        if time.monotonic() < self._shut_until:
            raise BlockingIOError  # else asyncio would ask again at once, 2,048 times, and report each of them
        try:
            accepted, address = super().accept()
        except OSError as error:
            if error.errno in NO_MORE:
                self._shut_until = time.monotonic() + SHUT_S
            raise
        caller = network_of(address[0]) if isinstance(address, tuple) else ""
        if accepted.family == socket.AF_UNIX and _user_of(accepted) not in (0, os.geteuid()):
            accepted.close()
            raise ConnectionAbortedError
        if (caller and self.callers[caller] >= PER_CALLER_MAX) or Door.total >= connections_max():
            accepted.close()
            raise ConnectionAbortedError
        Door.callers[caller] += 1
        Door.total += 1
        let_in = _LetIn(accepted.family, accepted.type, accepted.proto, fileno=accepted.detach())
        let_in.caller = caller
        return let_in, address


def _user_of(connection: socket.socket) -> int:
    """The user of the process at the other end, as it connected."""
    credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    return int(_CREDENTIALS.unpack(credentials)[1])


class _LetIn(socket.socket):
    """The socket of a caller."""

    caller: str | None = None

    def close(self) -> None:
        """Counts it no more."""
        if self.caller is not None:
            Door.total -= 1
            Door.callers[self.caller] -= 1
            if Door.callers[self.caller] <= 0:
                del Door.callers[self.caller]
            self.caller = None
        super().close()


class Held(H11Protocol):
    """One connection."""

    _waiting: asyncio.TimerHandle | None = None
    _reading: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """From now on a request is waited for."""
        super().connection_made(transport)
        self._wait()

    def connection_lost(self, exc: Exception | None) -> None:
        """Nothing more is waited for."""
        self._stop_waiting()
        self._stop_reading()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Handles the bytes. A request that is not complete yet has a time limit."""
        super().data_received(data)
        if self._is_answering():
            self._stop_waiting()
        elif self._waiting is None:
            self._wait()

    def send_400_response(self, msg: str) -> None:
        """Answers what is no HTTP by a problem too, not by uvicorn's plain text."""
        if self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE):  # else an answer is under way
            answer = problem(BadRequest("the request is not HTTP/1.1", hint="is HTTPS spoken where the setting tls is off?"))
            head = h11.Response(
                status_code=400, headers=[*answer.raw_headers, (b"connection", b"close")], reason=b"Bad Request"
            )
            for event in (head, h11.Data(data=bytes(answer.body)), h11.EndOfMessage()):
                self.transport.write(self.conn.send(event) or b"")
        self.transport.close()

    def pause_writing(self) -> None:
        """Too much of the answer waits to be sent: from now on the caller must read some of it within a time limit."""
        super().pause_writing()
        self._expect_reading()

    def resume_writing(self) -> None:
        """The caller has taken enough: its time limit ends."""
        self._stop_reading()
        super().resume_writing()

    def _expect_reading(self) -> None:
        self._reading = self.loop.call_later(TAKEN_WITHIN_S, self._look_at_reading, self.transport.get_write_buffer_size())

    def _look_at_reading(self, before: int) -> None:
        if self.transport.get_write_buffer_size() > before - TAKEN_LEAST_BYTES:
            self.transport.abort()
        else:
            self._expect_reading()

    def _stop_reading(self) -> None:
        if self._reading is not None:
            self._reading.cancel()
            self._reading = None

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
