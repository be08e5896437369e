"""The process that programs of tests are forked from: `python -m tests.running.forking SOCKET`. `forked.py` is its other side.

It has loaded what they load and made what each service makes, has one thread, and has nothing open. An order comes with a
socket and the program's standard files; its process id is said there, and how it ended.
"""

import functools
import gc
import importlib
import os
import pickle
import pkgutil
import socket
import subprocess
import sys
import tempfile
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import synvirt
from synvirt.doctor import examine
from synvirt.jobs.inspecting import looking
from synvirt.settings import Settings
from tests.fakes.service import Service
from tests.running import forked, orders
from tests.running.forked_small import SMALL, SMALL_ROOM, small_forked
from tests.running.made_once import ANSWERS, made_once
from tests.running.store_template import stores_from

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
    """Gets the answers for the doctor's checks from a process of its own: some checks begin threads, and a process with threads
    is not forked from."""
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


def become(order: dict[str, Any], loaded: dict[str, str]) -> None:
    """`loaded`: what modules have set in the environment."""
    forked.inherit(order["ordering"])
    # The process that looks into files is a second process of the service's, with half of its modules.
    vars(looking)["subprocess"] = SimpleNamespace(**vars(subprocess) | {"Popen": forked.Popen})
    with small_forked():
        orders.become(order, loaded)


@functools.cache
def _small() -> socket.socket:
    """Where the process that forks the small programs takes its orders, begun with the first of them."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with theirs:
        argv = [sys.executable, "-m", "tests.running.forking_small", str(theirs.fileno()), SMALL_ROOM]
        begun = subprocess.Popen(argv, cwd=forked.CHECKOUT, pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL)
    begun.returncode = 0  # `serve` buries it
    return ours


def main() -> None:
    control, before = socket.socket(fileno=int(sys.argv[1])), dict(os.environ)
    with ExitStack() as made:
        made.enter_context(made_once())
        load(made)
        loaded = {name: value for name, value in os.environ.items() if name not in before}
        order = orders.serve(control, SMALL, _small)
        if order is not None:
            become(order, loaded)


if __name__ == "__main__":
    main()
