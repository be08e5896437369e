"""{base_url}/api/v1/migrator/migrations: submit, list, load, cancel, cut over, repair, and the stream of updates.

Endpoints are `def` if they block (the store, the intake), so that the framework runs them in threads.
"""

from collections.abc import AsyncIterator, Callable
from typing import Annotated, Any, Literal
from uuid import UUID

from fastapi import APIRouter, Depends, Header, Query, Request, Response
from fastapi.concurrency import run_in_threadpool
from fastapi.sse import EventSourceResponse
from starlette.responses import StreamingResponse

from synvirt.api.paging import Cursor, Sought, number_of
from synvirt.api.received import documented, json_body, optional_json_body
from synvirt.api.routing import Routes
from synvirt.api.stream import STREAM_HEADERS, Feed, Pace, as_json, event_id_of
from synvirt.jobs.board import Board
from synvirt.jobs.instant import GuestWrites
from synvirt.migrations.intake import Intake, still
from synvirt.migrations.planning.foreseen import DryRun
from synvirt.migrations.planning.retrying import merged
from synvirt.migrations.removing import Volumes
from synvirt.model.job import Migration, Progress, ProgressUpdate
from synvirt.model.kinds import State
from synvirt.model.machine import DiskBus
from synvirt.model.plan import PlanEnvelope, RetryRequest
from synvirt.model.values import Model
from synvirt.store.documents import Unreadable, as_answered, parsed
from synvirt.store.filters import Only

# The specification's list is "all migrations": a page holds a large host's jobs of years, and limits our memory.
PAGE_LIMIT = 5000
# Some hundreds of kilobytes, in memory that is used again for the next piece.
JOBS_A_PIECE = 64
# `{"id":"` and then the UUID's 36 characters: a Migration's document begins with its id.
_ID_IN_DOCUMENT = slice(7, 7 + 36)

STREAM_DOCUMENTED: dict[int | str, dict[str, Any]] = {
    200: {
        "description": "Server-sent events without an end. `event: migration` has the whole Migration and an `id` that grows, "
        "at each change of `state` or `last_error`; `event: progress` has a ProgressUpdate and no id, at most twice a second "
        "a job; a comment line comes every 15 s. A new client first gets every job that has not ended (with `migration_id`: "
        "that job, ended or not, and it ends once that is removed). `Last-Event-ID` replays what was missed.",
        "content": {
            "text/event-stream": {
                "schema": {"type": "string"},
                "x-events": {
                    "migration": {"$ref": "#/components/schemas/Migration"},
                    "progress": {"$ref": "#/components/schemas/ProgressUpdate"},
                },
            }
        },
    }
}

DRY_RUN_DOCUMENTED: dict[int | str, dict[str, Any]] = {
    200: {
        "model": DryRun,
        "description": "With `dry_run`: the plan as it would run, what is wrong with it, and no job",
    }
}


class MigrationPage(Model):
    """Newest first. `next_cursor` of the last page is null; otherwise send it as `?cursor=`."""

    items: tuple[Migration, ...]
    next_cursor: str | None


def _second_ways(router: APIRouter, intake: Intake) -> None:
    """Further actions on a job that has ended, or whose host is lost."""

    @router.post("/{migration_id}/take-over", response_model=Migration)
    def take_over(
        migration_id: UUID,
        restart: Annotated[bool, Query(description="start over here, with new volumes, instead of going on")] = False,
    ) -> Migration:
        """Continue the job of a fenced host here, in whatever state it is, or start it over. Do this only if that host and its
        guests are off. Answers the job that goes on, which is a new one where it starts over; 409 where it cannot."""
        return intake.take_over(migration_id, restart=restart)

    @router.post(
        "/{migration_id}/retry",
        status_code=201,
        response_model=Migration,
        openapi_extra=documented(RetryRequest, required=False),
    )
    def retry(
        correction: Annotated[RetryRequest, Depends(optional_json_body(RetryRequest))],
        migration_id: UUID,
        request: Request,
        response: Response,
        *,
        conversion: Annotated[Literal["auto", "always", "never"] | None, Query(description="in place of the plan's")] = None,
        disk_bus: Annotated[DiskBus | None, Query(description="in place of the plan's")] = None,
    ) -> Migration:
        """Try a failed job again, with another plan where the body has a patch of it. A job that kept its volumes: a new job
        goes on with them, and has `retry_of`; what the copy was made by (`source`, `source_ref`, `target.destination`,
        and an Offline job's `mode` and `skip_disks`) is as it was. Of an Offline job nothing is copied again; of a Live job,
        whose guest has gone on since, whole disks are read and compared, and what differs is written. Every other job
        starts over; `source` and `source_ref` are as they were. A job that has not failed, or that needs a password again, or
        whose machine another job is at work on: 409."""
        job = intake.retry(migration_id, merged(correction.plan, _patch(conversion, disk_bus)))
        response.headers["Location"] = f"{request.url.path.rsplit('/', 2)[0]}/{job.id}"
        return job

    @router.post("/{migration_id}/repair", status_code=201, response_model=Migration)
    def repair(
        migration_id: UUID,
        request: Request,
        response: Response,
        *,
        check_only: Annotated[
            bool, Query(description="Report what differs; write nothing, and do not read the source")
        ] = False,
    ) -> Migration:
        """Compare the volumes of a completed job with its receipt, and repair what differs from their source. Answers a new
        job, whose `repair` says what was found, by offset. The source is read only where a volume differs, and its bytes are
        written only where their hash is the receipt's; else the job fails, and names the extents. 409, where the guest runs;
        without `check_only` also where it was ever started or converted, since the receipt is of the moment before; and where
        receipt, volumes or source are not there, or another repair of the job is under way."""
        job = intake.repair(migration_id, check_only=check_only)
        response.headers["Location"] = f"{request.url.path.rsplit('/', 2)[0]}/{job.id}"
        return job


def migrations_router(intake: Intake, *, stopping: Callable[[], bool], pace: Pace) -> APIRouter:
    """The routes under /migrations, and their stream. `stopping`: whether the service ends; streams end then."""
    router = Routes(prefix="/migrations", tags=["migrations"])
    store, board = intake.store, intake.board

    def update(id_: UUID, state: State, progress: Progress) -> ProgressUpdate:
        return ProgressUpdate(id=id_, state=state, progress=progress, disks=board.disks(id_, state))

    feed = Feed(store, board, as_json("migration", update), stopping=stopping, pace=pace, elsewhere=intake.figures_elsewhere)

    @router.post(
        "", status_code=201, response_model=Migration, openapi_extra=documented(PlanEnvelope), responses=DRY_RUN_DOCUMENTED
    )
    def submit(
        envelope: Annotated[PlanEnvelope, Depends(json_body(PlanEnvelope))],
        request: Request,
        response: Response,
        dry_run: Annotated[bool, Query(description="Show how it would run and what is wrong with it; create no job")] = False,
    ) -> Migration | Response:
        """Submit a plan. All of it is checked, and it becomes a job at once, in state Queued."""
        if dry_run:
            return Response(intake.dry_run(envelope.plan).model_dump_json(), media_type="application/json")
        job = intake.submit(envelope.plan)
        response.headers["Location"] = f"{request.url.path}/{job.id}"
        return job

    @router.get("", response_model=MigrationPage)
    def list_migrations(  # noqa: PLR0917 - the framework passes them by name
        limit: Annotated[int, Query(ge=1, le=PAGE_LIMIT)] = PAGE_LIMIT,
        cursor: Cursor = None,
        state: Annotated[list[State] | None, Query(description="Only jobs in one of these states")] = None,
        name: Annotated[Sought | None, Query(description="Only jobs of this name")] = None,
        source_id: Annotated[UUID | None, Query(description="Only jobs of this source")] = None,
        wave_id: Annotated[UUID | None, Query(description="Only jobs of this wave")] = None,
        host: Annotated[Sought | None, Query(description="Only jobs that this host has: its id")] = None,
    ) -> Response:
        """List all migrations, newest first."""
        only = Only(states=tuple(state or ()), name=name, source_id=source_id, wave_id=wave_id, host=host)
        documents, following = store.documents(limit=limit, cursor=number_of(cursor), only=only)
        return StreamingResponse(page(documents, following, board, intake.standing()), media_type="application/json")

    @router.get("/stream", response_class=StreamingResponse, responses=STREAM_DOCUMENTED)
    async def stream(
        migration_id: UUID | None = None, last_event_id: Annotated[str | None, Header(alias="Last-Event-ID")] = None
    ) -> Response:
        """Follow the jobs as they move."""
        if migration_id is not None:
            await run_in_threadpool(store.get, migration_id)  # NotFound now, as a problem, instead of a silent stream
        happening = feed.follow(job_id=migration_id, last_event_id=event_id_of(last_event_id))
        return EventSourceResponse(happening, headers=STREAM_HEADERS)

    @router.get("/{migration_id}", response_model=Migration)
    def load(migration_id: UUID) -> Migration:
        """Load one migration, with the newest progress."""
        return intake.as_now([store.get(migration_id)])[0]

    @router.delete("/{migration_id}", status_code=204)
    def remove(
        migration_id: UUID,
        volumes: Annotated[Volumes | None, Query(description="what happens to the volumes that a failed job kept")] = None,
    ) -> None:
        """Remove an ended job. If it failed and kept its volumes, `volumes` must say whether to keep or destroy them: 409
        without it. A job that has not ended, or still has to tidy up at its source: 409."""
        intake.remove(migration_id, volumes)

    @router.post("/{migration_id}/cancel", status_code=202, response_model=Migration)
    def cancel(migration_id: UUID, guest_writes: Annotated[GuestWrites, Query()] = "keep") -> Migration:
        """Ask a job to stop. It ends in Cancelled once everything that it made is removed. A job that has ended: 409. If an
        instant start has started its guest, what the guest wrote would be lost: 409 without `guest_writes=lose`."""
        return board.current(intake.cancel(migration_id, guest_writes=guest_writes))

    _second_ways(router, intake)

    @router.post("/{migration_id}/cutover", status_code=202, response_model=Migration)
    def cutover(migration_id: UUID) -> Migration:
        """Let a job with `warm.cutover` manual cut over: after its present pass, once it has a slot.
        `cutover_request` says since when it is asked."""
        return board.current(intake.cutover(migration_id))

    return router


async def page(documents: list[str], following: int | None, board: Board, standing: frozenset[UUID]) -> AsyncIterator[bytes]:
    """Makes the list's answer by joining texts: only running jobs, whose progress is on the board, are parsed, and those
    `standing` that wait for a lost host.

    In pieces: thousands of jobs are tens of megabytes, and one piece would take ten times as long.
    """
    running = {str(id_) for id_ in (*board.latest(), *standing)}

    def as_now(stored: str) -> str:
        document = as_answered(stored)
        if document[_ID_IN_DOCUMENT] not in running:
            return document
        try:
            job = board.current(parsed(Migration, document))
        except Unreadable:  # a later version on another host may have written it; the list has begun, and the others are in it
            return document
        return (still(job) if job.id in standing else job).model_dump_json()

    before = '{"items":['
    for start in range(0, len(documents), JOBS_A_PIECE):
        piece = map(as_now, documents[start : start + JOBS_A_PIECE])
        yield (before + ",".join(piece)).encode()
        before = ","
    cursor = f'"{following}"' if following is not None else "null"
    yield f'{before if not documents else ""}],"next_cursor":{cursor}}}'.encode()


def _patch(conversion: str | None, disk_bus: str | None) -> dict[str, Any]:
    """The patch in the query."""
    patch: dict[str, Any] = {} if conversion is None else {"conversion": conversion}
    return patch if disk_bus is None else patch | {"target": {"disk_bus": disk_bus}}
