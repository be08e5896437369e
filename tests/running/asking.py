"""A program of Python's that is forked (`forked.py`) though a shell starts it: `python -IS asking.py SOCKET MODULE ARGUMENTS…`
has the standard files, the folder and the environment that it was started with, and ends as the program does."""

import json
import os
import signal
import socket
import sys

ANSWER_BYTES = 100


def main() -> int:
    number, *words = sys.argv[1:]
    umask = os.umask(0)
    os.umask(umask)
    here = os.getcwd()  # noqa: PTH109 - pathlib takes a third of this program's start
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    order = {
        "words": words,
        "finds": here,
        "passed": [],
        "cwd": here,
        "environment": dict(os.environ),
        "session": False,
        "umask": umask,
    }
    with socket.socket(fileno=int(number)) as control, theirs:
        socket.send_fds(control, [json.dumps(order).encode()], [control.fileno(), theirs.fileno(), 0, 1, 2])
    if not ours.recv(ANSWER_BYTES):
        return 1
    status = os.waitstatus_to_exitcode(int(ours.recv(ANSWER_BYTES).split()[0]))
    if status < 0:
        signal.signal(-status, signal.SIG_DFL)
        os.kill(os.getpid(), -status)
    return status


if __name__ == "__main__":
    sys.exit(main())
