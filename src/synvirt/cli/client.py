"""A client of the service: HTTP over its Unix socket, or HTTPS. The command line uses it, and other programs may import it.

Errors of the service come back as the same SynvirtError that it raised. Blocking code.
"""

import json
import shlex
import socket
import ssl
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass
from ipaddress import ip_address
from pathlib import Path
from typing import Any, BinaryIO, Self, cast
from uuid import UUID

import httpx
from pydantic import ValidationError

from synvirt.cli.migrating.sending import Sending
from synvirt.errors import (
    BadRequest,
    Internal,
    NotFound,
    PersistFailed,
    ServiceUnreachable,
    SynvirtError,
    Unauthorized,
    UploadTooLarge,
    from_code,
)
from synvirt.model.job import Migration
from synvirt.model.plan import MigrationPlan
from synvirt.sizes import sized
from synvirt.texts import escaped_json

# A submitted plan's file is read: a few seconds on a slow share.
ANSWER_TIMEOUT_S = 60.0
CONNECT_TIMEOUT_S = 5.0
# The service answers an upload only when all of it is on its disk: a slow one may still have gigabytes to write.
UPLOAD_TIMEOUT_S = 600.0
# Three heartbeats: a stream that is silent for longer is dead.
STREAM_TIMEOUT_S = 45.0
# A restarted service is back in seconds; an upgraded one in less than this.
PATIENCE_S = 120.0
RECONNECT_EVERY_S = 1.0
# An event is a Migration: its manifest and domain XML are well below this. A peer that sends more is not the service.
EVENT_LIMIT_CHARS = 16 << 20
_SILENT = (
    "its process is stopped, or has too much to do: its log may say why. "
    "What it was asked may still be done: look before you ask again"
)
# Of a body that a command made of its options.
BY_HELP = "--help says what this command takes"
# Nothing at an address that every service has.
_ELSEWHERE = (
    "its base_url is another, or its version: --config or SYNVIRT_BASE_URL names the base_url, and with --server "
    "the end of the address: https://host:8441/synvirt"
)


@dataclass(frozen=True, slots=True)
class StreamEvent:
    """`event` is migration, run or progress; `data` is JSON text; `id` is of the last event that had one (progress: none)."""

    event: str
    data: str
    id: int | None


@dataclass(frozen=True, slots=True)
class Streamed:
    """The subject of a stream: its path, and the parameter that limits it to one thing."""

    path: str
    parameter: str


MIGRATIONS = Streamed("/migrations/stream", "migration_id")
RUNS = Streamed("/backup/runs/stream", "run_id")
WAVES = Streamed("/waves/stream", "wave_id")


class Client(AbstractContextManager["Client"]):
    """A client of one service. Its methods raise the SynvirtError that the service answers, and ServiceUnreachable."""

    def __init__(self, http: httpx.Client, *, where: str, hint: str, socket_path: Path | None = None) -> None:
        self._http, self._where, self._hint, self._socket_path = http, where, hint, socket_path

    @classmethod
    def local(cls, socket_path: Path, *, base_url: str = "") -> Self:
        """A client of this host's service, by its Unix socket."""
        transport = httpx.HTTPTransport(uds=str(socket_path), verify=_without_authorities())
        http = httpx.Client(transport=transport, base_url=f"http://synvirt{_prefix(base_url)}")
        data_dir = socket_path.parent
        hint = f"start it: synvirt serve --data-dir {shlex.quote(str(data_dir))}"
        return cls(http, where=str(socket_path), hint=hint, socket_path=socket_path)

    @staticmethod
    def checked_address(url: str) -> httpx.URL:
        """BadRequest, if it is no address of a service, or a password must not be sent there."""
        try:
            parsed = httpx.URL(url)
        except httpx.InvalidURL:
            parsed = httpx.URL()
        if "@" in url:  # it is in each error, and in the question for a password
            raise BadRequest(
                "the address of a service has no user's name and no password in it",
                hint="for example https://host:8441, with --user NAME; the password: SYNVIRT_PASSWORD, or asked for",
            )
        if parsed.scheme not in ("http", "https") or not parsed.host:
            raise BadRequest(f"{url!r} is not an address of a service", hint="for example https://host:8441")
        if parsed.scheme == "http" and not _is_loopback(parsed.host):
            raise BadRequest(f"{url} would send the password in clear", hint="use https://")
        return parsed

    @classmethod
    def remote(cls, url: str, *, user: str, password: str, ca_file: Path | None = None, verify: bool = True) -> Self:
        """`url` is https://host:port, with {base_url} behind it if the service has one."""
        parsed = cls.checked_address(url)
        http = httpx.Client(
            verify=_trust(ca_file, verify=verify) if parsed.scheme == "https" else _without_authorities(),
            auth=httpx.BasicAuth(user, password),
            base_url=f"{url.rstrip('/')}{_prefix('')}",
        )
        hint = "check the address, and that the service runs there: synvirt serve"
        return cls(http, where=url, hint=hint if parsed.scheme == "https" else f"{hint}; it uses https:// by itself")

    def __exit__(self, *_exception: object) -> None:
        self._http.close()

    # ── the service's answers as text ────────────────────────────────────────────────────────────────────────────────

    def ask(self, method: str, path: str, *, json: Any = None, params: dict[str, Any] | None = None) -> str:
        """The body of one answer. Paths of /backup, /tokens, /audit and /waves are under {base_url}/api/v1, others under its
        /migrator. A parameter that is None was not given, and is not sent. An error of the service is raised as its own
        class."""
        # Not an empty dictionary: given one, httpx drops the parameters that the path has.
        return self._asked(method, _under(path), json=json, params=_given(params or {}) or None)

    def ask_again(self, path: str, *, on_lost: Callable[[], None] = lambda: None) -> str:
        """GET of what was answered before and is followed: waits for the service and its store, as `follow` does."""
        lost_at: float | None = None
        while True:
            try:
                return self.ask("GET", path)
            except (ServiceUnreachable, PersistFailed):
                if lost_at is None:
                    lost_at = time.monotonic()
                    on_lost()
                elif time.monotonic() - lost_at > PATIENCE_S:
                    raise
            time.sleep(RECONNECT_EVERY_S)

    def edit(self, method: str, path: str, change: Callable[[Any], Any]) -> str:
        """Reads what is at the path, and sends back what `change` makes of it. Conflict, where it was changed in between."""
        read = self._request("GET", _under(path))
        tag = read.headers.get("ETag")  # an earlier version of the service gives none
        body = change(json.loads(self._answer(read)))
        return self._asked(method, _under(path), json=body, headers=None if tag is None else {"If-Match": tag})

    def health(self) -> str:
        """The answer of GET /healthz, which is at the root of the service's address, with any {base_url}."""
        return self._asked("GET", str(self._http.base_url.copy_with(raw_path=b"/healthz")))

    def _asked(self, method: str, url: str, **content: Any) -> str:
        return self._answer(self._request(method, url, **content))

    def _request(self, method: str, url: str, **content: Any) -> httpx.Response:
        timeout = httpx.Timeout(ANSWER_TIMEOUT_S, connect=CONNECT_TIMEOUT_S)
        self._knock()
        try:
            return self._http.request(method, url, timeout=timeout, **content)
        except httpx.HTTPError as error:
            raise self._unreachable(error) from error

    def send(self, path: str, content: bytes, *, params: dict[str, Any]) -> str:
        """POST of a file, with parameters as in `ask`. The service reads it at once and asks its sources about it: that may
        take a minute."""
        timeout = httpx.Timeout(UPLOAD_TIMEOUT_S, connect=CONNECT_TIMEOUT_S)
        headers = {"Content-Type": "application/octet-stream"}
        self._knock()
        try:
            response = self._http.post(_under(path), content=content, params=_given(params), headers=headers, timeout=timeout)
        except httpx.HTTPError as error:
            raise self._unreachable(error) from error
        return self._answer(response)

    def fetch(self, path: str) -> bytes:
        """A binary answer: a picture."""
        timeout = httpx.Timeout(ANSWER_TIMEOUT_S, connect=CONNECT_TIMEOUT_S)
        self._knock()
        try:
            response = self._http.get(_under(path), timeout=timeout)
        except httpx.HTTPError as error:
            raise self._unreachable(error) from error
        self._answer(response)
        return response.content

    def save(self, path: str, file: BinaryIO) -> None:
        """Writes a large answer to a file as it comes."""
        timeout = httpx.Timeout(ANSWER_TIMEOUT_S, connect=CONNECT_TIMEOUT_S)
        self._knock()
        try:
            with self._http.stream("GET", _under(path), timeout=timeout) as response:
                if response.status_code >= 300 or _is_page(response):
                    response.read()
                    self._answer(response)
                for piece in response.iter_bytes():
                    file.write(piece)
        except httpx.HTTPError as error:
            raise self._unreachable(error) from error

    def _answer(self, response: httpx.Response) -> str:
        if response.status_code >= 300:
            raise _refusal(response, self._where)
        # Somebody in between asks people to log in, for example: nothing was done of what was asked.
        if _is_page(response):
            raise _stranger(self._where, f"{response.status_code} and a page")
        if not response.content and response.status_code != httpx.codes.NO_CONTENT and response.request.method != "GET":
            raise _stranger(self._where, f"{response.status_code} and nothing")
        # It may be printed as it is, and an answer has names of others.
        is_json = response.headers.get("content-type", "").startswith("application/json")
        return escaped_json(response.text) if is_json else response.text

    def upload(
        self, path: Path, *, sha256: str | None = None, on_sent: Callable[[int, int], None] = lambda _sent, _total: None
    ) -> str:
        """Sends a file; returns the service's answer, an Upload. The file's SHA-256 is calculated during sending and sent after
        it, so the service checks what arrived; if `sha256` is given, it is checked instead. `on_sent` gets bytes sent and in
        all. UploadRejected, before a byte is sent, if the file is too large there."""
        so_far = 0

        def sent(bytes_sent: int, bytes_total: int) -> None:
            nonlocal so_far
            so_far = bytes_sent
            on_sent(bytes_sent, bytes_total)

        body = Sending(path, sha256, sent)
        timeout = httpx.Timeout(UPLOAD_TIMEOUT_S, connect=CONNECT_TIMEOUT_S)
        try:
            with body:
                self._refuse_upload(body.size_bytes)
                response = self._http.post(_under("/uploads"), content=iter(body), headers=body.headers, timeout=timeout)
        except httpx.HTTPError as error:
            if not 0 < so_far < body.size_bytes:  # a whole file may have arrived
                raise self._unreachable(error) from error
            raise ServiceUnreachable(
                f"the upload to {self._where} broke off after {sized(so_far)} of {sized(body.size_bytes)}: {_cause(error)}",
                hint="nothing of it stays there: send the file again",
            ) from error
        return self._answer(response)

    def _refuse_upload(self, size_bytes: int) -> None:
        """UploadTooLarge, if the service says so."""
        with suppress(NotFound, BadRequest):  # an earlier version of the service does not say it
            limits = json.loads(self.ask("GET", "/upload-limits", params={"size_bytes": size_bytes}))
            if limits.get("refused"):
                raise UploadTooLarge(str(limits["refused"]), hint=limits.get("hint"))

    def submit(self, plan: MigrationPlan) -> Migration:
        return self._job("POST", "/migrations", json={"plan": plan.model_dump(mode="json")})

    def migration(self, job_id: UUID | str) -> Migration:
        return self._job("GET", f"/migrations/{job_id}")

    def cancel(self, job_id: UUID | str, *, lose_guest_writes: bool = False) -> Migration:
        """Asks a job to stop. `lose_guest_writes`: also one whose guest runs already. Conflict, if the job has ended."""
        asked = "?guest_writes=lose" if lose_guest_writes else ""
        return self._job("POST", f"/migrations/{job_id}/cancel{asked}")

    def cutover(self, job_id: UUID | str) -> Migration:
        return self._job("POST", f"/migrations/{job_id}/cutover")

    def _job(self, method: str, path: str, *, json: Any = None) -> Migration:
        try:
            return Migration.model_validate_json(self.ask(method, path, json=json))
        except ValidationError as error:
            raise _stranger(self._where, "something other than a job") from error

    # ── the stream ───────────────────────────────────────────────────────────────────────────────────────────────────

    def stream(
        self, of: Streamed = MIGRATIONS, *, job_id: UUID | str | None = None, last_event_id: int | None = None
    ) -> Iterator[StreamEvent]:
        """One connection's events, until the service ends it (then the iterator ends) or it breaks (ServiceUnreachable)."""
        headers = {"Accept": "text/event-stream"}
        if last_event_id is not None:
            headers["Last-Event-ID"] = str(last_event_id)
        params = {of.parameter: str(job_id)} if job_id is not None else None
        timeout = httpx.Timeout(STREAM_TIMEOUT_S, connect=CONNECT_TIMEOUT_S)
        self._knock()
        try:
            with self._http.stream("GET", _under(of.path), headers=headers, params=params, timeout=timeout) as response:
                if response.status_code != 200:
                    response.read()
                    raise _refusal(response, self._where)
                yield from _events(response, self._where)
        except httpx.HTTPError as error:
            raise self._unreachable(error) from error

    def follow(
        self,
        of: Streamed = MIGRATIONS,
        *,
        job_id: UUID | str | None = None,
        patience_s: float = PATIENCE_S,
        on_lost: Callable[[], None] = lambda: None,
    ) -> Iterator[StreamEvent]:
        """Events without end: after a lost connection it waits for the service and its store, and missed events are replayed.

        ServiceUnreachable, after the service was away for `patience_s`, or at once if it never answered. NotFound, where the
        job was removed.
        """
        last_event_id: int | None = None
        lost_at: float | None = None
        connected = at_once = False
        while True:
            try:
                for event in self.stream(of, job_id=job_id, last_event_id=last_event_id):
                    connected, at_once, lost_at = True, True, None
                    last_event_id = event.id or last_event_id
                    yield event
                if at_once:  # it ended the stream itself: whether it stops or the job was removed, the next request shows
                    at_once = False
                    continue
            except (ServiceUnreachable, PersistFailed):  # the latter: it answers, and its database is away
                if not connected or (lost_at is not None and time.monotonic() - lost_at > patience_s):
                    raise
            if lost_at is None:
                lost_at = time.monotonic()
                on_lost()
            time.sleep(RECONNECT_EVERY_S)

    def _knock(self) -> None:
        """Whether a service listens on the Unix socket. httpcore would leave a socket open if none does, and report less."""
        if self._socket_path is None:
            return
        with socket.socket(socket.AF_UNIX) as probe:
            try:
                probe.connect(str(self._socket_path))
            except PermissionError as error:
                hint = "run this as the service's user, or use --server and a password"
                raise ServiceUnreachable(f"{self._where} belongs to another user", hint=hint) from error
            except OSError as error:
                cause = error.strerror or str(error)
                raise ServiceUnreachable(f"no service answers at {self._where}: {cause}", hint=self._hint) from error

    def _unreachable(self, error: httpx.HTTPError) -> SynvirtError:
        cause = _cause(error)
        if "CERTIFICATE_VERIFY_FAILED" in cause:
            return ServiceUnreachable(
                f"the certificate of {self._where} is not trusted: {cause}",
                hint="copy keyring/tls.crt of that service's folder and name it with --cacert, or --insecure if you must",
            )
        if isinstance(error, httpx.ReadTimeout | httpx.WriteTimeout):  # somebody listens there: to start one more would fail
            return ServiceUnreachable(f"the service at {self._where} listens, and does not answer: {cause}", hint=_SILENT)
        return ServiceUnreachable(f"no service answers at {self._where}: {cause}", hint=self._hint)


def _cause(error: httpx.HTTPError) -> str:
    return str(error) or type(error).__name__


def _prefix(base_url: str) -> str:
    return f"{'/' if base_url.strip('/') else ''}{base_url.strip('/')}/api/v1"


def _given(params: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in params.items() if value is not None}


def _under(path: str) -> str:
    return path if path.startswith(("/backup/", "/tokens", "/audit", "/waves")) else f"/migrator{path}"


def _is_loopback(host: str) -> bool:
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _without_authorities() -> ssl.SSLContext:
    """For what has no TLS: to load the certificates that this host trusts takes a tenth of a command's time."""
    return ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)


def _trust(ca_file: Path | None, *, verify: bool) -> ssl.SSLContext:
    try:
        context = ssl.create_default_context(cafile=str(ca_file) if ca_file else None)
    except (OSError, ssl.SSLError) as error:
        raise BadRequest(f"the certificate file {ca_file} cannot be read: {error.strerror or error}") from error
    if not verify:
        context.check_hostname = False
        context.verify_mode = ssl.CERT_NONE
    return context


def _refusal(response: httpx.Response, where: str) -> SynvirtError:
    try:
        details = response.json()
        code, detail, hint = details["code"], details["detail"], details.get("hint")
    except (ValueError, KeyError, TypeError):
        return _stranger(where, str(response.status_code))
    if hint and str(hint).startswith("/openapi.json"):
        hint = _ELSEWHERE if response.status_code == NotFound.status else BY_HELP
    error = from_code(str(code), str(detail), hint)
    # An earlier version of the service reports it by a source's code; and who must wait (429) has used no command wrongly.
    is_caller = response.status_code in {Unauthorized.status, httpx.codes.TOO_MANY_REQUESTS}
    return Unauthorized(detail, hint=hint) if is_caller and not isinstance(error, Unauthorized) else error


def _is_page(response: httpx.Response) -> bool:
    """Whether it is a page for people, or plain words: the service answers a program so only where that asks for a page."""
    kind = response.headers.get("content-type", "").partition(";")[0].strip().lower()
    return kind in ("text/html", "text/plain") and response.request.url.params.get("format") != "html"


def _stranger(where: str, answer: str) -> ServiceUnreachable:
    return ServiceUnreachable(
        f"{where} answered {answer}, and not as a SynVirt service does", hint="check the address, and what is in between"
    )


class _Bounded:
    """What httpx-sse asks of an answer, with a limit: it would keep an event without an end in memory."""

    def __init__(self, response: httpx.Response) -> None:
        self.headers, self._parts = response.headers, response.iter_text()

    def iter_text(self) -> Iterator[str]:
        length = 0
        for part in self._parts:
            # An empty line ends an event.
            end = max(part.rfind("\n\n"), part.rfind("\n\r\n"))
            length = len(part) - end if end >= 0 else length + len(part)
            if length > EVENT_LIMIT_CHARS:
                raise Internal("the stream has an event that a SynVirt service does not send")
            yield part


def _events(response: httpx.Response, where: str) -> Iterator[StreamEvent]:
    """Server-sent events (WHATWG HTML, section 9.2.6)."""
    from httpx_sse import EventSource, SSEError

    try:
        for event in EventSource(cast(httpx.Response, _Bounded(response))).iter_sse():
            if event.data:  # a comment between two events ends with an empty line, too
                yield StreamEvent(
                    event.event or "message", escaped_json(event.data), int(event.id) if event.id.isdecimal() else None
                )
    except SSEError as error:
        raise _stranger(where, "something other than events") from error
