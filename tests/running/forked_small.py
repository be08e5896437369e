"""Workers, guards and lookers, which the product starts by `sys.executable -P -m MODULE`, forked from a process that has loaded
what a worker loads (`forking_small.py`): to start Python is most of what the worker of a small job costs.

How Python itself starts them is seen by tests with a PYTHONPATH of their own, by migrations/test_worker_orders.py, and by those
that are `by_python`."""

import os
import subprocess
import sys
from asyncio import unix_events
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest

from synvirt.guests.inside import looking
from synvirt.live.vsphere import lease_guard
from tests.running import forked

SMALL = ("synvirt.worker", "synvirt.disks.vsphere.lease_end", "synvirt.guests.inside.looker")
# The rooms of the service that start one of these by `subprocess`. Workers are started by asyncio.
_STARTING = (lease_guard, looking)
# The last argument of the process that forks. A forked program writes its own command line over it.
SMALL_ROOM = "-" * 100
PYTHON = sys.executable
# Another one may have a `sitecustomize`, which Python reads as it starts.
PYTHONPATH = os.environ.get("PYTHONPATH")

# The forked programs whose end a loop of asyncio waits for, by process id.
_of_loops: dict[int, "_OfLoop"] = {}


class _OfLoop(forked.Popen[bytes]):
    """A program that a loop of asyncio waits for: the loop sets its return code, and no poll does."""

    def _execute_child(self, *arguments: Any) -> None:
        super()._execute_child(*arguments)
        _of_loops[self.pid] = self

    def _internal_poll(self, _deadstate: object = None) -> int | None:
        return self.returncode


class _Os:
    """asyncio waits for a process by os.waitpid, in a thread, which knows only children. A forked program is no child of this
    process: for one, the answer comes from the process that forked it."""

    def __getattr__(self, name: str) -> Any:
        return getattr(os, name)

    @staticmethod
    def waitpid(pid: int, options: int) -> tuple[int, int]:
        process = _of_loops.pop(pid, None)
        return os.waitpid(pid, options) if process is None else process._try_wait(options)


def _is_small(args: Any, env: Mapping[str, str] | None) -> bool:
    words = list(args) if isinstance(args, Sequence) and not isinstance(args, str) else []
    pythonpath = (os.environ if env is None else env).get("PYTHONPATH")
    return words[:3] == [PYTHON, "-P", "-m"] and words[3] in SMALL and pythonpath == PYTHONPATH


def _of_loop(args: Any, *, env: Mapping[str, str] | None = None, **named: Any) -> Any:
    return (_OfLoop if _is_small(args, env) else subprocess.Popen)(args, env=env, **named)


def _by_service(args: Any, *, env: Mapping[str, str] | None = None, **named: Any) -> Any:
    return (forked.Popen if _is_small(args, env) else subprocess.Popen)(args, env=env, **named)


@contextmanager
def small_forked() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(unix_events, "subprocess", SimpleNamespace(**vars(subprocess) | {"Popen": _of_loop}))
        patched.setattr(unix_events, "os", _Os())
        for module in _STARTING:
            patched.setattr(module, "subprocess", SimpleNamespace(**vars(subprocess) | {"Popen": _by_service}))
        yield


@contextmanager
def by_python() -> Iterator[None]:
    """Within the block, Python itself starts workers, guards and lookers."""
    with pytest.MonkeyPatch.context() as patched:
        for module in (unix_events, *_STARTING):
            patched.setattr(module, "subprocess", subprocess)
        yield
