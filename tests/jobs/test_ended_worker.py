"""Workers that end as no order says: one whose service stood still, and one that the kernel keeps."""

import asyncio
import gc
import os
import select
import signal
from pathlib import Path
from typing import Any

import pytest
import structlog

from synvirt.jobs import process
from synvirt.jobs.process import WorkerDied, WorkerKept, started
from synvirt.jobs.stop import Stop
from synvirt.jobs.wire import Flushed
from synvirt.migrations.job import Job
from synvirt.migrations.patience import Patience
from synvirt.model.problems import Problem
from tests.fakes.workers import in_process
from tests.house import House, offline_plan

LINE = Flushed(key="a", offset_bytes=0, bytes_total=1, bytes_done=0, bytes_zero=0)


@pytest.mark.timeout(120)
def test_a_write_that_finds_it_gone_leaves_no_error_that_nobody_looked_at() -> None:
    unseen: list[dict[str, Any]] = []

    async def stand_still() -> None:
        asyncio.get_running_loop().set_exception_handler(lambda _, context: unseen.append(context))
        async with started() as worker:
            child = worker._child  # type: ignore[attr-defined]
            pipe = select.poll()
            pipe.register(child.stdin.get_extra_info("pipe").fileno(), 0)
            os.killpg(child.pid, signal.SIGKILL)
            assert pipe.poll(60_000), "its end of the pipe is closed, and the loop has not heard of it"
            await worker.send(LINE)
        del worker, child
        await asyncio.sleep(0)
        gc.collect()

    asyncio.run(stand_still())
    gc.collect()
    assert unseen == []


class Kept:
    """A worker that the kernel keeps after SIGKILL, until `let_go`, as it waits for a file system that does not answer."""

    pid, stdin, returncode = 2**22 + 1, None, -9  # no process has this number

    def __init__(self) -> None:
        self.asked: list[str] = []
        self.let_go = asyncio.Event()
        self.stdout = self.stderr = self

    async def wait(self) -> int:
        await self.let_go.wait()
        return self.returncode

    async def readline(self) -> bytes:
        await self.let_go.wait()
        return b""

    async def read(self, _most: int) -> bytes:
        return await self.readline()

    def terminate(self) -> None:
        self.asked.append("terminate")

    def kill(self) -> None:
        self.asked.append("kill")


@pytest.mark.timeout(60)
def test_a_killed_worker_that_the_kernel_keeps_is_named_in_the_log_and_by_its_job_until_it_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(process, "STOP_GRACE_S", 0)
    shown: list[Problem | None] = []

    def last_error() -> Problem | None:
        return house.store.get(job.id).last_error

    async def cancelled() -> None:
        job.stop.set()
        async with Patience(job) as patience:

            async def on_kept(kept: WorkerKept) -> None:
                await patience.show(kept)
                shown.append(await asyncio.to_thread(last_error))
                child.let_go.set()

            child = Kept()
            worker = process._Process(child, keepalive_s=60, stalled_s=None)  # type: ignore[arg-type]
            monkeypatch.setattr(worker, "send", nothing_sent)
            with pytest.raises(WorkerDied):
                (await worker.carry_out(LINE, nothing_heard, job.stop.is_set, on_kept)).check()
            assert child.asked == ["terminate", "kill"]

    house = House(tmp_path, workers=in_process)
    job = Job(house.intake.submit(offline_plan(tmp_path / "disk.raw")), house.rooms, Stop())
    with structlog.testing.capture_logs() as logs:
        asyncio.run(cancelled())
    [kept] = shown
    assert kept is not None
    assert (kept.fatal, "does not answer" in kept.message, "umount -f" in (kept.hint or "")) == (False, True, True)
    assert "zpool clear" in (kept.hint or "")
    assert last_error() is None
    [line] = [one for one in logs if "pid" in one]
    assert (line["log_level"], line["pid"], line["hint"]) == ("warning", Kept.pid, kept.hint)
    house.close()


async def nothing_sent(_line: object) -> None:
    """No pipe."""


async def nothing_heard(_message: object) -> None:
    """It says nothing."""
