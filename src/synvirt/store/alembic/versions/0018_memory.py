"""What a job remembers as documents, instead of notes under made-up keys."""

import json
from collections.abc import Callable
from typing import Any

import sqlalchemy as sa
from alembic import op

revision = "0018"
down_revision = "0017"
branch_labels = None
depends_on = None

_NOTES = sa.table("notes", sa.column("migration_id"), sa.column("key"), sa.column("value"))
_FACTS = sa.table("schema_facts", sa.column("key"), sa.column("value"))
_VERSION = "1.0"


def _hashed(note: str) -> object:
    host, _, token = note.partition(" ")
    return {"host": host, "token": token}


def _before(note: str) -> object:
    return {"before": None if note == "nothing" else json.loads(note)}


# What a note's name was, with a number or without: its row, its field, and how it was written. An empty note was a note that
# was taken back; an empty last start is one of a platform that says none.
_OF_PASS: dict[str, tuple[str, Callable[[str], object]]] = {
    "begun": ("begun_at", str),
    "snapshot": ("snapshot", json.loads),
    "snapshot_at": ("snapshot_at", str),
    "downs": ("downs", int),
    "last_start": ("last_start", str),
    "released": ("released_at", str),
    "retaken": ("retakes", int),
    "whole": ("whole", lambda _: True),
}
_OF_JOB: dict[str, tuple[str, Callable[[str], object]]] = {
    "told_before": ("told", _before),
    "shutting_down": ("shutting_down_at", str),
    "down_since": ("down_since", str),
    "downs": ("downs", int),
    "cbt_resets": ("cbt_resets", int),
    "distrusted": ("distrusted", str),
    "last_delta": ("last_delta", int),
    "hashes": ("hashed", _hashed),
    "way": ("way", str),
    "source_files": ("source_files", str),
}


def upgrade() -> None:
    table = op.create_table(
        "memory",
        sa.Column("migration_id", sa.String(36), nullable=False),
        sa.Column("kind", sa.String(32), nullable=False),
        sa.Column("number", sa.Integer, nullable=False),
        sa.Column("document", sa.Text, nullable=False),
        sa.Column("version", sa.String(16), nullable=False, server_default="1.0"),
        sa.PrimaryKeyConstraint("migration_id", "kind", "number", name="pk_memory"),
        sa.ForeignKeyConstraint(
            ["migration_id"], ["migrations.id"], name="fk_memory_migration_id_migrations", ondelete="CASCADE"
        ),
    )
    db = op.get_bind()
    rows: dict[tuple[str, str, int], dict[str, object]] = {}
    for job_id, key, value in db.execute(sa.select(_NOTES)):
        if (placed := _placed(key, value)) is not None:
            kind, number, field, content = placed
            rows.setdefault((job_id, kind, number), {})[field] = content
    if rows:
        op.bulk_insert(
            table,
            [
                {"migration_id": job_id, "kind": kind, "number": number, "document": json.dumps(document), "version": _VERSION}
                for (job_id, kind, number), document in rows.items()
            ],
        )
    op.drop_table("notes")
    # A service of before would look for the notes.
    op.execute(sa.update(_FACTS).where(_FACTS.c.key == "usable_from").values(value=revision))


def _placed(key: str, value: str) -> tuple[str, int, str, Any] | None:
    """Kind of row, number, field and content. None: such a note is not read, or it was taken back."""
    name, _, number = key.partition(":")
    field, read = (_OF_PASS if number else _OF_JOB).get(name, ("", str))
    try:
        if key == "course":
            return "course", 0, "course", json.loads(value)
        if not field or (value == "" and field not in {"last_start", "whole", "distrusted"}):
            return None
        return ("pass", int(number), field, read(value)) if number else ("job", 0, field, read(value))
    except ValueError:  # written by no version of ours; a start does not end at it
        return None
