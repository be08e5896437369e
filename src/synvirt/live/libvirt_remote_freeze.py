"""A guest's file systems are frozen by a process of its own, which thaws them whatever becomes of the service.

    stdin   one line: which guest, and how its host is reached; then it stays open, and its end means: thaw
    stdout  «frozen», or why not

`python -m synvirt.live.libvirt_remote_freeze`. A guest that stays frozen hangs until somebody knows what to do about it: so a
service that is killed in that moment must not be the only one who does.
"""

import contextlib
import json
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from typing import Any, Final

import structlog

from synvirt.errors import Internal, SynvirtError
from synvirt.live import SourceAccess
from synvirt.live import libvirt_remote_domain as domains
from synvirt.live.libvirt_remote_form import FORM
from synvirt.live.libvirt_remote_host import Host, library

log = structlog.get_logger(__name__)

# Longer than a backup takes to begin, shorter than what users of the guest would call a fault.
FROZEN_MOST_S: Final = 15.0
# To connect there, ask the agent, and wait for a guest that has much to write out.
FREEZE_TIMEOUT_S: Final = 90.0
THAW_TIMEOUT_S: Final = 60.0
_THAW_TRIES: Final = 5
_FROZEN: Final = "frozen"
# Where a user's own libvirt is found, and the keys in an agent; the rest of the service's environment may hold secrets.
_ENVIRONMENT: Final = ("PATH", "HOME", "LANG", "TMPDIR", "PYTHONPATH", "SSH_AUTH_SOCK", "XDG_RUNTIME_DIR", "XDG_CONFIG_HOME")


@contextlib.contextmanager
def frozen(access: SourceAccess, vm_id: str) -> Iterator[bool]:
    """Are they frozen? Thawed at the end of the block, or after FROZEN_MOST_S, or when this process ends."""
    order = {"endpoint": access.endpoint, "credentials": dict(access.credentials), "options": dict(access.options)}
    with subprocess.Popen(
        [sys.executable, "-m", __name__],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        env={key: os.environ[key] for key in _ENVIRONMENT if key in os.environ},
        start_new_session=True,
    ) as child:
        if child.stdin is None or child.stdout is None:
            raise RuntimeError("a child has pipes")
        try:
            with contextlib.suppress(BrokenPipeError):
                child.stdin.write(json.dumps({**order, "vm_id": vm_id}) + "\n")
                child.stdin.flush()
            ready, _, _ = select.select([child.stdout], [], [], FREEZE_TIMEOUT_S)
            said = child.stdout.readline().strip() if ready else "it took too long"
            if said != _FROZEN:
                log.warning("guest does not freeze", vm=vm_id, cause=said)
            yield said == _FROZEN
        finally:
            with contextlib.suppress(BrokenPipeError):
                child.stdin.close()
            try:
                child.wait(THAW_TIMEOUT_S)
            except subprocess.TimeoutExpired:
                child.kill()


def _hold(order: dict[str, Any]) -> None:
    place, login, options = FORM.read(SourceAccess(order["endpoint"], order["credentials"], order["options"]))
    host = Host(place, login, options)
    host.open()
    try:
        domain = host.connection.lookupByUUIDString(order["vm_id"])
        if not domains.freeze(domain):
            raise Internal("its agent does not answer, or refuses")
        try:
            print(_FROZEN, flush=True)  # noqa: T201 - the service listens
            select.select([sys.stdin], [], [], FROZEN_MOST_S)
        finally:
            _thaw(domain)
    finally:
        host.close()


def _thaw(domain: Any) -> None:
    for _ in range(_THAW_TRIES):
        if domains.thaw(domain):
            return
        time.sleep(1)


def main() -> None:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # who stops the service stops all its processes, and this one has yet to thaw
    try:
        _hold(json.loads(sys.stdin.readline()))
    except (SynvirtError, ValueError, KeyError, library().libvirtError, BrokenPipeError) as error:
        with contextlib.suppress(BrokenPipeError):
            print(" ".join(str(error).split())[:400], flush=True)  # noqa: T201 - the service listens


if __name__ == "__main__":
    main()
