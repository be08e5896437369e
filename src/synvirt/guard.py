"""Runs a program that must not outlive the service: `python guard.py PROGRAM [ARGUMENT...]`.

The service holds our standard input open. When it ends (by kill -9 too), or when the service closes it, the program and all
that it started are killed: a conversion that went on alone would write to a volume that the next start resumes. A daemon left
by the program (virt-v2v serves disks by one) is killed when the program ends, whatever its user: it becomes our child when its
own parent is gone. This file needs no part of this package, and of the standard library only what loads in a few milliseconds:
not `subprocess`, `pathlib` or `contextlib`, which doubled its start.
"""

import ctypes
import os
import select
import signal
import sys
import time

_PR_SET_CHILD_SUBREAPER = 36
# A killed process ends at once, unless its disk does not answer.
GONE_TIMEOUT_S = 8.0
# Python ignores them; a program is to have what the kernel does with them.
_IGNORED = (signal.SIGPIPE, signal.SIGXFSZ)


def _children() -> list[int]:
    """Empty on a kernel that does not list them."""
    found: list[int] = []
    try:
        for task in os.scandir("/proc/self/task"):
            with open(os.open(f"{task.path}/children", os.O_RDONLY)) as listed:
                found += map(int, listed.read().split())
    except OSError:
        return []
    return found


def _end(pid: int) -> None:
    try:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, os.WNOHANG)
    except OSError:
        return  # it has ended, or another one is its parent


def _end_children() -> None:
    deadline = time.monotonic() + GONE_TIMEOUT_S
    while (pids := _children()) and time.monotonic() < deadline:
        for pid in pids:
            _end(pid)
        time.sleep(0.005)


def main() -> int:
    """Runs the program; its exit code is ours."""
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    nothing = [(os.POSIX_SPAWN_OPEN, 0, os.devnull, os.O_RDWR, 0)]
    child = os.posix_spawnp(sys.argv[1], sys.argv[1:], os.environ, file_actions=nothing, setsigdef=_IGNORED)
    ended = os.pidfd_open(child)
    while ended not in (ready := select.select([0, ended], [], [])[0]):
        if 0 in ready and not os.read(0, 4096):
            _end_children()
            os.killpg(0, signal.SIGKILL)
    _, status = os.waitpid(child, 0)
    _end_children()
    returncode = os.waitstatus_to_exitcode(status)
    # A program ended by a signal is reported as a shell reports it.
    return returncode if returncode >= 0 else 128 - returncode


if __name__ == "__main__":
    sys.exit(main())
