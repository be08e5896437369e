"""The stand-in's HTTP side: TLS, tickets with their CSRF token, API tokens; each call held against the vendor's schema."""

import json
import secrets
import threading
import time
from collections.abc import Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl, unquote, urlsplit

from tests.fakes.pve import schema
from tests.fakes.pve.cluster import Cluster, Refused
from tests.servers.certificates import self_signed, tls_server


class PveServer:
    """Serves `cluster` on a loopback port. `wrong` is what the schema does not allow: of answers, so of the stand-in itself."""

    def __init__(self, cluster: Cluster, folder: Path) -> None:
        self.cluster = cluster
        self.asked: list[tuple[str, str, dict[str, str]]] = []
        self.wrong: list[str] = []
        self.tickets: dict[str, tuple[str, str, float]] = {}
        self.logins = 0
        certificate = self_signed(folder)
        self.fingerprint = certificate.fingerprint
        plain = ThreadingHTTPServer(("127.0.0.1", 0), type("Handler", (_Handler,), {"pve": self}))
        self._server = tls_server(plain, certificate)
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.05,), daemon=True)

    @property
    def port(self) -> int:
        return int(self._server.server_address[1])

    @property
    def endpoint(self) -> str:
        return f"https://127.0.0.1:{self.port}"

    def __enter__(self) -> "PveServer":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()
        self.cluster.close()

    # ── who asks ─────────────────────────────────────────────────────────────────────────────────────────────────────

    def login(self, given: Mapping[str, str]) -> dict[str, str]:
        name = given["username"] if "@" in given["username"] else f"{given['username']}@{given.get('realm', 'pam')}"
        user = self.cluster.users.get(name)
        if user is None or user.secret != given["password"]:
            raise Refused(401, "authentication failure")
        self.logins += 1
        ticket, csrf = f"PVE:{name}:{secrets.token_hex(8)}::{secrets.token_urlsafe(32)}==", secrets.token_hex(8)
        self.tickets[ticket] = (name, csrf, time.time())
        return {"username": name, "ticket": ticket, "CSRFPreventionToken": csrf}

    def user(self, method: str, headers: Mapping[str, str]) -> str:
        authorization = headers.get("authorization", "")
        if authorization.startswith("PVEAPIToken="):
            name, _, secret = authorization.removeprefix("PVEAPIToken=").rpartition("=")
            if name not in self.cluster.users or self.cluster.users[name].secret != secret:
                raise Refused(401, "no such token" if name not in self.cluster.users else "invalid token value!")
            return name
        cookies = dict(part.strip().partition("=")[::2] for part in headers.get("cookie", "").split(";"))
        found = self.tickets.get(unquote(cookies.get("PVEAuthCookie", "")))
        if found is None:
            raise Refused(401, "No ticket")
        if method != "GET" and headers.get("csrfpreventiontoken") != found[1]:
            raise Refused(401, "Permission denied - invalid csrf token")
        return found[0]

    def answer(self, method: str, path: str, given: dict[str, str], headers: Mapping[str, str]) -> Any:
        self.asked.append((method, path, given))
        found = schema.route(method, path)
        if found is None:
            raise Refused(501, f"Method '{method} {path}' not implemented")
        known, declared, gaps = found
        given = {**given, **{name: unquote(value) for name, value in gaps.items()}}
        if errors := schema.wrong_request(declared, known, given):
            raise Refused(400, json.dumps(errors))
        if known == "/access/ticket":
            return self.login(given)
        user = self.user(method, headers)
        self._permit(user, declared["perm"], given)
        answer = self.cluster.answer(user, method, known, {name: given[name] for name in gaps}, given)
        if (why := schema.wrong_answer(declared, known, answer)) is not None:
            self.wrong.append(f"{method} {path}: {why}")
        return answer

    def _permit(self, user: str, declared: Mapping[str, Any], given: Mapping[str, str]) -> None:
        check = declared.get("check")
        if check is None:
            return
        kind, path, names, *options = check
        assert kind == "perm", "the paths that we ask have no others"
        path = path.format(**given)
        whole = self.cluster.users[user]
        # VM.Config.Options is one of several, any of which will do; without «any» all are wanted.
        granted = [whole.may(path, [name]) for name in names]
        if not (any(granted) if "any" in options else all(granted)):
            raise Refused(403, f"Permission check failed ({path}, {'|'.join(names)})")


class _Handler(BaseHTTPRequestHandler):
    pve: PveServer
    protocol_version = "HTTP/1.1"
    timeout = 30
    # Head and body go out apart: the second would wait 40 ms for the first to be acknowledged.
    disable_nagle_algorithm = True

    def log_message(self, *_: object) -> None:
        pass

    def _serve(self) -> None:
        url = urlsplit(self.path)
        length = int(self.headers.get("Content-Length", 0))
        body = self.rfile.read(length).decode()
        given = dict(parse_qsl(url.query if self.command == "GET" else body, keep_blank_values=True))
        headers = {name.lower(): value for name, value in self.headers.items()}
        try:
            path = url.path.removeprefix("/api2/json")
            self._say(200, {"data": self.pve.answer(self.command, path, given, headers)})
        except Refused as refused:
            if refused.status == 400:
                self._say(400, {"data": None, "errors": json.loads(refused.message)}, "Parameter verification failed.")
            else:
                # Older versions say the cause in the status line alone.
                self._say(refused.status, {"data": None}, refused.message)

    def _say(self, status: int, body: dict[str, Any], reason: str | None = None) -> None:
        content = json.dumps(body).encode()
        self.send_response(status, reason)
        self.send_header("Content-Type", "application/json;charset=UTF-8")
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    do_GET = do_POST = do_PUT = do_DELETE = _serve  # noqa: N815 - http.server's names
