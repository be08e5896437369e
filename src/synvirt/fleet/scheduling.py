"""What a wave does now: which full copies begin, which members cut over, and why each other one waits. Pure: no clock, no I/O.

    Scheduler(wave, spans, facts) ─ put(member, state) ─▶ decide(now) ─▶ begin, cut_over
                                                         why(member, now) ─▶ one sentence

The scheduler of a real wave and the simulation ask the same class, so a forecast follows the rules that will be kept. A real
one is built again at each tick from the tables; a simulated one lives on, so each change costs little: who is held by what time
alone cannot change stands in no queue, and a queue is one pair of source host and destination, passed over when it is full.

Full copies and cut-overs are counted each by itself against the limits: a window must not be lost to copies that take hours.
"""

import heapq
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from functools import partial

from synvirt.fleet.facts import UNKNOWN, Estimate, Facts
from synvirt.fleet.model import Group, MemberRequest, MemberState, Wave, WaveRequest
from synvirt.fleet.openings import ALWAYS, HORIZON, Openings, spans_of
from synvirt.fleet.order import Order, order
from synvirt.fleet.queueing import Key, Queues, Rank, Running
from synvirt.fleet.windows import Span
from synvirt.fleet.words import capital, listed, shown_s, shown_time

# A copy made sooner must be kept fresh longer, which loads the source each hour; a fortnight is what plans are changed in.
LEAD = timedelta(days=14)
# A copy that takes long begins this many times its own length before its window.
LEAD_COPIES = 3

S = MemberState
_HELD_READY = frozenset({S.READY, S.CUTTING_OVER, S.HEALTHY})
_LOST_IN_WORDS = {S.FAILED: "has failed", S.SKIPPED: "was skipped", S.ROLLED_BACK: "was rolled back"}
_IN_WORDS = {
    S.WAITING: "waiting",
    S.SYNCING: "being copied",
    S.READY: "not cut over yet",
    S.CUTTING_OVER: "being cut over",
    S.HEALTHY: "healthy",
    S.FAILED: "failed",
    S.SKIPPED: "skipped",
    S.ROLLED_BACK: "rolled back",
}


@dataclass(frozen=True, slots=True)
class Decision:
    """In the order in which they should begin. `canary_waits`: the canary is healthy, and its approval is what is missing."""

    begin: tuple[str, ...]
    cut_over: tuple[str, ...]
    canary_waits: bool = False


def decide(
    wave: WaveRequest | Wave,
    states: Mapping[str, MemberState],
    facts: Mapping[str, Facts],
    now: datetime,
    *,
    approved: Mapping[str, Iterable[str]] | None = None,
    cut_over_at: Mapping[str, datetime] | None = None,
    canary_approved: bool = False,
    hold: str | None = None,
) -> tuple[Decision, dict[str, str]]:
    """One tick of a real wave, and why each member that waits does. See Scheduler for the parameters. InvalidPlan."""
    scheduler = Scheduler(
        wave,
        spans_of(wave, now),
        facts,
        approved=approved,
        canary_approved=canary_approved,
        hold=hold,
    )
    for member, state in states.items():
        scheduler.put(member, state, at=(cut_over_at or {}).get(member))
    decision = scheduler.decide(now)
    return decision, scheduler.reasons(now)


class Scheduler:
    """`spans`: of each window, in UTC, ascending. `approved`: a member's approvers who have approved. `hold`: why nothing new
    may begin. All members start as waiting. InvalidPlan, for a wave with problems."""

    def __init__(
        self,
        wave: WaveRequest | Wave,
        spans: Mapping[str, Sequence[Span]],
        facts: Mapping[str, Facts],
        *,
        order_: Order | None = None,
        approved: Mapping[str, Iterable[str]] | None = None,
        canary_approved: bool = False,
        hold: str | None = None,
    ) -> None:
        self.order = order_ or order(wave)
        self.hold = hold
        self._wave, self._limits = wave, wave.limits
        self._facts = {member.id: facts.get(member.id, UNKNOWN) for member in wave.members}
        self._members: dict[str, MemberRequest] = {member.id: member for member in wave.members}
        self._groups: dict[str, Group] = {group.name: group for group in wave.groups}
        self._openings = Openings(spans, has_windows=bool(wave.windows))
        self._place = {name: place for place, name in enumerate(self.order.sequence)}
        self._state = dict.fromkeys(self._members, S.WAITING)
        self._copies, self._cuts = Running(), Running()
        self._missing = {name: self._approvers_missing(name, approved or {}) for name in self._members}
        self._begun_at: dict[str, datetime] = {}
        self._moved_in: dict[str, set[str]] = {name: set() for name in self._groups}
        self._group_fits_s: dict[str, float] = {}
        self._prepare_dependencies()
        self._canary = self._canaries()
        self._canary_left = len(self._canary)
        self._canary_approved = canary_approved
        self._to_begin, self._to_cut = Queues(), {name: Queues() for name in self._openings.names}
        self._later: list[tuple[datetime, int, str]] = []
        self._parked: dict[str, list[str]] = {}
        self._span_of: dict[str, Span | None] = {}
        self._queued: set[str] = set()
        self._unqueued, self._gate_was_open = set(self._members), False
        self._unqueued_are_new = True
        self._canary_reason: str | None = None

    # ── what it is given ───────────────────────────────────────────────────────────────────────────────────────────

    def state(self, member: str) -> MemberState:
        return self._state[member]

    def member(self, name: str) -> MemberRequest:
        return self._members[name]

    def put(self, member: str, state: MemberState, *, at: datetime | None = None) -> None:
        """`at`: when its cut-over began, where it is known."""
        before, facts = self._state[member], self._facts[member]
        if before is state and at is None:
            return
        self._state[member] = state
        self._canary_reason = None
        self._copies.put(member, facts, state is S.SYNCING)
        self._cuts.put(member, facts, state is S.CUTTING_OVER)
        self._count_moved(member, state, at)
        self._count_prepared(member, before, state)
        if (state is S.HEALTHY) != (before is S.HEALTHY):
            self._healed(member, 1 if state is S.HEALTHY else -1)
        self._queued.discard(member)
        self._unqueued.discard(member)
        if state is S.WAITING:
            self._unqueued.add(member)
            self._unqueued_are_new = True
        self._enqueue(member)

    def _count_moved(self, member: str, state: MemberState, at: datetime | None) -> None:
        group = self._members[member].group
        if group is None:
            return
        moved = self._moved_in[group]
        (moved.add if state in (S.CUTTING_OVER, S.HEALTHY) else moved.discard)(member)
        if not moved:
            self._begun_at.pop(group, None)
        elif at is not None:
            self._begun_at[group] = min(at, self._begun_at.get(group, at))

    def know(self, member: str, facts: Facts) -> None:
        """Newer facts, like a measured outage. Its source host and destination stay."""
        self._facts[member] = facts
        self._group_fits_s.clear()
        if self._state[member] is S.READY:
            self._enqueue(member)

    # ── what it decides ──────────────────────────────────────────────────────────────────────────────────────────────

    def decide(self, now: datetime) -> Decision:
        """Chosen members count as begun from here on."""
        if self.hold is not None or (self._wave.start_at is not None and now < self._wave.start_at):
            return Decision((), (), self._canary_waits())
        cut_over: list[str] = []
        for window, queues in self._to_cut.items():
            if not queues and window not in self._parked:
                continue
            span = self._open_span(window, now)
            if span is None:
                continue
            cut_over += queues.taken(self._is_free(self._cuts), partial(self._cuts_over, span, now))
        return Decision(self._begin(now), tuple(cut_over), self._canary_waits())

    def open_span_of(self, member: str, now: datetime) -> Span | None:
        """The opening of its window that `now` lies in."""
        return self._openings.open(self._window(member), now)

    def next_change(self, now: datetime) -> datetime | None:
        """When time alone may change what is decided: None, where it will not."""
        found = [self._later[0][0]] if self._later else []
        if self._wave.start_at is not None:
            found.append(self._wave.start_at)
        if not self._parked and not any(self._to_cut.values()):
            return min((at for at in found if at > now), default=None)
        if (opens := self._openings.next_start(now)) is not None:
            found.append(opens)
        return min((at for at in found if at > now), default=None)

    def _begin(self, now: datetime) -> tuple[str, ...]:
        is_open = self._canary_open()
        if self._unqueued_are_new or is_open != self._gate_was_open:
            self._unqueued_are_new, self._gate_was_open = False, is_open
            for member in [name for name in self._unqueued if is_open or name in self._canary]:
                self._unqueued.discard(member)
                heapq.heappush(self._later, (self._begins_at(member, now), self._place[member], member))
        while self._later and self._later[0][0] <= now:
            _, _, member = heapq.heappop(self._later)
            if self._state[member] is S.WAITING:
                self._to_begin.push(self._key(member), self._rank(member, now), member)
        return tuple(self._to_begin.taken(self._is_free(self._copies), self._begins))

    def _begins(self, member: str) -> bool | None:
        if self._state[member] is not S.WAITING:
            return False
        if self._why_not_placed(member) is not None:
            return None
        self.put(member, S.SYNCING)
        return True

    def _cuts_over(self, span: Span, now: datetime, member: str) -> bool | None:
        if member not in self._queued:
            return False
        if not self._may_cut(member):
            self._queued.discard(member)
            return False
        if self._why_not_in(member, span, now) is not None:
            # What is left of an opening only becomes less: it is looked at again in the next, where that may help.
            self._queued.discard(member)
            if self._fits_later(member, now) is not None:
                self._parked.setdefault(self._window(member), []).append(member)
            return False
        if self._why_apart(member) is not None:
            return None
        self.put(member, S.CUTTING_OVER, at=now)
        return True

    # ── why it waits ─────────────────────────────────────────────────────────────────────────────────────────────────

    def reasons(self, now: datetime) -> dict[str, str]:
        """Of all that wait."""
        found = {name: self.why(name, now) for name in self._members}
        return {name: reason for name, reason in found.items() if reason is not None}

    def why(self, member: str, now: datetime) -> str | None:
        """Why it does not go on, in a sentence; None: it does, or it has ended."""
        match self._state[member]:
            case S.WAITING:
                reasons: tuple[Callable[[str, datetime], str | None], ...] = (
                    self._why_held,
                    self._why_start,
                    self._why_unplaced,
                    self._why_canary,
                    self._why_lead,
                    self._why_copies,
                )
            case S.READY:
                reasons = (
                    self._why_held,
                    self._why_start,
                    self._why_approval,
                    self._why_after,
                    self._why_together,
                    self._why_cut,
                )
            case _:
                return None
        return next((why for why in (reason(member, now) for reason in reasons) if why is not None), None)

    def _why_held(self, _member: str, _now: datetime) -> str | None:
        return self.hold

    def _why_start(self, _member: str, now: datetime) -> str | None:
        at = self._wave.start_at
        return f"The wave starts on {shown_time(at)}." if at is not None and now < at else None

    def _why_canary(self, member: str, _now: datetime) -> str | None:
        if member in self._canary or self._canary_open():
            return None
        if self._canary_reason is None:
            left = [name for name in self.order.sequence if name in self._canary and self._state[name] is not S.HEALTHY]
            healthy = "The canary is healthy; an approval is awaited before the others move."
            self._canary_reason = f"It waits for the canary: {self._named(left)}." if left else healthy
        return self._canary_reason

    def _why_lead(self, member: str, now: datetime) -> str | None:
        at = self._begins_at(member, now)
        if at <= now:
            return None
        opens = self._first_opening(member, now)
        assert opens is not None
        window = self._window_named(member)
        return f"Its copy begins on {shown_time(at)}, in time for {window}, which opens on {shown_time(opens)}."

    def _why_copies(self, member: str, _now: datetime) -> str | None:
        unplaced = self._why_not_placed(member)
        return unplaced or self._why_full(member, self._copies, "copies") or "Its copy is next to begin."

    def _why_unplaced(self, member: str, _now: datetime) -> str | None:
        return self._facts[member].unplaced

    def _why_not_placed(self, member: str) -> str | None:
        if self._facts[member].unplaced is not None:
            return self._facts[member].unplaced
        if self._limits.per_source_host is None or self._facts[member].placed:
            return None
        return "Its source has not said yet which of its hosts it runs on, and the wave limits how many are copied from each."

    def _why_approval(self, member: str, _now: datetime) -> str | None:
        missing = self._missing[member]
        return f"It waits for the approval of {listed(missing)}." if missing else None

    def _why_after(self, member: str, _now: datetime) -> str | None:
        for name in self.order.after.get(member, ()):
            if not self._unhealthy.get(name, 0):
                continue
            inside = self.order.members_of.get(name)
            left = [one for one in inside or (name,) if self._state[one] is not S.HEALTHY]
            # What will not come is said before what may.
            left.sort(key=lambda one: (self._state[one] not in _LOST_IN_WORDS, self._place[one]))
            if inside is None:
                state = self._state[name]
                return f"It waits for {name}, which {_LOST_IN_WORDS.get(state, f'is {_IN_WORDS[state]}')}."
            return f"It waits for group {name}: {len(left)} of {len(inside)} are not healthy: {self._named(left)}."
        return None

    def _why_together(self, member: str, _now: datetime) -> str | None:
        group = self._together(member)
        if group is None or self._unprepared[group] == 0:
            return None
        left = [one for one in self.order.members_of[group] if one != member and not self._is_prepared(one)]
        if not left:
            return None
        first = left[0]
        if self._state[first] is not S.READY:
            return f"Its group {group} cuts over together, and waits for {self._named(left)}."
        what = "an approval" if self._missing[first] else "others outside of the group"
        return f"Its group {group} cuts over together, and {first} waits for {what}."

    def _why_cut(self, member: str, now: datetime) -> str | None:
        window = self._window(member)
        span = self._openings.open(window, now)
        if span is None:
            upcoming = self._openings.upcoming(window, now)
            if upcoming is None:
                return f"{capital(self._window_named(member))} does not open again: give it another window."
            return f"{capital(self._window_named(member))} opens on {shown_time(upcoming.start)}."
        return (
            self._why_not_in(member, span, now)
            or self._why_apart(member)
            or self._why_full(member, self._cuts, "cut-overs")
            or "Its cut-over is next to begin."
        )

    def _why_not_in(self, member: str, span: Span, now: datetime) -> str | None:
        """Why it cannot cut over in what is left of this opening."""
        outage = self._facts[member].outage
        if outage is None:
            return "Its outage is not known yet: a delta of it has to be copied first."
        budget = self._budget_s(member)
        if budget is not None and outage.p95 > budget:
            return f"Its outage of up to {shown_s(outage.p95)} is over its budget of {shown_s(budget)}."
        if self._is_late(member, span):
            group = self._together(member)
            return f"Its group {group} was cut over in part in an opening before: let it go on by hand, or roll the group back."
        needed, of_group = self._needed_s(member, outage)
        left = span.left_s(now)
        if needed <= left:
            return None
        what = f"Group {of_group}, which cuts over together, needs" if of_group else "Its outage takes"
        reason = f"{what} up to {shown_s(needed)}, and {self._window_named(member)} is open for {shown_s(left)} more"
        upcoming = self._fits_later(member, now)
        return (
            f"{reason}; it fits on {shown_time(upcoming.start)}."
            if upcoming
            else f"{reason}, and never opens for as long again."
        )

    def _is_late(self, member: str, span: Span) -> bool:
        """Others of its group were cut over in an opening before."""
        group = self._together(member)
        return group is not None and self._begun_at.get(group, span.start) < span.start

    def _needed_s(self, member: str, outage: Estimate) -> tuple[float, str | None]:
        """And the group that needs it, where the first of a group begins for all."""
        group = self._together(member)
        return (self._group_s(group), group) if group is not None and group not in self._begun_at else (outage.p95, None)

    def _fits_later(self, member: str, now: datetime) -> Span | None:
        """The next opening that it fits into, as far as is known."""
        outage, budget = self._facts[member].outage, self._budget_s(member)
        if outage is None or (budget is not None and outage.p95 > budget):
            return None
        needed, _ = self._needed_s(member, outage)
        found = next(
            (span for span in self._openings.after(self._window(member), now) if span.left_s(span.start) >= needed), None
        )
        return None if found is None or self._is_late(member, found) else found

    def _why_apart(self, member: str) -> str | None:
        name = self._members[member].group
        if name is None or self._groups[name].rule != "apart":
            return None
        others = sorted(one for one in self._moved_in[name] if one != member and self._state[one] is S.CUTTING_OVER)
        return f"{others[0]} of its group {name} is being cut over, and no two of them are at once." if others else None

    def _why_full(self, member: str, running: Running, what: str) -> str | None:
        facts, limits = self._facts[member], self._limits
        places = (
            (limits.wave, running.all, "of the wave"),
            (limits.per_source_host, running.by_host[facts.source_host], f"from source host {facts.source_host}"),
            (limits.per_destination, running.by_destination[facts.destination], f"to destination {facts.destination}"),
        )
        for limit, names, where in places:
            if limit is not None and len(names) >= limit:
                return f"{len(names)} of {limit} {what} {where} run: {listed(sorted(names, key=self._place.__getitem__))}."
        return None

    # ── canary, dependencies, groups ─────────────────────────────────────────────────────────────────────────────────

    def _canaries(self) -> frozenset[str]:
        """The first ones in order, with all without which they could not cut over."""
        if self._wave.canary is None:
            return frozenset()
        found: set[str] = set()
        todo = list(self.order.sequence[: self._wave.canary.count])
        while todo:
            name = todo.pop()
            if name in found:
                continue
            found.add(name)
            group = self._together(name)
            todo += [*self.order.needs(name), *(self.order.members_of[group] if group is not None else ())]
        return frozenset(found)

    def _canary_open(self) -> bool:
        canary = self._wave.canary
        return canary is None or self._canary_approved or (self._canary_left == 0 and canary.gate == "success")

    def _canary_waits(self) -> bool:
        canary = self._wave.canary
        waits = canary is not None and canary.gate == "approval" and self._canary_left == 0 and not self._canary_approved
        return waits and len(self._canary) < len(self._members)

    def _prepare_dependencies(self) -> None:
        members_of, after = self.order.members_of, self.order.after
        # How many of a name are not healthy: 1 a member, its members a group.
        self._unhealthy = {**dict.fromkeys(self._members, 1), **{name: len(inside) for name, inside in members_of.items()}}
        self._dependents: dict[str, list[str]] = {}
        self._unmet: Counter[str] = Counter()
        self._unmet_outside: Counter[str] = Counter()
        for member, names in after.items():
            for name in names:
                self._dependents.setdefault(name, []).append(member)
                self._unmet[member] += 1
                self._unmet_outside[member] += not self._is_inside(member, name)
        self._unprepared = {name: len(inside) for name, inside in members_of.items()}

    def _is_inside(self, member: str, name: str) -> bool:
        group = self._members[member].group
        return group is not None and name in self._members and self._members[name].group == group

    def _healed(self, member: str, change: int) -> None:
        if member in self._canary:
            self._canary_left -= change
        group = self._members[member].group
        for name in (member, *([group] if group is not None else [])):
            was = self._unhealthy[name]
            self._unhealthy[name] = was - change
            if (was == 0) == (was - change == 0):
                continue
            for dependent in self._dependents.get(name, ()):
                prepared = self._is_prepared(dependent)
                self._unmet[dependent] -= change
                self._unmet_outside[dependent] -= 0 if self._is_inside(dependent, name) else change
                self._prepared_changed(dependent, prepared)
                self._enqueue(dependent)

    def _is_prepared(self, member: str) -> bool:
        """As far as its group is concerned."""
        return self._state[member] in _HELD_READY and self._met(member)

    def _met(self, member: str) -> bool:
        return not self._missing[member] and self._unmet_outside[member] == 0

    def _count_prepared(self, member: str, before: MemberState, state: MemberState) -> None:
        if (before in _HELD_READY) != (state in _HELD_READY):
            self._prepared_changed(member, before in _HELD_READY and self._met(member))

    def _prepared_changed(self, member: str, was: bool) -> None:
        group, now = self._members[member].group, self._is_prepared(member)
        if group is None or was == now:
            return
        self._unprepared[group] += -1 if now else 1
        if self._unprepared[group] == 0:
            for one in self.order.members_of[group]:
                self._enqueue(one)

    def _may_cut(self, member: str) -> bool:
        """Nothing but time and room holds it."""
        group = self._together(member)
        return (
            self._state[member] is S.READY
            and self._unmet[member] == 0
            and not self._missing[member]
            and (group is None or self._unprepared[group] == 0)
        )

    def _enqueue(self, member: str) -> None:
        if member not in self._queued and self._may_cut(member):
            self._queued.add(member)
            rank = (self._members[member].priority, self._place[member])
            self._to_cut[self._window(member)].push(self._key(member), rank, member)

    def _together(self, member: str) -> str | None:
        group = self._members[member].group
        return group if group is not None and self._groups[group].rule == "together" else None

    def _group_s(self, group: str) -> float:
        """How long a group needs at the most: its longest chain, and its work shared by the slots (Graham's bound)."""
        if group not in self._group_fits_s:
            inside = set(self.order.members_of[group])
            long = {name: outage.p95 for name in inside if (outage := self._facts[name].outage) is not None}
            chain: dict[str, float] = {}
            for name in (one for one in self.order.sequence if one in inside):
                needs = [chain[other] for other in self.order.after.get(name, ()) if other in chain]
                chain[name] = max(needs, default=0.0) + long.get(name, 0.0)
            self._group_fits_s[group] = max(chain.values(), default=0.0) + self._shared_s(long)
        return self._group_fits_s[group]

    def _shared_s(self, long: Mapping[str, float]) -> float:
        hosts: defaultdict[str, float] = defaultdict(float)
        destinations: defaultdict[str, float] = defaultdict(float)
        for name, seconds in long.items():
            hosts[self._facts[name].source_host] += seconds
            destinations[self._facts[name].destination] += seconds
        loads = (
            (self._limits.wave, sum(long.values())),
            (self._limits.per_source_host, max(hosts.values(), default=0.0)),
            (self._limits.per_destination, max(destinations.values(), default=0.0)),
        )
        return max((load / limit for limit, load in loads if limit is not None), default=0.0)

    # ── time ─────────────────────────────────────────────────────────────────────────────────────────────────────────

    def _window(self, member: str) -> str:
        """Its window's id; empty: any of the wave, or any time in a wave without windows."""
        return self._members[member].window_id or ""

    def _window_named(self, member: str) -> str:
        window = self._window(member)
        return f"window {window}" if window else "a window of the wave"

    def _open_span(self, window: str, now: datetime) -> Span | None:
        span = self._openings.open(window, now)
        if span is not None and self._span_of.get(window) != span:
            self._span_of[window] = span
            for member in self._parked.pop(window, ()):
                self._enqueue(member)
        return span

    def _first_opening(self, member: str, now: datetime) -> datetime | None:
        """When its window opens, or did; None: it never does again."""
        return self._openings.first(self._window(member), now)

    def _begins_at(self, member: str, now: datetime) -> datetime:
        """Not before this is a copy worth its while. One whose window never opens again begins: it can be given another."""
        opens = self._first_opening(member, now)
        if opens is None or opens <= now:
            return now
        return opens - max(LEAD, LEAD_COPIES * timedelta(seconds=min(self._facts[member].copy.p95, HORIZON.total_seconds())))

    def _rank(self, member: str, now: datetime) -> Rank:
        opens = self._first_opening(member, now) or ALWAYS.end
        return (opens, self._members[member].priority, self._place[member])

    # ── room ─────────────────────────────────────────────────────────────────────────────────────────────────────────

    def _key(self, member: str) -> Key:
        facts = self._facts[member]
        return facts.source_host, facts.destination

    def _is_free(self, running: Running) -> Callable[[Key], bool]:
        limits, everyone = self._limits, len(self._members) + 1
        wave, host = limits.wave or everyone, limits.per_source_host or everyone
        destination = limits.per_destination or everyone
        return lambda key: (
            len(running.all) < wave
            and len(running.by_host[key[0]]) < host
            and len(running.by_destination[key[1]]) < destination
        )

    def _budget_s(self, member: str) -> float | None:
        group = self._members[member].group
        both = (self._members[member].outage_budget_s, self._groups[group].outage_budget_s if group is not None else None)
        return min((one for one in both if one is not None), default=None)

    def _approvers_missing(self, member: str, approved: Mapping[str, Iterable[str]]) -> tuple[str, ...]:
        given = set(approved.get(member, ()))
        return tuple(name for name in self._members[member].approvers if name not in given)

    def _named(self, members: Sequence[str]) -> str:
        return listed([f"{name} ({_IN_WORDS[self._state[name]]})" for name in members])
