"""Sessions of the page: the secret in a cookie identifies an account for a limited time.

They are stored in {data_dir}/keyring/sessions, so that they survive a restart of the service. Only hashes are stored: neither
the file nor a dump of our memory contains a secret.
"""

import contextlib
import hashlib
import json
import secrets
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import structlog
from starlette.requests import cookie_parser
from starlette.responses import Response

from synvirt.accounts import Role
from synvirt.durable import put_private_file

# A browser accepts a name with this prefix only by HTTPS, for this host alone and for every path (RFC 6265bis, section
# 4.1.3.2).
COOKIE = "__Host-synvirt"
# A working day; and a person who has had no page of ours open for an hour has left (NIST SP 800-63B, section 4.2.3).
AGE_S, IDLE_S = 12 * 3600.0, 3600.0
# For one account: more browsers than a person has. The oldest is removed.
SESSIONS_MAX = 16
SECRET_BYTES = 32

_log = structlog.get_logger("synvirt.api")


class Login(NamedTuple):
    """A logged-in person. `role`: from another service's accounts at the log-in; None: the account's present role."""

    account: str
    role: Role | None = None


@dataclass(slots=True)
class _Session:
    login: Login
    version: str
    begun: float
    used: float


class Sessions:
    """`version()` changes when the accounts, including their passwords, may have changed: then all are logged out. `grants` is
    the same for persons whose role another service gave: the settings for it. `path` None: they end with the service."""

    def __init__(
        self,
        version: Callable[[], object] = lambda: None,
        *,
        path: Path | None = None,
        clock: Callable[[], float] = time.time,
        grants: str = "",
    ) -> None:
        self._version, self._path, self._clock, self._grants = version, path, clock, grants
        # `_lock` is held for moments only, as the event loop takes it too; `_writing`, while the file is written.
        self._lock, self._writing = threading.Lock(), threading.Lock()
        self._sessions = {} if path is None else _read(path, clock())

    def begin(self, account: str, role: Role | None = None) -> str:
        """Begins a session after a right password, or after another service gave the person a role. Returns the cookie's
        secret. Blocks."""
        secret, at, login = secrets.token_urlsafe(SECRET_BYTES), self._clock(), Login(account, role)
        with self._lock:
            self._forget_ended()
            theirs = [key for key, one in self._sessions.items() if one.login.account == account]
            for key in theirs[: max(0, len(theirs) - SESSIONS_MAX + 1)]:
                del self._sessions[key]
            self._sessions[_hashed(secret)] = _Session(login, self._now_of(login), at, at)
        self._write()
        return secret

    def of(self, secret: str) -> Login | None:
        """The session's person. At once: it is called in the event loop, for each request."""
        with self._lock:
            found = self._sessions.get(_hashed(secret))
            if found is None or not self._holds(found):
                return None
            found.used = self._clock()
            return found.login

    def end(self, secret: str) -> None:
        """Blocks."""
        with self._lock:
            ended = self._sessions.pop(_hashed(secret), None)
        if ended is not None:
            self._write()

    def _holds(self, session: _Session) -> bool:
        at = self._clock()
        # A clock that was set back makes no session longer.
        young = session.begun <= at < session.begun + AGE_S
        return young and at < session.used + IDLE_S and session.version == self._now_of(session.login)

    def _now_of(self, login: Login) -> str:
        return str(self._version()) if login.role is None else self._grants

    def _forget_ended(self) -> None:
        self._sessions = {key: one for key, one in self._sessions.items() if self._holds(one)}

    def _write(self) -> None:
        """Times of use are not stored: after a restart the hour begins again."""
        if self._path is None:
            return
        with self._writing:
            with self._lock:
                sessions = dict(self._sessions)
            kept = {key: [one.login.account, one.version, one.begun, one.login.role or ""] for key, one in sessions.items()}
            try:
                put_private_file(self._path, json.dumps(kept).encode())
            except OSError as error:
                _log.warning("sessions are not kept over a restart", why=error.strerror)
                # An ended session must not come back.
                with contextlib.suppress(OSError):
                    self._path.unlink()


def _read(path: Path, at: float) -> dict[str, _Session]:
    """None, if there is no file, or a damaged one: then everybody logs in again."""
    try:
        found = json.loads(path.read_bytes())
        return {key: _kept(at, *fields) for key, fields in found.items()}
    except (OSError, ValueError, TypeError, AttributeError):
        return {}


def _kept(at: float, account: str, version: str, begun: float, role: str = "") -> _Session:
    """An earlier version stored no role."""
    return _Session(Login(str(account), Role(role) if role else None), str(version), float(begun), at)


def secret_in(cookie_header: str) -> str:
    return cookie_parser(cookie_header).get(COOKIE, "")


def give(response: Response, secret: str) -> None:
    """Sets the cookie without an age: it ends with the browser, and the service ends it before."""
    response.set_cookie(COOKIE, secret, path="/", secure=True, httponly=True, samesite="strict")


def take(response: Response) -> None:
    """Removes the session's cookie."""
    response.delete_cookie(COOKIE, path="/", secure=True, httponly=True, samesite="strict")


def _hashed(secret: str) -> str:
    return hashlib.sha256(secret.encode("utf-8", "replace")).hexdigest()
