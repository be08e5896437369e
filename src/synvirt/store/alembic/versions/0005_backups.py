"""Backups: repositories, jobs, runs and restore points."""

import sqlalchemy as sa
from alembic import op

revision = "0005"
down_revision = "0004"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_table(
        "backups",
        sa.Column("number", sa.BigInteger().with_variant(sa.Integer(), "sqlite"), primary_key=True, autoincrement=True),
        sa.Column("id", sa.String(36), nullable=False),
        sa.Column("host", sa.String(255), nullable=False),
        sa.Column("kind", sa.String(32), nullable=False),
        sa.Column("state", sa.String(32), nullable=False),
        sa.Column("document", sa.Text, nullable=False),
        sa.UniqueConstraint("id", name="uq_backups_id"),
        sqlite_autoincrement=True,
    )
    op.create_index("ix_backups_host_kind", "backups", ["host", "kind"])
