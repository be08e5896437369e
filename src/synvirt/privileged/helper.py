"""Root's helper: `python -m synvirt.privileged.helper --config /etc/synvirt/synvirt.toml`, a process a connection.

systemd takes the connection and hands it over (synvirt-helper.socket, Accept=yes). One message comes, one goes:

    {"call": "authenticate", "user": "…", "password": "…"}  ─▶  {"right": true} │ {"right": false} │ {"error": "…"}

The caller may be an attacker who has taken over the service. So it has to be the service's user (the kernel says who it is),
each call has its own arguments and no other, and they are checked here, by the settings in root's file. PAM gets the password
only of accounts in the groups that the settings name: root's password cannot be guessed through the helper.
"""

import argparse
import grp
import json
import os
import pwd
import secrets
import signal
import socket
import stat
import struct
import sys
import time
import tomllib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from synvirt.privileged.here import Here

# A name and a password; escaped by JSON, a character takes up to 12 bytes.
REQUEST_BYTES_MAX = 16 << 10
USER_BYTES_MAX, PASSWORD_BYTES_MAX = 256, 1024
CONFIG_BYTES_MAX = 1 << 20
# Who connects and says nothing holds one of the socket's MaxConnections.
REQUEST_WITHIN_S = 10.0
# PAM may wait for a directory that does not answer: the process ends then, and with it the call.
ENDS_WITHIN_S = 50
# Beside PAM's own pause, which a service of PAM may lack: this many guesses a second come through, no matter who asks.
WRONG_PAUSE_S = 1.0
# Of the password that nobody has; a longer one is as long as what was typed, as some hashes take longer for more text.
RANDOM_BYTES = 16
FIRST_PASSED_FD = 3  # sd_listen_fds(3)
_CREDENTIALS = struct.Struct("3i")


class Refused(Exception):
    """The call is not carried out; the caller gets the reason."""


@dataclass(frozen=True, slots=True)
class Rules:
    """What root's settings allow."""

    pam_service: str
    groups: tuple[str, ...]


def read_settings_file(path: Path) -> dict[str, Any]:
    """Refused, where the file could be another's than root's."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
        with open(descriptor, "rb") as file:
            found = os.fstat(descriptor)
            if not stat.S_ISREG(found.st_mode) or found.st_uid not in (0, os.geteuid()) or found.st_mode & 0o022:
                raise Refused("the settings file is not root's alone to write")
            content = file.read(CONFIG_BYTES_MAX + 1)
        if len(content) > CONFIG_BYTES_MAX:
            raise Refused("the settings file is too large")
        return tomllib.loads(content.decode())
    except (OSError, ValueError, RecursionError) as error:
        raise Refused("the settings file cannot be read") from error


def rules_of(path: Path) -> Rules:
    """Refused, as above."""
    settings = read_settings_file(path)
    pam = settings.get("pam", {})  # a table's key is the setting's name behind an underscore

    def text(name: str) -> str:
        value = settings.get(f"pam_{name}", pam.get(name, "") if isinstance(pam, dict) else "")
        if not isinstance(value, str):
            raise Refused(f"the setting pam_{name} is not text")
        return value

    groups = tuple(group for role in ("admin", "operator", "viewer") if (group := text(f"{role}_group")))
    return Rules(pam_service=text("service") or "login", groups=groups)


# ── the calls ────────────────────────────────────────────────────────────────────────────────────────────────────────


def authenticate(rules: Rules, user: str, password: str) -> dict[str, Any]:
    """The call `authenticate`: whether the password is right. A wrong one is answered WRONG_PAUSE_S later.

    For an account of no group PAM gets a random password, as sshd does it: the time of an answer shows neither whether the
    name is in a group, nor whether the password was right.
    """
    _check_text(user, USER_BYTES_MAX)
    _check_text(password, PASSWORD_BYTES_MAX)
    member = _is_member(user, rules.groups)
    tried = password if member else secrets.token_hex(max(RANDOM_BYTES, len(password.encode()) // 2))
    right = Here(rules.pam_service).authenticate(user, tried) and member
    if not right:
        time.sleep(WRONG_PAUSE_S)
    return {"right": right}


def _check_text(value: str, most: int) -> None:
    try:
        encoded = value.encode()
    except UnicodeEncodeError as error:
        raise Refused("an argument is not text") from error
    if len(encoded) > most or b"\0" in encoded:
        raise Refused("an argument is too long, or has a NUL")


def _is_member(user: str, groups: tuple[str, ...]) -> bool:
    try:
        account = pwd.getpwnam(user)
        theirs = set(os.getgrouplist(account.pw_name, account.pw_gid))
    except (KeyError, OSError, ValueError):
        return False
    for group in groups:
        try:
            if grp.getgrnam(group).gr_gid in theirs:
                return True
        except KeyError:
            continue
    return False


# Each with the names of its arguments, all of them texts.
CALLS: Mapping[str, tuple[tuple[str, ...], Callable[..., dict[str, Any]]]] = {
    "authenticate": (("user", "password"), authenticate),
}


# ── one connection ───────────────────────────────────────────────────────────────────────────────────────────────────


def serve(connection: socket.socket, *, allowed: frozenset[int], rules: Callable[[], Rules]) -> None:
    """One call. A caller that is not allowed gets no further reason."""
    try:
        answer = _answer(connection, allowed, rules)
    except Refused as refused:
        answer = {"error": str(refused)}
    try:
        connection.send(json.dumps(answer).encode())
    except OSError:
        return  # who asked has gone


def _answer(connection: socket.socket, allowed: frozenset[int], rules: Callable[[], Rules]) -> dict[str, Any]:
    _, uid, _ = _CREDENTIALS.unpack(connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size))
    if uid not in allowed:
        raise Refused("this is the service's own helper")
    connection.settimeout(REQUEST_WITHIN_S)
    try:
        message, _, flags, _ = connection.recvmsg(REQUEST_BYTES_MAX)
    except OSError as error:
        raise Refused("no request came") from error
    if flags & (socket.MSG_TRUNC | socket.MSG_CTRUNC):
        raise Refused("the request is too long, or has descriptors")
    return called(message, rules)


def called(message: bytes, rules: Callable[[], Rules]) -> dict[str, Any]:
    """The answer to one message. Refused where it is no call that the helper has."""
    try:
        request = json.loads(message, object_pairs_hook=_once)
    except (ValueError, RecursionError) as error:
        raise Refused("the request is not understood") from error
    if not isinstance(request, dict) or not all(isinstance(value, str) for value in request.values()):
        raise Refused("the request is not understood")
    names, call = CALLS.get(request.pop("call", ""), ((), None))
    if call is None:
        raise Refused("there is no such call")
    if request.keys() != set(names):
        raise Refused("the call has other arguments")
    return call(rules(), **request)


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """A name that comes twice would be one value here and another to a reader of the log."""
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("a name comes twice")
    return found


def main() -> int:
    """The helper as a process, started by systemd with one connection."""
    parser = argparse.ArgumentParser(prog="synvirt-helper")
    parser.add_argument("--config", type=Path, required=True)
    parser.add_argument("--user", default="synvirt", help="who may ask, beside root")
    options = parser.parse_args()
    if os.environ.get("LISTEN_FDS") != "1" or os.environ.get("LISTEN_PID") != str(os.getpid()):
        sys.stderr.write("systemd starts this, with a connection (synvirt-helper.socket)\n")
        return 2
    try:
        allowed = frozenset({0, pwd.getpwnam(options.user).pw_uid})
    except KeyError:
        allowed = frozenset({0})
    signal.alarm(ENDS_WITHIN_S)
    with socket.socket(fileno=FIRST_PASSED_FD) as connection:
        serve(connection, allowed=allowed, rules=lambda: rules_of(options.config))
    return 0


if __name__ == "__main__":
    sys.exit(main())
