"""Windows: when guests may be cut over. A wave has its own; those of the service are for the plans of single jobs.

Their times are local to their time zone, without an offset, as calendars have them (RFC 5545, section 3.3.5, form 3). All other
times are UTC.
"""

from typing import Annotated, Self

from pydantic import Field, StringConstraints, model_validator

from synvirt.model.times import LocalTime, TimeZone
from synvirt.model.values import ChosenId, Model, Name, Received, Time


class LockOut(Received):
    """No cut-over begins or lasts into it. Local times of the window's zone."""

    start: LocalTime
    end: LocalTime

    @model_validator(mode="after")
    def _forward(self) -> Self:
        if self.end <= self.start:
            raise ValueError("a lock-out ends after it starts")
        return self


class Window(Received):
    """When guests may be cut over: from `start` to `end`, once, or again by `rrule` (RFC 5545, section 3.3.10, without
    RRULE:)."""

    id: ChosenId
    name: Name
    timezone: TimeZone = "UTC"
    rrule: Annotated[str, StringConstraints(min_length=1, max_length=255)] | None = None
    start: LocalTime
    end: LocalTime
    lockouts: Annotated[tuple[LockOut, ...], Field(max_length=1000)] = ()

    @model_validator(mode="after")
    def _forward(self) -> Self:
        if self.end <= self.start:
            raise ValueError("a window ends after it starts")
        return self


class WindowShown(Window):
    """A window as answered. `open`: whether it is open now; `opens_at`, `closes_at`: of the present opening, else of the next
    one; null, if it does not open within three years from now or from its start."""

    open: bool = False
    opens_at: Time | None = None
    closes_at: Time | None = None


class WindowPage(Model):
    """By id. `next_cursor` of the last page is null; otherwise send it as `?cursor=`."""

    items: tuple[WindowShown, ...]
    next_cursor: str | None = None
