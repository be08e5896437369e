"""Queries about backups, in the store's transactions: documents by kind. What they say is `synvirt.backups.model`'s to know."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Literal
from uuid import UUID

from sqlalchemy import Connection, delete, insert, select, update

from synvirt.errors import BackupNotFound
from synvirt.store.tables import backups

Transaction = Callable[[], AbstractContextManager[Connection]]
Kind = Literal["repository", "job", "run", "point"]


class BackupRows:
    def __init__(self, *, reading: Transaction, writing: Transaction) -> None:
        self._reading, self._writing = reading, writing

    def put(self, kind: Kind, id_: UUID, document: str, *, host: str, state: str = "") -> None:
        """Added, or in the place of what was there."""
        with self._writing() as db:
            same = (backups.c.id == str(id_), backups.c.host == host, backups.c.kind == kind)
            if db.execute(update(backups).where(*same).values(state=state, document=document)).rowcount == 0:
                db.execute(insert(backups).values(id=str(id_), host=host, kind=kind, state=state, document=document))

    def get(self, kind: Kind, id_: UUID, *, host: str) -> str:
        """BackupNotFound."""
        query = select(backups.c.document).where(backups.c.id == str(id_), backups.c.host == host, backups.c.kind == kind)
        with self._reading() as db:
            document = db.execute(query).scalar()
        if document is None:
            raise BackupNotFound(f"there is no backup {kind} {id_}")
        return str(document)

    def page(self, kind: Kind, *, host: str, limit: int, cursor: int | None = None) -> tuple[list[str], int | None]:
        """Newest first, and the cursor of the next page (None: this was the last)."""
        query = select(backups.c.number, backups.c.document).where(backups.c.host == host, backups.c.kind == kind)
        if cursor is not None:
            query = query.where(backups.c.number < cursor)
        with self._reading() as db:
            rows = db.execute(query.order_by(backups.c.number.desc()).limit(limit + 1)).all()
        return [row.document for row in rows[:limit]], rows[limit - 1].number if len(rows) > limit else None

    def all(self, kind: Kind, *, host: str, states: tuple[str, ...] | None = None) -> list[str]:
        """Oldest first."""
        query = select(backups.c.document).where(backups.c.host == host, backups.c.kind == kind)
        if states is not None:
            query = query.where(backups.c.state.in_(states))
        with self._reading() as db:
            return list(db.execute(query.order_by(backups.c.number)).scalars())

    def remove(self, kind: Kind, id_: UUID, *, host: str) -> None:
        """Idempotent."""
        with self._writing() as db:
            same = (backups.c.id == str(id_), backups.c.host == host, backups.c.kind == kind)
            db.execute(delete(backups).where(*same))
