"""All that a domain is made from, as one value, so that a draft can be made before there is a job."""

from dataclasses import dataclass
from uuid import UUID

from synvirt.model.job import BootAttempt
from synvirt.model.machine import VmManifest
from synvirt.model.plan import Target


@dataclass(frozen=True, slots=True)
class Machine:
    """`id`: of the job; what the source does not have is derived from it. `target`: the plan's changes. `skipped`: keys of the
    disks that are left out. `has_drivers`: virtio drivers were installed on its disks. `attempts`: the rungs of the ladder so
    far; the last is the present one. `rehearsed`: it runs beside the guest that it is a copy of, with its own name and UUID and
    the same MAC addresses. `wires`: what its network cards are connected to then, each a TCP port of 127.0.0.1 that takes
    QEMU's frames; without them the cards have no link."""

    id: UUID
    manifest: VmManifest
    target: Target
    skipped: frozenset[str] = frozenset()
    has_drivers: bool = False
    attempts: tuple[BootAttempt, ...] = ()
    rehearsed: bool = False
    wires: tuple[int, ...] = ()
