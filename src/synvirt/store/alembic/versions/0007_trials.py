"""The snapshots of deep tests of sources: noted before they are made."""

import sqlalchemy as sa
from alembic import op

revision = "0007"
down_revision = "0006"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_table(
        "trials",
        sa.Column("name", sa.String(255), nullable=False),
        sa.Column("source_id", sa.String(36), nullable=False),
        sa.Column("vm_id", sa.Text, nullable=False),
        sa.PrimaryKeyConstraint("name", name="pk_trials"),
        sa.ForeignKeyConstraint(["source_id"], ["sources.id"], name="fk_trials_source_id_sources", ondelete="CASCADE"),
    )
