"""Queries about tokens and the audit trail, in the store's transactions. All hosts share both."""

import hashlib
import json
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, suppress
from datetime import UTC, datetime, timedelta
from typing import Any, NamedTuple
from uuid import UUID

from pydantic import Field
from sqlalchemy import Connection, delete, func, insert, select, text, update

from synvirt.accounts import Role
from synvirt.errors import PersistFailed, not_listed
from synvirt.model.values import Model, Time, now
from synvirt.store.documents import VERSION, Unreadable, is_known, parsed, readable, rewritten
from synvirt.store.tables import audit, tokens

Transaction = Callable[[], AbstractContextManager[Connection]]
# Entries are chained, so one is written after the other: "audt".
AUDIT_LOCK = 0x61756474
# A token's last use is noted once a minute at most, so that not each request of a script is a write.
USED_EVERY = timedelta(minutes=1)
FIRST = "0" * 64
# The account, the method and the resource of the entry that the service writes when it removes old entries.
RETAINED = ("(service)", "EXPIRE", "audit")
# The method of what is shown for an entry that cannot be read.
UNREADABLE = "UNREADABLE"


class Token(Model):
    """An API token. `account`: the account that made it, also by another token; where that account may not use the service any
    more, the token is refused. The secret is only in the answer to its making."""

    id: UUID
    name: str
    role: Role
    account: str
    created_at: Time
    expires_at: Time | None = None
    last_used_at: Time | None = None


class AuditEntry(Model):
    """Who did what, and how it ended. `result`: the HTTP status. `plan_digest`: SHA-256 of the accepted plan. `kept_from`: the
    service removed all entries before this one, as they were too old. `digest`: SHA-256 of the entry without `digest`, as
    canonical JSON; `plan_digest` and `kept_from` are part of it where they are set."""

    seq: int = 0
    at: Time
    account: str
    role: str
    address: str
    method: str
    resource: str
    result: int
    detail: str = ""
    plan_digest: str | None = None
    kept_from: int | None = None
    prev_digest: str = FIRST
    digest: str = Field(default="")

    def computed(self) -> str:
        """What `digest` must be: the SHA-256 (hex) of the entry's content with the digest of the entry before."""
        return _digest_of(json.loads(self.model_dump_json()))


class Link(NamedTuple):
    """An entry as the chain needs it, from its stored text, so that fields which a later version has added count too. `whole`:
    its text is what its digest was made of. `kept_from`: as in the entry, if the service wrote it."""

    seq: int
    digest: str
    prev_digest: str
    whole: bool
    kept_from: int | None = None


def link_of(seq: int, document: str) -> Link:
    """The link of a stored entry. Any text has one: a document that cannot be read is not whole."""
    try:
        content = json.loads(document)
        digest, prev_digest = content["digest"], content["prev_digest"]
        author = content["account"], content["method"], content["resource"]
        whole = content["seq"] == seq and digest == _digest_of(content)
        kept_from = content.get("kept_from") if author == RETAINED else None
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        return Link(seq, "", "", whole=False)
    return Link(seq, digest, prev_digest, whole, kept_from if isinstance(kept_from, int) else None)


def _digest_of(content: dict[str, Any]) -> str:
    # Entries of earlier versions have none of these two.
    absent = {name for name in ("plan_digest", "kept_from") if content.get(name) is None}
    kept = {name: value for name, value in content.items() if name not in {"digest", *absent}}
    return hashlib.sha256(json.dumps(kept, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


def _entry(seq: int, document: str) -> AuditEntry:
    """The entry; for a document that cannot be read, one that says so: it must not hide the others."""
    try:
        return parsed(AuditEntry, document)
    except Unreadable as error:
        account, _, resource = RETAINED
        at = datetime.fromtimestamp(0, UTC)
        return AuditEntry(
            seq=seq,
            at=at,
            account=account,
            role="",
            address="",
            method=UNREADABLE,
            resource=resource,
            result=Unreadable.status,
            detail=error.detail,
        )


class TokenRows:
    """The API tokens, by the hash of their secret."""

    def __init__(self, *, reading: Transaction, writing: Transaction) -> None:
        self._reading, self._writing = reading, writing

    def add(self, token: Token, secret_sha256: str) -> None:
        """Stores a token with the hash of its secret; the secret itself is never stored."""
        with self._writing() as db:
            db.execute(
                insert(tokens).values(
                    id=str(token.id), secret_sha256=secret_sha256, document=token.model_dump_json(), version=VERSION
                )
            )

    def by_secret(self, secret_sha256: str) -> Token | None:
        """The token with this secret, if it has not expired; its use is noted, where the store can be written."""
        with self._reading() as db:
            row = db.execute(select(tokens).where(tokens.c.secret_sha256 == secret_sha256, is_known(tokens.c.version))).first()
        if row is None:
            return None
        found, at = parsed(Token, row.document, row.version), now()
        if found.expires_at is not None and found.expires_at <= at:
            return None
        if found.last_used_at is None or at - found.last_used_at >= USED_EVERY:
            used = found.model_copy(update={"last_used_at": at})
            # A full disk must not lock out those who want to see what fills it.
            with suppress(PersistFailed), self._writing() as db:
                document = rewritten(row.document, found, used)
                db.execute(update(tokens).where(tokens.c.id == str(found.id)).values(document=document))
        return found

    def page(self, *, limit: int, cursor: int | None = None) -> tuple[list[Token], int | None]:
        """A page of tokens, oldest first, expired ones too, and the cursor of the next page (None: this was the last)."""
        query = select(tokens.c.number, tokens.c.document).where(is_known(tokens.c.version), tokens.c.number > (cursor or 0))
        with self._reading() as db:
            rows = db.execute(query.order_by(tokens.c.number).limit(limit + 1)).all()
        found = readable(Token, [row.document for row in rows[:limit]])
        return found, rows[limit - 1].number if len(rows) > limit else None

    def remove(self, token_id: UUID) -> None:
        """NotFound."""
        with self._writing() as db:
            if db.execute(delete(tokens).where(tokens.c.id == str(token_id))).rowcount == 0:
                raise not_listed("token", token_id)


class AuditRows:
    """The audit trail: a chain of entries, each with the digest of the one before."""

    def __init__(self, *, reading: Transaction, writing: Transaction) -> None:
        self._reading, self._writing = reading, writing

    def add(self, entry: AuditEntry) -> AuditEntry:
        """Adds an entry. The entry, with its number and its place in the chain."""
        with self._writing() as db:
            return _added(db, entry)

    def page(self, *, limit: int, cursor: int | None = None) -> tuple[list[AuditEntry], int | None]:
        """A page of entries, newest first, and the cursor of the next page (None: this was the last)."""
        query = select(audit.c.seq, audit.c.document)
        if cursor is not None:
            query = query.where(audit.c.seq < cursor)
        with self._reading() as db:
            rows = db.execute(query.order_by(audit.c.seq.desc()).limit(limit + 1)).all()
        return [_entry(row.seq, row.document) for row in rows[:limit]], rows[limit - 1].seq if len(rows) > limit else None

    def links(self, *, a_piece: int = 500) -> Iterator[Link]:
        """The links of all entries, newest first."""
        query = select(audit.c.seq, audit.c.document).order_by(audit.c.seq.desc()).limit(a_piece)
        before = None
        while True:
            with self._reading() as db:
                rows = db.execute(query if before is None else query.where(audit.c.seq < before)).all()
            if not rows:
                return
            yield from (link_of(row.seq, row.document) for row in rows)
            before = rows[-1].seq

    def oldest(self) -> int | None:
        """The number of the oldest entry; None: there is none."""
        with self._reading() as db:
            return db.execute(select(func.min(audit.c.seq))).scalar()

    def lines(self, *, after: int, limit: int) -> list[str]:
        """The documents after that number, oldest first."""
        query = select(audit.c.document).where(audit.c.seq > after).order_by(audit.c.seq).limit(limit)
        with self._reading() as db:
            return [row.document for row in db.execute(query).all()]

    def expire(self, before: datetime) -> int:
        """Removes the entries that are older. In the same transaction it adds an entry about that, which names the entry at
        which the chain now begins. The newest entry always stays. The number of removed entries."""
        with self._writing() as db:
            _alone(db)
            kept = _first_since(db, before)
            if kept is None:
                return 0
            gone = db.execute(delete(audit).where(audit.c.seq < kept)).rowcount
            account, method, resource = RETAINED
            words = f"{gone} entries before number {kept} were removed: they were too old"
            _added(
                db,
                AuditEntry(
                    at=now(),
                    account=account,
                    role="",
                    address="",
                    method=method,
                    resource=resource,
                    result=200,
                    detail=words,
                    kept_from=kept,
                ),
            )
        return gone


def _alone(db: Connection) -> None:
    """Takes the lock by which entries are written one after the other, on every host. SQLite has one writer anyway."""
    if db.dialect.name == "postgresql":
        db.execute(text("SELECT pg_advisory_xact_lock(:lock)"), {"lock": AUDIT_LOCK})


def _added(db: Connection, entry: AuditEntry) -> AuditEntry:
    _alone(db)
    last = db.execute(select(audit.c.seq, audit.c.digest).order_by(audit.c.seq.desc()).limit(1)).one_or_none()
    placed = entry.model_copy(
        update={"seq": 1 if last is None else last.seq + 1, "prev_digest": FIRST if last is None else last.digest}
    )
    made = placed.model_copy(update={"digest": placed.computed()})
    db.execute(insert(audit).values(seq=made.seq, digest=made.digest, document=made.model_dump_json()))
    return made


def _first_since(db: Connection, before: datetime) -> int | None:
    """The number of the oldest entry that stays: the newest of those that are too old. None: none is removed."""
    seen: list[int] = []
    query = select(audit.c.seq, audit.c.document).order_by(audit.c.seq).limit(500)
    while rows := db.execute(query.where(audit.c.seq > (seen[-1] if seen else 0))).all():
        for row in rows:
            if _entry(row.seq, row.document).at >= before:
                return row.seq if seen else None
            seen.append(row.seq)
    return seen[-1] if len(seen) > 1 else None


def broken_at(newest_first: Iterator[Link]) -> int | None:
    """The number of the first entry, from the newest on, that was changed or whose predecessor is missing. None: the chain is
    whole. The chain begins at number one, or at an entry that the service noted when it removed old ones."""
    after: Link | None = None
    begins_at = 1
    for link in newest_first:
        if not link.whole:
            return link.seq
        if after is not None and (after.prev_digest != link.digest or after.seq != link.seq + 1):
            return after.seq
        begins_at = max(begins_at, link.kept_from or 1)
        after = link
    return after.seq if after is not None and after.seq > begins_at else None
