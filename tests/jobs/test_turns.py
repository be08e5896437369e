"""Turns are handed on in the order the jobs came, and nobody polls for theirs."""

import asyncio
from collections.abc import Coroutine
from typing import Any
from uuid import UUID, uuid4

import pytest

from synvirt.errors import Cancelled
from synvirt.jobs.slots import Turns
from synvirt.jobs.stop import Stop


async def at_once(wanted: Coroutine[Any, Any, None]) -> None:
    await wanted


def test_a_thousand_jobs_take_their_turns_in_their_order() -> None:
    turns, jobs, came = Turns(3), [uuid4() for _ in range(1000)], []
    working, most = set[UUID](), 0

    async def work(job: UUID) -> None:
        nonlocal most
        await turns.taken(job, at_once)
        came.append(job)
        working.add(job)
        most = max(most, len(working))
        await asyncio.sleep(0)
        working.discard(job)
        turns.left(job)

    async def all_of_them() -> None:
        async with asyncio.timeout(60):
            await asyncio.gather(*map(work, jobs))

    asyncio.run(all_of_them())
    assert came == jobs
    assert most == 3


def test_a_cut_over_does_not_wait_and_a_cancelled_job_leaves_the_line() -> None:
    turns, first, second, third, urgent = Turns(1), uuid4(), uuid4(), uuid4(), uuid4()

    async def main() -> None:
        stop = Stop()
        await turns.taken(first, at_once)
        await turns.taken(first, at_once)
        line = [asyncio.create_task(turns.taken(second, stop.or_stop)), asyncio.create_task(turns.taken(third, at_once))]
        await asyncio.sleep(0)
        await turns.taken(urgent, at_once, urgent=True)
        stop.set()
        with pytest.raises(Cancelled):
            await line[0]
        turns.left(urgent)
        assert not line[1].done()
        turns.left(first)
        async with asyncio.timeout(60):
            await line[1]

    asyncio.run(main())
