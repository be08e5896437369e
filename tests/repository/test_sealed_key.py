"""Copies of a repository's key that a passphrase opens, or this host alone."""

import base64
from pathlib import Path

import pytest

from synvirt.backups.model import BackupRepositoryRequest, SealedKeyRequest
from synvirt.backups.repositories import Repositories
from synvirt.errors import BackupBadRequest, RepositoryKeyWrong
from synvirt.repository import sealed_key
from synvirt.repository.keys import new_key
from synvirt.store import Store
from tests.needs import need, need_root
from tests.repository.points import back_up, disk, restored

PASSPHRASE = "correct horse battery staple ü"


def test_a_passphrase_opens_its_copy_and_no_other_does() -> None:
    master = new_key()
    copy = sealed_key.by_passphrase(master, PASSPHRASE)
    assert sealed_key.is_sealed(copy)
    assert "\n" not in copy
    assert sealed_key.by_passphrase(master, PASSPHRASE) != copy
    assert sealed_key.opened(f" {copy}\n", PASSPHRASE) == master
    for wrong in ("", PASSPHRASE + " "):
        with pytest.raises(RepositoryKeyWrong, match="does not open"):
            sealed_key.opened(copy, wrong)
    with pytest.raises(BackupBadRequest, match="12 characters"):
        sealed_key.by_passphrase(master, "too short..")


def test_a_copy_that_was_changed_is_refused_and_costs_nothing() -> None:
    copy = sealed_key.by_passphrase(new_key(), PASSPHRASE)
    prefix, way, n, r, p, salt, sealed = copy.split(":")
    longer = base64.b64encode(base64.b64decode(sealed) + b"x").decode()
    for parts in (
        (way, n, "4", p, salt, sealed),
        (way, n, r, p, base64.b64encode(b"x" * 16).decode(), sealed),
        (way, n, r, p, salt, longer),
        (way, n, r, p, salt, ""),
        (way, n, r, p, salt, "%"),
        (way, str(1 << 40), r, p, salt, sealed),
        (way, n, "1000000", p, salt, sealed),
        (way, n, r, "1000000", salt, sealed),
        (way, "0", r, p, salt, sealed),
        (way, "-1", r, p, salt, sealed),
        (way, "x", r, p, salt, sealed),
        (way, n, r, salt, sealed),
        ("rot13", sealed),
        ("",),
    ):
        with pytest.raises(RepositoryKeyWrong):
            sealed_key.opened(":".join((prefix, *parts)), PASSPHRASE)


def test_this_host_opens_its_copy_and_a_changed_one_it_does_not() -> None:
    need("systemd-creds", "systemd")
    need_root("systemd's own key of this host")
    master = new_key()
    copy = sealed_key.by_this_host(master, "host")
    assert sealed_key.opened(copy, "") == master
    head, _, last = copy.rpartition(":")
    content = bytearray(base64.b64decode(last))
    content[-1] ^= 1
    with pytest.raises(BackupBadRequest, match="systemd-creds cannot decrypt"):
        sealed_key.opened(f"{head}:{base64.b64encode(content).decode()}", "")


def test_a_host_without_a_tpm_says_so() -> None:
    need("systemd-creds", "systemd")
    if Path("/dev/tpmrm0").exists():
        assert sealed_key.opened(sealed_key.by_this_host(b"k" * 32, "tpm2"), "") == b"k" * 32
        return
    with pytest.raises(BackupBadRequest, match=r"systemd-creds cannot encrypt it here: [^\[]"):
        sealed_key.by_this_host(new_key(), "tpm2")


def test_a_repository_is_used_again_by_a_sealed_copy(tmp_path: Path) -> None:
    store = Store(f"sqlite:///{tmp_path / 'test.db'}")
    for name in ("keyring", "here", "other"):
        (tmp_path / name).mkdir()
    request = {"name": "one", "kind": "local", "path": str(tmp_path / "here")}
    first = Repositories(store.backups, host="local", keyring=tmp_path / "keyring")
    known = first.add(BackupRepositoryRequest.model_validate(request))
    point = back_up(first.opened(known.id), disk("AB"))
    copy = first.sealed_copy(known.id, SealedKeyRequest.model_validate({"passphrase": PASSPHRASE}))
    first.close()
    other = Repositories(store.backups, host="other", keyring=tmp_path / "other")
    again = request | {"recovery_key": copy, "passphrase": PASSPHRASE}
    with pytest.raises(RepositoryKeyWrong):
        other.add(BackupRepositoryRequest.model_validate(again | {"passphrase": "another one, and long"}))
    back = other.add(BackupRepositoryRequest.model_validate(again))
    assert restored(other.opened(back.id), point) == [disk("AB").content]
    other.close()
    store.close()
    for wrong in ({}, {"passphrase": "x", "bound_to": "host"}, {"bound_to": "moon"}):
        with pytest.raises(ValueError, match=r"exactly one of these|Input should be"):
            SealedKeyRequest.model_validate(wrong)
