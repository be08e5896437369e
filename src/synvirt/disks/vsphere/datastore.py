"""A file of a vSphere datastore, by HTTPS ranges from /folder («vSphere Web Services SDK Programming Guide», Datastore Access).

    read_into ─▶ a connection of the pool ─▶ GET, Range: bytes=… ─▶ straight into the caller's buffer
    login     ─▶ the SOAP session that the requests' cookie names; made anew when the platform has forgotten it

A session of our own, since a pass may outlive the one that began it. A connection that is lost is made anew, a few times: a
moment's trouble on the way, or a host that restarts its agents, costs no terabyte.
"""

import http.client
import socket
import ssl
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing, suppress
from typing import Final, NoReturn
from urllib.parse import quote, urlencode
from xml.sax.saxutils import escape

from synvirt.blocks import Extent, coalesced
from synvirt.disks.specs import DatastoreSpec
from synvirt.errors import AuthFailed, DiskReadFailed, SourceUnreachable, SynvirtError
from synvirt.transport import tls

CONNECT_TIMEOUT_S: Final = 20.0
# With no byte for so long a server is taken as gone.
SILENCE_TIMEOUT_S: Final = 60.0
# Before each new attempt after a failed one.
RETRY_DELAYS_S: Final = (0.1, 1.0, 5.0)
# A host's agent (hostd) has 96 MiB for all such connections of all clients.
CONNECTIONS: Final = 4
COOKIE: Final = "vmware_soap_session"
# Of a file's size: an exabyte.
SIZE_DIGITS_MAX: Final = 18
# An answer that says why not is short.
_REFUSAL_BYTES: Final = 64 << 10

_LOGIN: Final = (
    '<?xml version="1.0" encoding="UTF-8"?><soapenv:Envelope xmlns:soapenv="http://schemas.xmlsoap.org/soap/envelope/">'
    '<soapenv:Body><Login xmlns="urn:vim25"><_this type="SessionManager">{manager}</_this>'
    "<userName>{user}</userName><password>{password}</password></Login></soapenv:Body></soapenv:Envelope>"
)
_LOGOUT: Final = (
    '<?xml version="1.0" encoding="UTF-8"?><soapenv:Envelope xmlns:soapenv="http://schemas.xmlsoap.org/soap/envelope/">'
    '<soapenv:Body><Logout xmlns="urn:vim25"><_this type="SessionManager">{manager}</_this></Logout>'
    "</soapenv:Body></soapenv:Envelope>"
)

_REFUSALS: Final = {
    200: "its server does not know ranges",
    403: "our user may not read it (privilege Datastore.Browse), or a running VM holds it; try options.transport lease",
    404: "it is no more; was its snapshot removed, or the VM moved?",
    416: "it is shorter than the disk",
    500: "its host cannot open it; a VM may hold it, or our user lack a privilege (Cryptographer.Access). Try transport lease",
}


class ReadForbidden(DiskReadFailed):
    """The platform does not let us read the file. By another way it may let us read the disk."""


class FileClosed(ReadForbidden):
    """Its host does not open it, and the platform says no more: as a rule that lasts, but it may pass."""


class FileGone(DiskReadFailed):
    """The file is no more. Opened anew, the disk may be found where its VM was moved to, or its snapshot to be gone."""


_FAILURES: Final[dict[int, type[DiskReadFailed]]] = {403: ReadForbidden, 404: FileGone, 500: FileClosed}


class _Lost(Exception):
    """This attempt failed in a way that another may not."""


class _ServerError(_Lost):
    """It answered 500: a moment's trouble, or all that it says of a file that it cannot open."""


class DatastoreReader:
    """A flat file. With `spec.areas`, (start, length) each, only those are data: the rest reads as zeros."""

    max_readers = CONNECTIONS

    def __init__(self, spec: DatastoreSpec) -> None:
        self._spec = spec
        self._name = f"[{spec.datastore}] {spec.path}"
        self._target = f"/folder/{quote(spec.path)}?{urlencode({'dcPath': spec.datacenter, 'dsName': spec.datastore})}"
        self._tls = tls.context(spec.host, verify=spec.verify_tls, fingerprint_sha256=spec.fingerprint_sha256)
        self._lock = threading.Lock()
        self._idle: list[http.client.HTTPSConnection] = []
        self._cookie = ""
        # Known before anything is copied: the file is there, as large as the platform says, and its server knows ranges.
        try:
            self.size = self._asked_size()
        except BaseException:
            self.close()  # it may have logged in
            raise

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
            with suppress(SynvirtError, _Lost, OSError, http.client.HTTPException), closing(self._borrowed()) as connection:
                self._soap(connection, _LOGOUT.format(manager=escape(self._spec.session_manager)))
        self._cookie = ""
        with self._lock:
            idle, self._idle = self._idle, []
        for connection in idle:
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
            # Of a file that was read it is a moment's trouble; of one that was never, while all else answers, it is the file.
            if isinstance(error.__cause__, _ServerError):
                raise self._refusal(http.client.INTERNAL_SERVER_ERROR) from error
            raise
        return found[0] if wanted is None else wanted

    def _tried(self, attempt: Callable[[http.client.HTTPSConnection], object], where: str) -> None:
        for delay_s in (*RETRY_DELAYS_S, None):
            connection: http.client.HTTPSConnection | None = None
            try:
                connection = self._borrowed()
                attempt(connection)
            except (_Lost, OSError, http.client.HTTPException) as error:
                if connection is not None:
                    connection.close()
                if delay_s is None:
                    raise SourceUnreachable(
                        f"{self._spec.host} was lost while {self._name} was read at {where}: {_said(error)}",
                        hint="the pass goes on from its watermark once the platform answers again",
                    ) from error
                time.sleep(delay_s)
            except BaseException:
                if connection is not None:
                    connection.close()
                raise
            else:
                with self._lock:
                    self._idle.append(connection)
                return

    def _fetch(self, connection: http.client.HTTPSConnection, offset: int, buffer: memoryview) -> int:
        """Fill `buffer`; how large the whole file is."""
        used = self._logged_in(connection)
        wanted = f"bytes {offset}-{offset + len(buffer) - 1}/"
        headers = {"Range": f"bytes={offset}-{offset + len(buffer) - 1}", "Cookie": f'{COOKIE}="{used}"'}
        connection.request("GET", self._target, headers=headers)
        answer = connection.getresponse()
        if answer.status != http.client.PARTIAL_CONTENT:
            whole_bytes = answer.length if answer.status == http.client.OK else None
            answer.read(_REFUSAL_BYTES)
            if whole_bytes and whole_bytes < offset + len(buffer):
                # RFC 9110, section 14.2: a server may answer a range that it cannot satisfy as if none had been asked for.
                raise DiskReadFailed(
                    f"{self._name} has {whole_bytes} bytes, and its disk at least {offset + len(buffer)}",
                    hint="the datastore's file is shorter than the VM's disk: look at the VM's disks on the platform",
                )
            self._refused(answer.status, used)
        told, _, size = (answer.headers.get("Content-Range") or "").rpartition("/")
        if f"{told}/" != wanted or not size.isdecimal() or len(size) > SIZE_DIGITS_MAX:
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

    def _refused(self, status: int, cookie: str) -> NoReturn:
        if status == http.client.UNAUTHORIZED:
            with self._lock:
                if self._cookie == cookie:
                    self._cookie = ""
            raise _Lost("the platform has forgotten our session")
        if status == http.client.INTERNAL_SERVER_ERROR:
            raise _ServerError(f"it answered {status}")
        if status > 500 or status == http.client.REQUEST_TIMEOUT:
            raise _Lost(f"it answered {status}")
        raise self._refusal(status)

    def _refusal(self, status: int) -> DiskReadFailed:
        why = _REFUSALS.get(status, "for no reason that we know")
        return _FAILURES.get(status, DiskReadFailed)(f"{self._spec.host} answers {status} for {self._name}: {why}")

    # ── connections and the session ──────────────────────────────────────────────────────────────────────────────────

    def _borrowed(self) -> http.client.HTTPSConnection:
        with self._lock:
            if self._idle:
                return self._idle.pop()
        connection = http.client.HTTPSConnection(self._spec.host, self._spec.port, timeout=CONNECT_TIMEOUT_S, context=self._tls)
        try:
            connection.connect()
        except ssl.SSLCertVerificationError as error:
            raise tls.not_trusted(self._spec.host, error.verify_message) from error
        connection.sock.settimeout(SILENCE_TIMEOUT_S)
        connection.sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        return connection

    def _logged_in(self, connection: http.client.HTTPSConnection) -> str:
        """The session's key; one login, however many threads ask."""
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
                        hint="was the password changed? Change it at the source too: synvirt sources change",
                    )
                self._cookie = cookie
            return self._cookie

    def _soap(self, connection: http.client.HTTPSConnection, envelope: str) -> tuple[int, str]:
        """The answer's status and the session that it names."""
        headers = {"Content-Type": "text/xml; charset=utf-8", "SOAPAction": "urn:vim25/6.5"}
        if self._cookie:
            headers["Cookie"] = f'{COOKIE}="{self._cookie}"'
        connection.request("POST", "/sdk", body=envelope.encode(), headers=headers)
        answer = connection.getresponse()
        fault = answer.read(_REFUSAL_BYTES)
        if answer.status >= 500 and b"InvalidLogin" not in fault:
            raise _Lost(f"it answered a login with {answer.status}")
        cookies = [header.partition(";")[0].partition("=") for header in answer.headers.get_all("Set-Cookie") or ()]
        return answer.status, next((value.strip('"') for name, _, value in cookies if name.strip() == COOKIE), "")


def _said(error: BaseException) -> str:
    if isinstance(error, TimeoutError):
        return f"it said nothing for {SILENCE_TIMEOUT_S:.0f} s"
    return str(error) or type(error).__name__
