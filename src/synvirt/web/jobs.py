"""{base_url}/: all migrations, unended ones first, each with live figures."""

import re
from collections.abc import Callable
from typing import Annotated
from uuid import UUID

from fastapi import APIRouter, Header, Query
from fastapi.sse import EventSourceResponse, format_sse_event
from starlette.responses import Response

from synvirt.api.stream import Feed, Pace, Words
from synvirt.migrations.intake import Intake
from synvirt.model.job import Migration, Progress, ProgressUpdate
from synvirt.model.kinds import ENDS, State
from synvirt.store import Event
from synvirt.store.documents import parsed, readable
from synvirt.web.pages import HEADERS, Pages

# As many as people look through; a link leads to the rest.
ENDED_ON_A_PAGE = 100
# The digits of SQL's BIGINT.
NUMBER = r"^[0-9]{1,18}$"
STREAM_HEADERS = HEADERS | {"X-Accel-Buffering": "no"}


def jobs_router(pages: Pages, intake: Intake, *, stopping: Callable[[], bool], pace: Pace) -> APIRouter:
    """The list of migrations, and the stream that keeps it up to date."""
    router = pages.router()
    store, board = intake.store, intake.board

    def changed_row(event: Event) -> bytes:
        job, number = parsed(Migration, event.document), str(event.id)
        if job.state == State.QUEUED:
            # The page may have been made after this event: then its row for the job gives way to the new one.
            gone = format_sse_event(event=f"job-{job.id}", data_str="gone")
            return gone + format_sse_event(event="queued", data_str=pages.part("row.html", job=job), id=number)
        state = format_sse_event(event=f"state-{job.id}", data_str=pages.part("row_state.html", job=job))
        return state + format_sse_event(event=f"figures-{job.id}", data_str=pages.part("row_figures.html", job=job), id=number)

    def figures_of(id_: UUID, state: State, progress: Progress) -> bytes:
        update = ProgressUpdate(id=id_, state=state, progress=progress)
        return format_sse_event(event=f"figures-{id_}", data_str=pages.part("row_figures.html", job=update))

    feed = Feed(store, board, Words(changed_row, figures_of), stopping=stopping, pace=pace, elsewhere=intake.figures_elsewhere)

    @router.get("/")
    def jobs(cursor: Annotated[str | None, Query(pattern=NUMBER)] = None) -> Response:
        # Before the jobs are read: what happens in between is sent twice, but never missed.
        newest = store.last_event_id()
        under_way = [] if cursor else [board.current(job) for job in reversed(store.unended())]
        documents, following = store.documents(limit=ENDED_ON_A_PAGE, cursor=int(cursor) if cursor else None)
        read = readable(Migration, documents)
        ended = [job for job in read if job.state in ENDS]
        return pages.page("jobs.html", under_way=under_way, ended=ended, following=following, cursor=cursor, newest=newest)

    @router.get("/events")
    async def events(
        after: Annotated[str, Query(pattern=NUMBER)],
        last_event_id: Annotated[str, Header(alias="Last-Event-ID")] = "",
    ) -> Response:
        """Parts of the list as they change. `after`: what the page has seen already."""
        # A foreign id (a proxy's) is no reason to refuse a browser.
        seen = int(last_event_id if re.fullmatch(NUMBER, last_event_id) else after)
        return EventSourceResponse(feed.follow(job_id=None, last_event_id=seen), headers=STREAM_HEADERS)

    return router
