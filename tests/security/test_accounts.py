"""The users file: who is in it, who is not, and what a damaged one does."""

import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import ModuleType

import pytest

from synvirt import accounts
from synvirt.accounts import Account, FileAccounts, Role, add_first_account, listed, remove_account, set_password
from synvirt.api.callers.auth import Remembering, authenticator
from synvirt.errors import BadRequest, Internal, Unauthorized
from synvirt.repository import sealed_key
from synvirt.settings import Settings
from synvirt.settings.data_dir import prepare_data_dir
from tests.running.made_once import GUESSED_AT


def test_two_first_starts_have_two_passwords(tmp_path: Path) -> None:
    assert add_first_account(tmp_path / "one") != add_first_account(tmp_path / "two")
    assert add_first_account(tmp_path / "one") is None


def test_a_password_that_was_set_is_good_at_once_and_the_old_one_is_not(tmp_path: Path) -> None:
    settings = Settings(data_dir=tmp_path)
    prepare_data_dir(settings)
    check = authenticator(settings, announce=lambda line: None)
    users = settings.keyring_dir / "users"
    set_password(users, "eve", "first ünïcode : pass")
    check.check("eve", "first ünïcode : pass", "")
    set_password(users, "eve", "second")
    check.check("eve", "second", "")
    with pytest.raises(Unauthorized):
        check.check("eve", "first ünïcode : pass", "")
    assert users.stat().st_mode & 0o777 == 0o600
    assert users.read_text().count("eve:") == 1
    assert "admin:" in users.read_text()


def test_changes_at_once_lose_none(tmp_path: Path) -> None:
    """Else an account that was removed might come back by a change of another's password."""
    users = tmp_path / "users"
    set_password(users, "admin", "x")
    set_password(users, "gone", "x")
    with ThreadPoolExecutor(5) as threads:
        changes = [threads.submit(set_password, users, f"user{number}", "x") for number in range(4)]
        changes.append(threads.submit(remove_account, users, "gone"))
        for change in changes:
            change.result()
    assert listed(users).keys() == {"admin", "user0", "user1", "user2", "user3"}


def test_the_last_admin_stays_one(tmp_path: Path) -> None:
    users = tmp_path / "users"
    set_password(users, "ann", "x")
    with pytest.raises(BadRequest, match="ann is the last admin"):
        set_password(users, "ann", "x", Role.VIEWER)
    set_password(users, "bob", "x", Role.ADMIN)
    set_password(users, "ann", "x", Role.VIEWER)
    assert listed(users) == {"ann": Role.VIEWER, "bob": Role.ADMIN}


@pytest.mark.parametrize("name", ["", "a:b", "a b", "a\nb", "#a", "x" * 65])
def test_a_name_that_would_break_the_file(tmp_path: Path, name: str) -> None:
    with pytest.raises(BadRequest):
        set_password(tmp_path / "users", name, "x")
    assert not (tmp_path / "users").exists()


@pytest.mark.parametrize(
    "line",
    [
        "admin:plain",
        "admin:scrypt:16384:8:5:c2FsdA==",
        "admin:scrypt:1073741824:8:1:c2FsdA==:aGFzaA==",
        "admin:scrypt:16384:8:5:c2FsdA==:a",
        "admin:scrypt:3:8:5:c2FsdA==:aGFzaA==",
    ],
)
def test_a_damaged_users_file_lets_nobody_in_and_says_so_to_the_operator_only(tmp_path: Path, line: str) -> None:
    users = tmp_path / "users"
    users.write_text(line + "\n")
    with pytest.raises((Internal, Unauthorized)) as raised:
        FileAccounts(users)("admin", "plain", "")
    assert str(tmp_path) not in str(raised.value)


def test_a_users_file_that_is_gone_lets_nobody_in(tmp_path: Path) -> None:
    check = FileAccounts(tmp_path / "users")
    with pytest.raises(Internal) as raised:
        Remembering(check, version=check.version).check("admin", "x", "")
    assert str(tmp_path) not in str(raised.value)


def test_a_name_that_is_not_there_takes_as_long_as_a_wrong_password(tmp_path: Path) -> None:
    """Not by the clock, which is noisy here: by the number of scrypt runs."""
    users = tmp_path / "users"
    users.write_text(Account.of("right").line("admin"))
    runs = []
    real = accounts._scrypt

    def counted(*arguments: object) -> bytes:
        runs.append(arguments)
        return real(*arguments)  # type: ignore[arg-type]

    check = FileAccounts(users)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(accounts, "_scrypt", counted)
        for user in ("admin", "nobody"):
            with pytest.raises(Unauthorized, match="the user or the password is wrong"):
                check(user, "wrong", "")
    assert len(runs) == 2


@pytest.mark.parametrize(("module", "mib"), [(accounts, 16), (sealed_key, 128)])
def test_a_guess_takes_the_memory_that_owasp_advises(module: ModuleType, mib: int) -> None:
    """Of the product: in other tests it takes next to none."""
    assert 128 * GUESSED_AT[module] * vars(module)["SCRYPT_R"] == mib << 20


def test_a_check_of_scrypt_is_quick_enough_for_a_person(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(accounts, "SCRYPT_N", GUESSED_AT[accounts])
    account = Account.of("x")
    started = time.process_time()
    assert account.matches("x")
    assert time.process_time() - started < 2
