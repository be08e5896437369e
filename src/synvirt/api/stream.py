"""The stream of updates, of migrations and of backup runs: read once, made into bytes once, and sent to all clients.

    store, board ─▶ Feed: looks four times a second ─▶ the last events, and each running job's newest figures, as bytes
                                                          └▶ each client takes what its cursor has not seen, at its own pace

There is no queue for each client: it costs only its cursor and the figures that it saw last. A slow client waits in its own
`yield`, gets fewer figures, and its missed events are read from the store again; no job and no other client waits for it.
"""

import asyncio
import contextlib
import contextvars
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import takewhile
from typing import Any, Generic, Protocol, TypeVar
from uuid import UUID

import structlog
from fastapi.concurrency import run_in_threadpool
from fastapi.sse import format_sse_event

from synvirt.errors import PersistFailed
from synvirt.model.job import Progress
from synvirt.model.values import Model
from synvirt.store.documents import as_answered

_log = structlog.get_logger("synvirt.stream")

# One page of a replay: the most that we hold at once for a client after a long absence.
REPLAY_PAGE = 100
# Events for clients that are a little behind. For others the store is read.
KEPT_EVENTS, KEPT_BYTES = 200, 4 << 20
# The digits of SQL's BIGINT.
EVENT_ID_DIGITS = 18
# Proxies must not store it, or wait for more of it.
STREAM_HEADERS = {"Cache-Control": "no-store", "X-Accel-Buffering": "no"}
FIRST, BEAT = format_sse_event(comment="synvirt"), format_sse_event(comment="still here")
NOBODY = UUID(int=0)


@dataclass(frozen=True, slots=True)
class Pace:
    """`ask_every_s`: another host with the same database writes events that this host's board does not see.
    `ask_elsewhere_every_s`: other hosts store their jobs' figures at each flush, which is each five seconds."""

    tick_s: float = 0.25
    ask_every_s: float = 1.0
    ask_elsewhere_every_s: float = 2.0
    progress_every_s: float = 0.5
    heartbeat_every_s: float = 15.0


class Happened(Protocol):
    """`document`: the job at that moment."""

    @property
    def id(self) -> int: ...
    @property
    def job_id(self) -> UUID: ...
    @property
    def document(self) -> str: ...


E = TypeVar("E", bound=Happened)
E_co = TypeVar("E_co", bound=Happened, covariant=True)
S = TypeVar("S")
S_co = TypeVar("S_co", covariant=True)


class Events(Protocol[E_co]):
    """The stored events of jobs, in order."""

    def last_event_id(self) -> int: ...
    def newest_events(self, *, job_id: UUID | None) -> Sequence[E_co]: ...
    def events_after(self, event_id: int, *, job_id: UUID | None, limit: int) -> Sequence[E_co]: ...


class Figured(Protocol[S_co]):
    """The newest figures of running jobs, which are not stored. `commits` grows with every write."""

    @property
    def commits(self) -> int: ...
    def latest(self) -> Mapping[UUID, tuple[S_co, Progress]]: ...


def event_id_of(header: str | None) -> int | None:
    """The number in a Last-Event-ID. A foreign id (a proxy's) is no reason to refuse a browser: it gets all from the start."""
    ours = header is not None and header.isascii() and header.isdigit() and len(header) <= EVENT_ID_DIGITS
    return int(header) if ours and header else None


@dataclass(frozen=True, slots=True)
class Words(Generic[E, S]):
    """The messages as server-sent events; called in a thread, once for all clients. `beat`: sent where nothing else may be."""

    event: Callable[[E], bytes]
    figures: Callable[[UUID, S, Progress], bytes]
    beat: bytes = BEAT


def as_json(name: str, update: Callable[[UUID, S, Progress], Model]) -> Words[Any, S]:
    """`event: name` with the whole job, `event: progress` with figures."""

    def event(happened: Happened) -> bytes:
        return format_sse_event(event=name, data_str=as_answered(happened.document), id=str(happened.id))

    def figures(id_: UUID, state: S, progress: Progress) -> bytes:
        return format_sse_event(event="progress", data_str=update(id_, state, progress).model_dump_json())

    return Words(event, figures)


@dataclass(frozen=True, slots=True)
class _Written:
    id: int
    job_id: UUID
    content: bytes


@dataclass(frozen=True, slots=True)
class _Figure(Generic[S]):
    """`version` changes with the content."""

    version: int
    state: S
    progress: Progress
    at: float
    content: bytes


@dataclass(slots=True)
class _Seen:
    """What one client knows of the figures: all up to `version`, except those of `early`, which came too soon after the last
    ones of their job. `taken_at`: of each job, when it took figures a moment ago."""

    version: int = 0
    early: dict[UUID, None] = field(default_factory=dict)
    taken_at: dict[UUID, float] = field(default_factory=dict)


class Feed(Generic[E, S]):
    """The events of jobs, for all clients in one event loop. It looks as long as there are clients. `elsewhere`: the figures of
    jobs that other hosts run, from the store; called in a thread. None: there are no other hosts.

    All events after `_since` and up to `_cursor` are in `_kept`.
    """

    def __init__(
        self,
        events: Events[E],
        board: Figured[S],
        words: Words[E, S],
        *,
        stopping: Callable[[], bool],
        pace: Pace,
        elsewhere: Callable[[], Mapping[UUID, tuple[S, Progress]]] | None = None,
    ) -> None:
        self._events, self._board, self._words, self._stopping, self._pace = events, board, words, stopping, pace
        self._ask_elsewhere = elsewhere
        self._elsewhere: Mapping[UUID, tuple[S, Progress]] = {}
        self._listeners = 0
        self._looking: asyncio.Task[None] | None = None
        self._news = asyncio.Event()
        self._kept: deque[_Written] = deque()
        self._since = self._cursor = self._kept_bytes = self._versions = 0
        self._figures: dict[UUID, _Figure[S]] = {}

    async def follow(self, *, job_id: UUID | None, last_event_id: int | None) -> AsyncIterator[bytes]:
        """The events, until the client leaves, the service stops, the store fails, or the job `job_id` is removed.

        The newest events of a new client ascend, so a client that is interrupted among them gets the rest by a replay.
        """
        self._listeners += 1
        try:
            yield FIRST
            cursor = await run_in_threadpool(self.newest)
            if not self._looks():
                self._begin(cursor)
            if last_event_id is None or last_event_id > cursor:  # above: an id of an earlier database
                for written in await run_in_threadpool(self._newest, job_id):
                    yield written.content
                    cursor = max(cursor, written.id)
            else:
                cursor = last_event_id
            seen, beat_at = _Seen(), time.monotonic()
            while not self._ended():
                news = self._news  # before we look, so that no event is missed during the wait
                async for written in self._after(cursor, job_id):
                    cursor = written.id
                    if written.content and job_id in (None, written.job_id):
                        yield written.content
                for figure in self._unseen(seen, job_id):
                    yield figure.content
                if time.monotonic() - beat_at >= self._pace.heartbeat_every_s:
                    if await self._is_gone(job_id):
                        return
                    yield self._words.beat
                    beat_at = time.monotonic()
                within_s = beat_at + self._pace.heartbeat_every_s - time.monotonic()
                await self._wait(news, min(within_s, self._pace.progress_every_s) if seen.early else within_s)
        except PersistFailed as error:  # the client connects again; each of its tries would be an incident in the log
            _log.warning("a stream ends", cause=error.detail)
        finally:
            self._listeners -= 1

    def newest(self) -> int:
        """The id of the newest event, which may have been removed with its job: what is kept here up to it is no news to a new
        client. Blocking."""
        return max(self._events.last_event_id(), self._cursor if self._looks() else 0)

    def _looks(self) -> bool:
        return self._looking is not None and not self._looking.done()

    async def _is_gone(self, job_id: UUID | None) -> bool:
        """Whether the job was removed. Its end may have come and gone between two looks; who connects again gets 404."""
        return job_id is not None and not await run_in_threadpool(self._newest, job_id)

    async def _wait(self, news: asyncio.Event, within_s: float) -> None:
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(news.wait(), max(0.0, within_s))

    def _begin(self, newest: int) -> None:
        self._since = self._cursor = newest
        self._kept, self._kept_bytes, self._figures, self._news = deque(), 0, {}, asyncio.Event()
        # In its own context: the log's context of the first client's request does not apply here.
        self._looking = asyncio.get_running_loop().create_task(self._look(), context=contextvars.Context())

    def _ended(self) -> bool:
        return self._stopping() or not self._looks()

    async def _look(self) -> None:
        commits, asked_at, asked_elsewhere_at = -1, 0.0, float("-inf")
        try:
            while self._listeners and not self._stopping():
                now, before = time.monotonic(), (self._cursor, self._versions)
                if self._ask_elsewhere is not None and now - asked_elsewhere_at >= self._pace.ask_elsewhere_every_s:
                    asked_elsewhere_at = now
                    self._elsewhere = await run_in_threadpool(self._ask_elsewhere)
                if self._board.commits != commits or now - asked_at >= self._pace.ask_every_s:
                    commits, asked_at = self._board.commits, now
                    await self._read_on()
                await self._draw()
                if (self._cursor, self._versions) != before:
                    self._wake()
                await asyncio.sleep(self._pace.tick_s)
        except Exception as error:
            # Clients connect again, which starts another look.
            _log.warning("the streams end", cause=str(error), exc_info=not isinstance(error, PersistFailed))
        finally:
            self._wake()

    def _wake(self) -> None:
        news, self._news = self._news, asyncio.Event()
        news.set()

    async def _read_on(self) -> None:
        more = True
        while more:
            page = await run_in_threadpool(self._read, self._cursor, None)
            for written in page:
                self._kept.append(written)
                self._kept_bytes += len(written.content)
                self._cursor = written.id
            while len(self._kept) > KEPT_EVENTS or self._kept_bytes > KEPT_BYTES:
                oldest = self._kept.popleft()
                self._since, self._kept_bytes = oldest.id, self._kept_bytes - len(oldest.content)
            more = len(page) == REPLAY_PAGE

    async def _draw(self) -> None:
        """New figures, for each job at least `progress_every_s` apart."""
        latest, now = {**self._elsewhere, **self._board.latest()}, time.monotonic()
        for id_ in self._figures.keys() - latest.keys():
            del self._figures[id_]
        due = {
            id_: figure
            for id_, figure in latest.items()
            if (old := self._figures.get(id_)) is None
            or (now - old.at >= self._pace.progress_every_s and figure != (old.state, old.progress))
        }
        if due:
            drawn = await run_in_threadpool(lambda: {id_: self._words.figures(id_, *figure) for id_, figure in due.items()})
            for id_, content in drawn.items():
                self._versions += 1
                self._figures.pop(id_, None)  # the newest are the last
                self._figures[id_] = _Figure(self._versions, *due[id_], now, content)

    def _read(self, cursor: int, job_id: UUID | None) -> list[_Written]:
        return self._written(self._events.events_after(cursor, job_id=job_id, limit=REPLAY_PAGE))

    def _newest(self, job_id: UUID | None) -> list[_Written]:
        return self._written(self._events.newest_events(job_id=job_id))

    def _written(self, events: Sequence[E]) -> list[_Written]:
        return [_Written(event.id, event.job_id, self._words.event(event)) for event in events]

    async def _after(self, cursor: int, job_id: UUID | None) -> AsyncIterator[_Written]:
        """Events of all jobs, or of one; the last may be empty, and only marks the position. One at a time, so that a client
        that does not read holds no more than that."""
        while cursor < self._cursor:
            if cursor < self._since:
                since = self._since  # before the store is read, so that its answer includes all up to here
                page = await run_in_threadpool(self._read, cursor, job_id)
                for written in page:
                    yield written
                cursor = page[-1].id if page else cursor
                if len(page) < REPLAY_PAGE and cursor < since:
                    cursor = since
                    yield _Written(cursor, NOBODY, b"")
            elif (following := next((written for written in self._kept if written.id > cursor), None)) is not None:
                cursor = following.id
                yield following

    def _unseen(self, seen: _Seen, job_id: UUID | None) -> Iterator[_Figure[S]]:
        """What one client has not seen, with at least `progress_every_s` between the figures of each job. Looks only at what is
        new: each of hundreds of clients would look at the figures of each of thousands of held jobs."""
        new = takewhile(lambda one: one[1].version > seen.version, reversed(self._figures.items()))
        ids = [*seen.early, *(id_ for id_, _ in new if id_ not in seen.early)][::-1]
        seen.version, seen.early = self._versions, {}
        for id_ in ids:
            figure = self._figures.get(id_) if job_id in (None, id_) else None
            if figure is None:
                continue
            if time.monotonic() - seen.taken_at.get(id_, float("-inf")) < self._pace.progress_every_s:
                seen.early[id_] = None
                continue
            yield figure
            # Now, as the client has taken it: so late figures of a slow client keep their distance too.
            seen.taken_at[id_] = time.monotonic()
        for id_ in [id_ for id_, at in seen.taken_at.items() if time.monotonic() - at >= self._pace.progress_every_s]:
            del seen.taken_at[id_]
