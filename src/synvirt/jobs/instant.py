"""Instant starts of imports and restores: the guest runs before its disks are complete. Blocking code.

This is what both have in common: where the guest's layers are, what is impossible, what keeps the guest running, and what a
cancel loses.
"""

from collections.abc import Sequence
from typing import Literal
from uuid import UUID

from synvirt.destinations import Destination
from synvirt.errors import Conflict
from synvirt.hypervisor import Early, Hypervisor, Paused
from synvirt.jobs.exporting import Exported
from synvirt.jobs.exports import Exports
from synvirt.model.job import Instant

# What a cancel does with the data that a guest wrote since its instant start.
GuestWrites = Literal["keep", "lose"]
# Seconds between two looks whether the guest is paused, or its export is gone.
LOOK_EVERY_S = 1.0
# Pauses after failures while the guest runs; the last one repeats.
AGAIN_S = (2, 5, 10, 30, 60)
# What is shown of a guest that has no room for what it writes begins so (`room_news`).
NO_SPACE = "the guest is paused: what it writes has no room in "
NO_SPACE_HINT = "free space there: the guest goes on by itself"
OTHER_DESTINATION = "choose a destination of kind zfs or directory, or leave instant out"


def is_started(instant: Instant | None) -> bool:
    """Whether the guest has been started. From then on it may have data that is nowhere else."""
    return instant is not None and instant.started_at is not None


def why_not_onto(destination: Destination) -> str | None:
    """Why a running guest cannot move onto a volume of this destination. None: it can."""
    if destination.device_type in ("file", "block"):
        return None
    return f"a guest cannot get onto a volume of kind {destination.device_type} while it runs"


def layers(exports: Exports, name: str, number: int) -> Early:
    """The layers of the disk that is the n-th export of this name."""
    folder = exports.folder(name)
    return Early(
        top=str(folder.parent / f"{number}-top.qcow2"),
        between=str(folder.parent / f"{number}-between.qcow2"),
        socket=str(folder / str(number)),
    )


def keep_going(
    exports: Exports, hypervisor: Hypervisor, name: str, disks: Sequence[Exported], uuid: UUID | None
) -> Paused | None:
    """Makes an export again if it is gone, and resumes a guest that is paused; why it was. An export that it could not read is
    made anew at the next look. `uuid`: of its domain, once there is one. Raises the error of a disk that cannot be opened."""
    exports.serve(name, disks)
    paused = None if uuid is None else hypervisor.resume(uuid)
    if paused is not None and paused.full is None:
        exports.renew(name)
    return paused


def room_news(shown: str | None, paused: Paused | None) -> str | None:
    """What to show now of the guest's room; empty: show it no more; None: what is shown stays. `shown`: the message of the
    trouble that is shown now. Another trouble stays; the lack of room is shown after it, if it lasts."""
    if paused is not None and paused.full is not None:
        return f"{NO_SPACE}{paused.full}" if shown is None else None
    return "" if shown is not None and shown.startswith(NO_SPACE) else None


def refuse_loss(what: str, instant: Instant | None, asked: GuestWrites, wrong: type[Conflict] = Conflict) -> None:
    """Conflict, where a cancel of `what` would lose data of its guest, and the caller did not ask for that."""
    if asked == "lose" or instant is None or instant.started_at is None:
        return
    raise wrong(
        f"the guest of {what} has run since {instant.started_at:%Y-%m-%d %H:%M} UTC: cancelling stops the guest, and loses "
        "all that it wrote since",
        hint="to lose that, cancel with guest_writes=lose: --lose-guest-writes on the command line",
    )
