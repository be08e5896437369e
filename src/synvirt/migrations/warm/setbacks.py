"""What goes wrong with a pass, and is noted so that it is tried again otherwise: a snapshot that is gone, change tracking that
was lost, or that lies."""

import structlog

from synvirt.disks.checking.sampling import ChangesMissed
from synvirt.errors import CbtReset, CbtUnsupported, SnapshotFailed
from synvirt.migrations.job import Job
from synvirt.migrations.warm.snapshots import Kind, snapshot_name, unmade
from synvirt.store import Watermark

log = structlog.get_logger(__name__)

# Change tracking may be lost once by bad luck (a host that crashed): the whole disk is compared again. A source that loses it
# once more before a delta went well will never converge.
CBT_RESETS_MAX = 1
# A snapshot is gone when its host was restarted in the middle of a pass. One that never lasts for a pass is no use.
RETAKES_MAX = 3


async def is_whole(job: Job, number: int) -> bool:
    """Does this pass read whole disks? Since their change tracking was lost, or once it was found to lie."""
    return (await job.memory_of(number)).whole or await is_distrusted(job)


async def is_distrusted(job: Job) -> bool:
    return (await job.memory()).distrusted is not None


async def retake(job: Job, number: int, kind: Kind, error: SnapshotFailed) -> None:
    """The snapshot is no more. Another is taken under its name, which holds all that changed since the one before it."""
    retakes = (await job.memory_of(number)).retakes or 0
    if retakes >= RETAKES_MAX:
        raise error
    log.warning("the snapshot is taken again", job=str(job.id), number=number, cause=error.detail)
    await take_anew(job, number, kind)
    await job.note_of(number, retakes=retakes + 1)


async def take_anew(job: Job, number: int, kind: Kind) -> None:
    """The pass begins again with another snapshot of the same name, on volumes that hold some of it already."""
    if (await job.memory_of(number)).retakes is None:
        await job.note_of(number, retakes=0)
    await _from_the_start(job, number)
    await unmade(job, snapshot_name(job, number), kind)
    await job.note_of(number, begun_at=None, snapshot=None)


async def _from_the_start(job: Job, number: int) -> None:
    """Nothing that the pass copied so far counts: what comes next is another moment of the source, or other extents. Before
    the note that says so, for a crash in between leaves a pass that is run again as it was."""
    store = job.rooms.store
    for key in await job.in_thread(store.watermarks, job.id, number):
        nothing = Watermark(
            disk_key=key, pass_number=number, offset_bytes=0, bytes_total=0, bytes_done=0, bytes_zero=0, finished=False
        )
        await job.in_thread(store.put_watermark, job.id, nothing)


async def allow_reset(job: Job, number: int, kind: Kind, error: CbtReset) -> None:
    """Note that pass `number` reads whole disks; the error itself, when that happened before.

    Of another snapshot: this one may be older than the reset, and by its change ids the next pass would find the same reset
    once more. Noted after it is gone: a crash in between finds the same reset, not another one."""
    resets = (await job.memory()).cbt_resets
    if resets >= CBT_RESETS_MAX:
        raise error
    await take_anew(job, number, kind)
    await job.note_of(number, whole=True)
    await job.note(cbt_resets=resets + 1)
    await job.change(last_error=job.problem(error, fatal=False))


async def take_reset_back(job: Job) -> None:
    """A pass over whole disks has made a reset good while the guest ran: `Pass.whole` says it, and it is no trouble of the job
    any more. What made the outage longer stays as the job's note."""
    last, note = job.migration.passes[-1], job.migration.last_error
    made_good = last.whole and last.kind != "final" and not await is_distrusted(job)
    if made_good and note is not None and (note.code, note.fatal) == (CbtReset.code, False):
        await job.change(last_error=None)


async def distrust(job: Job, number: int, error: ChangesMissed | CbtUnsupported) -> None:
    """Note that this pass and all after it read whole disks, the last one too. The source does not list changes truly, or does
    not list them any more since the disks are read by another way."""
    await _from_the_start(job, number)
    await job.note(distrusted=error.detail)
    problem = type(error)(
        f"{error.detail}. From here on whole disks are compared, also while the guest is off for the cut-over",
        hint=error.hint,
    )
    missed = {"distrusted": error.detail} if isinstance(error, ChangesMissed) else {}
    await job.change(last_error=job.problem(problem, fatal=False), **missed)
