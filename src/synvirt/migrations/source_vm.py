"""The source VM of a Live job: asked, shut down, not started beside its copy, left alone at the end. asyncio.

Each question opens a session of its own, and is patient (`patience`). What is done to the VM is in the ledger, or noted, first.
"""

from collections.abc import Awaitable, Callable
from typing import TypeVar

import structlog

from synvirt.errors import Conflict, PersistFailed, SourceUnreachable, SynvirtError, from_code
from synvirt.live import LiveAdapter, SwitchesTracking
from synvirt.migrations.job import Job
from synvirt.migrations.memory import JobMemory
from synvirt.migrations.patience import patiently
from synvirt.model.values import now
from synvirt.store import LedgerEntry

T = TypeVar("T")

log = structlog.get_logger(__name__)

# What a job that went well still owes its source. The rest of its ledger is what it made here, and keeps.
OWED = ("snapshot", "mark", "tracking")
# What a source that is away now is still to get, where that may also come later.
LATER_S = 30.0
# A guest that was asked politely has gone off by then, or will not any more; later, where its plan gives it longer.
SHUTTING_DOWN_S = 900.0


def vm_id(job: Job) -> str:
    """The platform's id of a Live job's VM."""
    if job.migration.plan.source_ref.kind != "live_vm":
        raise RuntimeError("an Offline plan has no source VM")
    return job.migration.plan.source_ref.vm_id


async def at_source(job: Job, use: Callable[[LiveAdapter], Awaitable[T]], limit_s: float | None = None) -> T:
    """In a session of its own; asked again while the source does not answer, or does not let us in any more."""
    return await patiently(job, lambda _: job.with_adapter(use), limit_s)


class SourceAwake(Conflict):
    """The source is on, though this job has shut it down."""


async def seen(job: Job) -> tuple[str, str]:
    """Its power state, never unknown, and its last start."""

    async def ask(adapter: LiveAdapter) -> tuple[str, str]:
        state = (await adapter.inspect(vm_id(job))).power_state
        if state == "unknown":
            raise SourceUnreachable(f"the source does not say whether {job.manifest.name} is on", hint="its host may be away")
        return state, await adapter.last_start(vm_id(job))

    return await at_source(job, ask)


async def shut_down(job: Job) -> None:
    """Off when it returns; in the ledger first, so that a failed job powers it on again. One that is off is left alone: it may
    be held open for its disks. Conflict, where shutting down would cost what a suspended guest has in memory."""
    state, _ = await seen(job)
    if state == "off":
        await job.note(shutting_down_at=None)
        return
    if state != "on":
        raise Conflict(
            f"the source {job.manifest.name} is {state}: to shut it down would lose what it has in memory",
            hint="resume it or shut it down, then submit it again",
        )
    await job.record("source_power", vm_id(job))
    # A guest that somebody powered on in between was not down until now.
    at = now()
    await job.note(downs=(await job.memory()).downs + 1, down_since=at, shutting_down_at=at)
    plan = job.migration.plan
    await at_source(job, lambda adapter: adapter.shutdown(vm_id(job), plan.shutdown, plan.shutdown_timeout_s))
    await job.note(shutting_down_at=None)


def may_go_off(job: Job) -> bool:
    """Blocks. Was the guest asked to shut down not long ago, and nobody saw it go off? It may still do so by itself."""
    asked = job.rooms.store.memory.get(job.id, JobMemory).shutting_down_at
    limit_s = max(SHUTTING_DOWN_S, job.migration.plan.shutdown_timeout_s or 0)
    return asked is not None and (now() - asked).total_seconds() < limit_s


async def ran_since(job: Job, number: int, start: str | None = None) -> bool:
    """Was the guest on since the snapshot of this pass, which was made while it was off? Then it wrote what the copy lacks.
    `start`: its last start, if that is known."""
    of_pass = await job.memory_of(number)
    if of_pass.snapshot is None:
        return False
    # Counted, not timed: clocks are set.
    if of_pass.downs != (await job.memory()).downs:
        return True
    if start is None:
        start = await at_source(job, lambda adapter: adapter.last_start(vm_id(job)))
    return of_pass.last_start is not None and of_pass.last_start != start


# ── the copy and its source ──────────────────────────────────────────────────────────────────────────────────────────


async def refuse_living(job: Job) -> None:
    """Conflict, when the source is on, or may be: two of one guest would both write, answer and be believed. Or was on, since
    its disks were copied."""
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
            hint="submit it again, and let nobody start it meanwhile",
        )


async def measure_downtime(job: Job) -> None:
    """From the source's shutting down to the first sign of life here, once."""
    since = (await job.memory()).down_since
    if since is not None and job.migration.boot_sign is not None and job.migration.downtime_s is None:
        await job.change(downtime_s=round((now() - since).total_seconds(), 3))


async def leave(job: Job) -> None:
    """The guest lives here now: mark the source VM, and leave no snapshot of ours on it. It does live here: what cannot be
    tidied up at the source is reported, stays in the ledger, costs nobody the guest, and is tried again later (`tidying`)."""
    await job.record("mark", vm_id(job))
    await tidy_up(job, "the guest runs here")


async def tidy_up(job: Job, so_far: str) -> None:
    """What a job that went well owes its source, now if it can be; `so_far`: what it says of itself where it cannot."""
    try:
        entries = await job.in_thread(job.rooms.store.ledger, job.id)
        for entry in sorted(entries, key=lambda one: one.kind == "tracking"):  # after the snapshots, which are made of it
            if entry.kind in OWED:
                await at_source(job, lambda adapter: _settled(job, adapter, entry), LATER_S)  # noqa: B023
                await job.strike(entry.kind, entry.name)
        await job.take_back()
    except PersistFailed:
        raise
    except SynvirtError as error:
        job.stop.check()
        log.warning("the source is not tidied up", job=str(job.id), cause=error.detail)
        problem = from_code(
            error.code,
            f"{so_far}; its source could not be tidied up: {error.detail}",
            "it is tried again until it is done; till then see that the old VM does not start by itself",
        )
        await job.tell(problem)


async def settle(job: Job, entry: LedgerEntry) -> None:
    """What a job that went well still owes its source: a mark, or that a snapshot goes, or that its changes are
    tracked no more."""
    await job.with_adapter(lambda adapter: _settled(job, adapter, entry))


async def _settled(job: Job, adapter: LiveAdapter, entry: LedgerEntry) -> None:
    match entry.kind:
        case "mark":
            await adapter.mark(vm_id(job), f"migrated to {job.migration.name} ({job.id})")
        case "tracking":
            await track_no_more(adapter, entry.name)
        case _:
            await adapter.cleanup(vm_id(job), entry.name)


async def track_no_more(adapter: LiveAdapter, vm: str) -> None:
    """Switches change tracking off, where the platform has a switch for it."""
    if isinstance(adapter, SwitchesTracking):
        await adapter.disable_cbt(vm)
