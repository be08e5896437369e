"""A folder that another SynVirt offers, over HTTPS: the client of `api/routes/peer.py`.

A file that a repository writes has no name until it is renamed. So it is sent at that time, in one request, and the peer
answers after it has checked the file and made it durable. Every request is idempotent, and is repeated for a while if the peer
is away.
"""

import base64
import contextlib
import email.utils
import http.client
import re
import ssl
import threading
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import TypeVar
from urllib.parse import quote, urlsplit

from pydantic import ValidationError

from synvirt import __version__
from synvirt.errors import (
    BackupBadRequest,
    BackupConflict,
    BackupImmutable,
    BadRequest,
    RepositoryDamaged,
    RepositoryFull,
    RepositoryUnreachable,
    SourceUnreachable,
    StoreWriteFailed,
    SynvirtError,
    root_cause_of,
)
from synvirt.http_answers import Response
from synvirt.model.problems import ProblemDetails
from synvirt.model.values import Bytes, Model
from synvirt.outgoing import Guard
from synvirt.repository.folder import UNFINISHED, Entry
from synvirt.sizes import KIB, MIB
from synvirt.transport import tls

# The time between two pieces of an answer. A peer's disk may need long to make 64 MiB durable.
TIMEOUT_S = 120.0
CONNECT_TIMEOUT_S = 10.0
# How long a peer may be away before a run fails: a restart, or a cable.
PATIENCE_S = 60.0
_WAITS_S = (0.1, 0.5, 1.0, 2.0, 5.0)
_SEND_BYTES = MIB
# The longest answers: a manifest, and the list of the packs of 60 TiB.
_ANSWER_BYTES_MAX = 128 * MIB
_PROBLEM_BYTES_MAX = 64 * KIB
_DETAIL_CHARS = 500
# The error codes of a peer, and our errors for them.
_ERRORS: dict[str, type[SynvirtError]] = {
    error.code: error
    for error in (BackupBadRequest, BackupConflict, BackupImmutable, RepositoryDamaged, RepositoryFull, RepositoryUnreachable)
}
_PASSING = frozenset({408, 429, 502, 503, 504})

Answered = TypeVar("Answered", bound=Model)
Piece = bytes | bytearray | memoryview


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerPlace:
    """`url`: https://HOST:PORT/…/backup/peer/NAME. `fingerprint_sha256`: in hex with colons, of the certificate it shows.
    `allowed_hosts`: the setting source_allowed_hosts."""

    url: str
    fingerprint_sha256: str
    username: str
    password: str
    allowed_hosts: tuple[str, ...] = ()


class PeerRoom(Model):
    """The file system of an offered folder. `keep_days`: the shortest time that restore points stay there."""

    capacity_bytes: Bytes
    used_bytes: Bytes
    keep_days: float


class PeerEntry(Model):
    """`modified_at`: seconds since 1970, by the peer's clock."""

    name: str
    size_bytes: Bytes
    modified_at: float


class PeerEntries(Model):
    """The answer of a peer that lists a folder."""

    entries: tuple[PeerEntry, ...]


class _Away(Exception):
    """The peer did not answer, or not this time."""


class _Stale(_Away):
    """A reused connection has ended: this says nothing of the peer."""


class PeerFolder:
    """Safe from several threads: each has a connection of its own during a request. `patience_s`: how long the peer may be
    away."""

    def __init__(self, place: PeerPlace, *, patience_s: float = PATIENCE_S) -> None:
        parts = urlsplit(place.url)
        try:
            port = parts.port or 443
        except ValueError as error:
            raise BackupBadRequest(f"peer.url: {error}") from error
        if parts.scheme != "https" or not parts.hostname or parts.query or parts.fragment or parts.username:
            raise BackupBadRequest("peer.url is not https://HOST:PORT/…/backup/peer/NAME")
        self._host, self._port, self._path = parts.hostname, port, parts.path.rstrip("/")
        self._where = f"{parts.hostname}:{port}"
        self._guard = Guard(place.allowed_hosts, "source_allowed_hosts")
        try:
            self._guard.check_name(self._host)
        except BadRequest as error:
            raise BackupBadRequest(error.detail, hint=error.hint) from error
        self._username = place.username
        pair = base64.b64encode(f"{place.username}:{place.password}".encode()).decode()
        self._headers = {"Authorization": f"Basic {pair}", "User-Agent": f"synvirt/{__version__}"}
        self._tls = tls.context(self._where, verify=True, fingerprint_sha256=place.fingerprint_sha256)
        self._patience_s = patience_s
        self._lock = threading.Lock()
        self._idle: list[http.client.HTTPConnection] = []
        self._unfinished: dict[str, list[Piece]] = {}
        # The date of its last answer.
        self._dated = ""

    # ── the interface of folders ─────────────────────────────────────────────────────────────────────────────────────

    def room(self) -> tuple[int, int]:
        """The size of the peer's file system, and how much of it is used, in bytes. RepositoryUnreachable."""
        found = self._parsed(PeerRoom, "", "its room")
        return found.capacity_bytes, found.used_bytes

    def make_folders(self, names: Iterable[str]) -> None:
        """Asks the peer to make a repository's folders, whose names it knows itself."""
        self._ask("POST", "/folders", "the repository")

    def write(self, name: str, pieces: Iterable[Piece]) -> None:
        with self._lock:
            self._unfinished[name] = list(pieces)

    def sync(self, name: str) -> None:
        """Renamed files are durable already."""

    def rename(self, old: str, new: str) -> None:
        with self._lock:
            pieces = self._unfinished.pop(old)
        self._ask("PUT", f"/files/{quote(new)}", new, pieces)

    def sync_folder(self, folder: str) -> None:
        """As for `sync`."""

    def read(self, name: str, offset: int = 0, length: int | None = None) -> bytes:
        query = f"?offset={offset}" + ("" if length is None else f"&length={length}")
        found = self._ask("GET", f"/files/{quote(name)}{query}", name)
        if length is not None and len(found) != length:
            raise RepositoryDamaged(f"the peer sends {len(found)} of the {length} bytes of {name} at {offset}")
        return found

    def entries(self, folder: str) -> list[Entry]:
        found = self._parsed(PeerEntries, f"/entries?folder={quote(folder)}", folder or "the repository").entries
        return sorted((Entry(one.name, one.size_bytes, one.modified_at) for one in found), key=lambda entry: entry.name)

    def delete(self, name: str) -> None:
        if name.startswith(f"{UNFINISHED}/"):
            with self._lock:
                self._unfinished.pop(name, None)
            return
        self._ask("DELETE", f"/files/{quote(name)}", name)

    def clock(self) -> float:
        self._parsed(PeerRoom, "", "its room")
        try:
            return email.utils.parsedate_to_datetime(self._dated).timestamp()
        except (ValueError, OverflowError):
            return time.time()

    def close(self) -> None:
        with self._lock:
            idle, self._idle = self._idle, []
        for connection in idle:
            connection.close()

    # ── requests and their errors ────────────────────────────────────────────────────────────────────────────────────

    def _parsed(self, model: type[Answered], path: str, what: str) -> Answered:
        try:
            return model.model_validate_json(self._ask("GET", path, what))
        except ValidationError as error:
            raise RepositoryUnreachable(
                f"the peer {self._where} answers what no SynVirt does for {what}",
                hint="is peer.url the one of its backup offer?",
            ) from error

    def _ask(self, method: str, path: str, what: str, pieces: list[Piece] | None = None) -> bytes:
        until = time.monotonic() + self._patience_s
        for wait_s in self._waits():
            try:
                return self._once(method, path, what, pieces)
            except _Stale:
                self.close()
            except _Away as error:
                if time.monotonic() + wait_s > until:
                    raise RepositoryUnreachable(
                        f"the peer {self._where} does not answer for {what}: {error}",
                        hint="does it run, and do firewalls let this host connect to it? What was sent is not sent again",
                    ) from error
                time.sleep(wait_s)
        raise AssertionError

    @staticmethod
    def _waits() -> Iterator[float]:
        yield from _WAITS_S
        while True:
            yield _WAITS_S[-1]

    def _once(self, method: str, path: str, what: str, pieces: list[Piece] | None) -> bytes:
        connection, away = self._borrowed()
        try:
            answer = self._sent(connection, method, path, pieces)
            good = answer.status in (200, 204)
            limit = _ANSWER_BYTES_MAX if good else _PROBLEM_BYTES_MAX
            body = _body(answer, limit)
        except SourceUnreachable as error:  # another certificate
            connection.close()
            raise RepositoryUnreachable(
                error.detail, hint="was the peer's certificate renewed? Then give the new one's; else an attacker is in between"
            ) from error
        except (OSError, http.client.HTTPException) as error:
            connection.close()
            raise away(_cause(error)) from error
        if answer.will_close or not answer.isclosed():  # the rest of a longer one is still to come
            connection.close()
        else:
            with self._lock:
                self._idle.append(connection)
        if good and len(body) <= limit:
            self._dated = answer.headers.get("date", "")
            return body
        raise self._refusal(answer.status, body, what)

    def _borrowed(self) -> tuple[http.client.HTTPConnection, type[_Away]]:
        """A connection, and the error for the case that it breaks."""
        with self._lock:
            if self._idle:
                return self._idle.pop(), _Stale
        made = http.client.HTTPConnection(self._host, self._port)
        made.response_class = Response
        made.auto_open = 0  # it would connect by itself, without the guard
        return made, _Away

    def _connected(self) -> ssl.SSLSocket:
        try:
            plain = self._guard.connect(self._host, self._port, timeout_s=CONNECT_TIMEOUT_S)
        except BadRequest as error:
            raise BackupBadRequest(error.detail, hint=error.hint) from error
        except SourceUnreachable as error:
            raise _Away(error.detail) from error
        try:
            return self._tls.wrap_socket(plain, server_hostname=self._host)
        except BaseException:
            plain.close()
            raise

    def _sent(
        self, connection: http.client.HTTPConnection, method: str, path: str, pieces: list[Piece] | None
    ) -> http.client.HTTPResponse:
        if getattr(connection, "sock", None) is None:
            connection.sock = sock = self._connected()
            sock.settimeout(TIMEOUT_S)
        length = sum(len(piece) for piece in pieces or [])
        connection.putrequest(method, self._path + path)
        for key, value in self._headers.items():
            connection.putheader(key, value)
        if pieces is not None:
            connection.putheader("Content-Length", str(length))
        connection.endheaders()
        # A peer that refuses answers at once and closes: its answer is read instead of reporting a failed send.
        with contextlib.suppress(BrokenPipeError, ConnectionResetError, ssl.SSLEOFError):
            for piece in pieces or []:
                view = memoryview(piece)
                for at in range(0, len(view), _SEND_BYTES):
                    connection.send(view[at : at + _SEND_BYTES])
        return connection.getresponse()

    def _refusal(self, status: int, body: bytes, what: str) -> Exception:
        try:
            problem = ProblemDetails.model_validate_json(body)
        except ValidationError:
            problem = None
        detail = "" if problem is None else f": {problem.detail[:_DETAIL_CHARS]}"
        if problem is not None and problem.code in _ERRORS:
            return _ERRORS[problem.code](f"the peer {self._where}{detail}", hint=(problem.hint or "")[:_DETAIL_CHARS] or None)
        if status == 401:
            hint = f"are the password of {self._username} and peer.url right?"
            return RepositoryUnreachable(f"the peer {self._where} refuses its caller{detail}", hint=hint)
        if status == 404:
            hint = "peer.url is the one of a folder that its operator set in backup_offers"
            return RepositoryUnreachable(f"the peer {self._where} offers no such folder", hint=hint)
        if status in _PASSING:
            return _Away(f"it answers {status}")
        return StoreWriteFailed(f"the peer {self._where} answers {status} for {what}{detail}")


def _body(answer: http.client.HTTPResponse, limit: int) -> bytes:
    """The whole body, or one byte more than `limit`. IncompleteRead: http.client reports a body that breaks off only if all of
    it is read."""
    length = answer.headers.get("content-length", "")
    body = answer.read(limit + 1)
    if re.fullmatch("[0-9]{1,18}", length) and len(body) < min(int(length), limit + 1):
        raise http.client.IncompleteRead(body[:0], int(length) - len(body))
    return body


def _cause(error: BaseException) -> str:
    if isinstance(error, TimeoutError):
        return "no byte came in time"
    return root_cause_of(error)[:200]
