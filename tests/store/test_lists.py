"""What lists read, on each sort of database: their own rows, and not those of years. The database itself counts them."""

import json
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from typing import Any, get_args
from uuid import UUID, uuid4

import pytest
from sqlalchemy import Connection, event, func, insert, select, text, update

from synvirt.backups.model import BackupRun, PointState, RestorePoint, Status
from synvirt.backups.points import Points
from synvirt.model.job import Domain, Migration
from synvirt.model.kinds import ENDS, State
from synvirt.store import Store
from synvirt.store.backups import Row
from synvirt.store.filters import Only
from synvirt.store.tables import POINT_STATES, backups, ledger, migrations, slots
from tests.house import live_plan
from tests.jobs.migrations import migration

AT = datetime(2026, 1, 1, tzinfo=UTC)
# Of each sort there is one that is asked for, the oldest, and so many others after it. A scan reads them all.
OTHERS, READ_MOST = 800, 200
# SQLite counts the steps of its programs. One that reads a row takes some ten.
STEPS_A_ROW = 10
BEGUN = tuple(state for state in State if state not in ENDS)


def a_job(name: str, state: State) -> Migration:
    plan = live_plan()
    ref = plan.source_ref.model_copy(update={"source_id": uuid4()})
    domain = Domain(name=name, uuid=str(uuid4()), xml="<domain/>" + " " * 1500)
    return migration().model_copy(
        update={
            "id": uuid4(),
            "name": name,
            "state": state,
            "plan": plan.model_copy(update={"source_ref": ref}),
            "domain": domain,
        }
    )


def a_point(name: str, job_id: UUID, repository_id: UUID) -> RestorePoint:
    return RestorePoint(
        id=uuid4(),
        vm_id=name,
        vm_name=name,
        job_id=job_id,
        run_id=uuid4(),
        created_at=AT,
        quiesced=False,
        consistency="crash",
        repository_id=repository_id,
        repository_kind="local",
        disks=(),
        size_bytes=0,
        stored_bytes=0,
    )


class Filled:
    """The store, and in it one job, one run and one point that are asked for, each before all others."""

    def __init__(self, store: Store) -> None:
        self.store = store
        self.job, other = a_job("sought", State.COPYING_FULL), a_job("other", State.COMPLETED)
        self.point = a_point("sought", uuid4(), uuid4())
        self.run = BackupRun(id=uuid4(), kind="restore", job_id=self.point.job_id, status=Status.TRANSFERRING, created_at=AT)
        store.add(self.job, host="sought")
        store.hosts.begin("sought", ttl_s=-9, document="{}")
        others = [other.model_copy(update={"id": uuid4()}) for _ in range(OTHERS)]
        for one in others:
            store.add(one, host="other")
        of_other = uuid4(), uuid4()
        done = {"job_id": of_other[0], "status": Status.COMPLETED, "created_at": AT}
        runs = [self.run, *(BackupRun(id=uuid4(), **done) for _ in range(OTHERS))]
        self.point = self.point.model_copy(update={"state": "damaged"})
        points = [self.point, *(a_point("other", *of_other) for _ in range(OTHERS))]
        rows = (
            (Row("run", run.id, run, state=str(run.status)), Row("point", point.id, point))
            for run, point in zip(runs, points, strict=True)
        )
        store.backups.put_all([row for both in rows for row in both], host="h")
        with store._writing() as db:
            waiting: list[dict[str, Any]] = [
                {"resource": "r", "job_id": str(uuid4()), "host": "h", "held": place == 0} for place in range(OTHERS)
            ]
            db.execute(insert(slots), waiting)
            kept = [("claim", "name other"), ("volume", "disk-0.raw"), ("domain", "other")]
            noted = [{"owner_kind": "migration", "kind": kind, "name": name} for kind, name in kept]
            db.execute(insert(ledger), [entry | {"owner_id": str(one.id)} for one in others for entry in noted])
            self.last_in_line = UUID(waiting[-1]["job_id"])
            if db.dialect.name == "postgresql":
                db.execute(text("ANALYZE"))

    def jobs(self, **only: Any) -> list[UUID]:
        return [UUID(json.loads(one)["id"]) for one in self.store.documents(limit=9, only=Only(**only))[0]]

    def found(self, kind: str, /, **only: str) -> list[UUID]:
        fields = {name: [value] for name, value in only.items()}
        page = self.store.backups.page(kind, host="h", limit=9, only=fields)[0]  # type: ignore[arg-type]
        return [UUID(json.loads(one)["id"]) for one in page]


Ask = Callable[[Filled], object]
JOBS: dict[str, Ask] = {
    "a state": lambda all_: all_.jobs(states=(State.COPYING_FULL,)),
    "those under way": lambda all_: all_.jobs(states=BEGUN),
    "a host": lambda all_: all_.jobs(host="sought"),
    "a host and a state": lambda all_: all_.jobs(host="sought", states=(State.COPYING_FULL,)),
    "a name": lambda all_: all_.jobs(name="sought"),
    "a name, a host and states": lambda all_: all_.jobs(name="sought", host="sought", states=tuple(State)),
    "a source": lambda all_: all_.jobs(source_id=all_.job.plan.source_ref.source_id),  # type: ignore[union-attr]
    "a source and states": lambda all_: all_.jobs(
        source_id=all_.job.plan.source_ref.source_id,  # type: ignore[union-attr]
        states=(State.COPYING_FULL, State.FAILED),
    ),
    "unended": lambda all_: [one.id for one in all_.store.unended()],
    "unended of a host": lambda all_: [one.id for one in all_.store.unended(host="sought")],
    "ids": lambda all_: all_.store.unended_ids(host="sought"),
    "newest events": lambda all_: [one.job_id for one in all_.store.newest_events()],
}
COUNTS: dict[str, tuple[Ask, object]] = {
    "all jobs": (lambda all_: len(all_.jobs()), 9),
    "ended jobs": (lambda all_: len(all_.jobs(states=tuple(ENDS))), 9),
    "a wave": (lambda all_: len(all_.jobs(wave_id=uuid4())), 0),
    "unended by host": (lambda all_: all_.store.count_unended(), {"sought": 1}),
    "wishes": (lambda all_: all_.store.wishes(host="other"), []),
    "what is left to tidy up": (lambda all_: all_.store.untidied(host="other"), []),
    "a claim": (lambda all_: all_.store.claim(all_.job.id, ["name sought", "name other"], hint=""), None),
    "readers of an upload": (lambda all_: all_.store.uploads.readers(uuid4()), []),
    "jobs of lost hosts": (lambda all_: all_.store.lost_jobs.all(but="other"), []),
    "new events of a host": (lambda all_: len(all_.store.events_after(all_.store.last_event_id() - 3, host="other")), 3),
    "all runs": (lambda all_: len(all_.found("run")), 9),
    "all points": (lambda all_: len(all_.found("point")), 9),
    "unended runs": (lambda all_: len(all_.store.backups.all("run", host="h", states=(str(Status.TRANSFERRING),))), 1),
    "a line": (lambda all_: all_.store.slots.is_next(all_.last_in_line, {"r": 3}, host="h"), False),
    "the audit trail": (lambda all_: all_.store.audit.page(limit=9), ([], None)),
    "points by state": (lambda all_: len(all_.found("point", state="unverified")), 9),
    "waves": (lambda all_: all_.store.waves.page(limit=9), ([], None)),
}
RUNS: dict[str, Ask] = {
    "a status": lambda all_: all_.found("run", status=str(Status.TRANSFERRING)),
    "a kind": lambda all_: all_.found("run", kind="restore"),
    "a job": lambda all_: all_.found("run", job_id=str(all_.run.job_id)),
}
POINTS: dict[str, Ask] = {
    "a guest": lambda all_: all_.found("point", vm_id="sought"),
    "a guest's name": lambda all_: all_.found("point", vm_name="sought"),
    "a job": lambda all_: all_.found("point", job_id=str(all_.point.job_id)),
    "a repository": lambda all_: all_.found("point", repository_id=str(all_.point.repository_id)),
    "a state": lambda all_: all_.found("point", state="damaged"),
    "a repository and a state": lambda all_: all_.found("point", repository_id=str(all_.point.repository_id), state="damaged"),
}


class RowCounter:
    rows = 0


@contextmanager
def rows_read(store: Store) -> Iterator[RowCounter]:
    """How many rows the queries in the block read, roughly. PostgreSQL runs each again, and tells."""
    counter, asked, engine = RowCounter(), [], store._engine
    is_sqlite, steps, counted = engine.dialect.name == "sqlite", 0, set()

    def stepped() -> None:
        nonlocal steps
        steps += 1

    def executed(connection: Connection, _: object, statement: str, parameters: Any, *__: object) -> None:
        if is_sqlite:
            counted.add(dbapi := connection.connection.dbapi_connection)
            dbapi.set_progress_handler(stepped, STEPS_A_ROW)  # type: ignore[union-attr]
        else:
            asked.append((statement, parameters))

    event.listen(engine, "before_cursor_execute", executed)
    try:
        yield counter
    finally:
        event.remove(engine, "before_cursor_execute", executed)
        for dbapi in counted:
            dbapi.set_progress_handler(None, 0)  # type: ignore[union-attr]
    counter.rows = steps
    if not asked:
        return
    with engine.connect() as connection:
        for statement, parameters in asked:
            explained = connection.exec_driver_sql(f"EXPLAIN (ANALYZE, FORMAT JSON) {statement}", parameters).scalar_one()
            counter.rows += _scanned(explained[0]["Plan"])


def _scanned(node: dict[str, Any]) -> int:
    mine = 0
    if node["Node Type"].endswith("Scan") and "Plans" not in node:
        mine = node["Actual Rows"] + node.get("Rows Removed by Filter", 0) + node.get("Rows Removed by Index Recheck", 0)
    return int(mine * node["Actual Loops"]) + sum(map(_scanned, node.get("Plans", ())))


def test_a_list_reads_its_own_rows(store: Store) -> None:
    filled, failed = Filled(store), []
    with rows_read(store) as counter:
        store.documents(limit=OTHERS)
    assert counter.rows > READ_MOST, "else it counts nothing"
    expected: list[tuple[str, Ask, object]] = [(name, ask, wanted) for name, (ask, wanted) in COUNTS.items()]
    for asks, sought in ((JOBS, filled.job.id), (RUNS, filled.run.id), (POINTS, filled.point.id)):
        expected += [(name, ask, [sought]) for name, ask in asks.items()]
    for name, ask, wanted in expected:
        with rows_read(store) as counter:
            assert ask(filled) == wanted, name
        if counter.rows > READ_MOST:
            failed.append(f"{name}: {counter.rows} rows")
    assert failed == []


def test_what_an_earlier_version_wrote_is_found_too(store: Store) -> None:
    """It knows no columns but those that it had."""
    job, long = a_job("sought", State.COPYING_FULL), a_job("n" * 300, State.QUEUED)
    run = BackupRun(id=uuid4(), kind="restore", job_id=uuid4(), status=Status.COMPLETED, created_at=AT)
    for one in (job, long):
        store.add(one, host="h")
    store.backups.put("run", run.id, run, host="h", state=str(run.status))
    for earlier in (False, True):
        if earlier:
            with store._writing() as db:
                db.execute(update(migrations).values(name=None, source_id=None))
                db.execute(update(backups).values(job_id=None, run_kind=None))
        for only in (
            Only(name="sought"),
            Only(source_id=job.plan.source_ref.source_id),  # type: ignore[union-attr]
            Only(source_id=job.plan.source_ref.source_id, states=(State.COPYING_FULL, State.COPYING_FULL)),  # type: ignore[union-attr]
            Only(name="sought", host="h", states=(State.COPYING_FULL,)),
        ):
            (document,), following = store.documents(limit=1, only=only)
            assert (json.loads(document)["id"], following) == (str(job.id), None)
        (document,), _ = store.documents(limit=1, only=Only(name="n" * 300))
        assert json.loads(document)["id"] == str(long.id)
        assert store.documents(limit=1, only=Only(name="n" * 299)) == ([], None)
        for only_ in ({"job_id": [str(run.job_id)]}, {"kind": ["restore", "verify"], "status": [str(Status.COMPLETED)]}):
            assert len(store.backups.page("run", host="h", limit=5, only=only_)[0]) == 1
        assert store.backups.page("run", host="h", limit=5, only={"job_id": [str(uuid4())]}) == ([], None)


def test_a_job_that_is_renamed_is_found_by_its_new_name(store: Store) -> None:
    """Its source did not answer when it was submitted: then it had the platform's id of its VM."""
    job = a_job("vm-17", State.QUEUED)
    store.add(job, host="a")
    store.change(job.id, State.QUEUED, lambda found: found.model_copy(update={"name": "web01"}))
    found = {}
    for name in ("vm-17", "web01"):
        found[name] = [json.loads(one)["name"] for one in store.documents(limit=9, only=Only(name=name))[0]]
    assert found == {"vm-17": [], "web01": ["web01"]}


@pytest.mark.parametrize("limit", [1, 2, 3, 7, 50])
def test_pages_of_a_filter_are_in_order_and_miss_nobody(store: Store, limit: int) -> None:
    ids = []
    for place in range(20):
        job = a_job("web", list(State)[place % 4])
        store.add(job, host=f"h{place % 2}")
        ids.append(job.id)
    chosen = tuple(list(State)[:3])
    for only, expected in (
        (Only(states=chosen), [id_ for place, id_ in enumerate(ids) if place % 4 < 3]),
        (Only(states=chosen, host="h1"), [id_ for place, id_ in enumerate(ids) if place % 4 == 1]),
        (Only(name="web"), ids),
    ):
        seen: list[UUID] = []
        cursor = None
        while True:
            documents, cursor = store.documents(limit=limit, cursor=cursor, only=only)
            seen += [UUID(json.loads(one)["id"]) for one in documents]
            if cursor is None:
                break
        assert seen == expected[::-1]


def test_figures_of_points_read_no_document(store: Store) -> None:
    """Neither after a change, nor after one by an earlier version, which changes a point's document alone."""
    points, asked = Points(store.backups, host="h"), list[str]()
    job, other = uuid4(), uuid4()
    for place, (of, name) in enumerate([(job, "web"), (job, "web"), (job, "db"), (other, "web")]):
        made_at = AT + timedelta(hours=place)
        points.put(a_point(name, of, uuid4()).model_copy(update={"created_at": made_at, "state": "ok"}))
    newest = points.put(a_point("web", job, uuid4()).model_copy(update={"created_at": AT + timedelta(days=9)}))
    event.listen(store._engine, "before_cursor_execute", lambda *told: asked.append(told[2]))
    newest_at = {(job, "web"): 9 * 24, (job, "db"): 2, (other, "web"): 3}
    for state in ("unverified", "ok", "damaged"):
        if state == "ok":
            points.change(newest.id, state="ok")
        if state == "damaged":
            newest_at[job, "web"] = 1
            with store._writing() as db:
                text_ = newest.model_copy(update={"state": "damaged"}).model_dump_json()
                db.execute(update(backups).where(backups.c.id == str(newest.id)).values(document=text_))
        asked.clear()
        figures = points.figures()
        assert not any("backups.document" in one for one in asked)
        assert figures.states == Counter({"ok": 4}) + Counter([state])
        assert {key: (at - AT.timestamp()) / 3600 for key, at in figures.newest_at.items() if at} == newest_at
        assert [point.id for point in points.all({"state": [state]})][-1] == newest.id


def test_points_that_an_earlier_version_wrote_are_counted(store: Store) -> None:
    points, job = Points(store.backups, host="h"), uuid4()
    first = points.put(a_point("web", job, uuid4()))
    second = points.put(a_point("web", job, uuid4()).model_copy(update={"created_at": AT + timedelta(hours=1), "state": "ok"}))
    with store._writing() as db:
        db.execute(update(backups).where(backups.c.id == str(second.id)).values(job_id=None, vm_id=None, made_at=None))
    for _ in range(2):
        figures = points.figures()
        assert figures.states == Counter(["ok", "unverified"])
        assert figures.newest_at == {(job, "web"): second.created_at.timestamp()}
        assert [point.id for point in points.all({"state": ["ok"]})] == [second.id]
        points.put(first)
        points.put(second)
    with store._reading() as db:
        assert db.execute(select(func.count()).where(backups.c.made_at.is_(None))).scalar() == 0, "it is written anew"


def test_the_states_of_points_are_those_of_the_index() -> None:
    assert get_args(PointState) == POINT_STATES
