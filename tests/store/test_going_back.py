"""A service of the version before can work with today's tables: later revisions only add to what it knows.

tables_0019.json is what the first release writes and reads, as it was then; a change that it could not live with fails here.
Going back over it is refused at a start (upgrading.py), so such a change needs a release that says so, a new description under
the revision's name, and a word in docs/operating.md.
"""

import json
from pathlib import Path
from typing import Any

from sqlalchemy import ColumnElement, inspect, select

from synvirt.store import Store
from synvirt.store.tables import schema_facts

# The revision that the released service has, and the first that can work with today's tables.
RELEASED = "0019"
FROZEN = Path(__file__).parent / f"tables_{RELEASED}.json"

Table = dict[str, Any]


def description(store: Store) -> dict[str, Table]:
    """Of each table its columns (whether a row may leave them out), and what of a row must be its own."""
    found: dict[str, Table] = {}
    look = inspect(store._engine)
    for name in sorted(set(look.get_table_names()) - {"alembic_version"}):
        key = look.get_pk_constraint(name)["constrained_columns"]
        columns = look.get_columns(name)
        made = {one["name"] for one in columns if one.get("autoincrement") is True} | ({"id", "number"} & set(key))
        found[name] = {
            "columns": {one["name"]: one["nullable"] or one["default"] is not None or one["name"] in made for one in columns},
            "own": sorted([key, *(one["column_names"] for one in _unique(look, name))]),
            "refers": sorted(one["constrained_columns"] for one in look.get_foreign_keys(name)),
            "checks": sorted(str(one["name"]) for one in look.get_check_constraints(name)),
        }
    return found


def _unique(look: Any, table: str) -> list[dict[str, Any]]:
    return [*look.get_unique_constraints(table), *(one for one in look.get_indexes(table) if one["unique"])]


def lost(released: dict[str, Table], today: dict[str, Table]) -> list[str]:
    """What a service that knows the `released` tables would miss in today's, or not be let do."""
    found = [f"table {name} is gone" for name in released.keys() - today.keys()]
    for name in sorted(released.keys() & today.keys()):
        before, now = released[name]["columns"], today[name]["columns"]
        found += [f"{name}.{column} is gone" for column in before.keys() - now.keys()]
        found += [f"{name}.{column} is new, and has to be written" for column in now.keys() - before.keys() if not now[column]]
        found += [
            f"{name}.{column} has to be written now" for column in before.keys() & now.keys() if before[column] > now[column]
        ]
        for rule in ("own", "refers", "checks"):
            found += [f"{name}: {rule} {one}" for one in today[name][rule] if one not in released[name][rule]]
    return found


def usable_from(store: Store) -> str | None:
    wanted: ColumnElement[bool] = schema_facts.c.key == "usable_from"
    with store._reading() as db:
        return db.execute(select(schema_facts.c.value).where(wanted)).scalar()


def test_the_released_service_can_work_with_todays_tables(tmp_path: Path) -> None:
    store = Store(f"sqlite:///{tmp_path / 'store.db'}")
    assert lost(json.loads(FROZEN.read_text()), description(store)) == []
    assert usable_from(store) == RELEASED, "it would refuse them at its start"
    store.close()


def test_what_it_could_not_live_with_is_seen(tmp_path: Path) -> None:
    store = Store(f"sqlite:///{tmp_path / 'store.db'}")
    released = description(store)
    with store._writing() as db:
        for statement in (
            "ALTER TABLE migrations ADD COLUMN may_be VARCHAR(36)",
            "ALTER TABLE uploads ADD COLUMN must_be VARCHAR(36) NOT NULL DEFAULT ''",
            "CREATE TABLE of_later (id VARCHAR(36) PRIMARY KEY)",
        ):
            db.exec_driver_sql(statement)
    assert lost(released, description(store)) == [], "what is added may stay empty"
    with store._writing() as db:
        for statement in (
            "DROP TABLE slots",
            "ALTER TABLE watermarks DROP COLUMN bytes_zero",
            "CREATE UNIQUE INDEX one_a_name ON sources (host)",
        ):
            db.exec_driver_sql(statement)
    assert lost(released, description(store)) == [
        "table slots is gone",
        "sources: own ['host']",
        "watermarks.bytes_zero is gone",
    ]
    store.close()
