"""Sealed credentials of jobs that read from elsewhere."""

import sqlalchemy as sa
from alembic import op

revision = "0004"
down_revision = "0003"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_table(
        "secrets",
        sa.Column(
            "migration_id",
            sa.String(36),
            sa.ForeignKey("migrations.id", name="fk_secrets_migration_id_migrations", ondelete="CASCADE"),
            primary_key=True,
        ),
        sa.Column("host", sa.String(255), nullable=False),
        sa.Column("sealed", sa.LargeBinary, nullable=False),
    )
