"""Until when the rate is taken that the copies of a wave share."""

import sqlalchemy as sa
from alembic import op

revision = "0016"
down_revision = "0015"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column("waves", sa.Column("rate_taken_until", sa.Double, nullable=False, server_default="0"))
