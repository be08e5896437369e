"""People's actions on waves: make them, start them, hold them, roll members back. Blocking code, called by the API.

Nothing here moves a VM: each method stores a request, and `carrying` executes it.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import datetime, timedelta
from uuid import UUID, uuid4

import structlog

from synvirt.acting import submitter
from synvirt.errors import BadRequest, Conflict, InvalidPlan
from synvirt.fleet.changing import change_members, make_changes, member_change, roll_back
from synvirt.fleet.model import (
    ALL_STATES,
    BEFORE_CUT_OVER,
    GOING,
    MEMBER_ENDS,
    REMOVABLE,
    SETTINGS,
    UNBEGUN,
    UNDER_WAY,
    Approval,
    ApprovalRequest,
    Member,
    MemberRequest,
    MemberState,
    RollBackRequest,
    Wave,
    WaveForecast,
    WaveRequest,
    WaveRetryRequest,
    WaveState,
    WaveSummary,
)
from synvirt.fleet.order import order
from synvirt.fleet.records import member_of, new_row, summary_of, wave_event, wave_of
from synvirt.fleet.webhooks import events as hooks
from synvirt.fleet.webhooks.events import Hooks
from synvirt.migrations.planning import schedule
from synvirt.migrations.planning.retrying import has_kept_copy
from synvirt.migrations.planning.windows import YEARS
from synvirt.model.job import Migration
from synvirt.model.kinds import Mode, State
from synvirt.model.plan import MigrationPlan
from synvirt.model.values import now
from synvirt.nearest import in_short
from synvirt.store.documents import Unreadable, parsed
from synvirt.store.waves import MemberChange, MemberRow, NewWave, WaveChange, WaveCheck, WaveRow, WaveRows

log = structlog.get_logger(__name__)

# A wave that is to begin now may come from a machine whose clock is late.
CLOCKS_DIFFER = timedelta(hours=1)


def is_warm(member: MemberRequest) -> bool:
    """Whether its copy is made while the guest runs; others are copied within their cut-over."""
    return member.plan.source.Live is not None and member.plan.mode is Mode.WARM


def plan_of(wave: Wave, member: Member) -> MigrationPlan:
    """The member's plan, with what its wave decides: the destination, when it cuts over, and the least of the rates."""
    target, warm, limits = member.plan.target, member.plan.warm, member.plan.limits
    if member.destination is not None:
        target = target.model_copy(update={"destination": member.destination})
    if is_warm(member):
        warm = warm.model_copy(update={"cutover": "manual", "untracked": "fail"})
    if wave.limits.bandwidth_bps is not None:
        most = min(filter(None, (limits.bandwidth_bps, wave.limits.bandwidth_bps)))
        limits = limits.model_copy(update={"bandwidth_bps": most})
    return member.plan.model_copy(update={"target": target, "warm": warm, "limits": limits})


class Waves:
    """`changed()`: called after each request, so that it is handled at once."""

    def __init__(self, rows: WaveRows, *, changed: Callable[[], None] = lambda: None, own: Hooks | None = None) -> None:
        self.rows = rows
        self.changed = changed
        self._hooks = own or Hooks()

    # ── waves ────────────────────────────────────────────────────────────────────────────────────────────────────────

    def create(self, asked: WaveRequest) -> Wave:
        """Makes a draft. InvalidPlan names what is wrong with it."""
        return self.create_all([asked])[0]

    def create_all(self, asked: Sequence[WaveRequest]) -> list[Wave]:
        """Makes drafts: all of them, or none."""
        for one in asked:
            self._check(one)
        made = []
        with self._hooks.held():
            new = []
            for one in asked:
                shown, sealed = self._hooks.made(one.hooks)
                wave = _made(one, uuid4()).model_copy(update={"hooks": shown})
                rows = [new_row(member) for member in one.members]
                new.append(NewWave(wave.id, wave.name, wave.state, wave, rows, wave_event(wave), sealed))
                made.append(wave)
            self.rows.add_all(new)
        return made

    def replace(
        self,
        wave_id: UUID,
        asked: WaveRequest,
        *,
        check: WaveCheck = lambda row, members: None,
        keeps_hooks: bool = False,
    ) -> Wave:
        """Replaces a draft; Conflict, if it is no draft any more. `keeps_hooks`: its webhooks stay."""
        self._check(asked)
        rows = [new_row(member) for member in asked.members]
        event = wave_event(wave_of(self.rows.get(wave_id)))
        with self._hooks.held():
            shown, sealed = self._hooks.made(asked.hooks)

            def other(before: Wave) -> Wave:
                kept = {"created_at": before.created_at, "submitted_by": before.submitted_by}
                return _made(asked, wave_id).model_copy(update=kept | {"hooks": before.hooks if keeps_hooks else shown})

            new = None if keeps_hooks else sealed
            return self.rows.replace(wave_id, WaveState.DRAFT, other, Wave, members=rows, event=event, hooks=new, check=check)

    def _check(self, asked: WaveRequest) -> None:
        check(asked)
        self._hooks.check(asked.hooks)

    def page(
        self, *, limit: int, cursor: int | None, states: Sequence[WaveState] = (), name: str | None = None
    ) -> tuple[list[WaveSummary], int | None]:
        """A page of at most `limit` waves, newest first, and the cursor of the next page; None: it was the last."""
        rows, following = self.rows.page(limit=limit, cursor=cursor, states=[str(one) for one in states], name=name)
        found = []
        for row in rows:
            try:
                found.append(summary_of(row))
            except Unreadable as error:  # doctor reports it; the other waves are listed
                log.warning("a stored wave is left alone", wave=str(row.id), cause=error.detail)
        return found, following

    def summary(self, wave_id: UUID) -> WaveSummary:
        """NotFound."""
        return summary_of(self.rows.counted(wave_id))

    def load(self, wave_id: UUID) -> tuple[WaveRow, list[MemberRow]]:
        """NotFound."""
        return self.rows.whole(wave_id)

    def whole(self, wave_id: UUID) -> Wave:
        """The wave with all of its members. NotFound."""
        row, members = self.load(wave_id)
        return wave_of(row, (member_of(one) for one in members))

    def remove(self, wave_id: UUID, *, check: WaveCheck = lambda row, members: None) -> None:
        """Removes a draft or an ended wave. Its jobs stay."""
        self.rows.remove(wave_id, REMOVABLE, check)

    # ── requests for a wave ──────────────────────────────────────────────────────────────────────────────────────────

    def go(self, wave_id: UUID) -> Wave:
        """Starts a draft, or continues a held wave."""
        if self.rows.get(wave_id).state == WaveState.DRAFT:
            whole = self.whole(wave_id)
            if not whole.members:
                raise Conflict(f"wave {whole.name} has no members", hint="add some first")

        def gone(before: Wave) -> Wave:
            return before.model_copy(
                update={"state": WaveState.RUNNING, "reason": None, "started_at": before.started_at or now()}
            )

        return self._change(wave_id, {WaveState.DRAFT, *GOING}, gone)

    def hold(self, wave_id: UUID) -> Wave:
        """Begins nothing new; running copies and cut-overs go on."""
        asking = submitter()
        reason = f"It was held by {asking.account}." if asking else "It was held."
        return self._change(
            wave_id, GOING, lambda before: before.model_copy(update={"state": WaveState.HELD, "reason": reason})
        )

    def cancel(self, wave_id: UUID) -> Wave:
        """Skips waiting members, cancels running jobs, and powers their sources on again. Healthy members stay here."""
        ended = {"state": WaveState.CANCELLED, "finished_at": now(), "reason": "It was cancelled."}
        return self._change(wave_id, {WaveState.DRAFT, *UNDER_WAY}, lambda before: before.model_copy(update=ended))

    def roll_back(self, wave_id: UUID, asked: RollBackRequest) -> Wave:
        """Rolls back the named members, or all: powers sources on again, stops guests here, and keeps their copies. What a
        guest wrote here since its cut-over does not go back with it."""
        row, members = self.load(wave_id)
        if row.state == WaveState.DRAFT:
            raise Conflict(f"wave {wave_id} has not begun", hint="there is nothing to roll back")
        named = set(asked.members)
        if unknown := named - {one.member_id for one in members}:
            raise BadRequest(f"members: the wave has no member {in_short(sorted(unknown))}")
        if not named:
            update = {"state": WaveState.ROLLING_BACK, "reason": "It is rolled back.", "finished_at": None}
            states = {*UNDER_WAY, WaveState.COMPLETED, WaveState.FAILED, WaveState.CANCELLED}
            return self._change(wave_id, states, lambda before: before.model_copy(update=update))
        left, cause = named, "It was rolled back."
        while left:
            chosen = [member_of(one) for one in members if one.member_id in left]
            begun = [one for one in chosen if one.job_id is not None and not one.is_back]
            unbegun = [one for one in chosen if one.job_id is None and one.state in UNBEGUN]
            done = roll_back(self.rows, wave_id, begun, cause)
            done += change_members(self.rows, wave_id, unbegun, UNBEGUN, {"state": MemberState.SKIPPED, "cause": cause})
            # Those that were begun, or tried again, since they were read.
            left = {one.id for one in (*begun, *unbegun)} - set(done)
            members = self.rows.members(wave_id)[0] if left else []
        self.changed()
        return wave_of(self.rows.get(wave_id))

    def approve(self, wave_id: UUID, asked: ApprovalRequest) -> Wave:
        """BadRequest, if no member waits for that approval, or the wave has no canary."""
        asking, at = submitter(), now()
        account = asking.account if asking else "local"
        if asked.canary:
            word = Approval(approver="canary", account=account, at=at)

            def with_word(before: Wave) -> Wave:
                if before.canary is None:
                    raise BadRequest("canary: this wave has none", hint="its members all begin without one")
                return before if before.canary_approval else before.model_copy(update={"canary_approval": word})

            return self._change(wave_id, {WaveState.DRAFT, *GOING}, with_word)
        assert asked.approver is not None
        word = Approval(approver=asked.approver, account=account, at=at)
        named = set(asked.members)
        members = self._members(wave_id, ALL_STATES)
        chosen = [one for one in members if asked.approver in one.approvers and (not named or one.id in named)]
        if missing := named - {one.id for one in chosen}:
            raise BadRequest(f"members: {in_short(sorted(missing))} do not need the approval of {asked.approver}")
        if not chosen:
            known = sorted({name for one in members for name in one.approvers})
            theirs = f"its members need those of {in_short(known)}" if known else "its members need none"
            hint = f"{theirs}; that the others go on after the canary is approved by itself: --canary, or canary: true"
            raise BadRequest(f"approver: no member needs the approval of {asked.approver}", hint=hint)

        def approved(before: Member) -> Member | None:
            had = {given.approver for given in before.approvals}
            given = {"approvals": (*before.approvals, word), "waits_for": None}
            return None if word.approver in had or word.approver not in before.approvers else before.model_copy(update=given)

        make_changes(self.rows, wave_id, [MemberChange(one.id, ALL_STATES, Member, approved) for one in chosen])
        self.changed()
        return wave_of(self.rows.get(wave_id))

    def set_forecast(self, wave_id: UUID, forecast: WaveForecast, planned: Mapping[str, datetime | None]) -> None:
        """Stores the forecast with the wave, in any state. `planned`: when members cut over; those that already did keep their
        old plan."""
        self.rows.rewrite_members(
            wave_id,
            BEFORE_CUT_OVER,
            Member,
            lambda before: before.model_copy(update={"planned_at": planned[before.id]}),
            only=planned,
        )
        self.rows.change(
            wave_id, frozenset(WaveState), lambda before: before.model_copy(update={"forecast": forecast}), Wave, wave_event
        )

    # ── requests for a member ────────────────────────────────────────────────────────────────────────────────────────

    def skip(self, wave_id: UUID, member_id: str) -> Member:
        """Skips a member: if it has a job, that is cancelled, and its source powered on again."""
        cause, done = "It was skipped.", list[str]()
        while not done:  # it may be begun, or tried again, after it was read
            member = member_of(self.rows.member(wave_id, member_id))
            if member.state in MEMBER_ENDS - {MemberState.FAILED}:
                raise Conflict(f"{member_id} is {member.state}", hint="roll it back, if it is to go back to its source")
            if member.job_id is not None and member.state not in MEMBER_ENDS:
                done = roll_back(self.rows, wave_id, [member], cause)
            else:
                fields = {"state": MemberState.SKIPPED, "cause": cause}
                done = change_members(self.rows, wave_id, [member], {member.state}, fields)
        self.changed()
        return member_of(self.rows.member(wave_id, member_id))

    def retry(self, wave_id: UUID, member_id: str) -> Member:
        """Begins a failed, skipped or rolled back member again with a new job, which uses a failed job's volumes if those were
        kept. If its guest booted here but was not healthy, it is only checked again: it runs here, and its source is off, until
        it is rolled back."""
        row, wave = self.rows.member(wave_id, member_id), self.rows.get(wave_id)
        member = _to_retry(row, wave)
        host, last = self._last_job(row, member)
        if member.state is not MemberState.ROLLED_BACK and last is not None and last.state is State.COMPLETED:
            fields: dict[str, object] = {"state": MemberState.CUTTING_OVER, "cause": None}
            submitted = None
        else:
            submitted = False
            goes_on: dict[str, object] = {}
            if last is not None and has_kept_copy(last):
                place = {"host": member.host and host, "destination": member.destination, "placed": member.placed}
                goes_on = {"retry_of": last.id, **place}
            fields = {**_FRESH, **goes_on}
        change = member_change(member, _RETRIED, fields, submitted=submitted)
        make_changes(self.rows, wave_id, [change], of_wave=_GOES_ON)
        self.changed()
        return member_of(self.rows.member(wave_id, member_id))

    def retry_all(self, wave_id: UUID, asked: WaveRetryRequest) -> Wave:
        """Retries the named members, or all that failed. BadRequest names unknown members. Conflict, before any is retried:
        none has failed, or a named one cannot be retried."""
        found = self.rows.get(wave_id)
        rows = {row.member_id: row for row in self.rows.members(wave_id)[0]}
        names = list(dict.fromkeys(asked.members))
        if unknown := set(names) - rows.keys():
            raise BadRequest(f"members: the wave has no member {in_short(sorted(unknown))}")
        for name in names:
            _to_retry(rows[name], found)
        names = names or [name for name, row in rows.items() if row.state == MemberState.FAILED and not row.rolling_back]
        if not names:
            hint = "name the members that are to be tried again"
            raise Conflict(f"no member of wave {wave_of(found).name} has failed", hint=hint)
        for name in names:
            self.retry(wave_id, name)
        return wave_of(self.rows.get(wave_id))

    def _last_job(self, row: MemberRow, member: Member) -> tuple[str | None, Migration | None]:
        """The last job with its host. If it was never submitted, the failed one that it would have continued."""
        for job_id in (member.job_id, None if row.submitted else member.retry_of):
            if job_id is not None and (found := self.rows.job(job_id)) is not None:
                host, document, version = found
                return host, parsed(Migration, document, version)
        return None, None

    def _change(self, wave_id: UUID, expected: Iterable[WaveState], change: Callable[[Wave], Wave]) -> Wave:
        done = self.rows.change(wave_id, frozenset(expected), change, Wave, wave_event, deliveries=hooks.of_wave)
        self.changed()
        return done

    def _members(self, wave_id: UUID, states: Iterable[MemberState]) -> list[Member]:
        return [member_of(row) for row in self.rows.members(wave_id, states=[str(one) for one in states])[0]]


_RETRIED = frozenset({MemberState.FAILED, MemberState.SKIPPED, MemberState.ROLLED_BACK})
_KEPT_AT_RETRY = frozenset({*MemberRequest.model_fields, "approvals", "planned_at"})
# Including its state: it waits.
_FRESH = {name: Member.model_fields[name].get_default() for name in Member.model_fields.keys() - _KEPT_AT_RETRY}


def _to_retry(row: MemberRow, wave: WaveRow) -> Member:
    """Conflict, if the member cannot be retried."""
    member = member_of(row)
    if wave.state not in {*GOING, WaveState.FAILED} or member.state not in _RETRIED or row.rolling_back:
        raise Conflict(
            f"{member.id} is {member.state}, in a wave that is {wave.state}",
            hint="what failed, was skipped or rolled back is tried again while the wave is under way",
        )
    return member


def _going(before: Wave) -> Wave:
    return before.model_copy(update={"state": WaveState.RUNNING, "reason": None, "finished_at": None})


# A failed wave goes on with the retried member, as ended waves are not handled.
_GOES_ON = WaveChange(frozenset({WaveState.FAILED}), _going, Wave, wave_event, hooks.of_wave)


def check(asked: WaveRequest) -> None:
    """InvalidPlan: what prevents the wave from running."""
    order(asked)
    if asked.start_at is not None and not YEARS[0] <= asked.start_at.year <= YEARS[1]:
        raise InvalidPlan(f"start_at is outside of the years {YEARS[0]} to {YEARS[1]}", hint="leave it out: it begins at go")
    if asked.start_at is not None and asked.start_at < now() - CLOCKS_DIFFER:
        raise InvalidPlan(f"start_at is in the past: {asked.start_at.isoformat()}", hint="leave it out: it begins at go")
    for place, member in enumerate(asked.members):
        if member.plan.schedule.start_at is not None:
            raise InvalidPlan(
                f"members[{place}].plan.schedule: the wave says when {member.id} begins",
                hint="leave schedule out; start_at of the wave, its windows and its order say when",
            )
        if member.plan.warm.window_id is not None:
            raise InvalidPlan(
                f"members[{place}].plan.warm.window_id: the wave says when {member.id} cuts over",
                hint="leave it out; window_id of the member names a window of the wave",
            )
        if member.plan.warm.schedule is not None:
            schedule.check(member.plan, now())
    if not asked.windows:
        return
    for place, member in enumerate(asked.members):
        if not is_warm(member) and member.outage_budget_s is None:
            raise InvalidPlan(
                f"members[{place}].outage_budget_s: {member.id} is copied while it is off, for an unknown time",
                hint="give it a budget: it cuts over while that fits into its window, and is rolled back where it does not",
            )


def with_settings_of(seen: Wave) -> WaveCheck:
    """Conflict, if more of the wave than its members was changed since it was `seen`."""

    def check(row: WaveRow, members: Sequence[MemberRow]) -> None:
        if _settings(wave_of(row)) != _settings(seen):
            raise Conflict(f"wave {seen.name} was changed meanwhile", hint="look at the wave, and import again")

    return check


def _settings(wave: Wave) -> dict[str, object]:
    """All that a request says of a wave besides its members."""
    return {name: getattr(wave, name) for name in SETTINGS}


def _made(asked: WaveRequest, wave_id: UUID) -> Wave:
    return Wave(
        id=wave_id,
        name=asked.name,
        groups=asked.groups,
        windows=asked.windows,
        limits=asked.limits,
        canary=asked.canary,
        on_failure=asked.on_failure,
        start_at=asked.start_at,
        submitted_by=submitter(),
        created_at=now(),
    )
