"""The ledger of all owners: what a job, a run, a guest's backup or a source's test makes, written before it is made.

Who reads and sweeps it, and the laws, are in `synvirt.jobs.ledger`; what an owner made on its own host is that host's to undo.
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Literal, NamedTuple
from uuid import UUID

from pydantic import BaseModel
from sqlalchemy import ColumnElement, Connection, delete, insert, select, update

from synvirt.store.documents import VERSION, is_known, parsed, rewritten, version_after
from synvirt.store.tables import ledger

Transaction = Callable[[], AbstractContextManager[Connection]]

# A migration; a backup run; a backup job, whose marks outlast its runs; a registered source, whose tests make snapshots.
OwnerKind = Literal["migration", "run", "backup_job", "source"]


class Owner(NamedTuple):
    """Who a ledger entry belongs to: a job, a run, a guest's backup or a source's test."""

    kind: OwnerKind
    id: UUID


@dataclass(frozen=True, slots=True)
class LedgerEntry:
    """`kind`: how it is undone; `name`: what is undone. `state`: of one that is to stay for a while, or in part.
    `document`: JSON, where a name does not say enough."""

    kind: str
    name: str
    state: str = ""
    document: str | None = None


class LedgerRows:
    """Of owners whose entries are of the host that made them. Those of migrations move with their job: they are the store's."""

    def __init__(self, *, reading: Transaction, writing: Transaction) -> None:
        self._reading, self._writing = reading, writing

    def record(self, owner: Owner, kind: str, name: str, *, host: str) -> None:
        """Idempotent."""
        with self._writing() as db:
            record(db, owner, LedgerEntry(kind, name), host=host)

    def put(self, owner: Owner, kind: str, name: str, document: BaseModel, *, state: str, host: str) -> None:
        """Recorded, or with this state and document from here on. Unreadable, where its document is quarantined."""
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
        """Idempotent."""
        with self._writing() as db:
            for entry in entries:
                strike(db, owner, entry.kind, entry.name)

    def replace(self, owner: Owner, entries: Sequence[LedgerEntry], *, host: str) -> None:
        """All that the owner has, in one transaction."""
        with self._writing() as db:
            forget(db, owner)
            for entry in entries:
                record(db, owner, entry, host=host)

    def of(self, owner: Owner) -> list[LedgerEntry]:
        """In the order in which the things were made."""
        with self._reading() as db:
            return entries_of(db, owner)

    def owned(self, kind: OwnerKind, *, host: str) -> list[tuple[Owner, LedgerEntry]]:
        """By all owners of the kind, on that host; oldest first."""
        chosen = (ledger.c.owner_kind == kind, ledger.c.host == host, is_known(ledger.c.version))
        with self._reading() as db:
            rows = db.execute(select(ledger).where(*chosen).order_by(ledger.c.id)).all()
        return [(Owner(kind, UUID(row.owner_id)), LedgerEntry(row.kind, row.name, row.state, row.document)) for row in rows]


# ── in the transactions of others ────────────────────────────────────────────────────────────────────────────────────────


def owned_by(owner: Owner) -> ColumnElement[bool]:
    return (ledger.c.owner_kind == owner.kind) & (ledger.c.owner_id == str(owner.id))


def record(db: Connection, owner: Owner, entry: LedgerEntry, *, host: str | None = None) -> None:
    """Idempotent. `host`: None, where the owner's is meant."""
    same = (owned_by(owner), ledger.c.kind == entry.kind, ledger.c.name == entry.name)
    if db.execute(select(ledger.c.id).where(*same)).first() is None:
        of_owner = {"owner_kind": owner.kind, "owner_id": str(owner.id), "host": host}
        thing = {"kind": entry.kind, "name": entry.name, "state": entry.state, "document": entry.document}
        db.execute(insert(ledger).values(**of_owner, **thing, version=VERSION))


def strike(db: Connection, owner: Owner, kind: str, name: str) -> None:
    """Deletes a ledger entry, in the caller's transaction."""
    db.execute(delete(ledger).where(owned_by(owner), ledger.c.kind == kind, ledger.c.name == name))


def forget(db: Connection, owner: Owner) -> None:
    """All that is written down of an owner that is no more."""
    db.execute(delete(ledger).where(owned_by(owner)))


def entries_of(db: Connection, owner: Owner) -> list[LedgerEntry]:
    """The ledger entries of an owner, oldest first, in the caller's transaction."""
    rows = db.execute(select(ledger).where(owned_by(owner)).order_by(ledger.c.id))
    return [LedgerEntry(row.kind, row.name, row.state, row.document) for row in rows]
