"""The version of each stored document, in a column of its own."""

import sqlalchemy as sa
from alembic import op

revision = "0013"
down_revision = "0012"
branch_labels = None
depends_on = None

TABLES = ("migrations", "events", "uploads", "sources", "backups", "backup_events", "tokens")


def upgrade() -> None:
    for table in TABLES:
        op.add_column(table, sa.Column("version", sa.String(16), nullable=False, server_default="1.0"))
