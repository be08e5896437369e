"""The loop of the laws of kinds is one of asyncio, but for the thread in which the store answers."""

import asyncio
import threading
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from uuid import UUID

import pytest

from synvirt.errors import NotFound
from synvirt.store import Store
from tests.fakes.loops import store_at_once
from tests.house import Crash


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    made = Store(f"sqlite:///{tmp_path / 'store.db'}")
    yield made
    made.close()


def test_the_store_answers_in_the_thread_of_the_loop_and_all_else_in_another(store: Store) -> None:
    async def threads() -> list[bool]:
        callers: list[int] = []
        store.on_commit = lambda: callers.append(threading.get_ident())
        await asyncio.to_thread(store.write_under, None)
        await asyncio.to_thread(partial(store.hosts.begin, "here", ttl_s=9, document="{}"))
        callers.append(await asyncio.to_thread(threading.get_ident))
        return [ident == threading.get_ident() for ident in callers]

    with store_at_once():
        assert asyncio.run(threads()) == [True, False]
    assert asyncio.run(threads()) == [False, False]


@pytest.mark.parametrize("raised", [NotFound, Crash])
def test_what_the_store_raises_goes_to_who_asked(store: Store, raised: type[BaseException]) -> None:
    async def asks() -> None:
        if raised is Crash:
            store.on_commit = crash
            await asyncio.to_thread(partial(store.hosts.begin, "here", ttl_s=9, document="{}"))
        await asyncio.to_thread(store.get, UUID(int=1))

    def crash() -> None:
        raise Crash

    with store_at_once(), pytest.raises(raised):
        asyncio.run(asks())


def test_what_is_ready_goes_on_between_two_questions(store: Store) -> None:
    async def both() -> list[int]:
        turns: list[int] = []

        async def asks(number: int) -> None:
            for _ in range(3):
                turns.append(number)
                await asyncio.to_thread(store.last_event_id)

        await asyncio.gather(asks(1), asks(2))
        return turns

    with store_at_once():
        assert asyncio.run(both()) == [1, 2] * 3
