"""Runs a program that must not outlive the service: `python guard.py PROGRAM [ARGUMENT...]`.

The service holds our standard input open. When it ends (by kill -9 too), or when the service closes it, the program and all
that it started are killed: a conversion that went on alone would write to a volume that the next start resumes. A daemon left
by the program (virt-v2v serves disks by one) is killed when the program ends, whatever its user: it becomes our child when its
own parent is gone. This file needs only the standard library and no part of this package, so it starts in a few milliseconds.
"""

import contextlib
import ctypes
import os
import select
import signal
import subprocess
import sys
import time
from pathlib import Path

_PR_SET_CHILD_SUBREAPER = 36
# A killed process ends at once, unless its disk does not answer.
GONE_TIMEOUT_S = 8.0


def _children() -> list[int]:
    return [int(pid) for task in Path("/proc/self/task").iterdir() for pid in (task / "children").read_text().split()]


def _end_children() -> None:
    deadline = time.monotonic() + GONE_TIMEOUT_S
    with contextlib.suppress(OSError):  # a kernel that does not list them
        while (pids := _children()) and time.monotonic() < deadline:
            for pid in pids:
                with contextlib.suppress(OSError):
                    os.kill(pid, signal.SIGKILL)
                    os.waitpid(pid, os.WNOHANG)
            time.sleep(0.005)


def main() -> int:
    """Runs the program; its exit code is ours."""
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    with subprocess.Popen(sys.argv[1:], stdin=subprocess.DEVNULL) as child:
        ended = os.pidfd_open(child.pid)
        while ended not in (ready := select.select([0, ended], [], [])[0]):
            if 0 in ready and not os.read(0, 4096):
                _end_children()
                os.killpg(0, signal.SIGKILL)
    _end_children()
    # A program ended by a signal is reported as a shell reports it.
    return child.returncode if child.returncode >= 0 else 128 - child.returncode


if __name__ == "__main__":
    sys.exit(main())
