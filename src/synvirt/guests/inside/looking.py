"""Facts of a guest from its disks, by a process in a cage (`looker.py`). Blocking.

Needs Debian's python3-libfsext, -libfsxfs, -libfsntfs and -libregf; a host without them reads no disks, and says so.
"""

import json
import os
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress

import structlog

from synvirt.model.facts import NOT_READ, bounded, short

log = structlog.get_logger(__name__)

# Time for some hundred files on a volume that may lie in a pool of slow disks.
WITHIN_S = 60.0
POLL_S = 0.1
# A thousand facts of 200 characters each, as JSON escapes them.
ANSWER_BYTES_MAX = 4 << 20
ENVIRONMENT = ("PATH", "PYTHONPATH")


def facts_of(
    devices: Sequence[str], stop: Callable[[], bool] = lambda: False, backing: Mapping[str, str] | None = None
) -> dict[str, str]:
    """The facts, and for each volume that was not read, why (`model.facts.NOT_READ`). `devices`: files and block devices, which
    nothing writes to meanwhile. `backing`: of those that are overlays in qcow2, the raw file under each."""
    descriptors: list[int] = []
    disks: list[str] = []
    try:
        for device in devices:
            files = [device, *([backing[device]] if backing and device in backing else [])]
            descriptors.extend(os.open(file, os.O_RDONLY | os.O_CLOEXEC) for file in files)
            disks.append(":".join(map(str, descriptors[-len(files) :])))
        return _asked(disks, descriptors, stop)
    except OSError as error:
        log.warning("the disks of a guest cannot be inspected", cause=error.strerror)
        return {f"{NOT_READ} disks": "they cannot be opened here"}
    finally:
        for descriptor in descriptors:
            os.close(descriptor)


def _asked(disks: Sequence[str], descriptors: Sequence[int], stop: Callable[[], bool]) -> dict[str, str]:
    child = subprocess.Popen(
        [sys.executable, "-P", "-m", "synvirt.guests.inside.looker", *disks],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        pass_fds=descriptors,
        env={key: os.environ[key] for key in ENVIRONMENT if key in os.environ},
        start_new_session=True,
    )
    with child:
        try:
            printed, messages = _outputs(child, stop)
        finally:
            child.kill()
    if child.returncode != 0:
        log.warning("the disks of a guest cannot be inspected", ended=child.returncode, cause=messages[-200:])
        return {f"{NOT_READ} disks": "what reads them here has ended: they are damaged, or it is not installed; see the log"}
    return _believed(printed)


def _outputs(child: "subprocess.Popen[bytes]", stop: Callable[[], bool]) -> tuple[bytes, str]:
    left_s = WITHIN_S
    while True:
        try:
            printed, messages = child.communicate(timeout=POLL_S)
        except subprocess.TimeoutExpired:
            left_s -= POLL_S
            if left_s <= 0 or stop():
                child.kill()
        else:
            return printed, messages.decode(errors="replace")


def _believed(printed: bytes) -> dict[str, str]:
    """Checks the facts: the process has read hostile disks and may have been taken over."""
    with suppress(ValueError, RecursionError):
        found = json.loads(printed) if len(printed) <= ANSWER_BYTES_MAX else None
        if isinstance(found, dict):
            return bounded({short(name): short(value) for name, value in found.items() if isinstance(value, str)})
    return {}
