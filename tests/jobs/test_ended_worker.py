"""Workers that end as no order says: one whose service stood still, and one that the kernel keeps."""

import asyncio
import gc
import os
import select
import signal
from typing import Any

import pytest
import structlog

from synvirt.jobs import process
from synvirt.jobs.process import started
from synvirt.jobs.wire import Flushed

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


@pytest.mark.timeout(60)
def test_a_killed_worker_that_the_kernel_keeps_is_named_in_the_log(monkeypatch: pytest.MonkeyPatch) -> None:
    """As it waits for a file system that does not answer. The fake outlives SIGKILL."""
    monkeypatch.setattr(process, "STOP_GRACE_S", 0)
    asked: list[str] = []

    class Kept:
        pid, stdin = 2**22 + 1, None  # no process has this number

        async def wait(self) -> None:
            await asyncio.sleep(0.01)

        def terminate(self) -> None:
            asked.append("terminate")

        def kill(self) -> None:
            asked.append("kill")

    with structlog.testing.capture_logs() as logs:
        asyncio.run(process._end_when(lambda: True, Kept()))  # type: ignore[arg-type]
        asyncio.run(process._end(Kept()))  # type: ignore[arg-type]
    assert asked == ["terminate", "kill"]
    assert [(one["log_level"], one["pid"]) for one in logs] == [("warning", Kept.pid)] * 2
    assert "umount -f" in logs[0]["hint"]
