"""Queries by name. Each method is one transaction; a job's move is a compare-and-set on its state plus an event row.

Every failure of the database is PersistFailed. `on_commit` is called after each commit that wrote: the engine wakes its
listeners with it, and the tests crash there.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime
from typing import Any
from uuid import UUID

from sqlalchemy import (
    ColumnElement,
    Connection,
    Row,
    Select,
    delete,
    exists,
    func,
    insert,
    select,
    text,
    update,
)
from sqlalchemy.exc import SQLAlchemyError

from synvirt.errors import Conflict, NotFound, PersistFailed
from synvirt.model.job import Migration
from synvirt.model.kinds import ENDS, State
from synvirt.store import ledger as ledgers
from synvirt.store import watermarks as marks
from synvirt.store.access import AuditRows, TokenRows
from synvirt.store.backups import BackupRows
from synvirt.store.documents import VERSION, is_known, parsed, readable, rewritten, version_after
from synvirt.store.events import OF_MIGRATIONS, Event
from synvirt.store.filters import ALL, Only
from synvirt.store.host_claim import HostClaim
from synvirt.store.hosts import Fence, HostRows
from synvirt.store.ledger import LedgerEntry, LedgerRows, Owner, owned_by
from synvirt.store.memory import MemoryRows, forget_passes
from synvirt.store.opening import opened
from synvirt.store.rehearsals import RehearsalRows
from synvirt.store.slots import SlotRows
from synvirt.store.sources import SourceRows
from synvirt.store.tables import events, hosts, ledger, migrations, rehearsals, secrets, slots
from synvirt.store.upgrading import upgrade
from synvirt.store.uploads import UploadRows
from synvirt.store.watermarks import Watermark
from synvirt.store.wave_hooks import HookRows
from synvirt.store.waves import WaveRows

# A job that waits for a source for months tells of it again and again. Who was away longer than this sees the job as it is.
EVENTS_KEPT, FOLDED_EVERY = 200, 16
# Two jobs that claim one name at the same moment must not both find it free: "clms".
CLAIMS_LOCK = 0x636C6D73
# One upgrade of the schema at a time: "upgr".
UPGRADE_LOCK = 0x75706772
_ENDED = tuple(str(end) for end in ENDS)
_STATES = frozenset(str(state) for state in State)


@dataclass(frozen=True, slots=True)
class Wish:
    """What an operator asked of a job: to cancel, or else to cut over or to be rehearsed."""

    job_id: UUID
    cancel: bool


class Store:
    """The store of this service; its parts are fields. Every method raises PersistFailed where the database fails."""

    def __init__(self, url: str, *, on_commit: Callable[[], None] = lambda: None) -> None:
        self._engine = opened(url)
        self.on_commit = on_commit
        self.uploads = UploadRows(reading=self._reading, writing=self._writing)
        self.backups = BackupRows(reading=self._reading, writing=self._writing)
        self.sources = SourceRows(reading=self._reading, writing=self._writing)
        self.slots = SlotRows(reading=self._reading, writing=self._writing)
        self.ledgers = LedgerRows(reading=self._reading, writing=self._writing)
        self.memory = MemoryRows(reading=self._reading, writing_of=self._writing_of)
        self.rehearsals = RehearsalRows(reading=self._reading, writing=self._writing)
        self.waves = WaveRows(reading=self._reading, writing=self._writing)
        self.wave_hooks = HookRows(reading=self._reading, writing=self._writing)
        self.tokens = TokenRows(reading=self._reading, writing=self._unfenced)
        self.audit = AuditRows(reading=self._reading, writing=self._unfenced)
        self.hosts = HostRows(reading=self._reading, writing=self._unfenced)
        self._fence: Fence | None = None
        try:
            with self._engine.connect().execution_options(writes=True) as connection, connection.begin():
                # Hosts of a fleet start together, and one of them upgrades. SQLite's transaction is such a lock by itself.
                _one_at_a_time(connection, UPGRADE_LOCK)
                upgrade(connection)
        except SQLAlchemyError as error:
            self._engine.dispose()
            raise _persist_failed(error) from error
        except PersistFailed:
            self._engine.dispose()
            raise

    def close(self) -> None:
        self._engine.dispose()

    def write_under(self, fence: Fence | None) -> None:
        """From now on every transaction that writes is refused (LeaseLost) once the host's epoch is another. None: none is."""
        self._fence = fence

    def claim_host(self, host: str) -> HostClaim:
        return HostClaim(self._engine, host)

    # ── jobs ─────────────────────────────────────────────────────────────────────────────────────────────────────────

    def add(self, job: Migration, *, host: str, sealed: bytes | None = None) -> None:
        """`sealed`: the job's own secrets, which go when it ends."""
        with self._writing() as db:
            _add(db, job, host, sealed)

    def get(self, job_id: UUID) -> Migration:
        """The job. NotFound."""
        with self._reading() as db:
            return _parse(_row(db, job_id))

    def sealed(self, job_id: UUID) -> bytes | None:
        """What `add` was given; None where that was nothing, or the job has ended."""
        with self._reading() as db:
            return db.execute(select(secrets.c.sealed).where(secrets.c.migration_id == str(job_id))).scalar()

    def host_of(self, job_id: UUID) -> str:
        """The id of the host that has the job. NotFound."""
        with self._reading() as db:
            return str(_row(db, job_id).host)

    def is_of(self, job_id: UUID, host: str) -> bool:
        """Whether there is such a job, and it is this host's."""
        with self._reading() as db:
            asked = select(migrations.c.id).where(migrations.c.id == str(job_id), migrations.c.host == host)
            return db.execute(asked).first() is not None

    def documents(self, *, limit: int, cursor: int | None = None, only: Only = ALL) -> tuple[list[str], int | None]:
        """Newest first: the jobs as JSON text, and the cursor of the next page (None: this was the last)."""
        query = select(migrations.c.number, migrations.c.document).order_by(migrations.c.number.desc()).limit(limit + 1)
        if cursor is not None:
            query = query.where(migrations.c.number < cursor)
        query = query.where(is_known(migrations.c.version), *only.conditions())
        with self._reading() as db:
            rows = db.execute(query).all()
        more = len(rows) > limit
        return [row.document for row in rows[:limit]], rows[limit - 1].number if more else None

    def unended(self, *, host: str | None = None) -> list[Migration]:
        """The jobs that have not ended, oldest first; of one host, or of all."""
        chosen = (migrations.c.state.not_in(_ENDED), is_known(migrations.c.version))
        query = select(migrations.c.document).where(*chosen)
        if host is not None:
            query = query.where(migrations.c.host == host)
        with self._reading() as db:
            return readable(Migration, db.execute(query.order_by(migrations.c.number)).scalars())

    def ended(self, *, host: str) -> list[Migration]:
        """Oldest first."""
        chosen = (migrations.c.host == host, migrations.c.state.in_(_ENDED))
        query = select(migrations.c.document).where(*chosen, is_known(migrations.c.version))
        with self._reading() as db:
            return readable(Migration, db.execute(query.order_by(migrations.c.number)).scalars())

    def remove(self, job_id: UUID) -> None:
        """An ended job with all that is known of it. Conflict, where it has not ended; NotFound."""
        with self._writing() as db:
            row = _row(db, job_id, lock=True)
            if row.state not in _ENDED:
                raise Conflict(f"job {job_id} has not ended: it is {row.state}", hint="cancel it first")
            ledgers.forget(db, _owner(job_id))
            db.execute(delete(migrations).where(migrations.c.id == str(job_id)))

    def unended_ids(self, *, host: str) -> list[UUID]:
        """Oldest first. No document is read."""
        chosen = (migrations.c.host == host, migrations.c.state.not_in(_ENDED))
        with self._reading() as db:
            found = db.execute(select(migrations.c.id).where(*chosen).order_by(migrations.c.number))
            return [UUID(row.id) for row in found]

    def wishes(self, *, host: str) -> list[Wish]:
        """What operators asked of the jobs that have not ended."""
        chosen = (migrations.c.host == host, migrations.c.state.not_in(_ENDED))
        rehearsed = exists().where(rehearsals.c.migration_id == migrations.c.id, rehearsals.c.state == "Waiting")
        asked = migrations.c.cancel_requested | migrations.c.cutover_requested | rehearsed
        query = select(migrations.c.id, migrations.c.cancel_requested).where(*chosen, asked)
        with self._reading() as db:
            return [Wish(UUID(row.id), bool(row.cancel_requested)) for row in db.execute(query)]

    def move_unended(self, job_id: UUID, *, to: str) -> bool:
        """The job is another host's from now on. Call it once the host that had it is fenced. False, when it has ended."""
        unended = migrations.c.state.not_in(_ENDED)
        with self._writing() as db:
            moved = update(migrations).where(migrations.c.id == str(job_id), unended).values(host=to)
            return db.execute(moved).rowcount == 1

    # ── jobs of a host that is lost ──────────────────────────────────────────────────────────────────────────────────

    def ids_of_fenced(self, *, but: str) -> list[tuple[UUID, Fence]]:
        """The jobs that have not ended of the hosts that are fenced, each with its host's epoch. Oldest first."""
        query = select(migrations.c.id, hosts.c.id.label("host"), hosts.c.epoch).join(hosts, hosts.c.id == migrations.c.host)
        lost = (hosts.c.fenced != "", hosts.c.id != but, migrations.c.state.not_in(_ENDED))
        with self._reading() as db:
            return [(UUID(row.id), Fence(row.host, row.epoch)) for row in db.execute(query.where(*lost).order_by("number"))]

    def take_over(self, job_id: UUID, lost: Fence, *, to: str) -> bool:
        """The job of a host that is fenced is host `to`'s from now on. False, where that host is back, the job has ended or is
        another's by now, or a job of `to` has claimed what this one has."""
        with self._writing() as db:
            row = _lost_row(db, job_id, lost)
            if row is None:
                return False
            mine = select(ledger.c.name).where(owned_by(_owner(job_id)), ledger.c.kind == "claim")
            _one_at_a_time(db, CLAIMS_LOCK)
            if db.execute(_claimed(job_id, mine, to)).first() is not None:
                return False
            db.execute(update(migrations).where(migrations.c.id == str(job_id)).values(host=to))
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
        """The job of a host that is fenced ends as `failed` says, and `again` begins on host `to`, with what the ledger says
        was done to the source. False, where that host is back, the job has ended, is another's by now or is to be cancelled."""
        with self._writing() as db:
            row = _lost_row(db, job_id, lost)
            if row is None or row.cancel_requested:
                return False
            before = _parse(row)
            after = failed(before)
            document = rewritten(row.document, before, after)
            _rewrite(db, row, after, document)
            db.execute(delete(secrets).where(secrets.c.migration_id == str(job_id)))
            db.execute(delete(slots).where(slots.c.job_id == str(job_id)))
            _announce(db, after, document, version_after(row.version))
            _add(db, again, to, sealed)
            at_source = (owned_by(_owner(job_id)), ledger.c.kind.in_(("snapshot", "source_power", "tracking")))
            db.execute(update(ledger).where(*at_source).values(owner_id=str(again.id)))
            return True

    def count_unended(self) -> dict[str, int]:
        """By host."""
        unended = migrations.c.state.not_in(_ENDED)
        query = select(migrations.c.host, func.count().label("jobs")).where(unended).group_by(migrations.c.host)
        with self._reading() as db:
            return {row.host: row.jobs for row in db.execute(query)}

    def count_by_state(self, *, host: str) -> dict[State, int]:
        """How many jobs of a host are in each state. States with none are left out."""
        query = select(migrations.c.state, func.count()).where(migrations.c.host == host).group_by(migrations.c.state)
        with self._reading() as db:
            # A later version's state is none of ours; its job is quarantined.
            return {State(state): count for state, count in db.execute(query) if state in _STATES}

    def oldest(self, state: State, *, host: str) -> Migration | None:
        """The job that came first of those in `state`."""
        chosen = (migrations.c.host == host, migrations.c.state == str(state), is_known(migrations.c.version))
        query = select(migrations.c.document).where(*chosen).order_by(migrations.c.number).limit(1)
        with self._reading() as db:
            document = db.execute(query).scalar()
        return None if document is None else parsed(Migration, document)

    def change(self, job_id: UUID, expected: State, change: Callable[[Migration], Migration]) -> Migration:
        """Rewrite a job that is still in `expected`, else Conflict. A move, an error, a boot attempt is an event too."""
        with self._writing_of(job_id) as db:
            row = _row(db, job_id, lock=True)
            before = _parse(row)
            if before.state != expected:
                raise Conflict(f"job {job_id} is {before.state}, not {expected}")
            after = change(before)
            document = rewritten(row.document, before, after)
            _rewrite(db, row, after, document)
            if after.ended:
                db.execute(delete(secrets).where(secrets.c.migration_id == str(job_id)))
                db.execute(delete(slots).where(slots.c.job_id == str(job_id)))
            if _reported(after) != _reported(before):
                _announce(db, after, document, version_after(row.version))
            return after

    # ── what others ask of a job ─────────────────────────────────────────────────────────────────────────────────────

    def request_cancel(self, job_id: UUID) -> Migration:
        return self._request(job_id, "cancel_requested")

    def request_cutover(self, job_id: UUID, *, until: datetime | None = None) -> Migration:
        """`until`: not asked for any more from then on, where it has not begun: a window closes."""
        moment = None if until is None else until.timestamp()
        return self._request(job_id, "cutover_requested", cutover_until=moment)

    def _request(self, job_id: UUID, flag: str, **values: object) -> Migration:
        with self._writing() as db:
            job = _parse(_row(db, job_id, lock=True))
            if job.ended:
                raise Conflict(f"job {job_id} has ended: it is {job.state}")
            db.execute(update(migrations).where(migrations.c.id == str(job_id)).values({flag: True, **values}))
            return job

    def cancel_requested(self, job_id: UUID) -> bool:
        return self._is_requested(job_id, migrations.c.cancel_requested)

    def cutover_requested(self, job_id: UUID) -> bool:
        """Whether an operator has asked for the cut-over, and the request has not expired."""
        in_time = migrations.c.cutover_until.is_(None) | (migrations.c.cutover_until > time.time())
        return self._is_requested(job_id, migrations.c.cutover_requested & in_time)

    def _is_requested(self, job_id: UUID, flag: ColumnElement[bool]) -> bool:
        """Asked often: no document is read."""
        with self._reading() as db:
            found = db.execute(select(flag).where(migrations.c.id == str(job_id))).scalar()
        if found is None:
            raise NotFound(f"there is no migration {job_id}")
        return bool(found)

    # ── events ───────────────────────────────────────────────────────────────────────────────────────────────────────

    def events_after(
        self, event_id: int, *, job_id: UUID | None = None, host: str | None = None, limit: int = 100
    ) -> list[Event]:
        """At most `limit` events after `event_id`, in order; of one job, of one host's jobs, or of all."""
        of_host = (
            [events.c.migration_id.in_(select(migrations.c.id).where(migrations.c.host == host))] if host is not None else []
        )
        with self._reading() as db:
            return OF_MIGRATIONS.after(db, event_id, *of_host, job_id=job_id, limit=limit)

    def newest_events(self, *, job_id: UUID | None = None) -> list[Event]:
        """The newest event of each job that has not ended, or of `job_id` whatever its state; the job as it is now."""
        chosen = migrations.c.id == str(job_id) if job_id else migrations.c.state.not_in(_ENDED)
        with self._reading() as db:
            return OF_MIGRATIONS.newest(db, migrations, chosen)

    def last_event_id(self) -> int:
        with self._reading() as db:
            return OF_MIGRATIONS.last_id(db)

    # ── watermarks, ledger ───────────────────────────────────────────────────────────────────────────────────────────

    def put_watermark(self, job_id: UUID, mark: Watermark) -> None:
        """Call it after the destination has flushed, never before."""
        with self._writing_of(job_id) as db:
            marks.put(db, job_id, mark)

    def watermarks(self, job_id: UUID, pass_number: int) -> dict[str, Watermark]:
        """By disk key."""
        with self._reading() as db:
            return marks.of_pass(db, job_id, pass_number)

    def copied_before(self, job_id: UUID, pass_number: int) -> dict[str, tuple[int, int]]:
        """By disk key: bytes that all passes before this one moved, and bytes of zeros among them."""
        with self._reading() as db:
            return marks.copied_before(db, job_id, pass_number)

    def fold_passes(self, job_id: UUID, number: int) -> None:
        """What is known of the passes before `number` becomes one watermark a disk; the first pass stays. Call it when the next
        pass builds on `number` alone."""
        with self._writing_of(job_id) as db:
            marks.fold(db, job_id, number)
            forget_passes(db, job_id, but=(1, number))

    def record(self, job_id: UUID, kind: str, name: str) -> None:
        """Into the ledger, before the thing is made. Idempotent."""
        with self._writing_of(job_id) as db:
            ledgers.record(db, _owner(job_id), LedgerEntry(kind, name))

    def claim(self, job_id: UUID, names: list[str], *, hint: str) -> None:
        """Into the ledger too: what only one job of a host may have until it ends. Conflict, when another has one of them."""
        with self._writing_of(job_id) as db:
            _one_at_a_time(db, CLAIMS_LOCK)
            if (taken := db.execute(_claimed(job_id, names, _row(db, job_id).host)).first()) is not None:
                raise Conflict(f"migration {taken.id}, which has not ended, has the {taken.name} too", hint=hint)
            for name in names:
                ledgers.record(db, _owner(job_id), LedgerEntry("claim", name))

    def strike(self, job_id: UUID, kind: str, name: str) -> None:
        """Out of the ledger, after the thing is gone, or is the operator's to keep. Idempotent."""
        with self._writing_of(job_id) as db:
            ledgers.strike(db, _owner(job_id), kind, name)

    def ledger(self, job_id: UUID) -> list[LedgerEntry]:
        """In the order the things were made."""
        with self._reading() as db:
            return ledgers.entries_of(db, _owner(job_id))

    def untidied(self, owed: Sequence[str], *, host: str) -> list[Migration]:
        """Ended jobs whose ledger is not empty: of one that went well, entries of the kinds that it still owes."""
        left = _of_migration & ((migrations.c.state != str(State.COMPLETED)) | ledger.c.kind.in_(owed))
        ended = (migrations.c.host == host, migrations.c.state.in_(_ENDED), is_known(migrations.c.version))
        query = select(migrations.c.document).where(*ended, exists().where(left)).order_by(migrations.c.number)
        with self._reading() as db:
            return readable(Migration, db.execute(query).scalars())

    # ── transactions ─────────────────────────────────────────────────────────────────────────────────────────────────

    @contextmanager
    def _reading(self) -> Iterator[Connection]:
        try:
            with self._engine.connect() as connection:
                yield connection
        except SQLAlchemyError as error:
            raise _persist_failed(error) from error

    @contextmanager
    def _writing(self) -> Iterator[Connection]:
        with self._unfenced() as connection:
            if self._fence is not None:
                self._fence.check(connection)
            yield connection

    @contextmanager
    def _writing_of(self, job_id: UUID) -> Iterator[Connection]:
        """The same, for what only the job's own host writes. A thread that a lost lease left behind may still come here once
        the lease is held again, and the job be another host's by then."""
        with self._writing() as db:
            if self._fence is not None:
                self._fence.check_host(_row(db, job_id, lock=True).host)
            yield db

    @contextmanager
    def _unfenced(self) -> Iterator[Connection]:
        try:
            with self._engine.connect().execution_options(writes=True) as connection, connection.begin():
                yield connection
        except SQLAlchemyError as error:
            raise _persist_failed(error) from error
        self.on_commit()


def _add(db: Connection, job: Migration, host: str, sealed: bytes | None) -> None:
    document = job.model_dump_json()
    values = {"id": str(job.id), "host": host, "state": job.state, "document": document, "version": VERSION}
    db.execute(insert(migrations).values(**values))
    if sealed is not None:
        db.execute(insert(secrets).values(migration_id=str(job.id), host=host, sealed=sealed))
    _announce(db, job, document, VERSION)


_of_migration = (ledger.c.owner_kind == "migration") & (ledger.c.owner_id == migrations.c.id)


def _owner(job_id: UUID) -> Owner:
    return Owner("migration", job_id)


def _claimed(job_id: UUID, names: list[str] | Select[tuple[str]], host: str) -> Select[tuple[str, str]]:
    """Which of these another job of the host has claimed that has not ended."""
    return (
        select(ledger.c.name, migrations.c.id)
        .join(migrations, _of_migration)
        .where(ledger.c.kind == "claim", ledger.c.name.in_(names), ledger.c.owner_id != str(job_id))
        .where(migrations.c.host == host, migrations.c.state.not_in(_ENDED))
    )


def _lost_row(db: Connection, job_id: UUID, lost: Fence) -> Row[Any] | None:
    """The job's row, while its host is fenced in this epoch and cannot come back before the transaction's end; else None."""
    query = select(hosts.c.epoch, hosts.c.fenced).where(hosts.c.id == lost.host)
    host = db.execute(query.with_for_update() if db.dialect.name == "postgresql" else query).first()
    if host is None or host.epoch != lost.epoch or not host.fenced:
        return None
    row = _row(db, job_id, lock=True)
    return None if row.host != lost.host or row.state in _ENDED else row


def _rewrite(db: Connection, row: Row[Any], after: Migration, document: str) -> None:
    values = {"state": after.state, "document": document, "version": version_after(row.version)}
    db.execute(update(migrations).where(migrations.c.number == row.number).values(**values))


def _reported(job: Migration) -> tuple[object, ...]:
    """What listeners get at once."""
    return job.state, job.last_error, job.boot_attempts


def _announce(db: Connection, job: Migration, document: str, version: str) -> None:
    if OF_MIGRATIONS.add(db, job.id, document, version) % FOLDED_EVERY == 0:
        of_job = OF_MIGRATIONS.of(job.id)
        kept = select(events.c.id).where(of_job).order_by(events.c.id.desc()).limit(1).offset(EVENTS_KEPT).scalar_subquery()
        OF_MIGRATIONS.forget(db, of_job, events.c.id <= kept)


def _one_at_a_time(db: Connection, lock: int) -> None:
    """SQLite has one writer anyway."""
    if db.dialect.name == "postgresql":
        db.execute(text("SELECT pg_advisory_xact_lock(:lock)"), {"lock": lock})


def _row(db: Connection, job_id: UUID, *, lock: bool = False) -> Row[Any]:
    query = select(migrations).where(migrations.c.id == str(job_id))
    row = db.execute(query.with_for_update() if lock else query).first()
    if row is None:
        raise NotFound(f"there is no migration {job_id}")
    return row


def _parse(row: Row[Any]) -> Migration:
    return parsed(Migration, row.document, row.version)


def _persist_failed(error: SQLAlchemyError) -> PersistFailed:
    cause = str(getattr(error, "orig", None) or error).splitlines()[0]
    return PersistFailed(f"the store failed: {cause}", hint="check the free space of {data_dir}, or that the database answers")
