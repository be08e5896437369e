"""What a member's job says of the member. Pure."""

from datetime import datetime, timedelta

from synvirt.fleet.facts import Estimate
from synvirt.fleet.model import Member, MemberRequest, MemberState, Wave
from synvirt.fleet.waves import is_warm
from synvirt.migrations.planning.openings import Openings, openings_of
from synvirt.model.job import Migration
from synvirt.model.kinds import State

# In addition to the copy: the guest shuts down, and boots here. A guess, for a job without a forecast of its outage.
AROUND_COPY = Estimate(60, 240)


def outage_of(member: MemberRequest, job: Migration | None) -> Estimate | None:
    """The member's outage. None: not known yet. Without windows and budgets it is not used."""
    if not is_warm(member):
        budget = member.outage_budget_s or 0
        return Estimate(budget, budget)
    if job is None:
        return None
    if job.forecast is not None:
        copy_s = job.forecast.expected_downtime_s
    elif job.passes and job.passes[-1].kind != "full":
        copy_s = job.passes[-1].seconds
    else:
        return None
    # If the job has it: from the measured shutdowns, last copies, conversions and boots of this site.
    if job.outage is not None:
        return Estimate(job.outage.p50_s, job.outage.p95_s)
    return Estimate(copy_s + AROUND_COPY.p50, 2 * copy_s + AROUND_COPY.p95)


def is_fresh(job: Migration) -> bool:
    """Whether a delta has succeeded, so that the remaining changes are few, and measured."""
    return job.state is State.DELTA_SYNCING and any(one.kind == "delta" and one.finished_at for one in job.passes)


def closes(wave: Wave, member: Member, openings: Openings) -> datetime | None:
    """The end of the opening in which its cut-over began, as the scheduler sees it: for a member without a window, windows that
    overlap are one. None: it has none."""
    if not wave.windows or member.cut_over_at is None:
        return None
    span = openings.open(member.window_id or "", member.cut_over_at)
    return None if span is None else span.end


def may_begin_until(wave: Wave, member: Member, job: Migration | None, openings: Openings) -> datetime | None:
    """The last moment at which its cut-over may begin, so as to end within its window; None: it has none."""
    until, outage = closes(wave, member, openings), outage_of(member, job)
    return until if until is None or outage is None else until - timedelta(seconds=outage.p95)


def is_too_late(wave: Wave, member: Member, job: Migration | None, openings: Openings, at: datetime) -> bool:
    """Whether its cut-over, if it began now, would not end within its window."""
    until = may_begin_until(wave, member, job, openings)
    return until is not None and at >= until


def openings_in_use(wave: Wave, at: datetime) -> Openings:
    """The openings of its windows since the oldest of its present cut-overs began: the service may have been down for days."""
    began = [one.cut_over_at for one in wave.members if one.state is MemberState.CUTTING_OVER and one.cut_over_at is not None]
    return openings_of(wave, min([at, *began]))


def why_ended(job: Migration) -> str:
    """Why it did not complete."""
    if job.state is State.CANCELLED:
        return "Its job was cancelled."
    return "Its job failed." if job.last_error is None else job.last_error.message
