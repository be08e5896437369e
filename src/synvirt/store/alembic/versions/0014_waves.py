"""Waves: a row each, a row a member, and their events; and until when a job may cut over."""

import sqlalchemy as sa
from alembic import op

revision = "0014"
down_revision = "0013"
branch_labels = None
depends_on = None

_SERIAL = sa.BigInteger().with_variant(sa.Integer, "sqlite")


def upgrade() -> None:
    op.add_column("migrations", sa.Column("cutover_until", sa.Double, nullable=True))
    op.create_table(
        "waves",
        sa.Column("number", _SERIAL, autoincrement=True, nullable=False),
        sa.Column("id", sa.String(36), nullable=False),
        sa.Column("name", sa.String(255), nullable=False),
        sa.Column("state", sa.String(32), nullable=False),
        sa.Column("document", sa.Text, nullable=False),
        sa.Column("version", sa.String(16), nullable=False, server_default="1.0"),
        sa.PrimaryKeyConstraint("number", name="pk_waves"),
        sa.UniqueConstraint("id", name="uq_waves_id"),
        sqlite_autoincrement=True,
    )
    op.create_table(
        "wave_members",
        sa.Column("wave_id", sa.String(36), nullable=False),
        sa.Column("member_id", sa.String(64), nullable=False),
        sa.Column("position", sa.Integer, nullable=False),
        sa.Column("state", sa.String(32), nullable=False),
        sa.Column("job_id", sa.String(36), nullable=True),
        sa.Column("submitted", sa.Boolean, nullable=False, server_default=sa.false()),
        sa.Column("rolling_back", sa.Boolean, nullable=False, server_default=sa.false()),
        sa.Column("waits_for", sa.Text, nullable=True),
        sa.Column("document", sa.Text, nullable=False),
        sa.Column("version", sa.String(16), nullable=False, server_default="1.0"),
        sa.PrimaryKeyConstraint("wave_id", "member_id", name="pk_wave_members"),
        sa.ForeignKeyConstraint(["wave_id"], ["waves.id"], name="fk_wave_members_wave_id_waves", ondelete="CASCADE"),
    )
    op.create_index("ix_wave_members_wave_id", "wave_members", ["wave_id", "position"])
    op.create_index("ix_wave_members_job_id", "wave_members", ["job_id"])
    op.create_table(
        "wave_events",
        sa.Column("id", _SERIAL, autoincrement=True, nullable=False),
        sa.Column("wave_id", sa.String(36), nullable=False),
        sa.Column("document", sa.Text, nullable=False),
        sa.Column("version", sa.String(16), nullable=False, server_default="1.0"),
        sa.PrimaryKeyConstraint("id", name="pk_wave_events"),
        sa.ForeignKeyConstraint(["wave_id"], ["waves.id"], name="fk_wave_events_wave_id_waves", ondelete="CASCADE"),
        sqlite_autoincrement=True,
    )
    op.create_index("ix_wave_events_wave_id", "wave_events", ["wave_id"])
