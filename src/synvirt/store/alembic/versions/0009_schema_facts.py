"""Which version may still use the tables after a later one has upgraded them."""

import sqlalchemy as sa
from alembic import op

revision = "0009"
down_revision = "0008"
branch_labels = None
depends_on = None


def upgrade() -> None:
    facts = op.create_table(
        "schema_facts",
        sa.Column("key", sa.String(64), nullable=False),
        sa.Column("value", sa.Text, nullable=False),
        sa.PrimaryKeyConstraint("key", name="pk_schema_facts"),
    )
    op.bulk_insert(facts, [{"key": "usable_from", "value": "0009"}])
