"""Our use of WinRM and PowerShell remoting against what Windows hosts answered: exchanges that pypsrp's makers recorded."""

import json
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from synvirt.errors import Internal
from synvirt.live.hyperv.session import Address, Credentials, HyperVRefused, Session
from synvirt.live.odd import OddAnswer
from tests.servers.remote_servers import certificates

RECORDED = json.loads((Path(__file__).parents[1] / "recorded" / "psrp.json").read_text())


@contextmanager
def replayed(folder: Path, name: str) -> Iterator[tuple[Session, list[str]]]:
    """A session with a server that answers as the host did then, each kind of question in its order; a pipeline's from its
    first on, however many there are. And what was asked."""
    answers: dict[str, list[str]] = {}
    for action, text in RECORDED[name]:
        answers.setdefault(action, []).append(text)
    left: dict[str, list[str]] = {action: list(texts) for action, texts in answers.items()}
    calls: list[str] = []

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"
        disable_nagle_algorithm = True

        def do_POST(self) -> None:
            request = self.rfile.read(int(self.headers["Content-Length"])).decode()
            message, action = (re.search(rf"{one}[^>]*>([^<]*)<", request) for one in ("MessageID", "Action"))
            assert message is not None
            assert action is not None
            kind = action[1].rpartition("/")[2] + (" of a command" if "DesiredStream CommandId" in request else "")
            calls.append(kind)
            if kind == "Command":
                left.update(
                    {one: list(answers[one]) for one in ("Command", "Receive of a command", "Signal") if one in answers}
                )
            text = re.sub(r"(RelatesTo>)[^<]*", rf"\g<1>{message[1]}", left[kind].pop(0))
            content = text.encode()
            self.send_response(500 if "WSManFault" in text else 200)
            self.send_header("Content-Type", "application/soap+xml;charset=UTF-8")
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    trusted = certificates(folder)
    server.socket = context(trusted).wrap_socket(server.socket, server_side=True)
    thread = threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True)
    thread.start()
    pin = ":".join(re.findall("..", trusted.fingerprint))
    made = Session(Address("127.0.0.1", server.server_port, fingerprint=pin), Credentials("basic", "user", "password"))
    try:
        yield made, calls
    finally:
        made.close()
        server.shutdown()
        thread.join()
        server.server_close()


def context(trusted: Any) -> Any:
    import ssl

    made = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    made.load_cert_chain(trusted.certificate, trusted.key)
    return made


def test_a_windows_host_is_understood(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with replayed(tmp_path, "succeeds") as (session, asked):
        session.open()
        assert asked[0] == "Create"
        assert "Receive" in asked
        # What was recorded is no JSON: a script of ours that answered so would be told.
        with pytest.raises(Internal, match="not JSON") as reported:
            session.run("list")
        assert "winrm" in reported.value.detail
        texts: list[str] = []
        as_json = SimpleNamespace(loads=lambda text, **_: texts.append(text), JSONDecodeError=json.JSONDecodeError)
        monkeypatch.setattr("synvirt.live.hyperv.session.json", as_json)
        with pytest.raises(OddAnswer):
            session.run("list")
        assert texts[0].startswith("winrm")
        assert "Windows Remote Management" in texts[0]
        session.close()
        assert asked[-1] == "Delete"


@pytest.mark.parametrize(
    ("name", "words"), [("fails", "error"), ("writes_an_error", "'Get-ServiceTypo' is not recognized as the name of a cmdlet")]
)
def test_an_error_of_a_windows_host_is_understood(tmp_path: Path, name: str, words: str) -> None:
    with replayed(tmp_path, name) as (session, asked):
        with pytest.raises(HyperVRefused) as reported:
            session.open()
        assert words in reported.value.detail
        # The shell is not left there.
        assert asked[-1] == "Delete"
