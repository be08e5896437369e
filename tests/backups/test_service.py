"""Jobs, runs and restore points as data: what is completed can be restored, what is not leaves nothing behind."""

import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path
from random import Random
from typing import Any, Literal, get_args
from uuid import UUID, uuid4

import pytest

from synvirt.backups.model import (
    ENDS,
    BackupJobChange,
    BackupJobRequest,
    BackupRepositoryRequest,
    BackupRun,
    RestoreRequest,
    Status,
)
from synvirt.backups.repositories import Repositories
from synvirt.backups.retention import Retention
from synvirt.backups.retiring import Retiring
from synvirt.errors import (
    BackupBadRequest,
    BackupConflict,
    BackupNotFound,
    PersistFailed,
    RepositoryUnreachable,
    SynvirtError,
)
from synvirt.jobs import process, runner
from synvirt.model.values import now
from synvirt.repository import condemned, garbage, packs, verify
from synvirt.repository import repository as stored
from synvirt.repository.keys import CHUNK_BYTES
from synvirt.repository.repository import Repository
from synvirt.store.backups import BackupRows
from tests.backups.house import House, disk_content
from tests.running.processes import until


def test_every_kind_of_run_says_what_becomes_of_one_that_was_cut_off(house: House) -> None:
    assert house.backups._kinds.all().keys() == set(get_args(BackupRun.model_fields["kind"].annotation))


def test_a_run_ends_completed_with_points_that_restore_to_the_same_bytes(house: House) -> None:
    house.image("web", disk_content())
    house.image("db", disk_content()[:5000])
    job = house.job("web", "db")
    run = house.run(job)
    assert (run.status, run.error, run.warnings) == ("completed", None, ())
    assert len(run.restore_point_ids) == 2
    assert run.progress.bytes_done == run.progress.bytes_total > 0
    assert house.backups.job(job.id).last_run_id == run.id
    for point_id, content in zip(run.restore_point_ids, (disk_content(), disk_content()[:5000]), strict=True):
        point = house.backups.points.get(point_id)
        assert (point.consistency, point.quiesced, point.state) == ("offline", False, "unverified")
        assert point.size_bytes == len(content)
        restored = house.ended(house.backups.restore(point_id, RestoreRequest(target="export")))
        assert restored.status == "completed", restored.error
        assert restored.path is not None
        folder = house.folder / restored.path
        assert [(folder / "0-vda.raw").read_bytes() == content] == [True]
        assert point.vm_name in (folder / "domain.xml").read_text()
        assert house.ended(house.backups.verify(point_id)).status == "completed"
        assert house.backups.points.get(point_id).state == "ok"


def test_a_second_run_stores_only_what_changed(house: House) -> None:
    house.image("web", disk_content())
    job = house.job("web")
    first = house.run(job)
    house.image("web", disk_content()[:-CHUNK_BYTES] + b"new" + bytes(CHUNK_BYTES - 3))
    second = house.run(job)
    stored = [house.backups.points.get(run.restore_point_ids[0]).stored_bytes for run in (first, second)]
    assert stored[0] > 2 * CHUNK_BYTES
    assert stored[1] < CHUNK_BYTES // 8


def test_a_guest_that_was_started_meanwhile_gives_no_point(house: House) -> None:
    house.image("web", disk_content())
    house.guests.changed = True
    run = house.run(house.job("web"))
    assert run.status == "failed"
    assert run.error is not None
    assert run.error.code == "E_BAK_SOURCE_RUNNING"
    assert house.backups.points.page(limit=10, cursor=None) == ([], None)
    assert house.backups.repositories.page(limit=1, cursor=None)[0][0].points_count == 0


def test_a_guest_that_is_not_there_fails_the_run_and_keeps_the_points_before_it(house: House) -> None:
    house.image("web", disk_content())
    house.image("gone", disk_content())
    job = house.job("web", "gone")
    house.guests.remove("gone")
    run = house.run(job)
    assert run.status == "failed"
    assert run.error is not None
    assert "gone" in run.error.message
    assert len(run.restore_point_ids) == 1


@pytest.mark.parametrize(
    ("vm_ids", "message"), [(("web", "wbe"), "wbe"), (("web", "web"), "one guest"), (("web", "id-of-web"), "one guest")]
)
def test_a_job_names_guests_that_are_there_and_each_once(house: House, vm_ids: tuple[str, ...], message: str) -> None:
    house.image("web", disk_content())
    repository = house.repository()
    with pytest.raises(BackupBadRequest, match=message):
        house.job(*vm_ids, repository=repository)
    job = house.job("web", repository=repository)
    with pytest.raises(BackupBadRequest, match=message):
        house.backups.change_job(job.id, BackupJobChange(vm_ids=vm_ids))
    assert [one.vm_ids for one in house.backups.all_jobs()] == [("web",)]


def test_two_jobs_never_have_one_name(house: House) -> None:
    house.image("web", disk_content())
    repository = house.repository()
    first, second = house.job("web", repository=repository), house.job("web", repository=repository)
    fields = {name: getattr(first, name) for name in BackupJobRequest.model_fields}
    with pytest.raises(BackupConflict, match=first.name):
        house.backups.add_job(BackupJobRequest(**fields))
    with pytest.raises(BackupConflict, match=first.name):
        house.backups.change_job(second.id, BackupJobChange(name=first.name))
    assert house.backups.change_job(first.id, BackupJobChange(name=first.name)).name == first.name


def test_a_job_runs_once_at_a_time_and_can_be_cancelled(house: House) -> None:
    house.image("web", disk_content())
    opened, go = threading.Event(), threading.Event()

    def held() -> None:
        opened.set()
        go.wait(100)

    house.guests.gate = held
    job = house.job("web")
    run = house.backups.run_job(job.id)
    assert opened.wait(60)
    with pytest.raises(BackupConflict, match=str(run.id)):
        house.backups.run_job(job.id)
    with pytest.raises(BackupConflict):
        house.backups.remove_job(job.id)
    house.backups.runs.cancel(run.id)
    go.set()
    assert house.ended(run).status == "cancelled"
    with pytest.raises(BackupConflict):
        house.backups.runs.cancel(run.id)
    house.guests.gate = lambda: None
    assert house.run(job).status == "completed"


class Hanging:
    """A server that hangs for one caller: `call`, in a thread of its own, waits in that method until the end of the block.
    Other threads go through it."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, owner: type, name: str, call: Callable[[], object]) -> None:
        self._reached, self._go_on = threading.Event(), threading.Event()
        self._thread, real = threading.Thread(target=call), getattr(owner, name)

        def called(*given: object, **named: object) -> object:
            if threading.current_thread() is self._thread:
                self._reached.set()
                assert self._go_on.wait(30)
            return real(*given, **named)

        monkeypatch.setattr(owner, name, called)

    def __enter__(self) -> None:
        self._thread.start()
        assert self._reached.wait(30)

    def __exit__(self, *_: object) -> None:
        self._go_on.set()
        self._thread.join()


@pytest.mark.parametrize("asked", ["change_key", "retire"])
def test_a_server_that_hangs_keeps_no_run_of_another_repository_from_beginning(
    house: House, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, asked: str
) -> None:
    house.image("web", disk_content())
    here = house.repository()
    (tmp_path / "there").mkdir()
    there = house.backups.add_repository(BackupRepositoryRequest(name="there", kind="local", path=str(tmp_path / "there"))).id
    job, other = house.job("web", repository=here), house.job("web", repository=there)
    calls: dict[str, tuple[type, str, Callable[[], object]]] = {
        "change_key": (Repositories, "change_key", lambda: house.backups.change_key(here)),
        "retire": (Retiring, "planned", lambda: house.backups.retire(job.id)),
    }
    with Hanging(monkeypatch, *calls[asked]):
        assert house.run(other).status == "completed"
        with pytest.raises(BackupConflict, match="is being changed, or points of the job are being removed"):
            house.backups.run_job(job.id)
        with pytest.raises(BackupConflict):
            calls[asked][2]()
        with pytest.raises(BackupConflict):
            house.backups.remove_job(job.id) if asked == "retire" else house.backups.verify_repository(here)
    assert house.run(job).status == "completed"


def test_a_key_that_changes_slowly_lets_other_repositories_be_opened(
    house: House, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    here, known = house.repository(), house.backups.repositories
    (tmp_path / "there").mkdir()
    there = house.backups.add_repository(BackupRepositoryRequest(name="there", kind="local", path=str(tmp_path / "there"))).id
    opened = list[Repository]()
    opening = threading.Thread(target=lambda: opened.append(known.opened(there)))
    with Hanging(monkeypatch, Repositories, "_end_change", lambda: known.change_key(here)):
        opening.start()
        opening.join(10)
        assert len(opened) == 1


def test_of_two_that_add_a_repository_of_one_name_at_once_one_is_refused(
    house: House, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "there").mkdir()
    with Hanging(monkeypatch, Repositories, "_write_key", house.repository):
        for name, folder in (("here", "there"), ("there", "repository")):
            request = BackupRepositoryRequest(name=name, kind="local", path=str(tmp_path / folder))
            with pytest.raises(BackupConflict, match="already"):
                house.backups.add_repository(request)
    assert [one.name for one in house.backups.repositories.known()] == ["here"]
    request = BackupRepositoryRequest(name="there", kind="local", path=str(tmp_path / "there"))
    assert house.backups.add_repository(request).name == "there"


@pytest.mark.parametrize("broken", [(BackupRows, "put_all"), (stored, "create")])
def test_a_repository_that_cannot_be_added_leaves_nothing(
    house: House, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, broken: tuple[Any, str]
) -> None:
    (tmp_path / "there").mkdir()
    request = BackupRepositoryRequest(name="there", kind="local", path=str(tmp_path / "there"))
    keys = sorted((tmp_path / "keyring").glob("backup-*"))

    def full(*_: object, **__: object) -> None:
        raise PersistFailed("the database is full")

    with monkeypatch.context() as patched:
        patched.setattr(*broken, full)
        with pytest.raises(PersistFailed):
            house.backups.add_repository(request)
    assert list((tmp_path / "there").iterdir()) == []
    assert sorted((tmp_path / "keyring").glob("backup-*")) == keys
    assert house.backups.repositories.known() == []
    assert house.backups.add_repository(request).name == "there"


def test_a_run_that_hangs_does_not_hold_up_the_end_of_the_service(house: House, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runner, "END_TIMEOUT_S", 0.1)
    house.image("web", disk_content())
    job, reached, go_on = house.job("web"), threading.Event(), threading.Event()

    def hang() -> None:
        reached.set()
        assert go_on.wait(60)

    house.guests.gate = hang
    run = house.backups.run_job(job.id)
    assert reached.wait(30)
    house.backups.close()
    assert house.backups.runs.get(run.id).status not in ENDS
    go_on.set()
    until(lambda: not house.backups.runs._at_work)


# Whether a run of that kind reads the points that it names: each is a promise that they stay.
READS = {"backup": False, "restore": True, "verify": True, "boot_test": True, "collect": False}


@pytest.mark.parametrize("kind", get_args(BackupRun.model_fields["kind"].annotation))
def test_a_point_stays_for_as_long_as_a_run_reads_it(house: House, kind: Literal["backup"]) -> None:
    house.image("web", disk_content())
    job = house.job("web", retention=Retention(keep_last=1))
    (point,) = house.run(job).restore_point_ids
    run = BackupRun(id=uuid4(), kind=kind, created_at=now(), restore_point_ids=(point,), repository_id=job.repository_id)

    def stands(status: Status) -> None:
        now_so = run.model_copy(update={"status": status})
        house.store.backups.put("run", run.id, now_so, host="local", state=str(status))

    if READS[kind]:
        for status in set(Status) - ENDS:
            stands(status)
            with pytest.raises(BackupConflict, match=str(run.id)) as refused:
                house.backups.remove_point(point)
            assert refused.value.hint
        house.run(job)
        assert point in {one.id for one in house.backups.points.all()}, "retention leaves it too"
    for status in ENDS if READS[kind] else set(Status):
        stands(status)
    house.backups.remove_point(point)
    assert point not in house.backups.repositories.opened(job.repository_id).point_ids()


def test_no_run_begins_to_read_a_point_that_is_about_to_go(house: House, monkeypatch: pytest.MonkeyPatch) -> None:
    house.image("web", disk_content())
    (point,) = house.run(house.job("web")).restore_point_ids
    remove, refused = Repository.remove, list[SynvirtError]()

    def verify() -> None:
        try:
            house.backups.verify(point)
        except SynvirtError as error:
            refused.append(error)

    begins = threading.Thread(target=verify)

    def removing(self: Repository, point_id: UUID) -> None:
        begins.start()
        begins.join(0.2)
        remove(self, point_id)

    monkeypatch.setattr(Repository, "remove", removing)
    house.backups.remove_point(point)
    begins.join()
    assert [type(error) for error in refused] == [BackupNotFound]


def test_a_point_that_is_removed_while_its_repository_is_verified_is_not_damaged(
    house: House, monkeypatch: pytest.MonkeyPatch
) -> None:
    house.image("web", disk_content())
    job = house.job("web")
    (gone,), (stays,) = house.run(job).restore_point_ids, house.run(job).restore_point_ids

    def then_it_goes(self: Repository) -> list[UUID]:
        listed = point_ids(self)
        if gone in {one.id for one in house.backups.points.all()}:
            house.backups.remove_point(gone)
        return listed

    point_ids = Repository.point_ids
    monkeypatch.setattr(Repository, "point_ids", then_it_goes)
    run = house.ended(house.backups.verify_repository(job.repository_id))
    assert (run.status, run.error) == ("completed", None)
    assert [(one.id, one.state) for one in house.backups.points.all()] == [(stays, "ok")]


def test_a_point_that_comes_while_its_repository_is_verified_is_not_verified(
    house: House, monkeypatch: pytest.MonkeyPatch
) -> None:
    house.image("web", disk_content())
    job, check_whole, came = house.job("web"), packs.check_whole, list[UUID]()
    (before,) = house.run(job).restore_point_ids

    def one_comes(*given: Any, **named: Any) -> None:
        house.image("web", Random(7).randbytes(CHUNK_BYTES))
        came.extend(house.run(job).restore_point_ids)
        check_whole(*given, **named)

    monkeypatch.setattr(packs, "check_whole", one_comes)
    report = house.ended(house.backups.verify_repository(job.repository_id)).report
    assert (len(came), report and report.packs) == (1, 1), "the pack of the new point was not read"
    states = [(point.state, point.verified_at is None) for point in map(house.backups.points.get, (before, *came))]
    assert states == [("ok", False), ("unverified", True)]


def test_damage_is_reported_by_verify_and_by_restore_and_leaves_no_half_an_export(house: House) -> None:
    house.image("web", disk_content())
    (point,) = house.run(house.job("web")).restore_point_ids
    (pack,) = (house.folder / "repository/packs").iterdir()
    content = bytearray(pack.read_bytes())
    content[100] ^= 1
    pack.write_bytes(content)
    verified = house.ended(house.backups.verify(point))
    assert verified.status == "failed"
    assert house.backups.points.get(point).state == "damaged"
    restored = house.ended(house.backups.restore(point, RestoreRequest(target="export", name="out")))
    assert restored.error is not None
    assert restored.error.code == "E_BAK_DAMAGED"
    assert not (house.folder / "exports/out").exists()


@pytest.mark.parametrize("by", ["point", "repository"])
def test_what_is_damaged_is_written_again_by_the_next_run_and_repairs_the_points_before(house: House, by: str) -> None:
    house.image("web", disk_content())
    job = house.job("web")
    (point,) = house.run(job).restore_point_ids
    (pack,) = (house.folder / "repository/packs").iterdir()
    content = bytearray(pack.read_bytes())
    content[100] ^= 1
    pack.write_bytes(content)
    verify = {
        "point": partial(house.backups.verify, point),
        "repository": partial(house.backups.verify_repository, job.repository_id),
    }
    assert house.ended(verify[by]()).status == "failed"
    assert house.backups.points.get(point).state == "damaged"
    (again,) = house.run(job).restore_point_ids
    for whole in (again, point):
        assert house.ended(house.backups.verify(whole)).status == "completed"
        assert house.backups.points.get(whole).state == "ok"


def test_another_host_finds_the_points_with_the_recovery_key(house: House, tmp_path: Path) -> None:
    house.image("web", disk_content())
    (point,) = house.run(house.job("web")).restore_point_ids
    (known,), _ = house.backups.repositories.page(limit=9, cursor=None)
    key = house.backups.repositories.recovery_key(known.id)
    (tmp_path / "other").mkdir()
    (tmp_path / "repository").rename(tmp_path / "other/repository")
    other = House(tmp_path / "other")
    with pytest.raises(SynvirtError):
        other.repository()
    other.repository(recovery_key=key)
    assert other.backups.points.get(point).vm_name == "web"
    restored = other.ended(other.backups.restore(point, RestoreRequest(target="export", name="out")))
    assert restored.status == "completed"
    assert [(tmp_path / "other/exports/out/0-vda.raw").read_bytes() == disk_content()] == [True]
    other.close()


def test_a_repository_that_is_away_fails_the_run_and_is_said_to_be(house: House) -> None:
    house.image("web", disk_content())
    job = house.job("web")
    (house.folder / "repository").rename(house.folder / "away")
    run = house.run(job)
    assert run.error is not None
    assert run.error.code == RepositoryUnreachable.code
    assert house.backups.repositories.page(limit=9, cursor=None)[0][0].state == "unreachable"
    (house.folder / "away").rename(house.folder / "repository")
    assert house.run(job).status == "completed"


def test_what_is_not_there_is_not_found(house: House) -> None:
    for ask in (
        house.backups.job,
        house.backups.runs.get,
        house.backups.points.get,
        house.backups.run_job,
        house.backups.verify,
    ):
        with pytest.raises(BackupNotFound):
            ask(uuid4())


def test_a_repository_that_jobs_write_to_is_not_forgotten(house: House) -> None:
    house.image("web", disk_content())
    job = house.job("web")
    with pytest.raises(BackupConflict):
        house.backups.forget_repository(job.repository_id)
    house.backups.remove_job(job.id)
    house.backups.forget_repository(job.repository_id)
    assert (house.folder / "repository/repository").exists()


def test_no_job_is_added_to_a_repository_that_is_forgotten_at_that_moment(
    house: House, monkeypatch: pytest.MonkeyPatch
) -> None:
    house.image("web", disk_content())
    repository = house.repository()
    asked = BackupJobRequest(name="nightly", vm_ids=("web",), repository_id=repository)
    with (
        Hanging(monkeypatch, Repositories, "forget", lambda: house.backups.forget_repository(repository)),
        pytest.raises(BackupConflict, match="is being forgotten"),
    ):
        house.backups.add_job(asked)
    with pytest.raises(BackupNotFound):
        house.backups.add_job(asked)
    assert house.backups.all_jobs() == []


def test_damage_of_any_extent_is_found_by_worker_and_service(house: House, monkeypatch: pytest.MonkeyPatch) -> None:
    """A worker's messages are short. All packs are condemned, all points marked; the report lists some, and counts the rest."""
    monkeypatch.setattr(packs, "PACK_BYTES", CHUNK_BYTES)
    names = [f"web{number}" for number in range(6)]
    for number, name in enumerate(names):
        house.image(name, Random(number).randbytes(2 * CHUNK_BYTES))
    job = house.job(*names)
    points = house.run(job).restore_point_ids
    repository = house.backups.repositories.opened(job.repository_id)
    for pack in repository.pack_sizes():
        content = bytearray((house.folder / "repository/packs" / pack).read_bytes())
        content[100] ^= 1
        (house.folder / "repository/packs" / pack).write_bytes(content)
    monkeypatch.setattr(verify, "LISTED_MAX", 2, raising=False)
    monkeypatch.setattr(process, "LINE_BYTES_MAX", 1600)
    monkeypatch.setattr(garbage, "CONDEMNED_AT_ONCE", 5, raising=False)
    assert house.ended(house.backups.verify(points[0])).error.code == "E_BAK_DAMAGED"  # type: ignore[union-attr]
    assert 1 <= len(condemned.packs_of(repository.folder)) < len(repository.pack_sizes())
    run = house.ended(house.backups.verify_repository(job.repository_id))
    assert run.error is not None
    assert run.error.code == "E_BAK_DAMAGED"
    assert condemned.packs_of(repository.folder) == repository.pack_sizes().keys()
    assert {house.backups.points.get(point).state for point in points} == {"damaged"}
    report = run.report
    assert report is not None
    assert [len(one) for one in (report.wrongs, report.damaged_points, report.damaged_packs)] == [2, 2, 2]
    packs_count, points_count = len(repository.pack_sizes()), len(points)
    assert (report.more_damaged_packs, report.more_damaged_points) == (packs_count - 2, points_count - 2)
    assert report.more_wrongs == packs_count + points_count - 2
