"""The laws of the store, on SQLite and on a real PostgreSQL."""

import json
import threading
from collections.abc import Callable, Mapping
from datetime import timedelta
from functools import partial
from typing import ClassVar
from uuid import UUID, uuid4

import psycopg
import pytest
from alembic.autogenerate import compare_metadata
from alembic.migration import MigrationContext
from pydantic_core import to_json
from sqlalchemy import create_engine, make_url, select, update

from synvirt.errors import BadRequest, Conflict, NotFound, PersistFailed
from synvirt.migrations.memory import JobMemory, Passing
from synvirt.model.job import Migration, Progress
from synvirt.model.kinds import Mode, State
from synvirt.model.plan import MigrationPlan
from synvirt.model.problems import Problem
from synvirt.model.values import now
from synvirt.store import LedgerEntry, Store, Watermark
from synvirt.store.ledger import Owner
from synvirt.store.memory import Remembered
from synvirt.store.tables import METADATA, memory

PLAN = MigrationPlan.model_validate(
    {
        "source": {"Offline": "ova_archive"},
        "source_ref": {"kind": "offline_host_path", "path": "/imports/a.ova"},
        "mode": "Cold",
    }
)


def a_job(**fields: object) -> Migration:
    return Migration(id=uuid4(), name="a", plan=PLAN, mode_effective=Mode.COLD, created_at=now()).model_copy(update=fields)


def to(state: State) -> Callable[[Migration], Migration]:
    return lambda job: job.model_copy(update={"state": state})


def test_a_database_in_another_encoding_is_said_at_the_start(postgres_server: str) -> None:
    """As initdb makes one under LC_ALL=C."""
    with psycopg.connect(postgres_server % "postgres", autocommit=True) as connection:
        connection.execute("CREATE DATABASE ascii ENCODING 'SQL_ASCII' LOCALE 'C' TEMPLATE template0")
    with pytest.raises(BadRequest, match="encoding is SQL_ASCII") as refused:
        Store(postgres_server % "ascii")
    assert "createdb --encoding=UTF8" in str(refused.value.hint)


def test_the_alembic_versions_make_the_tables_of_tables_py(store: Store, database_url: str) -> None:
    url = make_url(database_url)
    if url.get_backend_name() == "postgresql":
        url = url.set(drivername="postgresql+psycopg")
    engine = create_engine(url)
    with engine.connect() as connection:
        context = MigrationContext.configure(connection, opts={"compare_type": True})
        assert compare_metadata(context, METADATA) == []
    engine.dispose()


def test_a_job_comes_back_as_it_went_in_and_after_a_restart(store: Store, database_url: str) -> None:
    job = a_job(name="münchen – ✓")
    store.add(job, host="h1")
    assert store.get(job.id) == Migration.model_validate_json(job.model_dump_json())
    again = Store(database_url)
    assert again.get(job.id).name == job.name
    assert again.host_of(job.id) == "h1"
    again.close()


def test_an_unknown_job_is_not_found(store: Store) -> None:
    nobody = uuid4()
    for ask in (store.get, store.request_cancel, store.cancel_requested, store.request_cutover, store.host_of):
        with pytest.raises(NotFound, match=str(nobody)):
            ask(nobody)


def test_lists_are_newest_first_and_pages_miss_nobody(store: Store) -> None:
    jobs = [a_job() for _ in range(7)]
    for job in jobs:
        store.add(job, host="h")
    seen: list[UUID] = []
    cursor = None
    while True:
        documents, cursor = store.documents(limit=3, cursor=cursor)
        seen += [Migration.model_validate_json(document).id for document in documents]
        if cursor is None:
            break
        store.add(a_job(), host="h")  # a job that comes in between is on no later page
    assert seen == [job.id for job in reversed(jobs)]


def test_a_full_last_page_has_no_next(store: Store) -> None:
    for _ in range(4):
        store.add(a_job(), host="h")
    documents, cursor = store.documents(limit=2)
    assert cursor is not None
    documents, cursor = store.documents(limit=2, cursor=cursor)
    assert (len(documents), cursor) == (2, None)


def test_a_move_from_a_state_the_job_has_left_is_refused_and_changes_nothing(store: Store) -> None:
    job = a_job()
    store.add(job, host="h")
    store.change(job.id, State.QUEUED, to(State.COPYING_FULL))
    with pytest.raises(Conflict):
        store.change(job.id, State.QUEUED, to(State.FAILED))
    assert store.get(job.id).state == State.COPYING_FULL


def test_of_many_who_move_a_job_at_once_one_wins(store: Store) -> None:
    job = a_job()
    store.add(job, host="h")
    won: list[int] = []
    ready = threading.Barrier(8)

    def race(number: int) -> None:
        ready.wait()
        try:
            store.change(job.id, State.QUEUED, to(State.COPYING_FULL))
        except Conflict:
            return
        won.append(number)

    threads = [threading.Thread(target=race, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(won) == 1


def test_events_are_moves_and_new_errors_and_nothing_else(store: Store) -> None:
    job = a_job()
    store.add(job, host="h")
    progress = Progress(bytes_done=1)
    store.change(job.id, State.QUEUED, lambda job: job.model_copy(update={"progress": progress}))
    store.change(job.id, State.QUEUED, to(State.COPYING_FULL))
    problem = Problem(
        code="E_MIG_CBT_UNSUPPORTED", message="m", fatal=False, at=now().replace(microsecond=0), state=State.COPYING_FULL
    )
    store.change(job.id, State.COPYING_FULL, lambda job: job.model_copy(update={"last_error": problem}))
    seen = [Migration.model_validate_json(event.document) for event in store.events_after(0)]
    assert [(one.state, one.last_error is not None) for one in seen] == [
        (State.QUEUED, False),
        (State.COPYING_FULL, False),
        (State.COPYING_FULL, True),
    ]


def test_event_ids_grow_and_a_reader_that_follows_them_misses_none(store: Store) -> None:
    jobs = [a_job() for _ in range(6)]

    def work(mine: list[Migration]) -> None:
        for job in mine:
            store.add(job, host="h")
            store.change(job.id, State.QUEUED, to(State.COPYING_FULL))

    threads = [threading.Thread(target=work, args=(jobs[at::2],)) for at in range(2)]
    for thread in threads:
        thread.start()
    seen: list[UUID] = []
    cursor = 0
    while len(seen) < 12:
        for event in store.events_after(cursor, limit=2):
            assert event.id > cursor
            cursor = event.id
            seen.append(event.job_id)
    for thread in threads:
        thread.join()
    assert sorted(seen) == sorted([job.id for job in jobs] * 2)
    assert store.last_event_id() == cursor
    assert [event.job_id for event in store.events_after(0, job_id=jobs[0].id)] == [jobs[0].id] * 2


def test_wishes_are_kept_and_an_ended_job_takes_none(store: Store) -> None:
    job = a_job()
    store.add(job, host="h")
    assert not store.cancel_requested(job.id)
    assert store.get_to_run(job.id) == (store.get(job.id), False)
    store.request_cancel(job.id)
    store.request_cancel(job.id)
    store.request_cutover(job.id)
    assert store.cancel_requested(job.id)
    assert store.get_to_run(job.id) == (store.get(job.id), True)
    assert store.cutover_requested(job.id)
    store.change(job.id, State.QUEUED, to(State.CANCELLED))
    with pytest.raises(Conflict, match="Cancelled"):
        store.request_cancel(job.id)


def test_the_document_of_a_job_has_its_request_to_cut_over_and_an_event_tells_it(store: Store) -> None:
    job = a_job()
    store.add(job, host="h")
    before, until = store.last_event_id(), now() + timedelta(hours=1)
    asked = store.request_cutover(job.id, until=until)
    assert asked.cutover_request is not None
    assert (asked.asked_to_cut_over, asked.cutover_request.until) == (True, until)
    assert store.get(job.id).cutover_request is not None
    (told,) = store.events_after(before)
    assert "cutover_request" in told.document
    assert Migration.model_validate_json(told.document).asked_to_cut_over
    assert not store.request_cutover(job.id, until=now()).asked_to_cut_over


def test_a_request_that_has_expired_is_no_wish(store: Store) -> None:
    """The engine wakes a job a few times for each of its wishes: the request of the next window would wake nobody."""
    job = a_job()
    store.add(job, host="h")
    store.request_cutover(job.id, until=now() + timedelta(hours=1))
    assert [wish.job_id for wish in store.wishes(host="h")] == [job.id]
    store.request_cutover(job.id, until=now())
    assert store.wishes(host="h") == []
    store.request_cutover(job.id, until=None)
    assert [wish.job_id for wish in store.wishes(host="h")] == [job.id]


def test_unended_jobs_are_those_of_the_host(store: Store) -> None:
    mine, other, ended = a_job(), a_job(), a_job(state=State.COMPLETED)
    for job, host in ((mine, "h1"), (other, "h2"), (ended, "h1")):
        store.add(job, host=host)
    assert [job.id for job in store.unended(host="h1")] == [mine.id]
    assert {job.id for job in store.unended()} == {mine.id, other.id}


def test_the_newest_watermark_of_each_disk_and_pass_counts(store: Store) -> None:
    job = a_job()
    store.add(job, host="h")
    first = Watermark("a", 1, 10, 100, 10, 0, finished=False)
    later = Watermark("a", 1, 2**50, 2**60, 2**50, 7, finished=True)
    second = Watermark("a", 2, 1, 1, 1, 0, finished=False)
    for mark in (first, later, second):
        store.put_watermark(job.id, mark)
    assert store.watermarks(job.id, 1) == {"a": later}
    assert store.watermarks(job.id, 2) == {"a": second}
    third = Watermark("b", 2, 1, 1, 1, 0, finished=True)
    with pytest.raises(Conflict):
        store.change(job.id, State.STARTING, to(State.STARTING), mark=third)
    assert store.watermarks(job.id, 2) == {"a": second}, "its document and its watermark are written together, or neither"
    store.change(job.id, State.QUEUED, to(State.QUEUED), mark=third)
    assert store.watermarks(job.id, 2) == {"a": second, "b": third}


def test_the_ledger_keeps_order_and_forgets_what_is_struck(store: Store) -> None:
    job = a_job()
    store.add(job, host="h")
    for name in ("one", "two", "one"):
        store.record(job.id, "volume", name)
    store.record(job.id, "domain", "one")
    assert store.ledger(job.id) == [LedgerEntry("volume", "one"), LedgerEntry("volume", "two"), LedgerEntry("domain", "one")]
    store.strike(job.id, "volume", "one")
    store.strike(job.id, "volume", "one")
    assert store.ledger(job.id) == [LedgerEntry("volume", "two"), LedgerEntry("domain", "one")]


def test_entries_of_all_owners_of_a_kind_on_a_host_are_oldest_first(store: Store) -> None:
    first, second = sorted((Owner("run", uuid4()), Owner("run", uuid4())), key=lambda one: one.id, reverse=True)
    for owner, name, host in (
        (first, "a", "one"),
        (second, "b", "one"),
        (first, "c", "one"),
        (second, "d", "two"),
        (Owner("backup_job", first.id), "e", "one"),
    ):
        store.ledgers.record(owner, "volume", name, host=host)
    found = [(owner, entry.name) for owner, entry in store.ledgers.owned("run", host="one")]
    assert found == [(first, "a"), (second, "b"), (first, "c")]


class Fact(Remembered):
    kind: ClassVar[str] = "fact"

    first: int = 0
    second: str | None = None


class Other(Remembered):
    kind: ClassVar[str] = "other"

    first: int = 7


def test_what_is_remembered_is_a_document_of_its_kind_and_number(store: Store) -> None:
    job, another = a_job(), a_job()
    store.add(job, host="h")
    store.add(another, host="h")
    assert store.memory.get(job.id, Fact, 2) == Fact()
    store.memory.change(job.id, Fact, lambda before: before.model_copy(update={"first": before.first + 1}), 2)
    store.memory.change(job.id, Fact, lambda before: before.model_copy(update={"second": "later"}), 2)
    assert store.memory.get(job.id, Fact, 2) == Fact(first=1, second="later")
    assert store.memory.get(job.id, Fact) == store.memory.get(another.id, Fact, 2) == Fact()
    assert store.memory.get(job.id, Other, 2) == Other()


def test_what_a_later_version_remembers_stays(store: Store) -> None:
    store.add(job := a_job(), host="h")
    store.memory.change(job.id, Fact, lambda before: before)
    with store._writing() as db:
        db.execute(update(memory).values(document='{"first":1,"of_later":[1]}', version="1.9"))
    store.memory.change(job.id, Fact, lambda before: before.model_copy(update={"second": "w"}))
    with store._reading() as db:
        (row,) = db.execute(select(memory)).all()
    assert (json.loads(row.document), row.version) == ({"first": 1, "second": "w", "of_later": [1]}, "1.9")


class Renamed(Fact):
    renamed: ClassVar[Mapping[str, str]] = {"oldest": "first", "old": "second"}


@pytest.mark.parametrize(
    ("document", "read"),
    [
        ('{"old":"kept"}', Renamed(second="kept")),
        ('{"second":"new","old":"stale"}', Renamed(second="new")),
        ('{"second":null,"old":"stale"}', Renamed()),
        ('{"oldest":3,"old":null,"second":null}', Renamed(first=3)),
        ('{"second":"the word \\"old\\""}', Renamed(second='the word "old"')),
    ],
)
def test_a_field_is_read_by_its_earlier_name_and_written_by_the_present_one(store: Store, document: str, read: Renamed) -> None:
    store.add(job := a_job(), host="h")
    store.memory.change(job.id, Renamed, lambda before: before)
    with store._writing() as db:
        db.execute(update(memory).values(document=document))
    assert store.memory.get(job.id, Renamed) == read
    store.memory.change(job.id, Renamed, lambda before: before.model_copy(update={"second": "w"}))
    with store._reading() as db:
        (row,) = db.execute(select(memory)).all()
    assert json.loads(row.document) == {"first": read.first, "second": "w"}


def test_a_jobs_memory_of_an_earlier_version_keeps_the_problem_before_a_passing_trouble(store: Store) -> None:
    store.add(job := a_job(), host="h")
    store.memory.change(job.id, JobMemory, lambda before: before)
    before = Problem(
        code="E_MIG_CBT_RESET", message="before", fatal=False, at=now().replace(microsecond=0), state=State.COPYING_FULL
    )
    with store._writing() as db:
        db.execute(update(memory).values(document=json.dumps({"told": {"before": before.model_dump(mode="json")}})))
    assert store.memory.get(job.id, JobMemory).passing == Passing(before=before)


def test_folded_passes_are_forgotten_and_a_removed_job_wholly(store: Store) -> None:
    store.add(job := a_job(), host="h")
    store.add(another := a_job(), host="h")
    for number in range(6):
        store.memory.change(job.id, Fact, lambda before: Fact(first=before.first + 5), number)
    store.memory.change(another.id, Fact, lambda before: before, 3)
    store.fold_passes(job.id, 5)
    left = [number for number in range(6) if store.memory.get(job.id, Fact, number) != Fact()]
    assert left == [0, 1, 5]
    store.change(job.id, job.state, to(State.CANCELLED))
    store.remove(job.id)
    with store._reading() as db:
        assert [row.migration_id for row in db.execute(select(memory))] == [str(another.id)]


def test_what_folded_passes_copied_counts_as_before(store: Store) -> None:
    store.add(job := a_job(), host="h")
    for number in range(1, 6):
        for disk in ("a", "b"):
            store.put_watermark(job.id, Watermark(disk, number, 10, 100, 10**number, number, finished=number < 5))
    before = [store.copied(job.id, number)[1] for number in (2, 6)]
    marks = [store.watermarks(job.id, number) for number in (1, 5, 6)]
    assert before == [dict.fromkeys("ab", (10, 1)), dict.fromkeys("ab", (111110, 15))]
    for _ in range(2):
        store.fold_passes(job.id, 5)
        assert store.copied(job.id, 6) == (marks[2], before[1])
        assert [store.watermarks(job.id, number) for number in (1, 5, 6)] == marks
        assert [store.watermarks(job.id, number) for number in (2, 3, 4)] == [{}, {}, {}]


def test_every_commit_that_wrote_is_reported(store: Store) -> None:
    reported: list[int] = []
    store.on_commit = lambda: reported.append(1)
    job = a_job()
    store.add(job, host="h")
    store.get(job.id)
    store.events_after(0)
    assert len(reported) == 1


def test_a_store_that_cannot_be_opened_says_why() -> None:
    with pytest.raises(PersistFailed, match="store failed"):
        Store("sqlite:////nonexistent/folder/store.db")


def test_thousands_of_jobs_are_listed_without_parsing_them(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """Listing 5,000 jobs takes milliseconds because the rows are the answer's text: parsing would be the cost."""
    for _ in range(20):
        store.add(a_job(), host="h")
    monkeypatch.setattr(Migration, "model_validate_json", lambda *_: pytest.fail("a list parses no job"))
    assert len(store.documents(limit=20)[0]) == 20


def test_jobs_that_name_something_are_found_among_all_without_parsing_the_others(store: Store) -> None:
    """Each of thousands of submitted plans looks for another job of its VM."""
    names = ("100%", "100_", 'a "quoted" name', "a/b", "VM", "vm", "ü")
    for name in names:
        store.add(a_job(name=name), host="h")
    for name in names:
        found = [job.name for job in store.unended(naming=f'"name":{to_json(name).decode()}')]
        assert name in found
        assert {one.casefold() for one in found} == {name.casefold()}
    assert len(store.unended(naming="%")) == 1


# ── claims ───────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_what_a_job_claims_no_other_of_the_host_may_have_until_it_ends(store: Store) -> None:
    first, second, elsewhere = a_job(), a_job(), a_job()
    for job, host in ((first, "h1"), (second, "h1"), (elsewhere, "h2")):
        store.add(job, host=host)
    store.claim(first.id, ["name web", "UUID 1"], hint="rename it")
    store.claim(first.id, ["name web", "UUID 1"], hint="rename it")
    assert [entry.name for entry in store.ledger(first.id)] == ["name web", "UUID 1"]
    with pytest.raises(Conflict, match=f"{first.id}.*name web") as caught:
        store.claim(second.id, ["MAC 2", "name web"], hint="rename it")
    assert caught.value.hint == "rename it"
    assert store.ledger(second.id) == [], "all of it or nothing"
    store.claim(elsewhere.id, ["name web"], hint="")
    store.change(first.id, State.QUEUED, to(State.FAILED))
    store.claim(second.id, ["name web"], hint="")


def test_what_a_job_has_claimed_no_restore_of_the_host_may_have_nor_the_other_way_round(store: Store) -> None:
    job, run, rows = a_job(), uuid4(), store.backups
    store.add(job, host="h1")
    store.claim(job.id, ["name web"], hint="")
    for ask in (rows.refuse_claimed, rows.claim):
        with pytest.raises(Conflict, match=f"migration {job.id}.*name web") as caught:
            ask(run, ["name web"], host="h1", hint="rename it")
        assert caught.value.hint == "rename it"
        ask(run, ["name web"], host="h2", hint="")
    rows.ledger.replace(Owner("run", run), (), host="h2")
    for _ in range(2):
        rows.claim(run, ["name db"], host="h1", hint="")
    assert [entry.name for entry in rows.ledger.of(Owner("run", run))] == ["name db"]
    for claim in (partial(store.claim, job.id), partial(rows.claim, uuid4(), host="h1")):
        with pytest.raises(Conflict, match=f"run {run}.*name db"):
            claim(["name db"], hint="")
    rows.put_all([], host="h1", settled=(Owner("run", run),))
    store.claim(job.id, ["name db"], hint="")


def test_of_jobs_that_claim_one_name_at_the_same_moment_one_gets_it(store: Store) -> None:
    jobs = [a_job() for _ in range(6)]
    for job in jobs:
        store.add(job, host="h1")
    together, got, lost = threading.Barrier(len(jobs)), [], []

    def claim(job: Migration) -> None:
        together.wait(30)
        try:
            store.claim(job.id, ["name web"], hint="")
        except Conflict:
            lost.append(job.id)
        else:
            got.append(job.id)

    threads = [threading.Thread(target=claim, args=(job,)) for job in jobs]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert (len(got), len(lost)) == (1, len(jobs) - 1)


def test_who_looks_before_it_adds_sees_what_others_have_added(store: Store, database_url: str) -> None:
    """On all hosts: two plans for one VM, submitted on two hosts at once, made two jobs."""
    hosts = [store, store if database_url.startswith("sqlite") else Store(database_url)]
    together, threads = threading.Barrier(8), []

    def submit(host: Store) -> None:
        together.wait(30)
        with host.adding():
            if not host.unended():
                host.add(a_job(), host="h")

    for host in hosts * 4:
        threads.append(threading.Thread(target=submit, args=(host,)))
        threads[-1].start()
    for thread in threads:
        thread.join(60)
    assert len(store.unended()) == 1
    if hosts[1] is not store:
        hosts[1].close()
