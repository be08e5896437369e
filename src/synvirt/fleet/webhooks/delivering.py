"""Sends webhooks: each delivery is a row, tried again with growing pauses until it is accepted, or given up after a day.

    look() ─▶ what is due ─▶ taken by a compare-and-set ─▶ POST, or a command of the settings ─▶ delivered │ pending │ given up

Signed as in Standard Webhooks 1.0.0 (github.com/standard-webhooks/standard-webhooks, spec/standard-webhooks.md): headers
`webhook-id`, `webhook-timestamp` and `webhook-signature: v1,BASE64`, where the last is the HMAC-SHA256 of ID.TIMESTAMP.BODY. A
delivery may come twice (if a process dies before it notes the answer), with the same id. No redirect is followed.
"""

import base64
import binascii
import contextlib
import hashlib
import hmac
import pwd
import threading
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final
from urllib.parse import urlsplit
from uuid import UUID

import structlog

from synvirt import __version__, programs
from synvirt.cage import may_change_user
from synvirt.errors import Internal, NotFound, PersistFailed, SynvirtError
from synvirt.fleet.changing import hold_for
from synvirt.fleet.model import HookShown
from synvirt.fleet.records import wave_of
from synvirt.fleet.webhooks.events import Hooks
from synvirt.outgoing import Guard
from synvirt.settings import WaveCommandSetting
from synvirt.store.documents import Unreadable
from synvirt.store.wave_hooks import DELIVERED, GIVEN_UP, DeliveryRow, HookRows
from synvirt.store.waves import WaveRows
from synvirt.transport.asking import status_of

log = structlog.get_logger(__name__)

# For the whole answer, so that a slow server does not hold a thread longer.
ANSWER_S: Final = 30.0
FIRST_PAUSE_S, LONGEST_PAUSE_S = 5.0, 3600.0
# A server that is down overnight is still reached in the morning.
GIVEN_UP_AFTER_S: Final = 86400.0
# A required webhook stops a wave: an operator must decide before the window is over.
REQUIRED_GIVEN_UP_AFTER_S: Final = 900.0
SENT_AT_ONCE: Final = 4
# Deliveries of one hook that are sent in one round.
_LOOKED_AT: Final = 20
# Another try may succeed: 408 Request Timeout, 425 Too Early, 429 Too Many Requests; and every 5xx.
_PASSING: Final = frozenset({408, 425, 429})
_KEY_PREFIX: Final = "whsec_"


@dataclass(frozen=True, slots=True)
class Outcome:
    """`again`: another try may succeed."""

    taken: bool
    answer: str
    again: bool = True


@dataclass(frozen=True, slots=True)
class Ways:
    """The ways to send. `ca_file`: certificate authorities that are trusted besides the host's own."""

    guard: Guard = field(default_factory=Guard)
    ca_file: Path | None = None
    commands: Mapping[str, WaveCommandSetting] = field(default_factory=dict)


class Delivering:
    """`look` is called repeatedly, and returns at once."""

    def __init__(self, waves: WaveRows, rows: HookRows, hooks: Hooks, ways: Ways) -> None:
        self._waves, self._rows, self._hooks, self._ways = waves, rows, hooks, ways
        self._pool = ThreadPoolExecutor(SENT_AT_ONCE, thread_name_prefix="hooks")
        self._lock = threading.Lock()
        self._sending: set[UUID] = set()

    def close(self) -> None:
        self._pool.shutdown(wait=False, cancel_futures=True)

    def look(self) -> None:
        """PersistFailed."""
        by_hook: dict[UUID, list[DeliveryRow]] = {}
        for one in self._rows.due(limit=_LOOKED_AT):
            by_hook.setdefault(one.hook_id, []).append(one)
        for hook_id, due in by_hook.items():
            with self._lock:
                if hook_id in self._sending:
                    continue
                self._sending.add(hook_id)
            try:
                self._pool.submit(self._send, hook_id, due)
            except RuntimeError as error:  # it was closed meanwhile, or there is no memory for a thread
                log.warning("webhooks cannot be sent", cause=str(error))
                with self._lock:
                    self._sending.discard(hook_id)

    def _send(self, hook_id: UUID, due: Sequence[DeliveryRow]) -> None:
        """Sends them in the order of the events. The first failure ends this round: the server may be down."""
        try:
            for one in due:
                if not self.send(one):
                    return
        except PersistFailed as error:
            log.warning("webhooks cannot be sent", cause=error.detail)
        finally:
            with self._lock:
                self._sending.discard(hook_id)

    def send(self, one: DeliveryRow) -> bool:
        """False, if it was not accepted this time. PersistFailed."""
        try:
            found = self._hook(one)
        except Unreadable:
            return False  # a host of a later version sends it; else it is left alone, like its wave
        if found is None:
            self._rows.settle(one.number, state=GIVEN_UP, answer="The webhook no longer exists.")
            return True
        late_s = REQUIRED_GIVEN_UP_AFTER_S if found.required else GIVEN_UP_AFTER_S
        too_late = time.time() - one.made_at >= late_s
        opened = None if found.command is not None else self._opened(found.id)
        if (lacks := self._lacks(found, opened)) is not None:  # another host may have it
            # Where another host has tried, what it was answered is the cause.
            return self._give_up(one, found, one.answer or lacks) if too_late else False
        pause_s = min(FIRST_PAUSE_S * 2 ** min(one.attempts, 20), LONGEST_PAUSE_S)
        # No other host takes it before this attempt must have ended, and been noted.
        attempt_s = 0.0 if found.command is None else self._ways.commands[found.command].timeout_s
        if not self._rows.take(one, pause_s=FIRST_PAUSE_S + attempt_s + ANSWER_S):
            return False  # that one goes on with the next, in their order
        try:
            outcome = self._outcome(one, found, opened)
        except Exception as error:  # else it would be tried forever, and its wave would wait for a required one
            log.exception("a webhook cannot be sent", wave=str(one.wave_id), event_=one.event)
            outcome = Outcome(False, f"{type(error).__name__}: {error}"[:500])
        if not outcome.taken and (too_late or not outcome.again):
            return self._give_up(one, found, outcome.answer)
        if outcome.taken:
            self._rows.settle(one.number, state=DELIVERED, answer=outcome.answer)
        else:
            self._rows.put_off(one, pause_s=pause_s, answer=outcome.answer)
        return outcome.taken

    def _lacks(self, hook: HookShown, opened: tuple[str, bytes] | None) -> str | None:
        """What this host needs to send to a webhook, and has not; None: it has all of it."""
        if hook.command is None:
            return "no host's key opens its secret" if opened is None else None
        return None if hook.command in self._ways.commands else f"no settings have the command {hook.command}"

    def _outcome(self, one: DeliveryRow, hook: HookShown, opened: tuple[str, bytes] | None) -> Outcome:
        if hook.command is not None:
            return ran(self._ways.commands[hook.command], one)
        assert opened is not None
        url, secret = opened
        return posted(url, secret, one, self._ways)

    def _give_up(self, one: DeliveryRow, hook: HookShown, answer: str) -> bool:
        """Changes the wave first: if the process dies in between, this is done again."""
        if hook.required:
            reason = f"A required webhook did not accept {one.event}: {answer}. It is not waited for again."
            hold_for(self._waves, one.wave_id, reason, hook_id=hook.id)
        self._rows.settle(one.number, state=GIVEN_UP, answer=answer)
        log.warning("a webhook's delivery is given up", wave=str(one.wave_id), event_=one.event, cause=answer)
        return False

    def _hook(self, one: DeliveryRow) -> HookShown | None:
        """None: it is gone. Unreadable."""
        try:
            wave = wave_of(self._waves.get(one.wave_id))
        except NotFound:
            return None
        return next((hook for hook in wave.hooks if hook.id == one.hook_id), None)

    def _opened(self, hook_id: UUID) -> tuple[str, bytes] | None:
        sealed = self._rows.sealed(hook_id)
        if sealed is None:
            return None
        with contextlib.suppress(Internal):
            return self._hooks.opened(hook_id, sealed)
        return None


# ── by HTTP ──────────────────────────────────────────────────────────────────────────────────────────────────────────


def signed(secret: bytes, delivery_id: str, timestamp: int, body: bytes) -> str:
    """The `webhook-signature`. A secret of the form whsec_BASE64 is that key; any other text is the key itself."""
    key = secret
    if secret.startswith(_KEY_PREFIX.encode()):
        with contextlib.suppress(binascii.Error, ValueError):
            key = base64.b64decode(secret.removeprefix(_KEY_PREFIX.encode()), validate=True)
    digest = hmac.new(key, f"{delivery_id}.{timestamp}.".encode() + body, hashlib.sha256).digest()
    return f"v1,{base64.b64encode(digest).decode()}"


def posted(url: str, secret: bytes, one: DeliveryRow, ways: Ways) -> Outcome:
    """Never raises: an error is part of the result."""
    body = one.body.encode()
    delivery_id, timestamp = f"{one.wave_id}.{one.number}", int(time.time())
    headers = {
        "Content-Type": "application/json",
        "User-Agent": f"synvirt/{__version__}",
        "webhook-id": delivery_id,
        "webhook-timestamp": str(timestamp),
        "webhook-signature": signed(secret, delivery_id, timestamp, body),
    }
    try:
        status = status_of(
            url, guard=ways.guard, within_s=ANSWER_S, ca_file=ways.ca_file, method="POST", body=body, headers=headers
        )
    except SynvirtError as error:
        return Outcome(False, error.detail)
    if 200 <= status < 300:
        return Outcome(True, f"{status}")
    return Outcome(False, f"{urlsplit(url).hostname} answers {status}", again=status in _PASSING or status >= 500)


# ── by a command ─────────────────────────────────────────────────────────────────────────────────────────────────────


def ran(command: WaveCommandSetting, one: DeliveryRow) -> Outcome:
    """Runs it without new privileges, as the user in the settings. The event is in its environment, never in its arguments."""
    env = {
        "SYNVIRT_HOOK_ID": f"{one.wave_id}.{one.number}",
        "SYNVIRT_HOOK_EVENT": one.event,
        "SYNVIRT_HOOK_BODY": one.body,
    }
    try:
        programs.run(confined(command), timeout_s=command.timeout_s, env=env, cwd=Path("/"), guarded=True)
    except SynvirtError as error:
        return Outcome(False, error.detail[:500])
    return Outcome(True, f"{Path(command.argv[0]).name} ended with 0")


def confined(command: WaveCommandSetting) -> list[str]:
    """SynvirtError, if there is no such user. A service that may not change its user has few rights anyway."""
    argv = ["setpriv", "--no-new-privs"]
    if may_change_user():
        try:
            user = pwd.getpwnam(command.user)
        except KeyError:
            raise Internal(f"there is no user {command.user} here, whom the settings name for a command") from None
        argv += ["--reuid", str(user.pw_uid), "--regid", str(user.pw_gid), "--init-groups"]
        # A change from a user other than root to another keeps these capabilities otherwise.
        argv += ["--inh-caps=-all", "--ambient-caps=-all"]
    return [*argv, "--", *command.argv]
