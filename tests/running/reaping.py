"""Run the tests, and bury what they leave: `python -m tests.running.reaping -m pytest …`.

libvirt leaves its guests to the machine's init, and waits for one that it has ended until init has buried it: in a container
seconds for each guest, or forever. Here they are this process's (prctl(2), PR_SET_CHILD_SUBREAPER), and are buried at once.

So it knows what all of them took of the processors, guests too, which no test sees. SAY_PROCESSORS: say so at the end.
"""

import ctypes
import os
import resource
import signal
import subprocess
import sys
import time
from collections import defaultdict
from pathlib import Path

PR_SET_CHILD_SUBREAPER = 36
NAMES = 15


def main(arguments: list[str]) -> int:
    """The exit code of Python with these arguments."""
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    # Not for what the tests run by this themselves.
    says = os.environ.pop("SAY_PROCESSORS", None) is not None
    began = time.monotonic()
    tests = subprocess.Popen([sys.executable, *arguments])
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the terminal's Ctrl-C is theirs too
    signal.signal(signal.SIGTERM, lambda *_: tests.send_signal(signal.SIGTERM))
    used = Used()
    while True:
        # Not buried yet: it has its name until then.
        ended = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOWAIT)
        assert ended is not None
        status = used.bury(ended.si_pid, "the tests" if ended.si_pid == tests.pid else None)
        if ended.si_pid == tests.pid:
            tests.returncode = os.waitstatus_to_exitcode(status)
            _bury_the_rest(used)
            if says:
                used.say()
                _say_processors(time.monotonic() - began)
            return tests.returncode if tests.returncode >= 0 else 128 - tests.returncode


class Used:
    """What each program took of the processors, with what it waited for itself: of those that came to be children here."""

    def __init__(self) -> None:
        self._programs: dict[str, list[float]] = defaultdict(lambda: [0.0, 0])

    def bury(self, pid: int, name: str | None = None) -> int:
        """Its status."""
        name = name or Path(f"/proc/{pid}/comm").read_text().strip()
        _, status, used = os.wait4(pid, 0)
        total = self._programs[name]
        total[0] += used.ru_utime + used.ru_stime
        total[1] += 1
        return status

    def say(self) -> None:
        most = sorted(self._programs.items(), key=lambda program: -program[1][0])[:NAMES]
        table = ", ".join(f"{name} {seconds:.1f} s ({count:.0f})" for name, (seconds, count) in most)
        print(f"processor time, and how many processes: {table}", file=sys.stderr)


def _bury_the_rest(used: Used) -> None:
    """What a test that failed has left, guests above all, would run on beside whatever comes next."""
    while left := Path(f"/proc/{os.getpid()}/task/{os.getpid()}/children").read_text().split():
        for pid in map(int, left):
            os.kill(pid, signal.SIGKILL)
            used.bury(pid)


def _say_processors(wall_s: float) -> None:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    used_s, cores = used.ru_utime + used.ru_stime, len(os.sched_getaffinity(0))
    share = 100 * used_s / (wall_s * cores)
    print(f"{used_s:.1f} s of a processor in {wall_s:.1f} s: {share:.0f} % of {cores} cores", file=sys.stderr)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
