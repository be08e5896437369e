"""The stream of updates, of migrations and of backup runs: each client pulls at its own pace, from events and newest figures.

    new client ─▶ newest event of every job that has not ended ─┐
    Last-Event-ID ──────────────────────────────────────────────┴▶ events after the cursor, for ever
                                                                   and the newest figures, twice a second at most

There is no queue per client: all a client costs is its cursor and the last figure it saw of each running job. One that reads
slowly waits in its own `yield`, and sees fewer figures; no job waits for it.
"""

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar
from uuid import UUID

from fastapi.concurrency import run_in_threadpool
from fastapi.sse import format_sse_event

from synvirt.jobs.board import Board
from synvirt.model import Model, Progress, ProgressUpdate, State
from synvirt.store import Event, Store

# One page of a replay: what a client that was away for long makes us hold at once.
REPLAY_PAGE = 100
# What SQL's BIGINT holds, in digits.
EVENT_ID_DIGITS = 18
# No proxy is to keep it, or to wait for more of it.
STREAM_HEADERS = {"Cache-Control": "no-store", "X-Accel-Buffering": "no"}


@dataclass(frozen=True, slots=True)
class Pace:
    """`ask_every_s`: another host that shares the database writes events without this host's board knowing."""

    tick_s: float = 0.25
    ask_every_s: float = 1.0
    progress_every_s: float = 0.5
    heartbeat_every_s: float = 15.0


class Happened(Protocol):
    """`document`: the job as it was then."""

    @property
    def id(self) -> int: ...
    @property
    def document(self) -> str: ...


E = TypeVar("E", bound=Happened)
E_co = TypeVar("E_co", bound=Happened, covariant=True)
U = TypeVar("U", bound=Model)
S = TypeVar("S")
S_co = TypeVar("S_co", covariant=True)


class Events(Protocol[E_co]):
    """What is written of jobs, in its order."""

    def last_event_id(self) -> int: ...
    def newest_events(self, *, job_id: UUID | None) -> Sequence[E_co]: ...
    def events_after(self, event_id: int, *, job_id: UUID | None, limit: int) -> Sequence[E_co]: ...


class Figured(Protocol[S_co]):
    """What is not written: the newest figures of jobs that run. `commits` grows whenever something was written."""

    @property
    def commits(self) -> int: ...
    def latest(self) -> Mapping[UUID, tuple[S_co, Progress]]: ...


def event_id_of(header: str | None) -> int | None:
    """Of a Last-Event-ID. One that is none of ours (a proxy's) is no reason to refuse a browser: it starts anew."""
    ours = header is not None and header.isascii() and header.isdigit() and len(header) <= EVENT_ID_DIGITS
    return int(header) if ours and header else None


async def sent(name: str, happening: AsyncIterator[E | U | None]) -> AsyncIterator[bytes]:
    """What happens as server-sent events: `event: name` with the whole job, `event: progress` with figures."""
    yield format_sse_event(comment="synvirt")
    async for change in happening:
        if change is None:
            yield format_sse_event(comment="still here")
        elif isinstance(change, Model):
            yield format_sse_event(event="progress", data_str=change.model_dump_json())
        else:
            yield format_sse_event(event=name, data_str=change.document, id=str(change.id))


def changes(
    store: Store,
    board: Board,
    *,
    job_id: UUID | None,
    last_event_id: int | None,
    stopping: Callable[[], bool],
    pace: Pace,
) -> AsyncIterator[Event | ProgressUpdate | None]:
    """What happens to migrations."""

    def update(id_: UUID, state: State, progress: Progress) -> ProgressUpdate:
        return ProgressUpdate(id=id_, state=state, progress=progress)

    figures = Unseen(board, update, job_id, pace.progress_every_s)
    return followed(store, board, figures, job_id=job_id, last_event_id=last_event_id, stopping=stopping, pace=pace)


async def followed(
    events: Events[E],
    board: Figured[Any],
    figures: "Unseen[Any, U]",
    *,
    job_id: UUID | None,
    last_event_id: int | None,
    stopping: Callable[[], bool],
    pace: Pace,
) -> AsyncIterator[E | U | None]:
    """What happens, for ever: until the client leaves, or `stopping()`. None, now and then: nothing did, and we are still here.

    The newest events of a new client ascend, so whoever is cut off in the middle of them is told the rest by a replay.
    """
    newest = await run_in_threadpool(events.last_event_id)
    if last_event_id is None or last_event_id > newest:  # above: an id of a database that is no more
        for event in await run_in_threadpool(events.newest_events, job_id=job_id):
            yield event
            newest = max(newest, event.id)
        cursor = newest
    else:
        cursor = last_event_id
    commits, asked_at, beat_at = -1, 0.0, time.monotonic()
    while not stopping():
        now = time.monotonic()
        if board.commits != commits or now - asked_at >= pace.ask_every_s:
            commits, asked_at = board.commits, now
            more = True
            while more and not stopping():
                page = await run_in_threadpool(events.events_after, cursor, job_id=job_id, limit=REPLAY_PAGE)
                for event in page:
                    yield event
                    cursor = event.id
                more = len(page) == REPLAY_PAGE
        for update in figures.due():
            yield update
        if time.monotonic() - beat_at >= pace.heartbeat_every_s:
            yield None
            beat_at = time.monotonic()
        await asyncio.sleep(pace.tick_s)


class Unseen(Generic[S, U]):
    """Which figures one client has not seen, each job's spaced by `every_s`."""

    def __init__(
        self, board: Figured[S], update: Callable[[UUID, S, Progress], U], job_id: UUID | None, every_s: float
    ) -> None:
        self._board, self._update, self._job_id, self._every_s = board, update, job_id, every_s
        self._seen: dict[UUID, tuple[float, S | None, Progress | None]] = {}

    def due(self) -> Iterator[U]:
        latest = self._board.latest()
        if self._job_id is not None:
            latest = {id_: figure for id_, figure in latest.items() if id_ == self._job_id}
        self._seen = {id_: seen for id_, seen in self._seen.items() if id_ in latest}
        for id_, (state, progress) in latest.items():
            at, *seen = self._seen.get(id_, (float("-inf"), None, None))
            if time.monotonic() - at >= self._every_s and seen != [state, progress]:
                yield self._update(id_, state, progress)
                # Now, when the client has taken it: what a slow one gets late is spaced too.
                self._seen[id_] = (time.monotonic(), state, progress)
