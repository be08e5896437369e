"""Jobs, events, watermarks, ledger, notes."""

import sqlalchemy as sa
from alembic import op

revision = "0001"
down_revision = None
branch_labels = None
depends_on = None

_SERIAL = sa.BigInteger().with_variant(sa.Integer(), "sqlite")


def upgrade() -> None:
    op.create_table(
        "migrations",
        sa.Column("number", _SERIAL, primary_key=True, autoincrement=True),
        sa.Column("id", sa.String(36), nullable=False),
        sa.Column("host", sa.String(255), nullable=False),
        sa.Column("state", sa.String(32), nullable=False),
        sa.Column("cancel_requested", sa.Boolean, nullable=False, server_default=sa.false()),
        sa.Column("cutover_requested", sa.Boolean, nullable=False, server_default=sa.false()),
        sa.Column("document", sa.Text, nullable=False),
        sa.UniqueConstraint("id", name="uq_migrations_id"),
        sqlite_autoincrement=True,
    )
    op.create_index("ix_migrations_host_state", "migrations", ["host", "state"])
    op.create_table(
        "events",
        sa.Column("id", _SERIAL, primary_key=True, autoincrement=True),
        sa.Column("migration_id", sa.String(36), nullable=False),
        sa.Column("document", sa.Text, nullable=False),
        sa.ForeignKeyConstraint(
            ["migration_id"], ["migrations.id"], ondelete="CASCADE", name="fk_events_migration_id_migrations"
        ),
        sqlite_autoincrement=True,
    )
    op.create_index("ix_events_migration_id", "events", ["migration_id"])
    op.create_table(
        "watermarks",
        sa.Column("migration_id", sa.String(36), primary_key=True),
        sa.Column("pass_number", sa.Integer, primary_key=True),
        sa.Column("disk_key", sa.Text, primary_key=True),
        sa.Column("offset_bytes", sa.BigInteger, nullable=False),
        sa.Column("bytes_total", sa.BigInteger, nullable=False),
        sa.Column("bytes_done", sa.BigInteger, nullable=False),
        sa.Column("bytes_zero", sa.BigInteger, nullable=False),
        sa.Column("finished", sa.Boolean, nullable=False),
        sa.ForeignKeyConstraint(
            ["migration_id"], ["migrations.id"], ondelete="CASCADE", name="fk_watermarks_migration_id_migrations"
        ),
    )
    op.create_table(
        "ledger",
        sa.Column("id", _SERIAL, primary_key=True, autoincrement=True),
        sa.Column("migration_id", sa.String(36), nullable=False),
        sa.Column("kind", sa.String(32), nullable=False),
        sa.Column("name", sa.Text, nullable=False),
        sa.ForeignKeyConstraint(
            ["migration_id"], ["migrations.id"], ondelete="CASCADE", name="fk_ledger_migration_id_migrations"
        ),
        sa.UniqueConstraint("migration_id", "kind", "name", name="uq_ledger_migration_id"),
        sqlite_autoincrement=True,
    )
    op.create_table(
        "notes",
        sa.Column("migration_id", sa.String(36), primary_key=True),
        sa.Column("key", sa.String(255), primary_key=True),
        sa.Column("value", sa.Text, nullable=False),
        sa.ForeignKeyConstraint(
            ["migration_id"], ["migrations.id"], ondelete="CASCADE", name="fk_notes_migration_id_migrations"
        ),
    )
