"""The openings of windows, in UTC, up to the horizon: of a wave's, and of the one that a job's plan names."""

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from functools import lru_cache
from typing import Protocol

from synvirt.migrations.planning.schedule import horizon
from synvirt.migrations.planning.windows import Span, joined, occurrences
from synvirt.model.windows import Window, WindowShown

ALWAYS = Span(datetime.min.replace(tzinfo=UTC), datetime.max.replace(tzinfo=UTC))


class Windowed(Protocol):
    """A wave."""

    @property
    def windows(self) -> tuple[Window, ...]: ...


def spans_of(wave: Windowed, after: datetime) -> dict[str, tuple[Span, ...]]:
    """The openings of each window by its id, up to the horizon. InvalidPlan."""
    return {window.id: _spans_from(window, _day_of(after)) for window in wave.windows}


def openings_of(wave: Windowed, after: datetime) -> "Openings":
    """The same for each moment of a day. InvalidPlan."""
    return _openings_from(wave.windows, _day_of(after))


@lru_cache(maxsize=4)  # the waves that are under way at once: each tick of them asks
def _openings_from(windows: tuple[Window, ...], day: datetime) -> "Openings":
    return Openings({window.id: _spans_from(window, day) for window in windows}, has_windows=bool(windows))


def opening(window: Window, at: datetime, *, needed_s: float = 0) -> Span | None:
    """The opening that a cut-over may begin in: the first, from `at` on, of which `needed_s` are left. None: there is none.
    InvalidPlan."""
    return next((span for span in _spans_from(window, _day_of(at)) if span.end > at and span.left_s(at) >= needed_s), None)


def shown(window: Window, at: datetime) -> WindowShown:
    """The window with its present opening, or its next one."""
    span = opening(window, at)
    times = {} if span is None else {"open": span.start <= at, "opens_at": span.start, "closes_at": span.end}
    return WindowShown.model_validate(window.model_dump() | times)


def _day_of(moment: datetime) -> datetime:
    return moment.replace(hour=0, minute=0, second=0, microsecond=0)


@lru_cache(maxsize=1000)  # the most windows of a wave; so a tick need not parse their rules again
def _spans_from(window: Window, day: datetime) -> tuple[Span, ...]:
    return occurrences(window, day, horizon(day.replace(tzinfo=None), window.start).replace(tzinfo=UTC))


class Openings:
    """The openings of each window by its id; for the empty id, those of any window, or always in a wave without windows.
    `spans`: ascending."""

    def __init__(self, spans: Mapping[str, Sequence[Span]], *, has_windows: bool) -> None:
        own = {name: tuple(found) for name, found in spans.items()}
        any_of_them = tuple(joined(span for found in own.values() for span in found)) if has_windows else (ALWAYS,)
        self.names = (*own, "")
        self._spans = {**own, "": any_of_them}
        self._starts = {name: [span.start for span in found] for name, found in self._spans.items()}
        self._all = sorted({start for starts in self._starts.values() for start in starts})

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
