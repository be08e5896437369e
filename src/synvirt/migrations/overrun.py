"""A cut-over that takes longer than its budget is rolled back, where the plan says so. asyncio.

    guest shut down ──── outage_budget_s ────▶ no sign of life here yet ─▶ OutageTooLong: the job fails, and is swept:
                                               the guest here is ended, the source is powered on, the copy is kept

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
from synvirt.model.kinds import State

log = structlog.get_logger(__name__)

# The pause before a store that is away is asked again.
AGAIN_S = 1.0
WATCHED = frozenset({State.CUTTING_OVER, State.V2V_PROCESSING, State.STARTING})


async def within_budget(job: Job, step: Callable[[Job], Awaitable[Facts]]) -> Facts:
    """The step's result. OutageTooLong, where the outage was longer than the plan allows."""
    plan, state = job.migration.plan, job.migration.state
    if plan.on_overrun != "roll_back" or plan.outage_budget_s is None or state not in WATCHED:
        return await step(job)
    watch = asyncio.create_task(_expire(job, plan.outage_budget_s))
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
    raise OutageTooLong(
        f"{job.manifest.name} has been off for more than the {plan.outage_budget_s:.0f} s that its plan allows, in {state}",
        hint="the source is powered on again, and the copy is kept; submit it again with a longer outage_budget_s",
    )


async def _expire(job: Job, budget_s: float) -> None:
    """Stops the step when the budget is over. A store that is away for a moment does not end the watch."""
    while True:
        try:
            if (left_s := await _left_s(job, budget_s)) > 0:
                await asyncio.sleep(left_s)
                continue
            found = await job.in_thread(job.rooms.store.get, job.id)
        except PersistFailed as error:
            log.warning("the outage is not watched now", job=str(job.id), cause=error.detail)
            await asyncio.sleep(AGAIN_S)
        else:
            if found.boot_sign is None:
                job.stop.expire()
            return


async def _left_s(job: Job, budget_s: float) -> float:
    """Seconds left of the budget; all of it, while the guest is not being shut down yet."""
    since = (await job.memory()).down_since
    return budget_s if since is None else budget_s - off_for_s(job, since)
