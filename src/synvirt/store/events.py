"""Events of jobs, with ids that only grow: a stream replays them. One code for several tables, one for each kind of job.

The tables stay apart, because clients keep a place in each (Last-Event-ID): in one table their ids would mean other events.
Their rows also end differently: a migration's events are removed with it, those of runs and waves by age.
"""

from dataclasses import dataclass
from functools import cache
from typing import Any
from uuid import UUID

from sqlalchemy import ColumnElement, Connection, Insert, Select, Table, bindparam, delete, func, insert, select, text

from synvirt.store.documents import is_known
from synvirt.store.tables import backup_events, events, wave_events


@dataclass(frozen=True, slots=True)
class Event:
    """An event. `document`: the job as it was then, or what happened to it."""

    id: int
    job_id: UUID
    document: str


@dataclass(frozen=True, slots=True)
class EventLog:
    """The events in one table. `owner`: the column that names the job. `lock`: lets one writer in at a time, on PostgreSQL.
    That gives out ids at insert and shows rows at commit: without the lock a reader that has seen 8 could miss a 7 that commits
    later. Moves are rare, so the lock costs nothing."""

    table: Table
    owner: str
    lock: int

    def add(self, db: Connection, job_id: UUID, document: str, version: str, **more: str) -> int:
        """Adds an event, and gives its id. `more`: the table's other columns."""
        if db.dialect.name == "postgresql":  # SQLite has one writer anyway
            db.execute(text("SELECT pg_advisory_xact_lock(:lock)"), {"lock": self.lock})
        values = {self.owner: str(job_id), "document": document, "version": version, **more}
        (added,) = db.execute(_insert(self.table), values).inserted_primary_key or (0,)
        return int(added)

    def after(
        self, db: Connection, event_id: int, *chosen: ColumnElement[bool], job_id: UUID | None = None, limit: int | None = None
    ) -> list[Event]:
        """The events after an id, in order: of one job, or of all that are `chosen`."""
        query = _after(self.table, self.owner, of_one=job_id is not None)
        if chosen:
            query = query.where(*chosen)
        found = db.execute(query.limit(limit), {"seen": event_id, "owner": str(job_id)})
        return [Event(row.id, UUID(row.job_id), row.document) for row in found]

    def newest(self, db: Connection, jobs: Table, *chosen: ColumnElement[bool]) -> list[Event]:
        """The newest event of each of the jobs, and the job as it is now."""
        # A run of long ago has no event left: it gets 0, before all others.
        newest = func.coalesce(func.max(self.table.c.id), 0)
        query = (
            select(newest.label("event_id"), jobs.c.id, jobs.c.document)
            .join(self.table, self.table.c[self.owner] == jobs.c.id, isouter=True)
            .where(is_known(jobs.c.version), *chosen)
            .group_by(jobs.c.number)
            .order_by(newest)
        )
        return [Event(row.event_id, UUID(row.id), row.document) for row in db.execute(query)]

    def last_id(self, db: Connection, *chosen: ColumnElement[bool]) -> int:
        return db.execute(_last(self.table).where(*chosen) if chosen else _last(self.table)).scalar() or 0

    def of(self, job_id: UUID) -> ColumnElement[bool]:
        return self.table.c[self.owner] == str(job_id)

    def forget(self, db: Connection, *chosen: ColumnElement[bool]) -> None:
        """Deletes the chosen events, in the caller's transaction."""
        db.execute(delete(self.table).where(*chosen))


# Made once for each table: to make a statement costs more than SQLite takes to answer it.


@cache
def _insert(table: Table) -> Insert:
    return insert(table)


@cache
def _after(table: Table, owner: str, *, of_one: bool) -> Select[Any]:
    columns = (table.c.id, table.c[owner].label("job_id"), table.c.document)
    query = select(*columns).where(table.c.id > bindparam("seen"), is_known(table.c.version)).order_by(table.c.id)
    return query.where(table.c[owner] == bindparam("owner")) if of_one else query


@cache
def _last(table: Table) -> Select[Any]:
    return select(func.max(table.c.id))


# The numbers are "evnt", "bkev" and "wvev" in ASCII.
OF_MIGRATIONS = EventLog(events, "migration_id", 0x65766E74)
OF_RUNS = EventLog(backup_events, "run_id", 0x626B6576)
OF_WAVES = EventLog(wave_events, "wave_id", 0x77766576)
