"""The service's windows, which the plans of single jobs name."""

import sqlalchemy as sa
from alembic import op

revision = "0022"
down_revision = "0021"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_table(
        "windows",
        sa.Column("id", sa.String(64), nullable=False),
        sa.Column("document", sa.Text, nullable=False),
        sa.Column("version", sa.String(16), nullable=False, server_default="1.0"),
        sa.PrimaryKeyConstraint("id", name="pk_windows"),
    )
