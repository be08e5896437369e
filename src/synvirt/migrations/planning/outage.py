"""How long a guest would be off if its cut-over began now: p50 and p95, with the parts. No I/O.

    shutdown ─▶ last copy ─▶ conversion ─▶ boot                 one after the other: they add up
       └─ of past jobs of this site ─┘         (the last copy: of this job's own deltas, once it has some;
                                                conversion and boot: of its own rehearsals, once one has passed)

Times of work are skewed to the right, so each part counts as log-normal. Few measurements do not show their spread, so
PRIOR_RUNS runs with a spread of PRIOR_SPREAD are added to them. The p95 is for the next run, not for the past ones (a
prediction interval: Student's t of the logarithms). The parts above the median add up like independent variables.

A site whose jobs differ much gets a high p95 on purpose: a budget that is met only by luck is worthless.
"""

import math
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import datetime
from itertools import pairwise

from synvirt.migrations.planning.forecast import DELTAS_LOOKED_AT, MEASURED_LEAST_S, forecast
from synvirt.model.job import Migration, OutageForecast, OutagePart, OutagePartName, Pass
from synvirt.model.kinds import Mode, State
from synvirt.model.plan import MigrationPlan
from synvirt.model.rehearsal import Rehearsal, RehearsalState

# Log-normal medians before anything was measured, for a Linux server. A Windows guest that installs updates takes longer; then
# the first job of the site shows it.
UNMEASURED_S: dict[OutagePartName, float] = {"shutdown": 30.0, "last copy": 30.0, "conversion": 300.0, "boot": 60.0}
# Jobs of one site in the lab differ by a third: e^0.3.
PRIOR_RUNS, PRIOR_SPREAD = 3, 0.3
# For parts that were never measured.
UNMEASURED_SPREAD = 0.8
# A shorter copy is below the clock's resolution.
LEAST_S = 0.1
_Z95 = 1.6449


def outage_forecast(
    job: Migration,
    past: Iterable[Migration],
    *,
    converts: bool,
    starts: bool,
    rehearsals: Iterable[Rehearsal] = (),
    whole: bool = False,
    at: datetime,
) -> OutageForecast | None:
    """The forecast. None, before the first pass is done, or if the guest is off from the beginning. `past`: jobs that completed
    here; those of the same source count, or all of them if there are none. `rehearsals`: of this job. `whole`: the last copy
    compares whole disks, because change tracking was found wrong."""
    if job.mode_effective is not Mode.WARM or not any(one.finished_at is not None for one in job.passes):
        return None
    measured = _measured(past, job.plan)
    shutdown = _part("shutdown", [one["shutdown"] for one in measured])
    if whole:
        last = _part("last copy", [one.seconds for one in job.passes if one.finished_at and (one.whole or one.number == 1)])
    else:
        last = _last_copy(job.passes, [one["last copy"] for one in measured], shutdown, at=at)
    rehearsed = [one for one in rehearsals if one.state is RehearsalState.PASSED]
    after = _after(measured, converts=converts, starts=starts, rehearsed=rehearsed)
    return _added_up([shutdown, last, *after], job.plan, at=at)


def planned_outage(
    plan: MigrationPlan, past: Iterable[Migration], *, converts: bool, starts: bool, copy_s: float | None, at: datetime
) -> OutageForecast | None:
    """The same before there is a job. None for an Offline plan, whose guest does not run; for a warm one, as long as no job
    here has measured any part; for a cold one, whose guest is off during the whole copy, as long as `copy_s` is not known."""
    if plan.source.Live is None:
        return None
    measured = _measured(past, plan)
    shutdown = _part("shutdown", [one["shutdown"] for one in measured])
    if plan.mode is Mode.WARM:
        if not measured:
            return None
        last = _part("last copy", [one["last copy"] for one in measured])
    elif copy_s is None:
        return None
    else:
        last = OutagePart(name="last copy", p50_s=copy_s, p95_s=round(copy_s * math.exp(_Z95 * PRIOR_SPREAD), 2), measured=0)
    return _added_up([shutdown, last, *_after(measured, converts=converts, starts=starts)], plan, at=at)


def _measured(past: Iterable[Migration], plan: MigrationPlan) -> list[dict[OutagePartName, float]]:
    return [found for one in _alike(past, plan) if (found := measured_parts(one)) is not None]


def _after(
    measured: Sequence[dict[OutagePartName, float]], *, converts: bool, starts: bool, rehearsed: Sequence[Rehearsal] = ()
) -> list[OutagePart]:
    """The parts after the last copy: measured on this guest, else on others."""
    own: dict[OutagePartName, list[float]] = {
        "conversion": [one.conversion_s for one in rehearsed if one.conversion_s is not None],
        "boot": [one.boot_s for one in rehearsed if one.boot_s is not None],
    }
    follows: tuple[tuple[OutagePartName, bool], ...] = (("conversion", converts), ("boot", starts))
    return [_part(name, own[name] or [one[name] for one in measured if name in one]) for name, wanted in follows if wanted]


def _added_up(parts: Sequence[OutagePart], plan: MigrationPlan, *, at: datetime) -> OutageForecast:
    p50 = sum(part.p50_s for part in parts)
    beyond = math.hypot(*(part.p95_s - part.p50_s for part in parts))
    return OutageForecast(
        p50_s=round(p50, 1), p95_s=round(p50 + beyond, 1), budget_s=plan.outage_budget_s, parts=tuple(parts), at=at
    )


@dataclass(frozen=True, slots=True)
class Record:
    """Forecasts compared with the outcome: `jobs` that had both, `within_p95` of them; `median_error_s`: the distance between
    outage and p50, in either direction."""

    jobs: int
    within_p95: int
    median_error_s: float


def record(past: Iterable[Migration]) -> Record | None:
    """The record. None, if no job was forecast and measured."""
    both = [(one.downtime_s, one.outage) for one in past if one.downtime_s is not None and one.outage is not None]
    if not both:
        return None
    errors = [abs(measured - forecast.p50_s) for measured, forecast in both]
    within = sum(measured <= forecast.p95_s for measured, forecast in both)
    return Record(len(both), within, round(statistics.median(errors), 1))


def too_long(found: OutageForecast) -> str | None:
    """Why the outage would exceed the budget, in words for people; None, if it would not."""
    if found.budget_s is None or found.p95_s <= found.budget_s:
        return None
    longest = max(found.parts, key=lambda part: part.p95_s)
    each = ", ".join(f"{part.name} {part.p95_s:.0f} s" for part in found.parts)
    return (
        f"the outage may take {found.p95_s:.0f} s (p95), and {found.budget_s:.0f} s are allowed: {each}; "
        f"the longest is {longest.name} ({longest.measured or 'not'} measured here)"
    )


def measured_parts(job: Migration) -> dict[OutagePartName, float] | None:
    """The parts of a completed warm job's outage; None, if none was measured."""
    final = job.passes[-1] if job.passes else None
    if job.state is not State.COMPLETED or job.downtime_s is None or final is None or final.kind != "final":
        return None
    found: dict[OutagePartName, float] = {"last copy": final.seconds}
    if job.conversion is not None and job.conversion.finished_at is not None:
        found["conversion"] = (job.conversion.finished_at - job.conversion.started_at).total_seconds()
    booted = [(one.ended_at - one.began_at).total_seconds() for one in job.boot_attempts if one.ended_at is not None]
    if booted:
        found["boot"] = sum(booted)
    # The rest is the shutdown, and the time between the parts.
    found["shutdown"] = job.downtime_s - sum(found.values())
    return {name: max(seconds, LEAST_S) for name, seconds in found.items()}


def _alike(past: Iterable[Migration], plan: MigrationPlan) -> list[Migration]:
    jobs = [one for one in past if one.plan.source.Live is not None]
    ref = plan.source_ref
    same = [
        one
        for one in jobs
        if ref.kind == "live_vm" and one.plan.source_ref.kind == "live_vm" and one.plan.source_ref.source_id == ref.source_id
    ]
    return same or jobs


def _part(name: OutagePartName, seconds: Sequence[float]) -> OutagePart:
    if not seconds:
        return _quantiles(name, math.log(UNMEASURED_S[name]), UNMEASURED_SPREAD, 0, PRIOR_RUNS)
    logs = [math.log(max(one, LEAST_S)) for one in seconds]
    return _of_logs(name, logs)


def _of_logs(name: OutagePartName, logs: Sequence[float]) -> OutagePart:
    count = len(logs)
    squares = statistics.pvariance(logs) * count if count > 1 else 0.0
    runs = PRIOR_RUNS + count - 1
    spread = math.sqrt((PRIOR_RUNS * PRIOR_SPREAD**2 + squares) / runs)
    return _quantiles(name, statistics.fmean(logs), spread * math.sqrt(1 + 1 / count), count, runs)


def _quantiles(name: OutagePartName, middle: float, spread: float, measured: int, runs: int) -> OutagePart:
    p95 = math.exp(middle + _t95(runs) * spread)
    return OutagePart(name=name, p50_s=round(math.exp(middle), 2), p95_s=round(p95, 2), measured=measured)


def _t95(freedom: int) -> float:
    """Student's t, 0.95, to 2 % from 3 degrees on (Abramowitz & Stegun 26.7.5)."""
    z = _Z95
    return z + (z**3 + z) / (4 * freedom) + (5 * z**5 + 16 * z**3 + 3 * z) / (96 * freedom**2)


def _last_copy(passes: Sequence[Pass], before: Sequence[float], shutdown: OutagePart, *, at: datetime) -> OutagePart:
    """The last copy, from how fast this guest changed during each of its last deltas; without a delta, from the last copies of
    earlier jobs. The guest changes until it is off."""
    found = forecast(passes, at=at)
    rates = [math.log(max(rate, 1.0)) for rate in _rates(passes)][-2 * DELTAS_LOOKED_AT :]
    if found is None or not rates:
        return _part("last copy", before)
    rate = _of_logs("last copy", rates)
    last = next(one for one in reversed(passes) if one.finished_at is not None and one.snapshot_at is not None)
    assert last.snapshot_at is not None
    since_s = max((at - last.snapshot_at).total_seconds(), 0.0)
    fixed_s = max(found.expected_downtime_s - found.expected_delta_bytes / found.throughput_bps, _least(passes))
    return OutagePart(
        name="last copy",
        p50_s=round(fixed_s + rate.p50_s * (since_s + shutdown.p50_s) / found.throughput_bps, 2),
        # The fixed cost of a pass varies as other parts do.
        p95_s=round(
            fixed_s * math.exp(_Z95 * PRIOR_SPREAD) + rate.p95_s * (since_s + shutdown.p95_s) / found.throughput_bps, 2
        ),
        measured=rate.measured,
    )


def _rates(passes: Sequence[Pass]) -> list[float]:
    """The bytes changed in a second, for each delta."""
    done = [one for one in passes if one.finished_at is not None and one.snapshot_at is not None]
    return [
        one.bytes / max((one.snapshot_at - first.snapshot_at).total_seconds(), MEASURED_LEAST_S)
        for first, one in pairwise(done)
        if one.kind == "delta" and not one.whole and one.snapshot_at is not None and first.snapshot_at is not None
    ]


def _least(passes: Sequence[Pass]) -> float:
    """The shortest delta so far: no last copy was shorter."""
    return min((one.seconds for one in passes if one.kind == "delta" and one.finished_at is not None), default=0.0)
