"""The running part of backups: a thread that looks for jobs whose time has come."""

import contextlib
from collections.abc import Callable, Iterator

import structlog

from synvirt.backups.service import Backups
from synvirt.errors import PersistFailed
from synvirt.repeating import repeated

# Cron expressions have minutes, so some seconds do not matter.
LOOK_EVERY_S = 10.0
# A check may hang with an NFS server that is away: the service's end does not wait for that.
ENDS_WITHIN_S = 5.0

_log = structlog.get_logger("synvirt.backups")


@contextlib.contextmanager
def running(backups: Backups) -> Iterator[Backups]:
    """Starts the runs and the schedule; ends both at the end of the block."""
    backups.start()
    try:
        with looking(backups.look):
            yield backups
    finally:
        backups.close()


@contextlib.contextmanager
def looking(look: Callable[[], object], *, every_s: float = LOOK_EVERY_S) -> Iterator[None]:
    """Calls `look` at once, and again and again until the end. Errors are logged, as the next call may succeed."""

    def look_logged() -> None:
        try:
            look()
        except PersistFailed as error:
            _log.warning("cannot see which jobs' time has come", cause=error.detail)
        except Exception as error:
            _log.error("jobs whose time has come cannot be started", exc_info=error)

    with repeated(look_logged, name="backup-schedule", every_s=every_s, ends_within_s=ENDS_WITHIN_S):
        yield
