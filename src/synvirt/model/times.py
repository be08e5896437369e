"""Local times, moments and schedules that a caller sends."""

from datetime import UTC, datetime
from typing import Annotated, Self
from zoneinfo import ZoneInfo, ZoneInfoNotFoundError

from pydantic import AfterValidator, Field, StringConstraints, model_validator

from synvirt.model.values import Received, Time


def _known_zone(value: str) -> str:
    try:
        ZoneInfo(value)
    except (ZoneInfoNotFoundError, ValueError, OSError):
        raise ValueError(f"{value!r} is not a time zone of the IANA database, such as Europe/Berlin") from None
    return value


def _local(value: datetime) -> datetime:
    if value.tzinfo is not None:
        raise ValueError("this time is local to its time zone and has no offset, like 2026-11-28T22:00:00")
    return value


TimeZone = Annotated[str, StringConstraints(min_length=1, max_length=64), AfterValidator(_known_zone)]
LocalTime = Annotated[datetime, AfterValidator(_local)]


def local_to_utc(value: datetime, timezone: str) -> datetime:
    """A local time as UTC. One that a change of clocks skips is moved past the gap; of one that comes twice, the first counts
    (fold 0)."""
    return value.replace(tzinfo=ZoneInfo(timezone)).astimezone(UTC)


class SyncSchedule(Received):
    """When a held job copies its deltas: at `start`, local to `timezone`, and again by `rrule` (RFC 5545, section 3.3.10,
    without RRULE:), at the same time of day."""

    timezone: TimeZone = "UTC"
    rrule: Annotated[str, StringConstraints(min_length=1, max_length=255)]
    start: LocalTime


def _with_offset(value: datetime) -> datetime:
    if value.tzinfo is None:
        raise ValueError("this time has no offset; 2026-11-28T22:00:00Z and 2026-11-28T22:00:00+01:00 have one")
    try:
        value.astimezone(UTC)
    except OverflowError:
        raise ValueError("this time is outside of the calendar, as UTC has it: the years 1 to 9999") from None
    return value


# A moment that a caller sends. It must have an offset: without one it is not known which moment is meant.
Moment = Annotated[Time, AfterValidator(_with_offset)]


class Schedule(Received):
    """`start_at`: the job does not begin before. `interval_s`: a held job copies a delta at this interval, counted from
    `start_at`."""

    start_at: Moment | None = None
    interval_s: Annotated[float, Field(ge=60, le=366 * 86400)] | None = None

    @model_validator(mode="after")
    def _counted_from_a_time(self) -> Self:
        if self.interval_s is not None and self.start_at is None:
            raise ValueError("schedule.interval_s is counted from schedule.start_at, which is missing")
        return self
