"""The process that programs of tests are forked from: `python -m tests.running.forking SOCKET`. `forked.py` is its other side.

It has loaded what they load and made what each service makes, has one thread, and has nothing open. An order comes with a
socket and the program's standard files; its process id is said there, and how it ended.
"""

import fcntl
import gc
import importlib
import io
import json
import os
import pickle
import pkgutil
import runpy
import select
import signal
import socket
import subprocess
import sys
import tempfile
import time
import warnings
from contextlib import ExitStack, suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import synvirt
from synvirt.doctor import examine
from synvirt.jobs.inspecting import looking
from synvirt.settings import Settings
from tests.fakes.service import Service
from tests.running import forked
from tests.running.made_once import ANSWERS, made_once
from tests.running.store_template import stores_from

ORDER_BYTES = 1 << 20
FILES_MAX = 10

# Beside all of synvirt: what programs of tests are made of, and what libraries load once a service runs.
LOADED = ("tests.house", "tests.contracts.hypervisors", "anyio._backends._asyncio", "uvicorn.lifespan.off")


def load(made: ExitStack) -> None:
    for found in pkgutil.walk_packages(synvirt.__path__, "synvirt."):
        if not found.name.endswith("__main__"):
            importlib.import_module(found.name)
    for name in LOADED:
        importlib.import_module(name)
    # Half of a service's start is what its routes, their types and a new store need, the same each time.
    with tempfile.TemporaryDirectory() as folder:
        made.enter_context(stores_from(Path(folder) / "store.db"))
        Service(Path(folder)).close()
        _ask_programs(Path(folder))
    gc.collect()
    gc.freeze()


def _ask_programs(folder: Path) -> None:
    """What the doctor asks, a process of its own does: some of the checks begin threads, and no fork has those."""
    reading, writing = os.pipe()
    if os.fork() == 0:
        examine(Settings(data_dir=folder))
        with os.fdopen(writing, "wb") as answers:
            pickle.dump(ANSWERS, answers)
        os._exit(0)
    os.close(writing)
    with os.fdopen(reading, "rb") as answers:
        ANSWERS.update(pickle.load(answers))
    os.wait()


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


def become(order: dict[str, Any], loaded: dict[str, str]) -> None:
    """`loaded`: what modules have set in the environment."""
    forked.inherit(order["ordering"])
    if order["session"]:
        os.setsid()
    os.chdir(order["cwd"])
    os.environ.clear()
    os.environ.update(loaded | order["environment"])
    time.tzset()
    sys.path[:1] = [] if order["finds"] is None else [order["finds"]]
    at_once = "PYTHONUNBUFFERED" in os.environ
    for stream, is_by_line in ((sys.stdout, sys.stdout.isatty() or at_once), (sys.stderr, True)):
        assert isinstance(stream, io.TextIOWrapper)
        stream.reconfigure(line_buffering=is_by_line, write_through=at_once)
    # The process that looks into files is a second process of the service's, with half of its modules.
    vars(looking)["subprocess"] = SimpleNamespace(**vars(subprocess) | {"Popen": forked.Popen})
    warnings.filterwarnings("ignore", ".*found in sys.modules", RuntimeWarning)  # of a program that others import
    module, *arguments = order["words"]
    sys.argv = [module, *arguments]
    runpy.run_module(module, run_name="__main__", alter_sys=True)


def main() -> None:
    control, before = socket.socket(fileno=int(sys.argv[1])), dict(os.environ)
    with ExitStack() as made:
        made.enter_context(made_once())
        load(made)
        loaded = {name: value for name, value in os.environ.items() if name not in before}
        order = serve(control)
        if order is not None:
            become(order, loaded)


if __name__ == "__main__":
    main()
