"""One look at the store, and one drawing of each event, for however many clients listen."""

import asyncio
from collections.abc import AsyncIterator, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any, cast
from uuid import UUID, uuid4

import pytest
from structlog.testing import capture_logs

from synvirt.api.stream import FIRST, KEPT_EVENTS, Feed, Pace, Words
from synvirt.errors import PersistFailed
from synvirt.model.job import Progress
from synvirt.model.kinds import State
from synvirt.web.job import Drawn, JobView

PACE = Pace(tick_s=0.001, ask_every_s=0.001, ask_elsewhere_every_s=0.001, progress_every_s=0.001, heartbeat_every_s=60)
ONE, OTHER = uuid4(), uuid4()


@dataclass(frozen=True)
class Event:
    id: int
    job_id: UUID
    document: str = ""


class House:
    """The store and the board of a feed; counts what is asked of them, and what is drawn."""

    def __init__(self) -> None:
        self.written: list[Event] = []
        self.figures: dict[UUID, tuple[State, Progress]] = {}
        self.commits = self.drawn = self.asked = 0
        self.broken = self.stopping = False
        words: Words[Event, State] = Words(
            self.event, lambda id_, state, progress: self.event(Event(0, id_, f"{progress.bytes_done} done"))
        )
        self.elsewhere: dict[UUID, tuple[State, Progress]] = {}
        self.feed: Feed[Event, State] = Feed(
            self, self, words, stopping=lambda: self.stopping, pace=PACE, elsewhere=lambda: dict(self.elsewhere)
        )

    def write(self, count: int = 1, job_id: UUID = ONE) -> None:
        for _ in range(count):
            self.written.append(Event(len(self.written) + 1, job_id, str(len(self.written) + 1)))
        self.commits += 1

    def event(self, event: Event) -> bytes:
        self.drawn += 1
        return event.document.encode()

    def last_event_id(self) -> int:
        return len(self.written)

    def newest_events(self, *, job_id: UUID | None) -> list[Event]:
        return []

    def events_after(self, event_id: int, *, job_id: UUID | None, limit: int) -> list[Event]:
        self.asked += 1
        if self.broken:
            raise OSError("the disk is gone")
        return [event for event in self.written[event_id:] if job_id in (None, event.job_id)][:limit]

    def latest(self) -> Mapping[UUID, tuple[State, Progress]]:
        return dict(self.figures)

    async def client(self, job_id: UUID | None = None, last_event_id: int | None = None) -> AsyncIterator[bytes]:
        """One that is there: it was given its first, empty, comment, and waits for more."""
        happening = self.feed.follow(job_id=job_id, last_event_id=last_event_id)
        assert await anext(happening) == FIRST
        return happening


async def taken(happening: AsyncIterator[bytes], count: int) -> list[bytes]:
    async with asyncio.timeout(60):
        return [await anext(happening) for _ in range(count)]


def test_each_event_is_read_and_drawn_once_for_all() -> None:
    async def run() -> None:
        house = House()
        clients = [await house.client() for _ in range(100)]
        waiting = [asyncio.create_task(taken(client, 3)) for client in clients]
        while house.asked < 3:
            await asyncio.sleep(0)
        house.write(3)
        assert await asyncio.gather(*waiting) == [[b"1", b"2", b"3"]] * 100
        assert house.drawn == 3
        house.figures[ONE] = (State.COPYING_FULL, Progress(bytes_done=7))
        assert await asyncio.gather(*(taken(client, 1) for client in clients)) == [[b"7 done"]] * 100
        assert house.drawn == 4

    asyncio.run(run())


@pytest.mark.parametrize("job_id", [None, ONE])
def test_a_client_that_fell_behind_gets_all_events_from_the_store(job_id: UUID | None) -> None:
    """More was written than is kept, while it did not read; and some was not of its job."""

    async def run() -> None:
        house = House()
        slow, quick = await house.client(job_id), await house.client()
        first = asyncio.gather(taken(slow, 1), taken(quick, 1))
        while house.asked < 3:
            await asyncio.sleep(0)
        house.write()
        await first
        house.write(3 * KEPT_EVENTS)
        house.write(3 * KEPT_EVENTS, OTHER)
        await taken(quick, 6 * KEPT_EVENTS)
        house.write()
        mine = [event.document.encode() for event in house.written if job_id in (None, event.job_id)]
        assert await taken(slow, len(mine) - 1) == mine[1:]

    asyncio.run(run())


def test_one_that_comes_back_gets_what_it_missed_and_then_what_is_new() -> None:
    async def run() -> None:
        house = House()
        house.write(250)
        back = await house.client(last_event_id=3)
        assert await taken(back, 247) == [str(number).encode() for number in range(4, 251)]
        waiting = asyncio.create_task(taken(back, 1))
        await asyncio.sleep(0.01)
        house.write()
        assert await waiting == [b"251"]

    asyncio.run(run())


def test_a_new_client_sees_nothing_of_a_job_that_was_removed() -> None:
    """With its events: the newest id of the store is one from before the job."""

    async def run() -> None:
        house = House()
        house.write(1)
        old = await house.client()
        waiting = asyncio.create_task(taken(old, 2))
        while not house.asked:
            await asyncio.sleep(0)
        house.write(2, OTHER)
        assert await waiting == [b"2", b"3"]
        gone, house.written = house.written[1:], house.written[:1]
        newest = house.feed.newest()
        assert newest == gone[-1].id, "ids only grow"
        clients = [await house.client(), await house.client(last_event_id=newest)]
        waits = [asyncio.create_task(taken(client, 1)) for client in clients]
        await asyncio.sleep(0.05)
        house.written += [*gone, Event(4, ONE, "4")]
        house.commits += 1
        assert await asyncio.gather(*waits) == [[b"4"]] * 2

    asyncio.run(run())


def test_a_store_that_fails_ends_the_streams_and_the_next_client_starts_over() -> None:
    async def run() -> None:
        house = House()
        client = await house.client()
        house.broken = True
        with capture_logs() as logged, pytest.raises(StopAsyncIteration):
            await taken(client, 1)
        # It is none of our own errors: so the log has where it came from.
        assert [(one["cause"], one["exc_info"]) for one in logged] == [("the disk is gone", True)]
        house.broken = False
        again = asyncio.create_task(taken(await house.client(last_event_id=0), 1))
        house.write()
        assert await again == [b"1"]

    asyncio.run(run())


def test_a_stream_that_finds_no_store_ends_and_is_no_incident() -> None:
    """A database is away: each open page tries again each few seconds, and each try would be an incident with a traceback."""

    class Away(House):
        def last_event_id(self) -> int:
            raise PersistFailed("the database does not answer")

    class NotDrawn(JobView):
        def rendered(self, job_id: UUID, before: Drawn | None) -> Drawn:
            raise PersistFailed("the database does not answer")

    async def run() -> None:
        assert [one async for one in Away().feed.follow(job_id=None, last_event_id=None)] == [FIRST]
        intake = SimpleNamespace(board=SimpleNamespace(commits=1, progress=lambda _: None))
        view = NotDrawn(cast(Any, None), cast(Any, intake), lambda _: None, cast(Any, None))
        assert len([one async for one in view.parts(ONE, Pace(), lambda: False)]) == 1

    asyncio.run(run())


def test_the_service_s_end_is_the_streams_end_and_nobody_looks_for_nobody() -> None:
    async def run() -> None:
        house = House()
        client, leaving = await house.client(), cast(Any, await house.client())
        waiting = [asyncio.create_task(taken(each, 1)) for each in (client, leaving)]
        while house.asked < 3:
            await asyncio.sleep(0)
        waiting[1].cancel()
        house.stopping = True
        with pytest.raises(StopAsyncIteration):
            await waiting[0]
        house.stopping = False
        before = house.asked
        await asyncio.sleep(0.02)
        assert house.asked == before

    asyncio.run(run())


def test_a_job_s_page_is_drawn_once_for_all_who_look() -> None:
    drawn = []

    class Counted(JobView):
        def rendered(self, job_id: UUID, before: Drawn | None) -> Drawn:
            drawn.append(job_id)
            return Drawn({"figures": f"<p>{len(drawn)}</p>"})

    async def run() -> None:
        intake = SimpleNamespace(board=SimpleNamespace(commits=1, progress=lambda _: None))
        view = Counted(cast(Any, None), cast(Any, intake), lambda _: None, cast(Any, None))
        pace = Pace(progress_every_s=60, ask_every_s=60)
        looking = [view.parts(ONE, pace, lambda: False) for _ in range(100)]
        for each in looking:
            await anext(each)
        assert {(await taken(each, 1))[0] for each in looking} == {b"event: part\ndata: <p>1</p>\n\n"}
        assert drawn == [ONE]
        for each in looking:
            await cast(Any, each).aclose()
        assert view.shown == {}

    asyncio.run(run())


def test_the_stream_of_a_job_s_page_ends_with_the_job() -> None:
    """A browser would draw it again each second, for as long as its page is open."""

    class Ended(JobView):
        def rendered(self, job_id: UUID, before: Drawn | None) -> Drawn:
            return Drawn({"figures": "<p>1</p>"}, ended=True)

    async def run() -> None:
        intake = SimpleNamespace(board=SimpleNamespace(commits=1, progress=lambda _: None))
        view = Ended(cast(Any, None), cast(Any, intake), lambda _: None, cast(Any, None))
        async with asyncio.timeout(60):
            sent = [one async for one in view.parts(ONE, Pace(), lambda: False)]
        assert sent[1:] == [b"event: part\ndata: <p>1</p>\n\n", b"event: ended\ndata: ended\n\n"]
        assert view.shown == {}

    asyncio.run(run())


def test_a_job_that_has_not_changed_is_not_drawn_again() -> None:
    """Each move of any job is a reason to look at it; of a thousand held ones, some job always moves."""
    drawn: list[str] = []

    class Quiet(JobView):
        def values(self, job_id: UUID) -> dict[str, Any]:
            return {"job": SimpleNamespace(done=len(looks) // 2, ended=False)}

    looks: list[Drawn] = []

    def part(name: str, **_: object) -> str:
        drawn.append(name)
        return ""

    pages = SimpleNamespace(part=part)
    view = Quiet(cast(Any, pages), cast(Any, None), lambda _: None, cast(Any, None))
    for _ in range(4):
        looks.append(view.rendered(ONE, looks[-1] if looks else None))
    assert looks[0] is not looks[2] is looks[3]
    assert len(drawn) == 2 * len(set(drawn))


class Looked(dict[UUID, Any]):
    """Figures that count how many of them are looked at."""

    count = 0

    def items(self) -> Any:
        return _Items(self)


class _Items:
    def __init__(self, looked: Looked) -> None:
        self.looked = looked

    def _counted(self, ids: Iterable[UUID]) -> Iterator[tuple[UUID, Any]]:
        for id_ in ids:
            self.looked.count += 1
            yield id_, self.looked[id_]

    def __iter__(self) -> Iterator[tuple[UUID, Any]]:
        return self._counted(list(self.looked))

    def __reversed__(self) -> Iterator[tuple[UUID, Any]]:
        return self._counted(list(reversed(self.looked)))


def test_clients_look_at_what_is_new_and_not_at_the_figures_of_all_jobs() -> None:
    async def run() -> None:
        house, held = House(), [uuid4() for _ in range(300)]
        clients = [await house.client() for _ in range(10)]
        waiting = [asyncio.create_task(taken(client, len(held))) for client in clients]
        while house.asked < 3:
            await asyncio.sleep(0)
        house.feed._figures = looked = Looked()
        house.figures |= dict.fromkeys(held, (State.DELTA_SYNCING, Progress(bytes_done=1)))
        assert await asyncio.gather(*waiting) == [[b"1 done"] * len(held)] * 10
        looked.count = 0
        for done in range(2, 7):
            house.figures[held[0]] = (State.DELTA_SYNCING, Progress(bytes_done=done))
            assert await asyncio.gather(*(taken(client, 1) for client in clients)) == [[f"{done} done".encode()]] * 10
        assert looked.count < 300, "by ten clients, five times"

    asyncio.run(run())


def test_figures_that_come_too_soon_come_later() -> None:
    async def run() -> None:
        house = House()
        slow = Pace(tick_s=0.001, ask_every_s=0.001, ask_elsewhere_every_s=0.001, progress_every_s=0.3, heartbeat_every_s=60)
        client = await house.client()
        house.figures[ONE] = (State.COPYING_FULL, Progress(bytes_done=1))
        assert await taken(client, 1) == [b"1 done"]
        # The feed draws sooner than this client may have the next: it took the first ones late.
        house.feed._pace = slow
        house.feed._figures[ONE] = replace(house.feed._figures[ONE], at=float("-inf"))
        house.figures[ONE] = (State.COPYING_FULL, Progress(bytes_done=2))
        house.figures[OTHER] = (State.COPYING_FULL, Progress(bytes_done=3))
        assert await taken(client, 2) == [b"3 done", b"2 done"]

    asyncio.run(run())


def test_figures_of_other_hosts_come_too_and_those_of_the_board_are_newer() -> None:
    async def run() -> None:
        house = House()
        client = await house.client()
        house.elsewhere[OTHER] = (State.COPYING_FULL, Progress(bytes_done=5))
        assert await taken(client, 1) == [b"5 done"]
        house.elsewhere[OTHER] = (State.COPYING_FULL, Progress(bytes_done=9))
        assert await taken(client, 1) == [b"9 done"]
        house.figures[ONE] = (State.COPYING_FULL, Progress(bytes_done=7))  # before the store's: a job may have been taken over
        assert await taken(client, 1) == [b"7 done"]
        house.elsewhere[ONE] = (State.COPYING_FULL, Progress(bytes_done=3))
        house.elsewhere[OTHER] = (State.COPYING_FULL, Progress(bytes_done=11))
        assert await taken(client, 1) == [b"11 done"]

    asyncio.run(run())
