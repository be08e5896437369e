"""Uploads on a real server: whole or not there, whatever the caller, the disk or the service does."""

import contextlib
import hashlib
import os
import re
import socket
import subprocess
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from itertools import pairwise
from pathlib import Path
from typing import Any
from uuid import UUID, uuid4

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st
from sqlalchemy import text

from synvirt.api import multipart
from synvirt.errors import BadRequest, Conflict, PersistFailed, UploadNotFound
from synvirt.migrations import uploads
from synvirt.migrations.uploads import Incoming, Uploads, safe_name, swept
from synvirt.model.files import Upload
from synvirt.model.kinds import State
from synvirt.model.plan import HostPathRef, MigrationPlan, SourceRef, UploadRef
from synvirt.model.values import now
from tests.api.test_problems import assert_problem
from tests.counted import bytes_read
from tests.fakes.service import PLAN, PREFIX, Service
from tests.needs import need_root
from tests.offline import appliances

KIB, MIB = 1 << 10, 1 << 20
FORM = {"Content-Type": "multipart/form-data; boundary=b"}
FILE = 'form-data; name="file"; filename="web.ova"'
SHA256 = 'form-data; name="sha256"'


class Crash(BaseException):
    """The service dies here: nothing of ours may catch it."""


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


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    """For tests that leave nothing behind: one service for all of them."""
    made = Service(tmp_path_factory.mktemp("service"))
    with made.served():
        yield made
    made.close()


@pytest.fixture
def sender(shared: Service) -> Iterator[httpx.Client]:
    with shared.local() as client:
        yield client
    for upload in shared.uploads.page(limit=100)[0]:
        shared.uploads.remove(upload.id)
    assert_nothing(shared)


# ── what an upload is ────────────────────────────────────────────────────────────────────────────────────────────────


def test_an_upload_is_whole_listed_and_removed(service: Service, client: httpx.Client) -> None:
    data = os.urandom(3 * MIB + 17)
    upload = sent(client, data, "münchen web.ova", sha256=sha256(data).upper())
    assert set(upload) == {"id", "filename", "size_bytes", "sha256", "path", "created_at", "expires_at"}
    assert (upload["filename"], upload["size_bytes"], upload["sha256"]) == ("münchen web.ova", len(data), sha256(data))
    path = Path(upload["path"])
    assert path == service.settings.uploads_dir / upload["id"] / "münchen web.ova"
    assert path.read_bytes() == data
    assert client.get("/uploads").json() == {"items": [upload], "next_cursor": None}
    assert client.get(f"/uploads/{upload['id']}").json() == upload
    assert client.delete(f"/uploads/{upload['id']}").status_code == 204
    for answer in (client.get(f"/uploads/{upload['id']}"), client.delete(f"/uploads/{upload['id']}")):
        assert upload["id"] in assert_problem(answer, 404, "E_MIG_UPLOAD_NOT_FOUND")["detail"]
    assert_nothing(service)


def test_an_upload_is_for_nobody_else_of_the_host(client: httpx.Client) -> None:
    path = Path(sent(client, b"secret")["path"])
    assert path.parent.stat().st_mode & 0o007 == 0


def test_pages(client: httpx.Client) -> None:
    ids = [sent(client, b"%d" % number)["id"] for number in range(5)]
    seen, cursor = [], None
    while True:
        page = client.get("/uploads", params={"limit": 2} | ({"cursor": cursor} if cursor else {})).json()
        seen += [upload["id"] for upload in page["items"]]
        cursor = page["next_cursor"]
        if cursor is None:
            break
    assert seen == ids[::-1]


@pytest.mark.parametrize("query", ["limit=0", "limit=1001", "cursor=x", "cursor=0", "cursor=9999999999999999999"])
def test_a_page_that_cannot_be(sender: httpx.Client, query: str) -> None:
    assert_problem(sender.get(f"/uploads?{query}"), 400, "E_MIG_BAD_REQUEST")


def test_what_is_in_an_upload(client: httpx.Client, tmp_path: Path) -> None:
    archive = appliances.archive(tmp_path / "web.ova", appliances.appliance("qemu_user"))
    upload = sent(client, archive.read_bytes())
    answer = client.post(f"/uploads/{upload['id']}/inspect").json()
    assert answer["offline_kind"] == "ova_archive"
    assert answer["manifest"]["disks"]
    assert client.post(f"/uploads/{upload['id']}/inspect", json={}).json() == answer
    unknown = client.post(f"/uploads/{upload['id']}/inspect", json={"vm": "nobody"})
    assert_problem(unknown, 404, "E_MIG_VM_NOT_FOUND")
    assert_problem(client.post(f"/uploads/{upload['id']}/inspect?vm=web"), 400, "E_MIG_BAD_REQUEST")
    assert_problem(client.post(f"/uploads/{uuid4()}/inspect"), 404, "E_MIG_UPLOAD_NOT_FOUND")
    notes = sent(client, b"hello", "notes.txt")
    body = assert_problem(client.post(f"/uploads/{notes['id']}/inspect"), 400, "E_MIG_UNSUPPORTED_FORMAT")
    assert "notes.txt" in body["detail"]
    broken = sent(client, archive.read_bytes()[:3000])
    assert_problem(client.post(f"/uploads/{broken['id']}/inspect"), 400, "E_MIG_MALFORMED_ARCHIVE")


def test_an_upload_is_found_where_its_folder_was_moved(tmp_path: Path) -> None:
    (tmp_path / "old").mkdir()
    before = Service(tmp_path / "old")
    with before.served(), before.local() as client:
        upload = sent(client, b"data")
    before.close()
    (tmp_path / "old").rename(tmp_path / "new")
    after = Service(tmp_path / "new")
    path = after.uploads.get(UUID(upload["id"])).path
    assert path.startswith(str(tmp_path / "new"))
    assert Path(path).read_bytes() == b"data"
    after.close()


# ── its name ─────────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("raw", "name"),
    [
        ('filename="../../etc/passwd"', "passwd"),
        ('filename="C:\\\\Users\\\\me\\\\web.ova"', "web.ova"),
        ('filename="/"', "upload"),
        ('filename=".."', "upload"),
        ('filename=""', "upload"),
        ("", "upload"),
        ('filename=".ova"', "ova"),
        ('filename="a%22b%0D%0A.ova"', 'a"b.ova'),
        ('filename="a\\"b.ova"', 'a"b.ova'),
        ('filename="we\u202eb\x1b[31m.ova"', "web[31m.ova"),
        ('filename="' + "x" * 300 + '.ova"', "x" * 251 + ".ova"),
        ('filename="' + "ü" * 200 + '.qcow2"', "ü" * 124 + ".qcow2"),
        ('filename="web.' + "y" * 300 + '"', "web." + "y" * 251),
        ("filename*=UTF-8''evil.sh; filename=good.ova", "good.ova"),
        ('filename="\udcff.ova"', "\ufffd.ova"),
    ],
)
def test_a_name_is_never_a_path(sender: httpx.Client, raw: str, name: str) -> None:
    body = (
        b"--b\r\nContent-Disposition: form-data; name=file; " + raw.encode("utf-8", "surrogateescape") + b"\r\n\r\nx\r\n--b--"
    )
    answer = sender.post("/uploads", content=body, headers=FORM)
    assert answer.status_code == 201, answer.text
    assert answer.json()["filename"] == name
    assert Path(answer.json()["path"]).read_bytes() == b"x"


@given(st.text() | st.text(alphabet="/\\.\0 \n😀ü\u202ea", max_size=400))
def test_any_name_becomes_one_a_file_can_have(name: str) -> None:
    safe = safe_name(name.encode("utf-8", "replace").decode())
    assert 0 < len(safe.encode()) <= 255
    assert safe.isprintable()
    assert "/" not in safe
    assert not safe.startswith(".")
    assert safe_name(safe) == safe


# ── the body ─────────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("order", ["before", "after", "without"])
@pytest.mark.parametrize("chunk", [1, 7, 64 * KIB])
def test_the_digest_may_come_before_or_after(sender: httpx.Client, order: str, chunk: int) -> None:
    data = (b"\r\n--b" * 300 + b"\r\n--c--\r\n\r\n-")[: 4 * KIB]  # what nearly ends it
    data = data.replace(b"--b", b"--a", 1).replace(b"\r\n--b", b"\r\n-\r\n--\r\r\n--")
    digest = part(SHA256, sha256(data).encode() + b" \n")
    parts = {"before": [digest, part(FILE, data)], "after": [part(FILE, data), digest], "without": [part(FILE, data)]}[order]
    body = b"preamble\r\n"[:0] + b"".join(parts) + b"--b--\r\n"

    def pieces() -> Iterator[bytes]:
        for start in range(0, len(body), chunk):
            yield body[start : start + chunk]

    answer = sender.post("/uploads", content=pieces(), headers=FORM)
    assert answer.status_code == 201, answer.text
    assert answer.json()["sha256"] == sha256(data)
    assert Path(answer.json()["path"]).read_bytes() == data


@pytest.mark.parametrize("order", ["before", "after"])
def test_a_wrong_digest_leaves_nothing(shared: Service, sender: httpx.Client, order: str) -> None:
    parts = [part(FILE, b"data"), part(SHA256, sha256(b"date").encode())]
    body = b"".join(parts if order == "after" else parts[::-1]) + b"--b--\r\n"
    problem = assert_problem(sender.post("/uploads", content=body, headers=FORM), 422, "E_MIG_UPLOAD_REJECTED")
    assert sha256(b"data") in problem["detail"]
    assert sha256(b"date") in problem["detail"]
    assert problem["hint"]
    assert_nothing(shared)


END = b"--b--\r\n"
GOOD = part(FILE, b"data")
MALFORMED: list[tuple[str, bytes]] = [
    ("the part `file` is missing", END),
    ("the part `file` is missing", part(SHA256, b"0" * 64) + END),
    ("no file was chosen", part('form-data; name="file"; filename=""', b"") + END),
    ("no file was chosen", part('form-data; name="file"', b"") + END),
    ("the file is empty", part(FILE, b"") + END),
    ("the file is empty", part(SHA256, b"0" * 64) + part(FILE, b"") + END),
    ("the part `file` occurs twice", GOOD + GOOD + END),
    ("the part `sha256` occurs twice", part(SHA256, b"0" * 64) * 2 + GOOD + END),
    ("the part `sha256` occurs twice", GOOD + part(SHA256, b"0" * 64) * 2 + END),
    ("the part 'surprise' is not known", GOOD + part('form-data; name="surprise"', b"x") + END),
    ("the part '' is not known", GOOD + part("form-data", b"x") + END),
    ("a part is not form-data", GOOD + part("attachment; name=file", b"x") + END),
    ("a part is not form-data", b"--b\r\n\r\nx\r\n" + END),
    ("a part is not form-data in plain bytes", part(FILE, b"ZGF0YQ==", "Content-Transfer-Encoding: base64") + END),
    ("sha256: is not 64 hexadecimal digits", part(SHA256, b"0" * 63) + GOOD + END),
    ("sha256: is not 64 hexadecimal digits", GOOD + part(SHA256, b"g" * 64) + END),
    ("sha256: is not 64 hexadecimal digits", GOOD + part(SHA256, b"") + END),
    ("sha256: is longer than a digest", GOOD + part(SHA256, b"0" * 65 * KIB) + END),
    ("the body ends before its last boundary", GOOD),
    ("the body ends before its last boundary", GOOD + b"--b"),
    ("the body ends before its last boundary", GOOD[:-6]),
    ("the body ends before its last boundary", b"--b\r\nContent-Dis"),
    ("the body ends before its last boundary", b""),
    ("the body is not multipart/form-data", b"hello"),
    ("the body is not multipart/form-data", b"--c\r\n"),
    ("the body ends before its last boundary", GOOD + b"--bx\r\n\r\n"),
    ("the body is not multipart/form-data", b"--b\r\n: x\r\n\r\n"),
    ("the body is not multipart/form-data", b"--b\r\nA B: x\r\n\r\n"),
    ("the body is not multipart/form-data", b"--b\r\nX: " + b"y" * 9 * KIB + b"\r\n\r\n"),
    ("the body is not multipart/form-data", b"--b\r\n" + b"X: y\r\n" * 9 + b"\r\n"),
]


@pytest.mark.parametrize(
    ("reported", "body"), MALFORMED, ids=[f"{reported} {number}" for number, (reported, _) in enumerate(MALFORMED)]
)
def test_a_malformed_body_leaves_nothing(shared: Service, sender: httpx.Client, reported: str, body: bytes) -> None:
    problem = assert_problem(sender.post("/uploads", content=body, headers=FORM), 400, "E_MIG_BAD_REQUEST")
    assert reported in problem["detail"]
    assert problem["hint"]
    assert_nothing(shared)


@pytest.mark.parametrize(
    "content_type",
    [
        "",
        "application/json",
        "application/octet-stream",
        "multipart/form-data",
        "multipart/form-data; boundary=",
        "multipart/form-data; boundary=" + "b" * 500,
        "multipart/mixed; boundary=b",
        "x" * 3000,
    ],
    ids=lambda value: str(value)[:40],
)
def test_a_body_that_is_no_form(shared: Service, sender: httpx.Client, content_type: str) -> None:
    answer = sender.post("/uploads", content=GOOD + END, headers={"Content-Type": content_type} if content_type else {})
    assert "boundary" in assert_problem(answer, 400, "E_MIG_BAD_REQUEST")["detail"]
    assert_nothing(shared)


@given(body=st.binary(max_size=200), cuts=st.lists(st.integers(0, 200), max_size=4))
def test_no_body_does_anything_else_than_end_or_be_refused(body: bytes, cuts: list[int]) -> None:
    """Random bytes between two halves of a form, in any pieces."""
    written = bytearray()

    class Sink:
        def write(self, data: memoryview) -> None:
            written.extend(data)

        def finish(self, announced_sha256: str | None) -> Upload:
            raise Conflict("finished")

        def discard(self) -> None:
            pass

    form = multipart.UploadForm(FORM["Content-Type"], cap_bytes=1000, begin=lambda name: Sink())
    whole = GOOD[:-2] + body + b"\r\n" + END
    edges = [0, *sorted(min(cut, len(whole)) for cut in cuts), len(whole)]
    with contextlib.suppress(BadRequest, Conflict):
        for start, end in pairwise(edges):
            form.feed(whole[start:end])
        form.finish()
    if b"\r\n--b" not in b"\r\n" + body:
        assert bytes(written) == b"data" + body


# ── the cap ──────────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.fixture
def small(tmp_path: Path) -> Iterator[Service]:
    """A service that takes a MiB."""
    made = Service(tmp_path, upload_cap_bytes=MIB)
    with made.served():
        yield made
    made.close()


@pytest.mark.parametrize("announced", [True, False])
def test_the_cap_counts_the_files_bytes_as_they_come(small: Service, announced: bool) -> None:
    def body(size: int) -> bytes | Iterator[bytes]:
        whole = part(FILE, b"x" * size) + END
        return whole if announced else iter([whole[:1000], whole[1000:]])

    with small.local() as client:
        assert client.post("/uploads", content=body(MIB), headers=FORM).status_code == 201
        [kept] = left(small)
        answer = client.post("/uploads", content=body(MIB + 1), headers=FORM)
        assert "limit of 1.0 MiB (1048576 bytes)" in assert_problem(answer, 413, "E_MIG_UPLOAD_REJECTED")["detail"]
        assert left(small) == [kept]


def test_what_is_behind_the_last_boundary_counts_too(small: Service) -> None:
    def endless() -> Iterator[bytes]:
        yield GOOD + END
        while True:
            yield b"x" * 64 * KIB

    with small.local() as client:
        assert_problem(client.post("/uploads", content=endless(), headers=FORM), 413, "E_MIG_UPLOAD_REJECTED")
    assert_nothing(small)


def connected(service: Service, headers: str) -> socket.socket:
    sock = socket.socket(socket.AF_UNIX)
    sock.settimeout(60)
    sock.connect(str(service.settings.socket_path))
    sock.sendall(f"POST {PREFIX}/uploads HTTP/1.1\r\nHost: x\r\nContent-Type: {FORM['Content-Type']}\r\n{headers}\r\n".encode())
    return sock


@pytest.mark.parametrize("expect", ["", "Expect: 100-continue\r\n"])
def test_an_announced_size_over_the_cap_is_refused_before_a_byte_of_it(small: Service, expect: str) -> None:
    """The answer is there at once, whole, and then the connection is closed: nobody sends 93 GiB in vain."""
    with connected(small, f"Content-Length: 99999999999\r\n{expect}") as sock:
        answer = answered(sock)
        assert answer.startswith(b"HTTP/1.1 413 ")
        assert b"99999999999 bytes" in answer
        assert _sent_before_the_end(sock) < 4 * MIB
    assert_nothing(small)


@pytest.mark.parametrize("by", ["announced", "chunks"])
def test_of_ten_gibibytes_a_few_are_taken(small: Service, by: str) -> None:
    """A caller that listens only when all is sent cannot send it: the service stops reading."""
    head = "Content-Length: 10737418240\r\n" if by == "announced" else "Transfer-Encoding: chunked\r\n"
    with connected(small, head) as sock:
        sock.sendall((b"%x\r\n" % (10 << 30) if by == "chunks" else b"") + part(FILE, b"")[:-2])
        assert _sent_before_the_end(sock) < 4 * MIB
        assert answered(sock).startswith(b"HTTP/1.1 413 ")
    assert_nothing(small)


def test_how_large_an_upload_may_be(small: Service) -> None:
    with small.local() as client:
        room = client.get("/upload-limits").json()
        assert room["limit_bytes"] == MIB
        assert room["free_bytes"] > 0
        assert (room["refused"], room["hint"]) == (None, None)
        assert client.get("/upload-limits", params={"size_bytes": MIB}).json()["refused"] is None
        over = client.get("/upload-limits", params={"size_bytes": MIB + 1}).json()
        assert over["refused"] == "the file has 1.0 MiB (1048577 bytes), and the limit is 1.0 MiB (1048576 bytes)"
        assert "upload_cap_bytes" in over["hint"]


def answered(sock: socket.socket) -> bytes:
    """The whole answer, though the connection stays open behind it."""
    answer = b""
    while not answer.endswith(b"}"):
        answer += sock.recv(10_000)
    return answer


def _sent_before_the_end(sock: socket.socket) -> int:
    """The bytes that can be sent until the other side closes."""
    sent = 0
    with contextlib.suppress(BrokenPipeError, ConnectionResetError):
        while True:
            sent += sock.send(b"x" * 10_000)
    return sent


def test_a_size_that_is_no_number_is_refused_by_the_server_itself(small: Service) -> None:
    with connected(small, "Content-Length: 12x\r\n") as sock:
        assert sock.recv(1000).startswith(b"HTTP/1.1 400 ")


# ── callers that go away ─────────────────────────────────────────────────────────────────────────────────────────────


def begun(service: Service) -> socket.socket:
    """A caller in the middle of an upload: some of it is on the disk."""
    sock = connected(service, "Content-Length: 500000000\r\n")
    sock.sendall(part(FILE, b"x" * 3 * MIB)[:-2])
    until = time.monotonic() + 60
    while not any(path.stat().st_size for path in service.settings.uploads_dir.glob(".*/*")) and time.monotonic() < until:
        time.sleep(0.01)
    assert re.fullmatch(r"\.[0-9a-f-]{36}", " ".join(left(service)))
    return sock


def test_a_caller_that_goes_away_leaves_nothing(service: Service, client: httpx.Client) -> None:
    sock = begun(service)
    assert client.get("/uploads").json()["items"] == []
    sock.close()
    assert_nothing(service)


def test_a_caller_that_falls_silent_is_given_up(tmp_path: Path) -> None:
    service = Service(tmp_path, idle_s=1)
    with service.served(), connected(service, "Content-Length: 500000\r\n") as sock:
        sock.sendall(part(FILE, b"x" * 1000)[:-2])
        answer = answered(sock)
        assert answer.startswith(b"HTTP/1.1 400 ")
        assert b"nothing came for 1 s" in answer
        assert_nothing(service)
    service.close()


def test_a_service_that_ends_leaves_nothing(tmp_path: Path) -> None:
    service = Service(tmp_path)
    with service.served():
        sock = begun(service)
    sock.close()
    assert_nothing(service)
    service.close()


# ── many at once, and what they cost ─────────────────────────────────────────────────────────────────────────────────


def test_many_upload_at_once(service: Service) -> None:
    files = [os.urandom(2 * MIB + number) for number in range(12)]

    def one(data: bytes) -> dict[str, Any]:
        with service.local() as client:
            return sent(client, data, sha256=sha256(data))

    with ThreadPoolExecutor(len(files)) as pool:
        done = list(pool.map(one, files))
    assert len({upload["id"] for upload in done}) == len(files)
    for data, upload in zip(files, done, strict=True):
        assert Path(upload["path"]).read_bytes() == data
    assert len(left(service)) == len(files)


def test_memory_is_bounded(service: Service, client: httpx.Client) -> None:
    size = 300 * MIB

    def body() -> Iterator[bytes]:
        yield part(FILE, b"")[:-2]
        for _ in range(size // MIB):
            yield bytes(MIB)
        yield b"\r\n" + END

    sent(client, b"all modules are loaded")
    Path("/proc/self/clear_refs").write_text("5")  # forget the peak (proc(5))
    before = _status_kib("VmRSS")
    upload = client.post("/uploads", content=body(), headers=FORM).json()
    assert upload["size_bytes"] == size
    assert _status_kib("VmHWM") - before < 40 * KIB


def test_the_digest_is_taken_in_the_pass(service: Service) -> None:
    """Nothing that was written is read again, however large it is."""
    incoming = service.uploads.begin("web.ova")
    data = os.urandom(MIB)
    for _ in range(16):
        incoming.write(memoryview(data))
    with bytes_read() as count:
        upload = incoming.finish(None)
    assert upload.sha256 == sha256(data * 16)
    assert count.bytes < MIB


def _status_kib(name: str) -> int:
    found = re.search(rf"{name}:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert found is not None
    return int(found[1])


def test_a_slow_disk_holds_up_nobody_else(service: Service, client: httpx.Client, monkeypatch: pytest.MonkeyPatch) -> None:
    entered, leave = threading.Event(), threading.Event()

    def stuck(self: Incoming, data: memoryview) -> None:
        entered.set()
        assert leave.wait(100)

    monkeypatch.setattr(Incoming, "write", stuck)

    def one() -> None:
        with service.local() as own:
            assert send(own, b"data").status_code == 201

    uploading = threading.Thread(target=one)
    uploading.start()
    assert entered.wait(60)
    for _ in range(20):
        assert client.get("/uploads").status_code == 200
    leave.set()
    uploading.join(60)
    assert not uploading.is_alive()


# ── a full disk ──────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.fixture
def tiny(tmp_path: Path) -> Iterator[Service]:
    """Uploads on a file system of 24 MiB, of which 8 may be used."""
    need_root("a small file system to fill")
    service = Service(tmp_path)
    folder = service.settings.uploads_dir
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=24m", "tmpfs", folder], check=True)
    try:
        with service.served():
            yield service
    finally:
        subprocess.run(["umount", folder], check=True)
        service.close()


def test_what_does_not_fit_is_refused_before_a_byte_of_it(tiny: Service) -> None:
    with tiny.local() as client:
        limits = client.get("/upload-limits", params={"size_bytes": 30_000_000}).json()
    assert (limits["free_bytes"], "do not fit" in limits["refused"]) == (8388608, True)
    with connected(tiny, "Content-Length: 30000000\r\n") as sock:
        answer = answered(sock)
        assert answer.startswith(b"HTTP/1.1 413 ")
        assert b"28.6 MiB more (30000000 bytes) do not fit: uploads have 8.0 MiB left on this host" in answer
        assert b"hint" in answer
    assert_nothing(tiny)


def test_a_disk_that_fills_up_leaves_nothing(tiny: Service) -> None:
    """The size was not announced."""
    whole = part(FILE, os.urandom(12 * MIB)) + END
    with tiny.local() as client:
        answer = client.post("/uploads", content=iter([whole[:1000], whole[1000:]]), headers=FORM)
        assert "do not fit" in assert_problem(answer, 413, "E_MIG_UPLOAD_REJECTED")["detail"]
        assert_nothing(tiny)
        assert send(client, os.urandom(2 * MIB)).status_code == 201


def test_a_full_disk_is_found_while_writing(tiny: Service, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Uploads, "check_room", lambda self, wanted: None)
    with tiny.local() as client:
        problem = assert_problem(send(client, os.urandom(25 * MIB)), 413, "E_MIG_UPLOAD_REJECTED")
        assert problem["detail"] == "the upload does not fit: No space left on device"
    assert_nothing(tiny)


def test_a_disk_that_cannot_be_written_is_the_hosts_fault(service: Service, client: httpx.Client) -> None:
    service.settings.uploads_dir.rmdir()
    problem = assert_problem(send(client, b"data"), 500, "E_MIG_PERSIST_FAILED")
    assert problem["detail"] == "the upload could not be written: No such file or directory"
    service.settings.uploads_dir.touch()
    problem = assert_problem(send(client, b"data"), 500, "E_MIG_PERSIST_FAILED")
    assert "could not be written" in problem["detail"]
    assert str(service.settings.data_dir) not in str(problem)


# ── crashes ──────────────────────────────────────────────────────────────────────────────────────────────────────────


def incoming(service: Service) -> Incoming:
    made = service.uploads.begin("web.ova")
    made.write(memoryview(b"data"))
    return made


def restarted(service: Service) -> Uploads:
    again = Uploads(service.store.uploads, service.settings)
    again.recover()
    return again


def crash_on_commit(service: Service) -> None:
    def crash() -> None:
        raise Crash

    service.store.on_commit = crash


def test_a_crash_while_bytes_come_in_is_swept_at_the_start(service: Service) -> None:
    killed = incoming(service)
    assert len(left(service)) == 1
    restarted(service)
    assert_nothing(service)
    killed._file.close()


def test_a_crash_before_the_row_leaves_nothing(service: Service, monkeypatch: pytest.MonkeyPatch) -> None:
    def crash(*_: Any, **__: Any) -> None:
        raise Crash

    monkeypatch.setattr(service.store.uploads, "add", crash)
    with pytest.raises(Crash):
        incoming(service).finish(None)
    restarted(service)
    assert_nothing(service)


def test_a_crash_right_after_the_row_keeps_the_upload(service: Service) -> None:
    crash_on_commit(service)
    with pytest.raises(Crash):
        incoming(service).finish(None)
    again = restarted(service)
    [upload] = again.page(limit=10)[0]
    assert left(service) == [str(upload.id)]
    assert Path(upload.path).read_bytes() == b"data"
    assert (upload.sha256, upload.size_bytes) == (sha256(b"data"), 4)


def test_a_crash_while_removing_keeps_it_or_removes_it(service: Service, monkeypatch: pytest.MonkeyPatch) -> None:
    upload = incoming(service).finish(None)

    def crash(*_: Any, **__: Any) -> None:
        raise Crash

    with monkeypatch.context() as patched:
        patched.setattr(service.store.uploads, "remove", crash)
        with pytest.raises(Crash):
            service.uploads.remove(upload.id)
    assert Path(restarted(service).get(upload.id).path).read_bytes() == b"data"
    crash_on_commit(service)
    with pytest.raises(Crash):
        service.uploads.remove(upload.id)
    service.store.on_commit = lambda: None
    restarted(service)
    assert_nothing(service)


def test_a_start_touches_nothing_else(service: Service) -> None:
    upload = incoming(service).finish(None)
    (service.settings.uploads_dir / "mine").mkdir()
    (service.settings.uploads_dir / ".mine").mkdir()
    (service.settings.uploads_dir / str(uuid4())).mkdir()
    before = left(service)
    restarted(service)
    assert left(service) == before
    assert Path(upload.path).read_bytes() == b"data"


def test_a_store_that_fails_leaves_nothing(service: Service, client: httpx.Client) -> None:
    with service.store._writing() as db:
        db.execute(text("ALTER TABLE uploads RENAME TO lost"))
    assert_problem(send(client, b"data"), 500, "E_MIG_PERSIST_FAILED")
    assert left(service) == []


# ── jobs that read it ────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("by", ["id", "path"])
def test_an_upload_that_a_job_reads_stays(service: Service, client: httpx.Client, by: str) -> None:
    upload = sent(client, b"data")
    ref: SourceRef = UploadRef(kind="upload", upload_id=UUID(upload["id"]))
    if by == "path":
        ref = HostPathRef(kind="offline_host_path", path=upload["path"])
    job = service.submit(plan(ref))
    assert job.name == "web.ova"
    problem = assert_problem(client.delete(f"/uploads/{upload['id']}"), 409, "E_MIG_CONFLICT")
    assert str(job.id) in problem["detail"]
    assert problem["hint"]
    assert Path(upload["path"]).read_bytes() == b"data"
    service.move(job.id, State.FAILED)
    assert client.delete(f"/uploads/{upload['id']}").status_code == 204
    assert_nothing(service)


def test_files_that_somebody_removed_by_hand_do_not_keep_the_upload(service: Service, client: httpx.Client) -> None:
    upload = sent(client, b"data")
    Path(upload["path"]).unlink()
    Path(upload["path"]).parent.rmdir()
    assert_problem(client.post(f"/uploads/{upload['id']}/inspect"), 404, "E_MIG_NOT_FOUND")
    assert client.delete(f"/uploads/{upload['id']}").status_code == 204


# ── expiry ───────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_it_expires_when_the_setting_says(tmp_path: Path) -> None:
    service = Service(tmp_path, upload_expires_days=2)
    upload = incoming(service).finish(None)
    assert upload.expires_at - upload.created_at == timedelta(days=2)
    assert abs(upload.created_at - now()) < timedelta(seconds=60)
    service.close()


def test_what_has_expired_is_swept_but_not_under_a_job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    service = Service(tmp_path)
    old, read, young = (incoming(service).finish(None) for _ in range(3))
    job = service.submit(plan(UploadRef(kind="upload", upload_id=read.id)))
    monkeypatch.setattr(uploads, "now", lambda: now() + timedelta(days=7, minutes=-10))
    service.uploads.sweep()
    assert len(left(service)) == 3
    young = incoming(service).finish(None)
    monkeypatch.setattr(uploads, "now", lambda: now() + timedelta(days=7, minutes=10))
    with swept(service.uploads, every_s=0.05):
        _until(lambda: left(service) == sorted([str(read.id), str(young.id)]))
        with pytest.raises(UploadNotFound):
            service.uploads.get(old.id)
        service.move(job.id, State.COMPLETED)
        _until(lambda: left(service) == [str(young.id)])
    service.close()


def test_a_store_that_is_away_does_not_end_the_sweeping(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    service = Service(tmp_path)
    upload = incoming(service).finish(None)
    asked = threading.Semaphore(0)

    def away(*, host: str) -> list[Upload]:
        asked.release()
        raise PersistFailed("the store failed")

    with swept(service.uploads, every_s=0.02):
        with monkeypatch.context() as patched:
            patched.setattr(service.store.uploads, "all", away)
            for _ in range(3):
                assert asked.acquire(timeout=60)
        monkeypatch.setattr(uploads, "now", lambda: now() + timedelta(days=8))
        _until(lambda: left(service) == [])
    with pytest.raises(UploadNotFound):
        service.uploads.get(upload.id)
    service.close()


def _until(holds: Any) -> None:
    until = time.monotonic() + 60
    while not holds() and time.monotonic() < until:
        time.sleep(0.02)
    assert holds()
