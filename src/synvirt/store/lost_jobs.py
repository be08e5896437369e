"""The jobs of hosts that are lost: another host takes them over, or begins them again. In the store's transactions."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any
from uuid import UUID

from sqlalchemy import Connection, Row, delete, select, update

from synvirt.model.job import Migration
from synvirt.store.documents import rewritten, version_after
from synvirt.store.hosts import Fence, now
from synvirt.store.ledger import owned_by
from synvirt.store.migration_rows import (
    CLAIMS_LOCK,
    ENDED,
    add,
    announce,
    claimed,
    forget_secrets_and_slots,
    is_unended,
    one_at_a_time,
    owner,
    parse,
    rewrite,
    row_of,
)
from synvirt.store.tables import hosts, ledger, migrations, secrets, slots

Transaction = Callable[[], AbstractContextManager[Connection]]


class LostJobRows:
    """The unended jobs of fenced hosts. Every method raises PersistFailed where the database fails."""

    def __init__(self, *, reading: Transaction, writing: Transaction) -> None:
        self._reading, self._writing = reading, writing

    def all(self, *, but: str) -> list[tuple[UUID, Fence]]:
        """All of them, oldest first, each with its host's epoch. `but`: a host that is left out."""
        query = select(migrations.c.id, hosts.c.id.label("host"), hosts.c.epoch).join(hosts, hosts.c.id == migrations.c.host)
        lost = (hosts.c.fenced != "", hosts.c.id != but, is_unended())
        with self._reading() as db:
            return [(UUID(row.id), Fence(row.host, row.epoch)) for row in db.execute(query.where(*lost).order_by("number"))]

    def standing(self, *, but: str) -> frozenset[UUID]:
        """The jobs that wait for a host that is not alive, fenced or not yet: nothing is done for them. `but`: a host whose
        jobs are left out."""
        with self._reading() as db:
            alive = select(hosts.c.id).where(hosts.c.fenced == "", hosts.c.until > now(db))
            away = (is_unended(), migrations.c.host != but, migrations.c.host.not_in(alive))
            return frozenset(UUID(row.id) for row in db.execute(select(migrations.c.id).where(*away)))

    def take_over(self, job_id: UUID, lost: Fence, *, to: str) -> bool:
        """Gives a lost host's job to host `to`. False, where the lost host is back, the job has ended, another host has it by
        now, or a job of `to` has claimed the same name."""
        with self._writing() as db:
            row = _lost_row(db, job_id, lost)
            if row is None:
                return False
            mine = select(ledger.c.name).where(owned_by(owner(job_id)), ledger.c.kind == "claim")
            one_at_a_time(db, CLAIMS_LOCK)
            if db.execute(claimed(job_id, mine, to)).first() is not None:
                return False
            db.execute(update(migrations).where(migrations.c.id == str(job_id)).values(host=to))
            before = parse(row)
            after = before.model_copy(update={"host": to})
            document = rewritten(row.document, before, after)
            rewrite(db, row, after, document)
            announce(db, after, document, version_after(row.version))
            db.execute(update(secrets).where(secrets.c.migration_id == str(job_id)).values(host=to))
            db.execute(delete(slots).where(slots.c.job_id == str(job_id)))
            return True

    def restart_elsewhere(
        self,
        job_id: UUID,
        lost: Fence,
        failed: Callable[[Migration], Migration],
        again: Migration,
        *,
        to: str,
        sealed: bytes | None = None,
    ) -> bool:
        """Ends a lost host's job as `failed` says, and adds `again` on host `to`. The ledger entries about the source move to
        `again`, and so does the request to cancel. False, where the lost host is back, or the job has ended or moved to another
        host."""
        with self._writing() as db:
            row = _lost_row(db, job_id, lost)
            if row is None:
                return False
            before = parse(row)
            after = failed(before)
            document = rewritten(row.document, before, after)
            rewrite(db, row, after, document)
            forget_secrets_and_slots(db, job_id)
            announce(db, after, document, version_after(row.version))
            add(db, again, to, sealed)
            if row.cancel_requested:
                db.execute(update(migrations).where(migrations.c.id == str(again.id)).values(cancel_requested=True))
            at_source = (owned_by(owner(job_id)), ledger.c.kind.in_(("snapshot", "source_power", "tracking")))
            db.execute(update(ledger).where(*at_source).values(owner_id=str(again.id)))
            return True


def _lost_row(db: Connection, job_id: UUID, lost: Fence) -> Row[Any] | None:
    """The job's row, if its host is still fenced in this epoch; else None. On PostgreSQL the host's row is locked, so the host
    cannot come back before the transaction ends."""
    query = select(hosts.c.epoch, hosts.c.fenced).where(hosts.c.id == lost.host)
    host = db.execute(query.with_for_update() if db.dialect.name == "postgresql" else query).first()
    if host is None or host.epoch != lost.epoch or not host.fenced:
        return None
    row = row_of(db, job_id, lock=True)
    return None if row.host != lost.host or row.state in ENDED else row
