"""What /metrics tells of backups: ends are counted once, ages are those of what can be restored."""

from datetime import timedelta
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from synvirt.backups.model import BackupJob, BackupJobRequest, BackupRepositoryRequest, BackupRun, RestorePoint
from synvirt.model.values import now
from tests.fakes.backups import ended
from tests.fakes.service import Service

CONTENT = b"content" * 100_000


def _samples(service: Service) -> dict[tuple[str, ...], float]:
    """Of each sample of backups its name and the values of its labels, and its value."""
    text, _ = service.app.state.metrics.text("")
    return {
        (sample.name, *(value for label, value in sorted(sample.labels.items()) if label != "backup_job")): sample.value
        for family in text_string_to_metric_families(text.decode())
        for sample in family.samples
        if sample.name.startswith("synvirt_backup_")
    }


def _job(service: Service, folder: Path, *guests: str) -> BackupJob:
    folder.mkdir()
    known = service.backups.add_repository(BackupRepositoryRequest(name="here", kind="local", path=str(folder)))
    return service.backups.add_job(BackupJobRequest(name="nightly", vm_ids=guests, repository_id=known.id))


def _run(service: Service, job: BackupJob) -> BackupRun:
    return ended(service.backups, service.backups.run_job(job.id).id)


def _two_guests(service: Service, folder: Path) -> tuple[BackupJob, RestorePoint, RestorePoint]:
    """A job, and its points of web, 2 hours old, and of db, 9 hours old."""
    for guest in ("web", "db"):
        service.guests.image(guest, CONTENT)
    job = _job(service, folder, "web", "db")
    web, db = (service.backups.points.get(id_) for id_ in _run(service, job).restore_point_ids)
    for point, hours in ((web, 2), (db, 9)):
        service.backups.points.put(point.model_copy(update={"created_at": now() - timedelta(hours=hours)}))
    return job, web, db


def test_runs_are_counted_once_and_ages_are_of_good_points(service: Service, tmp_path: Path) -> None:
    assert _samples(service)[("synvirt_backup_runs_ended_total", "backup", "failed")] == 0
    service.guests.image("web", CONTENT)
    job = _job(service, tmp_path / "repository", "web")
    assert ("synvirt_backup_oldest_guest_age_seconds", "nightly") not in _samples(service)
    run = _run(service, job)
    for _ in range(2):
        reported = _samples(service)
        assert reported[("synvirt_backup_runs_ended_total", "backup", "completed")] == 1
        assert reported[("synvirt_backup_read_bytes_total",)] == len(CONTENT)
        assert reported[("synvirt_backup_stored_bytes_total",)] == run.stored_bytes > 0
        assert reported[("synvirt_backup_points", "unverified")] == 1
        assert reported[("synvirt_backup_runs", "transferring")] == 0
    point = service.backups.points.get(run.restore_point_ids[0])
    service.backups.points.put(point.model_copy(update={"created_at": now() - timedelta(hours=5)}))
    ended(service.backups, service.backups.verify(point.id).id)
    reported = _samples(service)
    assert 5 * 3600 <= reported[("synvirt_backup_oldest_guest_age_seconds", "nightly")] < 6 * 3600
    assert reported[("synvirt_backup_points", "ok")] == 1
    assert reported[("synvirt_backup_runs_ended_total", "verify", "completed")] == 1


def test_a_job_that_never_succeeded_is_as_old_as_itself(service: Service, tmp_path: Path) -> None:
    service.guests.image("gone", CONTENT)
    job = _job(service, tmp_path / "repository", "gone")
    service.guests.remove("gone")
    service.backups._jobs.put(job.model_copy(update={"created_at": now() - timedelta(days=3)}))
    assert _run(service, job).status == "failed"
    reported = _samples(service)
    assert reported[("synvirt_backup_runs_ended_total", "backup", "failed")] == 1
    assert reported[("synvirt_backup_last_success_age_seconds", "nightly")] >= 3 * 24 * 3600
    service.guests.image("gone", CONTENT)
    assert _run(service, job).status == "completed"
    assert _samples(service)[("synvirt_backup_last_success_age_seconds", "nightly")] < 3600


def test_the_guest_that_is_worst_off_counts(service: Service, tmp_path: Path) -> None:
    _, web, _ = _two_guests(service, tmp_path / "repository")
    ended(service.backups, service.backups.verify(web.id).id)
    assert _samples(service)[("synvirt_backup_oldest_guest_age_seconds", "nightly")] == pytest.approx(9 * 3600, abs=1800)


@pytest.mark.parametrize("named_by", ["vm_name", "vm_id"])
def test_a_guest_that_left_its_job_counts_no_more(service: Service, tmp_path: Path, named_by: str) -> None:
    """Nobody makes a new point of it, so the alarm would stay until its last point is removed."""
    job, web, db = _two_guests(service, tmp_path / "repository")
    for members, oldest in (((web, db), 9), ((web,), 2), ((db,), 9)):
        ids = tuple(getattr(point, named_by) for point in members)
        service.backups._jobs.put(job.model_copy(update={"vm_ids": ids}))
        ended(service.backups, service.backups.verify(web.id).id)
        reported = _samples(service)[("synvirt_backup_oldest_guest_age_seconds", "nightly")]
        assert reported == pytest.approx(oldest * 3600, abs=1800)


def test_a_point_of_a_clock_that_was_ahead_keeps_no_alarm_silent(service: Service, tmp_path: Path) -> None:
    """Each number below is the age in hours of a guest's point. Where all are of the future, the job's own age counts."""
    service.guests.image("web", CONTENT)
    job = _job(service, tmp_path / "repository", "web")
    points = [service.backups.points.get(_run(service, job).restore_point_ids[0]) for _ in range(2)]
    service.backups._jobs.put(job.model_copy(update={"created_at": now() - timedelta(hours=99)}))
    for ages, oldest in (((40, -9000), 40), ((-9000, -8000), 99)):
        for point, hours in zip(points, ages, strict=True):
            service.backups.points.put(point.model_copy(update={"created_at": now() - timedelta(hours=hours)}))
        ahead = service.backups.job(job.id).model_copy(update={"last_success_at": now() + timedelta(hours=9000)})
        ended(service.backups, service.backups.verify(points[0].id).id)
        service.backups._jobs.put(ahead)
        reported = _samples(service)
        for name, hours in (("oldest_guest", oldest), ("last_success", 99)):
            assert reported[(f"synvirt_backup_{name}_age_seconds", "nightly")] == pytest.approx(hours * 3600, abs=1800)
