"""What can go wrong with a pass: its snapshot is gone, or change tracking was lost or is wrong. Each is noted, and the pass is
tried again in another way."""

import structlog

from synvirt.disks.checking.sampling import ChangesMissed
from synvirt.errors import CbtReset, CbtUnsupported, SnapshotFailed, SynvirtError
from synvirt.migrations.job import Job
from synvirt.migrations.memory import PassMemory
from synvirt.migrations.warm.snapshots import Kind, snapshot_name, unmade
from synvirt.store import Watermark

log = structlog.get_logger(__name__)

# Change tracking may be lost once by accident (a host crashed): then whole disks are compared. A source that loses it again
# before a delta succeeded will never converge.
CBT_RESETS_MAX = 1
# A snapshot may be gone because its host was restarted during a pass. After this many times the pass fails.
RETAKES_MAX = 3


async def is_whole(job: Job, noted: PassMemory) -> bool:
    """Whether this pass reads whole disks, because change tracking was lost or was found wrong."""
    return noted.whole or await is_distrusted(job)


async def is_distrusted(job: Job) -> bool:
    """Whether the source's change tracking was found wrong. All passes then read whole disks."""
    return (await job.memory()).distrusted is not None


# What `note_setback` takes.
SETBACKS = (SnapshotFailed, ChangesMissed, CbtUnsupported, CbtReset)


async def note_setback(job: Job, number: int, kind: Kind, error: SynvirtError) -> None:
    """Notes why pass `number` failed, so that it is tried again in another way. Raises `error` where that would not help."""
    match error:
        case SnapshotFailed():
            await _retake(job, number, kind, error)
        case ChangesMissed() | CbtUnsupported():
            await _distrust(job, number, error)
        case CbtReset():
            await _allow_reset(job, number, kind, error)
        case _:
            raise error


async def _retake(job: Job, number: int, kind: Kind, error: SnapshotFailed) -> None:
    """Begins the pass again with another snapshot of the same name. It has all changes since the snapshot before. Raises
    `error` after RETAKES_MAX of them."""
    retakes = (await job.memory_of(number)).retakes or 0
    if retakes >= RETAKES_MAX:
        raise error
    log.warning("the snapshot is taken again", job=str(job.id), number=number, cause=error.detail)
    await begin_again(job, number, kind)
    await job.note_of(number, retakes=retakes + 1)


async def begin_again(job: Job, number: int, kind: Kind) -> None:
    """Begins the pass again with another snapshot of the same name. The volumes have a part of the pass already."""
    if (await job.memory_of(number)).retakes is None:
        await job.note_of(number, retakes=0)
    await _from_the_start(job, number)
    await unmade(job, snapshot_name(job, number), kind)
    await job.note_of(number, begun_at=None, snapshot=None)


async def _from_the_start(job: Job, number: int) -> None:
    """Sets the pass's watermarks to zero, as it will copy another moment of the source, or other extents. This comes before the
    note that says so: after a crash in between the pass runs again as it was."""
    store = job.rooms.store
    for key in await job.in_thread(store.watermarks, job.id, number):
        nothing = Watermark(
            disk_key=key, pass_number=number, offset_bytes=0, bytes_total=0, bytes_done=0, bytes_zero=0, finished=False
        )
        await job.in_thread(store.put_watermark, job.id, nothing)


async def _allow_reset(job: Job, number: int, kind: Kind, error: CbtReset) -> None:
    """Notes that pass `number` reads whole disks. Raises `error` after CBT_RESETS_MAX of them. A guest that is off has no
    tracking on some platforms, and needs none, as it changes no more: that does not count, nor is the last pass refused.

    It reads another snapshot. This one may be older than the reset, and then the next pass would meet the same reset again. The
    note is written after this snapshot is removed: after a crash in between the same reset is met, and counted once."""
    resets, off = (await job.memory()).cbt_resets, kind != "final" and await is_off(job)
    if resets >= CBT_RESETS_MAX and kind != "final" and not off:
        raise error
    await begin_again(job, number, kind)
    await job.note_of(number, whole=True)
    if not off:
        await job.note(cbt_resets=resets + 1)
    await job.report(error)


async def is_off(job: Job) -> bool:
    """Whether the guest is off now; the job or somebody else may have shut it down."""
    return (await job.with_adapter(lambda adapter: adapter.inspect(job.vm_id))).power_state == "off"


async def take_reset_back(job: Job) -> None:
    """Removes the job's note of a reset after a pass has read whole disks while the guest ran; `Pass.whole` says so. A reset
    that made the outage longer stays noted."""
    last, note = job.migration.passes[-1], job.migration.last_error
    made_good = last.whole and last.kind != "final" and not await is_distrusted(job)
    if made_good and note is not None and (note.code, note.fatal) == (CbtReset.code, False):
        await job.change(last_error=None)


async def _distrust(job: Job, number: int, error: ChangesMissed | CbtUnsupported) -> None:
    """Notes that this pass and all later ones read whole disks, the last one too. The source lists changes wrongly, or lists
    none any more because the disks are read by another way."""
    await _from_the_start(job, number)
    await job.note(distrusted=error.detail)
    problem = type(error)(
        f"{error.detail}. From here on whole disks are compared, also while the guest is off for the cut-over",
        hint=error.hint,
    )
    missed = {"distrusted": error.detail} if isinstance(error, ChangesMissed) else {}
    await job.report(problem, **missed)
