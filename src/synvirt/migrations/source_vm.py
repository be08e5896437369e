"""The source VM of a Live job: its power state, its shutdown, and what is left on it at the end. asyncio.

Each call opens its own session, and waits out a source that is away (`patience`). Before the VM is changed, the change has a
ledger entry or a note.
"""

import time
from collections.abc import Awaitable, Callable
from datetime import datetime
from functools import lru_cache
from typing import TypeVar
from uuid import UUID

import structlog

from synvirt.errors import Conflict, PersistFailed, SourceUnreachable, SynvirtError, VmNotFound, from_code
from synvirt.live import GuestStaysOn, LiveAdapter, SwitchesTracking
from synvirt.machines.texts import uuid_of
from synvirt.migrations.job import Job
from synvirt.migrations.memory import JobMemory
from synvirt.migrations.patience import patiently
from synvirt.migrations.planning.left_off import is_left_off
from synvirt.model.machine import VmManifest
from synvirt.model.values import now
from synvirt.store import LedgerEntry
from synvirt.store.tables import OWED_KINDS

T = TypeVar("T")

log = structlog.get_logger(__name__)

# How long to wait for a source that is away, where the call may also be made later.
LATER_S = 30.0
# A guest that was asked to shut down is off after this time, or will not go off any more. The plan may give it longer.
SHUTTING_DOWN_S = 900.0


async def at_source(job: Job, use: Callable[[LiveAdapter], Awaitable[T]], limit_s: float | None = None) -> T:
    """The answer of `use`, in its own session. It is called again while the source does not answer or refuses the login, for
    `limit_s` at most."""
    return await patiently(job, lambda _: job.with_adapter(use), limit_s)


class SourceAwake(Conflict):
    """The source is on, though this job has shut it down."""


def refuse_another(before: VmManifest | None, present: VmManifest) -> None:
    """VmNotFound, if the id is another machine's by now: Proxmox VE gives the number of a VM that was removed to the next one
    that is made. It must be neither copied under the old one's name, nor powered off or on. `before`: the job's machine."""
    if before is None or _is_unique(present.vm_id):
        return
    if None in (before.uuid, present.uuid) or before.uuid == present.uuid:
        return
    raise VmNotFound(
        f"{present.vm_id} is another machine now: {present.name} of UUID {present.uuid}, and not {before.name} of UUID "
        f"{before.uuid}",
        hint="was it removed, and its id given to a new VM? Submit a new plan of the machine that is to be moved",
    )


async def inspected(job: Job, adapter: LiveAdapter) -> VmManifest:
    """The source VM as it is now. VmNotFound, where it is gone, or another machine has its id."""
    present = await adapter.inspect(job.vm_id)
    refuse_another(job.migration.manifest, present)
    return present


def _is_unique(vm_id: str) -> bool:
    """Whether no other machine can get the id: it is a UUID."""
    return uuid_of(vm_id) is not None


async def power_on(job: Job, adapter: LiveAdapter) -> None:
    """Powers the source on, unless it is another machine by now (VmNotFound). It is inspected only where it may be: its owner
    wants it on, also if the platform describes it no more."""
    if not _is_unique(job.vm_id):
        await inspected(job, adapter)
    await adapter.power_on(job.vm_id)


async def seen(job: Job) -> tuple[str, str]:
    """The source's power state, never unknown, and its last start."""

    async def ask(adapter: LiveAdapter) -> tuple[str, str]:
        state = (await inspected(job, adapter)).power_state
        if state == "unknown":
            raise SourceUnreachable(
                f"the source does not say whether {job.manifest.name} is on",
                hint="its host may be away, or the VM may have been migrated to one that the source does not show",
            )
        return state, await adapter.last_start(job.vm_id)

    return await at_source(job, ask)


async def take_up_power(job: Job) -> None:
    """Does what an earlier job owes: it has shut the guest down, and could not power it on again. While this job has the VM,
    nobody else does that (`tidying`). A warm job powers it on now, as it may be held for days; a cold one once it failed, or is
    rolled back."""
    if not await job.in_thread(is_left_off, job.rooms.store, job.migration, job.vm_id):
        return
    if job.is_warm:
        await at_source(job, lambda adapter: power_on(job, adapter))
    else:
        await job.record("source_power", job.vm_id)


async def shut_down(job: Job) -> None:
    """Shuts the source down; it is off on return. A ledger entry comes first, so that a failed job powers it on again. A source
    that is off is not touched. Conflict, where it is suspended: a shutdown would lose its memory."""
    state, _ = await seen(job)
    if state == "off":
        memory = await job.memory()
        if memory.shutting_down_at is not None and memory.down_since is None:  # it stayed on, and went off later
            await job.note(down_since=now())
        await job.note(shutting_down_at=None)
        return
    if state != "on":
        raise Conflict(
            f"the source {job.manifest.name} is {state}: to shut it down would lose what it has in memory",
            hint="resume it or shut it down, then submit it again",
        )
    await job.record("source_power", job.vm_id)
    # Its next downtime counts, even if the guest was down before and was powered on again.
    await job.note(downs=(await job.memory()).downs + 1, down_since=None)
    await at_source(job, lambda adapter: _ask_to_shut_down(job, adapter))
    await job.note(shutting_down_at=None)


async def _ask_to_shut_down(job: Job, adapter: LiveAdapter) -> None:
    """Asks once; the downtime begins with that. A guest that stays on has none: it is asked again and again, perhaps for a day,
    and may go off by itself after each time."""
    plan, at = job.migration.plan, now()
    await job.note(down_since=(await job.memory()).down_since or at, shutting_down_at=at)
    if (noted := (await job.memory()).down_since) is not None:
        off_for_s(job, noted)  # its clock starts here, for the time as it is stored, to the millisecond
    try:
        await adapter.shutdown(job.vm_id, plan.shutdown, plan.shutdown_timeout_s)
    except GuestStaysOn:
        await job.note(down_since=None)
        raise


def off_for_s(job: Job, since: datetime) -> float:
    """How long the guest has been off. `since`: as it was noted. Counted by a clock that nobody sets, from when this process
    first asked; only the time before a restart is counted by the noted one."""
    return time.monotonic() - _off_since(job.id, since)


@lru_cache(maxsize=1024)
def _off_since(job_id: UUID, since: datetime) -> float:
    return time.monotonic() - max(0.0, (now() - since).total_seconds())


def may_go_off(job: Job) -> bool:
    """Whether the guest was asked to shut down a short time ago, and may still go off by itself. Blocks."""
    asked = job.rooms.store.memory.get(job.id, JobMemory).shutting_down_at
    limit_s = max(SHUTTING_DOWN_S, job.migration.plan.shutdown_timeout_s or 0)
    return asked is not None and abs((now() - asked).total_seconds()) < limit_s  # the clock may have been set back


async def ran_since(job: Job, number: int, start: str | None = None) -> bool:
    """Whether the guest has run since the snapshot of this pass, which was made while it was off. Then the copy lacks what it
    wrote. `start`: its last start, if that is known."""
    of_pass = await job.memory_of(number)
    if of_pass.snapshot is None:
        return False
    # Shutdowns are counted, as clocks may be set.
    if of_pass.downs != (await job.memory()).downs:
        return True
    if start is None:
        start = await at_source(job, lambda adapter: adapter.last_start(job.vm_id))
    return of_pass.last_start is not None and of_pass.last_start != start


# ── the copy and its source ──────────────────────────────────────────────────────────────────────────────────────────


async def refuse_living(job: Job) -> None:
    """Conflict, when the source is on or may be on: two copies of one guest must never run at once. Also Conflict, when it has
    run since its disks were copied."""
    if job.migration.boot_sign is not None or job.migration.plan.source.Live is None:
        return
    state, start = await seen(job)
    if state != "off":
        raise Conflict(
            f"the source {job.manifest.name} was shut down for the cut-over, and is {state} again: it is not started here",
            hint="the copy is kept, and lacks what the source wrote since; shut the source down and submit it again",
        )
    if await ran_since(job, job.migration.passes[-1].number, start):
        raise Conflict(
            f"the source {job.manifest.name} was on for a while after its disks had been copied: the copy lacks what it wrote",
            hint="submit it again, and make sure that it is not started meanwhile",
        )


async def measure_downtime(job: Job) -> None:
    """Notes the downtime once: from the source's shutdown to the guest's first sign of life here."""
    since = (await job.memory()).down_since
    if since is not None and job.migration.boot_sign is not None and job.migration.downtime_s is None:
        await job.change(downtime_s=round(off_for_s(job, since), 3))


async def leave(job: Job) -> None:
    """After the guest runs here: marks the source VM, and removes our snapshots from it. If that fails, the job does not fail.
    It reports the trouble, the entries stay in the ledger, and `tidying` tries again later."""
    await job.record("mark", job.vm_id)
    await tidy_up(job, "the guest runs here")


async def tidy_up(job: Job, so_far: str) -> None:
    """Does what a completed job owes its source, as far as it is possible now. `so_far`: the job's warning if something
    remains."""
    try:
        entries = await job.in_thread(job.rooms.store.ledger, job.id)
        for entry in sorted(entries, key=lambda one: one.kind == "tracking"):  # after the snapshots, which need it
            if entry.kind in OWED_KINDS:
                await at_source(job, lambda adapter: _settled(job, adapter, entry), LATER_S)  # noqa: B023
                await job.strike(entry.kind, entry.name)
        await job.show_no_more()
    except PersistFailed:
        raise
    except SynvirtError as error:
        job.stop.check()
        log.warning("the source is not tidied up", job=str(job.id), cause=error.detail)
        problem = from_code(
            error.code,
            f"{so_far}; its source could not be tidied up: {error.detail}",
            "it is tried again until it is done; until then make sure that the old VM does not start by itself",
        )
        await job.show(problem)


async def settle(job: Job, entry: LedgerEntry) -> None:
    """Settles one entry that a completed job still has at its source: sets the mark, removes a snapshot, or switches change
    tracking off."""
    await job.with_adapter(lambda adapter: _settled(job, adapter, entry))


async def _settled(job: Job, adapter: LiveAdapter, entry: LedgerEntry) -> None:
    match entry.kind:
        case "mark":
            await inspected(job, adapter)
            await adapter.mark(job.vm_id, f"migrated to {job.migration.name} ({job.id})")
        case "tracking":
            await track_no_more(adapter, entry.name)
        case _:
            await adapter.cleanup(job.vm_id, entry.name)


async def track_no_more(adapter: LiveAdapter, vm: str) -> None:
    """Switches change tracking off, where the platform has a switch for it."""
    if isinstance(adapter, SwitchesTracking):
        await adapter.disable_cbt(vm)
