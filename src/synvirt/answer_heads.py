"""Heads of HTTP answers, with a limit on their whole time and their lines.

http.client limits a line and the fields of one head. It waits for each byte alone, and reads any number of heads of interim
answers (`100 Continue`) before the answer itself: so a server could hold a thread forever.
"""

import http.client
import io
import time
from typing import Any, Final

# From the request to the last byte of the head. A platform may think for minutes before it answers.
HEAD_WITHIN_S: Final = 600.0
# http.client takes a hundred fields; a few interim answers may come before.
_LINES_MAX: Final = 1000


class Response(http.client.HTTPResponse):
    """Its head raises TimeoutError after HEAD_WITHIN_S, or after the connection's own timeout, if that is longer; HTTPException
    for too many lines. The class is a connection's `response_class`."""

    def __init__(self, sock: Any, *rest: Any, **named: Any) -> None:
        super().__init__(sock, *rest, **named)
        self._within_s = max(HEAD_WITHIN_S, sock.gettimeout() or 0)

    def begin(self) -> None:
        """Reads the head, as in http.client, within the limits."""
        whole = self.fp
        self.fp = _Head(whole, self._within_s)  # type: ignore[assignment]
        try:
            super().begin()
        finally:
            if self.fp is not None:  # else it is closed
                self.fp = whole


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
