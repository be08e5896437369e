"""The ledger of all owners: an entry for each thing that a job, a run, a guest's backup or a source's test makes, written
before it is made.

`synvirt.jobs.ledger` reads and sweeps it, and has its laws. A host undoes what owners made on it.
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Literal, NamedTuple
from uuid import UUID

from pydantic import BaseModel
from sqlalchemy import ColumnElement, Connection, bindparam, delete, exists, insert, select, update

from synvirt.store.documents import VERSION, is_known, parsed, rewritten, version_after
from synvirt.store.tables import ledger

Transaction = Callable[[], AbstractContextManager[Connection]]

# A migration; a backup run; a backup job, whose marks stay after its runs; a registered source, whose tests make snapshots.
OwnerKind = Literal["migration", "run", "backup_job", "source"]


class Owner(NamedTuple):
    """The owner of a ledger entry: a job, a run, a guest's backup or a source's test."""

    kind: OwnerKind
    id: UUID


@dataclass(frozen=True, slots=True)
class LedgerEntry:
    """`kind`: how it is undone; `name`: what is undone. `state`: of an entry that stays for a while, or in part. `document`:
    JSON, where a name is not enough."""

    kind: str
    name: str
    state: str = ""
    document: str | None = None


class LedgerRows:
    """The entries of owners whose things stay on the host that made them. Entries of migrations move with their job: the store
    itself has the queries for those."""

    def __init__(self, *, reading: Transaction, writing: Transaction) -> None:
        self._reading, self._writing = reading, writing

    def record(self, owner: Owner, kind: str, name: str, *, host: str) -> None:
        """Adds an entry. Idempotent."""
        with self._writing() as db:
            record(db, owner, LedgerEntry(kind, name), host=host)

    def put(self, owner: Owner, kind: str, name: str, document: BaseModel, *, state: str, host: str) -> None:
        """Adds an entry, or gives it this state and document. Unreadable, where its document is quarantined."""
        same = (owned_by(owner), ledger.c.kind == kind, ledger.c.name == name)
        with self._writing() as db:
            present = db.execute(select(ledger).where(*same).with_for_update()).first()
            if present is None:
                record(db, owner, LedgerEntry(kind, name, state, document.model_dump_json()), host=host)
                return
            text = rewritten(present.document, parsed(type(document), present.document, present.version), document)
            values = {"state": state, "document": text, "version": version_after(present.version)}
            db.execute(update(ledger).where(*same).values(**values))

    def strike(self, owner: Owner, entries: Sequence[LedgerEntry]) -> None:
        """Deletes entries. Idempotent."""
        with self._writing() as db:
            for entry in entries:
                strike(db, owner, entry.kind, entry.name)

    def replace(self, owner: Owner, entries: Sequence[LedgerEntry], *, host: str) -> None:
        """Replaces all entries of the owner, in one transaction."""
        with self._writing() as db:
            forget(db, owner)
            for entry in entries:
                record(db, owner, entry, host=host)

    def of(self, owner: Owner) -> list[LedgerEntry]:
        """The owner's entries, oldest first."""
        with self._reading() as db:
            return entries_of(db, owner)

    def owned(self, kind: OwnerKind, *, host: str) -> list[tuple[Owner, LedgerEntry]]:
        """The entries of all owners of a kind on that host, oldest first."""
        chosen = (ledger.c.owner_kind == kind, ledger.c.host == host, is_known(ledger.c.version))
        with self._reading() as db:
            rows = db.execute(select(ledger).where(*chosen).order_by(ledger.c.id)).all()
        return [(Owner(kind, UUID(row.owner_id)), LedgerEntry(row.kind, row.name, row.state, row.document)) for row in rows]


# ── in the transactions of others ────────────────────────────────────────────────────────────────────────────────────────


def owned_by(owner: Owner) -> ColumnElement[bool]:
    return (ledger.c.owner_kind == owner.kind) & (ledger.c.owner_id == str(owner.id))


def record(db: Connection, owner: Owner, entry: LedgerEntry, *, host: str | None = None) -> None:
    """Adds an entry, in the caller's transaction. Idempotent. `host` None: the owner's host."""
    more = {"host": host, "state": entry.state, "document": entry.document, "version": VERSION}
    db.execute(_RECORD, {**_names(owner, entry.kind, entry.name), **more})


def strike(db: Connection, owner: Owner, kind: str, name: str) -> None:
    """Deletes a ledger entry, in the caller's transaction."""
    db.execute(_STRIKE, _names(owner, kind, name))


def _names(owner: Owner, kind: str, name: str) -> dict[str, object]:
    return {"of_kind": owner.kind, "owner": str(owner.id), "entry_kind": kind, "entry_name": name}


# Made once: to make a statement costs more than SQLite takes to answer it.
_OWNED = (ledger.c.owner_kind == bindparam("of_kind"), ledger.c.owner_id == bindparam("owner"))
_ENTRIES = select(ledger).where(*_OWNED).order_by(ledger.c.id)
_THIS = (
    *_OWNED,
    ledger.c.kind == bindparam("entry_kind"),
    ledger.c.name == bindparam("entry_name"),
)
_COLUMNS = {"owner_kind": "of_kind", "owner_id": "owner", "kind": "entry_kind", "name": "entry_name"} | {
    name: name for name in ("host", "state", "document", "version")
}
# An entry that is there is not added again.
_RECORD = insert(ledger).from_select(
    list(_COLUMNS),
    select(*(bindparam(name, type_=ledger.c[column].type) for column, name in _COLUMNS.items())).where(~exists().where(*_THIS)),
)
_STRIKE = delete(ledger).where(*_THIS)


def forget(db: Connection, owner: Owner) -> None:
    """Deletes all entries of an owner, in the caller's transaction."""
    db.execute(delete(ledger).where(owned_by(owner)))


def entries_of(db: Connection, owner: Owner) -> list[LedgerEntry]:
    """The ledger entries of an owner, oldest first, in the caller's transaction."""
    rows = db.execute(_ENTRIES, {"of_kind": owner.kind, "owner": str(owner.id)})
    return [LedgerEntry(row.kind, row.name, row.state, row.document) for row in rows]
