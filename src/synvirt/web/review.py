"""A plan in words: what stays of the machine, what changes, and the states of its job."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from uuid import UUID

from synvirt.migrations.planning.cutting_over import CutOverTime
from synvirt.migrations.planning.foreseen import PlanForecast
from synvirt.migrations.planning.openings import shown
from synvirt.model.job import Migration, StateVisit
from synvirt.model.kinds import Mode, State
from synvirt.model.machine import Disk, VmManifest
from synvirt.model.plan import MigrationPlan
from synvirt.model.values import now
from synvirt.model.windows import Window
from synvirt.sizes import duration
from synvirt.web.stations import Station, stations
from synvirt.web.words import moment, rate, size


@dataclass(frozen=True, slots=True)
class Line:
    """`there` at the source, `here` in the plan; `changed`: on purpose. `disk`: the key of the line's disk."""

    what: str
    there: str
    here: str
    changed: bool = False
    disk: str | None = None


def lines(plan: MigrationPlan, manifest: VmManifest, *, network: str, destination: str) -> list[Line]:
    """`network`, `destination`: the defaults here, if the plan names none."""
    target = plan.target
    cpu, memory = target.cpu_count or manifest.cpu_count, target.memory_bytes or manifest.memory_bytes
    return [
        Line("Name", manifest.name, target.name or manifest.name, target.name not in (None, manifest.name)),
        Line("Processors", str(manifest.cpu_count), str(cpu), cpu != manifest.cpu_count),
        Line("Memory", size(manifest.memory_bytes), size(memory), memory != manifest.memory_bytes),
        *_disks(plan, manifest),
        _bus(plan, manifest),
        *_networks(plan, manifest, network),
        Line("Addresses", "UUID and MACs", "the same" if target.identity == "keep" else "new ones", target.identity == "new"),
        Line("Volumes", "", target.destination or f"{destination} (the default)"),
        *_limits(plan),
        *_shutdown(plan),
        *_outage(plan),
        *_instant(plan),
        Line("After the copy", "", "it is started here" if target.start else "it is defined, and left off", not target.start),
    ]


def _disks(plan: MigrationPlan, manifest: VmManifest) -> Iterator[Line]:
    for disk in manifest.disks:
        skipped = disk.key in plan.skip_disks
        yield Line(disk.label, _figures(disk), "left out" if skipped else "copied", skipped, disk.key)


def _figures(disk: Disk) -> str:
    used = f", {size(disk.used_bytes)} used" if disk.used_bytes is not None else ""
    return size(disk.capacity_bytes) + used


def _bus(plan: MigrationPlan, manifest: VmManifest) -> Line:
    there = ", ".join(dict.fromkeys(disk.bus for disk in manifest.disks)) or "–"
    return Line(
        "Disk bus", there, plan.target.disk_bus or "the best that its system has a driver for", plan.target.disk_bus is not None
    )


def _networks(plan: MigrationPlan, manifest: VmManifest, default: str) -> Iterator[Line]:
    mapped = {entry.source: entry.target for entry in plan.target.network_map}
    for name in dict.fromkeys(nic.network for nic in manifest.nics):
        yield Line("Network", name or "none", mapped.get(name) or f"{default} (the default)", name in mapped)


def _limits(plan: MigrationPlan) -> Iterator[Line]:
    if plan.limits.bandwidth_bps is not None:
        yield Line("Speed", "", f"at most {rate(plan.limits.bandwidth_bps)}", changed=True)


def _shutdown(plan: MigrationPlan) -> Iterator[Line]:
    manner = {"polite": "asked, then powered off", "hold": "asked, and waited for", "force": "powered off"}[plan.shutdown]
    if plan.shutdown_timeout_s is not None:
        yield Line("Shut down", "", f"{manner}, after {duration(plan.shutdown_timeout_s)}", changed=True)
    elif plan.shutdown != "polite":
        yield Line("Shut down", "", manner, changed=True)


def _instant(plan: MigrationPlan) -> Iterator[Line]:
    if plan.instant:
        yield Line("Start at once", "", "it is started over its source, and copied while it runs", changed=True)


def _outage(plan: MigrationPlan) -> Iterator[Line]:
    if plan.outage_budget_s is not None:
        after = "then it is rolled back" if plan.on_overrun == "roll_back" else "as forecast"
        yield Line("Off for", "", f"at most {duration(plan.outage_budget_s)}, {after}", changed=True)


def runs_cold(plan: MigrationPlan, manifest: VmManifest) -> str | None:
    """Why a warm plan would run cold, as far as known now."""
    if plan.mode != Mode.WARM or plan.source.Live is None or manifest.cbt_available:
        return None
    return manifest.cbt_reason or "the source does not track this machine's changes"


def windows_offered(windows: Iterable[Window]) -> list[tuple[str, str]]:
    """The windows that a form offers, with their ids; none, where the service has none."""
    offered = [("", "none: at any time")]
    for window in (shown(one, now()) for one in windows):
        if window.opens_at is not None:
            words = f"open until {moment(window.closes_at)}" if window.open else f"opens {moment(window.opens_at)}"
            offered.append((window.id, f"{window.name}: {words}"))
    return offered if len(offered) > 1 else []


def expected(forecast: PlanForecast | None, cut_over: CutOverTime | None) -> Iterator[tuple[str, str]]:
    """Sizes and times, in words; unknown ones are left out."""
    if cut_over is not None and cut_over.not_before is not None:
        yield "It cuts over", f"from {moment(cut_over.not_before)} to {moment(cut_over.not_after)}, window {cut_over.window_id}"
    elif cut_over is not None:
        yield "It cuts over", f"never: window {cut_over.window_id} has no opening as long as its outage may be"
    if forecast is None:
        return
    yield "To read", size(forecast.bytes_to_read)
    if forecast.copy_s is not None:
        yield "The copy takes", f"about {duration(forecast.copy_s)}"
    if forecast.outage_p50_s is not None:
        yield (
            "The guest is off for",
            f"about {duration(forecast.outage_p50_s)}, {duration(forecast.outage_p95_s)} at p95",
        )
    if forecast.basis:
        yield "By", forecast.basis


def expected_way(plan: MigrationPlan, manifest: VmManifest) -> list[Station]:
    """The states as the job's own page will show them."""
    mode = Mode.COLD if runs_cold(plan, manifest) else plan.mode
    at = now()
    return stations(
        Migration(
            id=UUID(int=0),
            name="",
            plan=plan,
            manifest=manifest,
            mode_effective=mode,
            created_at=at,
            history=(StateVisit(state=State.QUEUED, at=at),),
        )
    )
