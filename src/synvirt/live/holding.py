"""A guest's file systems held still by a process of its own, which thaws them whatever becomes of the service.

    stdin   one line: which guest, and how its platform is reached; then it stays open, and its end means: thaw
    stdout  «frozen», or why not

`python -m MODULE`, one for each platform that freezes so: it gives `main` what holds a guest. A frozen guest hangs until it is
thawed, so thawing must not depend on the service alone, which may be killed in that moment.
"""

import contextlib
import json
import os
import select
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any, Final

import structlog

from synvirt.errors import SynvirtError
from synvirt.live import SourceAccess

log = structlog.get_logger(__name__)

# Longer than a backup takes to begin, shorter than what users of the guest would call a fault.
FROZEN_MOST_S: Final = 15.0
# To connect there, and to ask the agent, which writes out what the guest has in memory first.
SAY_TIMEOUT_S: Final = 90.0
# For a guest that thaws. One that does not, or that froze when nobody waited for it any more, is thawed again and again by the
# process that froze it, by new connections, also after the service has gone on.
THAW_TIMEOUT_S: Final = 60.0
THAW_MOST_S: Final = 600.0
THAW_PAUSES_S: Final = (1.0, 2.0, 4.0, 8.0, 15.0)
FROZEN: Final = "frozen"
# Where a user's own libvirt is found, and the keys in an agent; the rest of the service's environment may hold secrets.
_ENVIRONMENT: Final = ("PATH", "HOME", "LANG", "TMPDIR", "PYTHONPATH", "SSH_AUTH_SOCK", "XDG_RUNTIME_DIR", "XDG_CONFIG_HOME")


class Hold:
    """Does the guest stand still? `quiet` once, and `lasted` until now. `killed`: nobody has thawed it, nor will."""

    def __init__(self, child: "subprocess.Popen[str] | None" = None, *, quiet: bool = False) -> None:
        self._child, self.quiet = child, quiet

    def lasted(self) -> bool:
        """The process says it when it thaws of itself."""
        if not self.quiet or self._child is None or self._child.stdout is None:
            return False
        ready, _, _ = select.select([self._child.stdout], [], [], 0)
        return not ready

    @property
    def killed(self) -> bool:
        return self._child is not None and self._child.poll() not in (None, 0)


@contextlib.contextmanager
def frozen(module: str, access: SourceAccess, vm_id: str) -> Iterator[Hold]:
    """Thawed at the end of the block, or after FROZEN_MOST_S, or when this process ends."""
    order = {"endpoint": access.endpoint, "credentials": dict(access.credentials), "options": dict(access.options)}
    child = subprocess.Popen(
        [sys.executable, "-P", "-m", module],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        env={key: os.environ[key] for key in _ENVIRONMENT if key in os.environ},
        start_new_session=True,
    )
    if child.stdin is None or child.stdout is None:
        raise RuntimeError("a child has pipes")
    said = ""
    try:
        with contextlib.suppress(BrokenPipeError):
            child.stdin.write(json.dumps({**order, "vm_id": vm_id}) + "\n")
            child.stdin.flush()
        ready, _, _ = select.select([child.stdout], [], [], SAY_TIMEOUT_S)
        said = _line(child.stdout.fileno()) if ready else "it took too long"
        if said != FROZEN:
            log.warning("guest does not freeze", vm=vm_id, cause=said)
        yield Hold(child, quiet=said == FROZEN)
    finally:
        with contextlib.suppress(BrokenPipeError):
            child.stdin.close()
        try:
            child.wait(THAW_TIMEOUT_S if said == FROZEN else 0)
        except subprocess.TimeoutExpired:
            if said == FROZEN:
                log.warning("guest does not thaw yet", vm=vm_id)
            threading.Thread(target=child.wait, name="thawing", daemon=True).start()
        child.stdout.close()


def _line(descriptor: int) -> str:
    """Byte by byte: what comes after it must be left for `select` to see."""
    said = bytearray()
    while (one := os.read(descriptor, 1)) not in (b"", b"\n"):
        said += one
    return said.decode(errors="replace").strip()


# ── in that process ──────────────────────────────────────────────────────────────────────────────────────────────────


def access_of(order: dict[str, Any]) -> SourceAccess:
    return SourceAccess(order["endpoint"], order["credentials"], order["options"])


def while_wanted() -> None:
    """The guest is frozen, and is to be thawed when this returns."""
    say(FROZEN)
    ended, _, _ = select.select([sys.stdin], [], [], FROZEN_MOST_S)
    if not ended:
        say("it was thawed")


def say(what: str) -> None:
    """Writes one line to the service: `frozen`, or why not."""
    with contextlib.suppress(BrokenPipeError):
        print(" ".join(what.split())[:400], flush=True)  # noqa: T201 - the service listens


def main(hold: Callable[[dict[str, Any]], None], *errors: type[Exception]) -> None:
    """`errors`: what its platform raises beside ours."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # who stops the service stops all its processes, and this one has yet to thaw
    expected: tuple[type[Exception], ...] = (SynvirtError, ValueError, KeyError, *errors)
    try:
        hold(json.loads(sys.stdin.readline()))
    except expected as error:
        say(str(error))
