"""Queries about waves, in the store's transactions. `synvirt.fleet.model` knows the content of the documents.

All hosts share the waves; one of them leads them at a time (`leading`). A change is a compare-and-set on the state that its
caller saw, plus an event row.
"""

from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, NamedTuple, TypeVar
from uuid import UUID

from pydantic import BaseModel
from sqlalchemy import Connection, Row, bindparam, case, delete, func, insert, select, text, update
from sqlalchemy.exc import SQLAlchemyError

from synvirt.errors import Conflict, NotFound, PersistFailed, not_listed
from synvirt.store.documents import VERSION, is_known, parsed, rewritten, version_after, written
from synvirt.store.events import OF_WAVES, Event
from synvirt.store.hosts import now
from synvirt.store.tables import migrations, wave_events, wave_members, waves
from synvirt.store.wave_hooks import NewDelivery, SealedHook, add_deliveries, add_hooks, replace_hooks

Transaction = Callable[[], AbstractContextManager[Connection]]
M = TypeVar("M", bound=BaseModel)

# A replay is for a listener that was away for hours; a wave of thousands has some six events for each member.
EVENTS_KEPT = 50_000
# The lock of the host that leads the waves: "wave".
LEADER_LOCK = 0x77617665
# After this long without `keep_lead` a leader that hangs, or was frozen, loses the lead.
LEADER_IDLE_S = 30
# SQLite takes at most 32,766 parameters in a statement.
ROWS_A_STATEMENT = 1000


class MemberRow(NamedTuple):
    """`document` is the Member as JSON. The columns next to it are what queries and compare-and-sets use. A tuple, since each
    tick makes one for each of thousands of members."""

    member_id: str
    state: str
    document: str
    job_id: UUID | None = None
    submitted: bool = False
    rolling_back: bool = False
    waits_for: str | None = None
    version: str = VERSION


@dataclass(frozen=True, slots=True)
class WaveRow:
    """A stored wave. `counts`: members by state."""

    number: int
    id: UUID
    state: str
    document: str
    version: str
    counts: Mapping[str, int] = field(default_factory=dict)


# Raises, where the wave with these members stays as it is. It is called in the transaction that writes.
WaveCheck = Callable[[WaveRow, Sequence[MemberRow]], None]


@dataclass(frozen=True, slots=True)
class MemberChange:
    """A change to a member that is in one of `expected`. `change` gets the member as it is then, and gives the new one; None:
    no change. A `model` has a `state` and a `job_id`. `submitted`, `rolling_back`: None leaves it as it was."""

    member_id: str
    expected: frozenset[str]
    model: type[BaseModel]
    change: Callable[[Any], Any]
    submitted: bool | None = None
    rolling_back: bool | None = None


@dataclass(frozen=True, slots=True)
class NewWave:
    """A wave to be added, with its first event."""

    id: UUID
    name: str
    state: str
    document: BaseModel
    members: Sequence[MemberRow]
    event: str
    hooks: Sequence[SealedHook] = ()


def _no_deliveries(*_: object) -> Sequence[NewDelivery]:
    return ()


@dataclass(frozen=True, slots=True)
class WaveChange:
    """A change to a wave that is in one of `expected`, with its event. `model` has a `state` and a `name`. `deliveries`: gives
    what is sent to its webhooks, from the wave before and after."""

    expected: frozenset[str]
    change: Callable[[Any], Any]
    model: type[BaseModel]
    event: Callable[[Any], str]
    deliveries: Callable[[Any, Any], Sequence[NewDelivery]] = _no_deliveries

    def made(self, db: Connection, row: Row[Any]) -> Any:
        """The document after the change, written with its event and deliveries in the caller's transaction."""
        before = parsed(self.model, row.document, row.version)
        after = self.change(before)
        if after != before:
            _rewrite(db, row, before, after)
            _announce(db, UUID(row.id), self.event(after))
            add_deliveries(db, UUID(row.id), self.deliveries(before, after))
        return after


class WaveRows:
    """The waves and their members."""

    def __init__(self, *, reading: Transaction, writing: Transaction) -> None:
        self._reading, self._writing = reading, writing
        # The transaction that holds the lead. Only the ticking thread uses it.
        self._lead: Connection | None = None

    # ── waves ────────────────────────────────────────────────────────────────────────────────────────────────────────

    def add_all(self, added: Iterable[NewWave]) -> None:
        """Adds all waves, or none."""
        with self._writing() as db:
            for one in added:
                values = {"id": str(one.id), "name": one.name, "state": one.state, "document": written(one.document)}
                db.execute(insert(waves).values(**values, version=VERSION))
                _add_members(db, one.id, one.members)
                add_hooks(db, one.id, one.hooks)
                _announce(db, one.id, one.event)

    def get(self, wave_id: UUID) -> WaveRow:
        """The wave. NotFound."""
        with self._reading() as db:
            return _wave(_row(db, wave_id))

    def whole(self, wave_id: UUID, ids: Sequence[str] | None = None) -> tuple[WaveRow, list[MemberRow]]:
        """The wave, and its members in their order. `ids`: of these alone. NotFound."""
        with self._reading() as db:
            return _whole(db, _row(db, wave_id), wave_id, ids)

    def counted(self, wave_id: UUID) -> WaveRow:
        """The wave, with its members counted. NotFound."""
        with self._reading() as db:
            return _wave(_row(db, wave_id), _counts(db, [str(wave_id)]))

    def page(
        self, *, limit: int, cursor: int | None = None, states: Sequence[str] = (), name: str | None = None
    ) -> tuple[list[WaveRow], int | None]:
        """A page of waves, newest first, and the cursor of the next page (None: this was the last)."""
        query = select(waves).where(is_known(waves.c.version))
        if cursor is not None:
            query = query.where(waves.c.number < cursor)
        if states:
            query = query.where(waves.c.state.in_(states))
        if name is not None:
            query = query.where(waves.c.name == name)
        with self._reading() as db:
            rows = db.execute(query.order_by(waves.c.number.desc()).limit(limit + 1)).all()
            counts = _counts(db, [row.id for row in rows])
        return [_wave(row, counts) for row in rows[:limit]], rows[limit - 1].number if len(rows) > limit else None

    def unended(self, ends: Sequence[str], member_ends: Sequence[str], draft: str) -> list[UUID]:
        """The waves that have work left: they have not ended, or a member has not ended, or is to be rolled back."""
        states = {"ends": list(ends), "resting": [*ends, draft], "member_ends": list(member_ends)}
        with self._reading() as db:
            return [UUID(id_) for id_ in db.execute(_UNENDED, states).scalars()]

    def change(
        self,
        wave_id: UUID,
        expected: frozenset[str],
        change: Callable[[M], M],
        model: type[M],
        event: Callable[[M], str],
        *,
        deliveries: Callable[[M, M], Sequence[NewDelivery]] = _no_deliveries,
        member_ends: Sequence[str] = (),
    ) -> M:
        """Changes a wave as a WaveChange says. Conflict, where the wave is in none of `expected`; with `member_ends` also where
        a member is in none of those, or is to be rolled back."""
        with self._writing() as db:
            row = _row(db, wave_id, lock=True)
            if row.state not in expected:
                raise Conflict(
                    f"wave {wave_id} is {row.state}, and this is for one that is {' or '.join(sorted(expected))}",
                    hint="look at the wave: it shows its state",
                )
            if member_ends:
                left = wave_members.c.rolling_back | wave_members.c.state.not_in(member_ends)
                query = select(wave_members.c.member_id).where(wave_members.c.wave_id == str(wave_id), left).limit(1)
                if (one := db.execute(query).scalar()) is not None:
                    raise Conflict(f"{one} of wave {wave_id} has not ended", hint="look at the wave: it shows its state")
            after: M = WaveChange(expected, change, model, event, deliveries).made(db, row)
            return after

    def replace(
        self,
        wave_id: UUID,
        expected: str,
        change: Callable[[M], M],
        model: type[M],
        *,
        members: Sequence[MemberRow],
        event: str,
        hooks: Sequence[SealedHook] | None = None,
        check: WaveCheck = lambda row, members: None,
    ) -> M:
        """Replaces the wave and its members. `hooks`: None keeps them. Conflict, where it is not in `expected` any more."""
        with self._writing() as db:
            row = _row(db, wave_id, lock=True)
            if row.state != expected:
                raise Conflict(f"wave {wave_id} is {row.state}, not {expected}", hint="make another wave")
            check(*_whole(db, row, wave_id))
            before = parsed(model, row.document, row.version)
            after = change(before)
            _rewrite(db, row, before, after)
            db.execute(delete(wave_members).where(wave_members.c.wave_id == str(wave_id)))
            _add_members(db, wave_id, members)
            if hooks is not None:
                replace_hooks(db, wave_id, hooks)
            _announce(db, wave_id, event)
            return after

    def remove(self, wave_id: UUID, expected: frozenset[str], check: WaveCheck) -> None:
        """Removes all that is stored about a wave; its jobs stay. NotFound; Conflict, where it is in none of `expected`."""
        with self._writing() as db:
            row = _row(db, wave_id, lock=True)
            if row.state not in expected:
                raise Conflict(f"wave {wave_id} is {row.state}", hint="cancel it first, and let its jobs end")
            check(*_whole(db, row, wave_id))
            db.execute(delete(waves).where(waves.c.id == str(wave_id)))

    # ── members ──────────────────────────────────────────────────────────────────────────────────────────────────────

    def members(
        self, wave_id: UUID, *, limit: int | None = None, after: int = -1, states: Sequence[str] = ()
    ) -> tuple[list[MemberRow], int | None]:
        """A page of members in their order, and the position of the last one if there are more."""
        query = _MEMBERS
        if states:
            query = query.where(wave_members.c.state.in_(states))
        if limit is not None:
            query = query.limit(limit + 1)
        with self._reading() as db:
            _row(db, wave_id)
            rows = db.execute(query, {"wave": str(wave_id), "after": after}).all()
        more = limit is not None and len(rows) > limit
        kept = rows[:limit] if limit is not None else rows
        return [_member(row) for row in kept], kept[-1].position if more else None

    def member(self, wave_id: UUID, member_id: str) -> MemberRow:
        """The member. NotFound."""
        with self._reading() as db:
            row = db.execute(_MEMBER, {"wave": str(wave_id), "member": member_id}).first()
        if row is None:
            raise NotFound(f"wave {wave_id} has no member {member_id}", hint="its list of members shows those there are")
        return _member(row)

    def change_members(
        self,
        wave_id: UUID,
        changes: Sequence[MemberChange],
        event: Callable[[BaseModel], str],
        deliveries: Callable[[str, str, BaseModel], Sequence[NewDelivery]] = _no_deliveries,
        *,
        of_wave: WaveChange | None = None,
    ) -> list[str]:
        """Makes all changes that still fit, in one transaction, each with its event; the ids of the changed members.
        `deliveries`: gives what is sent to webhooks, from the wave's document, the member's state before, and the member.
        `of_wave`: a change to the wave in the same transaction, if it fits."""
        done = []
        with self._writing() as db:
            wave = _row(db, wave_id, lock=True)
            if of_wave is not None and wave.state in of_wave.expected:
                of_wave.made(db, wave)
            for change in changes:
                same = {"wave": str(wave_id), "member": change.member_id}
                row = db.execute(_MEMBER, same).first()
                if row is None or row.state not in change.expected:
                    continue
                known = parsed(change.model, row.document, row.version)
                after = change.change(known)
                if after is None:
                    continue
                values: dict[str, Any] = {
                    "state": str(after.state),
                    "document": rewritten(row.document, known, after),
                    "version": version_after(row.version),
                    "waits_for": None,
                    "job_id": None if after.job_id is None else str(after.job_id),
                }
                given = {"submitted": change.submitted, "rolling_back": change.rolling_back}
                values |= {name: value for name, value in given.items() if value is not None}
                db.execute(_CHANGED_MEMBER, same | values)
                _announce(db, wave_id, event(after))
                add_deliveries(db, wave_id, deliveries(wave.document, row.state, after))
                done.append(change.member_id)
        return done

    def rewrite_members(
        self,
        wave_id: UUID,
        states: Iterable[str],
        model: type[M],
        change: Callable[[M], M],
        *,
        only: Container[str] | None = None,
    ) -> None:
        """The documents of all that are in these states, as they are at this moment; no state changes, and no event is made.
        `only`: the ids of those that may change; the others are not parsed."""
        query, of_wave, new = _MEMBERS.where(wave_members.c.state.in_(list(states))), {"wave": str(wave_id)}, []
        with self._writing() as db:
            _row(db, wave_id, lock=True)
            found = db.execute(query, of_wave | {"after": -1}).all()
            for row in [one for one in found if only is None or one.member_id in only]:
                known = parsed(model, row.document, row.version)
                if (after := change(known)) != known:
                    values = {"document": rewritten(row.document, known, after), "version": version_after(row.version)}
                    new.append(of_wave | {"member": row.member_id} | values)
            if new:
                db.execute(_CHANGED_MEMBER, new)

    def put_reasons(self, wave_id: UUID, waits_for: Mapping[str, str | None]) -> None:
        """Why members wait. No event: sentences change with the clock."""
        if not waits_for:
            return
        rows = [{"wave": str(wave_id), "member": member_id, "waits_for": reason} for member_id, reason in waits_for.items()]
        with self._writing() as db:
            db.execute(_CHANGED_MEMBER, rows)

    def jobs(self, wave_id: UUID, but: Sequence[str]) -> dict[UUID, tuple[str, str, str]]:
        """The jobs of the members whose state is not in `but`: host, document and version, by the job's id."""
        with self._reading() as db:
            found = db.execute(_JOBS, {"wave": str(wave_id), "but": list(but)}).all()
            return {_uuid(id_): (host, document, version) for id_, host, document, version in found}

    def job(self, job_id: UUID) -> tuple[str, str, str] | None:
        """The job's host, document and version. None: there is no such job."""
        query = select(migrations.c.host, migrations.c.document, migrations.c.version).where(migrations.c.id == str(job_id))
        with self._reading() as db:
            row = db.execute(query).first()
        return None if row is None else (row.host, row.document, row.version)

    # ── what its copies share ────────────────────────────────────────────────────────────────────────────────────────

    def of_jobs(self, job_ids: Iterable[UUID]) -> WaveRow | None:
        """The wave that has one of these jobs, or None. If several waves have one, the newest."""
        with self._reading() as db:
            row = db.execute(_OF_JOBS, {"jobs": [str(one) for one in job_ids]}).first()
        return None if row is None else _wave(row)

    def take_rate(self, wave_id: UUID, seconds: float) -> float:
        """Takes the next `seconds` of the whole rate, after the turns that copies on all hosts already have. Returns in how
        many seconds this turn begins; 0 if the wave was removed."""
        chosen = waves.c.id == str(wave_id)
        with self._writing() as db:
            at = now(db)
            taken = waves.c.rate_taken_until
            db.execute(update(waves).where(chosen).values(rate_taken_until=case((taken > at, taken), else_=at) + seconds))
            left: float | None = db.execute(select(taken - at).where(chosen)).scalar()
        return 0.0 if left is None else max(left - seconds, 0.0)

    # ── who leads, and what happened ─────────────────────────────────────────────────────────────────────────────────

    @contextmanager
    def leading(self) -> Iterator[bool]:
        """Whether this host leads the waves during the block; if not, another host does. A SQLite store has only one host,
        which always leads. A leader calls `keep_lead` at least every LEADER_IDLE_S seconds."""
        with self._reading() as db:
            if db.dialect.name != "postgresql":
                yield True
                return
            # It ends with this transaction, and so with this process.
            asked = text("SELECT pg_try_advisory_xact_lock(:lock)")
            db.execute(text(f"SET LOCAL idle_in_transaction_session_timeout = '{LEADER_IDLE_S}s'"))
            leads = bool(db.execute(asked, {"lock": LEADER_LOCK}).scalar())
            self._lead = db if leads else None
            try:
                yield leads
            finally:
                self._lead = None

    def keep_lead(self) -> None:
        """PersistFailed, where the lead was lost: this process stood still, and another host may lead by now."""
        if self._lead is None:
            return
        try:
            self._lead.execute(text("SELECT 1"))
        except SQLAlchemyError as error:
            raise PersistFailed("this host does not lead the waves any more: it was paused for too long") from error

    def last_event_id(self) -> int:
        """The id of the newest event; 0: there is none."""
        with self._reading() as db:
            return OF_WAVES.last_id(db)

    def events_after(self, event_id: int, *, job_id: UUID | None, limit: int) -> list[Event]:
        """The events after `event_id`, in order. `job_id`: only those of the wave with this id."""
        with self._reading() as db:
            return OF_WAVES.after(db, event_id, job_id=job_id, limit=limit)


# Made once: to make a statement costs more than SQLite takes to answer it.
_WAVE = select(waves).where(waves.c.id == bindparam("wave"))
_LOCKED_WAVE = _WAVE.with_for_update()
_OF_WAVE = wave_members.c.wave_id == bindparam("wave")
_HAVE_JOBS = select(wave_members.c.wave_id).where(wave_members.c.job_id.in_(bindparam("jobs", expanding=True)))
_OF_JOBS = select(waves).where(waves.c.id.in_(_HAVE_JOBS)).order_by(waves.c.number.desc()).limit(1)
_OF_MEMBER = (_OF_WAVE, wave_members.c.member_id == bindparam("member"))
_MEMBER_ROW = select(*(wave_members.c[name] for name in MemberRow._fields), wave_members.c.position)
_MEMBER = _MEMBER_ROW.where(*_OF_MEMBER)
_MEMBERS = _MEMBER_ROW.where(_OF_WAVE, wave_members.c.position > bindparam("after"), is_known(wave_members.c.version)).order_by(
    wave_members.c.position
)
_NAMED_MEMBERS = _MEMBERS.where(wave_members.c.member_id.in_(bindparam("ids", expanding=True)))
_OWING = select(wave_members.c.wave_id).where(
    wave_members.c.rolling_back | wave_members.c.state.not_in(bindparam("member_ends", expanding=True))
)
_UNENDED = (
    select(waves.c.id)
    .where(
        waves.c.state.not_in(bindparam("resting", expanding=True))
        | (waves.c.state.in_(bindparam("ends", expanding=True)) & waves.c.id.in_(_OWING)),
        is_known(waves.c.version),
    )
    .order_by(waves.c.number)
)
# Its values are the columns that are given with it.
_CHANGED_MEMBER = update(wave_members).where(*_OF_MEMBER)
_JOBS = (
    select(migrations.c.id, migrations.c.host, migrations.c.document, migrations.c.version)
    .join(wave_members, wave_members.c.job_id == migrations.c.id)
    .where(_OF_WAVE, wave_members.c.state.not_in(bindparam("but", expanding=True)) | wave_members.c.rolling_back)
)


def _row(db: Connection, wave_id: UUID, *, lock: bool = False) -> Row[Any]:
    row = db.execute(_LOCKED_WAVE if lock else _WAVE, {"wave": str(wave_id)}).first()
    if row is None:
        raise not_listed("wave", wave_id)
    return row


def _whole(db: Connection, row: Row[Any], wave_id: UUID, ids: Sequence[str] | None = None) -> tuple[WaveRow, list[MemberRow]]:
    query = _MEMBERS if ids is None else _NAMED_MEMBERS
    return _wave(row), [_member(one) for one in db.execute(query, {"wave": str(wave_id), "after": -1, "ids": ids}).all()]


def _wave(row: Row[Any], counts: Mapping[str, Mapping[str, int]] = {}) -> WaveRow:
    return WaveRow(row.number, UUID(row.id), row.state, row.document, row.version, counts.get(row.id, {}))


def _rewrite(db: Connection, row: Row[Any], before: BaseModel, after: Any) -> None:
    values = {"document": rewritten(row.document, before, after), "version": version_after(row.version)}
    db.execute(update(waves).where(waves.c.number == row.number).values(state=str(after.state), name=after.name, **values))


def _member(row: Sequence[Any]) -> MemberRow:
    member_id, state, document, job_id, *more, _position = row
    return MemberRow(member_id, state, document, None if job_id is None else _uuid(job_id), *more)


# A tick reads each member several times, and most of what that took was this.
@lru_cache(10_000)
def _uuid(text: str) -> UUID:
    return UUID(text)


def _add_members(db: Connection, wave_id: UUID, members: Sequence[MemberRow]) -> None:
    all_of_them = {"wave_id": str(wave_id), "version": VERSION}
    rows = [
        {**all_of_them, "member_id": one.member_id, "position": position, "state": one.state, "document": one.document}
        for position, one in enumerate(members)
    ]
    for start in range(0, len(rows), ROWS_A_STATEMENT):
        db.execute(insert(wave_members), rows[start : start + ROWS_A_STATEMENT])


def _counts(db: Connection, ids: Sequence[str]) -> dict[str, dict[str, int]]:
    query = select(wave_members.c.wave_id, wave_members.c.state, func.count().label("members"))
    query = query.where(wave_members.c.wave_id.in_(ids)).group_by(wave_members.c.wave_id, wave_members.c.state)
    found: dict[str, dict[str, int]] = {}
    for row in db.execute(query):
        found.setdefault(row.wave_id, {})[row.state] = row.members
    return found


def _announce(db: Connection, wave_id: UUID, document: str) -> None:
    added = OF_WAVES.add(db, wave_id, document, VERSION)
    if added % 1000 == 0:
        OF_WAVES.forget(db, wave_events.c.id <= added - EVENTS_KEPT)
