"""Checks passwords, of accounts of this host (`pam`), or of {data_dir}/keyring/users (`file`). Blocking code.

    Remembering ─▶ Throttled ─▶ FileAccounts │ pam_accounts

A password check costs a core 50 ms (scrypt) or an outside module (PAM), on purpose. So a right password is remembered for a
minute, and an address with too many wrong ones is refused without a check.
"""

import contextlib
import grp
import hmac
import os
import pwd
import secrets
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path

from synvirt.accounts import WRONG, FileAccounts, Role, add_first_account, nobody_can_log_in, version_of
from synvirt.api.callers.gate import Authenticate, TooManyAttempts
from synvirt.api.callers.networks import network_of
from synvirt.errors import Forbidden, Unauthorized
from synvirt.privileged import Privileged
from synvirt.privileged.here import Here
from synvirt.settings import Settings
from synvirt.settings.starting import check_groups

# The passwords of the host's accounts, and which are locked or expired. A directory service has others, which are not seen.
SHADOW = Path("/etc/shadow")

REMEMBERED_FOR_S = 60.0
REMEMBERED_MAX = 256

# Ten wrong passwords a minute from one address happen to people, but cannot guess twenty random letters.
FAILURES_ALLOWED = 10
# An account is guessed from many addresses at once; its owner may type it wrong a few times meanwhile.
FAILURES_ALLOWED_ACCOUNT = 30
FAILURES_WINDOW_S = 60.0
ADDRESSES_WATCHED_MAX = 4096

# (user, password, address) → None, or Unauthorized.
Check = Callable[[str, str, str], None]


def shadow_version() -> Callable[[], object]:
    """What changes when the passwords or the locks of the host's accounts may have. The package's unit lays an empty file over
    SHADOW, which is the same after each start, and is away from the first change on: such a version holds for this process
    alone, or a restart would bring sessions back which that change had ended."""
    here = secrets.token_hex(8)

    def version() -> object:
        try:
            is_hidden = SHADOW.stat().st_size == 0
        except OSError:
            is_hidden = True
        return here if is_hidden else version_of(SHADOW)

    return version


def pam_accounts(privileged: Privileged) -> Check:
    """A check by the host's accounts, by PAM. It raises Unauthorized."""

    def authenticate(user: str, password: str, address: str) -> None:
        if not privileged.authenticate(user, password):
            raise Unauthorized(WRONG)

    return authenticate


class Throttled:
    """Refuses an address, or an account, with too many wrong passwords, without a check; after one window it may try again. An
    attempt counts before it is checked, so that many at once cannot avoid the limit; only a wrong one goes on counting."""

    def __init__(self, inner: Check, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._inner, self._clock = inner, clock
        self._lock = threading.Lock()
        self._failures: OrderedDict[str, tuple[float, int]] = OrderedDict()

    def __call__(self, user: str, password: str, address: str) -> None:
        network = network_of(address)
        watched = (
            (f"address {network}", FAILURES_ALLOWED, "too many wrong passwords came from this address"),
            (f"account {user.casefold()}", FAILURES_ALLOWED_ACCOUNT, "too many wrong passwords were tried for this account"),
        )
        with self._lock:
            for key, allowed, why in watched:
                since, count = self._failures.get(key, (self._clock(), 0))
                wait_s = since + FAILURES_WINDOW_S - self._clock()
                if wait_s <= 0:
                    self._failures.pop(key, None)
                elif count >= allowed:
                    raise TooManyAttempts(why, wait_s=wait_s)
            for key, _, _ in watched:
                self._count(key, 1)
        wrong = False
        try:
            self._inner(user, password, address)
        except Unauthorized:
            wrong = True
            raise
        finally:
            if not wrong:  # after any other error, too: nothing was checked, as PAM's helper is away
                with self._lock:
                    for key, _, _ in watched:
                        self._count(key, -1)

    def _count(self, key: str, step: int) -> None:
        since, count = self._failures.pop(key, (self._clock(), 0))
        if count + step > 0:
            self._failures[key] = (since, count + step)
        while len(self._failures) > ADDRESSES_WATCHED_MAX:
            self._failures.popitem(last=False)


class Remembering:
    """A right password is remembered for a minute, as a keyed hash: a dump of our memory must not be a list of passwords.

    `version()` changes when the accounts may have changed: then nothing is remembered.
    """

    def __init__(
        self,
        inner: Check,
        *,
        version: Callable[[], object] = lambda: None,
        clock: Callable[[], float] = time.monotonic,
        role_of: Callable[[str], Role] = lambda user: Role.ADMIN,
    ) -> None:
        self._inner, self._clock = inner, clock
        self.role_of, self.version = role_of, version
        self._key = secrets.token_bytes(32)
        self._lock = threading.Lock()
        self._right: OrderedDict[bytes, tuple[float, object]] = OrderedDict()

    def remembers(self, user: str, password: str) -> bool:
        """Whether this password was right within the last REMEMBERED_FOR_S. It makes no check."""
        with self._lock:
            until, version = self._right.get(self._digest(user, password), (0.0, None))
        return self._clock() < until and version == self.version()

    def check(self, user: str, password: str, address: str) -> None:
        """Checks the password, and remembers a right one. Unauthorized."""
        version = self.version()
        self._inner(user, password, address)
        with self._lock:
            self._right[self._digest(user, password)] = (self._clock() + REMEMBERED_FOR_S, version)
            while len(self._right) > REMEMBERED_MAX:
                self._right.popitem(last=False)

    def _digest(self, user: str, password: str) -> bytes:
        return hmac.digest(self._key, f"{user}\0{password}".encode(), "sha256")


def authenticator(settings: Settings, *, announce: Callable[[str], None], privileged: Privileged | None = None) -> Authenticate:
    """The check by settings.auth. `announce` gets the one line with the password of the first start, which is shown once, or
    that no account is there."""
    if settings.auth == "pam":
        groups = pam_groups(settings)
        throttled = Throttled(pam_accounts(privileged or Here(settings.pam_service)))
        return Remembering(throttled, version=shadow_version(), role_of=partial(role_by_group, groups))
    path = settings.keyring_dir / "users"
    password = add_first_account(path)
    if password is not None:
        try:
            announce(f"The first start made the user admin with the password {password}: it is not shown again")
        except BaseException:
            path.unlink(missing_ok=True)  # nobody has seen the password: the next start makes another one
            raise
    if (nobody := nobody_can_log_in(path)) is not None:
        announce(nobody)
    accounts = FileAccounts(path)
    return Remembering(Throttled(accounts), version=accounts.version, role_of=accounts.role_of)


def pam_groups(settings: Settings) -> dict[Role, str]:
    """The groups by role. BadRequest, if none is set."""
    check_groups(settings)
    return {
        role: group
        for role, group in (
            (Role.ADMIN, settings.pam_admin_group),
            (Role.OPERATOR, settings.pam_operator_group),
            (Role.VIEWER, settings.pam_viewer_group),
        )
        if group
    }


def role_by_group(groups: Mapping[Role, str], user: str) -> Role:
    """The highest role of the account's groups. Forbidden, if none gives one."""
    try:
        account = pwd.getpwnam(user)
        theirs = set(os.getgrouplist(account.pw_name, account.pw_gid))
    except (KeyError, OSError):
        theirs = set()
    for role, group in groups.items():  # admin first
        with contextlib.suppress(KeyError):
            if grp.getgrnam(group).gr_gid in theirs:
                return role
    raise Forbidden(
        f"the account {user[:64]} is in none of the groups that may use this service",
        hint=f"an administrator of the host can add it: usermod -aG {next(iter(groups.values()))} {user[:64]}",
    )
