"""The thread that looks for jobs whose time has come."""

import contextlib
import threading
from collections.abc import Callable, Iterator

import structlog

# A cron expression has minutes; a job that is some seconds late is not.
LOOK_EVERY_S = 10.0
# A look may hang with an NFS server that is away: the service's end does not wait for that.
ENDS_WITHIN_S = 5.0

_log = structlog.get_logger("synvirt.backups")


@contextlib.contextmanager
def looking(look: Callable[[], object], *, every_s: float = LOOK_EVERY_S) -> Iterator[None]:
    """Calls `look` at once, and again and again until the end. What it raises is logged: the next look may be better."""
    stop = threading.Event()

    def loop() -> None:
        while True:
            try:
                look()
            except Exception as error:
                _log.error("jobs whose time has come cannot be started", exc_info=error)
            if stop.wait(every_s):
                return

    thread = threading.Thread(target=loop, name="backup-schedule", daemon=True)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join(ENDS_WITHIN_S)
