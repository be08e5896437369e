"""Rehearsals of jobs."""

import sqlalchemy as sa
from alembic import op

revision = "0017"
down_revision = "0016"
branch_labels = None
depends_on = None

_SERIAL = sa.BigInteger().with_variant(sa.Integer, "sqlite")


def upgrade() -> None:
    op.create_table(
        "rehearsals",
        sa.Column("number", _SERIAL, autoincrement=True, nullable=False),
        sa.Column("id", sa.String(36), nullable=False),
        sa.Column("migration_id", sa.String(36), nullable=False),
        sa.Column("state", sa.String(32), nullable=False),
        sa.Column("cancel_requested", sa.Boolean, nullable=False, server_default=sa.false()),
        sa.Column("document", sa.Text, nullable=False),
        sa.Column("version", sa.String(16), nullable=False, server_default="1.0"),
        sa.PrimaryKeyConstraint("number", name="pk_rehearsals"),
        sa.UniqueConstraint("id", name="uq_rehearsals_id"),
        sa.ForeignKeyConstraint(
            ["migration_id"], ["migrations.id"], name="fk_rehearsals_migration_id_migrations", ondelete="CASCADE"
        ),
        sqlite_autoincrement=True,
    )
    op.create_index("ix_rehearsals_migration_id", "rehearsals", ["migration_id"])
