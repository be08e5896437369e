"""Watches several jobs at once: one live table on a terminal, plain lines elsewhere.

The service is asked once a second, not streamed: a job that ended between two requests is seen as ended, and a restarted
service is simply asked again.
"""

import json
import sys
import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from synvirt.cli.client import PATIENCE_S
from synvirt.cli.migrating.watching import described, stage
from synvirt.cli.program import shown
from synvirt.errors import NotFound, PersistFailed, ServiceUnreachable
from synvirt.model.job import Migration
from synvirt.model.kinds import UNENDED
from synvirt.model.problems import Problem
from synvirt.model.values import now
from synvirt.sizes import sized
from synvirt.texts import escaped_json

if TYPE_CHECKING:
    from rich.table import Table

    from synvirt.cli.client import Client

ASK_EVERY_S = 1.0
# The service's longest page: the queue has the newest jobs, and the running ones are the oldest of these.
JOBS_MAX = 5000
# As many as a terminal of 24 lines shows; the rest are counted.
ROWS_MAX = 20


def watch_several(
    client: "Client", ids: list[str], *, as_json: bool, pause: Callable[[float], None] = time.sleep
) -> list[Migration]:
    """Follows jobs to their ends; returns the ended jobs. One that was removed before its end was seen is returned as it was
    last, with that as its error. No `ids`: all that have not ended. Ctrl-C leaves them as they are."""
    jobs: dict[str, Migration] = {}
    removed = dict[str, NotFound]()
    wanted = set(ids)
    looks = _live if sys.stdout.isatty() and not as_json else _lines
    show = looks(as_json=as_json)
    next(show)
    try:
        for found in _asked(client, wanted, removed, pause):
            jobs.update(found)
            wanted.update(found)
            show.send(list(found.values()))
            if all(job.ended for job in found.values()):
                break
            pause(ASK_EVERY_S)
    finally:
        show.close()
    return [job if id_ not in removed else _removed(job, removed[id_]) for id_, job in jobs.items()]


def _removed(job: Migration, error: NotFound) -> Migration:
    message = f"job {job.id} was removed before its end was seen"
    problem = Problem(code=error.code, message=message, hint=None, fatal=True, at=now(), state=job.state)
    return job.model_copy(update={"last_error": problem})


def _asked(
    client: "Client", wanted: set[str], removed: dict[str, NotFound], pause: Callable[[float], None]
) -> "Iterator[dict[str, Migration]]":
    """The present jobs, again and again. One that was there before, and is gone, goes from `wanted` to `removed`.
    ServiceUnreachable or PersistFailed, after the service or its store was away for long, or at once at the first request;
    NotFound."""
    lost_at: float | None = None
    answered = False
    # These are not asked for again: the service may have thousands of ended jobs.
    ended: dict[str, Migration] = {}
    seen = set[str]()
    while True:
        try:
            page = json.loads(client.ask("GET", "/migrations", params={"limit": JOBS_MAX, "state": UNENDED}))
            items = [item for item in page["items"] if not wanted or item["id"] in wanted]
            listed = {item["id"]: Migration.model_validate(item) for item in items}
            older: dict[str, Migration] = {}
            for id_ in wanted - listed.keys():
                try:
                    older[id_] = ended.get(id_) or client.migration(id_)
                except NotFound as error:
                    if id_ not in seen:
                        raise
                    removed[id_] = error
            wanted.difference_update(removed)
            ended = {id_: job for id_, job in older.items() if job.ended}
        except (ServiceUnreachable, PersistFailed):  # the latter: it answers, and its database is away
            lost_at = lost_at or time.monotonic()
            if not answered or time.monotonic() - lost_at > PATIENCE_S:
                raise
            pause(ASK_EVERY_S)
            continue
        lost_at, answered = None, True
        seen |= wanted | listed.keys()
        # Oldest first: a job keeps its place in the table.
        yield dict(sorted((listed | older).items(), key=lambda one: (one[1].created_at, one[0])))


Showing = Any  # a generator that receives lists of jobs


def _lines(*, as_json: bool) -> Showing:
    """A line when a job's state changes; with --json its document."""
    states: dict[object, object] = {}
    while True:
        jobs = yield
        for job in jobs:
            if states.get(job.id) != job.state:
                states[job.id] = job.state
                text = f"{time.strftime('%H:%M:%S')} {str(job.id)[:8]} {stage(job)}  {shown(job.name)}"
                print(escaped_json(job.model_dump_json()) if as_json else text, flush=True)


def _live(*, as_json: bool) -> Showing:
    from rich.live import Live

    del as_json  # JSON is for programs, which have no terminal
    with Live(refresh_per_second=4) as live:
        while True:
            jobs = yield
            live.update(table(jobs), refresh=True)


def table(jobs: list[Migration]) -> "Table":
    """Fits into 80 columns. Running jobs come first, as there may be many ended and queued ones."""
    from rich.table import Table
    from rich.text import Text

    running = [job for job in jobs if not job.ended and job.started_at is not None]
    others = [job for job in jobs if job.ended or job.started_at is None]
    rate = sum(job.progress.rate_bps for job in running if job.progress.bytes_done < job.progress.bytes_total)
    ended = sum(job.ended for job in jobs)
    caption = f"{len(running)} run, {len(jobs) - ended - len(running)} wait, {ended} ended, {sized(rate)}/s together"
    made = Table(box=None, pad_edge=False, caption=caption, caption_justify="left")
    for title, width in (("ID", 8), ("NAME", 19), ("STATE", 13), ("PROGRESS", 35)):
        made.add_column(title, no_wrap=True, overflow="ellipsis", max_width=width, min_width=8)
    for job in (running + others)[:ROWS_MAX]:
        remark = described(job.progress, state=job.state) if job.progress.bytes_total and not job.ended else ""
        if job.last_error is not None and (job.ended or not job.progress.rate_bps):  # it waits for what this says
            remark = job.last_error.code
        made.add_row(str(job.id)[:8], Text(shown(job.name)), stage(job), Text(remark))
    return made
