"""The process that has collected the tests, and that xdist's workers are forked from: `python -m tests.running.collecting
SOCKET`. `workers.py` is its other side.

To collect ten thousand tests takes five seconds of a processor, and more where Python has not compiled them yet. What was
collected is 200 MiB, which the workers share. A worker is a process of its own all the same, with a folder for temporary
files of its own, and goes on with the session as if it had collected itself.
"""

import importlib
import json
import os
import queue
import socket
import sys
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import execnet.gateway_base as execnet
import pytest
from _pytest.config import _prepareconfig

from tests.running import forked

# The rest is imported where it is needed: pytest gives its plugins what an `assert` needs as it loads them.

GIVEN_BYTES = 1 << 16


class Gateway(execnet.WorkerGateway):
    """Execnet runs a worker's session as a task. Here the session is there already."""

    def __init__(self, name: str) -> None:
        sys.stdin.readline()  # how a new Python would begin
        os.write(1, b"1")
        own: Any = execnet.init_popen_io(execnet.get_execmodel("main_thread_only"))
        super().__init__(own, name, _startcount=2)
        self._tasks: queue.SimpleQueue[tuple[Any, Any]] = queue.SimpleQueue()
        self._has_ended = threading.Event()
        self._execpool: Any = SimpleNamespace(trigger_shutdown=lambda: None, waitall=self._has_ended.wait)
        self._executetask_complete = None
        self._initreceive()
        self.executetask(self._tasks.get())  # which says what this computer is
        self.channel, _ = self._tasks.get()

    def _local_schedulexec(self, channel: Any, sourcetask: bytes) -> None:
        self._tasks.put((channel, execnet.loads_internal(sourcetask)))

    def end(self) -> None:
        self._has_ended.set()
        self.channel.close()
        self.join()


class Collected:
    """Of pytest's plugins the one that forks, where the tests would begin."""

    def __init__(self, control: socket.socket) -> None:
        self._control = control
        self._failed: list[pytest.CollectReport] = []
        self._gateway: Gateway | None = None

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if not report.passed:
            self._failed.append(report)

    def pytest_runtestloop(self, session: pytest.Session) -> bool:
        from tests.running.orders import serve

        capturing: Any = session.config.pluginmanager.getplugin("capturemanager")
        capturing.stop_global_capturing()  # into files, which each worker has to itself
        forked.share()
        assert len(list(Path("/proc/self/task").iterdir())) == 1, threading.enumerate()
        order = serve(self._control)
        self._control.close()
        if order is None:
            return True
        os.close(order["ordering"])
        self._gateway = Gateway(order["words"][0])
        capturing.start_global_capturing()
        capturing.suspend_global_capture()
        return bool(self._interactor(session, self._gateway.channel).pytest_runtestloop(session))

    def _interactor(self, session: pytest.Session, channel: Any) -> Any:
        """The plugin that tells xdist's controller about this worker and its tests."""
        remote: Any = importlib.import_module("xdist.remote")
        config: Any = session.config
        config.workerinput, _, options, _ = channel.receive()
        config.option.basetemp = options["basetemp"]
        config._tmp_path_factory._given_basetemp = Path(options["basetemp"]).absolute()
        name_worker(config.workerinput)
        interactor = remote.WorkerInteractor(config, channel)
        vars(remote)["interactor"] = interactor
        interactor.pytest_sessionstart(session)
        interactor.pytest_collection()
        interactor.pytest_collection_modifyitems(config, session.items)
        for report in self._failed:
            interactor.pytest_collectreport(report)
        interactor.pytest_collection_finish(session)
        return interactor

    def end(self) -> None:
        if self._gateway is not None:
            self._gateway.end()


def name_worker(workerinput: dict[str, Any]) -> None:
    os.environ["PYTEST_XDIST_TESTRUNUID"] = workerinput["testrunuid"]
    os.environ["PYTEST_XDIST_WORKER"] = workerinput["workerid"]
    os.environ["PYTEST_XDIST_WORKER_COUNT"] = str(workerinput["workercount"])


def main() -> int:
    control = socket.socket(fileno=int(sys.argv[1]))
    control.set_inheritable(False)
    given = json.loads(control.recv(GIVEN_BYTES))
    os.chdir(given["cwd"])
    sys.path[:], sys.argv[:] = given["path"], ["-c"]
    name_worker(given["workerinput"])
    try:
        config: Any = _prepareconfig(given["arguments"], None)
        remote: Any = importlib.import_module("xdist.remote")
        remote.setup_config(config, None)
        config._parser.prog = Path(given["workerinput"]["mainargv"][0]).name
        config.workerinput, config.workeroutput = given["workerinput"], {}
        collected = Collected(control)
        config.pluginmanager.register(collected)
        code = int(config.hook.pytest_cmdline_main(config=config))
    except pytest.UsageError as error:
        print(*(f"ERROR: {line}" for line in error.args), sep="\n", file=sys.stderr)
        return int(pytest.ExitCode.USAGE_ERROR)
    collected.end()
    return code


if __name__ == "__main__":
    sys.exit(main())
