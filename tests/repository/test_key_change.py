"""A repository's key is changed: the new one opens all, the old one nothing that is written from then on."""

import contextlib
import os
from collections.abc import Callable
from pathlib import Path
from typing import get_args

import pytest

from synvirt.backups.model import BackupJobRequest, BackupRepositoryRequest, BackupRun, RestoreRequest
from synvirt.backups.repositories import Repositories
from synvirt.errors import (
    BackupBadRequest,
    BackupConflict,
    BackupImmutable,
    RepositoryDamaged,
    RepositoryKeyWrong,
)
from synvirt.repository import key_change
from synvirt.repository.folder import HostFolder, put
from synvirt.repository.keys import CHUNK_BYTES, Keys, from_recovery_text, new_key
from synvirt.repository.manifest import HERE
from synvirt.repository.peer_offer import Offer
from synvirt.repository.repository import FOLDERS, Repository, change_key, create
from synvirt.repository.verify import verify_repository
from synvirt.store import Store
from tests.backups.peers import PASSWORD, USER, Peer
from tests.backups.restores.test_restore_script import _run
from tests.backups.test_peer_offer import OfferFolder
from tests.drawn import drawn
from tests.fakes.backups import FakeGuests, backups_of, ended
from tests.fakes.disks import MemoryReader
from tests.repository.points import KEY, back_up, restored


def noise(seed: int, chunks: int = 3) -> MemoryReader:
    found = MemoryReader("A" * chunks, block_bytes=CHUNK_BYTES)
    found.content = drawn(len(found.content), seed=seed)
    return found


@pytest.fixture
def folder(tmp_path: Path) -> HostFolder:
    (tmp_path / "repository").mkdir()
    made = HostFolder(tmp_path / "repository")
    create(made, KEY)
    return made


def test_the_newest_key_opens_all_and_an_older_one_nothing_new(folder: HostFolder, tmp_path: Path) -> None:
    from synvirt.repository.keys import recovery_text

    keys, points = [KEY, new_key(), new_key()], []
    for number, key in enumerate(keys):
        if number:
            change_key(folder, keys[number - 1], key)
            change_key(folder, keys[number - 1], key)  # once more is as good as once
        repository = Repository(folder, key)
        points.append(back_up(repository, noise(7), noise(number)))
        assert [repository.is_current(point) for point in points] == [False] * number + [True]
    repository = Repository(folder, keys[-1])
    for number, point in enumerate(points):
        assert restored(repository, point) == [noise(7).content, noise(number).content]
        script = _run(str(tmp_path / "repository"), str(point), str(tmp_path / f"out{number}"), key=recovery_text(keys[-1]))
        assert script.returncode == 0, script.stderr
        assert [(tmp_path / f"out{number}/0-disk0.raw").read_bytes() == noise(7).content] == [True]
    assert verify_repository(repository).wrongs == ()
    for old in keys[:-1]:
        with pytest.raises(RepositoryKeyWrong, match="newer key"):
            Repository(folder, old)
        for point in points[keys.index(old) + 1 :]:
            with pytest.raises(RepositoryDamaged):
                repository_by(folder, old).manifest(point)
    with pytest.raises(RepositoryKeyWrong, match="not the key"):
        Repository(folder, new_key())
    with pytest.raises(RepositoryKeyWrong):
        change_key(folder, keys[0], new_key())
    with pytest.raises(RepositoryKeyWrong):
        change_key(folder, new_key(), new_key())


def repository_by(folder: HostFolder, key: bytes) -> Repository:
    """As somebody opens it who has an old key, and does not care that there is a newer one."""
    made = Repository.__new__(Repository)
    made.folder, made.keys, made._reading = folder, Keys(key), HERE  # type: ignore[assignment]
    return made


def test_nothing_of_an_older_key_is_in_what_is_written_with_the_newest(folder: HostFolder) -> None:
    old = back_up(Repository(folder, KEY), noise(1))
    new = new_key()
    change_key(folder, KEY, new)
    repository = Repository(folder, new)
    names = {name for disk in repository.shown(old).disks for name in _names(repository, disk)}
    point = back_up(repository, noise(1))
    assert names.isdisjoint(name for disk in repository.shown(point).disks for name in _names(repository, disk))
    assert restored(repository, point) == [noise(1).content]


def _names(repository: Repository, disk: object) -> list[bytes]:
    found = repository.chunk_names(disk)  # type: ignore[arg-type]
    return [found[at : at + 32] for at in range(0, len(found), 32)]


def test_who_has_not_the_key_changes_it_for_nobody(folder: HostFolder) -> None:
    """Files of a stranger who may write there: read, and of no effect."""
    point = back_up(Repository(folder, KEY), noise(1))
    stranger, other = new_key(), new_key()
    key_change.write(folder, stranger, other)
    for name, content in (("0" * 64, b"[]"), ("1" * 64, b"{}"), ("2" * 64, b"\xff"), ("3" * 64, b"[" * 4000), ("x", b"")):
        put(folder, f"{key_change.FOLDER}/{name}", [content])
    # One whose «before» is a key of the stranger's own leads from it to no other.
    forged = Keys(other)
    put(
        folder,
        f"{key_change.FOLDER}/{'4' * 64}",
        [b'{"key_check": "%s", "before": "", "by": ""}' % forged.check.encode()],
    )
    assert restored(Repository(folder, KEY), point) == [noise(1).content]
    for key in (stranger, other):
        with pytest.raises(RepositoryKeyWrong):
            Repository(folder, key)


def test_files_of_a_stranger_hide_no_change_of_the_key(folder: HostFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    """The older key, which is known to have leaked, would be the newest again."""
    newest = new_key()
    key_change.write(folder, KEY, newest)
    for number in range(key_change.CHANGES_MAX):
        put(folder, f"{key_change.FOLDER}/{number:064}", [b"{}"])
    with pytest.raises(RepositoryKeyWrong, match="newer key"):
        Repository(folder, KEY)
    Repository(folder, newest)
    monkeypatch.setattr(key_change, "FILES_MAX", key_change.CHANGES_MAX)
    for key in (KEY, newest):
        with pytest.raises(RepositoryDamaged, match="101 files"):
            Repository(folder, key)


def test_a_peer_keeps_the_changes_and_removes_none(tmp_path: Path) -> None:
    folder = OfferFolder(Offer(tmp_path, keep_s=0))
    create(folder, KEY)
    point = back_up(Repository(folder, KEY), noise(1))
    new = new_key()
    change_key(folder, KEY, new)
    assert restored(Repository(folder, new), point) == [noise(1).content]
    name = f"{key_change.FOLDER}/{Keys(new).check}"
    with pytest.raises(BackupImmutable):
        folder.delete(name)
    for other in (b"x", b"{}", folder.read(name).replace(b'"before"', b'"after"') + b"x"):
        with pytest.raises(BackupBadRequest):
            folder.put(f"{key_change.FOLDER}/{'5' * 64}", other)


@pytest.mark.parametrize("kind", ["local", "peer"])
@pytest.mark.parametrize("dies_at", range(9))
def test_a_change_that_is_cut_off_is_ended_by_who_opens_next(
    tmp_path: Path, kind: str, dies_at: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At each of its calls that write: the keyring, the repository, the store."""
    home = Peer(tmp_path / "home")
    store = Store(f"sqlite:///{tmp_path / 'test.db'}")
    (tmp_path / "here").mkdir()
    (tmp_path / "keyring").mkdir()

    def repositories() -> Repositories:
        return Repositories(store.backups, host="local", keyring=tmp_path / "keyring")

    with home.served() if kind == "peer" else contextlib.nullcontext():
        place: dict[str, object] = {"path": str(tmp_path / "here")}
        if kind == "peer":
            account = {"username": USER, "password": PASSWORD}
            url, fingerprint = home.place.url, home.place.fingerprint_sha256
            place = {"peer": {"url": url, "fingerprint_sha256": fingerprint, "credentials": account}}
        before = repositories()
        known = before.add(BackupRepositoryRequest.model_validate({"name": "one", "kind": kind} | place))
        old = from_recovery_text(before.recovery_key(known.id))
        point = back_up(before.opened(known.id), noise(1))
        calls = 0

        def dying(real: Callable[..., object]) -> Callable[..., object]:
            def call(*given: object, **named: object) -> object:
                nonlocal calls
                calls += 1
                if calls > dies_at:
                    raise Died
                return real(*given, **named)

            return call

        with monkeypatch.context() as dead:
            dead.setattr(os, "link", dying(os.link))
            dead.setattr(Path, "replace", dying(Path.replace))
            dead.setattr(key_change, "put", dying(put))
            dead.setattr(Repositories, "_write_key", dying(Repositories._write_key))
            dead.setattr(type(store.backups), "put", dying(type(store.backups).put))
            with contextlib.suppress(Died):
                before.change_key(known.id)
        kept = [one.read_bytes() for one in (tmp_path / "keyring").glob("backup-*.key*")] != [old]
        before.close()
        after = repositories()
        assert restored(after.opened(known.id), point) == [noise(1).content]
        again = back_up(after.opened(known.id), noise(2))
        new = from_recovery_text(after.recovery_key(known.id))
        assert (new != old) is kept is (dies_at > 1), "it is changed as soon as the next key is kept"
        assert not list((tmp_path / "keyring").glob("*.new"))
        third = repositories()
        assert restored(third.opened(known.id), again) == [noise(2).content]
        assert third.spec(known.id).key
        newest = third.change_key(known.id)
        assert restored(third.opened(known.id), point) == [noise(1).content]
        assert from_recovery_text(newest) not in (old, new)
        for one in (after, third):
            one.close()
    store.close()


class Died(Exception):
    pass


def test_a_next_key_that_is_half_written_is_nobodys(tmp_path: Path) -> None:
    store = Store(f"sqlite:///{tmp_path / 'test.db'}")
    for name in ("keyring", "here"):
        (tmp_path / name).mkdir()
    made = Repositories(store.backups, host="local", keyring=tmp_path / "keyring")
    known = made.add(BackupRepositoryRequest.model_validate({"name": "one", "kind": "local", "path": str(tmp_path / "here")}))
    (tmp_path / f"keyring/backup-{known.id}.key.new").write_bytes(b"half")
    key = made.recovery_key(known.id)
    assert back_up(made.opened(known.id), noise(1))
    assert made.recovery_key(known.id) == key
    assert made.change_key(known.id) != key
    made.close()
    store.close()


def test_a_lost_key_is_named_and_no_other_is_made_in_its_place(tmp_path: Path) -> None:
    """Its recovery key would open nothing; and a copy of the lost file is put back where it was."""
    store = Store(f"sqlite:///{tmp_path / 'test.db'}")
    for name in ("keyring", "here"):
        (tmp_path / name).mkdir()
    made = Repositories(store.backups, host="local", keyring=tmp_path / "keyring")
    known = made.add(BackupRepositoryRequest.model_validate({"name": "one", "kind": "local", "path": str(tmp_path / "here")}))
    right = made.recovery_key(known.id)
    made.close()
    path = tmp_path / f"keyring/backup-{known.id}.key"
    kept = path.rename(tmp_path / "copy")
    again = Repositories(store.backups, host="local", keyring=tmp_path / "keyring")
    for ask in (again.recovery_key, again.opened, again.spec, again.change_key):
        with pytest.raises(RepositoryKeyWrong, match=f"there is no {path.name}"):
            ask(known.id)
        assert not path.exists()
    shown = again.shown(known)
    assert shown.state == "unreachable"
    assert path.name in (shown.problem or "")
    kept.rename(path)
    assert back_up(again.opened(known.id), noise(1))
    assert again.recovery_key(known.id) == right
    again.close()
    store.close()


@pytest.mark.parametrize("recorded", [True, False])
@pytest.mark.parametrize("kind", get_args(BackupRun.model_fields["kind"].annotation))
def test_a_key_is_not_changed_while_a_run_uses_the_repository(
    kind: str, recorded: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run of any kind. `recorded`: its row says which repository it uses; older rows name only a point."""
    store, guests = Store(f"sqlite:///{tmp_path / 'test.db'}"), FakeGuests(tmp_path / "images")
    guests.image("web", noise(1).content)
    with contextlib.closing(backups_of(store, guests, tmp_path)) as backups:
        backups.start()
        known = []
        for name in ("here", "there"):
            (tmp_path / name).mkdir()
            request = {"name": name, "kind": "local", "path": str(tmp_path / name)}
            known.append(backups.add_repository(BackupRepositoryRequest.model_validate(request)))
        here, there = (one.id for one in known)
        job = backups.add_job(BackupJobRequest(name="nightly", vm_ids=("web",), repository_id=here))
        (point,) = ended(backups, backups.run_job(job.id).id).restore_point_ids
        ask: dict[str, Callable[[], BackupRun]] = {
            "backup": lambda: backups.run_job(job.id),
            "restore": lambda: backups.restore(point, RestoreRequest(target="export")),
            "verify": lambda: backups.verify(point),
            "boot_test": lambda: backups.boot_test(point),
            "collect": lambda: backups.collect(here, dry_run=True),
        }
        monkeypatch.setattr(backups, "_testing", lambda: None)
        # It waits for its turn, until it is cancelled.
        monkeypatch.setattr(backups.runs._turns, "_most", 0)
        monkeypatch.setattr(backups.runs._urgent, "_most", 0)
        run = ask[kind]()
        if not recorded and run.restore_point_ids:
            backups.runs._save(run.model_copy(update={"repository_id": None}))
        with pytest.raises(BackupConflict, match=str(run.id)):
            backups.change_key(here)
        backups.change_key(there)
        backups.runs.cancel(run.id)
        assert backups.change_key(here)
    store.close()


def test_a_repository_of_before_there_were_changes_is_opened_as_it_was(folder: HostFolder, tmp_path: Path) -> None:
    (tmp_path / "repository/keys").rmdir()
    point = back_up(Repository(folder, KEY), noise(1))
    assert restored(Repository(folder, KEY), point) == [noise(1).content]
    assert "keys" in FOLDERS
    new = new_key()
    change_key(folder, KEY, new)
    assert restored(Repository(folder, new), point) == [noise(1).content]


@pytest.mark.parametrize("is_ended", [True, False])
def test_of_two_hosts_that_change_the_key_at_once_no_two_have_done_it(
    folder: HostFolder, tmp_path: Path, is_ended: bool
) -> None:
    """Each would write points that the other cannot open. `is_ended`: the other has looked for ours before that was there."""
    mine, theirs = new_key(), new_key()
    here = HostFolder(tmp_path / "repository")

    class Late(HostFolder):
        def rename(self, old: str, new: str) -> None:
            if is_ended:
                change_key(here, KEY, theirs)
            else:
                key_change.write(here, KEY, theirs)
            super().rename(old, new)

    with pytest.raises(BackupConflict, match="another host"):
        change_key(Late(tmp_path / "repository"), KEY, mine)
    assert [one.name for one in folder.entries(key_change.FOLDER)] == [Keys(theirs).check]
    change_key(folder, KEY, theirs)  # its host looks by now, or once more
    point = back_up(Repository(folder, theirs), noise(1))
    assert restored(Repository(folder, theirs), point) == [noise(1).content]
    for key, why in ((mine, "not the key"), (KEY, "newer key")):
        with pytest.raises(RepositoryKeyWrong, match=why):
            Repository(folder, key)
    with pytest.raises(RepositoryKeyWrong, match="newer key"):
        change_key(folder, KEY, mine)
