"""Whether the volumes of a job may be repaired by its receipt. Blocking code.

A ledger describes the moment before the first boot, and before drivers were installed. What a guest, or a conversion, has
written since differs from it and is correct: a "repair" would destroy it. So a volume is repaired only if nothing has written
to it:

    compared   a job that completed, on its host, with its receipt and its volumes; its guest is off
    repaired   and its guest was never started, no drivers were installed, and its source has the same disks, and is off
"""

import contextlib
from collections.abc import Mapping
from uuid import UUID

from synvirt.disks import open_reader
from synvirt.disks.checking.receipt_rows import LedgerSpec
from synvirt.disks.specs import written
from synvirt.errors import Conflict, HostPathRejected, InvalidPlan, MalformedArchive, NotFound, SynvirtError
from synvirt.migrations.planning.foreseen import at_source, in_files
from synvirt.migrations.rooms import Rooms
from synvirt.model.job import Migration
from synvirt.model.kinds import State
from synvirt.model.machine import VmManifest
from synvirt.model.repair import DiskRepair, Repair
from synvirt.proof.keeping import Receipts
from synvirt.store import Store

_CHECK_HINT = "see what differs with check_only, which writes nothing"
_LOST_HINT = "put its tar back among the receipts of this host"


def repair_of(rooms: Rooms, job: Migration, check_only: bool) -> Repair:
    """Checks a repair of that job before anything is read. Conflict says why it is not allowed; SourceUnreachable and others,
    if its source cannot be asked."""
    if job.repair is not None:
        raise Conflict(f"job {job.id} is a repair itself", hint=f"ask for a repair of job {job.repair.of}")
    if job.state is not State.COMPLETED:
        raise Conflict(f"job {job.id} is {job.state}: only the volumes of a completed job have a receipt")
    volumes = {disk.key: disk.volume for disk in job.disks if disk.volume is not None}
    disks = tuple(DiskRepair(key=key, volume=volumes[key]) for key in ledgers_of(rooms, job) if key in volumes)
    if not disks:
        raise Conflict(f"the receipt of job {job.id} has no hashes of its volumes", hint="the receipt has the reason")
    found = Repair(of=job.id, check_only=check_only, disks=disks)
    refuse_volumes(rooms, job, found)
    if not check_only:
        _refuse_source(rooms, job, found)
    return found


def refuse_second(store: Store, job_id: UUID) -> None:
    """Conflict, if a repair of that job is running: the volumes that it reads must not change meanwhile."""
    for other in store.unended(naming=str(job_id)):
        if other.repair is not None and other.repair.of == job_id:
            raise Conflict(f"job {other.id}, a repair of job {job_id}, has not ended", hint="wait for its end, or cancel it")


def ledgers_of(rooms: Rooms, job: Migration) -> Mapping[str, LedgerSpec]:
    """The ledgers by disk key. Conflict, if the receipt is missing, or is not as it was signed."""
    try:
        return _receipts(rooms, job).ledgers(job.id)
    except NotFound as error:
        raise Conflict(f"the receipt of job {job.id} is not on this host any more", hint=_LOST_HINT) from error
    except MalformedArchive as error:
        raise Conflict(f"the receipt of job {job.id} is not as it was signed: {error.detail}", hint=_LOST_HINT) from error


def _receipts(rooms: Rooms, job: Migration) -> Receipts:
    if rooms.receipts is None:
        raise Conflict("this host keeps no receipts", hint="the setting receipts is off")
    if job.receipt is None:
        raise Conflict(f"job {job.id} has no receipt to compare its volumes with")
    return rooms.receipts


def refuse_volumes(rooms: Rooms, job: Migration, repair: Repair) -> None:
    """Conflict, if the volumes are missing, or were written to, or may be written to now."""
    _refuse_guest(rooms, job, check_only=repair.check_only)
    for disk in repair.disks:
        size = next(one.capacity_bytes for one in _manifest(job).disks if one.key == disk.key)
        try:
            volume = written(rooms.destination_named(job.destination).open(disk.volume, size))
            with contextlib.closing(open_reader(volume)) as reader:
                reader.read_into(0, memoryview(bytearray(min(reader.size, 512))))
        except SynvirtError as error:
            raise Conflict(
                f"volume {disk.volume} of job {job.id} cannot be read: {error.detail}",
                hint="a volume that is gone is not repaired: migrate it again, or restore a backup",
            ) from error


def _refuse_guest(rooms: Rooms, job: Migration, *, check_only: bool) -> None:
    domain = job.domain
    lived = None if domain is None else rooms.hypervisor.lived(UUID(domain.uuid))
    name = job.name if domain is None else domain.name
    if lived is not None and lived.runs:
        raise Conflict(f"guest {name} runs: its volumes change", hint="shut it down first")
    if check_only:
        return
    if job.plan.target.start or job.boot_attempts:
        raise Conflict(
            f"job {job.id} has started guest {name}: the receipt is of the moment before, and what the guest wrote since would"
            " be overwritten",
            hint=_CHECK_HINT,
        )
    if job.conversion is not None:
        raise Conflict(
            f"drivers were put into guest {name} after the moment of the receipt: a repair would take them out again",
            hint=_CHECK_HINT,
        )
    if lived is None:
        raise Conflict(
            f"this host has no domain {name} any more: whether a guest wrote to the volumes since cannot be seen",
            hint=_CHECK_HINT,
        )
    if lived.trace is not None:
        raise Conflict(
            f"guest {name} seems to have been started since: {lived.trace}; what it wrote would be overwritten",
            hint=_CHECK_HINT,
        )


def _refuse_source(rooms: Rooms, job: Migration, repair: Repair) -> None:
    ref, plan = job.plan.source_ref, job.plan
    if ref.kind == "remote_url":
        raise Conflict(
            f"the credentials of {ref.url} are not kept",
            hint="see what differs with check_only; if anything does, migrate it again",
        )
    source = _source(rooms, job)
    if plan.source.Live is not None and source.power_state != "off":
        raise Conflict(
            f"the source {source.name} is {source.power_state}: it is no longer what was copied",
            hint="shut it down; only what is still as it was is taken from it",
        )
    present = {disk.key: disk.capacity_bytes for disk in source.disks}
    for disk in _manifest(job).disks:
        if disk.key in {one.key for one in repair.disks} and present.get(disk.key) != disk.capacity_bytes:
            raise Conflict(
                f"the source has no disk {disk.key} of {disk.capacity_bytes} bytes any more",
                hint="bring back the file, or the machine, that was copied",
            )


def _source(rooms: Rooms, job: Migration) -> VmManifest:
    """SourceUnreachable, AuthFailed; Conflict, if the source exists no more."""
    plan, ref = job.plan, job.plan.source_ref
    try:
        if plan.source.Live is None or ref.kind != "live_vm":
            return in_files(rooms, plan)
        return at_source(rooms, plan.source.Live, ref)[0]
    except (NotFound, HostPathRejected, MalformedArchive, InvalidPlan) as error:
        raise Conflict(
            f"the source of job {job.id} is not there any more: {error.detail}",
            hint="bring back the file, or the machine, that was copied; what differs is seen with check_only",
        ) from error


def _manifest(job: Migration) -> VmManifest:
    assert job.manifest is not None, "a job that completed has looked at its machine"
    return job.manifest
