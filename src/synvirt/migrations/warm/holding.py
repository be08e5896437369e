"""A job that waits for its next delta, or for its operator to ask for the cut-over. It has no turn meanwhile."""

import time

from synvirt.migrations.cloning import clone_asked
from synvirt.migrations.job import Job
from synvirt.migrations.planning.forecast import HOLD_LEAST_S, HOLD_MOST_S, hold_interval_s
from synvirt.migrations.planning.schedule import has_schedule, next_sync
from synvirt.migrations.warm.setbacks import is_distrusted
from synvirt.model.values import now

# Of a job that is held, before its first delta says how fast its guest changes.
HOLD_UNKNOWN_S = 600.0
# A job that holds is woken when it is asked to cut over. This is for what is missed.
HOLD_LOOK_S = 600.0


async def asked_while_waiting(job: Job) -> bool:
    """Wait until the next delta is due; true as soon as the operator of a job that is held asks for the cut-over. Where each
    delta reads whole disks, none is due until then."""
    began, held = time.monotonic(), job.migration.plan.warm.cutover == "manual"
    distrusted = held and await is_distrusted(job)
    asked = await _is_asked(job)
    while not asked and (left := float("inf") if distrusted else _left_s(job, began)) > 0:
        job.leave_turn()
        await job.stop.sleep_or_wake(min(left, HOLD_LOOK_S))
        await clone_asked(job)
        asked = await _is_asked(job)
    await job.take_turn()
    return asked


async def _is_asked(job: Job) -> bool:
    """Did the operator of a job that is held ask for the cut-over?"""
    held = job.migration.plan.warm.cutover == "manual"
    return held and await job.in_thread(job.rooms.store.cutover_requested, job.id)


def _left_s(job: Job, began: float) -> float:
    """Until the next delta is due. By a schedule: of the wall's clock, which may be set, counted from the moment of the source
    that was copied last; so a service that was down makes up for what it missed."""
    plan, last = job.migration.plan, job.migration.passes[-1]
    if has_schedule(plan):
        due = next_sync(plan, last.snapshot_at or last.finished_at or now())
        return float("inf") if due is None else (due - now()).total_seconds()
    return began + pause_between_s(job) - time.monotonic()


def pause_between_s(job: Job) -> float:
    """From one delta to the next."""
    plan = job.migration.plan
    if has_schedule(plan):
        first = next_sync(plan, now())
        second = None if first is None else next_sync(plan, first)
        return float("inf") if first is None or second is None else (second - first).total_seconds()
    return plan.warm.interval_s or (held_pause_s(job) if plan.warm.cutover == "manual" else 0)


def held_pause_s(job: Job) -> float:
    """Between the deltas of a job that holds, by its forecast."""
    found, warm = job.migration.forecast, job.migration.plan.warm
    if found is None:
        return HOLD_UNKNOWN_S
    return hold_interval_s(found.change_rate_bps, warm.delta_threshold_bytes, least_s=HOLD_LEAST_S, most_s=HOLD_MOST_S)
