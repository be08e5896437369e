"""Queries about backups, in the store's transactions: documents by kind. `synvirt.backups.model` knows their content."""

from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Literal, TypeVar
from uuid import UUID

from pydantic import BaseModel
from sqlalchemy import ColumnElement, Connection, bindparam, case, delete, func, insert, select, update

from synvirt.errors import BackupNotFound, not_listed
from synvirt.store.documents import VERSION, check_version, is_known, parsed, rewritten, version_after, written
from synvirt.store.events import OF_RUNS, Event
from synvirt.store.filters import Way, fields_are, kept, page_of
from synvirt.store.ledger import LedgerRows, Owner
from synvirt.store.ledger import forget as settle
from synvirt.store.migration_rows import claim, refuse_claimed
from synvirt.store.slots import free
from synvirt.store.tables import backup_events, backups

Transaction = Callable[[], AbstractContextManager[Connection]]
Kind = Literal["repository", "job", "run", "point", "watermarks", "request", "cancel"]
Key = tuple[Kind, UUID]
D = TypeVar("D", bound=BaseModel)

# What people call them, where it is not «backup» and the kind.
_NOUNS = {"point": "restore point"}
# A replay is for a listener that was away for hours; a run writes some ten events.
EVENTS_KEPT = 10_000
# Made once: to make a statement costs more than SQLite takes to answer it.
_THIS = (backups.c.id == bindparam("of_id"), backups.c.host == bindparam("of_host"), backups.c.kind == bindparam("of_kind"))
_DOCUMENT = select(backups.c.document, backups.c.version).where(*_THIS)
_LOCKED_DOCUMENT = _DOCUMENT.with_for_update()
# Its values are the columns that are given with it.
_REWRITE = update(backups).where(*_THIS)
_INSERT = insert(backups)
# By the field of a filter: the column that finds its rows. That of a filter's fields which is first here leaves the fewest.
_FINDERS: Mapping[str, ColumnElement[str | None]] = {
    "job_id": backups.c.job_id,
    "vm_id": backups.c.vm_id,
    "vm_name": backups.c.vm_name,
    "status": backups.c.state,
    "kind": backups.c.run_kind,
    # Of points. Before their repository: those that are looked for are the few damaged ones.
    "state": backups.c.point_state,
    "repository_id": backups.c.repository_id,
}
# Columns that hold whatever version wrote the row.
_ALWAYS = {"status", "state"}
_GUEST = (backups.c.point_state, backups.c.job_id, backups.c.vm_id)
_POINTS_OF_GUESTS = select(
    *_GUEST,
    func.count(backups.c.made_at).label("with_time"),
    func.max(case((backups.c.made_at <= bindparam("moment"), backups.c.made_at))).label("newest_at"),
    func.count().label("all_"),
).group_by(*_GUEST)
Fields = Mapping[str, Sequence[str]]


@dataclass(frozen=True, slots=True)
class PointsOfGuest:
    """How many points of a guest that a job backs up are in one state, and when the newest was made, in seconds since 1970.
    None: all were made by a clock that was ahead."""

    state: str | None
    job_id: str
    vm_id: str
    count: int
    newest_at: float | None


@dataclass(frozen=True, slots=True)
class Row:
    """A document to be stored. `announced`: the change is an event for the run's listeners."""

    kind: Kind
    id: UUID
    document: BaseModel
    state: str = ""
    announced: bool = False


class BackupRows:
    """The documents of backups. `ledger`: what runs make, and what backups make on their guests."""

    def __init__(self, *, reading: Transaction, writing: Transaction) -> None:
        self._reading, self._writing = reading, writing
        self.ledger = LedgerRows(reading=reading, writing=writing)

    def put(self, kind: Kind, id_: UUID, document: BaseModel, *, host: str, state: str = "") -> None:
        """Adds a document, or replaces it."""
        self.put_all([Row(kind, id_, document, state)], host=host)

    def put_all(
        self,
        rows: list[Row],
        *,
        host: str,
        gone: tuple[Key, ...] = (),
        settled: tuple[Owner, ...] = (),
        slots_of: tuple[UUID, ...] = (),
    ) -> None:
        """Stores all rows or none. In the same transaction the documents `gone` are removed, the ledgers of `settled`: their
        users keep those things, and the slots of the runs `slots_of`. Unreadable, where a document to be replaced is
        quarantined."""
        with self._writing() as db:
            for run_id in slots_of:
                free(db, run_id)
            for owner in settled:
                settle(db, owner)
            for kind, id_ in gone:
                db.execute(delete(backups).where(backups.c.id == str(id_), backups.c.host == host, backups.c.kind == kind))
            for row in rows:
                same = {"of_id": str(row.id), "of_host": host, "of_kind": row.kind}
                before = db.execute(_LOCKED_DOCUMENT, same).first()
                if before is None:
                    document, version = written(row.document), VERSION
                    key = {"id": str(row.id), "host": host, "kind": row.kind, **_found_by(row.kind, row.document)}
                    db.execute(_INSERT, {**key, "state": row.state, "document": document, "version": version})
                else:
                    known = parsed(type(row.document), before.document, before.version)
                    document, version = rewritten(before.document, known, row.document), version_after(before.version)
                    # A point is rarely replaced, and an earlier version may have left its columns empty.
                    found = _found_by(row.kind, row.document) if row.kind == "point" else {}
                    db.execute(_REWRITE, {**same, "state": row.state, "document": document, "version": version, **found})
                if row.announced:
                    OF_RUNS.add(db, row.id, document, version, host=host)

    def change(self, kind: Kind, id_: UUID, model: type[D], change: Callable[[D], D], *, host: str) -> D:
        """Changes a document; what others change at the same time is not lost. BackupNotFound, Unreadable."""
        with self._writing() as db:
            same = {"of_id": str(id_), "of_host": host, "of_kind": kind}
            before = db.execute(_LOCKED_DOCUMENT, same).first()
            if before is None:
                raise not_listed(_NOUNS.get(kind, f"backup {kind}"), id_, BackupNotFound)
            known = parsed(model, before.document, before.version)
            changed = change(known)
            document, version = rewritten(before.document, known, changed), version_after(before.version)
            db.execute(_REWRITE, {**same, "document": document, "version": version})
        return changed

    def get(self, kind: Kind, id_: UUID, *, host: str) -> str:
        """A document. BackupNotFound, Unreadable."""
        with self._reading() as db:
            row = db.execute(_DOCUMENT, {"of_id": str(id_), "of_host": host, "of_kind": kind}).first()
        if row is None:
            raise not_listed(_NOUNS.get(kind, f"backup {kind}"), id_, BackupNotFound)
        check_version(kind, row.version)
        return str(row.document)

    def several(self, kind: Kind, ids: Collection[UUID], *, host: str) -> dict[UUID, tuple[str, str]]:
        """Those of these documents that there are, by id, each with its version."""
        columns = (backups.c.id, backups.c.document, backups.c.version)
        chosen = (backups.c.id.in_(map(str, ids)), backups.c.host == host, backups.c.kind == kind)
        with self._reading() as db:
            found = db.execute(select(*columns).where(*chosen)).all() if ids else []
        return {UUID(row.id): (row.document, row.version) for row in found}

    def page(
        self, kind: Kind, *, host: str, limit: int, cursor: int | None = None, only: Fields | None = None
    ) -> tuple[list[str], int | None]:
        """A page of documents, newest first, and the cursor of the next page (None: this was the last). `only`: those whose
        fields have one of these values each; a field without values has any."""
        with self._reading() as db:
            rows = db.execute(page_of(backups, _ways(kind, host, only), limit=limit + 1, cursor=cursor)).all()
        return [row.document for row in rows[:limit]], rows[limit - 1].number if len(rows) > limit else None

    def runs_from(self, number: int, *, host: str, states: tuple[str, ...], limit: int) -> list[tuple[int, str]]:
        """The runs in one of `states` after row `number`, oldest first, each with its row's number."""
        chosen = (backups.c.host == host, backups.c.kind == "run", is_known(backups.c.version), backups.c.state.in_(states))
        query = select(backups.c.number, backups.c.document).where(*chosen, backups.c.number > number)
        with self._reading() as db:
            return [(row.number, row.document) for row in db.execute(query.order_by(backups.c.number).limit(limit))]

    def all(self, kind: Kind, *, host: str, states: tuple[str, ...] | None = None, only: Fields | None = None) -> list[str]:
        """All documents of a kind, oldest first. `only`: as in `page`."""
        query = page_of(backups, _ways(kind, host, only, states), limit=None, cursor=None)
        with self._reading() as db:
            return [row.document for row in db.execute(query)][::-1]

    def points_of_guests(self, *, host: str, moment: float) -> tuple[list[PointsOfGuest], list[str]]:
        """All points by guest, job and state, read from an index; and the documents of those that an earlier version wrote,
        which are not in it. `moment`: no point made after it is the newest, in seconds since 1970."""
        of_points = (backups.c.host == host, backups.c.kind == "point")
        with self._reading() as db:
            groups = db.execute(_POINTS_OF_GUESTS.where(*of_points), {"moment": moment}).all()
            missing = any(one.all_ > one.with_time for one in groups)
            query = select(backups.c.document).where(*of_points, backups.c.made_at.is_(None))
            others = [row.document for row in db.execute(query)] if missing else []
        return [PointsOfGuest(*one[:5]) for one in groups if one.with_time], others

    def guests_named(self, job_id: UUID, names: Sequence[str], *, host: str) -> set[str]:
        """The guests' ids of those points of a job that were made under one of these names."""
        points = (backups.c.host == host, backups.c.kind == "point", backups.c.vm_name.in_(names))
        with self._reading() as db:
            found = db.execute(select(backups.c.vm_id).where(*points, backups.c.job_id == str(job_id)).distinct())
            return {row.vm_id for row in found}

    def ids(self, kind: Kind, *, host: str) -> set[UUID]:
        """The ids of all documents of a kind, whatever their version. No document is read."""
        with self._reading() as db:
            found = db.execute(select(backups.c.id).where(backups.c.host == host, backups.c.kind == kind))
            return {UUID(row.id) for row in found}

    def claim(self, run_id: UUID, names: list[str], *, host: str, hint: str) -> None:
        """Claims names for a run until its end, as migrations of this host do. Conflict, when another run or job has one."""
        with self._writing() as db:
            claim(db, Owner("run", run_id), names, host, hint=hint)

    def refuse_claimed(self, run_id: UUID, names: list[str], *, host: str, hint: str) -> None:
        """Conflict, when the run could not claim them."""
        with self._reading() as db:
            refuse_claimed(db, Owner("run", run_id), names, host, hint=hint)

    def remove(self, kind: Kind, id_: UUID, *, host: str, check: Callable[[str], None] | None = None) -> None:
        """Removes a document. Idempotent. `check`: raises, where the document as it is stays."""
        with self._writing() as db:
            if check is not None:
                there = db.execute(_LOCKED_DOCUMENT, {"of_id": str(id_), "of_host": host, "of_kind": kind}).first()
                if there is None:
                    return
                check_version(kind, there.version)
                check(there.document)
            same = (backups.c.id == str(id_), backups.c.host == host, backups.c.kind == kind)
            db.execute(delete(backups).where(*same))

    def remove_run(self, run_id: UUID, *, host: str) -> None:
        """Removes a run and its events. Idempotent."""
        with self._writing() as db:
            OF_RUNS.forget(db, OF_RUNS.of(run_id), backup_events.c.host == host)
            same = (backups.c.id == str(run_id), backups.c.host == host, backups.c.kind == "run")
            db.execute(delete(backups).where(*same))

    # ── what happened to runs ────────────────────────────────────────────────────────────────────────────────────────

    def events_after(self, event_id: int, *, host: str, run_id: UUID | None = None, limit: int | None = None) -> list[Event]:
        """The events after `event_id`, in order."""
        with self._reading() as db:
            return OF_RUNS.after(db, event_id, backup_events.c.host == host, job_id=run_id, limit=limit)

    def newest_events(self, *, host: str, ends: tuple[str, ...], run_id: UUID | None = None) -> list[Event]:
        """The newest event of each run that is not in one of the states `ends`, or of `run_id` in any state; with the run as it
        is now."""
        chosen = backups.c.state.not_in(ends) if run_id is None else backups.c.id == str(run_id)
        with self._reading() as db:
            return OF_RUNS.newest(db, backups, backups.c.host == host, backups.c.kind == "run", chosen)

    def last_event_id(self, *, host: str) -> int:
        with self._reading() as db:
            return OF_RUNS.last_id(db, backup_events.c.host == host)

    def sweep_events(self, *, host: str) -> None:
        """Removes the oldest events. The newest one always stays, so that ids go on growing."""
        oldest = self.last_event_id(host=host) - EVENTS_KEPT
        with self._writing() as db:
            OF_RUNS.forget(db, backup_events.c.host == host, backup_events.c.id <= oldest)


def _ways(kind: Kind, host: str, only: Fields | None, states: tuple[str, ...] | None = None) -> list[Way]:
    """A document is to be found where it fits one of these."""
    chosen: Way = [backups.c.host == host, backups.c.kind == kind]
    chosen += [] if states is None else [backups.c.state.in_(states)]
    checks: Way = [is_known(backups.c.version)]
    checks += [fields_are(backups.c.document, only)] if only else []
    by = next((name for name in _FINDERS if only and only.get(name)), None)
    if only is None or by is None:
        return [[*chosen, *checks]]
    column = _FINDERS[by]
    found = [column == kept(value) for value in dict.fromkeys(only[by])]
    found += [column.is_(None)] if by not in _ALWAYS else []
    return [[*chosen, one, *checks] for one in found]


def _found_by(kind: Kind, document: BaseModel) -> dict[str, str | float]:
    """The columns that find a document. A field that it does not have, or that is null, is an empty text."""
    fields = {column.name: getattr(document, name, None) for name, column in _FINDERS.items() if name not in _ALWAYS}
    made_at = {"made_at": document.created_at.timestamp()} if kind == "point" and hasattr(document, "created_at") else {}
    return {name: "" if value is None else kept(str(value)) for name, value in fields.items()} | made_at
