"""{base_url}/waves: the waves for their operator: waiting members with their reasons, the windows, and the actions on a
wave."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Annotated, Any, Literal
from uuid import UUID

from fastapi import Query
from fastapi.concurrency import run_in_threadpool
from fastapi.routing import APIRouter
from pydantic import ValidationError
from starlette.responses import Response

from synvirt.api.paging import Cursor, number_of
from synvirt.errors import BadRequest
from synvirt.fleet.forecasting import Forecaster, WhatIf
from synvirt.fleet.model import (
    GOING,
    MEMBER_ENDS,
    MEMBERS_MAX,
    MOVED,
    REMOVABLE,
    UNDER_WAY,
    WAVE_ENDS,
    ApprovalRequest,
    Member,
    MemberId,
    MemberState,
    RollBackRequest,
    Wave,
    WaveRetryRequest,
    WaveState,
)
from synvirt.fleet.records import member_of, wave_of
from synvirt.fleet.sheets.importing import Importer
from synvirt.fleet.waves import Waves
from synvirt.fleet.webhooks.deliveries import Deliveries
from synvirt.migrations.planning.openings import spans_of
from synvirt.mistakes import place, worded
from synvirt.model.rehearsal import TogetherRequest
from synvirt.model.values import now
from synvirt.model.windows import Window
from synvirt.offline.units import size_bytes
from synvirt.rehearsals.asking import Rehearsing
from synvirt.sizes import duration
from synvirt.store.wave_hooks import PENDING
from synvirt.web.backups.jobs import ON_A_PAGE
from synvirt.web.fields import judged
from synvirt.web.forms import Form, Sent
from synvirt.web.pages import Pages
from synvirt.web.waves.new import NewWavePages
from synvirt.web.words import moment

# The page is drawn again every few seconds; the next page shows more.
MEMBERS_ON_A_PAGE = 200
# To read a job takes half a millisecond, and a page is drawn again each time that something changes.
MEMBERS_LOOKED_AT = 50
# The newest; `synvirt waves deliveries` lists all.
DELIVERIES_SHOWN = 20

ActionName = Literal["go", "hold", "retry", "canary", "rehearse", "cancel", "roll-back", "remove"]
MemberActionName = Literal["approve", "skip", "retry", "roll-back"]

_TONES: Mapping[str, str] = {
    WaveState.RUNNING: "busy",
    WaveState.HELD: "note",
    WaveState.ROLLING_BACK: "note",
    WaveState.COMPLETED: "good",
    WaveState.FAILED: "bad",
    MemberState.SYNCING: "busy",
    MemberState.READY: "busy",
    MemberState.CUTTING_OVER: "busy",
    MemberState.HEALTHY: "good",
}

# The members' states in which a job copies.
_COPYING = (str(MemberState.SYNCING), str(MemberState.READY))


@dataclass(frozen=True, slots=True)
class Action:
    """`button` asks; `question` and `meaning` are on the page that asks for confirmation. `states`: those in which it is
    offered. Each request is checked again when it is executed."""

    button: str
    question: str
    meaning: str
    states: frozenset[WaveState]
    danger: bool = False


ACTIONS: Mapping[ActionName, Action] = {
    "go": Action(
        "Go",
        "Start or continue this wave?",
        "Copies begin, and members cut over in their order and within their windows.",
        frozenset({WaveState.DRAFT, WaveState.HELD}),
    ),
    "hold": Action(
        "Hold", "Hold this wave?", "Nothing new begins. What copies or cuts over goes on.", frozenset({WaveState.RUNNING})
    ),
    "retry": Action(
        "Retry all that failed",
        "Start over with all members that failed?",
        "Each gets a new job. A guest that booted here, and failed a check, is only checked again.",
        frozenset({*GOING, WaveState.FAILED}),
    ),
    "canary": Action(
        "Approve the canary",
        "Is the canary healthy?",
        "The others continue after your approval, once the canary has ended.",
        GOING,
    ),
    "rehearse": Action(
        "Rehearse together",
        "Rehearse the guests of this wave together?",
        "Those that copy warm are started from clones of their volumes, in one isolated network, each after those that it "
        "waits for. Their checks are made there, and all of it is removed again. The copying continues.",
        GOING,
    ),
    "cancel": Action(
        "Cancel",
        "Cancel this wave?",
        "Members that wait are skipped. Jobs that run are cancelled, and their sources powered on again. "
        "Healthy members stay as they are.",
        UNDER_WAY,
        danger=True,
    ),
    "roll-back": Action(
        "Roll back",
        "Roll the whole wave back?",
        "Guests here are stopped, sources powered on, copies kept. What a guest wrote since its cut-over stays in its copy.",
        frozenset({*UNDER_WAY, WaveState.COMPLETED, WaveState.FAILED, WaveState.CANCELLED}),
        danger=True,
    ),
    "remove": Action(
        "Remove",
        "Remove this wave?",
        "Its record and its report are removed. Its jobs and their guests stay.",
        REMOVABLE,
        danger=True,
    ),
}


@dataclass(frozen=True, slots=True)
class MemberAction:
    """An action on a member: the button, the question before it, and what it means."""

    button: str
    question: str
    meaning: str
    danger: bool = False


MEMBER_ACTIONS: Mapping[MemberActionName, MemberAction] = {
    "approve": MemberAction("Approve", "Approve the cut-over of this member?", "Then it may cut over."),
    "skip": MemberAction(
        "Skip",
        "Leave this member out?",
        "A job that it has is cancelled, and its source powered on again.",
    ),
    "retry": MemberAction("Retry", "Start over with this member?", "It gets a new job."),
    "roll-back": MemberAction(
        "Roll back",
        "Roll this member back to its source?",
        "Its guest here is stopped, its source powered on, its copy kept. "
        "What the guest wrote since its cut-over stays in its copy.",
        danger=True,
    ),
}


@dataclass(frozen=True, slots=True)
class Opening:
    """The open opening of a window, or the next. `words` counts down to its end, or to its start."""

    name: str
    open: bool
    words: str


class WavePages:
    """Blocking, except `simulate`."""

    def __init__(
        self, pages: Pages, waves: Waves, forecaster: Forecaster, deliveries: Deliveries, rehearsing: Rehearsing
    ) -> None:
        self._pages, self._waves, self._forecaster, self._deliveries = pages, waves, forecaster, deliveries
        self._rehearsing = rehearsing

    def waves(self, cursor: Cursor = None) -> Response:
        """The waves, newest first."""
        items, following = self._waves.page(limit=ON_A_PAGE, cursor=number_of(cursor))
        return self._pages.page("waves/list.html", waves=items, following=following, cursor=cursor)

    def wave(
        self,
        wave_id: UUID,
        state: MemberState | None = None,
        after: Annotated[int, Query(ge=0, le=MEMBERS_MAX)] = 0,
    ) -> Response:
        """`after`: how many members come before this page's."""
        return self._pages.page("waves/wave.html", **self._values(wave_id, state, after))

    async def simulate(self, wave_id: UUID, form: Sent) -> Response:
        """Asks sources for the sizes of VMs, so it runs only on request. With other numbers filled in: what they would
        change."""
        wave = wave_of(await run_in_threadpool(self._waves.rows.get, wave_id))
        found, picture = await self._forecaster.pictured(wave_id, what_if(form, wave))
        return self._pages.page("waves/simulated.html", wave=wave, found=found, picture=picture, form=form)

    def confirm(self, wave_id: UUID, action_name: ActionName) -> Response:
        """Asks whether to do this to a wave."""
        action, wave = ACTIONS[action_name], wave_of(self._waves.rows.get(wave_id))
        here = f"/waves/{wave_id}"
        return self._pages.ask(
            action.question,
            wave.name,
            action.meaning,
            action=f"{here}/{action_name}",
            back=here,
            yes=action.button.lower(),
            here="/waves",
            danger=action.danger,
        )

    def act(self, wave_id: UUID, action_name: ActionName) -> Response:
        """Does it, and leads back to the wave."""
        if action_name == "remove":
            self._waves.remove(wave_id)
            return self._pages.see("/waves")
        does: Mapping[ActionName, Callable[[UUID], object]] = {
            "go": self._waves.go,
            "hold": self._waves.hold,
            "retry": lambda id_: self._waves.retry_all(id_, WaveRetryRequest()),
            "cancel": self._waves.cancel,
            "roll-back": lambda id_: self._waves.roll_back(id_, RollBackRequest()),
            "rehearse": lambda id_: self._rehearsing.ask_together(TogetherRequest(wave_id=id_)),
            "canary": lambda id_: self._waves.approve(id_, ApprovalRequest(canary=True)),
        }
        does[action_name](wave_id)
        return self._pages.see(f"/waves/{wave_id}")

    def confirm_member(
        self,
        wave_id: UUID,
        member_id: MemberId,
        action_name: MemberActionName,
        approver: Annotated[str, Query(max_length=255)] = "",
    ) -> Response:
        """Asks whether to do this to a member."""
        member, action = member_of(self._waves.rows.member(wave_id, member_id)), MEMBER_ACTIONS[action_name]
        here = f"/waves/{wave_id}"
        return self._pages.ask(
            action.question,
            f"{member.vm} ({member.id})",
            *([f"The approver is {approver}."] if action_name == "approve" else []),
            action.meaning,
            action=f"{here}/members/{member.id}/{action_name}",
            back=here,
            yes=action.button.lower(),
            here="/waves",
            danger=action.danger,
            hidden=[("approver", approver)] if action_name == "approve" else [],
        )

    def act_on_member(self, wave_id: UUID, member_id: MemberId, action_name: MemberActionName, form: Sent) -> Response:
        """Does it, and leads back to the wave."""
        match action_name:
            case "approve":
                asked = {"approver": form.text("approver"), "members": (member_id,)}
                self._waves.approve(wave_id, judged(ApprovalRequest, asked))
            case "skip":
                self._waves.skip(wave_id, member_id)
            case "retry":
                self._waves.retry(wave_id, member_id)
            case "roll-back":
                self._waves.roll_back(wave_id, RollBackRequest(members=(member_id,)))
        return self._pages.see(f"/waves/{wave_id}")

    def _values(self, wave_id: UUID, state: MemberState | None, after: int) -> dict[str, Any]:
        row = self._waves.rows.counted(wave_id)
        wave, at = wave_of(row), now()
        rows, last = self._waves.rows.members(
            wave_id, limit=MEMBERS_ON_A_PAGE, after=after - 1, states=[str(state)] if state else []
        )
        members = [member_of(one) for one in rows]
        sent = self._deliveries.page(wave_id, limit=DELIVERIES_SHOWN)[0] if wave.hooks else []
        return {
            "wave": wave,
            "counts": {one: row.counts[one] for one in MemberState if one in row.counts},
            "shown": state,
            "after": after,
            "following": None if last is None else last + 1,
            # A member has its job's id before there is a job, and keeps it where the plan was refused.
            "begun": {one.member_id for one in rows if one.submitted},
            "members": [(member, possible_of_member(wave, member)) for member in members],
            "rehearsed": self._rehearsing.states_of([one.job_id for one in members if one.job_id is not None]),
            "words_missing": words_missing,
            "actions": [
                (name, ACTIONS[name])
                for name in possible(
                    wave,
                    failed=row.counts.get(MemberState.FAILED, 0),
                    rehearsable=wave.state in GOING and self._rehearsable(wave_id),
                )
            ],
            "member_actions": MEMBER_ACTIONS,
            "openings": openings(wave, at) if wave.state not in WAVE_ENDS else [],
            # What a wave's end sends is delivered after it; and another operator may let a draft go.
            "moving": wave.state not in WAVE_ENDS or any(one.state == PENDING for one in sent),
            "hooks": {hook.id: hook.url or hook.command for hook in wave.hooks},
            "deliveries": sent,
        }

    def _rehearsable(self, wave_id: UUID) -> bool:
        """Whether enough members copy warm now. Of so many that copy, it does not look at each one's job."""
        rows, more = self._waves.rows.members(wave_id, limit=MEMBERS_LOOKED_AT, states=_COPYING)
        return more is not None or self._rehearsing.may_be_together(one.job_id for one in rows if one.job_id is not None)


def what_if(form: Form, wave: Wave) -> WhatIf:
    """The numbers in the page of a forecast; an empty one changes nothing. BadRequest."""
    document: dict[str, Any] = {}
    if form.text("more_destinations"):
        document["more_destinations"] = form.text("more_destinations")
    for name in ("network_bps", "source_host_bps"):
        if form.text(name):
            try:
                document[name] = size_bytes(form.text(name))
            except ValueError as error:
                raise BadRequest(f"{form.text(name)[:100]!r} is not a size, such as 1 GiB or 600 MiB") from error
    limits = {name: form.text(name) for name in ("per_source_host", "per_destination", "wave") if form.text(name)}
    if limits:
        document["limits"] = wave.limits.model_dump() | limits
    if end := form.text("window_end"):
        if not wave.windows:
            raise BadRequest("the wave has no window that could end at another time")
        document["windows"] = [{**wave.windows[0].model_dump(), "end": end}]
    try:
        return WhatIf.model_validate(document)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        raise BadRequest(f"{place(first['loc'])}: {worded(first)}", hint="go back and correct it") from error


def possible(wave: Wave, *, failed: int, rehearsable: bool) -> list[ActionName]:
    """The actions that the page offers, in its order. `failed`: how many members have failed; `rehearsable`:
    whether enough copy warm."""
    canary_waits = wave.canary is not None and wave.canary.gate == "approval" and wave.canary_approval is None
    asked_for: Mapping[ActionName, bool] = {"canary": canary_waits, "retry": failed > 0, "rehearse": rehearsable}
    return [name for name, action in ACTIONS.items() if wave.state in action.states and asked_for.get(name, True)]


def possible_of_member(wave: Wave, member: Member) -> list[MemberActionName]:
    """The actions that make sense for a member now."""
    names: list[MemberActionName] = []
    if wave.state in {*GOING, WaveState.DRAFT} and words_missing(member):
        names.append("approve")
    if wave.state in {*GOING, WaveState.DRAFT} and member.state not in MEMBER_ENDS | MOVED:
        names.append("skip")
    if wave.state in {*GOING, WaveState.FAILED} and member.state in MEMBER_ENDS - {MemberState.HEALTHY}:
        names.append("retry")
    # One that has failed may have a guest that runs here, or a source that is off.
    moved = member.state in MOVED or (member.state is MemberState.FAILED and member.job_id is not None)
    if wave.state is not WaveState.DRAFT and moved:
        names.append("roll-back")
    return names


def words_missing(member: Member) -> list[str]:
    """The approvals that it still needs before its cut-over."""
    given = {one.approver for one in member.approvals}
    return [] if member.state in MEMBER_ENDS else [name for name in member.approvers if name not in given]


def openings(wave: Wave, at: datetime) -> list[Opening]:
    """Open windows first, then the others by their next start; those that never open again last."""
    found = [(window, next((span for span in spans if span.end > at), None)) for window, spans in _windows(wave, at)]
    found.sort(key=lambda one: (one[1] is None, one[1].start if one[1] else at))
    shown = []
    for window, span in found:
        if span is None:
            shown.append(Opening(window.name, False, "does not open again"))
        elif span.start <= at:
            left = duration((span.end - at).total_seconds())
            shown.append(Opening(window.name, True, f"open for {left} more, until {moment(span.end)}"))
        else:
            shown.append(
                Opening(window.name, False, f"opens in {duration((span.start - at).total_seconds())}, {moment(span.start)}")
            )
    return shown


def _windows(wave: Wave, at: datetime) -> list[tuple[Window, Any]]:
    spans = spans_of(wave, at)
    return [(window, spans[window.id]) for window in wave.windows]


def wave_tone(state: str) -> str:
    """The colour of a state of a wave or a member: a class of the style sheet."""
    return "bad" if state == MemberState.FAILED else _TONES.get(state, "quiet")


def wave_words(state: str) -> str:
    return state.replace("_", " ").capitalize()


def waves_router(
    pages: Pages, waves: Waves, forecaster: Forecaster, deliveries: Deliveries, importer: Importer, *, rehearsing: Rehearsing
) -> APIRouter:
    """The pages of waves."""
    pages.add_filters(wave_tone, wave_words)
    made = WavePages(pages, waves, forecaster, deliveries, rehearsing)
    new = NewWavePages(pages, waves, importer)
    here = "/waves/{wave_id}"
    return pages.router(
        {
            "GET /waves": made.waves,
            "GET /waves/new": new.begin,
            "POST /waves/new/file": new.of_file,
            "POST /waves/new/query": new.of_query,
            "POST /waves/new/selection": new.of_selection,
            f"GET {here}": made.wave,
            f"POST {here}/simulate": made.simulate,
            f"GET {here}/{{action_name}}": made.confirm,
            f"POST {here}/{{action_name}}": made.act,
            f"GET {here}/members/{{member_id}}/{{action_name}}": made.confirm_member,
            f"POST {here}/members/{{member_id}}/{{action_name}}": made.act_on_member,
        }
    )
