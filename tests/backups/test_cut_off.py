"""Runs that are cut off, by the service's end or a lost lease, or that wait: for a repository, or for the store."""

import threading
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from synvirt.backups import runs, service
from synvirt.backups.model import (
    ENDS,
    BackupRepositoryRequest,
    BackupRun,
    RestoreRequest,
    Status,
)
from synvirt.backups.worker.taking_journal import RECORD_BYTES, Journal
from synvirt.errors import BackupConflict, BackupNotFound, PersistFailed
from synvirt.jobs import runner
from synvirt.jobs.runner import Runner
from synvirt.repository.folder import HostFolder
from synvirt.repository.keys import NAME_BYTES
from synvirt.store.backups import Row
from synvirt.store.store import StoreAway
from tests.backups.house import House, disk_content
from tests.running.processes import until


def test_a_run_that_the_services_end_cut_off_goes_on(house: House) -> None:
    house.image("web", disk_content())
    opened, stops = threading.Event(), house.backups.runs._stops

    def held() -> None:
        opened.set()
        until(lambda: all(stop.is_set() for stop in stops.values()))  # the service ends

    house.guests.gate = held
    job = house.job("web")
    run = house.backups.run_job(job.id)
    assert opened.wait(60)
    house.close()
    again = House(house.folder)
    found = again.ended(run)
    assert (found.status, found.error, len(found.restore_point_ids)) == ("completed", None, 1)
    assert again.run(job).status == "completed"
    again.close()


def test_a_run_that_a_lost_lease_cut_off_stops_at_once_and_goes_on_once_the_lease_is_held(house: House) -> None:
    house.image("web", disk_content())
    opened, freed, stops = threading.Event(), threading.Event(), house.backups.runs._stops

    def held() -> None:
        opened.set()
        until(lambda: all(stop.is_set() for stop in stops.values()))
        freed.set()

    house.guests.gate = held
    job = house.job("web")
    other = house.job("web", repository=job.repository_id)
    run = house.backups.run_job(job.id)
    assert opened.wait(60)
    house.backups.pause()
    assert freed.is_set()
    left = house.backups.runs.get(run.id)
    assert left.status not in ENDS
    with pytest.raises(BackupConflict, match="lost its lease"):
        house.backups.run_job(other.id)
    house.backups.not_renewed = lambda: PersistFailed("database or disk is full")
    with pytest.raises(PersistFailed, match="disk is full"):  # as other requests are answered: it is what can be mended
        house.backups.run_job(other.id)
    house.guests.gate = lambda: None
    house.backups.resume()
    found = house.ended(run)
    assert (found.status, found.error, found.resumed_count) == ("completed", None, 0)
    assert house.run(other).status == "completed"


def test_after_a_lost_lease_no_guest_is_stored_twice_by_one_run(house: House) -> None:
    stops, opened = house.backups.runs._stops, list[int]()
    for name in ("web", "db"):
        house.image(name, disk_content())

    def held() -> None:
        opened.append(1)
        if len(opened) == 2:
            until(lambda: all(stop.is_set() for stop in list(stops.values())))

    house.guests.gate = held
    run = house.backups.run_job(house.job("web", "db").id)
    until(lambda: len(opened) == 2)
    house.backups.pause()
    house.backups.resume()
    found = house.ended(run)
    assert (found.status, len(found.restore_point_ids), len(found.guests)) == ("completed", 2, 2)
    assert len(opened) == 3
    assert {point.id for point in house.backups.points.all()} == set(found.restore_point_ids)


def test_one_that_waits_for_its_turn_is_cut_off_too_and_is_not_cancelled(house: House) -> None:
    stops = house.backups.runs._stops
    house.image("web", disk_content())
    repository = house.repository()
    house.guests.gate = lambda: until(lambda: all(stop.is_set() for stop in list(stops.values())))
    begun = [house.backups.run_job(house.job("web", repository=repository).id) for _ in range(4)]
    until(lambda: sum(house.backups.runs.get(run.id).status != "queued" for run in begun) == 2)
    house.backups.pause()
    assert [house.backups.runs.get(run.id).status for run in begun].count(Status.QUEUED) == 2
    house.guests.gate = lambda: None
    house.backups.resume()
    assert [(house.ended(run).status, house.ended(run).resumed_count) for run in begun] == [("completed", 0)] * 4


def test_one_that_was_begun_just_before_goes_on_too(house: House, monkeypatch: pytest.MonkeyPatch) -> None:
    """The lease is lost between its first row and its task's first moment."""
    house.image("web", disk_content())
    job = house.job("web", repository=house.repository())
    with monkeypatch.context() as until_then:
        until_then.setattr(Runner, "begin", lambda *_: None)
        run = house.backups.run_job(job.id)
        house.backups.pause()
    house.backups.resume()
    assert house.ended(run).status == Status.COMPLETED


@pytest.mark.parametrize("error", [PersistFailed("the store is away"), RuntimeError("can't start new thread")])
def test_what_goes_wrong_while_runs_are_taken_up_is_tried_again_and_begins_none_twice(
    house: House, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    """A lease is lost where the store is away: it may be away again."""
    monkeypatch.setattr(service, "RESUME_EVERY_S", 0.05)
    all_runs = house.backups.runs
    house.image("web", disk_content())
    repository = house.repository()
    house.guests.gate = lambda: until(lambda: all(stop.is_set() for stop in list(all_runs._stops.values())))
    first, second = [house.backups.run_job(house.job("web", repository=repository).id) for _ in range(2)]
    until(lambda: len(all_runs._at_work) == 2)
    house.backups.pause()
    entered, go, begin, tries = threading.Event(), threading.Event(), all_runs.begin, list[object]()

    def held() -> None:
        entered.set()
        assert go.wait(60)

    def failing(run: BackupRun, **more: Any) -> BackupRun:
        tries.append(run.id)
        if tries == [first.id, second.id]:
            raise error
        return begin(run, **more)

    def first_is_at_work(within_s: float) -> bool:
        assert not tries or entered.wait(60)
        return let_go(within_s)

    let_go = all_runs.let_go
    monkeypatch.setattr(all_runs, "let_go", first_is_at_work)
    house.guests.gate = held
    monkeypatch.setattr(all_runs, "begin", failing)
    house.backups.resume()
    until(lambda: len(tries) > 2 and second.id in all_runs._begun)
    assert tries == [first.id, second.id, second.id]
    house.backups.runs.cancel(first.id)
    go.set()
    assert [house.ended(run).status for run in (first, second)] == ["cancelled", "completed"]


def test_a_thread_that_outlives_a_lost_lease_is_waited_for(house: House, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two threads of one run would both write its disks."""
    monkeypatch.setattr(runner, "END_TIMEOUT_S", 0.01)
    monkeypatch.setattr(service, "RESUME_EVERY_S", 0.05)
    house.image("web", disk_content())
    opened, go, entered = threading.Event(), threading.Event(), list[int]()

    def held() -> None:
        entered.append(1)
        opened.set()
        go.wait(100)

    house.guests.gate = held
    run = house.backups.run_job(house.job("web").id)
    assert opened.wait(60)
    house.backups.pause()
    house.backups.resume()
    house.backups.pause()
    house.backups.resume()
    assert len(entered) == 1
    go.set()
    assert house.ended(run).status == "completed"
    assert len(entered) == 2


def test_a_repository_that_hangs_keeps_nothing_else_from_going_on(house: House, monkeypatch: pytest.MonkeyPatch) -> None:
    """An NFS server that was away stopped the runs to all other repositories, and the answers about them."""
    house.image("web", disk_content())
    (point,) = house.run(job := house.job("web")).restore_point_ids
    (house.folder / "other").mkdir()
    request = BackupRepositoryRequest(name="other", kind="local", path=str(house.folder / "other"))
    other = house.backups.add_repository(request).id
    hangs, back, check = threading.Event(), threading.Event(), HostFolder.check

    def checked(self: HostFolder) -> None:
        if self._path.name == "repository":
            hangs.set()
            assert back.wait(60)
        check(self)

    monkeypatch.setattr(HostFolder, "check", checked)
    removes = threading.Thread(target=house.backups.remove_point, args=(point,))
    removes.start()
    assert hangs.wait(60)
    assert house.run(house.job("web", repository=other)).status == "completed"
    for refused in (lambda: house.backups.verify(point), lambda: house.backups.remove_point(point)):
        with pytest.raises((BackupNotFound, BackupConflict), match="being removed"):
            refused()
    back.set()
    removes.join(60)
    assert point not in house.backups.repositories.opened(job.repository_id).point_ids()


@pytest.mark.parametrize("fails", [False, True])
def test_a_run_whose_end_cannot_be_stored_ends_when_the_store_is_back(
    house: House, monkeypatch: pytest.MonkeyPatch, fails: bool
) -> None:
    """Its job never ran again before the next start of the service."""
    monkeypatch.setattr(runs, "STORE_PAUSE_S", 0.01)
    house.image("web", disk_content())
    job, rows = house.job("web"), house.store.backups
    if fails:
        (house.folder / "images" / "web").unlink()
    put_all, refused = rows.put_all, list[str]()

    def full(written: list[Row], **more: Any) -> None:
        if len(refused) < 3 and any(row.kind == "run" and row.state in ENDS for row in written):
            refused.append("the run's end")
            raise PersistFailed("the store failed: database or disk is full")
        put_all(written, **more)

    monkeypatch.setattr(rows, "put_all", full)
    run = house.run(job)
    assert len(refused) == 3
    assert (run.status, len(run.restore_point_ids)) == (("failed", 0) if fails else ("completed", 1))
    house.image("web", disk_content())
    assert house.run(job).status == "completed"


@pytest.mark.parametrize("guests", [("web",), ("web", "db")])
def test_a_run_goes_on_where_its_store_was_away_for_a_moment(
    house: House, monkeypatch: pytest.MonkeyPatch, guests: tuple[str, ...]
) -> None:
    """A restart of the database failed each backup, and undid each restore, however long it had taken."""
    monkeypatch.setattr(runs, "AWAY_PAUSES_S", (0.01,))
    for name in guests:
        house.image(name, disk_content())
    job, rows, away = house.job(*guests), house.store.backups, list[str]()
    put_all = rows.put_all

    def restarting(written: list[Row], **more: Any) -> None:
        if len(away) < 3 and any(row.kind == "run" and row.state == "transferring" for row in written):
            away.append("the run's state")
            raise StoreAway("the store failed: terminating connection due to administrator command")
        put_all(written, **more)

    monkeypatch.setattr(rows, "put_all", restarting)
    run = house.run(job)
    assert (run.status, run.error, len(run.restore_point_ids), run.warnings) == ("completed", None, len(guests), ())
    assert len(away) == 3
    away.clear()
    restored = house.ended(house.backups.restore(run.restore_point_ids[0], RestoreRequest(target="export", name="out")))
    assert (restored.status, restored.error, len(away)) == ("completed", None, 3)


def test_a_run_that_is_cancelled_while_its_store_is_away_ends(house: House, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runs, "AWAY_PAUSES_S", (60.0,))
    house.image("web", disk_content())
    job, rows, away = house.job("web"), house.store.backups, threading.Event()
    put_all = rows.put_all

    def failing(written: list[Row], **more: Any) -> None:
        if not away.is_set() and any(row.kind == "run" and row.state == "transferring" for row in written):
            away.set()
            raise StoreAway("the store failed: the connection is lost")
        put_all(written, **more)

    monkeypatch.setattr(rows, "put_all", failing)
    run = house.backups.run_job(job.id)
    assert away.wait(60)
    house.backups.runs.cancel(run.id)
    assert house.ended(run).status == "cancelled"


def test_a_journal_gives_what_was_named_at_its_own_moment_and_nothing_else(tmp_path: Path) -> None:
    """A name of another moment would put an old chunk into a new point."""
    path, first, second = tmp_path / "vm.stored", b"1" * NAME_BYTES, b"2" * NAME_BYTES

    def at(moment: str, disk: int, number: int, name: bytes, *files: str) -> list[dict[int, bytes]]:
        with closing(Journal(path, moment)) as journal:
            found = [journal.stored(0, files), journal.stored(1, ())]
            journal.add(disk, number, name)
        return found

    assert at("then", 0, 7, first) == [{}, {}]
    assert at("now", 0, 8, first) == [{}, {}]
    with path.open("ab") as file:  # a power cut leaves zeros; a kill, a part of a record
        file.write(bytes(RECORD_BYTES) + b"half")
    assert at("now", 1, 9, second) == [{8: first}, {}]
    assert at("now", 1, 9, first) == [{8: first}, {9: second}]
    assert at("now", 0, 0, first) == [{8: first}, {9: first}]
    # A backing file of the disk was written to since.
    assert at("now", 0, 5, second, "web 1", "base 1") == [{}, {9: first}]
    assert at("now", 0, 6, first, "web 1", "base 2") == [{}, {9: first}]
    assert at("now", 0, 7, first, "web 1", "base 1") == [{5: second}, {9: first}]
