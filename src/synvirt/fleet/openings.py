"""The openings of a wave's windows, in UTC, up to the horizon."""

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime, timedelta
from functools import lru_cache

from synvirt.fleet.model import Wave, WaveRequest, Window
from synvirt.fleet.windows import Span, joined, occurrences

# How far ahead windows are searched.
HORIZON = timedelta(days=3 * 366)
ALWAYS = Span(datetime.min.replace(tzinfo=UTC), datetime.max.replace(tzinfo=UTC))


def spans_of(wave: WaveRequest | Wave, after: datetime) -> dict[str, tuple[Span, ...]]:
    """The openings of each window by its id, up to HORIZON. InvalidPlan."""
    return {window.id: _spans_from(window, _day_of(after)) for window in wave.windows}


def openings_of(wave: WaveRequest | Wave, after: datetime) -> "Openings":
    """The same for each moment of a day. InvalidPlan."""
    return _openings_from(wave.windows, _day_of(after))


@lru_cache(maxsize=4)  # the waves that are under way at once: each tick of them asks
def _openings_from(windows: tuple[Window, ...], day: datetime) -> "Openings":
    return Openings({window.id: _spans_from(window, day) for window in windows}, has_windows=bool(windows))


def _day_of(moment: datetime) -> datetime:
    return moment.replace(hour=0, minute=0, second=0, microsecond=0)


@lru_cache(maxsize=1000)  # the most windows of a wave; so a tick need not parse their rules again
def _spans_from(window: Window, day: datetime) -> tuple[Span, ...]:
    return occurrences(window, day, day + HORIZON)


class Openings:
    """The openings of each window by its id; for the empty id, those of any window, or always in a wave without windows.
    `spans`: ascending."""

    def __init__(self, spans: Mapping[str, Sequence[Span]], *, has_windows: bool) -> None:
        own = {name: tuple(found) for name, found in spans.items()}
        any_of_them = tuple(joined(span for found in own.values() for span in found)) if has_windows else (ALWAYS,)
        self.names = (*own, "")
        self._spans = {**own, "": any_of_them}
        self._starts = {name: [span.start for span in found] for name, found in self._spans.items()}
        self._all = sorted({start for starts in self._starts.values() for start in starts} - {ALWAYS.start})

    def open(self, window: str, now: datetime) -> Span | None:
        """The opening that contains `now`."""
        place = bisect_right(self._starts[window], now) - 1
        if place < 0:
            return None
        span = self._spans[window][place]
        return span if now < span.end else None

    def after(self, window: str, now: datetime) -> Sequence[Span]:
        return self._spans[window][bisect_right(self._starts[window], now) :]

    def upcoming(self, window: str, now: datetime) -> Span | None:
        """The first opening of a window that begins after `now`; None: there is none up to the horizon."""
        spans, place = self._spans[window], bisect_right(self._starts[window], now)
        return spans[place] if place < len(spans) else None

    def first(self, window: str, now: datetime) -> datetime | None:
        """The start of its present or next opening; None: it never opens again."""
        span = self.open(window, now) or self.upcoming(window, now)
        return None if span is None else span.start

    def next_start(self, now: datetime) -> datetime | None:
        """The next start of any window."""
        place = bisect_right(self._all, now)
        return self._all[place] if place < len(self._all) else None
