"""Checks a whole plan before anything is copied: what is wrong with it, field by field, and how its job would run.

Blocking code. A source that does not answer is no mistake of the plan: its job waits for the source, and checks the rest then.
Problems come in the order in which a person would correct them.
"""

import asyncio
import statistics
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from uuid import uuid4

import structlog

from synvirt.destinations import free_bytes_of
from synvirt.errors import (
    AuthFailed,
    Conflict,
    DomainDefineFailed,
    HypervisorAway,
    Internal,
    InvalidPlan,
    SourceUnreachable,
    SynvirtError,
    V2vFailed,
)
from synvirt.hypervisor import Capacity
from synvirt.hypervisor.domain_xml import safe_name
from synvirt.hypervisor.machine import Machine
from synvirt.kvm.identity import CLAIMED_HINT, Identity, identity_of
from synvirt.machines.concerns import TARGET_TOO_SMALL, runs_cold, with_room
from synvirt.migrations import instant
from synvirt.migrations.planning import schedule
from synvirt.migrations.planning.critical import refuse_critical
from synvirt.migrations.planning.cutting_over import CutOverTime, check_window, cut_over
from synvirt.migrations.planning.naming import refuse_unknown
from synvirt.migrations.planning.outage import planned_outage
from synvirt.migrations.planning.past import completed
from synvirt.migrations.planning.taken import refuse_same, refuse_taken
from synvirt.migrations.rooms import Rooms
from synvirt.model.job import Difference, Migration, OutagePart
from synvirt.model.kinds import LiveKind, Mode
from synvirt.model.machine import Concern, Disk, VmManifest
from synvirt.model.plan import LiveVmRef, MigrationPlan
from synvirt.model.values import Bytes, Model, now
from synvirt.offline.several import choosing
from synvirt.sizes import GIB, MIB, counted

log = structlog.get_logger(__name__)

# The same as for `GET /sources/:id/vms/:vm_id`.
SOURCE_ANSWERS_WITHIN_S = 60.0
_MEASURED_LEAST_S = 1.0


class PlanProblem(Model):
    """`field`: where in the plan, as a path (`target.network_map[0].target`). `hint`: what would be right."""

    field: str
    detail: str
    hint: str | None = None


class DiskWay(Model):
    """How a disk would be copied: `warm` (while the guest runs, its changes after it), `cold` (while it is off), `file` (from a
    file), `skipped`."""

    disk_key: str
    way: str
    reason: str


class PlanForecast(Model):
    """Seconds; null where nothing was measured yet. `basis` says what `copy_s` follows from, `outage_parts` what the outage is
    made of and of how many jobs here each part was measured."""

    bytes_to_read: Bytes
    copy_s: float | None = None
    outage_p50_s: float | None = None
    outage_p95_s: float | None = None
    outage_parts: tuple[OutagePart, ...] = ()
    basis: str = ""


class DryRun(Model):
    """The plan as its job would run. `manifest` is null where the source could not be asked; `problems` says why. `cut_over`:
    null without a window."""

    plan: MigrationPlan
    manifest: VmManifest | None
    concerns: tuple[Concern, ...]
    ways: tuple[DiskWay, ...]
    forecast: PlanForecast | None
    cut_over: CutOverTime | None = None
    differences: tuple[Difference, ...]
    problems: tuple[PlanProblem, ...]


@dataclass
class Foreseen:
    """`refused`: problems that no job could get past, by field. `waited_for`: what a job would wait for."""

    plan: MigrationPlan
    manifest: VmManifest | None = None
    supports_warm: bool = False
    differences: tuple[Difference, ...] = ()
    refused: list[tuple[str, SynvirtError]] = field(default_factory=list)
    waited_for: list[tuple[str, SynvirtError]] = field(default_factory=list)

    @contextmanager
    def at(self, where: str, *, waits_for: tuple[type[SynvirtError], ...] = ()) -> Iterator[None]:
        """Errors raised in the block become problems of that field."""
        try:
            yield
        except SynvirtError as error:
            (self.waited_for if isinstance(error, waits_for) else self.refused).append((where, error))


def refuse(found: Foreseen) -> None:
    """Raises the first problem's error, with all problems in its detail; does nothing if there is none. What this host lacks
    for the guest is a problem of the plan: nothing of the service has failed."""
    if not found.refused:
        return
    _, first = found.refused[0]
    if isinstance(first, (V2vFailed, DomainDefineFailed)) and not isinstance(first, HypervisorAway):
        first = InvalidPlan(first.detail, hint=first.hint)
    if len(found.refused) == 1:
        raise first
    raise type(first)("; ".join(f"{where}: {error.detail}" for where, error in found.refused), hint=first.hint)


def foresee(rooms: Rooms, plan: MigrationPlan) -> Foreseen:
    """Checks a plan. It changes nothing, here or at the source."""
    found = Foreseen(plan)
    free_bytes: int | None = None
    with found.at("target.destination"):
        free_bytes = _free_bytes(rooms, plan.target.destination)
    if plan.source_ref.kind == "live_vm":
        _live(rooms, plan.source_ref, found)
    else:
        with found.at("source_ref"):
            found.manifest = in_files(rooms, plan)
    if found.manifest is not None:
        _disks(found, found.manifest)
        if free_bytes is not None:
            with_its_room = with_room(_without(found.manifest, plan.skip_disks), free_bytes)
            found.manifest = found.manifest.model_copy(update={"concerns": with_its_room.concerns})
        _mode(found, found.manifest)
        _concerns(found, found.manifest)
        if rooms.converts(plan, found.manifest):
            with found.at("conversion"):
                rooms.preparer.check(found.manifest)
    if plan.instant:
        with found.at("instant"):
            _instant(rooms, plan, found.manifest)
    with found.at("warm.schedule"):
        schedule.check(plan, now())
    with found.at("warm.window_id"):
        check_window(rooms, plan)
    networks_and_host(rooms, found)
    return found


def _instant(rooms: Rooms, plan: MigrationPlan, manifest: VmManifest | None) -> None:
    instant.refuse_plan(rooms, plan, converts=rooms.converts(plan, manifest))
    if manifest is None or plan.source.Offline is None or plan.source_ref.kind == "live_vm":
        return
    path, root = rooms.place(plan.source_ref)
    with rooms.connected(root):
        importer = choosing(rooms.importers[plan.source.Offline], plan.source_ref.vm)
        keys = [disk.key for disk in manifest.disks if disk.key not in plan.skip_disks]
        instant.refuse_readers([importer.open_disk(path, root, key).reader for key in keys])


def networks_and_host(rooms: Rooms, found: Foreseen) -> None:
    """The problems that this host finds."""
    _networks(rooms, found)
    if found.manifest is not None and (has := _capacity(rooms)) is not None:
        if found.plan.target.start:
            with found.at("target.memory_bytes"):
                _memory(found.plan.target.memory_bytes or found.manifest.memory_bytes, has)
        with found.at("target.cpu_count"):
            _cpus(found.plan.target.cpu_count or found.manifest.cpu_count, has)
    with found.at("target", waits_for=(HypervisorAway,)):
        found.differences = check_host(rooms, found.plan, found.manifest)


def refuse_unfit(rooms: Rooms, job: Migration) -> None:
    """Refuses what a job from another host could not get past on this one, or would wait for here: a third host may have it. It
    does not ask the source."""
    found = Foreseen(job.plan, manifest=job.manifest)
    with found.at("target.destination"):
        _free_bytes(rooms, job.destination or job.plan.target.destination)
    if job.manifest is not None and rooms.converts(job.plan, job.manifest):
        with found.at("conversion"):
            rooms.preparer.check(job.manifest)
    with found.at("target"):
        rooms.hypervisor.capacity()  # one that is away is asked for nothing else
        networks_and_host(rooms, found)
    found.refused += found.waited_for
    refuse(found)


def dry_run(rooms: Rooms, plan: MigrationPlan) -> DryRun:
    """The whole check as an answer; it refuses nothing."""
    found = foresee(rooms, plan)
    manifest = found.manifest
    forecast = None if manifest is None else _forecast(rooms, plan, manifest)
    return DryRun(
        plan=plan,
        manifest=manifest,
        concerns=() if manifest is None else manifest.concerns,
        ways=() if manifest is None else tuple(_ways(found, manifest)),
        forecast=forecast,
        cut_over=cut_over(
            rooms,
            plan,
            copy_s=(forecast.copy_s if forecast is not None else None) or 0,
            outage_s=(forecast.outage_p95_s if forecast is not None else None) or 0,
        ),
        differences=found.differences,
        problems=tuple(
            PlanProblem(field=where, detail=error.detail, hint=error.hint)
            for where, error in (*found.refused, *found.waited_for)
        ),
    )


# ── the source ───────────────────────────────────────────────────────────────────────────────────────────────────────


def _live(rooms: Rooms, ref: LiveVmRef, found: Foreseen) -> None:
    kind = found.plan.source.Live
    if kind is None:
        raise RuntimeError("a plan's source fits its source_ref")
    with found.at("source_ref.source_id"):
        rooms.check_source(kind, ref.source_id)
    if found.refused and found.refused[-1][0] == "source_ref.source_id":
        return
    with found.at("source_ref.vm_id"):
        refuse_taken(rooms, ref)

    with found.at("source_ref.vm_id", waits_for=(SourceUnreachable, AuthFailed, Internal)):
        found.manifest, found.supports_warm = at_source(rooms, kind, ref)
    if found.manifest is not None:
        with found.at("source_ref.vm_id"):
            refuse_same(rooms, kind, ref, found.manifest)


def at_source(rooms: Rooms, kind: LiveKind, ref: LiveVmRef) -> tuple[VmManifest, bool]:
    """The machine of a Live plan, and whether its source has a warm mode. SourceUnreachable, VmNotFound, AuthFailed."""

    async def ask() -> tuple[VmManifest, bool]:
        adapter = await rooms.connect(kind, ref.source_id)
        try:
            async with asyncio.timeout(SOURCE_ANSWERS_WITHIN_S):
                await adapter.connect()
                return await adapter.inspect(ref.vm_id), await adapter.supports_warm()
        except TimeoutError as error:
            raise SourceUnreachable(f"the source did not answer within {SOURCE_ANSWERS_WITHIN_S:.0f} s") from error
        finally:
            await adapter.close()

    return asyncio.run(ask())


def in_files(rooms: Rooms, plan: MigrationPlan) -> VmManifest:
    """The machine of an Offline plan. HostPathRejected, MalformedArchive and others, if the files hold none of that kind."""
    if plan.source.Offline is None or plan.source_ref.kind == "live_vm":
        raise RuntimeError("a plan's source fits its source_ref")
    importer = rooms.importers.get(plan.source.Offline)
    if importer is None:
        served = ", ".join(rooms.importers)
        raise InvalidPlan(f"offline kind {plan.source.Offline} is not served yet", hint=f"supported are {served}")
    path, root = rooms.place(plan.source_ref)
    with rooms.connected(root):
        known = rooms.detect(path, root)
        if known.kind != importer.kind:
            raise InvalidPlan(
                f"{path.name} is of kind {known.kind}, not {importer.kind}",
                hint=f"submit it as {{Offline: {known.kind}}}",
            )
        return choosing(importer, plan.source_ref.vm).inspect(path, root)


# ── the machine ──────────────────────────────────────────────────────────────────────────────────────────────────────


def _without(manifest: VmManifest, skipped: Sequence[str]) -> VmManifest:
    return manifest.model_copy(update={"disks": tuple(disk for disk in manifest.disks if disk.key not in skipped)})


def _disks(found: Foreseen, manifest: VmManifest) -> None:
    keys = [disk.key for disk in manifest.disks]
    for at, key in enumerate(found.plan.skip_disks):
        with found.at(f"skip_disks[{at}]"):
            refuse_unknown(key, keys, f"disk of {manifest.name}")
    if keys and set(keys) <= set(found.plan.skip_disks):
        with found.at("skip_disks"):
            raise InvalidPlan(f"every disk of {manifest.name} is skipped", hint="leave one to copy")


def _mode(found: Foreseen, manifest: VmManifest) -> None:
    """A plan of mode Warm may run cold: then that is a concern. A plan of files that does not want that is refused, as files
    never change; a platform may track changes by the time of the job."""
    why = _why_cold(found, manifest)
    if why is None:
        return
    found.manifest = manifest.model_copy(update={"concerns": (*manifest.concerns, runs_cold(why))})
    if found.plan.source.Offline is not None and found.plan.warm.untracked == "fail":
        with found.at("mode"):
            raise InvalidPlan(f"{manifest.name} cannot be copied warm: {why}", hint="Cold is the mode of a plan of files")


def _concerns(found: Foreseen, manifest: VmManifest) -> None:
    """Refuses an unknown concern: it must be misspelt. A skipped disk's concern may be named."""
    ids = [concern.id for concern in manifest.concerns]
    for at, waived in enumerate(found.plan.waive_concerns):
        if waived != TARGET_TOO_SMALL:
            with found.at(f"waive_concerns[{at}]"):
                refuse_unknown(waived, ids, f"concern of {manifest.name}")
    with found.at("waive_concerns"):
        refuse_critical(found.plan, manifest)


# ── here ─────────────────────────────────────────────────────────────────────────────────────────────────────────────


def _free_bytes(rooms: Rooms, name: str | None) -> int:
    """Of the destination of that name, or of the default. InvalidPlan, DiskWriteFailed."""
    refuse_unknown(name, rooms.destinations, "destination")
    return free_bytes_of(rooms.destination_named(name))


def _networks(rooms: Rooms, found: Foreseen) -> None:
    """Checks the networks of this host that the plan names, and the source's networks that it maps."""
    wanted = found.plan.target.network_map
    if not wanted:
        return
    here: list[str] = []
    try:
        here = rooms.hypervisor.networks()
    except SynvirtError as error:
        log.warning("the hypervisor does not say which networks there are", cause=error.detail)
    plain = {name.partition(":")[2] for name in here}
    for at, entry in enumerate(wanted):
        if here and entry.target != "user" and entry.target not in here and entry.target not in plain:
            with found.at(f"target.network_map[{at}].target"):
                refuse_unknown(entry.target, [*here, *(["user"] if "user" not in here else [])], "network of this host")
    if found.manifest is None:
        return
    there = list(dict.fromkeys(nic.network for nic in found.manifest.nics))
    mapped = {entry.source for entry in wanted}
    # A map for many machines may name more networks than one machine has; if it fits none of a machine's cards, a name is
    # wrong.
    if set(there) <= mapped:
        return
    for at, entry in enumerate(wanted):
        if entry.source not in there:
            with found.at(f"target.network_map[{at}].source"):
                refuse_unknown(entry.source, there, f"network of {found.manifest.name}")


def _capacity(rooms: Rooms) -> Capacity | None:
    try:
        return rooms.hypervisor.capacity()
    except SynvirtError as error:
        log.warning("the hypervisor does not say what this host has", cause=error.detail)
        return None


def _memory(wanted: int, has: Capacity) -> None:
    """InvalidPlan, if the machine would have more memory than this host: it would be moved and never start."""
    if wanted > has.memory_bytes:
        raise InvalidPlan(
            f"it would have {wanted / GIB:.1f} GiB of memory, and this host has {has.memory_bytes / GIB:.1f} GiB in all",
            hint="set target.memory_bytes lower, or set target.start to false",
        )


def _cpus(wanted: int, has: Capacity) -> None:
    """InvalidPlan, if the machine would have more processors than a guest can have: such a domain is not even defined. More
    than the host has is slow, but starts."""
    if wanted > has.vcpus_max > 0:
        raise InvalidPlan(
            f"it would have {wanted} processors, and a guest of this host can have {has.vcpus_max}",
            hint="set target.cpu_count lower",
        )


def check_host(rooms: Rooms, plan: MigrationPlan, manifest: VmManifest | None) -> tuple[Difference, ...]:
    """The differences that the machine will have here. Conflict, if its name, UUID or a MAC address is taken: the job claims
    them later, but the caller should know at once. DomainDefineFailed, if this host cannot run it; HypervisorAway, for which
    the job would wait."""
    if manifest is None and plan.target.name is None:
        return ()
    differences: tuple[Difference, ...] = ()
    wanted = Identity(safe_name(plan.target.name or "", fallback=""))
    try:
        if manifest is not None:
            converts = rooms.converts(plan, manifest)
            machine = Machine(uuid4(), manifest, plan.target, frozenset(plan.skip_disks), has_drivers=converts)
            domain = rooms.hypervisor.domain_xml(machine, [])
            differences, wanted = domain.differences, identity_of(domain.xml)
        rooms.hypervisor.check_free(wanted)
    except (Conflict, DomainDefineFailed):
        raise
    except SynvirtError as error:
        log.warning("the hypervisor does not say whether a name is free", cause=error.detail)
    rooms.store.refuse_claimed(wanted.claims, host=rooms.host, hint=CLAIMED_HINT)
    return differences


# ── how it would run ─────────────────────────────────────────────────────────────────────────────────────────────────


def _ways(found: Foreseen, manifest: VmManifest) -> Iterator[DiskWay]:
    plan = found.plan
    why_cold = _why_cold(found, manifest)
    for disk in manifest.disks:
        if disk.key in plan.skip_disks:
            yield DiskWay(disk_key=disk.key, way="skipped", reason="skip_disks names it")
        elif plan.source.Offline is not None:
            yield DiskWay(disk_key=disk.key, way="file", reason=f"read where it lies, as {disk.format}")
        elif plan.mode is Mode.COLD:
            yield DiskWay(disk_key=disk.key, way="cold", reason=f"the plan's mode is Cold{_read_by(disk)}")
        elif why_cold is not None:
            yield DiskWay(disk_key=disk.key, way="cold", reason=f"{why_cold}{_read_by(disk)}")
        else:
            yield DiskWay(disk_key=disk.key, way="warm", reason=f"the source tracks its changes{_read_by(disk)}")


def _why_cold(found: Foreseen, manifest: VmManifest) -> str | None:
    """Why a plan of mode Warm runs cold. None: it runs as planned."""
    if found.plan.mode is not Mode.WARM:
        return None
    if found.plan.source.Offline is not None or found.supports_warm:
        return manifest.cbt_reason_without(found.plan.skip_disks)
    return "the source has no warm mode"


def _read_by(disk: Disk) -> str:
    return f"; read by {disk.read_by}" if disk.read_by else ""


def _forecast(rooms: Rooms, plan: MigrationPlan, manifest: VmManifest) -> PlanForecast:
    kept = _without(manifest, plan.skip_disks).disks
    to_read = sum(_bytes_to_read(disk) for disk in kept)
    past = completed(rooms.store, plan)
    copy_s, basis = _copy_time(rooms, plan, kept, [job for job in past if _same_source(job.plan, plan)])
    outage = planned_outage(
        plan,
        past,
        converts=rooms.converts(plan, manifest),
        starts=plan.target.start,
        copy_s=copy_s,
        at=now(),
    )
    return PlanForecast(
        bytes_to_read=to_read,
        copy_s=None if copy_s is None else round(copy_s, 1),
        outage_p50_s=None if outage is None else outage.p50_s,
        outage_p95_s=None if outage is None else outage.p95_s,
        outage_parts=() if outage is None else outage.parts,
        basis=basis,
    )


def _bytes_to_read(disk: Disk) -> int:
    return disk.capacity_bytes if disk.used_bytes is None else disk.used_bytes


def _copy_time(rooms: Rooms, plan: MigrationPlan, disks: Sequence[Disk], past: Sequence[Migration]) -> tuple[float | None, str]:
    """The seconds, and their basis: first copies of jobs of the same source; else the rates that a deep test of the source
    measured for the ways that would read the disks. It counts one disk after another, so a job may be faster."""
    limit_bps = plan.limits.bandwidth_bps or float("inf")
    firsts = [job.passes[0] for job in past if job.passes]
    # The copy of an empty disk measures no speed.
    speeds = [first.bytes / first.seconds for first in firsts if first.bytes and first.seconds >= _MEASURED_LEAST_S]
    if speeds:
        speed = min(statistics.median(speeds), limit_bps)
        basis = f"{counted(len(speeds), 'job')} of this source that ended here"
        return sum(_bytes_to_read(disk) for disk in disks) / speed, basis
    ref = plan.source_ref
    rates = rooms.rates_of(ref.source_id) if ref.kind == "live_vm" else {}
    if not disks or not all(rates.get(disk.read_by or "") for disk in disks):
        hint = "; a deep test of the source measures its ways" if any(disk.read_by for disk in disks) else ""
        return None, f"no job of this source has ended here yet{hint}"
    used = {disk.read_by: rates[disk.read_by] for disk in disks if disk.read_by is not None}
    ways = ", ".join(f"{way} {bytes_per_s / MIB:.1f} MiB/s" for way, bytes_per_s in used.items())
    seconds = sum(_bytes_to_read(disk) / min(used[disk.read_by], limit_bps) for disk in disks if disk.read_by is not None)
    return seconds, f"the last deep test of the source: {ways}"


def _same_source(one: MigrationPlan, other: MigrationPlan) -> bool:
    if one.source_ref.kind == "live_vm" and other.source_ref.kind == "live_vm":
        return one.source_ref.source_id == other.source_ref.source_id
    return one.source == other.source and one.source.Live is None
