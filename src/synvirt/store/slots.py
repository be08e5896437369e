"""Queries about slots: how many jobs of all hosts use one host of a source, one destination or one repository at the same time.

    take ─▶ a row that waits ─▶ first in the line, and one is free: held ─▶ leave: gone

A row counts as long as the lease of its host holds; so those of a host that died free themselves, when it has long ended what
it had under way (`jobs/lease.py`). A host's own go when it starts again. The line is strict: first come, first served, over all
that a job needs at once. So nobody starves, and no two wait for each other.
"""

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from typing import Any
from uuid import UUID

from sqlalchemy import ColumnElement, Connection, Select, and_, delete, exists, func, insert, or_, select, text, update

from synvirt.store.hosts import now
from synvirt.store.tables import hosts, slots

# Two jobs that look at one line at the same moment must not both find the last slot free: "slot".
SLOTS_LOCK = 0x736C6F74

Transaction = Callable[[], AbstractContextManager[Connection]]


class SlotRows:
    """The slots that jobs hold or wait for, of all hosts."""

    def __init__(self, *, reading: Transaction, writing: Transaction) -> None:
        self._reading, self._writing = reading, writing

    def take(self, job_id: UUID, wanted: Mapping[str, int], *, host: str, urgent: bool = False) -> bool:
        """A slot of each resource, of which that many are, or none; then the job has a place in each line, which it keeps when
        it asks again. `urgent`: at once, beyond the number, and counted for those who come later. Idempotent."""
        with self._writing() as db:
            if db.dialect.name == "postgresql":
                db.execute(text("SELECT pg_advisory_xact_lock(:lock)"), {"lock": SLOTS_LOCK})
            db.execute(delete(slots).where(slots.c.resource.in_(wanted), _is_over(db)))
            mine = (slots.c.job_id == str(job_id), slots.c.resource.in_(wanted))
            there = set(db.execute(select(slots.c.resource).where(*mine)).scalars())
            for resource in wanted:
                if resource not in there:
                    db.execute(insert(slots).values(resource=resource, job_id=str(job_id), host=host, held=False))
            if not urgent and not _is_next(db, job_id, wanted):
                return False
            db.execute(update(slots).where(*mine).values(held=True, host=host))
            return True

    def is_next(self, job_id: UUID, wanted: Mapping[str, int]) -> bool:
        """Would a `take` succeed now? Nothing is written: asked often."""
        with self._reading() as db:
            return _is_next(db, job_id, wanted)

    def leave(self, job_id: UUID, resources: Mapping[str, int] | None = None) -> None:
        """Its slots, or its places in the lines; None: all that it has. Idempotent."""
        chosen = slots.c.job_id == str(job_id)
        if resources is not None:
            chosen = and_(chosen, slots.c.resource.in_(resources))
        with self._writing() as db:
            db.execute(delete(slots).where(chosen))

    def has_any(self, job_id: UUID) -> bool:
        """Whether the job holds a slot or waits for one."""
        with self._reading() as db:
            return db.execute(select(slots.c.number).where(slots.c.job_id == str(job_id))).first() is not None

    def count(self, resource: str) -> tuple[int, int]:
        """How many are held, and how many wait."""
        with self._reading() as db:
            query = select(slots.c.held, func.count()).where(slots.c.resource == resource, ~_is_over(db)).group_by(slots.c.held)
            found: dict[bool, int] = {bool(held): count for held, count in db.execute(query)}
        return found.get(True, 0), found.get(False, 0)

    def counts(self) -> dict[str, tuple[int, int]]:
        """By resource that is in use, over all hosts: how many slots are held, and how many jobs wait in its line."""
        query = select(slots.c.resource, slots.c.held, func.count()).group_by(slots.c.resource, slots.c.held)
        found: dict[str, tuple[int, int]] = {}
        with self._reading() as db:
            for resource, held, count in db.execute(query.where(~_is_over(db)).order_by(slots.c.resource)):
                had, waited = found.get(resource, (0, 0))
                found[resource] = (had + count, waited) if held else (had, waited + count)
        return found


def _is_next(db: Connection, job_id: UUID, wanted: Mapping[str, int]) -> bool:
    return all(db.execute(_before(db, job_id, resource)).scalar_one() < most for resource, most in wanted.items())


def _before(db: Connection, job_id: UUID, resource: str) -> Select[Any]:
    """How many have a slot, or came before this job and have none yet."""
    own = select(slots.c.number).where(slots.c.job_id == str(job_id), slots.c.resource == resource).scalar_subquery()
    others = (slots.c.resource == resource, slots.c.job_id != str(job_id), ~_is_over(db))
    return select(func.count()).select_from(slots).where(*others, or_(slots.c.held, slots.c.number < own))


def _is_over(db: Connection) -> ColumnElement[bool]:
    """Its host's lease. One that is fenced, and whose lease is not over, may still have something under way."""
    return exists().where(hosts.c.id == slots.c.host, hosts.c.until <= now(db))
