"""Answers of HTTP servers, with limits that http.client does not have. Every HTTP client of this package reads through it.

    head   a limit on its whole time and its lines
    body   a least rate: LEAST_BYTES in each window of waiting

http.client waits for each byte alone, and reads any number of heads of interim answers (`100 Continue`) before the answer
itself. So a server that sends a byte now and then could hold a thread forever.
"""

import http.client
import io
import time
from typing import Any, Final

from synvirt.sizes import KIB

# A source that is slower serves nobody: 1 GiB would take 12 days. The lowest limit that a person can set for a copy is 64 times
# as much.
LEAST_BPS: Final = KIB
# A network that loses packets, and a server under load, may pause for half a minute.
WINDOW_S: Final = 60.0
# What each window of a body must bring. An attempt that brought less is no progress.
LEAST_BYTES: Final = int(LEAST_BPS * WINDOW_S)
# From the request to the last byte of the head. A platform may think for minutes before it answers.
HEAD_WITHIN_S: Final = 600.0
# http.client takes a hundred fields; a few interim answers may come before.
_LINES_MAX: Final = 1000

clock = time.monotonic


class TooSlow(OSError):
    """A server sent its answer more slowly than LEAST_BPS."""


class Response(http.client.HTTPResponse):
    """Its head raises TimeoutError after HEAD_WITHIN_S, or after the connection's own timeout, if that is longer; HTTPException
    for too many lines. Its body raises TooSlow. The class is a connection's `response_class`."""

    def __init__(self, sock: Any, *rest: Any, **named: Any) -> None:
        super().__init__(sock, *rest, **named)
        silence_s = sock.gettimeout() or 0.0
        self._within_s = max(HEAD_WITHIN_S, silence_s)
        # One silence that the connection allows is not yet too slow.
        self._watched = _Watched(self.fp.detach(), WINDOW_S + silence_s)
        self.fp = io.BufferedReader(self._watched)

    def begin(self) -> None:
        """Reads the head, as in http.client, within the limits."""
        whole = self.fp
        self.fp = _Head(whole, self._within_s)  # type: ignore[assignment]
        try:
            super().begin()
        finally:
            if self.fp is not None:  # else it is closed
                self.fp = whole
        self._watched.begin_window()


class _Watched(io.RawIOBase):
    """A socket's file. Only the time that it waits for the server counts: a reader may pause as long as it likes."""

    def __init__(self, raw: io.RawIOBase, window_s: float) -> None:
        self._raw, self._window_s = raw, window_s
        self.begin_window()

    def begin_window(self) -> None:
        self._waited_s, self._got = 0.0, 0

    def readable(self) -> bool:
        return True

    def fileno(self) -> int:
        return self._raw.fileno()

    def readinto(self, buffer: Any) -> int | None:
        began = clock()
        count = self._raw.readinto(buffer)
        self._waited_s += clock() - began
        self._got += count or 0
        if self._got >= LEAST_BYTES:
            self.begin_window()
        elif count and self._waited_s > self._window_s:
            raise TooSlow(f"it sent {self._got} bytes within {self._waited_s:.0f} s, which is too slow")
        return count

    def close(self) -> None:
        if not self.closed:
            super().close()
            self._raw.close()


class _Head:
    """The lines of a buffered file, as http.client reads them."""

    def __init__(self, file: io.BufferedReader, within_s: float) -> None:
        self._file, self._until = file, time.monotonic() + within_s
        self._lines = 0

    def readline(self, most: int) -> bytes:
        self._lines += 1
        if self._lines > _LINES_MAX:
            raise http.client.HTTPException(f"the head of the answer has over {_LINES_MAX} lines")
        line = bytearray()
        while len(line) < most and not line.endswith(b"\n"):
            if time.monotonic() > self._until:
                raise TimeoutError("the head of the answer came too slowly")
            piece = self._file.peek(1)  # one read of the socket at most
            if not piece:
                break
            end = piece.find(b"\n") + 1 or len(piece)
            line += self._file.read(min(end, most - len(line)))
        return bytes(line)

    def close(self) -> None:
        self._file.close()
