"""{base_url}/migrations/ID: one job, complete and live, the possible actions, and its proof on a separate tab."""

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Literal
from uuid import UUID

import structlog
from fastapi import APIRouter
from fastapi.concurrency import run_in_threadpool
from fastapi.sse import EventSourceResponse, format_sse_event
from starlette.responses import RedirectResponse, Response

from synvirt.api.stream import Pace
from synvirt.errors import Conflict, InvalidPlan, MalformedArchive, NotFound, PersistFailed
from synvirt.migrations.hosts.about import Hosts, HostState
from synvirt.migrations.intake import Intake
from synvirt.migrations.memory import CourseMemory
from synvirt.migrations.planning.openings import shown
from synvirt.migrations.planning.outage import record
from synvirt.migrations.planning.past import completed
from synvirt.migrations.planning.retrying import has_kept_copy
from synvirt.migrations.removing import has_kept_volumes
from synvirt.model.job import Migration
from synvirt.model.kinds import State
from synvirt.model.rehearsal import RehearsalRequest
from synvirt.model.values import now
from synvirt.model.windows import WindowShown
from synvirt.proof.keeping import ReceiptContent, Receipts
from synvirt.rehearsals.asking import Rehearsing, why_not
from synvirt.web.chart import chart
from synvirt.web.jobs import BEAT, STREAM_HEADERS
from synvirt.web.pages import Pages
from synvirt.web.stations import stations

# The parts of the pages, in their order; each is a template, and an element with this id.
ABOVE = ("banner", "way")
JOB = ("figures", "actions", "found", "chart", "disks", "passes", "boot", "conversion", "differences", "facts")
PROOF = ("outage", "rehearsals", "moved", "verification", "receipt")
PARTS = (*ABOVE, *JOB, *PROOF)
# The tabs below `ABOVE`: the end of the address, the name, the parts. A page has all parts, and hides those of other tabs: so
# one stream of parts serves each.
TABS = (("", "Job", JOB), ("/proof", "Proof", PROOF))

log = structlog.get_logger(__name__)

REHEARSALS_SHOWN = 5
# The event by which the page closes its stream. Without it, a browser would connect again and again.
ENDED = "ended"

ActionName = Literal[
    "cancel", "lose", "cutover", "rehearse", "retry", "again", "check", "repair", "remove", "destroy",
    "fence", "take-over", "start-over",
]  # fmt: skip
# What comes before each way to go on without a job's host.
_OFF = (
    "Do this only if that host and its guests are off, by its power or its management board: two copies of one guest must "
    "never run at once. "
)


@dataclass(frozen=True, slots=True)
class Action:
    """`button` asks; `question` and `meaning` are on the page that asks for confirmation."""

    name: ActionName
    button: str
    question: str
    meaning: str
    danger: bool = False


ACTIONS = {
    action.name: action
    for action in (
        Action(
            "cutover",
            "Cut over",
            "Cut over now?",
            "The guest is shut down at its source, what has changed since the last pass is copied, and it is started here. "
            "It is off from the first to the last of these steps.",
        ),
        Action(
            "rehearse",
            "Rehearse",
            "Rehearse this move?",
            "The guest is started here from clones of its volumes, in an isolated network, checked, and removed again. "
            "The source runs on, and the copying continues.",
        ),
        Action(
            "cancel",
            "Cancel",
            "Cancel this migration?",
            "The copying stops, and what was made here for it is removed. The source stays as it was found.",
            danger=True,
        ),
        Action(
            "lose",
            "Cancel, and lose what the guest wrote",
            "Stop the guest, and lose what it wrote?",
            "It runs here since its instant start. It is stopped, and all that it wrote since is lost; its volumes are "
            "removed. The source stays as it was found.",
            danger=True,
        ),
        Action(
            "retry",
            "Go on with its copy",
            "Go on where this job failed?",
            "Its copy was kept: a new job continues with it. A file is not copied again; of a live machine all is read and "
            "compared, and what differs is written.",
        ),
        Action(
            "again",
            "Run again",
            "Run this plan again?",
            "A new job with the same plan starts over.",
        ),
        Action(
            "check",
            "Compare with the receipt",
            "Compare its volumes with the receipt?",
            "A new job reads the volumes, and says where they differ. Nothing is written. What a guest has written since "
            "differs, too.",
        ),
        Action(
            "repair",
            "Repair by the receipt",
            "Repair its volumes by the receipt?",
            "A new job reads the volumes. Where they differ from the receipt, it reads the source and overwrites them. Do this "
            "only if no guest has ever been started from them: whatever one wrote would be lost.",
            danger=True,
        ),
        Action(
            "remove",
            "Remove from the list",
            "Remove this job from the list?",
            "Its record and its history are removed. Its guest and its volumes stay as they are.",
        ),
        Action(
            "destroy",
            "Remove with its volumes",
            "Remove this job and its volumes?",
            "Its record and the volumes that it kept are removed: its copy no longer exists.",
            danger=True,
        ),
        Action(
            "fence",
            "Fence its host",
            "Is its host off, and are its guests?",
            f"{_OFF}All further writes of that host are refused. Its jobs may go on elsewhere then.",
            danger=True,
        ),
        Action(
            "take-over",
            "Go on here",
            "Go on here with this job?",
            f"{_OFF}The job goes on here from where it was, if this host reaches its volumes.",
            danger=True,
        ),
        Action(
            "start-over",
            "Start over here",
            "Start this job over here?",
            f"{_OFF}A new job begins here, with the same plan and new volumes. What the old one made is removed when its host "
            "is back.",
            danger=True,
        ),
    )
}


@dataclass(slots=True)
class Shown:
    """A job's parts as last drawn, shared by all open pages."""

    drawing: asyncio.Lock = field(default_factory=asyncio.Lock)
    viewers: int = 0
    seen: object = None
    at: float = float("-inf")
    drawn: "Drawn | None" = None


@dataclass(frozen=True, slots=True)
class Drawn:
    """The parts of a job's page as HTML by their names, and what they were drawn from. `ended`: nothing more comes."""

    parts: dict[str, str]
    values: dict[str, Any] = field(default_factory=dict)
    ended: bool = False


@dataclass(frozen=True, slots=True)
class JobView:
    """The content of a job's page. Blocking, except `parts`."""

    pages: Pages
    intake: Intake
    screenshot: Callable[[UUID], bytes | None]
    rehearsing: Rehearsing
    receipts: Receipts | None = None
    hosts: Hosts | None = None
    shown: dict[UUID, Shown] = field(default_factory=dict)

    def current(self, job_id: UUID) -> Migration:
        return self.intake.as_now([self.intake.store.get(job_id)])[0]

    def values(self, job_id: UUID) -> dict[str, Any]:
        """What the templates of a job's page need. NotFound."""
        job, store = self.current(job_id), self.intake.store
        cancelling = not job.ended and store.cancel_requested(job.id)
        rehearsals = self.rehearsing.of(job.id)
        going_on = cancelling or job.asked_to_cut_over or not all(one.ended for one in rehearsals)
        lost = self._lost(job)
        return {
            "lost": lost,
            "rehearsals": rehearsals[:REHEARSALS_SHOWN],
            "job": job,
            "stations": stations(job),
            "actions": [
                ACTIONS[name]
                for name in possible(
                    job,
                    cancelling=cancelling,
                    kept=has_kept_volumes(store, job),
                    rehearsable=why_not(job) is None and not going_on,
                    lost=lost,
                )
            ],
            "chart": chart(self.intake.board.courses().get(job.id) or store.memory.get(job.id, CourseMemory).course),
            "has_screen": job.state == State.FAILED and bool(job.boot_attempts) and self.screenshot(job.id) is not None,
            "cancelling": cancelling,
            "receipt": self._receipt(job),
            "by_receipt": [ACTIONS[name] for name in by_receipt(job)],
            "window": self._window(job),
            "there": self._there(job),
        }

    def _there(self, job: Migration) -> set[UUID]:
        """The jobs that its page links to, except those that were removed."""
        repaired = None if job.repair is None else job.repair.of
        named = {job.retried_by, job.retry_of, job.restarted_by, job.restart_of, repaired}
        return {one for one in named if one is not None and self._is_there(one)}

    def _is_there(self, job_id: UUID) -> bool:
        try:
            self.intake.store.host_of(job_id)
        except NotFound:
            return False
        return True

    def _window(self, job: Migration) -> WindowShown | None:
        """The window of an unended job, as it is now."""
        window_id = job.plan.warm.window_id
        if job.ended or job.repair is not None or window_id is None:
            return None
        with suppress(NotFound, InvalidPlan):  # another host may have removed it, or changed its times
            return shown(self.intake.store.windows.get(window_id), now())
        return None

    def _lost(self, job: Migration) -> HostState | None:
        """The state of the job's host, where that does nothing for its jobs now. None: it is alive, or the job has ended."""
        if self.hosts is None or job.ended or job.host is None:
            return None
        state = self.hosts.state(job.host)
        return None if state == "alive" else state

    def _receipt(self, job: Migration) -> ReceiptContent | None:
        """The content of the job's receipt. None, if it has none, or the receipt is on another host."""
        if job.receipt is None or self.receipts is None:
            return None
        try:
            return self.receipts.content(job.id)
        except (NotFound, MalformedArchive):
            return None

    def rendered(self, job_id: UUID, before: Drawn | None) -> Drawn:
        """The parts of the page that change. `before`: as they were drawn last; drawn again only where the job has changed, as
        each move of any other job is a reason to look."""
        values = self.values(job_id)
        if before is not None and values == before.values:
            return before
        parts = {name: self.pages.part(f"job/{name}.html", oob=True, **values) for name in PARTS}
        return Drawn(parts, values, values["job"].ended)

    async def parts(self, job_id: UUID, pace: Pace, stopping: Callable[[], bool]) -> AsyncIterator[bytes]:
        """The parts as they change, until the job has ended or is removed. Figures of a disk or a pass are no events of the
        store: so the job is read when anything was written."""
        sent: dict[str, str] = {}
        beat_at = time.monotonic()
        shown = self.shown.setdefault(job_id, Shown())
        shown.viewers += 1
        try:
            yield format_sse_event(comment="synvirt")
            while not stopping():
                fresh = await self._drawn(job_id, shown, pace)
                if changed := [html for name, html in fresh.parts.items() if sent.get(name) != html]:
                    yield format_sse_event(event="part", data_str="\n".join(changed))
                sent = fresh.parts
                if fresh.ended:
                    yield format_sse_event(event=ENDED, data_str=ENDED)
                    return
                if time.monotonic() - beat_at >= pace.heartbeat_every_s:
                    yield BEAT
                    beat_at = time.monotonic()
                await asyncio.sleep(pace.progress_every_s)
        except NotFound:  # the job was removed: the page stays as it is, and does not ask again
            yield format_sse_event(event=ENDED, data_str=ENDED)
        except PersistFailed as error:  # as in `Feed.follow`
            log.warning("the stream of a job's page ends", job=str(job_id), cause=error.detail)
        finally:
            shown.viewers -= 1
            if not shown.viewers:
                self.shown.pop(job_id, None)

    async def _drawn(self, job_id: UUID, shown: Shown, pace: Pace) -> Drawn:
        """Draws once for all open pages: at most twice a second, and once a second without changes."""
        async with shown.drawing:
            board, now = self.intake.board, time.monotonic()
            news = (board.commits, board.progress(job_id))
            wait_s = pace.ask_every_s if news == shown.seen else pace.progress_every_s
            if shown.drawn is None or now - shown.at >= wait_s:
                shown.seen, shown.at = news, now
                shown.drawn = await run_in_threadpool(self.rendered, job_id, shown.drawn)
            return shown.drawn

    def act(self, job_id: UUID, action: ActionName) -> Migration | None:
        """Executes an action. The job to show next: a new one, if one was begun; None, if it was removed."""
        job: Migration | None = None
        match action:
            case "cancel" | "lose":
                job = self.intake.cancel(job_id, guest_writes="lose" if action == "lose" else "keep")
            case "cutover":
                job = self.intake.cutover(job_id)
            case "rehearse":
                self.rehearsing.ask(job_id, RehearsalRequest())
                job = self.intake.store.get(job_id)
            case "retry":
                job = self.intake.retry(job_id, {})
            case "again":
                before = self.intake.store.get(job_id)
                if not may_run_again(before):
                    raise Conflict(f"job {job_id} is {before.state}, and is not run again")
                job = self.intake.submit(before.plan)
            case "fence":
                job = self.intake.store.get(job_id)
                if self.hosts is None or job.host is None or self._lost(job) is None:
                    raise Conflict(f"host {job.host} of job {job_id} is alive", hint="it goes on with its jobs; look again")
                self.hosts.fence(job.host)
            case "take-over" | "start-over":
                job = self.intake.take_over(job_id, restart=action == "start-over")
            case "check" | "repair":
                job = self.intake.repair(job_id, check_only=action == "check")
            case "remove" | "destroy":
                kept = has_kept_volumes(self.intake.store, self.intake.store.get(job_id))
                self.intake.remove(job_id, None if not kept else "destroy" if action == "destroy" else "keep")
        return job


def job_router(view: JobView, *, stopping: Callable[[], bool], pace: Pace) -> APIRouter:
    """The pages of one job, and the stream that keeps them up to date."""
    pages = view.pages
    router = pages.router()

    def tab(job_id: UUID, name: str) -> Response:
        values = view.values(job_id)
        # Reads dozens of jobs, so it is not one of the parts that are drawn repeatedly.
        so_far = record(completed(view.intake.store, values["job"].plan)) if name == "/proof" else None
        return pages.page("job.html", above=ABOVE, tabs=TABS, tab=name, so_far=so_far, oob=False, **values)

    @router.get("/migrations/{job_id}")
    def job_page(job_id: UUID) -> Response:
        return tab(job_id, "")

    @router.get("/migrations/{job_id}/proof")
    def proof_page(job_id: UUID) -> Response:
        return tab(job_id, "/proof")

    @router.get("/migrations/{job_id}/events")
    async def events(job_id: UUID) -> Response:
        """Parts of the page as they change; a new listener gets each once."""
        await run_in_threadpool(view.current, job_id)  # NotFound now, instead of a silent stream
        return EventSourceResponse(view.parts(job_id, pace, stopping), headers=STREAM_HEADERS)

    @router.get("/migrations/{job_id}/{action}")
    def confirm(job_id: UUID, action: ActionName) -> Response:
        return pages.page("confirm.html", job=view.current(job_id), action=ACTIONS[action])

    @router.post("/migrations/{job_id}/{action}")
    def act(job_id: UUID, action: ActionName) -> Response:
        job = view.act(job_id, action)
        tab = "/proof" if action == "rehearse" else ""
        return RedirectResponse(f"{pages.root}/migrations/{job.id}{tab}" if job else f"{pages.root}/", status_code=303)

    return router


def possible(
    job: Migration,
    *,
    cancelling: bool,
    kept: bool = False,
    rehearsable: bool = False,
    lost: HostState | None = None,
) -> list[ActionName]:
    """The actions that the page offers. Each request is checked again when it is executed. `lost`: the state of a host that is
    not alive."""
    names: list[ActionName] = []
    if lost is not None:
        names += ["fence"] if lost == "away" else ["take-over", "start-over"]
    if job.held and job.held_for == "request" and not cancelling:
        names.append("cutover")
    if rehearsable:
        names.append("rehearse")
    if not job.ended and not cancelling:
        names.append("lose" if job.instant is not None and job.instant.started_at is not None else "cancel")
    if job.retried_by is None and has_kept_copy(job):
        names.append("retry")
    elif may_run_again(job):
        names.append("again")
    if job.ended:
        names.append("remove")
    if kept:
        names.append("destroy")
    return names


def by_receipt(job: Migration) -> list[ActionName]:
    """The actions that the page offers next to a receipt. Only the request checks whether a guest was started since."""
    if job.state is not State.COMPLETED or job.receipt is None:
        return []
    is_untouched = not job.plan.target.start and not job.boot_attempts and job.conversion is None
    return ["check", "repair"] if is_untouched else ["check"]


def may_run_again(job: Migration) -> bool:
    """A remote file may need a password, which only the old job had; a repair is requested at its receipt."""
    ended_badly = job.state in (State.FAILED, State.CANCELLED) and job.repair is None
    return ended_badly and job.retried_by is None and job.plan.source_ref.kind != "remote_url"
