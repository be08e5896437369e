"""The body of an upload on a real server: malformed forms, digests, and files over the cap."""

import contextlib
import socket
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from synvirt.api import multipart
from synvirt.errors import BadRequest, Conflict
from synvirt.model.files import Upload
from tests.api.test_problems import assert_problem
from tests.api.uploads.sending import (
    END,
    FILE,
    FORM,
    GOOD,
    KIB,
    MIB,
    SHA256,
    answered,
    assert_nothing,
    connected,
    left,
    part,
    sha256,
)
from tests.fakes.service import Service

# ── the body ────────────────────────────────────────────────────────────────────────────────────────────


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
    status = 400 if "b" * 500 in content_type else 415
    assert "boundary" in assert_problem(answer, status, "E_MIG_BAD_REQUEST")["detail"]
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


# ── the cap ─────────────────────────────────────────────────────────────────────────────────────────────


@pytest.fixture
def small(tmp_path: Path) -> Iterator[Service]:
    """A service that takes a MiB."""
    made = Service(tmp_path, has_pages=False, upload_cap_bytes=MIB)
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
