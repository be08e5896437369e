"""How many jobs work at once: here (Turns, in memory), and on one source, one host of it, one destination or one backup
repository (Slots, in the store, for the jobs and backup runs of all hosts). asyncio; `held_in_thread` is for threads.

A host has guests to serve, and its disks one head each. A cut-over never waits: its guest is off. A slot covers a pass, never a
wait for the next one.
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

# A slot that a job of this process leaves is given on at once; one of another host is looked for. Who waits for its turn is
# called: there may be thousands. The further look is for a loop that ended.
LOOK_EVERY_S, TURN_EVERY_S = 2.0, 30.0
# Between two looks of a thread that waits, whether it is to stop.
STOP_POLL_S = 0.2

OrStop = Callable[[Coroutine[Any, Any, None]], Awaitable[None]]


@dataclass(frozen=True, slots=True)
class Resource:
    """What so many jobs use at the same time, over all hosts. `key` names it in the store."""

    key: str
    most: int


def source_host(source_id: UUID, host: str, *, most: int) -> Resource:
    """A host of a registered source; empty where the source is one."""
    return Resource(f"source {source_id} {host}", most)


def source(source_id: UUID, *, most: int) -> Resource:
    """A registered source as a whole: a vCenter answers for all its hosts, and what goes through it, it carries itself."""
    # No host has a name with a space.
    return Resource(f"source {source_id} in all", most)


def destination(name: str, *, most: int) -> Resource:
    """`name`: one that is the same on each host that reaches the destination, and on no other."""
    return Resource(f"destination {name}", most)


def repository(repository_id: UUID, *, most: int) -> Resource:
    """A backup repository, by the id that lies in it: each host knows it by that."""
    return Resource(f"repository {repository_id}", most)


def guests_of(host: str, *, most: int) -> Resource:
    """The disks of one of our own hosts' guests."""
    return Resource(f"guests {host}", most)


class Slots:
    """Those of this host's jobs, in the store. What a cut-over takes comes on top of the number."""

    def __init__(self, rows: SlotRows, *, host: str) -> None:
        self._rows, self._host = rows, host
        self._lock = threading.Lock()
        self._waiting: set[Call] = set()

    @asynccontextmanager
    async def held(
        self, job_id: UUID, resources: Sequence[Resource], or_stop: OrStop, *, urgent: bool = False
    ) -> AsyncIterator["Held"]:
        """One of each, for as long as the block lasts; they are waited for together, in the order the jobs came. `or_stop`
        awaits, and may raise: then the job waits no longer."""
        held = Held(self, job_id, {one.key: one.most for one in resources}, or_stop, urgent=urgent)
        try:
            await held.take()
            yield held
        except (Exception, asyncio.CancelledError):
            # What it is says more than that the store is away: then the row goes with the job's next run, or the host's lease.
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
        """What a run of the job left that was cut off."""
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
        while not await asyncio.to_thread(self._rows.is_next, job_id, wanted):
            called = Call()
            with self._lock:
                self._waiting.add(called)
            try:
                await called.within(LOOK_EVERY_S)
            finally:
                with self._lock:
                    self._waiting.discard(called)


class Held:
    """The slots of a job, which it may leave for as long as it only waits."""

    def __init__(self, slots: Slots, job_id: UUID, wanted: dict[str, int], or_stop: OrStop, *, urgent: bool) -> None:
        self._slots, self._job_id, self._wanted, self._or_stop, self._urgent = slots, job_id, wanted, or_stop, urgent

    async def take(self) -> None:
        """In the order the jobs came; at once, where the job has them."""
        await self._slots.take(self._job_id, self._wanted, self._or_stop, urgent=self._urgent)

    async def leave(self) -> None:
        """Gives the slots back before the end of the block."""
        await self._slots.leave(self._job_id, self._wanted)


class Turns:
    """`most` jobs work, the others wait for their turn in the order they came. A job has its turn until it leaves it: at its
    end, and for as long as it only waits, for its cut-over or for a source that is away."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._lock = threading.Lock()
        self._working: set[UUID] = set()
        # In their order.
        self._waiting: dict[UUID, Call] = {}

    async def taken(self, job_id: UUID, or_stop: OrStop, *, urgent: bool = False) -> None:
        """At once, where the job has it already. `or_stop` awaits, and may raise: then the job waits no longer."""
        try:
            while (called := self._take(job_id, urgent=urgent)) is not None:
                await or_stop(called.within(TURN_EVERY_S))
        finally:
            with self._lock:
                self._waiting.pop(job_id, None)
                self._call()

    def left(self, job_id: UUID) -> None:
        """The job has ended or holds: its turn is free."""
        with self._lock:
            self._working.discard(job_id)
            self._call()

    def _take(self, job_id: UUID, *, urgent: bool) -> Call | None:
        """None: it is the job's turn. Else it is in the line, and is called when it is to look again."""
        with self._lock:
            if job_id in self._working:
                return None
            self._waiting[job_id] = called = Call()  # where it stands already it keeps its place
            if not urgent and job_id not in self._next():
                return called
            self._working.add(job_id)
            return None

    def _next(self) -> list[UUID]:
        return list(islice(self._waiting, max(self._most - len(self._working), 0)))

    def _call(self) -> None:
        for job_id in self._next():
            self._waiting[job_id].call()
