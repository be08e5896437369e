"""Queries about the webhooks of waves: their sealed secrets, and what is to be delivered to them.

A delivery is added in the transaction of the change that it reports, so both exist or none. A process takes a delivery by a
compare-and-set on its attempts, which also sets the time of the next attempt: if the process dies while it sends, another one
takes it then. A webhook is sent one event at a time, over all hosts: until the answer is noted, no other event of it is due.
"""

import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any
from uuid import UUID

from sqlalchemy import Connection, Row, Select, delete, func, insert, or_, select, update

from synvirt.errors import Conflict, NotFound
from synvirt.store.migration_rows import one_at_a_time
from synvirt.store.tables import wave_deliveries, wave_hooks

Transaction = Callable[[], AbstractContextManager[Connection]]

PENDING, DELIVERED, GIVEN_UP = "pending", "delivered", "given_up"
# No attempt is put off for so long (an hour, and the hour that a command may take): a clock that was far ahead has put it off.
CLOCK_WRONG_S = 3 * 3600.0
# Two hosts that take events of one webhook must not both find that none is being sent: "hook".
TAKING_LOCK = 0x686F6F6B


@dataclass(frozen=True, slots=True)
class SealedHook:
    """The secret of a webhook, and the host that sealed it."""

    id: UUID
    host: str
    sealed: bytes


@dataclass(frozen=True, slots=True)
class NewDelivery:
    """A delivery to be added. `body`: JSON, as it will be sent. Each attempt sends the same bytes."""

    hook_id: UUID
    event: str
    body: str


@dataclass(frozen=True, slots=True)
class DeliveryRow:
    """A stored delivery. Times in seconds since 1970. `answer`: the result of the last attempt; None while one is made."""

    number: int
    wave_id: UUID
    hook_id: UUID
    event: str
    body: str
    state: str
    attempts: int
    made_at: float
    next_at: float
    answer: str | None


class HookRows:
    """The webhooks of waves, and their deliveries."""

    def __init__(self, *, reading: Transaction, writing: Transaction) -> None:
        self._reading, self._writing = reading, writing

    def sealed(self, hook_id: UUID) -> bytes | None:
        """The sealed secret of a webhook. None: it has no secret, or is gone."""
        with self._reading() as db:
            return db.execute(select(wave_hooks.c.sealed).where(wave_hooks.c.id == str(hook_id))).scalar()

    def add_once(self, wave_id: UUID, deliveries: Sequence[NewDelivery]) -> None:
        """Adds those deliveries whose hook has not had the same event of this wave yet."""
        had = select(wave_deliveries.c.hook_id, wave_deliveries.c.event).where(wave_deliveries.c.wave_id == str(wave_id))
        had = had.where(wave_deliveries.c.event.in_({one.event for one in deliveries})).distinct()

        def missing(db: Connection) -> list[NewDelivery]:
            found = {(row.hook_id, row.event) for row in db.execute(had)}
            return [one for one in deliveries if (str(one.hook_id), one.event) not in found]

        with self._reading() as db:
            if not missing(db):
                return
        with self._writing() as db:
            add_deliveries(db, wave_id, missing(db))

    def due(self, *, limit: int) -> list[DeliveryRow]:
        """The deliveries that are due, in the order of their events. At most `limit` of each hook: thousands that one server
        does not accept keep none from the others. A new one is due at once, whatever clock its host has."""
        at, next_at = time.time(), wave_deliveries.c.next_at
        is_due = or_(wave_deliveries.c.attempts == 0, next_at <= at, next_at > at + CLOCK_WRONG_S)
        chosen = (wave_deliveries.c.state == PENDING, is_due, wave_deliveries.c.hook_id.not_in(_being_sent(at)))
        place = func.row_number().over(partition_by=wave_deliveries.c.hook_id, order_by=wave_deliveries.c.number)
        ranked = select(wave_deliveries.c.number, place.label("place")).where(*chosen).subquery()
        query = select(wave_deliveries).join(ranked, ranked.c.number == wave_deliveries.c.number)
        query = query.where(ranked.c.place <= limit).order_by(wave_deliveries.c.number)
        with self._reading() as db:
            return [_delivery(row) for row in db.execute(query)]

    def take(self, one: DeliveryRow, *, pause_s: float) -> bool:
        """Takes a delivery; if no answer is noted, it is due again after `pause_s`. False, where another process has taken it,
        or sends another one of its webhook. One made by a clock that was ahead is as old as this attempt: else it would be
        given up later by as much."""
        same = (wave_deliveries.c.number == one.number, wave_deliveries.c.state == PENDING)
        with self._writing() as db:
            one_at_a_time(db, TAKING_LOCK)
            at = time.time()
            if db.execute(_being_sent(at).where(wave_deliveries.c.hook_id == str(one.hook_id))).first() is not None:
                return False
            values = {"attempts": one.attempts + 1, "next_at": at + pause_s, "made_at": min(one.made_at, at), "answer": None}
            done = db.execute(update(wave_deliveries).where(*same, wave_deliveries.c.attempts == one.attempts).values(**values))
            return done.rowcount == 1

    def put_off(self, one: DeliveryRow, *, pause_s: float, answer: str) -> None:
        """Notes that the attempt for which `one` was taken has failed: it is due again after `pause_s`. Nothing changes, where
        another process has taken it since."""
        same = (wave_deliveries.c.number == one.number, wave_deliveries.c.state == PENDING)
        with self._writing() as db:
            values = {"next_at": time.time() + pause_s, "answer": answer}
            db.execute(update(wave_deliveries).where(*same, wave_deliveries.c.attempts == one.attempts + 1).values(**values))

    def settle(self, number: int, *, state: str, answer: str) -> None:
        """Notes the result of the last attempt."""
        same = (wave_deliveries.c.number == number, wave_deliveries.c.state == PENDING)
        with self._writing() as db:
            db.execute(update(wave_deliveries).where(*same).values(state=state, answer=answer))

    def again(self, wave_id: UUID, number: int) -> DeliveryRow:
        """Makes a delivery that was given up due at once, as if it were new. NotFound; Conflict."""
        same = (wave_deliveries.c.wave_id == str(wave_id), wave_deliveries.c.number == number)
        with self._writing() as db:
            row = db.execute(select(wave_deliveries).where(*same)).first()
            if row is None:
                raise NotFound(f"wave {wave_id} has no delivery {number}", hint="its list of deliveries shows those there are")
            if row.state != GIVEN_UP:
                raise Conflict(f"delivery {number} is {row.state}", hint="only a delivery that was given up is sent again")
            at = time.time()
            values = {"state": PENDING, "attempts": 0, "made_at": at, "next_at": at}
            db.execute(update(wave_deliveries).where(*same).values(**values))
            return _delivery(db.execute(select(wave_deliveries).where(*same)).one())

    def owed(self, wave_id: UUID, hooks: Iterable[UUID]) -> DeliveryRow | None:
        """The oldest delivery that one of these hooks has not accepted yet."""
        query = select(wave_deliveries).where(wave_deliveries.c.wave_id == str(wave_id), wave_deliveries.c.state == PENDING)
        query = query.where(wave_deliveries.c.hook_id.in_([str(one) for one in hooks])).order_by(wave_deliveries.c.number)
        with self._reading() as db:
            row = db.execute(query.limit(1)).first()
        return None if row is None else _delivery(row)

    def page(
        self, wave_id: UUID, *, limit: int, cursor: int | None = None, states: Sequence[str] = ()
    ) -> tuple[list[DeliveryRow], int | None]:
        """A page of deliveries, newest first, and the cursor of the next page (None: this was the last)."""
        query = select(wave_deliveries).where(wave_deliveries.c.wave_id == str(wave_id))
        if cursor is not None:
            query = query.where(wave_deliveries.c.number < cursor)
        if states:
            query = query.where(wave_deliveries.c.state.in_(states))
        with self._reading() as db:
            rows = db.execute(query.order_by(wave_deliveries.c.number.desc()).limit(limit + 1)).all()
        return [_delivery(row) for row in rows[:limit]], rows[limit - 1].number if len(rows) > limit else None


def _being_sent(at: float) -> Select[tuple[str]]:
    """A query for the webhooks whose answer to an attempt is not noted yet."""
    next_at, is_taken = wave_deliveries.c.next_at, wave_deliveries.c.attempts > 0
    now = (wave_deliveries.c.answer.is_(None), next_at > at, next_at <= at + CLOCK_WRONG_S)
    return select(wave_deliveries.c.hook_id).where(wave_deliveries.c.state == PENDING, is_taken, *now)


# ── in the transactions of waves ─────────────────────────────────────────────────────────────────────────────────────


def add_hooks(db: Connection, wave_id: UUID, hooks: Sequence[SealedHook]) -> None:
    """Adds webhooks to a wave, in the caller's transaction."""
    for one in hooks:
        db.execute(insert(wave_hooks).values(id=str(one.id), wave_id=str(wave_id), host=one.host, sealed=one.sealed))


def replace_hooks(db: Connection, wave_id: UUID, hooks: Sequence[SealedHook]) -> None:
    """Replaces all webhooks of a wave, in the caller's transaction."""
    db.execute(delete(wave_hooks).where(wave_hooks.c.wave_id == str(wave_id)))
    add_hooks(db, wave_id, hooks)


def add_deliveries(db: Connection, wave_id: UUID, deliveries: Sequence[NewDelivery]) -> None:
    """Adds deliveries that are due at once, in the caller's transaction."""
    at = time.time()
    rows = [
        {
            "wave_id": str(wave_id),
            "hook_id": str(one.hook_id),
            "event": one.event,
            "body": one.body,
            "state": PENDING,
            "attempts": 0,
            "made_at": at,
            "next_at": at,
        }
        for one in deliveries
    ]
    if rows:
        db.execute(insert(wave_deliveries), rows)


def _delivery(row: Row[Any]) -> DeliveryRow:
    return DeliveryRow(
        number=row.number,
        wave_id=UUID(row.wave_id),
        hook_id=UUID(row.hook_id),
        event=row.event,
        body=row.body,
        state=row.state,
        attempts=row.attempts,
        made_at=row.made_at,
        next_at=row.next_at,
        answer=row.answer,
    )
