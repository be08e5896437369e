"""One HTTP client for platforms (RFC 9110): pooled connections by urllib3, pinned certificates, limits on every answer.

    client = HttpClient("https://pve.example:8006", Trust(fingerprint_sha256="AB:CD:…"))
    answer = client.request("GET", "/api2/json/version")
    answer.status, answer.json()

A status is an answer, not an error: each platform's adapter knows what its statuses mean. SourceUnreachable is raised where no
answer came, or only a part. Redirects are not followed. The query is left out of errors: it may hold a session.
"""

import json as json_text
import socket
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Final, Protocol
from urllib.parse import urlencode, urlsplit

import urllib3
from urllib3.exceptions import (
    ConnectTimeoutError,
    HTTPError,
    LocationParseError,
    NameResolutionError,
    NewConnectionError,
    ProtocolError,
    ReadTimeoutError,
    SSLError,
)

from synvirt import __version__, outgoing
from synvirt.errors import BadRequest, SourceUnreachable, root_cause_of
from synvirt.http_answers import Response
from synvirt.texts.json_bounded import TooManyValues, loads_bounded
from synvirt.transport import tls

# The time to connect: a firewall that drops packets is found out after this.
CONNECT_TIMEOUT_S: Final = 10.0
# The time between two pieces of an answer: short enough that a job says within a minute that its platform hangs.
SILENCE_TIMEOUT_S: Final = 45.0
# The most of one answer that is held in memory. The largest known, 5,000 VMs of a cluster with all their fields, is 30 MiB.
ANSWER_BYTES_MAX: Final = 64 << 20
# From the request to the last byte of an answer that is held in memory: an answer of one byte a second is given up.
ANSWER_TIMEOUT_S: Final = 600.0
_PIECE_BYTES: Final = 256 << 10
# Safe to send twice (RFC 9110, section 9.2.2). They are sent a second time when an idle connection turns out to be closed.
_IDEMPOTENT: Final = frozenset({"GET", "HEAD", "OPTIONS", "PUT", "DELETE"})


def _dialled(connection: urllib3.connection.HTTPConnection) -> socket.socket:
    """For urllib3: a connection through the guard, with failures in the form of the library's own."""
    try:
        # While it connects, urllib3's `timeout` is that of connecting.
        timeout_s = connection.timeout if isinstance(connection.timeout, int | float) else CONNECT_TIMEOUT_S
        return outgoing.sources().dial(connection.host, connection.port, timeout_s=timeout_s)
    except socket.gaierror as error:
        raise NameResolutionError(connection.host, connection, error) from error
    except TimeoutError as error:
        raise ConnectTimeoutError(connection, "no answer") from error
    except OSError as error:
        raise NewConnectionError(connection, str(error)) from error


class _Plain(urllib3.connection.HTTPConnection):
    response_class = Response

    def _new_conn(self) -> socket.socket:
        return _dialled(self)


class _Connection(urllib3.connection.HTTPSConnection):
    """With a pin the handshake itself compares the certificate (tls.context). urllib3 cannot know that, and warns. Without a
    pin the operator turned the check off, and `sources test` says so."""

    response_class = Response

    def connect(self) -> None:
        super().connect()
        self.is_verified = True

    def _new_conn(self) -> socket.socket:
        return _dialled(self)


class _PlainPool(urllib3.HTTPConnectionPool):
    ConnectionCls = _Plain


class _Pool(urllib3.HTTPSConnectionPool):
    ConnectionCls = _Connection


# For a library that makes its own pools (PoolManager.pool_classes_by_scheme).
POOLS: Final[Mapping[str, type[urllib3.HTTPConnectionPool]]] = MappingProxyType({"http": _PlainPool, "https": _Pool})


class AnswerTooLarge(SourceUnreachable):
    """An answer has more bytes, or values, than its caller takes."""


@dataclass(frozen=True, slots=True)
class Trust:
    """What a connection trusts. `fingerprint_sha256`: only this certificate; else this host's authorities, or any certificate
    if `verify` is False."""

    verify: bool = True
    fingerprint_sha256: str | None = None


@dataclass(frozen=True, slots=True)
class Answer:
    """A whole answer. `headers`: names in lower case; a name that came several times has all its values, with commas.
    `reason`: the words after the number in the status line; some platforms give the cause there."""

    status: int
    headers: Mapping[str, str]
    body: bytes = field(repr=False)
    reason: str = ""

    @property
    def ok(self) -> bool:
        return 200 <= self.status < 300

    def json(self) -> Any:
        """SourceUnreachable, where the body is no JSON: a proxy or another service answered. AnswerTooLarge."""
        try:
            return loads_bounded(self.body)
        except TooManyValues as error:
            raise AnswerTooLarge(f"an answer of {len(self.body)} bytes has {error}") from error
        except (ValueError, RecursionError) as error:
            start = self.body[:80].decode("utf-8", "replace")
            raise SourceUnreachable(
                f"an answer of {len(self.body)} bytes is not JSON: it begins with {start!r}",
                hint="are the address and the port right, or does a proxy answer in its place?",
            ) from error


class Recorder(Protocol):
    """Gets each request with its whole answer, to write it down for `sources record`."""

    def answered(self, method: str, path: str, query: Mapping[str, str], sent: bytes | None, answer: Answer) -> None: ...


class Stream:
    """An answer whose body is read piece by piece. Reading raises SourceUnreachable, when the connection is lost."""

    def __init__(self, response: urllib3.BaseHTTPResponse, where: str) -> None:
        self._response = response
        self._where = where
        self.status = response.status
        self.reason = response.reason or ""
        self.headers: Mapping[str, str] = {name.lower(): value for name, value in response.headers.items()}
        self._ended = False

    @property
    def ended(self) -> bool:
        """Whether the body is read to its end, so that the next request may use the connection."""
        return self._ended or self._response.length_remaining == 0

    def read(self, count: int) -> bytes:
        """At most `count` bytes; fewer only at the end, none after it."""
        pieces = bytearray()
        while len(pieces) < count:
            with _translated(self._where):
                piece = self._response.read(count - len(pieces))
            if not piece:
                self._ended = True
                break
            pieces += piece
        return bytes(pieces)

    def read_some(self, count: int) -> bytes:
        """What has come, at most `count` bytes: it waits for the first of them alone. None at the end."""
        with _translated(self._where):
            piece = self._response.read1(count)
        self._ended = self._ended or not piece
        return piece

    def read_into(self, buffer: memoryview) -> int:
        """Puts bytes into `buffer` and gives their number: as many as fit, fewer only at the end."""
        piece = self.read(len(buffer))
        buffer[: len(piece)] = piece
        return len(piece)


class HttpClient:
    """`origin`: scheme, host and port. `connections`: the most at once; a caller that needs one more waits.

    `headers` go with every request; `authorize` gives more of them before each request, so that a token may be renewed.
    """

    def __init__(
        self,
        origin: str,
        trust: Trust | None = None,
        *,
        connections: int = 8,
        timeout_s: float = SILENCE_TIMEOUT_S,
        headers: Mapping[str, str] | None = None,
        recorder: Recorder | None = None,
    ) -> None:
        trust = trust or Trust()
        url = urlsplit(origin)
        if url.scheme not in {"http", "https"} or not url.hostname:
            raise BadRequest(f"endpoint: {origin[:100]!r} is not an address of an HTTP server", hint="https://host:port")
        self.host = url.hostname
        self.port = url.port or (443 if url.scheme == "https" else 80)
        self.where = f"{self.host} port {self.port}"
        self._timeout_s = timeout_s
        self._headers = {"user-agent": f"SynVirt/{__version__}", **{k.lower(): v for k, v in (headers or {}).items()}}
        self._recorder = recorder
        self._lock = threading.Lock()
        common: dict[str, Any] = {"maxsize": connections, "block": True, "retries": False}
        if url.scheme == "https":
            context = tls.context(self.where, verify=trust.verify, fingerprint_sha256=trust.fingerprint_sha256)
            self._pool: urllib3.HTTPConnectionPool = _Pool(
                self.host, self.port, ssl_context=context, assert_hostname=None if context.check_hostname else False, **common
            )
        else:
            self._pool = _PlainPool(self.host, self.port, **common)

    def set_header(self, name: str, value: str | None) -> None:
        """Sends the header with every request from now on; None: no more."""
        with self._lock:
            headers = {**self._headers, name.lower(): value or ""}
            self._headers = {key: text for key, text in headers.items() if key != name.lower() or value is not None}

    def request(
        self,
        method: str,
        path: str,
        *,
        query: Mapping[str, str] | None = None,
        json: Any = None,
        form: Mapping[str, str] | None = None,
        body: bytes | None = None,
        headers: Mapping[str, str] | None = None,
        timeout_s: float | None = None,
        limit_bytes: int = ANSWER_BYTES_MAX,
    ) -> Answer:
        """The whole answer. One of `json`, `form`, `body` is the request's body. `timeout_s`: of silence, not of the whole.

        SourceUnreachable: no answer, or one that was cut off. AnswerTooLarge: one of more than `limit_bytes`.
        """
        sent, content_type = _body(json, form, body)
        merged = {**content_type, **(headers or {})}
        until = time.monotonic() + max(ANSWER_TIMEOUT_S, timeout_s or 0)
        with self.stream(method, path, query=query, body=sent, headers=merged, timeout_s=timeout_s) as stream:
            pieces = bytearray()
            while piece := stream.read_some(_PIECE_BYTES):
                pieces += piece
                if len(pieces) > limit_bytes:
                    raise AnswerTooLarge(f"{self.where} answered {method} {path} with more than {limit_bytes} bytes")
                if time.monotonic() > until:
                    raise SourceUnreachable(f"{self.where} sent its answer to {method} {path} too slowly")
            answer = Answer(stream.status, stream.headers, bytes(pieces), stream.reason)
        if self._recorder is not None:
            self._recorder.answered(method, path, dict(query or {}), sent, answer)
        return answer

    @contextmanager
    def stream(
        self,
        method: str,
        path: str,
        *,
        query: Mapping[str, str] | None = None,
        body: bytes | None = None,
        headers: Mapping[str, str] | None = None,
        timeout_s: float | None = None,
    ) -> Iterator[Stream]:
        """The head of the answer has come when the block begins. A body that was not read to its end closes the connection."""
        where = f"{self.where} ({method} {path})"
        with self._lock:
            merged = {**self._headers, **{name.lower(): value for name, value in (headers or {}).items()}}
        response = self._sent(method, _target(path, query), body, merged, timeout_s=timeout_s or self._timeout_s, where=where)
        stream = Stream(response, where)
        try:
            yield stream
        finally:
            if not stream.ended:
                response.close()
            response.release_conn()

    def close(self) -> None:
        self._pool.close()

    def _sent(
        self, method: str, target: str, body: bytes | None, headers: Mapping[str, str], *, timeout_s: float, where: str
    ) -> urllib3.BaseHTTPResponse:
        timeout = urllib3.Timeout(connect=min(CONNECT_TIMEOUT_S, timeout_s), read=timeout_s)
        again = method in _IDEMPOTENT
        while True:
            with _translated(where):
                try:
                    return self._pool.urlopen(
                        method,
                        target,
                        body,
                        headers,
                        redirect=False,
                        assert_same_host=False,
                        timeout=timeout,
                        preload_content=False,
                        decode_content=False,
                    )
                except ProtocolError:
                    if not again:
                        raise
            again = False


def _target(path: str, query: Mapping[str, str] | None) -> str:
    return f"{path}?{urlencode(query)}" if query else path


def _body(json: Any, form: Mapping[str, str] | None, body: bytes | None) -> tuple[bytes | None, dict[str, str]]:
    if json is not None:
        return json_text.dumps(json, separators=(",", ":")).encode(), {"content-type": "application/json"}
    if form is not None:
        return urlencode(form).encode(), {"content-type": "application/x-www-form-urlencoded"}
    return body, {}


@contextmanager
def _translated(where: str) -> Iterator[None]:
    """urllib3's errors as ours. A certificate that is not the pinned one is SourceUnreachable already (tls.context)."""
    try:
        yield
    except NameResolutionError as error:
        raise SourceUnreachable(
            f"{where}: the name does not resolve to an address", hint="check the spelling, and this host's DNS"
        ) from error
    except (NewConnectionError, ConnectTimeoutError) as error:
        cause = "no answer" if isinstance(error, ConnectTimeoutError) and error.__cause__ is None else root_cause_of(error)
        raise SourceUnreachable(
            f"{where} accepts no connection: {cause}", hint="is it running, and does a firewall let this host through?"
        ) from error
    except ReadTimeoutError as error:
        raise SourceUnreachable(
            f"{where} did not answer in time", hint="is the platform overloaded?", waited_s=SILENCE_TIMEOUT_S
        ) from error
    except SSLError as error:
        raise tls.not_trusted(where, root_cause_of(error)) from error
    except LocationParseError as error:
        raise BadRequest(f"{where}: this address cannot be asked for") from error
    except (HTTPError, OSError) as error:
        raise SourceUnreachable(f"{where}: the connection was lost: {root_cause_of(error)}") from error
