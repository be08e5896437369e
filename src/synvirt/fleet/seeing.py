"""A wave as one tick reads it. Most ticks find most of it as it was: a document is parsed again only where its text has
changed."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from uuid import UUID

import structlog

from synvirt.fleet.model import MEMBER_ENDS, Member, Wave, WaveUpdate
from synvirt.fleet.order import Order, order
from synvirt.fleet.records import wave_of
from synvirt.model.job import Migration
from synvirt.store.documents import Unreadable, parsed
from synvirt.store.waves import MemberRow, WaveRow, WaveRows

log = structlog.get_logger(__name__)

# Of more members that have changed, all are read. A tick changes few; SQLite takes some thousands of names in a query.
CHANGED_MOST = 200


@dataclass(frozen=True, slots=True)
class Seen:
    """`rows` of the members, by their ids: these alone have what members wait for. `jobs` by their ids, each with its host.
    `unreadable`: jobs that this version cannot read; they are there, and nothing is done with them. `as_of`: the newest event
    by then."""

    wave: Wave
    rows: Mapping[str, MemberRow]
    jobs: Mapping[UUID, tuple[str, Migration]]
    unreadable: frozenset[UUID]
    as_of: int

    def job_of(self, member: Member) -> Migration | None:
        """The member's job, if there is one."""
        found = None if member.job_id is None else self.jobs.get(member.job_id)
        return None if found is None else found[1]


class Seeing:
    """Looks at waves, and parses only what has changed since its last look. Not for several threads."""

    def __init__(self, rows: WaveRows) -> None:
        self._rows = rows
        # By wave: the text and what was parsed of it. Only what the newest look found is kept.
        self._members: dict[UUID, dict[str, tuple[str, Member]]] = {}
        self._jobs: dict[UUID, dict[UUID, tuple[str, Migration]]] = {}
        self._unreadable: dict[UUID, frozenset[UUID]] = {}
        self._orders: dict[UUID, tuple[list[str], Order]] = {}

    def forget(self) -> None:
        """No wave is under way."""
        for known in (self._members, self._jobs, self._unreadable, self._orders):
            known.clear()

    def seen(self, wave_id: UUID) -> Seen:
        """NotFound."""
        as_of = self._rows.last_event_id()
        head, rows = self._rows.whole(wave_id)
        return self._of(head, {row.member_id: row for row in rows}, as_of)

    def again(self, seen: Seen) -> Seen:
        """Reads again what has changed in this tick: a large wave takes a tenth of a second. No event says what members wait
        for: of those that have not changed it is as it was."""
        as_of = self._rows.last_event_id()
        if as_of == seen.as_of:
            return seen
        changed = self._changed(seen)
        if changed is None:
            return self.seen(seen.wave.id)
        head, rows = self._rows.whole(seen.wave.id, changed)
        return self._of(head, {**seen.rows, **{row.member_id: row for row in rows}}, as_of)

    def _changed(self, seen: Seen) -> list[str] | None:
        """The members with events since then. None: they are many, or the wave itself has one, and may have other members."""
        events = self._rows.events_after(seen.as_of, job_id=seen.wave.id, limit=CHANGED_MOST + 1)
        try:
            names = {parsed(WaveUpdate, event.document).member or "" for event in events}
        except Unreadable:
            return None
        known = sorted(name for name in names if name in seen.rows)
        return known if len(events) <= CHANGED_MOST and len(known) == len(names) else None

    def _of(self, head: WaveRow, rows: Mapping[str, MemberRow], as_of: int) -> Seen:
        members = self._parsed_members(head.id, rows.values())
        return Seen(wave_of(head, members), rows, *self._parsed_jobs(head.id), as_of)

    def order_of(self, wave: Wave) -> Order:
        """Members keep what they wait for from the draft on, so the order is the same while they are. InvalidPlan."""
        ids = [one.id for one in wave.members]
        if wave.id not in self._orders or self._orders[wave.id][0] != ids:
            self._orders[wave.id] = ids, order(wave)
        return self._orders[wave.id][1]

    def _parsed_members(self, wave_id: UUID, rows: Iterable[MemberRow]) -> list[Member]:
        before, after = self._members.get(wave_id, {}), dict[str, tuple[str, Member]]()
        for row in rows:
            known = before.get(row.member_id)
            if known is None or known[0] != row.document:
                known = row.document, parsed(Member, row.document, row.version)
            after[row.member_id] = known
        self._members[wave_id] = after
        return [member for _, member in after.values()]

    def _parsed_jobs(self, wave_id: UUID) -> tuple[dict[UUID, tuple[str, Migration]], frozenset[UUID]]:
        before, after = self._jobs.get(wave_id, {}), dict[UUID, tuple[str, Migration]]()
        found, unreadable = {}, set[UUID]()
        for id_, (host, document, version) in self._rows.jobs(wave_id, sorted(MEMBER_ENDS)).items():
            known = before.get(id_)
            try:
                job = known[1] if known is not None and known[0] == document else parsed(Migration, document, version)
            except Unreadable as error:
                unreadable.add(id_)
                if id_ not in self._unreadable.get(wave_id, ()):
                    log.warning("a job of a wave is left alone", job=str(id_), cause=error.detail)
                continue
            after[id_] = document, job
            found[id_] = host, job
        self._jobs[wave_id], self._unreadable[wave_id] = after, frozenset(unreadable)
        return found, self._unreadable[wave_id]
