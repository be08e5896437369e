"""The client's own work: reading the stream as it may come, and answers that are not the service's."""

import itertools
import json
import os
import pty
import socket
import subprocess
import sys
import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, cast

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from synvirt.cli.client import Client, StreamEvent, _events, _refusal
from synvirt.errors import (
    AuthFailed,
    BackupUnauthorized,
    BadRequest,
    Conflict,
    Internal,
    NotFound,
    PersistFailed,
    ServiceUnreachable,
    Unauthorized,
    VmNotFound,
)
from synvirt.main import running
from synvirt.model.sources import SourceChange, SourceRequest
from tests.cli.conftest import Run
from tests.fakes.service import Service
from tests.needs import need_root


def _answer(parts: Iterable[bytes]) -> httpx.Response:
    return httpx.Response(200, headers={"Content-Type": "text/event-stream; charset=utf-8"}, content=iter(parts))


DATA = st.text(st.characters(exclude_categories=["Cc", "Cs", "Zl", "Zp"]), min_size=1)


@given(st.lists(st.tuples(st.sampled_from(["migration", "progress"]), DATA, st.none() | st.integers(0, 2**40))))
def test_what_the_service_writes_is_read_back(events: list[tuple[str, str, int | None]]) -> None:
    from fastapi.sse import format_sse_event

    wire = b""
    for name, data, id_ in events:
        wire += format_sse_event(comment="between")
        wire += format_sse_event(event=name, data_str=data, id=str(id_) if id_ is not None else None)
    last: int | None = None
    expected = [StreamEvent(name, data, last := last if id_ is None else id_) for name, data, id_ in events]
    assert list(_events(_answer(wire[i : i + 7] for i in range(0, len(wire), 7)), "the service")) == expected


@given(st.lists(st.text()))
def test_any_lines_at_all_are_no_trouble(lines: list[str]) -> None:
    list(_events(_answer(f"{line}\n".encode() for line in lines), "the service"))


def test_an_event_that_was_cut_off_is_none() -> None:
    assert list(_events(_answer([b"event: migration\n", b"data: {\n", b"id: 3\n"]), "the service")) == []


@pytest.mark.parametrize("part", [b"x" * (1 << 20), b"data: x\n" * (1 << 17)], ids=["line", "event"])
def test_an_event_without_end_is_refused(part: bytes) -> None:
    with pytest.raises(Internal, match="an event that a SynVirt service does not send"):
        list(_events(_answer(itertools.chain([b"data: "], itertools.repeat(part))), "the service"))


def test_a_page_is_not_a_stream() -> None:
    page = httpx.Response(200, headers={"Content-Type": "text/html"}, content=b"data: 1\n\n")
    with pytest.raises(ServiceUnreachable, match="answered something other than events"):
        list(_events(page, "the service"))


@pytest.mark.parametrize("method", ["ask", "send"])
def test_a_parameter_is_sent_where_it_was_given(method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """An empty one was given: the service says what is wrong with it, or finds nothing."""
    urls: list[httpx.URL] = []

    def answer(request: httpx.Request) -> httpx.Response:
        urls.append(request.url)
        return httpx.Response(200, json={})

    with answering(200, b"") as client:
        monkeypatch.setattr(client, "_http", httpx.Client(base_url="http://here", transport=httpx.MockTransport(answer)))
        params: dict[str, Any] = {"given": "x", "not_given": None, "empty": "", "no": False, "none": 0, "all": []}
        client.ask("GET", "/uploads", params=params) if method == "ask" else client.send("/uploads", b"", params=params)
        client.ask("POST", "/uploads?of=the-path")
    assert dict(urls[0].params) == {"given": "x", "empty": "", "no": "false", "none": "0"}
    assert dict(urls[1].params) == {"of": "the-path"}, "no parameters leave it as it is"


@contextmanager
def answering(status: int, body: bytes, content_type: str = "application/problem+json") -> Iterator[Client]:
    class Answer(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.rfile.read(int(self.headers.get("Content-Length") or 0))
            self.send_response(status)
            self.send_header("Content-Type", content_type)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def do_POST(self) -> None:
            self.do_GET()

        def do_DELETE(self) -> None:
            self.do_GET()

        def log_message(self, format: str, *args: object) -> None:  # noqa: A002
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Answer)
    thread = threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True)
    thread.start()
    try:
        with Client.remote(f"http://127.0.0.1:{server.server_port}", user="a", password="b") as client:
            yield client
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


@pytest.mark.parametrize(
    ("status", "code", "error"),
    [
        (409, "E_MIG_CONFLICT", Conflict),
        (404, "E_MIG_VM_NOT_FOUND", VmNotFound),
        (401, "E_MIG_UNAUTHENTICATED", Unauthorized),
        (401, "E_BAK_UNAUTHENTICATED", BackupUnauthorized),
        (401, "E_MIG_AUTH_FAILED", Unauthorized),  # a service of an earlier version
        (502, "E_MIG_AUTH_FAILED", AuthFailed),
        (400, "E_MIG_OF_A_LATER_VERSION", Internal),
    ],
)
def test_a_refusal_is_raised_as_what_it_was(status: int, code: str, error: type[Exception]) -> None:
    with answering(status, b'{"code": "%s", "detail": "so it is", "hint": "do"}' % code.encode()) as client:
        with pytest.raises(error, match="so it is") as raised:
            client.ask("GET", "/migrations")
        assert raised.value.hint == "do"  # type: ignore[attr-defined]
        with pytest.raises(error, match="so it is"):
            next(client.stream())


@pytest.mark.parametrize(
    ("away", "error"),
    [
        (
            httpx.Response(500, json={"code": "E_MIG_PERSIST_FAILED", "detail": "the store failed", "hint": "wait"}),
            PersistFailed,
        ),
        (httpx.Response(502, html="<h1>Bad Gateway</h1>"), ServiceUnreachable),
    ],
    ids=["database", "behind a proxy"],
)
def test_a_service_that_is_away_is_waited_for(
    monkeypatch: pytest.MonkeyPatch, away: httpx.Response, error: type[Exception]
) -> None:
    monkeypatch.setattr("synvirt.cli.client.RECONNECT_EVERY_S", 0)
    answers = iter([_answer([b"id: 1\ndata: a\n\n"]), away, away, _answer([b"id: 2\ndata: b\n\n"])])
    http = httpx.Client(base_url="http://service", transport=httpx.MockTransport(lambda _: next(answers)))
    lost: list[str] = []
    with Client(http, where="here", hint="") as client:
        events = client.follow(on_lost=lambda: lost.append("waiting"))
        assert [next(events).data, next(events).data, lost] == ["a", "b", ["waiting"]]
    answers = iter([away])
    http = httpx.Client(base_url="http://service", transport=httpx.MockTransport(lambda _: next(answers)))
    with Client(http, where="here", hint="") as client, pytest.raises(error):  # it never answered
        next(client.follow())


@pytest.mark.parametrize("body", [b"<html>", b"[]", b"null", b'{"code": 1}', b""])
@pytest.mark.parametrize("status", [404, 502, 302])
def test_what_is_no_service_of_ours(status: int, body: bytes) -> None:
    with answering(status, body, "text/html") as client, pytest.raises(ServiceUnreachable, match=f"answered {status}"):
        client.ask("GET", "/migrations")


def test_an_answer_that_is_no_migration() -> None:
    with answering(200, b"<html>") as client, pytest.raises(ServiceUnreachable, match="not as a SynVirt service"):
        client.migration("x")


@pytest.mark.parametrize(
    ("content_type", "body", "command"),
    [
        *(
            ("text/html; charset=utf-8", b"<html>Log in first", command)
            for command in (
                *("migrations list", "migrations list --json", "migrations remove ID", "migrations cancel ID"),
                *("sources remove ID", "backup runs", "waves remove ID", "tokens revoke ID", "receipt get ID"),
            )
        ),
        ("application/json", b"", "migrations remove ID"),
    ],
)
def test_nothing_is_done_where_somebody_else_says_that_all_is_well(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, content_type: str, body: bytes, command: str
) -> None:
    """A portal, or a proxy that wants people to log in, answers every request with a page of its own."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("SYNVIRT_PASSWORD", "x")
    with answering(200, body, content_type) as client:
        asked = command.replace("ID", "5e14de9e-fb77-4cdd-bcd2-f3c62442acd4").split()
        ended = run(*asked, "--server", client._where, "--user", "a")
    assert (ended.exit_code, "not as a SynVirt service does" in ended.stderr) == (1, True), ended.output
    assert "_INTERNAL" not in ended.stderr
    assert list(tmp_path.glob("*.tar")) == []


def test_a_peer_that_speaks_something_else() -> None:
    with pytest.raises(BadRequest), Client.remote("ftp://x", user="a", password="b"):
        pass


def test_the_socket_of_a_service_that_was_killed(tmp_path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as left:
        left.bind(str(tmp_path / "synvirt.sock"))
    with Client.local(tmp_path / "synvirt.sock") as client:
        for ask in (lambda: client.ask("GET", "/migrations"), lambda: next(client.stream())):
            with pytest.raises(ServiceUnreachable, match="Connection refused") as raised:
                ask()
            assert raised.value.hint == f"start it: synvirt serve --data-dir {tmp_path}"


def test_a_folder_with_a_space_is_reported_as_a_shell_takes_it(tmp_path: Path) -> None:
    with Client.local(tmp_path / "a b" / "synvirt.sock") as client, pytest.raises(ServiceUnreachable) as raised:
        client.ask("GET", "/migrations")
    assert raised.value.hint == f"start it: synvirt serve --data-dir '{tmp_path}/a b'"


def test_that_no_service_answers_has_a_code_of_its_own(run: Run, tmp_path: Path) -> None:
    done = run("--json", "migrations", "list")
    assert done.exit_code == 1
    reported = json.loads(done.stdout)["error"]
    assert reported["code"] == "E_MIG_SERVICE_UNREACHABLE"
    assert str(tmp_path / "synvirt.sock") in reported["detail"]
    assert reported["hint"] == f"start it: synvirt serve --data-dir {tmp_path}"


@pytest.mark.parametrize("terminal", [True, False])
def test_the_services_lines_are_plain_at_a_terminal_and_json_elsewhere(terminal: bool) -> None:
    """In a process of its own: the log is one for all of it."""
    program = (
        "import structlog, sys; from synvirt.logs import log_to; log_to('info', sys.stdout);"
        "structlog.get_logger().info('serving', at='here')"
    )
    ours, theirs = pty.openpty() if terminal else os.pipe()
    try:
        subprocess.run([sys.executable, "-P", "-c", program], stdout=theirs, check=True, timeout=60)
        line = os.read(ours, 4096).decode()
    finally:
        os.close(ours)
        os.close(theirs)
    assert "serving" in line
    assert line.startswith("{") is not terminal


def test_a_service_under_another_base_url_is_named_as_the_reason(tmp_path: Path) -> None:
    made = Service(tmp_path, base_url="/kvm")
    with made.served() as server:
        for base_url, found in (("", False), ("/kvm", True)):
            with Client.local(made.settings.socket_path, base_url=base_url) as client:
                if found:
                    client.ask("GET", "/migrations")
                    continue
                with pytest.raises(NotFound) as caught:
                    client.ask("GET", "/migrations")
                assert "SYNVIRT_BASE_URL" in str(caught.value.hint)
        assert running.Service(server, cast("Any", None), made.settings.base_url).address == f"{server.address}/kvm/"
        assert running.Service(server, cast("Any", None), "").address == server.address
    made.close()


def test_the_socket_of_another_user(service: Service) -> None:
    """As somebody who is not root: for root there is no socket of another user's."""
    need_root("becoming another user")
    for folder in (service.settings.data_dir, *service.settings.data_dir.parents):
        if folder != Path("/") and folder.stat().st_uid == os.geteuid() and folder != Path("/tmp"):
            folder.chmod(0o755)
    # Asked once before: the other user cannot read this environment, where it lies under root's home.
    code = (
        "import os, sys; from pathlib import Path; from synvirt.cli.client import Client;"
        " ask = lambda: Client.local(Path(sys.argv[1])).ask('GET', '/migrations');"
        " ask(); os.setgid(65534); os.setuid(65534); ask()"
    )
    command: list[str | Path] = [sys.executable, "-c", code, service.settings.socket_path]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert "belongs to another user" in done.stderr


def test_a_service_that_is_stopped_is_not_to_be_started(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its socket takes connections while its process stands still; and what it was asked, it does when it goes on."""
    monkeypatch.setattr("synvirt.cli.client.ANSWER_TIMEOUT_S", 0.2)
    path = tmp_path / "synvirt.sock"
    with socket.socket(socket.AF_UNIX) as stopped:
        stopped.bind(str(path))
        stopped.listen()
        with Client.local(path) as client, pytest.raises(ServiceUnreachable, match="listens, and does not answer") as caught:
            client.ask("GET", "/migrations")
    assert "synvirt serve" not in (caught.value.hint or "")
    assert "look before you ask again" in (caught.value.hint or "")


@pytest.mark.parametrize("status", [401, 429])
def test_a_caller_who_is_not_let_in_has_used_no_command_wrongly(status: int) -> None:
    problem = {"code": "E_MIG_BAD_REQUEST", "detail": "too many wrong passwords came", "hint": "try again in 9 s"}
    refused = _refusal(httpx.Response(status, json=problem), "https://kvm1")
    assert (type(refused), refused.detail, refused.hint) == (Unauthorized, problem["detail"], problem["hint"])


def test_what_was_changed_while_it_was_edited_is_not_overwritten(service: Service) -> None:
    sources = service.sources
    made = sources.add(SourceRequest(name="lab", kind="libvirt_remote", endpoint="qemu:///system"))
    mine, path = {"name": "mine"}, f"/sources/{made.id}"

    def overtaken(before: dict[str, Any]) -> dict[str, str]:
        sources.change(made.id, SourceChange(name="theirs"))
        return mine

    with Client.local(service.settings.socket_path) as client:
        with pytest.raises(Conflict, match="changed it meanwhile"):
            client.edit("PATCH", path, overtaken)
        assert sources.get(made.id).name == "theirs"
        client.edit("PATCH", path, lambda before: mine)
    assert sources.get(made.id).name == "mine"
