"""A certificate of a test's own, and a server that shows it."""

import hashlib
import ssl
import subprocess
from dataclasses import dataclass
from http.server import ThreadingHTTPServer
from pathlib import Path


@dataclass(frozen=True, slots=True)
class Certificate:
    key: Path
    certificate: Path

    @property
    def fingerprint(self) -> str:
        """SHA-256, as sources pin it."""
        der = ssl.PEM_cert_to_DER_cert(self.certificate.read_text())
        return hashlib.sha256(der).digest().hex(":").upper()


def self_signed(folder: Path) -> Certificate:
    made = Certificate(folder / "server-key.pem", folder / "server.pem")
    argv = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes", "-days", "2"]
    argv += ["-keyout", str(made.key), "-out", str(made.certificate), "-subj", "/CN=lab"]
    subprocess.run([*argv, "-addext", "subjectAltName=IP:127.0.0.1"], check=True, capture_output=True)
    return made


def tls_server(server: ThreadingHTTPServer, certificate: Certificate) -> ThreadingHTTPServer:
    """Each connection is shaken hands with in its own thread: one that says nothing holds up nobody."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate.certificate, certificate.key)
    server.daemon_threads = True
    server.socket = context.wrap_socket(server.socket, server_side=True, do_handshake_on_connect=False)
    return server
