"""Log-ins, log-outs and refused log-ins, as entries of the audit trail.

Each log-in by the page or an OpenID provider is an entry. Basic and tokens come with every request, so they are one entry in
twelve hours for an account at an address. The first refused log-in is an entry at once; further ones of the same account and
address are counted, and become one entry after ten minutes. So guessing passwords cannot fill the disk, and is still recorded.
"""

import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import structlog

from synvirt.accounts import Role
from synvirt.api.callers.networks import network_of
from synvirt.api.callers.sessions import AGE_S
from synvirt.errors import SynvirtError
from synvirt.model.values import now
from synvirt.repeating import repeated
from synvirt.store.access import AuditEntry

LOG_IN, LOG_OUT = "LOGIN", "LOGOUT"
# The way of a log-in, which is an entry's resource.
PAGE, OIDC, BASIC, TOKEN = "page", "oidc", "basic", "token"
# The most characters of an account's name in the audit trail and a job, and of the reason of a refusal.
ACCOUNT_CHARS_MAX, WHY_CHARS_MAX = 100, 500
# A caller's path may be as long as its request line.
RESOURCE_CHARS_MAX, METHOD_CHARS_MAX = 500, 10
# A caller that sends credentials with each request is new again when a session would have ended.
NEW_AFTER_S = AGE_S
COUNTED_FOR_S = 600.0
# More accounts and addresses at once are not distinguished: 256 entries in ten minutes, and one entry for all others.
COUNTED_MAX, KNOWN_MAX = 256, 4096
LOOK_EVERY_S = 60.0

_log = structlog.get_logger("synvirt.api")
# Account, network, way.
_Key = tuple[str, str, str]


@dataclass(slots=True)
class _Refused:
    since: float
    last: AuditEntry
    more: int = 0


@dataclass(frozen=True, slots=True)
class Caller:
    """The caller: `account` of the users file or the host, `token:NAME`, `oidc:NAME`, or `local` by the Unix socket.
    `account_of_token`: the account that made the token."""

    account: str
    role: Role
    address: str = ""
    by_session: bool = False
    confined: bool = False  # to what is offered to another service
    account_of_token: str | None = None


class Coming:
    """`write` adds an entry to the trail, or logs that it cannot. Blocking code, except `is_new`."""

    def __init__(self, write: Callable[[AuditEntry], None], *, clock: Callable[[], float] = time.monotonic) -> None:
        self._write, self._clock = write, clock
        self._lock = threading.Lock()
        self._known: OrderedDict[_Key, float] = OrderedDict()
        self._counted: dict[_Key, _Refused] = {}
        self.refused = 0

    def is_new(self, account: str, address: str, way: str) -> bool:
        """Whether this caller, which sends credentials with each request, is new; from now on it is not. It answers at once."""
        key, at = (account, network_of(address), way), self._clock()
        with self._lock:
            if at < self._known.get(key, 0.0):
                return False
            self._known[key] = at + NEW_AFTER_S
            self._known.move_to_end(key)
            while len(self._known) > KNOWN_MAX:
                self._known.popitem(last=False)
            return True

    def came(self, caller: Caller, way: str) -> None:
        self._write(entry_of(caller, LOG_IN, way, 200))

    def left(self, caller: Caller, way: str) -> None:
        self._write(entry_of(caller, LOG_OUT, way, 200))

    def denied(self, caller: Caller, method: str, resource: str, error: SynvirtError) -> None:
        """A known caller tried something that needs another role."""
        self._write(entry_of(caller, method, resource, error.status, error.detail))

    def refuse(self, account: str, address: str, way: str, error: SynvirtError) -> None:
        """Counts a refused log-in. The first of an account and network is an audit entry at once; the others are counted."""
        _log.warning("login refused", account=account[:64], address=address, way=way, why=error.detail)
        entry = entry_of(Caller(account, Role.VIEWER, address), LOG_IN, way, error.status, error.detail)
        entry = entry.model_copy(update={"role": ""})
        key = (entry.account.casefold(), network_of(address), way)
        with self._lock:
            self.refused += 1
            if key not in self._counted and len(self._counted) >= COUNTED_MAX:
                key = ("", "", "")
                entry = entry.model_copy(update={"account": "(others)", "address": "", "resource": ""})
            known = self._counted.get(key)
            if known is not None:
                known.last, known.more = entry, known.more + 1
                return
            self._counted[key] = _Refused(self._clock(), entry)
        self._write(entry)

    def write_counts(self, *, at_end: bool = False) -> None:
        """Writes how many more were refused, of those that were counted for long enough; at the end of all."""
        at = self._clock()
        with self._lock:
            over = [key for key, one in self._counted.items() if at_end or at - one.since >= COUNTED_FOR_S]
            due = [self._counted.pop(key) for key in over]
        for one in due:
            if one.more:
                detail = f"{one.more} more like the one before; the last: {one.last.detail}"[:WHY_CHARS_MAX]
                self._write(one.last.model_copy(update={"detail": detail}))


@contextmanager
def counts_written(coming: Coming) -> Iterator[None]:
    """Writes the counted log-ins into the audit trail, now and then, and at the end of the block."""
    try:
        with repeated(coming.write_counts, name="log-ins", every_s=LOOK_EVERY_S, ends_within_s=1.0):
            yield
    finally:
        coming.write_counts(at_end=True)


def entry_of(
    caller: Caller, method: str, resource: str, result: int, detail: str = "", *, digest: str | None = None
) -> AuditEntry:
    """An entry of the present time. A refused account, and one of a provider or of the host, may be any typed text; the
    requested path may be any text too."""
    return AuditEntry(
        at=now(),
        account=shown_account(caller),
        role=str(caller.role),
        address=caller.address,
        method=_shown(method, METHOD_CHARS_MAX),
        resource=_shown(resource, RESOURCE_CHARS_MAX),
        result=result,
        detail=_shown(detail, WHY_CHARS_MAX),
        plan_digest=digest,
    )


def shown_account(caller: Caller) -> str:
    """The account's name in the trail, and in its jobs."""
    return _shown(caller.account, ACCOUNT_CHARS_MAX)


def _shown(text: str, chars_max: int) -> str:
    return "".join(letter if letter.isprintable() else "\N{REPLACEMENT CHARACTER}" for letter in text[:chars_max])
