"""Real servers that files are read from: nginx, Samba, moto's S3. And what stands between them and us: faults.

Each is a context manager: a server of the test's own, on a port that was free, gone afterwards with all it began.
"""

import base64
import contextlib
import hashlib
import os
import select
import shutil
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from ipaddress import ip_address
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from synvirt.remote import Remote
from tests.needs import need, need_root
from tests.running.ports import free_port

LOOPBACK = ("127.0.0.0/8", "::1")
USER, PASSWORD = "importer", "p@ss:wörd"


def wait_for_port(port: int, process: "subprocess.Popen[bytes]", log: Path | None = None) -> None:
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=1):
            return
        if process.poll() is not None:
            break
        time.sleep(0.05)
    raise AssertionError(f"no server at port {port}: {log.read_text() if log and log.exists() else ''}")


@contextlib.contextmanager
def running(argv: list[str], ports: tuple[int, ...], log: Path, env: dict[str, str] | None = None) -> Iterator[None]:
    with log.open("ab") as output:
        process = subprocess.Popen(
            argv,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            start_new_session=True,
            env={**os.environ, **(env or {})},
        )
    try:
        for port in ports:
            wait_for_port(port, process, log)
        yield
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


# ── certificates ─────────────────────────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True)
class Certificates:
    """An authority of the test's own, and a certificate of it for 127.0.0.1 and localhost."""

    authority: Path
    certificate: Path
    key: Path
    fingerprint: str


def certificates(folder: Path, ahead: timedelta = timedelta()) -> Certificates:
    """Made by a clock that is so much ahead."""
    now = datetime.now(UTC) + ahead
    ca_key, key = ec.generate_private_key(ec.SECP256R1()), ec.generate_private_key(ec.SECP256R1())
    ca_name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "authority of a test")])

    def built(name: x509.Name, public: ec.EllipticCurvePublicKey, *, ca: bool) -> x509.Certificate:
        builder = x509.CertificateBuilder().subject_name(name).issuer_name(ca_name).public_key(public)
        builder = builder.serial_number(x509.random_serial_number()).not_valid_before(now - timedelta(hours=1))
        builder = builder.not_valid_after(now + timedelta(days=2))
        builder = builder.add_extension(x509.BasicConstraints(ca=ca, path_length=None), critical=True)
        if not ca:
            names = [x509.DNSName("localhost"), x509.IPAddress(ip_address("127.0.0.1"))]
            builder = builder.add_extension(x509.SubjectAlternativeName(names), critical=False)
        return builder.sign(ca_key, hashes.SHA256())

    authority = built(ca_name, ca_key.public_key(), ca=True)
    leaf = built(x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "server")]), key.public_key(), ca=False)
    pem = serialization.Encoding.PEM
    made = Certificates(
        folder / "ca.pem", folder / "server.pem", folder / "server.key", leaf.fingerprint(hashes.SHA256()).hex().upper()
    )
    made.authority.write_bytes(authority.public_bytes(pem))
    made.certificate.write_bytes(leaf.public_bytes(pem))
    made.key.write_bytes(key.private_bytes(pem, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()))
    return made


# ── nginx ────────────────────────────────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True)
class Nginx:
    """/open/ is for all, /private/ for USER; /moved/ redirects to /private/; /whole/ ignores ranges.
    `elsewhere` serves the same under another origin, to which /away/ redirects."""

    folder: Path
    port: int
    tls_port: int
    elsewhere: int
    certificates: Certificates
    access_log: Path

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}/open/"

    def requests(self) -> list[str]:
        """Method, path, status, bytes of the body, range asked for, authorization; of every request so far."""
        return self.access_log.read_text().splitlines() if self.access_log.exists() else []


_NGINX = """
daemon off; master_process off; worker_processes 1; pid {folder}/nginx.pid; error_log {folder}/error.log;
events {{ worker_connections 256; }}
http {{
  log_format asked '$request_method $uri $status $body_bytes_sent "$http_range" "$http_authorization" $server_port';
  access_log {folder}/access.log asked;
  sendfile on; default_type application/octet-stream; client_body_temp_path {folder}/t1; proxy_temp_path {folder}/t2;
  fastcgi_temp_path {folder}/t3; uwsgi_temp_path {folder}/t4; scgi_temp_path {folder}/t5;
  ssl_certificate {certificate}; ssl_certificate_key {key};
  server {{
    listen 127.0.0.1:{port}; listen 127.0.0.1:{tls_port} ssl;
    location /open/ {{ alias {files}/; }}
    location /private/ {{ alias {files}/; auth_basic x; auth_basic_user_file {folder}/users; }}
    location /moved/ {{ rewrite ^/moved/(.*)$ /private/$1 redirect; }}
    location /away/ {{ rewrite ^/away/(.*)$ http://127.0.0.1:{elsewhere}/open/$1 redirect; }}
    location /downgrade/ {{ rewrite ^/downgrade/(.*)$ http://127.0.0.1:{port}/open/$1 redirect; }}
    location /round/ {{ rewrite ^/round/(.*)$ /round/$1 redirect; }}
    location /metadata/ {{ return 302 http://169.254.169.254/latest/meta-data/; }}
    location /share/ {{ return 302 smb://127.0.0.1/share/x; }}
    location /whole/ {{ alias {files}/; max_ranges 0; }}
  }}
  server {{ listen 127.0.0.1:{elsewhere}; location /open/ {{ alias {files}/; }} }}
}}
"""


@contextlib.contextmanager
def nginx(folder: Path) -> Iterator[Nginx]:
    program = need("nginx", "nginx-light")
    folder.mkdir(parents=True, exist_ok=True)
    files = folder / "files"
    files.mkdir()
    made = certificates(folder)
    digest = base64.b64encode(hashlib.sha1(PASSWORD.encode()).digest()).decode()
    (folder / "users").write_text(f"{USER}:{{SHA}}{digest}\n")
    server = Nginx(files, free_port(), free_port(), free_port(), made, folder / "access.log")
    text = _NGINX.format(
        folder=folder,
        files=files,
        port=server.port,
        tls_port=server.tls_port,
        elsewhere=server.elsewhere,
        certificate=made.certificate,
        key=made.key,
    )
    if os.geteuid() == 0:
        text = f"user root;\n{text}"
    (folder / "nginx.conf").write_text(text)
    argv = [program, "-p", str(folder), "-e", str(folder / "error.log"), "-c", str(folder / "nginx.conf")]
    with running(argv, (server.port, server.tls_port, server.elsewhere), folder / "output.log"):
        yield server


# ── Samba ────────────────────────────────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True)
class Samba:
    folder: Path
    port: int

    @property
    def url(self) -> str:
        return f"smb://127.0.0.1:{self.port}/disks/"


_SAMBA = """
[global]
 interfaces = lo
 bind interfaces only = yes
 smb ports = {port}
 disable netbios = yes
 server min protocol = SMB2
 private dir = {folder}/private
 state directory = {folder}/state
 cache directory = {folder}/cache
 lock directory = {folder}/lock
 pid directory = {folder}/pid
 ncalrpc dir = {folder}/ncalrpc
 log file = {folder}/log
 passdb backend = tdbsam:{folder}/private/passdb.tdb
 load printers = no
 disable spoolss = yes
{more}[disks]
 path = {files}
 read only = no
"""


@contextlib.contextmanager
def samba(folder: Path, *, more: str = "") -> Iterator[Samba]:
    """Its user is root, whose password there is PASSWORD: any other would have to be an account of this machine. `more`: lines
    of its configuration."""
    program, passwords = need("smbd", "samba"), need("smbpasswd", "samba-common-bin")
    need_root("Samba's users are the machine's accounts")
    # Samba keeps Unix sockets in its folders: their paths must be short.
    home = Path(f"/tmp/smb-{os.getpid()}-{free_port()}")
    files, server = folder / "share", Samba(folder / "share", free_port())
    for path in (files, *(home / name for name in ("private", "state", "cache", "lock", "pid", "ncalrpc"))):
        path.mkdir(parents=True)
    configuration = home / "smb.conf"
    configuration.write_text(_SAMBA.format(folder=home, files=files, port=server.port, more=more))
    try:
        subprocess.run(
            [passwords, "-c", str(configuration), "-s", "-a", "root"],
            input=f"{PASSWORD}\n{PASSWORD}\n".encode(),
            check=True,
            capture_output=True,
            timeout=60,
        )
        argv = [program, "--foreground", "--no-process-group", f"--configfile={configuration}", "--debug-stdout"]
        with running(argv, (server.port,), home / "output.log"):
            yield server
    finally:
        shutil.rmtree(home, ignore_errors=True)


# ── S3 ───────────────────────────────────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True)
class S3:
    """moto's server, checking signatures as AWS does. `put` makes an object in `bucket`."""

    port: int
    access_key_id: str
    secret_access_key: str
    put: Callable[[str, bytes], None]
    presigned: Callable[[str], str]
    bucket: str = "exports"

    @property
    def endpoint(self) -> str:
        return f"http://127.0.0.1:{self.port}"


@contextlib.contextmanager
def s3(folder: Path, *, checked: bool = True) -> Iterator[S3]:
    """`checked`: every request must be signed by a user that may do it; moto cannot tell of a signed URL."""
    import boto3
    from botocore.config import Config

    folder.mkdir(parents=True, exist_ok=True)
    port = free_port()
    # Three requests make the user.
    argv = [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)]
    with running(argv, (port,), folder / "moto.log", {"INITIAL_NO_AUTH_ACTION_COUNT": "3"} if checked else {}):
        options = {"endpoint_url": f"http://127.0.0.1:{port}", "region_name": "us-east-1"}
        iam = boto3.client("iam", aws_access_key_id="first", aws_secret_access_key="first", **options)
        iam.create_user(UserName="importer")
        policy = '{"Version": "2012-10-17", "Statement": [{"Effect": "Allow", "Action": "s3:*", "Resource": "*"}]}'
        iam.put_user_policy(UserName="importer", PolicyName="all", PolicyDocument=policy)
        key = iam.create_access_key(UserName="importer")["AccessKey"]
        access, secret = key["AccessKeyId"], key["SecretAccessKey"]
        config = Config(signature_version="s3v4", s3={"addressing_style": "path"})
        client = boto3.client("s3", aws_access_key_id=access, aws_secret_access_key=secret, config=config, **options)
        client.create_bucket(Bucket=S3.bucket)

        def put(name: str, content: bytes) -> None:
            client.put_object(Bucket=S3.bucket, Key=name, Body=content)

        def presigned(name: str) -> str:
            return str(client.generate_presigned_url("get_object", Params={"Bucket": S3.bucket, "Key": name}))

        yield S3(port, access, secret, put, presigned)
        client.close()
        iam.close()


# ── what stands in between ───────────────────────────────────────────────────────────────────────────────────────────


@dataclass
class Wire:
    """A TCP proxy that counts what comes back, and cuts connections: the n-th after `cuts[n]` bytes from the server."""

    port: int
    cuts: dict[int, int] = field(default_factory=dict)
    connections: int = 0
    bytes_back: int = 0
    # Called after each piece from the server, with all that came so far.
    on_bytes: Callable[[int], None] = lambda _bytes_back: None
    refuse: bool = False
    # Requests wait for it.
    open: threading.Event = field(default_factory=threading.Event)

    def carry(self, client: socket.socket, upstream: int, ended: threading.Event) -> None:
        self.connections += 1
        left = self.cuts.get(self.connections)
        with client, socket.create_connection(("127.0.0.1", upstream)) as server:
            while not ended.is_set():
                if self.refuse:
                    return
                for ready in select.select([client, server], [], [], 0.2)[0]:
                    try:
                        content = ready.recv(1 << 16)
                    except OSError:
                        return
                    if not content:
                        return
                    if ready is client:
                        while not self.open.wait(0.1) and not ended.is_set():
                            pass
                        server.sendall(content)
                        continue
                    content = content if left is None else content[:left]
                    left = None if left is None else left - len(content)
                    self.bytes_back += len(content)
                    self.on_bytes(self.bytes_back)
                    with contextlib.suppress(OSError):
                        client.sendall(content)
                    if left == 0:
                        # Reset, not an orderly end: what a router that lost its table does.
                        client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                        return


@contextlib.contextmanager
def wire(upstream: int) -> Iterator[Wire]:
    listening = socket.create_server(("127.0.0.1", 0))
    made = Wire(listening.getsockname()[1])
    made.open.set()
    ended = threading.Event()
    threads: list[threading.Thread] = []

    def accept() -> None:
        while not ended.is_set():
            if not select.select([listening], [], [], 0.1)[0]:
                continue
            client, _ = listening.accept()
            if made.refuse:
                client.close()
                continue
            threads.append(threading.Thread(target=made.carry, args=(client, upstream, ended), daemon=True))
            threads[-1].start()

    accepting = threading.Thread(target=accept, daemon=True)
    accepting.start()
    try:
        yield made
    finally:
        ended.set()
        accepting.join()
        for thread in threads:
            thread.join()
        listening.close()


@dataclass
class RangeRequest:
    """A request as a scripted server sees it."""

    number: int
    start: int
    end: int
    headers: dict[str, str]
    path: str = "/"


# Status, headers, body of the answer to a request.
Script = Callable[[RangeRequest], tuple[int, dict[str, str], bytes]]


@contextlib.contextmanager
def scripted(script: Script) -> Iterator[str]:
    """The URL of a file that a server of bad habits serves, one connection a request."""
    counted = iter(range(1, 1 << 20))

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            first_and_last = self.headers.get("Range", "bytes=0-0").removeprefix("bytes=").split("-")
            headers = {key.lower(): value for key, value in self.headers.items()}
            request = RangeRequest(next(counted), int(first_and_last[0]), int(first_and_last[1]), headers, self.path)
            status, answered, body = script(request)
            self.send_response(status)
            for key, value in answered.items():
                self.send_header(key, value)
            self.end_headers()
            with contextlib.suppress(OSError):
                self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}/"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def honest(content: bytes, request: RangeRequest, etag: str = '"v1"') -> tuple[int, dict[str, str], bytes]:
    """What a good server answers."""
    end = min(request.end + 1, len(content))
    headers = {
        "Content-Range": f"bytes {request.start}-{end - 1}/{len(content)}",
        "Content-Length": str(end - request.start),
        "ETag": etag,
    }
    return 206, headers, content[request.start : end]


def remote(url: str, **fields: object) -> Remote:
    """A Remote that may speak to this machine, as no service does by default."""
    return Remote(url=url, allowed_hosts=LOOPBACK, **fields)  # type: ignore[arg-type]
