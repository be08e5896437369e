"""HttpClient against real sockets: what a server may do to it."""

import socket
import threading
from collections.abc import Iterator
from contextlib import nullcontext
from http.server import BaseHTTPRequestHandler
from pathlib import Path

import pytest

from synvirt.errors import BadRequest, SourceUnreachable
from synvirt.texts import json_bounded
from synvirt.transport import Answer, AnswerTooLarge, HttpClient, Trust, http
from tests.servers.remote_servers import Certificates, certificates
from tests.transport.http_server import Server, colons


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


def test_an_answer_of_a_million_small_values_is_not_parsed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Their objects would be 24 times as large as the answer."""
    monkeypatch.setattr(json_bounded, "VALUES_MAX", 1000)
    for value, most in ((b"{}", 500), (b"[]", 500), (b'""', 1000), (b"7", 1000)):
        for count in (most, most + 1):
            answer = Answer(200, {}, b"[" + b",".join([value] * count) + b"]")
            with nullcontext() if count == most else pytest.raises(AnswerTooLarge, match="more than 1000 values"):
                assert len(answer.json()) == count


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
