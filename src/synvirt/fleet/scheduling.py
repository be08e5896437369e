"""What a wave does now: which full copies begin, and which members cut over. Pure: no clock, no I/O.

    Scheduler(wave, openings, facts) ─ put(member, state) ─▶ decide(now) ─▶ begin, cut_over
                                                         why(member, now) ─▶ one sentence (reasons.py)

Real waves and the simulation use the same class, so a forecast follows the real rules. For a real wave it is built again at
each tick from the tables. A simulated one lives on, so each change must be cheap: a member that is held by another is in no
queue (standing.py), and there is one queue for each pair of source host and destination, skipped when it is full.

Full copies and cut-overs count separately against the limits: a copy that takes hours must not use up a window.
"""

import heapq
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from datetime import datetime
from functools import partial

from synvirt.fleet.facts import Facts
from synvirt.fleet.model import MemberRequest, MemberState, Wave, WaveRequest
from synvirt.fleet.order import Order
from synvirt.fleet.queueing import Key, Queues, Rank, Running
from synvirt.fleet.reasons import Reasons
from synvirt.fleet.standing import Standing
from synvirt.migrations.planning.openings import ALWAYS, Openings, openings_of
from synvirt.migrations.planning.windows import Span

S = MemberState


@dataclass(frozen=True, slots=True)
class Decision:
    """In the order in which they should begin. `canary_waits`: the canary is healthy, and only its approval is missing."""

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
    order_: Order | None = None,
) -> tuple[Decision, dict[str, str]]:
    """One tick of a real wave, and the reason of each waiting member. See Scheduler for the parameters. InvalidPlan."""
    scheduler = Scheduler(
        wave,
        openings_of(wave, now),
        facts,
        order_=order_,
        approved=approved,
        canary_approved=canary_approved,
        hold=hold,
    )
    for member, state in states.items():
        scheduler.put(member, state, at=(cut_over_at or {}).get(member))
    decision = scheduler.decide(now)
    return decision, scheduler.reasons(now)


class Scheduler:
    """`openings`: of its windows. `approved`: a member's approvers who have approved. `hold`: why nothing new
    may begin. All members start as waiting. InvalidPlan, for a wave with problems."""

    def __init__(
        self,
        wave: WaveRequest | Wave,
        openings: Openings,
        facts: Mapping[str, Facts],
        *,
        order_: Order | None = None,
        approved: Mapping[str, Iterable[str]] | None = None,
        canary_approved: bool = False,
        hold: str | None = None,
    ) -> None:
        self._wave, self._hold = wave, hold
        self._standing = Standing(
            wave,
            openings,
            facts,
            order_=order_,
            approved=approved or {},
            canary_approved=canary_approved,
            freed=self._enqueue,
        )
        self._reasons = Reasons(self._standing, hold)
        # Members whose copies may begin now, or later, or have not been checked yet.
        self._to_begin = Queues()
        self._later: list[tuple[datetime, int, str]] = []
        self._unqueued, self._gate_was_open = set(self._standing.members), False
        self._unqueued_are_new = True
        # Members that may cut over, by window; and those that its opening is too short for.
        self._to_cut = {name: Queues() for name in self._standing.openings.names}
        self._queued: set[str] = set()
        self._parked: dict[str, list[str]] = {}
        self._span_of: dict[str, Span | None] = {}

    # ── input and questions ──────────────────────────────────────────────────────────────────────────────────────────

    def member(self, name: str) -> MemberRequest:
        return self._standing.members[name]

    def put(self, member: str, state: MemberState, *, at: datetime | None = None) -> None:
        """`at`: when its cut-over began, if known."""
        if self._standing.state[member] is state and at is None:
            return
        self._standing.put(member, state, at=at)
        self._queued.discard(member)
        self._unqueued.discard(member)
        if state is S.WAITING:
            self._unqueued.add(member)
            self._unqueued_are_new = True
        self._enqueue(member)

    def update(self, member: str, facts: Facts) -> None:
        """Updates facts, like a measured outage. Its source host and destination stay."""
        self._standing.update(member, facts)
        if self._standing.state[member] is S.READY:
            self._enqueue(member)

    def why(self, member: str, now: datetime) -> str | None:
        """Why it does not go on, in a sentence; None, if it does, or has ended."""
        return self._reasons.why(member, now)

    def reasons(self, now: datetime) -> dict[str, str]:
        """The reasons of all waiting members."""
        return self._reasons.of_all(now)

    def open_span_of(self, member: str, now: datetime) -> Span | None:
        """The opening of its window that contains `now`."""
        return self._standing.openings.open(self._standing.window(member), now)

    def next_change(self, now: datetime) -> datetime | None:
        """When time alone may change the decisions; None, if it will not."""
        found = [self._later[0][0]] if self._later else []
        if self._wave.start_at is not None:
            found.append(self._wave.start_at)
        waits_for_window = bool(self._parked) or any(self._to_cut.values())
        if waits_for_window and (opens := self._standing.openings.next_start(now)) is not None:
            found.append(opens)
        return min((at for at in found if at > now), default=None)

    # ── decisions ────────────────────────────────────────────────────────────────────────────────────────────────────

    def decide(self, now: datetime) -> Decision:
        """Decides. The chosen members count as begun from here on."""
        standing = self._standing
        if self._hold is not None or (self._wave.start_at is not None and now < self._wave.start_at):
            return Decision((), (), standing.canary_waits())
        cut_over: list[str] = []
        for window, queues in self._to_cut.items():
            if not queues and window not in self._parked:
                continue
            span = self._open_span(window, now)
            if span is None:
                continue
            cut_over += queues.taken(self._is_free(standing.cuts), partial(self._cuts_over, span, now))
        return Decision(self._begin(now), tuple(cut_over), standing.canary_waits())

    def _begin(self, now: datetime) -> tuple[str, ...]:
        standing = self._standing
        is_open = standing.canary_open()
        if self._unqueued_are_new or is_open != self._gate_was_open:
            self._unqueued_are_new, self._gate_was_open = False, is_open
            for member in [name for name in self._unqueued if is_open or name in standing.canary]:
                self._unqueued.discard(member)
                heapq.heappush(self._later, (standing.begins_at(member, now), standing.place[member], member))
        while self._later and self._later[0][0] <= now:
            _, _, member = heapq.heappop(self._later)
            if standing.state[member] is S.WAITING:
                self._to_begin.push(self._key(member), self._rank(member, now), member)
        return tuple(self._to_begin.taken(self._is_free(standing.copies), self._begins))

    def _begins(self, member: str) -> bool | None:
        if self._standing.state[member] is not S.WAITING:
            return False
        if self._reasons.not_placed(member) is not None:
            return None
        self.put(member, S.SYNCING)
        return True

    def _cuts_over(self, span: Span, now: datetime, member: str) -> bool | None:
        if member not in self._queued:
            return False
        if not self._standing.may_cut(member):
            self._queued.discard(member)
            return False
        if self._reasons.not_in(member, span, now) is not None:
            # The rest of an opening only becomes shorter: the member is checked again in the next one, if that may help.
            self._queued.discard(member)
            if self._standing.fits_later(member, now) is not None:
                self._parked.setdefault(self._standing.window(member), []).append(member)
            return False
        if self._reasons.apart(member) is not None:
            return None
        self.put(member, S.CUTTING_OVER, at=now)
        return True

    def _enqueue(self, member: str) -> None:
        """Puts it into the queue that fits its present state."""
        standing = self._standing
        if member not in self._queued and standing.may_cut(member):
            self._queued.add(member)
            rank = (standing.members[member].priority, standing.place[member])
            self._to_cut[standing.window(member)].push(self._key(member), rank, member)

    def _open_span(self, window: str, now: datetime) -> Span | None:
        span = self._standing.openings.open(window, now)
        if span is not None and self._span_of.get(window) != span:
            self._span_of[window] = span
            for member in self._parked.pop(window, ()):
                self._enqueue(member)
        return span

    def _rank(self, member: str, now: datetime) -> Rank:
        opens = self._standing.first_opening(member, now) or ALWAYS.end
        return (opens, self._standing.members[member].priority, self._standing.place[member])

    def _key(self, member: str) -> Key:
        facts = self._standing.facts[member]
        return facts.source_host, facts.destination

    def _is_free(self, running: Running) -> Callable[[Key], bool]:
        limits, everyone = self._wave.limits, len(self._standing.members) + 1
        wave, host = limits.wave or everyone, limits.per_source_host or everyone
        destination = limits.per_destination or everyone
        return lambda key: (
            len(running.all) < wave
            and len(running.by_host[key[0]]) < host
            and len(running.by_destination[key[1]]) < destination
        )
