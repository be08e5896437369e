"""The window of a job whose plan names one: it lets the held job cut over, in place of its operator."""

from datetime import datetime

from synvirt.errors import InvalidPlan, NotFound
from synvirt.migrations.job import Job
from synvirt.migrations.planning.openings import opening
from synvirt.migrations.planning.windows import Span
from synvirt.model.kinds import State
from synvirt.model.values import now


async def next_opening(job: Job, at: datetime) -> Span | None:
    """The opening at `at`, else the next one. None: the window never opens again, or is gone; it may have been changed since
    the plan was accepted."""
    window_id = job.migration.plan.warm.window_id
    if window_id is None:
        return None
    try:
        return opening(await job.in_thread(job.rooms.store.windows.get, window_id), at)
    except (NotFound, InvalidPlan):
        return None


async def is_open(job: Job) -> bool:
    """Whether the job's window is open now."""
    span = await next_opening(job, at := now())
    return span is not None and span.start <= at


async def opens_in_s(job: Job) -> float:
    """Seconds until the window opens, or opens again. Infinite, if it does not."""
    at = now()
    span = await next_opening(job, at)
    if span is not None and span.start <= at:
        span = await next_opening(job, span.end)
    return float("inf") if span is None else (span.start - at).total_seconds()


async def too_short(job: Job) -> str | None:
    """Why the job's outage would not fit into the rest of its window; None, if it would, or has no window."""
    window_id = job.migration.plan.warm.window_id
    if window_id is None:
        return None
    at, found = now(), job.migration.outage
    span = await next_opening(job, at)
    if span is None or span.start > at:
        return f"window {window_id} has closed"
    left_s = span.left_s(at)
    if found is None or found.p95_s <= left_s:
        return None
    return f"the outage may take {found.p95_s:.0f} s (p95), and window {window_id} is open for {left_s:.0f} s more"


async def closes_at(job: Job) -> datetime | None:
    """The end of the opening in which the job's cut-over began. None: it has no window."""
    if job.migration.plan.warm.window_id is None:
        return None
    began = next((one.at for one in job.migration.history if one.state is State.CUTTING_OVER), now())
    span = await next_opening(job, began)
    # Not within any: the window was changed since. It is over.
    return span.end if span is not None and span.start <= began else began
