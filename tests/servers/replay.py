"""A recording of a site (docs/recordings.md) as a server that answers as the site did."""

import json
import re
import threading
from collections import defaultdict
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl, urlsplit

from synvirt.live import recording_soap
from synvirt.live.vsphere.versions import PATH as VSPHERES_VERSIONS
from tests.servers.certificates import self_signed, tls_server

# In no recording, which would scrub a version of four numbers as an address; without a list the oldest version is used.
NOT_RECORDED = frozenset({VSPHERES_VERSIONS})


class Replay:
    """Each question is answered as it was then, the second time as the second time, and then as the last time."""

    def __init__(self, lines: Iterable[str]) -> None:
        head, *exchanges = [json.loads(line) for line in lines]
        assert head["recording"] == 1
        self.head = head
        self.unknown: list[str] = []
        self._answers: dict[str, list[dict[str, Any]]] = defaultdict(list)
        self._lock = threading.Lock()
        for one in exchanges:
            request = one["request"]
            key = _key(request["method"], request["path"], request["query"], request.get("body"))
            self._answers[key].append(one["answer"])

    def answer(self, method: str, target: str, sent: bytes = b"") -> dict[str, Any]:
        url = urlsplit(target)
        soap = recording_soap.read(sent)
        try:
            body = json.loads(sent) if soap is None else recording_soap.question(soap)
        except ValueError:
            body = None
        key = _key(method, url.path, dict(parse_qsl(url.query, keep_blank_values=True)), body)
        with self._lock:
            found = self._answers.get(key)
            if not found:
                if url.path not in NOT_RECORDED:
                    self.unknown.append(key)
                return {"status": 404, "type": "text/plain", "body": "it was not asked then"}
            return found.pop(0) if len(found) > 1 else found[0]


def _key(method: str, path: str, query: dict[str, str], body: Any) -> str:
    """JSON-RPC and SOAP ask everything of one path: by method and parameters, but for the session, or who logs in."""
    rpc = ""
    if isinstance(body, dict) and "soap" in body:
        given = {} if body["soap"] == "Login" else body["given"]
        # A view is made again each time, and named by its session: what is asked of it says what it is.
        parameters = re.sub(r'session\[[^"]*', "session", json.dumps(given))
        rpc = f" {body['soap']} {parameters}"
    if isinstance(body, dict) and "jsonrpc" in body:
        given = [] if ".login" in body["method"] else body["params"][1:]
        rpc = f" {body['method']} {json.dumps(given)}"
    return f"{method} {path} {json.dumps(query, sort_keys=True)}{rpc}"


@contextmanager
def replayed(recording: Path | str, folder: Path) -> Iterator[tuple[str, str, Replay]]:
    """(endpoint, its certificate's SHA-256, the replay)."""
    text = recording.read_text() if isinstance(recording, Path) else recording
    replay = Replay(text.splitlines())

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"
        timeout = 30
        disable_nagle_algorithm = True

        def log_message(self, *_: object) -> None:
            pass

        def _serve(self) -> None:
            sent = self.rfile.read(int(self.headers.get("Content-Length", 0)))
            answer = replay.answer(self.command, self.path, sent)
            body = answer["body"] if isinstance(answer["body"], str) else json.dumps(answer["body"])
            content = body.encode()
            self.send_response(answer["status"], answer.get("reason"))
            self.send_header("Content-Type", answer["type"] or "application/json")
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        do_GET = do_POST = do_PUT = do_DELETE = _serve  # noqa: N815 - http.server's names

    certificate = self_signed(folder)
    server = tls_server(ThreadingHTTPServer(("127.0.0.1", 0), Handler), certificate)
    thread = threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True)
    thread.start()
    try:
        yield f"https://127.0.0.1:{server.server_address[1]}", certificate.fingerprint, replay
    finally:
        server.shutdown()
        server.server_close()
