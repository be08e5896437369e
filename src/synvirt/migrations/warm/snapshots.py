"""The snapshots of a Live job's passes at its source, and their change tracking. Each has its ledger entry first."""

from typing import Literal

from synvirt.errors import CbtUnsupported, Conflict, SnapshotFailed
from synvirt.live import LiveAdapter, SnapshotRef, SwitchesTracking
from synvirt.migrations.job import Job, named
from synvirt.migrations.landing import follow
from synvirt.migrations.patience import SnapshotNotMade
from synvirt.migrations.source_vm import SourceAwake, at_source, inspected
from synvirt.model.kinds import Mode
from synvirt.model.machine import VmManifest
from synvirt.model.values import now

Kind = Literal["full", "delta", "final"]


async def track_changes(job: Job) -> None:
    """Switches change tracking on. The job goes on cold, if the source turns out to be unable to track this VM's changes."""
    if all(disk.cbt_enabled for disk, _ in job.copied_disks):
        return
    # What a platform makes for tracking is removed with the first pass's snapshot. So that entry is written now.
    await job.record("snapshot", snapshot_name(job, 1))
    try:
        await at_source(job, lambda adapter: _enable_cbt(job, adapter))
    except CbtUnsupported as error:
        problem = CbtUnsupported(
            f"{job.manifest.name} cannot be copied warm, so the job runs cold: {error.detail}",
            hint="the guest is shut down for the whole copy; cancel if that does not suit",
        )
        await job.report(problem, mode_effective=Mode.COLD)


async def _enable_cbt(job: Job, adapter: LiveAdapter) -> None:
    """Writes a ledger entry first where tracking is off, so that it is switched off again at the end."""
    if isinstance(adapter, SwitchesTracking) and not await adapter.is_tracked(job.vm_id):
        await job.record("tracking", job.vm_id)
    await adapter.enable_cbt(job.vm_id, _copied_keys(job))


def _copied_keys(job: Job) -> list[str]:
    return [disk.key for disk, _ in job.copied_disks]


async def snapshot_of(job: Job, number: int, kind: Kind) -> SnapshotRef:
    """The snapshot of this pass, made once. Its change ids are noted before anything uses them, and before the earlier snapshot
    is removed. Conflict, when the VM has other disks than when the job began."""
    of_pass = await job.memory_of(number)
    if of_pass.snapshot is not None:
        return of_pass.snapshot
    name = snapshot_name(job, number)
    if of_pass.begun_at is not None:
        # It may exist, without a note. The guest may have run since then, or have been off and on.
        await unmade(job, name, kind)
    await job.record("snapshot", name)
    await job.note_of(number, begun_at=now())
    downs = (await job.memory()).downs
    keys = _copied_keys(job)

    off = kind == "final" or not job.is_warm

    async def make(adapter: LiveAdapter) -> tuple[SnapshotRef, VmManifest, str]:
        made = await adapter.snapshot(job.vm_id, name, keys)
        return made, await inspected(job, adapter), await adapter.last_start(job.vm_id) if off else ""

    at = now()
    try:
        # Only once: a snapshot that was made without an answer is removed before another is made, as the guest may have run on.
        made, manifest, start = await job.with_adapter(make)
    except SnapshotFailed as error:
        raise SnapshotNotMade(error.detail, hint=error.hint) from error
    refuse_other_disks(job, manifest)
    if off and manifest.power_state != "off":
        raise SourceAwake(f"the source {manifest.name} is {manifest.power_state} again, though it was shut down")
    await follow(job, manifest)
    await job.note_of(number, snapshot=made, snapshot_at=at, downs=downs, last_start=start if off else None)
    return made


def snapshot_name(job: Job, number: int) -> str:
    """The name of a pass's snapshot at the source."""
    return f"synvirt-{job.id}-{number}"


async def unmade(job: Job, name: str, kind: Kind) -> None:
    """Removes a pass's snapshot if it exists; changes are tracked as before."""

    async def undo(adapter: LiveAdapter) -> None:
        await adapter.cleanup(job.vm_id, name)
        if job.is_warm and kind != "final":
            # Some platforms keep the tracking with their snapshots: it may have gone with the last one.
            try:
                await _enable_cbt(job, adapter)
            except CbtUnsupported:
                # Some track a guest only while it runs. One that is off changes no more.
                if (await adapter.inspect(job.vm_id)).power_state != "off":
                    raise

    try:
        await job.with_adapter(undo)
    except (SnapshotFailed, CbtUnsupported) as error:
        raise SnapshotNotMade(error.detail, hint=error.hint) from error


def refuse_other_disks(job: Job, manifest: VmManifest) -> None:
    """Conflict, when a disk was added, removed or resized since the job began: the copy would not be the VM's."""
    skipped = set(job.migration.plan.skip_disks)
    began = {disk.key: disk for disk in job.manifest.disks if disk.key not in skipped}
    present = {disk.key: disk for disk in manifest.disks if disk.key not in skipped}
    changes = [
        f"{named(present[key])} of {present[key].capacity_bytes} bytes was added" for key in present.keys() - began.keys()
    ]
    changes += [f"{named(began[key])} was removed" for key in began.keys() - present.keys()]
    changes += [
        f"{named(began[key])} was resized from {began[key].capacity_bytes} to {present[key].capacity_bytes} bytes"
        for key in began.keys() & present.keys()
        if began[key].capacity_bytes != present[key].capacity_bytes
    ]
    if changes:
        raise Conflict(
            f"{manifest.name} has other disks than when the job began: {'; '.join(sorted(changes))}",
            hint="try it again: it goes on with the disks that are as they were; one not to come along goes into skip_disks",
        )
