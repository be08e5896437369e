"""Queries about slots: how many jobs of all hosts use one host of a source, one destination or one repository at the same time.

    take ─▶ a row that waits ─▶ first in the line, and one is free: held ─▶ leave: gone

A row counts while its host's lease holds. So the rows of a dead host stop counting, after it has ended what it had under way
(`jobs/lease.py`). A host deletes its own rows when it starts. The line is strict: first come, first served, for all slots that
a job needs together. So every job gets its turn, and no two jobs wait for each other.
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
        """Takes a slot of each resource, or none. `wanted`: how many slots each resource has. If it takes none, the job has a
        place in each line, and keeps it when it asks again. `urgent`: take them at once, even beyond the number; they count for
        later jobs. Idempotent."""
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
        """Whether a `take` would succeed now. Nothing is written, as this is asked often."""
        with self._reading() as db:
            return _is_next(db, job_id, wanted)

    def leave(self, job_id: UUID, resources: Mapping[str, int] | None = None) -> None:
        """Gives back a job's slots and places in lines; None: all of them. Idempotent."""
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
        """How many slots are held, and how many jobs wait."""
        with self._reading() as db:
            query = select(slots.c.held, func.count()).where(slots.c.resource == resource, ~_is_over(db)).group_by(slots.c.held)
            found: dict[bool, int] = {bool(held): count for held, count in db.execute(query)}
        return found.get(True, 0), found.get(False, 0)

    def counts(self) -> dict[str, tuple[int, int]]:
        """For each resource in use, over all hosts: how many slots are held, and how many jobs wait."""
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
    """How many jobs have a slot, or wait in the line before this job."""
    own = select(slots.c.number).where(slots.c.job_id == str(job_id), slots.c.resource == resource).scalar_subquery()
    others = (slots.c.resource == resource, slots.c.job_id != str(job_id), ~_is_over(db))
    return select(func.count()).select_from(slots).where(*others, or_(slots.c.held, slots.c.number < own))


def _is_over(db: Connection) -> ColumnElement[bool]:
    """Whether the lease of the row's host is over. A fenced host whose lease is not over may still have work under way."""
    return exists().where(hosts.c.id == slots.c.host, hosts.c.until <= now(db))
