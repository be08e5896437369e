"""What an instant start is, of an import or of a restore: its guest runs before its disks are whole. Blocking code.

Here is what both have: where the guest's layers lie, what cannot be, what keeps the guest going, and what a cancel loses.
"""

from collections.abc import Sequence
from typing import Literal
from uuid import UUID

from synvirt.destinations import Destination
from synvirt.errors import Conflict
from synvirt.hypervisor import Early, Hypervisor
from synvirt.jobs.exports import Exported, Exports
from synvirt.model.job import Instant

# What becomes of what a guest wrote since its instant start.
GuestWrites = Literal["keep", "lose"]
# Between two looks whether the guest stands still, or its export is gone.
LOOK_EVERY_S = 1.0
# Between two tries of what failed while the guest runs; the last repeats.
AGAIN_S = (2, 5, 10, 30, 60)
OTHER_DESTINATION = "choose a destination of kind zfs or directory, or leave instant out"


def is_started(instant: Instant | None) -> bool:
    """From then on the guest has data that is nowhere else."""
    return instant is not None and instant.started_at is not None


def why_not_onto(destination: Destination) -> str | None:
    """Why no guest gets onto a volume of this destination while it runs; None, where it does."""
    if destination.device_type in ("file", "block"):
        return None
    return f"a guest cannot get onto a volume of kind {destination.device_type} while it runs"


def layers(exports: Exports, name: str, number: int) -> Early:
    """Of the disk that is served as that number of the exports of this name."""
    folder = exports.folder(name)
    return Early(
        top=str(folder.parent / f"{number}-top.qcow2"),
        between=str(folder.parent / f"{number}-between.qcow2"),
        socket=str(folder / str(number)),
    )


def keep_going(exports: Exports, hypervisor: Hypervisor, name: str, disks: Sequence[Exported], uuid: UUID | None) -> bool:
    """An export that is gone is made again, and a guest that stands still is made to go on: True, where it stood. `uuid`: of
    its domain, once there is one. The error of a disk that cannot be opened."""
    exports.serve(name, disks)
    return uuid is not None and hypervisor.resume(uuid)


def refuse_loss(what: str, instant: Instant | None, asked: GuestWrites, wrong: type[Conflict] = Conflict) -> None:
    """Where to cancel `what` would lose what its guest wrote, and nobody asked for that."""
    if asked == "lose" or instant is None or instant.started_at is None:
        return
    raise wrong(
        f"the guest of {what} has run since {instant.started_at:%Y-%m-%d %H:%M} UTC: to cancel it stops the guest, and loses "
        "all that it wrote since",
        hint="to lose that, cancel with guest_writes=lose: --lose-guest-writes on the command line",
    )
