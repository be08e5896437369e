"""Prism Central and Prism Element over HTTPS, each on a port of its own, over one State; with faults.

Every request and every answer is held against the vendor's schema: what is wrong is kept in `mistakes`, which a test's end
looks at (conftest), so that neither our adapter nor this stand-in can invent a field unseen.
"""

import base64
import json
import re
import ssl
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, ClassVar
from urllib.parse import parse_qsl, unquote, urlsplit

from synvirt.live import SourceAccess
from tests.fakes.prism import schema
from tests.fakes.prism.central import CentralAnswers
from tests.fakes.prism.element import ElementAnswers
from tests.fakes.prism.state import Refusal, State
from tests.servers.remote_servers import Certificates, certificates

USER, PASSWORD = "mover", "s3cret"
VERSIONS = {"vmm": 1, "dataprotection": 1, "prism": 0, "clustermgmt": 0, "volumes": 1, "networking": 0, "iam": 0}
_V4 = re.compile(r"/api/(\w+)/v4\.(\d+)/(.*)")


@dataclass
class Fault:
    """The next `times` requests whose method and path the pattern finds: a status, or a connection that is cut."""

    pattern: re.Pattern[str]
    kind: str
    times: int


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 64

    def handle_error(self, request: object, client_address: object) -> None:
        """Clients of these tests hang up."""


@dataclass
class Prisms:
    state: State
    certificates: Certificates
    central: CentralAnswers
    element: ElementAnswers
    ports: dict[str, int] = field(default_factory=dict)
    mistakes: list[str] = field(default_factory=list)
    seen: list[str] = field(default_factory=list)
    faults: list[Fault] = field(default_factory=list)
    nfs_ports: tuple[int, int] | None = None
    # Off for a measure of speed alone.
    checked: bool = True
    portal: str | None = None

    def url(self, which: str) -> str:
        return f"https://127.0.0.1:{self.ports[which]}"

    def access(self, *which: str, password: str = PASSWORD, folder: Path | None = None, **options: Any) -> SourceAccess:
        """`central`, `element` or both; certificates are pinned."""
        which = which or ("central", "element")
        pin = self.certificates.fingerprint
        chosen: dict[str, Any] = {"fingerprint_sha256": pin, "element_fingerprint_sha256": pin, "shutdown_timeout_s": 1}
        if len(which) == 2:
            chosen["prism_element"] = self.url("element")
        if self.nfs_ports is not None:
            chosen |= {"nfs_port": self.nfs_ports[0], "mount_port": self.nfs_ports[1]}
        if self.portal is not None:
            chosen["data_services"] = self.portal
        credentials = {"user": USER, "password": password}
        return SourceAccess(self.url(which[0]), credentials, {**chosen, **options}, folder or self.state.folder / "adapter")

    def fault(self, pattern: str, kind: str, times: int = 1) -> None:
        self.faults.append(Fault(re.compile(pattern), kind, times))

    def names(self) -> list[str]:
        """What is left of ours on the platform."""
        state = self.state
        return sorted(
            [one.name for one in state.kept.values()]
            + [f"group {one.name}" for one in state.groups.values()]
            + [f"image {one.name}" for one in state.images.values()]
        )


class _Handler(BaseHTTPRequestHandler):
    prisms: ClassVar[Prisms]
    which: ClassVar[str]

    protocol_version = "HTTP/1.1"
    timeout = 60
    disable_nagle_algorithm = True

    def do_any(self) -> None:
        content = self.rfile.read(int(self.headers.get("content-length") or 0))
        url = urlsplit(self.path)
        path, query = unquote(url.path), dict(parse_qsl(url.query, keep_blank_values=True))
        headers = {name.lower(): value for name, value in self.headers.items()}
        self.prisms.seen.append(f"{self.which} {self.command} {path}")
        if (kind := self._fault(path)) == "cut":
            self.close_connection = True
            self.connection.close()
            return
        try:
            if kind is not None:
                raise Refusal(int(kind), "a fault of the test's")
            self._authorized(headers, path)
            if path.endswith("/file"):
                self._file(path)
                return
            body = json.loads(content) if content else None
            try:
                if self.prisms.checked:
                    schema.check_request(self.command, path, query, headers, body)
            except schema.Unknown as error:
                self.prisms.mistakes.append(f"request: {error}")
            with self.prisms.state.lock:
                status, answer, more = self._answered(path, query, headers, body)
            try:
                if self.prisms.checked:
                    schema.check_answer(self.command, path, status, answer)
            except schema.Unknown as error:
                self.prisms.mistakes.append(f"answer: {error}")
        except Refusal as refusal:
            status, answer, more = refusal.status, self._refused(path, refusal), {}
        except (AssertionError, LookupError, TypeError, ValueError) as error:
            self.prisms.mistakes.append(f"the stand-in: {self.command} {path}: {error!r}")
            status, answer, more = 500, {"message": "the stand-in has failed"}, {}
        self._send(status, json.dumps(answer).encode(), **more)

    def _fault(self, path: str) -> str | None:
        with self.prisms.state.lock:
            for one in self.prisms.faults:
                if one.times > 0 and one.pattern.search(f"{self.which} {self.command} {path}"):
                    one.times -= 1
                    return one.kind
        return None

    def _authorized(self, headers: dict[str, str], path: str) -> None:
        if "cookie" in headers and self.which == "element":
            return
        wanted = "Basic " + base64.b64encode(f"{USER}:{PASSWORD}".encode()).decode()
        if headers.get("authorization") != wanted:
            raise Refusal(401, "Authentication required.")

    def _answered(
        self, path: str, query: dict[str, str], headers: dict[str, str], body: Any
    ) -> tuple[int, Any, dict[str, str]]:
        if self.which == "element":
            if (found := _V4.fullmatch(path)) is not None and found[1] == "dataprotection":
                return self.prisms.central.content_regions(int(found[2]), found[3], headers, body)
            return self.prisms.element.answer(self.command, path, body)
        if self.command == "OPTIONS" and (found := re.fullmatch(r"/api/(\w+)/unversioned/info", path)) is not None:
            return self.prisms.central.info(found[1])
        if (found := _V4.fullmatch(path)) is None:
            raise Refusal(404, f"no path {path}")
        return self.prisms.central.answer(self.command, found[1], int(found[2]), found[3], query, headers, body)

    def _refused(self, path: str, refusal: Refusal) -> Any:
        if _V4.fullmatch(path):
            return {"data": {"error": [{"message": refusal.message, "severity": "ERROR"}]}}
        return {"state": "ERROR", "code": refusal.status, "message_list": [{"message": refusal.message, "reason": "ERROR"}]}

    def _file(self, path: str) -> None:
        """The whole file, whatever range is asked for."""
        image = self.prisms.state.images.get(path.split("/")[-2])
        if image is None:
            raise Refusal(404, "no such image")
        self._send(200, image.path.read_bytes(), type_="application/octet-stream")

    def _send(self, status: int, body: bytes, type_: str = "application/json", **more: str) -> None:
        self.send_response(status)
        for name, value in {"Content-Type": type_, "Content-Length": str(len(body)), **more}.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body)

    do_GET = do_POST = do_PUT = do_DELETE = do_OPTIONS = do_any  # noqa: N815 - http.server's names

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002 - the base's name
        pass


@contextmanager
def prisms(folder: Path) -> Iterator[Prisms]:
    """Both Prisms of one cluster; what it keeps lies in `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "containers").mkdir()
    made = certificates(folder)
    state = State(folder / "containers")
    found = Prisms(state, made, CentralAnswers(state, dict(VERSIONS)), ElementAnswers(state))
    ending: list[Callable[[], None]] = []
    try:
        for which in ("central", "element"):
            server = _Server(("127.0.0.1", 0), type("Handler", (_Handler,), {"prisms": found, "which": which}))
            context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
            context.load_cert_chain(made.certificate, made.key)
            server.socket = context.wrap_socket(server.socket, server_side=True)
            found.ports[which] = int(server.server_address[1])
            thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True)
            thread.start()
            ending += [server.shutdown, server.server_close]
        yield found
    finally:
        for end in ending:
            end()
