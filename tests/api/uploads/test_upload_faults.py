"""Uploads when something fails: callers that go away, slow and full disks, a service that crashes."""

import asyncio
import os
import re
import socket
import subprocess
import threading
import time
from collections.abc import AsyncIterator, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from uuid import uuid4

import httpx
import pytest
from sqlalchemy import text, update
from starlette.requests import Request

from synvirt.api.body import LEAST_BYTES, PIECE_BYTES, pieces
from synvirt.api.routes.uploads import received
from synvirt.errors import PersistFailed
from synvirt.migrations.uploads import Incoming, Uploads
from synvirt.model.files import Upload
from synvirt.store.documents import VERSION
from synvirt.store.tables import uploads
from tests.api.test_problems import assert_problem
from tests.api.uploads.sending import (
    END,
    FILE,
    FORM,
    KIB,
    MIB,
    answered,
    assert_nothing,
    connected,
    incoming,
    left,
    part,
    send,
    sent,
    sha256,
)
from tests.counted import bytes_read
from tests.drawn import drawn
from tests.fakes.service import Service
from tests.needs import need_root


class Crash(BaseException):
    """The service dies here: nothing of ours may catch it."""


# ── callers that go away ────────────────────────────────────────────────────────────────────────────────


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
    service = Service(tmp_path, has_pages=False, idle_s=1)
    with service.served(), connected(service, "Content-Length: 500000\r\n") as sock:
        sock.sendall(part(FILE, b"x" * 1000)[:-2])
        answer = answered(sock)
        assert answer.startswith(b"HTTP/1.1 400 ")
        assert b"less than 16.0 KiB came in 1 s" in answer
        assert_nothing(service)
    service.close()


def test_a_caller_that_sends_byte_by_byte_is_given_up() -> None:
    async def dripping() -> AsyncIterator[bytes]:
        while True:
            yield b"x"
            await asyncio.sleep(0.001)

    async def take() -> None:
        async for _ in pieces(dripping(), 0.1):
            pass

    with pytest.raises(TimeoutError):
        asyncio.run(take())


@pytest.mark.parametrize("chunk", [1, 7000, LEAST_BYTES, PIECE_BYTES - 1, 3 * PIECE_BYTES])
def test_a_body_comes_whole_in_whatever_chunks(chunk: int) -> None:
    content = drawn(2 * PIECE_BYTES + 5) if chunk > 1 else drawn(1000)

    async def stream() -> AsyncIterator[bytes]:
        for start in range(0, len(content), chunk):
            yield content[start : start + chunk]
        yield b""

    async def taken() -> list[bytes]:
        return [piece async for piece in pieces(stream(), 60.0)]

    found = asyncio.run(taken())
    assert b"".join(found) == content
    assert all(len(piece) >= PIECE_BYTES for piece in found[:-1])


def test_a_service_that_ends_leaves_nothing(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    service = Service(tmp_path, has_pages=False)
    with service.served():
        sock = begun(service)
    sock.close()
    assert_nothing(service)
    service.close()
    assert [record.getMessage() for record in caplog.records if record.exc_info] == [], "its end is no mistake"


def test_an_end_while_all_threads_are_busy_leaves_nothing(tmp_path: Path) -> None:
    """uvicorn cancels the request, and then the event loop's end does."""
    service = Service(tmp_path, has_pages=False)
    busy = threading.Event()

    async def request() -> None:
        came = [{"type": "http.request", "body": part(FILE, b"x" * MIB)[:-2], "more_body": True}]
        waits = asyncio.Event()

        async def receive() -> dict[str, Any]:
            if came:
                return came.pop()
            waits.set()
            await asyncio.Event().wait()
            raise AssertionError

        headers = [(b"content-length", b"5000000"), (b"content-type", FORM["Content-Type"].encode())]
        loop = asyncio.get_running_loop()
        loop.set_default_executor(ThreadPoolExecutor(1))
        loop.run_in_executor(None, busy.wait)
        asked = Request({"type": "http", "method": "POST", "headers": headers}, receive)
        task = asyncio.create_task(received(asked, service.uploads, 60.0))
        await waits.wait()
        for _ in range(2):
            task.cancel()
            await asyncio.sleep(0.01)
        assert left(service) != []
        busy.set()

    try:
        asyncio.run(request())
    finally:
        busy.set()
    assert_nothing(service)
    service.close()


# ── many at once, and what they cost ────────────────────────────────────────────────────────────────────


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


# ── a full disk ─────────────────────────────────────────────────────────────────────────────────────────


@pytest.fixture
def tiny(tmp_path: Path) -> Iterator[Service]:
    """Uploads on a file system of 24 MiB, of which 8 may be used."""
    need_root("a small file system to fill")
    service = Service(tmp_path, has_pages=False)
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


# ── crashes ─────────────────────────────────────────────────────────────────────────────────────────────


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


@pytest.mark.parametrize("away", [False, True], ids=["back", "away for longer"])
def test_a_lost_answer_to_the_commit_lists_nothing(service: Service, monkeypatch: pytest.MonkeyPatch, away: bool) -> None:
    """The row is there, and the caller got an error. Before, an upload without bytes was listed until it expired."""
    add, remove = service.store.uploads.add, service.store.uploads.remove

    def lost(upload: Upload, *, host: str) -> None:
        add(upload, host=host)
        raise PersistFailed("the connection was lost")

    def gone(_: object) -> None:
        raise PersistFailed("the database does not answer")

    coming = incoming(service)
    with monkeypatch.context() as patched:
        patched.setattr(service.store.uploads, "add", lost)
        patched.setattr(service.store.uploads, "remove", gone if away else remove)
        with pytest.raises(PersistFailed, match="the connection was lost"):
            coming.finish(None)
        coming.discard()
    service.uploads.sweep()
    assert_nothing(service)
    assert incoming(service).finish(None).id in {one.id for one in service.uploads.page(limit=10)[0]}


def test_an_upload_that_the_store_cannot_remove_now_is_still_whole(service: Service, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before, its files stayed hidden until the next start, and it was listed all the while."""
    upload = incoming(service).finish(None)

    def full(_: object) -> None:
        raise PersistFailed("database or disk is full")

    with monkeypatch.context() as patched:
        patched.setattr(service.store.uploads, "remove", full)
        with pytest.raises(PersistFailed):
            service.uploads.remove(upload.id)
    [listed] = service.uploads.page(limit=10)[0]
    assert Path(listed.path).read_bytes() == b"data"
    service.uploads.remove(upload.id)
    assert_nothing(service)


def test_a_start_keeps_the_files_of_an_upload_that_only_a_later_version_reads(service: Service) -> None:
    """The service went back by a version just after a crash: the row is left alone, and so are the files."""
    crash_on_commit(service)
    with pytest.raises(Crash):
        incoming(service).finish(None)
    service.store.on_commit = lambda: None
    with service.store._writing() as db:
        db.execute(text("UPDATE uploads SET version = '9.0'"))
    restarted(service)
    with service.store._writing() as db:
        db.execute(update(uploads).values(version=VERSION))
    [upload] = restarted(service).page(limit=10)[0]
    assert Path(upload.path).read_bytes() == b"data"
