"""Runs that are cut off: cancelled at each state, killed at any moment, with a guest that cannot be backed up.

Whatever happens, the points of before are whole, nothing half-made counts, and what was stored is not stored again.
"""

import errno
import os
import subprocess
import sys
import threading
import time
from dataclasses import replace
from functools import partial
from pathlib import Path
from random import Random
from types import SimpleNamespace
from typing import Any
from uuid import uuid4

import pytest

from synvirt.backups import upkeep
from synvirt.backups.model import BackupRun, RestoreRequest, Status
from synvirt.backups.runs import RunKind
from synvirt.backups.trouble import trouble_of
from synvirt.backups.under_way import UnderWay
from synvirt.disks.raw.files import RawReader
from synvirt.errors import DiskReadFailed, RepositoryFull, RepositoryUnreachable
from synvirt.jobs import runner
from synvirt.jobs.rate import Rate
from synvirt.model.values import now
from synvirt.repository import packs
from synvirt.repository.folder import Entry, HostFolder
from synvirt.repository.keys import CHUNK_BYTES
from synvirt.repository.session import Session
from synvirt.repository.verify import verify_repository
from synvirt.store.store import StoreAway
from tests.backups.house import House
from tests.drawn import shared_in_a_file
from tests.jobs.test_in_a_thread import NoThreads
from tests.running.processes import until

SIZE = 12 * CHUNK_BYTES


@shared_in_a_file
def content() -> bytes:
    return Random(5).randbytes(SIZE)


@pytest.fixture
def house(house: House) -> House:
    house.image("web", content())
    return house


@pytest.fixture(autouse=True)
def _small_packs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packs, "PACK_BYTES", 2 * CHUNK_BYTES)


def _check_whole(house: House, points: int) -> None:
    (known,), _ = house.backups.repositories.page(limit=9, cursor=None)
    report = verify_repository(house.backups.repositories.opened(known.id))
    assert (report.wrongs, report.points) == ((), points)
    assert len(house.backups.points.all()) == points


@pytest.mark.parametrize("status", [Status.QUEUED, Status.PREPARING, Status.TRANSFERRING, Status.COMMITTING])
def test_a_cancel_at_each_state_leaves_nothing_half_made(house: House, monkeypatch: pytest.MonkeyPatch, status: Status) -> None:
    job, cancelled = house.job("web"), threading.Event()
    house.guests.gate = lambda: status != Status.QUEUED or cancelled.wait(60)
    with monkeypatch.context() as patched:
        move = UnderWay.move

        def cancelling(self: UnderWay, to: Status, **changes: Any) -> None:
            move(self, to, **changes)
            if to == status:
                house.backups.runs.cancel(self.run.id)

        patched.setattr(UnderWay, "move", cancelling)
        run = house.backups.run_job(job.id)
        if status == Status.QUEUED:
            house.backups.runs.cancel(run.id)
            cancelled.set()
        run = house.ended(run)
    made = 1 if run.status == "completed" else 0
    assert made == 0 or status == Status.COMMITTING, "the last moment may be too late"
    if not made:
        assert run.error is not None
        assert (run.status, run.error.code) == ("cancelled", "E_BAK_CANCELLED")
        assert run.restore_point_ids == ()
    _check_whole(house, made)
    again = house.run(job)
    assert again.status == "completed"
    _check_whole(house, made + 1)


def test_one_that_waits_is_cancelled_at_once(house: House) -> None:
    """Both threads are busy: it is not theirs to wait for."""
    go = threading.Event()
    house.guests.gate = lambda: go.wait(60)
    repository = house.repository()
    busy = [house.backups.run_job(house.job("web", repository=repository).id) for _ in range(2)]
    waiting = house.backups.run_job(house.job("web", repository=repository).id)
    assert house.backups.runs.cancel(waiting.id).status == "cancelled"
    go.set()
    assert [house.ended(run).status for run in busy] == ["completed", "completed"]


def test_a_restore_does_not_stand_in_line_behind_backups(house: House) -> None:
    repository = house.repository()
    (point,) = house.run(house.job("web", repository=repository)).restore_point_ids
    go = threading.Event()
    house.guests.gate = lambda: go.wait(60)
    busy = [house.backups.run_job(house.job("web", repository=repository).id) for _ in range(3)]
    restored = house.ended(house.backups.restore(point, RestoreRequest(target="export", name="out")))
    assert restored.status == "completed", restored.error
    assert not any(house.backups.runs.get(run.id).status == "completed" for run in busy)
    go.set()
    assert {house.ended(run).status for run in busy} == {"completed"}


CHILD = """
import os, sys
from pathlib import Path
from synvirt.backups import under_way
from synvirt.repository import packs, session
from synvirt.repository.keys import CHUNK_BYTES
from tests.backups.house import House

packs.PACK_BYTES = 2 * CHUNK_BYTES
under_way.SAVE_EVERY_S = 0.0
where, count = sys.argv[2], int(sys.argv[3])
seen = 0

def dying(call):
    def called(*args, **kwargs):
        global seen
        seen += 1
        if seen == count:
            os._exit(9)
        return call(*args, **kwargs)
    return called

house = House(Path(sys.argv[1]))
if where == "put":
    session.put = dying(session.put)
else:
    house.backups.points.put = dying(house.backups.points.put)
(job,), _ = house.backups.jobs(limit=9, cursor=None)
house.ended(house.backups.run_job(job.id))
os._exit(1)
"""


def _kill(house: House, where: str, count: int) -> None:
    """A service, at the `count`th of these calls of a run."""
    house.close()
    root = Path(__file__).parent.parent.parent
    argv = [sys.executable, "-c", CHILD, str(house.folder), where, str(count)]
    done = subprocess.run(argv, cwd=root, capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 9, done.stdout + done.stderr


@pytest.mark.parametrize("changed", [False, True])
def test_a_killed_run_goes_on_and_reads_only_what_is_not_stored(
    house: House, monkeypatch: pytest.MonkeyPatch, changed: bool
) -> None:
    """`changed`: the guest's file was written meanwhile, so all of it is read again."""
    house.job("web")
    _kill(house, "put", 8)
    if changed:
        house.image("web", content()[:-1] + b"!")
    read, read_into = [0], RawReader.read_into

    def counted(self: RawReader, offset: int, buffer: memoryview) -> None:
        read[0] += len(buffer)
        read_into(self, offset, buffer)

    monkeypatch.setattr(RawReader, "read_into", counted)
    again = House(house.folder)
    try:
        (run,), _ = again.backups.runs.page(limit=9, cursor=None)
        run = again.ended(run)
        assert (run.status, run.resumed_count, run.error) == ("completed", 1, None)
        if changed:
            assert read[0] == SIZE
        else:
            assert read[0] <= SIZE - 4 * CHUNK_BYTES
        # Each pack that was stored is used.
        assert run.stored_bytes < SIZE + 2 * CHUNK_BYTES
        assert [disk.read_bytes for guest in run.guests for disk in guest.disks] == [SIZE]
        assert list((again.folder / "journals").iterdir()) == []
        _check_whole(again, 1)
        restored = again.ended(again.backups.restore(run.restore_point_ids[0], RestoreRequest(target="export", name="out")))
        assert restored.status == "completed", restored.error
        assert [(again.folder / "exports/out/0-vda.raw").read_bytes() == (again.folder / "images/web").read_bytes()] == [True]
    finally:
        again.close()


def test_a_point_whose_registration_a_kill_cut_off_is_found_again(house: House) -> None:
    job = house.job("web")
    _kill(house, "register", 1)
    again = House(house.folder)
    try:
        (run,), _ = again.backups.runs.page(limit=9, cursor=None)
        assert again.ended(run).status == "completed"
        (point,) = again.backups.points.all()
        assert (point.job_id, point.vm_name) == (job.id, "web")
        _check_whole(again, 1)
        assert again.ended(again.backups.verify(point.id)).status == "completed"
    finally:
        again.close()


def test_a_point_whose_repository_went_away_before_it_said_so_is_found(house: House, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its run has failed: nobody else would look for it, show it, or remove it one day."""
    commit, away = Session.commit, RepositoryUnreachable("the peer does not answer for points/…")

    def unanswered(session: Session, *given: Any) -> None:
        commit(session, *given)
        raise away

    job = house.job("web")
    with monkeypatch.context() as patched:
        patched.setattr(Session, "commit", unanswered)
        run = house.run(job)
    assert (run.status, run.error and run.error.code) == ("failed", RepositoryUnreachable.code)
    house.backups.look()
    assert [(point.job_id, point.run_id) for point in house.backups.points.all()] == [(job.id, run.id)]
    assert house.run(job).status == "completed"
    _check_whole(house, 2)


def test_a_guest_that_fails_keeps_none_of_the_others_from_it(house: House) -> None:
    for name in ("gone", "nowhere", "db"):
        house.image(name, content()[:5000])
    job = house.job("gone", "web", "nowhere", "db")
    for name in ("gone", "nowhere"):
        house.guests.remove(name)
    run = house.run(job)
    assert (run.status, len(run.restore_point_ids)) == ("failed", 2)
    assert run.error is not None
    assert run.error.message.startswith("2 of 4 guests were not backed up; gone: ")
    assert [(warning.vm_id, warning.code) for warning in run.warnings] == [
        ("gone", "E_BAK_NOT_FOUND"),
        ("nowhere", "E_BAK_NOT_FOUND"),
    ]
    _check_whole(house, 2)


@pytest.mark.parametrize("error", [RepositoryFull("no room"), RepositoryUnreachable("gone away")])
def test_a_repository_that_fails_ends_the_run_at_once(house: House, monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
    house.image("db", content()[:5000])
    tried = []

    def broken(self: Session, manifest: Any, sign: Any) -> None:
        tried.append(manifest.sealed.vm_name)
        raise error

    job = house.job("web", "db")
    with monkeypatch.context() as patched:
        patched.setattr(Session, "commit", broken)
        run = house.run(job)
    assert run.error is not None
    assert (tried, run.status, run.error.message) == (["web"], "failed", str(error))
    assert house.run(job).status == "completed"


@pytest.mark.parametrize("by", ["point", "repository"])
def test_damage_is_noted_also_where_nothing_can_be_written(house: House, monkeypatch: pytest.MonkeyPatch, by: str) -> None:
    """On a full disk or a read-only mount the run reported only that, and the point went on as a good one."""
    job = house.job("web")
    (point,) = house.run(job).restore_point_ids
    pack = next((house.folder / "repository/packs").iterdir())
    changed = bytearray(pack.read_bytes())
    changed[100] ^= 1
    pack.write_bytes(changed)

    def full(_folder: HostFolder, name: str, _pieces: object) -> None:
        raise RepositoryFull(f"the repository is full: {name}")

    monkeypatch.setattr(HostFolder, "write", full)
    verify = {
        "point": partial(house.backups.verify, point),
        "repository": partial(house.backups.verify_repository, job.repository_id),
    }
    run = house.ended(verify[by]())
    assert run.error is not None
    assert run.error.code == "E_BAK_DAMAGED"
    assert [(one.code, "out of use" in one.message) for one in run.warnings] == [("E_BAK_REPOSITORY_FULL", True)]
    assert (run.report is not None) is (by == "repository")
    assert house.backups.points.get(point).state == "damaged"


def test_a_server_whose_clock_is_behind_makes_nothing_old(house: House, monkeypatch: pytest.MonkeyPatch) -> None:
    """It dates the files of an NFS mount: by this host's clock, what another run has just written would be of last week."""
    behind_s, entries, utime = 8 * 24 * 3600, HostFolder.entries, os.utime
    monkeypatch.setattr(os, "utime", lambda path: utime(path, (time.time() - behind_s,) * 2))

    def dated(folder: HostFolder, name: str) -> list[Entry]:
        return [replace(one, modified_at=one.modified_at - behind_s) for one in entries(folder, name)]

    monkeypatch.setattr(HostFolder, "entries", dated)
    job = house.job("web")
    assert house.run(job).status == "completed"
    (point,) = house.backups.points.all()
    house.backups.repositories.opened(job.repository_id).remove(point.id)
    written = house.folder / "repository/tmp/0123456789abcdef"
    written.write_bytes(b"the pack of another host's run")
    run = house.ended(house.backups.collect(job.repository_id, dry_run=False))
    assert (run.status, run.collected and run.collected.packs_condemned) == ("completed", 0)
    assert [path.name for path in written.parent.iterdir()] == [written.name]


def test_errors_of_shared_rooms_are_reported_by_a_code_of_this_side(house: House) -> None:
    def fails(_: UnderWay) -> None:
        raise DiskReadFailed("sector 5")

    def breaks(_: UnderWay) -> None:
        raise ValueError("/secret/path")

    for work, code in ((fails, "E_BAK_SOURCE_READ_FAILED"), (breaks, "E_BAK_INTERNAL")):
        house.backups.runs._kinds = {"backup": RunKind(lambda _, work=work: work)}  # type: ignore[misc]
        with house.backups.runs.lock:
            run = house.backups.runs.begin(BackupRun(id=uuid4(), created_at=now()))
        error = house.ended(run).error
        assert error is not None
        assert error.code == code
        assert "secret" not in error.message


def test_the_rate_is_of_the_last_seconds() -> None:
    clock = [0.0]
    rate = Rate(clock=lambda: clock[0])
    assert rate.at(0) == 0.0
    for second in range(1, 61):
        clock[0] = second
        figure = rate.at(second * 100)
    assert figure == pytest.approx(100)
    for second in range(61, 81):  # it stands still
        clock[0] = second
        figure = rate.at(6000)
    assert figure == 0.0
    assert rate.at(0) == 0.0, "what goes back is no rate below nothing"


@pytest.mark.parametrize("cancelled", [False, True])
def test_a_run_is_run_though_the_answer_to_its_commit_was_lost(
    house: House, monkeypatch: pytest.MonkeyPatch, cancelled: bool
) -> None:
    """Its job would run never again, as one of its runs has not ended."""
    monkeypatch.setattr(runner, "RECONCILE_EVERY_S", 1000 if cancelled else 0.1)
    job, real = house.job("web"), house.store.backups.put_all
    house.run(job)

    def lost(*arguments: Any, **named: Any) -> None:
        real(*arguments, **named)
        monkeypatch.setattr(house.store.backups, "put_all", real)
        raise StoreAway("the store failed: server closed the connection unexpectedly")

    monkeypatch.setattr(house.store.backups, "put_all", lost)
    with pytest.raises(StoreAway):
        house.backups.run_job(job.id)
    run, _ = house.backups.runs.page(limit=9, cursor=None)[0]
    if cancelled:
        house.backups.runs.cancel(run.id)
    assert house.ended(run).status == ("cancelled" if cancelled else "completed")
    assert house.run(job).status == "completed"


def test_a_run_that_was_not_stored_is_not_run(house: House, monkeypatch: pytest.MonkeyPatch) -> None:
    job, real = house.job("web"), house.store.backups.put_all

    def away(*_: object, **__: object) -> None:
        monkeypatch.setattr(house.store.backups, "put_all", real)
        raise StoreAway("the store failed: connection refused")

    monkeypatch.setattr(house.store.backups, "put_all", away)
    with pytest.raises(StoreAway):
        house.backups.run_job(job.id)
    run = house.run(job)
    assert run.status == "completed"
    assert house.backups.runs.page(limit=9, cursor=None)[0] == [house.backups.runs.get(run.id)]


@pytest.mark.parametrize("thread", ["backups", "backups_0"])
def test_a_run_for_which_there_is_no_thread_does_not_wait_for_ever(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, thread: str
) -> None:
    """The service's first run had started a thread for all of them: without it each later one was stored, and never run."""
    monkeypatch.setattr(runner, "RECONCILE_EVERY_S", 0.05)
    monkeypatch.setattr(runner, "STORE_PAUSE_S", 0.05)
    no, house = NoThreads(monkeypatch, thread), House(tmp_path)
    house.image("web", content())
    job = house.job("web")
    if thread == "backups":
        with pytest.raises(RuntimeError):
            house.backups.run_job(job.id)
        assert house.backups.runs.not_ended() == []
    else:
        run = house.backups.run_job(job.id)
        until(lambda: len(no.refused) > 3)
        assert house.backups.runs.get(run.id).status == Status.QUEUED
    no.over = True
    assert (house.run(job) if thread == "backups" else house.ended(run)).status == "completed"
    house.close()


def test_a_run_that_lacks_something_of_the_host_says_so() -> None:
    found = trouble_of(OSError(errno.EMFILE, os.strerror(errno.EMFILE), "/secret"))
    assert (found.code, found.message) == ("E_BAK_INTERNAL", "the run cannot go on: Too many open files")
    assert "LimitNOFILE" in (found.hint or "")
    found = trouble_of(OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "/secret"))
    assert (found.code, found.message) == ("E_BAK_INTERNAL", "the run cannot go on: No space left on device")
    assert "data_dir" in (found.hint or "")


@pytest.mark.parametrize(
    ("damaged", "says"),
    [
        ((), "the pack has changed"),
        ((1,), "disk vdb is damaged: the pack has changed"),
        ((0, 2), "disks vda, vdc are damaged: the pack has changed"),
        ((0, 1, 2), "disks vda, vdb, vdc are damaged: the pack has changed"),
    ],
)
def test_a_damaged_point_says_which_disks_can_be_restored(damaged: tuple[int, ...], says: str) -> None:
    point: Any = SimpleNamespace(disks=[SimpleNamespace(target=target) for target in ("vda", "vdb", "vdc")])
    found = upkeep._damaged_point(point, "the pack has changed", damaged)
    assert found.detail == says
    assert ("the other disks of this point are whole" in (found.hint or "")) == (len(damaged) in (1, 2))
