"""Facts of a guest from its disks, by a process in a cage (`looker.py`). Blocking.

Needs Debian's python3-libfsext, -libfsxfs, -libfsntfs and -libregf; a host without them reads no disks, and says so.
"""

import contextlib
import json
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress

import structlog

from synvirt.guests.inside.opening import ENVIRONMENT, opened
from synvirt.machines.loader import Loader, from_line
from synvirt.model.facts import NOT_READ, bounded, short
from synvirt.programs import inherited

log = structlog.get_logger(__name__)

# Time for some hundred files on a volume that may lie in a pool of slow disks.
WITHIN_S = 60.0
POLL_S = 0.1
GONE_WITHIN_S = 10.0
# A thousand facts of 200 characters each, as JSON escapes them.
ANSWER_BYTES_MAX = 4 << 20
MESSAGES_READ_BYTES, MESSAGE_CHARS = 64 << 10, 200
# The looker's option; its own module needs the readers' libraries.
LOADERS = "--loaders"


def facts_of(
    devices: Sequence[str], stop: Callable[[], bool] = lambda: False, backing: Mapping[str, str] | None = None
) -> dict[str, str]:
    """The facts, and for each volume that was not read, why (`model.facts.NOT_READ`). `devices`: as `opening.py` has them;
    nothing writes to them meanwhile. `backing`: of those that are overlays in qcow2, the raw file under each."""
    return _read(devices, stop, backing or {})


def loaders_of(
    devices: Sequence[str], stop: Callable[[], bool] = lambda: False, backing: Mapping[str, str] | None = None
) -> list[Loader]:
    """The loaders on the disks' EFI system partitions that no firmware finds by itself. `devices`, `backing`: as of
    `facts_of`."""
    found = _read(devices, stop, backing or {}, LOADERS)
    return [loader for name, line in found.items() if name.isdigit() and (loader := from_line(line)) is not None]


def _read(devices: Sequence[str], stop: Callable[[], bool], backing: Mapping[str, str], *wanted: str) -> dict[str, str]:
    with contextlib.ExitStack() as closing:
        try:
            disks = [opened(device, backing.get(device), closing) for device in devices]
        except OSError as error:
            log.warning("the disks of a guest cannot be inspected", cause=error.strerror)
            return {f"{NOT_READ} disks": "they cannot be opened here"}
        descriptors = [descriptor for disk in disks for descriptor in disk.descriptors]
        return _asked([*wanted, *(disk.argument for disk in disks)], descriptors, stop)


def _asked(arguments: Sequence[str], descriptors: Sequence[int], stop: Callable[[], bool]) -> dict[str, str]:
    # Files, not pipes: the size of what it writes is limited (looker.py), and so it cannot fill our memory.
    with tempfile.TemporaryFile() as printed, tempfile.TemporaryFile() as messages:
        child = subprocess.Popen(
            [sys.executable, "-P", "-m", "synvirt.guests.inside.looker", *arguments],
            stdin=subprocess.DEVNULL,
            stdout=printed,
            stderr=messages,
            pass_fds=descriptors,
            env=inherited(ENVIRONMENT),
            start_new_session=True,
        )
        try:
            _wait(child, stop)
        finally:
            child.kill()
            try:
                child.wait(GONE_WITHIN_S)
            except subprocess.TimeoutExpired:  # a disk that does not answer holds even one that was killed
                threading.Thread(target=child.wait, name="looker-ends", daemon=True).start()
        if child.returncode != 0:
            messages.seek(0)
            cause = messages.read(MESSAGES_READ_BYTES).decode(errors="replace")[-MESSAGE_CHARS:]
            log.warning("the disks of a guest cannot be inspected", ended=child.returncode, cause=cause)
            return {
                f"{NOT_READ} disks": "what reads them here has ended: they are damaged, or it is not installed; see the log"
            }
        printed.seek(0)
        return _believed(printed.read(ANSWER_BYTES_MAX + 1))


def _wait(child: "subprocess.Popen[bytes]", stop: Callable[[], bool]) -> None:
    until = time.monotonic() + WITHIN_S
    while time.monotonic() < until and not stop():
        with suppress(subprocess.TimeoutExpired):
            child.wait(POLL_S)
            return


def _believed(printed: bytes) -> dict[str, str]:
    """Checks the facts: the process has read hostile disks and may have been taken over."""
    with suppress(ValueError, RecursionError):
        found = json.loads(printed) if len(printed) <= ANSWER_BYTES_MAX else None
        if isinstance(found, dict):
            return bounded({short(name): short(value) for name, value in found.items() if isinstance(value, str)})
    return {}
