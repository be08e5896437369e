"""Runs a program that must not outlive the service: `python guard.py PROGRAM [ARGUMENT...]`.

The service holds our standard input open. Its end is the service's end, kill -9 included; the program and all its children,
which share our process group, are then killed too: a conversion that went on alone would write to a volume that the next start
resumes. Needs nothing but the standard library, and no part of this package: it starts in a few milliseconds.
"""

import os
import signal
import subprocess
import sys
import threading


def _leave_with_the_service() -> None:
    while os.read(0, 4096):
        pass
    os.killpg(0, signal.SIGKILL)


def main() -> int:
    threading.Thread(target=_leave_with_the_service, daemon=True).start()
    code = subprocess.run(sys.argv[1:], stdin=subprocess.DEVNULL, check=False).returncode
    # A program ended by a signal is reported as a shell does it.
    return code if code >= 0 else 128 - code


if __name__ == "__main__":
    sys.exit(main())
