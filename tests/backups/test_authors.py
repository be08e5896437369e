"""Who made a restore point: what a host signs, what others make of it, and what those who have the key cannot forge."""

import base64
import json
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any
from uuid import UUID, uuid4

import pytest
from blake3 import blake3

from synvirt.backups.authors import UNKNOWN, Author, Authors
from synvirt.backups.model import BackupJob, BackupRun, RestorePoint, RestoreRequest
from synvirt.backups.repositories import Repositories
from synvirt.errors import Internal, RepositoryDamaged
from synvirt.jobs import dataclass_json
from synvirt.proof.signing import HostKey
from synvirt.repository.folder import HostFolder
from synvirt.repository.keys import Keys, from_recovery_text, new_key, recovery_text
from synvirt.repository.manifest import DiskMap, Manifest, Mark, Named, Sealed, Shown, Signature, Unread, statement
from synvirt.repository.opening import OpenRepositories
from synvirt.repository.repository import Repository, create
from synvirt.repository.session import Session
from synvirt.repository.specs import FolderSpec, PointSpec, RepositorySpec
from tests.backups.house import House, disk_content
from tests.backups.restores.test_restore_script import _run as script
from tests.fakes.backups import authors_of, backups_of
from tests.needs import need
from tests.running.processes import until


class Shared:
    """A repository, and hosts that have its key."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.master = folder, new_key()
        (folder / "repository").mkdir()
        create(HostFolder(folder / "repository"), self.master)

    @property
    def repository(self) -> Repository:
        return Repository(HostFolder(self.folder / "repository"), self.master)

    def key(self, host: str) -> HostKey:
        return HostKey(self.folder / f"{host}.key", host)

    def point(self, author: Authors, *, disks: int = 0) -> UUID:
        """Its disks have no bytes."""
        maps, named = DiskMap(size_bytes=0, pages=()), Named(target="vda", path="/x", size_bytes=0)
        shown = Shown(id=uuid4(), created_at="2026-01-01T00:00:00Z", disks=(maps,) * disks)
        sealed = Sealed(
            vm_id="v",
            vm_name="web",
            consistency="offline",
            job_id=uuid4(),
            run_id=uuid4(),
            domain_xml="<domain/>",
            disks=(named,) * disks,
        )

        def sign(digest: str) -> Signature | None:
            return author.sign(statement(shown.id, digest))

        Session(self.repository).commit(Manifest(shown=shown, sealed=sealed), sign)
        return shown.id


@pytest.fixture
def shared(tmp_path: Path) -> Shared:
    return Shared(tmp_path)


def test_who_made_a_point_is_reported(shared: Shared, tmp_path: Path) -> None:
    ours, theirs = shared.key("kvm1"), shared.key("kvm2")
    point = shared.point(Authors(theirs))
    theirs_is = theirs.public.fingerprint
    assert Authors(theirs).of(shared.repository.unread(point)) == Author("own", theirs_is, "synvirt@kvm2")
    assert Authors(ours).of(shared.repository.unread(point)) == Author("unknown", theirs_is)
    signers = tmp_path / "signers"
    signers.write_text(f"# of the fleet\n\n{ours.allowed_signers}{theirs.allowed_signers}")
    assert Authors(ours, signers).of(shared.repository.unread(point)) == Author("known", theirs_is, "synvirt@kvm2")
    assert Authors(ours).of(shared.repository.unread(shared.point(Authors()))) == Author("none")


def test_ssh_keygen_says_the_same(shared: Shared, tmp_path: Path) -> None:
    tool, key = need("ssh-keygen", "openssh-client"), shared.key("kvm2")
    unread = shared.repository.unread(shared.point(Authors(key)))
    signature, signed = unread.signature, unread.statement
    assert signature is not None
    (tmp_path / "signers").write_text(key.allowed_signers)
    (tmp_path / "sig").write_text(signature.sshsig)
    for purpose, expected in (("synvirt-backup", 0), ("synvirt-receipt", 255)):
        files = ("-f", tmp_path / "signers", "-s", tmp_path / "sig")
        argv: list[str | Path] = [tool, "-Y", "verify", *files, "-I", "synvirt@kvm2", "-n", purpose]
        assert subprocess.run(argv, input=signed, capture_output=True, check=False).returncode == expected


def test_a_file_of_signers_that_is_none_is_an_error(shared: Shared, tmp_path: Path) -> None:
    point, signers = shared.point(Authors(shared.key("kvm2"))), tmp_path / "signers"
    with pytest.raises(Internal, match="cannot be read"):
        Authors(shared.key("kvm1"), signers).of(shared.repository.unread(point))
    signers.write_text("root ssh-rsa AAAA\n")
    with pytest.raises(Internal, match="synvirt receipt key"):
        Authors(shared.key("kvm1"), signers).of(shared.repository.unread(point))


# ── what those who have the repository's key make of a point ─────────────────────────────────────────────────────────

Change = Callable[[dict[str, Any], dict[str, Any]], None]


def rewritten(path: Path, master: bytes, change: Callable[[bytes, bytes], tuple[bytes, bytes]]) -> None:
    """Sealed again, and whole in all that the format itself checks."""
    keys = Keys(master)
    shown, sealed, _, _ = path.read_bytes().split(b"\n")
    shown, plain = change(shown, keys.unseal(base64.b64decode(sealed), belongs_to=shown, what="it"))
    body = shown + b"\n" + base64.b64encode(keys.seal(plain, belongs_to=shown)) + b"\n"
    path.write_bytes(body + blake3(body).hexdigest().encode() + b"\n")


def in_json(change: Change) -> Callable[[bytes, bytes], tuple[bytes, bytes]]:
    def changed(shown: bytes, plain: bytes) -> tuple[bytes, bytes]:
        outer, inner = json.loads(shown), json.loads(plain)
        change(outer, inner)
        compact = {"separators": (",", ":"), "ensure_ascii": False}
        return json.dumps(outer, **compact).encode(), json.dumps(inner, **compact).encode()  # type: ignore[arg-type]

    return changed


def twice(shown: bytes, plain: bytes) -> tuple[bytes, bytes]:
    """The last of two fields of a name is read: what is signed says less."""
    before, mark, last = plain.rpartition(b',"signature":')
    return shown, before + mark + last[:-1] + b',"domain_xml":"<evil/>"}'


def smuggled(shown: bytes, plain: bytes) -> tuple[bytes, bytes]:
    before, mark, last = plain.rpartition(b',"signature":')
    return shown, before[:1] + b'"signature":null,' + before[1:-1] + b',"domain_xml":"<evil/>"' + before[-1:] + mark + last


FORGERIES: dict[str, Callable[[bytes, bytes], tuple[bytes, bytes]]] = {
    "domain": in_json(lambda outer, inner: inner.update(domain_xml="<evil/>")),
    "guest": in_json(lambda outer, inner: inner.update(vm_name="db")),
    "moment": in_json(lambda outer, inner: outer.update(created_at="2027-01-01T00:00:00Z")),
    "disks": in_json(
        lambda outer, inner: (
            outer.update(disks=[{"size_bytes": 5, "pages": ["0" * 64]}]),
            inner.update(disks=[{"target": "vda", "path": "/x", "size_bytes": 5}]),
        )[0]
    ),
    "signature": in_json(
        lambda outer, inner: inner["signature"].update(sshsig=inner["signature"]["sshsig"].replace("U1NIU0lH", "U1NIU0lI"))
    ),
    "key": in_json(lambda outer, inner: inner["signature"].update(key="ssh-ed25519 AAAA")),
    "behind it": twice,
    "a second one": smuggled,
}


@pytest.mark.parametrize("forgery", FORGERIES)
def test_what_was_signed_is_changed_by_nobody(shared: Shared, forgery: str) -> None:
    key = shared.key("kvm2")
    point = shared.point(Authors(key))
    path = shared.folder / "repository/points" / f"{point}.point"
    rewritten(path, shared.master, lambda shown, plain: (shown, plain))
    assert Authors(key).of(shared.repository.unread(point)).standing == "own"  # so it is the change that shows below
    rewritten(path, shared.master, FORGERIES[forgery])
    with pytest.raises(RepositoryDamaged):
        Authors(key).of(shared.repository.unread(point))


def test_a_signature_is_of_one_point(shared: Shared) -> None:
    """Another of the same host's, under a new point's id."""
    key = shared.key("kvm2")
    first, second = (shared.point(Authors(key)) for _ in range(2))
    taken = shared.repository.unread(first).signature
    assert taken is not None
    path = shared.folder / "repository/points" / f"{second}.point"
    rewritten(path, shared.master, in_json(lambda outer, inner: inner.update(signature=taken.model_dump())))
    with pytest.raises(RepositoryDamaged, match="not what its author signed"):
        Authors(key).of(shared.repository.unread(second))


def test_another_s_key_makes_another_author_and_no_key_none(shared: Shared) -> None:
    """What cannot be prevented: a warning says it."""
    point = shared.point(Authors(shared.key("kvm2")))
    path = shared.folder / "repository/points" / f"{point}.point"
    rewritten(path, shared.master, in_json(lambda outer, inner: inner.pop("signature")))
    assert Authors(shared.key("kvm2")).of(shared.repository.unread(point)) == Author("none")


def test_a_signature_is_no_other_host_s(shared: Shared) -> None:
    key = shared.key("kvm2")
    with pytest.raises(RepositoryDamaged):
        Authors(key).of(shared.repository.unread(shared.point(Forger(shared.key("kvm3"), key))))


class Forger(Authors):
    """Signs with a key of its own, and calls it another's."""

    def __init__(self, own: HostKey, named: HostKey) -> None:
        super().__init__(own)
        self._named = named

    def sign(self, statement: bytes) -> Signature | None:
        signature = super().sign(statement)
        return signature and signature.model_copy(update={"key": self._named.public.line})


# ── runs ─────────────────────────────────────────────────────────────────────────────────────────────────────────────


def backed_up(house: House) -> UUID:
    house.image("web", disk_content())
    (point,) = house.run(house.job("web")).restore_point_ids
    return point


def as_another_host(house: House, *, signers: Path | None = None) -> None:
    """The same repository, by a host with a key of its own."""
    house.backups.close()
    (house.folder / "other").mkdir(exist_ok=True)
    other = authors_of(house.folder / "other", host="kvm9", signers=signers)
    house.backups = backups_of(house.store, house.guests, house.folder, authors=other)
    house.backups.start()


EXPORT = RestoreRequest(target="export")


def test_our_own_points_are_restored_without_a_word(house: House) -> None:
    point = backed_up(house)
    assert house.backups.points.get(point).signed_by == authors_of(house.folder).fingerprint
    for run in (house.backups.restore(point, EXPORT), house.backups.verify(point)):
        ended = house.ended(run)
        assert (ended.status, ended.warnings) == ("completed", ())


def test_a_restore_and_a_verification_say_whose_key_is_not_known(house: House, tmp_path: Path) -> None:
    point = backed_up(house)
    fingerprint = authors_of(house.folder).fingerprint
    assert fingerprint is not None
    as_another_host(house)
    repository = house.backups.points.get(point).repository_id
    runs: tuple[Callable[[], BackupRun], ...] = (
        lambda: house.backups.restore(point, EXPORT),
        lambda: house.backups.verify(point),
        lambda: house.backups.verify_repository(repository),
    )
    for begin in runs:
        ended = house.ended(begin())
        assert ended.status == "completed", ended.error
        (warning,) = ended.warnings
        assert warning.code == UNKNOWN
        assert fingerprint in warning.message
    signers = tmp_path / "signers"
    signers.write_text(HostKey(house.folder / "keyring/receipts.key", "local").allowed_signers)
    as_another_host(house, signers=signers)
    assert house.ended(house.backups.restore(point, EXPORT)).warnings == ()


def test_a_restore_says_that_a_point_is_not_signed(house: House) -> None:
    house.backups.close()
    house.backups = backups_of(house.store, house.guests, house.folder, authors=Authors())
    house.backups.start()
    point = backed_up(house)
    assert house.backups.points.get(point).signed_by is None
    as_another_host(house)
    (warning,) = house.ended(house.backups.restore(point, EXPORT)).warnings
    assert (warning.code, warning.message.partition(":")[0]) == (UNKNOWN, "not signed")


def test_a_forged_point_is_restored_by_nobody_and_damaged_for_a_verification(house: House) -> None:
    point = backed_up(house)
    known = house.backups.points.get(point)
    master = from_recovery_text(house.backups.repositories.recovery_key(known.repository_id))
    rewritten(house.folder / "repository/points" / f"{point}.point", master, FORGERIES["domain"])
    exports = house.folder / "exports"
    restored = house.ended(house.backups.restore(point, EXPORT))
    assert (restored.status, restored.error and restored.error.code) == ("failed", RepositoryDamaged.code)
    assert not exports.exists() or not list(exports.iterdir())
    assert house.ended(house.backups.verify(point)).status == "failed"
    assert house.backups.points.get(point).state == "damaged"
    whole = house.ended(house.backups.verify_repository(known.repository_id))
    assert whole.report is not None
    assert whole.report.damaged_points == (point,)
    assert "not what its author signed" in whole.report.wrongs[0]


def begun(house: House, kind: str, point: UUID) -> BackupRun:
    return house.backups.restore(point, EXPORT) if kind == "restore" else house.backups.verify(point)


# Of runs that read a point and need no hypervisor.
READING = pytest.mark.parametrize("kind", ["restore", "verification"])


@READING
def test_a_point_that_is_swapped_after_its_author_was_checked_is_damaged(
    house: House, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A genuine one for an unsigned one: no warning could come any more."""
    point = backed_up(house)
    swap_after_check(monkeypatch, house.folder, house.backups.repositories, house.backups.points.get(point))
    ended = house.ended(begun(house, kind, point))
    assert ended.error is not None
    assert (ended.status, ended.error.code, ended.warnings) == ("failed", RepositoryDamaged.code, ())
    assert "not the one whose author was checked" in ended.error.message
    assert kind != "restore" or not list((house.folder / "exports").iterdir())
    assert kind == "restore" or house.backups.points.get(point).state == "damaged"


@READING
def test_a_run_that_goes_on_takes_no_other_manifest_than_it_began_with(
    house: House, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    point = backed_up(house)
    master = from_recovery_text(house.backups.repositories.recovery_key(house.backups.points.get(point).repository_id))
    reads, stops, read_chunk = threading.Event(), house.backups.runs._stops, Repository.read_chunk

    def held(self: Repository, name: bytes, into: memoryview) -> None:
        reads.set()
        until(lambda: all(stop.is_set() for stop in stops.values()))  # the service ends
        read_chunk(self, name, into)

    with monkeypatch.context() as patched:
        patched.setattr(Repository, "read_chunk", held)
        run = begun(house, kind, point)
        assert reads.wait(60)
        house.backups.close()
    path = house.folder / f"repository/points/{point}.point"
    rewritten(path, master, in_json(lambda outer, inner: (inner.pop("signature"), inner.update(vm_name="evil"))[1]))
    house.backups = backups_of(house.store, house.guests, house.folder)
    house.backups.start()
    ended = house.ended(run)
    assert ended.error is not None
    assert (ended.status, ended.error.code, ended.resumed_count) == ("failed", RepositoryDamaged.code, 1)
    assert "replaced meanwhile" in ended.error.message


def test_changes_are_counted_from_no_point_whose_author_is_not_known(house: House) -> None:
    house.guests.mark = Mark(kind="checkpoint", name="one")
    point = backed_up(house)
    (job,) = house.backups.all_jobs()
    path, master = house.folder / f"repository/points/{point}.point", _master(house, job)
    genuine = path.read_bytes()
    rewritten(path, master, in_json(lambda outer, inner: inner.pop("signature")))
    house.run(job)
    path.write_bytes(genuine)
    house.run(job)
    assert house.guests.bases[1:] == [None, house.backups.points.all()[1].id]


def test_a_base_that_is_swapped_after_its_author_was_checked_is_not_counted_from(
    house: House, monkeypatch: pytest.MonkeyPatch
) -> None:
    house.guests.mark = Mark(kind="checkpoint", name="one")
    point = backed_up(house)
    (job,) = house.backups.all_jobs()
    path, master, is_known = house.folder / f"repository/points/{point}.point", _master(house, job), Authors.is_known

    def swapped(self: Authors, unread: Unread) -> bool:
        known = is_known(self, unread)
        rewritten(path, master, FORGERIES["disks"])
        return known

    monkeypatch.setattr(Authors, "is_known", swapped)
    ended = house.run(job)
    assert house.guests.bases == [None, point]
    assert (ended.status, ended.error and ended.error.code) == ("failed", RepositoryDamaged.code)


def _master(house: House, job: BackupJob) -> bytes:
    return from_recovery_text(house.backups.repositories.recovery_key(job.repository_id))


def swap_after_check(monkeypatch: pytest.MonkeyPatch, folder: Path, repositories: Repositories, point: RestorePoint) -> None:
    """As soon as its author was checked another manifest lies in its place, which nobody has signed."""
    master = from_recovery_text(repositories.recovery_key(point.repository_id))
    warn = Authors.warn

    def swapped(inner: dict[str, Any]) -> None:
        inner.pop("signature", None)
        inner["vm_name"] = "evil"

    def warned(*arguments: Any) -> Author | None:
        author = warn(*arguments)
        path = folder / f"repository/points/{point.id}.point"
        rewritten(path, master, in_json(lambda outer, inner: swapped(inner)))
        return author

    monkeypatch.setattr(Authors, "warn", warned)


def test_a_disk_of_a_point_is_opened_as_it_was_checked_or_as_it_is(shared: Shared) -> None:
    """The hash is of what is signed, not of the signature or of how it is sealed. An order without one takes what is there."""
    point, folder = shared.point(Authors(shared.key("kvm2")), disks=1), shared.folder / "repository"
    path, sha256 = folder / f"points/{point}.point", shared.repository.manifest(point).sha256
    assert sha256 == shared.repository.unread(point).sha256

    def opened(sha256: str | None) -> None:
        here = RepositorySpec(place=FolderSpec(path=str(folder)), key=base64.b64encode(shared.master).decode())
        line = dataclass_json.dump(PointSpec(repository=here, point_id=str(point), number=0, sha256=sha256))
        with OpenRepositories() as repositories:
            repositories.point(dataclass_json.load(PointSpec, line)).close()

    opened(sha256)
    rewritten(path, shared.master, in_json(lambda outer, inner: inner.pop("signature")))
    opened(sha256)  # it says the same
    rewritten(path, shared.master, FORGERIES["domain"])
    opened(None)
    with pytest.raises(RepositoryDamaged, match="replaced meanwhile") as caught:
        opened(sha256)
    assert caught.value.hint


def test_a_host_that_takes_a_repository_up_knows_who_signed(house: House, tmp_path: Path) -> None:
    point = backed_up(house)
    signed_by = house.backups.points.get(point).signed_by
    key = house.backups.repositories.recovery_key(house.backups.points.get(point).repository_id)
    (tmp_path / "second").mkdir()
    second = House(tmp_path / "second")
    try:
        shutil.rmtree(second.folder / "repository")
        shutil.copytree(house.folder / "repository", second.folder / "repository")
        second.repository(recovery_key=key)
        assert second.backups.points.get(point).signed_by == signed_by
        (warning,) = second.ended(second.backups.restore(point, EXPORT)).warnings
        assert warning.code == UNKNOWN
    finally:
        second.close()


def test_a_mount_says_whose_key_is_not_known_and_serves_nothing_forged(house: House) -> None:
    point = backed_up(house)
    repository = house.backups.points.get(point).repository_id
    master = from_recovery_text(house.backups.repositories.recovery_key(repository))
    house.close()
    (house.folder / "test.db").rename(house.folder / "migrator.db")
    (house.folder / "keyring/receipts.key").unlink()
    command = [sys.executable, "-m", "synvirt", "backup", "mount", str(point), "--data-dir", str(house.folder), "--json"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as child:
        try:
            assert child.stdout is not None
            assert json.loads(child.stdout.readline())["disks"]
            child.send_signal(signal.SIGINT)
            assert UNKNOWN in child.communicate(timeout=60)[1]
        finally:
            child.kill()
    rewritten(house.folder / "repository/points" / f"{point}.point", master, FORGERIES["domain"])
    refused = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    error = json.loads(refused.stdout)["error"]
    assert (refused.returncode, error["code"]) == (1, RepositoryDamaged.code)
    assert "not what its author signed" in error["detail"]


def test_the_script_says_whose_key_it_was_and_refuses_what_is_forged(shared: Shared) -> None:
    host, key = shared.key("kvm2"), recovery_text(shared.master)
    point, folder = shared.point(Authors(host)), str(shared.folder / "repository")
    assert f"signed by {host.public.fingerprint}" in script(folder, key=key).stdout
    for forgery in ("domain", "moment", "signature", "key", "behind it"):
        path = shared.folder / "repository/points" / f"{point}.point"
        whole = path.read_bytes()
        rewritten(path, shared.master, FORGERIES[forgery])
        result = script(folder, str(point), str(shared.folder / "out"), key=key)
        assert (result.returncode, "not what its author signed" in result.stderr) == (1, True), (forgery, result.stderr)
        path.write_bytes(whole)
    shared.point(Authors())
    assert "(not signed)" in script(folder, key=key).stdout
