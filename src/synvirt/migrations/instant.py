"""Instant start: the guest runs while its copy is made, and moves onto its volumes when the copy is complete. asyncio.

    CopyingFull   export served ─▶ overlay made ─▶ domain on it defined, started, seen to boot
                                └▶ the pass copies the same disks to the volumes, and yields to the guest's reads
    Starting      the guest's layers become its volumes, without a stop ─▶ domain over the volumes defined ─▶ export ended

From the guest's start until it is on its volumes no failure of a step fails the job: the job shows it, and tries the step again
until it succeeds or an operator cancels, which loses what the guest wrote. A guest that cannot read is paused, and resumed when
it can. The export outlives the service; the host that has the job finds it, or makes it again.
"""

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from contextlib import suppress
from functools import partial
from typing import Any, TypeVar
from uuid import UUID

import structlog

from synvirt.disks.specs import (
    AllocatedSpec,
    BlankSpec,
    ChangedSpec,
    GzipSpec,
    ImageSpec,
    JoinedSpec,
    RawSpec,
    ReaderSpec,
    XvaSpec,
)
from synvirt.errors import (
    Cancelled,
    DiskWriteFailed,
    GuestBootFailed,
    Internal,
    InvalidPlan,
    PersistFailed,
    SynvirtError,
    from_code,
)
from synvirt.hypervisor import Paused, Volume
from synvirt.hypervisor.hardware import uuid_of
from synvirt.jobs.exporting import ACTIVITY
from synvirt.jobs.exports import Exports
from synvirt.jobs.instant import (
    AGAIN_S,
    LOOK_EVERY_S,
    NO_SPACE_HINT,
    OTHER_DESTINATION,
    is_started,
    keep_going,
    layers,
    room_news,
    why_not_onto,
)
from synvirt.migrations.job import Job
from synvirt.migrations.landing import define_on, land, machine_of, note_content
from synvirt.migrations.passes import PassDisk, run_pass
from synvirt.migrations.rooms import Rooms
from synvirt.model.job import Instant, InstantState, Migration, Pass
from synvirt.model.plan import MigrationPlan
from synvirt.model.values import now
from synvirt.repeating import pause_after

log = structlog.get_logger(__name__)

T = TypeVar("T")

# Specs of servers that this service itself asks for ranges.
_RANGES = ("http://", "https://", "s3://")


def applies(job: Migration) -> bool:
    """Whether the job starts its guest at once. A retry that took over a complete copy starts its guest from that instead."""
    return job.plan.instant and job.retry_of is None


# ── can it be ────────────────────────────────────────────────────────────────────────────────────────────────────────


def refuse_plan(rooms: Rooms, plan: MigrationPlan, *, converts: bool) -> None:
    """InvalidPlan, where the plan allows no instant start."""
    if plan.source.Live is not None:
        raise InvalidPlan("an instant start is for offline imports: the guest of a Live plan runs at its source meanwhile")
    if not plan.target.start:
        raise InvalidPlan("an instant start with target.start false starts nothing", hint="leave one of them out")
    if converts:
        raise InvalidPlan(
            "the guest needs drivers put into its disks before it can start here, and that needs a whole copy",
            hint="leave instant out; or set conversion to never, where it has virtio drivers already",
        )
    if plan.on_host_lost == "restart_elsewhere":
        raise InvalidPlan(
            "on_host_lost restart_elsewhere would lose what the guest wrote since its instant start",
            hint="leave one of them out",
        )
    if rooms.exports is None:
        raise InvalidPlan("this service serves no disks to its guests")
    if plan.source.Offline in rooms.passthroughs:
        raise InvalidPlan(f"a {plan.source.Offline} is converted as a whole: nothing of it can be read before")
    if (why := why_not_onto(rooms.destination_named(plan.target.destination))) is not None:
        raise InvalidPlan(why, hint=OTHER_DESTINATION)


def refuse_readers(readers: Sequence[ReaderSpec]) -> None:
    """InvalidPlan, where a disk cannot be read in several places at once."""
    for spec in readers:
        if (why := _not_anywhere(spec)) is not None:
            raise InvalidPlan(
                f"the guest cannot run from its source: {why}", hint="leave instant out, or unpack the source first"
            )


def _not_anywhere(spec: ReaderSpec) -> str | None:  # noqa: PLR0911 - a table in the form of code
    match spec:
        case RawSpec():
            if spec.remote is not None and not spec.remote.url.startswith(_RANGES):
                return "its server is asked by another program"
            return None
        case GzipSpec() | XvaSpec(packing="gzip" | "zstd"):
            return "it is compressed as a whole, and so is read from its start"
        case XvaSpec():
            return _not_anywhere(spec.over)
        case AllocatedSpec() | ChangedSpec():
            return _not_anywhere(spec.over)
        case ImageSpec():
            return _not_anywhere(spec.over) or (None if spec.parent is None else _not_anywhere(spec.parent))
        case JoinedSpec():
            return next(filter(None, map(_not_anywhere, spec.parts)), None)
        case BlankSpec():
            return None
    return f"a disk of format {spec.format} is read by another program, or comes as a stream"


# ── CopyingFull: the guest runs, and is copied ───────────────────────────────────────────────────────────────────────


async def copy_under_the_guest(job: Job, disks: Sequence[PassDisk], check: Callable[[], Awaitable[None]]) -> None:
    """Runs the guest and copies its disks, until the copy is complete and the guest has booted or failed to. `check` raises
    where the source has changed."""
    exports, name = _exports(job), str(job.id)
    readers = [disk.reader for disk in disks]
    volumes = await job.in_thread(_early_volumes, job)
    if await job.in_thread(job.rooms.hypervisor.has_moved, uuid_of(machine_of(job.migration)), volumes):
        return  # the store is older than that, as if it was put back from a copy: the volumes are the guest's
    refuse_readers(readers)
    await job.record("export", name)
    await job.in_thread(exports.serve, name, readers)
    await _lay(job, volumes)
    yields_to = str(exports.folder(name) / ACTIVITY)

    async def copied() -> None:
        async def attempt() -> None:
            await run_pass(job, Pass(number=1, kind="full"), disks, yields_to=yields_to)
            await check()

        await until_it_goes_well(job, attempt)

    await _while_guest_is_kept(job, readers, [copied(), _landed(job, volumes)])


async def _lay(job: Job, volumes: Sequence[Volume]) -> None:
    """Makes the overlays, only once: they have what the guest wrote."""
    if job.migration.instant is not None:
        return
    sizes = {disk.key: disk.capacity_bytes for disk in job.manifest.disks}
    for volume in volumes:
        job.stop.check()
        await job.in_thread(job.rooms.hypervisor.lay, volume, sizes[volume.disk_key])
    await job.change(instant=Instant(state="preparing"))


async def _landed(job: Job, volumes: list[Volume]) -> None:
    """Starts the guest and waits until it has booted. A guest that does not boot is reported only in Starting, when its copy is
    complete: so the copy is kept."""
    if job.migration.boot_sign is not None:
        return

    async def starts(job: Job) -> None:
        if is_started(job.migration.instant):
            return
        # Noted before the start: from now on the guest's writes must be kept.
        await _be(job, "running", started_at=now())

    try:
        await note_content(job, volumes)
        await land(job, volumes, starts)
    except GuestBootFailed as error:
        log.warning("the guest was not seen to boot; it is copied all the same", job=str(job.id), cause=error.detail)
    except SynvirtError:
        await _note_whether_it_ran(job)
        raise


async def _note_whether_it_ran(job: Job) -> None:
    """A guest that could not be started has written nothing: its job fails as any other."""
    domain = job.migration.domain
    lived = None if domain is None else await job.in_thread(job.rooms.hypervisor.lived, UUID(domain.uuid))
    if lived is None or lived.trace is None:
        await _be(job, "preparing", started_at=None)


async def until_it_goes_well(job: Job, attempt: Callable[[], Awaitable[T]]) -> T:
    """The result of `attempt`. While a guest's overlays have what it wrote, and nothing else has, no failure ends its job: it
    is shown, and `attempt` is called again, until an operator cancels. Before the guest's start, and once it is on its volumes,
    a failure is raised."""
    tries = 0
    while True:
        try:
            result = await attempt()
        except (Cancelled, PersistFailed):
            raise
        except Exception as error:
            if not _would_lose_writes(job.migration):
                raise
            pause_s = pause_after(tries, AGAIN_S)
            tries += 1
            # A missing file may come back as another one. So it is checked again, not remembered.
            await job.show(_shown_meanwhile(job, error, pause_s))
            await job.stop.sleep(pause_s)
        else:
            if tries:
                await job.show_no_more()
            return result


def _would_lose_writes(job: Migration) -> bool:
    return job.instant is not None and is_started(job.instant) and job.instant.state != "done"


def _shown_meanwhile(job: Job, error: Exception, pause_s: float) -> SynvirtError:
    if not isinstance(error, SynvirtError):
        log.exception("something unexpected went wrong", job=str(job.id))
        error = Internal(f"{type(error).__name__} in {job.migration.state}", hint="the service's log has the cause")
    log.warning("the guest runs on; it is tried again", job=str(job.id), cause=error.detail, again_s=pause_s)
    return from_code(
        error.code,
        f"{error.detail.rstrip('.')}. The guest is kept, and it is tried again",
        error.hint or "cancel the job to give up: what the guest wrote is lost then",
    )


async def _while_guest_is_kept(job: Job, readers: Sequence[ReaderSpec], work: Sequence[Coroutine[Any, Any, None]]) -> None:
    """Does all of the work while the guest is kept running. Raises the first failure, when all work has ended."""
    doing = [asyncio.ensure_future(one) for one in work]
    keeping = asyncio.ensure_future(_keep(job, readers))
    everything = [*doing, keeping]
    try:
        while not all(one.done() for one in doing):
            done, _ = await asyncio.wait([one for one in everything if not one.done()], return_when=asyncio.FIRST_COMPLETED)
            for one in done:
                one.result()
    except Exception:
        # Work in threads ends here, so that nothing is defined or started after the job is swept.
        job.stop.expire()
        await asyncio.wait(doing)
        job.stop.renew()
        raise
    finally:
        for one in everything:
            one.cancel()
        await asyncio.wait(everything)
        for one in everything:  # if several failed, one is raised
            with suppress(asyncio.CancelledError):
                one.exception()


async def _keep(job: Job, readers: Sequence[ReaderSpec]) -> None:
    """Forever: makes a missing export again, and resumes a paused guest."""
    name = str(job.id)
    while True:
        await job.stop.sleep(LOOK_EVERY_S)
        try:
            domain = job.migration.domain
            uuid = None if domain is None else UUID(domain.uuid)
            paused = await job.in_thread(keep_going, _exports(job), job.rooms.hypervisor, name, readers, uuid)
        except (Cancelled, PersistFailed):
            raise
        except Exception as error:  # of any kind: as long as the guest runs, this must not end
            log.warning("the guest's disks are not served now", job=name, cause=str(error))
            paused = Paused()
        await _show_room(job, paused)
        if (instant := job.migration.instant) is not None and instant.state in ("running", "waiting"):
            state: InstantState = "waiting" if paused else "running"
            if state != instant.state:
                await _be(job, state)


async def _show_room(job: Job, paused: Paused | None) -> None:
    shown = job.migration.last_error
    if shown is not None and paused is not None and (await job.memory()).passing is None:
        shown = None  # it passes no more, and is shown again afterwards: the job runs cold, for example
    news = room_news(None if shown is None else shown.message, paused)
    if news:
        log.warning("the guest has no room for what it writes", job=str(job.id), cause=news)
        await job.show(DiskWriteFailed(news, hint=NO_SPACE_HINT))
    elif news is not None:
        await job.show_no_more()


# ── Starting: onto the volumes ───────────────────────────────────────────────────────────────────────────────────────


async def onto_volumes(job: Job, readers: Sequence[ReaderSpec] | None, volumes: list[Volume]) -> None:
    """Moves the guest onto its volumes. On return nothing else of the instant start is left."""
    instant = job.migration.instant
    if instant is None or job.migration.domain is None:
        raise Internal("the guest of an instant start was never defined")
    uuid = UUID(job.migration.domain.uuid)
    if instant.state != "done":
        await _be(job, "moving")
        layered = await job.in_thread(_early_volumes, job)
        move = partial(job.rooms.hypervisor.onto_volumes, uuid, layered)

        async def moved() -> None:
            await job.in_stoppable_thread(move)
            await define_on(job, volumes, layered)
            await job.in_stoppable_thread(move)  # one that was off may have been started from its layers before that

        if readers is None:
            await until_it_goes_well(job, moved)
        else:
            await _while_guest_is_kept(job, readers, [until_it_goes_well(job, moved)])
        await _show_room(job, None)
    await sweep_export(job, str(job.id))  # where that fails, the whole step is tried again (advance.py)
    await _be(job, "done")
    job.stop.check()  # the last moment at which a cancel is possible
    await job.strike("export", str(job.id))


async def sweep_export(job: Job, name: str) -> None:
    """Removes the export, and the overlays in its folder."""
    await job.in_thread(_exports(job).end, name)


# ── below ────────────────────────────────────────────────────────────────────────────────────────────────────────────


def _exports(job: Job) -> Exports:
    if job.rooms.exports is None:
        raise Internal("this service serves no disks to its guests")
    return job.rooms.exports


def _early_volumes(job: Job) -> list[Volume]:
    """The guest's layers, in the order of the pass, by which the sockets are numbered. Blocks."""
    exports, destination = _exports(job), job.destination
    return [
        Volume(disk.key, destination.device(volume), destination.device_type, layers(exports, str(job.id), number))
        for number, (disk, volume) in enumerate(job.copied_disks)
    ]


async def _be(job: Job, state: InstantState, **fields: object) -> None:
    if job.migration.instant is not None:
        await job.change(instant=job.migration.instant.model_copy(update={"state": state, **fields}))
