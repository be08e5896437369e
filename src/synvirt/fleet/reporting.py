"""The report of a wave: planned against real times, outages, failures by cause. CSV, JSON and HTML.

Wave and its members ─▶ report_of ─▶ WaveReport ─▶ as_csv │ as_html │ its own JSON
"""

import csv
import io
import statistics
from collections import Counter
from collections.abc import Iterable
from datetime import datetime
from html import escape
from typing import Any
from uuid import UUID

from synvirt.fleet.model import Member, MemberState, Wave, WaveForecast, WaveState
from synvirt.fleet.records import late_s
from synvirt.fleet.sheets.rows import guarded
from synvirt.fleet.simulation.drawing import quantile
from synvirt.fleet.words import shown_time
from synvirt.model.values import Model, Time
from synvirt.sizes import duration


class ReportedMember(Model):
    """`waits_for`, `cause`: sentences. `planned_at`, `cut_over_at`: by the forecast, and as it was."""

    id: str
    vm: str
    group: str | None
    state: MemberState
    waits_for: str | None
    cause: str | None
    planned_at: Time | None
    cut_over_at: Time | None
    healthy_at: Time | None
    outage_s: float | None
    outage_budget_s: float | None
    job_id: UUID | None


COLUMNS = tuple(ReportedMember.model_fields)


class Outages(Model):
    """Of the members whose outage is known. `over_budget`: how many of them took longer than they were allowed to."""

    members: int
    median_s: float
    longest_s: float
    over_budget: int


class ForecastError(Model):
    """Of the members whose cut-over was forecast and came: by how much it was missed, earlier or later: half of them
    by no more than `median_s`, 95 % by no more than `p95_s`."""

    members: int
    median_s: float
    p95_s: float


class WaveReport(Model):
    """`causes`: how many members each cause of a failure, a skip or a roll-back stopped, the most frequent first. `late_s`: how
    much later than the forecast's even chance it ended, negative if earlier; null before its end or without one."""

    id: UUID
    name: str
    state: WaveState
    reason: str | None
    started_at: Time | None
    finished_at: Time | None
    forecast: WaveForecast | None
    late_s: float | None
    counts: dict[MemberState, int]
    causes: dict[str, int]
    outages: Outages | None
    forecast_error: ForecastError | None
    members: tuple[ReportedMember, ...]


def report_of(wave: Wave, members: Iterable[Member]) -> WaveReport:
    """The report of a wave at this moment; durations in seconds."""
    reported = tuple(ReportedMember(**{name: getattr(one, name) for name in COLUMNS}) for one in members)
    counted = Counter(one.state for one in reported)
    causes = Counter(one.cause for one in reported if one.cause is not None)
    late_s = None
    if wave.forecast is not None and wave.finished_at is not None:
        late_s = (wave.finished_at - wave.forecast.ends_p50).total_seconds()
    return WaveReport(
        id=wave.id,
        name=wave.name,
        state=wave.state,
        reason=wave.reason,
        started_at=wave.started_at,
        finished_at=wave.finished_at,
        forecast=wave.forecast,
        late_s=late_s,
        counts={state: counted[state] for state in MemberState if state in counted},
        causes=dict(causes.most_common()),
        outages=_outages(reported),
        forecast_error=_forecast_error(reported),
        members=reported,
    )


def _outages(members: Iterable[ReportedMember]) -> Outages | None:
    known = [(one.outage_s, one.outage_budget_s) for one in members if one.outage_s is not None]
    if not known:
        return None
    seconds = [took for took, _ in known]
    return Outages(
        members=len(known),
        median_s=statistics.median(seconds),
        longest_s=max(seconds),
        over_budget=sum(budget is not None and took > budget for took, budget in known),
    )


def _forecast_error(members: Iterable[ReportedMember]) -> ForecastError | None:
    missed = sorted(abs(late) for one in members if (late := late_s(one.planned_at, one.cut_over_at)) is not None)
    if not missed:
        return None
    return ForecastError(members=len(missed), median_s=statistics.median(missed), p95_s=quantile(missed, 0.95))


def as_csv(report: WaveReport) -> str:
    """A line for each member, by RFC 4180. No cell begins like a formula."""
    text = io.StringIO()
    lines = csv.writer(text, lineterminator="\r\n")
    lines.writerow(COLUMNS)
    for one in report.members:
        fields = one.model_dump(mode="json")
        lines.writerow([guarded("" if fields[name] is None else str(fields[name])) for name in COLUMNS])
    return text.getvalue()


_STYLE = (
    "body{font:15px/1.5 system-ui,sans-serif;max-width:70rem;margin:2rem auto;padding:0 1rem;color:#1b2226;background:#fff}"
    "table{border-collapse:collapse;width:100%;margin:.5rem 0 2rem}"
    "th,td{text-align:left;vertical-align:top;padding:.35rem .7rem;border-top:1px solid #dcdfdc;overflow-wrap:anywhere}"
    "thead th{color:#57626a;font-weight:500;white-space:nowrap}"
)


def as_html(report: WaveReport) -> str:
    """A single file without others, to be sent or printed."""
    facts: list[tuple[str, Any]] = [
        ("State", report.state.replace("_", " ") + (f". {report.reason}" if report.reason else "")),
        ("Began", _moment(report.started_at)),
        ("Ended", _moment(report.finished_at)),
    ]
    if report.forecast is not None:
        even, late = _moment(report.forecast.ends_p50), _moment(report.forecast.ends_p95)
        facts.append(("Forecast", f"{even}, with a chance of 95 % by {late}"))
    if report.late_s is not None:
        facts.append(("Against it", f"{duration(abs(report.late_s))} {'later' if report.late_s > 0 else 'earlier'}"))
    if (error := report.forecast_error) is not None:
        spread = f"half of {error.members} within {duration(error.median_s)} of it, 95 % within {duration(error.p95_s)}"
        facts.append(("Cut-overs against it", spread))
    facts += [(state.replace("_", " ").capitalize(), count) for state, count in report.counts.items()]
    if report.outages is not None:
        spread = f"median {duration(report.outages.median_s)}, longest {duration(report.outages.longest_s)}"
        facts.append(("Outages", f"{spread}; {report.outages.over_budget} of {report.outages.members} over their budget"))
    rows = [
        (
            one.vm,
            one.state.replace("_", " "),
            one.cause or one.waits_for or "",
            _moment(one.planned_at),
            _moment(one.cut_over_at),
            _moment(one.healthy_at),
            duration(one.outage_s) + (f" of {duration(one.outage_budget_s)}" if one.outage_budget_s is not None else ""),
        )
        for one in report.members
    ]
    head = ("VM", "State", "Why", "Planned", "Cut over", "Healthy", "Outage")
    causes = [(count, cause) for cause, count in report.causes.items()]
    parts = [
        f"<h1>{_text(report.name)}</h1>",
        _table((), facts),
        *(["<h2>Causes</h2>", _table(("VMs", "Cause"), causes)] if causes else []),
        f"<h2>Members</h2>{_table(head, rows)}",
    ]
    body = "\n".join(parts)
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>'
        f"{_text(report.name)}</title><style>{_STYLE}</style></head>\n<body>\n{body}\n</body></html>\n"
    )


def _table(head: Iterable[str], rows: Iterable[tuple[Any, ...]]) -> str:
    titles = "".join(f'<th scope="col">{_text(one)}</th>' for one in head)
    lines = ["<tr>" + "".join(f"<td>{_text(str(cell))}</td>" for cell in row) + "</tr>" for row in rows]
    thead = f"<thead><tr>{titles}</tr></thead>" if titles else ""
    return "\n".join([f"<table>{thead}<tbody>", *lines, "</tbody></table>"])


def _text(value: str) -> str:
    return escape("".join(letter if letter.isprintable() else "\ufffd" for letter in value))


def _moment(at: datetime | None) -> str:
    return "–" if at is None else shown_time(at)
