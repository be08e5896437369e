"""The sealing key: its file, and what it seals."""

import errno
import fcntl
import os
import stat
from collections.abc import Callable
from pathlib import Path

import pytest

from synvirt.errors import SynvirtError
from synvirt.keyring import Keyring, KeyUnusable, migrator_key, seal, unseal
from tests.needs import need_root


def test_the_key_is_made_once_with_its_mode(tmp_path: Path) -> None:
    path = tmp_path / "migrator.key"
    key = migrator_key(path)
    assert len(key) == 32
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert migrator_key(path) == key


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o400])
def test_a_key_that_others_may_have_read_is_refused(tmp_path: Path, mode: int) -> None:
    path = tmp_path / "migrator.key"
    migrator_key(path)
    path.chmod(mode)
    with pytest.raises(KeyUnusable, match=f"{mode:04o}"):
        migrator_key(path)


def names(folder: Path) -> list[str]:
    return sorted(one.name for one in folder.iterdir())


class Crashed(BaseException):
    """The process ends here."""


@pytest.mark.parametrize("moment", ["fsync", "link", "unlink"])
def test_a_start_that_ends_while_the_key_is_made_leaves_none_or_all_of_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, moment: str
) -> None:
    path = tmp_path / "migrator.key"

    def crash(*_: object, **__: object) -> None:
        raise Crashed

    with monkeypatch.context() as patched:
        patched.setattr(os, moment, crash)
        patched.setattr(Path, "unlink", crash)  # nothing is tidied up
        with pytest.raises(Crashed):
            migrator_key(path)
    assert path.exists() == (moment == "unlink")
    assert names(tmp_path) != ["migrator.key"]  # half made, or named twice
    key = migrator_key(path)
    assert len(key) == 32
    assert migrator_key(path) == key
    assert names(tmp_path) == ["migrator.key"]


def test_of_the_next_key_too_nothing_half_made_stays_and_of_others_all(tmp_path: Path) -> None:
    others = [".migrator.key.0123", ".migrator.key.bak", ".other.key.0123456789abcdef", "migrator.key.0123456789abcdef"]
    for name in (*others, ".migrator.key.0123456789abcdef", ".migrator.key.new.fedcba9876543210"):
        (tmp_path / name).write_bytes(bytes(32))
    Keyring(tmp_path / "migrator.key")
    assert names(tmp_path) == sorted([*others, "migrator.key"])


def test_a_key_that_is_being_made_is_not_swept(tmp_path: Path) -> None:
    path = tmp_path / "migrator.key"
    half = tmp_path / ".migrator.key.0123456789abcdef"
    half.write_bytes(b"half")
    folder = os.open(tmp_path, os.O_RDONLY)
    try:
        fcntl.flock(folder, fcntl.LOCK_SH)  # as whoever makes one does
        migrator_key(path)
        assert half.exists()
    finally:
        os.close(folder)
    migrator_key(path)
    assert not half.exists()


def test_a_file_system_without_locks_has_keys_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def none(*_: object) -> None:
        raise OSError(errno.ENOLCK, "no locks available")

    monkeypatch.setattr(fcntl, "flock", none)
    assert len(migrator_key(tmp_path / "migrator.key")) == 32


def test_of_two_that_make_the_key_both_use_the_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "migrator.key"
    first: list[bytes] = []
    sync = os.fsync

    def overtaken(descriptor: int) -> None:
        monkeypatch.setattr(os, "fsync", sync)
        first.append(migrator_key(path))
        sync(descriptor)

    monkeypatch.setattr(os, "fsync", overtaken)
    assert [migrator_key(path)] == first
    assert [one.name for one in tmp_path.iterdir()] == ["migrator.key"]


@pytest.mark.parametrize("size", [0, 31, 33])
def test_a_key_of_another_size_is_refused(tmp_path: Path, size: int) -> None:
    path = tmp_path / "migrator.key"
    path.write_bytes(bytes(size))
    path.chmod(0o600)
    with pytest.raises(KeyUnusable, match="not 32"):
        migrator_key(path)


def test_a_link_to_another_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "elsewhere").write_bytes(bytes(32))
    (tmp_path / "elsewhere").chmod(0o600)
    (tmp_path / "migrator.key").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(KeyUnusable):
        migrator_key(tmp_path / "migrator.key")


def test_what_is_sealed_opens_for_its_owner_alone(tmp_path: Path) -> None:
    key = migrator_key(tmp_path / "key")
    sealed = seal(key, b"secret", belongs_to=b"source 1")
    assert unseal(key, sealed, belongs_to=b"source 1") == b"secret"
    assert b"secret" not in sealed
    assert sealed != seal(key, b"secret", belongs_to=b"source 1")
    other = migrator_key(tmp_path / "other")
    attempts: tuple[Callable[[], bytes], ...] = (
        lambda: unseal(key, sealed, belongs_to=b"source 2"),
        lambda: unseal(other, sealed, belongs_to=b"source 1"),
        lambda: unseal(key, sealed[:-1], belongs_to=b"source 1"),
        lambda: unseal(key, bytes([sealed[0] ^ 1]) + sealed[1:], belongs_to=b"source 1"),
        lambda: unseal(key, b"", belongs_to=b"source 1"),
    )
    for wrong in attempts:
        with pytest.raises(SynvirtError):
            wrong()


def test_root_opens_the_key_of_a_service_that_is_another_user_and_no_other_s(tmp_path: Path) -> None:
    """`synvirt doctor` and `synvirt backup mount`, called by root."""
    need_root("a key of another user's")
    path = tmp_path / "keyring/migrator.key"
    path.parent.mkdir(mode=0o700)
    key = migrator_key(path)
    for one in (path.parent, path):
        os.chown(one, 12345, 12345)
    assert migrator_key(path) == key
    os.chown(path, 12346, 12345)
    with pytest.raises(KeyUnusable, match="belongs to user 12346"):
        migrator_key(path)


@pytest.mark.parametrize("make", [os.mkdir, os.mkfifo])
def test_what_is_no_file_is_refused_at_once(tmp_path: Path, make: Callable[[Path], None]) -> None:
    path = tmp_path / "migrator.key"
    make(path)
    with pytest.raises(KeyUnusable, match=r"migrator\.key is not a file"):
        migrator_key(path)


def test_the_hint_names_what_this_key_is_for(tmp_path: Path) -> None:
    hints = {}
    for name in ("migrator.key", "receipts.key", "other.key"):
        migrator_key(tmp_path / name)
        (tmp_path / name).write_bytes(b"short")
        with pytest.raises(KeyUnusable, match="has 5 bytes, not 32") as caught:
            migrator_key(tmp_path / name)
        hints[name] = str(caught.value.hint)
    assert "credentials of registered sources" in hints["migrator.key"]
    assert "receipts" in hints["receipts.key"]
    assert not any("sources" in hints[name] for name in ("receipts.key", "other.key"))
