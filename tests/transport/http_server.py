"""An HTTP server whose answers a test makes."""

import ssl
import threading
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from tests.servers.remote_servers import Certificates

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


def colons(fingerprint: str) -> str:
    return ":".join(fingerprint[at : at + 2] for at in range(0, len(fingerprint), 2))
