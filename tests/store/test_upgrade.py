"""A database that an earlier version wrote is taken over with all that is in it."""

import json
from datetime import UTC, datetime
from pathlib import Path
from uuid import uuid4

import pytest
from alembic import command
from alembic.config import Config
from alembic.script import ScriptDirectory
from sqlalchemy import Connection, create_engine, insert, make_url

import synvirt.store
from synvirt.model.kinds import State
from synvirt.store import LedgerEntry, Store, Watermark
from synvirt.store.tables import events, ledger, migrations, notes, secrets, sources, uploads, watermarks
from synvirt.store.upgrading import revisions

CONFIG = Config()
CONFIG.set_main_option("script_location", str(Path(synvirt.store.__file__).parent / "alembic"))
REVISIONS = [script.revision for script in ScriptDirectory.from_config(CONFIG).walk_revisions()][::-1]
JOB, UPLOAD, SOURCE = uuid4(), uuid4(), uuid4()
AT = "2026-01-02T03:04:05.678Z"
# As the first version wrote a job: what came later is not in it.
DOCUMENT = {
    "id": str(JOB),
    "name": "münchen – ✓",
    "plan": {
        "source": {"Offline": "ova_archive"},
        "source_ref": {"kind": "offline_host_path", "path": "/imports/a.ova"},
        "mode": "Cold",
    },
    "state": "CopyingFull",
    "mode_effective": "Cold",
    "created_at": AT,
}


def test_the_names_of_the_files_are_the_revisions() -> None:
    """The service reads names alone: it loads Alembic only where there is something to upgrade."""
    assert list(revisions()) == REVISIONS


def written_by_an_earlier_version(db: Connection, revision: str) -> None:
    """A row in each table that the version had."""
    key = {"migration_id": str(JOB)}
    text = json.dumps(DOCUMENT)
    db.execute(insert(migrations).values(id=str(JOB), host="h", state="CopyingFull", cancel_requested=True, document=text))
    for _ in range(3):
        db.execute(insert(events).values(**key, document=text))
    counts = {"offset_bytes": 2**40, "bytes_total": 2**41, "bytes_done": 7, "bytes_zero": 3}
    db.execute(insert(watermarks).values(**key, pass_number=1, disk_key="2000", **counts, finished=False))
    db.execute(insert(ledger).values(**key, kind="volume", name="a-disk"))
    db.execute(insert(notes).values(**key, key="k", value="v"))
    if revision >= "0002":
        upload = {"id": str(UPLOAD), "filename": "a.ova", "size_bytes": 5, "sha256": "ab", "path": "/p", "created_at": AT}
        db.execute(insert(uploads).values(id=str(UPLOAD), host="h", document=json.dumps(upload | {"expires_at": AT})))
    if revision >= "0003":
        source = {"id": str(SOURCE), "name": "lab", "kind": "vim_api", "endpoint": "https://v.example", "created_at": AT}
        values = {"id": str(SOURCE), "host": "h", "name": "lab", "document": json.dumps(source), "sealed": b"\0sealed"}
        db.execute(insert(sources).values(**values))
    if revision >= "0004":
        db.execute(insert(secrets).values(**key, host="h", sealed=b"\0secret"))


@pytest.mark.parametrize("revision", REVISIONS)
def test_a_database_of_each_version_is_taken_over_with_its_rows(database_url: str, revision: str) -> None:
    url = make_url(database_url)
    if url.get_backend_name() == "postgresql":
        url = url.set(drivername="postgresql+psycopg")
    engine = create_engine(url)
    with engine.begin() as connection:
        CONFIG.attributes["connection"] = connection
        command.upgrade(CONFIG, revision)
        written_by_an_earlier_version(connection, revision)
    engine.dispose()

    store = Store(database_url)
    try:
        job = store.get(JOB)
        assert (job.name, job.state, job.created_at) == (
            "münchen – ✓",
            State.COPYING_FULL,
            datetime(2026, 1, 2, 3, 4, 5, 678000, tzinfo=UTC),
        )
        assert store.cancel_requested(JOB)
        assert not store.cutover_requested(JOB)
        assert [event.id for event in store.events_after(0)] == [1, 2, 3]
        mark = Watermark("2000", 1, 2**40, 2**41, 7, 3, finished=False)
        assert store.watermarks(JOB, 1) == {"2000": mark}
        assert store.ledger(JOB) == [LedgerEntry("volume", "a-disk")]
        assert store.noted(JOB, "k") == "v"
        if revision >= "0002":
            assert store.uploads.get(UPLOAD, host="h").filename == "a.ova"
        if revision >= "0003":
            assert store.sources.get(SOURCE).name == "lab"
            assert store.sources.opened(SOURCE)[1] == b"\0sealed"
        assert store.sealed(JOB) == (b"\0secret" if revision >= "0004" else None)
        # … and the job goes on: a move, a new event behind the old ones.
        store.change(JOB, State.COPYING_FULL, lambda job: job.model_copy(update={"state": State.STARTING}))
        assert store.last_event_id() == 4
    finally:
        store.close()


def test_every_version_is_one_behind_another() -> None:
    """Two heads, from two engineers' versions at once, would leave half of the hosts without the other's tables."""
    assert ScriptDirectory.from_config(CONFIG).get_heads() == [REVISIONS[-1]]
    assert REVISIONS[0] == "0001"
    assert sorted(REVISIONS) == REVISIONS
