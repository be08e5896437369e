"""Queries about sources, in the store's transactions. A host's key seals its sources: each asks for its own."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from uuid import UUID

from sqlalchemy import Connection, delete, insert, select, update

from synvirt.errors import Conflict, NotFound
from synvirt.model import ENDS, Migration, Source
from synvirt.store.documents import parsed, readable
from synvirt.store.tables import migrations, secrets, sources, trials

# All that is sealed: whose it is, the table, the column that says whose.
_SEALED = (("source", sources, sources.c.id), ("job", secrets, secrets.c.migration_id))

Transaction = Callable[[], AbstractContextManager[Connection]]


@dataclass(frozen=True, slots=True)
class Trial:
    """The snapshot of a deep test: of which VM of which source, and its name there."""

    source_id: UUID
    vm_id: str
    name: str


class SourceRows:
    def __init__(self, *, reading: Transaction, writing: Transaction) -> None:
        self._reading, self._writing = reading, writing

    def add(self, source: Source, sealed: bytes, *, host: str) -> None:
        """Conflict when the host has a source of that name."""
        with self._writing() as db:
            _check_name_free(db, source, host)
            db.execute(
                insert(sources).values(
                    id=str(source.id), host=host, name=source.name, document=source.model_dump_json(), sealed=sealed
                )
            )

    def get(self, source_id: UUID, *, host: str) -> Source:
        """NotFound."""
        with self._reading() as db:
            return _source(db, source_id, host)[0]

    def opened(self, source_id: UUID, *, host: str) -> tuple[Source, bytes]:
        """The source and its sealed credentials. NotFound."""
        with self._reading() as db:
            return _source(db, source_id, host)

    def page(self, *, host: str, limit: int, cursor: int | None = None) -> tuple[list[Source], int | None]:
        """Newest first, and the cursor of the next page (None: this was the last)."""
        query = select(sources.c.number, sources.c.document).where(sources.c.host == host)
        if cursor is not None:
            query = query.where(sources.c.number < cursor)
        with self._reading() as db:
            rows = db.execute(query.order_by(sources.c.number.desc()).limit(limit + 1)).all()
        found = [parsed(Source, row.document) for row in rows[:limit]]
        return found, rows[limit - 1].number if len(rows) > limit else None

    def change(self, source_id: UUID, change: Callable[[Source, bytes], tuple[Source, bytes]], *, host: str) -> Source:
        """NotFound; Conflict when another source of the host has the new name, and when a job that has not ended reads from a
        source that is to be elsewhere."""
        with self._writing() as db:
            before, sealed = _source(db, source_id, host)
            after, sealed = change(before, sealed)
            if after.name != before.name:
                _check_name_free(db, after, host)
            if after.endpoint != before.endpoint:
                _check_unused(db, before)
            values = {"name": after.name, "document": after.model_dump_json(), "sealed": sealed}
            db.execute(update(sources).where(sources.c.id == str(source_id)).values(**values))
            return after

    def remove(self, source_id: UUID, *, host: str) -> None:
        """NotFound; Conflict while a job that has not ended reads from it."""
        with self._writing() as db:
            _check_unused(db, _source(db, source_id, host)[0])
            db.execute(delete(sources).where(sources.c.id == str(source_id)))

    def any_sealed(self, *, host: str) -> tuple[str, UUID, bytes] | None:
        """Something that the host sealed: whether it is a `source`'s or a `job`'s, whose, and the sealed bytes."""
        with self._reading() as db:
            for owner, table, key in _SEALED:
                row = db.execute(select(key.label("id"), table.c.sealed).where(table.c.host == host).limit(1)).first()
                if row is not None:
                    return owner, UUID(row.id), row.sealed
        return None

    def reseal(self, reseal: Callable[[str, UUID, bytes], bytes], *, host: str) -> int:
        """All that the host sealed at once, or nothing, named as in `any_sealed`; how many sources there are."""
        count = 0
        with self._writing() as db:
            for owner, table, key in _SEALED:
                rows = db.execute(select(key.label("id"), table.c.sealed).where(table.c.host == host)).all()
                for row in rows:
                    sealed = reseal(owner, UUID(row.id), row.sealed)
                    db.execute(update(table).where(key == row.id).values(sealed=sealed))
                count += len(rows) if owner == "source" else 0
        return count

    # ── deep tests ───────────────────────────────────────────────────────────────────────────────────────────────────────

    def note_trial(self, trial: Trial, *, host: str) -> None:
        """Before the snapshot is made. NotFound, where the source was removed meanwhile."""
        with self._writing() as db:
            _source(db, trial.source_id, host)
            db.execute(insert(trials).values(name=trial.name, source_id=str(trial.source_id), vm_id=trial.vm_id))

    def strike_trial(self, trial: Trial) -> None:
        """Once the snapshot is gone; again is harmless."""
        with self._writing() as db:
            db.execute(delete(trials).where(trials.c.name == trial.name))

    def trials(self, *, host: str) -> list[Trial]:
        """All of the host whose snapshots may be there; but not of a VM that a job reads which has not ended."""
        noted = select(trials).join(sources, sources.c.id == trials.c.source_id).where(sources.c.host == host)
        unended = select(migrations.c.document).where(migrations.c.state.not_in([str(end) for end in ENDS]))
        with self._reading() as db:
            found = [Trial(UUID(row.source_id), row.vm_id, row.name) for row in db.execute(noted.order_by(trials.c.name))]
            jobs = readable(Migration, (row.document for row in db.execute(unended))) if found else []
        read = {(ref.source_id, ref.vm_id) for ref in (job.plan.source_ref for job in jobs) if ref.kind == "live_vm"}
        return [one for one in found if (one.source_id, one.vm_id) not in read]


def _source(db: Connection, source_id: UUID, host: str) -> tuple[Source, bytes]:
    query = select(sources.c.document, sources.c.sealed).where(sources.c.id == str(source_id), sources.c.host == host)
    row = db.execute(query).first()
    if row is None:
        raise NotFound(f"there is no source {source_id}", hint="synvirt sources list shows them")
    return parsed(Source, row.document), row.sealed


def _check_unused(db: Connection, source: Source) -> None:
    using = (
        select(migrations.c.id)
        .where(migrations.c.state.not_in([str(end) for end in ENDS]))
        .where(migrations.c.document.contains(str(source.id)))
        .order_by(migrations.c.number)
    )
    jobs = [row.id for row in db.execute(using)]
    if jobs:
        raise Conflict(
            f"{len(jobs)} job(s) read from source {source.name}: {', '.join(jobs[:5])}",
            hint="wait for them to end, or cancel them",
        )


def _check_name_free(db: Connection, source: Source, host: str) -> None:
    same = select(sources.c.id).where(sources.c.host == host, sources.c.name == source.name)
    if db.execute(same).first() is not None:
        raise Conflict(f"a source named {source.name!r} is registered", hint="choose another name, or change that one")
