"""Workers of jobs, forked from the process that runs the tests: to begin, a new Python takes a fifth of a second of a
processor here, most of it for page faults.

A worker is a process of its own all the same, a child of its service's, in a cage of its own. How Python itself starts one is
seen by tests outside the guest.
"""

import contextlib
import gc
import inspect
import os
import signal
import subprocess
import sys
import traceback
from asyncio import unix_events
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any, NoReturn

import pytest

import synvirt.backups.worker.tasks  # noqa: F401 - else each that asks for it loads it
from synvirt import worker
from synvirt.jobs.worker import main

# The process ids of all that there were.
begun: list[int] = []


class Popen(subprocess.Popen[bytes]):
    """Of `python -P -m synvirt.worker SILENCE_S`, as asyncio starts it."""

    _close_pipe_fds: Any

    def _execute_child(self, *arguments: Any) -> None:
        given = inspect.signature(subprocess.Popen._execute_child).bind(self, *arguments).arguments  # type: ignore[attr-defined]
        *words, silence_s = given["args"]
        assert words == [sys.executable, "-P", "-m", "synvirt.worker"]
        assert given["start_new_session"]
        self.pid = os.fork()
        if self.pid == 0:
            _become((given["p2cread"], given["c2pwrite"], given["errwrite"]), given["env"], float(silence_s))
        begun.append(self.pid)
        self._child_created = True
        self._close_pipe_fds(*(given[name] for name in ("p2cread", "p2cwrite", "c2pread", "c2pwrite", "errread", "errwrite")))


def _become(files: tuple[int, ...], environment: dict[str, str], silence_s: float) -> NoReturn:
    try:
        gc.freeze()  # what is garbage by now would close its files, whose numbers are others' here
        os.setsid()
        signal.set_wakeup_fd(-1)
        for standard, file in enumerate(files):
            os.dup2(file, standard)
        os.closerange(len(files), os.sysconf("SC_OPEN_MAX"))
        sys.stdout, sys.stderr = (os.fdopen(number, "w", closefd=False) for number in (1, 2))
        os.environ.clear()
        os.environ.update(environment)
        os._exit(main(worker.TASKS, silence_s=silence_s))
    except BaseException:
        traceback.print_exc()
        os._exit(1)


@contextlib.contextmanager
def forked() -> Iterator[None]:
    """All that asyncio starts meanwhile."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(unix_events, "subprocess", SimpleNamespace(**vars(subprocess) | {"Popen": Popen}))
        yield
