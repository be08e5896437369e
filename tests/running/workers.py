"""xdist's workers, forked from a process that has collected the tests (`collecting.py`)."""

import importlib
import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import execnet.gateway_io as execnet
import pytest
from execnet.gateway_base import Popen2IO

from tests.running import forked


class Worker(execnet.Popen2IOMaster):
    """As execnet has a process that it has started itself."""

    def __init__(self, name: str, control: socket.socket, execmodel: Any) -> None:
        class Popen(forked.Popen[bytes]):
            def _ordered_by(self) -> socket.socket:
                return control

        self.popen = Popen([sys.executable, "-m", name], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        Popen2IO.__init__(self, self.popen.stdin, self.popen.stdout, execmodel)


class Workers:
    """The plugin of the process that gives out the tests."""

    def __init__(self) -> None:
        self._patched = pytest.MonkeyPatch()
        self._control: socket.socket | None = None
        self._collecting: subprocess.Popen[bytes] | None = None

    @pytest.hookimpl(optionalhook=True)
    def pytest_xdist_setupnodes(self, config: pytest.Config, specs: list[Any]) -> None:
        if not all(spec.popen and not (spec.python or spec.via or spec.chdir) for spec in specs):
            return
        plugin: Any = importlib.import_module("xdist.plugin")
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            self._collecting = subprocess.Popen(
                [sys.executable, "-m", "tests.running.collecting", str(theirs.fileno())],
                cwd=forked.CHECKOUT,
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
            )
        self._control = ours
        given = {
            "arguments": [str(argument) for argument in config.invocation_params.args],
            "cwd": os.fspath(Path.cwd()),
            "path": plugin._sys_path,
            "workerinput": {"workerid": "gw", "workercount": len(specs), "testrunuid": "", "mainargv": sys.argv},
        }
        ours.send(json.dumps(given).encode())
        self._patched.setattr(execnet, "create_io", self._new_worker)

    def _new_worker(self, spec: Any, execmodel: Any) -> Worker:
        assert self._control is not None
        try:
            return Worker(f"{spec.id}-worker", self._control, execmodel)
        except OSError:
            pytest.exit("the tests were not collected", pytest.ExitCode.USAGE_ERROR)

    @pytest.hookimpl(trylast=True)
    def pytest_unconfigure(self) -> None:
        self._patched.undo()
        if self._control is not None and self._collecting is not None:
            self._control.close()
            self._collecting.wait()
