"""A restore point's state and time as columns: a list by state, and the metrics, read no text of a point."""

import json
from contextlib import suppress
from datetime import datetime

import sqlalchemy as sa
from alembic import op

revision = "0021"
down_revision = "0020"
branch_labels = None
depends_on = None

_BACKUPS = sa.table("backups", *map(sa.column, ("number", "kind", "document", "job_id", "made_at")))
# Points that are in memory at once.
_ROWS = 500
_STATES = ("ok", "unverified", "damaged")
# Of the document, which versions before this one change without the state's column.
_STATE_OF_POINT = (
    "CASE WHEN kind = 'point' THEN CASE "
    + " ".join(f"""WHEN replace(document, '"state":"{state}"', '') <> document THEN '{state}'""" for state in _STATES)
    + " END END"
)


def upgrade() -> None:
    # SQLite adds no column that is stored, PostgreSQL before 18 has none that is not.
    stored = op.get_bind().dialect.name == "postgresql"
    op.add_column("backups", sa.Column("point_state", sa.String(32), sa.Computed(_STATE_OF_POINT, persisted=stored)))
    op.add_column("backups", sa.Column("made_at", sa.Double()))
    _fill()
    op.create_index("ix_backups_point_state", "backups", ["host", "kind", "point_state", "number"])
    op.create_index("ix_backups_newest", "backups", ["host", "kind", "point_state", "job_id", "vm_id", "made_at"])


def _fill() -> None:
    """What cannot be read stays without, and so does a row without the columns of 0020."""
    db, last = op.get_bind(), 0
    points = sa.select(_BACKUPS.c.number, _BACKUPS.c.document)
    chosen = points.where(_BACKUPS.c.kind == "point", _BACKUPS.c.job_id.is_not(None))
    query = chosen.order_by(_BACKUPS.c.number).limit(_ROWS)
    while rows := db.execute(query.where(_BACKUPS.c.number > last)).all():
        last, filled = rows[-1].number, []
        for row in rows:
            with suppress(ValueError, KeyError, TypeError, AttributeError, RecursionError, OverflowError):
                at = datetime.fromisoformat(json.loads(row.document)["created_at"])
                filled.append({"of_number": row.number, "new_at": at.timestamp()})
        if filled:
            changed = sa.update(_BACKUPS).where(_BACKUPS.c.number == sa.bindparam("of_number"))
            db.execute(changed.values(made_at=sa.bindparam("new_at")), filled)
