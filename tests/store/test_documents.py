"""Documents of other versions are read, written with what this one does not know, and never stop a start."""

import json
from typing import Any
from uuid import UUID

import pytest
from sqlalchemy import create_engine, insert, make_url, text

from synvirt.errors import PersistFailed
from synvirt.model import Migration, State
from synvirt.store import Store
from synvirt.store.documents import Unreadable, parsed, readable, rewritten
from synvirt.store.tables import migrations
from tests.house import live_plan
from tests.jobs.migrations import migration


def _later(job: Migration) -> dict[str, Any]:
    """As a later version would have written it: fields that nobody knows here, some in parts that refuse such."""
    document: dict[str, Any] = json.loads(job.model_dump_json())
    document["receipt"] = {"signed": True}
    document["plan"]["window_id"] = "w1"
    document["plan"]["warm"]["not_before"] = "22:00"
    document["plan"]["source_ref"]["via"] = ["a", "b"]
    document["history"][0]["by"] = "admin"
    return document


def _job() -> Migration:
    job = migration(plan=live_plan())
    visits = [{"state": "Queued", "at": "2026-01-02T03:04:05Z"}, {"state": "CopyingFull", "at": "2026-01-02T03:04:06Z"}]
    return Migration.model_validate_json(json.dumps(json.loads(job.model_dump_json()) | {"history": visits}))


def test_unknown_fields_are_read_past_and_survive_a_change() -> None:
    job = _job()
    text_ = json.dumps(_later(job))
    read = parsed(Migration, text_)
    assert read == job
    after = read.model_copy(update={"state": State.STARTING, "history": (*read.history, read.history[0])})
    written = json.loads(rewritten(text_, read, after))
    assert written["receipt"] == {"signed": True}
    assert (written["plan"]["window_id"], written["plan"]["warm"]["not_before"]) == ("w1", "22:00")
    assert written["plan"]["source_ref"]["via"] == ["a", "b"]
    assert [visit.get("by") for visit in written["history"]][:2] == ["admin", None]
    assert parsed(Migration, json.dumps(written)) == after
    assert rewritten(job.model_dump_json(), job, after) == after.model_dump_json()


@pytest.mark.parametrize("text_", ["{", "[]", '{"id": 7}', "", '{"id":"x","plan":{"source":{"Live":"vim_api"}}}'])
def test_what_cannot_be_read_is_named(text_: str) -> None:
    with pytest.raises(Unreadable, match="a stored Migration"):
        parsed(Migration, text_)


def test_one_bad_row_stops_nothing(database_url: str) -> None:
    store = Store(database_url)
    good = _job()
    store.add(good, host="h")
    bad = UUID(int=3)
    with store._writing() as db:
        db.execute(insert(migrations).values(id=str(bad), host="h", state="FutureState", document='{"id": 3}'))
    assert [job.id for job in store.unended(host="h")] == [good.id]
    assert set(store.unended_ids(host="h")) == {good.id, bad}
    assert [job.id for job in readable(Migration, store.documents(limit=9)[0])] == [good.id]
    with pytest.raises(Unreadable):
        store.get(bad)
    store.close()


def _as_a_later_version(database_url: str, usable_from: str) -> None:
    url = make_url(database_url)
    if url.get_backend_name() == "postgresql":
        url = url.set(drivername="postgresql+psycopg")
    engine = create_engine(url)
    with engine.begin() as db:
        db.execute(text("ALTER TABLE migrations ADD COLUMN window_id VARCHAR(36)"))
        db.execute(text("CREATE TABLE waves (id VARCHAR(36) PRIMARY KEY)"))
        db.execute(text("UPDATE alembic_version SET version_num = 'later'"))
        db.execute(text("UPDATE schema_facts SET value = :value WHERE key = 'usable_from'"), {"value": usable_from})
    engine.dispose()


def test_the_service_goes_back_one_version_while_a_job_is_under_way(database_url: str) -> None:
    store = Store(database_url)
    store.add(job := _job(), host="h")
    with store._writing() as db:
        db.execute(migrations.update().values(document=json.dumps(_later(job))))
    store.close()
    _as_a_later_version(database_url, "0009")

    back = Store(database_url)
    (found,) = back.unended(host="h")
    back.change(found.id, State.QUEUED, lambda one: one.model_copy(update={"state": State.COPYING_FULL}))
    document = json.loads(back.documents(limit=1)[0][0])
    assert (document["state"], document["receipt"], document["plan"]["window_id"]) == ("CopyingFull", {"signed": True}, "w1")
    back.close()


def test_tables_that_this_version_cannot_use_are_refused_in_words(database_url: str) -> None:
    Store(database_url).close()
    _as_a_later_version(database_url, "later")
    with pytest.raises(PersistFailed, match=r"made by a later version of SynVirt \(revision later\)"):
        Store(database_url)
