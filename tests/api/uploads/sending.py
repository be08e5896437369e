"""Helpers of the tests of uploads: bodies of forms, callers, and what is left in the folder."""

import hashlib
import socket
import time
from typing import Any

import httpx

from synvirt.migrations.uploads import Incoming
from synvirt.model.plan import MigrationPlan, SourceRef
from tests.fakes.service import PLAN, PREFIX, Service

KIB, MIB = 1 << 10, 1 << 20
FORM = {"Content-Type": "multipart/form-data; boundary=b"}
FILE = 'form-data; name="file"; filename="web.ova"'
SHA256 = 'form-data; name="sha256"'


def sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def left(service: Service) -> list[str]:
    """Whatever lies in the uploads' folder, hidden or not."""
    return sorted(path.name for path in service.settings.uploads_dir.iterdir())


def assert_nothing(service: Service) -> None:
    """Now, or as soon as the service has noticed that its caller is gone."""
    until = time.monotonic() + 60
    while left(service) and time.monotonic() < until:
        time.sleep(0.02)
    assert left(service) == []
    assert service.uploads.page(limit=10) == ([], None)


def send(client: httpx.Client, data: bytes, name: str = "web.ova", **fields: str) -> httpx.Response:
    return client.post("/uploads", files={"file": (name, data)}, data=fields)


def sent(client: httpx.Client, data: bytes, name: str = "web.ova", **fields: str) -> dict[str, Any]:
    response = send(client, data, name, **fields)
    assert response.status_code == 201, response.text
    answer: dict[str, Any] = response.json()
    assert response.headers["Location"] == f"{PREFIX}/uploads/{answer['id']}"
    return answer


def part(disposition: str, data: bytes, *headers: str) -> bytes:
    lines = "".join(f"{line}\r\n" for line in (f"Content-Disposition: {disposition}", *headers))
    return b"--b\r\n" + lines.encode("latin-1") + b"\r\n" + data + b"\r\n"


def plan(ref: SourceRef) -> MigrationPlan:
    return PLAN.model_copy(update={"source_ref": ref})


END = b"--b--\r\n"
GOOD = part(FILE, b"data")


def connected(service: Service, headers: str) -> socket.socket:
    sock = socket.socket(socket.AF_UNIX)
    sock.settimeout(60)
    sock.connect(str(service.settings.socket_path))
    sock.sendall(f"POST {PREFIX}/uploads HTTP/1.1\r\nHost: x\r\nContent-Type: {FORM['Content-Type']}\r\n{headers}\r\n".encode())
    return sock


def answered(sock: socket.socket) -> bytes:
    """The whole answer, though the connection stays open behind it."""
    answer = b""
    while not answer.endswith(b"}"):
        answer += sock.recv(10_000)
    return answer


def incoming(service: Service) -> Incoming:
    made = service.uploads.begin("web.ova")
    made.write(memoryview(b"data"))
    return made
