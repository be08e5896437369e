"""Queries about slots: how many jobs of all hosts use one host of a source, one destination or one repository at the same time.

    take ─▶ a row that waits ─▶ first in the line, and one is free: held ─▶ leave: gone

A row counts while its host's lease holds, and always for its own host. So the rows of a dead host stop counting, after it has
ended what it had under way (`jobs/lease.py`). A host deletes its own rows when it starts. The line is strict: first come, first
served, for all slots that a job needs together. So every job gets its turn, and no two jobs wait for each other.
"""

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import cache
from uuid import UUID

from sqlalchemy import (
    ColumnElement,
    Connection,
    Delete,
    Select,
    bindparam,
    delete,
    exists,
    func,
    insert,
    or_,
    select,
    text,
    update,
)

from synvirt.store.hosts import clock
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
            mine = {"job": str(job_id), "wanted": list(wanted)}
            db.execute(_line(db.dialect.name).forget_over, {"wanted": mine["wanted"], "asking": host})
            there = set(db.execute(_MINE, mine).scalars())
            row = {"job_id": str(job_id), "host": host, "held": False}
            if new := [{"resource": resource, **row} for resource in wanted if resource not in there]:
                db.execute(_INSERT, new)
            if not urgent and not _is_next(db, job_id, wanted, host):
                return False
            db.execute(_HOLD, {**mine, "of_host": host})
            return True

    def is_next(self, job_id: UUID, wanted: Mapping[str, int], *, host: str) -> bool:
        """Whether a `take` would succeed now. Nothing is written, as this is asked often."""
        with self._reading() as db:
            return _is_next(db, job_id, wanted, host)

    def leave(self, job_id: UUID, resources: Mapping[str, int] | None = None) -> None:
        """Gives back a job's slots and places in lines; None: all of them. Idempotent."""
        with self._writing() as db:
            if resources is None:
                free(db, job_id)
            else:
                db.execute(_LEAVE, {"job": str(job_id), "wanted": list(resources)})

    def has_any(self, job_id: UUID) -> bool:
        """Whether the job holds a slot or waits for one."""
        with self._reading() as db:
            return db.execute(_ANY, {"job": str(job_id)}).first() is not None

    def count(self, resource: str) -> tuple[int, int]:
        """How many slots are held, and how many jobs wait."""
        with self._reading() as db:
            query = (
                select(slots.c.held, func.count())
                .where(slots.c.resource == resource, ~_is_over(db.dialect.name))
                .group_by(slots.c.held)
            )
            found: dict[bool, int] = {bool(held): count for held, count in db.execute(query)}
        return found.get(True, 0), found.get(False, 0)

    def counts(self) -> dict[str, tuple[int, int]]:
        """For each resource in use, over all hosts: how many slots are held, and how many jobs wait."""
        query = select(slots.c.resource, slots.c.held, func.count()).group_by(slots.c.resource, slots.c.held)
        found: dict[str, tuple[int, int]] = {}
        with self._reading() as db:
            for resource, held, count in db.execute(query.where(~_is_over(db.dialect.name)).order_by(slots.c.resource)):
                had, waited = found.get(resource, (0, 0))
                found[resource] = (had + count, waited) if held else (had, waited + count)
        return found


def free(db: Connection, job_id: UUID) -> None:
    """Gives back a job's slots and places in lines, in the caller's transaction."""
    db.execute(_LEAVE_ALL, {"job": str(job_id)})


# Made once: each pass of a job takes slots, and to make a statement costs more than SQLite takes to answer it.
_OF_JOB = slots.c.job_id == bindparam("job")
_THESE = (_OF_JOB, slots.c.resource.in_(bindparam("wanted", expanding=True)))
_MINE = select(slots.c.resource).where(*_THESE)
_HOLD = update(slots).where(*_THESE).values(held=True, host=bindparam("of_host"))
_INSERT = insert(slots)
_LEAVE, _LEAVE_ALL = delete(slots).where(*_THESE), delete(slots).where(_OF_JOB)
_ANY = select(slots.c.number).where(_OF_JOB)


@dataclass(frozen=True, slots=True)
class _Line:
    """Statements that ask a database's clock. `before`: how many jobs have a slot of `this`, or wait in line before `job`; no
    more than `most` are counted, as each of a thousand that wait asks again and again."""

    forget_over: Delete
    before: Select[int]


@cache
def _line(dialect: str) -> _Line:
    # Who asks is alive: a clock that was set ahead has not ended its jobs.
    is_over = (slots.c.host != bindparam("asking")) & _is_over(dialect)
    own = select(slots.c.number).where(slots.c.job_id == bindparam("job"), slots.c.resource == bindparam("this"))
    others = (slots.c.resource == bindparam("this"), slots.c.job_id != bindparam("job"), ~is_over)
    before = or_(slots.c.held, slots.c.number < own.scalar_subquery())
    wanted = slots.c.resource.in_(bindparam("wanted", expanding=True))
    return _Line(
        forget_over=delete(slots).where(wanted, is_over),
        before=select(func.count()).select_from(
            select(slots.c.number).where(*others, before).order_by(slots.c.number).limit(bindparam("most")).subquery()
        ),
    )


def _is_next(db: Connection, job_id: UUID, wanted: Mapping[str, int], host: str) -> bool:
    query, mine = _line(db.dialect.name).before, {"job": str(job_id), "asking": host}
    return all(db.execute(query, {**mine, "this": this, "most": most}).scalar_one() < most for this, most in wanted.items())


def _is_over(dialect: str) -> ColumnElement[bool]:
    """Whether the lease of the row's host is over. A fenced host whose lease is not over may still have work under way."""
    return exists().where(hosts.c.id == slots.c.host, hosts.c.until <= clock(dialect))
