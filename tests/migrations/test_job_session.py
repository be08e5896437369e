"""A job's session with its source, ended whatever moment the operator cancels at."""

import asyncio
from types import SimpleNamespace
from typing import Any, cast

import pytest

from synvirt.jobs.stop import Stop
from synvirt.migrations.job import Job


class Slow:
    """An adapter whose source lets it wait; it closes slowly too."""

    def __init__(self) -> None:
        self.connecting, self.closed = asyncio.Event(), False

    async def connect(self) -> None:
        self.connecting.set()
        await asyncio.Event().wait()

    async def close(self) -> None:
        await asyncio.sleep(0)
        self.closed = True


def test_a_session_that_is_cancelled_while_it_opens_is_closed() -> None:
    async def cancelled() -> bool:
        adapter = Slow()

        async def connect(*_: object) -> Slow:
            return adapter

        plan = SimpleNamespace(
            source=SimpleNamespace(Live="vsphere"), source_ref=SimpleNamespace(kind="live_vm", source_id=None)
        )
        rooms: Any = SimpleNamespace(connect=connect)
        job = Job(cast(Any, SimpleNamespace(plan=plan)), rooms, Stop())

        async def session() -> None:
            async with job.session():
                pytest.fail("nobody let it in")

        opening = asyncio.create_task(session())
        await adapter.connecting.wait()
        opening.cancel()
        with pytest.raises(asyncio.CancelledError):
            await opening
        return adapter.closed

    assert asyncio.run(cancelled())
