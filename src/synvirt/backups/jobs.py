"""Backup jobs as data: what they back up, when the schedule runs them, and their last run."""

from collections.abc import Callable
from datetime import datetime, timedelta
from uuid import UUID, uuid4

from synvirt.accounts import Role
from synvirt.acting import current
from synvirt.backups.model import ENDS, BackupJob, BackupJobChange, BackupJobRequest, BackupRun, Trigger
from synvirt.backups.retention import keeps_less
from synvirt.backups.schedule import next_time
from synvirt.errors import BackupForbidden, Interrupted
from synvirt.model.values import now
from synvirt.store.backups import BackupRows, Row
from synvirt.store.documents import parsed, readable

# A clock that was more than this ahead was wrong. After a smaller correction, times that were started are not repeated.
CLOCK_WRONG = timedelta(days=1)


class Jobs:
    """The backup jobs of this host, as documents in the store."""

    def __init__(self, rows: BackupRows, *, host: str) -> None:
        self._rows, self._host = rows, host

    def get(self, job_id: UUID) -> BackupJob:
        """BackupNotFound."""
        return _shown(parsed(BackupJob, self._rows.get("job", job_id, host=self._host)))

    def page(self, *, limit: int, cursor: int | None) -> tuple[list[BackupJob], int | None]:
        """A page of at most `limit` jobs, newest first, and the cursor of the next page; None: it was the last."""
        texts, following = self._rows.page("job", host=self._host, limit=limit, cursor=cursor)
        return [_shown(job) for job in readable(BackupJob, texts)], following

    def all(self) -> list[BackupJob]:
        return [_shown(job) for job in readable(BackupJob, self._rows.all("job", host=self._host))]

    def add(self, asked: BackupJobRequest) -> BackupJob:
        """A new job with a new id. Its schedule counts from now on."""
        at = now()
        fields = {name: getattr(asked, name) for name in type(asked).model_fields}
        return self.put(BackupJob(id=uuid4(), created_at=at, scheduled_to=at, **fields))

    def put(self, job: BackupJob) -> BackupJob:
        """Writes the job, and returns it as shown."""
        self._rows.put_all([self.row(job)], host=self._host)
        return _shown(job)

    def change(self, job_id: UUID, asked: BackupJobChange, check: Callable[[BackupJob], None]) -> BackupJob:
        """Checks and changes the job in one transaction, and returns it as shown. BackupNotFound."""

        def change(job: BackupJob) -> BackupJob:
            check(job)
            return changed(job, asked)

        return _shown(self._rows.change("job", job_id, BackupJob, change, host=self._host))

    def forget_run(self, run_id: UUID) -> None:
        """A job whose last run it is has none until it runs again: its schedule goes by `scheduled_to`, and an earlier run must
        not be made up for once more."""
        for job in self.all():
            if job.last_run_id == run_id:
                self.put(job.model_copy(update={"last_run_id": None}))

    def row(self, job: BackupJob) -> Row:
        return Row("job", job.id, job)

    def remove(self, job_id: UUID, check: Callable[[BackupJob], None]) -> None:
        self._rows.remove("job", job_id, host=self._host, check=lambda text: check(parsed(BackupJob, text)))


def changed(job: BackupJob, asked: BackupJobChange) -> BackupJob:
    """Changes only the fields that were sent. A new schedule counts from now: its earlier times are not made up for.
    BackupForbidden: the caller is no admin, and points would be removed that stay now."""
    _refuse_removing(job, asked)
    changes = {name: getattr(asked, name) for name in asked.model_fields_set}
    if changes.get("schedule", job.schedule) != job.schedule:
        changes["scheduled_to"] = now()
    return job.model_copy(update=changes)


def _refuse_removing(job: BackupJob, asked: BackupJobChange) -> None:
    """Each run removes what its job's retention does not keep, and only admins remove points. The service itself has no act."""
    act = current()
    if "retention" not in asked.model_fields_set or act is None or act.role.reaches(Role.ADMIN):
        return
    if keeps_less(job.retention, asked.retention):
        raise BackupForbidden(
            f"retention that keeps less removes restore points: this needs the role {Role.ADMIN}, "
            f"and {act.account} has the role {act.role}",
            hint="ask an admin of this service; retention that keeps more needs no admin",
        )


def due(job: BackupJob, last: BackupRun | None, moment: datetime) -> Trigger | None:
    """Why the schedule runs the job now. Several missed times give one run.

    A run that was interrupted by the service's end is made up for once: a run that itself ends the service must not repeat
    forever.
    """
    if job.schedule is None or (last is not None and last.status not in ENDS):
        return None
    if last is not None and last.error is not None and (last.error.code, last.trigger) == (Interrupted.code, "schedule"):
        return "again"
    return "schedule" if time_has_come(job, moment) else None


def time_has_come(job: BackupJob, moment: datetime) -> bool:
    return job.schedule is not None and next_time(job.schedule, job.scheduled_to or job.created_at) <= moment


def righted(job: BackupJob, moment: datetime) -> BackupJob:
    """Corrects the job's times after a clock that was far ahead."""
    was_wrong = job.scheduled_to is not None and job.scheduled_to - moment > CLOCK_WRONG
    return job.model_copy(update={"scheduled_to": moment}) if was_wrong else job


def _shown(job: BackupJob) -> BackupJob:
    """The job with its next run."""
    at = None if job.schedule is None else next_time(job.schedule, job.scheduled_to or job.created_at)
    return job.model_copy(update={"next_run_at": at})
