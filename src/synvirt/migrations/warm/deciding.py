"""What a warm job does after a pass: one more pass, one that also compares what the source calls unchanged, or the cut-over."""

from synvirt.errors import OutageTooLong
from synvirt.migrations.job import Job
from synvirt.migrations.planning.outage import too_long
from synvirt.migrations.warm.forecasting import forecast_outage
from synvirt.migrations.warm.holding import held_pause_s, is_asked, pause_between_s
from synvirt.migrations.warm.setbacks import is_distrusted, is_off
from synvirt.migrations.warm.window import opens_in_s, too_short
from synvirt.model.job import Pass
from synvirt.model.values import now

# When an operator asks for the cut-over, a last snapshot older than this is too old: one more delta is copied while the guest
# still runs.
FRESH_S = 30.0
# A delta was held up if it took this much longer than its copying: the source was away, or the service was down. The next delta
# is then large, and says nothing about how the guest converges.
HELD_UP_S, HELD_UPS_MAX = 600.0, 20
# How often a held job compares what the source calls unchanged. A comparison reads the whole source.
VERIFIED_FOR_S = 86400.0
# With verify = auto: once a week, and only if the comparison fits into half of the pause between two deltas.
AUTO_VERIFIED_FOR_S, AUTO_SHARE, AUTO_PAUSE_LEAST_S = 7 * VERIFIED_FOR_S, 0.5, 60.0
# A job that cuts over as soon as it can has no pause. It compares if its outage fits into its budget, the comparison takes at
# most this long, and this many passes are left for it and the deltas after it.
AT_ONCE_MOST_S, AT_ONCE_PASSES = 3600.0, 3


async def converged(job: Job, delta: Pass) -> bool:
    """Whether the job can cut over after this delta. It can, if little is left to copy; or, where an operator decides, if the
    operator has asked and the delta is fresh."""
    warm = job.migration.plan.warm
    # Without change tracking to trust, each pass reads whole disks, the last one too. More passes do not make it shorter.
    distrusted = await is_distrusted(job)
    if _was_held_up(delta) and not distrusted:
        return False
    if warm.cutover == "manual":
        asked = await is_asked(job)
        # One more delta at most: it may itself take longer than FRESH_S. One of an earlier request, which has expired, or of
        # an earlier opening of the window, says nothing about this one.
        last = (await job.memory()).last_delta == delta.number
        return asked and (distrusted or last or is_fresh(delta))
    if distrusted or delta.bytes <= warm.delta_threshold_bytes:
        return True
    # A guest that is off changes no more, and on some platforms each pass of it reads whole disks.
    return delta.whole and await is_off(job)


async def fits_budget(job: Job) -> bool:
    """Whether the outage's p95 is within the plan's budget, and within the rest of its window. If not, the job says which part
    is too long, and holds for a while."""
    await forecast_outage(job)
    reason = (None if job.migration.outage is None else too_long(job.migration.outage)) or await too_short(job)
    error = job.migration.last_error
    if reason is None:
        if error is not None and error.code == OutageTooLong.code:
            await job.change(last_error=None)
        return True
    if error is None or error.message != reason:
        await job.report(OutageTooLong(reason, hint="the job holds until it fits"))
    job.leave_turn()
    pause_s = job.migration.plan.warm.interval_s or held_pause_s(job)
    await job.stop.sleep_or_wake(min(pause_s, await opens_in_s(job)))
    await job.take_turn()
    return False


async def is_to_be_verified(job: Job, last: Pass) -> bool:
    """Whether the next pass also compares what the source calls unchanged. A job does that once, as late as possible before its
    cut-over; once a day where an operator decides when to cut over. With verify = auto it does so only if there is time."""
    warm = job.migration.plan.warm
    if warm.verify == "sample" or await is_distrusted(job):
        return False
    by_itself = warm.verify == "auto"
    if by_itself and (last.number == 1 or not (_has_time_to_compare(job) or _budget_allows_to_compare(job))):
        return False
    verified = [one for one in job.migration.passes if one.verify and one.finished_at is not None]
    if warm.cutover == "manual":
        return not verified or _age_s(verified[-1]) >= (AUTO_VERIFIED_FOR_S if by_itself else VERIFIED_FOR_S)
    return not verified and last.number > 1 and await converged(job, last)


def _has_time_to_compare(job: Job) -> bool:
    """Whether the pause between two deltas is long enough, so that the next delta or a cut-over does not wait for long."""
    pause_s = pause_between_s(job)
    return pause_s >= AUTO_PAUSE_LEAST_S and _comparing_s(job) <= pause_s * AUTO_SHARE


def _budget_allows_to_compare(job: Job) -> bool:
    """Whether the outage fits into its budget, and would after a comparison: the deltas after it converge."""
    found, outage, warm = job.migration.forecast, job.migration.outage, job.migration.plan.warm
    if warm.cutover != "auto" or found is None or outage is None or outage.budget_s is None:
        return False
    passes_left = warm.max_passes - (job.migration.passes[-1].number - 1)
    fits = found.converges and too_long(outage) is None
    return fits and passes_left >= AT_ONCE_PASSES and _comparing_s(job) <= AT_ONCE_MOST_S


def _comparing_s(job: Job) -> float:
    """How long the last comparison took; if there was none, the first copy, which reads about as much."""
    measured = [one for one in job.migration.passes if one.finished_at is not None and (one.verify or one.number == 1)]
    return measured[-1].seconds if measured else float("inf")


def held_ups(job: Job) -> int:
    """How many deltas were held up, HELD_UPS_MAX at most. They do not count against max_passes."""
    return min(sum(_was_held_up(one) for one in job.migration.passes[1:]), HELD_UPS_MAX)


def is_fresh(one: Pass) -> bool:
    """Whether a cut-over may follow this pass without another delta."""
    return _age_s(one) <= FRESH_S


def _was_held_up(one: Pass) -> bool:
    if one.snapshot_at is None or one.finished_at is None:
        return False
    return (one.finished_at - one.snapshot_at).total_seconds() - one.seconds > HELD_UP_S


def _age_s(one: Pass) -> float:
    return float("inf") if one.snapshot_at is None else (now() - one.snapshot_at).total_seconds()
