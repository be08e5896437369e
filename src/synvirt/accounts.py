"""The users file, {data_dir}/keyring/users: who may call a service that does not use the host's accounts. Blocking code.

A line for each user: `name:scrypt:N:r:p:salt:hash[:role]`, salt and hash in base64. Mode 0600.

Roles: a viewer reads; an operator also migrates, backs up and restores; an admin also changes sources, settings and accounts,
and removes. A line without a role is from before roles existed, when every user could do everything: it is an admin's.
"""

import base64
import fcntl
import hashlib
import hmac
import os
import re
import secrets
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from synvirt.durable import put_private_file
from synvirt.errors import BadRequest, Internal, Unauthorized

# RFC 7914 section 2; 16 MiB and about 50 ms for each check: OWASP's advice for an interactive login.
SCRYPT_N, SCRYPT_R, SCRYPT_P, SCRYPT_BYTES, SALT_BYTES = 1 << 14, 8, 5, 32, 16
# A file edited by hand may ask for more, but not for gigabytes or minutes.
SCRYPT_MEMORY_BYTES, SCRYPT_P_MAX = 64 << 20, 16

_LINE = re.compile(
    r"^(?P<name>[^:\s]+):scrypt:(?P<n>\d+):(?P<r>\d+):(?P<p>\d+):(?P<salt>[\w+/=]+):(?P<hash>[\w+/=]+)"
    r"(?::(?P<role>viewer|operator|admin))?$",
    re.ASCII,
)
# The password is read from a screen and typed elsewhere, so letters that look like digits are left out. Twenty of these are 98
# bits.
_TYPED = "abcdefghijkmnpqrstuvwxyz23456789"
WRONG = "the user or the password is wrong"


class Role(StrEnum):
    """Each may do what those before it may."""

    VIEWER = "viewer"
    OPERATOR = "operator"
    ADMIN = "admin"

    def reaches(self, needed: "Role") -> bool:
        """Whether this role may do what `needed` may: viewer, operator, admin in ascending order."""
        order = list(Role)
        return order.index(self) >= order.index(needed)


@dataclass(frozen=True, slots=True)
class Account:
    """A line of the users file, without the name."""

    n: int
    r: int
    p: int
    salt: bytes
    hash: bytes
    role: Role = Role.ADMIN

    @property
    def cost(self) -> tuple[int, int, int]:
        """What one check takes, as scrypt counts it."""
        return self.n, self.r, self.p

    def matches(self, password: str) -> bool:
        return hmac.compare_digest(_scrypt(password, self.salt, self.n, self.r, self.p), self.hash)

    @classmethod
    def of(cls, password: str, role: Role = Role.ADMIN) -> "Account":
        salt = secrets.token_bytes(SALT_BYTES)
        return cls(SCRYPT_N, SCRYPT_R, SCRYPT_P, salt, _scrypt(password, salt, SCRYPT_N, SCRYPT_R, SCRYPT_P), role)

    def line(self, name: str) -> str:
        """The account's line in the users file."""
        salt, hash_ = (base64.b64encode(value).decode() for value in (self.salt, self.hash))
        return f"{name}:scrypt:{self.n}:{self.r}:{self.p}:{salt}:{hash_}:{self.role}\n"


class FileAccounts:
    """The users file. It is read again after a change, so a password set by `synvirt password` works at once."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._lock = threading.Lock()
        self._read_at: tuple[int, int] | None = None
        self._accounts: dict[str, Account] = {}

    def __call__(self, user: str, password: str, address: str) -> None:
        accounts = self._current()
        account = accounts.get(user)
        if account is not None and account.matches(password):
            return
        # The time of this answer must not show which names exist: whatever the name is, scrypt runs once with each cost of the
        # file.
        costs = {one.cost for one in accounts.values()} or {(SCRYPT_N, SCRYPT_R, SCRYPT_P)}
        for n, r, p in costs - ({account.cost} if account is not None else set()):
            _scrypt(password, secrets.token_bytes(SALT_BYTES), n, r, p)
        raise Unauthorized(WRONG)

    def role_of(self, user: str) -> Role:
        """The role of a user whose password was right. Unauthorized, if the user has been removed since."""
        account = self._current().get(user)
        if account is None:
            raise Unauthorized(WRONG)
        return account.role

    def version(self) -> tuple[int, int] | None:
        """Of the users file, as `version_of`."""
        return version_of(self._path)

    def accounts(self) -> "dict[str, Account]":
        return dict(self._current())

    def _current(self) -> dict[str, Account]:
        with self._lock:
            version = self.version()
            if version is None or version != self._read_at:
                try:
                    self._accounts = _parse(self._path.read_text())
                except OSError as error:
                    raise Internal(f"the users file cannot be read: {error.strerror}") from error
                except ValueError as error:
                    raise Internal(f"the users file is damaged: {error}") from error
                self._read_at = version
            return self._accounts


def version_of(path: Path) -> tuple[int, int] | None:
    """Changes when the file does; None, if there is no file."""
    try:
        status = path.stat()
    except OSError:
        return None
    return status.st_mtime_ns, status.st_ino


@contextmanager
def _changing(path: Path) -> Iterator[None]:
    """Within the block, no other process or thread changes the users file: it is read, and written as a whole. The lock is a
    file of its own, as the users file is replaced."""
    lock = os.open(path.with_name(f".{path.name}.lock"), os.O_RDONLY | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        with suppress(OSError):  # a file system without locks
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield
    finally:
        os.close(lock)


def add_first_account(path: Path) -> str | None:
    """Makes the users file with `admin` and a random password, and returns that password. None, if the file exists."""
    password = "-".join("".join(secrets.choice(_TYPED) for _ in range(5)) for _ in range(4))
    lines = "# name:scrypt:N:r:p:salt:hash:role; `synvirt accounts` writes the lines\n" + Account.of(password).line("admin")
    try:
        with _changing(path):
            put_private_file(path, lines.encode(), replace=False)
    except FileExistsError:
        return None
    return password


def nobody_can_log_in(path: Path) -> str | None:
    """What is to be said of a users file that has no account; None, where it has one, or is damaged, which each log-in says."""
    try:
        return None if listed(path) else f"{path} has no account: nobody can log in; `synvirt password admin` adds one"
    except Internal:
        return None


def listed(path: Path) -> dict[str, Role]:
    """The accounts and their roles. Internal, where the file is damaged."""
    return {name: account.role for name, account in FileAccounts(path).accounts().items()} if path.exists() else {}


def remove_account(path: Path, user: str) -> None:
    """Removes the account. BadRequest, if there is none or it is the last admin."""
    with _changing(path):
        there = listed(path)
        if user not in there:
            raise BadRequest(f"there is no account {user[:64]!r}", hint="`synvirt accounts list` shows those there are")
        _refuse_last_admin(there, user)
        lines = path.read_text().splitlines(keepends=True)
        put_private_file(path, "".join(line for line in lines if line.split(":")[0] != user).encode())


def set_password(path: Path, user: str, password: str, role: Role | None = None) -> Role | None:
    """Adds the user or changes the password, in a new file that replaces the old one; returns the role of one that was added.

    `role` None keeps the present role; a new account becomes operator, and the first one admin. BadRequest for a wrong name,
    and if no admin would be left.
    """
    if not re.fullmatch(r"[^:\s#][^:\s]{0,63}", user):
        raise BadRequest(f"{user[:64]!r} cannot be a user's name", hint="1 to 64 characters, without colon or space")
    with _changing(path):
        lines = path.read_text().splitlines(keepends=True) if path.exists() else []
        kept = [line if line.endswith("\n") else line + "\n" for line in lines if line.split(":")[0] != user]
        there = listed(path)
        role = role or there.get(user) or (Role.OPERATOR if there else Role.ADMIN)
        if there.get(user) is Role.ADMIN and role is not Role.ADMIN:
            _refuse_last_admin(there, user)
        put_private_file(path, "".join([*kept, Account.of(password, role).line(user)]).encode())
        return None if user in there else role


def _refuse_last_admin(there: dict[str, Role], user: str) -> None:
    if not any(role is Role.ADMIN for name, role in there.items() if name != user):
        raise BadRequest(f"{user} is the last admin", hint="give another account the role admin first")


def _scrypt(password: str, salt: bytes, n: int, r: int, p: int) -> bytes:
    return hashlib.scrypt(password.encode(), salt=salt, n=n, r=r, p=p, maxmem=SCRYPT_MEMORY_BYTES, dklen=SCRYPT_BYTES)


def _parse(text: str) -> dict[str, Account]:
    accounts = {}
    for number, line in enumerate(text.splitlines(), 1):
        if not line.strip() or line.startswith("#"):
            continue
        found = _LINE.match(line)
        if found is None:
            raise ValueError(f"line {number} is not name:scrypt:N:r:p:salt:hash")
        n, r, p = (int(found[name]) for name in ("n", "r", "p"))
        # RFC 7914 section 2: N is a power of two above 1; the work area is 128 · N · r bytes (here: half of what is allowed).
        if n < 2 or n & (n - 1) or not 0 < 128 * n * r <= SCRYPT_MEMORY_BYTES // 2 or not 0 < p <= SCRYPT_P_MAX:
            raise ValueError(f"line {number} asks scrypt for what it cannot do, or for more work than a password is given here")
        salt, hash_ = base64.b64decode(found["salt"]), base64.b64decode(found["hash"])
        accounts[found["name"]] = Account(n, r, p, salt, hash_, Role(found["role"] or Role.ADMIN))
    return accounts
