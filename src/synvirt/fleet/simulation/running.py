"""One run of a wave: at each tick the scheduler decides, copies move bytes, cut-overs end."""

import heapq
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import TYPE_CHECKING

from synvirt.fleet.facts import Estimate, Facts
from synvirt.fleet.job_facts import outage_of
from synvirt.fleet.model import MemberState, Wave, WaveRequest
from synvirt.fleet.order import Order
from synvirt.fleet.scheduling import Scheduler
from synvirt.fleet.simulation.drawing import Draws, quantile
from synvirt.fleet.simulation.nouns import TICK_S, Load, Site
from synvirt.fleet.waves import is_warm
from synvirt.migrations.planning.forecast import hold_interval_s
from synvirt.migrations.planning.openings import Openings

if TYPE_CHECKING:  # imported only to simulate a wave: 12 MiB that the rest of the service does not need
    import numpy as np
    from numpy.typing import NDArray

S = MemberState
# A guest that has missed its window this often will miss the next one too.
WINDOWS_MISSED_MAX = 3
# Keeping copies fresh never uses all of a source host: this share is left for new copies.
_COPIES_LEAST_SHARE = 0.1
# A source may claim any size: what ends later than the calendar, ends then.
_LATEST_S = 5000 * 366 * 86400.0
# What may limit the rate of a copy.
BOUNDS = ("one copy's own rate", "source host", "destination", "network", "bandwidth limit of the wave")


@dataclass(frozen=True, slots=True)
class Setting:
    """What all runs of a simulation share. `openings`: of its windows. `names`: the members' ids."""

    wave: WaveRequest | Wave
    loads: Mapping[str, Load]
    site: Site
    order: Order
    openings: Openings
    start: datetime
    names: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.names.extend(member.id for member in self.wave.members)


class Run:
    """One run. `draws` None: every duration is as forecast. After `go`, `begins`, `ready`, `cuts` and `healthy` have the
    moments by member; `lost` has the members that never cut over, with the reason; `why_…` what members waited for."""

    def __init__(self, setting: Setting, draws: Draws | None) -> None:
        import numpy as np

        self.setting, self._draws = setting, draws
        names, loads, site = setting.names, setting.loads, setting.site
        self._number = {name: number for number, name in enumerate(names)}
        each = [loads[name] for name in names]
        hosts = {host: n for n, host in enumerate(dict.fromkeys(load.source_host for load in each))}
        destinations = {name: n for n, name in enumerate(dict.fromkeys(load.destination for load in each))}
        self._host = np.array([hosts[load.source_host] for load in each], dtype=np.int64)
        self._destination = np.array([destinations[load.destination] for load in each], dtype=np.int64)
        left = [load.size_bytes if load.left_bytes is None else load.left_bytes for load in each]
        drawn = [1.0 if draws is None else draws.one() for _ in each]
        # A copy that takes twice as long counts twice as many bytes in this run.
        self._left = np.array(left, dtype=np.float64) * np.array(drawn)
        self._whole = self._left.copy()
        # What is not warm is copied within its cut-over, and has nothing to keep fresh.
        self.cold = {member.id for member in setting.wave.members if not is_warm(member)}
        changes = [
            0.0 if name in self.cold else site.change_bps if load.change_bps is None else load.change_bps
            for name, load in zip(names, each, strict=True)
        ]
        self._change = np.array(changes, dtype=np.float64)
        self._fresh_by_host = np.zeros(len(hosts))
        self._bound_s: NDArray[np.float64] = np.zeros((len(names), len(BOUNDS)))
        self._shared_bps = setting.wave.limits.bandwidth_bps or math.inf
        own = min(site.copy_bps, self._shared_bps)
        self._own_bps = own
        # A ready copy is updated at the pace of its job; changes after that are copied while the guest is off.
        self._outage_s = [
            (site.outage_s if load.outage_s is None else load.outage_s)
            + min(change * hold_interval_s(change, load.delta_bytes), load.size_bytes) / own
            for load, change in zip(each, changes, strict=True)
        ]
        slow = quantile(sorted(site.residuals), 0.95) if site.residuals else 1.0
        facts = {
            name: Facts(
                load.source_host,
                load.destination,
                Estimate(copy_s := load.size_bytes / own, copy_s * slow),
                outage_of(member, None) if member.id in self.cold else Estimate(outage, outage * slow),
            )
            for member, name, load, outage in zip(setting.wave.members, names, each, self._outage_s, strict=True)
        }
        approved = {member.id: member.approvers for member in setting.wave.members}
        self.scheduler = Scheduler(setting.wave, setting.openings, facts, order_=setting.order, approved=approved)
        self.now = setting.start
        self._copying: list[int] = []
        self._cutting: list[tuple[float, str, bool]] = []
        # When the windows close of cold members that are cutting over; and which of those come up before that.
        self._closes_s: dict[str, float] = {}
        self._in_time: set[str] = set()
        self._missed: dict[str, int] = {}
        self.lost: dict[str, str] = {}
        self.begins: dict[str, datetime] = {}
        self.ready: dict[str, datetime] = {}
        self.cuts: dict[str, datetime] = {}
        self.healthy: dict[str, datetime] = {}
        self.why_begun_late: dict[str, str] = {}
        self.why_cut_late: dict[str, str] = {}
        for name, load in zip(names, each, strict=True):
            self._begin_as(name, load)

    def _begin_as(self, name: str, load: Load) -> None:
        """A member of a running wave begins in its present state."""
        if load.state is S.WAITING:
            return
        number = self._number[name]
        if load.state is S.SYNCING:
            self._copying.append(number)
            self.begins[name] = self.setting.start
        if load.state is S.READY:
            self._keep_fresh(number, 1)
            self.ready[name] = self.setting.start
        at = self.setting.start if load.state is S.CUTTING_OVER else None
        self.scheduler.put(name, load.state, at=at)
        if load.state is S.CUTTING_OVER:
            self.cuts[name] = self.setting.start
            if name in self.cold:
                self._copying.append(number)
            else:
                heapq.heappush(self._cutting, (self._outage_s[number], name, True))
        if load.state is S.HEALTHY:
            self.healthy[name] = self.setting.start

    @property
    def end(self) -> datetime | None:
        """When the last member is healthy; None, if none is."""
        return max(self.healthy.values(), default=None)

    def bound_seconds(self, name: str) -> list[float]:
        """For how long each of BOUNDS limited the member's copy."""
        found: list[float] = self._bound_s[self._number[name]].tolist()
        return found

    # ── events in order ──────────────────────────────────────────────────────────────────────────────────────────────

    def go(self) -> None:
        """Runs the wave to its end."""
        now_s = 0.0
        while True:
            self.now = now = self._at(now_s)
            while self._decide(now_s, now):
                pass
            if now_s == 0 and self._draws is None:
                self.why_begun_late = self.scheduler.reasons(now)
            rates = self._rates()
            following = self._next_s(now_s, now, rates)
            if following is None:
                return
            self._advance(following, now_s, rates)
            now_s = following

    def _decide(self, now_s: float, now: datetime) -> bool:
        """Whether there is more to decide at this moment, as a cold member is ready at once."""
        decision = self.scheduler.decide(now)
        for name in decision.cut_over:
            self._cut_over(name, now_s, now)
        for name in decision.begin:
            self.begins[name] = now
            if name in self.cold:
                self._is_ready(name, now)
            else:
                self._copying.append(self._number[name])
        return not self.cold.isdisjoint(decision.begin)

    def _is_ready(self, name: str, at: datetime) -> None:
        self.ready[name] = at
        self._keep_fresh(self._number[name], 1)
        self.scheduler.put(name, S.READY)
        if self._draws is None:
            self.why_cut_late[name] = self.scheduler.why(name, at) or ""

    def _at(self, seconds: float) -> datetime:
        return self.setting.start + timedelta(seconds=min(seconds, _LATEST_S))

    def _next_s(self, now_s: float, now: datetime, rates: "NDArray[np.float64]") -> float | None:
        """The tick at which something has ended, or a window opens."""
        found: list[float] = []
        if self._copying:
            found.append(now_s + float((self._left[self._copying] / rates).min()))
        if self._cutting:
            found.append(self._cutting[0][0])
        change = self.scheduler.next_change(now) if len(self.healthy) + len(self.lost) < len(self._number) else None
        if found:
            ended = math.ceil((min(found) + 1e-6) / TICK_S) * TICK_S
            following = max(ended, now_s + TICK_S)
            return following if change is None else min(following, (change - self.setting.start).total_seconds())
        return None if change is None else (change - self.setting.start).total_seconds()

    def _rates(self) -> "NDArray[np.float64]":
        """Bytes a second of each running copy. The copies that use a resource share it."""
        import numpy as np

        if not self._copying:
            return np.zeros(0)
        site, active = self.setting.site, self._copying
        hosts, destinations = self._host[active], self._destination[active]
        bounds = np.full((len(BOUNDS), len(active)), np.inf)
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
                name = self.setting.names[number]
                if name in self.cold:
                    self._boots(name, to_s)
                else:
                    self._is_ready(name, self._at(to_s))
        while self._cutting and self._cutting[0][0] <= to_s:
            ended_s, name, came_up = heapq.heappop(self._cutting)
            if came_up or name not in self._in_time:
                self._ended(name, self._at(ended_s), came_up)

    def _cut_over(self, name: str, now_s: float, now: datetime) -> None:
        number = self._number[name]
        left = self._left_of_window_s(name, now)
        self.cuts[name] = now
        if name in self.cold:
            self._copying.append(number)
            self._closes_s[name] = now_s + left
            if left < math.inf:
                heapq.heappush(self._cutting, (now_s + left, name, False))
            return
        took = self._took_s(number)
        # A cut-over that does not end within its window is rolled back: its source is powered on when the window closes.
        heapq.heappush(self._cutting, (now_s + min(took, left), name, took <= left))

    def _took_s(self, number: int) -> float:
        return self._outage_s[number] * (1.0 if self._draws is None else self._draws.one())

    def _boots(self, name: str, now_s: float) -> None:
        """The copy of a cold member is whole. If its window closes first, that is among the events already."""
        up_s = now_s + self._took_s(self._number[name])
        if up_s <= self._closes_s.get(name, math.inf):
            self._in_time.add(name)
            heapq.heappush(self._cutting, (up_s, name, True))

    def _left_of_window_s(self, name: str, now: datetime) -> float:
        span = self.scheduler.open_span_of(name, now)
        return span.left_s(now) if span is not None else math.inf

    def _ended(self, name: str, at: datetime, came_up: bool) -> None:
        if came_up:
            self.healthy[name] = at
            self._keep_fresh(self._number[name], -1)
            self.scheduler.put(name, S.HEALTHY)
            return
        del self.cuts[name]
        number = self._number[name]
        if name in self.cold:
            self._copying = [one for one in self._copying if one != number]
            self._left[number] = self._whole[number]
        self._missed[name] = self._missed.get(name, 0) + 1
        if self._missed[name] < WINDOWS_MISSED_MAX:
            self.scheduler.put(name, S.READY)
            return
        self.lost[name] = f"Its cut-over did not fit into {WINDOWS_MISSED_MAX} openings of its window; its source is on."
        self._keep_fresh(self._number[name], -1)
        self.scheduler.put(name, S.FAILED)

    def _keep_fresh(self, number: int, sign: int) -> None:
        self._fresh_by_host[self._host[number]] += sign * self._change[number]
