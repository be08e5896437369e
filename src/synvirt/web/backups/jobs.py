"""{base_url}/backups: jobs and their runs. Restore points and repositories: points.py, repositories.py next to this file."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar
from uuid import UUID

from fastapi import APIRouter
from starlette.responses import Response

from synvirt.api.paging import Cursor, number_of
from synvirt.backups.model import ENDS, BackupJob, BackupJobChange, BackupJobRequest, PointFate
from synvirt.backups.retiring import fates
from synvirt.backups.service import Backups
from synvirt.errors import BackupConflict, BackupNotFound, SynvirtError
from synvirt.jobs.instant import is_started
from synvirt.sizes import counted
from synvirt.web.backups.words import WORDS
from synvirt.web.fields import Field, fields, judged, mark_of, refuse_overtaken, typed, values
from synvirt.web.forms import Form, Sent
from synvirt.web.pages import Pages
from synvirt.web.words import moment

ON_A_PAGE = 100
# How many a job's own page shows; the pages of runs and of points show all.
LATEST = 20
# How many of the newest are searched for the job's own.
LOOKED_THROUGH = 1000

# Cancelling a run: the question, its meaning, the answer.
_CANCELLING = (
    "Cancel this run?",
    "What it has made so far is removed, or found by the next run and not stored twice. Older restore points stay.",
    "cancel it",
)
_LOSING = (
    "Stop the guest, and lose what it wrote?",
    "It was started at once, and runs. It is stopped, what it wrote is lost, its volumes are removed; the restore point stays.",
    "stop it, and lose that",
)

T = TypeVar("T")


def found(get: Callable[[UUID], T], id_: UUID | None) -> T | None:
    """The thing that a link leads to; None, if it is gone."""
    try:
        return None if id_ is None else get(id_)
    except BackupNotFound:
        return None


class BackupPages:
    """The pages of jobs and runs; `backups_router` has their paths."""

    def __init__(self, pages: Pages, backups: Backups) -> None:
        self._pages, self._backups = pages, backups

    # ── jobs ─────────────────────────────────────────────────────────────────────────────────────────────────────────

    def jobs(self, cursor: Cursor = None) -> Response:
        """The backup jobs, each with its last run."""
        jobs, following = self._backups.jobs(limit=ON_A_PAGE, cursor=number_of(cursor))
        runs = {job.last_run_id: run for job in jobs if (run := found(self._backups.runs.get, job.last_run_id)) is not None}
        known = {job.repository_id: found(self._backups.repositories.get, job.repository_id) for job in jobs}
        return self._pages.page(
            "backups/jobs.html",
            jobs=jobs,
            runs=runs,
            running=any(run.status not in ENDS for run in runs.values()),
            repositories={id_: one.name for id_, one in known.items() if one is not None},
            has_repository=bool(self._backups.repositories.known()),
            following=following,
            cursor=cursor,
        )

    def job(self, job_id: UUID) -> Response:
        """One job: its last runs and restore points."""
        job = self._backups.job(job_id)
        repository = found(self._backups.repositories.get, job.repository_id)
        of_job = {"job_id": [str(job_id)]}
        runs, _ = self._backups.runs.page(limit=LATEST, cursor=None, only=of_job)
        points, _ = self._backups.points.page(limit=LATEST, cursor=None, only=of_job)
        return self._pages.page(
            "backups/job.html",
            job=job,
            repository=repository.name if repository else "gone",
            runs=runs,
            points=points,
            fates=self._fates(job),
        )

    def _fates(self, job: BackupJob) -> dict[UUID, PointFate]:
        """What retention would do with each point now, by this host's data: a repository that is away is not waited for."""
        of_job = {"job_id": [str(job.id)], "repository_id": [str(job.repository_id)]}
        here = self._backups.points.all(of_job)
        protected = {point.id for point in here if point.protected}
        return {fate.restore_point_id: fate for fate in fates(here, job.retention, protected=protected)}

    def retire_asked(self, job_id: UUID) -> Response:
        """Asks whether to remove what retention does not keep, and lists it."""
        job = self._backups.job(job_id)
        going = [fate for fate in self._fates(job).values() if fate.removed]
        return self._pages.ask(
            "Remove what is not kept?",
            f"{job.name}: {counted(len(going), 'restore point')}",
            *(f"{fate.vm_name}, {moment(fate.created_at)}" for fate in going[:LATEST]),
            *([f"and {len(going) - LATEST} more"] if len(going) > LATEST else []),
            "The job's next run does the same at its end.",
            action=f"/backups/jobs/{job_id}/retire",
            back=f"/backups/jobs/{job_id}",
            yes="remove them",
            here="/backups",
            danger=True,
        )

    def retire(self, job_id: UUID) -> Response:
        """Removes what retention does not keep."""
        self._backups.retire(job_id)
        return self._pages.see(f"/backups/jobs/{job_id}")

    def empty_form(self) -> Response:
        return self._job_form()

    def _job_form(self, job: BackupJob | None = None, form: Form | None = None, error: SynvirtError | None = None) -> Response:
        shown = _JobFields.of(job)
        if form is not None:
            shown = shown.typed(form, error)
        return self._pages.page(
            "backups/job_form.html",
            status=error.status if error else 200,
            error=error,
            job=job,
            mark=mark_of(_JobFields.of(job).all),
            fields=shown,
            repositories=self._backups.repositories.known(),
            chosen=form.text("repository_id") if form else "",
        )

    def add_job(self, form: Sent) -> Response:
        """Makes a job; a form with mistakes comes back with them."""
        asked = _JobFields.of(None).values(form) | {"repository_id": form.text("repository_id")}
        try:
            job = self._backups.add_job(judged(BackupJobRequest, asked))
        except SynvirtError as error:
            return self._job_form(None, form, error)
        return self._pages.see(f"/backups/jobs/{job.id}")

    def change_form(self, job_id: UUID) -> Response:
        return self._job_form(self._backups.job(job_id))

    def change_job(self, job_id: UUID, form: Sent) -> Response:
        """Changes a job; a form with mistakes, or of a job that was changed since, comes back."""
        job = self._backups.job(job_id)

        def check(found: BackupJob) -> None:
            refuse_overtaken(_JobFields.of(found).all, form, BackupConflict)

        # An empty field means none: without its key, the old value would stay.
        asked = {"schedule": None} | _JobFields.of(job).values(form)
        try:
            check(job)
            self._backups.change_job(job_id, judged(BackupJobChange, asked), check=check)
        except SynvirtError as error:
            return self._job_form(job, form, error)
        return self._pages.see(f"/backups/jobs/{job_id}")

    def remove_job_asked(self, job_id: UUID) -> Response:
        """Asks whether to remove a job."""
        return self._pages.ask(
            "Remove this backup job?",
            self._backups.job(job_id).name,
            "Nothing is backed up by it any more. Its restore points stay.",
            action=f"/backups/jobs/{job_id}/remove",
            back=f"/backups/jobs/{job_id}",
            yes="remove it",
            here="/backups",
            danger=True,
        )

    def remove_job(self, job_id: UUID) -> Response:
        """Removes a job; its restore points stay."""
        self._backups.remove_job(job_id)
        return self._pages.see("/backups")

    def run_job(self, job_id: UUID) -> Response:
        return self._pages.see(f"/backups/runs/{self._backups.run_job(job_id).id}")

    # ── runs ─────────────────────────────────────────────────────────────────────────────────────────────────────────

    def runs(self, cursor: Cursor = None) -> Response:
        """The runs, newest first."""
        runs, following = self._backups.runs.page(limit=ON_A_PAGE, cursor=number_of(cursor))
        jobs, _ = self._backups.jobs(limit=LOOKED_THROUGH, cursor=None)
        return self._pages.page(
            "backups/runs.html",
            runs=runs,
            running=any(run.status not in ENDS for run in runs),
            jobs={job.id: job.name for job in jobs},
            following=following,
            cursor=cursor,
        )

    def run(self, run_id: UUID) -> Response:
        """One run, with its restore points."""
        run = self._backups.runs.get(run_id)
        points = (found(self._backups.points.get, point_id) for point_id in run.restore_point_ids)
        return self._pages.page(
            "backups/run.html",
            run=run,
            job=found(self._backups.job, run.job_id),
            repository=found(self._backups.repositories.get, run.repository_id),
            points=[point for point in points if point is not None],
        )

    def cancel_asked(self, run_id: UUID) -> Response:
        """Asks whether to cancel a run."""
        run, here = self._backups.runs.get(run_id), f"/backups/runs/{run_id}"
        question, meaning, yes = _LOSING if is_started(run.instant) else _CANCELLING
        hidden = [("guest_writes", "lose")] if is_started(run.instant) else []
        detail = f"It is {run.status}."
        return self._pages.ask(
            question, detail, meaning, action=f"{here}/cancel", back=here, yes=yes, here="/backups", danger=True, hidden=hidden
        )

    def cancel(self, run_id: UUID, form: Sent) -> Response:
        """Cancels a run; also if that loses what its guest wrote, if the answer allows it."""
        self._backups.runs.cancel(run_id, guest_writes="lose" if form.text("guest_writes") == "lose" else "keep")
        return self._pages.see(f"/backups/runs/{run_id}")


_RETENTION = type(BackupJobRequest.model_fields["retention"].default)


@dataclass(frozen=True, slots=True)
class _JobFields:
    """The parts of a job's form: what is backed up and when, running guests, retention."""

    first: list[Field]
    quiesce: list[Field]
    retention: list[Field]

    @classmethod
    def of(cls, job: BackupJob | None) -> "_JobFields":
        known = fields(BackupJobRequest, values=job.model_dump() if job else None)
        first = [one for one in known if one.key in ("name", "vm_ids", "schedule")]
        kept = fields(_RETENTION, "retention.", job.retention.model_dump() if job else None)
        return cls(first, [one for one in known if one.key == "quiesce"], kept)

    @property
    def all(self) -> list[Field]:
        return [*self.first, *self.quiesce, *self.retention]

    def typed(self, form: Form, error: SynvirtError | None) -> "_JobFields":
        return _JobFields(*(typed(known, form, error) for known in (self.first, self.quiesce, self.retention)))

    def values(self, form: Form) -> dict[str, Any]:
        return values([*self.first, *self.quiesce], form) | {"retention": values(self.retention, form)}


def backups_router(pages: Pages, backups: Backups) -> APIRouter:
    """The pages of jobs and runs."""
    made = BackupPages(pages, backups)
    pages.add_filters(*WORDS)
    return pages.router(
        {
            "GET /backups": made.jobs,
            "GET /backups/jobs/new": made.empty_form,
            "POST /backups/jobs/new": made.add_job,
            "GET /backups/jobs/{job_id}": made.job,
            "GET /backups/jobs/{job_id}/change": made.change_form,
            "POST /backups/jobs/{job_id}/change": made.change_job,
            "POST /backups/jobs/{job_id}/run": made.run_job,
            "GET /backups/jobs/{job_id}/retire": made.retire_asked,
            "POST /backups/jobs/{job_id}/retire": made.retire,
            "GET /backups/jobs/{job_id}/remove": made.remove_job_asked,
            "POST /backups/jobs/{job_id}/remove": made.remove_job,
            "GET /backups/runs": made.runs,
            "GET /backups/runs/{run_id}": made.run,
            "GET /backups/runs/{run_id}/cancel": made.cancel_asked,
            "POST /backups/runs/{run_id}/cancel": made.cancel,
        }
    )
