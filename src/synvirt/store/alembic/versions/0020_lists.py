"""Columns and indexes for what lists are asked by: a page reads its own rows, not those of years."""

import json
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import sqlalchemy as sa
from alembic import op

revision = "0020"
down_revision = "0019"
branch_labels = None
depends_on = None

_NUMBERED = ("number", "document")
_MIGRATIONS = sa.table("migrations", *map(sa.column, (*_NUMBERED, "name", "source_id")))
_BACKUPS = sa.table("backups", *map(sa.column, (*_NUMBERED, "kind", "job_id", "repository_id", "vm_id", "vm_name", "run_kind")))
# Rows that are in memory at once, and the characters of a text that a column keeps.
_ROWS, _CHARS = 500, 255
_ENDED = sa.text("state NOT IN ('Cancelled', 'Completed', 'Failed')")


def upgrade() -> None:
    for name in ("name", "source_id"):
        op.add_column("migrations", sa.Column(name, sa.String(_CHARS if name == "name" else 36)))
    for name, chars in (("job_id", 36), ("repository_id", 36), ("vm_id", _CHARS), ("vm_name", _CHARS), ("run_kind", 32)):
        op.add_column("backups", sa.Column(name, sa.String(chars)))
    _fill(_MIGRATIONS, _of_job)
    _fill(_BACKUPS, _of_backup, _BACKUPS.c.kind.in_(("run", "point")))
    op.drop_index("ix_migrations_host_state", "migrations")
    op.create_index("ix_migrations_host_state", "migrations", ["host", "state", "number"])
    op.create_index("ix_migrations_host", "migrations", ["host", "number"])
    op.create_index("ix_migrations_state", "migrations", ["state", "number"])
    op.create_index("ix_migrations_name", "migrations", ["name", "number"])
    op.create_index("ix_migrations_source_id", "migrations", ["source_id", "number"])
    op.create_index("ix_migrations_source_id_state", "migrations", ["source_id", "state", "number"])
    op.create_index(
        "ix_migrations_unended", "migrations", ["host", "number", "state"], sqlite_where=_ENDED, postgresql_where=_ENDED
    )
    op.drop_index("ix_backups_host_kind", "backups")
    op.create_index("ix_backups_host_kind", "backups", ["host", "kind", "number"])
    for name in ("state", "job_id", "repository_id", "vm_id", "vm_name", "run_kind"):
        op.create_index(f"ix_backups_{name}", "backups", ["host", "kind", name, "number"])
    op.create_index("ix_wave_members_state", "wave_members", ["wave_id", "state", "rolling_back"])


def _fill(table: sa.TableClause, found: Callable[[Any], dict[str, str]], *chosen: sa.ColumnElement[bool]) -> None:
    """What cannot be read stays without: then its text is looked through."""
    db, last = op.get_bind(), 0
    query = sa.select(table.c.number, table.c.document).where(*chosen).order_by(table.c.number).limit(_ROWS)
    while rows := db.execute(query.where(table.c.number > last)).all():
        last, filled = rows[-1].number, []
        for row in rows:
            with suppress(ValueError, KeyError, TypeError, AttributeError, RecursionError):
                fields = found(json.loads(row.document))
                filled.append({"of_number": row.number} | {f"new_{name}": _kept(text) for name, text in fields.items()})
        if filled:
            values: dict[str, sa.BindParameter[str]] = {
                name.removeprefix("new_"): sa.bindparam(name) for name in filled[0] if name != "of_number"
            }
            db.execute(sa.update(table).where(table.c.number == sa.bindparam("of_number")).values(values), filled)


def _of_job(job: Any) -> dict[str, str]:
    return {"name": job["name"], "source_id": job["plan"]["source_ref"].get("source_id") or ""}


def _of_backup(document: Any) -> dict[str, str]:
    """A run, or a restore point."""
    fields = {name: document.get(name) or "" for name in ("job_id", "repository_id", "vm_id", "vm_name")}
    return fields | {"run_kind": document.get("kind") or ""}


def _kept(text: str) -> str:
    return text.replace("\0", "").encode("utf-8", "replace").decode()[:_CHARS]
