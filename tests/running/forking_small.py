"""The process that small programs of the product are forked from: `python -m tests.running.forking_small SOCKET ROOM`.
`forked_small.py` is its other side.

It has loaded what a worker loads before its order comes, and no more: what a worker needs in its cage, it loads there, as one
that Python itself starts.
"""

import ctypes
import gc
import os
import socket
import sys
from pathlib import Path
from typing import Any

import synvirt.worker  # noqa: F401 - for those that are forked
from tests.running import orders

# In /proc/PID/stat, counted from what follows the name: where the words of a process are.
BEGIN, END = 45, 46


def main() -> None:
    control, before = socket.socket(fileno=int(sys.argv[1])), dict(os.environ)
    gc.collect()
    gc.freeze()
    order = orders.serve(control)
    if order is not None:
        os.close(order["ordering"])
        _show_words(order)
        orders.become(order, {name: value for name, value in os.environ.items() if name not in before})


def _show_words(order: dict[str, Any]) -> None:
    """Writes the program's command line into /proc/PID/cmdline, in the place of ROOM, and behind it the process that ordered
    the program: `processes.py` finds it by that."""
    fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    begin, room = int(fields[BEGIN]), int(fields[END]) - int(fields[BEGIN])
    words = "\0".join([sys.executable, "-P", "-m", *order["words"], f"ordered-by={order['by']}"]).encode()
    assert len(words) < room, "there is no room for its words"
    ctypes.memmove(begin, words.ljust(room, b"\0"), room)


if __name__ == "__main__":
    main()
