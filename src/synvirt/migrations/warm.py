"""The passes of a Live job: its source frozen for each, asked what changed, and shut down before the last. asyncio.

    snapshot n ─▶ noted ─▶ read (since snapshot n - 1) ─▶ n - 1 goes ─▶ n is released: its change ids alone stay
                              │ gone? taken anew            not before n is copied: until then n - 1 is what n builds on
                              │ change tracking lost, or found to lie? whole disks are compared

Change tracking is not trusted: each pass also looks at some of what it leaves out (`disks.sampling`).
"""

import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from typing import Literal

import structlog

from synvirt.disks.checking.sampling import ChangesMissed
from synvirt.disks.specs import comes_once, read_whole, told_empty
from synvirt.errors import (
    Cancelled,
    CbtReset,
    CbtUnsupported,
    Conflict,
    DeltaTooLarge,
    OutageTooLong,
    PersistFailed,
    SnapshotFailed,
    SynvirtError,
)
from synvirt.live import LiveAdapter, SnapshotRef, SwitchesTracking
from synvirt.migrations import moved, source_vm
from synvirt.migrations.cloning import call_off, clone_asked
from synvirt.migrations.job import Job, converts, copied_disks
from synvirt.migrations.passes import PassDisk, run_opened_pass
from synvirt.migrations.patience import Patience, SnapshotNotMade, patiently
from synvirt.migrations.planning.forecast import HOLD_LEAST_S, HOLD_MOST_S, forecast, hold_interval_s, why_not
from synvirt.migrations.planning.outage import outage_forecast, too_long
from synvirt.migrations.planning.past import completed
from synvirt.migrations.planning.schedule import has_schedule, next_sync
from synvirt.migrations.source_vm import SourceAwake, at_source, ran_since, shut_down, vm_id
from synvirt.model.job import Pass
from synvirt.model.kinds import Mode
from synvirt.model.machine import Disk, VmManifest
from synvirt.model.values import now
from synvirt.store import Watermark

Kind = Literal["full", "delta", "final"]

log = structlog.get_logger(__name__)

# Change tracking may be lost once by bad luck (a host that crashed): the whole disk is compared again. A source that loses it
# once more before a delta went well will never converge.
CBT_RESETS_MAX = 1
# A snapshot is gone when its host was restarted in the middle of a pass. One that never lasts for a pass is no use.
RETAKES_MAX = 3
# Of a job that is held, before its first delta says how fast its guest changes.
HOLD_UNKNOWN_S = 600.0
# A job that holds is woken when it is asked to cut over. This is for what is missed.
HOLD_LOOK_S = 600.0
# The operator asks for the cut-over: what has changed since an older snapshot is copied once more while the guest still runs.
FRESH_S = 30.0
# A delta that took so much longer than its copying was held up, by a source that was away or a service that was down. What
# changed meanwhile is for the next: it says nothing of how the guest converges.
HELD_UP_S, HELD_UPS_MAX = 600.0, 20
# A job that is held has thousands of them, and its document is written at each watermark. The first is kept, too.
PASSES_KEPT = 20
# A job that holds compares all that is called unchanged once a day: it reads the whole source.
VERIFIED_FOR_S = 86400.0
# One that does it by itself, once a week; and only in a pause between two deltas of which it leaves a half.
AUTO_VERIFIED_FOR_S, AUTO_SHARE, AUTO_PAUSE_LEAST_S = 7 * VERIFIED_FOR_S, 0.5, 60.0
# One that cuts over as soon as it can has no pause. Where its outage has a budget, and fits, a comparison that takes no longer
# comes first; it and the deltas after it are as many passes more.
AT_ONCE_MOST_S, AT_ONCE_PASSES = 3600.0, 3
# A guest that restarts after each shutdown will always do so.
SHUT_DOWNS_MAX = 3


def is_warm(job: Job) -> bool:
    return job.migration.mode_effective is Mode.WARM


# ── the passes of a job ──────────────────────────────────────────────────────────────────────────────────────────────


async def copy_full(job: Job) -> None:
    """The first pass; of a guest that runs on, or was shut down for it. On the volumes of a failed job whole disks are
    compared: its guest may have run here, or have been converted, and it has run there."""
    if job.migration.retry_of is not None and not job.migration.passes:
        await job.note_of(1, whole=True, retakes=0)
    if is_warm(job) and not job.migration.passes:
        await _track_changes(job)
    if is_warm(job):
        await _copy(job, 1, "full")
    elif (budget_s := job.migration.plan.outage_budget_s) is not None:
        raise OutageTooLong(
            f"{job.manifest.name} cannot be copied warm: it would be away for its whole copy, and {budget_s:.0f} s are allowed",
            hint="see why in the job's note; submit anew without outage_budget_s, or cold",
        )
    else:
        await _copy_while_off(job, _cold_number)


async def sync(job: Job) -> bool:
    """One delta; is it time to cut over? Not, while the guest would be away for too long. DeltaTooLarge, where it never is."""
    return await _synced(job) and await _fits(job)


async def _fits(job: Job) -> bool:
    """Is the outage's p95 within the plan's budget? Where not, the job says which part is too long, and holds for a while."""
    await _forecast_outage(job)
    told = None if job.migration.outage is None else too_long(job.migration.outage)
    said = job.migration.last_error
    if told is None:
        if said is not None and said.code == OutageTooLong.code:
            await job.change(last_error=None)
        return True
    if said is None or said.message != told:
        await job.change(last_error=job.problem(OutageTooLong(told, hint="the job holds until it fits"), fatal=False))
    job.leave_turn()
    await job.stop.sleep_or_wake(job.migration.plan.warm.interval_s or _hold_interval_s(job))
    await job.take_turn()
    return False


async def _forecast_outage(job: Job) -> None:
    """From what the jobs took that completed here, and from this one's passes and rehearsals."""
    found = outage_forecast(
        job.migration,
        await job.in_thread(completed, job.rooms.store, job.migration.plan),
        converts=converts(job, job.manifest),
        starts=job.migration.plan.target.start,
        rehearsals=await job.in_thread(job.rooms.store.rehearsals.of, job.id),
        whole=await _is_distrusted(job),
        at=now(),
    )
    await job.change(outage=found)


async def _synced(job: Job) -> bool:
    warm, last = job.migration.plan.warm, job.migration.passes[-1]
    if last.finished_at is None:  # a crash left it: later deltas build on it, so it comes first
        return await _converged(job, await _copy(job, last.number, "delta"))
    if (await job.memory_of(last.number)).released_at is None:
        await _released(job, last.number)  # a crash left it: a snapshot that is held grows until the next delta, for days maybe
    deltas = last.number - 1
    held_up = min(sum(_was_held_up(one) for one in job.migration.passes[1:]), HELD_UPS_MAX)
    # A crash may have come between a delta that was small enough and the cut-over: then one more says whether it still is.
    too_many = deltas - held_up >= warm.max_passes
    if warm.cutover == "auto" and too_many and not await _converged(job, last):
        raise DeltaTooLarge(
            f"after {deltas} delta passes the guest still changes over {warm.delta_threshold_bytes} bytes a pass: "
            f"{why_not(job.migration.passes)}",
            hint="try when the guest is quieter, raise warm.delta_threshold_bytes or warm.max_passes, or migrate cold",
        )
    if deltas and await _asked_while_waiting(job):
        if _age_s(last) <= FRESH_S or await _is_distrusted(job):
            return True
        await job.note(last_delta=last.number + 1)
    elif await _is_to_be_verified(job, last):
        await job.change(passes=(*job.migration.passes, Pass(number=last.number + 1, kind="delta", verify=True)))
    delta = await _copy(job, last.number + 1, "delta")
    # To compare takes as long as a full copy: what has changed meanwhile is for the next.
    if delta.verify or not await _converged(job, delta):
        return False
    # Who asks for the cut-over does not wait for a comparison: one that keeps up has had its own.
    return warm.cutover == "manual" or not await _is_to_be_verified(job, delta)


async def _is_to_be_verified(job: Job, last: Pass) -> bool:
    """Does the next pass compare all that the source calls unchanged? Once before the cut-over, as late as possible; where an
    operator asks for the cut-over, each day, since its time is not known. By itself, where there is time for it."""
    warm = job.migration.plan.warm
    if warm.verify == "sample" or await _is_distrusted(job):
        return False
    by_itself = warm.verify == "auto"
    if by_itself and (last.number == 1 or not (_has_time_to_compare(job) or _budget_allows_to_compare(job))):
        return False
    verified = [one for one in job.migration.passes if one.verify and one.finished_at is not None]
    if warm.cutover == "manual":
        return not verified or _age_s(verified[-1]) >= (AUTO_VERIFIED_FOR_S if by_itself else VERIFIED_FOR_S)
    return not verified and last.number > 1 and await _converged(job, last)


def _has_time_to_compare(job: Job) -> bool:
    """It reads about what the first copy read: neither the next delta nor a cut-over waits for it for long."""
    pause_s = _pause_s(job)
    return pause_s >= AUTO_PAUSE_LEAST_S and _comparing_s(job) <= pause_s * AUTO_SHARE


def _budget_allows_to_compare(job: Job) -> bool:
    """The outage fits, and would after it too: what changes meanwhile is copied while the guest runs, faster than it comes."""
    found, outage, warm = job.migration.forecast, job.migration.outage, job.migration.plan.warm
    if warm.cutover != "auto" or found is None or outage is None or outage.budget_s is None:
        return False
    passes_left = warm.max_passes - (job.migration.passes[-1].number - 1)
    fits = found.converges and too_long(outage) is None
    return fits and passes_left >= AT_ONCE_PASSES and _comparing_s(job) <= AT_ONCE_MOST_S


def _comparing_s(job: Job) -> float:
    """What it took the last time, else what the first copy did."""
    measured = [one for one in job.migration.passes if one.finished_at is not None and (one.verify or one.number == 1)]
    return measured[-1].seconds if measured else float("inf")


def _pause_s(job: Job) -> float:
    """From one delta to the next."""
    plan = job.migration.plan
    if has_schedule(plan):
        first = next_sync(plan, now())
        second = None if first is None else next_sync(plan, first)
        return float("inf") if first is None or second is None else (second - first).total_seconds()
    return plan.warm.interval_s or (_hold_interval_s(job) if plan.warm.cutover == "manual" else 0)


async def cut_over(job: Job) -> None:
    """The source off, and the last of its changes copied."""
    await call_off(job)
    last = job.migration.passes[-1]
    if last.finished_at is None and last.kind != "final":
        await _copy(job, last.number, last.kind)
    await _copy_while_off(job, _final_number)


async def _copy_while_off(job: Job, chosen: Callable[[Job], Awaitable[int]]) -> None:
    """The source shut down, and the pass `chosen` of it copied. A source that somebody powers on again has changed since its
    snapshot: it is shut down, and what that snapshot holds is not the last any more."""
    await moved.ask_source(job)
    # Nobody goes down before there is a slot to read it; a cut-over has one at once.
    async with job.slots(urgent=is_warm(job)):
        for _ in range(SHUT_DOWNS_MAX):
            await shut_down(job)
            number = await chosen(job)
            if await ran_since(job, number):
                await patiently(job, lambda _: _take_anew(job, number, "final"))  # noqa: B023
            with suppress(SourceAwake):
                await _copy(job, number, "final" if is_warm(job) else "full")
                if not await ran_since(job, number):
                    return
    raise Conflict(
        f"the source {job.manifest.name} is powered on again and again while its last changes are copied",
        hint="find what starts it: somebody, a schedule, high availability",
    )


async def _final_number(job: Job) -> int:
    """The last pass, while nothing changes after it; else one more."""
    last = job.migration.passes[-1]
    if last.kind != "final":
        return last.number + 1
    if last.finished_at is None or not await ran_since(job, last.number):
        return last.number
    await _released(job, last.number)
    return last.number + 1


async def _cold_number(job: Job) -> int:
    """One pass is all. Conflict, where its guest ran after it: what was copied is of a guest that is no more."""
    if job.migration.passes and job.migration.passes[-1].finished_at is not None and await ran_since(job, 1):
        raise Conflict(
            f"the source {job.manifest.name} was powered on again after its disks had been copied",
            hint="the copy lacks what it wrote since: submit anew, and let nobody start it meanwhile",
        )
    return 1


async def _track_changes(job: Job) -> None:
    """The automatic downgrade, where it shows only by trying that the source cannot track this VM's changes."""
    if all(disk.cbt_enabled for disk, _ in copied_disks(job)):
        return
    # What a platform makes for it goes with the first pass' snapshot, whatever happens in between.
    await job.record("snapshot", _snapshot_name(job, 1))
    try:
        await at_source(job, lambda adapter: _enable_cbt(job, adapter))
    except CbtUnsupported as error:
        told = CbtUnsupported(
            f"{job.manifest.name} cannot be copied warm, so the job runs cold: {error.detail}",
            hint="the guest is shut down for the whole copy; cancel if that does not suit",
        )
        await job.change(mode_effective=Mode.COLD, last_error=job.problem(told, fatal=False))


async def _enable_cbt(job: Job, adapter: LiveAdapter) -> None:
    """In the ledger first, where the platform has it switched off: it is to be found as it was."""
    if isinstance(adapter, SwitchesTracking) and not await adapter.is_tracked(vm_id(job)):
        await job.record("tracking", vm_id(job))
    await adapter.enable_cbt(vm_id(job), _copied_keys(job))


def _copied_keys(job: Job) -> list[str]:
    return [disk.key for disk, _ in copied_disks(job)]


async def _converged(job: Job, delta: Pass) -> bool:
    warm = job.migration.plan.warm
    # Where change tracking lies every pass reads whole disks, the last one too: more of them bring nothing.
    distrusted = await _is_distrusted(job)
    if _was_held_up(delta) and not distrusted:
        return False
    if warm.cutover == "manual":
        asked = await job.in_thread(job.rooms.store.cutover_requested, job.id)
        # One more at most: it may itself take longer than what counts as fresh.
        last = (await job.memory()).last_delta is not None
        return asked and (distrusted or last or _age_s(delta) <= FRESH_S)
    return distrusted or delta.bytes <= warm.delta_threshold_bytes


async def _is_distrusted(job: Job) -> bool:
    return (await job.memory()).distrusted is not None


async def _asked_while_waiting(job: Job) -> bool:
    """Wait until the next delta is due; true as soon as the operator of a job that is held asks for the cut-over. Where each
    delta reads whole disks, none is due until then."""
    began, held = time.monotonic(), job.migration.plan.warm.cutover == "manual"
    distrusted = held and await _is_distrusted(job)
    asked = await _is_asked(job)
    while not asked and (left := float("inf") if distrusted else _left_s(job, began)) > 0:
        job.leave_turn()
        await job.stop.sleep_or_wake(min(left, HOLD_LOOK_S))
        await clone_asked(job)
        asked = await _is_asked(job)
    await job.take_turn()
    return asked


def _left_s(job: Job, began: float) -> float:
    """Until the next delta is due. By a schedule: of the wall's clock, which may be set, counted from the moment of the source
    that was copied last; so a service that was down makes up for what it missed."""
    plan, last = job.migration.plan, job.migration.passes[-1]
    if has_schedule(plan):
        due = next_sync(plan, last.snapshot_at or last.finished_at or now())
        return float("inf") if due is None else (due - now()).total_seconds()
    return began + _pause_s(job) - time.monotonic()


def _hold_interval_s(job: Job) -> float:
    found, warm = job.migration.forecast, job.migration.plan.warm
    if found is None:
        return HOLD_UNKNOWN_S
    return hold_interval_s(found.change_rate_bps, warm.delta_threshold_bytes, least_s=HOLD_LEAST_S, most_s=HOLD_MOST_S)


async def _is_asked(job: Job) -> bool:
    """Did the operator of a job that is held ask for the cut-over?"""
    held = job.migration.plan.warm.cutover == "manual"
    return held and await job.in_thread(job.rooms.store.cutover_requested, job.id)


def _was_held_up(one: Pass) -> bool:
    if one.snapshot_at is None or one.finished_at is None:
        return False
    return (one.finished_at - one.snapshot_at).total_seconds() - one.seconds > HELD_UP_S


def _age_s(one: Pass) -> float:
    return float("inf") if one.snapshot_at is None else (now() - one.snapshot_at).total_seconds()


# ── one pass ─────────────────────────────────────────────────────────────────────────────────────────────────────────


async def _copy(job: Job, number: int, kind: Kind) -> Pass:
    """Pass `number`, whatever happens to snapshots and change tracking meanwhile; then remove what is not needed any more."""
    done = next((one for one in job.migration.passes if one.number == number and one.finished_at is not None), None)

    async def tried(patience: Patience) -> Pass | None:
        if kind == "final" or not is_warm(job):  # in the slot of `_copy_while_off`
            return await _tried(job, number, kind, patience)
        # A snapshot that is held grows: it is read at once.
        async with job.slots(urgent=(await job.memory_of(number)).snapshot is not None):
            return await _tried(job, number, kind, patience)

    while done is None:
        # The job waits without a slot: other VMs are read meanwhile.
        done = await patiently(job, tried)
    if kind == "final" or not is_warm(job):
        # The guest is down: what is left at its source is removed once it is up again. Where a platform locks the VM while its
        # disks are read, it cannot be started meanwhile.
        return done
    if not await _is_whole(job, number):
        await job.note(cbt_resets=0)
    await _released(job, number)
    await job.change(forecast=forecast(job.migration.passes, at=now()))
    await _forecast_outage(job)
    await clone_asked(job)
    return done


async def _released(job: Job, number: int) -> None:
    """Of the pass that is copied only its change ids stay at the source, and nothing of those before it. What cannot go now
    goes before the next pass, or at the end: what is copied is copied."""
    await _take_reset_back(job)
    name = _snapshot_name(job, number)
    try:
        for entry in await job.in_thread(job.rooms.store.ledger, job.id):
            if entry.kind == "snapshot" and entry.name != name:
                await at_source(job, lambda adapter: adapter.cleanup(vm_id(job), entry.name), source_vm.LATER_S)  # noqa: B023
                await job.strike("snapshot", entry.name)
        await at_source(job, lambda adapter: adapter.release(vm_id(job), name), source_vm.LATER_S)
    except (PersistFailed, Cancelled):
        raise
    except SynvirtError as error:
        log.warning("a snapshot is not let go of now", job=str(job.id), number=number, cause=error.detail)
    else:
        await job.note_of(number, released_at=now())
        # A job that is held for weeks has thousands of passes, and the next one builds on this one alone.
        await job.in_thread(job.rooms.store.fold_passes, job.id, number)


async def _take_reset_back(job: Job) -> None:
    """A pass over whole disks has made a reset good while the guest ran: `Pass.whole` says it, and it is no trouble of the job
    any more. What made the outage longer stays as the job's note."""
    last, note = job.migration.passes[-1], job.migration.last_error
    made_good = last.whole and last.kind != "final" and not await _is_distrusted(job)
    if made_good and note is not None and (note.code, note.fatal) == (CbtReset.code, False):
        await job.change(last_error=None)


async def _tried(job: Job, number: int, kind: Kind, patience: Patience) -> Pass | None:
    """The pass; None, when it must be tried again from what was noted. Nothing in here waits for a source."""
    snapshot = await _snapshot(job, number, kind)
    whole = await _is_whole(job, number)
    before = (await job.memory_of(number - 1)).snapshot if number > 1 and not whole else None
    retaken = (await job.memory_of(number)).retakes is not None
    verify = any(one.number == number and one.verify for one in job.migration.passes)

    @asynccontextmanager
    async def opened() -> AsyncIterator[Sequence[PassDisk]]:
        async with job.session() as adapter:
            yield await job.stop.or_stop(_opened_disks(job, adapter, snapshot, before, number, whole=whole, verify=verify))

    await _stamp(job, number, kind, whole=whole and number > 1)
    try:
        # Only a first pass meets volumes that still read as zeros.
        return await run_opened_pass(job, number, kind, opened, patience, fresh=number == 1 and not retaken)
    except SnapshotFailed as error:
        await _retake(job, number, kind, error)
    except (ChangesMissed, CbtUnsupported) as error:
        await _distrust(job, number, error)
    except CbtReset as error:
        await _allow_reset(job, number, kind, error)
    return None


async def _opened_disks(
    job: Job,
    adapter: LiveAdapter,
    snapshot: SnapshotRef,
    before: SnapshotRef | None,
    number: int,
    *,
    whole: bool,
    verify: bool,
) -> list[PassDisk]:
    """`whole`: what the source says of changes, and of what was never written, is not believed. `verify`: it is believed, and
    all of it compared."""

    async def opened(disk: Disk, volume: str) -> PassDisk:
        since = None if before is None else before.change_ids.get(disk.key)
        if before is not None and since is None:
            raise CbtReset(f"disk {disk.key} has no change id in snapshot {before.id}")
        reader = await adapter.open_disk(vm_id(job), snapshot, disk, since)
        if whole:
            reader = read_whole(reader)
        doubted = (since is not None and not comes_once(reader)) or told_empty(reader)
        sample = f"{job.id} {number} {disk.key}" if doubted else None
        return PassDisk(
            disk.key,
            reader,
            volume,
            disk.capacity_bytes,
            compare=since is None and (number > 1 or job.migration.retry_of is not None),
            sample=sample,
            verify=since is not None and verify,
        )

    return [await opened(disk, volume) for disk, volume in copied_disks(job)]


async def _stamp(job: Job, number: int, kind: Kind, *, whole: bool) -> None:
    """The pass in the job's document, with the moment that it copies."""
    stamped = {"snapshot_at": (await job.memory_of(number)).snapshot_at, "whole": whole}
    passes = list(job.migration.passes)
    if not passes or passes[-1].number != number:
        passes.append(Pass(number=number, kind=kind))
    passes[-1] = passes[-1].model_copy(update=stamped)
    await job.change(passes=(*passes[:1], *passes[1:][-PASSES_KEPT:]))


# ── what goes wrong with it ──────────────────────────────────────────────────────────────────────────────────────────


async def _is_whole(job: Job, number: int) -> bool:
    """Does this pass read whole disks? Since their change tracking was lost, or once it was found to lie."""
    return (await job.memory_of(number)).whole or await _is_distrusted(job)


async def _from_the_start(job: Job, number: int) -> None:
    """Nothing that the pass copied so far counts: what comes next is another moment of the source, or other extents. Before
    the note that says so, for a crash in between leaves a pass that is run again as it was."""
    store = job.rooms.store
    for key in await job.in_thread(store.watermarks, job.id, number):
        nothing = Watermark(
            disk_key=key, pass_number=number, offset_bytes=0, bytes_total=0, bytes_done=0, bytes_zero=0, finished=False
        )
        await job.in_thread(store.put_watermark, job.id, nothing)


async def _retake(job: Job, number: int, kind: Kind, error: SnapshotFailed) -> None:
    """The snapshot is no more. Another is taken under its name, which holds all that changed since the one before it."""
    retakes = (await job.memory_of(number)).retakes or 0
    if retakes >= RETAKES_MAX:
        raise error
    log.warning("the snapshot is taken anew", job=str(job.id), number=number, cause=error.detail)
    await _take_anew(job, number, kind)
    await job.note_of(number, retakes=retakes + 1)


async def _take_anew(job: Job, number: int, kind: Kind) -> None:
    """The pass begins again with another snapshot of the same name, on volumes that hold some of it already."""
    if (await job.memory_of(number)).retakes is None:
        await job.note_of(number, retakes=0)
    await _from_the_start(job, number)
    await _unmade(job, _snapshot_name(job, number), kind)
    await job.note_of(number, begun_at=None, snapshot=None)


async def _unmade(job: Job, name: str, kind: Kind) -> None:
    """No such snapshot, and changes are tracked as before."""

    async def undo(adapter: LiveAdapter) -> None:
        await adapter.cleanup(vm_id(job), name)
        if is_warm(job) and kind != "final":
            # Where a platform keeps the tracking with its snapshots, it may have gone with the last one.
            await _enable_cbt(job, adapter)

    try:
        await job.with_adapter(undo)
    except (SnapshotFailed, CbtUnsupported) as error:
        raise SnapshotNotMade(error.detail, hint=error.hint) from error


async def _allow_reset(job: Job, number: int, kind: Kind, error: CbtReset) -> None:
    """Note that pass `number` reads whole disks; the error itself, when that happened before.

    Of another snapshot: this one may be older than the reset, and by its change ids the next pass would find the same reset
    once more. Noted after it is gone: a crash in between finds the same reset, not another one."""
    resets = (await job.memory()).cbt_resets
    if resets >= CBT_RESETS_MAX:
        raise error
    await _take_anew(job, number, kind)
    await job.note_of(number, whole=True)
    await job.note(cbt_resets=resets + 1)
    await job.change(last_error=job.problem(error, fatal=False))


async def _distrust(job: Job, number: int, error: ChangesMissed | CbtUnsupported) -> None:
    """Note that this pass and all after it read whole disks, the last one too. The source does not list changes truly, or does
    not list them any more since the disks are read by another way."""
    await _from_the_start(job, number)
    await job.note(distrusted=error.detail)
    told = type(error)(
        f"{error.detail}. From here on whole disks are compared, also while the guest is off for the cut-over",
        hint=error.hint,
    )
    missed = {"distrusted": error.detail} if isinstance(error, ChangesMissed) else {}
    await job.change(last_error=job.problem(told, fatal=False), **missed)


def _snapshot_name(job: Job, number: int) -> str:
    return f"synvirt-{job.id}-{number}"


async def _snapshot(job: Job, number: int, kind: Kind) -> SnapshotRef:
    """The snapshot of this pass, made once; its change ids are noted before anything relies on them, and before the snapshot
    before it goes. Conflict, when the VM has other disks by now than the job began with."""
    of_pass = await job.memory_of(number)
    if of_pass.snapshot is not None:
        return of_pass.snapshot
    name = _snapshot_name(job, number)
    if of_pass.begun_at is not None:
        # Made, maybe, and not noted. The guest may have gone on, or even have been off and on, since then.
        await _unmade(job, name, kind)
    await job.record("snapshot", name)
    await job.note_of(number, begun_at=now())
    downs = (await job.memory()).downs
    keys = _copied_keys(job)

    off = kind == "final" or not is_warm(job)

    async def make(adapter: LiveAdapter) -> tuple[SnapshotRef, VmManifest, str]:
        made = await adapter.snapshot(vm_id(job), name, keys)
        return made, await adapter.inspect(vm_id(job)), await adapter.last_start(vm_id(job)) if off else ""

    at = now()
    try:
        # Once: one that was made, and not answered, is unmade before another is made. The guest may have gone on meanwhile.
        made, manifest, start = await job.with_adapter(make)
    except SnapshotFailed as error:
        raise SnapshotNotMade(error.detail, hint=error.hint) from error
    refuse_other_disks(job, manifest)
    if off and manifest.power_state != "off":
        raise SourceAwake(f"the source {manifest.name} is {manifest.power_state} again, though it was shut down")
    await job.note_of(number, snapshot=made, snapshot_at=at, downs=downs, last_start=start if off else None)
    return made


def refuse_other_disks(job: Job, manifest: VmManifest) -> None:
    """A disk that came, went or was resized since the job began: the copy would lack it, or not be the VM's."""
    skipped = set(job.migration.plan.skip_disks)
    began = {disk.key: disk.capacity_bytes for disk in job.manifest.disks if disk.key not in skipped}
    present = {disk.key: disk.capacity_bytes for disk in manifest.disks if disk.key not in skipped}
    changes = [f"disk {key} of {present[key]} bytes was added" for key in present.keys() - began.keys()]
    changes += [f"disk {key} was removed" for key in began.keys() - present.keys()]
    changes += [
        f"disk {key} was resized from {began[key]} to {present[key]} bytes"
        for key in began.keys() & present.keys()
        if began[key] != present[key]
    ]
    if changes:
        raise Conflict(
            f"{manifest.name} has other disks than when the job began: {'; '.join(sorted(changes))}",
            hint="submit the plan anew; a disk that is not to come along goes into skip_disks",
        )
