"""The window of a job whose plan names one: it lets the held job cut over, in place of its operator."""

from contextlib import suppress
from datetime import datetime

from synvirt.errors import InvalidPlan, NotFound
from synvirt.migrations.job import Job
from synvirt.migrations.planning.openings import opening
from synvirt.migrations.planning.windows import Span
from synvirt.model.kinds import State
from synvirt.model.values import now
from synvirt.model.windows import Window


async def is_open(job: Job) -> bool:
    """Whether the job's window is open now."""
    return _open(await _window(job), now()) is not None


async def opens_in_s(job: Job) -> float:
    """Seconds until the window opens, or opens again. Infinite, if it does not."""
    window, at = await _window(job), now()
    span = _next(window, at)
    if span is not None and span.start <= at:
        span = _next(window, span.end)
    return float("inf") if span is None else (span.start - at).total_seconds()


async def too_short(job: Job) -> str | None:
    """Why the job's outage would not fit into the rest of its window; None, if it would, or has no window."""
    window_id = job.migration.plan.warm.window_id
    if window_id is None:
        return None
    window, at, found = await _window(job), now(), job.migration.outage
    if (span := _open(window, at)) is None:
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
    span = _open(await _window(job), began)
    # Not within any: the window was changed since. It is over.
    return began if span is None else span.end


async def _window(job: Job) -> Window | None:
    """The job's window as it is now, since it may have been changed. None: the job has none, or it is gone."""
    window_id = job.migration.plan.warm.window_id
    if window_id is None:
        return None
    with suppress(NotFound):
        return await job.in_thread(job.rooms.store.windows.get, window_id)
    return None


def _next(window: Window | None, at: datetime) -> Span | None:
    """The opening at `at`, else the next one. None: it never opens again."""
    if window is None:
        return None
    with suppress(InvalidPlan):  # it was changed since the plan was accepted
        return opening(window, at)
    return None


def _open(window: Window | None, at: datetime) -> Span | None:
    """The opening at `at`."""
    span = _next(window, at)
    return span if span is not None and span.start <= at else None
