"""No connection but through the guard: of each kind, by a name that leads elsewhere once it was checked; and in all modules."""

import ast
import asyncio
import base64
import contextlib
import json
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Final

import pytest

import synvirt
from synvirt import outgoing
from synvirt.disks.nbd import iscsi
from synvirt.disks.nbd.reader import NbdReader, by_tls
from synvirt.disks.specs import DatastoreSpec, IscsiSpec, LeaseSpec, NbdTlsSpec, NfsSpec
from synvirt.disks.vsphere import datastore
from synvirt.disks.vsphere.exported import ExportedReader
from synvirt.errors import BadRequest, SourceUnreachable, SynvirtError
from synvirt.jobs.orders import CopyOrder
from synvirt.live import Reach, SourceAccess
from synvirt.live import ssh as ssh_of
from synvirt.live.hyperv import session as winrm
from synvirt.live.libvirt.adapter import LibvirtRemote
from synvirt.live.vsphere import hosts, versions
from synvirt.live.vsphere.session import Login, VimSession
from synvirt.migrations.sources import probing
from synvirt.model.access import SourceOptions
from synvirt.proof import stamping
from synvirt.transport import HttpClient, Trust, tls

ROOT: Final = Path(synvirt.__file__).parent
NAME: Final = "rebinding.example"
MAY, MAY_NOT = "127.0.0.1", "127.0.0.2"


class Names:
    """What a hostile name server answers for NAME, in turn; the last for good."""

    def __init__(self, *answers: str) -> None:
        self._answers, self.asked = list(answers), 0

    def __call__(self, host: Any, port: Any, *arguments: Any, **named: Any) -> Any:
        if host != NAME:
            return _REAL(host, port, *arguments, **named)
        self.asked += 1
        answer = self._answers.pop(0) if len(self._answers) > 1 else self._answers[0]
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (answer, int(port or 0)))]


_REAL: Final = socket.getaddrinfo


class Doors:
    """One port at both addresses. Whoever connects where he may is sent away at once; who connects elsewhere is counted."""

    def __init__(self, held: contextlib.ExitStack) -> None:
        self._refused = held.enter_context(socket.create_server((MAY_NOT, 0), backlog=64))
        self.port = self._refused.getsockname()[1]
        self._allowed = held.enter_context(socket.create_server((MAY, self.port), backlog=64))
        self._let_in = 0
        self._thread = threading.Thread(target=self._serve)
        self._thread.start()
        held.callback(self.let_in)

    def _serve(self) -> None:
        while True:
            connected, _ = self._allowed.accept()
            with connected:
                if connected.getpeername()[0] == MAY_NOT:  # our own, which ends this
                    return
                self._let_in += 1

    def let_in(self) -> int:
        """How many there were; none is let in any more. Ours comes last in the queue."""
        if self._thread.is_alive():
            with socket.create_connection((MAY, self.port), source_address=(MAY_NOT, 0)):
                self._thread.join()
        return self._let_in

    def went_astray(self) -> int:
        """A connection is in the listener's queue as soon as whoever made it knows of it."""
        self._refused.setblocking(False)
        count = 0
        with contextlib.suppress(BlockingIOError):
            while True:
                self._refused.accept()[0].close()
                count += 1
        return count


@pytest.fixture
def doors() -> Iterator[Doors]:
    with contextlib.ExitStack() as held:
        yield Doors(held)


@pytest.fixture(autouse=True)
def _one_address_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    outgoing.permit((MAY,))
    monkeypatch.setattr(datastore, "RETRY_DELAYS_S", ())


def _esxi(port: int) -> object:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(hosts, "HTTPS_PORT", port)
        return hosts._from_here(NAME, "", by_vddk=False)


def _vddk_port(port: int) -> object:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(hosts, "VDDK_PORT", port)
        patch.setattr(tls, "look", lambda name, port: tls.Shown("", None))
        return hosts._from_here(NAME, "", by_vddk=True)


def _of_datastore(port: int, **more: Any) -> DatastoreSpec:
    return DatastoreSpec(
        host=NAME, port=port, user="u", password="p", datacenter="d", datastore="s", path="x", size_bytes=1, **more
    )  # fmt: skip


def _elsewhere(port: int) -> object:
    """As a redirect of vCenter's, or a host that is asked directly, leads there."""
    reader = datastore.DatastoreReader.__new__(datastore.DatastoreReader)
    reader._spec = _of_datastore(1, hosts=((NAME, ""),), verify_tls=False)
    reader._home, reader._trusted = (NAME, 1), {}
    return reader._new_connection((NAME, port))


def _winrm(port: int) -> object:
    return winrm.Session(winrm.Address(NAME, port, verify=False), winrm.Credentials("ntlm", "u", "p"))._opened()


def _winrm_redirected(port: int) -> object:
    """Its library would follow a redirect to plain HTTP."""
    session = winrm.Session(winrm.Address("other.example", 1, verify=False), winrm.Credentials("ntlm", "u", "p"))
    return session._connection().transport.session.post(f"http://{NAME}:{port}/wsman", timeout=5)


def _lease(port: int) -> object:
    return ExportedReader(LeaseSpec(host=NAME, port=port, target="/x", size_bytes=1, verify_tls=False))


def _vim(port: int) -> None:
    place = SimpleNamespace(host=NAME, port=port)
    session = VimSession(place, Login("u", "p"), SourceOptions(verify_tls=False))  # type: ignore[arg-type]
    with pytest.MonkeyPatch.context() as patch:  # pyvmomi's own connections are the question
        patch.setattr(versions, "listed", lambda *_: [])
        session.open()


KINDS: Final[dict[str, Callable[[int], object]]] = {
    "certificate": lambda port: tls.look(NAME, port),
    "http": lambda port: HttpClient(f"http://{NAME}:{port}").request("GET", "/"),
    "https": lambda port: HttpClient(f"https://{NAME}:{port}", Trust(verify=False)).request("GET", "/"),
    "probe": lambda port: asyncio.run(probing._Probe().port(Reach(NAME, port))),
    "time stamp": lambda port: stamping._asked(f"http://{NAME}:{port}/", b""),
    "time stamp by TLS": lambda port: stamping._asked(f"https://{NAME}:{port}/", b""),
    "vSphere's versions": lambda port: versions.listed(
        NAME, port, tls.context(NAME, verify=False, fingerprint_sha256=None), 5.0
    ),
    "vSphere": _vim,
    "datastore": lambda port: datastore.DatastoreReader(_of_datastore(port, verify_tls=False)),
    "datastore's other host": _elsewhere,
    "export lease": _lease,
    "ESXi": _esxi,
    "ESXi's VDDK port": _vddk_port,
    "WinRM": _winrm,
    "WinRM redirected": _winrm_redirected,
    "NBD": lambda port: NbdReader(f"nbd://{NAME}:{port}/x", connect_timeout_s=5.0),
}


def tried(kind: str, port: int) -> None:
    """None of them is answered: what they make of that is not asked here."""
    with contextlib.suppress(Exception):
        KINDS[kind](port)


@pytest.mark.parametrize("kind", KINDS)
def test_a_name_that_leads_elsewhere_once_it_was_checked_leads_nobody_there(
    doors: Doors, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    honest = Names(MAY)
    monkeypatch.setattr(socket, "getaddrinfo", honest)
    tried(kind, doors.port)
    assert honest.asked, "the name was never asked for: this tests nothing"
    for answers in ((MAY, MAY_NOT), (MAY_NOT,), (MAY, MAY_NOT, MAY, MAY_NOT)):
        monkeypatch.setattr(socket, "getaddrinfo", Names(*answers))
        for _ in range(3):
            tried(kind, doors.port)
    assert doors.let_in()
    assert doors.went_astray() == 0


def test_the_test_sees_who_goes_astray(doors: Doors, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(socket, "getaddrinfo", Names(MAY_NOT))
    socket.create_connection((NAME, doors.port)).close()
    assert doors.went_astray() == 1


# ── programs and libraries that connect by themselves ────────────────────────────────────────────────────────────────


def test_ssh_is_given_the_address_and_knows_the_key_by_the_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(socket, "getaddrinfo", Names(MAY, MAY_NOT))
    door = ssh_of.Door(NAME, 2222, "root", tmp_path)
    argv = [*door.argv(), *door.led()]
    assert {f"HostName={MAY}", f"HostKeyAlias=[{NAME}]:2222"} <= set(argv)
    with pytest.raises(BadRequest, match="not among"):
        door.led()
    # What OpenSSH itself makes of it.
    stdout = subprocess.run([*argv, "-G", "--", NAME], capture_output=True, text=True, check=True).stdout
    assert {f"hostname {MAY}", f"hostkeyalias [{NAME}]:2222"} <= set(stdout.splitlines())


def test_a_pinned_key_is_looked_for_at_the_address(monkeypatch: pytest.MonkeyPatch) -> None:
    key = "ssh-ed25519 " + base64.b64encode(b"a key").decode()
    calls: list[list[str]] = []

    def scanned(argv: list[str], **_: object) -> object:
        calls.append(argv)
        return SimpleNamespace(stdout=f"{MAY} {key}\n")

    monkeypatch.setattr(ssh_of, "run", scanned)
    monkeypatch.setattr(socket, "getaddrinfo", Names(MAY, MAY_NOT))
    assert ssh_of.pinned_key(NAME, 22, ssh_of.key_fingerprint(f"x {key}")) == f"{NAME} {key}\n"
    assert calls[0][-1] == MAY


def test_libvirt_without_tls_is_given_the_address(doors: Doors, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(socket, "getaddrinfo", Names(MAY, MAY_NOT))
    host = LibvirtRemote(SourceAccess(f"qemu+tcp://{NAME}:{doors.port}/system", {}, {}))._host
    opened: list[str] = []
    monkeypatch.setattr(host, "_opened", opened.append)
    host._connect()
    assert opened == [f"qemu+tcp://{MAY}:{doors.port}/system"]


def test_libiscsi_is_given_the_address(doors: Doors, monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[list[str]] = []

    def start(argv: list[str], **_: object) -> object:
        started.append(argv)
        raise SourceUnreachable("that is all")

    monkeypatch.setattr(iscsi, "start", start)
    monkeypatch.setattr(socket, "getaddrinfo", Names(MAY, MAY_NOT))
    spec = IscsiSpec(portal=f"{NAME}:{doors.port}", target="t", lun=0, initiator="i")
    with pytest.raises(SourceUnreachable, match="that is all"):
        iscsi.IscsiReader(spec)
    assert json.loads(started[0][-1].removeprefix("json:"))["file"]["portal"] == f"{MAY}:{doors.port}"
    with pytest.raises(BadRequest, match="not among"):
        iscsi.IscsiReader(spec)
    assert len(started) == 1


def test_libnfs_is_given_the_address(doors: Doors, monkeypatch: pytest.MonkeyPatch) -> None:
    from synvirt.disks import nfs

    monkeypatch.setattr(socket, "getaddrinfo", Names(MAY, MAY_NOT))
    connection = nfs._Connection.__new__(nfs._Connection)
    connection._spec = NfsSpec(host=NAME, export="/e", path="x", mount_port=doors.port)
    assert connection._knock() == MAY
    with pytest.raises(BadRequest, match="not among"):
        connection._knock()


def test_a_child_that_needs_a_name_is_not_started_if_the_name_leads_elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(socket, "getaddrinfo", Names(MAY_NOT))
    with pytest.raises(BadRequest, match="not among"):
        NbdReader(by_tls(NbdTlsSpec(host=NAME, port=1, export="x", trusted="/nowhere")), connect_timeout_s=5.0)
    with pytest.raises(BadRequest, match="not among"):
        NbdReader(f"nbds://{NAME}:1/x", connect_timeout_s=5.0)


# ── what a worker is allowed ─────────────────────────────────────────────────────────────────────────────────────────


def test_where_any_address_may_be_bound_the_routes_say_which_is_this_hosts_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """As with net.ipv4.ip_nonlocal_bind."""
    guard = outgoing.Guard()
    own = [*own_addresses(), "127.0.0.1", "127.3.2.1"]
    monkeypatch.setattr(socket.socket, "bind", lambda *_: None)
    guard.check("203.0.113.9")
    for address in own:
        with pytest.raises(BadRequest, match="may be read from"):
            guard.check(address)
    monkeypatch.setattr(outgoing, "_route_kind", lambda _: None)
    with pytest.raises(BadRequest):
        guard.check("203.0.113.9")


def own_addresses() -> list[str]:
    """Of this host's interfaces: the source of what would go to others; nothing is sent."""
    found = []
    for family, other in ((socket.AF_INET, "203.0.113.9"), (socket.AF_INET6, "2001:db8::9")):
        with contextlib.suppress(OSError), socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect((other, 9))
            found.append(str(probe.getsockname()[0]))
    return found


def test_an_order_carries_what_is_permitted() -> None:
    outgoing.permit(("10.0.0.0/8", "*.example"))
    order = CopyOrder(disks=())
    outgoing.permit(())
    assert CopyOrder.from_line(order.to_line()).outgoing == ("10.0.0.0/8", "*.example")


def test_a_worker_is_held_to_it(doors: Doors, tmp_path: Path) -> None:
    """In a process of its own, which knows of no settings."""
    outgoing.permit(("10.0.0.0/8",))
    disk = {"format": "nbd", "uri": f"nbd://{MAY}:{doors.port}/x"}
    order = {
        "kind": "copy",
        "disks": [{"key": "k", "reader": disk, "writer": {"kind": "file", "path": str(tmp_path / "volume"), "size_bytes": 1}}],
    }
    (tmp_path / "volume").write_bytes(b"\0")
    line = json.dumps({**order, "outgoing": outgoing.permitted()}).encode() + b"\n"
    worker = [sys.executable, "-m", "synvirt.worker"]
    with subprocess.Popen(worker, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as running:
        assert running.stdin is not None
        assert running.stdout is not None
        running.stdin.write(line)
        running.stdin.flush()  # and stays open: its end is the service's
        reported = running.stdout.read()
    assert b"E_MIG_BAD_REQUEST" in reported, reported
    assert b"not among the hosts" in reported
    assert doors.let_in() == 0


# ── all modules ──────────────────────────────────────────────────────────────────────────────────────────────────────

# fmt: off
_CLIENTS: Final = frozenset([
    "httpx", "requests", "urllib3", "urllib.request", "ftplib", "smtplib", "telnetlib", "xmlrpc", "paramiko", "aiohttp",
    "websockets", "smbprotocol", "pyVmomi", "pypsrp", "nbd", "libvirt",
])
_CALLS: Final = frozenset([
    "socket.socket", "create_connection", "create_datagram_endpoint", "open_connection", "sock_connect", "connect_ex",
    "HTTPConnection", "HTTPSConnection", "HTTPAdapter",
])
_PROGRAMS: Final = frozenset(["ssh", "ssh-keyscan", "scp", "curl", "wget", "nc", "rsync", "smbclient"])
# fmt: on

_LOCAL: Final = "a Unix socket of this host"
_HANDED: Final = "is handed a socket of the guard's, and connects by itself never"
# What opens connections, and why that is in order. A new line here is a decision: docs/threat-model.md says what is told there.
SHOWN: Final[dict[str, dict[str, str]]] = {
    "outgoing.py": {"create_connection": "the guard itself", "socket.socket": "binds, to learn whether an address is its own"},
    "transport/http.py": {
        "urllib3": "its connections are _dialled",
        "HTTPConnection": "the class of those",
        "HTTPSConnection": "the class of those",
    },
    "transport/https.py": {"HTTPConnection": "connects by the guard", "HTTPSConnection": "connects by the guard"},
    "remote/http.py": {"HTTPConnection": _HANDED},
    "remote/smb.py": {"smbprotocol": "goes to an address that was checked"},
    "remote/smb_shares.py": {"smbprotocol": "the connection is that of smb.py"},
    "repository/peer.py": {"HTTPConnection": _HANDED},
    "transport/asking.py": {"HTTPConnection": _HANDED},
    "privileged/asking.py": {"socket.socket": "the helper's Unix socket"},
    "privileged/helper.py": {"socket.socket": "the Unix socket that it was started with"},
    "live/hyperv/session.py": {"HTTPAdapter": "its pools are transport's"},
    "live/vsphere/session.py": {"pyVmomi": "its connections are transport's"},
    "live/ssh.py": {"runs ssh": "to an address that was checked", "runs ssh-keyscan": "of an address that was checked"},
    "live/nutanix/allow_list.py": {"socket.socket": "UDP, and nothing is sent: the address that this host has towards another"},
    "live/proxmox/farewell.py": {"socket.socket": _LOCAL},
    "kvm/qmp.py": {"socket.socket": _LOCAL},
    "disks/nbd/reader.py": {"nbd": "is handed a socket of the guard's; by TLS a name that was checked"},
    "disks/nbd/server.py": {"socket.socket": "listens"},
    "disks/nbd/silence.py": {"socket.socket": "one that is open, by its descriptor"},
    "guests/inside/opening.py": {"socket.socket": _LOCAL},
    "guests/inside/pool.py": {"socket.socket": "one that is open, by its descriptor; librbd connects to the settings' cluster"},
    "kvm/freezing.py": {"socket.socket": "one that is open, by its descriptor"},
    "kvm/thaw_guard.py": {"socket.socket": "one that is open, by its descriptor", "libvirt": "this host's"},
    "kvm/library.py": {"libvirt": "loads it; live/libvirt/host.py checks whom a source's leads to"},
    "jobs/inspecting/looker.py": {"socket.socket": "one that is open, by its descriptor"},
    "api/listening.py": {"socket.socket": "listens"},
    "settings/starting.py": {"socket.socket": "binds, to see whether the address is this host's"},
    "cli/client.py": {"httpx": "the command line, to the service that whoever runs it names", "socket.socket": _LOCAL},
    "disks/nbd/held.py": {"nbd": "names memory for the reader beside it"},
    "doctor/sources.py": {"nbd": "asks for its version"},
    "rehearsals/bubble.py": {
        "create_connection": "in a network namespace that has nothing but the rehearsed guest",
        "socket.socket": "asks that namespace's device; others are open, by their descriptors",
    },
    "rehearsals/network.py": {"socket.socket": "listens on loopback for QEMU; another is open, by its descriptor"},
}


def test_nothing_opens_a_connection_past_the_guard() -> None:
    found = {
        str(path.relative_to(ROOT)): marks
        for path in sorted(ROOT.rglob("*.py"))
        if (marks := set(_marks(ast.parse(path.read_text()))) - {""})
    }
    assert found == {path: set(marks) for path, marks in SHOWN.items()}


def _marks(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        match node:
            case ast.Import(names=names):
                yield from (_client(one.name) for one in names)
            case ast.ImportFrom(module=str(module), names=names):
                yield _client(module) or next(filter(None, (_client(f"{module}.{one.name}") for one in names)), "")
                yield from (one.name for one in names if one.name in _CALLS)
            case ast.Call(func=ast.Attribute(value=value, attr=attr)):
                if attr in _CALLS or f"{ast.unparse(value)}.{attr}" in _CALLS:
                    yield attr if attr in _CALLS else f"{ast.unparse(value)}.{attr}"
            case ast.ClassDef(bases=bases):
                yield from (base.attr for base in bases if isinstance(base, ast.Attribute) and base.attr in _CALLS)
            case ast.List(elts=[ast.Constant(value=str(program)), *_]) | ast.Tuple(elts=[ast.Constant(value=str(program)), *_]):
                if program in _PROGRAMS:
                    yield f"runs {program}"


def _client(module: str) -> str:
    return next((one for one in _CLIENTS if module == one or module.startswith(f"{one}.")), "")


@pytest.mark.parametrize(
    "text",
    [
        "import socket\nsocket.create_connection(('h', 1))",
        "from socket import create_connection",
        "import asyncio\nasync def f(): await asyncio.open_connection('h', 1)",
        "import socket\nsocket.socket().connect(('h', 1))",
        "import http.client\nhttp.client.HTTPSConnection('h')",
        "import httpx",
        "from urllib import request",
        "import urllib3",
        "run(['curl', 'https://h'])",
    ],
)
def test_the_walk_sees(text: str) -> None:
    assert set(_marks(ast.parse(text))) - {""}


def test_errors_of_the_guard_are_ours() -> None:
    with pytest.raises(SynvirtError) as caught:
        outgoing.sources().dial(MAY_NOT, 1)
    assert "source_allowed_hosts" in (caught.value.hint or "")
