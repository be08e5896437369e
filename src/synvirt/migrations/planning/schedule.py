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


def has_schedule(plan: MigrationPlan) -> bool:
    """Whether its deltas begin by the clock."""
    return plan.warm.schedule is not None or plan.schedule.interval_s is not None


def next_sync(plan: MigrationPlan, after: datetime) -> datetime | None:
    """The first time after `after` (UTC) at which a delta begins; None, if there is none within three years. InvalidPlan, for
    an impossible rule."""
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
            f"the schedule {plan.warm.schedule.rrule} has no time within three years from now",
            hint="see UNTIL and COUNT of its rule, and its start",
        )


def _next_of(schedule: SyncSchedule, after: datetime) -> datetime | None:
    rule = parse(schedule.rrule, schedule.timezone)
    local = after.astimezone(UTC).replace(tzinfo=None)
    for start in starts(rule, schedule.start, since=local - _A_DAY, before=local + HORIZON):
        if (at := local_to_utc(start, schedule.timezone)) > after:
            return at
    return None
