"""What happened to jobs, in the order of ids that only grow: what a stream replays. One code over a table a kind of job.

The tables stay apart, for each is a sequence that clients keep a place in (Last-Event-ID): in one table the ids that they hold
would mean other events. They also end in other ways: a migration's events go with it, those of runs and waves by age.
"""

from dataclasses import dataclass
from uuid import UUID

from sqlalchemy import ColumnElement, Connection, Table, delete, func, insert, select, text

from synvirt.store.documents import is_known
from synvirt.store.tables import backup_events, events, wave_events


@dataclass(frozen=True, slots=True)
class Event:
    """`document`: the job as it was then, or what happened to it."""

    id: int
    job_id: UUID
    document: str


@dataclass(frozen=True, slots=True)
class EventLog:
    """`owner`: the column that names the job. `lock`: one writer at a time, on PostgreSQL: it gives out ids at insert and shows
    rows at commit, so a reader that has seen 8 could miss a 7 that commits later. Moves are rare: it costs nothing."""

    table: Table
    owner: str
    lock: int

    def add(self, db: Connection, job_id: UUID, document: str, version: str, **more: str) -> int:
        """Its id. `more`: the table's other columns."""
        if db.dialect.name == "postgresql":  # SQLite has one writer anyway
            db.execute(text("SELECT pg_advisory_xact_lock(:lock)"), {"lock": self.lock})
        values = {self.owner: str(job_id), "document": document, "version": version, **more}
        (added,) = db.execute(insert(self.table).values(**values)).inserted_primary_key or (0,)
        return int(added)

    def after(
        self, db: Connection, event_id: int, *chosen: ColumnElement[bool], job_id: UUID | None = None, limit: int | None = None
    ) -> list[Event]:
        """In their order, those of one job, or of all that are `chosen`."""
        columns = (self.table.c.id, self.table.c[self.owner].label("job_id"), self.table.c.document)
        query = select(*columns).where(self.table.c.id > event_id, is_known(self.table.c.version), *chosen)
        if job_id is not None:
            query = query.where(self.of(job_id))
        found = db.execute(query.order_by(self.table.c.id).limit(limit))
        return [Event(row.id, UUID(row.job_id), row.document) for row in found]

    def newest(self, db: Connection, jobs: Table, *chosen: ColumnElement[bool]) -> list[Event]:
        """The newest event of each of the jobs, and the job as it is now."""
        # Of a run of long ago no event is left: 0, before all others.
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
        return db.execute(select(func.max(self.table.c.id)).where(*chosen)).scalar() or 0

    def of(self, job_id: UUID) -> ColumnElement[bool]:
        return self.table.c[self.owner] == str(job_id)

    def forget(self, db: Connection, *chosen: ColumnElement[bool]) -> None:
        """Deletes the chosen events, in the caller's transaction."""
        db.execute(delete(self.table).where(*chosen))


# The numbers are "evnt", "bkev" and "wvev" in ASCII.
OF_MIGRATIONS = EventLog(events, "migration_id", 0x65766E74)
OF_RUNS = EventLog(backup_events, "run_id", 0x626B6576)
OF_WAVES = EventLog(wave_events, "wave_id", 0x77766576)
