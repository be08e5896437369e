"""A picture of a simulated wave: SVG made here, without a script. Its colours are readable on light and dark; text has the
page's colour.

    windows     ▒▒▒      ▒▒▒      ▒▒▒        when members may cut over
    esx-1    ▁▃▇▇▅▁ ┃      ┃                 a row a source host: how many copies run, bars where members cut over
    vm-17    ━━━━━━─────── ┃                 or a row a member, where there are few: its copy, kept fresh, its cut-over

Its size does not grow with the wave: large waves have a row for each host, ROWS_MAX at most, and time is cut into SLICES
pieces.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import UTC, datetime, timedelta
from html import escape
from itertools import accumulate, groupby
from typing import TypeVar

from synvirt.fleet.simulation.nouns import MemberForecast, Simulation
from synvirt.migrations.planning.windows import Span

T = TypeVar("T", int, str)

ROWS_MAX = 60
SLICES = 240
WIDTH, LABEL, ROW, HEAD = 1000, 170, 18, 58
# The most characters that fit into the column of labels.
_LABEL_CHARS = 24
_TICKS = (1, 2, 4, 6, 12, 24, 48, 24 * 7, 24 * 14, 24 * 28, 24 * 91, 24 * 365)
_TICKS_MOST = 10
_COPY, _CUT, _WINDOW, _WARN = "#2a9088", "#d9822b", "#8d979c", "#d0433c"


def gantt(
    simulation: Simulation, spans: Mapping[str, Sequence[Span]] | None = None, *, title: str = "Forecast of the wave"
) -> str:
    """The SVG element for a page. `spans`: of each window, as in the simulation."""
    times = [at for one in simulation.members for at in (one.begins_at, one.ready_at, one.planned_at, one.healthy_at) if at]
    if not times:
        return _svg(HEAD, title, [_text(4, 28, "No member of this wave moves: see the reason of each.")])
    start, end = min(times), max(times)
    # Half a per cent more, so that the last event is visible.
    scale = _Scale(start, end + max((end - start) * 0.005, timedelta(minutes=5)))
    rows = _rows(simulation.members)
    height = HEAD + ROW * len(rows) + 24
    parts = [*_axis(scale, height), *_windows(scale, spans or {}, height)]
    for number, (name, members) in enumerate(rows):
        top = HEAD + ROW * number
        parts.append(_text(4, top + 13, _short(name), title=name))
        single = len(rows) == len(simulation.members)
        parts += _member(scale, members[0], top) if single else _load(scale, members, top)
    if simulation.forecast is not None:
        parts += _end(scale, simulation.forecast.ends_p50, "p50", height) + _end(
            scale, simulation.forecast.ends_p95, "p95", height
        )
    return _svg(height, title, parts)


class _Scale:
    def __init__(self, start: datetime, end: datetime) -> None:
        self.start, self.end = start, end
        self._seconds = (end - start).total_seconds()

    def x(self, at: datetime) -> float:
        share = (at - self.start).total_seconds() / self._seconds
        return LABEL + min(1.0, max(0.0, share)) * (WIDTH - LABEL - 8)

    def slice_of(self, at: datetime) -> int:
        return min(SLICES - 1, max(0, int((at - self.start).total_seconds() / self._seconds * SLICES)))

    def slice_x(self, number: int) -> float:
        return LABEL + number / SLICES * (WIDTH - LABEL - 8)


def _rows(members: Sequence[MemberForecast]) -> list[tuple[str, list[MemberForecast]]]:
    """A row for each member, or for each host if these are too many; the last one for all further hosts."""
    if len(members) <= ROWS_MAX:
        return [(one.id, [one]) for one in members]
    hosts: dict[str, list[MemberForecast]] = {}
    for one in members:
        hosts.setdefault(one.source_host, []).append(one)
    ordered = sorted(hosts.items(), key=lambda item: (-len(item[1]), item[0]))
    shown = sorted(ordered[: ROWS_MAX - 1] if len(ordered) > ROWS_MAX else ordered)
    rest = [one for _, inside in ordered[len(shown) :] for one in inside]
    found = [(f"{name} · {len(inside)} VMs", inside) for name, inside in shown]
    return [*found, (f"{len(ordered) - len(shown)} more hosts · {len(rest)} VMs", rest)] if rest else found


def _member(scale: _Scale, one: MemberForecast, top: float) -> list[str]:
    title = f"{one.id}: {one.reason}"
    parts = []
    if one.begins_at and one.ready_at:
        parts.append(_rect(scale.x(one.begins_at), top + 4, scale.x(one.ready_at), 10, _COPY, title=title))
    if one.ready_at:
        until = scale.x(one.planned_at or scale.end)
        parts.append(_rect(scale.x(one.ready_at), top + 8, until, 2, _COPY, opacity=0.5, title=title))
    if one.planned_at and one.healthy_at:
        parts.append(_rect(scale.x(one.planned_at), top + 2, scale.x(one.healthy_at), 14, _CUT, title=title))
    else:
        parts.append(_text(WIDTH - 12, top + 13, "!", fill=_WARN, title=title))
    return parts


def _load(scale: _Scale, members: Sequence[MemberForecast], top: float) -> list[str]:
    """How many copies run in each slice of time, scaled to the most of the row; cut-overs as bars over the whole height."""
    copies, cuts = _copies(scale, members), [0] * SLICES
    for one in members:
        if one.planned_at:
            cuts[scale.slice_of(one.planned_at)] += 1
    most = max(copies)
    parts = []
    for left, right, number in _spans(scale, copies):
        high = max(1.5, 12 * number / most)
        parts.append(_rect(left, top + 16 - high, right, high, _COPY, title=f"{number} copies"))
    parts += [_rect(left, top + 2, right, 14, _CUT, title=f"{number} cut-overs") for left, right, number in _spans(scale, cuts)]
    lost = sum(one.healthy_at is None for one in members)
    if lost:
        parts.append(_text(WIDTH - 12, top + 13, "!", fill=_WARN, title=f"{lost} VMs never cut over"))
    return parts


def _copies(scale: _Scale, members: Sequence[MemberForecast]) -> list[int]:
    """How many copies run in each slice."""
    changes = [0] * (SLICES + 1)
    for one in members:
        if one.begins_at and one.ready_at:
            changes[scale.slice_of(one.begins_at)] += 1
            changes[scale.slice_of(one.ready_at) + 1] -= 1
    return list(accumulate(changes[:SLICES]))


def _spans(scale: _Scale, slices: Sequence[T]) -> Iterator[tuple[float, float, T]]:
    """(left, right, value) of each run of slices with the same value, where it is not 0 or empty."""
    first = 0
    for value, same in groupby(slices):
        end = first + len(list(same))
        if value:
            yield scale.slice_x(first), scale.slice_x(end), value
        first = end


def _windows(scale: _Scale, spans: Mapping[str, Sequence[Span]], height: float) -> list[str]:
    """The slices in which a window is open, with the windows, drawn behind the rows."""
    open_in: list[set[str]] = [set() for _ in range(SLICES)]
    for name, found in spans.items():
        for span in found:
            if span.start < scale.end and span.end > scale.start:
                for number in range(scale.slice_of(span.start), scale.slice_of(span.end) + 1):
                    open_in[number].add(name)
    names = [", ".join(sorted(inside)[:5]) for inside in open_in]
    return [
        _rect(left, HEAD - 8, right, height - HEAD - 8, _WINDOW, opacity=0.22, title=f"open: {name}")
        for left, right, name in _spans(scale, names)
    ]


def _axis(scale: _Scale, height: float) -> list[str]:
    hours = (scale.end - scale.start).total_seconds() / 3600
    step = next((one for one in _TICKS if hours / one <= _TICKS_MOST), _TICKS[-1] * (int(hours / _TICKS[-1] / _TICKS_MOST) + 1))
    midnight = scale.start.astimezone(UTC).replace(hour=0, minute=0, second=0, microsecond=0)
    parts = []
    at = midnight
    while at <= scale.end:
        if at >= scale.start:
            x = scale.x(at)
            parts.append(_rect(x, HEAD - 12, x + 0.7, height - HEAD - 4, "currentColor", opacity=0.2))
            if x < WIDTH - 75:
                parts.append(_text(x + 2, HEAD - 16, at.strftime("%b %d" if step >= 24 else "%b %d %H:%M")))
        at += timedelta(hours=step)
    return [*parts, _text(4, HEAD - 16, "UTC")]


def _end(scale: _Scale, at: datetime, what: str, height: float) -> list[str]:
    x = scale.x(at)
    label = f"{what} {at.astimezone(UTC):%b %d %H:%M}"
    place = 14 if what == "p50" else 26
    line = _rect(x, HEAD - 8, x + 1.5, height - HEAD - 8, _WARN, opacity=0.8, title=f"ends: {label}")
    return [line, _text(min(x, WIDTH - 8), place, label, anchor="end", fill=_WARN)]


def _rect(left: float, top: float, right: float, high: float, fill: str, *, opacity: float = 1, title: str = "") -> str:
    wide = max(1.2, right - left)
    seen = f' fill-opacity="{opacity}"' if opacity != 1 else ""
    return (
        f'<rect x="{left:.1f}" y="{top:.1f}" width="{wide:.1f}" height="{high:.1f}" fill="{fill}"{seen}>{_title(title)}</rect>'
    )


def _text(x: float, y: float, text: str, *, anchor: str = "start", fill: str = "currentColor", title: str = "") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" fill="{fill}">{_escaped(text)}{_title(title)}</text>'


def _title(text: str) -> str:
    return f"<title>{_escaped(text)}</title>" if text else ""


def _escaped(text: str) -> str:
    """XML has no control characters, even escaped."""
    return escape("".join(letter if letter.isprintable() else "\ufffd" for letter in text))


def _short(name: str) -> str:
    return name if len(name) <= _LABEL_CHARS else f"{name[: _LABEL_CHARS - 1]}…"


def _svg(height: float, title: str, parts: Iterable[str]) -> str:
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" class="gantt" viewBox="0 0 {WIDTH} {height:.0f}" width="100%" role="img" '
        f'aria-label="{_escaped(title)}" font-family="system-ui, sans-serif" font-size="11">'
        f"{_title(title)}{''.join(parts)}</svg>"
    )
