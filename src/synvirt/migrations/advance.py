"""One move of a job: it runs the step of its state and goes where the table says; or it ends, and sweeps what it made. asyncio.

    advance(job) ─▶ step of its state ─▶ next state
                      ├─ Cancelled ──▶ sweep all ───────────────▶ Cancelled
                      └─ any error ──▶ last_error, sweep ───────▶ Failed     (a whole copy is kept)

Idempotent at every commit: called for a job that was failing when the service died, it goes on with that.
"""

from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from functools import partial
from uuid import UUID

import structlog

from synvirt.errors import AuthFailed, Cancelled, Internal, PersistFailed, SourceUnreachable, SynvirtError
from synvirt.jobs.ledger import Order, Sweep
from synvirt.jobs.shortage import unforeseen
from synvirt.jobs.stop import Stop
from synvirt.migrations import instant, source_vm
from synvirt.migrations.cloning import wait_until_gone
from synvirt.migrations.hosts import rolled_back
from synvirt.migrations.job import Job
from synvirt.migrations.overrun import within_budget
from synvirt.migrations.patience import while_something_here_is_away
from synvirt.migrations.planning.retrying import kept_on_failure
from synvirt.migrations.rooms import Rooms
from synvirt.migrations.sources.elsewhere import name_new_source
from synvirt.migrations.states import Facts, may_move, next_state
from synvirt.migrations.steps import STEPS
from synvirt.model.job import Migration, StateVisit
from synvirt.model.kinds import ENDS, State
from synvirt.model.values import now
from synvirt.store import LedgerEntry

log = structlog.get_logger(__name__)

# Pauses of a sweep: a source that is away may be back in a moment. After them the entry stays in the ledger, for `tidying`.
SWEEP_PAUSES_S = (0.5, 2, 5)
# How long a cancelled job waits for a login at its source. After that `tidying` does the rest later.
CANCELLED_CONNECT_S = 5.0
# The kinds of ledger entries that are undone at the source of a Live job.
AT_SOURCE = frozenset({"snapshot", "source_power", "tracking"})


async def advance(rooms: Rooms, migration: Migration, stop: Stop) -> State:
    """The state the job is in afterwards; it must not have ended. Raises only PersistFailed: without a store the state is
    unknown."""
    # Each log line on the way has the job's id, also those of threads and libraries.
    with structlog.contextvars.bound_contextvars(job=str(migration.id)):
        return await _advance(rooms, migration, stop)


async def _advance(rooms: Rooms, migration: Migration, stop: Stop) -> State:
    job, state = Job(migration, rooms, stop), migration.state
    failure = _failing(migration)
    if failure is None:
        try:
            stop.check()
            await job.take_turn()
            step = partial(while_something_here_is_away, step=_step)
            facts = await instant.until_it_goes_well(job, lambda: within_budget(job, step))
            return await _move(job, next_state(state, facts))
        except PersistFailed:
            raise
        except Cancelled:
            await job.change(last_error=job.problem(Cancelled(), fatal=True))
        except SynvirtError as error:
            await _fail(job, error)
        except Exception as error:
            log.exception("a step failed in a way that it should not", job=str(job.id), state=state)
            await _fail(job, unforeseen(error, state))
    return await _end(job)


async def _step(job: Job) -> Facts:
    await rolled_back.refuse(job)
    return await STEPS[job.migration.state](job)


def _failing(migration: Migration) -> str | None:
    error = migration.last_error
    return error.code if error is not None and error.fatal else None


async def _fail(job: Job, error: SynvirtError) -> None:
    await name_new_source(job, error)
    log.warning("job failed", job=str(job.id), state=job.migration.state, code=error.code, detail=error.detail)
    await job.change(last_error=job.problem(error, fatal=True))


async def _move(job: Job, to: State, **fields: object) -> State:
    if not may_move(job.migration.state, to):
        raise Internal(f"a job cannot go from {job.migration.state} to {to}")
    if to in ENDS:
        fields["finished_at"] = now()
        job.leave_turn()
    visit = StateVisit(state=to, at=now())
    history = job.migration.history if to == job.migration.state else (*job.migration.history, visit)
    await job.change(state=to, history=history, **fields)
    if to not in ENDS:  # else the stream would go on with figures of the state before
        job.rooms.board.pin(job.id, to, job.migration.progress)
    log.info("job moved", job=str(job.id), state=to)
    return to


async def _end(job: Job) -> State:
    """Sweeps, then moves to Failed or Cancelled. In these states nothing of the job is left, except what it keeps."""
    await wait_until_gone(job)
    cancelled = _failing(job.migration) == Cancelled.code
    has_guest = await rolled_back.has_guest(job)  # then its volumes are not the job's any more
    kept: frozenset[str] = frozenset() if cancelled or has_guest else kept_on_failure(job.migration)
    await sweep(job, rolled_back.GUESTS if has_guest else kept)
    left = await _what_is_left(job, kept)
    stopped = job.migration.progress.stopped()  # it may have ended in the middle of a pass
    return await _move(job, State.CANCELLED if cancelled else State.FAILED, **left, progress=stopped)


async def _what_is_left(job: Job, keep: frozenset[str]) -> dict[str, object]:
    """The job's fields, without the volumes and the domain that are gone."""
    left = {(entry.kind, entry.name) for entry in await job.in_thread(job.rooms.store.ledger, job.id)}
    disks, domain = job.migration.disks, job.migration.domain
    if "volume" not in keep:
        disks = tuple(disk if ("volume", disk.volume) in left else disk.model_copy(update={"volume": None}) for disk in disks)
    is_there = domain is not None and ("domain", domain.uuid) in left
    return {"disks": disks, "domain": domain if is_there else None}


# ── the ledger swept ─────────────────────────────────────────────────────────────────────────────────────────────────


async def _sweep_volume(job: Job, name: str) -> None:
    await job.in_thread(job.destination.destroy, name)


async def _sweep_domain(job: Job, uuid: str) -> None:
    await job.in_thread(job.rooms.hypervisor.undefine, UUID(uuid), job.id)


async def _sweep_screenshot(job: Job, _name: str) -> None:
    await job.in_thread(job.rooms.hypervisor.forget_screenshot, job.id)


async def _sweep_variables(job: Job, _name: str) -> None:
    await job.in_thread(job.rooms.hypervisor.forget_variables, job.id)


async def _sweep_claim(_job: Job, _name: str) -> None:
    """A claim is only its ledger entry: there is nothing to undo."""


async def _sweep_conversion(job: Job, name: str) -> None:
    await job.in_thread(job.rooms.preparer.discard, name)


async def _sweep_hashes(job: Job, _name: str) -> None:
    """Also the hashes of the job whose volumes this one has: it may not have taken them over yet."""
    for job_id in (job.id, job.migration.retry_of):
        if job.rooms.receipts is not None and job_id is not None:
            await job.in_thread(job.rooms.receipts.forget_hashes, job_id)


async def _sweep_passthrough(job: Job, name: str) -> None:
    for tool in job.rooms.passthroughs.values():
        await job.in_thread(tool.discard, name)


async def _sweep_snapshot(job: Job, name: str) -> None:
    await _at_source(job, lambda adapter, vm_id: adapter.cleanup(vm_id, name))


async def _sweep_tracking(job: Job, _name: str) -> None:
    await _at_source(job, source_vm.track_no_more)


async def _sweep_source_power(job: Job, _name: str) -> None:
    await _at_source(job, lambda adapter, _: source_vm.power_on(job, adapter))
    if await job.in_thread(source_vm.may_go_off, job):
        raise SourceUnreachable(
            "the guest was asked to shut down, and may still do so by itself",
            hint="it is checked again, and powered on again, for a quarter of an hour",
        )


async def _sweep_export(job: Job, name: str) -> None:
    await instant.sweep_export(job, name)


async def _sweep_mark(_job: Job, _name: str) -> None:
    """A note on the source VM, which names the job. It does no harm, so it stays."""


SWEEPERS: dict[str, Callable[[Job, str], Awaitable[None]]] = {
    "variables": _sweep_variables,
    "volume": _sweep_volume,
    "claim": _sweep_claim,
    "domain": _sweep_domain,
    "screenshot": _sweep_screenshot,
    "conversion": _sweep_conversion,
    "passthrough": _sweep_passthrough,
    "hashes": _sweep_hashes,
    "export": _sweep_export,
    "snapshot": _sweep_snapshot,
    "source_power": _sweep_source_power,
    "tracking": _sweep_tracking,
    "mark": _sweep_mark,
}


_ORDER = Order(
    late={"snapshot": 1, "tracking": 2},
    only_after={"source_power": frozenset({"domain"}), "tracking": frozenset({"snapshot"})},
)


async def _at_source(job: Job, call: Callable[..., Awaitable[None]]) -> None:
    """Ignores the stop flag: a cancelled job still tidies up at its source."""
    ref = job.migration.plan.source_ref
    if ref.kind != "live_vm":
        return
    async with job.session(within_s=CANCELLED_CONNECT_S if job.stop.is_set() else None) as adapter:
        await call(adapter, ref.vm_id)


async def sweep(job: Job, keep: frozenset[str] = frozenset()) -> None:
    """Undoes the ledger, newest first. Entries of the kinds in `keep` are only deleted: the operator keeps those things. What
    cannot be undone now stays in the ledger."""

    async def kept_or_swept(entry: LedgerEntry) -> bool:
        if entry.kind in keep:
            return True
        # An operator who cancels does not wait for a platform that hangs: `tidying` removes later what is left there.
        if entry.kind in AT_SOURCE and job.stop.left_running:
            return False
        return await _swept(job, entry)

    async for entry in undone(await job.in_thread(job.rooms.store.ledger, job.id), kept_or_swept):
        await job.strike(entry.kind, entry.name)


async def undone(entries: Sequence[LedgerEntry], undo: Callable[[LedgerEntry], Awaitable[bool]]) -> AsyncIterator[LedgerEntry]:
    """Gives each entry that `undo` has undone, newest first.

    Snapshots come after the others: some platforms take hours to consolidate a disk, and the guest runs meanwhile. Tracking
    comes last, as it can be switched off only without our snapshots. The source is not powered on while a domain here could not
    be undone: two copies of one guest must never run at once."""
    sweep = Sweep(entries, _ORDER)
    for entry in sweep:
        if await undo(entry):
            yield entry
        else:
            sweep.stays(entry)


async def _swept(job: Job, entry: LedgerEntry) -> bool:
    for pause in (*SWEEP_PAUSES_S, None):
        try:
            await SWEEPERS[entry.kind](job, entry.name)
        except PersistFailed:
            raise
        except Exception as error:  # the other entries are swept all the same
            log.warning("cannot be swept", job=str(job.id), kind=entry.kind, name=entry.name, cause=str(error))
            if isinstance(error, AuthFailed):  # trying the same password again would only lock the account
                return False
            if isinstance(error, SourceUnreachable) and error.waited_s and job.stop.is_set():
                job.stop.left_running = True
                return False
            if pause is not None:
                await Stop().sleep(pause)
        else:
            return True
    return False
