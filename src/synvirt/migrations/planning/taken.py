"""Whether another job is at work on a live VM. Two jobs would power it off for each other."""

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
        if other.plan.source.Live != kind or theirs.source_id == ref.source_id or other.manifest is None:
            continue
        if (other.manifest.uuid, other.manifest.name) == (manifest.uuid, manifest.name):
            raise _taken(other, f"the machine {manifest.name} of UUID {manifest.uuid}, by another source")


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
