"""The two sockets: modes, certificate, who is in the way, and a stop that waits for nobody."""

import base64
import contextlib
import gc
import os
import select
import shutil
import signal
import socket
import ssl
import stat
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path

import httpx
import pytest
from cryptography import x509
from cryptography.hazmat.primitives import serialization

from synvirt.api import Server, connections, data_dir_locked, received, serve, tls
from synvirt.api.tls import certificate, fingerprint
from synvirt.errors import BadRequest, Conflict
from synvirt.settings import Settings
from synvirt.settings.data_dir import prepare_data_dir
from tests.cage.test_cage import child
from tests.fakes.service import PASSWORD, PREFIX, USER, Service
from tests.needs import need
from tests.running import forked
from tests.running.processes import until


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def test_https_with_the_certificate_that_was_made(service_url: tuple[Service, str]) -> None:
    service, url = service_url
    trusting = ssl.create_default_context(cafile=str(service.settings.keyring_dir / "tls.crt"))
    for host in ("127.0.0.1", "localhost"):
        address = url.replace("127.0.0.1", host)
        response = httpx.get(f"{address}{PREFIX}/migrations", verify=trusting, auth=httpx.BasicAuth(USER, PASSWORD), timeout=60)
        assert response.status_code == 200
    with pytest.raises(httpx.ConnectError, match="CERTIFICATE_VERIFY_FAILED"):
        httpx.get(f"{url}/healthz")
    with pytest.raises(httpx.HTTPError):
        httpx.get(f"{url.replace('https', 'http')}/healthz")


@pytest.fixture
def service_url(tmp_path: Path) -> Iterator[tuple[Service, str]]:
    service = Service(tmp_path)
    with service.served() as server:
        yield service, server.address
    service.close()


def test_other_programs_trust_it_too(service_url: tuple[Service, str]) -> None:
    service, url = service_url
    found = subprocess.run(
        [need("curl", "curl"), "--silent", "--cacert", service.settings.keyring_dir / "tls.crt", f"{url}/healthz"],
        capture_output=True,
        timeout=30,
    )
    assert b'"ok"' in found.stdout, found.stderr


def test_the_modes_of_what_it_makes(service_url: tuple[Service, str]) -> None:
    service, _ = service_url
    assert mode(service.settings.socket_path) == 0o600
    assert mode(service.settings.keyring_dir / "tls.key") == 0o600
    assert mode(service.settings.keyring_dir / "tls.crt") == 0o600
    assert mode(service.settings.keyring_dir) == 0o700


def test_a_caller_that_says_no_goodbye_leaves_nothing_open(tmp_path: Path) -> None:
    """As a browser does with a connection that it keeps for later: TLS would wait for half a minute."""
    service = Service(tmp_path)
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always", ResourceWarning)
        gc.collect()
        found.clear()  # what others left
        with service.served() as server:
            host, port = server.address.removeprefix("https://").split(":")
            unchecked = ssl.create_default_context()
            unchecked.check_hostname, unchecked.verify_mode = False, ssl.CERT_NONE
            idle = unchecked.wrap_socket(socket.create_connection((host, int(port))))
            until(server.connections)
        del server
        gc.collect()
    idle.close()
    service.close()
    assert [str(warning.message) for warning in found if "socket" in str(warning.message).lower()] == []


@pytest.mark.skipif(os.geteuid() != 0, reason="only root has a cage whose user is another one")
def test_a_reader_in_its_cage_is_no_admin_by_the_unix_socket(service_url: tuple[Service, str]) -> None:
    """It may open others' files, so the socket's mode does not keep it out; a reader that was taken over would try."""
    path = str(service_url[0].settings.socket_path)
    request = b"GET /api/v1/tokens HTTP/1.1\r\nHost: synvirt\r\n\r\n"
    does = (
        f"[s := socket.socket(socket.AF_UNIX), s.connect({path!r}), s.settimeout(30), s.sendall({request!r}), s.recv(64)][-1]"
    )
    for cage in ({"network": "ANY"}, {"network": "LOCAL", "programs": True}, {"network": "LOCAL", "files_as_service": True}):
        answer = child(does, **cage)
        assert answer.get("found", "b''") == "b''", answer
        assert answer.get("error", "BrokenPipeError") in ("BrokenPipeError", "ConnectionResetError"), answer
    with service_url[0].local() as client:
        assert client.get("http://synvirt/api/v1/tokens").status_code == 200


def test_the_socket_is_gone_after_the_stop(tmp_path: Path) -> None:
    service = Service(tmp_path)
    with service.served():
        assert service.settings.socket_path.is_socket()
    assert not service.settings.socket_path.exists()
    service.close()


# ── the certificate ──────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.fixture
def settings(tmp_path: Path) -> Settings:
    made = Settings(data_dir=tmp_path, listen="127.0.0.1:0")
    prepare_data_dir(made)
    return made


def test_the_certificate_is_made_once_and_names_this_host(settings: Settings) -> None:
    path, key = certificate(settings)
    content = path.read_bytes(), key.read_bytes()
    assert (certificate(settings), path.read_bytes(), key.read_bytes()) == ((path, key), *content)
    made = x509.load_pem_x509_certificate(content[0])
    names = made.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    assert {"localhost", socket.gethostname()} <= set(names.get_values_for_type(x509.DNSName))
    assert "127.0.0.1" in [str(address) for address in names.get_values_for_type(x509.IPAddress)]
    assert made.not_valid_before_utc < datetime.now(UTC) < made.not_valid_after_utc
    openssl = need("openssl", "openssl")
    reported = subprocess.run(
        [openssl, "x509", "-in", path, "-noout", "-fingerprint", "-sha256"], capture_output=True, text=True, timeout=30
    )
    assert reported.stdout.strip().endswith(fingerprint(path))


def test_one_that_soon_expires_is_made_again(settings: Settings, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tls, "VALID_DAYS", 20)
    first = certificate(settings)[0].read_bytes()
    monkeypatch.undo()
    second = certificate(settings)[0].read_bytes()
    assert first != second
    assert x509.load_pem_x509_certificate(second).not_valid_after_utc > datetime.now(UTC) + timedelta(days=300)


def test_a_certificate_cut_off_is_made_again(settings: Settings) -> None:
    path, _ = certificate(settings)
    path.write_bytes(path.read_bytes()[:100])
    x509.load_pem_x509_certificate(certificate(settings)[0].read_bytes())


def test_a_key_of_another_certificate_is_made_again(settings: Settings) -> None:
    """For example after a backup of which only one file was restored."""
    path, key = certificate(settings)
    other = key.read_bytes()
    path.unlink()
    certificate(settings)
    for wrong in (other, b"", b"nonsense"):
        key.write_bytes(wrong)
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(*certificate(settings))


def test_a_key_with_a_passphrase_is_refused_and_nobody_is_asked(settings: Settings, tmp_path: Path) -> None:
    path, key = certificate(settings)
    locked = tmp_path / "locked.key"
    secret = serialization.load_pem_private_key(key.read_bytes(), None)
    form = serialization.PrivateFormat.PKCS8
    locked.write_bytes(
        secret.private_bytes(serialization.Encoding.PEM, form, serialization.BestAvailableEncryption(b"hunter2"))
    )
    given = settings.model_copy(update={"tls_certificate": path, "tls_key": locked})
    with pytest.raises(BadRequest, match=r"locked\.key is locked by a passphrase"):
        certificate(given)
    with pytest.raises(BadRequest, match="is not a file"):
        certificate(given.model_copy(update={"tls_key": tmp_path}))


def test_the_operators_certificate(settings: Settings, tmp_path: Path) -> None:
    path, key = certificate(settings)
    mine = tmp_path / "mine.crt", tmp_path / "mine.key"
    shutil.copy(path, mine[0])
    shutil.copy(key, mine[1])
    given = settings.model_copy(update={"tls_certificate": mine[0], "tls_key": mine[1]})
    assert certificate(given) == mine
    with pytest.raises(BadRequest, match="belong together"):
        certificate(settings.model_copy(update={"tls_certificate": mine[0]}))
    mine[1].unlink()
    with pytest.raises(BadRequest, match=r"mine\.key cannot be read"):
        certificate(given)


def test_a_certificate_that_is_none_is_refused_before_anything_listens(settings: Settings, tmp_path: Path) -> None:
    for name in ("mine.crt", "mine.key"):
        (tmp_path / name).write_text("nonsense")
    given = settings.model_copy(update={"tls_certificate": tmp_path / "mine.crt", "tls_key": tmp_path / "mine.key"})
    service = Service(tmp_path, tls_certificate=tmp_path / "mine.crt", tls_key=tmp_path / "mine.key")
    with pytest.raises(BadRequest, match=r"mine\.crt"):
        Server(service.app, given)
    assert not given.socket_path.exists()
    service.close()


# ── what is in the way ───────────────────────────────────────────────────────────────────────────────────────────────


def test_a_port_in_use(service_url: tuple[Service, str], tmp_path_factory: pytest.TempPathFactory) -> None:
    service, url = service_url
    port = url.rpartition(":")[2]
    other = service.settings.model_copy(
        update={"data_dir": tmp_path_factory.mktemp("other"), "listen": f"127.0.0.1:{port}", "tls": False}
    )
    with pytest.raises(Conflict, match=f"127.0.0.1:{port} is in use"):
        Server(service.app, other)


def test_a_second_service_on_the_folder(service_url: tuple[Service, str]) -> None:
    service, _ = service_url
    with pytest.raises(Conflict, match="another service answers"):
        Server(service.app, service.settings)
    with service.local() as client:
        assert client.get("/migrations").status_code == 200


def test_a_socket_that_a_killed_service_left(tmp_path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as left:
        left.bind(str(tmp_path / "synvirt.sock"))
    service = Service(tmp_path)
    with service.served(), service.local() as client:
        assert client.get("/migrations").status_code == 200
    service.close()


def test_a_file_in_the_sockets_place_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "synvirt.sock").write_text("mine")
    service = Service(tmp_path)
    with pytest.raises(Conflict, match="already exists, and is not a socket"):
        Server(service.app, service.settings)
    assert (tmp_path / "synvirt.sock").read_text() == "mine"
    service.close()


@pytest.mark.parametrize("listen", ["no such host:1", "1.2.3.4:1"])
def test_an_address_that_cannot_be(tmp_path: Path, listen: str) -> None:
    service = Service(tmp_path)
    with pytest.raises(BadRequest, match="listen"):
        Server(service.app, service.settings.model_copy(update={"listen": listen}))
    assert not service.settings.socket_path.exists()
    service.close()


@pytest.mark.parametrize("listen", ["0.0.0.0:0", "[::]:0"])
def test_in_clear_only_on_loopback(tmp_path: Path, listen: str) -> None:
    service = Service(tmp_path)
    with pytest.raises(BadRequest, match="not a loopback address"):
        Server(service.app, service.settings.model_copy(update={"listen": listen, "tls": False}))
    service.close()


def test_a_folder_whose_name_is_too_long_for_a_socket(tmp_path: Path) -> None:
    long = tmp_path / ("x" * 100)
    service = Service(long)
    with pytest.raises(BadRequest, match="longer than a socket's path"):
        Server(service.app, service.settings)
    service.close()


def test_the_folder_is_locked(tmp_path: Path) -> None:
    with data_dir_locked(tmp_path):
        with pytest.raises(Conflict, match=f"process {os.getpid()}") as raised, data_dir_locked(tmp_path):
            pytest.fail("two hold it")
        assert raised.value.hint
    with data_dir_locked(tmp_path):
        pass


# ── the stop ─────────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_it_soon_with_or_without_clients(tmp_path: Path, number: signal.Signals) -> None:
    """One client reads its stream, one never does, one has asked nothing yet."""
    command = [sys.executable, "-m", "tests.fakes.serving_till_signal", str(tmp_path)]
    child = forked.Popen(command, stdout=subprocess.PIPE, text=True)
    stuck, idle = socket.socket(socket.AF_UNIX), socket.socket(socket.AF_UNIX)
    try:
        assert child.stdout is not None
        while child.stdout.readline() != "ready\n":
            assert child.poll() is None
        path = str(tmp_path / "synvirt.sock")
        reading = threading.Event()
        reader = threading.Thread(target=_read_to_the_end, args=(path, reading))
        reader.start()
        assert reading.wait(60)
        for sock in (stuck, idle):
            sock.connect(path)
        stuck.sendall(f"GET {PREFIX}/migrations/stream HTTP/1.1\r\nHost: x\r\n\r\n".encode())
        time.sleep(0.5)
        child.send_signal(number)
        rest, _ = child.communicate(timeout=60)  # a second or two
        assert (child.returncode, rest.splitlines()[-1]) == (0, "ended")
        reader.join(60)
        assert not reader.is_alive()
    finally:
        child.kill()
        child.wait()
        for sock in (stuck, idle):
            sock.close()
    assert not (tmp_path / "synvirt.sock").exists()


def test_an_error_as_it_gets_ready_ends_it(tmp_path: Path) -> None:
    """Else it would serve on and hear no signal."""

    def on_ready() -> None:
        raise BrokenPipeError("nobody reads where it serves")

    service = Service(tmp_path)
    with pytest.raises(BrokenPipeError):
        serve(service.app, service.settings, on_ready=on_ready)
    service.close()
    assert not (tmp_path / "synvirt.sock").exists()


def _read_to_the_end(path: str, reading: threading.Event) -> None:
    with (
        httpx.Client(transport=httpx.HTTPTransport(uds=path), base_url="http://x", timeout=60) as client,
        client.stream("GET", f"{PREFIX}/migrations/stream") as response,
    ):
        reading.set()
        for _ in response.iter_lines():
            pass  # to an orderly end: a broken one would raise


# ── callers who say nothing, and callers who are many ────────────────────────────────────────────────────────────────


HEAD = b"GET /healthz HTTP/1.1\r\nHost: x\r\n"


@pytest.fixture
def quick_to_let_go(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[str, int]]:
    monkeypatch.setattr(connections, "HEAD_WITHIN_S", 0.3)
    monkeypatch.setattr(connections, "PER_CALLER_MAX", 20)
    service = Service(tmp_path, tls=False)
    with service.served() as server:
        host, _, port = server.address.removeprefix("http://").partition(":")
        yield host, int(port)
    service.close()


@pytest.mark.parametrize(
    "sent", [b"", b"GET /healthz HTTP/1.1\r\nHost: x\r\nX-Slow: ", b"GET /healthz HTTP/1.1\r\nHost: x\r\n\r\nGET"]
)
def test_who_says_nothing_more_is_let_go(quick_to_let_go: tuple[str, int], sent: bytes) -> None:
    with socket.create_connection(quick_to_let_go, timeout=60) as connection:
        connection.sendall(sent)
        received = b""
        with contextlib.suppress(ConnectionResetError):
            while part := connection.recv(4096):
                received += part
    assert received.startswith(b"HTTP/1.1 200") is (b"\r\n\r\n" in sent)


def test_who_sends_its_head_byte_by_byte_is_let_go(quick_to_let_go: tuple[str, int]) -> None:
    with socket.create_connection(quick_to_let_go, timeout=60) as connection:
        connection.sendall(HEAD + b"X-Slow: ")
        with contextlib.suppress(ConnectionResetError, BrokenPipeError):
            while True:
                connection.sendall(b"x")
                time.sleep(0.01)


def test_who_does_not_read_its_answer_is_let_go(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The document needs no credentials, and is long: it must not stay in memory for whoever asks. Small buffers of the kernel
    are those of a line that is not this host's own."""
    monkeypatch.setattr(connections, "TAKEN_WITHIN_S", 0.3)
    service = Service(tmp_path, tls=False)
    with service.served() as server:
        server._sockets.tcp.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
        with socket.socket() as caller:
            caller.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            caller.connect(server._sockets.tcp.getsockname())
            caller.sendall(b"GET /openapi.json HTTP/1.1\r\nHost: x\r\n\r\n")
            until(lambda: connections.Door.total == 1)
            until(lambda: connections.Door.total == 0)
        assert len(httpx.get(f"{server.address}/openapi.json", timeout=60).content) > 100_000, "a caller that reads gets all"
    service.close()


@pytest.mark.parametrize(("path", "kind"), [("/login", "x-www-form-urlencoded"), (f"{PREFIX}/migrations", "json")])
def test_a_body_that_does_not_come_is_not_waited_for(
    quick_to_let_go: tuple[str, int], monkeypatch: pytest.MonkeyPatch, path: str, kind: str
) -> None:
    """Nobody has to be known to send the form of the log-in."""
    monkeypatch.setattr(received, "BODY_WITHIN_S", 0.3)
    monkeypatch.setattr(received, "SLOW_LINE_BPS", 1 << 30)
    known = base64.b64encode(f"{USER}:{PASSWORD}".encode()).decode()
    head = (f"POST {path} HTTP/1.1", "Host: x", f"Authorization: Basic {known}", f"Content-Type: application/{kind}")
    with socket.create_connection(quick_to_let_go, timeout=60) as caller:
        caller.sendall("\r\n".join((*head, "Content-Length: 20", "", "user=")).encode())
        answer = b""
        while part := caller.recv(1 << 16):
            answer += part
    assert answer.startswith(b"HTTP/1.1 400")


def test_one_address_does_not_have_all_connections(quick_to_let_go: tuple[str, int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connections, "HEAD_WITHIN_S", 600)
    with contextlib.ExitStack() as opened:
        silent = [opened.enter_context(socket.create_connection(quick_to_let_go, timeout=60)) for _ in range(60)]

        def cut() -> int:
            found = 0
            for one in silent:
                one.setblocking(False)
                try:
                    found += one.recv(1) == b""
                except BlockingIOError:
                    pass
                except ConnectionResetError:
                    found += 1
            return found

        until(lambda: cut() == 40)
    until(lambda: not connections.Door.callers)
    assert httpx.get(f"http://{quick_to_let_go[0]}:{quick_to_let_go[1]}/healthz", timeout=60).status_code == 200


def test_who_says_nothing_in_tls_counts_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connections, "PER_CALLER_MAX", 5)
    service = Service(tmp_path)
    with service.served() as server, contextlib.ExitStack() as opened:
        place = server._sockets.tcp.getsockname()
        silent = [opened.enter_context(socket.create_connection(place, timeout=60)) for _ in range(8)]
        ready = select.poll()
        for one in silent:
            ready.register(one, select.POLLIN)
        until(lambda: len(ready.poll(0)) == 3)
        assert connections.Door.total == 5
        opened.close()
        until(lambda: connections.Door.total == 0)
    service.close()


def test_who_says_nothing_in_tls_is_let_go(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before HTTP: asyncio waits a minute for it. Half of a greeting is no more."""
    monkeypatch.setattr(connections, "HANDSHAKE_WITHIN_S", 0.3)
    service = Service(tmp_path)
    with service.served() as server, contextlib.ExitStack() as opened:
        place = server._sockets.tcp.getsockname()
        for sent in (b"", b"\x16\x03\x01\x02\x00"):
            caller = opened.enter_context(socket.create_connection(place, timeout=40))
            caller.sendall(sent)
            with contextlib.suppress(ConnectionResetError):
                assert caller.recv(1) == b""
        until(lambda: connections.Door.total == 0)
    service.close()


def test_no_cipher_without_aead(service_url: tuple[Service, str]) -> None:
    old = ssl.create_default_context()
    old.check_hostname, old.verify_mode, old.maximum_version = False, ssl.CERT_NONE, ssl.TLSVersion.TLSv1_2
    old.set_ciphers("ECDHE-ECDSA-AES128-SHA:ECDHE-ECDSA-AES256-SHA384:@SECLEVEL=0")
    host, _, port = service_url[1].removeprefix("https://").partition(":")
    with socket.create_connection((host, int(port)), timeout=60) as plain, pytest.raises(ssl.SSLError):
        old.wrap_socket(plain)
    answer = httpx.get(f"{service_url[1]}/healthz", verify=False, timeout=60)
    assert answer.headers["Strict-Transport-Security"].startswith("max-age=")
