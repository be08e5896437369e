"""A worker that is forked is one that Python itself would have started, and is found by who ordered it."""

import asyncio
import os
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from synvirt.jobs.orders import CopyOrder
from synvirt.jobs.process import Ended, started
from tests.running import forked
from tests.running.forked_small import by_python
from tests.running.processes import command_line, until, workers


def _open(pid: int) -> list[str]:
    """While it begins, it closes files between two of these steps."""
    found = []
    for one in Path(f"/proc/{pid}/fd").iterdir():
        with suppress(FileNotFoundError):
            found.append(str(one.readlink()).partition(":")[0])
    return sorted(found)


def _about(pid: int) -> dict[str, Any]:
    status = dict(line.split(":\t") for line in Path(f"/proc/{pid}/status").read_text().splitlines())
    return {
        "session": os.getsid(pid) == pid,
        "umask": status["Umask"],
        "folder": Path(f"/proc/{pid}/cwd").readlink(),
        "open": _open(pid),
        "threads": status["Threads"],
    }


async def _seen_and_carried_out() -> tuple[dict[str, Any], int, Ended]:
    async def heard(message: object) -> None: ...

    async with started() as worker:
        until(workers)  # for a moment after execve(2) a process has no command line
        (pid,) = workers()
        until(lambda: _open(pid) == ["pipe"] * 4)  # it waits for its order
        assert "-P -m synvirt.worker" in command_line(pid)
        about, parent = _about(pid), int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
        return about, parent, await worker.carry_out(CopyOrder(disks=()), heard, lambda: False)


def test_it_is_what_python_starts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    about, parent, done = asyncio.run(_seen_and_carried_out())
    with by_python():
        expected, its_parent, its_done = asyncio.run(_seen_and_carried_out())
    assert (about, done) == (expected, its_done)
    assert (parent == os.getpid(), its_parent == os.getpid()) == (False, True)
    assert workers() == []


def test_how_it_was_killed_is_known() -> None:
    async def killed() -> int:
        async with started() as worker:
            child = worker._child  # type: ignore[attr-defined]
            os.killpg(child.pid, signal.SIGKILL)
            code: int = await child.wait()
            return code

    assert asyncio.run(killed()) == -signal.SIGKILL


SERVICE = """
import asyncio
from synvirt.jobs.process import started

async def hold():
    async with started():
        print("on", flush=True)
        await asyncio.sleep(60)

asyncio.run(hold())
"""


def test_that_of_a_service_is_found_and_ends_with_it(tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(SERVICE)
    with forked.Popen([sys.executable, "-m", "program"], stdout=subprocess.PIPE, text=True, cwd=tmp_path) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "on\n"
        until(lambda: len(workers(process.pid)) == 1)
        (worker,) = workers(process.pid)
        assert worker in workers(), "it is this process's, too"
        process.kill()
    until(lambda: not Path(f"/proc/{worker}").exists())
