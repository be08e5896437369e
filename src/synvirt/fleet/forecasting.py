"""A wave's forecast with this site's measurements: its members' sizes, the rates of earlier copies, and the errors of
forecasts.

    jobs of the wave │ the sources' lists ─▶ Load of each member ┐
    jobs that completed here              ─▶ Site                ┴▶ simulate ─▶ WaveSimulation

For a member with a job, the job gives the size; for others, their source does. An unknown size counts as the median of the
known ones, and the member is listed.
"""

import asyncio
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Annotated, Final
from uuid import UUID

from pydantic import Field

from synvirt.errors import SynvirtError
from synvirt.fleet.gantt import gantt
from synvirt.fleet.listed_vms import Rows
from synvirt.fleet.model import Member, Wave, WaveForecast, WaveLimits, WaveRequest
from synvirt.fleet.simulation.changes import Change, changed, difference_in_words
from synvirt.fleet.simulation.forecast import simulate
from synvirt.fleet.simulation.nouns import RESIDUALS_ASSUMED, Load, MemberForecast, Simulation, Site
from synvirt.fleet.waves import Waves
from synvirt.live import VmRow
from synvirt.migrations.planning.forecast import MEASURED_LEAST_S
from synvirt.migrations.planning.openings import spans_of
from synvirt.model.job import Migration
from synvirt.model.kinds import State
from synvirt.model.values import WHOLE, Model, Received, now
from synvirt.model.windows import Window
from synvirt.sizes import GIB, KIB, TIB
from synvirt.store import Store
from synvirt.store.documents import Unreadable, parsed, readable
from synvirt.store.filters import Only

# A guess for a wave without any known size: an average server's disks.
SIZE_ASSUMED: Final = 100 * GIB
# The newest jobs, as a site changes over the years.
JOBS_LOOKED_AT: Final = 500
# Someone waits for the forecast.
SOURCE_WITHIN_S: Final = 40.0
# With fewer than these, the errors of forecasts are not known well; figures of other sites are added.
RESIDUALS_LEAST: Final = 20


class WhatIf(Received):
    """Other numbers to try. `more_destinations`: hosts like those that there are. A window takes the place of the one with its
    id."""

    more_destinations: Annotated[int, Field(ge=0, le=1000), WHOLE] = 0
    network_bps: Annotated[float, Field(ge=64 * KIB, le=TIB)] | None = None
    source_host_bps: Annotated[float, Field(ge=64 * KIB, le=TIB)] | None = None
    limits: WaveLimits | None = None
    windows: Annotated[tuple[Window, ...], Field(max_length=1000)] | None = None


class WaveSimulation(Model):
    """`forecast` is null where no member cuts over. `unfinished`: members that never do. `assumed`: members whose size is
    not known. `difference`: a sentence; null without another number."""

    forecast: WaveForecast | None
    members: tuple[MemberForecast, ...]
    unfinished: int
    assumed: tuple[str, ...]
    difference: str | None


class Forecaster:
    """`rows`: asks a source for its VMs, once for each simulation. `host`: this one. `destination`: of plans that name none."""

    def __init__(self, waves: Waves, store: Store, rows: Rows, *, host: str, destination: str) -> None:
        self._waves, self._store, self._rows, self._host, self._destination = waves, store, rows, host, destination

    async def forecast(self, wave_id: UUID, what_if: WhatIf) -> WaveSimulation:
        """The forecast. NotFound; InvalidPlan. Without other numbers, the wave stores the forecast."""
        return (await self._run(wave_id, what_if))[0]

    async def pictured(self, wave_id: UUID, what_if: WhatIf) -> tuple[WaveSimulation, str]:
        """The same with its picture, an SVG element."""
        answered, drawn = await self._run(wave_id, what_if)
        return answered, await asyncio.to_thread(drawn)

    async def _run(self, wave_id: UUID, what_if: WhatIf) -> tuple[WaveSimulation, Callable[[], str]]:
        wave = await asyncio.to_thread(self._waves.whole, wave_id)
        jobs = await asyncio.to_thread(self._jobs, wave_id)
        loads, assumed = loads_of(
            wave, jobs, await self._listed(wave, jobs), destination=lambda name: f"{self._host}/{name or self._destination}"
        )
        return await asyncio.to_thread(self._simulated, wave, loads, assumed, what_if)

    def _simulated(
        self, wave: Wave, loads: dict[str, Load], assumed: tuple[str, ...], what_if: WhatIf
    ) -> tuple[WaveSimulation, Callable[[], str]]:
        site = site_of(self._completed())
        at = now()
        found = simulate(wave, loads, site, at)
        difference = None
        run: WaveRequest | Wave = wave
        if what_if == WhatIf():
            if found.forecast is not None:
                self._waves.set_forecast(wave.id, found.forecast, {one.id: one.planned_at for one in found.members})
        else:
            before = found
            run, loads, site = changed(wave, loads, site, _change(what_if))
            found = simulate(run, loads, site, at)
            difference = difference_in_words(before, found)
        return _answered(found, assumed, difference), lambda: gantt(found, spans_of(run, at), title=f"Forecast of {wave.name}")

    def _jobs(self, wave_id: UUID) -> dict[UUID, Migration]:
        found: dict[UUID, Migration] = {}
        for id_, (_, document, version) in self._waves.rows.jobs(wave_id, ()).items():
            try:
                found[id_] = parsed(Migration, document, version)
            except Unreadable:  # doctor reports it; the member is simulated like one without a job
                continue
        return found

    def _completed(self) -> list[Migration]:
        documents, _ = self._store.documents(limit=JOBS_LOOKED_AT, only=Only(states=(State.COMPLETED,)))
        return readable(Migration, documents)

    async def _listed(self, wave: Wave, jobs: Mapping[UUID, Migration]) -> dict[tuple[UUID, str], VmRow]:
        """The VMs of each source that must be asked, all at once. If a source does not answer, its members stay unknown."""
        refs = [one.plan.source_ref for one in wave.members if _job_with_sizes(one, jobs) is None]

        async def of(source_id: UUID) -> dict[tuple[UUID, str], VmRow]:
            try:
                async with asyncio.timeout(SOURCE_WITHIN_S):
                    rows = await self._rows(source_id)
            except (SynvirtError, TimeoutError):
                return {}
            return {(source_id, vm_id): row for vm_id, row in rows.items()}

        found: dict[tuple[UUID, str], VmRow] = {}
        for one in await asyncio.gather(*map(of, {ref.source_id for ref in refs if ref.kind == "live_vm"})):
            found |= one
        return found


def loads_of(
    wave: Wave,
    jobs: Mapping[UUID, Migration],
    listed: Mapping[tuple[UUID, str], VmRow],
    *,
    destination: Callable[[str | None], str],
) -> tuple[dict[str, Load], tuple[str, ...]]:
    """The load of each member, and the members whose size is assumed."""
    found: dict[str, Load] = {}
    unknown: list[str] = []
    for member in wave.members:
        job = None if member.job_id is None else jobs.get(member.job_id)
        size, host = _size_and_host(member, jobs, listed)
        if size is None:
            unknown.append(member.id)
        goes_to = f"{member.host}/{member.destination}" if member.host else destination(member.plan.target.destination)
        load = Load(size or 0, host, goes_to, delta_bytes=member.plan.warm.delta_threshold_bytes, state=member.state)
        found[member.id] = load if job is None else _as_it_goes(load, job)
    known = [one.size_bytes for name, one in found.items() if name not in set(unknown)]
    assumed = int(statistics.median(known)) if known else SIZE_ASSUMED
    found |= {name: replace(found[name], size_bytes=assumed) for name in unknown}
    return found, tuple(unknown)


def _job_with_sizes(member: Member, jobs: Mapping[UUID, Migration]) -> Migration | None:
    """The job that has the sizes of the member's disks."""
    job = None if member.job_id is None else jobs.get(member.job_id)
    return job if job is not None and job.manifest is not None else None


def _size_and_host(
    member: Member, jobs: Mapping[UUID, Migration], listed: Mapping[tuple[UUID, str], VmRow]
) -> tuple[int | None, str]:
    ref, job = member.plan.source_ref, _job_with_sizes(member, jobs)
    source = str(ref.source_id) if ref.kind == "live_vm" else "files"
    if job is not None and job.manifest is not None:
        kept = [disk for disk in job.manifest.disks if disk.key not in member.plan.skip_disks]
        size = sum(disk.capacity_bytes if disk.used_bytes is None else disk.used_bytes for disk in kept)
        return size, f"{source}/{job.manifest.host}" if job.manifest.host else source
    row = listed.get((ref.source_id, ref.vm_id)) if ref.kind == "live_vm" else None
    if row is None:
        return None, source
    return row.capacity_bytes, f"{source}/{row.host}" if row.host else source


def _as_it_goes(load: Load, job: Migration) -> Load:
    """The load with what its job has measured."""
    if job.state is State.COPYING_FULL and job.progress.bytes_total:
        load = replace(load, left_bytes=max(0, job.progress.bytes_total - job.progress.bytes_done))
    if job.forecast is not None:
        load = replace(load, change_bps=job.forecast.change_rate_bps)
    if job.outage is not None:
        load = replace(load, outage_s=sum(part.p50_s for part in job.outage.parts if part.name != "last copy"))
    return load


def site_of(past: Iterable[Migration]) -> Site:
    """The site's rates, from jobs that completed here; missing figures are assumed."""
    jobs = list(past)
    fulls = [job.passes[0] for job in jobs if job.passes and job.passes[0].seconds >= MEASURED_LEAST_S]
    speeds = [one.bytes / one.seconds for one in fulls if one.bytes]
    residuals = [
        job.downtime_s / job.outage.p50_s for job in jobs if job.downtime_s and job.outage is not None and job.outage.p50_s > 0
    ]
    if len(residuals) < RESIDUALS_LEAST:
        residuals += RESIDUALS_ASSUMED
    changes = [job.forecast.change_rate_bps for job in jobs if job.forecast is not None]
    outages = [outage for job in jobs if (outage := _outage_without_copy_s(job)) is not None]
    assumed = Site()
    return Site(
        copy_bps=statistics.median(speeds or [assumed.copy_bps]),
        change_bps=statistics.median(changes or [assumed.change_bps]),
        outage_s=statistics.median(outages or [assumed.outage_s]),
        residuals=tuple(residuals),
    )


def _outage_without_copy_s(job: Migration) -> float | None:
    """The outage without the bytes of the last pass. None, if its guest was not off just for a last pass."""
    last = job.passes[-1] if job.passes else None
    if job.downtime_s is None or last is None or last.kind != "final":
        return None
    return max(0.0, job.downtime_s - last.seconds)


def _change(what_if: WhatIf) -> Change:
    return Change(
        more_destinations=what_if.more_destinations,
        network_bps=what_if.network_bps,
        source_host_bps=what_if.source_host_bps,
        limits=what_if.limits,
        windows=what_if.windows,
    )


def _answered(found: Simulation, assumed: Sequence[str], difference: str | None) -> WaveSimulation:
    return WaveSimulation(
        forecast=found.forecast,
        members=found.members,
        unfinished=found.unfinished,
        assumed=tuple(assumed),
        difference=difference,
    )
