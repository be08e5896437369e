"""How many jobs work at once: on this host (Turns, in memory); and for one source, one of its hosts, one destination or one
backup repository (Slots, in the store, for the jobs and backup runs of all hosts). asyncio; `held_in_thread` is for threads.

A host also serves its guests, and its disks take only so much. A cut-over never waits, as its guest is off. A job holds a slot
for a pass, never while it waits for the next one.
"""

import asyncio
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass
from itertools import islice
from typing import Any
from uuid import UUID

from synvirt.errors import Cancelled, PersistFailed
from synvirt.jobs.calls import Call
from synvirt.store.slots import SlotRows

# How often a waiting job looks for a free slot, and for its turn. A slot that a job of this process leaves is passed on at
# once, but that of another host's job must be looked for. A job that waits for its turn is called, as thousands
# may wait; it looks by itself only in case the event loop that should call it has ended.
LOOK_EVERY_S, TURN_EVERY_S = 2.0, 30.0
# How often a waiting thread looks whether it is to stop.
STOP_POLL_S = 0.2

OrStop = Callable[[Coroutine[Any, Any, None]], Awaitable[None]]


@dataclass(frozen=True, slots=True)
class Resource:
    """Something that at most this many jobs use at the same time, over all hosts. `key` names it in the store."""

    key: str
    most: int


def source_host(source_id: UUID, host: str, *, most: int) -> Resource:
    """A host of a registered source. `host` is empty where the source is a single host."""
    return Resource(f"source {source_id} {host}", most)


def source(source_id: UUID, *, most: int) -> Resource:
    """A registered source as a whole: what goes through a vCenter costs the vCenter, whichever host has the VM."""
    # No host has a name with a space.
    return Resource(f"source {source_id} in all", most)


def destination(name: str, *, most: int) -> Resource:
    """A destination. `name`: the same on all hosts that reach it, and used for no other."""
    return Resource(f"destination {name}", most)


def repository(repository_id: UUID, *, most: int) -> Resource:
    """A backup repository. Its id is in the repository itself, so all hosts use the same."""
    return Resource(f"repository {repository_id}", most)


def guests_of(host: str, *, most: int) -> Resource:
    """The disks of one of our own hosts' guests."""
    return Resource(f"guests {host}", most)


class Slots:
    """The slots of this host's jobs, in the store. A cut-over may take one more than the number allows."""

    def __init__(self, rows: SlotRows, *, host: str) -> None:
        self._rows, self._host = rows, host
        self._lock = threading.Lock()
        self._waiting: set[Call] = set()

    @asynccontextmanager
    async def held(
        self, job_id: UUID, resources: Sequence[Resource], or_stop: OrStop, *, urgent: bool = False
    ) -> AsyncIterator["Held"]:
        """Holds one slot of each resource while the block runs. It waits for all of them together, in the order in which jobs
        came. `or_stop` awaits; if it raises, the job stops waiting."""
        held = Held(self, job_id, {one.key: one.most for one in resources}, or_stop, urgent=urgent)
        try:
            await held.take()
            yield held
        except (Exception, asyncio.CancelledError):
            # The block's own error says more than a store that is away. The row goes with the job's next run, or with the
            # lease.
            with suppress(PersistFailed):
                await held.leave()
            raise
        await held.leave()

    @contextmanager
    def held_in_thread(
        self, job_id: UUID, resources: Sequence[Resource], stop: Callable[[], bool], *, urgent: bool = False
    ) -> Iterator[None]:
        """The same for a thread that has no event loop. Cancelled, once `stop()` while it waits."""
        wanted = {one.key: one.most for one in resources}

        async def or_stop(waiting: Coroutine[Any, Any, None]) -> None:
            task = asyncio.ensure_future(waiting)
            while not (await asyncio.wait({task}, timeout=STOP_POLL_S))[0]:
                if stop():
                    task.cancel()
                    raise Cancelled
            await task

        try:
            asyncio.run(self.take(job_id, wanted, or_stop, urgent=urgent))
            yield
        except BaseException:
            with suppress(PersistFailed):
                asyncio.run(self.leave(job_id, wanted))
            raise
        asyncio.run(self.leave(job_id, wanted))

    async def forget(self, job_id: UUID) -> None:
        """Gives back what an interrupted run of the job has left."""
        if await asyncio.to_thread(self._rows.has_any, job_id):
            await asyncio.to_thread(self._rows.leave, job_id)

    async def take(self, job_id: UUID, wanted: dict[str, int], or_stop: OrStop, *, urgent: bool) -> None:
        """Waits in line until all wanted slots are free, and takes them at once. `urgent`: without waiting."""
        while not await asyncio.to_thread(self._rows.take, job_id, wanted, host=self._host, urgent=urgent):
            await or_stop(self._until_next(job_id, wanted))

    async def leave(self, job_id: UUID, wanted: dict[str, int]) -> None:
        """Gives the slots back, and wakes those that wait here."""
        await asyncio.to_thread(self._rows.leave, job_id, wanted)
        with self._lock:
            for called in self._waiting:
                called.call()

    async def _until_next(self, job_id: UUID, wanted: dict[str, int]) -> None:
        while not await asyncio.to_thread(self._rows.is_next, job_id, wanted, host=self._host):
            called = Call()
            with self._lock:
                self._waiting.add(called)
            try:
                await called.within(LOOK_EVERY_S)
            finally:
                with self._lock:
                    self._waiting.discard(called)


class Held:
    """The slots of a job. It may leave them while it only waits."""

    def __init__(self, slots: Slots, job_id: UUID, wanted: dict[str, int], or_stop: OrStop, *, urgent: bool) -> None:
        self._slots, self._job_id, self._wanted, self._or_stop, self._urgent = slots, job_id, wanted, or_stop, urgent

    async def take(self) -> None:
        """Takes them again, in the order in which jobs came; at once, where the job has them."""
        await self._slots.take(self._job_id, self._wanted, self._or_stop, urgent=self._urgent)

    async def leave(self) -> None:
        """Gives the slots back before the end of the block."""
        await self._slots.leave(self._job_id, self._wanted)


class Turns:
    """At most `most` jobs work; the others wait for their turn in the order in which they came. A job leaves its turn at its
    end, and while it only waits, for its cut-over or for a source that is away."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._lock = threading.Lock()
        self._working: set[UUID] = set()
        # The waiting jobs, in their order.
        self._waiting: dict[UUID, Call] = {}

    async def taken(self, job_id: UUID, or_stop: OrStop, *, urgent: bool = False) -> None:
        """Waits for the job's turn; returns at once if it has it. `or_stop` awaits; if it raises, the job stops waiting."""
        try:
            while (called := self._take(job_id, urgent=urgent)) is not None:
                await or_stop(called.within(TURN_EVERY_S))
        finally:
            with self._lock:
                self._waiting.pop(job_id, None)
                self._call()

    def left(self, job_id: UUID) -> None:
        """Frees the job's turn: it has ended, or only waits."""
        with self._lock:
            self._working.discard(job_id)
            self._call()

    def _take(self, job_id: UUID, *, urgent: bool) -> Call | None:
        """None, if it is the job's turn. Else the job is in the line, and is called when it must look again."""
        with self._lock:
            if job_id in self._working:
                return None
            self._waiting[job_id] = called = Call()  # a job that is in the line already keeps its place
            if not urgent and job_id not in self._next():
                return called
            self._working.add(job_id)
            return None

    def _next(self) -> list[UUID]:
        return list(islice(self._waiting, max(self._most - len(self._working), 0)))

    def _call(self) -> None:
        for job_id in self._next():
            self._waiting[job_id].call()
