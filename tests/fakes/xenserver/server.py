"""The pool's hosts on the network: HTTPS with JSON-RPC, XML-RPC and /export_raw_vdi each, and a real nbdkit with TLS."""

import json
import ssl
import subprocess
import threading
import time
import xmlrpc.client
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from ipaddress import ip_address
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec

from synvirt.live import SourceAccess
from synvirt.programs import end_group
from synvirt.transport import tls
from tests.fakes.xenserver import vhd
from tests.fakes.xenserver.model import Failure
from tests.fakes.xenserver.pool import PASSWORD, USER, Pool
from tests.needs import need
from tests.running.ports import free_port

ADDRESSES = ("127.0.0.1", "127.0.0.2")
SUBJECT = "xen-1.example"
READY_TIMEOUT_S = 60
_PIECE_BYTES = 1 << 20


def certificate(folder: Path, name: str, *addresses: str) -> str:
    """A key and a certificate that signs itself, in the names that nbdkit wants; the certificate as PEM."""
    folder.mkdir(parents=True)
    key = ec.generate_private_key(ec.SECP256R1())
    subject = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, name)])
    names: list[x509.GeneralName] = [x509.DNSName(name), *(x509.IPAddress(ip_address(one)) for one in addresses)]
    made = (
        x509.CertificateBuilder().subject_name(subject).issuer_name(subject).public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(datetime.now(UTC) - timedelta(days=1)).not_valid_after(datetime.now(UTC) + timedelta(days=9))
        .add_extension(x509.SubjectAlternativeName(names), critical=False).sign(key, hashes.SHA256())
    )  # fmt: skip
    pem = made.public_bytes(serialization.Encoding.PEM).decode()
    secret = key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    (folder / "server-key.pem").write_bytes(secret)
    for one in ("server-cert.pem", "ca-cert.pem"):
        (folder / one).write_text(pem)
    return pem


class _Server(ThreadingHTTPServer):
    daemon_threads = True

    def __init__(self, address: str, port: int, pool: Pool, keys: Path) -> None:
        self.pool, self.address = pool, address
        self.context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        self.context.load_cert_chain(keys / "server-cert.pem", keys / "server-key.pem")
        super().__init__((address, port), _Requests)

    def finish_request(self, request: Any, client_address: Any) -> None:
        with suppress(OSError, ssl.SSLError), self.context.wrap_socket(request, server_side=True) as secured:
            super().finish_request(secured, client_address)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that goes in the middle is no error of the server's."""


def _as_json(value: Any) -> Any:
    if isinstance(value, datetime):
        return value.strftime("%Y%m%dT%H:%M:%SZ")
    raise TypeError(type(value))


def _as_xml(value: Any) -> Any:
    """XenAPI's integers are texts in XML-RPC."""
    if isinstance(value, bool) or not isinstance(value, int | list | dict | datetime):
        return value
    if isinstance(value, int):
        return str(value)
    if isinstance(value, datetime):
        return xmlrpc.client.DateTime(value)
    return [_as_xml(one) for one in value] if isinstance(value, list) else {key: _as_xml(one) for key, one in value.items()}


class _Requests(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    # Head and body in one packet: else the other end waits before it says that it has the first.
    wbufsize = 1 << 16
    server: _Server

    def log_message(self, *_: Any) -> None:
        pass

    def do_POST(self) -> None:
        sent = self.rfile.read(int(self.headers.get("content-length") or 0))
        if self.path == "/jsonrpc":
            order = json.loads(sent)
            answer: dict[str, Any] = {"jsonrpc": "2.0", "id": order["id"]}
            try:
                answer["result"] = self.server.pool.dispatch(self.server.address, order["method"], order["params"])
            except Failure as failure:
                code, *parameters = failure.description
                answer["error"] = {"code": 1, "message": code, "data": parameters}
            body, kind = json.dumps(answer, default=_as_json).encode(), "application/json"
        else:
            given, method = xmlrpc.client.loads(sent)
            try:
                found = self.server.pool.dispatch(self.server.address, str(method), list(given))
                reported: dict[str, Any] = {"Status": "Success", "Value": _as_xml(found)}
            except Failure as failure:
                reported = {"Status": "Failure", "ErrorDescription": failure.description}
            body, kind = xmlrpc.client.dumps((reported,), methodresponse=True).encode(), "text/xml"
        self._answer(200, body, kind)

    def _answer(self, status: int, body: bytes, kind: str = "text/plain", **headers: str) -> None:
        self.send_response(status)
        for name, value in {"content-type": kind, "content-length": str(len(body)), **headers}.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body)

    def do_GET(self) -> None:
        url = urlsplit(self.path)
        query = {name: values[0] for name, values in parse_qs(url.query).items()}
        pool = self.server.pool
        if url.path != "/export_raw_vdi" or query.get("vdi") not in pool.tables["VDI"]:
            self._answer(404, b"")
        elif query.get("session_id") not in pool.sessions:
            self._answer(401, b"")
        elif not pool.sees(self.server.address, query["vdi"]):
            self._answer(302, b"", location="https://elsewhere.example/export_raw_vdi")
        else:
            self._export(query, pool.export_faults.pop(0) if pool.export_faults else "")

    def _export(self, query: dict[str, str], fault: str) -> None:
        """As xapi does: the head first, then the disk is opened."""
        pool = self.server.pool
        self.close_connection = True
        if fault == "500":
            self._answer(500, b"")
            return
        self.wfile.write(b"HTTP/1.1 200 OK\r\nConnection: close\r\nContent-Type: application/octet-stream\r\n\r\n")
        if fault == "body500":
            self.wfile.write(b"HTTP/1.1 500 Internal Error\r\ncontent-length: 0\r\n\r\n")
            return
        vbds = [pool.exported(self.server.address, query["vdi"])]
        if "base" in query:
            vbds.append(pool.exported(self.server.address, query["base"]))
        try:
            base = vbds[1][1] if "base" in query else None
            pieces = vhd.stream(vbds[0][1], base) if query["format"] == "vhd" else _raw(vbds[0][1])
            for number, piece in enumerate(pieces):
                if fault == "cut" and number == 2:
                    self.wfile.write(piece[: len(piece) // 2])
                    return
                self.wfile.write(piece)
        finally:
            for vbd, _ in vbds if fault != "leftover" else ():
                with suppress(Failure), pool.lock:
                    pool.vbd_destroy(vbd)


def _raw(path: Path) -> Iterator[bytes]:
    with path.open("rb") as disk:
        while piece := disk.read(_PIECE_BYTES):
            yield piece


@dataclass(frozen=True)
class XenServer:
    """A pool that runs. `url` and `fingerprint` are its coordinator's."""

    pool: Pool
    port: int
    folder: Path
    nbd: "Nbd"

    @property
    def url(self) -> str:
        return f"https://{ADDRESSES[0]}:{self.port}"

    def fingerprint(self, address: str = ADDRESSES[0]) -> str:
        return tls.fingerprint(ssl.PEM_cert_to_DER_cert(self.pool.certificates[address]))

    def access(
        self, *, password: str = PASSWORD, user: str = USER, address: str = ADDRESSES[0], **options: Any
    ) -> SourceAccess:
        chosen = {"fingerprint_sha256": self.fingerprint(address), **options}
        url = f"https://{address}:{self.port}"
        return SourceAccess(url, {"user": user, "password": password}, chosen, self.folder / "session")


class Nbd:
    """A real NBD server with TLS, on a port of its own: it can be stopped, and started again."""

    def __init__(self, folder: Path, exports: Path, keys: Path) -> None:
        self._folder, self._exports, self._keys = folder, exports, keys
        self.port = free_port()
        self._child: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        ready = self._folder / "nbdkit.pid"
        ready.unlink(missing_ok=True)
        argv = [
            need("nbdkit", "nbdkit"), "-f", "-r", "--tls=require", f"--tls-certificates={self._keys}", f"--pidfile={ready}",
            "-i", ADDRESSES[0], "-p", str(self.port), "file", f"dir={self._exports}",
        ]  # fmt: skip
        self._child = subprocess.Popen(argv, start_new_session=True, stderr=subprocess.DEVNULL)
        deadline = time.monotonic() + READY_TIMEOUT_S
        while not ready.exists():
            assert self._child.poll() is None
            assert time.monotonic() < deadline
            time.sleep(0.01)

    def stop(self) -> None:
        if self._child is not None:
            end_group(self._child)
            self._child.wait()
            self._child = None


@contextmanager
def xenserver(folder: Path, *, nbd: bool = True) -> Iterator[XenServer]:
    """A pool of two hosts; `nbd`: one of its networks has that purpose."""
    folder.mkdir(parents=True, exist_ok=True)
    pool, port = Pool(folder, ADDRESSES), free_port()
    with ExitStack() as stack:
        for number, address in enumerate(ADDRESSES, 1):
            keys = folder / f"keys-{number}"
            pool.certificates[address] = certificate(keys, f"xen-{number}.example", address)
            server = _Server(address, port, pool, keys)
            thread = threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True)
            thread.start()
            stack.callback(server.server_close)
            stack.callback(server.shutdown)
        served = Nbd(folder, pool.exports, folder / "keys-1")
        stack.callback(served.stop)
        if nbd:
            served.start()
            pem = pool.certificates[ADDRESSES[0]]
            pool.nbd_servers = [
                {"exportname": "", "address": ADDRESSES[0], "port": served.port, "cert": pem, "subject": SUBJECT}
            ]
        yield XenServer(pool, port, folder, served)
