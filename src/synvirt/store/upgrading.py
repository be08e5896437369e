"""The tables brought up to date at a start; or used as they are, where a later version made them.

A later version's tables have the revision of its last Alembic file, which this version has not. `schema_facts.usable_from`
names the first revision whose service can work with them: files that only add nullable columns and tables leave it as it is,
all others set it to their own. So the service can go back one version while jobs are under way.
"""

import functools
from pathlib import Path

import structlog
from alembic import command
from alembic.config import Config
from alembic.runtime.migration import MigrationContext
from alembic.script import ScriptDirectory
from sqlalchemy import Connection, inspect, select

from synvirt.errors import PersistFailed
from synvirt.store.tables import schema_facts

log = structlog.get_logger(__name__)


def upgrade(connection: Connection) -> None:
    """In the caller's transaction. PersistFailed, where a later version's tables cannot be used by this one."""
    present = MigrationContext.configure(connection).get_current_revision()
    head, ours = _revisions()
    if present == head:
        return
    if present is None or present in ours:
        config = _config()
        config.attributes["connection"] = connection
        command.upgrade(config, "head")
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


def _config() -> Config:
    config = Config()
    config.set_main_option("script_location", str(Path(__file__).parent / "alembic"))
    return config


@functools.cache
def _revisions() -> tuple[str | None, frozenset[str]]:
    """The newest of this version's revisions, and all of them. Alembic imports each of their files to tell."""
    scripts = ScriptDirectory.from_config(_config())
    return scripts.get_current_head(), frozenset(script.revision for script in scripts.walk_revisions())
