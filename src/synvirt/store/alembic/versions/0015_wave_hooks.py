"""Webhooks of waves: their secrets, sealed, and a row a delivery."""

import sqlalchemy as sa
from alembic import op

revision = "0015"
down_revision = "0014"
branch_labels = None
depends_on = None

_SERIAL = sa.BigInteger().with_variant(sa.Integer, "sqlite")


def upgrade() -> None:
    op.create_table(
        "wave_hooks",
        sa.Column("id", sa.String(36), nullable=False),
        sa.Column("wave_id", sa.String(36), nullable=False),
        sa.Column("host", sa.String(255), nullable=False),
        sa.Column("sealed", sa.LargeBinary, nullable=False),
        sa.PrimaryKeyConstraint("id", name="pk_wave_hooks"),
        sa.ForeignKeyConstraint(["wave_id"], ["waves.id"], name="fk_wave_hooks_wave_id_waves", ondelete="CASCADE"),
    )
    op.create_index("ix_wave_hooks_wave_id", "wave_hooks", ["wave_id"])
    op.create_table(
        "wave_deliveries",
        sa.Column("number", _SERIAL, autoincrement=True, nullable=False),
        sa.Column("wave_id", sa.String(36), nullable=False),
        sa.Column("hook_id", sa.String(36), nullable=False),
        sa.Column("event", sa.String(32), nullable=False),
        sa.Column("body", sa.Text, nullable=False),
        sa.Column("state", sa.String(16), nullable=False),
        sa.Column("attempts", sa.Integer, nullable=False),
        sa.Column("made_at", sa.Double, nullable=False),
        sa.Column("next_at", sa.Double, nullable=False),
        sa.Column("answer", sa.Text, nullable=True),
        sa.PrimaryKeyConstraint("number", name="pk_wave_deliveries"),
        sa.ForeignKeyConstraint(["wave_id"], ["waves.id"], name="fk_wave_deliveries_wave_id_waves", ondelete="CASCADE"),
        sqlite_autoincrement=True,
    )
    op.create_index("ix_wave_deliveries_wave_id", "wave_deliveries", ["wave_id", "number"])
    op.create_index("ix_wave_deliveries_state", "wave_deliveries", ["state", "next_at"])
