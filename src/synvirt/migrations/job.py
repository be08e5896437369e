"""A job while one of its steps runs: its document, its memory, its ledger, its source, and whether it must stop. asyncio."""

import asyncio
import threading
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import ParamSpec, TypeVar, cast
from uuid import UUID

from synvirt.destinations import Destination
from synvirt.errors import SynvirtError
from synvirt.jobs.runner import in_a_thread
from synvirt.jobs.slots import Held, destination, source, source_host
from synvirt.jobs.stop import Stop
from synvirt.live import LiveAdapter
from synvirt.migrations.memory import JobMemory, Passing, PassMemory, noting
from synvirt.migrations.rooms import Rooms
from synvirt.model.job import Migration
from synvirt.model.kinds import Mode, State
from synvirt.model.machine import Disk, VmManifest
from synvirt.model.problems import Problem
from synvirt.model.values import now
from synvirt.store import Watermark
from synvirt.store.memory import Remembered

P = ParamSpec("P")
R = TypeVar("R", bound=Remembered)
T = TypeVar("T")

# In these states a warm job's guest has not been shut down yet.
_RUNS_ON = frozenset({State.COPYING_FULL, State.DELTA_SYNCING})


class Job:
    """One running job. `migration` is what the store has; every change goes through `change`."""

    def __init__(self, migration: Migration, rooms: Rooms, stop: Stop) -> None:
        self.migration = migration
        self.rooms = rooms
        self.stop = stop
        self._slots: Held | None = None
        # Several tasks of a step may change the job. They do so one by one, so that `migration` is never older than the store.
        self._changing = asyncio.Lock()
        # What it remembers, by kind and number. It is read once: a warm job asks fifty times, and only this job writes it.
        self._remembered: dict[tuple[type[Remembered], int], Remembered] = {}
        self._remembering = asyncio.Lock()

    @property
    def id(self) -> UUID:
        return self.migration.id

    @property
    def manifest(self) -> VmManifest:
        """The VM as it was inspected in Queued. Only later steps may ask."""
        if self.migration.manifest is None:
            raise RuntimeError("no step before Queued's end has a manifest")
        return self.migration.manifest

    @property
    def vm_id(self) -> str:
        """The platform's id of a Live job's VM."""
        if self.migration.plan.source_ref.kind != "live_vm":
            raise RuntimeError("an Offline plan has no source VM")
        return self.migration.plan.source_ref.vm_id

    @property
    def is_warm(self) -> bool:
        """Whether the guest runs while it is copied."""
        return self.migration.mode_effective is Mode.WARM

    @property
    def converts(self) -> bool:
        """Whether drivers are installed in the guest, by its plan and its manifest."""
        return self.rooms.converts(self.migration.plan, self.manifest)

    @property
    def copied_disks(self) -> list[tuple[Disk, str]]:
        """The disks that the plan does not skip, each with its volume; for a repair those that it compares."""
        repair = self.migration.repair
        volumes = {disk.key: disk.volume for disk in (self.migration.disks if repair is None else repair.disks)}
        return [(disk, volume) for disk in self.manifest.disks if (volume := volumes.get(disk.key)) is not None]

    @property
    def destination(self) -> Destination:
        """The destination that has the job's volumes, or will have them."""
        return self.rooms.destination_named(self.migration.destination or self.migration.plan.target.destination)

    async def in_thread(self, call: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Runs blocking code in a thread."""
        return await asyncio.to_thread(call, *args, **kwargs)

    async def in_stoppable_thread(self, call: Callable[[Callable[[], bool]], T]) -> T:
        """Runs blocking code that takes long in a thread, to its end. `call` gets a function that says whether it must end: the
        job is stopped, or this process ends, or its host has lost its lease."""
        let_go = threading.Event()
        return await in_a_thread(lambda: call(lambda: self.stop.is_set() or let_go.is_set()), let_go.set)

    async def change(self, mark: Watermark | None = None, /, **fields: object) -> None:
        """Writes these fields of the job; the state stays. `mark`: a watermark that is written with them. Conflict where the
        state has changed meanwhile."""
        async with self._changing:
            self.migration = await self.in_thread(
                self.rooms.store.change, self.id, self.migration.state, lambda now_: now_.model_copy(update=fields), mark=mark
            )

    def problem(self, error: SynvirtError, *, fatal: bool) -> Problem:
        """The error as `last_error` holds it."""
        return Problem(
            code=error.code, message=error.detail, hint=error.hint, fatal=fatal, at=now(), state=self.migration.state
        )

    @property
    def guest_is_off(self) -> bool:
        """Whether the guest is off, or will be at any moment. Such a job must not wait."""
        job = self.migration
        runs_on = job.state is State.QUEUED or (self.is_warm and job.state in _RUNS_ON)
        return job.plan.source.Live is not None and not runs_on and job.repair is None

    async def take_turn(self) -> None:
        """Waits for one of the `jobs_at_once` turns; does not wait while the guest is off. Cancelled."""
        await self.rooms.turns.taken(self.id, self.stop.or_stop, urgent=self.guest_is_off)

    def leave_turn(self) -> None:
        """Lets another job work while this one waits."""
        self.rooms.turns.left(self.id)

    @asynccontextmanager
    async def slots(self, *, urgent: bool = False) -> AsyncIterator[None]:
        """Holds the slots of a pass: of the source, of the source's host that has the VM, and of the destination."""
        rooms, ref = self.rooms, self.migration.plan.source_ref
        name = self.migration.destination or next(iter(rooms.destinations))
        shared = await self.in_thread(self.destination.shared_id)
        wanted = [destination(shared or f"{rooms.host} {name}", most=rooms.jobs_per_destination)]
        if ref.kind == "live_vm":
            wanted.append(source_host(ref.source_id, self.manifest.host, most=rooms.jobs_per_source))
            wanted.append(source(ref.source_id, most=rooms.jobs_per_source_in_all))
        async with rooms.slots.held(self.id, wanted, self.stop.or_stop, urgent=urgent) as held:
            self._slots = held
            try:
                yield
            finally:
                self._slots = None

    async def leave_slots(self) -> None:
        """Lets other jobs copy while this one waits for something that may take a day."""
        if self._slots is not None:
            await self._slots.leave()

    async def take_slots(self) -> None:
        """Takes the slots again, if they were left."""
        if self._slots is not None:
            await self._slots.take()

    async def report(self, error: SynvirtError, **fields: object) -> None:
        """Shows a problem that stays as the job's last error, with these fields of it. Where a trouble that may pass is shown
        now, this is what is shown again after it."""
        problem = self.problem(error, fatal=False)
        if (await self.memory()).passing is not None:
            await self.note(passing=Passing(before=problem))
        await self.change(last_error=problem, **fields)

    async def show(self, error: SynvirtError) -> None:
        """Shows a trouble that may pass as the job's last error, until `show_no_more`. One that is shown already stays as it
        is: each change is an event with the whole job, and a source may be away for a day."""
        if (await self.memory()).passing is None:
            await self.note(passing=Passing(before=self.migration.last_error))
        problem, shown = self.problem(error, fatal=False), self.migration.last_error
        if shown is None or shown.model_copy(update={"at": problem.at}) != problem:
            await self.change(last_error=problem)

    async def show_no_more(self) -> None:
        """The trouble has passed: the problem that was shown before it is shown again."""
        passing = (await self.memory()).passing
        if passing is not None:
            await self.change(last_error=passing.before)
            await self.note(passing=None)

    async def memory(self) -> JobMemory:
        """What the job remembers. Not `hashed`, which blocking code reads and writes (`proof/receipts.py`)."""
        return await self._memory(JobMemory)

    async def note(self, **facts: object) -> None:
        """Writes fields of JobMemory, in one transaction. Those that it has already are not written."""
        await self._note(JobMemory, 0, facts)

    async def memory_of(self, number: int) -> PassMemory:
        """What the job remembers of a pass."""
        return await self._memory(PassMemory, number)

    async def note_of(self, number: int, **facts: object) -> None:
        """Writes fields of a pass's PassMemory, in one transaction."""
        await self._note(PassMemory, number, facts)

    async def fold_passes(self, number: int) -> None:
        """Keeps only what the pass after `number` needs: a job that is held for weeks has thousands of passes."""
        async with self._remembering:
            self._remembered.clear()
            await self.in_thread(self.rooms.store.fold_passes, self.id, number)

    async def _memory(self, kind: type[R], number: int = 0) -> R:
        async with self._remembering:
            found = self._remembered.get((kind, number))
            if found is None:
                found = await self.in_thread(self.rooms.store.memory.get, self.id, kind, number)
                self._remembered[kind, number] = found
        return cast("R", found)

    async def _note(self, kind: type[Remembered], number: int, facts: dict[str, object]) -> None:
        change = self.rooms.store.memory.change
        async with self._remembering:
            known = self._remembered.get((kind, number))
            if known is not None and noting(known, **facts) == known:
                return
            # Where the store fails, nobody knows which of the two it has.
            self._remembered.pop((kind, number), None)
            self._remembered[kind, number] = await self.in_thread(
                change, self.id, kind, lambda before: noting(before, **facts), number
            )

    async def record(self, kind: str, name: str) -> None:
        """Adds a ledger entry. Call it before the thing is made."""
        await self.in_thread(self.rooms.store.record, self.id, kind, name)

    async def strike(self, kind: str, name: str) -> None:
        """Deletes a ledger entry. Call it after the thing is gone."""
        await self.in_thread(self.rooms.store.strike, self.id, kind, name)

    async def with_adapter(self, use: Callable[[LiveAdapter], Awaitable[T]]) -> T:
        """The answer of `use`, in a session with the source of a Live plan. Cancelled, when the job must stop."""

        async def used() -> T:
            async with self.session() as adapter:
                return await use(adapter)

        return await self.stop.or_stop(used())

    @asynccontextmanager
    async def session(self, *, within_s: float | None = None) -> AsyncIterator[LiveAdapter]:
        """A session with the source of a Live plan. It does not end when the job must stop. SourceUnreachable, when there is
        none within `within_s`."""
        plan = self.migration.plan
        if plan.source.Live is None or plan.source_ref.kind != "live_vm":
            raise RuntimeError("an Offline plan has no adapter")
        async with self.rooms.sessions.lent(plan.source.Live, plan.source_ref.source_id, within_s=within_s) as adapter:
            yield adapter


def named(disk: Disk) -> str:
    """A disk for people: by its key, which skip_disks takes, and by its label, if the platform has another name for it."""
    return f"disk {disk.key}" + (f" ({disk.label})" if disk.label not in ("", disk.key) else "")


def volume_label(disk: Disk, manifest: VmManifest) -> str:
    """What the disk's volume is named by: its label, or label and key where two disks of the VM have the same label. Only the
    key, where one of these is a third disk's label: no two disks share a volume."""
    labels = Counter(other.label for other in manifest.disks)
    names = {other.key: other.label if labels[other.label] == 1 else f"{other.label} {other.key}" for other in manifest.disks}
    return names[disk.key] if len(set(names.values())) == len(names) else disk.key
