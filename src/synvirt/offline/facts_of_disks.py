"""Completes a manifest by the disks themselves: their sizes and formats, what is encrypted, and the guest's family where the
description does not have it."""

from collections.abc import Iterable, Sequence

from synvirt.machines import concerns
from synvirt.machines.concerns import UNKNOWN_GUEST
from synvirt.machines.guest_os import Family, names_another
from synvirt.model.machine import Concern, GuestOs, VmManifest
from synvirt.offline.files import Measured

# Larger than any number of disks in a machine.
_LAST = 1 << 16


def completed(manifest: VmManifest, measured: Sequence[Measured], more: Iterable[Concern] = ()) -> VmManifest:
    """`measured` are the manifest's disks; `more` are concerns that only the whole package shows."""
    found = [*manifest.concerns, *(concern for each in measured for concern in each.concerns), *more]
    guest = manifest.guest_os
    family = _family(measured)
    if guest.family == "other" and family is not None and not names_another(guest):
        guest = by_partitions(family, guest)
        found = [concern for concern in found if concern.id != UNKNOWN_GUEST]
    disks = tuple(each.disk for each in measured)
    return manifest.model_copy(update={"disks": disks, "guest_os": guest, "concerns": tuple(found)})


def with_firmware(manifest: VmManifest, measured: Sequence[Measured]) -> VmManifest:
    """For a machine whose description does not name its firmware: UEFI, where its first disk boots in no other way."""
    order = sorted(measured, key=_boot_order)
    if manifest.firmware == "uefi" or not order or order[0].layout.firmware != "uefi":
        return manifest
    found = (*manifest.concerns, concerns.uefi_state_lost())
    return manifest.model_copy(update={"firmware": "uefi", "concerns": found})


def by_partitions(family: Family, described: GuestOs | None = None) -> GuestOs:
    """The guest's family by its partition table; `described` is the description's name for it."""
    name = f"{family.capitalize()} (by the partition table)"
    return GuestOs(family=family, id=described.id if described else "", name=name)


def _family(measured: Sequence[Measured]) -> Family | None:
    """The family by the first disk that shows it, in boot order."""
    return next(
        (each.layout.family for each in sorted(measured, key=_boot_order) if each.layout.family in ("windows", "linux")), None
    )


def _boot_order(each: Measured) -> int:
    """Disks without a place in the boot order come after those with one."""
    return each.disk.boot_order or _LAST
