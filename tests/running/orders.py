"""Orders of processes, each of which is forked from this one: the programs of tests (`forking.py`), the small ones of the
product (`forking_small.py`), and xdist's workers (`collecting.py`). It loads nothing of what they run."""

import fcntl
import io
import json
import os
import runpy
import select
import signal
import socket
import sys
import time
import warnings
from collections.abc import Callable, Collection
from contextlib import suppress
from typing import Any

ORDER_BYTES = 1 << 20
FILES_MAX = 10


def serve(
    control: socket.socket, others: Collection[str] = (), other: Callable[[], socket.socket] | None = None
) -> dict[str, Any] | None:
    """Forks a process for each order. Returns the order in each forked process, with the socket that it came by; None in this
    process, once all who order have closed their sockets. `others`: programs that another process forks, which takes its orders
    at the socket `other`."""
    woken, wakes = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.set_wakeup_fd(wakes)
    running: dict[int, socket.socket] = {}
    while True:
        ready, _, _ = select.select([control.fileno(), woken], [], [])
        if woken in ready:
            os.read(woken, 4096)
            _say_ends(running)
        if control.fileno() not in ready:
            continue
        order, descriptors, _, _ = socket.recv_fds(control, ORDER_BYTES, FILES_MAX)
        if not order:
            return None
        given = json.loads(order)
        ordering, end, *files = descriptors
        if other is not None and given["words"][0] in others:
            socket.send_fds(other(), [order], descriptors)
            for descriptor in descriptors:
                os.close(descriptor)
            continue
        pid = os.fork()
        if pid == 0:
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            for open_socket in (control, *running.values()):
                open_socket.close()
            for descriptor in (woken, wakes):
                os.close(descriptor)
            if given["session"]:
                os.setsid()
            with socket.socket(fileno=end) as told:
                _say(told, os.getpid())  # now who ordered it may end its session
            return _with_files(given, ordering, files)
        for descriptor in (ordering, *files):
            os.close(descriptor)
        running[pid] = socket.socket(fileno=end)


def _with_files(order: dict[str, Any], ordering: int, files: list[int]) -> dict[str, Any]:
    """Gives each file the descriptor number that the program expects."""
    wanted = (0, 1, 2, *order["passed"])
    ordering, *files = [_moved(file, max(wanted) + 10) for file in (ordering, *files)]
    for file, number in zip(files, wanted, strict=True):
        os.dup2(file, number)
        os.close(file)
    return order | {"ordering": ordering}


def become(order: dict[str, Any], loaded: dict[str, str]) -> None:
    """Runs the program. `loaded`: what modules have set in the environment."""
    os.umask(order["umask"])
    os.chdir(order["cwd"])
    os.environ.clear()
    os.environ.update(loaded | order["environment"])
    time.tzset()
    sys.path[:1] = [] if order["finds"] is None else [order["finds"]]
    at_once = "PYTHONUNBUFFERED" in os.environ
    for stream, is_by_line in ((sys.stdout, sys.stdout.isatty() or at_once), (sys.stderr, True)):
        assert isinstance(stream, io.TextIOWrapper)
        stream.reconfigure(line_buffering=is_by_line, write_through=at_once)
    warnings.filterwarnings("ignore", ".*found in sys.modules", RuntimeWarning)  # of a program that others import
    module, *arguments = order["words"]
    sys.argv = [module, *arguments]
    runpy.run_module(module, run_name="__main__", alter_sys=True)


def _moved(descriptor: int, beyond: int) -> int:
    moved = fcntl.fcntl(descriptor, fcntl.F_DUPFD_CLOEXEC, beyond)
    os.close(descriptor)
    return moved


def _say_ends(running: dict[int, socket.socket]) -> None:
    while running:
        pid, status, used = os.wait4(-1, os.WNOHANG)
        if pid == 0:
            return
        if pid in running:  # not what this process has begun for itself
            with running.pop(pid) as end:
                _say(end, f"{status} {used.ru_utime + used.ru_stime}")


def _say(end: socket.socket, what: object) -> None:
    with suppress(OSError):  # who ordered it has ended
        end.send(str(what).encode())
