"""The loaders of systems on a disk's EFI system partitions, and their menus. Pure, over a disk.

Most installers put one where every firmware looks, /EFI/BOOT/BOOTX64.EFI. Others, Debian's above all, rely on an entry in the
firmware's variables, and without that a firmware finds no loader.
"""

from collections.abc import Iterator
from contextlib import suppress
from typing import Final, Protocol

from synvirt.blocks import DiskReader
from synvirt.errors import DiskReadFailed
from synvirt.guests.inside.fat import Entry, Fat
from synvirt.guests.inside.seekable import Positional, Window
from synvirt.machines.loader import Loader
from synvirt.machines.partitions import system_partitions

# Of a folder the first one: a shim starts the loader beside it, with Secure Boot too.
_LOADERS: Final = ("shimx64.efi", "shim.efi", "grubx64.efi", "grub.efi", "systemd-bootx64.efi", "bootmgfw.efi", "loader.efi")
# Windows' loader is one folder further down.
_FURTHER: Final = {"microsoft": "boot"}
LOADERS_MAX: Final = 16
# What Red Hat's systems before 9 have there, and not in /boot.
_OF_GRUB: Final = frozenset({"grub.cfg", "grubenv"})


class Disk(DiskReader, Positional, Protocol):
    """What both the table and the file system are read from."""


def loaders_of(disk: Disk) -> Iterator[Loader]:
    """Those on partitions without a loader where every firmware looks. A file system that cannot be read has none."""
    for partition in system_partitions(disk):
        try:
            paths = list(_paths(Fat(Window(disk, partition.start))))[:LOADERS_MAX]
        except DiskReadFailed:
            continue
        for path in paths:
            yield Loader(partition.number, partition.first, partition.sectors, partition.id, path)


def menus_of(disk: Disk) -> dict[str, str]:
    """The menus and variables of GRUB there, by their paths where a Linux mounts such a partition."""
    found: dict[str, str] = {}
    for partition in system_partitions(disk):
        with suppress(DiskReadFailed):
            files = Fat(Window(disk, partition.start))
            for vendor in _folders(files, efi.cluster) if (efi := _efi(files)) is not None else ():
                for one in files.folder(vendor.cluster):
                    if one.name.lower() in _OF_GRUB:
                        path = f"/boot/efi/EFI/{vendor.name}/{one.name.lower()}"
                        found.setdefault(path, files.read(one).decode(errors="replace"))
    return found


def _efi(files: Fat) -> Entry | None:
    return next((one for one in _folders(files, 0) if one.name.lower() == "efi"), None)


def _paths(files: Fat) -> Iterator[str]:
    if (efi := _efi(files)) is None:
        return
    vendors = list(_folders(files, efi.cluster))
    fallback = next((one for one in vendors if one.name.lower() == "boot"), None)
    if fallback is not None and "bootx64.efi" in _names(files, fallback):
        return
    for vendor in vendors:
        folder, path = vendor, f"\\{efi.name}\\{vendor.name}"
        if (inner := _FURTHER.get(vendor.name.lower())) is not None:
            folder = next((one for one in _folders(files, vendor.cluster) if one.name.lower() == inner), vendor)
            path = path if folder is vendor else f"{path}\\{folder.name}"
        names = _names(files, folder)
        loader = next((names[name] for name in _LOADERS if name in names), None)
        if loader is not None:
            yield f"{path}\\{loader}"


def _folders(files: Fat, cluster: int) -> Iterator[Entry]:
    return (one for one in files.folder(cluster) if one.is_folder and one.cluster and one.name not in (".", ".."))


def _names(files: Fat, folder: Entry) -> dict[str, str]:
    return {one.name.lower(): one.name for one in files.folder(folder.cluster) if not one.is_folder}
