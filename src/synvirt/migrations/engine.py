"""Migrations as a kind of job: the runner calls `Engine.run`, which moves one job until it ends.

The state, the watermarks and the ledger of a job are in the store, so a step that runs twice does nothing twice.
"""

import asyncio
import threading
import time
from collections import Counter
from collections.abc import Mapping
from contextlib import ExitStack, suppress
from uuid import UUID

import structlog

from synvirt.errors import NotFound, PersistFailed, SynvirtError
from synvirt.jobs.course import KEPT_EVERY_S, Course
from synvirt.jobs.runner import Runner
from synvirt.jobs.stop import Stop
from synvirt.migrations.advance import advance
from synvirt.migrations.memory import CourseMemory
from synvirt.migrations.rooms import Rooms
from synvirt.migrations.tidying import tidied
from synvirt.model.job import Migration
from synvirt.store import Wish
from synvirt.store.documents import Unreadable

log = structlog.get_logger(__name__)

# Seconds between two queries for requests of operators, which may come by another host's API. One query serves all jobs.
WISHES_POLL_S = 1.0
WAKES = 3


# The states that a job has been in, and the newest pass that it has finished: both only grow.
Reached = tuple[int, int]


def _reached(job: Migration) -> Reached:
    return len(job.history), max((one.number for one in job.passes if one.finished_at is not None), default=0)


class Engine:
    """One for each process. `start` also resumes every unended job of this host, and tidies up after the ended ones."""

    def __init__(self, rooms: Rooms, *, host: str) -> None:
        self.rooms = rooms
        self._host = host
        self._stops: dict[UUID, Stop] = {}
        self._closing = threading.Event()
        self._tidying = ExitStack()
        self._kept: dict[UUID, Course] = {}
        self._woken: Counter[UUID] = Counter()
        # How far each running job has come, by what it began its present step with.
        self._reached: dict[UUID, Reached] = {}
        self._runner = Runner(
            self.run,
            lambda: rooms.store.unended_ids(host=host),
            name="migrations",
            on_begin=rooms.sessions.begin,
            on_end=rooms.sessions.end,
        )

    def start(self) -> None:
        """Runs this host's jobs from now on, and tidies up after ended ones."""
        self._runner.start()
        threading.Thread(target=self._look_for_wishes, name="wishes", daemon=True).start()
        self._tidying.enter_context(tidied(self.rooms, host=self._host))

    def begin(self, job_id: UUID) -> None:
        """Gives the job to the runner; idempotent. Jobs take turns (`slots.Turns`)."""
        self._runner.begin(job_id)

    def wake(self, job_id: UUID) -> None:
        """An operator has made a request: the job looks at once."""
        stop = self._stop_of(job_id)
        if self.rooms.store.cancel_requested(job_id):
            stop.set()
        stop.wake()

    def pause(self) -> None:
        """This host has lost its lease: none of its jobs runs when this returns."""
        self._tidying.close()
        self._runner.pause()

    def resume(self) -> None:
        """This host has a lease again: jobs go on from what the store says, not from what this process remembers."""
        self._tidying.enter_context(tidied(self.rooms, host=self._host))  # first: the host may have no thread for it
        self._stops.clear()
        self._kept.clear()
        self._runner.resume()

    def close(self) -> None:
        """Stops the jobs where they are, as a crash would. They go on at the next start."""
        self._closing.set()
        self._tidying.close()
        self._runner.close()

    async def run(self, job_id: UUID) -> None:
        """Runs a job to its end. PersistFailed, where the store is away: then a job can neither go on nor fail."""
        try:
            await self._run_to_end(job_id)
        except PersistFailed as error:
            self.rooms.board.store_is_away(job_id, error)
            raise

    async def _run_to_end(self, job_id: UUID) -> None:
        stop, store = self._stop_of(job_id), self.rooms.store
        try:
            migration, cancelled = await asyncio.to_thread(store.get_to_run, job_id)
        except Unreadable as error:
            log.warning("a job is left alone", job=str(job_id), cause=error.detail)
            return
        except NotFound:  # the job had ended and was removed
            return
        await asyncio.to_thread(self._take_up_course, job_id)
        await self.rooms.slots.forget(job_id)
        try:
            while not migration.ended:
                if cancelled:
                    stop.set()
                self._reached[job_id] = _reached(migration)
                await advance(self.rooms, migration, stop)
                migration, cancelled = await asyncio.to_thread(store.get_to_run, job_id)
        finally:
            self._reached.pop(job_id, None)
        self._stops.pop(job_id, None)
        await asyncio.to_thread(self._keep_course, job_id, self.rooms.board.courses())
        self._kept.pop(job_id, None)
        self.rooms.board.unpin(job_id)

    def _stop_of(self, job_id: UUID) -> Stop:
        return self._stops.setdefault(job_id, Stop())

    def _look_for_wishes(self) -> None:
        kept_at, was_away = time.monotonic(), False
        while not self._closing.wait(WISHES_POLL_S):
            if time.monotonic() - kept_at >= KEPT_EVERY_S:
                kept_at = time.monotonic()
                courses = self.rooms.board.courses()
                for job_id in list(self._stops):
                    self._keep_course(job_id, courses)
            try:
                self._apply(self.rooms.store.wishes(host=self._host))
                if was_away:
                    self._stop_those_ahead()
                was_away = False
            except PersistFailed as error:
                was_away = True
                log.warning("cannot see what operators ask", cause=error.detail)

    def _stop_those_ahead(self) -> None:
        """Stops jobs that have come further than the store says: another server may have taken over, without the last seconds.
        They go on from there. A job that sleeps, perhaps for an hour, sees nothing of that itself."""
        for job_id, reached in list(self._reached.items()):
            try:
                stored = _reached(self.rooms.store.get(job_id))
            except NotFound:
                stored = (0, 0)
            except Unreadable:
                continue
            if stored < reached:
                log.warning("the store is older than the job, which goes on from what it says", job=str(job_id))
                self._runner.stop(job_id)

    def _apply(self, wishes: list[Wish]) -> None:
        """A request stays until the job ends. A job is woken a few times, as it may not have been asleep yet."""
        for wish in wishes:
            stop = self._stops.get(wish.job_id)
            if stop is None:
                continue
            if wish.cancel:
                stop.set()
            if self._woken[wish.job_id] < WAKES:
                self._woken[wish.job_id] += 1
                stop.wake()
        self._woken = Counter({wish.job_id: self._woken[wish.job_id] for wish in wishes})

    def _take_up_course(self, job_id: UUID) -> None:
        """A job whose course cannot be read runs all the same."""
        with suppress(Unreadable):
            self.rooms.board.take_up(job_id, self.rooms.store.memory.get(job_id, CourseMemory).course)

    def _keep_course(self, job_id: UUID, courses: Mapping[UUID, Course]) -> None:
        """No job waits for this, and none fails if it fails."""
        course = courses.get(job_id, Course())
        if course == self._kept.get(job_id, Course()):
            return
        try:
            self.rooms.store.memory.change(job_id, CourseMemory, lambda _: CourseMemory(course=course))
            self._kept[job_id] = course
        except SynvirtError as error:  # the store is away; the row is unreadable; the job was just removed
            log.warning("how fast a job copies cannot be kept", job=str(job_id), cause=error.detail)
