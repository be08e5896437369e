"""Alembic's entry: the store hands its open connection over, so that there is one way to the database."""

from alembic import context

from synvirt.store.tables import METADATA

context.configure(
    connection=context.config.attributes["connection"],
    target_metadata=METADATA,
    # SQLite cannot ALTER most things: Alembic then makes a new table and copies the rows.
    render_as_batch=True,
)
with context.begin_transaction():
    context.run_migrations()
