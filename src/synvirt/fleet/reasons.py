"""Why a member of a wave waits, in a sentence. Pure.

    Reasons(standing, hold) ─▶ why(member, now) ─▶ the first thing that holds it; None: it goes on, or has ended

The scheduler also asks this module whether a member may begin or cut over: so decisions and sentences follow the same rule.
"""

from collections.abc import Callable, Collection, Sequence
from datetime import datetime
from functools import partial

from synvirt.fleet.model import MemberState
from synvirt.fleet.queueing import Running
from synvirt.fleet.standing import Standing
from synvirt.fleet.words import capital, listed, shown_time
from synvirt.migrations.planning.windows import Span
from synvirt.sizes import duration

S = MemberState
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


_LOST_HOST = "Its host "


def is_said_here(state: MemberState, waits_for: str | None, reason: str | None) -> bool:
    """Whether the leading host writes what a member waits for. For one that cuts over, its own host does, unless that is
    lost."""
    return state is not S.CUTTING_OVER or reason is not None or (waits_for or "").startswith(_LOST_HOST)


class Reasons:
    """`hold`: why nothing new of the wave may begin."""

    def __init__(self, standing: Standing, hold: str | None) -> None:
        self._standing, self._hold = standing, hold
        self._by_state: dict[MemberState, tuple[Callable[[str, datetime], str | None], ...]] = {
            S.WAITING: (self._held, self._starts, self._unplaced, self._canary, self._lead, self._copies),
            S.SYNCING: (self._lost,),
            S.CUTTING_OVER: (self._lost,),
            S.READY: (self._lost, self._held, self._starts, self._approval, self._after, self._together, self._cut),
        }
        # Reasons that are the same for many members until one of them goes on, each with the changes that it is made of.
        self._shared: dict[str, tuple[int, str]] = {}

    def of_all(self, now: datetime) -> dict[str, str]:
        """The reasons of all waiting members."""
        found = {name: self.why(name, now) for name, state in self._standing.state.items() if state in self._by_state}
        return {name: reason for name, reason in found.items() if reason is not None}

    def why(self, member: str, now: datetime) -> str | None:
        """Why it does not go on; None, if it does, or has ended."""
        reasons = self._by_state.get(self._standing.state[member], ())
        return next((why for why in (reason(member, now) for reason in reasons) if why is not None), None)

    def _lost(self, member: str, _now: datetime) -> str | None:
        host = self._standing.facts[member].lost
        return (
            None
            if host is None
            else f"{_LOST_HOST}{host} is lost: the job goes on once that host is back, or after a take-over."
        )

    def _held(self, _member: str, _now: datetime) -> str | None:
        return self._hold

    def _starts(self, _member: str, now: datetime) -> str | None:
        at = self._standing.wave.start_at
        return f"The wave starts on {shown_time(at)}." if at is not None and now < at else None

    # ── why its copy does not begin ──────────────────────────────────────────────────────────────────────────────────

    def not_placed(self, member: str) -> str | None:
        """Why its source host or its destination is not known yet."""
        standing = self._standing
        if standing.facts[member].unplaced is not None:
            return standing.facts[member].unplaced
        if standing.wave.limits.per_source_host is None or standing.facts[member].placed:
            return None
        return (
            "Its source has not reported yet which of its hosts it runs on, and the wave limits how many are copied from each."
        )

    def _unplaced(self, member: str, _now: datetime) -> str | None:
        return self._standing.facts[member].unplaced

    def _canary(self, member: str, _now: datetime) -> str | None:
        standing = self._standing
        if member in standing.canary or standing.canary_open():
            return None
        return self._once("the canary", self._canary_reason)

    def _canary_reason(self) -> str:
        standing = self._standing
        left = [name for name in standing.order.sequence if name in standing.canary and not standing.is_healthy(name)]
        healthy = "The canary is healthy; an approval is awaited before the others move."
        return f"It waits for the canary: {self._named(left)}." if left else healthy

    def _lead(self, member: str, now: datetime) -> str | None:
        at = self._standing.begins_at(member, now)
        if at <= now:
            return None
        opens = self._standing.first_opening(member, now)
        assert opens is not None
        window = self._window_named(member)
        return f"Its copy begins on {shown_time(at)}, in time for {window}, which opens on {shown_time(opens)}."

    def _copies(self, member: str, _now: datetime) -> str | None:
        full = self._full(member, self._standing.copies, "copies")
        return self.not_placed(member) or full or "Its copy is next to begin."

    # ── why it does not cut over ─────────────────────────────────────────────────────────────────────────────────────

    def not_in(self, member: str, span: Span, now: datetime) -> str | None:
        """Why it cannot cut over in the rest of this opening."""
        standing = self._standing
        outage = standing.facts[member].outage
        if outage is None:
            return "Its outage is not known yet: a delta of it has to be copied first."
        budget = standing.budget_s(member)
        if budget is not None and outage.p95 > budget:
            return f"Its outage of up to {duration(outage.p95)} is over its budget of {duration(budget)}."
        if standing.is_late(member, span):
            group = standing.together(member)
            return f"Its group {group} was cut over in part in an opening before: let it go on by hand, or roll the group back."
        needed, of_group = standing.needed_s(member, outage)
        left = span.left_s(now)
        if needed <= left:
            return None
        what = f"Group {of_group}, which cuts over together, needs" if of_group else "Its outage takes"
        reason = f"{what} up to {duration(needed)}, and {self._window_named(member)} is open for {duration(left)} more"
        upcoming = standing.fits_later(member, now)
        return (
            f"{reason}; it fits on {shown_time(upcoming.start)}."
            if upcoming
            else f"{reason}, and never opens for as long again."
        )

    def apart(self, member: str) -> str | None:
        """Why it may not cut over at the same time as the present ones of its group."""
        standing = self._standing
        name = standing.members[member].group
        if name is None or standing.groups[name].rule != "apart":
            return None
        others = sorted(one for one in standing.moved_in[name] if one != member and standing.state[one] is S.CUTTING_OVER)
        return f"{others[0]} of its group {name} is being cut over, and only one of them may be at a time." if others else None

    def _approval(self, member: str, _now: datetime) -> str | None:
        missing = self._standing.missing[member]
        return f"It waits for the approval of {listed(missing)}." if missing else None

    def _after(self, member: str, _now: datetime) -> str | None:
        standing = self._standing
        for name in standing.order.after.get(member, ()):
            if standing.is_healthy(name):
                continue
            inside = standing.order.members_of.get(name)
            left = [one for one in inside or (name,) if not standing.is_healthy(one)]
            # Members that will never be healthy are named before those that may be.
            left.sort(key=lambda one: (standing.state[one] not in _LOST_IN_WORDS, standing.place[one]))
            if inside is None:
                state = standing.state[name]
                return f"It waits for {name}, which {_LOST_IN_WORDS.get(state, f'is {_IN_WORDS[state]}')}."
            return f"It waits for group {name}: {len(left)} of {len(inside)} are not healthy: {self._named(left)}."
        return None

    def _together(self, member: str, _now: datetime) -> str | None:
        standing, group = self._standing, self._standing.together(member)
        if group is None or standing.is_group_prepared(group):
            return None
        left = [one for one in standing.order.members_of[group] if one != member and not standing.is_prepared(one)]
        if not left:
            return None
        first = left[0]
        if standing.state[first] is not S.READY:
            return f"Its group {group} cuts over together, and waits for {self._named(left)}."
        what = "an approval" if standing.missing[first] else "others outside of the group"
        return f"Its group {group} cuts over together, and {first} waits for {what}."

    def _cut(self, member: str, now: datetime) -> str | None:
        openings, window = self._standing.openings, self._standing.window(member)
        span = openings.open(window, now)
        if span is None:
            upcoming = openings.upcoming(window, now)
            if upcoming is None:
                return f"{capital(self._window_named(member))} does not open again: give it another window."
            return f"{capital(self._window_named(member))} opens on {shown_time(upcoming.start)}."
        return (
            self.not_in(member, span, now)
            or self.apart(member)
            or self._full(member, self._standing.cuts, "cut-overs")
            or "Its cut-over is next to begin."
        )

    # ── in words ─────────────────────────────────────────────────────────────────────────────────────────────────────

    def _full(self, member: str, running: Running, what: str) -> str | None:
        facts, limits = self._standing.facts[member], self._standing.wave.limits
        places = (
            (limits.wave, running.all, "of the wave"),
            (limits.per_source_host, running.by_host[facts.source_host], f"from source host {facts.source_host}"),
            (limits.per_destination, running.by_destination[facts.destination], f"to destination {facts.destination}"),
        )
        for limit, names, where in places:
            if limit is not None and len(names) >= limit:
                return self._once(f"{what} {where}", partial(self._full_reason, limit, names, f"{what} {where}"))
        return None

    def _full_reason(self, limit: int, names: Collection[str], what: str) -> str:
        in_order = sorted(names, key=self._standing.place.__getitem__)
        return f"{len(names)} of {limit} {what} run: {listed(in_order)}."

    def _once(self, what: str, reason: Callable[[], str]) -> str:
        """A reason that is made again only where a member has gone on."""
        at, made = self._shared.get(what, (-1, ""))
        if at != self._standing.changes:
            made = reason()
            self._shared[what] = self._standing.changes, made
        return made

    def _window_named(self, member: str) -> str:
        window = self._standing.window(member)
        return f"window {window}" if window else "a window of the wave"

    def _named(self, members: Sequence[str]) -> str:
        return listed([f"{name} ({_IN_WORDS[self._standing.state[name]]})" for name in members])
