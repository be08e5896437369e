"""Executes waves: one host leads them all. It checks their jobs, asks `scheduling` what begins now, and starts that.

    tick ─▶ lead? ─▶ a wave: what its jobs came to ─▶ place ─▶ decide ─▶ noted: member, state, job's id ─▶ asked to cut over
      └───▶ each host: submits what was noted for it             └── a crash in between: the next tick goes on from the note

All knowledge is in rows, and each step may be done twice: a job's id is stored before the job is submitted, and a cut-over is
requested until its window is over. What only a job's own host can do is done there (`host_side`).
"""

import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from datetime import datetime
from uuid import UUID, uuid4

import structlog

from synvirt.destinations import DestinationAway
from synvirt.errors import Conflict, NotFound, PersistFailed, SourceUnreachable, SynvirtError
from synvirt.fleet.changing import change_members, failed, make_changes, member_change, roll_back
from synvirt.fleet.facts import Facts
from synvirt.fleet.host_side import HostSide
from synvirt.fleet.job_facts import closes, is_fresh, is_too_late, may_begin_until, openings_in_use, outage_of, why_ended
from synvirt.fleet.model import (
    GOING,
    MEMBER_ENDS,
    RUNS,
    UNBEGUN,
    UNDER_WAY,
    UNENDED,
    WAVE_ENDS,
    Member,
    MemberState,
    Wave,
    WaveState,
)
from synvirt.fleet.placing import NEXT, Placing, is_placed
from synvirt.fleet.reasons import is_said_here
from synvirt.fleet.records import wave_event
from synvirt.fleet.scheduling import Decision, decide
from synvirt.fleet.seeing import Seeing, Seen
from synvirt.fleet.waves import is_warm, plan_of
from synvirt.fleet.webhooks.delivering import Delivering
from synvirt.fleet.webhooks.events import deliveries, of_wave
from synvirt.live import VmRow
from synvirt.migrations.intake import Intake
from synvirt.migrations.planning.openings import Openings
from synvirt.model.job import Migration
from synvirt.model.kinds import State
from synvirt.model.values import now
from synvirt.repeating import repeated
from synvirt.store.wave_hooks import HookRows
from synvirt.store.waves import MemberChange, WaveRows

log = structlog.get_logger(__name__)

TICK_S = 2.0
# With thousands of members a tick takes a few hundred milliseconds: at most a tenth of one core.
IDLE_FACTOR = 10
# A source that answers slowly delays other submissions no longer than this; the next tick goes on.
SUBMITTING_S = 8.0
S = MemberState
# By the state of a member whose job was not submitted: how it was before.
_NOT_BEGUN: Mapping[S, Mapping[str, object]] = {
    S.SYNCING: {"state": S.WAITING, "job_id": None},
    S.CUTTING_OVER: {"state": S.READY, "job_id": None, "cut_over_at": None},
}
_CANCELLED = "The wave was cancelled."
_MAY_BE_OFF = "; its source may be off: its job tries to power it on for a day."


class Carrying:
    """`placing`: chooses hosts; None: the leading host submits all. `delivering`: sends to webhooks; None: nothing is sent.
    `vm_of`: of a source's VM that has no job yet (ListedVms.of). `unreachable`: is notified of a source that does not answer.
    `clock`: for tests, which shorten a night to a second."""

    def __init__(
        self,
        intake: Intake,
        side: HostSide,
        placing: Placing | None = None,
        *,
        delivering: Delivering | None = None,
        vm_of: Callable[[UUID, str], VmRow | None] = lambda source_id, vm_id: VmRow(vm_id, vm_id, ""),
        unreachable: Callable[[UUID], None] = lambda source_id: None,
        clock: Callable[[], datetime] = now,
    ) -> None:
        self._intake, self._side, self._delivering, self._clock = intake, side, delivering, clock
        self._placing, self._vm_of, self._unreachable = placing, vm_of, unreachable
        self._rows: WaveRows = intake.store.waves
        self._hooks: HookRows = intake.store.wave_hooks
        self._seeing = Seeing(self._rows)
        # Why waves cannot go on, in this tick and in the last one: a document that cannot be read stays so for days.
        self._causes: dict[UUID, str] = {}
        self._causes_before: dict[UUID, str] = {}
        self._wake = threading.Event()
        self._ticking, self._paused = threading.Lock(), False

    def pause(self) -> None:
        """This host has lost its lease: when this returns, it does nothing more to a guest or a source."""
        self._paused = True
        with self._ticking:
            pass

    def resume(self) -> None:
        self._paused = False
        self.wake()

    def wake(self) -> None:
        self._wake.set()

    def rest(self, for_s: float) -> None:
        """Waits until it is woken."""
        if self._wake.wait(for_s):
            self._wake.clear()

    def tick(self) -> None:
        """Never raises: what fails now is tried again in the next tick."""
        with self._ticking:
            if not self._paused:
                self._tick()

    def _tick(self) -> None:
        try:
            if self._delivering is not None:
                self._delivering.look()
            waves = self._rows.unended(sorted(WAVE_ENDS), sorted(MEMBER_ENDS), WaveState.DRAFT)
            if not waves:
                self._seeing.forget()
                return
            self._causes_before, self._causes = self._causes, {}
            with self._rows.leading() as leads:
                led: dict[UUID, Seen | None] = {}
                for wave_id in waves if leads else ():
                    self._rows.keep_lead()
                    led[wave_id] = self._guarded(wave_id, None, lambda seen: self._lead(seen, waves))
                # After the decisions of all waves, as sources are asked here: one that hangs takes a minute, and the lead.
                for wave_id in waves:
                    self._guarded(wave_id, led.get(wave_id), lambda seen: self._follow_orders(seen, leads=leads))
        except PersistFailed as error:
            log.warning("waves cannot be inspected", cause=error.detail)

    def _guarded(self, wave_id: UUID, seen: Seen | None, look: Callable[[Seen], Seen]) -> Seen | None:
        """`seen`: an earlier look in this tick. Gives the newest; None: it failed."""
        try:
            return look(self._seeing.seen(wave_id) if seen is None else self._seeing.again(seen))
        except NotFound:  # removed meanwhile
            pass
        except PersistFailed:
            raise
        except Exception as error:  # whatever it was, the other waves are handled too
            cause, is_ours = str(error), isinstance(error, SynvirtError)
            if cause not in (self._causes.get(wave_id), self._causes_before.get(wave_id)):
                log.warning("a wave cannot go on now", wave=str(wave_id), cause=cause, exc_info=not is_ours)
            self._causes[wave_id] = cause
        return None

    # ── a wave ───────────────────────────────────────────────────────────────────────────────────────────────────────

    def _follow_orders(self, seen: Seen, *, leads: bool) -> Seen:
        """Does what this host must do."""
        broke = None if seen.wave.state in WAVE_ENDS else self._submit(seen, leads=leads)
        if not self._side.look(seen, leads=leads):
            self.wake()
        if broke is not None:
            raise broke
        return seen

    def _lead(self, seen: Seen, under_way: Sequence[UUID]) -> Seen:
        wave, at = seen.wave, self._clock()
        if self._placing is not None and self._placing.release(wave, seen.rows, seen.jobs):
            seen = self._seeing.seen(wave.id)
        self._observe(seen, at)
        seen = self._seeing.again(seen)
        self._rows.keep_lead()
        if self._placing is not None and seen.wave.state not in GOING:
            self._placing.count(seen.wave, seen.jobs)
        if seen.wave.state in WAVE_ENDS:
            self._cancel_what_is_left(seen)
            return seen
        if seen.wave.state is WaveState.ROLLING_BACK:
            self._roll_back(seen)
        elif seen.wave.state in GOING:
            unplaced: Mapping[str, str] = {}
            if self._placing is not None:
                unplaced_by, moved = self._placing.look(
                    seen.wave, seen.rows, seen.jobs, under_way=under_way, stuck=self._causes_before
                )
                seen = self._seeing.seen(wave.id) if moved else seen
                left = [one for one in seen.wave.members if one.host is None]
                # A member that is retried only now is placed at the next tick, and does not begin before.
                new = {one.id: NEXT for one in left if one.state is S.WAITING and is_placed(one)}
                unplaced = new | {one.id: unplaced_by[one.id] for one in left if one.id in unplaced_by}
            self._decide(seen, unplaced, at)
        seen = self._seeing.again(seen)
        self._finish(seen)
        return seen

    def _decide(self, seen: Seen, unplaced: Mapping[str, str], at: datetime) -> None:
        wave = seen.wave
        # A member that is being rolled back does not go on, and no other cut-over may depend on it.
        states = {one.id: S.ROLLED_BACK if seen.rows[one.id].rolling_back else one.state for one in wave.members}
        lost = self._intake.standing()
        decision, reasons = decide(
            wave,
            states,
            {one.id: self._facts(one, seen, unplaced.get(one.id), lost) for one in wave.members if states[one.id] in UNENDED},
            at,
            approved={one.id: [word.approver for word in one.approvals] for one in wave.members if one.approvals},
            cut_over_at={one.id: one.cut_over_at for one in wave.members if one.cut_over_at is not None},
            canary_approved=wave.canary_approval is not None,
            hold=self._why_held(wave),
            order_=self._seeing.order_of(wave),
        )
        # If this process was frozen, its decisions may be out of date: then they are not executed.
        self._rows.keep_lead()
        if decision.canary_waits and wave.hooks:
            self._hooks.add_once(wave.id, deliveries(wave, "canary_waits"))
        self._begin(wave, decision, at)
        said = [(name, row.waits_for, reasons.get(name)) for name, row in seen.rows.items()]
        new = {name: now_ for name, was, now_ in said if now_ != was and is_said_here(states[name], was, now_)}
        self._rows.put_reasons(wave.id, new)

    def _why_held(self, wave: Wave) -> str | None:
        if wave.state is WaveState.HELD:
            return wave.reason or "The wave is held."
        required = [hook.id for hook in wave.hooks if hook.required]
        owed = self._hooks.owed(wave.id, required) if required else None
        if owed is None:
            return None
        why = f": {owed.answer}" if owed.answer else "."
        return f"A required webhook has not accepted {owed.event} yet{why}"

    def _begin(self, wave: Wave, decision: Decision, at: datetime) -> None:
        """Stores the decisions; the rest follows from the stored notes."""
        by_id, changes = {one.id: one for one in wave.members}, list[MemberChange]()
        for name in decision.begin:
            member = by_id[name]
            # A cold member has nothing to copy in advance.
            fields: dict[str, object] = {"state": S.READY}
            if is_warm(member):
                fields = {"state": S.SYNCING, "job_id": uuid4()}
            changes.append(member_change(member, {S.WAITING}, fields, submitted=False))
        for name in decision.cut_over:
            member = by_id[name]
            fields = {"state": S.CUTTING_OVER, "cut_over_at": at}
            if not is_warm(member):
                fields["job_id"] = uuid4()
            changes.append(member_change(member, {S.READY}, fields))
        make_changes(self._rows, wave.id, changes)

    def _roll_back(self, seen: Seen) -> None:
        """Rolls back members that were moved or are being moved; those that have not begun are skipped."""
        begun = [one for one in seen.wave.members if one.job_id is not None and not seen.rows[one.id].rolling_back]
        roll_back(self._rows, seen.wave.id, begun, "The wave was rolled back.")
        unbegun = [one for one in seen.wave.members if one.job_id is None]
        fields = {"state": S.SKIPPED, "cause": "The wave was rolled back."}
        change_members(self._rows, seen.wave.id, unbegun, UNBEGUN, fields)

    def _finish(self, seen: Seen) -> None:
        wave = seen.wave
        if any(one.state not in MEMBER_ENDS or seen.rows[one.id].rolling_back for one in wave.members):
            return
        failed = [one for one in wave.members if one.state is S.FAILED]
        back = [one for one in wave.members if one.state is S.ROLLED_BACK]
        if wave.state is WaveState.ROLLING_BACK:
            state, reason = WaveState.ROLLED_BACK, "It was rolled back."
        elif failed or back:
            # Not why it was held before: that was the first failure alone, or a person's wish.
            were = "was" if len(back) == 1 else "were"
            outcome = f"{len(failed)} of {len(wave.members)} failed, {len(back)} {were} rolled back."
            first = next((f" {one.id} failed: {one.cause}" for one in failed if one.cause), "")
            state, reason = WaveState.FAILED, outcome + first
        else:
            state, reason = WaveState.COMPLETED, None
        fields = {"state": state, "reason": reason, "finished_at": now()}
        with suppress(Conflict):  # a member has been retried meanwhile
            self._rows.change(
                wave.id,
                UNDER_WAY,
                lambda before: before.model_copy(update=fields),
                Wave,
                wave_event,
                deliveries=of_wave,
                member_ends=sorted(MEMBER_ENDS),
            )

    # ── its jobs ─────────────────────────────────────────────────────────────────────────────────────────────────────

    def _observe(self, seen: Seen, at: datetime) -> None:
        openings, changes = openings_in_use(seen.wave, at), list[MemberChange]()
        try:
            for member in seen.wave.members:
                if member.job_id is not None and (member.state in RUNS or seen.rows[member.id].rolling_back):
                    fields = self._observed(seen, member, openings, at)
                    changes += [member_change(member, {member.state}, fields)] if fields else []
        finally:  # also where the job of one of them is in trouble
            make_changes(self._rows, seen.wave.id, changes)

    def _observed(self, seen: Seen, member: Member, openings: Openings, at: datetime) -> dict[str, object]:
        """The fields of a begun member that its job changes; those of a failed one are written at once."""
        job, row = seen.job_of(member), seen.rows[member.id]
        if job is not None and job.restarted_by is not None:
            return {"job_id": job.restarted_by}
        if row.rolling_back:  # the job's host ends it
            return {}
        if job is None:
            if row.submitted and member.job_id not in seen.unreadable:
                self._failed(seen, member, "Its job was removed.")
        elif job.state is State.CANCELLED and seen.wave.state is WaveState.CANCELLED and member.cause is None:
            if not self._side.is_owed_power(job):
                return {"state": S.ROLLED_BACK, "cause": _CANCELLED}
            roll_back(self._rows, seen.wave.id, [member], _CANCELLED)
        elif job.state in (State.FAILED, State.CANCELLED):
            cause = member.cause or why_ended(job)
            self._failed(seen, member, f"{cause.rstrip('.')}{_MAY_BE_OFF}" if self._side.is_owed_power(job) else cause)
        else:
            return self._followed(seen, member, job, openings, at)
        return {}

    def _followed(self, seen: Seen, member: Member, job: Migration, openings: Openings, at: datetime) -> dict[str, object]:
        """The same, for a job that runs or has completed."""
        if is_warm(member) and job.held:
            if member.state is S.CUTTING_OVER:
                is_asked = self._intake.store.cutover_requested(job.id)
                if not is_asked and not self._ask_to_cut_over(seen, member, job, openings, at):
                    # The rest of the window is too short now: the guest runs on at its source, and waits for the next.
                    return {"state": S.READY, "cut_over_at": None}
            elif member.state is S.SYNCING and is_fresh(job):
                return {"state": S.READY}
        elif member.state is not S.CUTTING_OVER:
            if is_warm(member) and job.state not in (State.QUEUED, State.COPYING_FULL):  # the cut-over was requested elsewhere
                return {"state": S.CUTTING_OVER, "cut_over_at": at}
        elif not job.ended and (member.cause is not None or self._is_overdue(seen, member, openings, at)):
            self._cancel(job)
        return {}

    def _is_overdue(self, seen: Seen, member: Member, openings: Openings, at: datetime) -> bool:
        """Whether its window has closed. It is noted before its job is cancelled, as it says why."""
        until = closes(seen.wave, member, openings)
        if until is None or at < until:
            return False
        cause = "Its window closed before it was done."
        change_members(self._rows, seen.wave.id, [member], {S.CUTTING_OVER}, {"cause": cause})
        return True

    def _ask_to_cut_over(self, seen: Seen, member: Member, job: Migration, openings: Openings, at: datetime) -> bool:
        """Requests the cut-over. False, if it would not end within the window any more."""
        if is_too_late(seen.wave, member, job, openings, at):
            return False
        self._intake.store.request_cutover(job.id, until=may_begin_until(seen.wave, member, job, openings))
        return True

    def _submit(self, seen: Seen, *, leads: bool) -> Exception | None:
        """Submits what was noted for this host, in the order of the wave, as long as the sources answer quickly. A member
        without a host is submitted by the leader. Gives the first error of an unexpected kind: it stops no other member."""
        began, broke, unbegun = time.monotonic(), None, list[MemberChange]()
        openings = openings_in_use(seen.wave, self._clock())
        for member in seen.wave.members:
            row = seen.rows[member.id]
            if member.job_id is None or row.submitted or row.rolling_back or member.state not in RUNS:
                continue
            if member.job_id in seen.unreadable:
                continue
            if not self._is_ours(member, leads=leads):
                continue
            if time.monotonic() - began > SUBMITTING_S:
                self.wake()
                break
            job = seen.job_of(member)
            if job is None and member.state in _NOT_BEGUN and self._waits_again(seen.wave, member, openings):
                unbegun.append(member_change(member, {member.state}, _NOT_BEGUN[member.state]))
                continue
            try:
                if job is None and not self._submitted(seen, member, member.job_id):
                    if self._rows.get(seen.wave.id).state != seen.wave.state:
                        self.wake()
                        break
                    continue
            except PersistFailed:
                raise
            except Exception as error:
                broke = broke or error
                self._rows.put_reasons(
                    seen.wave.id, {member.id: f"Its job cannot be submitted now: {type(error).__name__}: {error}"}
                )
                continue
            change_members(self._rows, seen.wave.id, [member], {member.state}, {}, submitted=True)
        if make_changes(self._rows, seen.wave.id, unbegun):
            self.wake()  # what they wait for now is said at once
        return broke

    def _is_ours(self, member: Member, *, leads: bool) -> bool:
        """Whether this host submits it. One without a host only while this host leads."""
        if leads and member.host is None:
            self._rows.keep_lead()
            return True
        return member.host == self._side.host

    def _waits_again(self, wave: Wave, member: Member, openings: Openings) -> bool:
        """Whether a member without a job does not begin now: its wave is held since, or its window is over."""
        return wave.state is WaveState.HELD or is_too_late(wave, member, None, openings, self._clock())

    def _submitted(self, seen: Seen, member: Member, job_id: UUID) -> bool:
        wave, plan = seen.wave, plan_of(seen.wave, member)
        try:
            if member.retry_of is None:
                self._intake.submit(plan, job_id=job_id, submitted_by=wave.submitted_by)
            else:
                self._intake.go_on_from(member.retry_of, plan, job_id=job_id, submitted_by=wave.submitted_by)
        except PersistFailed:
            raise
        except SourceUnreachable as error:
            self._rows.put_reasons(wave.id, {member.id: f"Its source does not answer: {error.detail}"})
            if plan.source_ref.kind == "live_vm":
                self._unreachable(plan.source_ref.source_id)
            return False
        except DestinationAway as error:
            self._rows.put_reasons(wave.id, {member.id: f"Its destination is away: {error.detail}"})
            return False
        except SynvirtError as error:
            # Where another host has submitted it at this moment, which had the member before, the VM is taken by its own job.
            if self._rows.job(job_id) is not None:
                return True
            self._failed(seen, member, error.detail)
            return False
        return True

    def _failed(self, seen: Seen, member: Member, cause: str) -> None:
        failed(self._rows, seen.wave, member, cause)

    def _cancel_what_is_left(self, seen: Seen) -> None:
        """Cancels running jobs of a wave that has ended."""
        left = [one for one in seen.wave.members if one.state not in MEMBER_ENDS and not seen.rows[one.id].rolling_back]
        unbegun = [one for one in left if one.job_id is None]
        fields = {"state": S.SKIPPED, "cause": _CANCELLED}
        change_members(self._rows, seen.wave.id, unbegun, UNBEGUN, fields)
        jobs = [(one, seen.job_of(one)) for one in left if one.job_id is not None]
        # The host of a job that was not submitted may do that at this moment. So that host ends it.
        unsubmitted = [one for one, job in jobs if job is None and not seen.rows[one.id].submitted]
        roll_back(self._rows, seen.wave.id, unsubmitted, _CANCELLED)
        for _, job in jobs:
            if job is not None and not job.ended:
                self._cancel(job)

    def _cancel(self, job: Migration) -> None:
        if not self._intake.store.cancel_requested(job.id):
            self._intake.cancel(job.id)

    def _facts(self, member: Member, seen: Seen, unplaced: str | None = None, lost: Collection[UUID] = ()) -> Facts:
        ref, job = member.plan.source_ref, seen.job_of(member)
        source = str(ref.source_id) if ref.kind == "live_vm" else "files"
        host: str | None = ""
        if job is not None and job.manifest is not None:
            host = job.manifest.host
        elif ref.kind == "live_vm" and member.state not in MEMBER_ENDS:
            row = self._vm_of(ref.source_id, ref.vm_id)
            host = None if row is None else row.host
        destination = member.destination or member.plan.target.destination or self._side.default_destination
        return Facts(
            f"{source}/{host}" if host else source,
            self._where(member.host or self._side.host, destination),
            outage=outage_of(member, job),
            placed=host is not None,
            unplaced=unplaced,
            lost=seen.jobs[job.id][0] if job is not None and job.id in lost else None,
        )

    def _where(self, host: str, destination: str) -> str:
        return f"{host}/{destination}" if self._placing is None else self._placing.where(host, destination)


@contextmanager
def carried(carrying: Carrying, *, every_s: float = TICK_S) -> Iterator[None]:
    """Runs ticks while the block runs."""

    def look() -> None:
        # Of the processor: after a tick that waited for a source, others must not wait ten times as long.
        began = time.thread_time()
        carrying.tick()
        carrying.rest(max(every_s, IDLE_FACTOR * (time.thread_time() - began)))

    with repeated(look, name="waves", every_s=0.0, ends_within_s=5.0, wake=carrying.wake):
        yield
