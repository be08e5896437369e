"""A session with another libvirt: the connection, and the access to its disks' NBD sockets. Blocking code.

    qemu+ssh   both by Unix sockets through SSH tunnels
    qemu+tls   both by TLS, with one certificate authority and one client certificate
    qemu+tcp   both in the clear, and the disks only if the operator permits it
    qemu       this host's own libvirtd, by its Unix socket

libvirt.org/uri.html and libvirt.org/remote.html. Secrets that libraries need as files are in a folder of the session, in memory
where possible, and are removed with it. The next session removes the leftovers of a killed service.
"""

import contextlib
import itertools
import os
import re
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final
from urllib.parse import parse_qs, quote

from synvirt import outgoing
from synvirt.disks.specs import NbdSpec
from synvirt.errors import AuthFailed, BadRequest, Internal, SourceUnreachable, SynvirtError, VmNotFound
from synvirt.kvm import library as libvirt_library
from synvirt.kvm.limit import within
from synvirt.live.folder import private_folder
from synvirt.live.form import Place
from synvirt.live.libvirt.form import Login, Options
from synvirt.live.libvirt.pki import Pki
from synvirt.live.ssh import Door, Tunnels, pinned_key

CONNECT_TIMEOUT_S: Final = 10.0
# libvirt's own connect has no time limit, and its keep-alive begins after it. A login is a few requests, each answered in
# milliseconds; a daemon that systemd starts for it, or a domain controller behind SASL, takes some seconds.
OPEN_TIMEOUT_S: Final = 30.0
# The goodbye is one request. A host that does not answer it does not get one.
CLOSE_TIMEOUT_S: Final = 10.0
# libvirt closes a connection that is silent for this long, so every call that waits on it ends.
KEEPALIVE_EVERY_S, KEEPALIVE_MISSED_MAX = 5, 3
# The sockets of a host's libvirt: of the one daemon, or of the modular one.
SOCKETS: Final = ("/run/libvirt/libvirt-sock", "/run/libvirt/virtqemud-sock")
BUSY_HINT: Final = "another operation on this domain is under way there: try again when it is over"
LOST_HINT: Final = "the connection was lost; is the host up, and its libvirtd running?"
# Without names that ssh would read as an option, or that no host has.
_HOST = re.compile(r"[A-Za-z0-9_\[:][A-Za-z0-9._:%\]-]*")

UNTRUSTED: Final = re.compile(r"certificate|TLS handshake|GNUTLS", re.IGNORECASE)
# In libnbd's words: a handshake that is cut off is not a refusal.
UNTRUSTED_DISKS: Final = re.compile(r"certificate|fatal alert", re.IGNORECASE)


# libvirt's virErrorNumber for a call that our user may not make, by any rule.
_NO_RIGHT: Final = ("AUTH_FAILED", "AUTH_CANCELLED", "AUTH_UNAVAILABLE", "ACCESS_DENIED", "OPERATION_DENIED")
_LOCKED_SOCKET: Final = re.compile(r"Failed to connect socket to .*: Permission denied")
# libvirt's text for it, and a hint. First match wins.
_RIGHTS: Final = (
    (
        re.compile(r"read only access"),
        "that is libvirt's read-only socket: name the other one in the endpoint's ?socket=, libvirt-sock or virtqemud-sock",
    ),
    (
        re.compile(r"denied access"),
        "access_drivers in its libvirtd.conf asks polkit: allow {user} the actions org.libvirt.api.* by a rule there",
    ),
    (
        re.compile(r"polkit|denied by policy|authentication (unavailable|cancelled)|Permission denied"),
        "log in as root, or put {user} into the group libvirt there, or allow it org.libvirt.unix.manage by a rule of polkit",
    ),
)


class Silent(SourceUnreachable):
    """The host accepts the connection, and is silent."""


class Host:
    """One session. `open` it first; `close` at the end."""

    def __init__(self, place: Place, login: Login, options: Options) -> None:
        self._place, self._login, self._options = place, login, options
        if place.host is not None and not _HOST.fullmatch(place.host):
            raise BadRequest(f"endpoint: {place.host[:60]!r} is not a host name")
        self.pki = Pki(place, login, options)
        self._closing = contextlib.ExitStack()
        self._folder: Path | None = None
        # For the sockets of tunnels: a path that was given out never leads elsewhere.
        numbers = itertools.count()
        self._tunnels = Tunnels(self._door, lambda: self.folder / f"{next(numbers)}.sock")
        self._open: Any = None

    @property
    def name(self) -> str:
        """Its name in errors."""
        return self._place.host or "this host's libvirt"

    @property
    def by_network(self) -> bool:
        """Whether the disks come by TCP, not by a Unix socket."""
        return self._place.scheme in ("qemu+tls", "qemu+tcp")

    @property
    def needs_leave(self) -> bool:
        """Whether QEMU's socket is opened by a user who is not root, so that its mode decides: its owner and group may."""
        return not self.by_network and self.user_name != "root"

    @property
    def user_name(self) -> str:
        """Our user there. Without a name, ssh uses the local one; over the network it is a certificate, or none."""
        user = self._login.user or self._place.user if self._place.host is not None else None
        ours = "root" if os.geteuid() == 0 else f"user {os.geteuid()}"
        return user or ("this client" if self.by_network else ours)

    @property
    def encrypted(self) -> bool:
        return self._place.scheme == "qemu+tls"

    def open(self) -> None:
        """SourceUnreachable, AuthFailed."""
        if self._open is not None:
            return
        try:
            self._folder = self._closing.enter_context(private_folder())
            self._open = self._connect()
            self._refuse_closed()
            self._open.setKeepAlive(KEEPALIVE_EVERY_S, KEEPALIVE_MISSED_MAX)
        except BaseException:
            self.close()
            raise

    def _refuse_closed(self) -> None:
        if self._folder is None:
            raise SourceUnreachable(f"the session with {self.name} was closed while it was opened")

    def close(self, *, in_use: bool = False) -> None:
        """`in_use`: a call of another thread does not end. Then that thread keeps the connection, which is closed with its last
        reference: libvirt would free what the call is using."""
        connection, self._open, self._folder = self._open, None, None
        # From the last to the first, each of them whatever becomes of the others: the folder has secrets.
        with contextlib.ExitStack() as ending:
            ending.callback(self._closing.close)
            if connection is not None and not in_use:
                ending.callback(_say_goodbye, connection)
            ending.callback(self._tunnels.close_all)

    def renew(self) -> None:
        """Makes a connection again that was lost while idle. SourceUnreachable, AuthFailed."""
        if self._open is not None and not _alive(self._open):
            self.close()
            self.open()

    def leave_disks(self) -> None:
        """Closes all tunnels except the connection's own."""
        self._tunnels.close_all(kept=(str(self._socket()), *SOCKETS))

    @property
    def connection(self) -> Any:
        """The open virConnect."""
        if self._open is None:
            raise SourceUnreachable(f"the session with {self.name} is not open")
        return self._open

    @contextlib.contextmanager
    def asked(self, doing: str, otherwise: type[SynvirtError] = Internal, hint: str | None = None) -> Iterator[None]:
        """libvirt's errors become ours: SourceUnreachable, AuthFailed, VmNotFound; else `otherwise`."""
        libvirt = library()
        try:
            yield
        except libvirt.libvirtError as error:
            raise self.translated(error, doing, otherwise, hint) from error

    def translated(self, error: Any, doing: str, otherwise: type[SynvirtError], hint: str | None = None) -> SynvirtError:
        """A libvirt error as ours: VmNotFound, SourceUnreachable or AuthFailed where it is one of these, else `otherwise`."""
        libvirt = library()
        detail = f"{self.name}: {doing}: {error.get_error_message() or error}"
        if error.get_error_code() == libvirt.VIR_ERR_NO_DOMAIN:
            return VmNotFound(detail)
        if libvirt_library.is_lost(error) or (self._open is not None and not _alive(self._open)):
            return SourceUnreachable(detail, hint=LOST_HINT)
        if (lacking := self.lacking(error)) is not None:
            return AuthFailed(detail, hint=lacking)
        if _busy(error):
            return SourceUnreachable(detail, hint=libvirt_library.endless_lock_hint(detail) or BUSY_HINT)
        return otherwise(detail, hint=hint)

    def lacking(self, error: Any) -> str | None:
        """A hint about a right that our user lacks; None, where the error has another cause."""
        libvirt = library()
        codes = {getattr(libvirt, f"VIR_ERR_{name}") for name in _NO_RIGHT}
        message = error.get_error_message() or str(error)
        if error.get_error_code() not in codes and not _LOCKED_SOCKET.search(message):
            return None
        hint = next((hint for pattern, hint in _RIGHTS if pattern.search(message)), "check user and password")
        return hint.format(user=self.user_name)

    # ── the connection ───────────────────────────────────────────────────────────────────────────────────────────────

    def _connect(self) -> Any:
        place = self._place
        match place.scheme:
            case "qemu+ssh":
                return self._by_ssh()
            case "qemu+tls":
                self._check_port()
                query = f"?pkipath={quote(str(self.pki.write(self.folder / 'pki')))}{self.pki.query}"
                return self._opened(f"qemu+tls://{_bracketed(place.host)}:{place.port}{place.path or '/system'}{query}")
            case "qemu+tcp":
                return self._opened(f"qemu+tcp://{_bracketed(self._check_port())}:{place.port}{place.path or '/system'}")
            case "qemu":
                # Through the daemon's socket: if this process has the embedded driver open, qemu:/// leads to that and fails.
                return self._opened(f"qemu+unix://{place.path or '/system'}{_socket_query(self._socket())}")
            case _:
                return self._opened(f"{place.scheme}://{place.path or '/system'}{_socket_query(self._socket())}")

    def _by_ssh(self) -> Any:
        """A tunnel opens even if nothing listens there: the daemon's socket is found by trying."""
        chosen = self._socket()
        failure: SynvirtError | None = None
        for remote in (chosen,) if chosen else SOCKETS:
            local = self._tunnels.to(remote)
            try:
                return self._opened(f"qemu+unix://{self._place.path or '/system'}{_socket_query(str(local))}")
            except Silent:
                raise  # it exists: the other one need not be tried
            except SourceUnreachable as error:
                failure = SourceUnreachable(
                    f"{self.name}: libvirt does not answer at {remote}: {self._tunnels.cause(remote) or error.detail}",
                    hint=f"is libvirtd running there, and may {self.user_name} open its socket (root, or the group libvirt)? "
                    "options of the endpoint: ?socket=PATH",
                )
                self._tunnels.close(remote)
        assert failure is not None
        raise failure

    def _opened(self, uri: str) -> Any:
        libvirt = library()
        asked = [libvirt.VIR_CRED_AUTHNAME, libvirt.VIR_CRED_PASSPHRASE]
        try:
            return within(OPEN_TIMEOUT_S, lambda: libvirt.openAuth(uri, [asked, self._answer, None], 0), unwanted=_disconnect)
        except TimeoutError as error:
            raise Silent(
                f"{self.name} accepts the connection, and does not answer within {OPEN_TIMEOUT_S:.0f} s",
                hint="its libvirtd hangs, or something else listens there: restart it",
            ) from error
        except libvirt.libvirtError as error:
            message = error.get_error_message() or str(error)
            if UNTRUSTED.search(message) and self.encrypted:
                raise SourceUnreachable(
                    f"{self.name} is not trusted, or does not trust us: {message}",
                    hint=f"{self.pki.wanted}; it may need a client's certificate too",
                ) from error
            if (lacking := self.lacking(error)) is not None:
                raise AuthFailed(f"{self.name} refused the login: {message}", hint=lacking) from error
            raise SourceUnreachable(f"{self.name} cannot be reached: {message}", hint="is its libvirtd running?") from error

    def _answer(self, asked: list[list[Any]], _opaque: object) -> int:
        """SASL asks. There is no answer: the login fails."""
        libvirt = library()
        password = self._login.password.get_secret_value() if self._login.password else None
        answers = {libvirt.VIR_CRED_AUTHNAME: self._login.user or self._place.user, libvirt.VIR_CRED_PASSPHRASE: password}
        for one in asked:
            if (answer := answers.get(one[0])) is None:
                return -1
            one[4] = answer
        return 0

    def _check_port(self) -> str:
        """The address that answers: without TLS, libvirt gets it instead of the name. For a silent host libvirt itself would
        wait for minutes."""
        assert self._place.host is not None
        assert self._place.port is not None
        try:
            with outgoing.sources().dial(self._place.host, self._place.port, timeout_s=CONNECT_TIMEOUT_S) as reached:
                return str(reached.getpeername()[0])
        except OSError as error:
            raise SourceUnreachable(
                f"{self.name} accepts no connection on port {self._place.port}: {error.strerror or 'no answer'}",
                hint="is it running, is the port right, and does a firewall let this host through?",
            ) from error

    def _socket(self) -> str | None:
        return next(iter(parse_qs(self._place.query).get("socket", [])), None)

    # ── the disks ────────────────────────────────────────────────────────────────────────────────────────────────────

    @property
    def folder(self) -> Path:
        """The session's folder of secrets and sockets. SourceUnreachable before the session is open."""
        if self._folder is None:
            raise SourceUnreachable(f"the session with {self.name} is not open")
        return self._folder

    def nbd_address(self) -> str:
        """The address for a backup's NBD server to listen on. It is the host's address as we see it: its own name may lead it
        to 127.0.1.1."""
        if self._options.nbd_address is not None:
            return self._options.nbd_address
        try:
            return str(socket.getaddrinfo(self._place.host, None, type=socket.SOCK_STREAM)[0][4][0])
        except OSError as error:
            raise SourceUnreachable(f"the name {self.name} does not resolve to an address: {error.strerror}") from error

    def spec(self, export: str, *, path: str | None, port: int | None, bitmap: str | None) -> NbdSpec:
        """The export of an NBD server on that host, at a socket's path or a port."""
        context = None if bitmap is None else f"qemu:dirty-bitmap:{bitmap}"
        name = quote(export, safe="")
        if path is not None:
            local = self._tunnels.to(path) if self._place.scheme == "qemu+ssh" else Path(path)
            return NbdSpec(uri=f"nbd+unix:///{name}?socket={quote(str(local), safe='/')}", bitmap=context)
        where = f"{_bracketed(self._options.nbd_host(self._place.host))}:{port}/{name}"
        if not self.encrypted:
            return NbdSpec(uri=f"nbd://{where}", bitmap=context)
        pki = quote(str(self.folder / "pki"), safe="/")
        verify = "" if self.pki.checked else "&tls-verify-peer=false"
        return NbdSpec(uri=f"nbds://{where}?tls-certificates={pki}{verify}", bitmap=context)

    @property
    def way_to_disks(self) -> str:
        """The possible obstacles on the way, for people."""
        if self.by_network:
            return "does every firewall let options.nbd_ports through?"
        if self._place.scheme == "qemu+ssh":
            return "does sshd there forward sockets (AllowStreamLocalForwarding), and has it room for one more (MaxSessions)?"
        return "does its QEMU still answer?"

    def tunnel_cause(self, remote: str | None) -> str:
        """Why nothing may come through that tunnel: what ssh reports, or nothing."""
        return self._tunnels.cause(remote)

    def _door(self) -> Door:
        place, options, login = self._place, self._options, self._login
        assert place.host is not None
        assert place.port is not None
        known = options.known_hosts
        if options.fingerprint_sha256 is not None:
            known = pinned_key(place.host, place.port, options.fingerprint_sha256)
        return Door(
            host=place.host,
            port=place.port,
            user=login.user or place.user,
            folder=self.folder,
            private_key=login.private_key.get_secret_value() if login.private_key else None,
            secret=login.password.get_secret_value() if login.password else None,
            known_hosts=known,
            verify=options.verify_tls or options.fingerprint_sha256 is not None,
        )


def library() -> Any:
    return libvirt_library.load(Internal)


def unanswered(error: Any) -> bool:
    """Whether libvirt did not get the domain's lock in time, or the connection was lost meanwhile. This says nothing about the
    domain: ask again later. What was asked may have been done."""
    return _busy(error) or libvirt_library.is_lost(error)


def _busy(error: Any) -> bool:
    return bool(error.get_error_code() == library().VIR_ERR_OPERATION_TIMEOUT)


def _say_goodbye(connection: Any) -> None:
    with contextlib.suppress(TimeoutError):
        within(CLOSE_TIMEOUT_S, lambda: _disconnect(connection))


def _disconnect(connection: Any) -> None:
    with contextlib.suppress(library().libvirtError):
        connection.close()


def _alive(connection: Any) -> bool:
    try:
        return bool(connection.isAlive())
    except library().libvirtError:
        return False


def _bracketed(host: str | None) -> str:
    return f"[{host}]" if host is not None and ":" in host else str(host)


def _socket_query(path: str | None) -> str:
    return "" if path is None else f"?socket={quote(path, safe='/')}"
