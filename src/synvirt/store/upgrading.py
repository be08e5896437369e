"""Upgrades the tables at a start. Tables of a later version are used as they are, if that is possible.

A later version's tables have the revision of its last Alembic file, which this version has not. `schema_facts.usable_from`
names the first revision whose service can work with them: files that only add nullable columns and tables leave it as it is,
all others set it to their own. So the service can go back one version while jobs are under way.
"""

import functools
from pathlib import Path

import structlog
from sqlalchemy import Column, Connection, MetaData, String, Table, inspect, select

from synvirt.errors import PersistFailed
from synvirt.store.tables import schema_facts

# Alembic's own table: one row, the revision that the tables have.
_ALEMBIC_VERSION = Table("alembic_version", MetaData(), Column("version_num", String(32), nullable=False))
_SCRIPTS = Path(__file__).parent / "alembic"

log = structlog.get_logger(__name__)


def upgrade(connection: Connection) -> None:
    """Upgrades the tables in the caller's transaction. PersistFailed, where this version cannot use a later version's
    tables."""
    present = _present(connection)
    ours = revisions()
    if present == ours[-1]:
        return
    if present is None or present in ours:
        _run_alembic(connection)
        return
    usable_from = None
    if inspect(connection).has_table(schema_facts.name):
        usable_from = connection.execute(select(schema_facts.c.value).where(schema_facts.c.key == "usable_from")).scalar()
    if usable_from not in ours:
        raise PersistFailed(
            f"the store was made by a later version of SynVirt (revision {present}), and this one cannot use it",
            hint="install that version again, or put back the copy of the store from before the upgrade (docs/operating.md)",
        )
    log.warning("the store was made by a later version; it is used as it is", revision=present)


def _present(connection: Connection) -> str | None:
    if not inspect(connection).has_table(_ALEMBIC_VERSION.name):
        return None
    return connection.execute(select(_ALEMBIC_VERSION.c.version_num)).scalar()


def _run_alembic(connection: Connection) -> None:
    # Imported only here: it costs 10 MiB and time at a start, and almost no start has something to upgrade.
    from alembic import command
    from alembic.config import Config

    config = Config()
    config.set_main_option("script_location", str(_SCRIPTS))
    config.attributes["connection"] = connection
    command.upgrade(config, "head")


@functools.cache
def revisions() -> tuple[str, ...]:
    """This version's revisions, oldest first: each file's name begins with its own (tests/store/test_upgrade.py)."""
    return tuple(sorted(path.name.partition("_")[0] for path in (_SCRIPTS / "versions").glob("[0-9]*.py")))
