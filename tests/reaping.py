"""Run the tests, and bury what they leave: `python -m tests.reaping -m pytest …`.

libvirt leaves its guests to the machine's init, and waits for one that it has ended until init has buried it: in a container
seconds for each guest, or for ever. Here they are this process's (prctl(2), PR_SET_CHILD_SUBREAPER), and are buried at once.
"""

import ctypes
import os
import signal
import subprocess
import sys
from pathlib import Path

PR_SET_CHILD_SUBREAPER = 36


def main(arguments: list[str]) -> int:
    """The exit code of Python with these arguments."""
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    tests = subprocess.Popen([sys.executable, *arguments])
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the terminal's Ctrl-C is theirs too
    signal.signal(signal.SIGTERM, lambda *_: tests.send_signal(signal.SIGTERM))
    while True:
        pid, status = os.wait()
        if pid == tests.pid:
            tests.returncode = os.waitstatus_to_exitcode(status)
            _bury_the_rest()
            return tests.returncode if tests.returncode >= 0 else 128 - tests.returncode


def _bury_the_rest() -> None:
    """What a test that failed has left, guests above all, would run on beside whatever comes next."""
    while left := Path(f"/proc/{os.getpid()}/task/{os.getpid()}/children").read_text().split():
        for pid in map(int, left):
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
