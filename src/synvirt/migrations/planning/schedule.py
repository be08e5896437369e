"""When a job begins, and when a held job copies its changes, if its plan says so. No I/O.

A time that passed while the service was down is made up for at once, and only once for all missed times.
"""

import math
from datetime import UTC, datetime, timedelta

from synvirt.errors import InvalidPlan
from synvirt.model.plan import MigrationPlan
from synvirt.model.times import SyncSchedule, local_to_utc
from synvirt.recurrence import parse, starts

# How far ahead windows and schedules are searched.
HORIZON = timedelta(days=3 * 366)
# No clock differs from UTC by more.
_A_DAY = timedelta(days=1)
_LAST = datetime.max - HORIZON - 2 * _A_DAY  # noqa: DTZ901 - compared with local times, which have no zone


def horizon(after: datetime, start: datetime) -> datetime:
    """The end of the search for what comes after `after` and never before `start`, both without a zone: one may be made years
    before it first comes."""
    return min(max(after, start), _LAST) + HORIZON


def has_schedule(plan: MigrationPlan) -> bool:
    """Whether its deltas begin by the clock."""
    return plan.warm.schedule is not None or plan.schedule.interval_s is not None


def next_sync(plan: MigrationPlan, after: datetime) -> datetime | None:
    """The first time after `after` (UTC) at which a delta begins; None, if there is none up to the horizon. InvalidPlan, for an
    impossible rule."""
    if plan.warm.schedule is not None:
        return _next_of(plan.warm.schedule, after)
    start, every_s = plan.schedule.start_at, plan.schedule.interval_s
    if start is None or every_s is None:
        return None
    over = math.floor((after - start).total_seconds() / every_s) + 1
    return start + timedelta(seconds=max(0, over) * every_s)


def check(plan: MigrationPlan, at: datetime) -> None:
    """InvalidPlan."""
    if plan.warm.schedule is not None and _next_of(plan.warm.schedule, at) is None:
        raise InvalidPlan(
            f"the schedule {plan.warm.schedule.rrule} has no time within three years from now or from its start",
            hint="see UNTIL and COUNT of its rule, and its start",
        )


def _next_of(schedule: SyncSchedule, after: datetime) -> datetime | None:
    rule = parse(schedule.rrule, schedule.timezone)
    local = after.astimezone(UTC).replace(tzinfo=None)
    for start in starts(rule, schedule.start, since=local - _A_DAY, before=horizon(local, schedule.start)):
        if (at := local_to_utc(start, schedule.timezone)) > after:
            return at
    return None
