"""One ledger: of migrations, backup runs («unfinished»), what backups make of guests («made») and sources' tests (trials)."""

import json
from typing import Any

import sqlalchemy as sa
from alembic import op

revision = "0019"
down_revision = "0018"
branch_labels = None
depends_on = None

_SERIAL = sa.BigInteger().with_variant(sa.Integer, "sqlite")
_OLD = sa.table("ledger", sa.column("id"), sa.column("migration_id"), sa.column("kind"), sa.column("name"))
_TRIALS = sa.table("trials", sa.column("name"), sa.column("source_id"), sa.column("vm_id"), sa.column("host"))
_SOURCES = sa.table("sources", sa.column("id"), sa.column("host"))
_BACKUPS = sa.table(
    "backups",
    *(sa.column(name) for name in ("number", "id", "host", "kind", "document", "version")),
)
_FACTS = sa.table("schema_facts", sa.column("key"), sa.column("value"))
# Of documents that this revision knows.
_MAJOR = "1."


def upgrade() -> None:
    db = op.get_bind()
    rows = [
        _of("migration", row.migration_id, None) | {"kind": row.kind, "name": row.name}
        for row in db.execute(sa.select(_OLD).order_by(_OLD.c.id))
    ]
    kept = sa.select(_BACKUPS).where(_BACKUPS.c.kind.in_(("made", "unfinished"))).order_by(_BACKUPS.c.number)
    for row in db.execute(kept).all():
        # What a later version wrote, or is not readable, stays where it is.
        if row.version.startswith(_MAJOR) and (found := _of_backups(row)) is not None:
            rows += found
            db.execute(sa.delete(_BACKUPS).where(_BACKUPS.c.number == row.number))
    # Earlier versions noted no host of a test: a source was one host's.
    made_by = sa.func.coalesce(_TRIALS.c.host, _SOURCES.c.host).label("made_by")
    trials = sa.select(_TRIALS, made_by).join(_SOURCES, _SOURCES.c.id == _TRIALS.c.source_id).order_by(_TRIALS.c.name)
    for row in db.execute(trials):
        thing = {"kind": "snapshot", "name": row.name, "document": json.dumps({"vm_id": row.vm_id})}
        rows.append(_of("source", row.source_id, row.made_by) | thing)
    op.drop_table("trials")
    op.drop_table("ledger")
    table = op.create_table(
        "ledger",
        sa.Column("id", _SERIAL, autoincrement=True, nullable=False),
        sa.Column("owner_kind", sa.String(16), nullable=False),
        sa.Column("owner_id", sa.String(36), nullable=False),
        sa.Column("host", sa.String(255)),
        sa.Column("kind", sa.String(32), nullable=False),
        sa.Column("name", sa.Text, nullable=False),
        sa.Column("state", sa.String(16), nullable=False, server_default=""),
        sa.Column("document", sa.Text),
        sa.Column("version", sa.String(16), nullable=False, server_default="1.0"),
        sa.PrimaryKeyConstraint("id", name="pk_ledger"),
        sqlite_autoincrement=True,
    )
    op.create_index("ix_ledger_owner_id", "ledger", ["owner_id", "owner_kind"])
    op.create_index("ix_ledger_owner_kind", "ledger", ["owner_kind", "host"])
    if rows:
        op.bulk_insert(table, rows)
    op.execute(sa.update(_FACTS).where(_FACTS.c.key == "usable_from").values(value=revision))


def _of_backups(row: Any) -> list[dict[str, Any]] | None:
    try:
        document = json.loads(row.document)
        if row.kind == "made":
            thing = {"kind": document["way"], "name": row.id, "state": document.get("state", "working")}
            return [
                _of("backup_job", document["job_id"], row.host) | thing | {"document": row.document, "version": row.version}
            ]
        things = document.get("things", ())
        return [_of("run", document["run_id"], row.host) | {"kind": one["kind"], "name": one["name"]} for one in things]
    except (ValueError, KeyError, TypeError, AttributeError):
        return None


def _of(owner_kind: str, owner_id: str, host: str | None) -> dict[str, Any]:
    return {"owner_kind": owner_kind, "owner_id": owner_id, "host": host, "state": "", "document": None, "version": "1.0"}
