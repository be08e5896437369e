"""Who may call: accounts of this host (`pam`), or of {data_dir}/keyring/users (`file`). Blocking code.

    Remembering ─▶ Throttled ─▶ FileAccounts │ pam_accounts

A password check costs a core 50 ms (scrypt) or an outside module (PAM), by design. So what was right is remembered for a
minute, and what was wrong too often is refused unasked.
"""

import hmac
import secrets
import threading
import time
from collections import OrderedDict
from collections.abc import Callable

from synvirt.accounts import WRONG, FileAccounts, add_first_account
from synvirt.api.gate import Authenticate
from synvirt.errors import Unauthorized
from synvirt.settings import Settings

REMEMBERED_FOR_S = 60.0
REMEMBERED_MAX = 256

# Ten wrong passwords a minute and address is a person's bad day, and no way to guess twenty random letters.
FAILURES_ALLOWED = 10
FAILURES_WINDOW_S = 60.0
ADDRESSES_WATCHED_MAX = 1024


# (user, password, address) → None, or Unauthorized.
Check = Callable[[str, str, str], None]


def pam_accounts(service: str) -> Check:
    import pamela

    def authenticate(user: str, password: str, address: str) -> None:
        try:
            pamela.authenticate(user, password, service=service, resetcred=0)
        except pamela.PAMError as error:
            raise Unauthorized(WRONG) from error

    return authenticate


class Throttled:
    """Refuses an address that was wrong too often, without asking; one window later it may try again."""

    def __init__(self, inner: Check, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._inner, self._clock = inner, clock
        self._lock = threading.Lock()
        self._failures: OrderedDict[str, tuple[float, int]] = OrderedDict()

    def __call__(self, user: str, password: str, address: str) -> None:
        with self._lock:
            since, count = self._failures.get(address, (self._clock(), 0))
            wait_s = since + FAILURES_WINDOW_S - self._clock()
            if wait_s <= 0:
                self._failures.pop(address, None)
            elif count >= FAILURES_ALLOWED:
                raise Unauthorized("too many wrong passwords came from this address", hint=f"try again in {wait_s:.0f} s")
        try:
            self._inner(user, password, address)
        except Unauthorized:
            self._failed(address)
            raise

    def _failed(self, address: str) -> None:
        with self._lock:
            since, count = self._failures.pop(address, (self._clock(), 0))
            self._failures[address] = (since, count + 1)
            while len(self._failures) > ADDRESSES_WATCHED_MAX:
                self._failures.popitem(last=False)


class Remembering:
    """What was right stays right for a minute. It keeps a keyed hash: a dump of our memory must not be a list of passwords.

    `version()` changes when the accounts may have changed: then nothing is remembered.
    """

    def __init__(
        self, inner: Check, *, version: Callable[[], object] = lambda: None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._inner, self._version, self._clock = inner, version, clock
        self._key = secrets.token_bytes(32)
        self._lock = threading.Lock()
        self._right: OrderedDict[bytes, tuple[float, object]] = OrderedDict()

    def knows(self, user: str, password: str) -> bool:
        with self._lock:
            until, version = self._right.get(self._digest(user, password), (0.0, None))
        return self._clock() < until and version == self._version()

    def check(self, user: str, password: str, address: str) -> None:
        version = self._version()
        self._inner(user, password, address)
        with self._lock:
            self._right[self._digest(user, password)] = (self._clock() + REMEMBERED_FOR_S, version)
            while len(self._right) > REMEMBERED_MAX:
                self._right.popitem(last=False)

    def _digest(self, user: str, password: str) -> bytes:
        return hmac.digest(self._key, f"{user}\0{password}".encode(), "sha256")


def authenticator(settings: Settings, *, announce: Callable[[str], None]) -> Authenticate:
    """As settings.auth says. `announce` is told the one line that shows the first start's password; it is shown once."""
    if settings.auth == "pam":
        return Remembering(Throttled(pam_accounts(settings.pam_service)))
    path = settings.keyring_dir / "users"
    password = add_first_account(path)
    if password is not None:
        announce(f"The first start made the user admin with the password {password}: it is not shown again")
    accounts = FileAccounts(path)
    return Remembering(Throttled(accounts), version=accounts.version)
