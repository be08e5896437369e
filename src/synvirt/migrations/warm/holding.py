"""A job that waits for its next delta, or for its operator or its window to ask for the cut-over. It gives up its turn
meanwhile."""

import time
from datetime import datetime

from synvirt.migrations.cloning import clone_asked
from synvirt.migrations.job import Job
from synvirt.migrations.planning.forecast import HOLD_LEAST_S, HOLD_MOST_S, hold_interval_s
from synvirt.migrations.planning.schedule import has_schedule, next_sync
from synvirt.migrations.warm.setbacks import is_distrusted
from synvirt.migrations.warm.window import is_open, opens_in_s
from synvirt.model.values import now

# The pause of a held job before its first delta has shown how fast its guest changes.
HOLD_UNKNOWN_S = 600.0
# A held job is woken when it is asked to cut over. It also looks by itself this often, in case it was not woken.
HOLD_LOOK_S = 600.0


async def asked_while_waiting(job: Job) -> bool:
    """Waits until the next delta is due. True, as soon as the cut-over of a held job is asked for. Where each delta
    would read whole disks, none is due before that."""
    began, held = time.monotonic(), job.migration.plan.warm.cutover == "manual"
    distrusted = held and await is_distrusted(job)
    asked, last = await is_asked(job), job.migration.passes[-1]
    since = last.snapshot_at or last.finished_at or now()
    while not asked:
        # If the clock was set back, the last snapshot seems to lie ahead, and would put off the next delta by as much.
        since = min(since, now())
        left = float("inf") if distrusted else _left_s(job, began, since)
        if left <= 0:
            break
        job.leave_turn()
        await job.stop.sleep_or_wake(min(left, HOLD_LOOK_S, await opens_in_s(job)))
        await clone_asked(job)
        asked = await is_asked(job)
    await job.take_turn()
    return asked


async def is_asked(job: Job) -> bool:
    """Whether a held job is to cut over: its operator has asked for it, or its window is open."""
    warm = job.migration.plan.warm
    if warm.window_id is not None:
        return await is_open(job)
    return warm.cutover == "manual" and await job.in_thread(job.rooms.store.cutover_requested, job.id)


def _left_s(job: Job, began: float, since: datetime) -> float:
    """Seconds until the next delta is due. A schedule goes by the wall clock, which may be set, and counts from the last
    snapshot, `since`: a service that was down makes up for what it missed."""
    plan = job.migration.plan
    if has_schedule(plan):
        due = next_sync(plan, since)
        return float("inf") if due is None else (due - now()).total_seconds()
    return began + pause_between_s(job) - time.monotonic()


def pause_between_s(job: Job) -> float:
    """Seconds from one delta to the next."""
    plan = job.migration.plan
    if has_schedule(plan):
        first = next_sync(plan, now())
        second = None if first is None else next_sync(plan, first)
        return float("inf") if first is None or second is None else (second - first).total_seconds()
    return plan.warm.interval_s or (held_pause_s(job) if plan.warm.cutover == "manual" else 0)


def held_pause_s(job: Job) -> float:
    """Seconds between the deltas of a held job, by its forecast."""
    found, warm = job.migration.forecast, job.migration.plan.warm
    if found is None:
        return HOLD_UNKNOWN_S
    return hold_interval_s(found.change_rate_bps, warm.delta_threshold_bytes, least_s=HOLD_LEAST_S, most_s=HOLD_MOST_S)
