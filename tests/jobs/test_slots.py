"""Slots hold over all hosts: never more than there are, in the order the jobs came, and freed when a host dies."""

import asyncio
import threading
from collections.abc import Coroutine, Iterator
from typing import Any
from uuid import UUID, uuid4

import pytest

from synvirt.errors import Cancelled, PersistFailed
from synvirt.jobs.slots import Resource, Slots, destination, source_host
from synvirt.jobs.stop import Stop
from synvirt.model.kinds import State
from synvirt.store import Store
from synvirt.store.hosts import LeaseLost
from tests.jobs.migrations import migration

ESX1, ESX2, POOL = source_host(UUID(int=7), "esx1", most=2), source_host(UUID(int=7), "esx2", most=2), destination("p", most=3)


def take(store: Store, job: UUID, *wanted: Resource, host: str = "a", urgent: bool = False) -> bool:
    return store.slots.take(job, {one.key: one.most for one in wanted}, host=host, urgent=urgent)


async def at_once(wanted: Coroutine[Any, Any, None]) -> None:
    await wanted


def test_who_came_first_goes_first_and_a_cut_over_waits_for_nobody(store: Store) -> None:
    first, second, third, fourth, urgent = (uuid4() for _ in range(5))
    assert take(store, first, ESX1)
    assert take(store, first, ESX1)
    assert take(store, second, ESX1, host="b")
    assert not take(store, third, ESX1, host="b")
    assert not take(store, fourth, ESX1)
    assert take(store, uuid4(), ESX2)
    assert take(store, urgent, ESX1, urgent=True)
    assert store.slots.count(ESX1.key) == (3, 2)
    store.slots.leave(first)
    assert not take(store, third, ESX1, host="b")  # what a cut-over has counts for those who come later
    store.slots.leave(urgent)
    assert not store.slots.is_next(fourth, {ESX1.key: ESX1.most}, host="a")
    assert not take(store, fourth, ESX1)
    assert take(store, third, ESX1, host="b")
    store.slots.leave(second)
    assert take(store, fourth, ESX1)


def test_all_that_a_job_needs_comes_together_and_nobody_is_passed(store: Store) -> None:
    """In another order two jobs that need two things each would wait for each other, or one of them forever."""
    one, two = destination("one", most=1), destination("two", most=1)
    holder, first, second = uuid4(), uuid4(), uuid4()
    assert take(store, holder, one)
    assert not take(store, first, one, two)
    assert store.slots.count(two.key) == (0, 1)
    assert not take(store, second, two)
    store.slots.leave(holder)
    assert take(store, first, two, one)
    assert take(store, first, two, one)
    store.slots.leave(first, {two.key: two.most})
    assert store.slots.counts() == {one.key: (1, 0), two.key: (0, 1)}
    assert take(store, second, two)


def test_a_host_that_died_keeps_its_slots_until_its_lease_is_over(store: Store) -> None:
    store.hosts.begin("dead", ttl_s=1000, document="{}")
    for _ in range(2):
        assert take(store, uuid4(), ESX1, host="dead")
    waits = uuid4()
    assert not take(store, waits, ESX1, host="b")
    store.hosts.fence("dead")
    assert not take(store, waits, ESX1, host="b")  # fenced, and maybe alive for some seconds more
    store.hosts.begin("dead", ttl_s=-1, document="{}")
    assert take(store, waits, ESX1, host="b")


def test_a_clock_that_is_set_ahead_frees_no_slot_of_the_host_that_asks(store: Store) -> None:
    """It is alive, whatever its lease says until the next renewal: up to ten seconds later."""
    lease, first, later = store.hosts.begin("a", ttl_s=60, document="{}"), uuid4(), uuid4()
    assert take(store, first, ESX1)
    assert take(store, uuid4(), ESX1)
    assert store.hosts.renew(lease, ttl_s=-3600, document="{}")  # as after an hour, for the clock
    assert not take(store, later, ESX1)
    assert not store.slots.is_next(later, {ESX1.key: ESX1.most}, host="a")
    assert store.hosts.renew(lease, ttl_s=60, document="{}")
    assert store.slots.count(ESX1.key) == (2, 1)
    store.slots.leave(first)
    assert take(store, later, ESX1)


def test_slots_of_a_host_whose_lease_is_over_do_not_count_and_do_not_come_back(store: Store) -> None:
    late, other, one = store.hosts.begin("late", ttl_s=-1, document="{}"), uuid4(), destination("one", most=1)
    assert take(store, uuid4(), one, host="late")
    assert (store.slots.count(one.key), store.slots.counts()) == ((0, 0), {})
    assert store.slots.is_next(other, {one.key: one.most}, host="b")
    assert take(store, other, one, host="b")
    assert store.hosts.renew(late, ttl_s=1000, document="{}")
    assert store.slots.counts() == {one.key: (1, 0)}
    assert take(store, other, one, host="b")


def test_a_host_that_starts_over_has_no_slots_left_and_one_that_is_fenced_takes_none(store: Store) -> None:
    store.write_under(store.hosts.begin("a", ttl_s=1000, document="{}"))
    assert take(store, uuid4(), ESX1)
    assert not take(store, uuid4(), destination("none", most=0))
    store.hosts.fence("a")
    with pytest.raises(LeaseLost):
        take(store, uuid4(), ESX1)
    store.hosts.begin("a", ttl_s=1000, document="{}")
    assert store.slots.count(ESX1.key) == (0, 0)


def test_an_ended_job_has_none(store: Store) -> None:
    job = migration()
    store.add(job, host="a")
    assert take(store, job.id, ESX1, POOL)
    store.change(job.id, job.state, lambda before: before.model_copy(update={"state": State.FAILED}))
    assert not store.slots.has_any(job.id)


@pytest.fixture
def stores(postgresql_url: str) -> Iterator[list[Store]]:
    """Of three services on one database."""
    stores = [Store(postgresql_url) for _ in range(3)]
    yield stores
    for store in stores:
        store.close()


def test_there_are_never_more_over_several_services(stores: list[Store]) -> None:
    """Their jobs take and leave, again and again, and some are cancelled as they wait."""
    counting, at_once_now, most = threading.Lock(), dict.fromkeys((ESX1.key, ESX2.key, POOL.key), 0), dict[str, int]()

    def changed(keys: list[str], by: int) -> None:
        with counting:
            for key in keys:
                at_once_now[key] += by
                most[key] = max(most.get(key, 0), at_once_now[key])

    async def work(slots: Slots, number: int) -> None:
        wanted = [(ESX1, ESX2)[number % 2], POOL]
        for again in range(4):
            stop = Stop()
            if again == 2 and number % 3 == 0:
                asyncio.get_running_loop().call_later(0.01 * number, stop.set)
            try:
                async with slots.held(uuid4(), wanted, stop.or_stop):
                    changed([one.key for one in wanted], +1)
                    await asyncio.sleep(0.005)
                    changed([one.key for one in wanted], -1)
            except Cancelled:
                continue

    def serve(host: str, store: Store) -> None:
        async def all_of_them() -> None:
            slots = Slots(store.slots, host=host)
            async with asyncio.timeout(200):
                await asyncio.gather(*(work(slots, number) for number in range(6)))

        asyncio.run(all_of_them())

    threads = [threading.Thread(target=serve, args=pair) for pair in zip("abc", stores, strict=True)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(most[one.key] <= one.most for one in (ESX1, ESX2, POOL))
    assert [stores[0].slots.count(key) for key in at_once_now] == [(0, 0)] * 3


def test_a_slot_that_is_left_is_given_on_at_once_and_what_a_lost_run_left_goes_with_the_next(store: Store) -> None:
    slots, first, second = Slots(store.slots, host="a"), uuid4(), uuid4()
    alone = destination("alone", most=1)

    async def main() -> list[str]:
        order: list[str] = []
        waiting = asyncio.Event()

        async def later() -> None:
            waiting.set()
            async with slots.held(second, [alone], at_once):
                order.append("second")

        async with slots.held(first, [alone], at_once) as held:
            task = asyncio.create_task(later())
            await waiting.wait()
            await held.leave()
            async with asyncio.timeout(60):
                await task
            await held.take()
            order.append("first again")
        return order

    assert asyncio.run(main()) == ["second", "first again"]
    assert take(store, first, ESX1)
    asyncio.run(slots.forget(first))
    assert not store.slots.has_any(first)


def test_an_error_is_reported_though_the_store_is_away(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """A task that was cancelled, because the lease is lost, must not go on for it."""

    def away(*_: object) -> None:
        raise PersistFailed("the store failed")

    async def main() -> None:
        async with Slots(store.slots, host="a").held(uuid4(), [ESX1], at_once):
            monkeypatch.setattr(store.slots, "leave", away)
            raise asyncio.CancelledError

    with pytest.raises(asyncio.CancelledError):
        asyncio.run(main())
