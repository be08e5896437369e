"""When the windows of a wave are open, in UTC, as far as is looked ahead."""

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime, timedelta
from functools import lru_cache

from synvirt.fleet.model import Wave, WaveRequest, Window
from synvirt.fleet.windows import Span, joined, occurrences

# Windows are looked at this far ahead.
HORIZON = timedelta(days=3 * 366)
ALWAYS = Span(datetime.min.replace(tzinfo=UTC), datetime.max.replace(tzinfo=UTC))


def spans_of(wave: WaveRequest | Wave, after: datetime) -> dict[str, tuple[Span, ...]]:
    """Of each window by its id, as far as HORIZON. InvalidPlan."""
    day = after.replace(hour=0, minute=0, second=0, microsecond=0)
    return {window.id: _spans_from(window, day) for window in wave.windows}


@lru_cache(maxsize=1000)  # the windows of a wave at their most; a tick need not read their rules again
def _spans_from(window: Window, day: datetime) -> tuple[Span, ...]:
    return occurrences(window, day, day + HORIZON)


class Openings:
    """Of each window by its id; of the empty id, any of them, or always where a wave has no windows. `spans`: ascending."""

    def __init__(self, spans: Mapping[str, Sequence[Span]], *, has_windows: bool) -> None:
        own = {name: tuple(found) for name, found in spans.items()}
        any_of_them = tuple(joined(span for found in own.values() for span in found)) if has_windows else (ALWAYS,)
        self.names = (*own, "")
        self._spans = {**own, "": any_of_them}
        self._starts = {name: [span.start for span in found] for name, found in self._spans.items()}
        self._all = sorted({start for starts in self._starts.values() for start in starts} - {ALWAYS.start})

    def open(self, window: str, now: datetime) -> Span | None:
        """The opening that `now` lies in."""
        place = bisect_right(self._starts[window], now) - 1
        if place < 0:
            return None
        span = self._spans[window][place]
        return span if now < span.end else None

    def after(self, window: str, now: datetime) -> Sequence[Span]:
        return self._spans[window][bisect_right(self._starts[window], now) :]

    def upcoming(self, window: str, now: datetime) -> Span | None:
        """The first opening of a window that begins after `now`; None: none within the time that is looked ahead."""
        spans, place = self._spans[window], bisect_right(self._starts[window], now)
        return spans[place] if place < len(spans) else None

    def first(self, window: str, now: datetime) -> datetime | None:
        """When it opens, or did; None: it never does again."""
        span = self.open(window, now) or self.upcoming(window, now)
        return None if span is None else span.start

    def next_start(self, now: datetime) -> datetime | None:
        """Of any window."""
        place = bisect_right(self._all, now)
        return self._all[place] if place < len(self._all) else None
