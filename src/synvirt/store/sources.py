"""Queries about sources, in the store's transactions. Sources are registered once for all hosts. `host`: the host whose key
sealed the credentials; the hosts of a fleet share one key (docs/decisions/0012-one-key-for-a-fleet.md)."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any
from uuid import UUID

from sqlalchemy import Connection, Row, delete, insert, select, update

from synvirt.errors import Conflict, not_listed
from synvirt.model.job import Migration
from synvirt.model.sources import Source
from synvirt.model.values import Model
from synvirt.sizes import counted
from synvirt.store.documents import VERSION, is_known, parsed, readable, rewritten, version_after
from synvirt.store.ledger import LedgerEntry, Owner, forget, record, strike
from synvirt.store.migration_rows import is_unended, one_at_a_time
from synvirt.store.tables import ledger, migrations, schema_facts, secrets, sources, wave_hooks

# Two sources of one name that are added at the same moment must not both find it free: "srcn".
NAMES_LOCK = 0x7372636E
# What the facts about a sealing key that was replaced are named by, with the key's name.
_REPLACED = "sealing_key_replaced "
# All sealed things: the kind of owner, the table, and the column with the owner's id.
_SEALED = (
    ("source", sources, sources.c.id),
    ("job", secrets, secrets.c.migration_id),
    ("hook", wave_hooks, wave_hooks.c.id),
)

Transaction = Callable[[], AbstractContextManager[Connection]]


@dataclass(frozen=True, slots=True)
class Trial:
    """The snapshot of a deep test: its source, its VM and its name. It has an entry in the source's ledger."""

    source_id: UUID
    vm_id: str
    name: str


@dataclass(frozen=True, slots=True)
class Sealed:
    """A sealed thing, its owner, and the host that sealed it: a `source`'s credentials, a `job`'s or a `hook`'s secret."""

    owner: str
    id: UUID
    host: str
    sealed: bytes


class SourceRows:
    """The registered sources, with their sealed credentials."""

    def __init__(self, *, reading: Transaction, writing: Transaction) -> None:
        self._reading, self._writing = reading, writing

    def add(self, source: Source, sealed: bytes, *, host: str) -> None:
        """Adds a source. Conflict, when there is a source of that name."""
        with self._writing() as db:
            _check_name_free(db, source)
            db.execute(
                insert(sources).values(
                    id=str(source.id),
                    host=host,
                    name=source.name,
                    document=source.model_dump_json(),
                    version=VERSION,
                    sealed=sealed,
                )
            )

    def get(self, source_id: UUID) -> Source:
        """The source. NotFound."""
        with self._reading() as db:
            return _parsed(_row(db, source_id))

    def opened(self, source_id: UUID) -> tuple[Source, bytes]:
        """The source and its sealed credentials. NotFound."""
        with self._reading() as db:
            row = _row(db, source_id)
            return _parsed(row), row.sealed

    def page(self, *, limit: int, cursor: int | None = None) -> tuple[list[Source], int | None]:
        """A page of sources, newest first, and the cursor of the next page (None: this was the last)."""
        query = select(sources.c.number, sources.c.document).where(is_known(sources.c.version))
        if cursor is not None:
            query = query.where(sources.c.number < cursor)
        with self._reading() as db:
            rows = db.execute(query.order_by(sources.c.number.desc()).limit(limit + 1)).all()
        found = readable(Source, [row.document for row in rows[:limit]])
        return found, rows[limit - 1].number if len(rows) > limit else None

    def change(self, source_id: UUID, change: Callable[[Source, bytes], tuple[Source, bytes]], *, host: str) -> Source:
        """Changes a source. NotFound; Conflict, when another source has the new name, or when the endpoint changes while an
        unended job reads from the source."""
        with self._writing() as db:
            row = _row(db, source_id, lock=True)
            before, was_sealed = _parsed(row), row.sealed
            after, sealed = change(before, was_sealed)
            if after.name != before.name:
                _check_name_free(db, after)
            if after.endpoint != before.endpoint:
                _check_unused(db, before)
            document = rewritten(row.document, before, after)
            values: dict[str, object] = {"name": after.name, "document": document, "version": version_after(row.version)}
            if sealed != was_sealed:
                values |= {"sealed": sealed, "host": host}
            db.execute(update(sources).where(sources.c.id == str(source_id)).values(**values))
            return after

    def remove(self, source_id: UUID, check: Callable[[Source, bytes], None] = lambda source, sealed: None) -> None:
        """Removes a source. `check`: raises, where the source and its sealed credentials, as they are, stay. NotFound;
        Conflict, while an unended job reads from it."""
        with self._writing() as db:
            row = _row(db, source_id, lock=True)
            source = _parsed(row)
            check(source, row.sealed)
            _check_unused(db, source)
            # The snapshots of its tests cannot be reached any more.
            forget(db, Owner("source", source_id))
            db.execute(delete(sources).where(sources.c.id == str(source_id)))

    def sealed(self) -> list[Sealed]:
        """All sealed things, of all hosts."""
        with self._reading() as db:
            return [
                Sealed(owner, UUID(row.id), row.host, row.sealed)
                for owner, table, key in _SEALED
                for row in db.execute(select(key.label("id"), table.c.host, table.c.sealed))
            ]

    def replacement_of(self, key: str) -> tuple[str, str] | None:
        """The name of the key by which the key with this name was replaced, and the host on which; None: it was not."""
        with self._reading() as db:
            found = db.execute(select(schema_facts.c.value).where(schema_facts.c.key == _REPLACED + key)).scalar()
        if found is None:
            return None
        by, _, host = found.partition(" ")
        return by, host

    def reseal(self, reseal: Callable[[Sealed], bytes | None], *, replaced: str, by: str, host: str) -> int:
        """Seals all things again, or none. Where `reseal` gives None, a thing stays as it is. `replaced`, `by`: the names of
        the key before and of that after, which are noted, too. The number of sources that were sealed again."""
        count = 0
        with self._writing() as db:
            for owner, table, key in _SEALED:
                for row in db.execute(select(key.label("id"), table.c.host, table.c.sealed).with_for_update()).all():
                    sealed = reseal(Sealed(owner, UUID(row.id), row.host, row.sealed))
                    if sealed is not None:
                        db.execute(update(table).where(key == row.id).values(sealed=sealed))
                        count += owner == "source"
            db.execute(insert(schema_facts).values(key=_REPLACED + replaced, value=f"{by} {host}"))
        return count

    # ── deep tests ───────────────────────────────────────────────────────────────────────────────────────────────────────

    def note_trial(self, trial: Trial, *, host: str) -> None:
        """Adds the ledger entry of a snapshot, before it is made. NotFound, where the source was removed meanwhile."""
        with self._writing() as db:
            _row(db, trial.source_id, lock=True)
            record(db, *_entry(trial), host=host)

    def strike_trial(self, trial: Trial) -> None:
        """Deletes the ledger entry, after the snapshot is gone. Idempotent."""
        with self._writing() as db:
            owner, entry = _entry(trial)
            strike(db, owner, entry.kind, entry.name)

    def trials(self, *, host: str) -> list[Trial]:
        """The host's snapshots that may still exist; without those of VMs that an unended job reads."""
        noted = select(ledger).where(ledger.c.owner_kind == "source", ledger.c.host == host, is_known(ledger.c.version))
        unended = select(migrations.c.document).where(is_unended(), is_known(migrations.c.version))
        with self._reading() as db:
            rows = db.execute(noted.order_by(ledger.c.id)).all()
            found = [Trial(UUID(row.owner_id), parsed(_OfTrial, row.document, row.version).vm_id, row.name) for row in rows]
            jobs = readable(Migration, (row.document for row in db.execute(unended))) if found else []
        read = {(ref.source_id, ref.vm_id) for ref in (job.plan.source_ref for job in jobs) if ref.kind == "live_vm"}
        return [one for one in found if (one.source_id, one.vm_id) not in read]


class _OfTrial(Model):
    vm_id: str


def _entry(trial: Trial) -> tuple[Owner, LedgerEntry]:
    document = _OfTrial(vm_id=trial.vm_id).model_dump_json()
    return Owner("source", trial.source_id), LedgerEntry("snapshot", trial.name, document=document)


def _row(db: Connection, source_id: UUID, *, lock: bool = False) -> Row[Any]:
    query = select(sources).where(sources.c.id == str(source_id))
    row = db.execute(query.with_for_update() if lock else query).first()
    if row is None:
        raise not_listed("source", source_id)
    return row


def _parsed(row: Row[Any]) -> Source:
    return parsed(Source, row.document, row.version)


def _check_unused(db: Connection, source: Source) -> None:
    using = (
        select(migrations.c.id)
        .where(is_unended())
        .where(migrations.c.document.contains(str(source.id)))
        .order_by(migrations.c.number)
    )
    jobs = [row.id for row in db.execute(using)]
    if jobs:
        raise Conflict(
            f"source {source.name} is read by {counted(len(jobs), 'job')}: {', '.join(jobs[:5])}",
            hint="wait for them to end, or cancel them",
        )


def _check_name_free(db: Connection, source: Source) -> None:
    one_at_a_time(db, NAMES_LOCK)
    same = select(sources.c.id).where(sources.c.name == source.name)
    if db.execute(same).first() is not None:
        raise Conflict(f"a source named {source.name!r} is registered", hint="choose another name, or change that one")
