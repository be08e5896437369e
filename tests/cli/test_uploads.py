"""synvirt uploads: what it sends, what it prints, how it ends."""

import contextlib
import hashlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any
from uuid import UUID

import httpx
import pytest

from synvirt.cli.client import Client
from synvirt.cli.migrating.sending import Sending
from synvirt.cli.migrating.upload_shown import Lines
from synvirt.errors import NotFound
from synvirt.model.plan import UploadRef
from tests.cli.conftest import Run
from tests.fakes.service import PASSWORD, PLAN, Service
from tests.offline import appliances
from tests.running.processes import until

MIB = 1 << 20


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "elsewhere" / 'a "web" münchen.ova'
    path.parent.mkdir()
    path.write_bytes(os.urandom(3 * MIB + 5))
    return path


def digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def added(run: Run, path: Path, *more: object) -> dict[str, Any]:
    done = run("uploads", "add", path, "--json", *more)
    assert done.exit_code == 0, done.stderr
    answer: dict[str, Any] = json.loads(done.stdout)
    return answer


def test_add_sends_the_file_and_its_digest(service: Service, run: Run, file: Path) -> None:
    done = run("uploads", "add", file)
    assert done.exit_code == 0, done.stderr
    [upload] = service.uploads.page(limit=10)[0]
    assert (upload.filename, upload.sha256, upload.size_bytes) == (file.name, digest(file), file.stat().st_size)
    assert Path(upload.path).read_bytes() == file.read_bytes()
    lines = done.stdout.splitlines()
    assert lines[-1] == f"Upload {upload.id} has SHA-256 {upload.sha256}. Import it: synvirt import '{upload.path}'"
    assert re.fullmatch(r"\d\d:\d\d:\d\d a \"web\" münchen.ova  100 %, 3.0 MiB of 3.0 MiB, .*/s", lines[-2])


def test_add_prints_what_the_service_answers(service: Service, run: Run, file: Path) -> None:
    answer = added(run, file, "--sha256", digest(file).upper())
    with service.local() as client:
        assert client.get(f"/uploads/{answer['id']}").json() == answer


def test_an_empty_file(service: Service, run: Run, tmp_path: Path) -> None:
    empty = tmp_path / "empty.img"
    empty.touch()
    done = run("uploads", "add", empty)
    assert (done.exit_code, "empty.img is empty" in done.stderr) == (2, True)
    assert service.uploads.page(limit=10) == ([], None)


def test_a_digest_that_is_another_files_is_refused(service: Service, run: Run, file: Path) -> None:
    done = run("uploads", "add", file, "--sha256", "0" * 64)
    assert done.exit_code == 1
    assert done.stderr.startswith("E_MIG_UPLOAD_REJECTED: ")
    assert "hint: " in done.stderr
    assert service.uploads.page(limit=10) == ([], None)


@pytest.mark.parametrize("what", ["absent", "folder", "pipe", "digest"])
def test_what_is_no_file_is_wrong_usage(service: Service, run: Run, tmp_path: Path, what: str) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "digest").touch()
    os.mkfifo(tmp_path / "pipe")
    done = run("uploads", "add", tmp_path / what, *(["--sha256", "abc"] if what == "digest" else []))
    assert (done.exit_code, done.stdout) == (2, "")
    assert {"absent": "cannot be read", "folder": ".ova", "pipe": "is not a file", "digest": "hexadecimal"}[what] in done.stderr


def test_a_file_over_the_cap_is_refused_before_it_is_sent(tmp_path: Path, run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    service = Service(tmp_path, has_pages=False, upload_cap_bytes=MIB)
    monkeypatch.setattr(Sending, "_chunk", lambda _self, _most: pytest.fail("a piece of the file was read"))
    large = tmp_path / "large.img"
    with large.open("wb") as file:
        file.truncate(10 << 30)
    with service.served():
        done = run("uploads", "add", large, "--json")
    assert done.exit_code == 1
    assert json.loads(done.stdout)["error"]["code"] == "E_MIG_UPLOAD_REJECTED"
    message = "the file has 10.0 GiB (10737418240 bytes), and the limit is 1.0 MiB (1048576 bytes)"
    assert done.stderr.startswith(f"E_MIG_UPLOAD_REJECTED: {message}")
    service.close()


def test_a_service_that_does_not_say_how_large_an_upload_may_be_is_sent_to(
    tmp_path: Path, run: Run, file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An earlier version: its own refusal, which comes while the file is sent, is the answer."""
    service = Service(tmp_path, has_pages=False, upload_cap_bytes=MIB)
    monkeypatch.setattr(service.uploads, "refusal_of", lambda _size: (_ for _ in ()).throw(NotFound("no such address")))
    with service.served():
        done = run("uploads", "add", file, "--json")
    assert done.exit_code == 1
    assert json.loads(done.stdout)["error"]["code"] == "E_MIG_UPLOAD_REJECTED"
    service.close()


def test_a_file_that_shrinks_while_it_is_sent(service: Service, run: Run, file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def shrink(_self: Lines, sent: int, _total: int) -> None:
        # Not before the service has begun to keep it: else there is nothing that it could forget to remove.
        until(lambda: list(service.settings.uploads_dir.iterdir()))
        os.truncate(file, sent)

    monkeypatch.setattr(Lines, "sent", shrink)
    done = run("uploads", "add", file)
    assert done.exit_code == 2
    assert "became shorter while it was sent" in done.stderr
    _eventually_nothing(service)


@pytest.mark.parametrize(("at", "mode"), [(0, "r+b"), (None, "ab")])
def test_a_file_that_is_written_while_it_is_sent(
    service: Service, run: Run, file: Path, monkeypatch: pytest.MonkeyPatch, at: int | None, mode: str
) -> None:
    """The service would have a mixture of two versions, or the beginning of one that grows."""

    def write(_self: Lines, _sent: int, _total: int) -> None:
        until(lambda: list(service.settings.uploads_dir.iterdir()))
        with file.open(mode) as written:
            if at is not None:
                written.seek(at)
            written.write(b"more")

    monkeypatch.setattr(Lines, "sent", write)
    done = run("uploads", "add", file)
    assert (done.exit_code, "was changed while it was sent" in done.stderr) == (2, True), done.stderr
    _eventually_nothing(service)


def test_list_show_and_remove(service: Service, run: Run, file: Path) -> None:
    assert run("uploads", "list").stdout == "There are no uploads\n"
    upload = added(run, file)
    other = added(run, file)
    listed = run("uploads", "list").stdout.splitlines()
    assert listed[0].split() == ["ID", "NAME", "SIZE", "EXPIRES"]
    assert [line.split()[0] for line in listed[1:]] == [other["id"], upload["id"]]
    assert "3.0 MiB" in listed[1]
    page = run("uploads", "list", "--limit", "1")
    assert page.stdout.splitlines()[-1].startswith("There are more: --cursor ")
    cursor = page.stdout.split()[-1]
    assert json.loads(run("uploads", "list", "--cursor", cursor, "--json").stdout)["items"] == [upload]
    sheet = run("uploads", "show", upload["id"][:13]).stdout
    assert ["sha256", upload["sha256"]] in [line.split() for line in sheet.splitlines()]
    assert json.loads(run("uploads", "show", upload["id"], "--json").stdout) == upload
    assert run("uploads", "remove", upload["id"]).stdout == f"Upload {upload['id']} is removed\n"
    gone = run("uploads", "show", upload["id"])
    assert (gone.exit_code, gone.stdout) == (1, "")
    assert gone.stderr.startswith("E_MIG_UPLOAD_NOT_FOUND: ")
    assert run("uploads", "show", "zzz").stderr.startswith("E_MIG_UPLOAD_NOT_FOUND: there is no upload zzz")


def test_rm_is_another_word_for_remove(service: Service, run: Run, file: Path) -> None:
    upload = added(run, file)
    assert run("uploads", "rm", upload["id"]).exit_code == 0
    assert service.uploads.page(limit=10) == ([], None)


def test_what_a_job_reads_stays(service: Service, run: Run, file: Path) -> None:
    upload = added(run, file)
    ref = UploadRef(kind="upload", upload_id=UUID(upload["id"]))
    job = service.submit(PLAN.model_copy(update={"source_ref": ref}))
    assert job.name == file.name
    done = run("uploads", "remove", upload["id"])
    assert (done.exit_code, done.stdout) == (1, "")
    assert done.stderr.startswith(f"E_MIG_CONFLICT: upload {upload['id']} is read by 1 job")
    assert str(job.id) in done.stderr


def test_inspect(service: Service, run: Run, tmp_path: Path) -> None:
    archive = appliances.archive(tmp_path / "web.ova", appliances.appliance("qemu_user"))
    upload = added(run, archive)
    answer = json.loads(run("uploads", "inspect", upload["id"], "--json").stdout)
    assert answer["offline_kind"] == "ova_archive"
    reported = run("uploads", "inspect", upload["id"]).stdout.splitlines()
    assert reported[0].split() == ["kind", "ova_archive"]
    assert any(line.startswith("disk ") for line in reported)


def test_to_a_service_elsewhere(tmp_path: Path, run: Run, file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SYNVIRT_PASSWORD", PASSWORD)
    service = Service(tmp_path, has_pages=False)
    with service.served() as server:
        certificate = service.settings.keyring_dir / "tls.crt"
        answer = added(run, file, "--server", server.address, "--cacert", certificate)
        assert answer["sha256"] == digest(file)
        monkeypatch.setenv("SYNVIRT_PASSWORD", "wrong")
        refused = run("uploads", "add", file, "--server", server.address, "--cacert", certificate)
        assert refused.exit_code == 1
        assert refused.stderr.startswith("E_MIG_UNAUTHENTICATED")
    service.close()


def adding(file: Path, *, data_dir: Path) -> list[str]:
    """`synvirt uploads add`, in a process of its own."""
    program = [sys.executable, "-c", "from synvirt.cli import app; app()"]
    return [*program, "--data-dir", str(data_dir), "uploads", "add", str(file)]


def test_an_interrupt_leaves_nothing(service: Service, tmp_path: Path) -> None:
    """Ctrl-C in the middle of a body that the service has begun to write."""
    large = tmp_path / "large.img"
    with large.open("wb") as file:
        file.truncate(8 << 30)
    argv = adding(large, data_dir=tmp_path)
    with subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as child:
        until(lambda: list(service.settings.uploads_dir.iterdir()))
        child.send_signal(signal.SIGINT)
        _, stderr = child.communicate(timeout=60)
    assert child.returncode == 130
    assert stderr == "Interrupted: nothing of the upload is left\n"
    _eventually_nothing(service)


def test_an_interrupt_after_the_last_byte_says_that_the_file_may_be_kept(
    service: Service, run: Run, file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A whole file is listed as soon as it is on the service's disk, whether its caller still waits or not."""
    answer = Client._answer

    def interrupted(self: Client, response: httpx.Response) -> str:
        if service.uploads.page(limit=10)[0]:
            raise KeyboardInterrupt
        return answer(self, response)

    monkeypatch.setattr(Client, "_answer", interrupted)
    done = run("uploads", "add", file)
    assert len(service.uploads.page(limit=10)[0]) == 1
    assert done.exit_code == 130
    assert done.stderr == "Interrupted: the file was sent, and the service may keep it: synvirt uploads list\n"


def test_a_terminal_shows_a_bar(service: Service, tmp_path: Path, file: Path) -> None:
    ours, its = os.openpty()
    argv = adding(file, data_dir=tmp_path)
    with subprocess.Popen(argv, stdout=its, stderr=its, env=os.environ | {"TERM": "xterm", "COLUMNS": "120"}) as child:
        os.close(its)
        seen = b""
        with contextlib.suppress(OSError):  # EIO: the other end is closed
            while piece := os.read(ours, 65536):
                seen += piece
    os.close(ours)
    assert child.returncode == 0
    assert "━".encode() in seen
    assert b"3.0/3.0" in seen
    assert b"has SHA-256 " + digest(file).encode() in seen


def test_a_service_that_dies_is_reported(tmp_path: Path, run: Run, file: Path) -> None:
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(str(tmp_path / "synvirt.sock"))
    listener.listen()

    def die() -> None:
        """With the first connection that asks something: one before it only looks whether a service listens."""
        asked = b""
        while not asked:
            connection, _ = listener.accept()
            with connection:
                asked = connection.recv(1000)
        listener.close()

    thread = threading.Thread(target=die)
    thread.start()
    done = run("uploads", "add", file)
    thread.join(10)
    assert done.exit_code == 1
    assert "no service answers at" in done.stderr


def test_an_upload_that_breaks_off_says_how_far_it_came(tmp_path: Path, run: Run, file: Path) -> None:
    answer = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: 2\r\nConnection: close\r\n\r\n{}"
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(str(tmp_path / "synvirt.sock"))
    listener.listen()

    def die() -> None:
        """After it said how large an upload may be, and took a part of one."""
        while True:
            connection, _ = listener.accept()
            with connection:
                asked = connection.recv(1000)
                if asked.startswith(b"GET"):
                    connection.sendall(answer)
                taken = 0
                while asked.startswith(b"POST") and taken < MIB + 1000:
                    taken += len(connection.recv(MIB))
                if taken:
                    return

    thread = threading.Thread(target=die)
    thread.start()
    done = run("uploads", "add", file)
    thread.join(10)
    listener.close()
    assert done.exit_code == 1
    assert re.search(r"broke off after [1-3]\.0 MiB of 3\.0 MiB: ", done.stderr), done.stderr
    assert "send the file again" in done.stderr


def test_lines_come_at_each_tenth_and_each_ten_seconds() -> None:
    printed: list[str] = []
    now = [0.0]
    lines = Lines("x\x1b.ova", out=printed.append, clock=lambda: now[0])
    for sent in range(1, 1001):
        now[0] += 0.01
        lines.sent(sent, 1000)
    assert len(printed) == 10
    assert "\x1b" not in printed[0]
    assert "10 %" in printed[0]
    now[0] += 10
    lines.sent(1000, 1000)
    assert len(printed) == 11


def _eventually_nothing(service: Service) -> None:
    until(lambda: not list(service.settings.uploads_dir.iterdir()))
    assert service.uploads.page(limit=10) == ([], None)
