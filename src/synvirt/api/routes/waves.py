"""{base_url}/api/v1/waves: make waves, start them, hold them, roll members back. All of it blocks, and runs in threads."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal
from uuid import UUID

from fastapi import APIRouter, Depends, FastAPI, Header, Query, Request, Response
from fastapi.concurrency import run_in_threadpool
from fastapi.sse import EventSourceResponse
from starlette.responses import StreamingResponse

from synvirt.api.document import ETAG, problem_described
from synvirt.api.paging import PAGE_LIMIT, Cursor, Limit, Number, Sought, cursor_of, number_of
from synvirt.api.received import bounded, documented, json_body, optional_json_body
from synvirt.api.routing import Routes
from synvirt.api.stream import STREAM_HEADERS, Feed, Pace, as_json, event_id_of
from synvirt.api.strict import known_parameters
from synvirt.api.tags import IfMatch, Tagged, tag_of_text
from synvirt.errors import NotFound, UnsupportedMediaType
from synvirt.fleet.forecasting import Forecaster, WaveSimulation, WhatIf
from synvirt.fleet.model import (
    ApprovalRequest,
    Delivery,
    Member,
    MemberId,
    MemberRequest,
    MemberState,
    RollBackRequest,
    Wave,
    WaveRequest,
    WaveRetryRequest,
    WaveState,
    WaveSummary,
)
from synvirt.fleet.querying import VmQuery
from synvirt.fleet.records import member_json, member_of, wave_event, wave_json, wave_of
from synvirt.fleet.reporting import WaveReport, as_csv, as_html, report_of
from synvirt.fleet.sheets.importing import Importer, WaveImport, refused
from synvirt.fleet.sheets.rows import CSV_BYTES_MAX, to_csv, to_json
from synvirt.fleet.waves import Waves
from synvirt.fleet.webhooks.deliveries import Deliveries
from synvirt.jobs.board import Board
from synvirt.model.job import Progress
from synvirt.model.values import Model, Name
from synvirt.settings import Settings
from synvirt.sizes import MIB
from synvirt.store import Event
from synvirt.store.documents import Unreadable
from synvirt.store.waves import WaveCheck, WaveRows

MEMBERS_LIMIT = 10_000
# Ten thousand members with plans of 2 KiB, and as much again.
WAVE_LIMIT_BYTES = 48 * MIB

SOURCE_DOCUMENTED: dict[int | str, dict[str, Any]] = {
    502: problem_described("E_MIG_SOURCE_UNREACHABLE, E_MIG_AUTH_FAILED: the source does not answer, or refuses our login")
}
STREAM_DOCUMENTED: dict[int | str, dict[str, Any]] = {
    200: {
        "description": "Server-sent events without an end. `event: wave` has a WaveUpdate and an `id` that grows, at each "
        "change of the state of a wave or of a member; a comment line comes every 15 s. `Last-Event-ID` replays what was "
        "missed; a new client gets the events from then on, and with `wave_id` that wave's present state before them.",
        "content": {
            "text/event-stream": {
                "schema": {"type": "string"},
                "x-events": {"wave": {"$ref": "#/components/schemas/WaveUpdate"}},
            }
        },
    }
}

# The types that another site's form can send without a check of the browser are not among them.
SHEET_TYPES = (
    "text/csv",
    "application/vnd.openxmlformats-officedocument.spreadsheetml.sheet",
    "application/json",
    "application/octet-stream",
)
IMPORT_DOCUMENTED: dict[str, Any] = {
    "requestBody": {
        "required": True,
        "content": {kind: {"schema": {"type": "string", "format": "binary"}} for kind in SHEET_TYPES},
    }
}

REPORT_DOCUMENTED: dict[int | str, dict[str, Any]] = {
    200: {
        "description": "What was planned, what happened, and why; with format=csv, by RFC 4180",
        "content": {kind: {"schema": {"type": "string"}} for kind in ("text/csv", "text/html")},
    }
}
EXPORT_DOCUMENTED: dict[int | str, dict[str, Any]] = {
    200: {
        "description": "The wave; with format=csv, its members",
        "content": {"text/csv": {"schema": {"type": "string"}}},
        "headers": ETAG,
    }
}
_JSON = "application/json"
SIMULATION_DOCUMENTED: dict[int | str, dict[str, Any]] = {
    200: {
        "description": "The forecast; with format=svg, a picture of it: a row per member, or per host if there are many",
        "content": {"image/svg+xml": {"schema": {"type": "string"}}},
    }
}


# For a page or a picture that is shown alone and runs nothing: its names come from strangers.
ALONE = {"Content-Security-Policy": "default-src 'none'; style-src 'unsafe-inline'", "X-Content-Type-Options": "nosniff"}


class WavePage(Model):
    """Newest first. `next_cursor` of the last page is null; otherwise send it as `?cursor=`."""

    items: tuple[WaveSummary, ...]
    next_cursor: str | None


class MemberPage(Model):
    """In the wave's order. `next_cursor` of the last page is null; otherwise send it as `?cursor=`."""

    items: tuple[Member, ...]
    next_cursor: str | None


class DeliveryPage(Model):
    """Newest first. `next_cursor` of the last page is null; otherwise send it as `?cursor=`."""

    items: tuple[Delivery, ...]
    next_cursor: str | None


class WaveExport(Model):
    """As POST /waves takes it, but for hooks: their secrets are in no answer. `etag`: of the wave, for PUT."""

    etag: str
    name: str
    members: tuple[MemberRequest, ...]
    groups: tuple[Any, ...]
    windows: tuple[Any, ...]
    limits: Any
    canary: Any
    on_failure: str
    start_at: Any


@dataclass(frozen=True, slots=True)
class Fleet:
    """All that waves need."""

    waves: Waves
    forecaster: Forecaster
    importer: Importer
    deliveries: Deliveries


def mount_waves(app: FastAPI, fleet: Fleet, board: Board, settings: Settings, *, pace: Pace | None = None) -> None:
    """At {base_url}/api/v1/waves: behind the same gate as the rest, and in the same document."""
    base_url = settings.base_url.strip("/")
    prefix = f"{'/' if base_url else ''}{base_url}/api/v1"
    router = Routes(prefix="/waves", tags=["waves"], dependencies=[Depends(known_parameters)])
    waves = fleet.waves
    _many(router, waves)
    _stream(router, waves.rows, board, stopping=app.state.stopping.is_set, pace=pace or Pace())
    _importing(router, fleet.importer)
    _one(router, waves)
    _forecasting(router, fleet.forecaster)
    _wishes(router, waves)
    _members(router, waves)
    _deliveries(router, waves, fleet.deliveries)
    app.include_router(router, prefix=prefix)


def _importing(router: APIRouter, importer: Importer) -> None:
    @router.post("/import", response_model=WaveImport, openapi_extra=IMPORT_DOCUMENTED)
    async def import_waves(
        request: Request,
        name: Annotated[Name | None, Query(description="The wave of rows that name none; without it, imported")] = None,
        into: Annotated[UUID | None, Query(description="A draft that takes these members; its windows and limits stay")] = None,
        dry_run: Annotated[bool, Query(description="List all errors, by row and column, and create nothing")] = False,
    ) -> WaveImport:
        """Make drafts from a spreadsheet: RVTools, CSV like AWS MGN's, our own CSV or JSON. All of it is imported, or nothing:
        400 names the rows and columns that are wrong. All sources are asked for their VMs."""
        kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
        if kind not in SHEET_TYPES:
            shown = repr(kind[:100]) if kind else "missing"
            raise UnsupportedMediaType(f"the body's Content-Type is {shown}", hint=f"one of {', '.join(SHEET_TYPES)} is right")
        content = await bounded(request, CSV_BYTES_MAX)
        found = await importer.take(content, name=name, into=into, dry_run=dry_run)
        if found.problems and not dry_run:
            raise refused(found.problems)
        return found

    @router.post("/select", response_model=WaveImport, openapi_extra=documented(VmQuery), responses=SOURCE_DOCUMENTED)
    async def select_vms(
        query: Annotated[VmQuery, Depends(json_body(VmQuery))],
        dry_run: Annotated[bool, Query(description="Say how many VMs match, and create nothing")] = False,
    ) -> WaveImport:
        """Make a draft of all VMs of a source that match: in a folder, on a host, powered on. 400 where a word matches nothing,
        with the nearest word there is."""
        return await importer.select(query, dry_run=dry_run)


def _many(router: APIRouter, waves: Waves) -> None:
    @router.post("", status_code=201, response_model=Wave, openapi_extra=documented(WaveRequest))
    def create_wave(
        wave: Annotated[WaveRequest, Depends(json_body(WaveRequest, limit_bytes=WAVE_LIMIT_BYTES))],
        request: Request,
        response: Response,
    ) -> Response:
        """Make a wave as a draft: nothing moves before it is started. 400 names what is wrong with it."""
        made = waves.create(wave)
        return _whole(waves, made.id, status=201, location=f"{request.url.path}/{made.id}")

    @router.get("", response_model=WavePage)
    def list_waves(
        limit: Limit = PAGE_LIMIT,
        cursor: Cursor = None,
        state: Annotated[list[WaveState] | None, Query(description="Only waves in one of these states")] = None,
        name: Annotated[Sought | None, Query(description="Only waves of this name")] = None,
    ) -> WavePage:
        """List the waves, newest first, each with its members counted by state."""
        items, following = waves.page(limit=limit, cursor=number_of(cursor), states=state or (), name=name)
        return WavePage(items=tuple(items), next_cursor=cursor_of(following))


def _one(router: APIRouter, waves: Waves) -> None:
    @router.get("/{wave_id:uuid}", response_model=Wave)
    def load_wave(wave_id: UUID) -> Response:
        """Load one wave with all of its members."""
        return _whole(waves, wave_id)

    begun: dict[int | str, dict[str, Any]] = {409: problem_described("E_MIG_CONFLICT: the wave is no longer a draft")}

    @router.put("/{wave_id:uuid}", response_model=Wave, openapi_extra=documented(WaveRequest), responses=begun)
    def replace_wave(
        wave_id: UUID,
        wave: Annotated[WaveRequest, Depends(json_body(WaveRequest, limit_bytes=WAVE_LIMIT_BYTES))],
        tags: IfMatch,
    ) -> Response:
        """Replace a draft. 409 once it has begun; 412 where it was changed since the export whose `etag` the body has."""
        waves.replace(wave_id, wave, check=_made_from(tags, wave.etag))
        return _whole(waves, wave_id)

    @router.delete("/{wave_id:uuid}", status_code=204)
    def remove_wave(wave_id: UUID, tags: IfMatch) -> None:
        """Remove a draft, or a wave that has ended. Its jobs stay."""
        waves.remove(wave_id, check=_made_from(tags))

    @router.get("/{wave_id}/export", response_model=WaveExport, responses=EXPORT_DOCUMENTED)
    def export_wave(
        wave_id: UUID,
        format_: Annotated[Literal["json", "csv"], Query(alias="format", description="csv: only its members")] = "json",
    ) -> Response:
        """Export the wave as POST takes it, without its results; or its members as a spreadsheet that /waves/import takes. Its
        tag is the wave's."""
        row, members = waves.load(wave_id)
        tag = tag_of_text(wave_json(row, members))
        wave, of_it = wave_of(row), map(member_of, members)
        made, kind = (to_csv(wave, of_it), "text/csv") if format_ == "csv" else (to_json(wave, of_it, etag=tag), _JSON)
        return Response(made, media_type=kind, headers={"ETag": tag})

    @router.get("/{wave_id}/report", response_model=WaveReport, responses=REPORT_DOCUMENTED)
    def report_wave(
        wave_id: UUID,
        format_: Annotated[
            Literal["csv", "json", "html"],
            Query(alias="format", description="csv: a line for each member; html: to be sent or printed"),
        ] = "json",
    ) -> Response | WaveReport:
        """The report of a wave: planned and real times, outages, failures by cause."""
        row, members = waves.load(wave_id)
        report = report_of(wave_of(row), map(member_of, members))
        if format_ == "json":
            return report
        if format_ == "csv":
            return Response(as_csv(report), media_type="text/csv")
        return Response(as_html(report), media_type="text/html", headers=ALONE)


def _forecasting(router: APIRouter, forecaster: Forecaster) -> None:
    @router.post(
        "/{wave_id}/simulate",
        response_model=WaveSimulation,
        responses=SIMULATION_DOCUMENTED,
        openapi_extra=documented(WhatIf, required=False),
    )
    async def simulate_wave(
        wave_id: UUID,
        what_if: Annotated[WhatIf, Depends(optional_json_body(WhatIf, limit_bytes=WAVE_LIMIT_BYTES))],
        format_: Annotated[
            Literal["json", "svg"], Query(alias="format", description="svg: the forecast as a picture")
        ] = "json",
    ) -> Response | WaveSimulation:
        """Simulate the wave: when each member is copied and cut over, when all of it ends, and what delays it
        most. Sources are asked how large VMs are that have no job yet. With other numbers it says what they would change;
        without any, the wave keeps this forecast."""
        if format_ == "svg":
            _, picture = await forecaster.pictured(wave_id, what_if)
            return Response(picture, media_type="image/svg+xml", headers=ALONE)
        return await forecaster.forecast(wave_id, what_if)


def _wishes(router: APIRouter, waves: Waves) -> None:
    @router.post("/{wave_id}/go", status_code=202, response_model=WaveSummary)
    def go(wave_id: UUID) -> WaveSummary:
        """Start a draft, or continue a held wave."""
        return _summary(waves, waves.go(wave_id))

    @router.post("/{wave_id}/hold", status_code=202, response_model=WaveSummary)
    def hold(wave_id: UUID) -> WaveSummary:
        """Hold a wave: nothing new begins; copies and cut-overs under way go on."""
        return _summary(waves, waves.hold(wave_id))

    @router.post("/{wave_id}/cancel", status_code=202, response_model=WaveSummary)
    def cancel_wave(wave_id: UUID) -> WaveSummary:
        """Cancel a wave: waiting members are skipped, jobs that run are cancelled and their sources powered on again. Healthy
        members stay here."""
        return _summary(waves, waves.cancel(wave_id))

    @router.post(
        "/{wave_id}/roll-back",
        status_code=202,
        response_model=WaveSummary,
        openapi_extra=documented(RollBackRequest, required=False),
    )
    def roll_back(
        wave_id: UUID,
        request: Annotated[RollBackRequest, Depends(optional_json_body(RollBackRequest, limit_bytes=WAVE_LIMIT_BYTES))],
    ) -> WaveSummary:
        """Roll back these members, or all: guests here are stopped, sources powered on, copies kept. What a guest wrote since
        its cut-over is in its copy only."""
        return _summary(waves, waves.roll_back(wave_id, request))

    @router.post(
        "/{wave_id}/retry",
        status_code=202,
        response_model=WaveSummary,
        openapi_extra=documented(WaveRetryRequest, required=False),
    )
    def retry_members(
        wave_id: UUID,
        request: Annotated[WaveRetryRequest, Depends(optional_json_body(WaveRetryRequest, limit_bytes=WAVE_LIMIT_BYTES))],
    ) -> WaveSummary:
        """Retry these members, or all that failed."""
        return _summary(waves, waves.retry_all(wave_id, request))

    @router.post("/{wave_id}/approve", status_code=202, response_model=WaveSummary, openapi_extra=documented(ApprovalRequest))
    def approve(
        wave_id: UUID,
        approval: Annotated[ApprovalRequest, Depends(json_body(ApprovalRequest, limit_bytes=WAVE_LIMIT_BYTES))],
    ) -> WaveSummary:
        """Approve members that wait for it; or approve, after the canary, that the others go on."""
        return _summary(waves, waves.approve(wave_id, approval))


def _members(router: APIRouter, waves: Waves) -> None:
    @router.get("/{wave_id}/members", response_model=MemberPage)
    def list_members(
        wave_id: UUID,
        limit: Annotated[int, Query(ge=1, le=MEMBERS_LIMIT)] = MEMBERS_LIMIT,
        cursor: Cursor = None,
        state: Annotated[list[MemberState] | None, Query(description="Only members in one of these states")] = None,
    ) -> Response:
        """List the members, in the wave's order."""
        # A cursor is a number from 1 on, a position one from 0 on.
        after = (number_of(cursor) or 0) - 1
        rows, last = waves.rows.members(wave_id, limit=limit, after=after, states=[str(one) for one in state or ()])
        following = "null" if last is None else f'"{last + 1}"'
        items = ",".join(member_json(row) for row in rows)
        return Response(f'{{"items":[{items}],"next_cursor":{following}}}', media_type="application/json")

    @router.get("/{wave_id}/members/{member_id}", response_model=Member)
    def load_member(wave_id: UUID, member_id: MemberId) -> Member:
        """Load one member."""
        return member_of(waves.rows.member(wave_id, member_id))

    @router.post("/{wave_id}/members/{member_id}/skip", status_code=202, response_model=Member)
    def skip_member(wave_id: UUID, member_id: MemberId) -> Member:
        """Skip a member. Its job is cancelled, and its source powered on again."""
        return waves.skip(wave_id, member_id)

    @router.post("/{wave_id}/members/{member_id}/retry", status_code=202, response_model=Member)
    def retry_member(wave_id: UUID, member_id: MemberId) -> Member:
        """Retry a member that failed, was skipped or rolled back."""
        return waves.retry(wave_id, member_id)


def _deliveries(router: APIRouter, waves: Waves, deliveries: Deliveries) -> None:
    @router.get("/{wave_id}/deliveries", response_model=DeliveryPage)
    def list_deliveries(
        wave_id: UUID,
        limit: Limit = PAGE_LIMIT,
        cursor: Cursor = None,
        state: Annotated[
            list[Literal["pending", "delivered", "given_up"]] | None, Query(description="Only those in one of these states")
        ] = None,
    ) -> DeliveryPage:
        """List the deliveries to the webhooks of a wave, newest first, with their results."""
        waves.rows.get(wave_id)
        items, following = deliveries.page(wave_id, limit=limit, cursor=number_of(cursor), states=state or ())
        return DeliveryPage(items=tuple(items), next_cursor=cursor_of(following))

    @router.post("/{wave_id}/deliveries/{number}/again", status_code=202, response_model=Delivery)
    def deliver_again(wave_id: UUID, number: Number) -> Delivery:
        """Send a delivery again that was given up."""
        return deliveries.again(wave_id, number)


def _stream(router: APIRouter, rows: WaveRows, board: Board, *, stopping: Callable[[], bool], pace: Pace) -> None:
    events = _WaveEvents(rows, board)
    feed = Feed[Event, Any](events, events, as_json("wave", _no_figures), stopping=stopping, pace=pace)

    @router.get("/stream", response_class=StreamingResponse, responses=STREAM_DOCUMENTED)
    async def stream_waves(
        wave_id: UUID | None = None, last_event_id: Annotated[str | None, Header(alias="Last-Event-ID")] = None
    ) -> Response:
        """Follow waves as they move."""
        if wave_id is not None:
            await run_in_threadpool(rows.get, wave_id)  # NotFound now, as a problem, instead of a silent stream
        happening = feed.follow(job_id=wave_id, last_event_id=event_id_of(last_event_id))
        return EventSourceResponse(happening, headers=STREAM_HEADERS)


class _WaveEvents:
    """The events of waves, for a stream; waves have no other figures."""

    def __init__(self, rows: WaveRows, board: Board) -> None:
        self._rows, self._board = rows, board

    @property
    def commits(self) -> int:
        return self._board.commits

    def latest(self) -> Mapping[UUID, tuple[Any, Progress]]:
        return {}

    def last_event_id(self) -> int:
        return self._rows.last_event_id()

    def newest_events(self, *, job_id: UUID | None) -> list[Event]:
        """The wave as it is now, also after its end; of all waves none: a new client loads their list."""
        if job_id is None:
            return []
        newest = self._rows.last_event_id()  # first: what happens to the wave from here on is an event of its own
        try:
            return [Event(newest, job_id, wave_event(wave_of(self._rows.get(job_id))))]
        except (NotFound, Unreadable):
            return []

    def events_after(self, event_id: int, *, job_id: UUID | None, limit: int) -> list[Event]:
        return self._rows.events_after(event_id, job_id=job_id, limit=limit)


def _no_figures(_id: UUID, _state: Any, _progress: Progress) -> Model:
    raise AssertionError("a wave has no figures")


def _whole(waves: Waves, wave_id: UUID, *, status: int = 200, location: str | None = None) -> Response:
    row, members = waves.load(wave_id)
    content = wave_json(row, members)
    headers = {"ETag": tag_of_text(content)} | ({} if location is None else {"Location": location})
    return Response(content, status_code=status, media_type=_JSON, headers=headers)


def _made_from(tags: Tagged, etag: str | None = None) -> WaveCheck:
    return lambda row, members: tags.check_tag(tag_of_text(wave_json(row, members)), etag=etag)


def _summary(waves: Waves, wave: Wave) -> WaveSummary:
    return waves.summary(wave.id)
