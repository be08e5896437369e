"""The guest lands: its name is claimed, its domain is defined and started, and it boots; if needed from another bus. asyncio.

    claim (Queued)      the job claims what two guests here may not share, or Conflict, before anything is copied
    follow (each pass)  the guest gets the processors, memory and cards that its source has by now
    land (Starting)     rung ─▶ define ─▶ start ─▶ wait for a sign of life
                         ▲                            │ none, and another bus may help
                         └─── the next of the ladder ◀┘

The job's rung is the last of `boot_attempts`. It is committed before anything of that rung is done, so after a crash the job
goes on with that rung.
"""

from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from uuid import UUID

import structlog

from synvirt.errors import Cancelled, GuestBootFailed, Internal, SynvirtError
from synvirt.guests.inside.opening import by_socket
from synvirt.hypervisor import Volume
from synvirt.hypervisor.hardware import ladder
from synvirt.hypervisor.machine import Machine
from synvirt.kvm.identity import CLAIMED_HINT, identity_of
from synvirt.live import KeepsUefiVariables, LiveAdapter
from synvirt.machines import boot_entries, card_names, disk_drivers, disk_names
from synvirt.migrations.job import Job
from synvirt.migrations.source_vm import LATER_S, at_source
from synvirt.model.job import BootAttempt, Domain, Migration
from synvirt.model.kinds import State
from synvirt.model.machine import DiskBus, VmManifest
from synvirt.model.values import now

log = structlog.get_logger(__name__)


def machine_of(job: Migration) -> Machine:
    """The machine of this job's domain, once its manifest is known."""
    if job.manifest is None:
        raise Internal(f"job {job.id} has no manifest yet")
    return Machine(
        id=job.id,
        manifest=job.manifest,
        target=job.plan.target,
        skipped=frozenset(disk.key for disk in job.disks if disk.state == "skipped"),
        has_drivers=any(visit.state is State.V2V_PROCESSING for visit in job.history),
        attempts=job.boot_attempts,
    )


async def claim(job: Job, planned: Migration | None = None) -> None:
    """Claims the name and ids of the guest that the job has `planned` (None: as it is). Conflict, when another job or a domain
    here has one. The claim comes before the look, so that of two jobs one sees the other."""
    draft = await job.in_thread(job.rooms.hypervisor.domain_xml, machine_of(planned or job.migration), [])
    identity = identity_of(draft.xml)
    await job.in_thread(job.rooms.store.claim, job.id, identity.claims, hint=CLAIMED_HINT)
    await job.in_thread(job.rooms.hypervisor.check_free, identity)


async def follow(job: Job, present: VmManifest) -> None:
    """Takes over the processors, memory and network cards that the source has now: a job may be held for weeks, and its owner
    changes them meanwhile. Other facts stay: a guest that is off does not say its system or addresses. Conflict, as `claim`."""
    before = job.manifest
    addresses = {card.mac: card.ip_addresses for card in before.nics}
    cards = [card.model_copy(update={"ip_addresses": addresses.get(card.mac, card.ip_addresses)}) for card in present.nics]
    sizes = {name: getattr(present, name) for name in ("cpu_count", "cores_per_socket", "memory_bytes")}
    after = before.model_copy(update={**sizes, "nics": tuple(cards)})
    if after == before or job.migration.repair is not None:  # a repair makes no guest
        return
    log.info("the source was reconfigured", job=str(job.id), **sizes, cards=len(cards))
    await claim(job, job.migration.model_copy(update={"manifest": after}))
    await job.change(manifest=after)


async def land(job: Job, volumes: list[Volume], check: Callable[[Job], Awaitable[None]]) -> None:
    """Boots the guest. GuestBootFailed, when no rung is left; DomainDefineFailed; Conflict, when a domain took the name
    meanwhile. `check` raises when the guest must not be started; it is called before each rung, as a rung takes minutes."""
    is_first = job.migration.domain is None and not job.migration.boot_attempts
    if is_first and not await _carry_variables(job):
        await _make_entries(job, volumes)
    starts = job.migration.plan.target.start
    if starts and not job.migration.boot_attempts:
        await job.change(boot_attempts=(_attempt(ladder(machine_of(job.migration))[0]),))
    while True:
        domain = await _defined(job, volumes)
        if not starts:
            return
        await check(job)
        try:
            sign = await _booted(job, domain)
        except GuestBootFailed as error:
            await _climb(job, error)
        else:
            *before, last = job.migration.boot_attempts
            ended = last.model_copy(update={"sign": sign, "trouble": None, "ended_at": now()})
            await job.change(boot_sign=sign, boot_attempts=(*before, ended))
            await job.in_thread(job.rooms.hypervisor.forget_screenshot, job.id)
            return


async def _carry_variables(job: Job) -> bool:
    """Takes boot entries and keys over from the source, if it keeps them as we do. A guest boots without them too: a loss stops
    nothing, and is listed in the domain's differences. Whether there are any."""
    ref = job.migration.plan.source_ref
    if ref.kind != "live_vm" or job.manifest.firmware != "uefi":
        return False

    async def ask(adapter: LiveAdapter) -> bytes | None:
        return await adapter.uefi_variables(ref.vm_id) if isinstance(adapter, KeepsUefiVariables) else None

    try:
        content = await at_source(job, ask, LATER_S)
    except Cancelled:
        raise
    except SynvirtError as error:
        log.warning("the UEFI variables stay behind", job=str(job.id), cause=error.detail)
        return False
    if content is None:
        return False
    await job.record("variables", str(job.id))
    return await job.in_thread(job.rooms.hypervisor.keep_variables, job.id, content)


async def _make_entries(job: Job, volumes: list[Volume]) -> None:
    """Makes boot entries for the loaders on the guest's disks, where its own did not come along, and no loader lies where every
    firmware looks: it would not boot."""
    if job.manifest.firmware != "uefi":
        return
    loaders = await job.in_stoppable_thread(lambda stop: job.rooms.find_loaders(disks_of(volumes), stop, {}))
    if not loaders:
        return
    await job.record("variables", str(job.id))
    add = partial(job.rooms.hypervisor.add_entries, job.id, boot_entries.entries(loaders), secure=job.manifest.secure_boot)
    if await job.in_thread(add):
        await job.change(manifest=boot_entries.noted(job.manifest, loaders))


def disks_of(volumes: Sequence[Volume]) -> list[str]:
    """As `look_inside` and `find_loaders` take them: of a volume that is not complete yet, what the guest reads meanwhile."""
    return [volume.path if volume.early is None else by_socket(volume.early.socket) for volume in volumes]


async def note_content(job: Job, volumes: list[Volume]) -> None:
    """Notes how a Linux itself names its disks, and the bus that its initramfs has drivers for, by which the ladder begins. One
    that does not find all its disks boots far enough to show signs of life, and stops a minute later; one without a driver
    waits for minutes. Its network cards, too: one that it does not find gets no address. Once the guest may have been started,
    the disks are its own, and nothing is noted."""
    if job.manifest.guest_os.family != "linux" or job.migration.domain is not None or job.migration.boot_attempts:
        return
    facts = await job.in_stoppable_thread(lambda stop: job.rooms.look_inside(disks_of(volumes), stop, {}))
    noted = card_names.noted(disk_drivers.noted(disk_names.noted(job.manifest, facts), facts), facts)
    if noted != job.manifest:
        await job.change(manifest=noted)


async def _defined(job: Job, volumes: list[Volume]) -> Domain:
    hypervisor = job.rooms.hypervisor
    domain = job.migration.domain
    if domain is None:
        domain = await job.in_thread(hypervisor.domain_xml, machine_of(job.migration), volumes)
    await job.record("domain", domain.uuid)
    await job.in_thread(hypervisor.define, domain)
    await job.change(domain=domain)
    return domain


async def define_on(job: Job, volumes: list[Volume], moved: list[Volume]) -> None:
    """Defines the domain again on these volumes, with its present rung. A running guest goes on. `moved`: the same volumes,
    with the layers that its disks had."""
    hypervisor = job.rooms.hypervisor
    domain = await job.in_thread(hypervisor.domain_xml, machine_of(job.migration), volumes)
    await job.in_thread(hypervisor.define, domain, moved)
    await job.change(domain=domain)


async def _booted(job: Job, domain: Domain) -> str:
    job.stop.check()
    await job.record("screenshot", str(job.id))
    await job.in_thread(job.rooms.hypervisor.start, UUID(domain.uuid))
    return await job.in_stoppable_thread(
        partial(job.rooms.hypervisor.wait_until_booted, UUID(domain.uuid), job.rooms.boot_timeout_s)
    )


async def _climb(job: Job, error: GuestBootFailed) -> None:
    """Commits the end of this rung and the next rung together. Raises `error`, when there is none or it would not help."""
    *before, last = job.migration.boot_attempts
    failed = last.model_copy(update={"trouble": error.summary, "ended_at": now()})
    tried = {attempt.disk_bus for attempt in job.migration.boot_attempts}
    left = [bus for bus in ladder(machine_of(job.migration)) if bus not in tried]
    if not error.other_bus_may_help or not left:
        await job.change(boot_attempts=(*before, failed))
        raise error
    await job.change(boot_attempts=(*before, failed, _attempt(left[0])), domain=None)


def _attempt(bus: DiskBus) -> BootAttempt:
    return BootAttempt(disk_bus=bus, began_at=now())
