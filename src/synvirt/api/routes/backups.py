"""{base_url}/api/v1/backup: repositories, jobs, runs, restore points. All of it blocks, and runs in threads."""

from collections.abc import Callable
from typing import Annotated, Any, Generic, TypeVar
from uuid import UUID

from fastapi import APIRouter, Depends, FastAPI, Header, Query, Request, Response
from fastapi.concurrency import run_in_threadpool
from fastapi.sse import EventSourceResponse
from starlette.responses import StreamingResponse

from synvirt.api.backup_metrics import BackupMetrics
from synvirt.api.document import BEGUN, problem_described
from synvirt.api.paging import PAGE_LIMIT, Cursor, LastName, Limit, Sought, cursor_of, named_page, number_of
from synvirt.api.received import documented, json_body
from synvirt.api.routes.peer import peer_router
from synvirt.api.routing import Routes
from synvirt.api.stream import STREAM_HEADERS, Feed, Pace, as_json, event_id_of
from synvirt.api.strict import known_parameters
from synvirt.api.tags import IfMatch, Tags
from synvirt.backups.model import (
    BackupJob,
    BackupJobChange,
    BackupJobRequest,
    BackupRepository,
    BackupRepositoryChange,
    BackupRepositoryRequest,
    BackupRun,
    Bandwidth,
    PointFate,
    PointState,
    RecoveryKey,
    RestorePoint,
    RestorePointChange,
    RestoreRequest,
    RunKind,
    RunUpdate,
    SealedKey,
    SealedKeyRequest,
    Status,
)
from synvirt.backups.offers import BackupOffer
from synvirt.backups.retention import Retention
from synvirt.backups.service import Backups
from synvirt.errors import BackupBadRequest, BackupNotFound
from synvirt.jobs.instant import GuestWrites
from synvirt.migrations.removing import Volumes
from synvirt.model.job import Progress
from synvirt.model.values import Model
from synvirt.settings import Settings

Item = TypeVar("Item", bound=Model)


class Page(Model, Generic[Item]):
    """Newest first. `next_cursor` of the last page is null; otherwise send it as `?cursor=`."""

    items: tuple[Item, ...]
    next_cursor: str | None


class BackupRepositoryPage(Page[BackupRepository]):
    __doc__ = Page.__doc__


class BackupJobPage(Page[BackupJob]):
    __doc__ = Page.__doc__


class BackupRunPage(Page[BackupRun]):
    __doc__ = Page.__doc__


class RestorePointPage(Page[RestorePoint]):
    __doc__ = Page.__doc__


class BackupOffers(Model):
    """The offers of this host, by name. `next_cursor` of the last page is null; otherwise send it as `?cursor=`."""

    items: tuple[BackupOffer, ...]
    next_cursor: str | None = None


class RetentionPlan(Model):
    """The restore points of a job, newest first: which of them go, and why each of the others stays."""

    items: tuple[PointFate, ...]


_PROBLEMS: dict[int | str, dict[str, Any]] = {
    400: problem_described("E_BAK_BAD_REQUEST, E_BAK_KEY_WRONG: what was sent cannot be used"),
    404: problem_described("E_BAK_NOT_FOUND: there is no such object"),
    409: problem_described("E_BAK_CONFLICT, E_BAK_SOURCE_RUNNING: the request does not fit the present state"),
    502: problem_described("E_BAK_REPOSITORY_UNREACHABLE: the repository cannot be reached"),
}

STREAM_DOCUMENTED: dict[int | str, dict[str, Any]] = {
    200: {
        "description": "Server-sent events without an end. `event: run` has the whole BackupRun and an `id` that grows, at "
        "each change of `status` and each warning; `event: progress` has a RunUpdate and no id, at most twice a second per "
        "run; a comment line comes every 15 s. A new client first gets every run that has not ended (with `run_id`: that run, "
        "ended or not). `Last-Event-ID` replays what was missed.",
        "content": {
            "text/event-stream": {
                "schema": {"type": "string"},
                "x-events": {
                    "run": {"$ref": "#/components/schemas/BackupRun"},
                    "progress": {"$ref": "#/components/schemas/RunUpdate"},
                },
            }
        },
    }
}


def _placed(request: Request, response: Response) -> Callable[[BackupRun], BackupRun]:
    """Gives the run that the request began, and says in the answer where it is. The path: /backup/THINGS/ID/VERB."""

    def placed(run: BackupRun) -> BackupRun:
        response.headers["Location"] = f"{request.url.path.rsplit('/', 3)[0]}/runs/{run.id}"
        return run

    return placed


Placed = Annotated[Callable[[BackupRun], BackupRun], Depends(_placed)]


def mount(app: FastAPI, backups: Backups, settings: Settings, *, pace: Pace | None = None) -> None:
    """At {base_url}/api/v1/backup: behind the same gate as the rest, and in the same document."""
    BackupMetrics(backups, app.state.metrics.registry)
    base_url = settings.base_url.strip("/")
    prefix = f"{'/' if base_url else ''}{base_url}/api/v1"
    app.include_router(backups_router(backups, stopping=app.state.stopping.is_set, pace=pace or Pace()), prefix=prefix)
    app.include_router(peer_router(backups.offers.by_name), prefix=prefix)


def backups_router(backups: Backups, *, stopping: Callable[[], bool], pace: Pace) -> APIRouter:
    """The routes under /backup."""
    router = Routes(prefix="/backup", tags=["backup"], responses=_PROBLEMS, dependencies=[Depends(known_parameters)])
    _repositories(router, backups)
    _offers(router, backups)
    _jobs(router, backups)
    _retention(router, backups)
    _stream(router, backups, stopping=stopping, pace=pace)
    _runs(router, backups)
    _points(router, backups)
    return router


def _repositories(router: APIRouter, backups: Backups) -> None:
    @router.post(
        "/repositories", status_code=201, response_model=BackupRepository, openapi_extra=documented(BackupRepositoryRequest)
    )
    def add_repository(
        repository: Annotated[BackupRepositoryRequest, Depends(json_body(BackupRepositoryRequest))],
        request: Request,
        response: Response,
    ) -> BackupRepository:
        """Make a repository in an empty folder, or use an existing one with its recovery key. Write down the key of a new
        one."""
        made = backups.add_repository(repository)
        response.headers["Location"] = f"{request.url.path}/{made.id}"
        return made

    @router.get("/repositories", response_model=BackupRepositoryPage)
    def list_repositories(limit: Limit = PAGE_LIMIT, cursor: Cursor = None) -> BackupRepositoryPage:
        """List the repositories, newest first, each with what is found there now."""
        items, following = backups.repositories.page(limit=limit, cursor=number_of(cursor, BackupBadRequest))
        return BackupRepositoryPage(items=tuple(items), next_cursor=cursor_of(following))

    @router.get("/repositories/{repository_id}", response_model=BackupRepository)
    def load_repository(repository_id: UUID, tags: Tags) -> BackupRepository:
        """Load one repository."""
        stored, sealed = backups.repositories.stored(repository_id)
        return tags(backups.repositories.shown(stored), sealed)

    @router.patch(
        "/repositories/{repository_id}", response_model=BackupRepository, openapi_extra=documented(BackupRepositoryChange)
    )
    def change_repository(
        repository_id: UUID,
        change: Annotated[BackupRepositoryChange, Depends(json_body(BackupRepositoryChange))],
        tags: IfMatch,
    ) -> BackupRepository:
        """Change a repository: rename it, or say where it lies now, which certificate its peer shows, and by which account it
        is used. What lies there must open with its key; its restore points that are not known are registered. 409 while a run
        uses it."""
        return backups.change_repository(repository_id, change, check=tags.check)

    @router.delete("/repositories/{repository_id}", status_code=204)
    def forget_repository(repository_id: UUID, tags: IfMatch) -> None:
        """Forget a repository. Its content stays, and so does its key. 409 while jobs write to it, or a run uses it."""
        backups.forget_repository(repository_id, check=tags.check)

    @router.post("/repositories/{repository_id}/verify", status_code=202, response_model=BackupRun, responses=BEGUN)
    def verify_repository(repository_id: UUID, placed: Placed) -> BackupRun:
        """Read a whole repository, and compare it with its hashes. The run's `report` says what is wrong."""
        return placed(backups.verify_repository(repository_id))

    @router.post("/repositories/{repository_id}/collect", status_code=202, response_model=BackupRun, responses=BEGUN)
    def collect_garbage(
        repository_id: UUID,
        placed: Placed,
        dry_run: Annotated[bool, Query(description="remove nothing, only count")] = False,
        bandwidth_bps: Annotated[Bandwidth | None, Query(description="the most bytes that it reads a second")] = None,
    ) -> BackupRun:
        """Remove what no restore point needs, in two steps a day apart, as each backup run does: `collected` of the run."""
        return placed(backups.collect(repository_id, dry_run=dry_run, bandwidth_bps=bandwidth_bps))

    @router.get("/repositories/{repository_id}/recovery-key", response_model=RecoveryKey)
    def recovery_key(repository_id: UUID) -> RecoveryKey:
        """Show the recovery key, which opens the repository without this host. Keep it elsewhere."""
        return RecoveryKey(recovery_key=backups.repositories.recovery_key(repository_id))

    @router.post("/repositories/{repository_id}/change-key", response_model=RecoveryKey)
    def change_repository_key(repository_id: UUID) -> RecoveryKey:
        """Give the repository a new key. Everything is written with it from now on, and it opens what is there too. The answer
        is the new recovery key. 409 while a run uses the repository."""
        return RecoveryKey(recovery_key=backups.change_key(repository_id))

    @router.post(
        "/repositories/{repository_id}/sealed-key", response_model=SealedKey, openapi_extra=documented(SealedKeyRequest)
    )
    def seal_repository_key(
        repository_id: UUID, sealing: Annotated[SealedKeyRequest, Depends(json_body(SealedKeyRequest))]
    ) -> SealedKey:
        """A copy of the repository's key that is sealed by a passphrase, or bound to this host."""
        return SealedKey(sealed_key=backups.repositories.sealed_copy(repository_id, sealing))


def _offers(router: APIRouter, backups: Backups) -> None:
    @router.get("/offers", response_model=BackupOffers)
    def list_offers(limit: Limit = PAGE_LIMIT, cursor: LastName = None) -> BackupOffers:
        """List the folders that this host keeps for other SynVirts, each with what is found there now."""
        names, following = named_page(backups.offers.names(), str, limit=limit, cursor=cursor, refused=BackupBadRequest)
        return BackupOffers(items=tuple(map(backups.offers.get, names)), next_cursor=following)

    @router.get("/offers/{offer}", response_model=BackupOffer)
    def load_offer(offer: str) -> BackupOffer:
        """Load one offer."""
        return backups.offers.get(offer)

    @router.delete("/offers/{offer}/protections/{point_id}", status_code=204)
    def release_offered_point(offer: str, point_id: UUID) -> None:
        """Take the protection off a restore point that is kept here for another SynVirt. Its own account cannot."""
        backups.offers.release(offer, point_id)


def _jobs(router: APIRouter, backups: Backups) -> None:
    @router.post("/jobs", status_code=201, response_model=BackupJob, openapi_extra=documented(BackupJobRequest))
    def add_backup_job(
        job: Annotated[BackupJobRequest, Depends(json_body(BackupJobRequest))], request: Request, response: Response
    ) -> BackupJob:
        """Make a backup job. Without a schedule nothing runs until it is asked for."""
        made = backups.add_job(job)
        response.headers["Location"] = f"{request.url.path}/{made.id}"
        return made

    @router.get("/jobs", response_model=BackupJobPage)
    def list_backup_jobs(limit: Limit = PAGE_LIMIT, cursor: Cursor = None) -> BackupJobPage:
        """List the backup jobs, newest first."""
        items, following = backups.jobs(limit=limit, cursor=number_of(cursor, BackupBadRequest))
        return BackupJobPage(items=tuple(items), next_cursor=cursor_of(following))

    @router.get("/jobs/{job_id}", response_model=BackupJob)
    def load_backup_job(job_id: UUID, tags: Tags) -> BackupJob:
        """Load one backup job."""
        return tags(backups.job(job_id))

    @router.patch("/jobs/{job_id}", response_model=BackupJob, openapi_extra=documented(BackupJobChange))
    def change_backup_job(
        job_id: UUID, change: Annotated[BackupJobChange, Depends(json_body(BackupJobChange))], tags: IfMatch
    ) -> BackupJob:
        """Change a backup job: what is not sent stays as it is. A run that is under way goes on as it began. Retention that
        keeps less removes restore points at the next run's end: that needs the role admin (403)."""
        return backups.change_job(job_id, change, check=tags.check)

    @router.delete("/jobs/{job_id}", status_code=204)
    def remove_backup_job(job_id: UUID, tags: IfMatch) -> None:
        """Remove a backup job; its restore points stay. 409 while it runs."""
        backups.remove_job(job_id, check=tags.check)

    @router.post("/jobs/{job_id}/run", status_code=202, response_model=BackupRun, responses=BEGUN)
    def run_backup_job(job_id: UUID, placed: Placed) -> BackupRun:
        """Start a run of a backup job; no body. 409 while it runs."""
        return placed(backups.run_job(job_id))


def _retention(router: APIRouter, backups: Backups) -> None:
    @router.get("/jobs/{job_id}/retention", response_model=RetentionPlan)
    def preview_retention(job_id: UUID, lines: Annotated[Retention, Query()]) -> RetentionPlan:
        """Show what retention would remove now, without removing it: by the job's own rules, or by those of the query, if
        any."""
        chosen = lines if lines.model_fields_set else None
        return RetentionPlan(items=tuple(backups.retiring.planned(backups.job(job_id), chosen)))

    @router.post("/jobs/{job_id}/retention", response_model=RetentionPlan)
    def apply_retention(job_id: UUID) -> RetentionPlan:
        """Remove what the job's retention does not keep, as each of its runs does. 409 while it runs."""
        return RetentionPlan(items=tuple(backups.retire(job_id)))


def _stream(router: APIRouter, backups: Backups, *, stopping: Callable[[], bool], pace: Pace) -> None:
    def update(id_: UUID, status: Status, progress: Progress) -> RunUpdate:
        return RunUpdate(id=id_, status=status, progress=progress)

    feed = Feed(backups.runs, backups.runs.figures, as_json("run", update), stopping=stopping, pace=pace)

    @router.get("/runs/stream", response_class=StreamingResponse, responses=STREAM_DOCUMENTED)
    async def stream_runs(
        run_id: UUID | None = None, last_event_id: Annotated[str | None, Header(alias="Last-Event-ID")] = None
    ) -> Response:
        """Follow the runs as they move."""
        if run_id is not None:
            await run_in_threadpool(backups.runs.get, run_id)  # BackupNotFound now, as a problem, instead of a silent stream
        happening = feed.follow(job_id=run_id, last_event_id=event_id_of(last_event_id))
        return EventSourceResponse(happening, headers=STREAM_HEADERS)


def _runs(router: APIRouter, backups: Backups) -> None:
    @router.get("/runs", response_model=BackupRunPage)
    def list_runs(
        limit: Limit = PAGE_LIMIT,
        cursor: Cursor = None,
        status: Annotated[list[Status] | None, Query(description="Only runs with one of these")] = None,
        kind: Annotated[list[RunKind] | None, Query(description="Only runs of one of these kinds")] = None,
        job_id: Annotated[UUID | None, Query(description="Only runs of this job")] = None,
    ) -> BackupRunPage:
        """List the runs, newest first: backups, restores and verifications."""
        only = _only(status=status, kind=kind, job_id=job_id)
        items, following = backups.runs.page(limit=limit, cursor=number_of(cursor, BackupBadRequest), only=only)
        return BackupRunPage(items=tuple(items), next_cursor=cursor_of(following))

    @router.get("/runs/{run_id}", response_model=BackupRun)
    def load_run(run_id: UUID) -> BackupRun:
        """Load one run, with its progress."""
        return backups.runs.get(run_id)

    @router.delete("/runs/{run_id}", status_code=204)
    def remove_run(
        run_id: UUID,
        volumes: Annotated[
            Volumes | None, Query(description="as for migrations; an ended run has kept none of its own")
        ] = None,
    ) -> None:
        """Remove the record of a run that has ended. Its restore points stay, and so does what it restored, whatever `volumes`
        says. 409 while it runs."""
        backups.remove_run(run_id)

    @router.post("/runs/{run_id}/cancel", status_code=202, response_model=BackupRun)
    def cancel_run(run_id: UUID, guest_writes: Annotated[GuestWrites, Query()] = "keep") -> BackupRun:
        """Ask a run to stop. 409 where it has ended, and for a restore whose guest was started at once, since what that
        wrote would be lost: `guest_writes=lose` asks for it."""
        return backups.runs.cancel(run_id, guest_writes=guest_writes)


def _only(**wanted: object) -> dict[str, list[str]]:
    """The filter of a list: the values that each field may have."""
    given = {name: value if isinstance(value, list) else [value] for name, value in wanted.items() if value is not None}
    return {name: [str(value) for value in values] for name, values in given.items()}


def _points(router: APIRouter, backups: Backups) -> None:
    @router.get("/restore-points", response_model=RestorePointPage)
    def list_restore_points(  # noqa: PLR0917 - the framework passes them by name
        limit: Limit = PAGE_LIMIT,
        cursor: Cursor = None,
        vm_id: Annotated[Sought | None, Query(description="Only points of this guest: its UUID")] = None,
        vm_name: Annotated[Sought | None, Query(description="Only points of guests of this name")] = None,
        job_id: Annotated[UUID | None, Query(description="Only points that this job made")] = None,
        repository_id: Annotated[UUID | None, Query(description="Only points in this repository")] = None,
        state: Annotated[list[PointState] | None, Query(description="Only points in one of these states")] = None,
    ) -> RestorePointPage:
        """List the restore points, newest first."""
        only = _only(vm_id=vm_id, vm_name=vm_name, job_id=job_id, repository_id=repository_id, state=state)
        items, following = backups.points.page(limit=limit, cursor=number_of(cursor, BackupBadRequest), only=only)
        return RestorePointPage(items=tuple(items), next_cursor=cursor_of(following))

    @router.get("/restore-points/{point_id}", response_model=RestorePoint)
    def load_restore_point(point_id: UUID, tags: Tags) -> RestorePoint:
        """Load one restore point."""
        return tags(backups.points.get(point_id))

    @router.patch("/restore-points/{point_id}", response_model=RestorePoint, openapi_extra=documented(RestorePointChange))
    def protect_restore_point(
        point_id: UUID, change: Annotated[RestorePointChange, Depends(json_body(RestorePointChange))], tags: IfMatch
    ) -> RestorePoint:
        """Protect a restore point from retention and removal, or take the protection off it."""
        return backups.protect(point_id, change, check=tags.check)

    @router.delete("/restore-points/{point_id}", status_code=204)
    def remove_restore_point(point_id: UUID, tags: IfMatch) -> None:
        """Remove a restore point. What only it needs is collected by a later run. 409 where it is protected, and while it
        is restored, verified or boot-tested."""
        backups.remove_point(point_id, check=tags.check)

    @router.post("/restore-points/{point_id}/verify", status_code=202, response_model=BackupRun, responses=BEGUN)
    def verify_restore_point(point_id: UUID, placed: Placed) -> BackupRun:
        """Read a whole restore point, and compare it with its hashes. The run fails if it is damaged."""
        return placed(backups.verify(point_id))

    @router.post(
        "/restore-points/{point_id}/restore",
        status_code=202,
        response_model=BackupRun,
        openapi_extra=documented(RestoreRequest),
        responses=BEGUN,
    )
    def restore_point(
        point_id: UUID, restore: Annotated[RestoreRequest, Depends(json_body(RestoreRequest))], placed: Placed
    ) -> BackupRun:
        """Restore a point: to files in a new folder, to a new domain, or in place to its own guest, which must be shut off."""
        return placed(backups.restore(point_id, restore))

    @router.post("/restore-points/{point_id}/boot-test", status_code=202, response_model=BackupRun, responses=BEGUN)
    def boot_test_restore_point(point_id: UUID, placed: Placed) -> BackupRun:
        """Start a point's guest next to the others, without a network, and see whether it boots. Only the result stays, as the
        point's `boot_test`."""
        return placed(backups.boot_test(point_id))

    @router.get(
        "/restore-points/{point_id}/screenshot",
        response_class=Response,
        responses={200: {"content": {"image/png": {}}, "description": "The guest's screen at the end of its last boot test"}},
    )
    def restore_point_screenshot(point_id: UUID) -> Response:
        """The screen of a point's last boot test. 404 where there is none."""
        picture = backups.screenshot(point_id)
        if picture is None:
            raise BackupNotFound(f"restore point {point_id} has no screenshot", hint="a boot test that has ended leaves one")
        return Response(picture, media_type="image/png", headers={"X-Content-Type-Options": "nosniff"})
