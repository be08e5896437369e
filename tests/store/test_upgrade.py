"""A database that an earlier version wrote is taken over with all that is in it."""

import json
from datetime import UTC, datetime
from pathlib import Path
from uuid import uuid4

import pytest
from alembic import command
from alembic.config import Config
from alembic.script import ScriptDirectory
from sqlalchemy import Connection, create_engine, insert, make_url, table
from sqlalchemy import column as named

import synvirt.store
from synvirt.backups.sources.made import Made, MadeRows
from synvirt.jobs.course import Course, Sample
from synvirt.live import SnapshotRef
from synvirt.migrations.memory import CourseMemory, Hashed, JobMemory, Passing, PassMemory
from synvirt.model.kinds import State
from synvirt.model.problems import Problem
from synvirt.store import LedgerEntry, Store, Watermark
from synvirt.store.ledger import Owner
from synvirt.store.sources import Trial
from synvirt.store.tables import events, ledger, memory, migrations, secrets, sources, uploads, watermarks
from synvirt.store.upgrading import revisions

CONFIG = Config()
CONFIG.set_main_option("script_location", str(Path(synvirt.store.__file__).parent / "alembic"))
REVISIONS = [script.revision for script in ScriptDirectory.from_config(CONFIG).walk_revisions()][::-1]
JOB, UPLOAD, SOURCE = uuid4(), uuid4(), uuid4()
AT = "2026-01-02T03:04:05.678Z"
MOMENT = datetime(2026, 1, 2, 3, 4, 5, 678000, tzinfo=UTC)
TOKEN = uuid4()
PROBLEM = Problem(code="E_MIG_NOT_FOUND", message="m", hint="h", fatal=False, at=MOMENT, state=State.COPYING_FULL)
OLD_LEDGER = table("ledger", named("migration_id"), named("kind"), named("name"))
OLD_BACKUPS = table("backups", *map(named, ("id", "host", "kind", "state", "document")))
OLD_TRIALS = table("trials", named("name"), named("source_id"), named("vm_id"), named("host"))
MADE = Made(id=uuid4(), job_id=uuid4(), vm_id="v", way="zfs", name="n", volumes=("p/v",), state="lasting")
RUN, LONG = uuid4(), "<domain/>" * 999
UNFINISHED = {"run_id": str(RUN), "things": [{"kind": "staged", "name": "/a"}, {"kind": "defined", "name": LONG}]}
OLD_NOTES = table("notes", named("migration_id"), named("key"), named("value"))
# Every note that a version before 0018 wrote, one that nobody knows, and one that was broken.
NOTES = {
    "told_before": PROBLEM.model_dump_json(),
    "shutting_down": AT,
    "down_since": AT,
    "downs": "2",
    "cbt_resets": "1",
    "distrusted": "it lies",
    "last_delta": "8",
    "hashes": f"host-a {TOKEN}",
    "way": "own",
    "source_files": "[('a', 1)]",
    "course": "[2.0,[[1.5,0],[3.5,4096]]]",
    "begun:7": AT,
    "snapshot:7": '{"id":"s-7","change_ids":{"2000":"c/7"}}',
    "snapshot_at:7": AT,
    "downs:7": "2",
    "last_start:7": "",
    "released:7": AT,
    "retaken:7": "0",
    "whole:7": "change tracking was reset",
    "snapshot:8": "",
    "begun:8": AT,
    "retaken:9": "none",
    "k": "v",
}
PASS_7 = PassMemory(
    begun_at=MOMENT,
    snapshot=SnapshotRef(id="s-7", change_ids={"2000": "c/7"}),
    snapshot_at=MOMENT,
    downs=2,
    last_start="",
    released_at=MOMENT,
    retakes=0,
    whole=True,
)
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


def _written_at(revision: str, database_url: str, noted: dict[str, str] = NOTES) -> None:
    url = make_url(database_url)
    if url.get_backend_name() == "postgresql":
        url = url.set(drivername="postgresql+psycopg")
    engine = create_engine(url)
    with engine.begin() as connection:
        CONFIG.attributes["connection"] = connection
        command.upgrade(CONFIG, revision)
        written_by_an_earlier_version(connection, revision, noted)
    engine.dispose()


def written_by_an_earlier_version(db: Connection, revision: str, noted: dict[str, str]) -> None:
    """A row in each table that the version had."""
    key = {"migration_id": str(JOB)}
    text = json.dumps(DOCUMENT)
    db.execute(insert(migrations).values(id=str(JOB), host="h", state="CopyingFull", cancel_requested=True, document=text))
    for _ in range(3):
        db.execute(insert(events).values(**key, document=text))
    counts = {"offset_bytes": 2**40, "bytes_total": 2**41, "bytes_done": 7, "bytes_zero": 3}
    db.execute(insert(watermarks).values(**key, pass_number=1, disk_key="2000", **counts, finished=False))
    if revision < "0019":
        db.execute(insert(OLD_LEDGER).values(**key, kind="volume", name="a-disk"))
    else:
        db.execute(insert(ledger).values(owner_kind="migration", owner_id=str(JOB), kind="volume", name="a-disk"))
    if "0005" <= revision < "0019":
        broken = json.dumps({"run_id": 7, "things": 7})
        for id_, kind, document in (
            (MADE.id, "made", MADE.model_dump_json()),
            (uuid4(), "unfinished", json.dumps(UNFINISHED)),
            (uuid4(), "unfinished", broken),
        ):
            values = {"host": "h", "kind": kind, "state": "", "document": document}
            db.execute(insert(OLD_BACKUPS).values(id=str(id_), **values))
    if revision < "0018":
        for name, value in noted.items():
            db.execute(insert(OLD_NOTES).values(**key, key=name, value=value))
    else:
        db.execute(insert(memory).values(**key, kind="job", number=0, document='{"downs":2}'))
    if revision >= "0002":
        upload = {"id": str(UPLOAD), "filename": "a.ova", "size_bytes": 5, "sha256": "ab", "path": "/p", "created_at": AT}
        db.execute(insert(uploads).values(id=str(UPLOAD), host="h", document=json.dumps(upload | {"expires_at": AT})))
    if revision >= "0003":
        source = {"id": str(SOURCE), "name": "lab", "kind": "vim_api", "endpoint": "https://v.example", "created_at": AT}
        values = {"id": str(SOURCE), "host": "h", "name": "lab", "document": json.dumps(source)}
        db.execute(insert(sources).values(**values, sealed=b"\0sealed"))
    if "0007" <= revision < "0019":
        trial = {"name": "synvirt-test-1", "source_id": str(SOURCE), "vm_id": "vm-1"}
        db.execute(insert(OLD_TRIALS).values(**trial, **({"host": "t"} if revision >= "0012" else {})))
    if revision >= "0004":
        db.execute(insert(secrets).values(**key, host="h", sealed=b"\0secret"))


@pytest.mark.parametrize("revision", REVISIONS)
def test_a_database_of_each_version_is_taken_over_with_its_rows(empty_database_url: str, revision: str) -> None:
    _written_at(revision, empty_database_url)
    store = Store(empty_database_url)
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
        run = Owner("run", RUN)
        things = [LedgerEntry("staged", "/a"), LedgerEntry("defined", LONG)]
        assert store.ledgers.of(run) == (things if "0005" <= revision < "0019" else [])
        made = MadeRows(store.ledgers, host="h").all()
        assert made == ([MADE] if "0005" <= revision < "0019" else [])
        trial = Trial(SOURCE, "vm-1", "synvirt-test-1")
        assert store.sources.trials(host="t" if revision >= "0012" else "h") == ([trial] if "0007" <= revision < "0019" else [])
        assert store.memory.get(JOB, JobMemory).downs == 2
        assert store.memory.get(JOB, PassMemory, 7) == (PASS_7 if revision < "0018" else PassMemory())
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


def test_each_kind_of_note_is_taken_over(empty_database_url: str) -> None:
    _written_at("0017", empty_database_url)
    store = Store(empty_database_url)
    try:
        assert store.memory.get(JOB, JobMemory) == JobMemory(
            passing=Passing(before=PROBLEM),
            shutting_down_at=MOMENT,
            down_since=MOMENT,
            downs=2,
            cbt_resets=1,
            distrusted="it lies",
            last_delta=8,
            hashed=Hashed(host="host-a", token=TOKEN),
            way="own",
            source_files="[('a', 1)]",
        )
        assert store.memory.get(JOB, PassMemory, 7) == PASS_7
        assert store.memory.get(JOB, PassMemory, 8) == PassMemory(begun_at=MOMENT)
        assert store.memory.get(JOB, PassMemory, 9) == PassMemory()
        assert store.memory.get(JOB, CourseMemory).course == Course(2.0, (Sample(1.5, 0), Sample(3.5, 4096)))
    finally:
        store.close()


@pytest.mark.parametrize(
    ("note", "passing"), [("nothing", Passing()), ("", None), (PROBLEM.model_dump_json(), Passing(before=PROBLEM)), ("{", None)]
)
def test_the_problem_before_a_passing_trouble_is_taken_over(tmp_path: Path, note: str, passing: Passing | None) -> None:
    url = f"sqlite:///{tmp_path / 'store.db'}"
    _written_at("0017", url, {"told_before": note, "hashes": "", "shutting_down": ""})
    store = Store(url)
    try:
        assert store.memory.get(JOB, JobMemory) == JobMemory(passing=passing)
    finally:
        store.close()


def test_every_version_is_one_behind_another() -> None:
    """Two heads, from two engineers' versions at once, would leave half of the hosts without the other's tables."""
    assert ScriptDirectory.from_config(CONFIG).get_heads() == [REVISIONS[-1]]
    assert REVISIONS[0] == "0001"
    assert sorted(REVISIONS) == REVISIONS
