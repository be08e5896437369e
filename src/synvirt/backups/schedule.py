"""When the schedule runs a backup job: a cron expression of five fields (crontab(5)), in UTC.

UTC, like retention's days: in local time, one hour of the year comes twice, and another is missing.
"""

from datetime import UTC, datetime
from functools import lru_cache
from typing import Annotated

from cronsim import CronSim, CronSimError
from pydantic import AfterValidator, StringConstraints

_FIELDS = 5
# Names that some crons have for expressions.
_NAMED = {
    "@hourly": "0 * * * *",
    "@daily": "0 0 * * *",
    "@weekly": "0 0 * * 0",
    "@monthly": "0 0 1 * *",
    "@yearly": "0 0 1 1 *",
}


def _checked(text: str) -> str:
    text = " ".join(text.split())
    fields = _NAMED.get(text, text)
    if len(fields.split()) != _FIELDS:
        raise ValueError("a schedule has five fields: minute, hour, day of month, month, day of week; for example 0 2 * * *")
    try:
        next(CronSim(fields.upper(), datetime(2000, 1, 1, tzinfo=UTC)))
    except CronSimError as error:
        raise ValueError(f"not a schedule: {str(error).lower()}; for example 0 2 * * * is each day at 02:00 UTC") from None
    except StopIteration:
        raise ValueError("not a schedule: no day matches it") from None
    return text


Schedule = Annotated[str, StringConstraints(min_length=1, max_length=100), AfterValidator(_checked)]


@lru_cache(4096)  # each look asks for all jobs, and to find it takes a millisecond
def next_time(schedule: str, after: datetime) -> datetime:
    """The first time after that moment."""
    return next(CronSim(_NAMED.get(schedule, schedule).upper(), after.astimezone(UTC)))
