"""The steps of a job, a function for each state. They are idempotent: after a crash a job resumes by running its step again.
asyncio.

Each takes the running job and returns the Facts by which `states.ROWS` chooses the next state. What a step makes has its ledger
entry before; what it must remember (a snapshot's change ids) is noted before it is used.
"""

import asyncio
from collections.abc import Awaitable, Callable
from functools import partial
from pathlib import Path

import structlog

from synvirt.disks.roots import Root
from synvirt.disks.specs import ReaderSpec
from synvirt.errors import (
    Cancelled,
    CbtUnsupported,
    DiskWriteFailed,
    InvalidPlan,
    PersistFailed,
    SynvirtError,
)
from synvirt.guests import in_order
from synvirt.hypervisor import Volume
from synvirt.live import LiveAdapter
from synvirt.machines import concerns
from synvirt.machines.texts import clean
from synvirt.migrations import instant, repairing, source_vm
from synvirt.migrations.files import disks_of_files, importer_of, refuse_changed
from synvirt.migrations.job import Job, volume_label
from synvirt.migrations.landing import claim, land, note_content
from synvirt.migrations.passes import run_pass
from synvirt.migrations.passthrough import chosen, pass_through
from synvirt.migrations.patience import patiently
from synvirt.migrations.planning.critical import refuse_critical
from synvirt.migrations.planning.retrying import look_at_volumes, with_kept_volumes
from synvirt.migrations.proof import moved, receipts
from synvirt.migrations.states import Facts
from synvirt.migrations.warm.holding import HOLD_LOOK_S
from synvirt.migrations.warm.syncing import copy_full, cut_over, sync
from synvirt.model.job import Conversion, ConversionMessage, DiskProgress, MessageKind, Pass
from synvirt.model.kinds import Mode, State
from synvirt.model.machine import VmManifest
from synvirt.model.problems import Problem
from synvirt.model.values import now
from synvirt.offline import OfflineImporter

Step = Callable[[Job], Awaitable[Facts]]

log = structlog.get_logger(__name__)

NO_WARM_MODE = "the source has no warm mode"

# ── Queued: the VM, and whether the plan can work at all ─────────────────────────────────────────────────────────────


async def queued(job: Job) -> Facts:
    """Inspects the VM, refuses what cannot work, and chooses disks and destination. Nothing is copied."""
    if job.migration.repair is not None:
        await repairing.begin(job)
        return Facts(repair=True)
    await _until_start(job)
    if taken_up := job.migration.retry_of is not None:
        await _take_volumes(job)
        if job.migration.plan.source.Live is None:
            await look_at_volumes(job)
            return await _nothing_to_copy(job)
    manifest, supports_warm = await _inspected(job)
    refuse_critical(job.migration.plan, manifest)
    disks = _chosen_disks(job, manifest)
    if taken_up:
        source_vm.refuse_another(job.manifest, manifest)
        disks = with_kept_volumes(job, disks, manifest)
    plan, rooms = job.migration.plan, job.rooms
    destination = plan.target.destination or next(iter(rooms.destinations))
    fields: dict[str, object] = {"manifest": manifest, "disks": disks, "destination": destination, "started_at": now()}
    if (name := clean(manifest.name)) and not (plan.name or plan.target.name):
        # Where its machine was not known when it was submitted, it has the file's name, or the platform's id of the VM.
        fields["name"] = name
    if plan.mode is Mode.WARM:
        fields |= _cold_instead(job, manifest, supports_warm=supports_warm)
    await job.change(**fields)
    await claim(job)
    await chosen(job)
    if job.converts:
        await job.in_thread(rooms.preparer.check, manifest)
    if not taken_up:  # else its volumes exist already
        await _refuse_too_large(job, manifest)
    return Facts()


def _cold_instead(job: Job, manifest: VmManifest, *, supports_warm: bool) -> dict[str, object]:
    """The fields of a warm job that becomes a cold one; none, where its source can be copied warm.
    CbtUnsupported, where the plan wants that to fail."""
    plan = job.migration.plan
    reason = manifest.cbt_reason_without(plan.skip_disks) if supports_warm else NO_WARM_MODE
    if reason is None:
        return {}
    if plan.warm.untracked == "fail":
        raise CbtUnsupported(f"{manifest.name} cannot be copied warm: {reason}", hint="plan it Cold, or repair its source")
    hint = None if plan.source.Offline else "the guest is shut down for the whole copy; cancel if that does not suit"
    return {"mode_effective": Mode.COLD, "last_error": _runs_cold(job, manifest, reason, hint)}


def _runs_cold(job: Job, manifest: VmManifest, reason: str, hint: str | None = None) -> Problem:
    detail = f"{manifest.name} cannot be copied warm, so the job runs cold: {reason}"
    return job.problem(CbtUnsupported(detail, hint=hint), fatal=False)


async def _take_volumes(job: Job) -> None:
    """Takes over the volumes of the failed job."""
    for _, volume in job.copied_disks:  # a service that was killed right after the job was added has not done so
        await job.record("volume", volume)
    await receipts.take_up(job)


async def _nothing_to_copy(job: Job) -> Facts:
    """For a retry of an Offline job: the failed job has copied its file completely, and the file may be gone. What was planned
    Warm was copied cold, whatever `warm.untracked` says by now."""
    fields: dict[str, object] = {"started_at": now()}
    if job.migration.plan.mode is Mode.WARM:
        fields["last_error"] = _runs_cold(job, job.manifest, NO_WARM_MODE)
    await job.change(**fields)
    await claim(job)
    if job.converts:
        await job.in_thread(job.rooms.preparer.check, job.manifest)
    return Facts()


async def _until_start(job: Job) -> None:
    """Waits until the plan's start. It looks at the clock again and again, as the clock may be set meanwhile."""
    start_at = job.migration.plan.schedule.start_at
    if start_at is None:
        return
    while (left := (start_at - now()).total_seconds()) > 0:
        job.leave_turn()
        await job.stop.sleep_or_wake(min(left, HOLD_LOOK_S))
    await job.take_turn()


async def _inspected(job: Job) -> tuple[VmManifest, bool]:
    plan = job.migration.plan
    if plan.source_ref.kind == "live_vm":
        vm_id = plan.source_ref.vm_id

        async def ask(adapter: LiveAdapter) -> tuple[VmManifest, bool]:
            return await adapter.inspect(vm_id), await adapter.supports_warm()

        return await source_vm.at_source(job, ask)
    importer, path, root = await job.in_thread(importer_of, job)
    # A remote server may be slow; a cancel does not wait for it.
    return await job.stop.or_stop(job.in_thread(_manifest, job, importer, path, root)), False


def _manifest(job: Job, importer: OfflineImporter, path: Path, root: Root) -> VmManifest:
    with job.rooms.connected(root):
        return importer.inspect(path, root)


def _chosen_disks(job: Job, manifest: VmManifest) -> tuple[DiskProgress, ...]:
    skipped = set(job.migration.plan.skip_disks)
    unknown = skipped - {disk.key for disk in manifest.disks}
    if unknown:
        raise InvalidPlan(
            f"skip_disks names {', '.join(sorted(unknown))}, which {manifest.name} has not",
            hint=f"its disks are {', '.join(disk.key for disk in manifest.disks) or 'none'}",
        )
    chosen = tuple(
        DiskProgress(key=disk.key, label=disk.label, state="skipped")
        if disk.key in skipped
        else DiskProgress(
            key=disk.key, label=disk.label, volume=job.destination.volume_name(job.id, volume_label(disk, manifest))
        )
        for disk in manifest.disks
    )
    if not any(disk.volume for disk in chosen):
        raise InvalidPlan(f"{manifest.name} has no disk to import", hint="choose another VM, or fewer skip_disks")
    return chosen


async def _refuse_too_large(job: Job, manifest: VmManifest) -> None:
    """DiskWriteFailed, where the disks are known to hold more than the destination has free. Where that is not known, a lack of
    space shows while copying."""
    if concerns.TARGET_TOO_SMALL in job.migration.plan.waive_concerns:
        return
    wanted = concerns.least_bytes(disk for disk in manifest.disks if disk.key not in job.migration.plan.skip_disks)
    free = await job.in_thread(job.destination.free_bytes)
    if wanted > free:
        raise DiskWriteFailed(
            f"the disks of {manifest.name} hold at least {wanted} bytes, and the destination has {free} free",
            hint="free space on the destination, skip disks, or choose another destination",
        )


# ── CopyingFull, DeltaSyncing, CuttingOver: passes ───────────────────────────────────────────────────────────────────


async def copying_full(job: Job) -> Facts:
    """Makes the volumes, and copies every disk once; or repairs those of another job."""
    if job.migration.repair is not None:
        await repairing.repair(job)
        return Facts(repair=True)
    if job.migration.retry_of is not None:
        if job.migration.plan.source.Live is None:
            return await _copied(job)
        await _destroy_others(job)
    await _make_volumes(job)
    if job.migration.plan.source.Offline is not None:
        disks = await disks_of_files(job)
        await refuse_changed(job, disks)
        if (tool := await chosen(job)) is not None:
            _, source, _ = await job.in_thread(importer_of, job)
            async with job.slots():
                await pass_through(job, tool, source, disks)
        elif instant.applies(job.migration):
            await instant.copy_under_the_guest(job, disks, partial(refuse_changed, job, disks))
            return Facts()  # its guest runs: it is prepared for nothing any more
        else:
            await run_pass(job, Pass(number=1, kind="full"), disks)
        await refuse_changed(job, disks)
        return await _copied(job)
    await copy_full(job)
    return _facts(job) if job.is_warm else await _copied(job)


async def delta_syncing(job: Job) -> Facts:
    """Copies one delta. The state's own row brings the job here again until it converges."""
    return _facts(job, converged=await sync(job))


async def cutting_over(job: Job) -> Facts:
    """Shuts the source down, and copies its last changes."""
    await cut_over(job)
    return await _copied(job)


async def _copied(job: Job) -> Facts:
    """The facts of volumes that have all the guest's data. What a Linux's disks say is noted first: it may have to be prepared,
    and after that they say something else."""
    await note_content(job, await job.in_thread(_volumes, job))
    return _facts(job)


def _facts(job: Job, *, converged: bool = False) -> Facts:
    return Facts(
        warm=job.is_warm,
        prepare=job.converts,
        converged=converged,
    )


async def _make_volumes(job: Job) -> None:
    sizes = {disk.key: disk.capacity_bytes for disk in job.manifest.disks}
    for disk in job.migration.disks:
        if disk.volume is not None:
            await job.record("volume", disk.volume)
            await _begin_again_if_gone(job, disk.key, disk.volume)
            await job.in_thread(job.destination.create, disk.volume, sizes[disk.key])
            job.stop.check()


async def _begin_again_if_gone(job: Job, key: str, volume: str) -> None:
    """Forgets what was copied onto a volume that somebody has removed since: the new one is empty. DiskWriteFailed, where the
    copy of a Live job was complete, as its snapshot may be gone."""
    if not job.migration.passes or await job.in_thread(job.destination.is_there, volume):
        return
    *earlier, last = job.migration.passes
    if last.finished_at is not None:
        if job.migration.plan.source.Live is not None:
            raise DiskWriteFailed(
                f"volume {volume} is gone, with all that was copied of disk {key}: somebody has removed it",
                hint="submit it again: it is copied from its first byte",
            )
        await job.change(passes=(*earlier, last.model_copy(update={"finished_at": None})))
    log.warning("a volume is gone, and its disk is copied again", job=str(job.id), disk=key, volume=volume)
    await job.in_thread(job.rooms.store.forget_watermarks, job.id, key)


async def _destroy_others(job: Job) -> None:
    """Destroys volumes of the failed job whose disks have another size by now, or do not come along any more."""
    wanted = {disk.volume for disk in job.migration.disks}
    for entry in await job.in_thread(job.rooms.store.ledger, job.id):
        if entry.kind == "volume" and entry.name not in wanted:
            await job.in_thread(job.destination.destroy, entry.name)
            await job.strike("volume", entry.name)


# ── V2vProcessing, Starting ──────────────────────────────────────────────────────────────────────────────────────────


async def v2v_processing(job: Job) -> Facts:
    """Converts the guest on overlays of its volumes, and commits them when that succeeded. A failed conversion needs no new
    copy. A commit is tried again: else the volumes would have half of it."""
    preparer, name = job.rooms.preparer, str(job.id)
    devices = in_order(job.manifest, {volume.disk_key: volume.path for volume in await job.in_thread(_volumes, job)})
    await job.record("conversion", name)
    if job.migration.conversion is None or job.migration.conversion.finished_at is None:
        await job.change(conversion=Conversion(tool=preparer.tool, started_at=now()))
        loop = asyncio.get_running_loop()

        def on_message(kind: MessageKind, text: str) -> None:
            """Called in the tool's thread, which waits, so that messages stay in order."""
            asyncio.run_coroutine_threadsafe(_note_message(job, kind, text), loop).result()

        await job.in_stoppable_thread(partial(preparer.convert, name, job.manifest, devices, on_message))
        await _change_conversion(job, finished_at=now())
    await patiently(job, lambda _: job.in_thread(preparer.adopt, name, devices))
    await job.in_thread(preparer.discard, name)
    await job.strike("conversion", name)
    return await _copied(job)


# Limits of a job's messages: a tool may write without end.
MESSAGES_KEPT, MESSAGE_CHARS = 100, 1000


async def _note_message(job: Job, kind: MessageKind, text: str) -> None:
    messages = () if job.migration.conversion is None else job.migration.conversion.messages
    message = ConversionMessage(at=now(), kind=kind, text=text[:MESSAGE_CHARS])
    await _change_conversion(job, messages=(*messages, message)[-MESSAGES_KEPT:])


async def _change_conversion(job: Job, **fields: object) -> None:
    if job.migration.conversion is not None:
        await job.change(conversion=job.migration.conversion.model_copy(update=fields))


async def starting(job: Job) -> Facts:
    """Defines the domain on the volumes, starts it, and waits until it has booted."""
    volumes = await job.in_thread(_volumes, job)
    if instant.applies(job.migration):
        await instant.onto_volumes(job, await _readers_while_there(job), volumes)
    if job.migration.instant is None or job.migration.boot_sign is None:
        # Where the guest has booted before and is off now, its owner has shut it down.
        await land(job, volumes, source_vm.refuse_living)
    if job.migration.plan.source.Live is not None:
        await source_vm.measure_downtime(job)
        await source_vm.leave(job)
    await moved.compare(job)
    await receipts.give(job)
    return _facts(job)


async def _readers_while_there(job: Job) -> list[ReaderSpec] | None:
    """The readers of an instant start's source. None, where it is not needed any more, or is away: the copy may be complete."""
    if job.migration.instant is not None and job.migration.instant.state == "done":
        return None
    try:
        return [disk.reader for disk in await disks_of_files(job)]
    except (Cancelled, PersistFailed):
        raise
    except SynvirtError:
        return None


def _volumes(job: Job) -> list[Volume]:
    """Blocks: a destination may have to wait for a device."""
    destination = job.destination
    return [Volume(disk.key, destination.device(volume), destination.device_type) for disk, volume in job.copied_disks]


STEPS: dict[State, Step] = {
    State.QUEUED: queued,
    State.COPYING_FULL: copying_full,
    State.DELTA_SYNCING: delta_syncing,
    State.CUTTING_OVER: cutting_over,
    State.V2V_PROCESSING: v2v_processing,
    State.STARTING: starting,
}
