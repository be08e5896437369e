"""Uploads on a real server: listed, named, read by jobs, removed, and expired."""

import os
import threading
import time
from datetime import timedelta
from pathlib import Path
from typing import Any
from uuid import UUID, uuid4

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from synvirt.errors import PersistFailed, UploadNotFound
from synvirt.migrations import uploads
from synvirt.migrations.uploads import safe_name, swept
from synvirt.model.files import Upload
from synvirt.model.kinds import State
from synvirt.model.plan import HostPathRef, SourceRef, UploadRef
from synvirt.model.values import now
from tests.api.test_problems import assert_problem
from tests.api.uploads.sending import FORM, MIB, assert_nothing, incoming, left, plan, sent, sha256
from tests.fakes.service import Service
from tests.offline import appliances

# ── what an upload is ───────────────────────────────────────────────────────────────────────────────────


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


@pytest.mark.parametrize("upload_id", ["nonsense", "00000000-0000-4000-8000-000000000000"])
def test_what_is_no_upload_has_the_code_of_one_that_is_gone(client: httpx.Client, upload_id: str) -> None:
    for answer in (
        client.get(f"/uploads/{upload_id}"),
        client.delete(f"/uploads/{upload_id}"),
        client.post(f"/uploads/{upload_id}/inspect"),
    ):
        assert_problem(answer, 404, "E_MIG_UPLOAD_NOT_FOUND")


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
    before = Service(tmp_path / "old", has_pages=False)
    with before.served(), before.local() as client:
        upload = sent(client, b"data")
    before.close()
    (tmp_path / "old").rename(tmp_path / "new")
    after = Service(tmp_path / "new", has_pages=False)
    path = after.uploads.get(UUID(upload["id"])).path
    assert path.startswith(str(tmp_path / "new"))
    assert Path(path).read_bytes() == b"data"
    after.close()


# ── its name ────────────────────────────────────────────────────────────────────────────────────────────


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
        ("filename*=UTF-8''m%C3%BCnchen%20web.ova", "münchen web.ova"),
        ("filename*=utf-8'de'm%c3%bcnchen.ova; size=1", "münchen.ova"),
        ("filename*=ISO-8859-1''m%FCnchen.ova", "münchen.ova"),
        ("filename*=UTF-8''..%2F..%2Fetc%2Fpasswd", "passwd"),
        ("filename*=UTF-8''%FF.ova", "\ufffd.ova"),
        ("filename*=EBCDIC''web.ova", "upload"),
        ("filename*=web.ova", "upload"),
        ("x=\"; filename*=UTF-8''a.ova\"", "upload"),
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


# ── jobs that read it ───────────────────────────────────────────────────────────────────────────────────


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


# ── expiry ──────────────────────────────────────────────────────────────────────────────────────────────


def test_it_expires_when_the_setting_says(tmp_path: Path) -> None:
    service = Service(tmp_path, has_pages=False, upload_expires_days=2)
    upload = incoming(service).finish(None)
    assert upload.expires_at - upload.created_at == timedelta(days=2)
    assert abs(upload.created_at - now()) < timedelta(seconds=60)
    service.close()


def test_what_has_expired_is_swept_but_not_under_a_job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    service = Service(tmp_path, has_pages=False)
    old, read, young = (incoming(service).finish(None) for _ in range(3))
    job = service.submit(plan(UploadRef(kind="upload", upload_id=read.id)))
    monkeypatch.setattr(uploads, "now", lambda: now() + timedelta(days=7, minutes=-10))
    service.uploads.sweep()
    assert len(left(service)) == 3
    young = incoming(service).finish(None)
    monkeypatch.setattr(uploads, "now", lambda: now() + timedelta(days=7, minutes=10))
    with swept(service.uploads, every_s=0.05):
        holds_soon(lambda: left(service) == sorted([str(read.id), str(young.id)]))
        with pytest.raises(UploadNotFound):
            service.uploads.get(old.id)
        service.move(job.id, State.COMPLETED)
        holds_soon(lambda: left(service) == [str(young.id)])
    service.close()


def test_a_store_that_is_away_does_not_end_the_sweeping(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    service = Service(tmp_path, has_pages=False)
    upload = incoming(service).finish(None)
    queries = threading.Semaphore(0)

    def away(*, host: str) -> list[Upload]:
        queries.release()
        raise PersistFailed("the store failed")

    with swept(service.uploads, every_s=0.02):
        with monkeypatch.context() as patched:
            patched.setattr(service.store.uploads, "all", away)
            for _ in range(3):
                assert queries.acquire(timeout=60)
        monkeypatch.setattr(uploads, "now", lambda: now() + timedelta(days=8))
        holds_soon(lambda: left(service) == [])
    with pytest.raises(UploadNotFound):
        service.uploads.get(upload.id)
    service.close()


def holds_soon(holds: Any) -> None:
    until = time.monotonic() + 60
    while not holds() and time.monotonic() < until:
        time.sleep(0.02)
    assert holds()
