"""The state of each member of a wave, and whether others hold it: canary, dependencies, groups, approvals. Pure.

    Standing(wave, …) ─ put(member, state) ─▶ may_cut(member), canary_open(), fits_later(member, now) …

Each `put` updates counters of the members that it affects, so a wave of thousands is not scanned each time.
"""

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping
from datetime import datetime, timedelta

from synvirt.fleet.facts import UNKNOWN, Estimate, Facts
from synvirt.fleet.model import MEMBER_ENDS, MOVED, Group, MemberRequest, MemberState, Wave, WaveRequest
from synvirt.fleet.order import Order, order
from synvirt.fleet.queueing import Running
from synvirt.migrations.planning.openings import Openings
from synvirt.migrations.planning.schedule import HORIZON
from synvirt.migrations.planning.windows import Span

# An earlier copy must be kept fresh for longer, which loads the source every hour; plans often change up to two weeks before.
LEAD = timedelta(days=14)
# A long copy begins this many times its own duration before its window.
LEAD_COPIES = 3

S = MemberState
_HELD_READY = frozenset({S.READY, S.CUTTING_OVER, S.HEALTHY})


class Standing:
    """The parameters are those of `scheduling.Scheduler`. `freed`: called with a member that may be free to cut over now.
    `changes`: grows with each `put`. InvalidPlan, for a wave with problems."""

    def __init__(
        self,
        wave: WaveRequest | Wave,
        openings: Openings,
        facts: Mapping[str, Facts],
        *,
        order_: Order | None,
        approved: Mapping[str, Iterable[str]],
        canary_approved: bool,
        freed: Callable[[str], None],
    ) -> None:
        self.order = order_ or order(wave)
        self.wave, self._freed, self.changes = wave, freed, 0
        self.facts = {member.id: facts.get(member.id, UNKNOWN) for member in wave.members}
        self.members: dict[str, MemberRequest] = {member.id: member for member in wave.members}
        self.groups: dict[str, Group] = {group.name: group for group in wave.groups}
        self.openings = openings
        self.place = {name: place for place, name in enumerate(self.order.sequence)}
        self.state = dict.fromkeys(self.members, S.WAITING)
        self.copies, self.cuts = Running(), Running()
        # By member, the approvers who have not approved.
        self.missing = {name: self._approvers_missing(name, approved) for name in self.members}
        # When the first of a group began to cut over; and which members have begun.
        self._begun_at: dict[str, datetime] = {}
        self.moved_in: dict[str, set[str]] = {name: set() for name in self.groups}
        self._group_fits_s: dict[str, float] = {}
        self._prepare_dependencies()
        self.canary = self._canaries()
        self._canary_left = self._canary_under_way = len(self.canary)
        self._canary_approved = canary_approved

    # ── input ──────────────────────────────────────────────────────────────────────────────────────────────────────

    def put(self, member: str, state: MemberState, *, at: datetime | None = None) -> None:
        """`at`: when its cut-over began, if known."""
        before, facts = self.state[member], self.facts[member]
        self.state[member] = state
        self.changes += 1
        self.copies.put(member, facts, state is S.SYNCING)
        self.cuts.put(member, facts, state is S.CUTTING_OVER)
        self._count_moved(member, state, at)
        if member in self.canary:
            self._canary_under_way += (before in MEMBER_ENDS) - (state in MEMBER_ENDS)
        if (before in _HELD_READY) != (state in _HELD_READY):
            self._prepared_changed(member, before in _HELD_READY and self._met(member))
        if (state is S.HEALTHY) != (before is S.HEALTHY):
            self._healed(member, 1 if state is S.HEALTHY else -1)

    def update(self, member: str, facts: Facts) -> None:
        """Updates facts, like a measured outage. Its source host and destination stay."""
        self.facts[member] = facts
        self._group_fits_s.clear()

    def _count_moved(self, member: str, state: MemberState, at: datetime | None) -> None:
        group = self.members[member].group
        if group is None:
            return
        moved = self.moved_in[group]
        (moved.add if state in MOVED else moved.discard)(member)
        if not moved:
            self._begun_at.pop(group, None)
        elif at is not None:
            self._begun_at[group] = min(at, self._begun_at.get(group, at))

    # ── canary ───────────────────────────────────────────────────────────────────────────────────────────────────────

    def _canaries(self) -> frozenset[str]:
        """The first members in order, with all that they must wait for."""
        if self.wave.canary is None:
            return frozenset()
        found: set[str] = set()
        todo = list(self.order.sequence[: self.wave.canary.count])
        while todo:
            name = todo.pop()
            if name in found:
                continue
            found.add(name)
            group = self.together(name)
            todo += [*self.order.needs(name), *(self.order.members_of[group] if group is not None else ())]
        return frozenset(found)

    def canary_open(self) -> bool:
        """Whether the other members may begin too. An approval given before counts once the canary has ended, well or not."""
        canary = self.wave.canary
        if canary is None or (self._canary_left == 0 and canary.gate == "success"):
            return True
        return self._canary_approved and self._canary_under_way == 0

    def canary_waits(self) -> bool:
        """Whether the canary is healthy, and only its approval is missing."""
        canary = self.wave.canary
        waits = canary is not None and canary.gate == "approval" and self._canary_left == 0 and not self._canary_approved
        return waits and len(self.canary) < len(self.members)

    # ── dependencies, groups, approvals ──────────────────────────────────────────────────────────────────────────────

    def may_cut(self, member: str) -> bool:
        """Whether only time and free slots are missing."""
        group = self.together(member)
        return (
            self.state[member] is S.READY
            and self._unmet[member] == 0
            and not self.missing[member]
            and (group is None or self.is_group_prepared(group))
        )

    def is_healthy(self, name: str) -> bool:
        """For a group: whether all of its members are healthy."""
        return not self._unhealthy.get(name, 0)

    def is_prepared(self, member: str) -> bool:
        """Whether its group lets it cut over."""
        return self.state[member] in _HELD_READY and self._met(member)

    def is_group_prepared(self, group: str) -> bool:
        return self._unprepared[group] == 0

    def together(self, member: str) -> str | None:
        """Its group, if that cuts over together."""
        group = self.members[member].group
        return group if group is not None and self.groups[group].rule == "together" else None

    def _prepare_dependencies(self) -> None:
        members_of, after = self.order.members_of, self.order.after
        # How many of a name are not healthy: 1 for a member, its members for a group.
        self._unhealthy = {**dict.fromkeys(self.members, 1), **{name: len(inside) for name, inside in members_of.items()}}
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
        group = self.members[member].group
        return group is not None and name in self.members and self.members[name].group == group

    def _healed(self, member: str, change: int) -> None:
        if member in self.canary:
            self._canary_left -= change
        group = self.members[member].group
        for name in (member, *([group] if group is not None else [])):
            was = self._unhealthy[name]
            self._unhealthy[name] = was - change
            if (was == 0) == (was - change == 0):
                continue
            for dependent in self._dependents.get(name, ()):
                prepared = self.is_prepared(dependent)
                self._unmet[dependent] -= change
                self._unmet_outside[dependent] -= 0 if self._is_inside(dependent, name) else change
                self._prepared_changed(dependent, prepared)
                self._freed(dependent)

    def _met(self, member: str) -> bool:
        return not self.missing[member] and self._unmet_outside[member] == 0

    def _prepared_changed(self, member: str, was: bool) -> None:
        group, now = self.members[member].group, self.is_prepared(member)
        if group is None or was == now:
            return
        self._unprepared[group] += -1 if now else 1
        if self._unprepared[group] == 0:
            for one in self.order.members_of[group]:
                self._freed(one)

    def _approvers_missing(self, member: str, approved: Mapping[str, Iterable[str]]) -> tuple[str, ...]:
        needed = self.members[member].approvers
        if not needed:  # as most members
            return ()
        given = set(approved.get(member, ()))
        return tuple(name for name in needed if name not in given)

    # ── time ─────────────────────────────────────────────────────────────────────────────────────────────────────────

    def window(self, member: str) -> str:
        """Its window's id; empty: any of the wave, or any time in a wave without windows."""
        return self.members[member].window_id or ""

    def first_opening(self, member: str, now: datetime) -> datetime | None:
        """The start of its window's present or next opening; None: it never opens again."""
        return self.openings.first(self.window(member), now)

    def begins_at(self, member: str, now: datetime) -> datetime:
        """The earliest useful time for its copy. A member whose window never opens again begins: it can get another window."""
        opens = self.first_opening(member, now)
        if opens is None or opens <= now:
            return now
        return opens - max(LEAD, LEAD_COPIES * timedelta(seconds=min(self.facts[member].copy.p95, HORIZON.total_seconds())))

    def budget_s(self, member: str) -> float | None:
        """The longest allowed outage in seconds, by its own limit and its group's; None: any."""
        group = self.members[member].group
        both = (self.members[member].outage_budget_s, self.groups[group].outage_budget_s if group is not None else None)
        return min((one for one in both if one is not None), default=None)

    def is_late(self, member: str, span: Span) -> bool:
        """Whether others of its group were cut over in an earlier opening."""
        group = self.together(member)
        return group is not None and self._begun_at.get(group, span.start) < span.start

    def needed_s(self, member: str, outage: Estimate) -> tuple[float, str | None]:
        """The time for it; for the first of a group that cuts over together, the time for the whole group."""
        group = self.together(member)
        return (self._group_s(group), group) if group is not None and group not in self._begun_at else (outage.p95, None)

    def fits_later(self, member: str, now: datetime) -> Span | None:
        """The next opening that it fits into, up to the horizon."""
        outage, budget = self.facts[member].outage, self.budget_s(member)
        if outage is None or (budget is not None and outage.p95 > budget):
            return None
        needed, _ = self.needed_s(member, outage)
        found = next(
            (span for span in self.openings.after(self.window(member), now) if span.left_s(span.start) >= needed), None
        )
        return None if found is None or self.is_late(member, found) else found

    def _group_s(self, group: str) -> float:
        """The most time that a group needs: its longest chain, and its work shared by the slots (Graham's bound)."""
        if group not in self._group_fits_s:
            inside = set(self.order.members_of[group])
            long = {name: outage.p95 for name in inside if (outage := self.facts[name].outage) is not None}
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
            hosts[self.facts[name].source_host] += seconds
            destinations[self.facts[name].destination] += seconds
        limits = self.wave.limits
        loads = (
            (limits.wave, sum(long.values())),
            (limits.per_source_host, max(hosts.values(), default=0.0)),
            (limits.per_destination, max(destinations.values(), default=0.0)),
        )
        return max((load / limit for limit, load in loads if limit is not None), default=0.0)
