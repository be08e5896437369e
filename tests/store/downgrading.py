"""A store of this version written as revision 0017 had it, which had notes and four ledgers: for jobs that are under way.

The service itself has no way back.
"""

import json
from typing import Any

from sqlalchemy import Connection, create_engine, inspect, text

_OF_PASS = {
    "begun_at": "begun",
    "snapshot": "snapshot",
    "snapshot_at": "snapshot_at",
    "downs": "downs",
    "last_start": "last_start",
    "released_at": "released",
    "retakes": "retaken",
    "whole": "whole",
}
_OF_JOB = {"passing": "told_before", "shutting_down_at": "shutting_down", "hashed": "hashes"}
# By table: the columns that revisions 0020 and 0021 added, and the indexes that were there before.
_FINDERS: dict[str, tuple[tuple[str, ...], set[str]]] = {
    "migrations": (("name", "source_id"), {"ix_migrations_host_state"}),
    "backups": (
        ("job_id", "repository_id", "vm_id", "vm_name", "run_kind", "point_state", "made_at"),
        {"ix_backups_host_kind"},
    ),
    "wave_members": ((), {"ix_wave_members_wave_id", "ix_wave_members_job_id"}),
}


def to_0017(sqlite_url: str) -> int:
    """How many notes there are."""
    engine = create_engine(sqlite_url)
    with engine.begin() as db:
        _without_finders(db)
        db.execute(
            text("CREATE TABLE notes (migration_id VARCHAR(36), key VARCHAR(255), value TEXT, PRIMARY KEY (migration_id, key))")
        )
        count = 0
        for row in db.execute(text("SELECT * FROM memory")).all():
            for key, value in _notes(row.kind, row.number, json.loads(row.document)):
                values = {"job": row.migration_id, "key": key, "value": value}
                db.execute(text("INSERT INTO notes VALUES (:job, :key, :value)"), values)
                count += 1
        entries = db.execute(text("SELECT * FROM ledger ORDER BY id")).all()
        for table in ("memory", "ledger", "windows"):
            db.execute(text(f"DROP TABLE {table}"))
        columns = "id INTEGER PRIMARY KEY AUTOINCREMENT, migration_id VARCHAR(36), kind VARCHAR(32), name TEXT"
        db.execute(text(f"CREATE TABLE ledger ({columns})"))
        db.execute(text("CREATE TABLE trials (name TEXT, source_id VARCHAR(36), vm_id TEXT, host TEXT)"))
        for one in entries:
            assert one.owner_kind == "migration"
            values = {"job": one.owner_id, "kind": one.kind, "name": one.name}
            db.execute(text("INSERT INTO ledger (migration_id, kind, name) VALUES (:job, :kind, :name)"), values)
        db.execute(text("UPDATE alembic_version SET version_num = '0017'"))
        db.execute(text("UPDATE schema_facts SET value = '0009' WHERE key = 'usable_from'"))
    engine.dispose()
    return count


def _without_finders(db: Connection) -> None:
    for table, (columns, indexes) in _FINDERS.items():
        for name in {one["name"] for one in inspect(db).get_indexes(table)} - indexes:
            db.execute(text(f"DROP INDEX {name}"))
        for column in columns:
            db.execute(text(f"ALTER TABLE {table} DROP COLUMN {column}"))


def _notes(kind: str, number: int, document: dict[str, Any]) -> list[tuple[str, str]]:
    if kind == "course":
        return [("course", json.dumps(document["course"]))]
    written = {field: _text(field, value) for field, value in document.items() if value not in (None, False, 0)}
    if kind == "pass":
        # Here 0 and an empty text say more than that there was no note.
        written |= {field: str(document[field]) for field in ("retakes", "last_start") if document.get(field) is not None}
        return [(f"{_OF_PASS[field]}:{number}", value) for field, value in written.items()]
    return [(_OF_JOB.get(field, field), value) for field, value in written.items()]


def _text(field: str, value: Any) -> str:
    match field:
        case "snapshot":
            return json.dumps(value)
        case "passing":
            return "nothing" if value["before"] is None else json.dumps(value["before"])
        case "hashed":
            return f"{value['host']} {value['token']}"
        case _:
            return str(value)
