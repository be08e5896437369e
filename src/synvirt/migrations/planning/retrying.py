"""Tries a failed job again, with a corrected plan if the plan was wrong.

    job A: … CopyingFull ─▶ V2vProcessing ─✗ Failed, its volumes kept
    job B: Queued ─▶ CopyingFull (they are there) ─▶ V2vProcessing ─▶ …

If the failed job's copy was kept, the new job takes its volumes.

    Offline  the file has not changed: nothing is copied
    Live     the source was switched on again, and the guest may have run here: the first pass reads whole disks, and writes
             the differences to the volumes; from there it goes on like any job. A disk that was added or resized since is
             copied to a new volume

Otherwise the new job begins from the start.
"""

import contextlib
import json
from collections.abc import Mapping
from typing import Any
from uuid import UUID

from pydantic import ValidationError

from synvirt.disks import open_reader
from synvirt.disks.specs import written
from synvirt.errors import Conflict, InvalidPlan, NotFound
from synvirt.machines.texts import clean
from synvirt.migrations.job import Job, named
from synvirt.migrations.states import COPY, KEPT_ON_FAILURE
from synvirt.mistakes import listed
from synvirt.model.job import DiskProgress, Migration, Progress, StateVisit
from synvirt.model.kinds import State
from synvirt.model.machine import VmManifest
from synvirt.model.plan import MigrationPlan
from synvirt.model.submitter import Submitter
from synvirt.model.values import now
from synvirt.store import Store

# The parts of a plan, as paths, that a complete copy depends on. A Live job copies once more, by the mode that suits.
_COPIED_BY = ("source", "source_ref", "mode", "skip_disks", "target.destination")
_COPIED_LIVE_BY = ("source", "source_ref", "target.destination")
# The parts of a plan that identify the machine.
_MACHINE = ("source", "source_ref")


def merged(document: Mapping[str, Any], patch: Mapping[str, Any]) -> dict[str, Any]:
    """Applies a JSON merge patch (RFC 7396): null removes a member."""
    found = dict(document)
    for name, value in patch.items():
        if value is None:
            found.pop(name, None)
        elif isinstance(value, Mapping):
            before = found.get(name)
            found[name] = merged(before if isinstance(before, Mapping) else {}, value)
        else:
            found[name] = value
    return found


def corrected(job: Migration, patch: Mapping[str, Any]) -> MigrationPlan:
    """The job's plan with `patch`. InvalidPlan, if the patch is invalid, or changes what has taken effect already."""
    try:
        plan = MigrationPlan.model_validate_json(json.dumps(merged(job.plan.model_dump(mode="json"), patch)))
    except ValidationError as error:
        raise InvalidPlan(listed(error.errors(include_url=False), "plan")) from None
    kept = has_kept_copy(job)
    fixed = _MACHINE if not kept else _COPIED_BY if job.plan.source.Live is None else _COPIED_LIVE_BY
    for path in fixed:
        if _at(plan, path) != _at(job.plan, path):
            why = "its copy was made so" if kept else "the job is of that machine"
            raise InvalidPlan(f"plan.{path}: cannot be changed any more: {why}", hint="submit a new plan")
    return plan


def _at(plan: MigrationPlan, path: str) -> object:
    found: object = plan
    for name in path.split("."):
        found = getattr(found, name)
    return found


def taken_up(
    store: Store, before: Migration, plan: MigrationPlan, *, job_id: UUID, host: str, submitted_by: Submitter | None
) -> Migration:
    """The job that takes over a failed one, with another plan. It is noted in the failed job first, so that no two jobs have
    the same volumes. Conflict, if there is nothing to take over. Blocks."""
    is_live = before.plan.source.Live is not None
    _refuse(before)
    created_at = now()
    machine = "" if before.manifest is None else clean(before.manifest.name)
    again = Migration(
        id=job_id,
        name=plan.name or plan.target.name or machine or before.name,
        plan=plan,
        mode_effective=plan.mode if is_live else before.mode_effective,
        retry_of=before.id,
        attempt=before.attempt + 1,
        manifest=before.manifest,
        disks=tuple(_waiting(disk) for disk in before.disks) if is_live else before.disks,
        destination=before.destination,
        progress=Progress() if is_live else before.progress,
        conversion=before.conversion if _converted(before) and not is_live else None,
        submitted_by=submitted_by,
        host=host,
        created_at=created_at,
        history=(StateVisit(state=State.QUEUED, at=created_at),),
    )

    def note(job: Migration) -> Migration:
        if job.retried_by == job.id:  # by its removal
            raise Conflict(f"job {job.id} is being removed with its volumes", hint="submit its plan again")
        if is_taken_up(store, job):
            raise Conflict(f"job {job.id} is continued by job {job.retried_by}", hint="look at that job")
        return job.model_copy(update={"retried_by": again.id})

    store.change(before.id, State.FAILED, note)
    store.add(again, host=host)
    for disk in again.disks:
        if disk.volume is not None:
            store.record(again.id, "volume", disk.volume)
    store.record(again.id, "hashes", str(again.id))
    return again


def _waiting(disk: DiskProgress) -> DiskProgress:
    """A new record of the disk for its existing volume."""
    return disk if disk.volume is None else DiskProgress(key=disk.key, label=disk.label, volume=disk.volume)


def _refuse(job: Migration) -> None:
    if job.state != State.FAILED or job.last_error is None:
        raise Conflict(f"job {job.id} is {job.state}: only a failed job is tried again")
    kept = kept_on_failure(job) and any(disk.volume for disk in job.disks)
    whole = all(disk.state in ("copied", "skipped") for disk in job.disks)
    half_converted = job.last_error.state == State.V2V_PROCESSING and _converted(job)
    # A Live job compares, whatever its volumes now contain.
    if not kept or (job.plan.source.Live is None and (not whole or half_converted)):
        raise Conflict(
            f"job {job.id} failed in {job.last_error.state} and has left no whole copy to go on with",
            hint="submit its plan again",
        )


def has_kept_copy(job: Migration) -> bool:
    """Whether the job may be taken over, by its record."""
    try:
        _refuse(job)
    except Conflict:
        return False
    return True


def kept_on_failure(job: Migration) -> frozenset[str]:
    """The ledger entries that stay when the job fails. A job that took over a complete copy keeps it, in whatever state it
    fails."""
    return COPY if job.retry_of else KEPT_ON_FAILURE.get(_failed_in(job), frozenset())


def _failed_in(job: Migration) -> State:
    return job.state if job.last_error is None or job.state != State.FAILED else job.last_error.state


def _converted(job: Migration) -> bool:
    return job.conversion is not None and job.conversion.finished_at is not None


def is_taken_up(store: Store, job: Migration) -> bool:
    """Whether another job has taken it over. A service that was killed between the note and the new job leaves a note without a
    job. A job that this version cannot read has taken it over all the same."""
    if job.retried_by is None:
        return False
    try:
        store.host_of(job.retried_by)
    except NotFound:
        return False
    return True


def with_kept_volumes(job: Job, chosen: tuple[DiskProgress, ...], manifest: VmManifest) -> tuple[DiskProgress, ...]:
    """The chosen disks of a Live job, with the failed job's volumes where they fit. Conflict, if the machine has lost a disk:
    its volume is destroyed only on request."""
    before = {disk.key: disk for disk in job.migration.disks if disk.volume is not None}
    old = {disk.key: disk.capacity_bytes for disk in job.manifest.disks}
    new = {disk.key: disk.capacity_bytes for disk in manifest.disks}
    if lost := before.keys() - new.keys():
        names = ", ".join(sorted(named(disk) for disk in job.manifest.disks if disk.key in lost))
        raise Conflict(
            f"{manifest.name} has {names} no more, which the failed job has copied",
            hint="attach it again; or remove the failed job and submit its plan again",
        )

    def fits(disk: DiskProgress) -> bool:
        return disk.volume is not None and disk.key in before and old[disk.key] == new[disk.key]

    return tuple(before[disk.key] if fits(disk) else disk for disk in chosen)


async def look_at_volumes(job: Job) -> None:
    """DiskReadFailed, if a volume is missing because an operator has removed it."""
    sizes = {disk.key: disk.capacity_bytes for disk in job.manifest.disks}

    def look() -> None:
        for disk, volume in job.copied_disks:
            with contextlib.closing(open_reader(written(job.destination.open(volume, sizes[disk.key])))) as reader:
                reader.read_into(0, memoryview(bytearray(min(reader.size, 512))))

    await job.in_thread(look)
