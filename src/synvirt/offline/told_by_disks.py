"""A manifest completed by what the disks themselves tell: their sizes and formats, what is encrypted, and the guest's family
where the description does not know it."""

from collections.abc import Iterable, Sequence

from synvirt.model import Concern, GuestOs, VmManifest
from synvirt.offline.concerns import UNKNOWN_GUEST
from synvirt.offline.files import Measured
from synvirt.offline.guest_os import Family, names_another


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


def by_partitions(family: Family, said: GuestOs | None = None) -> GuestOs:
    """The guest as its partition table shows it; `said` is what the description called it."""
    name = f"{family.capitalize()} (by the partition table)"
    return GuestOs(family=family, id=said.id if said else "", name=name)


def _family(measured: Sequence[Measured]) -> Family | None:
    """That of the first disk that tells, in the order in which they are booted."""
    order = sorted(measured, key=lambda each: each.disk.boot_order or len(measured) + 1)
    return next((each.layout.family for each in order if each.layout.family in ("windows", "linux")), None)
