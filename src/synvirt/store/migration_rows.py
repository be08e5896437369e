"""The rows of migrations: what several queries do with them, in the caller's transaction."""

from typing import Any
from uuid import UUID

from sqlalchemy import (
    ColumnElement,
    CompoundSelect,
    Connection,
    Row,
    Select,
    bindparam,
    delete,
    insert,
    select,
    text,
    union_all,
    update,
)

from synvirt.errors import Conflict, not_listed
from synvirt.model.job import Migration
from synvirt.model.kinds import ENDS
from synvirt.store.documents import VERSION, parsed, version_after, written
from synvirt.store.events import OF_MIGRATIONS
from synvirt.store.filters import kept
from synvirt.store.ledger import LedgerEntry, Owner, record
from synvirt.store.tables import UNENDED, events, ledger, migrations, secrets, slots

# A job that waits for a source for months reports it again and again, so its older events are deleted. A listener that was
# away for longer sees the job as it is now.
EVENTS_KEPT, FOLDED_EVERY = 200, 16
# Two owners that claim one name at the same moment must not both find it free: "clms".
CLAIMS_LOCK = 0x636C6D73
ENDED = tuple(str(end) for end in ENDS)
# Made once: to make a statement costs more than SQLite takes to answer it.
_JOB = select(migrations).where(migrations.c.id == bindparam("job"))
_LOCKED_JOB = _JOB.with_for_update()
_REWRITE = (
    update(migrations)
    .where(migrations.c.number == bindparam("of_number"))
    .values(state=bindparam("new_state"), document=bindparam("new_document"), version=bindparam("new_version"))
)
# Apart: the index of names is written only for a new one.
_RENAME = update(migrations).where(migrations.c.number == bindparam("of_number")).values(name=bindparam("new_name"))
_INSERT = insert(migrations)
_FORGET_SECRETS = delete(secrets).where(secrets.c.migration_id == bindparam("job"))
_FORGET_SLOTS = delete(slots).where(slots.c.job_id == bindparam("job"))
_NUMBER_UNENDED = select(migrations.c.number).where(text(UNENDED)).correlate(None)
# Joins the ledger's rows to the migrations that own them.
OWNED = (ledger.c.owner_kind == "migration") & (ledger.c.owner_id == migrations.c.id)


def is_unended(host: str | None = None) -> ColumnElement[bool]:
    """Whether a job (of a host) has not ended. By the index of those: the rows of ended jobs, which are many more, are not
    read."""
    return migrations.c.number.in_(_NUMBER_UNENDED if host is None else _NUMBER_UNENDED.where(migrations.c.host == host))


def owner(job_id: UUID) -> Owner:
    """The job as an owner of ledger entries."""
    return Owner("migration", job_id)


def row_of(db: Connection, job_id: UUID, *, lock: bool = False) -> Row[Any]:
    """The job's row, locked for this transaction where `lock`. NotFound."""
    row = db.execute(_LOCKED_JOB if lock else _JOB, {"job": str(job_id)}).first()
    if row is None:
        raise not_listed("migration", job_id)
    return row


def parse(row: Row[Any]) -> Migration:
    """The job of a row. Unreadable."""
    return parsed(Migration, row.document, row.version)


def add(db: Connection, job: Migration, host: str, sealed: bytes | None) -> None:
    """Adds the row of a new job, its sealed secrets, and its first event."""
    document = written(job)
    values = {"id": str(job.id), "host": host, "state": job.state, "document": document, "version": VERSION}
    ref = job.plan.source_ref
    finders = {"name": kept(job.name), "source_id": str(ref.source_id) if ref.kind == "live_vm" else ""}
    db.execute(_INSERT, {**values, **finders})
    if sealed is not None:
        db.execute(insert(secrets).values(migration_id=str(job.id), host=host, sealed=sealed))
    announce(db, job, document, VERSION)


def rewrite(db: Connection, row: Row[Any], after: Migration, document: str) -> None:
    """Writes a job's new document into its row. The column that finds it by its name follows: a job gets its machine's name
    once its source has answered."""
    values = {"new_state": after.state, "new_document": document, "new_version": version_after(row.version)}
    db.execute(_REWRITE, {"of_number": row.number, **values})
    if row.name is not None and row.name != (name := kept(after.name)):
        db.execute(_RENAME, {"of_number": row.number, "new_name": name})


def forget_secrets_and_slots(db: Connection, job_id: UUID) -> None:
    """Deletes the sealed secrets and the slots of a job that ends."""
    db.execute(_FORGET_SECRETS, {"job": str(job_id)})
    db.execute(_FORGET_SLOTS, {"job": str(job_id)})


def announce(db: Connection, job: Migration, document: str, version: str) -> None:
    """Adds an event. Now and then it deletes events older than the last EVENTS_KEPT."""
    if OF_MIGRATIONS.add(db, job.id, document, version) % FOLDED_EVERY == 0:
        of_job = OF_MIGRATIONS.of(job.id)
        kept = select(events.c.id).where(of_job).order_by(events.c.id.desc()).limit(1).offset(EVENTS_KEPT).scalar_subquery()
        OF_MIGRATIONS.forget(db, of_job, events.c.id <= kept)


def claimed(by: UUID, names: list[str] | Select[tuple[str]], host: str) -> CompoundSelect[tuple[str, str, str]]:
    """A query for those of `names` that another unended job or backup run of the host has claimed, each with its owner. Those
    of jobs by these: the ledger has the claims of all ended ones too, and SQLite, without `concat`, would look through them.
    A run leaves none at its end."""
    of_unended = ledger.c.owner_id.in_(select(migrations.c.id).where(is_unended(host), migrations.c.id != str(by)))
    of_run = (ledger.c.owner_kind == "run", ledger.c.host == host, ledger.c.owner_id != str(by))
    claims = select(ledger.c.name, ledger.c.owner_id.label("id"), ledger.c.owner_kind.label("owner"))
    claims = claims.where(ledger.c.kind == "claim", ledger.c.name.in_(names))
    return union_all(claims.where(ledger.c.owner_kind.concat("") == "migration", of_unended), claims.where(*of_run))


def claim(db: Connection, by: Owner, names: list[str], host: str, *, hint: str) -> None:
    """Adds ledger entries for names that only one unended job or backup run of a host may have. Conflict, when another has
    one."""
    one_at_a_time(db, CLAIMS_LOCK)
    refuse_claimed(db, by, names, host, hint=hint)
    for name in names:
        record(db, by, LedgerEntry("claim", name), host=host if by.kind == "run" else None)


def refuse_claimed(db: Connection, by: Owner, names: list[str], host: str, *, hint: str) -> None:
    """Conflict, when another unended job or backup run of the host has one of the names."""
    if (taken := db.execute(claimed(by.id, names, host)).first()) is not None:
        raise Conflict(f"{taken.owner} {taken.id}, which has not ended, has the {taken.name} too", hint=hint)


def one_at_a_time(db: Connection, lock: int) -> None:
    """Waits until no other transaction holds this lock, and holds it until its own end. SQLite has one writer anyway."""
    if db.dialect.name == "postgresql":
        db.execute(text("SELECT pg_advisory_xact_lock(:lock)"), {"lock": lock})
