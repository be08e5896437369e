"""Ended jobs go, with what they kept where an operator says so; never what somebody still needs."""

from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import AbstractContextManager
from datetime import timedelta
from pathlib import Path
from typing import Any
from uuid import UUID, uuid4

import pytest
from sqlalchemy import update

from synvirt.errors import Conflict, Internal, NotFound
from synvirt.migrations.removing import Removal, volumes_of
from synvirt.model.job import Migration
from synvirt.model.kinds import State
from synvirt.model.values import now
from synvirt.store.tables import migrations
from tests.fakes.hypervisor import FakeHypervisor
from tests.fakes.workers import in_process
from tests.house import House, offline_plan


def _run(folder: Path, *, fail: str | None = None) -> tuple[House, Migration, Removal]:
    house = House(folder, hypervisor=FakeHypervisor(fail=fail), workers=in_process)
    appliance = house.imports / "appliance"
    appliance.mkdir()
    (appliance / "disk-0.raw").write_bytes(b"disk" * 1024)
    job = house.run(house.intake.submit(offline_plan(appliance)).id)

    def destroy(job: Migration) -> None:
        for volume in volumes_of(job):
            house.destination.destroy(volume)

    return house, job, Removal(house.store, here="local", destroy=destroy, forget=lambda job: None)


def test_a_completed_job_goes_and_its_guest_stays(tmp_path: Path) -> None:
    house, job, removal = _run(tmp_path)
    with pytest.raises(Conflict, match="the disks of its guest"):
        removal.remove(job.id, "destroy")
    removal.remove(job.id, None)
    with pytest.raises(NotFound):
        house.store.get(job.id)
    assert house.store.events_after(0) == []
    assert house.volume(job).exists()
    assert len(house.hypervisor.domains) == 1
    house.close()


@pytest.mark.parametrize(("volumes", "stays"), [("keep", True), ("destroy", False)])
def test_what_becomes_of_kept_volumes_is_asked(tmp_path: Path, volumes: str, stays: bool) -> None:
    house, job, removal = _run(tmp_path, fail="boot")
    assert job.state == State.FAILED
    with pytest.raises(Conflict, match="kept its volumes"):
        removal.remove(job.id, None)
    removal.remove(job.id, volumes)  # type: ignore[arg-type]
    assert house.volume(job).exists() is stays
    assert house.store.documents(limit=9) == ([], None)
    house.close()


@pytest.mark.parametrize("fail", [None, "boot"])
def test_what_else_was_kept_of_a_failed_job_goes_with_it(tmp_path: Path, fail: str | None) -> None:
    house, job, _ = _run(tmp_path, fail=fail)
    forgotten: list[UUID] = []
    removal = Removal(house.store, here="local", destroy=lambda _: None, forget=lambda found: forgotten.append(found.id))
    removal.remove(job.id, "keep")
    assert forgotten == ([] if fail is None else [job.id])
    house.close()


def test_volumes_that_another_job_took_up_are_that_ones(tmp_path: Path) -> None:
    house, job, removal = _run(tmp_path, fail="boot")
    again = house.intake.retry(job.id, {})
    removal.remove(job.id, None)
    assert house.volume(job).exists()
    with pytest.raises(Conflict, match="has not ended"):
        removal.remove(again.id, None)
    house.close()


def test_a_removal_that_was_cut_off_goes_on_and_nobody_takes_the_copy_up_meanwhile(tmp_path: Path) -> None:
    house, job, removal = _run(tmp_path, fail="boot")

    def full(_: Migration) -> None:
        raise OSError

    with pytest.raises(OSError):
        Removal(house.store, here="local", destroy=full, forget=lambda job: None).remove(job.id, "destroy")
    with pytest.raises(Conflict, match="is being removed with its volumes"):
        house.intake.retry(job.id, {})
    removal.remove(job.id, "destroy")
    assert not house.volume(job).exists()
    house.close()


def test_a_copy_that_a_job_takes_up_at_the_moment_of_its_removal_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    house, job, removal = _run(tmp_path, fail="boot")
    adding = house.store.adding

    def taken_up_before() -> AbstractContextManager[None]:
        monkeypatch.undo()
        house.intake.retry(job.id, {})
        return adding()

    monkeypatch.setattr(house.store, "adding", taken_up_before)
    with pytest.raises(Conflict, match="is continued by job"):
        removal.remove(job.id, "destroy")
    assert house.volume(job).exists()
    house.close()


def test_a_removal_does_not_come_between_a_retrys_note_and_its_job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The failed job is noted as taken up before the new one is there."""
    house, job, removal = _run(tmp_path, fail="boot")
    add = house.store.add
    with ThreadPoolExecutor(1) as pool:
        removals: list[Future[None]] = []

        def removed_before(*asked: Any, **more: Any) -> None:
            removals.append(pool.submit(removal.remove, job.id, "destroy"))
            wait(removals, 0.5)  # it must not end before the retry, and waits
            add(*asked, **more)

        monkeypatch.setattr(house.store, "add", removed_before)
        again = house.intake.retry(job.id, {})
        with pytest.raises(Conflict, match=f"is continued by job {again.id}"):
            removals[0].result(60)
    assert house.volume(job).exists()
    house.close()


@pytest.mark.parametrize(("fail", "owed"), [(None, "mark"), ("boot", "mark"), ("boot", "domain")])
def test_a_job_that_still_tidies_up_or_is_anothers_stays(tmp_path: Path, fail: str | None, owed: str) -> None:
    """A completed job's domain is its guest; a failed one's must go."""
    house, job, removal = _run(tmp_path, fail=fail)
    house.store.record(job.id, owed, "vm-1")
    with pytest.raises(Conflict, match=f"still has to tidy up: {owed} vm-1"):
        removal.remove(job.id, "keep")
    house.store.strike(job.id, owed, "vm-1")
    with pytest.raises(Conflict, match="ran on host local"):
        Removal(house.store, here="other", destroy=lambda job: None, forget=lambda job: None).remove(job.id, None)
    house.close()


def test_a_job_whose_volumes_are_out_of_reach_for_good_goes_without_them(tmp_path: Path) -> None:
    """Its pool is lost: they would be owed for ever."""
    house, job, removal = _run(tmp_path, fail="boot")
    house.store.record(job.id, "volume", "tank/4711/disk")
    for volumes in (None, "destroy"):
        with pytest.raises(Conflict, match="still has to tidy up: volume tank/4711/disk") as refused:
            removal.remove(job.id, volumes)
        assert refused.value.hint is not None
        assert "keep them" in refused.value.hint
    removal.remove(job.id, "keep")
    assert house.store.documents(limit=9) == ([], None)
    assert house.store.ledger(job.id) == []
    house.close()


def test_old_jobs_go_by_themselves_but_not_with_what_is_asked_about(tmp_path: Path) -> None:
    house, job, removal = _run(tmp_path)
    removal.remove_older(1)
    assert house.store.get(job.id) == job
    house.store.change(job.id, job.state, lambda one: one.model_copy(update={"finished_at": now() - timedelta(days=2)}))
    removal.remove_older(1)
    assert house.store.documents(limit=9) == ([], None)
    house.close()


def _put_aside(house: House, job_id: UUID) -> None:
    """Another version of the service has written the job, so that this one cannot read it."""
    with house.store._writing() as db:
        db.execute(update(migrations).where(migrations.c.id == str(job_id)).values(version="2.0"))


def test_a_job_that_an_unreadable_one_has_taken_up_goes_and_keeps_no_other(tmp_path: Path) -> None:
    house, job, removal = _run(tmp_path, fail="boot")
    old, later = {"finished_at": now() - timedelta(days=2)}, uuid4()
    older, oldest = uuid4(), uuid4()
    house.store.add(job.model_copy(update={"id": oldest, "state": State.CANCELLED, **old}), host="local")
    house.store.add(job.model_copy(update={"id": older, "retried_by": later, **old}), host="local")
    house.store.add(job.model_copy(update={"id": later}), host="local")
    _put_aside(house, later)
    removal.remove_older(1)
    for gone in (older, oldest):
        with pytest.raises(NotFound):
            house.store.get(gone)
    house.close()


def test_an_old_job_that_cannot_go_keeps_no_other(tmp_path: Path) -> None:
    house, job, _ = _run(tmp_path)
    old = {"finished_at": now() - timedelta(days=2), "state": State.CANCELLED}
    first, second = uuid4(), uuid4()
    for one in (first, second):
        house.store.add(job.model_copy(update={"id": one, **old}), host="local")

    def forget(job: Migration) -> None:
        if job.id == second:
            raise Internal("its receipt is in the way")

    Removal(house.store, here="local", destroy=lambda job: None, forget=forget).remove_older(1)
    assert house.store.get(second).id == second
    with pytest.raises(NotFound):
        house.store.get(first)
    house.close()


def test_of_many_old_jobs_none_is_missed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """They are read a page at a time, and removed meanwhile: all at once, those of a year take gigabytes."""
    monkeypatch.setattr("synvirt.migrations.removing.PAGE", 2)
    house, job, removal = _run(tmp_path)
    old = {"finished_at": now() - timedelta(days=2)}
    for _ in range(5):
        house.store.add(job.model_copy(update={"id": uuid4(), **old}), host="local")
        house.store.add(job.model_copy(update={"id": uuid4()}), host="local")
    removal.remove_older(1)
    assert len(house.store.documents(limit=99)[0]) == 6
    house.close()
