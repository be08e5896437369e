"""Run the tests, and bury what they leave: `python -m tests.reaping -m pytest …`.

libvirt leaves its guests to the machine's init, and waits for one that it has ended until init has buried it: in a container
seconds for each guest, or for ever. Here they are this process's (prctl(2), PR_SET_CHILD_SUBREAPER), and are buried at once.

So it knows what all of them took of the processors, guests too, which no test sees. SAY_PROCESSORS: say so at the end.
"""

import ctypes
import os
import resource
import signal
import subprocess
import sys
import time
from pathlib import Path

PR_SET_CHILD_SUBREAPER = 36


def main(arguments: list[str]) -> int:
    """The exit code of Python with these arguments."""
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    # Not for what the tests run by this themselves.
    says = os.environ.pop("SAY_PROCESSORS", None) is not None
    began = time.monotonic()
    tests = subprocess.Popen([sys.executable, *arguments])
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the terminal's Ctrl-C is theirs too
    signal.signal(signal.SIGTERM, lambda *_: tests.send_signal(signal.SIGTERM))
    while True:
        pid, status = os.wait()
        if pid == tests.pid:
            tests.returncode = os.waitstatus_to_exitcode(status)
            _bury_the_rest()
            if says:
                _say_processors(time.monotonic() - began)
            return tests.returncode if tests.returncode >= 0 else 128 - tests.returncode


def _bury_the_rest() -> None:
    """What a test that failed has left, guests above all, would run on beside whatever comes next."""
    while left := Path(f"/proc/{os.getpid()}/task/{os.getpid()}/children").read_text().split():
        for pid in map(int, left):
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)


def _say_processors(wall_s: float) -> None:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    used_s, cores = used.ru_utime + used.ru_stime, len(os.sched_getaffinity(0))
    share = 100 * used_s / (wall_s * cores)
    print(f"{used_s:.1f} s of a processor in {wall_s:.1f} s: {share:.0f} % of {cores} cores", file=sys.stderr)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
