"""How long a pass is tried again whose worker dies."""

import asyncio
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any
from uuid import uuid4

from hypothesis import given
from hypothesis import strategies as st

from synvirt.jobs.process import WorkerDied
from synvirt.migrations.passes import RETRY_PAUSES_S, again_and_again

TRIES = len(RETRY_PAUSES_S)
# What each attempt does before its worker dies: it moves a watermark, or none. Then one succeeds.
ATTEMPTS = st.lists(st.booleans(), max_size=3 * TRIES) | st.lists(st.integers(0, TRIES + 1), max_size=4).map(
    lambda runs: [moved for length in runs for moved in [True, *[False] * length]]
)


@given(ATTEMPTS)
def test_only_attempts_in_a_row_that_bring_nothing_end_a_pass(attempts: list[bool]) -> None:
    """A copy of weeks may lose its worker a hundred times."""
    pauses: list[float] = []
    left = iter(attempts)

    async def slept(seconds: float) -> None:
        pauses.append(seconds)

    async def in_thread(of: Callable[..., Any], *arguments: object) -> Any:
        return of(*arguments)

    rooms = SimpleNamespace(store=SimpleNamespace(watermarks=lambda *_: {}))
    job = SimpleNamespace(id=uuid4(), stop=SimpleNamespace(sleep=slept), in_thread=in_thread, rooms=rooms)
    listener: Any = SimpleNamespace(job=job, number=1, moved=False)
    listener.begin_attempt = lambda: setattr(listener, "moved", False)

    async def attempt(_: object) -> None:
        assert not listener.moved
        if (moves := next(left, None)) is not None:
            listener.moved = moves
            raise WorkerDied("it was killed")

    expected, in_a_row, gives_up = [], 0, False
    for moves in attempts:
        in_a_row = 1 if moves else in_a_row + 1
        if gives_up := in_a_row > TRIES:
            break
        expected.append(RETRY_PAUSES_S[in_a_row - 1])
    try:
        asyncio.run(again_and_again(listener, {}, attempt))
    except WorkerDied:
        assert gives_up
    else:
        assert not gives_up
    assert pauses == expected
