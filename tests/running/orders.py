"""Orders of processes, each of which is forked from this one: the programs of tests (`forking.py`), and xdist's workers
(`collecting.py`). It loads nothing of what they run."""

import fcntl
import json
import os
import select
import signal
import socket
from contextlib import suppress
from typing import Any

ORDER_BYTES = 1 << 20
FILES_MAX = 10


def serve(control: socket.socket) -> dict[str, Any] | None:
    """In each forked process: what it is to run, and the socket that it was ordered by. In this one: None, once nobody orders
    any more."""
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
        ordering, end, *files = descriptors
        pid = os.fork()
        if pid == 0:
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            for other in (control, *running.values()):
                other.close()
            for descriptor in (woken, wakes, end):
                os.close(descriptor)
            return _with_files(json.loads(order), ordering, files)
        for descriptor in (ordering, *files):
            os.close(descriptor)
        running[pid] = socket.socket(fileno=end)
        _say(running[pid], pid)


def _with_files(order: dict[str, Any], ordering: int, files: list[int]) -> dict[str, Any]:
    """Each has the number that it is to have."""
    wanted = (0, 1, 2, *order["passed"])
    ordering, *files = [_moved(file, max(wanted) + 10) for file in (ordering, *files)]
    for file, number in zip(files, wanted, strict=True):
        os.dup2(file, number)
        os.close(file)
    return order | {"ordering": ordering}


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
