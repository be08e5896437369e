"""Which host made the snapshot of a deep test: sources are those of all hosts."""

import sqlalchemy as sa
from alembic import op

revision = "0012"
down_revision = "0011"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column("trials", sa.Column("host", sa.String(255), nullable=True))
