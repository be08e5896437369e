"""A function a state: what a job does there. Idempotent: running it again after a crash is how a job resumes. asyncio.

Each takes the running job and answers the Facts by which `states.ROWS` chooses where it goes next. What a step makes is in the
ledger before it is made; what it must remember (a snapshot's change ids) is noted before it is used.
"""

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Literal

from synvirt.disks.roots import Root, connected
from synvirt.disks.specs import ReaderSpec, paths, versions
from synvirt.errors import CbtReset, CbtUnsupported, DeltaTooLarge, DiskReadFailed, DiskWriteFailed, InvalidPlan
from synvirt.hypervisor import Volume
from synvirt.live import LiveAdapter, SnapshotRef
from synvirt.migrations.critical import refuse_critical
from synvirt.migrations.job import Job
from synvirt.migrations.landing import claim, land
from synvirt.migrations.passes import PassDisk, run_pass
from synvirt.migrations.passthrough import chosen, pass_through
from synvirt.migrations.states import Facts
from synvirt.model import Conversion, ConversionMessage, Disk, DiskProgress, MessageKind, Mode, Pass, State, VmManifest, now
from synvirt.offline import OfflineImporter, concerns
from synvirt.offline.elsewhere import joined

Step = Callable[[Job], Awaitable[Facts]]

# Change tracking may be lost once by bad luck (a host that crashed): the whole disk is compared again. A source that loses it
# again and again will never converge.
CBT_RESETS_MAX = 1
# A job that holds for its cut-over, with no interval of its own: deltas stay small, and the source is not snapshot for ever.
HOLD_INTERVAL_S = 60.0


# ── Queued: who is the VM, and can the plan work at all ──────────────────────────────────────────────────────────────


async def queued(job: Job) -> Facts:
    manifest, supports_warm = await _inspected(job)
    refuse_critical(job.migration.plan, manifest)
    disks = _chosen_disks(job, manifest)
    plan, rooms = job.migration.plan, job.rooms
    destination = plan.target.destination or next(iter(rooms.destinations))
    fields: dict[str, object] = {"manifest": manifest, "disks": disks, "destination": destination, "started_at": now()}
    if plan.mode is Mode.WARM and not (supports_warm and manifest.cbt_available):
        reason = manifest.cbt_reason if supports_warm else "the source has no warm mode"
        error = CbtUnsupported(
            f"{manifest.name} cannot be copied warm, so the job runs cold: {reason or 'its changes are not tracked'}",
            hint=None if plan.source.Offline else "the guest is shut down for the whole copy; cancel if that does not suit",
        )
        fields |= {"mode_effective": Mode.COLD, "last_error": job.problem(error, fatal=False)}
    await job.change(**fields)
    await claim(job)
    await chosen(job)
    if _converts(job, manifest):
        await job.in_thread(rooms.preparer.check)
    await _refuse_too_large(job, manifest)
    return Facts()


async def _inspected(job: Job) -> tuple[VmManifest, bool]:
    plan = job.migration.plan
    if plan.source_ref.kind == "live_vm":
        vm_id = plan.source_ref.vm_id

        async def ask(adapter: LiveAdapter) -> tuple[VmManifest, bool]:
            return await adapter.inspect(vm_id), await adapter.supports_warm()

        return await job.with_adapter(ask)
    importer, path, root = await job.in_thread(_offline, job)
    return await job.in_thread(_manifest, importer, path, root), False


def _manifest(importer: OfflineImporter, path: Path, root: Root) -> VmManifest:
    with connected(root):
        return importer.inspect(path, root)


def _offline(job: Job) -> tuple[OfflineImporter, Path, Root]:
    """Blocks: it asks the store where an upload lies, and what was sealed."""
    plan = job.migration.plan
    if plan.source.Offline is None or plan.source_ref.kind == "live_vm":
        raise RuntimeError("a Live plan has no file")
    importer = job.rooms.importers.get(plan.source.Offline)
    if importer is None:
        raise InvalidPlan(f"offline kind {plan.source.Offline} is not served yet")
    ref = plan.source_ref
    if ref.kind == "remote_url":
        ref = joined(ref, job.rooms.secret_of(job.id))
    return importer, *job.rooms.place(ref)


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
            key=disk.key, label=disk.label, volume=job.destination.volume_name(job.id, _volume_label(disk, manifest))
        )
        for disk in manifest.disks
    )
    if not any(disk.volume for disk in chosen):
        raise InvalidPlan(f"{manifest.name} has no disk to import", hint="choose another VM, or fewer skip_disks")
    return chosen


def _volume_label(disk: Disk, manifest: VmManifest) -> str:
    """The disk's label, or label and key where two disks of the VM have the same label."""
    alone = sum(other.label == disk.label for other in manifest.disks) == 1
    return disk.label if alone else f"{disk.label} {disk.key}"


async def _refuse_too_large(job: Job, manifest: VmManifest) -> None:
    """Out of space is foreseen where the source says how much it uses; else it is found while copying."""
    if concerns.TARGET_TOO_SMALL in job.migration.plan.waive_concerns:
        return
    wanted = sum(disk.used_bytes or 0 for disk in manifest.disks if disk.key not in job.migration.plan.skip_disks)
    free = await job.in_thread(job.destination.free_bytes)
    if wanted > free:
        raise DiskWriteFailed(
            f"{manifest.name} uses {wanted} bytes and the destination has {free} free",
            hint="free space on the destination, skip disks, or choose another destination",
        )


# ── CopyingFull, DeltaSyncing, CuttingOver: passes ───────────────────────────────────────────────────────────────────


async def copying_full(job: Job) -> Facts:
    facts = _facts(job)
    await _make_volumes(job)
    if job.migration.plan.source.Offline is not None:
        disks = await _offline_disks(job)
        await _refuse_changed(job, disks)
        if (tool := await chosen(job)) is not None:
            _, source, _ = await job.in_thread(_offline, job)
            await pass_through(job, tool, source, disks)
        else:
            await run_pass(job, 1, "full", disks, fresh=True)
        await _refuse_changed(job, disks)
        return facts
    if facts.warm:
        await job.with_adapter(lambda adapter: _enable_cbt(job, adapter))
    else:
        await _shut_source_down(job)
    await _copy_snapshot(job, 1, "full")
    return facts


async def delta_syncing(job: Job) -> Facts:
    """One delta pass a call: the state's own row brings the job here again until it converges."""
    warm, last = job.migration.plan.warm, job.migration.passes[-1]
    if last.finished_at is None:  # a crash left it: later deltas build on it, so it comes first
        return _after_delta(job, await _copy_snapshot(job, last.number, "delta"))
    deltas = [one for one in job.migration.passes if one.kind == "delta"]
    if warm.cutover == "auto" and len(deltas) >= warm.max_passes:
        raise _delta_too_large(job, deltas)
    if deltas and await _cutover_while_waiting(job):
        return _facts(job, converged=True)
    return _after_delta(job, await _copy_snapshot(job, last.number + 1, "delta"))


def _after_delta(job: Job, delta: Pass) -> Facts:
    warm = job.migration.plan.warm
    return _facts(job, converged=warm.cutover == "auto" and delta.bytes <= warm.delta_threshold_bytes)


async def _cutover_while_waiting(job: Job) -> bool:
    """Wait until the next delta is due; true as soon as the operator of a job that is held asks for the cut-over."""
    warm = job.migration.plan.warm
    held = warm.cutover == "manual"
    left = warm.interval_s or (HOLD_INTERVAL_S if held else 0)
    while True:
        if held and await job.in_thread(job.rooms.store.cutover_requested, job.id):
            return True
        if left <= 0:
            return False
        await job.stop.sleep(min(left, 1))
        left -= 1


async def cutting_over(job: Job) -> Facts:
    """The source off, and the last of its changes copied. A source that somebody powered on again while the service was away
    has changed since its final snapshot: it is shut down, and one more final pass follows."""
    was_on = (await job.with_adapter(lambda adapter: adapter.inspect(_vm_id(job)))).power_state != "off"
    last = job.migration.passes[-1]
    if last.finished_at is None:
        last = await _copy_snapshot(job, last.number, last.kind)
    await _shut_source_down(job)
    if was_on or last.kind != "final":
        await _copy_snapshot(job, last.number + 1, "final")
    return _facts(job)


def _facts(job: Job, *, converged: bool = False) -> Facts:
    return Facts(
        warm=job.migration.mode_effective is Mode.WARM,
        prepare=_converts(job, job.manifest),
        converged=converged,
    )


def _delta_too_large(job: Job, deltas: list[Pass]) -> DeltaTooLarge:
    warm = job.migration.plan.warm
    sizes = ", ".join(str(one.bytes) for one in deltas[-5:])
    return DeltaTooLarge(
        f"after {len(deltas)} delta passes the guest still changes over {warm.delta_threshold_bytes} bytes a pass: {sizes}",
        hint="try when the guest is quieter, raise warm.delta_threshold_bytes or warm.max_passes, or migrate cold",
    )


async def _make_volumes(job: Job) -> None:
    sizes = {disk.key: disk.capacity_bytes for disk in job.manifest.disks}
    for disk in job.migration.disks:
        if disk.volume is not None:
            await job.record("volume", disk.volume)
            await job.in_thread(job.destination.create, disk.volume, sizes[disk.key])
            job.stop.check()


async def _offline_disks(job: Job) -> list[PassDisk]:
    importer, path, root = await job.in_thread(_offline, job)

    def opened() -> list[PassDisk]:
        found = []
        with connected(root):
            for disk, volume in _copied(job):
                one = importer.open_disk(path, root, disk.key)
                found.append(PassDisk(disk.key, one.reader, volume, disk.capacity_bytes, one.checksums))
        return found

    return await job.in_thread(opened)


async def _refuse_changed(job: Job, disks: list[PassDisk]) -> None:
    """Half of one export and half of another is a disk that never was: the files are what they were when the copy began."""

    def look() -> str:
        found = [(path, Path(path).stat()) for disk in disks for path in paths(disk.reader)]
        elsewhere = [version for disk in disks for version in versions(disk.reader)]
        return repr([(path, stat.st_size, stat.st_mtime_ns, stat.st_ino) for path, stat in found] + elsewhere)

    try:
        present = await job.in_thread(look)
    except OSError as error:
        raise DiskReadFailed(f"the source file is gone: {error.strerror}", hint="put it back and submit again") from error
    noted = await job.in_thread(job.rooms.store.noted, job.id, "source_files")
    if noted is None:
        await job.in_thread(job.rooms.store.note, job.id, "source_files", present)
    elif noted != present:
        raise DiskReadFailed(
            "a source file was changed or replaced while it was being imported",
            hint="let its copying into the import root finish first, then submit again",
        )


def _copied(job: Job) -> list[tuple[Disk, str]]:
    """The disks that are not skipped, each with its volume."""
    volumes = {disk.key: disk.volume for disk in job.migration.disks}
    return [(disk, volume) for disk in job.manifest.disks if (volume := volumes[disk.key]) is not None]


# ── the live source ──────────────────────────────────────────────────────────────────────────────────────────────────


def _vm_id(job: Job) -> str:
    if job.migration.plan.source_ref.kind != "live_vm":
        raise RuntimeError("an Offline plan has no source VM")
    return job.migration.plan.source_ref.vm_id


async def _enable_cbt(job: Job, adapter: LiveAdapter) -> None:
    if not all(disk.cbt_enabled for disk in job.manifest.disks):
        await adapter.enable_cbt(_vm_id(job))


async def _shut_source_down(job: Job) -> None:
    """Off when it returns; in the ledger first, so that a failed job powers it on again, if it was on."""
    if job.manifest.power_state == "on":
        await job.record("source_power", _vm_id(job))
    await job.with_adapter(lambda adapter: adapter.shutdown(_vm_id(job)))


async def _copy_snapshot(job: Job, number: int, kind: Literal["full", "delta", "final"]) -> Pass:
    """Snapshot, copy what changed since the one before, let that go. A lost change tracking costs one pass over whole disks."""
    snapshot = await _snapshot(job, number)
    before = await _noted_snapshot(job, number - 1) if number > 1 else None
    whole = await job.in_thread(job.rooms.store.noted, job.id, f"whole:{number}") is not None
    try:
        disks = await job.with_adapter(lambda adapter: _snapshot_disks(job, adapter, snapshot, None if whole else before))
    except CbtReset as error:
        await _allow_reset(job, number, error)
        disks = await job.with_adapter(lambda adapter: _snapshot_disks(job, adapter, snapshot, None))
    # Only a first pass meets volumes that still read as zeros.
    done = await run_pass(job, number, kind, disks, fresh=number == 1)
    if before is not None:
        await _let_snapshot_go(job, number - 1)
    return done


async def _allow_reset(job: Job, number: int, error: CbtReset) -> None:
    """Note that pass `number` reads whole disks; the error itself, when that happened before."""
    resets = int(await job.in_thread(job.rooms.store.noted, job.id, "cbt_resets") or 0)
    if resets >= CBT_RESETS_MAX:
        raise error
    await job.in_thread(job.rooms.store.note, job.id, "cbt_resets", str(resets + 1))
    await job.in_thread(job.rooms.store.note, job.id, f"whole:{number}", "change tracking was reset")
    await job.change(last_error=job.problem(error, fatal=False))


def _snapshot_name(job: Job, number: int) -> str:
    return f"synvirt-{job.id}-{number}"


async def _snapshot(job: Job, number: int) -> SnapshotRef:
    """The snapshot of this pass, made once; its change ids are noted before anything relies on them."""
    noted = await _noted_snapshot(job, number)
    if noted is not None:
        return noted
    name = _snapshot_name(job, number)
    await job.record("snapshot", name)
    made = await job.with_adapter(lambda adapter: adapter.snapshot(_vm_id(job), name))
    await job.in_thread(job.rooms.store.note, job.id, f"snapshot:{number}", made.model_dump_json())
    return made


async def _noted_snapshot(job: Job, number: int) -> SnapshotRef | None:
    noted = await job.in_thread(job.rooms.store.noted, job.id, f"snapshot:{number}")
    return None if noted is None else SnapshotRef.model_validate_json(noted)


async def _let_snapshot_go(job: Job, number: int) -> None:
    name = _snapshot_name(job, number)
    await job.with_adapter(lambda adapter: adapter.cleanup(_vm_id(job), name))
    await job.strike("snapshot", name)


async def _snapshot_disks(job: Job, adapter: LiveAdapter, snapshot: SnapshotRef, before: SnapshotRef | None) -> list[PassDisk]:
    async def spec(disk: Disk) -> ReaderSpec:
        since = None if before is None else before.change_ids.get(disk.key)
        if before is not None and since is None:
            raise CbtReset(f"disk {disk.key} has no change id in snapshot {before.id}")
        return await adapter.open_disk(_vm_id(job), snapshot, disk, since)

    return [PassDisk(disk.key, await spec(disk), volume, disk.capacity_bytes) for disk, volume in _copied(job)]


# ── V2vProcessing, Starting ──────────────────────────────────────────────────────────────────────────────────────────


async def v2v_processing(job: Job) -> Facts:
    """Converted beside the volumes, and taken over when that went well: a bad conversion never costs a new copy."""
    preparer, name = job.rooms.preparer, str(job.id)
    devices = [volume.path for volume in await job.in_thread(_volumes, job)]
    await job.record("conversion", name)
    if job.migration.conversion is None or job.migration.conversion.finished_at is None:
        await job.change(conversion=Conversion(tool=preparer.tool, started_at=now()))
        loop = asyncio.get_running_loop()

        def tell(kind: MessageKind, text: str) -> None:
            """Called in the tool's thread, which waits: messages stay in order."""
            asyncio.run_coroutine_threadsafe(_note_message(job, kind, text), loop).result()

        await job.in_thread(preparer.convert, name, job.manifest, devices, tell, job.stop.is_set)
        await _change_conversion(job, finished_at=now())
    await job.in_thread(preparer.adopt, name, devices)
    await job.in_thread(preparer.discard, name)
    await job.strike("conversion", name)
    return _facts(job)


# A tool that talks for ever must not make the job's record grow for ever; and nobody reads longer lines.
MESSAGES_KEPT, MESSAGE_CHARS = 100, 1000


async def _note_message(job: Job, kind: MessageKind, text: str) -> None:
    messages = () if job.migration.conversion is None else job.migration.conversion.messages
    message = ConversionMessage(at=now(), kind=kind, text=text[:MESSAGE_CHARS])
    await _change_conversion(job, messages=(*messages, message)[-MESSAGES_KEPT:])


async def _change_conversion(job: Job, **fields: object) -> None:
    if job.migration.conversion is not None:
        await job.change(conversion=job.migration.conversion.model_copy(update=fields))


def _converts(job: Job, manifest: VmManifest) -> bool:
    choice = job.migration.plan.conversion
    return choice == "always" or (choice == "auto" and job.rooms.preparer.wants(manifest))


async def starting(job: Job) -> Facts:
    await land(job, await job.in_thread(_volumes, job))
    if job.migration.plan.source.Live is not None:
        await _leave_source(job)
    return _facts(job)


def _volumes(job: Job) -> list[Volume]:
    """Blocks: a destination may have to wait for a device."""
    destination = job.destination
    return [Volume(disk.key, destination.device(volume), destination.device_type) for disk, volume in _copied(job)]


async def _leave_source(job: Job) -> None:
    """The guest lives here now: mark the source VM, and leave no snapshot of ours on it."""
    note = f"migrated to {job.migration.name} ({job.id})"
    await job.with_adapter(lambda adapter: adapter.mark(_vm_id(job), note))
    for one in job.migration.passes:
        await _let_snapshot_go(job, one.number)


STEPS: dict[State, Step] = {
    State.QUEUED: queued,
    State.COPYING_FULL: copying_full,
    State.DELTA_SYNCING: delta_syncing,
    State.CUTTING_OVER: cutting_over,
    State.V2V_PROCESSING: v2v_processing,
    State.STARTING: starting,
}
