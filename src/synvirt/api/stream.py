"""The stream of updates: each client pulls at its own pace, from the store's events and the board.

    new client ─▶ newest event of every job that has not ended ─┐
    Last-Event-ID ──────────────────────────────────────────────┴▶ events after the cursor, for ever
                                                                   and the board's figures, twice a second at most

There is no queue per client: all a client costs is its cursor and the last figure it saw of each running job. One that reads
slowly waits in its own `yield`, and sees fewer figures; no job waits for it.
"""

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass
from uuid import UUID

from fastapi.concurrency import run_in_threadpool
from fastapi.sse import format_sse_event

from synvirt.migrations.board import Board
from synvirt.model import Progress, ProgressUpdate, State
from synvirt.store import Event, Store

# One page of a replay: what a client that was away for long makes us hold at once.
REPLAY_PAGE = 100


@dataclass(frozen=True, slots=True)
class Pace:
    """`ask_every_s`: another host that shares the database writes events without this host's board knowing."""

    tick_s: float = 0.25
    ask_every_s: float = 1.0
    progress_every_s: float = 0.5
    heartbeat_every_s: float = 15.0


async def updates(
    store: Store,
    board: Board,
    *,
    job_id: UUID | None,
    last_event_id: int | None,
    stopping: Callable[[], bool],
    pace: Pace,
) -> AsyncIterator[bytes]:
    """`changes` as server-sent events."""
    yield format_sse_event(comment="synvirt")
    async for change in changes(store, board, job_id=job_id, last_event_id=last_event_id, stopping=stopping, pace=pace):
        match change:
            case None:
                yield format_sse_event(comment="still here")
            case ProgressUpdate():
                yield format_sse_event(event="progress", data_str=change.model_dump_json())
            case _:
                yield format_sse_event(event="migration", data_str=change.document, id=str(change.id))


async def changes(
    store: Store,
    board: Board,
    *,
    job_id: UUID | None,
    last_event_id: int | None,
    stopping: Callable[[], bool],
    pace: Pace,
) -> AsyncIterator[Event | ProgressUpdate | None]:
    """What happens, for ever: until the client leaves, or `stopping()`. None, now and then: nothing did, and we are still here.

    The newest events of a new client ascend, so whoever is cut off in the middle of them is told the rest by a replay.
    """
    newest = await run_in_threadpool(store.last_event_id)
    if last_event_id is None or last_event_id > newest:  # above: an id of a database that is no more
        for event in await run_in_threadpool(store.newest_events, job_id=job_id):
            yield event
            newest = max(newest, event.id)
        cursor = newest
    else:
        cursor = last_event_id
    figures = _Figures(board, job_id, pace.progress_every_s)
    commits, asked_at, beat_at = -1, 0.0, time.monotonic()
    while not stopping():
        now = time.monotonic()
        if board.commits != commits or now - asked_at >= pace.ask_every_s:
            commits, asked_at = board.commits, now
            more = True
            while more and not stopping():
                page = await run_in_threadpool(store.events_after, cursor, job_id=job_id, limit=REPLAY_PAGE)
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


class _Figures:
    """Which figures of the board one client has not seen, each job's spaced by `every_s`."""

    def __init__(self, board: Board, job_id: UUID | None, every_s: float) -> None:
        self._board, self._job_id, self._every_s = board, job_id, every_s
        self._seen: dict[UUID, tuple[float, State, Progress]] = {}

    def due(self) -> Iterator[ProgressUpdate]:
        latest = self._board.latest()
        if self._job_id is not None:
            latest = {id_: figure for id_, figure in latest.items() if id_ == self._job_id}
        self._seen = {id_: seen for id_, seen in self._seen.items() if id_ in latest}
        for id_, (state, progress) in latest.items():
            at, *seen = self._seen.get(id_, (float("-inf"), None, None))
            if time.monotonic() - at >= self._every_s and seen != [state, progress]:
                yield ProgressUpdate(id=id_, state=state, progress=progress)
                # Now, when the client has taken it: what a slow one gets late is spaced too.
                self._seen[id_] = (time.monotonic(), state, progress)
