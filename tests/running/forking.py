"""The process that programs of tests are forked from: `python -m tests.running.forking SOCKET`. `forked.py` is its other side.

It has loaded what they load and made what each service makes, has one thread, and has nothing open. An order comes with a
socket and the program's standard files; its process id is said there, and how it ended.
"""

import gc
import importlib
import io
import os
import pickle
import pkgutil
import runpy
import socket
import subprocess
import sys
import tempfile
import time
import warnings
from contextlib import ExitStack
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
from tests.running.orders import serve
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
