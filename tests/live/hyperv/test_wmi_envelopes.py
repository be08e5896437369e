"""The body of a WinRM answer: bounded in bytes and in time, and never unpacked."""

import gzip
import threading
from collections.abc import Callable, Iterator
from contextlib import closing
from http.server import BaseHTTPRequestHandler

import pytest
import requests

from synvirt.errors import Internal, SourceUnreachable
from synvirt.live.hyperv import session as hyperv_session
from tests.transport.http_server import Reply, Server

_LIMIT_BYTES = 100_000


@pytest.fixture
def asked() -> Iterator[Callable[[Reply], bytes]]:
    """Posts to a host that answers with the reply, by the session's own adapter."""
    with closing(Server(None)) as server, requests.Session() as session:
        session.trust_env = False
        session.mount("http://", hyperv_session._adapter(None, hyperv_session.Limits("a host")))

        def post(reply: Reply) -> bytes:
            server.reply = reply
            return session.post(f"http://127.0.0.1:{server.port}/wsman", data=b"x", timeout=20).content

        yield post


def _begin(request: BaseHTTPRequestHandler) -> None:
    """A head without the body's length: the body ends with the connection."""
    request.send_response(200)
    request.end_headers()
    request.close_connection = True


def _sends(body: bytes, *, sized: bool) -> Reply:
    def reply(request: BaseHTTPRequestHandler) -> None:
        if sized:
            Server.send(request, 200, body)
        else:
            _begin(request)
            request.wfile.write(body)

    return reply


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hyperv_session, "ENVELOPE_BYTES_MAX", _LIMIT_BYTES)


@pytest.mark.parametrize("sized", [True, False])
def test_one_of_the_most_bytes_is_taken_and_a_longer_one_is_not(asked: Callable[[Reply], bytes], sized: bool) -> None:
    for length in (0, 1, _LIMIT_BYTES):
        body = b"e" * length
        assert asked(_sends(body, sized=sized)) == body
    longer = b"e" * (_LIMIT_BYTES + 1)
    with pytest.raises(Internal, match="more than 100000 bytes"):
        asked(_sends(longer, sized=sized))


def test_one_without_an_end_is_given_up(asked: Callable[[Reply], bytes]) -> None:
    def endless(request: BaseHTTPRequestHandler) -> None:
        _begin(request)
        while True:
            request.wfile.write(b"e" * 10_000)

    with pytest.raises(Internal, match="more than 100000 bytes"):
        asked(endless)


def test_one_whose_bytes_come_too_slowly_is_given_up(asked: Callable[[Reply], bytes], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hyperv_session, "ENVELOPE_WITHIN_S", 0.1)
    gone = threading.Event()

    def drip(request: BaseHTTPRequestHandler) -> None:
        _begin(request)
        while not gone.wait(0.01):
            request.wfile.write(b"e")
            request.wfile.flush()

    try:
        with pytest.raises(SourceUnreachable, match="sent an envelope for more than"):
            asked(drip)
    finally:
        gone.set()


def test_none_is_unpacked(asked: Callable[[Reply], bytes]) -> None:
    """A thousandth of the bytes would fill the memory."""
    packed = gzip.compress(bytes(10 << 20))
    assert asked(lambda request: Server.send(request, 200, packed, **{"content-encoding": "gzip"})) == packed
