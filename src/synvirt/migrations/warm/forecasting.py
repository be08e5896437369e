"""What a running job expects of its cut-over, in its document: after each pass, and when it asks whether it may cut over."""

from synvirt.migrations.job import Job
from synvirt.migrations.planning.forecast import forecast
from synvirt.migrations.planning.outage import outage_forecast
from synvirt.migrations.planning.past import completed
from synvirt.migrations.warm.setbacks import is_distrusted
from synvirt.model.job import Migration, OutageForecast
from synvirt.model.rehearsal import Rehearsal
from synvirt.model.values import now


async def forecast_cut_over(job: Job) -> None:
    """Forecasts the last delta and the outage, after a pass."""
    await job.change(forecast=forecast(job.migration.passes, at=now()), outage=await _outage(job))


async def forecast_outage(job: Job) -> None:
    """Forecasts the job's outage from the jobs that completed here, and from this job's passes and rehearsals."""
    await job.change(outage=await _outage(job))


async def _outage(job: Job) -> OutageForecast | None:
    past, rehearsals = await job.in_thread(_measured_here, job)
    return outage_forecast(
        job.migration,
        past,
        converts=job.converts,
        starts=job.migration.plan.target.start,
        rehearsals=rehearsals,
        whole=await is_distrusted(job),
        at=now(),
    )


def _measured_here(job: Job) -> tuple[list[Migration], list[Rehearsal]]:
    """The jobs that completed here, and this job's rehearsals. Blocks."""
    store = job.rooms.store
    return completed(store, job.migration.plan), store.rehearsals.of(job.id)
