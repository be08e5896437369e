"""Whether a guest has booted, judged from outside. Pure: the caller passes in what was seen, and when.

The first true sign ends the wait:

    agent      the guest agent answers a ping
    console    a login prompt on the serial console
    activity   for N seconds it has not crashed or restarted, and has written to its disks again and again: firmware, a boot
               loader or a kernel without its root file system does not do that
    running    it has not stopped; only where the setting boot_check asks for no more

The wait ends early if the guest stops, restarts again and again, or shows why it does not boot and then does nothing more.
"""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal

from synvirt.hypervisor.console import LOGIN_PROMPT, Cause, cause_of, last_lines

Check = Literal["any", "agent", "running"]
# The signs that count, by the setting boot_check.
SIGNS: dict[Check, tuple[str, ...]] = {
    "any": ("agent", "console", "activity"),
    "agent": ("agent", "console"),
    "running": ("agent", "running"),
}

# How long to wait for an agent after a login prompt: an agent starts at about the same time. A guest without one has booted
# too.
AGENT_GRACE_S = 10.0
# With boot_check "running": a broken QEMU ends sooner than this.
RUNNING_SETTLE_S = 10.0
# A guest that shows why it does not boot has failed if it then does nothing for this long: an emulated guest on a busy host may
# need seconds between two lines.
QUIET_S = 8.0
# An installed guest may restart at its first start on new hardware, even twice; no system boots four times in a minute.
RESETS_MAX, RESETS_WITHIN_S, RESETS_EVER = 4, 60.0, 8
# The guest must have written in this many of the seconds in which activity is looked for, and in one of the last third too.
WRITING_SECONDS = 3


@dataclass(frozen=True, slots=True)
class Seen:
    """What was seen of a guest. `at_s`: seconds since the start of the wait. `trouble`: why it has stopped or crashed;
    `hopeless`: no other bus would help; `full`: it was paused for want of room. `console`: the end of the serial console;
    `screen`: the text of a screen in text mode. `resets`, `requests`, `writes`: so far."""

    at_s: float
    trouble: str | None = None
    hopeless: bool = False
    full: bool = False
    agent: bool = False
    console: str = ""
    screen: str = ""
    resets: int = 0
    requests: int = 0
    writes: int = 0


@dataclass(frozen=True, slots=True)
class Lost:
    """The guest has not booted. `other_bus_may_help`: it looks like a guest that has no driver for its disks. `full`: what it
    writes has no room."""

    trouble: str
    cause: Cause | None
    other_bus_may_help: bool
    full: bool = False


@dataclass
class Watch:
    """One boot. `judge` is called for each look, in order."""

    check: Check
    timeout_s: float
    activity_s: float
    _prompted_at: float | None = None
    _changed_at: float = 0.0
    _last: Seen | None = None
    _resets: deque[float] = field(default_factory=deque)
    _wrote_at: deque[float] = field(default_factory=deque)

    def judge(self, seen: Seen) -> str | Lost | None:
        """The sign, or Lost. None: go on looking."""
        self._note(seen)
        if seen.trouble is not None:
            return self._lost(seen, seen.trouble, hopeless=seen.hopeless)
        signs: dict[str, Callable[[Seen], bool]] = {
            "agent": lambda seen: seen.agent,
            "console": self._console,
            "activity": self._activity,
            "running": self._running,
        }
        sign = next((name for name in SIGNS[self.check] if signs[name](seen)), None)
        return sign or self._end_of_hope(seen)

    def _end_of_hope(self, seen: Seen) -> Lost | None:
        if self._restarts(seen):
            return self._lost(seen, f"restarts again and again: {seen.resets} times in {seen.at_s:.0f} s")
        if self._stuck(seen):
            return self._lost(seen, f"has done nothing for {seen.at_s - self._changed_at:.0f} s")
        if seen.at_s >= self.timeout_s:
            return self._lost(seen, f"gave no sign of life within {self.timeout_s:g} s")
        return None

    # ── signs ────────────────────────────────────────────────────────────────────────────────────────────────────────

    def _console(self, seen: Seen) -> bool:
        if self._prompted_at is None and LOGIN_PROMPT.search(seen.console):
            self._prompted_at = seen.at_s
        return self._prompted_at is not None and seen.at_s - self._prompted_at >= AGENT_GRACE_S

    def _activity(self, seen: Seen) -> bool:
        since = seen.at_s - self.activity_s
        if since < 0 or (self._resets and self._resets[-1] > since) or _cause(seen) is not None:
            return False
        seconds = {int(at) for at in self._wrote_at if at > since}
        return len(seconds) >= WRITING_SECONDS and self._wrote_at[-1] > seen.at_s - self.activity_s / 3

    def _running(self, seen: Seen) -> bool:
        return seen.at_s >= RUNNING_SETTLE_S

    # ── the end of hope ──────────────────────────────────────────────────────────────────────────────────────────────

    def _restarts(self, seen: Seen) -> bool:
        lately = sum(at > seen.at_s - RESETS_WITHIN_S for at in self._resets)
        return lately >= RESETS_MAX or seen.resets >= RESETS_EVER

    def _stuck(self, seen: Seen) -> bool:
        found = _cause(seen)
        return found is not None and found.final and self._prompted_at is None and seen.at_s - self._changed_at >= QUIET_S

    def _lost(self, seen: Seen, trouble: str, *, hopeless: bool = False) -> Lost:
        found = _cause(seen)
        return Lost(trouble, found, not hopeless and (found is None or found.other_bus), full=seen.full)

    def _note(self, seen: Seen) -> None:
        before = self._last or Seen(0)
        self._last = seen
        if (seen.console, seen.screen, seen.requests, seen.resets) != (
            before.console,
            before.screen,
            before.requests,
            before.resets,
        ):
            self._changed_at = seen.at_s
        self._resets.extend([seen.at_s] * (seen.resets - before.resets))
        if seen.writes > before.writes:
            self._wrote_at.append(seen.at_s)
        while self._wrote_at and self._wrote_at[0] < seen.at_s - self.activity_s:
            self._wrote_at.popleft()


def _cause(seen: Seen) -> Cause | None:
    return cause_of(last_lines(seen.console)) or cause_of(seen.screen)
