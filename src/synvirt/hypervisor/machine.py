"""What a domain is made of, as one value: so a draft can be drawn before there is a job."""

from dataclasses import dataclass
from uuid import UUID

from synvirt.model.job import BootAttempt
from synvirt.model.machine import VmManifest
from synvirt.model.plan import Target


@dataclass(frozen=True, slots=True)
class Machine:
    """`id`: of who makes it; what the source has none of is derived from it. `target`: what the plan wants otherwise.
    `skipped`: keys of the disks that do not come along. `has_drivers`: virtio drivers were put into its disks. `attempts`: the
    rungs of the ladder so far; it stands on the last. `rehearsed`: it runs next to the guest that it is a copy of: under a name
    and a UUID of its own, with the addresses of its network cards. `wires`: what these are plugged into then, each
    a TCP port of 127.0.0.1 that takes QEMU's frames; without them there is no cable in them."""

    id: UUID
    manifest: VmManifest
    target: Target
    skipped: frozenset[str] = frozenset()
    has_drivers: bool = False
    attempts: tuple[BootAttempt, ...] = ()
    rehearsed: bool = False
    wires: tuple[int, ...] = ()
