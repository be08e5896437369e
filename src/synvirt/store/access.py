"""Queries about tokens and the audit trail, in the store's transactions. Both are the fleet's, not a host's."""

import hashlib
import json
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from datetime import timedelta
from uuid import UUID

from pydantic import Field
from sqlalchemy import Connection, delete, insert, select, text, update

from synvirt.accounts import Role
from synvirt.errors import NotFound
from synvirt.model import Model, Time, now
from synvirt.store.tables import audit, tokens

Transaction = Callable[[], AbstractContextManager[Connection]]
# Entries are chained one after the other: "audt".
AUDIT_LOCK = 0x61756474
# A token's last use is told to the minute: not each of a script's requests is a write.
USED_EVERY = timedelta(minutes=1)
FIRST = "0" * 64


class Token(Model):
    """`account`: who made it. The secret is in the answer to its making alone."""

    id: UUID
    name: str
    role: Role
    account: str
    created_at: Time
    expires_at: Time | None = None
    last_used_at: Time | None = None


class AuditEntry(Model):
    """Who did what, and how it ended. `result`: the HTTP status. `digest`: SHA-256 of the entry without it, as canonical
    JSON."""

    seq: int = 0
    at: Time
    account: str
    role: str
    address: str
    method: str
    resource: str
    result: int
    detail: str = ""
    prev_digest: str = FIRST
    digest: str = Field(default="")

    def computed(self) -> str:
        content = json.loads(self.model_dump_json(exclude={"digest"}))
        return hashlib.sha256(json.dumps(content, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


class TokenRows:
    def __init__(self, *, reading: Transaction, writing: Transaction) -> None:
        self._reading, self._writing = reading, writing

    def add(self, token: Token, secret_sha256: str) -> None:
        with self._writing() as db:
            db.execute(insert(tokens).values(id=str(token.id), secret_sha256=secret_sha256, document=token.model_dump_json()))

    def by_secret(self, secret_sha256: str) -> Token | None:
        """One that has not expired, noted as used."""
        with self._reading() as db:
            document = db.execute(select(tokens.c.document).where(tokens.c.secret_sha256 == secret_sha256)).scalar()
        if document is None:
            return None
        found, at = Token.model_validate_json(document), now()
        if found.expires_at is not None and found.expires_at <= at:
            return None
        if found.last_used_at is None or at - found.last_used_at >= USED_EVERY:
            used = found.model_copy(update={"last_used_at": at})
            with self._writing() as db:
                db.execute(update(tokens).where(tokens.c.id == str(found.id)).values(document=used.model_dump_json()))
        return found

    def all(self) -> list[Token]:
        with self._reading() as db:
            rows = db.execute(select(tokens.c.document).order_by(tokens.c.number)).all()
        return [Token.model_validate_json(row.document) for row in rows]

    def remove(self, token_id: UUID) -> None:
        """NotFound."""
        with self._writing() as db:
            if db.execute(delete(tokens).where(tokens.c.id == str(token_id))).rowcount == 0:
                raise NotFound(f"there is no token {token_id}")


class AuditRows:
    def __init__(self, *, reading: Transaction, writing: Transaction) -> None:
        self._reading, self._writing = reading, writing

    def add(self, entry: AuditEntry) -> AuditEntry:
        """With its number and its place in the chain."""
        with self._writing() as db:
            if db.dialect.name == "postgresql":
                db.execute(text("SELECT pg_advisory_xact_lock(:lock)"), {"lock": AUDIT_LOCK})
            last = db.execute(select(audit.c.seq, audit.c.digest).order_by(audit.c.seq.desc()).limit(1)).one_or_none()
            placed = entry.model_copy(
                update={"seq": 1 if last is None else last.seq + 1, "prev_digest": FIRST if last is None else last.digest}
            )
            made = placed.model_copy(update={"digest": placed.computed()})
            db.execute(insert(audit).values(seq=made.seq, digest=made.digest, document=made.model_dump_json()))
        return made

    def page(self, *, limit: int, cursor: int | None = None) -> tuple[list[AuditEntry], int | None]:
        """Newest first, and the cursor of the next page (None: this was the last)."""
        query = select(audit.c.seq, audit.c.document)
        if cursor is not None:
            query = query.where(audit.c.seq < cursor)
        with self._reading() as db:
            rows = db.execute(query.order_by(audit.c.seq.desc()).limit(limit + 1)).all()
        return [AuditEntry.model_validate_json(row.document) for row in rows[:limit]], (
            rows[limit - 1].seq if len(rows) > limit else None
        )


def broken_at(newest_first: Iterator[AuditEntry]) -> int | None:
    """The number of the first entry, from the newest, that was changed or before which one is missing; None: the chain holds.
    Its oldest entry may name one that was let go of when it was too old."""
    after: AuditEntry | None = None
    for entry in newest_first:
        if entry.digest != entry.computed():
            return entry.seq
        if after is not None and (after.prev_digest != entry.digest or after.seq != entry.seq + 1):
            return after.seq
        after = entry
    return None
