"""The forecast of a wave: one run as planned, and many with durations drawn."""

from collections.abc import Mapping
from datetime import datetime

from synvirt.fleet.model import Wave, WaveForecast, WaveRequest
from synvirt.fleet.order import order
from synvirt.fleet.simulation.drawing import Draws, quantile
from synvirt.fleet.simulation.explaining import bottleneck, forecast_of
from synvirt.fleet.simulation.nouns import Load, Simulation, Site
from synvirt.fleet.simulation.running import Run, Setting
from synvirt.migrations.planning.openings import openings_of

# Runs besides the plan's own: as many as fit into ten seconds for five thousand members, and enough for a percentile.
RUNS_TIMES_MEMBERS, RUNS_LEAST, RUNS_MOST = 20_000, 4, 40


def simulate(wave: WaveRequest | Wave, loads: Mapping[str, Load], site: Site, now: datetime, *, seed: int = 0) -> Simulation:
    """The forecast of `wave` from `now` on. `loads` has every member. InvalidPlan, for a wave with problems."""
    # The canary's gate may be an approval, and a forecast takes those as given once the canary is healthy.
    if wave.canary is not None:
        wave = wave.model_copy(update={"canary": wave.canary.model_copy(update={"gate": "success"})})
    start = max(now, wave.start_at) if wave.start_at is not None else now
    setting = Setting(wave, loads, site, order(wave), openings_of(wave, start), start)
    plan = Run(setting, draws=None)
    plan.go()
    runs = min(RUNS_MOST, max(RUNS_LEAST, RUNS_TIMES_MEMBERS // max(1, len(loads))))
    ends: list[datetime] = []
    if plan.end is not None:
        slow = quantile(sorted(site.residuals), 0.95)
        for number in range(runs):
            # The first run is a site at its slowest: few draws would miss it.
            run = Run(setting, draws=Draws(site.residuals, seed + number, common=slow if number == 0 else None))
            run.go()
            ends += [run.end] if run.end is not None else []
    members = tuple(forecast_of(plan, name) for name in setting.names)
    cause, seconds = bottleneck(plan)
    forecast = None
    if plan.end is not None:
        p95 = quantile(sorted(ends), 0.95) if ends else plan.end
        begun = (*plan.begins.values(), *plan.cuts.values())
        forecast = WaveForecast(
            starts_at=min(begun, default=start),
            ends_p50=plan.end,
            ends_p95=max(plan.end, p95),
            bottleneck=cause,
            made_at=now,
        )
    unfinished = sum(one.healthy_at is None for one in members)
    return Simulation(
        forecast=forecast,
        members=members,
        unfinished=unfinished,
        runs=runs,
        ends=tuple(sorted(ends)),
        bottleneck_seconds=seconds,
    )
