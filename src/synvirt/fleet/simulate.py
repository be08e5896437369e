"""A simulation of a wave, by the same scheduler that will run it. Pure; the same answer for the same seed.

    Load (size, change rate, outage) + Site (measured rates) ─▶ runs ─▶ Simulation: when each begins, is ready, cuts over, and
    why then

Copies that run share the bandwidth of their source host, their destination and the network, less what keeping ready copies
fresh takes. A first run has every duration as forecast, and is the plan. Others draw each duration from the site's residuals
(real by forecast, of jobs that ended); their ends give the end's p95. Half of a residual's logarithm is the run's own, since
a site that is slow is slow for all. Approvals are taken as given: a forecast cannot know when somebody says yes.
"""

import heapq
import math
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime, timedelta
from typing import TYPE_CHECKING, Any

from synvirt.fleet.facts import Estimate, Facts
from synvirt.fleet.model import MemberState, Wave, WaveForecast, WaveLimits, WaveRequest, Window
from synvirt.fleet.openings import spans_of
from synvirt.fleet.order import Order, order
from synvirt.fleet.scheduling import Scheduler
from synvirt.fleet.windows import Span
from synvirt.fleet.words import shown_s, shown_time
from synvirt.migrations.planning.forecast import hold_interval_s
from synvirt.model.plan import Warm
from synvirt.model.values import Model, Time
from synvirt.sizes import MIB

if TYPE_CHECKING:  # imported where a wave is simulated: 12 MiB that no other work of the service needs
    import numpy as np
    from numpy.typing import NDArray

S = MemberState
# What ends within a minute is looked at together: a plan to the hour needs no more.
TICK_S = 60.0
# Where this site has measured nothing yet: a 10 Gbit/s network, spinning disks behind it, and guests as others saw them.
COPY_BPS_ASSUMED = 150.0 * MIB
HOST_BPS_ASSUMED = 600.0 * MIB
OUTAGE_ASSUMED_S = 180.0
CHANGE_BPS_ASSUMED = 64.0 * 1024
RESIDUALS_ASSUMED = (0.7, 0.8, 0.9, 0.95, 1.0, 1.0, 1.05, 1.15, 1.3, 1.6, 2.2)
# Runs besides the plan's own: as many as fit into ten seconds for five thousand members, and enough for a percentile.
RUNS_TIMES_MEMBERS, RUNS_LEAST, RUNS_MOST = 20_000, 4, 40
# A guest that does not come up within its window so often will not in the next one either.
WINDOWS_MISSED_MAX = 3
# Keeping copies fresh never takes all of a source host: below this share new copies still move.
_COPIES_LEAST_SHARE = 0.1


@dataclass(frozen=True, slots=True)
class Load:
    """What a member weighs. `outage_s`: shutdown, last delta's fixed cost, conversion and boot, without the delta's bytes. It
    and `change_bps` are None where its own job has not said: then they are the site's. `state`, `left_bytes`: of a wave that
    runs, how far it is. `delta_bytes`: how large a delta may grow before it is copied."""

    size_bytes: int
    source_host: str
    destination: str
    change_bps: float | None = None
    outage_s: float | None = None
    state: MemberState = S.WAITING
    left_bytes: int | None = None
    delta_bytes: int = Warm().delta_threshold_bytes


@dataclass(frozen=True, slots=True)
class Site:
    """Bytes a second: of one copy, of all from one source host, to one destination, over the network (None: no bound that is
    known). `change_bps`, `outage_s`: of a guest of which nothing is known yet. `residuals`: real duration by forecast one, of
    jobs that ended here."""

    copy_bps: float = COPY_BPS_ASSUMED
    source_host_bps: float | None = HOST_BPS_ASSUMED
    destination_bps: float | None = None
    network_bps: float | None = None
    change_bps: float = CHANGE_BPS_ASSUMED
    outage_s: float = OUTAGE_ASSUMED_S
    residuals: tuple[float, ...] = RESIDUALS_ASSUMED


@dataclass(frozen=True, slots=True)
class Change:
    """What if. `more_destinations`: hosts like those that there are, which take their share of the VMs."""

    more_destinations: int = 0
    network_bps: float | None = None
    source_host_bps: float | None = None
    limits: WaveLimits | None = None
    windows: tuple[Window, ...] | None = None


class MemberForecast(Model):
    """`planned_at`: when its cut-over begins. Null, where it never comes so far; then `reason` says why. Else `reason` says
    what it waited for longest."""

    id: str
    source_host: str
    destination: str
    begins_at: Time | None = None
    ready_at: Time | None = None
    planned_at: Time | None = None
    healthy_at: Time | None = None
    reason: str = ""


class Simulation(Model):
    """`unfinished`: members that never cut over. `forecast` is null where nobody does."""

    forecast: WaveForecast | None
    members: tuple[MemberForecast, ...]
    unfinished: int
    runs: int
    ends: tuple[Time, ...]
    bottleneck_seconds: dict[str, float]


def simulate(wave: WaveRequest | Wave, loads: Mapping[str, Load], site: Site, now: datetime, *, seed: int = 0) -> Simulation:
    """`loads`: of every member. InvalidPlan, for a wave with problems."""
    # Its gate is an approval that a forecast takes as given once the canary is healthy.
    if wave.canary is not None:
        wave = wave.model_copy(update={"canary": wave.canary.model_copy(update={"gate": "success"})})
    start = max(now, wave.start_at) if wave.start_at is not None else now
    setting = _Setting(wave, loads, site, order(wave), spans_of(wave, start), start)
    plan = _Run(setting, draws=None)
    plan.go()
    runs = min(RUNS_MOST, max(RUNS_LEAST, RUNS_TIMES_MEMBERS // max(1, len(loads))))
    ends: list[datetime] = []
    if plan.end is not None:
        slow = _quantile(sorted(site.residuals), 0.95)
        for number in range(runs):
            # One of few runs is a site at its slowest: few draws would miss it.
            run = _Run(setting, draws=_Draws(site.residuals, seed + number, common=slow if number == 0 else None))
            run.go()
            ends += [run.end] if run.end is not None else []
    members = tuple(plan.forecast_of(name) for name in setting.names)
    bottleneck, seconds = plan.bottleneck()
    forecast = None
    if plan.end is not None:
        p95 = _quantile(sorted(ends), 0.95) if ends else plan.end
        begun = (*plan.begins.values(), *plan.cuts.values())
        forecast = WaveForecast(
            starts_at=min(begun, default=start),
            ends_p50=plan.end,
            ends_p95=max(plan.end, p95),
            bottleneck=bottleneck,
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


def changed(
    wave: WaveRequest | Wave, loads: Mapping[str, Load], site: Site, change: Change
) -> tuple[WaveRequest | Wave, dict[str, Load], Site]:
    """The same with other numbers. A window of `change.windows` takes the place of the one with its id."""
    updates: dict[str, Any] = {}
    if change.limits is not None:
        updates["limits"] = change.limits
    if change.windows is not None:
        new = {window.id: window for window in change.windows}
        kept = tuple(new.pop(window.id, window) for window in wave.windows)
        updates["windows"] = (*kept, *new.values())
    site = replace(
        site,
        network_bps=change.network_bps if change.network_bps is not None else site.network_bps,
        source_host_bps=change.source_host_bps if change.source_host_bps is not None else site.source_host_bps,
    )
    return wave.model_copy(update=updates), _spread(loads, change.more_destinations), site


def difference_in_words(before: Simulation, after: Simulation) -> str:
    """In a sentence."""
    if before.forecast is None or after.forecast is None:
        return f"{before.unfinished} VMs never cut over before, {after.unfinished} after."
    seconds = (before.forecast.ends_p50 - after.forecast.ends_p50).total_seconds()
    what = "as late" if abs(seconds) < TICK_S else f"{shown_s(abs(seconds))} {'sooner' if seconds > 0 else 'later'}"
    summary = f"It ends {what}, on {shown_time(after.forecast.ends_p50)} (p95 {shown_time(after.forecast.ends_p95)})"
    moved = before.unfinished - after.unfinished
    if moved:
        summary += f"; {abs(moved)} {'more' if moved > 0 else 'fewer'} VMs cut over"
    return f"{summary}. What holds it back: {after.forecast.bottleneck}"


def _spread(loads: Mapping[str, Load], more: int) -> dict[str, Load]:
    """Each new destination takes as many as the others keep, evenly from all of them."""
    before = len({load.destination for load in loads.values()})
    if more <= 0 or before == 0:
        return dict(loads)
    found: dict[str, Load] = {}
    seen: dict[str, int] = {}
    for name, load in loads.items():
        place = seen[load.destination] = seen.get(load.destination, -1) + 1
        turn = place % (before + more)
        found[name] = load if turn < before else replace(load, destination=f"new-{turn - before + 1}")
    return found


@dataclass(frozen=True, slots=True)
class _Setting:
    wave: WaveRequest | Wave
    loads: Mapping[str, Load]
    site: Site
    order: Order
    spans: Mapping[str, Sequence[Span]]
    start: datetime
    names: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.names.extend(member.id for member in self.wave.members)


class _Draws:
    """`common`: of the whole run."""

    def __init__(self, residuals: Sequence[float], seed: int, common: float | None = None) -> None:
        self._random = random.Random(seed)  # noqa: S311 - a forecast, no secret
        self._residuals = tuple(one for one in residuals if 0 < one < 1000) or (1.0,)
        self._common = common if common is not None else self._random.choice(self._residuals)

    def one(self) -> float:
        return math.sqrt(self._common * self._random.choice(self._residuals))


def _quantile(ascending: Sequence[Any], share: float) -> Any:
    return ascending[min(len(ascending) - 1, math.ceil(share * len(ascending)) - 1)]


_BOUNDS = ("one copy's own rate", "source host", "destination", "network", "bandwidth limit of the wave")


class _Run:
    def __init__(self, setting: _Setting, draws: _Draws | None) -> None:
        import numpy as np

        self._setting, self._draws = setting, draws
        names, loads, site = setting.names, setting.loads, setting.site
        self._number = {name: number for number, name in enumerate(names)}
        each = [loads[name] for name in names]
        hosts = {host: n for n, host in enumerate(dict.fromkeys(load.source_host for load in each))}
        destinations = {name: n for n, name in enumerate(dict.fromkeys(load.destination for load in each))}
        self._host = np.array([hosts[load.source_host] for load in each], dtype=np.int64)
        self._destination = np.array([destinations[load.destination] for load in each], dtype=np.int64)
        left = [load.size_bytes if load.left_bytes is None else load.left_bytes for load in each]
        drawn = [1.0 if draws is None else draws.one() for _ in each]
        # A copy that takes twice as long has twice as many bytes of this run.
        self._left = np.array(left, dtype=np.float64) * np.array(drawn)
        changes = [site.change_bps if load.change_bps is None else load.change_bps for load in each]
        self._change = np.array(changes, dtype=np.float64)
        self._fresh_by_host = np.zeros(len(hosts))
        self._bound_s: NDArray[np.float64] = np.zeros((len(names), len(_BOUNDS)))
        self._shared_bps = setting.wave.limits.bandwidth_bps or math.inf
        own = min(site.copy_bps, self._shared_bps)
        self._own_bps = own
        # A ready copy is kept fresh at the pace of its job; what changes meanwhile is copied while the guest is off.
        self._outage_s = [
            (site.outage_s if load.outage_s is None else load.outage_s)
            + min(change * hold_interval_s(change, load.delta_bytes), load.size_bytes) / own
            for load, change in zip(each, changes, strict=True)
        ]
        slow = _quantile(sorted(site.residuals), 0.95) if site.residuals else 1.0
        facts = {
            name: Facts(
                load.source_host,
                load.destination,
                Estimate(copy_s := load.size_bytes / own, copy_s * slow),
                Estimate(outage, outage * slow),
            )
            for name, load, outage in zip(names, each, self._outage_s, strict=True)
        }
        approved = {member.id: member.approvers for member in setting.wave.members}
        self._scheduler = Scheduler(setting.wave, setting.spans, facts, order_=setting.order, approved=approved)
        self._now = setting.start
        self._copying: list[int] = []
        self._cutting: list[tuple[float, str, bool]] = []
        self._missed: dict[str, int] = {}
        self._lost: dict[str, str] = {}
        self.begins: dict[str, datetime] = {}
        self.ready: dict[str, datetime] = {}
        self.cuts: dict[str, datetime] = {}
        self.healthy: dict[str, datetime] = {}
        self._why_begun_late: dict[str, str] = {}
        self._why_cut_late: dict[str, str] = {}
        for name, load in zip(names, each, strict=True):
            self._begin_as(name, load)

    def _begin_as(self, name: str, load: Load) -> None:
        """A wave that runs is taken up where it is."""
        if load.state is S.WAITING:
            return
        number = self._number[name]
        if load.state is S.SYNCING:
            self._copying.append(number)
            self.begins[name] = self._setting.start
        if load.state is S.READY:
            self._keep_fresh(number, 1)
            self.ready[name] = self._setting.start
        at = self._setting.start if load.state is S.CUTTING_OVER else None
        self._scheduler.put(name, load.state, at=at)
        if load.state is S.CUTTING_OVER:
            self.cuts[name] = self._setting.start
            heapq.heappush(self._cutting, (self._outage_s[number], name, True))
        if load.state is S.HEALTHY:
            self.healthy[name] = self._setting.start

    @property
    def end(self) -> datetime | None:
        return max(self.healthy.values(), default=None)

    # ── one event after the other ────────────────────────────────────────────────────────────────────────────────────

    def go(self) -> None:
        now_s = 0.0
        while True:
            self._now = now = self._at(now_s)
            decision = self._scheduler.decide(now)
            if now_s == 0 and self._draws is None:
                self._why_begun_late = self._scheduler.reasons(now)
            for name in decision.begin:
                self.begins[name] = now
                self._copying.append(self._number[name])
            for name in decision.cut_over:
                self._cut_over(name, now_s, now)
            rates = self._rates()
            following = self._next_s(now_s, now, rates)
            if following is None:
                return
            self._advance(following, now_s, rates)
            now_s = following

    def _at(self, seconds: float) -> datetime:
        return self._setting.start + timedelta(seconds=seconds)

    def _next_s(self, now_s: float, now: datetime, rates: "NDArray[np.float64]") -> float | None:
        """The tick at which something has ended, or a window opens."""
        found: list[float] = []
        if self._copying:
            found.append(now_s + float((self._left[self._copying] / rates).min()))
        if self._cutting:
            found.append(self._cutting[0][0])
        change = self._scheduler.next_change(now) if len(self.healthy) + len(self._lost) < len(self._number) else None
        if found:
            ended = math.ceil((min(found) + 1e-6) / TICK_S) * TICK_S
            following = max(ended, now_s + TICK_S)
            return following if change is None else min(following, (change - self._setting.start).total_seconds())
        return None if change is None else (change - self._setting.start).total_seconds()

    def _rates(self) -> "NDArray[np.float64]":
        """Bytes a second of each copy that runs, each resource shared by those that use it."""
        import numpy as np

        if not self._copying:
            return np.zeros(0)
        site, active = self._setting.site, self._copying
        hosts, destinations = self._host[active], self._destination[active]
        bounds = np.full((len(_BOUNDS), len(active)), np.inf)
        bounds[0] = self._own_bps
        if site.source_host_bps is not None:
            free = np.maximum(site.source_host_bps - self._fresh_by_host, site.source_host_bps * _COPIES_LEAST_SHARE)
            bounds[1] = free[hosts] / np.bincount(hosts, minlength=len(free))[hosts]
        if site.destination_bps is not None:
            bounds[2] = site.destination_bps / np.bincount(destinations)[destinations]
        if self._shared_bps < math.inf:
            bounds[4] = self._shared_bps / len(active)
        if site.network_bps is not None:
            free_bps = max(site.network_bps - float(self._fresh_by_host.sum()), site.network_bps * _COPIES_LEAST_SHARE)
            bounds[3] = free_bps / len(active)
        self._binding = np.argmin(bounds, axis=0)
        least: NDArray[np.float64] = np.min(bounds, axis=0)
        return least

    def _advance(self, to_s: float, now_s: float, rates: "NDArray[np.float64]") -> None:
        import numpy as np

        if self._copying:
            active = np.array(self._copying)
            left = self._left[active] - rates * (to_s - now_s)
            self._left[active] = left
            self._bound_s[active, self._binding] += to_s - now_s
            done = active[left <= 1].tolist()
            if done:
                self._copying = active[left > 1].tolist()
            for number in done:
                name = self._setting.names[number]
                self.ready[name] = self._at(to_s)
                self._keep_fresh(number, 1)
                self._scheduler.put(name, S.READY)
                if self._draws is None:
                    self._why_cut_late[name] = self._scheduler.why(name, self._at(to_s)) or ""
        while self._cutting and self._cutting[0][0] <= to_s:
            ended_s, name, came_up = heapq.heappop(self._cutting)
            self._ended(name, self._at(ended_s), came_up)

    def _cut_over(self, name: str, now_s: float, now: datetime) -> None:
        number = self._number[name]
        took = self._outage_s[number] * (1.0 if self._draws is None else self._draws.one())
        left = self._left_of_window_s(name, now)
        self.cuts[name] = now
        # One that does not end within its window is rolled back: its source is on again as the window closes.
        heapq.heappush(self._cutting, (now_s + min(took, left), name, took <= left))

    def _left_of_window_s(self, name: str, now: datetime) -> float:
        span = self._scheduler.open_span_of(name, now)
        return span.left_s(now) if span is not None else math.inf

    def _ended(self, name: str, at: datetime, came_up: bool) -> None:
        if came_up:
            self.healthy[name] = at
            self._keep_fresh(self._number[name], -1)
            self._scheduler.put(name, S.HEALTHY)
            return
        del self.cuts[name]
        self._missed[name] = self._missed.get(name, 0) + 1
        if self._missed[name] < WINDOWS_MISSED_MAX:
            self._scheduler.put(name, S.READY)
            return
        self._lost[name] = f"Its cut-over did not fit into {WINDOWS_MISSED_MAX} openings of its window; its source is on."
        self._keep_fresh(self._number[name], -1)
        self._scheduler.put(name, S.FAILED)

    def _keep_fresh(self, number: int, sign: int) -> None:
        self._fresh_by_host[self._host[number]] += sign * self._change[number]

    # ── what it says ─────────────────────────────────────────────────────────────────────────────────────────────────

    def forecast_of(self, name: str) -> MemberForecast:
        load = self._setting.loads[name]
        return MemberForecast(
            id=name,
            source_host=load.source_host,
            destination=load.destination,
            begins_at=self.begins.get(name),
            ready_at=self.ready.get(name),
            planned_at=self.cuts.get(name),
            healthy_at=self.healthy.get(name),
            reason=self._reason(name),
        )

    def _reason(self, name: str) -> str:
        if name in self.healthy:
            begun, ready = self.begins.get(name), self.ready.get(name)
            before_s = (begun - self._setting.start).total_seconds() if begun is not None else 0.0
            after_s = (self.cuts[name] - ready).total_seconds() if ready is not None and name in self.cuts else 0.0
            if max(before_s, after_s) < 2 * TICK_S:
                return "It goes on without waiting."
            late = self._why_cut_late if after_s >= before_s else self._why_begun_late
            return late.get(name) or "It goes on without waiting."
        if name in self._lost:
            return self._lost[name]
        # Asked of the last moment at which something could have begun.
        return self._scheduler.why(name, self._now) or "It has ended."

    def bottleneck(self) -> tuple[str, dict[str, float]]:
        """What the last one waited for longest, and those that it waited for; seconds by cause."""
        seconds: dict[str, float] = {}
        name = max(self.healthy, key=self.healthy.__getitem__, default=None)
        if name is None:
            return "nothing moves", {}
        last, seen = name, {name}
        while name is not None:
            following = self._slowest_needed(name, seen)
            self._account(name, self.healthy.get(following) if following else None, seconds)
            name = following
            seen.add(name or "")
        cause = max(seconds, key=seconds.__getitem__, default="nothing")
        return f"{cause}: {shown_s(seconds.get(cause, 0.0))} of the way of {last}, which ends last.", seconds

    def _slowest_needed(self, name: str, seen: set[str]) -> str | None:
        """The member that it waited for last, where it was ready by then."""
        needs = [one for one in self._setting.order.needs(name) if one in self.healthy and one not in seen]
        slowest = max(needs, key=self.healthy.__getitem__, default=None)
        if slowest is None or name not in self.ready or self.healthy[slowest] <= self.ready[name]:
            return None
        return slowest

    def _account(self, name: str, from_: datetime | None, seconds: dict[str, float]) -> None:
        load, number, start = self._setting.loads[name], self._number[name], self._setting.start
        begun, ready, cut = self.begins.get(name), self.ready.get(name), self.cuts.get(name)

        def add(cause: str, length: timedelta) -> None:
            if length.total_seconds() > 0:
                seconds[cause] = seconds.get(cause, 0.0) + length.total_seconds()

        if ready is not None and cut is not None:
            since = max(ready, from_ or ready)
            closed = self._scheduler.open_span_of(name, since) is None
            add(self._window_of(name) if closed else self._cause(self._why_cut_late.get(name, ""), name), cut - since)
        if cut is not None and name in self.healthy:
            add("cut-overs themselves", self.healthy[name] - cut)
        if from_ is not None:
            return
        if begun is not None:
            add(self._cause(self._why_begun_late.get(name, ""), name), begun - start)
        places = ("", f" {load.source_host}", f" {load.destination}", "", "")
        for what, place, spent in zip(_BOUNDS, places, self._bound_s[number], strict=True):
            add(f"{what}{place}", timedelta(seconds=float(spent)))

    def _cause(self, why: str, name: str) -> str:
        """A cause by its sentence, as few words."""
        load = self._setting.loads[name]
        causes = (
            ("canary", "the canary"),
            ("source host", f"limit of source host {load.source_host}"),
            ("destination", f"limit of destination {load.destination}"),
            ("of the wave run", "limit of the wave"),
            ("indow", self._window_of(name)),
            ("starts on", "the wave's start"),
        )
        return next((cause for part, cause in causes if part in why), "others that it waits for")

    def _window_of(self, name: str) -> str:
        of = self._scheduler.member(name).window_id
        return f"window {of}" if of else "the windows"
