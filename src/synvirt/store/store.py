"""The store: its transactions, the queries about migrations by name, and all other queries as its parts.

Each method is one transaction. A job's move is a compare-and-set on its state plus an event row. Every failure of the database
is PersistFailed. `on_commit` is called after each commit that wrote: the engine wakes its listeners with it, and the tests
crash there.
"""

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime
from functools import lru_cache
from typing import Any
from uuid import UUID

from sqlalchemy import Connection, Row, Select, bindparam, delete, exists, func, select, text, update
from sqlalchemy.exc import DataError, IntegrityError, NotSupportedError, ProgrammingError, SQLAlchemyError

from synvirt.errors import Conflict, PersistFailed, not_listed
from synvirt.model.job import CutoverRequest, Migration
from synvirt.model.kinds import State
from synvirt.model.values import now
from synvirt.store import ledger as ledgers
from synvirt.store import watermarks as marks
from synvirt.store.access import AuditRows, TokenRows
from synvirt.store.backups import BackupRows
from synvirt.store.documents import is_known, parsed, readable, rewritten, version_after
from synvirt.store.events import OF_MIGRATIONS, Event
from synvirt.store.filters import ALL, Only, page_of
from synvirt.store.host_claim import HostClaim
from synvirt.store.hosts import Fence, HostRows
from synvirt.store.ledger import LedgerEntry, LedgerRows
from synvirt.store.lost_jobs import LostJobRows
from synvirt.store.memory import MemoryRows, forget_passes
from synvirt.store.migration_rows import (
    ENDED,
    OWNED,
    add,
    announce,
    claim,
    forget_secrets_and_slots,
    is_unended,
    one_at_a_time,
    owner,
    parse,
    refuse_claimed,
    rewrite,
    row_of,
)
from synvirt.store.opening import Connections, opened
from synvirt.store.rehearsals import RehearsalRows
from synvirt.store.slots import SlotRows
from synvirt.store.sources import SourceRows
from synvirt.store.tables import IS_OWED, events, ledger, migrations, rehearsals, secrets, slots, wave_members
from synvirt.store.upgrading import upgrade
from synvirt.store.uploads import UploadRows
from synvirt.store.watermarks import Watermark
from synvirt.store.wave_hooks import HookRows
from synvirt.store.waves import WaveRows
from synvirt.store.windows import WindowRows

# One upgrade of the schema at a time: "upgr".
UPGRADE_LOCK = 0x75706772
# One host at a time adds jobs: "addj".
ADDING_LOCK = 0x6164646A
# What no database takes, at whatever moment.
_OF_THE_STATEMENT = (DataError, IntegrityError, NotSupportedError, ProgrammingError)
_STATES = frozenset(str(state) for state in State)
_NOT_COMPLETED = [state for state in ENDED if state != str(State.COMPLETED)]
# Made once: each job asks every moment, and to make a statement costs more than SQLite takes to answer it.
_THIS_JOB = migrations.c.id == bindparam("job")
_IN_TIME = migrations.c.cutover_until.is_(None) | (migrations.c.cutover_until > bindparam("now"))
# Its values are the columns that are given with it.
_REQUESTED = update(migrations).where(_THIS_JOB)
_CANCEL_REQUESTED = select(migrations.c.cancel_requested).where(_THIS_JOB)
_CUTOVER_REQUESTED = select(migrations.c.cutover_requested & _IN_TIME).where(_THIS_JOB)

_OF_HOST = (is_unended(), migrations.c.host == bindparam("of_host"))
_UNENDED = select(migrations.c.id).where(*_OF_HOST).order_by(migrations.c.number)
_REHEARSED = exists().where(rehearsals.c.migration_id == migrations.c.id, rehearsals.c.state == "Waiting")
_WISHES = select(migrations.c.id, migrations.c.cancel_requested).where(
    *_OF_HOST, migrations.c.cancel_requested | (migrations.c.cutover_requested & _IN_TIME) | _REHEARSED
)


def _page(only: Only, limit: int, cursor: int | None) -> Select[Any]:
    return page_of(migrations, [[*way, is_known(migrations.c.version)] for way in only.ways()], limit=limit, cursor=cursor)


@lru_cache(64)
def _newest(only: Only, limit: int) -> Select[Any]:
    """The first page, which is asked for again and again: a job's forecasts look at those of its source."""
    return _page(only, limit, None)


class StoreAway(PersistFailed):
    """The database does not answer, or has no room: it may answer soon."""


@dataclass(frozen=True, slots=True)
class Wish:
    """A request of an operator. `cancel`: the job is to be cancelled; else it is to cut over, or to be rehearsed."""

    job_id: UUID
    cancel: bool


class Store:
    """The store of this service; its parts are fields. Every method raises PersistFailed where the database fails."""

    def __init__(self, url: str, *, on_commit: Callable[[], None] = lambda: None) -> None:
        self._engine = opened(url)
        self._connections = Connections(self._engine)
        self.on_commit = on_commit
        self.uploads = UploadRows(reading=self._reading, writing=self._writing, adding=self.adding)
        self.backups = BackupRows(reading=self._reading, writing=self._writing)
        self.sources = SourceRows(reading=self._reading, writing=self._writing)
        self.slots = SlotRows(reading=self._reading, writing=self._writing)
        self.ledgers = LedgerRows(reading=self._reading, writing=self._writing)
        self.lost_jobs = LostJobRows(reading=self._reading, writing=self._writing)
        self.memory = MemoryRows(reading=self._reading, writing_of=self._writing_of)
        self.rehearsals = RehearsalRows(reading=self._reading, writing=self._writing)
        self.waves = WaveRows(reading=self._reading, writing=self._writing)
        self.windows = WindowRows(reading=self._reading, writing=self._writing)
        self.wave_hooks = HookRows(reading=self._reading, writing=self._writing)
        self.tokens = TokenRows(reading=self._reading, writing=self._unfenced)
        self.audit = AuditRows(reading=self._reading, writing=self._unfenced)
        self.hosts = HostRows(reading=self._reading, writing=self._unfenced)
        self._fence: Fence | None = None
        self._adding = threading.Lock()
        try:
            with self._connections.unhurried() as connection:
                # The hosts of a fleet may start together. One of them upgrades, and the others wait.
                one_at_a_time(connection, UPGRADE_LOCK)
                upgrade(connection)
        except SQLAlchemyError as error:
            self._connections.close()
            raise _persist_failed(error) from error
        except PersistFailed:
            self._connections.close()
            raise

    @property
    def is_shared(self) -> bool:
        """Whether other hosts may have the same store: SQLite is one host's."""
        return self._engine.dialect.name == "postgresql"

    def close(self) -> None:
        self._connections.close()

    def write_under(self, fence: Fence | None) -> None:
        """From now on a transaction that writes raises LeaseLost when the host's epoch has changed. None: no check."""
        self._fence = fence

    def claim_host(self, host: str) -> HostClaim:
        """The claim that keeps a second service from running under this host's id."""
        return HostClaim(self._engine, host)

    # ── jobs ─────────────────────────────────────────────────────────────────────────────────────────────────────────

    def add(self, job: Migration, *, host: str, sealed: bytes | None = None) -> None:
        """Adds a job. `sealed`: its own secrets; they are deleted when it ends."""
        with self._writing() as db:
            add(db, job, host, sealed)

    @contextmanager
    def adding(self) -> Iterator[None]:
        """Only one thread of all hosts is in this block. So a job that it has not found, no other has added when it adds its
        own, or removes what such a job would need. On SQLite there is only one host."""
        # Also within a process: threads that wait for the database's lock hold a connection each, and the block needs another.
        with self._adding, self._reading() as db:
            one_at_a_time(db, ADDING_LOCK)
            yield

    def get(self, job_id: UUID) -> Migration:
        """The job. NotFound."""
        with self._reading() as db:
            return parse(row_of(db, job_id))

    def get_to_run(self, job_id: UUID) -> tuple[Migration, bool]:
        """The job, and whether an operator has asked to cancel it. NotFound."""
        with self._reading() as db:
            row = row_of(db, job_id)
            return parse(row), row.cancel_requested

    def sealed(self, job_id: UUID) -> bytes | None:
        """The sealed secrets of a job; None, where it has none or has ended."""
        with self._reading() as db:
            return db.execute(select(secrets.c.sealed).where(secrets.c.migration_id == str(job_id))).scalar()

    def host_of(self, job_id: UUID) -> str:
        """The id of the host that has the job. NotFound."""
        with self._reading() as db:
            return str(row_of(db, job_id).host)

    def is_of(self, job_id: UUID, host: str) -> bool:
        """Whether there is such a job, and this host has it."""
        with self._reading() as db:
            asked = select(migrations.c.id).where(migrations.c.id == str(job_id), migrations.c.host == host)
            return db.execute(asked).first() is not None

    def documents(self, *, limit: int, cursor: int | None = None, only: Only = ALL) -> tuple[list[str], int | None]:
        """A page of jobs as JSON text, newest first, and the cursor of the next page (None: this was the last)."""
        with self._reading() as db:
            rows = db.execute(_newest(only, limit + 1) if cursor is None else _page(only, limit + 1, cursor)).all()
        more = len(rows) > limit
        return [row.document for row in rows[:limit]], rows[limit - 1].number if more else None

    def unended(self, *, host: str | None = None, naming: str | None = None) -> list[Migration]:
        """The jobs that have not ended, oldest first; of one host, or of all. `naming`: only those whose document has this text
        in any place, for callers that look for one of thousands: to parse them all takes half a second."""
        query = select(migrations.c.document).where(is_unended(host), is_known(migrations.c.version))
        if naming is not None:
            query = query.where(migrations.c.document.contains(naming, autoescape=True))
        with self._reading() as db:
            return readable(Migration, db.execute(query.order_by(migrations.c.number)).scalars())

    def copying_elsewhere(self, *, host: str) -> list[Migration]:
        """The unended jobs of other hosts that hold a slot: those that copy, and not the thousands that are held."""
        held = select(slots.c.job_id).where(slots.c.held, slots.c.host != host)
        chosen = (migrations.c.id.in_(held), migrations.c.state.not_in(ENDED), is_known(migrations.c.version))
        with self._reading() as db:
            return readable(Migration, db.execute(select(migrations.c.document).where(*chosen)).scalars())

    def remove(self, job_id: UUID) -> None:
        """Removes an ended job and all that is stored about it. Conflict, where it has not ended; NotFound."""
        with self._writing() as db:
            row = row_of(db, job_id, lock=True)
            if row.state not in ENDED:
                raise Conflict(f"job {job_id} has not ended: it is {row.state}", hint="cancel it first")
            ledgers.forget(db, owner(job_id))
            db.execute(delete(migrations).where(migrations.c.id == str(job_id)))

    def unended_ids(self, *, host: str) -> list[UUID]:
        """The ids of the jobs that have not ended, oldest first. No document is read."""
        with self._reading() as db:
            return [UUID(row.id) for row in db.execute(_UNENDED, {"of_host": host})]

    def wishes(self, *, host: str) -> list[Wish]:
        """The requests of operators to jobs of a host that have not ended. One that has expired is none: the next would be
        taken for it."""
        with self._reading() as db:
            found = db.execute(_WISHES, {"of_host": host, "now": time.time()})
            return [Wish(UUID(row.id), bool(row.cancel_requested)) for row in found]

    def count_unended(self) -> dict[str, int]:
        """How many jobs have not ended, by host."""
        query = select(migrations.c.host, func.count().label("jobs")).where(is_unended()).group_by(migrations.c.host)
        with self._reading() as db:
            return {row.host: row.jobs for row in db.execute(query)}

    def count_by_state(self, *, host: str) -> dict[State, int]:
        """How many jobs of a host are in each state. States with none are left out."""
        query = select(migrations.c.state, func.count()).where(migrations.c.host == host).group_by(migrations.c.state)
        with self._reading() as db:
            # A later version may have other states. A job in such a state is quarantined.
            return {State(state): count for state, count in db.execute(query) if state in _STATES}

    def oldest(self, state: State, *, host: str) -> Migration | None:
        """The oldest job in `state`."""
        chosen = (migrations.c.host == host, migrations.c.state == str(state), is_known(migrations.c.version))
        query = select(migrations.c.document).where(*chosen).order_by(migrations.c.number).limit(1)
        with self._reading() as db:
            document = db.execute(query).scalar()
        return None if document is None else parsed(Migration, document)

    def change(
        self,
        job_id: UUID,
        expected: State,
        change: Callable[[Migration], Migration],
        *,
        mark: Watermark | None = None,
    ) -> Migration:
        """Rewrites a job that is still in `expected`, else Conflict. A move, an error or a boot attempt adds an event. `mark`:
        written in the same transaction, as `put_watermark` does."""
        with self._writing() as db:
            row = self._own_row(db, job_id)
            before = parse(row)
            if before.state != expected:
                raise Conflict(f"job {job_id} is {before.state}, not {expected}")
            after = change(before)
            document = rewritten(row.document, before, after)
            rewrite(db, row, after, document)
            if mark is not None:
                marks.put(db, job_id, mark)
            if after.ended:
                forget_secrets_and_slots(db, job_id)
            if _reported(after) != _reported(before):
                announce(db, after, document, version_after(row.version))
            return after

    # ── requests of operators ────────────────────────────────────────────────────────────────────────────────────────

    def request_cancel(self, job_id: UUID) -> Migration:
        """Conflict, where the job has ended; NotFound."""
        with self._writing() as db:
            _, job = _unended_row(db, job_id)
            db.execute(_REQUESTED, {"job": str(job_id), "cancel_requested": True})
            return job

    def request_cutover(self, job_id: UUID, *, until: datetime | None = None) -> Migration:
        """`until`: the request expires then if the cut-over has not begun, because a window closes. The job's document has the
        request, and an event says so. Conflict, where the job has ended; NotFound."""
        moment = None if until is None else until.timestamp()
        with self._writing() as db:
            row, before = _unended_row(db, job_id)
            db.execute(_REQUESTED, {"job": str(job_id), "cutover_requested": True, "cutover_until": moment})
            after = before.model_copy(update={"cutover_request": CutoverRequest(at=now(), until=until)})
            document = rewritten(row.document, before, after)
            rewrite(db, row, after, document)
            announce(db, after, document, version_after(row.version))
            return after

    def cancel_requested(self, job_id: UUID) -> bool:
        return self._is_requested(job_id, _CANCEL_REQUESTED)

    def cutover_requested(self, job_id: UUID) -> bool:
        """Whether an operator has asked for the cut-over, and the request has not expired."""
        return self._is_requested(job_id, _CUTOVER_REQUESTED, now=time.time())

    def _is_requested(self, job_id: UUID, query: Select[Any], **more: object) -> bool:
        """No document is read: this is asked often."""
        with self._reading() as db:
            found = db.execute(query, {"job": str(job_id), **more}).scalar()
        if found is None:
            raise not_listed("migration", job_id)
        return bool(found)

    # ── events ───────────────────────────────────────────────────────────────────────────────────────────────────────

    def events_after(
        self, event_id: int, *, job_id: UUID | None = None, host: str | None = None, limit: int = 100
    ) -> list[Event]:
        """At most `limit` events after `event_id`, in order; of one job, of one host's jobs, or of all."""
        # The job of each event, by its id: SQLite would look through the events of each of the host's jobs otherwise.
        of_job = (migrations.c.id == events.c.migration_id, migrations.c.host == host)
        of_host = [exists().where(*of_job)] if host is not None else []
        with self._reading() as db:
            return OF_MIGRATIONS.after(db, event_id, *of_host, job_id=job_id, limit=limit)

    def newest_events(self, *, job_id: UUID | None = None) -> list[Event]:
        """The newest event of each job that has not ended, or of `job_id` whatever its state; the job as it is now."""
        chosen = migrations.c.id == str(job_id) if job_id else is_unended()
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
        """The watermarks of a pass, by disk key."""
        with self._reading() as db:
            return marks.of_pass(db, job_id, pass_number)

    def forget_watermarks(self, job_id: UUID, disk_key: str) -> None:
        """Call it when the volume of a disk is gone, before another is made in its place."""
        with self._writing_of(job_id) as db:
            marks.forget(db, job_id, disk_key)

    def copied(self, job_id: UUID, pass_number: int) -> tuple[dict[str, Watermark], dict[str, tuple[int, int]]]:
        """The watermarks of a pass, by disk key; and by disk key the bytes that all passes before it moved, with the bytes of
        zeros among them."""
        with self._reading() as db:
            return marks.of_pass(db, job_id, pass_number), marks.copied_before(db, job_id, pass_number)

    def fold_passes(self, job_id: UUID, number: int) -> None:
        """Joins the watermarks of the passes before `number` into one for each disk; the first pass stays. Call it when the
        next pass builds on `number` alone."""
        with self._writing_of(job_id) as db:
            marks.fold(db, job_id, number)
            forget_passes(db, job_id, but=(1, number))

    def record(self, job_id: UUID, kind: str, name: str) -> None:
        """Adds a ledger entry. Call it before the thing is made. Idempotent."""
        with self._writing_of(job_id) as db:
            ledgers.record(db, owner(job_id), LedgerEntry(kind, name))

    def claim(self, job_id: UUID, names: list[str], *, hint: str) -> None:
        """Adds ledger entries for names that only one unended job or backup run of a host may have. Conflict, when another has
        one."""
        with self._writing() as db:
            claim(db, owner(job_id), names, self._own_row(db, job_id).host, hint=hint)

    def refuse_claimed(self, names: list[str], *, host: str, hint: str) -> None:
        """Conflict, when an unended job or backup run of the host has one of the names."""
        with self._reading() as db:
            refuse_claimed(db, owner(UUID(int=0)), names, host, hint=hint)

    def strike(self, job_id: UUID, kind: str, name: str) -> None:
        """Deletes a ledger entry. Call it when the thing is gone, or the operator keeps it. Idempotent."""
        with self._writing_of(job_id) as db:
            ledgers.strike(db, owner(job_id), kind, name)

    def ledger(self, job_id: UUID) -> list[LedgerEntry]:
        """The job's ledger entries, oldest first."""
        with self._reading() as db:
            return ledgers.entries_of(db, owner(job_id))

    def untidied(self, *, host: str) -> list[Migration]:
        """Ended jobs with entries left in their ledger, oldest first. Of a completed job only entries that it owes its source
        count."""
        failed = (migrations.c.host == host, migrations.c.state.in_(_NOT_COMPLETED), exists().where(OWNED))
        # `concat`: SQLite must take the index of what is owed, and then the job's id.
        owing = select(ledger.c.owner_id).where(text(IS_OWED), ledger.c.owner_kind.concat("") == "migration")
        of_host = (migrations.c.host.concat("") == host, migrations.c.state.concat("") == str(State.COMPLETED))
        query = select(migrations.c.number, migrations.c.document).where(is_known(migrations.c.version))
        with self._reading() as db:
            chosen = (failed, (migrations.c.id.in_(owing), *of_host))
            rows = sorted((row.number, row.document) for these in chosen for row in db.execute(query.where(*these)))
        return readable(Migration, (document for _, document in rows))

    def owing_power(self, vm_id: str) -> list[Migration]:
        """Jobs that did not complete, and have shut down a live VM of this id that they could not power on again yet."""
        owing = exists().where(OWNED, ledger.c.kind == "source_power", ledger.c.name == vm_id)
        chosen = (migrations.c.state.in_(_NOT_COMPLETED), is_known(migrations.c.version), owing)
        with self._reading() as db:
            return readable(Migration, db.execute(select(migrations.c.document).where(*chosen)).scalars())

    def is_rolling_back(self, job_id: UUID) -> bool:
        """Whether a member of a wave is rolled back, and waits for what this job owes its source."""
        member = exists().where(wave_members.c.job_id == str(job_id), wave_members.c.rolling_back)
        with self._reading() as db:
            return bool(db.execute(select(member)).scalar())

    # ── transactions ─────────────────────────────────────────────────────────────────────────────────────────────────

    @contextmanager
    def _reading(self) -> Iterator[Connection]:
        try:
            with self._connections.reading() as connection:
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
        """As `_writing`, and LeaseLost where the job belongs to another host. A thread that began before a lease was lost may
        come here after the host has a lease again; another host may have the job by then."""
        with self._writing() as db:
            if self._fence is not None:
                self._own_row(db, job_id)
            yield db

    def _own_row(self, db: Connection, job_id: UUID) -> Row[Any]:
        """The job's row, locked. LeaseLost, as `_writing_of`; NotFound."""
        row = row_of(db, job_id, lock=True)
        if self._fence is not None:
            self._fence.check_host(row.host)
        return row

    @contextmanager
    def _unfenced(self) -> Iterator[Connection]:
        try:
            with self._connections.writing() as connection:
                yield connection
        except SQLAlchemyError as error:
            raise _persist_failed(error) from error
        self.on_commit()


def _unended_row(db: Connection, job_id: UUID) -> tuple[Row[Any], Migration]:
    """The job and its row, locked. Conflict, where it has ended; NotFound."""
    row = row_of(db, job_id, lock=True)
    job = parse(row)
    if job.ended:
        raise Conflict(f"job {job_id} has ended: it is {job.state}")
    return row, job


def _reported(job: Migration) -> tuple[object, ...]:
    """The parts of a job whose change is an event."""
    return job.state, job.last_error, job.boot_attempts


def _persist_failed(error: SQLAlchemyError) -> PersistFailed:
    cause = str(getattr(error, "orig", None) or error).splitlines()[0]
    return (PersistFailed if isinstance(error, _OF_THE_STATEMENT) else StoreAway)(
        f"the store failed: {cause}",
        hint="check the free space of the service's folder (data_dir), or that the database answers",
    )
