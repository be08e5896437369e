"""Answers that a server sends too slowly, or without an end."""

import contextlib
import io
import json
import threading
import time
from collections.abc import Callable, Iterable
from http.client import HTTPException
from http.server import BaseHTTPRequestHandler
from typing import Any

import pytest

from synvirt import http_answers
from synvirt.disks.vsphere import lease_end
from synvirt.errors import RepositoryUnreachable, SourceUnreachable
from synvirt.remote import http as remote_http
from synvirt.remote import retrying
from synvirt.remote.reading import RemoteReader
from synvirt.repository.peer import PeerFolder, PeerPlace
from synvirt.transport import HttpClient
from synvirt.transport.https import PlainConnection
from tests.servers import remote_servers
from tests.servers.remote_servers import Certificates
from tests.transport.http_server import Server, colons


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


@pytest.mark.timeout(60)
def test_the_process_that_ends_leases_reads_no_answer_without_an_end(
    tls_server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It goes on to the next lease, and to the session."""

    def endless(request: BaseHTTPRequestHandler) -> None:
        request.close_connection = True
        request.send_response(200)
        request.end_headers()
        with contextlib.suppress(OSError):
            while True:
                request.wfile.write(bytes(1 << 20))

    tls_server.reply = endless
    order = {"host": "127.0.0.1", "port": tls_server.port, "verify": False, "fingerprint_sha256": None, "permitted": []}
    order |= {"cookie": "", "session_manager": "SessionManager", "api_version": "8.0"}
    monkeypatch.setattr("sys.stdin", io.StringIO(json.dumps(order) + "\nlease-1\nlease-2\n"))
    monkeypatch.setattr("signal.signal", lambda *_: None)
    lease_end.main()
    for wanted, (_, _, _, body) in zip((b"lease-1", b"lease-2", b"Logout"), tls_server.seen, strict=True):
        assert wanted in body
