"""A cut-over that takes longer than its budget is rolled back, where the plan says so; one that its window closes on, always.
asyncio.

    guest shut down ──── outage_budget_s ────▶ no sign of life here yet ─▶ OutageTooLong: the job fails, and is swept:
    cut-over began ── the window closes ────▶  the guest here is ended, the source is powered on, the copy is kept

A roll-back loses what the guest wrote here since its start. So there is no roll-back once it has been seen to run here.
"""

import asyncio
import contextlib
from collections.abc import Awaitable, Callable

import structlog

from synvirt.errors import Cancelled, OutageTooLong, PersistFailed
from synvirt.migrations.job import Job
from synvirt.migrations.source_vm import off_for_s
from synvirt.migrations.states import Facts
from synvirt.migrations.warm.window import closes_at
from synvirt.model.kinds import State
from synvirt.model.plan import MigrationPlan
from synvirt.model.values import now

log = structlog.get_logger(__name__)

# The pause before a store that is away is asked again.
AGAIN_S = 1.0
# How often a window is asked for: it may be changed meanwhile, and a budget cannot.
LOOK_S = 30.0
WATCHED = frozenset({State.CUTTING_OVER, State.V2V_PROCESSING, State.STARTING})


async def within_budget(job: Job, step: Callable[[Job], Awaitable[Facts]]) -> Facts:
    """The step's result. OutageTooLong, where the outage was longer than the plan, or its window, allows."""
    plan, state = job.migration.plan, job.migration.state
    if (_budget_s(plan) is None and plan.warm.window_id is None) or state not in WATCHED:
        return await step(job)
    watch = asyncio.create_task(_expire(job))
    try:
        return await step(job)
    except Cancelled:
        if not watch.done() or not job.stop.renew():
            raise
    finally:
        watch.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await watch
        job.stop.renew()
    job.migration = await job.in_thread(job.rooms.store.get, job.id)
    if job.migration.boot_sign is not None:  # the guest booted at the same moment
        return await step(job)
    if _budget_s(plan) is None or ((closes := await closes_at(job)) is not None and closes <= now()):
        raise OutageTooLong(
            f"window {plan.warm.window_id} closed before the cut-over of {job.manifest.name} was done, in {state}",
            hint="the source is powered on again, and the copy is kept; try it again, within a longer window",
        )
    raise OutageTooLong(
        f"{job.manifest.name} has been off for more than the {plan.outage_budget_s:.0f} s that its plan allows, in {state}",
        hint="the source is powered on again, and the copy is kept; submit it again with a longer outage_budget_s",
    )


def _budget_s(plan: MigrationPlan) -> float | None:
    """None: the cut-over goes on, however long it takes."""
    return plan.outage_budget_s if plan.on_overrun == "roll_back" else None


async def _expire(job: Job) -> None:
    """Stops the step when the budget is over, or the window closes. A store that is away for a moment ends no watch."""
    has_window = job.migration.plan.warm.window_id is not None
    while True:
        try:
            if (left_s := await _left_s(job)) > 0:
                await asyncio.sleep(min(left_s, LOOK_S) if has_window else left_s)
                continue
            found = await job.in_thread(job.rooms.store.get, job.id)
        except PersistFailed as error:
            log.warning("the outage is not watched now", job=str(job.id), cause=error.detail)
            await asyncio.sleep(AGAIN_S)
        else:
            if found.boot_sign is None:
                job.stop.expire()
            return


async def _left_s(job: Job) -> float:
    """Seconds left of the budget and of the window; all of the budget, while the guest is not being shut down yet."""
    left_s, budget_s, closes = float("inf"), _budget_s(job.migration.plan), await closes_at(job)
    if budget_s is not None:
        since = (await job.memory()).down_since
        left_s = budget_s if since is None else budget_s - off_for_s(job, since)
    return left_s if closes is None else min(left_s, (closes - now()).total_seconds())
