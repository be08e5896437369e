"""A file of a vSphere datastore, by HTTPS ranges from /folder («vSphere Web Services SDK Programming Guide», Datastore Access).

    read_into ─▶ a connection of the pool ─▶ GET, Range: bytes=… ─▶ straight into the caller's buffer
    login     ─▶ the SOAP session of the requests' cookie; made again when the platform has forgotten it
    redirect  ─▶ by HTTPS, once, to an ESXi host in vCenter's inventory; it gets only the range from us
    direct    ─▶ directly to such a host, with a ticket from vCenter for each request (AcquireGenericServiceTicket)

The reader has its own session, since a pass may last longer than the session that began it. A lost connection is made again, a
few times: a short network fault, or a host that restarts its agents, does not lose a terabyte. If a platform has no room for so
many transfers (503, or a reset connection), fewer requests run for a while.
"""

import http.client
import logging
import re
import socket
import ssl
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from itertools import chain
from typing import Final, NoReturn
from urllib.parse import quote, urlencode, urlsplit
from xml.sax.saxutils import escape

from synvirt import __version__
from synvirt.blocks import Extent, coalesced
from synvirt.disks.specs import DatastoreSpec
from synvirt.errors import AuthFailed, DiskReadFailed, SourceUnreachable, SynvirtError
from synvirt.transport import https, tls

log = logging.getLogger(__name__)  # structlog would load rich into each worker

CONNECT_TIMEOUT_S: Final = 20.0
# With no byte for this long, a server counts as gone.
SILENCE_TIMEOUT_S: Final = 60.0
# Pauses before each new attempt after a failed one.
RETRY_DELAYS_S: Final = (0.1, 1.0, 5.0)
# A host's agent (hostd) has 96 MiB for all such connections of all clients.
CONNECTIONS: Final = 4
# After the platform had no room for a transfer, one more is tried after this time.
ROOM_GROWS_AFTER_S: Final = 60.0
HTTPS_PORT: Final = 443
COOKIE: Final = "vmware_soap_session"
# The cookie with a ticket for a host.
TICKET_COOKIE: Final = "vmware_cgi_ticket"
# A host that answered before is given up after this many failures in a row; one that never did, after the first.
DIRECT_FAILURES_MAX: Final = 3
# A host on the same network accepts a connection quickly, or a firewall drops it.
DIRECT_CONNECT_TIMEOUT_S: Final = 5.0
# The most digits of a file's size: an exabyte.
SIZE_DIGITS_MAX: Final = 18
# An answer with a refusal is short.
_REFUSAL_BYTES: Final = 64 << 10
# The most of a redirect's target in an error.
_PLACE_CHARS: Final = 300

_LOGIN: Final = (
    '<?xml version="1.0" encoding="UTF-8"?><soapenv:Envelope xmlns:soapenv="http://schemas.xmlsoap.org/soap/envelope/">'
    '<soapenv:Body><Login xmlns="urn:vim25"><_this type="SessionManager">{manager}</_this>'
    "<userName>{user}</userName><password>{password}</password></Login></soapenv:Body></soapenv:Envelope>"
)
_TICKET: Final = (
    '<?xml version="1.0" encoding="UTF-8"?><soapenv:Envelope xmlns:soapenv="http://schemas.xmlsoap.org/soap/envelope/"'
    ' xmlns:xsi="http://www.w3.org/2001/XMLSchema-instance"><soapenv:Body><AcquireGenericServiceTicket xmlns="urn:vim25">'
    '<_this type="SessionManager">{manager}</_this><spec xsi:type="SessionManagerHttpServiceRequestSpec">'
    "<method>httpGet</method><url>{url}</url></spec></AcquireGenericServiceTicket></soapenv:Body></soapenv:Envelope>"
)
# SessionManagerGenericServiceTicket.id, with the characters that a cookie allows.
_TICKET_ID: Final = re.compile(rb"<id>([\w.+/=-]{1,256})</id>")
_LOGOUT: Final = (
    '<?xml version="1.0" encoding="UTF-8"?><soapenv:Envelope xmlns:soapenv="http://schemas.xmlsoap.org/soap/envelope/">'
    '<soapenv:Body><Logout xmlns="urn:vim25"><_this type="SessionManager">{manager}</_this></Logout>'
    "</soapenv:Body></soapenv:Envelope>"
)

_AGENT: Final = {"User-Agent": f"SynVirt/{__version__}"}

# RFC 9110, section 15.4: the codes that redirect a GET.
_REDIRECTS: Final = (301, 302, 303, 307, 308)

_REFUSALS: Final = {
    200: "its server does not know ranges",
    403: "our user may not read it (privilege Datastore.Browse), or a running VM holds it; try options.transport lease",
    404: "it no longer exists; was its snapshot removed, or the VM moved?",
    416: "it is shorter than the disk",
    500: "its host cannot open it; a VM may hold it, or our user lack a privilege (Cryptographer.Access). Try transport lease",
}


class ReadForbidden(DiskReadFailed):
    """The platform refuses to read the file. The disk may be readable in another way."""


class FileClosed(ReadForbidden):
    """Its host does not open it, and the platform gives no reason: mostly this is permanent, but it may end."""


class FileGone(DiskReadFailed):
    """The file is gone. When it is opened again, the disk may be where its VM was moved to, or its snapshot may be gone."""


_FAILURES: Final[dict[int, type[DiskReadFailed]]] = {403: ReadForbidden, 404: FileGone, 500: FileClosed}


class _Lost(Exception):
    """This attempt failed, and another may not."""


class _ServerError(_Lost):
    """The answer 500: a short fault, or the platform's only answer for a file that it cannot open."""


class _Full(_Lost):
    """The answer 503: the platform is down, or has no room for one more transfer."""


Place = tuple[str, int]


class _Room:
    """How many transfers run at once: CONNECTIONS, or as many as the platform has room for."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._now, self._most, self._full_at = 0, CONNECTIONS, 0.0

    def enter(self) -> None:
        with self._changed:
            self._changed.wait_for(lambda: self._now < self._most)
            if self._most < CONNECTIONS and time.monotonic() > self._full_at + ROOM_GROWS_AFTER_S:
                self._most, self._full_at = self._most + 1, time.monotonic()
            self._now += 1

    def leave(self) -> None:
        with self._changed:
            self._now -= 1
            self._changed.notify_all()

    def was_full(self) -> bool:
        """For a running transfer. True: others of ours are running, and one will make room; False: we are the only one."""
        with self._changed:
            others = self._now - 1
            if others:
                self._most, self._full_at = min(self._most, others), time.monotonic()
            return others > 0


class DatastoreReader:
    """A flat file. With `spec.areas`, (start, length) each, only those are data: the rest reads as zeros."""

    max_readers = CONNECTIONS

    def __init__(self, spec: DatastoreSpec) -> None:
        self._spec = spec
        self._name = f"[{spec.datastore}] {spec.path}"
        self._target = f"/folder/{quote(spec.path)}?{urlencode({'dcPath': spec.datacenter, 'dsName': spec.datastore})}"
        self._lock = threading.Lock()
        self._home: Place = (spec.host, spec.port)
        self._trusted = {self._home: tls.context(spec.host, verify=spec.verify_tls, fingerprint_sha256=spec.fingerprint_sha256)}
        self._idle: dict[Place, list[http.client.HTTPSConnection]] = {}
        self._room = _Room()
        self._cookie = ""
        # How many requests in a row to `spec.direct` may fail, before vCenter is asked instead.
        self._direct_left = 1 if spec.direct else 0
        # Checked before anything is copied: the file exists, has the platform's size, and its server supports ranges.
        try:
            self.size = self._asked_size()
        except BaseException:
            self.close()  # it may have logged in
            raise

    @property
    def is_direct(self) -> bool:
        """Whether `spec.direct` sent the last read."""
        return self._direct_left > 1

    def extents(self) -> Iterator[Extent]:
        if self._spec.areas is None:
            yield Extent(0, self.size)
            return
        yield from coalesced(self._allocated(self._spec.areas))

    def read_into(self, offset: int, buffer: memoryview) -> None:
        if offset < 0 or offset + len(buffer) > self.size:
            raise DiskReadFailed(f"{len(buffer)} bytes at offset {offset} are outside {self._name} of {self.size}")
        if len(buffer):
            self._tried(lambda connection: self._fetch(connection, offset, buffer), f"offset {offset}")

    def close(self) -> None:
        if self._cookie:
            with suppress(SynvirtError, _Lost, OSError, http.client.HTTPException), self._connected(self._home) as connection:
                self._soap(connection, _LOGOUT.format(manager=escape(self._spec.session_manager)))
        self._cookie = ""
        with self._lock:
            idle, self._idle = self._idle, {}
        for connection in chain.from_iterable(idle.values()):
            connection.close()

    def _allocated(self, areas: tuple[tuple[int, int], ...]) -> Iterator[Extent]:
        end = 0
        for start, length in sorted(areas):
            if start + length > self.size or start < 0 or length < 0:
                raise DiskReadFailed(f"{self._name}: an area at {start} of {length} bytes leaves the disk of {self.size}")
            if start > end:
                yield Extent(end, start - end, zero=True)
            if start + length > max(start, end):
                yield Extent(max(start, end), start + length - max(start, end))
                end = start + length
        if end < self.size:
            yield Extent(end, self.size - end, zero=True)

    # ── requests ─────────────────────────────────────────────────────────────────────────────────────────────────────

    def _asked_size(self) -> int:
        wanted, found = self._spec.size_bytes, [0]

        def ask(connection: http.client.HTTPSConnection) -> None:
            found[0] = self._fetch(connection, max(0, (wanted or 0) - 1), memoryview(bytearray(1)))

        try:
            if wanted != 0:
                self._tried(ask, "its end")
        except SourceUnreachable as error:
            # For a file that was read before it is a short fault; for one that never was, while all else works, it is the file.
            if isinstance(error.__cause__, _ServerError):
                raise self._refusal(http.client.INTERNAL_SERVER_ERROR) from error
            raise
        return found[0] if wanted is None else wanted

    def _tried(self, attempt: Callable[[http.client.HTTPSConnection], object], where: str) -> object:
        delays = iter((*RETRY_DELAYS_S, None))
        while True:
            self._room.enter()
            try:
                with self._connected(self._home) as connection:
                    return attempt(connection)
            except (_Lost, OSError, http.client.HTTPException) as error:
                # Another transfer of ours that ends makes room: no failure, and no attempt used.
                full = (
                    isinstance(error, (_Full, ConnectionResetError, http.client.RemoteDisconnected)) and self._room.was_full()
                )
                delay_s = 0.0 if full else next(delays)
                if delay_s is None:
                    raise SourceUnreachable(
                        f"{self._spec.host} was lost while {self._name} was read at {where}: {_cause(error)}",
                        hint="the pass goes on from its watermark once the platform answers again",
                    ) from error
                time.sleep(delay_s)
            finally:
                self._room.leave()

    def _fetch(self, connection: http.client.HTTPSConnection, offset: int, buffer: memoryview) -> int:
        """Fills `buffer`; the size of the whole file."""
        used = self._logged_in(connection)
        wanted = _AGENT | {"Range": f"bytes={offset}-{offset + len(buffer) - 1}"}
        if self._spec.direct is not None and (self._direct_left or self._spec.direct_only):
            try:
                size = self._fetch_directly(connection, self._spec.direct, offset, buffer, wanted)
            except (_Lost, SynvirtError, OSError, http.client.HTTPException) as error:
                never = self._direct_left <= 1
                self._direct_left = max(0, self._direct_left - 1)
                if never and self._spec.direct_only:
                    # A host that never answered is not asked again at once, as there may be a dozen others to try.
                    raise _of_host(self._spec.direct[0], self._name, error) from error
                if self._direct_left or self._spec.direct_only:
                    raise
                # vCenter is asked from now on: it reads through the same host, or through one that it reaches.
                log.info("%s does not send %s itself, vCenter does: %s", self._spec.direct[0], self._name, _cause(error))
            else:
                self._direct_left = DIRECT_FAILURES_MAX
                return size
        connection.request("GET", self._target, headers=wanted | {"Cookie": f'{COOKIE}="{used}"'})
        answer = connection.getresponse()
        if answer.status not in _REDIRECTS:
            return self._filled(answer, offset, buffer, used)
        answer.read(_REFUSAL_BYTES)
        place, target = self._sent_on(answer.status, answer.headers.get("Location") or "")
        with self._connected(place) as other:
            # The session's cookie is only for vCenter: the host gets what vCenter put into the URL.
            other.request("GET", target, headers=wanted)
            return self._filled(other.getresponse(), offset, buffer, None)

    def _fetch_directly(
        self,
        connection: http.client.HTTPSConnection,
        place: Place,
        offset: int,
        buffer: memoryview,
        wanted: Mapping[str, str],
    ) -> int:
        """A ticket is valid for one request and only for this URL. The host gets nothing else of ours."""
        host, port = place
        # The inventory path of a datacenter is vCenter's: a host has only one datacenter.
        target = f"/folder/{quote(self._spec.path)}?{urlencode({'dsName': self._spec.datastore})}"
        url = f"https://{host}{'' if port == HTTPS_PORT else f':{port}'}{target}"
        status, body = self._asked(
            connection, _TICKET.format(manager=escape(self._spec.session_manager), url=escape(url)), "a ticket"
        )
        found = _TICKET_ID.search(body)
        if status != http.client.OK or found is None:
            raise _Lost(f"vCenter gives no ticket for {host}: it answered {status}")
        with self._connected(place) as other:
            other.request("GET", target, headers={**wanted, "Cookie": f"{TICKET_COOKIE}={found[1].decode()}"})
            return self._filled(other.getresponse(), offset, buffer, None)

    def _sent_on(self, status: int, location: str) -> tuple[Place, str]:
        """ReadForbidden, for a target that is not the platform's."""
        try:
            to = urlsplit(location)
            place = (to.hostname or "", to.port or HTTPS_PORT)
        except ValueError:
            to, place = urlsplit(""), ("", 0)
        if to.scheme != "https" or to.username is not None or place[0] not in (name.lower() for name, _ in self._spec.hosts):
            where = f"{to.scheme or 'nowhere'}://{place[0]}"
            raise ReadForbidden(
                f"{self._spec.host} answers {status} for {self._name}, and sends us on to {where[:_PLACE_CHARS]!r}, "
                "which is no host of that datastore",
                hint="only hosts that vCenter names are asked, by their names there and by HTTPS; try options.transport lease",
            )
        return place, (to.path or "/") + (f"?{to.query}" if to.query else "")

    def _filled(self, answer: http.client.HTTPResponse, offset: int, buffer: memoryview, used: str | None) -> int:
        """`used`: the session in the request to vCenter; None: another host answers."""
        if answer.status != http.client.PARTIAL_CONTENT:
            whole_bytes = answer.length if answer.status == http.client.OK else None
            answer.read(_REFUSAL_BYTES)
            if whole_bytes and whole_bytes < offset + len(buffer):
                # RFC 9110, section 14.2: a server may answer a range that it cannot satisfy as if no range had been given.
                raise DiskReadFailed(
                    f"{self._name} has {whole_bytes} bytes, and its disk at least {offset + len(buffer)}",
                    hint="the datastore's file is shorter than the VM's disk: look at the VM's disks on the platform",
                )
            self._refused(answer.status, used)
        wanted = f"bytes {offset}-{offset + len(buffer) - 1}/"
        sent, _, size = (answer.headers.get("Content-Range") or "").rpartition("/")
        if f"{sent}/" != wanted or not size.isdecimal() or len(size) > SIZE_DIGITS_MAX:
            raise DiskReadFailed(f"{self._spec.host} answered another range of {self._name} than offset {offset}")
        got = 0
        while got < len(buffer):
            count = answer.readinto(buffer[got:])
            if not count:
                raise _Lost(f"the answer ended after {got} of {len(buffer)} bytes")
            got += count
        if not answer.isclosed():
            answer.read(0)
        return int(size)

    def _refused(self, status: int, used: str | None) -> NoReturn:
        if status == http.client.UNAUTHORIZED:
            if used is None:
                raise _Lost("the host that vCenter sent us on to does not know its ticket")
            with self._lock:
                if self._cookie == used:
                    self._cookie = ""
            raise _Lost("the platform has forgotten our session")
        if status == http.client.SERVICE_UNAVAILABLE:
            raise _Full(f"it answered {status}")
        if status == http.client.INTERNAL_SERVER_ERROR:
            raise _ServerError(f"it answered {status}")
        if status > 500 or status == http.client.REQUEST_TIMEOUT:
            raise _Lost(f"it answered {status}")
        raise self._refusal(status)

    def _refusal(self, status: int) -> DiskReadFailed:
        why = _REFUSALS.get(status, "for no reason that we know")
        return _FAILURES.get(status, DiskReadFailed)(f"{self._spec.host} answers {status} for {self._name}: {why}")

    # ── connections and the session ──────────────────────────────────────────────────────────────────────────────────

    @contextmanager
    def _connected(self, place: Place) -> Iterator[http.client.HTTPSConnection]:
        """An idle connection, or a new one; kept for the next request unless there is an error."""
        with self._lock:
            idle = self._idle.get(place)
            connection = idle.pop() if idle else None
        connection = connection or self._new_connection(place)
        try:
            yield connection
        except BaseException:
            connection.close()
            raise
        with self._lock:
            self._idle.setdefault(place, []).append(connection)

    def _new_connection(self, place: Place) -> http.client.HTTPSConnection:
        host, port = place
        timeout_s = DIRECT_CONNECT_TIMEOUT_S if place == self._spec.direct else CONNECT_TIMEOUT_S
        connection = https.Connection(host, port, timeout=timeout_s, context=self._trust(place))
        try:
            connection.connect()
        except ssl.SSLCertVerificationError as error:
            raise tls.not_trusted(host, error.verify_message) from error
        connection.sock.settimeout(SILENCE_TIMEOUT_S)
        connection.sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        return connection

    def _trust(self, place: Place) -> ssl.SSLContext:
        """One for all connections to this place: to load this host's authorities takes 25 ms of a core."""
        if place not in self._trusted:
            self._trusted[place] = self._new_trust(place[0])
        return self._trusted[place]

    def _new_trust(self, host: str) -> ssl.SSLContext:
        thumbprint = next(thumbprint for name, thumbprint in self._spec.hosts if name.lower() == host.lower())
        # The platform's own certificate was checked: the one that it names for its host is right, no matter who signed it.
        if thumbprint:
            return tls.context_by_thumbprint(host, thumbprint)
        return tls.context(host, verify=self._spec.verify_tls, fingerprint_sha256=None)

    def _logged_in(self, connection: http.client.HTTPSConnection) -> str:
        """The session's key; one login for any number of threads."""
        with self._lock:
            if not self._cookie:
                login = _LOGIN.format(
                    manager=escape(self._spec.session_manager),
                    user=escape(self._spec.user),
                    password=escape(self._spec.password),
                )
                status, cookie = self._soap(connection, login)
                if status != http.client.OK or not cookie:
                    raise AuthFailed(
                        f"{self._spec.host} refused our login while {self._name} was read",
                        hint="was the password changed? Change it at the registered source too",
                    )
                self._cookie = cookie
            return self._cookie

    def _asked(self, connection: http.client.HTTPSConnection, envelope: str, what: str) -> tuple[int, bytes]:
        """The answer's status and its body. _Lost, where the platform is away."""
        answer, body = self._posted(connection, envelope)
        if answer.status >= 500 and b"NotAuthenticated" in body:
            self._refused(http.client.UNAUTHORIZED, self._cookie)
        if answer.status > 500:
            raise _Lost(f"it answered {what} with {answer.status}")
        return answer.status, body

    def _soap(self, connection: http.client.HTTPSConnection, envelope: str) -> tuple[int, str]:
        """The answer's status and its session."""
        answer, fault = self._posted(connection, envelope)
        if answer.status >= 500 and b"InvalidLogin" not in fault:
            raise _Lost(f"it answered a login with {answer.status}")
        cookies = [header.partition(";")[0].partition("=") for header in answer.headers.get_all("Set-Cookie") or ()]
        return answer.status, next((value.strip('"') for name, _, value in cookies if name.strip() == COOKIE), "")

    def _posted(self, connection: http.client.HTTPSConnection, envelope: str) -> tuple[http.client.HTTPResponse, bytes]:
        headers = _AGENT | {"Content-Type": "text/xml; charset=utf-8", "SOAPAction": f"urn:vim25/{self._spec.api_version}"}
        if self._cookie:
            headers["Cookie"] = f'{COOKIE}="{self._cookie}"'
        connection.request("POST", "/sdk", body=envelope.encode(), headers=headers)
        answer = connection.getresponse()
        return answer, answer.read(_REFUSAL_BYTES)


def _of_host(host: str, name: str, error: BaseException) -> SynvirtError:
    if isinstance(error, SynvirtError):
        return error
    return SourceUnreachable(
        f"the host {host} does not send {name} itself: {_cause(error)}",
        hint="is its name known here, and its port 443 open? transport datastore asks vCenter alone",
    )


def _cause(error: BaseException) -> str:
    if isinstance(error, TimeoutError):
        return f"it sent nothing for {SILENCE_TIMEOUT_S:.0f} s"
    return str(error) or type(error).__name__
