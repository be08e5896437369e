"""A job's receipt, and the hashes that it is made from, from the first pass to the end. asyncio.

If a receipt cannot be made, the job says so, and completes all the same.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any
from uuid import UUID, uuid4

import structlog

from synvirt.errors import Internal, PersistFailed, SynvirtError
from synvirt.jobs.orders import HashesOrder
from synvirt.migrations.job import Job
from synvirt.migrations.memory import Hashed, JobMemory, Passing, noting
from synvirt.model.job import Migration
from synvirt.model.kinds import Mode
from synvirt.model.rehearsal import Rehearsal, RehearsalState
from synvirt.proof.bag import rehearsal_result
from synvirt.proof.keeping import CopiedDisk, MovedJob

log = structlog.get_logger(__name__)

# The kind of the ledger entry.
HASHES = "hashes"


def hashes_orders(job: Job, kind: str) -> dict[str, HashesOrder]:
    """The orders to hash, by disk key, for a pass of this kind; empty, where receipts are off. Blocks."""
    receipts, store = job.rooms.receipts, job.rooms.store
    if receipts is None:
        if (
            store.memory.get(job.id, JobMemory).hashed is not None
        ):  # receipts were switched off meanwhile: what this pass writes gets no hash
            _note(job, None)
        return {}
    store.record(job.id, HASHES, str(job.id))
    token = _token(job)
    if token is None:
        token = uuid4()
        _note(job, Hashed(host=job.rooms.host, token=token))
    last = kind == "final" or job.migration.mode_effective is Mode.COLD
    try:
        return {
            disk.key: HashesOrder(path=str(receipts.hashes_file(job.id, number)), token=token, last=last)
            for number, (disk, _) in enumerate(job.copied_disks)
        }
    except OSError as error:
        log.warning("no hashes are kept of this pass", job=str(job.id), cause=error.strerror)
        # The hashes of earlier passes do not cover what this pass writes.
        _note(job, None)
        return {}


def _note(job: Job, hashed: Hashed | None) -> None:
    job.rooms.store.memory.change(job.id, JobMemory, lambda before: noting(before, hashed=hashed))


def _token(job: Job) -> UUID | None:
    """The token of the hashes. None, where another host has written the volumes meanwhile."""
    hashed = job.rooms.store.memory.get(job.id, JobMemory).hashed
    return hashed.token if hashed is not None and hashed.host == job.rooms.host else None


async def take_up(job: Job) -> None:
    """Takes over the hashes of the job whose volumes this one has. A Live job deletes them, as its first pass reads
    everything."""
    receipts, store, before = job.rooms.receipts, job.rooms.store, job.migration.retry_of
    if receipts is None or before is None:
        return
    if job.migration.plan.source.Live is not None:
        await job.in_thread(receipts.forget_hashes, before)
        return
    hashed = (await job.in_thread(store.memory.get, before, JobMemory)).hashed
    if hashed is not None:
        await job.record(HASHES, str(job.id))
        await job.note(hashed=hashed)
        try:
            await job.in_thread(receipts.hand_on, before, job.id)
        except OSError as error:
            log.warning("the hashes of the job before cannot be taken up", job=str(job.id), cause=error.strerror)


async def give(job: Job) -> None:
    """Makes the receipt of a job that has done everything else. Idempotent."""
    receipts = job.rooms.receipts
    if receipts is None:
        return
    if job.migration.receipt is None:
        try:
            await job.change(receipt=await job.in_thread(_made, job))
        except PersistFailed:
            raise
        except (SynvirtError, OSError) as error:
            cause = error.detail if isinstance(error, SynvirtError) else error.strerror or type(error).__name__
            log.warning("no receipt is made", job=str(job.id), cause=cause)
            await _say(job, _why_none(error, cause))
    await job.in_thread(receipts.forget_hashes, job.id)
    await job.strike(HASHES, str(job.id))


async def _say(job: Job, trouble: SynvirtError) -> None:
    """Shows it as the job's last error, unless one that stays is there. What the job still owes its source is shown first."""
    passing, problem = (await job.memory()).passing, job.problem(trouble, fatal=False)
    if passing is None and job.migration.last_error is None:
        await job.change(last_error=problem)
    elif passing is not None and passing.before is None:
        await job.note(passing=Passing(before=problem))


def _why_none(error: SynvirtError | OSError, cause: str) -> SynvirtError:
    """What the job says that has no receipt. A disk that takes no file is no mistake of ours."""
    detail = f"the move is complete; its receipt could not be made: {cause}"
    if isinstance(error, SynvirtError):
        return Internal(detail, hint=error.hint)
    hint = "free space for receipts in the service's folder: the next jobs get theirs then, and this one stays without"
    return PersistFailed(detail, hint=hint)


def _made(job: Job) -> Any:
    receipts = job.rooms.receipts
    assert receipts is not None
    disks = tuple(
        CopiedDisk(disk.key, disk.label, volume, disk.capacity_bytes, _file(job, number))
        for number, (disk, volume) in enumerate(job.copied_disks)
    )
    plan = (job.migration.plan.model_dump_json(indent=1) + "\n").encode()
    rehearsals = job.rooms.store.rehearsals.of(job.id)
    facts = facts_of(job.migration, rehearsals)
    return receipts.make(MovedJob(job.id, facts, plan, disks, _token(job), rehearsal=last_result(plan, rehearsals)))


def last_result(plan: bytes, rehearsals: Sequence[Rehearsal]) -> bytes | None:
    """The result of the newest rehearsal that was not cancelled, for the receipt; None: there is none. `rehearsals`: newest
    first."""
    known = (one for one in rehearsals if one.state in {RehearsalState.PASSED, RehearsalState.FAILED})
    last = next(known, None)
    if last is None:
        return None
    checks = [(check.name, check.ok) for check in last.checks]
    return rehearsal_result(plan, passed=last.state is RehearsalState.PASSED, checks=checks)


def _file(job: Job, number: int) -> Path:
    assert job.rooms.receipts is not None
    return job.rooms.receipts.hashes_file(job.id, number)


def facts_of(job: Migration, rehearsals: Sequence[Rehearsal] = ()) -> dict[str, Any]:
    """The statement's facts about the job: what, from where, when, by whom, how long. No secrets, as a plan has none."""
    manifest, plan = job.manifest, job.plan
    waived = set(plan.waive_concerns)
    return {
        "job": {
            "id": str(job.id),
            "name": job.name,
            "submitted_by": None if job.submitted_by is None else job.submitted_by.model_dump(mode="json"),
            "created_at": _at(job.created_at),
            "started_at": _at(job.started_at),
            "mode": str(job.mode_effective),
            "retry_of": None if job.retry_of is None else str(job.retry_of),
            "states": [{"state": str(visit.state), "at": _at(visit.at)} for visit in job.history],
        },
        "source": {
            **plan.source.model_dump(mode="json"),
            "reference": plan.source_ref.model_dump(mode="json"),
            "vm": None
            if manifest is None
            else manifest.model_dump(mode="json", include={"vm_id", "name", "uuid", "host", "firmware", "guest_os"}),
        },
        "target": {
            "destination": job.destination,
            "domain": None if job.domain is None else {"name": job.domain.name, "uuid": job.domain.uuid},
            "converted_by": None if job.conversion is None else job.conversion.tool,
            "boot_sign": job.boot_sign,
        },
        "skipped_disks": list(plan.skip_disks),
        "concerns_waived": [
            {"id": one.id, "label": one.label, "assessment": one.assessment}
            for one in (manifest.concerns if manifest is not None else ())
            if one.id in waived
        ],
        "passes": [one.model_dump(mode="json") for one in job.passes],
        # How sure the comparisons of the passes are, and which changes the source had missed.
        "tracking": {"confidence": plan.warm.confidence, "distrusted": job.distrusted}
        if plan.source.Live is not None
        else None,
        "rehearsals": [one.model_dump(mode="json", include=_OF_REHEARSALS) for one in rehearsals if one.ended],
        "sameness": None if job.moved is None else job.moved.model_dump(mode="json"),
        "outage": {
            "measured_s": job.downtime_s,
            "forecast": None if job.outage is None else job.outage.model_dump(mode="json"),
        },
    }


_OF_REHEARSALS = {"id", "state", "moment", "finished_at", "conversion_s", "boot_s", "outage_s", "checks"}


def _at(moment: Any) -> str | None:
    return None if moment is None else moment.isoformat(timespec="seconds")
