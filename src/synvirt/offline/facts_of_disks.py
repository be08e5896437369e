"""Completes a manifest by the disks themselves: their sizes and formats, what is encrypted, and the guest's family where the
description does not have it.

A disk's size comes from the reader that will copy it, so the two always agree.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from synvirt.blocks import DiskReader, Placed
from synvirt.disks import open_reader, sector_bytes, snapshots_inside
from synvirt.disks.specs import ImageSpec, ReaderSpec, format_name, versions
from synvirt.errors import HostPathRejected, UnsupportedFormat
from synvirt.machines import concerns, partitions
from synvirt.machines.concerns import UNKNOWN_GUEST
from synvirt.machines.guest_os import names_another
from synvirt.machines.partitions import UNKNOWN, Layout
from synvirt.model.machine import Concern, Disk, Family, GuestOs, VmManifest
from synvirt.offline.single.raw_device import raw_device
from synvirt.remote import is_size_alone
from synvirt.sizes import GIB

# Larger than any number of disks in a machine.
_LAST = 1 << 16
# A description rounds a disk's size to its unit. A larger difference means another disk.
_CAPACITY_SLACK_BYTES = 1 << 20
# The tables of an image are read to say what it holds. Those of a larger one are more than 64 MiB (qcow2): too slow here.
_TABLES_OF_BYTES = 512 * GIB
# A fragmented image has more runs; they are a second of a processor.
_EXTENTS_MAX = 200_000


@dataclass(frozen=True, slots=True)
class Measured:
    """A disk with its image's facts, its partition table, and the concerns from both."""

    disk: Disk
    layout: Layout = UNKNOWN
    concerns: tuple[Concern, ...] = ()


def measured(disk: Disk, open_spec: Callable[[Disk], ReaderSpec]) -> Measured:
    """The disk with the format and size that its reader finds.

    A disk that cannot be read becomes a Critical concern, which a plan may waive by skipping the disk. So does an image that
    names files it may not have. A damaged one is MalformedArchive, and one outside the root HostPathRejected.
    """
    try:
        spec = open_spec(disk)
    except UnsupportedFormat as problem:
        return unreadable(disk, problem)
    device = raw_device(spec)
    if device is not None:
        return Measured(disk, concerns=(concerns.raw_device(disk.key, device),))
    try:
        reader = open_reader(spec)
    except (UnsupportedFormat, HostPathRejected) as problem:
        return unreadable(disk, problem)
    try:
        size, layout, snapshots = reader.size, partitions.look(reader), snapshots_inside(spec, reader)
        sectors = sector_bytes(spec, reader)
        used = _allocated(spec, reader) if disk.used_bytes is None else disk.used_bytes
    finally:
        reader.close()
    found = concerns.of_layout(disk.key, layout)
    found += concerns.of_sectors(disk.key, sectors)
    if snapshots:
        found.append(concerns.disk_snapshots(disk.key, snapshots))
    if any(is_size_alone(file.version) for file in versions(spec)):
        found.append(concerns.unversioned(disk.key))
    if disk.capacity_bytes and abs(size - disk.capacity_bytes) > _CAPACITY_SLACK_BYTES:
        found.append(concerns.capacity_differs(disk.key, disk.capacity_bytes, size))
    known = {"format": format_name(spec), "capacity_bytes": size, "used_bytes": used, "sector_bytes": sectors}
    return Measured(disk.model_copy(update=known), layout, tuple(found))


def _allocated(spec: ReaderSpec, reader: DiskReader) -> int | None:
    """The bytes that an image's own tables call data. None, where they do not tell: a raw disk has no tables, a thick image
    calls its zeros data too, and the tables of the rest are not read, as that would take long."""
    if not isinstance(spec, ImageSpec) or versions(spec) or reader.size > _TABLES_OF_BYTES:
        return None
    data = 0
    for number, extent in enumerate(reader.extents()):
        if number == _EXTENTS_MAX:
            return None
        data += 0 if extent.zero else extent.length
    return data if data < reader.size or not _lies_plainly(reader) else None


def _lies_plainly(reader: DiskReader) -> bool:
    return isinstance(reader, Placed) and next(iter(reader.places()), None) is not None


def unreadable(disk: Disk, problem: UnsupportedFormat | HostPathRejected) -> Measured:
    """A disk that cannot be read, with the concern that the plan must waive."""
    remedy = problem.hint or "Export the VM again, or skip the disk in the plan."
    return Measured(disk, concerns=(concerns.unreadable_disk(disk.key, problem.detail, remedy),))


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
