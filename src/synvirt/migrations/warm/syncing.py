"""The passes of a Live job, from the first to the last. Each copies a snapshot; the last one, of a source that is off. asyncio.

copy_full ─▶ sync, sync, … ─▶ cut_over
    └──────────┴───────────────┴─▶ a pass (`one_pass`)         sync asks `deciding` what is next, and `holding` when
"""

from collections.abc import Awaitable, Callable
from contextlib import suppress

from synvirt.errors import Conflict, DeltaTooLarge, OutageTooLong
from synvirt.migrations.cloning import call_off, release, settle
from synvirt.migrations.job import Job
from synvirt.migrations.patience import patiently
from synvirt.migrations.planning.forecast import why_not
from synvirt.migrations.proof import moved
from synvirt.migrations.source_vm import SourceAwake, ran_since, shut_down, take_up_power
from synvirt.migrations.warm.deciding import converged, fits_budget, held_ups, is_fresh, is_to_be_verified
from synvirt.migrations.warm.holding import asked_while_waiting
from synvirt.migrations.warm.one_pass import copy_pass, let_go
from synvirt.migrations.warm.setbacks import begin_again, is_distrusted
from synvirt.migrations.warm.snapshots import track_changes
from synvirt.model.job import Pass
from synvirt.sizes import sized

# After this many shutdowns the job gives up on a guest that is started again each time.
SHUT_DOWNS_MAX = 3


async def copy_full(job: Job) -> None:
    """The first pass, of a running guest, or of one that is shut down for it. On the volumes of a failed job it compares whole
    disks: the guest has run at its source since, and may have been converted or have run here."""
    if job.migration.retry_of is not None and not job.migration.passes:
        await job.note_of(1, whole=True, retakes=0)
    if not job.migration.passes:
        await take_up_power(job)
    if job.is_warm and not job.migration.passes:
        await track_changes(job)
    if job.is_warm:
        await copy_pass(job, 1, "full")
    elif (allowed := _allowed(job)) is not None:
        raise OutageTooLong(
            f"{job.manifest.name} cannot be copied warm: it would be off for its whole copy, and {allowed}",
            hint="see why in the job's note; submit it again without outage_budget_s and warm.window_id, or cold",
        )
    else:
        await _copy_while_off(job, _cold_number)


def _allowed(job: Job) -> str | None:
    """How long the guest may be off, in words. None: as long as it takes."""
    plan = job.migration.plan
    if plan.outage_budget_s is not None:
        return f"{plan.outage_budget_s:.0f} s are allowed"
    return None if plan.warm.window_id is None else f"it may be off within window {plan.warm.window_id} alone"


async def sync(job: Job) -> bool:
    """Copies one delta. Whether the job can cut over now: not while the outage would be too long. DeltaTooLarge, if the guest
    changes too fast."""
    return await _synced(job) and await fits_budget(job)


async def _synced(job: Job) -> bool:
    warm, last = job.migration.plan.warm, job.migration.passes[-1]
    if last.finished_at is None:  # a crash left it unfinished: it comes first, as later deltas build on it
        return await converged(job, await copy_pass(job, last.number, "delta"))
    if (await job.memory_of(last.number)).released_at is None:
        await let_go(job, last.number)  # a crash left it: its snapshot would grow until the next delta, perhaps for days
    deltas = last.number - 1
    # A crash may have come between a small enough delta and the cut-over. One more delta then says whether it still is.
    too_many = deltas - held_ups(job) >= warm.max_passes
    if warm.cutover == "auto" and too_many and not await converged(job, last):
        raise DeltaTooLarge(
            f"after {deltas} delta passes the guest still changes over {sized(warm.delta_threshold_bytes)} a pass: "
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
    # A comparison takes as long as a full copy: the next delta has what changed meanwhile.
    if delta.verify or not await converged(job, delta):
        return False
    # An operator who asks for the cut-over does not wait for a comparison: a held job has had one every day.
    return warm.cutover == "manual" or not await is_to_be_verified(job, delta)


async def cut_over(job: Job) -> None:
    """Shuts the source down, and copies its last changes."""
    await call_off(job)
    last = job.migration.passes[-1]
    if last.kind != "final":
        if last.finished_at is None:
            await copy_pass(job, last.number, last.kind)
        elif (await job.memory()).down_since is None and (await job.memory_of(last.number)).released_at is None:
            # The source was away after that pass. Hyper-V knows what changed since a snapshot only once it is released.
            await let_go(job, last.number)
    await _copy_while_off(job, _final_number)


async def _copy_while_off(job: Job, chosen: Callable[[Job], Awaitable[int]]) -> None:
    """Shuts the source down, and copies the pass whose number `chosen` gives. If the source is powered on again meanwhile, it
    has changed since its snapshot: it is shut down again, and another snapshot is copied."""
    await moved.ask_source(job)
    # The guest is shut down only when there is a slot to read it. A cut-over gets one at once.
    async with job.slots(urgent=job.is_warm):
        for _ in range(SHUT_DOWNS_MAX):
            await shut_down(job)
            if job.is_warm:
                await settle(job)
            number = await chosen(job)
            if await ran_since(job, number):
                await patiently(job, lambda _: begin_again(job, number, "final"))  # noqa: B023
            with suppress(SourceAwake):
                await copy_pass(job, number, "final" if job.is_warm else "full")
                if not await ran_since(job, number):
                    await release(job)
                    return
    raise Conflict(
        f"the source {job.manifest.name} is powered on again and again while its last changes are copied",
        hint="find what starts it: somebody, a schedule, high availability",
    )


async def _final_number(job: Job) -> int:
    """The number of the final pass: the one that there is if the source has not run since, else the next."""
    last = job.migration.passes[-1]
    if last.kind != "final":
        return last.number + 1
    if last.finished_at is None or not await ran_since(job, last.number):
        return last.number
    await let_go(job, last.number)
    return last.number + 1


async def _cold_number(job: Job) -> int:
    """A cold copy has one pass, number 1. Conflict, where its guest has run since it was copied."""
    if job.migration.passes and job.migration.passes[-1].finished_at is not None and await ran_since(job, 1):
        raise Conflict(
            f"the source {job.manifest.name} was powered on again after its disks had been copied",
            hint="the copy lacks what it wrote since: submit it again, and make sure that it is not started meanwhile",
        )
    return 1
