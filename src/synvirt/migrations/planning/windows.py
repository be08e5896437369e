"""When guests may be cut over: a window's occurrences as spans in UTC. No I/O.

    Window (local, RFC 5545) ─▶ starts ─▶ UTC ─▶ what overlaps is joined ─▶ minus lock-outs ─▶ Span, Span, …

When clocks change, an occurrence ends when the local clock shows its end: a night from 22:00 to 06:00 lasts nine hours when
clocks go back. A skipped time is moved past the gap; of a time that comes twice, the first counts. A lock-out does the
opposite, so that it is never shorter than intended.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from itertools import islice
from zoneinfo import ZoneInfo

from synvirt.errors import InvalidPlan
from synvirt.model.times import local_to_utc
from synvirt.model.windows import LockOut, Window
from synvirt.recurrence import parse, starts

# Outside these years, time zones are guesses and arithmetic leaves the calendar.
YEARS = (1970, 2200)
LENGTH_MAX = timedelta(days=31)
# A window each day for 13 years; no real plan has more.
OCCURRENCES_MAX = 5_000


@dataclass(frozen=True, slots=True, order=True)
class Span:
    """A part of a window in UTC; `end` is excluded."""

    start: datetime
    end: datetime

    def left_s(self, now: datetime) -> float:
        return max(0.0, (self.end - max(now, self.start)).total_seconds())


def occurrences(window: Window, after: datetime, before: datetime) -> tuple[Span, ...]:
    """The spans that end after `after` and start before `before` (UTC), ascending and separate. Spans are whole: the first may
    start before `after`. InvalidPlan, for an impossible rule."""
    length = check(window)
    zone = ZoneInfo(window.timezone)
    if window.rrule is None:
        found = [window.start]
    else:
        rule = parse(window.rrule, window.timezone)
        # A day more on both sides: no clock differs from UTC by more.
        since = _local(after, zone) - length - timedelta(days=1)
        until = _local(before, zone) + timedelta(days=1)
        found = list(islice(starts(rule, window.start, since=since, before=until), OCCURRENCES_MAX + 1))
        if len(found) > OCCURRENCES_MAX:
            raise InvalidPlan(
                f"window {window.id!r} occurs more than {OCCURRENCES_MAX} times in the period that is checked",
                hint="give the rule an end by UNTIL, or a larger INTERVAL",
            )
    spans = (Span(local_to_utc(start, window.timezone), local_to_utc(start + length, window.timezone)) for start in found)
    # An occurrence that begins in a skipped hour may have no time left.
    whole = joined(span for span in spans if span.start < span.end)
    pieces = _without(whole, joined(_locked(one, zone) for one in window.lockouts))
    return tuple(piece for piece in pieces if piece.end > after and piece.start < before)


def check(window: Window) -> timedelta:
    """The window's length. InvalidPlan."""
    times = (window.start, window.end, *(at for one in window.lockouts for at in (one.start, one.end)))
    if not all(YEARS[0] <= at.year <= YEARS[1] for at in times):
        raise InvalidPlan(f"window {window.id!r} has a time outside of the years {YEARS[0]} to {YEARS[1]}")
    length = window.end - window.start
    if length > LENGTH_MAX:
        raise InvalidPlan(
            f"window {window.id!r} lasts {length}; {LENGTH_MAX.days} days are the most",
            hint="a longer time is a shorter window with a rule, like FREQ=DAILY",
        )
    if window.rrule is not None:
        parse(window.rrule, window.timezone)
    return length


def _local(at: datetime, zone: ZoneInfo) -> datetime:
    bounded = min(max(at, datetime(YEARS[0], 1, 1, tzinfo=UTC)), datetime(YEARS[1], 12, 31, tzinfo=UTC))
    return bounded.astimezone(zone).replace(tzinfo=None)


def _locked(one: LockOut, zone: ZoneInfo) -> Span:
    """The longest span that it can mean."""
    return Span(min(_both(one.start, zone)), max(_both(one.end, zone)))


def _both(at: datetime, zone: ZoneInfo) -> tuple[datetime, datetime]:
    return at.replace(tzinfo=zone, fold=0).astimezone(UTC), at.replace(tzinfo=zone, fold=1).astimezone(UTC)


def joined(spans: Iterable[Span]) -> list[Span]:
    """Joins spans that overlap or touch."""
    found: list[Span] = []
    for span in sorted(spans):
        if found and span.start <= found[-1].end:
            found[-1] = Span(found[-1].start, max(found[-1].end, span.end))
        else:
            found.append(span)
    return found


def _without(spans: list[Span], locked: list[Span]) -> list[Span]:
    """Both ascending, and without overlaps of their own."""
    found: list[Span] = []
    place = 0
    for span in spans:
        start = span.start
        while place < len(locked) and locked[place].end <= start:
            place += 1
        at = place
        while at < len(locked) and locked[at].start < span.end:
            if start < locked[at].start:
                found.append(Span(start, locked[at].start))
            start = locked[at].end
            at += 1
        if start < span.end:
            found.append(Span(start, span.end))
    return found
