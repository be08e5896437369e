"""Documents of other versions are read, written with what this one does not know, and never stop a start."""

import json
from typing import Any
from uuid import UUID, uuid4

import pytest
from sqlalchemy import create_engine, insert, make_url, text

from synvirt.backups.model import BackupRepository
from synvirt.backups.sources.made import Made, MadeRows
from synvirt.errors import PersistFailed
from synvirt.model.files import Upload
from synvirt.model.job import Migration
from synvirt.model.kinds import State
from synvirt.model.sources import Source
from synvirt.model.values import now
from synvirt.store import Store
from synvirt.store.documents import VERSION, Unreadable, parsed, readable, rewritten, version_after, written
from synvirt.store.tables import backups, events, ledger, migrations, sources, uploads
from tests.house import live_plan
from tests.jobs.migrations import migration


def _later(job: Migration) -> dict[str, Any]:
    """As a later version would have written it: fields that nobody knows here, some in parts that refuse such."""
    document: dict[str, Any] = json.loads(job.model_dump_json())
    document["of_later"] = {"signed": True}
    document["plan"]["of_later"] = "w1"
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
    again = json.loads(rewritten(text_, read, after))
    assert again["of_later"] == {"signed": True}
    assert (again["plan"]["of_later"], again["plan"]["warm"]["not_before"]) == ("w1", "22:00")
    assert again["plan"]["source_ref"]["via"] == ["a", "b"]
    assert [visit.get("by") for visit in again["history"]][:2] == ["admin", None]
    assert parsed(Migration, json.dumps(again)) == after
    assert rewritten(job.model_dump_json(), job, after) == after.model_dump_json()


def test_a_document_that_is_read_again_is_not_parsed_again() -> None:
    text_ = written(_job())
    assert parsed(Migration, text_) is parsed(Migration, str(text_.encode(), "utf-8"))
    with pytest.raises(Unreadable, match=r"version 9\.0"):
        parsed(Migration, text_, "9.0")


def test_a_change_writes_only_the_new_document(monkeypatch: pytest.MonkeyPatch) -> None:
    job, texts = _job(), list[str]()
    make = Migration.model_dump_json
    monkeypatch.setattr(Migration, "model_dump_json", lambda job: texts.append(make(job)) or texts[-1])  # type: ignore[func-returns-value]
    before = written(job)
    read = parsed(Migration, before)
    after = rewritten(before, read, read.model_copy(update={"state": State.STARTING}))
    assert texts == [before, after]


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
    assert store.count_by_state(host="h") == {good.state: 1}
    assert [job.id for job in readable(Migration, store.documents(limit=9)[0])] == [good.id]
    with pytest.raises(Unreadable):
        store.get(bad)
    store.close()


@pytest.mark.parametrize(
    ("before", "after"), [("1.0", VERSION), ("1.7", "1.7"), ("1.12", "1.12"), ("1.x", VERSION), ("1", VERSION)]
)
def test_a_later_minor_version_stays_beside_what_it_wrote(before: str, after: str) -> None:
    assert version_after(before) == after


@pytest.mark.parametrize("version", ["2.0", "0.9", "10.0", "", "x"])
def test_a_document_of_another_major_version_is_quarantined_whole(database_url: str, version: str) -> None:
    """Even one that could be read: what its fields mean may be another thing by then."""
    store = Store(database_url)
    good, other = _job(), migration(id=uuid4())
    source = Source(id=uuid4(), name="lab", kind="vim_api", endpoint="https://v.example", created_at=good.created_at)
    upload = Upload(
        id=uuid4(),
        filename="a.ova",
        size_bytes=5,
        sha256="ab",
        path="/p",
        created_at=good.created_at,
        expires_at=good.created_at,
    )
    made = Made(id=uuid4(), job_id=uuid4(), vm_id="v", way="zfs", name="n")
    kept = BackupRepository(id=uuid4(), name="k", kind="local", path="/k", created_at=now())
    store.add(good, host="h")
    before = store.last_event_id()
    store.add(other, host="h")
    store.sources.add(source, b"", host="h")
    store.uploads.add(upload, host="h")
    MadeRows(store.ledgers, host="h").put(made)
    store.backups.put("repository", kept.id, kept, host="h")
    with store._writing() as db:
        for table in (migrations, events, sources, uploads, backups):
            mine = table.c.migration_id == str(other.id) if table is events else table.c.id != str(good.id)
            db.execute(table.update().where(mine).values(version=version))
        db.execute(ledger.update().values(version=version))

    assert [job.id for job in store.unended(host="h")] == [good.id]
    assert json.loads(store.documents(limit=9)[0][0])["id"] == str(good.id)
    assert len(store.documents(limit=9)[0]) == len(store.newest_events()) == 1
    assert store.events_after(before) == []
    assert store.sources.page(limit=9)[0] == []
    assert store.uploads.all(host="h") == store.uploads.page(host="h", limit=9)[0] == []
    assert store.backups.all("repository", host="h") == []
    assert MadeRows(store.ledgers, host="h").all() == []
    for ask in (
        lambda: store.get(other.id),
        lambda: store.change(other.id, State.QUEUED, lambda one: one),
        lambda: store.request_cancel(other.id),
        lambda: store.sources.get(source.id),
        lambda: store.uploads.get(upload.id, host="h"),
        lambda: store.backups.get("repository", kept.id, host="h"),
        lambda: store.backups.put("repository", kept.id, kept, host="h"),
        lambda: MadeRows(store.ledgers, host="h").put(made),
    ):
        with pytest.raises(Unreadable, match="is of version"):
            ask()
    store.close()


def test_what_a_later_minor_version_added_survives_in_all_that_is_written(database_url: str) -> None:
    store = Store(database_url)
    store.add(job := _job(), host="h")
    source = Source(id=uuid4(), name="lab", kind="vim_api", endpoint="https://v.example", created_at=job.created_at)
    store.sources.add(source, b"", host="h")
    made = Made(id=uuid4(), job_id=uuid4(), vm_id="v", way="zfs", name="n")
    kept = BackupRepository(id=uuid4(), name="k", kind="local", path="/k", created_at=now())
    MadeRows(store.ledgers, host="h").put(made)
    store.backups.put("repository", kept.id, kept, host="h")
    with store._writing() as db:
        for table in (migrations, sources, backups, ledger):
            (text_,) = db.execute(table.select().with_only_columns(table.c.document)).scalars()
            later = json.dumps(json.loads(text_) | {"of_later": {"signed": True}})
            db.execute(table.update().values(document=later, version="1.7"))

    store.change(job.id, State.QUEUED, lambda one: one.model_copy(update={"state": State.COPYING_FULL}))
    store.sources.change(source.id, lambda one, sealed: (one.model_copy(update={"name": "other"}), sealed), host="h")
    store.backups.put("repository", kept.id, kept.model_copy(update={"state": "unreachable"}), host="h")
    MadeRows(store.ledgers, host="h").put(made.model_copy(update={"state": "keeping"}))
    with store._reading() as db:
        for table, changed in (
            (migrations, "CopyingFull"),
            (sources, "other"),
            (backups, "unreachable"),
            (ledger, "keeping"),
        ):
            (row,) = db.execute(table.select()).all()
            document = json.loads(row.document)
            assert (document["of_later"], row.version) == ({"signed": True}, "1.7"), table.name
            assert changed in document.values()
        assert [row.version for row in db.execute(events.select())] == [VERSION, "1.7"]
    store.close()


def _as_a_later_version(database_url: str, usable_from: str) -> None:
    url = make_url(database_url)
    if url.get_backend_name() == "postgresql":
        url = url.set(drivername="postgresql+psycopg")
    engine = create_engine(url)
    with engine.begin() as db:
        db.execute(text("ALTER TABLE migrations ADD COLUMN of_later VARCHAR(36)"))
        db.execute(text("CREATE TABLE of_later (id VARCHAR(36) PRIMARY KEY)"))
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
    assert (document["state"], document["of_later"], document["plan"]["of_later"]) == ("CopyingFull", {"signed": True}, "w1")
    back.close()


def test_tables_that_this_version_cannot_use_are_refused_in_words(database_url: str) -> None:
    Store(database_url).close()
    _as_a_later_version(database_url, "later")
    with pytest.raises(PersistFailed, match=r"made by a later version of SynVirt \(revision later\)"):
        Store(database_url)
