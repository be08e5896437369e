"""The body of a WinRM answer: bounded in bytes and in time, and never unpacked."""

import gzip
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
import requests

from synvirt.errors import Internal, SourceUnreachable
from synvirt.live.hyperv import session as hyperv_session

Reply = Callable[[BaseHTTPRequestHandler], None]
_LIMIT_BYTES = 100_000


@pytest.fixture
def asked() -> Iterator[Callable[[Reply], bytes]]:
    """Posts to a host that answers with the reply, by the session's own adapter."""
    replies: list[Reply] = []

    class Handler(BaseHTTPRequestHandler):
        timeout = 30

        def do_POST(self) -> None:
            self.rfile.read(int(self.headers.get("content-length", 0)))
            replies[0](self)

        def log_message(self, format: str, *args: object) -> None:  # noqa: A002 - the base's name
            pass

    class Quiet(ThreadingHTTPServer):
        daemon_threads = True

        def handle_error(self, request: object, client_address: object) -> None:
            """The session hangs up."""

    with Quiet(("127.0.0.1", 0), Handler) as server, requests.Session() as session:
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        session.trust_env = False
        session.mount("http://", hyperv_session._adapter(None))

        def post(reply: Reply) -> bytes:
            replies[:] = [reply]
            return session.post(f"http://127.0.0.1:{server.server_address[1]}/wsman", data=b"x", timeout=20).content

        yield post
        server.shutdown()


def _head(request: BaseHTTPRequestHandler, **headers: str) -> None:
    request.send_response(200)
    for name, value in headers.items():
        request.send_header(name.replace("_", "-"), value)
    request.end_headers()


def _sends(body: bytes, **headers: str) -> Reply:
    def reply(request: BaseHTTPRequestHandler) -> None:
        _head(request, **headers)
        request.wfile.write(body)

    return reply


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hyperv_session, "ENVELOPE_BYTES_MAX", _LIMIT_BYTES)


@pytest.mark.parametrize("sized", [True, False])
def test_one_of_the_most_bytes_is_taken_and_a_longer_one_is_not(asked: Callable[[Reply], bytes], sized: bool) -> None:
    for length in (0, 1, _LIMIT_BYTES):
        body = b"e" * length
        assert asked(_sends(body, **({"Content_Length": str(length)} if sized else {}))) == body
    longer = b"e" * (_LIMIT_BYTES + 1)
    with pytest.raises(Internal, match="more than 100000 bytes"):
        asked(_sends(longer, **({"Content_Length": str(len(longer))} if sized else {})))


def test_one_without_an_end_is_given_up(asked: Callable[[Reply], bytes]) -> None:
    def endless(request: BaseHTTPRequestHandler) -> None:
        _head(request)
        while True:
            request.wfile.write(b"e" * 10_000)

    with pytest.raises(Internal, match="more than 100000 bytes"):
        asked(endless)


def test_one_whose_bytes_come_too_slowly_is_given_up(asked: Callable[[Reply], bytes], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hyperv_session, "ENVELOPE_WITHIN_S", 0.1)
    gone = threading.Event()

    def drip(request: BaseHTTPRequestHandler) -> None:
        _head(request)
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
    assert asked(_sends(packed, Content_Encoding="gzip", Content_Length=str(len(packed)))) == packed
