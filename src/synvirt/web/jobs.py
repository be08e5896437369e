"""{base_url}/: all migrations, unended ones first, each with live figures."""

from collections.abc import Callable, Mapping
from typing import Annotated, Literal
from uuid import UUID

from fastapi import APIRouter, Header, Query
from fastapi.sse import EventSourceResponse, format_sse_event
from starlette.responses import Response

from synvirt.api.paging import Cursor, Number, number_of
from synvirt.api.stream import Feed, Pace, Words, event_id_of
from synvirt.migrations.intake import Intake
from synvirt.model.job import Migration, Progress, ProgressUpdate
from synvirt.model.kinds import ENDS, UNENDED, State
from synvirt.store import Event
from synvirt.store.documents import Unreadable, parsed, readable
from synvirt.store.filters import Only
from synvirt.web.pages import HEADERS, Pages

# The parts of the list, by the states of their jobs.
Part = Literal["begun", "queued", "ended"]
PARTS: Mapping[Part, Only] = {
    "begun": Only(states=tuple(state for state in UNENDED if state is not State.QUEUED)),
    "queued": Only(states=(State.QUEUED,)),
    "ended": Only(states=tuple(ENDS)),
}
# Jobs of a part on one page: as many as people look through. Links lead to the rest.
ON_A_PAGE = 100
STREAM_HEADERS = HEADERS | {"X-Accel-Buffering": "no"}
# A script of the page sees no comment of a stream: an event tells it that the service is there (away.js).
BEAT = format_sse_event(event="beat", data_str="still here")


def jobs_router(pages: Pages, intake: Intake, *, stopping: Callable[[], bool], pace: Pace) -> APIRouter:
    """The list of migrations, and the stream that keeps it up to date."""
    router = pages.router()
    store = intake.store

    def changed_row(event: Event) -> bytes:
        try:
            job, number = parsed(Migration, event.document), str(event.id)
        except Unreadable:  # doctor reports it; the list goes on without it
            return b""
        if job.state == State.QUEUED:
            # The page may have been made after this event: then its row for the job gives way to the new one.
            gone = format_sse_event(event=f"job-{job.id}", data_str="gone")
            return gone + format_sse_event(event="queued", data_str=pages.part("row.html", job=job), id=number)
        state = format_sse_event(event=f"state-{job.id}", data_str=pages.part("row_state.html", job=job))
        return state + format_sse_event(event=f"figures-{job.id}", data_str=pages.part("row_figures.html", job=job), id=number)

    def figures_of(id_: UUID, state: State, progress: Progress) -> bytes:
        update = ProgressUpdate(id=id_, state=state, progress=progress)
        return format_sse_event(event=f"figures-{id_}", data_str=pages.part("row_figures.html", job=update))

    feed = Feed(
        store,
        intake.board,
        Words(changed_row, figures_of, BEAT),
        stopping=stopping,
        pace=pace,
        elsewhere=intake.figures_elsewhere,
    )

    def jobs_of(part: Part, cursor: int | None = None) -> tuple[list[Migration], int | None]:
        documents, following = store.documents(limit=ON_A_PAGE, cursor=cursor, only=PARTS[part])
        return intake.as_now(readable(Migration, documents)), following

    @router.get("/")
    def jobs(cursor: Cursor = None, part: Part = "ended") -> Response:
        """The newest of each part; with a cursor, the next page of one."""
        # Before the jobs are read: what happens in between is sent twice, but never missed.
        newest, after = feed.newest(), number_of(cursor)
        shown = {part: jobs_of(part, after)} if after is not None else {one: jobs_of(one) for one in PARTS}
        return pages.page("jobs.html", parts=shown, cursor=cursor, newest=newest)

    @router.get("/events")
    async def events(
        after: Annotated[Number, Query()],
        last_event_id: Annotated[str, Header(alias="Last-Event-ID")] = "",
    ) -> Response:
        """Parts of the list as they change. `after`: what the page has seen already."""
        seen = event_id_of(last_event_id)
        stream = feed.follow(job_id=None, last_event_id=after if seen is None else seen)
        return EventSourceResponse(stream, headers=STREAM_HEADERS)

    return router
