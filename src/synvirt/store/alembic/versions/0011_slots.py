"""Slots of source hosts and destinations, for the jobs of all hosts."""

import sqlalchemy as sa
from alembic import op

revision = "0011"
down_revision = "0010"
branch_labels = None
depends_on = None

_SERIAL = sa.BigInteger().with_variant(sa.Integer, "sqlite")


def upgrade() -> None:
    op.create_table(
        "slots",
        sa.Column("number", _SERIAL, autoincrement=True, nullable=False),
        sa.Column("resource", sa.Text, nullable=False),
        sa.Column("job_id", sa.String(36), nullable=False),
        sa.Column("host", sa.String(255), nullable=False),
        sa.Column("held", sa.Boolean, nullable=False),
        sa.PrimaryKeyConstraint("number", name="pk_slots"),
        sa.UniqueConstraint("job_id", "resource", name="uq_slots_job_id"),
        sqlite_autoincrement=True,
    )
    op.create_index("ix_slots_resource", "slots", ["resource"])
