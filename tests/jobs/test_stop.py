"""A wait that an operator may end."""

import asyncio
import contextlib
from typing import Any

import pytest

from synvirt.errors import Cancelled
from synvirt.jobs.stop import Stop


def test_what_has_answered_is_not_waited_for_again(monkeypatch: pytest.MonkeyPatch) -> None:
    waited, wait = [], asyncio.wait

    async def counted(*arguments: Any, **named: Any) -> Any:
        waited.append(arguments)
        return await wait(*arguments, **named)

    monkeypatch.setattr(asyncio, "wait", counted)

    async def answered() -> str:
        await asyncio.sleep(0)
        return "the answer"

    stop = Stop()
    assert asyncio.run(stop.or_stop(answered())) == "the answer"
    assert len(waited) == 1
    assert not stop.left_running


def test_what_is_stopped_has_ended_before_the_job_goes_on() -> None:
    ended: list[str] = []

    async def source() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            await asyncio.sleep(0.01)
            ended.append("the source")

    async def stopped() -> None:
        stop = Stop()
        asyncio.get_running_loop().call_soon(stop.set)
        with pytest.raises(Cancelled):
            await stop.or_stop(source())
        assert ended == ["the source"]
        assert not stop.left_running

    asyncio.run(stopped())


def test_a_call_that_does_not_end_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("synvirt.jobs.stop.CANCEL_WITHIN_S", 0.01)

    async def stopped() -> bool:
        stop, let_go = Stop(), asyncio.Event()

        async def deaf() -> None:
            while not let_go.is_set():
                with contextlib.suppress(asyncio.CancelledError):
                    await let_go.wait()

        asyncio.get_running_loop().call_soon(stop.set)
        with pytest.raises(Cancelled):
            await stop.or_stop(deaf())
        let_go.set()
        return stop.left_running

    assert asyncio.run(stopped())
