"""Whether another job is at work on a live VM, or was. Two jobs would power it off and on for each other."""

from collections.abc import Iterator

from pydantic_core import to_json

from synvirt.errors import Conflict
from synvirt.migrations.rooms import Rooms
from synvirt.model.job import Migration
from synvirt.model.kinds import LiveKind
from synvirt.model.machine import VmManifest
from synvirt.model.plan import LiveVmRef


def refuse_taken(rooms: Rooms, ref: LiveVmRef) -> None:
    """Conflict, if another job has this VM of this source."""
    for other, theirs in _of_live_vms(rooms, ref.vm_id):
        if (theirs.source_id, theirs.vm_id) == (ref.source_id, ref.vm_id):
            raise _taken(other, "the same machine")


def refuse_same(rooms: Rooms, kind: LiveKind, ref: LiveVmRef, manifest: VmManifest) -> None:
    """Conflict, if another job has this VM by another source: one platform may be registered twice, by name and by address, or
    a host besides its cluster. Its name must be the same too, as a copied VM may have the UUID of its original."""
    if manifest.uuid is None:
        return
    for other, theirs in _of_live_vms(rooms, manifest.uuid):
        if theirs.source_id != ref.source_id and _is_same(kind, manifest, other):
            raise _taken(other, f"the machine {manifest.name} of UUID {manifest.uuid}, by another source")


def is_of_same(job: Migration, other: Migration) -> bool:
    """Whether both jobs are of one live VM, by one source or, as above, by two."""
    kind, ref, theirs = job.plan.source.Live, job.plan.source_ref, other.plan.source_ref
    if kind is None or ref.kind != "live_vm" or theirs.kind != "live_vm":
        return False
    if theirs.source_id == ref.source_id:
        return theirs.vm_id == ref.vm_id
    return job.manifest is not None and _is_same(kind, job.manifest, other)


def is_read(rooms: Rooms, job: Migration) -> bool:
    """Whether an unended job, on whichever host and by whichever source, is of the same live VM as this job. Blocks."""
    if job.plan.source_ref.kind != "live_vm":
        return False
    uuid = None if job.manifest is None else job.manifest.uuid
    names = [job.plan.source_ref.vm_id] if uuid is None else [job.plan.source_ref.vm_id, uuid]
    return any(is_of_same(job, other) for name in names for other, _ in _of_live_vms(rooms, name))


def _is_same(kind: LiveKind, manifest: VmManifest, other: Migration) -> bool:
    if manifest.uuid is None or other.plan.source.Live != kind or other.manifest is None:
        return False
    return (other.manifest.uuid, other.manifest.name) == (manifest.uuid, manifest.name)


def _of_live_vms(rooms: Rooms, name: str) -> Iterator[tuple[Migration, LiveVmRef]]:
    """The unended jobs of live VMs whose document has this text in it."""
    for other in rooms.store.unended(naming=to_json(name).decode()):
        if other.plan.source_ref.kind == "live_vm":
            yield other, other.plan.source_ref


def _taken(other: Migration, what: str) -> Conflict:
    return Conflict(
        f"job {other.id} ({other.name}) is at work on {what}",
        hint="wait until it has ended, or cancel it first",
    )
