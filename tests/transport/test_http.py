"""HttpClient against real sockets: what a server may do to it."""

import contextlib
import io
import socket
import ssl
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from http.client import HTTPException
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from synvirt import http_answers
from synvirt.errors import BadRequest, RepositoryUnreachable, SourceUnreachable
from synvirt.remote import http as remote_http
from synvirt.remote import retrying
from synvirt.remote.reading import RemoteReader
from synvirt.repository.peer import PeerFolder, PeerPlace
from synvirt.transport import Answer, HttpClient, Trust, http
from synvirt.transport.https import PlainConnection
from tests.servers import remote_servers
from tests.servers.remote_servers import Certificates, certificates

Reply = Callable[[BaseHTTPRequestHandler], None]


class _Quiet(ThreadingHTTPServer):
    daemon_threads = True

    def handle_error(self, request: object, client_address: object) -> None:
        """Clients of these tests hang up."""


class Server:
    """Answers with `reply`, and keeps what it was sent."""

    def __init__(self, made: Certificates | None) -> None:
        self.reply: Reply = lambda request: self.send(request, 200, b"{}")
        self.seen: list[tuple[str, str, dict[str, str], bytes]] = []
        self.connections = 0
        outer = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"
            timeout = 30

            def setup(self) -> None:
                outer.connections += 1
                super().setup()

            def __getattr__(self, name: str) -> Callable[[], None]:
                if name.startswith("do_"):
                    return self.handle_any
                raise AttributeError(name)

            def handle_any(self) -> None:
                body = self.rfile.read(int(self.headers.get("content-length", 0)))
                outer.seen.append((self.command, self.path, {k.lower(): v for k, v in self.headers.items()}, body))
                outer.reply(self)

            def log_message(self, format: str, *args: object) -> None:  # noqa: A002 - the base's name
                pass

        self._server = _Quiet(("127.0.0.1", 0), Handler)
        if made is not None:
            context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
            context.load_cert_chain(made.certificate, made.key)
            self._server.socket = context.wrap_socket(self._server.socket, server_side=True)
        self.port = self._server.server_address[1]
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    @staticmethod
    def send(request: BaseHTTPRequestHandler, status: int, body: bytes, **headers: str) -> None:
        request.send_response(status)
        for name, value in {"content-length": str(len(body)), **headers}.items():
            request.send_header(name, value)
        request.end_headers()
        request.wfile.write(body)

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()


@pytest.fixture
def server() -> Iterator[Server]:
    made = Server(None)
    yield made
    made.close()


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Certificates:
    return certificates(tmp_path_factory.mktemp("certificates"))


@pytest.fixture
def tls_server(made: Certificates) -> Iterator[Server]:
    server = Server(made)
    yield server
    server.close()


@pytest.fixture
def client(server: Server) -> Iterator[HttpClient]:
    opened = HttpClient(f"http://127.0.0.1:{server.port}", timeout_s=20)
    yield opened
    opened.close()


def test_a_request_and_its_answer(server: Server, client: HttpClient) -> None:
    server.reply = lambda request: server.send(request, 418, b'{"a": [1]}', **{"x-kind": "Tea"})
    answer = client.request("POST", "/pot", query={"q": "a b&c"}, json={"name": "é"}, headers={"X-Once": "1"})
    assert (answer.status, answer.ok, answer.json(), answer.headers["x-kind"]) == (418, False, {"a": [1]}, "Tea")
    method, path, headers, body = server.seen[0]
    assert (method, path, body) == ("POST", "/pot?q=a+b%26c", b'{"name":"\\u00e9"}')
    assert headers["content-type"] == "application/json"
    assert headers["x-once"] == "1"
    assert headers["user-agent"].startswith("SynVirt/")


def test_a_header_for_all_requests_is_set_and_taken_away(server: Server, client: HttpClient) -> None:
    client.set_header("Cookie", "session=1")
    client.request("GET", "/")
    client.set_header("Cookie", None)
    client.request("GET", "/", headers={"cookie": "other"})
    client.request("GET", "/")
    assert [seen[2].get("cookie") for seen in server.seen] == ["session=1", "other", None]


def _by_client(port: int) -> None:
    client = HttpClient(f"http://127.0.0.1:{port}", timeout_s=1.0)
    try:
        client.request("POST", "/")
    finally:
        client.close()


def _by_one_connection(port: int) -> None:
    connection = PlainConnection("127.0.0.1", port, timeout=1.0)
    try:
        connection.request("POST", "/")
        connection.getresponse()
    finally:
        connection.close()


def _by_reader(port: int) -> None:
    RemoteReader(remote_servers.remote(f"http://127.0.0.1:{port}"), "disk.raw").close()


@pytest.mark.timeout(60)
@pytest.mark.parametrize("piece", [b"HTTP/1.1 100 Continue\r\n\r\n", b"HTTP/1.1 102 "], ids=["interim answers", "a line"])
@pytest.mark.parametrize(
    ("request_by", "error"),
    [(_by_client, SourceUnreachable), (_by_one_connection, (TimeoutError, HTTPException)), (_by_reader, SourceUnreachable)],
)
def test_a_head_without_an_end_is_given_up(
    piece: bytes,
    request_by: Callable[[int], None],
    error: type[Exception] | tuple[type[Exception], ...],
    server: Server,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A server that sends something now and then is not silent; it must not hold a thread of ours."""
    monkeypatch.setattr(http_answers, "HEAD_WITHIN_S", 1.0)
    monkeypatch.setattr(remote_http, "READ_TIMEOUT_S", 1.0)
    monkeypatch.setattr(retrying, "PAUSES_S", ())
    gone = threading.Event()

    def drip(request: BaseHTTPRequestHandler) -> None:
        with contextlib.suppress(OSError):
            while not gone.wait(0.01):
                request.wfile.write(piece if b"\n" in piece else piece[:1])
        request.close_connection = True

    server.reply = drip
    try:
        with pytest.raises(error):
            request_by(server.port)
    finally:
        gone.set()


def _read_by_client(port: int) -> None:
    client = HttpClient(f"http://127.0.0.1:{port}")
    try:
        client.request("GET", "/")
    finally:
        client.close()


def _read_by_stream(port: int) -> None:
    client = HttpClient(f"http://127.0.0.1:{port}")
    try:
        with client.stream("GET", "/") as stream:
            stream.read(_WHOLE)
    finally:
        client.close()


def _read_by_one_connection(port: int) -> None:
    connection = PlainConnection("127.0.0.1", port)
    try:
        connection.request("GET", "/")
        connection.getresponse().read()
    finally:
        connection.close()


def colons(fingerprint: str) -> str:
    return ":".join(fingerprint[at : at + 2] for at in range(0, len(fingerprint), 2))


def _read_by_peer(port: int, made: Certificates) -> None:
    place = PeerPlace(url=f"https://127.0.0.1:{port}/", fingerprint_sha256=colons(made.fingerprint), username="u", password="p")
    folder = PeerFolder(place, patience_s=0.0)
    try:
        folder.read("f")
    finally:
        folder.close()


_WHOLE = 400


class _Clock:
    """A minute passes with each look at it."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        self.now_s += 60.0
        return self.now_s


def _dripping(request: BaseHTTPRequestHandler) -> None:
    """The whole answer, in pieces that come one by one."""
    request.send_response(206)
    request.send_header("content-length", str(_WHOLE))
    request.send_header("content-range", f"bytes 0-{_WHOLE - 1}/{_WHOLE}")
    request.end_headers()
    with contextlib.suppress(OSError):
        for _ in range(_WHOLE // 50):
            request.wfile.write(bytes(50))
            time.sleep(0.005)
    request.close_connection = True


@pytest.mark.parametrize(
    ("read_by", "error"),
    [
        (_read_by_client, SourceUnreachable),
        (_read_by_stream, SourceUnreachable),
        (_read_by_one_connection, http_answers.TooSlow),
        (_by_reader, SourceUnreachable),
    ],
)
def test_a_body_that_comes_too_slowly_is_given_up(
    read_by: Callable[[int], None], error: type[Exception], server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A server that sends a byte now and then is not silent, and would hold a copy forever."""
    monkeypatch.setattr(http_answers, "clock", _Clock())
    monkeypatch.setattr(retrying, "PAUSES_S", ())
    server.reply = _dripping
    with pytest.raises(error, match="too slow"):
        read_by(server.port)


def test_a_peer_that_answers_too_slowly_is_away(
    tls_server: Server, made: Certificates, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(http_answers, "clock", _Clock())
    tls_server.reply = _dripping
    with pytest.raises(RepositoryUnreachable, match="too slow"):
        _read_by_peer(tls_server.port, made)


class _Pieces(io.RawIOBase):
    """A body whose pieces each come after their time."""

    def __init__(self, clock: list[float], pieces: Iterable[tuple[int, float]]) -> None:
        self._clock, self._pieces = clock, iter(pieces)

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        count, takes_s = next(self._pieces, (0, 0.0))
        self._clock[0] += takes_s
        return count


@pytest.mark.parametrize(
    ("pieces", "slow"),
    [
        pytest.param([(1, 1.0)] * 200, True, id="a byte a second"),
        pytest.param([(2000, 1.0)] * 200, False, id="a slow line"),
        pytest.param([(1, 59.0), (1, 30.0), (1, 29.0), (70_000, 1.0)], False, id="a pause that a connection allows"),
        pytest.param([(70_000, 1.0), (1, 100.0), (1, 100.0)], True, id="fast at first"),
        pytest.param([(1, 119.0)], False, id="a small answer"),
    ],
)
def test_the_least_rate(pieces: list[tuple[int, float]], slow: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The connection itself allows a silence of 60 s. The reader's own pauses do not count."""
    now = [0.0]
    monkeypatch.setattr(http_answers, "clock", lambda: now[0])

    class Socket:
        def makefile(self, _mode: str) -> io.BufferedReader:
            return io.BufferedReader(_Pieces(now, pieces))

        def gettimeout(self) -> float:
            return 60.0

    answer = http_answers.Response(Socket())
    buffer = memoryview(bytearray(100_000))
    with pytest.raises(http_answers.TooSlow) if slow else contextlib.nullcontext():
        while answer.fp.raw.readinto(buffer):
            now[0] += 1000.0


def test_an_answer_may_come_after_an_interim_one(server: Server, client: HttpClient) -> None:
    def both(request: BaseHTTPRequestHandler) -> None:
        request.wfile.write(b"HTTP/1.1 100 Continue\r\nx-of: another\r\n\r\n")
        server.send(request, 200, b"{}", **{"x-own": "1"})

    server.reply = both
    for _ in range(2):
        answer = client.request("GET", "/")
        assert (answer.status, answer.body, answer.headers.get("x-own"), answer.headers.get("x-of")) == (200, b"{}", "1", None)
    assert server.connections == 1


def test_requests_share_connections(server: Server, client: HttpClient) -> None:
    for _ in range(5):
        client.request("GET", "/")
    assert server.connections == 1


def test_an_idle_connection_that_was_closed_is_made_again(server: Server, client: HttpClient) -> None:
    def answer_and_hang_up(request: BaseHTTPRequestHandler) -> None:
        server.send(request, 200, b"{}")
        request.close_connection = True  # without saying so in a header

    server.reply = answer_and_hang_up
    for _ in range(3):
        assert client.request("GET", "/").ok


def test_a_post_whose_answer_was_lost_is_not_sent_twice(server: Server, client: HttpClient) -> None:
    def hang_up(request: BaseHTTPRequestHandler) -> None:
        request.close_connection = True

    server.reply = hang_up
    with pytest.raises(SourceUnreachable, match="the connection was lost"):
        client.request("POST", "/snapshot")
    assert len(server.seen) == 1
    with pytest.raises(SourceUnreachable):
        client.request("GET", "/snapshot")
    assert len(server.seen) == 3


def test_a_body_that_is_cut_off_is_no_answer(server: Server, client: HttpClient) -> None:
    def cut(request: BaseHTTPRequestHandler) -> None:
        request.send_response(200)
        request.send_header("content-length", "100")
        request.end_headers()
        request.wfile.write(b"half")
        request.close_connection = True

    server.reply = cut
    with pytest.raises(SourceUnreachable):
        client.request("GET", "/list")


def test_too_large_an_answer_is_refused(server: Server, client: HttpClient) -> None:
    server.reply = lambda request: server.send(request, 200, bytes(5000))
    with pytest.raises(SourceUnreachable, match="more than 4999 bytes"):
        client.request("GET", "/", limit_bytes=4999)
    assert len(client.request("GET", "/", limit_bytes=5000).body) == 5000


def test_silence_is_given_up(server: Server, client: HttpClient) -> None:
    until = threading.Event()

    def silent(_request: BaseHTTPRequestHandler) -> None:
        until.wait(60)

    server.reply = silent
    try:
        with pytest.raises(SourceUnreachable, match="did not answer in time") as caught:
            client.request("GET", "/slow", query={"session": "SECRET"}, timeout_s=0.3)
    finally:
        until.set()
    assert "SECRET" not in str(caught.value.detail)


def test_an_answer_that_comes_byte_by_byte_is_given_up(
    server: Server, client: HttpClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(http, "ANSWER_TIMEOUT_S", 0.5)
    left = threading.Event()

    def dripping(request: BaseHTTPRequestHandler) -> None:
        request.send_response(200)
        request.send_header("content-length", "1000")
        request.end_headers()
        for _ in range(1000):
            request.wfile.write(b" ")
            if left.wait(0.05):
                return

    server.reply = dripping
    try:
        with pytest.raises(SourceUnreachable, match="sent its answer to GET /slow too slowly"):
            client.request("GET", "/slow", timeout_s=0.2)
    finally:
        left.set()


def test_what_is_no_json_names_its_beginning(server: Server, client: HttpClient) -> None:
    server.reply = lambda request: server.send(request, 200, b"<html>log in</html>")
    with pytest.raises(SourceUnreachable, match="<html>log in"):
        client.request("GET", "/").json()
    server.reply = lambda request: server.send(request, 200, b"[" * 100_000)
    with pytest.raises(SourceUnreachable, match="is not JSON"):
        client.request("GET", "/").json()


def test_a_redirect_is_an_answer(server: Server, client: HttpClient) -> None:
    server.reply = lambda request: server.send(request, 302, b"", location="http://169.254.169.254/")
    assert client.request("GET", "/").status == 302
    assert len(server.seen) == 1


def test_a_stream_is_read_in_pieces_and_may_be_left(server: Server, client: HttpClient) -> None:
    server.reply = lambda request: server.send(request, 200, b"0123456789")
    with client.stream("GET", "/bytes") as stream:
        buffer = bytearray(4)
        assert (stream.read(3), stream.read_into(memoryview(buffer)), bytes(buffer)) == (b"012", 4, b"3456")
        assert (stream.read(100), stream.read(1)) == (b"789", b"")
    with client.stream("GET", "/bytes") as stream:
        stream.read(1)
    # The one that was left may not be used again: its body is still on the way.
    assert client.request("GET", "/").body == b"0123456789"
    assert server.connections == 2


def test_nobody_listens(server: Server) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        client = HttpClient(f"http://127.0.0.1:{taken.getsockname()[1]}")
        with pytest.raises(SourceUnreachable, match="accepts no connection: Connection refused"):
            client.request("GET", "/")
        client.close()


@pytest.mark.parametrize("origin", ["ftp://a", "https://", "a", "https:///x"])
def test_what_is_no_http_server(origin: str) -> None:
    with pytest.raises(BadRequest):
        HttpClient(origin)


# ── trust ────────────────────────────────────────────────────────────────────────────────────────────────────────────


def _asked(server: Server, trust: Trust) -> Answer:
    client = HttpClient(f"https://127.0.0.1:{server.port}", trust)
    try:
        return client.request("GET", "/secret")
    finally:
        client.close()


def test_a_stranger_is_refused_before_anything_is_sent(tls_server: Server) -> None:
    with pytest.raises(SourceUnreachable, match=r"is not trusted: .*certificate"):
        _asked(tls_server, Trust())
    assert tls_server.seen == []


def test_a_pinned_certificate_is_trusted_and_another_is_not(tls_server: Server, made: Certificates, tmp_path: Path) -> None:
    assert _asked(tls_server, Trust(fingerprint_sha256=colons(made.fingerprint))).ok
    other = certificates(tmp_path).fingerprint
    with pytest.raises(SourceUnreachable, match="not the pinned one"):
        _asked(tls_server, Trust(fingerprint_sha256=colons(other)))
    assert len(tls_server.seen) == 1


def test_the_check_can_be_turned_off(tls_server: Server) -> None:
    assert _asked(tls_server, Trust(verify=False)).ok


def test_a_server_without_tls_is_named(server: Server) -> None:
    with pytest.raises(SourceUnreachable):
        _asked(server, Trust(verify=False))


def test_a_recorder_is_given_whole_answers(server: Server) -> None:
    kept: list[tuple[str, str, dict[str, str], bytes | None, int]] = []

    class Kept:
        def answered(self, method: str, path: str, query: object, sent: bytes | None, answer: Answer) -> None:
            assert isinstance(query, dict)
            kept.append((method, path, query, sent, answer.status))

    client = HttpClient(f"http://127.0.0.1:{server.port}", recorder=Kept())
    client.request("PUT", "/x", query={"a": "1"}, form={"b": "2"})
    client.close()
    assert kept == [("PUT", "/x", {"a": "1"}, b"b=2", 200)]
