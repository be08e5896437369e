"""{base_url}/: all migrations, those under way first, each with live figures."""

import re
from collections.abc import AsyncIterator, Callable
from typing import Annotated

from fastapi import APIRouter, Header, Query
from fastapi.concurrency import run_in_threadpool
from fastapi.sse import EventSourceResponse, format_sse_event
from starlette.responses import Response

from synvirt.api.stream import Pace, changes
from synvirt.migrations.intake import Intake
from synvirt.model import ENDS, Migration, Progress, ProgressUpdate, State
from synvirt.store import Event
from synvirt.store.documents import parsed, readable
from synvirt.web.pages import HEADERS, Pages

# What a person looks through; the rest is a link away.
ENDED_ON_A_PAGE = 100
# What SQL's BIGINT holds, in digits.
NUMBER = r"^[0-9]{1,18}$"
STREAM_HEADERS = HEADERS | {"X-Accel-Buffering": "no"}


def jobs_router(pages: Pages, intake: Intake, *, stopping: Callable[[], bool], pace: Pace) -> APIRouter:
    router = pages.router()
    store, board = intake.store, intake.board

    @router.get("/")
    def jobs(cursor: Annotated[str | None, Query(pattern=NUMBER)] = None) -> Response:
        # Before the jobs are read: what happens in between is told twice, and never missed.
        newest = store.last_event_id()
        figures = board.latest()
        under_way = [] if cursor else [with_figure(job, figures.get(job.id)) for job in reversed(store.unended())]
        documents, following = store.documents(limit=ENDED_ON_A_PAGE, cursor=int(cursor) if cursor else None)
        read = readable(Migration, documents)
        ended = [job for job in read if job.state in ENDS]
        return pages.page(
            "jobs.html", under_way=under_way, ended=ended, following=following, cursor=cursor, newest=newest, oob=False
        )

    @router.get("/events")
    async def events(
        after: Annotated[str, Query(pattern=NUMBER)],
        last_event_id: Annotated[str, Header(alias="Last-Event-ID")] = "",
    ) -> Response:
        """Parts of the list as they change. `after`: what the page has seen already."""
        # An id that is none of ours (a proxy's) is no reason to refuse a browser.
        seen = int(last_event_id if re.fullmatch(NUMBER, last_event_id) else after)
        happening = changes(store, board, job_id=None, last_event_id=seen, stopping=stopping, pace=pace)
        return EventSourceResponse(_parts(happening), headers=STREAM_HEADERS)

    async def _parts(happening: AsyncIterator[Event | ProgressUpdate | None]) -> AsyncIterator[bytes]:
        async for change in happening:
            if change is None:
                yield format_sse_event(comment="still here")
            elif isinstance(change, ProgressUpdate):
                figures = pages.part("row_figures.html", job=change, oob=True)
                yield format_sse_event(event="part", data_str=figures)
            else:
                told = await run_in_threadpool(_told, change)
                yield format_sse_event(event="part", data_str=told, id=str(change.id))

    def _told(event: Event) -> str:
        job = parsed(Migration, event.document)
        return pages.part("row_told.html", job=job, is_new=job.state == State.QUEUED, oob=True)

    return router


def with_figure(job: Migration, figure: tuple[State, Progress] | None) -> Migration:
    if figure is None or figure[0] != job.state:
        return job
    return job.model_copy(update={"progress": figure[1]})
