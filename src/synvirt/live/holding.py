"""Freezes a guest's file systems by a separate process, which thaws them even if the service dies.

    stdin   one line: the guest, and the access to its platform; then it stays open, and its end means: thaw
    stdout  «frozen», or why not

`python -m MODULE`, one module for each platform that freezes so: it passes `main` a function that freezes a guest. A frozen
guest hangs until it is thawed, so thawing must not depend only on the service, which may be killed at that moment.
"""

import contextlib
import itertools
import json
import os
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any, Final

import structlog

from synvirt.errors import SynvirtError
from synvirt.live import SourceAccess
from synvirt.programs import inherited

log = structlog.get_logger(__name__)

# Longer than the start of a backup, shorter than what users of the guest would call a fault.
FROZEN_MOST_S: Final = 15.0
# The time to connect, and for the agent, which first writes out the guest's memory.
SAY_TIMEOUT_S: Final = 90.0
# The time for a guest that thaws. A guest that does not, or that froze after the service gave up, is thawed again and again by
# the process that froze it, with new connections, also after the service has gone on.
THAW_TIMEOUT_S: Final = 60.0
THAW_MOST_S: Final = 600.0
THAW_PAUSES_S: Final = (1.0, 2.0, 4.0, 8.0, 15.0)
FROZEN: Final = "frozen"
# For a user's own libvirt and the keys in an agent. The rest of the service's environment may have secrets.
_ENVIRONMENT: Final = ("PATH", "HOME", "LANG", "TMPDIR", "PYTHONPATH", "SSH_AUTH_SOCK", "XDG_RUNTIME_DIR", "XDG_CONFIG_HOME")


class Hold:
    """Whether the guest is frozen: `quiet` once it is, and `lasted` while it is. `killed`: it died without a thaw."""

    def __init__(self, child: "subprocess.Popen[str] | None" = None, *, quiet: bool = False) -> None:
        self._child, self.quiet = child, quiet

    def lasted(self) -> bool:
        """The process reports it when it thaws by itself."""
        if not self.quiet or self._child is None or self._child.stdout is None:
            return False
        ready, _, _ = select.select([self._child.stdout], [], [], 0)
        return not ready

    @property
    def killed(self) -> bool:
        return self._child is not None and self._child.poll() not in (None, 0)


@contextlib.contextmanager
def frozen(module: str, access: SourceAccess, vm_id: str) -> Iterator[Hold]:
    """The guest is thawed at the end of the block, or after FROZEN_MOST_S, or when this process ends."""
    order = {"endpoint": access.endpoint, "credentials": dict(access.credentials), "options": dict(access.options)}
    child = subprocess.Popen(
        [sys.executable, "-P", "-m", module],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        env=inherited(_ENVIRONMENT),
        start_new_session=True,
    )
    if child.stdin is None or child.stdout is None:
        raise RuntimeError("a child has pipes")
    line = ""
    try:
        with contextlib.suppress(BrokenPipeError):
            child.stdin.write(json.dumps({**order, "vm_id": vm_id}) + "\n")
            child.stdin.flush()
        ready, _, _ = select.select([child.stdout], [], [], SAY_TIMEOUT_S)
        line = _line(child.stdout.fileno()) if ready else "it took too long"
        if line != FROZEN:
            log.warning("guest does not freeze", vm=vm_id, cause=line)
        yield Hold(child, quiet=line == FROZEN)
    finally:
        with contextlib.suppress(BrokenPipeError):
            child.stdin.close()
        try:
            child.wait(THAW_TIMEOUT_S if line == FROZEN else 0)
        except subprocess.TimeoutExpired:
            if line == FROZEN:
                log.warning("guest does not thaw yet", vm=vm_id)
            threading.Thread(target=child.wait, name="thawing", daemon=True).start()
        child.stdout.close()


def _line(descriptor: int) -> str:
    """Byte by byte: `select` must still see what comes after the line."""
    line = bytearray()
    while (one := os.read(descriptor, 1)) not in (b"", b"\n"):
        line += one
    return line.decode(errors="replace").strip()


# ── in that process ──────────────────────────────────────────────────────────────────────────────────────────────────


def access_of(order: dict[str, Any]) -> SourceAccess:
    return SourceAccess(order["endpoint"], order["credentials"], order["options"])


def while_wanted() -> None:
    """Waits while the guest must stay frozen; the caller thaws it then."""
    say(FROZEN)
    ended, _, _ = select.select([sys.stdin], [], [], FROZEN_MOST_S)
    if not ended:
        say("it was thawed")


def thaw_until_done(thaw: Callable[[], bool], limit_s: float) -> None:
    """Calls `thaw` at least once, and again for `limit_s` seconds until it reports that nothing is frozen. It may raise any
    error: nothing else would thaw the guest."""
    deadline = time.monotonic() + limit_s
    for pause_s in itertools.chain(THAW_PAUSES_S, itertools.repeat(THAW_PAUSES_S[-1])):
        with contextlib.suppress(Exception):
            if thaw():
                return
        if time.monotonic() + pause_s > deadline:
            return
        time.sleep(pause_s)


def say(what: str) -> None:
    """Writes one line to the service: `frozen`, or why not."""
    with contextlib.suppress(BrokenPipeError):
        print(" ".join(what.split())[:400], flush=True)  # noqa: T201 - the service listens


def main(hold: Callable[[dict[str, Any]], None], *errors: type[Exception]) -> None:
    """`errors`: the platform's exceptions beside ours."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # the service's stop signals all its processes; this one must still thaw
    expected: tuple[type[Exception], ...] = (SynvirtError, ValueError, KeyError, *errors)
    try:
        hold(json.loads(sys.stdin.readline()))
    except expected as error:
        say(str(error))
