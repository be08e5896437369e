"""What this host has of what the service can use: one row a requirement of the specification (part 1) and of our own.

A row looks for one thing, and never changes anything. What the settings do not ask for may be missing without harm.

checks.py    the table: a name, what it is for, how to get it, the check, whether the settings need it
finding.py   what a row finds, and what several of them look for
service.py · guests.py · volumes.py · sources.py    the checks, by what would not work without it
"""

import threading
import time
from collections.abc import Callable
from datetime import datetime

import structlog

from synvirt.doctor.checks import CAGE_LAYERS, CHECKS
from synvirt.doctor.finding import Check, Finding, Missing
from synvirt.errors import SynvirtError, cause_of
from synvirt.model.values import now
from synvirt.settings import Settings

__all__ = ["CAGE_LAYERS", "CHECKS", "Check", "Checkup", "Finding", "Missing", "examine", "needs_met"]

# What a host has changes when somebody installs something.
CHECKUP_EVERY_S = 600
log = structlog.get_logger(__name__)


def examine(settings: Settings) -> list[Finding]:
    """All checks, in the table's order; none stops another, whatever its error."""
    return [_examine(check, settings) for check in CHECKS]


def _examine(check: Check, settings: Settings) -> Finding:
    try:
        found, detail = True, check.look(settings)
    except Missing as missing:
        found, detail = False, str(missing)
    except SynvirtError as error:
        found, detail = False, error.detail
    except Exception as error:  # of the system, of libvirt, of a module that is installed but broken
        found, detail = False, f"it could not be checked: {cause_of(error)}"
    return Finding(check.name, found, check.needed(settings), detail, check.what_for, check.how_to_get)


class Checkup:
    """The checks of a service that runs: made at its start and again when they are old and somebody asks, always in a thread of
    their own, so that no request waits for them. `latest()`: when, and what was found; None before the first ones are done."""

    def __init__(self, settings: Settings, *, examine: Callable[[Settings], list[Finding]] = examine) -> None:
        self._settings, self._examine = settings, examine
        self._lock = threading.Lock()
        self._latest: tuple[datetime, list[Finding]] | None = None
        self._begun_at: float | None = None

    def begin(self) -> None:
        """At once, unless they are being made or are fresh."""
        with self._lock:
            if self._begun_at is not None and time.monotonic() - self._begun_at < CHECKUP_EVERY_S:
                return
            self._begun_at = time.monotonic()
        threading.Thread(target=self._run, name="checkup", daemon=True).start()

    def latest(self) -> tuple[datetime, list[Finding]] | None:
        """The last findings, and when; None: none yet. New checks begin in the background."""
        self.begin()
        return self._latest

    def renew(self) -> tuple[datetime, list[Finding]]:
        """All checks, run again now: for an operator who has fixed something."""
        with self._lock:
            self._begun_at = time.monotonic()
        return self._run()

    def _run(self) -> tuple[datetime, list[Finding]]:
        findings = self._examine(self._settings)
        first = self._latest is None
        self._latest = latest = (now(), findings)
        for finding in findings if first else ():
            if finding.needed and not finding.found:
                log.warning(
                    "this host lacks what the service needs", name=finding.name, cause=finding.detail, hint=finding.how_to_get
                )
        return latest


def needs_met(findings: list[Finding]) -> bool:
    return all(finding.found or not finding.needed for finding in findings)
