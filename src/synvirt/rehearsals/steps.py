"""A function for each state: what a rehearsal does in it. Blocking. After a crash, after NotYet, and while something here is
away, the function runs again from its start.

Each takes the rehearsal under way and returns the changes that come with the move to the next state.
"""

import asyncio
import contextlib
import shlex
import time
from collections.abc import Callable, Sequence
from dataclasses import replace

import structlog

from synvirt.errors import (
    Cancelled,
    DiskWriteFailed,
    DomainDefineFailed,
    GuestBootFailed,
    HostLacks,
    Interrupted,
    PersistFailed,
    SynvirtError,
)
from synvirt.guests import in_order
from synvirt.hypervisor import Volume
from synvirt.hypervisor.hardware import ladder
from synvirt.hypervisor.machine import Machine
from synvirt.live import ReportsGuestFacts
from synvirt.machines import boot_entries, disk_drivers, disk_names
from synvirt.migrations.cloning import clones
from synvirt.migrations.job import Job
from synvirt.migrations.landing import disks_of, machine_of
from synvirt.migrations.proof.moved import SETTLED_WITHIN_S
from synvirt.model.checks import Check
from synvirt.model.job import BootAttempt, Migration
from synvirt.model.kinds import State
from synvirt.model.machine import DiskBus, VmManifest
from synvirt.model.rehearsal import ROLE_PORTS, AnyCheck, CheckResult, Rehearsal, RehearsalState, Sameness
from synvirt.model.values import now
from synvirt.proof.health import Checker
from synvirt.proof.sameness import are_read, compared, is_settled, of_disks
from synvirt.rehearsals.together import are_all_checked, is_its_turn
from synvirt.rehearsals.under_way import NotYet, UnderWay

log = structlog.get_logger(__name__)

CHECK_PAUSE_S = 1.0
# An agent answers in milliseconds, a platform in seconds.
FACTS_WITHIN_S = 30.0
# A busy guest may miss the agent's two seconds once. Where its clone has an agent, so has it.
SOURCE_TRIES = 2
# A guest that breaks its network by what it sends does so each time.
NETWORKS_LOST_MAX = 3
# The shown part of a command; the whole command is in the request.
NAME_CHARS = 200
# What cannot be removed now may be removable in a moment: for example a volume that its guest still has open.
SWEEP_PAUSES_S = (0.5, 2, 5, 15, 60)
# After these states, the job's volumes belong to the guest itself.
BEFORE_CUT_OVER = frozenset({State.QUEUED, State.COPYING_FULL, State.DELTA_SYNCING})


def waiting(under_way: UnderWay) -> dict[str, object]:
    """Looks whether the job has cloned its volumes: NotYet. It is cancelled, if the job will not clone any more."""
    rows, rooms = under_way.rooms.store.rehearsals, under_way.rooms
    under_way.rehearsal = rows.get(under_way.rehearsal.id)
    if under_way.rehearsal.state is not RehearsalState.WAITING:
        return {}
    if not under_way.cancelled() and under_way.job.migration.state in BEFORE_CUT_OVER:
        raise NotYet
    with rooms.cloning:  # not while the job clones
        under_way.rehearsal = rows.get(under_way.rehearsal.id)
        if under_way.rehearsal.state is RehearsalState.WAITING:
            under_way.move(state=RehearsalState.SWEEPING, outcome=RehearsalState.CANCELLED)
    return {}


def refuse_lost(under_way: UnderWay) -> None:
    """Interrupted, where another host had it: its guest may still run there, and write to the clones."""
    if (host := under_way.rehearsal.host) != under_way.rooms.host:
        raise Interrupted(f"host {host}, which had the rehearsal, is lost", hint="rehearse again")


def preparing(under_way: UnderWay) -> dict[str, object]:
    """Prepares the clones with the guest's drivers, as the job will prepare the volumes."""
    rehearsal, job, preparer = under_way.rehearsal, under_way.job, under_way.rooms.preparer
    volumes = _volumes(under_way, job)
    if not rehearsal.read and rehearsal.conversion_s is None and (found := _read(under_way, volumes)):
        under_way.move(read=found)
    as_read = _as_read(under_way.rehearsal, job.manifest)
    if rehearsal.conversion_s is not None or under_way.rooms.converts(job.migration.plan, as_read):
        name, devices = str(rehearsal.id), in_order(job.manifest, {volume.disk_key: volume.path for volume in volumes})
        if rehearsal.conversion_s is None:
            began = time.monotonic()
            preparer.convert(name, job.manifest, devices, lambda kind, text: None, under_way.stop, backing=_backing(volumes))
            under_way.move(conversion_s=round(time.monotonic() - began, 1))
        preparer.adopt(name, devices, backing=_backing(volumes))
        preparer.discard(name)
    _make_entries(under_way, volumes)
    return {"state": RehearsalState.BOOTING}


def _make_entries(under_way: UnderWay, volumes: Sequence[Volume]) -> None:
    """Makes boot entries for loaders that no firmware finds by itself. So a guest boots whose own entries come along only with
    the job's guest, or not at all."""
    rooms, manifest = under_way.rooms, under_way.job.manifest
    if manifest.firmware == "uefi":
        loaders = rooms.find_loaders(disks_of(volumes), under_way.stop, _backing(volumes))
        if loaders:
            rooms.hypervisor.add_entries(under_way.rehearsal.id, boot_entries.entries(loaders), secure=manifest.secure_boot)


def booting(under_way: UnderWay) -> dict[str, object]:
    """Climbs the ladder like the job itself: it ends at the first bus from which the guest boots."""
    rehearsal, job, hypervisor = under_way.rehearsal, under_way.job, under_way.rooms.hypervisor
    if under_way.waits_since is None:
        # Left by a service that was killed here: how long a guest boots cannot be measured on one that ran on.
        hypervisor.undefine(rehearsal.id, rehearsal.id)
    if (together := rehearsal.together) is not None:
        under_way.wait_for(lambda group: is_its_turn(together, rehearsal, group))
    network = under_way.renew_network(job.manifest.nics)
    wires = () if under_way.network is None else under_way.network.ports
    volumes, began = _volumes(under_way, job), time.monotonic()
    tried: list[BootAttempt] = []
    buses = ladder(_machine(rehearsal, job.migration, ()))
    for bus in buses:
        tried.append(BootAttempt(disk_bus=bus, began_at=now()))
        try:
            sign = _booted(under_way, _machine(rehearsal, job.migration, tuple(tried), wires), volumes)
        except GuestBootFailed as error:
            if not error.other_bus_may_help or bus == buses[-1]:
                _keep(under_way, hypervisor.screenshot(rehearsal.id))
                raise
        else:
            under_way.tried = tuple(tried)
            return {
                "state": RehearsalState.CHECKING,
                "boot_s": round(time.monotonic() - began, 1),
                "boot_sign": sign,
                "checks": (CheckResult(name="boot", ok=True, detail=_seen(sign, bus)), network),
            }
    raise DomainDefineFailed(f"{job.manifest.name} has no bus to boot from")


def _booted(under_way: UnderWay, machine: Machine, volumes: list[Volume]) -> str:
    hypervisor, rooms = under_way.rooms.hypervisor, under_way.rooms
    under_way.check()
    domain = hypervisor.domain_xml(machine, volumes)
    hypervisor.define(domain)
    hypervisor.start(machine.id)
    return hypervisor.wait_until_booted(machine.id, rooms.boot_timeout_s, under_way.stop)


def _as_read(rehearsal: Rehearsal, manifest: VmManifest) -> VmManifest:
    """With what a Linux's disks say. What was read before a conversion is not so any more: that writes the names that the disks
    have here, and the initramfs."""
    if manifest.guest_os.family != "linux" or rehearsal.conversion_s is not None:
        return manifest
    return disk_drivers.noted(disk_names.noted(manifest, rehearsal.read), rehearsal.read)


def _machine(rehearsal: Rehearsal, job: Migration, attempts: tuple[BootAttempt, ...], wires: tuple[int, ...] = ()) -> Machine:
    assert job.manifest is not None
    return Machine(
        id=rehearsal.id,
        manifest=_as_read(rehearsal, job.manifest),
        target=job.plan.target,
        skipped=frozenset(disk.key for disk in job.disks if disk.state == "skipped"),
        has_drivers=rehearsal.conversion_s is not None,
        attempts=attempts,
        rehearsed=True,
        wires=wires,
    )


def _seen(sign: str, bus: DiskBus) -> str:
    return f"seen by its {sign}, disks on {bus}"


def checking(under_way: UnderWay) -> dict[str, object]:
    """Runs the checks; each is repeated until its time is over. Then it waits until no other guest needs this one."""
    rehearsal = under_way.rehearsal
    if under_way.network is None and under_way.begin_network is not None:
        # A service was killed here, and the guest's network ended with it.
        return {"state": RehearsalState.BOOTING, "checked": False}
    if under_way.network is not None and under_way.network.ended:
        return _in_a_new_network(under_way)
    if under_way.found is None:
        if under_way.rooms.hypervisor.lived(rehearsal.id) is None:
            # The step was interrupted after it had removed the guest to read its disks.
            return {"state": RehearsalState.BOOTING, "checked": False}
        try:
            found = _found(under_way)
        except _NetworkEnded:
            return _in_a_new_network(under_way)
        if rehearsal.together is not None:
            under_way.move(checked=True)
        under_way.found = found
    if rehearsal.together is not None:
        under_way.wait_for(are_all_checked)
    # A job that cuts over may have taken the volume under the clone away: what was found since is nothing.
    under_way.check(anew=True)
    outage = under_way.job.migration.outage
    before_s = None if outage is None else sum(part.p50_s for part in outage.parts if part.name in ("shutdown", "last copy"))
    after_s = (rehearsal.conversion_s or 0.0) + (rehearsal.boot_s or 0.0)
    return {
        **under_way.found,
        "state": RehearsalState.SWEEPING,
        "read": {},
        "outage_s": None if before_s is None else round(before_s + after_s, 1),
    }


class _NetworkEnded(Exception):
    """The guest's network has ended: what a check found since says nothing of the guest."""


def _in_a_new_network(under_way: UnderWay) -> dict[str, object]:
    """Starts the guest again. HostLacks, where its networks end again and again."""
    under_way.found = None
    under_way.networks_lost += 1
    if under_way.networks_lost == NETWORKS_LOST_MAX:
        raise HostLacks(
            f"the rehearsed guest's network has ended {NETWORKS_LOST_MAX} times: its process was killed, or broke",
            hint="the kernel's log says whether memory was short; rehearse again then",
        )
    log.warning("a rehearsed guest's network has ended; it is started again", rehearsal=str(under_way.rehearsal.id))
    return {"state": RehearsalState.BOOTING, "checked": False}


def _found(under_way: UnderWay) -> dict[str, object]:
    rehearsal, checker = under_way.rehearsal, under_way.checks_by()
    results = [one for one in rehearsal.checks if one.name in ("boot", "network")]
    for check in rehearsal.asked.checks:
        trouble = _asked(under_way, checker, _as_asked(check))
        results.append(CheckResult(name=_named(check), ok=trouble is None, detail=trouble or "as it should be"))
    _refuse_stopped(under_way)
    kept = _keep(under_way, under_way.rooms.hypervisor.picture(rehearsal.id))
    sameness = _sameness(under_way)
    _refuse_no_room(under_way)
    _refuse_stopped(under_way)
    return {
        "outcome": RehearsalState.PASSED if all(one.ok for one in results) else RehearsalState.FAILED,
        "checks": tuple(results),
        "sameness": sameness,
        "screenshot_url": _url(rehearsal) if kept else None,
    }


def _sameness(under_way: UnderWay) -> tuple[Sameness, ...]:
    """Compares the running source with the rehearsed guest; each reports its own facts. A source that does not answer fails
    nothing."""
    rehearsal, job, hypervisor = under_way.rehearsal, under_way.job, under_way.rooms.hypervisor
    machine = _machine(rehearsal, job.migration, ())
    # The job's own guest will have its drivers, and will boot from the bus that this one booted from.
    own = replace(machine_of(job.migration), has_drivers=machine.has_drivers, attempts=under_way.tried)
    differences, machines = hypervisor.domain_xml(own, []).differences, hypervisor.machine_facts(machine)
    source, clone = dict(rehearsal.read), hypervisor.guest_facts(rehearsal.id)
    if (facts := _source_facts(under_way, job, tries=SOURCE_TRIES if clone else 1)) and clone:
        source = {item: source[item] for item in source if are_read({item: source[item]})}  # both report their own
    source |= facts
    if not clone and are_read(rehearsal.read) and rehearsal.together is None:
        # No agent reports what runs in it: so its disks are read, once it writes to them no more.
        hypervisor.undefine(rehearsal.id, rehearsal.id)
        return compared(of_disks(source), _read(under_way, _volumes(under_way, job)), differences, machines)
    deadline = time.monotonic() + SETTLED_WITHIN_S
    while True:
        rows = compared(source, clone, differences, machines)
        if is_settled(rows) or time.monotonic() >= deadline:
            return rows
        under_way.check()
        under_way.pause(CHECK_PAUSE_S)
        clone = hypervisor.guest_facts(rehearsal.id)


def _read(under_way: UnderWay, volumes: Sequence[Volume]) -> dict[str, str]:
    """Facts from the disks, while they are not written."""
    return under_way.rooms.look_inside(disks_of(volumes), under_way.stop, _backing(volumes))


def _backing(volumes: Sequence[Volume]) -> dict[str, str]:
    """Of the clones that are overlays, the volume under each."""
    return {volume.path: volume.over for volume in volumes if volume.over is not None}


def _source_facts(under_way: UnderWay, job: Job, tries: int) -> dict[str, str]:
    """What the source reports of its guest; none, where it reports nothing at any try."""
    for left in reversed(range(tries)):
        try:
            if facts := asyncio.run(_ask_source(under_way, job)):
                return facts
        except (SynvirtError, TimeoutError) as error:
            log.warning(
                "the source does not say what runs in its guest", rehearsal=str(under_way.rehearsal.id), cause=str(error)
            )
        if left:
            under_way.pause(CHECK_PAUSE_S)
    return {}


async def _ask_source(under_way: UnderWay, job: Job) -> dict[str, str]:
    """By a session of its own, as jobs' sessions belong to their event loop."""
    plan = job.migration.plan
    if plan.source.Live is None or plan.source_ref.kind != "live_vm":
        return {}
    adapter = await under_way.rooms.connect(plan.source.Live, plan.source_ref.source_id)
    try:
        async with asyncio.timeout(FACTS_WITHIN_S):
            await adapter.connect()
            return await adapter.guest_facts(plan.source_ref.vm_id) if isinstance(adapter, ReportsGuestFacts) else {}
    finally:
        await adapter.close()


def _asked(under_way: UnderWay, checker: Checker, check: Check) -> str | None:
    deadline = time.monotonic() + check.within_s
    while True:
        under_way.check()
        left_s = deadline - time.monotonic()
        trouble = checker.trouble(check, under_way.rehearsal.id, max(left_s, CHECK_PAUSE_S))
        if trouble is not None:
            _refuse_no_room(under_way)
            _refuse_stopped(under_way)
            if under_way.network is not None and under_way.network.ended:
                raise _NetworkEnded
        if trouble is None or time.monotonic() >= deadline:
            return trouble
        under_way.pause(min(CHECK_PAUSE_S, max(deadline - time.monotonic(), 0.0)))


def _refuse_no_room(under_way: UnderWay) -> None:
    """DiskWriteFailed, where the guest is paused as what it writes has no room: what fails then says nothing of the guest. It
    ends, as the copy of its job may need the room."""
    paused = under_way.rooms.hypervisor.resume(under_way.rehearsal.id)
    if paused is not None and paused.full is not None:
        raise DiskWriteFailed(
            f"the rehearsed guest was paused: what it writes has no room in {paused.full}",
            hint="free space there, and rehearse again",
        )


def _refuse_stopped(under_way: UnderWay) -> None:
    """GuestBootFailed, where the guest has stopped: a check would say only that it is silent, and without one it would pass.
    One that was removed to read its disks has run until then."""
    lived = under_way.rooms.hypervisor.lived(under_way.rehearsal.id)
    if lived is not None and not lived.runs:
        raise GuestBootFailed(
            f"the rehearsed guest has stopped before its checks were done: {lived.trace or 'nothing says why'}",
            hint="a guest that shuts itself down does so after the cut-over too; rehearse again, and look at its console",
        )


def _as_asked(check: AnyCheck) -> Check:
    if check.kind == "role":
        return Check(kind="port", port=ROLE_PORTS[check.role], within_s=check.within_s)
    return Check.model_validate(check.model_dump())


def _named(check: AnyCheck) -> str:
    match check.kind:
        case "command":
            return shlex.join(check.argv)[:NAME_CHARS]
        case "port":
            return f"port {check.port}"
        case "role":
            return f"{check.role}: port {ROLE_PORTS[check.role]}"
        case "http":
            return check.url[:NAME_CHARS]


def _keep(under_way: UnderWay, picture: bytes | None) -> bool:
    """Stores a picture for people; nothing depends on it."""
    if picture is None:
        return False
    path = under_way.screen
    partial = path.with_suffix(".partial")
    try:
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        partial.write_bytes(picture)
        partial.replace(path)
    except OSError as error:
        log.warning("a screen cannot be kept", cause=str(error))
        with contextlib.suppress(OSError):
            partial.unlink(missing_ok=True)  # it may fill the disk
        return False
    return True


def _url(rehearsal: Rehearsal) -> str:
    return f"/migrations/{rehearsal.migration_id}/rehearsals/{rehearsal.id}/screenshot"


def failed(under_way: UnderWay, error: SynvirtError) -> dict[str, object]:
    """What changes when a step failed. Cancelled means a request of the operator or the job."""
    job, rehearsal = under_way.job, under_way.rehearsal
    cancelled = isinstance(error, Cancelled)
    checks = rehearsal.checks
    if isinstance(error, GuestBootFailed):
        checks = (CheckResult(name="boot", ok=False, detail=error.summary),)
    return {
        "state": RehearsalState.SWEEPING,
        "outcome": RehearsalState.CANCELLED if cancelled else RehearsalState.FAILED,
        "error": None if cancelled else job.problem(error, fatal=True),
        "checks": checks,
        "screenshot_url": _url(rehearsal) if under_way.screen.exists() else None,
    }


def sweeping(under_way: UnderWay) -> dict[str, object]:
    """Removes all that it made, the guest first. The rehearsal ends only after that: whatever fails is tried again."""
    _until_done(under_way, [*_undoing(under_way), lambda: _unclone(under_way)])
    return {"state": under_way.rehearsal.outcome or RehearsalState.FAILED, "finished_at": now()}


def sweep_here(under_way: UnderWay) -> None:
    """Removes what this host alone has of it. Its job, with the clones, was taken over by another host."""
    _until_done(under_way, _undoing(under_way))


def _undoing(under_way: UnderWay) -> list[Callable[[], object]]:
    rehearsal, rooms = under_way.rehearsal, under_way.rooms
    return [
        lambda: rooms.hypervisor.undefine(rehearsal.id, rehearsal.id),
        under_way.close,
        lambda: rooms.hypervisor.forget_screenshot(rehearsal.id),
        lambda: rooms.hypervisor.forget_variables(rehearsal.id),
        lambda: rooms.preparer.discard(str(rehearsal.id)),
    ]


def _until_done(under_way: UnderWay, steps: list[Callable[[], object]]) -> None:
    pauses = iter(SWEEP_PAUSES_S)
    while steps:
        left = []
        for step in steps:
            try:
                step()
            except PersistFailed:
                raise
            except Exception as error:
                unexpected = not isinstance(error, SynvirtError)
                log.warning(
                    "what a rehearsal made cannot be removed now",
                    rehearsal=str(under_way.rehearsal.id),
                    cause=str(error),
                    exc_info=unexpected,
                )
                left.append(step)
        steps = left
        if steps:
            under_way.pause(next(pauses, SWEEP_PAUSES_S[-1]))


def _unclone(under_way: UnderWay) -> None:
    """Idempotent."""
    job = under_way.job
    if job.migration.manifest is not None:
        for _, volume, clone in clones(job, under_way.rehearsal.id):
            job.destination.unclone(volume, clone)


def _volumes(under_way: UnderWay, job: Job) -> list[Volume]:
    destination = job.destination
    return [
        Volume(disk.key, destination.device(clone), destination.device_type, over=destination.backing_file(volume, clone))
        for disk, volume, clone in clones(job, under_way.rehearsal.id)
    ]


STEPS: dict[RehearsalState, Callable[[UnderWay], dict[str, object]]] = {
    RehearsalState.WAITING: waiting,
    RehearsalState.PREPARING: preparing,
    RehearsalState.BOOTING: booting,
    RehearsalState.CHECKING: checking,
    RehearsalState.SWEEPING: sweeping,
}
