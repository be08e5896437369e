"""A repository on a peer when things go wrong: cables, disks, certificates, passwords, and a peer that is killed."""

import base64
import contextlib
import errno
import os
import socket
import ssl
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from random import Random
from types import SimpleNamespace
from typing import Any
from urllib.parse import urlsplit
from uuid import UUID

import httpx
import pytest

from synvirt.api.routes import peer as peer_route
from synvirt.backups import repositories as backup_repositories
from synvirt.backups import working
from synvirt.backups.model import BackupJobRequest, BackupRepositoryRequest, RestoreRequest
from synvirt.backups.repositories import Repositories
from synvirt.errors import (
    BackupBadRequest,
    PersistFailed,
    RepositoryDamaged,
    RepositoryFull,
    RepositoryUnreachable,
    StoreWriteFailed,
)
from synvirt.repository import packs
from synvirt.repository import peer as peer_folder
from synvirt.repository.folder import put
from synvirt.repository.keys import CHUNK_BYTES
from synvirt.repository.peer import PeerFolder, PeerPlace
from synvirt.repository.repository import Repository
from synvirt.repository.session import Session
from synvirt.store import Store
from tests.backups.peers import PASSWORD, USER, Peer
from tests.fakes.backups import FakeGuests, backups_of, ended
from tests.fakes.disks import MemoryReader
from tests.fakes.workers import Gone
from tests.needs import need_root
from tests.repository.points import KEY, back_up, opened, restored
from tests.running.processes import until
from tests.servers.remote_servers import wire


@pytest.fixture(autouse=True)
def small_packs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packs, "PACK_BYTES", 2 * CHUNK_BYTES)


@pytest.fixture
def peer(tmp_path: Path) -> Iterator[Peer]:
    with Peer(tmp_path / "home").served() as made:
        yield made


def _noise(chunks: int, seed: int = 8) -> MemoryReader:
    found = MemoryReader("A" * chunks, block_bytes=CHUNK_BYTES)
    found.content = Random(seed).randbytes(len(found.content))
    return found


def _pack() -> tuple[str, bytes]:
    made = packs.Pack()
    made.add(b"n" * 32, packs.CHUNK, Random(2).randbytes(900_000), CHUNK_BYTES)
    name, content, _ = made.closed()
    return f"packs/{name}", bytes(content)


def _half_sent(place: PeerPlace, name: str, content: bytes) -> ssl.SSLSocket:
    """A PUT of which half has been sent."""
    parts = urlsplit(place.url)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    sock = context.wrap_socket(socket.create_connection((parts.hostname, parts.port), 10))
    basic = base64.b64encode(f"{place.username}:{place.password}".encode()).decode()
    head = f"PUT {parts.path}/files/{name} HTTP/1.1\r\nHost: {parts.netloc}\r\nAuthorization: Basic {basic}\r\n"
    sock.sendall(f"{head}Content-Length: {len(content)}\r\n\r\n".encode() + content[: len(content) // 2])
    return sock


def _begun(folder: Path) -> list[Path]:
    return list((folder / "tmp").iterdir())


def test_an_upload_that_breaks_off_leaves_nothing_and_can_be_made_again(peer: Peer) -> None:
    folder = peer.opened()
    opened(folder, new=True)
    name, content = _pack()
    sock = _half_sent(peer.place, name, content)
    until(lambda: _begun(peer.folder))
    sock.close()
    until(lambda: not _begun(peer.folder))
    assert folder.entries("packs") == []
    put(folder, name, [content])
    assert folder.read(name) == content


def test_connections_that_break_off_are_made_again(peer: Peer) -> None:
    folder = peer.opened()
    repository = opened(folder, new=True)
    noise = _noise(6)
    parts = urlsplit(peer.place.url)
    assert parts.port is not None
    with wire(parts.port) as between:
        between.cuts = {1: 9_000, 2: 700_000, 3: 1_200_000, 4: 50_000}
        shaky = peer.opened(url=peer.place.url.replace(str(parts.port), str(between.port)))
        point = back_up(repository, noise)
        again = Repository(shaky, KEY)
        assert restored(again, point) == [noise.content]
        assert between.connections > 4


def test_a_peer_that_sends_less_or_far_more_than_was_asked_for_is_not_believed(
    peer: Peer, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = peer.opened()
    opened(folder, new=True)
    name, content = _pack()
    put(folder, name, [content])
    monkeypatch.setattr(peer_folder, "_ANSWER_BYTES_MAX", 99_999)
    assert folder.read(name, 0, 99_999) == content[:99_999]
    with pytest.raises(StoreWriteFailed, match="answers 200"):
        folder.read(name, 0, 100_000)
    assert folder.read(name, 5, 10) == content[5:15]  # by another connection: the rest of that answer is nobody's
    monkeypatch.setattr(folder, "_ask", lambda *_: content[:9])
    with pytest.raises(RepositoryDamaged, match="sends 9 of the 10 bytes"):
        folder.read(name, 0, 10)


def test_another_certificate_is_refused_before_anything_is_sent(tmp_path: Path) -> None:
    home = Peer(tmp_path / "home")
    with home.served():
        first = home.place.fingerprint_sha256
        opened(home.opened(), new=True)
    home.forget_certificate()
    with home.served():
        with pytest.raises(RepositoryUnreachable, match=r"certificate .* is not the pinned one"):
            home.opened(fingerprint_sha256=first, patience_s=0).entries("packs")
        assert home.opened().entries("packs") == []


def test_a_wrong_password_or_account_gets_its_own_error(peer: Peer) -> None:
    with pytest.raises(RepositoryUnreachable, match="refuses") as refused:
        peer.opened(password="wrong").entries("")
    assert "wrong" not in refused.value.detail.replace("the password is wrong", "")
    with pytest.raises(RepositoryUnreachable):
        peer.opened(url=peer.place.url.replace("office", "cellar")).entries("")
    base = peer.place.url.partition("/backup/peer")[0]
    with httpx.Client(verify=False, auth=(USER, PASSWORD)) as client:
        for path in (
            "/backup/jobs",
            "/migrator/migrations",
            "/backup/peer/officeX",
            "/backup/peer",
            "/backup/peer/office/../../jobs",
        ):
            assert client.get(f"{base}{path}").status_code == 401, path
        assert client.get(f"{base}/backup/peer/office").json()["keep_days"] == 0
    with httpx.Client(verify=False, auth=("admin", "admin's")) as client:
        assert client.get(f"{base}/backup/jobs").status_code == 200
        assert client.get(f"{base}/backup/peer/cellar").status_code == 404


@pytest.mark.parametrize(
    "url", ["http://peer:8441/x", "https://", "https://u:p@peer/x", "https://peer:99999/x", "https://peer/x?y=1"]
)
def test_a_url_that_is_none_is_refused(url: str, peer: Peer) -> None:
    with pytest.raises(BackupBadRequest):
        peer.opened(url=url)


def test_a_full_peer_is_reported_and_the_run_can_be_made_again(tmp_path: Path) -> None:
    need_root("mount")
    home = Peer(tmp_path / "home")
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=5m", "tmpfs", home.folder], check=True)
    try:
        with home.served():
            folder = home.opened()
            repository = opened(folder, new=True)
            with pytest.raises(RepositoryFull, match=r"the peer 127\.0\.0\.1:\d+: .*No space left"):
                back_up(repository, _noise(6))
            assert _begun(home.folder) == []
            assert repository.point_ids() == []
            subprocess.run(["mount", "-o", "remount,size=50m", home.folder], check=True)
            point = back_up(repository, _noise(6))
            assert restored(Repository(folder, KEY), point) == [_noise(6).content]
    finally:
        subprocess.run(["umount", home.folder], check=True)


def test_a_quota_is_reported_and_the_run_can_be_made_again_when_there_is_room(tmp_path: Path) -> None:
    home = Peer(tmp_path / "home", quota_bytes=8 * CHUNK_BYTES)
    with home.served():
        folder = home.opened()
        repository = opened(folder, new=True)
        first = back_up(repository, _noise(5))
        assert folder.room()[0] == 8 * CHUNK_BYTES
        with pytest.raises(RepositoryFull, match=r"the peer 127\.0\.0\.1:\d+: .* of the quota of 8388608 are free"):
            back_up(repository, _noise(5, seed=9))
        assert (repository.point_ids(), _begun(home.folder)) == ([first], [])
        repository.remove(first)
        for one in folder.entries("packs"):
            folder.delete(f"packs/{one.name}")
        repository.refresh()
        assert restored(repository, back_up(repository, _noise(5, seed=9))) == [_noise(5, seed=9).content]


def test_so_many_files_at_once_and_no_more(tmp_path: Path) -> None:
    """Who asks and does not read holds one place of its offer's, and what others ask of it waits for one."""
    home = Peer(tmp_path / "home")
    with home.served():
        folder = home.opened(patience_s=0)
        opened(folder, new=True)
        name, content = _pack()
        with contextlib.ExitStack() as stack:
            held = [stack.enter_context(_half_sent(home.place, name, content)) for _ in range(peer_route.STREAMS_MAX)]
            until(lambda: len(_begun(home.folder)) == len(held))
            for ask in (lambda: folder.read("repository"), lambda: put(folder, name, [content])):
                with pytest.raises(RepositoryUnreachable, match="it answers 429"):
                    ask()
            assert len(folder.entries("packs")) == 0, "what is no file of it is answered"
            patient = home.opened(patience_s=60)
            waiting = threading.Thread(target=lambda: put(patient, name, [content]))
            waiting.start()
            held[0].close()
            waiting.join(60)
            assert [one.name for one in folder.entries("packs")] == [name.removeprefix("packs/")]
        until(lambda: _begun(home.folder) == [])
        assert folder.read(name) == content


def test_a_run_goes_on_when_the_peer_is_back(tmp_path: Path) -> None:
    home = Peer(tmp_path / "home")
    with home.served():
        folder = home.opened(patience_s=60)
        repository = opened(folder, new=True)
    with pytest.raises(RepositoryUnreachable, match="does not answer"):
        home.opened(patience_s=0).entries("packs")
    points = []
    running = threading.Thread(target=lambda: points.append(back_up(repository, _noise(3))))
    running.start()
    with home.served():
        running.join(60)
        assert restored(Repository(folder, KEY), points[0]) == [_noise(3).content]


def test_a_peer_that_is_killed_in_the_middle_of_a_put_keeps_what_it_had_and_nothing_half(tmp_path: Path) -> None:
    home = tmp_path / "home"
    with subprocess.Popen([sys.executable, "-m", "tests.backups.peer_child", home], stdout=subprocess.PIPE, text=True) as child:
        try:
            assert child.stdout is not None
            url, fingerprint = next(line for line in child.stdout if line.startswith("https://")).split()
            place = PeerPlace(url=url, fingerprint_sha256=fingerprint, username=USER, password=PASSWORD)
            folder = PeerFolder(place)
            earlier = back_up(opened(folder, new=True), _noise(4))
            before = {entry.name for entry in folder.entries("packs")}
            folder.close()
            sock = _half_sent(place, *_pack())
            until(lambda: _begun(home / "offered"))
        finally:
            child.kill()
    sock.close()
    assert _begun(home / "offered"), "a killed service cannot have removed it"
    again = Peer(home)
    with again.served():
        folder = again.opened()
        repository = Repository(folder, KEY)
        session = Session(repository)
        later = back_up(repository, _noise(4), _noise(2, seed=9), session=session)
        assert session.new_bytes < 3 * CHUNK_BYTES, "what is there is not sent again"
        assert _begun(again.folder) == []
        assert before < {entry.name for entry in folder.entries("packs")}
        for point, contents in ((earlier, [_noise(4).content]), (later, [_noise(4).content, _noise(2, seed=9).content])):
            assert restored(Repository(folder, KEY), point) == contents


def test_a_peer_is_spoken_to_only_where_sources_may_be(peer: Peer) -> None:
    for allowed in (("*.example",), ("10.0.0.0/8",)):
        with pytest.raises(BackupBadRequest, match="source or a backup peer"):
            PeerFolder(replace(peer.place, allowed_hosts=allowed), patience_s=0).room()
    with contextlib.closing(PeerFolder(replace(peer.place, allowed_hosts=("127.0.0.0/8",)), patience_s=0)) as folder:
        assert folder.room()[0] > 0
    with pytest.raises(BackupBadRequest, match="source or a backup peer"):
        PeerFolder(replace(peer.place, url="https://169.254.169.254/backup/peer/x"))


def test_a_key_that_cannot_be_kept_leaves_the_folder_as_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The data folder is full: what is the cause, and what is to be done, is said."""
    (tmp_path / "keyring").mkdir()
    (tmp_path / "home").mkdir()
    store = Store(f"sqlite:///{tmp_path / 'test.db'}")
    repositories = Repositories(store.backups, host="local", keyring=tmp_path / "keyring", caches=tmp_path / "caches")

    def full(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(backup_repositories, "put_private_file", full)
    request = {"name": "here", "kind": "local", "path": str(tmp_path / "home")}
    with pytest.raises(PersistFailed, match="key cannot be kept: No space left on device") as caught:
        repositories.add(BackupRepositoryRequest.model_validate(request))
    assert "data_dir" in str(caught.value.hint)
    assert list((tmp_path / "home").iterdir()) == []
    assert repositories.known() == []


def test_a_peer_is_a_repository_as_others_are_and_its_password_is_sealed(peer: Peer, tmp_path: Path) -> None:
    (tmp_path / "keyring").mkdir()
    store = Store(f"sqlite:///{tmp_path / 'test.db'}")
    repositories = Repositories(store.backups, host="local", keyring=tmp_path / "keyring", caches=tmp_path / "caches")
    request = {
        "name": "elsewhere",
        "kind": "peer",
        "peer": {
            "url": peer.place.url,
            "fingerprint_sha256": peer.place.fingerprint_sha256.replace(":", "").lower(),
            "credentials": {"username": USER, "password": PASSWORD},
        },
    }
    made = repositories.add(BackupRepositoryRequest.model_validate(request))
    assert (made.kind, made.state, made.path) == ("peer", "ready", None)
    assert made.capacity_bytes is not None
    point = back_up(repositories.opened(made.id), _noise(2))
    again = Repositories(store.backups, host="local", keyring=tmp_path / "keyring", caches=tmp_path / "caches")
    assert restored(again.opened(made.id), point) == [_noise(2).content]
    shown = again.shown(again.get(made.id))
    assert (shown.points_count, shown.place) == (1, peer.place.url)
    for text in (store.backups.get("repository", made.id, host="local"), shown.model_dump_json(), repr(shown)):
        assert PASSWORD not in text
    assert "sealed" not in shown.model_dump()
    key = again.recovery_key(made.id)
    again.forget(made.id)
    with pytest.raises(BackupBadRequest):
        again.add(BackupRepositoryRequest.model_validate(request | {"peer": request["peer"] | {"credentials": {"token": "x"}}}))  # type: ignore[operator]
    back = again.add(BackupRepositoryRequest.model_validate(request | {"recovery_key": key}))
    assert again.opened(back.id).point_ids() == [point]
    for one in (repositories, again):
        one.close()
    store.close()


def test_runs_on_a_peer_keep_what_it_keeps_and_restore(tmp_path: Path) -> None:
    """Through the service: retention asks for one point, and the peer keeps all for thirty days."""
    home, guests = Peer(tmp_path / "home", keep_days=30), FakeGuests(tmp_path / "guests")
    store = Store(f"sqlite:///{tmp_path / 'test.db'}")
    backups = backups_of(store, guests, tmp_path)
    backups.start()
    with home.served():
        peer = {
            "url": home.place.url,
            "fingerprint_sha256": home.place.fingerprint_sha256,
            "credentials": {"user": USER, "password": PASSWORD},  # as sources call it
        }
        request = BackupRepositoryRequest.model_validate({"name": "there", "kind": "peer", "peer": peer})
        repository = backups.add_repository(request)
        lines = {"name": "nightly", "vm_ids": ("web",), "repository_id": repository.id, "retention": {"keep_last": 1}}
        guests.image("web", b"")
        job = backups.add_job(BackupJobRequest.model_validate(lines))
        points: list[UUID] = []
        for seed in (1, 2):
            guests.image("web", _noise(3, seed).content)
            run = ended(backups, backups.run_job(job.id).id)
            assert (run.status, run.error, run.warnings) == ("completed", None, ())
            points += run.restore_point_ids
        for seed, point in zip((1, 2), points, strict=True):
            assert backups.points.get(point).repository_kind == "peer"
            export = ended(backups, backups.restore(point, RestoreRequest(target="export", name=f"of-{seed}")).id)
            assert export.status == "completed", export.error
            (image,) = (tmp_path / f"exports/of-{seed}").glob("*.raw")
            assert [image.read_bytes() == _noise(3, seed).content] == [True]
        backups.close()
    store.close()


def test_a_worker_that_dies_after_its_point_exists_on_the_peer_is_replaced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The next worker commits the same point under the same id; the seal of a manifest has other bytes each time."""
    home, guests = Peer(tmp_path / "home", keep_days=30), FakeGuests(tmp_path / "guests")
    guests.image("web", _noise(3).content)
    commit, deaths = Session.commit, ["once"]

    def committed(self: Session, *given: Any) -> None:
        commit(self, *given)
        if deaths:
            deaths.pop()
            raise Gone

    monkeypatch.setattr(Session, "commit", committed)
    monkeypatch.setattr(working, "RETRY_PAUSES_S", (0.0,))
    store = Store(f"sqlite:///{tmp_path / 'test.db'}")
    backups = backups_of(store, guests, tmp_path)
    backups.start()
    with home.served():
        peer = {
            "url": home.place.url,
            "fingerprint_sha256": home.place.fingerprint_sha256,
            "credentials": {"username": USER, "password": PASSWORD},
        }
        request = BackupRepositoryRequest.model_validate({"name": "there", "kind": "peer", "peer": peer})
        repository = backups.add_repository(request)
        job = backups.add_job(BackupJobRequest(name="nightly", vm_ids=("web",), repository_id=repository.id))
        run = ended(backups, backups.run_job(job.id).id)
        assert (run.status, run.error, run.warnings, deaths) == ("completed", None, (), [])
        assert [f"{point}.point" for point in run.restore_point_ids] == [
            path.name for path in (home.folder / "points").iterdir()
        ]
        backups.close()
    store.close()


@pytest.mark.parametrize(
    "fields", [{"kind": "peer"}, {"kind": "local"}, {"kind": "peer", "path": "/x"}, {"kind": "nfs", "peer": {}}]
)
def test_a_repository_lies_in_one_place(fields: dict[str, object]) -> None:
    with pytest.raises(ValueError, match="peer"):
        BackupRepositoryRequest.model_validate({"name": "x", **fields})


@pytest.mark.parametrize("length", ["9" * 5000, "²", "-1", ""])
def test_a_length_that_is_none_says_nothing_of_a_body(length: str) -> None:
    answer: Any = SimpleNamespace(headers={"content-length": length}, read=lambda most: b"body")
    assert peer_folder._body(answer, 10) == b"body"
