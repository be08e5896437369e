"""The passes of a Live job, from the first to the last: its source frozen for each, and shut down before the last. asyncio.

copy_full ─▶ sync, sync, … ─▶ cut_over
    └──────────┴───────────────┴─▶ a pass (`one_pass`)         sync asks `deciding` what is next, and `holding` when
"""

from collections.abc import Awaitable, Callable
from contextlib import suppress

from synvirt.errors import Conflict, DeltaTooLarge, OutageTooLong
from synvirt.migrations import moved
from synvirt.migrations.cloning import call_off
from synvirt.migrations.job import Job
from synvirt.migrations.patience import patiently
from synvirt.migrations.planning.forecast import why_not
from synvirt.migrations.source_vm import SourceAwake, ran_since, shut_down
from synvirt.migrations.warm.deciding import converged, fits_budget, held_ups, is_fresh, is_to_be_verified
from synvirt.migrations.warm.holding import asked_while_waiting
from synvirt.migrations.warm.one_pass import copy_pass, let_go
from synvirt.migrations.warm.setbacks import is_distrusted, take_anew
from synvirt.migrations.warm.snapshots import is_warm, track_changes
from synvirt.model.job import Pass

# A guest that restarts after each shutdown will always do so.
SHUT_DOWNS_MAX = 3


async def copy_full(job: Job) -> None:
    """The first pass; of a guest that runs on, or was shut down for it. On the volumes of a failed job whole disks are
    compared: its guest may have run here, or have been converted, and it has run there."""
    if job.migration.retry_of is not None and not job.migration.passes:
        await job.note_of(1, whole=True, retakes=0)
    if is_warm(job) and not job.migration.passes:
        await track_changes(job)
    if is_warm(job):
        await copy_pass(job, 1, "full")
    elif (budget_s := job.migration.plan.outage_budget_s) is not None:
        raise OutageTooLong(
            f"{job.manifest.name} cannot be copied warm: it would be away for its whole copy, and {budget_s:.0f} s are allowed",
            hint="see why in the job's note; submit it again without outage_budget_s, or cold",
        )
    else:
        await _copy_while_off(job, _cold_number)


async def sync(job: Job) -> bool:
    """One delta; is it time to cut over? Not, while the guest would be away for too long. DeltaTooLarge, where it never is."""
    return await _synced(job) and await fits_budget(job)


async def _synced(job: Job) -> bool:
    warm, last = job.migration.plan.warm, job.migration.passes[-1]
    if last.finished_at is None:  # a crash left it: later deltas build on it, so it comes first
        return await converged(job, await copy_pass(job, last.number, "delta"))
    if (await job.memory_of(last.number)).released_at is None:
        await let_go(job, last.number)  # a crash left it: a snapshot that is held grows until the next delta, for days maybe
    deltas = last.number - 1
    # A crash may have come between a delta that was small enough and the cut-over: then one more says whether it still is.
    too_many = deltas - held_ups(job) >= warm.max_passes
    if warm.cutover == "auto" and too_many and not await converged(job, last):
        raise DeltaTooLarge(
            f"after {deltas} delta passes the guest still changes over {warm.delta_threshold_bytes} bytes a pass: "
            f"{why_not(job.migration.passes)}",
            hint="try when the guest is quieter, raise warm.delta_threshold_bytes or warm.max_passes, or migrate cold",
        )
    if deltas and await asked_while_waiting(job):
        if is_fresh(last) or await is_distrusted(job):
            return True
        await job.note(last_delta=last.number + 1)
    elif await is_to_be_verified(job, last):
        await job.change(passes=(*job.migration.passes, Pass(number=last.number + 1, kind="delta", verify=True)))
    delta = await copy_pass(job, last.number + 1, "delta")
    # To compare takes as long as a full copy: what has changed meanwhile is for the next.
    if delta.verify or not await converged(job, delta):
        return False
    # Who asks for the cut-over does not wait for a comparison: one that keeps up has had its own.
    return warm.cutover == "manual" or not await is_to_be_verified(job, delta)


async def cut_over(job: Job) -> None:
    """The source off, and the last of its changes copied."""
    await call_off(job)
    last = job.migration.passes[-1]
    if last.finished_at is None and last.kind != "final":
        await copy_pass(job, last.number, last.kind)
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
                await patiently(job, lambda _: take_anew(job, number, "final"))  # noqa: B023
            with suppress(SourceAwake):
                await copy_pass(job, number, "final" if is_warm(job) else "full")
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
    await let_go(job, last.number)
    return last.number + 1


async def _cold_number(job: Job) -> int:
    """One pass is all. Conflict, where its guest ran after it: what was copied is of a guest that is no more."""
    if job.migration.passes and job.migration.passes[-1].finished_at is not None and await ran_since(job, 1):
        raise Conflict(
            f"the source {job.manifest.name} was powered on again after its disks had been copied",
            hint="the copy lacks what it wrote since: submit it again, and let nobody start it meanwhile",
        )
    return 1
