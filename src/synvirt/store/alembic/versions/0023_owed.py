"""An index of the ledger entries that jobs must still settle at their sources, few of hundreds of thousands."""

import sqlalchemy as sa
from alembic import op

revision = "0023"
down_revision = "0022"
branch_labels = None
depends_on = None

_OWED = sa.text("kind IN ('mark', 'snapshot', 'tracking')")


def upgrade() -> None:
    columns = ["owner_id", "owner_kind", "kind"]
    op.create_index("ix_ledger_owed", "ledger", columns, sqlite_where=_OWED, postgresql_where=_OWED)
