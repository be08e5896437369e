"""One HTTP request to a caller's URL, through the outgoing guard, with a limit on its whole time. Blocking."""

import contextlib
import http.client
import socket
import ssl
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from urllib.parse import urlsplit

from synvirt.errors import BadRequest, SourceUnreachable, cause_of
from synvirt.outgoing import Guard

# No answer comes sooner than a handshake.
_LEAST_S = 0.1


def status_of(
    url: str,
    *,
    guard: Guard,
    within_s: float,
    ca_file: Path | None = None,
    method: str = "GET",
    body: bytes | None = None,
    headers: Mapping[str, str],
) -> int:
    """The status of the answer. `within_s`: the time to connect, for each address of the host; then the time for the whole
    answer: an answer that comes byte by byte holds a thread no longer. `ca_file`: authorities beside this host's own. Redirects
    are not followed.
    BadRequest, for a malformed URL or one that is not allowed; SourceUnreachable, without an answer."""
    parts = urlsplit(url)
    try:
        host, port = parts.hostname or "", parts.port or (443 if parts.scheme == "https" else 80)
    except ValueError as error:
        raise BadRequest(f"it is not a URL: {error}") from error
    path = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
    deadline = time.monotonic() + within_s
    sock = guard.connect(host, port, timeout_s=max(within_s, _LEAST_S))
    asked = http.client.HTTPConnection(host, port)
    asked.sock = sock
    late = threading.Event()

    def end() -> None:
        late.set()
        _shut(asked.sock)

    timer = threading.Timer(max(deadline - time.monotonic(), _LEAST_S), end)
    timer.start()
    try:
        if parts.scheme == "https":
            context = ssl.create_default_context()
            if ca_file is not None:
                context.load_verify_locations(ca_file)
            # The handshake is made later: one that comes byte by byte must end in time, too.
            asked.sock = context.wrap_socket(sock, server_hostname=host, do_handshake_on_connect=False)
            asked.sock.do_handshake()
        asked.request(method, path, body=body, headers=dict(headers))
        status = asked.getresponse().status
    except (OSError, http.client.HTTPException, ValueError) as error:
        if late.is_set():
            raise _too_late(host, within_s) from error
        raise SourceUnreachable(f"{host} does not answer: {cause_of(error)}"[:500]) from error
    finally:
        timer.cancel()
        asked.close()
        sock.close()
    if late.is_set():  # we have shut the connection, and it reads as the end of the headers
        raise _too_late(host, within_s)
    return status


def _too_late(host: str, within_s: float) -> SourceUnreachable:
    return SourceUnreachable(f"{host} does not answer within {within_s:.3g} s")


def _shut(sock: socket.socket | None) -> None:
    """Wakes a thread that waits for the socket."""
    if sock is not None:
        with contextlib.suppress(OSError):
            sock.shutdown(socket.SHUT_RDWR)
