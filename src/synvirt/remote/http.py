"""Files by HTTP ranges: RFC 9110 section 14, from a server that answers 206 and gives the version of the file.

    first    GET, Range: bytes=0-65535                        ─▶ 206, Content-Range: bytes 0-65535/SIZE, ETag, Last-Modified
    then     GET, Range: bytes=…, If-Match: ETag              ─▶ 206 of the same version, or 412: it was changed

No HEAD: a URL that was signed for GET refuses it. The range, the size and the version of every answer are checked. A few
redirects are followed, never from https to http. Credentials go only to the first origin.
"""

import base64
import contextlib
import hashlib
import http.client
import re
import socket
import ssl
import string
import threading
from collections.abc import Callable, Mapping
from dataclasses import replace
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from functools import cached_property
from typing import Final
from urllib.parse import quote, urljoin

from synvirt import __version__, outgoing
from synvirt.errors import (
    AuthFailed,
    BadRequest,
    DiskReadFailed,
    NotFound,
    SourceUnreachable,
    SynvirtError,
    UnsupportedFormat,
    root_cause_of,
)
from synvirt.http_answers import Response
from synvirt.remote import Interrupted, Remote, urls, version_by
from synvirt.remote.urls import Url

# The first read when a file is opened: it holds the headers of most formats.
HEAD_BYTES: Final = 64 << 10
# The time between two pieces of an answer. A server under load may need a while, and an object store may fetch from tape.
READ_TIMEOUT_S: Final = 30.0
REDIRECTS_MAX: Final = 5
# The most of an error's body. Of a longer one the rest is not read, and its connection is closed.
_REFUSAL_BYTES: Final = 64 << 10
_STEP_BYTES: Final = 128 << 10
_CONTENT_RANGE: Final = re.compile(r"bytes (\d{1,19})-(\d{1,19})/(\d{1,19})", re.ASCII)
_REDIRECTS: Final = frozenset({301, 302, 303, 307, 308})
# 408 Request Timeout, 425 Too Early, 429 Too Many Requests; and every 5xx.
_PASSING: Final = frozenset({408, 425, 429})
# What a server says of the file. Any other 4xx of a redirect's target may mean that its signature has lapsed: 403 of most
# stores, 400 of Google's, and of S3 for keys that are lent for a while.
_OF_THE_FILE: Final = frozenset({412, 416})

# Headers for a request to `url` beside the common ones; for S3, its signature.
Sign = Callable[[Url], Mapping[str, str]]


class HttpPlace:
    """`sign` makes the headers that authenticate a request; only requests to the Remote's own origin have them."""

    fetches_at_once = 6

    def __init__(self, remote: Remote, sign: Sign | None = None) -> None:
        self._remote = remote
        self._sign = sign or _authorization(remote)
        self._lock = threading.Lock()
        self._idle: dict[str, list[http.client.HTTPConnection]] = {}
        self._all: dict[http.client.HTTPConnection, socket.socket] = {}
        self._closed = threading.Event()

    @cached_property
    def _context(self) -> ssl.SSLContext:
        """Made for the first connection that is secured: a place without TLS needs no authorities loaded."""
        return _tls(self._remote)

    def url(self, name: str) -> Url:
        return replace(urls.parse(self._remote.url).beneath(name), query=self._remote.query)

    def open(self, name: str) -> "HttpFile":
        return HttpFile(self, self.url(name))

    def names(self, _folder: str) -> list[str] | None:
        """HTTP has no folders."""
        return None

    def reason(self, _body: bytes) -> str:
        """The reason in an error's body; none for HTTP, as the body is a page for people."""
        return ""

    def close(self) -> None:
        with self._lock:
            self._closed.set()
            connections, self._all, self._idle = self._all, {}, {}
        for connection, sock in connections.items():
            with contextlib.suppress(OSError):  # closing alone would not wake a thread that waits for the server
                sock.shutdown(socket.SHUT_RDWR)
            connection.close()

    # ── one request ──────────────────────────────────────────────────────────────────────────────────────────────────

    def ask(self, url: Url, headers: Mapping[str, str], *, asked_for: Url) -> "Answer":
        """GET `url`, with redirects. `asked_for`: the URL that the credentials are for, and the name in errors."""
        for _ in range(REDIRECTS_MAX + 1):
            answer = self._answer(url, headers, asked_for)
            location = answer.headers.get("location")
            if answer.status not in _REDIRECTS or not location:
                return answer
            answer.refusal()
            url = _redirected(url, location, asked_for)
        raise DiskReadFailed(f"{asked_for.shown} redirects more than {REDIRECTS_MAX} times")

    def _answer(self, url: Url, headers: Mapping[str, str], asked_for: Url) -> "Answer":
        common = {"Host": url.authority, "User-Agent": f"synvirt/{__version__}", "Accept-Encoding": "identity"}
        own = self._sign(url) if url.origin == asked_for.origin else {}
        while True:
            connection, used_before = self._borrowed(url)
            try:
                connection.putrequest("GET", url.target, skip_host=True, skip_accept_encoding=True)
                for key, value in {**common, **headers, **own}.items():
                    connection.putheader(key, value)
                connection.endheaders()
                return Answer(self, url, connection, connection.getresponse())
            except (OSError, http.client.HTTPException) as error:
                self.drop(connection)
                # A server may end an idle connection: that means nothing for this request.
                if not (used_before and isinstance(error, (ConnectionError, http.client.RemoteDisconnected))):
                    raise Interrupted(_cause(error)) from error

    def _borrowed(self, url: Url) -> tuple[http.client.HTTPConnection, bool]:
        with self._lock:
            if self._closed.is_set():
                raise SourceUnreachable(f"{url.shown} was closed while it was read")
            idle = self._idle.get(url.origin)
            if idle:
                return idle.pop(), True
        tls = self._context if url.scheme == "https" else None
        connection = http.client.HTTPConnection(url.host, url.port)
        connection.response_class = Response
        connection.auto_open = 0  # it would connect by itself, without the guard
        sock = self._remote.guard.connect(url.host, url.port)
        sock.settimeout(READ_TIMEOUT_S)
        connection.sock = sock = self._secured(sock, url, tls) if tls else sock
        with self._lock:
            self._all[connection] = sock
        if self._closed.is_set():
            self.drop(connection)
            raise SourceUnreachable(f"{url.shown} was closed while it was read")
        return connection, False

    def _secured(self, sock: socket.socket, url: Url, tls: ssl.SSLContext) -> ssl.SSLSocket:
        try:
            secured = tls.wrap_socket(sock, server_hostname=url.host)
        except ssl.SSLCertVerificationError as error:
            sock.close()
            trust = "name its authority in the setting remote_ca_file, or give options.fingerprint_sha256 of its certificate"
            raise AuthFailed(
                f"{url.origin} shows a certificate that is not trusted: {error.verify_message}",
                hint=outgoing.hint_of_refused(error.verify_message, trust),
            ) from error
        except OSError as error:
            sock.close()
            raise Interrupted(f"TLS with {url.origin} failed: {_cause(error)}") from error
        try:
            check_fingerprint(secured.getpeercert(binary_form=True), self._remote.fingerprint_sha256, url.origin)
        except AuthFailed:
            secured.close()
            raise
        return secured

    def give_back(self, url: Url, connection: http.client.HTTPConnection) -> None:
        """Keeps a connection whose answer was read to its end."""
        with self._lock:
            if not self._closed.is_set():
                self._idle.setdefault(url.origin, []).append(connection)
                return
        self.drop(connection)

    def drop(self, connection: http.client.HTTPConnection) -> None:
        """Closes a connection."""
        with self._lock:
            self._all.pop(connection, None)
        connection.close()


class Answer:
    """The head of an answer; its body is read once, by one of the methods."""

    def __init__(
        self, place: HttpPlace, url: Url, connection: http.client.HTTPConnection, response: http.client.HTTPResponse
    ) -> None:
        self.url, self.status, self.headers = url, response.status, response.headers
        self._place, self._connection, self._response = place, connection, response

    def body(self, into: memoryview) -> None:
        """Reads exactly as many bytes as fit; Interrupted, where there are fewer."""
        got, count = 0, 1
        try:
            while got < len(into) and count:
                # In steps: when a broken connection ends a read, it is not known how many bytes came.
                count = self._response.readinto(into[got : got + _STEP_BYTES])
                got += count
        except (OSError, http.client.HTTPException) as error:
            self.drop_unread()
            raise Interrupted(_cause(error), got=got) from error
        self._done()
        if got < len(into):
            raise Interrupted(f"the answer ended after {got} of {len(into)} bytes", got=got)

    def text(self, most: int) -> bytes:
        """A body of at most `most` bytes. Interrupted."""
        try:
            content = self._response.read(most + 1)
        except (OSError, http.client.HTTPException) as error:
            self.drop_unread()
            raise Interrupted(_cause(error)) from error
        self._done()
        return content

    def drop_unread(self) -> None:
        """Closes the connection without reading the rest of the answer."""
        # A connection that ends with its answer has given its socket to the answer.
        self._response.close()
        self._place.drop(self._connection)

    def refusal(self) -> bytes:
        """The server's words beside its status; never fails."""
        try:
            return self.text(_REFUSAL_BYTES)
        except Interrupted:
            return b""

    def _done(self) -> None:
        # A response that was read to its end has released its connection; an unfinished one has not.
        if self._response.isclosed() and not self._response.will_close:
            self._place.give_back(self.url, self._connection)
        else:
            self.drop_unread()


class HttpFile:
    """A file, at the version that it had when it was opened."""

    def __init__(self, place: HttpPlace, url: Url) -> None:
        self._place, self._url = place, url
        self.shown = url.shown
        # The target of a redirect. It is asked directly from then on, until it refuses (its signature has expired).
        self._target = url
        self.head = b""
        answer = place.ask(url, {"Range": f"bytes=0-{HEAD_BYTES - 1}"}, asked_for=url)
        self._etag, self._changed = answer.headers.get("etag", ""), answer.headers.get("last-modified", "")
        self.size = self._opened(answer)
        self._target = answer.url
        self.version = version_by(self.size, self._etag or self._changed)

    def _opened(self, answer: Answer) -> int:
        """The file's size; its first bytes become `head`."""
        if answer.status == 416:  # an empty file has no first byte, and S3 does not report that it is empty
            answer.refusal()
            answer = self._place.ask(self._url, {}, asked_for=self._url)
        if answer.status == 200:
            answer.drop_unread()
            if answer.headers.get("content-length") == "0":
                return 0
            raise UnsupportedFormat(
                f"{self.shown}: the server sends the whole file where a range of it is asked for",
                hint="a server that answers ranges is needed (nginx, Apache, S3 do); else put the file into the import root",
            )
        self._require_partial(answer)
        found = _CONTENT_RANGE.fullmatch(answer.headers.get("content-range", ""))
        if found is None:
            answer.drop_unread()
            raise UnsupportedFormat(
                f"{self.shown}: the server does not say how large the file is",
                hint="its answer to a range must have «Content-Range: bytes 0-…/SIZE»",
            )
        size = int(found[3])
        head = bytearray(min(HEAD_BYTES, size))
        self._check_range(answer, 0, len(head), size)
        got = len(head)
        try:
            answer.body(memoryview(head))
        except Interrupted as error:
            if not error.got:
                raise
            got = error.got
        self.head = bytes(head[:got])
        return size

    def fetch(self, offset: int, into: memoryview) -> None:
        headers = {"Range": f"bytes={offset}-{offset + len(into) - 1}"}
        # A weak validator is not valid for ranges (RFC 9110 section 13.1.1): then the answer's own is compared, below.
        if self._etag.startswith('"'):
            headers["If-Match"] = self._etag
        elif self._changed:
            headers["If-Unmodified-Since"] = self._changed
        target = self._target
        answer = self._place.ask(target, headers, asked_for=self._url)
        if target is not self._url and 400 <= answer.status < 500 and answer.status not in _OF_THE_FILE | _PASSING:
            answer.refusal()
            answer = self._place.ask(self._url, headers, asked_for=self._url)
        self._target = answer.url
        if answer.status in (200, 412):
            answer.drop_unread()
            raise self._was_changed(offset)
        if answer.status == 416:
            answer.refusal()
            raise DiskReadFailed(f"{self.shown} ends before offset {offset}, but had {self.size} bytes when it was opened")
        self._require_partial(answer, offset)
        self._check_range(answer, offset, len(into), self.size)
        if self._etag and answer.headers.get("etag", "") != self._etag:
            answer.drop_unread()
            raise self._was_changed(offset)
        if not self._etag and answer.headers.get("last-modified", "") != self._changed:
            answer.drop_unread()
            raise self._was_changed(offset)
        answer.body(into)

    def _require_partial(self, answer: Answer, offset: int | None = None) -> None:
        """Requires 206; raises the error that another status means."""
        status = answer.status
        if status == 206 and answer.headers.get("content-encoding", "identity") == "identity":
            return
        if status == 206:
            answer.drop_unread()
            raise UnsupportedFormat(f"{self.shown}: the server compresses what it sends, so ranges mean nothing")
        reason = self._place.reason(answer.refusal())
        where = self.shown if offset is None else f"{self.shown}, offset {offset}"
        raise refused(status, where, reason, answer.headers.get("retry-after"))

    def _check_range(self, answer: Answer, offset: int, length: int, size: int) -> None:
        found = _CONTENT_RANGE.fullmatch(answer.headers.get("content-range", ""))
        announced = answer.headers.get("content-length")
        if found is None or (int(found[1]), int(found[2]), int(found[3])) != (offset, offset + length - 1, size):
            answer.drop_unread()
            if found is not None and int(found[3]) != size:
                raise self._was_changed(offset)
            raise DiskReadFailed(
                f"{self.shown}: bytes {offset} to {offset + length - 1} of {size} were asked for, and the server answers"
                f" {answer.headers.get('content-range', 'nothing')[:80]!r}",
                hint="the server, or a proxy before it, does not serve ranges as it should",
            )
        if announced is not None and announced != str(length):
            answer.drop_unread()
            raise DiskReadFailed(
                f"{self.shown}: the server announces {announced[:20]} bytes for a range of {length} at offset {offset}"
            )

    def _was_changed(self, offset: int) -> DiskReadFailed:
        return DiskReadFailed(
            f"{self.shown} was changed or replaced while it was read, at offset {offset}",
            hint="let it be written to its end first, then submit again",
        )

    def close(self) -> None:
        """The connections belong to the place."""


# ── meanings of answers ──────────────────────────────────────────────────────────────────────────────────────────────


def refused(status: int, where: str, reason: str, retry_after: str | None) -> SynvirtError | Interrupted:
    """The error for an unexpected status. Interrupted, where a retry may succeed."""
    what = f"{status} {http.client.responses.get(status, '')}".strip() + (f" ({reason})" if reason else "")
    if status in _PASSING or status >= 500:
        return Interrupted(f"the server answers {what}", after_s=_seconds(retry_after))
    if status in (401, 403):
        return AuthFailed(
            f"{where}: the server answers {what}",
            hint="check the credentials; a signed URL may have lapsed, or be signed for another file or method",
        )
    if status in (404, 410):
        return NotFound(f"{where}: the server answers {what}", hint="check the URL: the path, and capital letters in it")
    return DiskReadFailed(f"{where}: the server answers {what}")


def _seconds(retry_after: str | None) -> float | None:
    """RFC 9110 section 10.2.3: a number of seconds, or a date."""
    if retry_after is None:
        return None
    if retry_after.isascii() and retry_after.isdigit():
        return float(retry_after[:9])
    try:
        return max(0.0, (parsedate_to_datetime(retry_after) - datetime.now(UTC)).total_seconds())
    except (TypeError, ValueError):
        return None


def _redirected(url: Url, location: str, asked_for: Url) -> Url:
    # Many servers write a name as it is, in bytes, which http.client gives as Latin-1.
    location = quote(location.encode("latin-1"), safe=string.punctuation)
    try:
        target = urls.parse(urljoin(url.origin + url.target, location))
    except ValueError as error:
        raise DiskReadFailed(f"{asked_for.shown} redirects to an address that is not a URL") from error
    if target.scheme not in ("http", "https"):
        raise BadRequest(f"{asked_for.shown} redirects to a {target.scheme} URL, which is not followed")
    if url.scheme == "https" and target.scheme == "http":
        raise BadRequest(f"{asked_for.shown} redirects from https to {target.origin}, in the clear: not followed")
    return target


def _cause(error: BaseException) -> str:
    if isinstance(error, TimeoutError):
        return f"no byte came for {READ_TIMEOUT_S:.0f} s"
    if isinstance(error, http.client.IncompleteRead):
        return "the connection ended in the middle of an answer"
    return root_cause_of(error)[:200]


# ── authentication ───────────────────────────────────────────────────────────────────────────────────────────────────


def _authorization(remote: Remote) -> Sign:
    """Basic (RFC 7617), or a bearer token (RFC 6750)."""
    if token := remote.credential("token"):
        headers = {"Authorization": f"Bearer {token}"}
    elif username := remote.credential("username"):
        pair = f"{username}:{remote.credential('password')}".encode()
        headers = {"Authorization": "Basic " + base64.b64encode(pair).decode()}
    else:
        headers = {}
    return lambda _url: headers


def _tls(remote: Remote) -> ssl.SSLContext:
    checked = remote.verify_tls and not remote.fingerprint_sha256
    # To load this host's authorities takes 25 ms of a core: not where none is asked.
    context = ssl.create_default_context() if checked else ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    if remote.ca_file:
        try:
            context.load_verify_locations(remote.ca_file)
        except (OSError, ssl.SSLError) as error:
            raise SourceUnreachable("the authorities in the setting remote_ca_file cannot be read") from error
    if not checked:
        context.check_hostname = False
        context.verify_mode = ssl.CERT_NONE
    return context


def check_fingerprint(certificate: bytes | None, wanted: str | None, origin: str) -> None:
    """AuthFailed where the certificate (DER) does not have the SHA-256 fingerprint; None: any."""
    if wanted is None:
        return
    found = hashlib.sha256(certificate or b"").hexdigest()
    if found != wanted.replace(":", "").lower():
        raise AuthFailed(
            f"{origin} shows a certificate with the SHA-256 fingerprint {found}, not the one that was given",
            hint="was its certificate renewed? Then give the new fingerprint; else somebody is in between",
        )
