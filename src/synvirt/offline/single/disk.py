"""A VM with one disk image and nothing else: the common part of the three single-disk kinds.

The image does not describe its machine. The manifest says so (a concern) and takes defaults. It guesses firmware and family,
which decide whether the VM starts, from the disk's partition table. The plan's `target` overrides them.
"""

from pathlib import Path

from synvirt.disks.roots import Root
from synvirt.disks.specs import ReaderSpec
from synvirt.errors import NotFound
from synvirt.machines import concerns
from synvirt.model.machine import Disk, GuestOs, VmManifest
from synvirt.offline import OpenedDisk, facts_of_disks, files
from synvirt.offline.single.children import children_beside
from synvirt.sizes import GIB

DISK_KEY = "disk0"
_DEFAULT_CPUS = 2
_DEFAULT_MEMORY_BYTES = 2 * GIB


def inspect(path: Path, root: Root, image_format: str) -> VmManifest:
    """The manifest of a VM with only a disk image: default hardware, the rest by its partition table."""
    disk = Disk(
        key=DISK_KEY,
        label=path.name,
        capacity_bytes=0,
        format=image_format,
        bus="virtio",
        controller="virtio0",
        boot_order=1,
        source_path=path.name,
    )
    measured = facts_of_disks.measured(disk, lambda _: _spec(path, root, image_format))
    layout = measured.layout
    found = [concerns.assumed_hardware(), *measured.concerns]
    if newer := children_beside(path, root):
        found.append(concerns.newer_files(DISK_KEY, newer))
    uefi = layout.firmware == "uefi"
    if uefi:
        found.append(concerns.uefi_state_lost())
    if layout.family is None:
        found.append(concerns.unknown_guest("an image whose partition table does not show it"))
    return VmManifest(
        vm_id=path.name,
        name=path.stem or path.name,
        firmware="uefi" if uefi else "bios",
        cpu_count=_DEFAULT_CPUS,
        memory_bytes=_DEFAULT_MEMORY_BYTES,
        guest_os=GuestOs() if layout.family in (None, "other") else facts_of_disks.by_partitions(layout.family),
        cbt_reason="an offline import is a copy of files: nothing changes in them",
        disks=(measured.disk,),
        concerns=tuple(found),
    )


def open_disk(path: Path, root: Root, disk_key: str, image_format: str) -> OpenedDisk:
    """How to read the only disk. NotFound for another key."""
    if disk_key != DISK_KEY:
        raise NotFound(f"{path.name} has no disk {disk_key!r}: its only one is {DISK_KEY!r}")
    return OpenedDisk(_spec(path, root, image_format))


def _spec(path: Path, root: Root, image_format: str) -> ReaderSpec:
    """Files that the image names (parents, extents, backing files) may lie anywhere under the import root."""
    return files.disk_spec(files.whole_file(path, root), root, declared=image_format, inner_root=root)
