"""Runs that ended long ago go by the setting keep_ended_days, as migrations do."""

from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from uuid import UUID, uuid4

import pytest

from synvirt.backups import runs
from synvirt.backups.model import BackupJob, BackupRun, RunKind, Status
from synvirt.backups.retention import Retention
from synvirt.backups.service import Backups
from synvirt.model.values import now
from synvirt.store import Store
from tests.fakes.backups import FakeGuests, backups_of

OLD = timedelta(days=40)


@pytest.fixture
def backups(store: Store, tmp_path: Path) -> Iterator[Backups]:
    made = backups_of(store, FakeGuests(tmp_path / "images"), tmp_path)  # nothing begins: the runs are rows alone
    yield made
    made.close()


def put(
    store: Store, kind: RunKind, *, ago: timedelta, took: timedelta = timedelta(0), status: Status = Status.COMPLETED
) -> UUID:
    created = now() - ago
    finished = None if status is Status.TRANSFERRING else created + took
    run = BackupRun(id=uuid4(), kind=kind, status=status, created_at=created, finished_at=finished)
    store.backups.put("run", run.id, run, host="local", state=str(status))
    return run.id


def left(store: Store) -> list[UUID]:
    return [BackupRun.model_validate_json(one).id for one in store.backups.all("run", host="local")]


@pytest.mark.parametrize("page", [1, 2, 500])
def test_old_runs_of_every_kind_go_and_what_is_young_or_runs_stays(
    store: Store, backups: Backups, monkeypatch: pytest.MonkeyPatch, page: int
) -> None:
    monkeypatch.setattr(runs, "PAGE", page)
    kinds: tuple[RunKind, ...] = ("backup", "restore", "verify", "boot_test", "collect")
    for kind in kinds:
        put(store, kind, ago=OLD)
    put(store, "backup", ago=OLD, status=Status.FAILED)
    still = put(store, "restore", ago=OLD, status=Status.TRANSFERRING)
    long = put(store, "verify", ago=OLD, took=OLD - timedelta(days=2))  # it ended two days ago
    put(store, "backup", ago=timedelta(days=32), status=Status.CANCELLED)
    young = put(store, "backup", ago=timedelta(days=3))
    backups.remove_older_runs(30)
    assert left(store) == [still, long, young]


def test_the_last_run_of_a_job_stays_however_old(store: Store, backups: Backups) -> None:
    """The schedule needs it: by it a run that was missed is made up for."""
    last, before = put(store, "backup", ago=OLD), put(store, "backup", ago=2 * OLD)
    job = BackupJob(
        id=uuid4(),
        name="nightly",
        vm_ids=("a",),
        repository_id=uuid4(),
        quiesce="off",
        retention=Retention(),
        created_at=now(),
        last_run_id=last,
    )
    store.backups.put("job", job.id, job, host="local")
    assert set(left(store)) == {last, before}
    backups.remove_older_runs(30)
    assert left(store) == [last]
