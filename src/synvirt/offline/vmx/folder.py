"""A VM of VMware as files: its folder, or the path of its .vmx."""

from functools import partial
from pathlib import Path, PurePosixPath
from typing import ClassVar

from synvirt.disks.roots import HOST, Root
from synvirt.disks.specs import ReaderSpec
from synvirt.errors import MalformedArchive, NotFound
from synvirt.machines import concerns
from synvirt.model.kinds import OfflineKind
from synvirt.model.machine import Disk, Snapshot, VmManifest
from synvirt.offline import OpenedDisk, facts_of_disks, files
from synvirt.offline.files import Folder
from synvirt.offline.vmx import configuration as vmx

# .vmtx is a template; .vmxf, beside each .vmx, is something else.
_SUFFIXES = (".vmx", ".vmtx")


class VmxFolder:
    """Folders of VMware VMs."""

    kind: ClassVar[OfflineKind] = OfflineKind.VMX_FOLDER

    def probe(self, path: Path, head: bytes, root: Root = HOST) -> bool:
        if any(files.holds(path, suffix, root) for suffix in _SUFFIXES):
            return True
        plain = head.replace(b"\0", b"").lower()
        return any(files.has_suffix(path.name, suffix) for suffix in _SUFFIXES) and b"=" in plain

    def inspect(self, path: Path, root: Root) -> VmManifest:
        folder, name, machine = _read(path, root)
        measured = [facts_of_disks.measured(disk, partial(_spec, folder, machine)) for disk in machine.manifest.disks]
        taken = _snapshots(folder, name)
        found = [concerns.snapshots_present(len(taken))] if taken else []
        if _is_locked(folder):
            found.append(concerns.in_use())
        return facts_of_disks.completed(machine.manifest.model_copy(update={"snapshots": taken}), measured, found)

    def open_disk(self, path: Path, root: Root, disk_key: str) -> OpenedDisk:
        folder, _, machine = _read(path, root)
        disk = next((disk for disk in machine.manifest.disks if disk.key == disk_key), None)
        if disk is None:
            raise NotFound(f"{path.name} has no disk {disk_key!r}")
        return OpenedDisk(_spec(folder, machine, disk))


def _read(path: Path, root: Root) -> tuple[Folder, str, vmx.Machine]:
    folder = Folder(path, root)
    name = folder.chosen or folder.description(".vmx" if files.holds(folder.path, ".vmx", root) else ".vmtx")
    file = folder.find(name)
    if file is None:
        raise MalformedArchive(f"{folder.label} lost its {name} while it was read")
    return folder, name, vmx.parse(files.read_all(file, root, vmx.FILE_MAX_BYTES), name)


def _spec(folder: Folder, machine: vmx.Machine, disk: Disk) -> ReaderSpec:
    """The disk's file is that of its newest snapshot, which names its parents and extents itself."""
    written = machine.files[disk.key]
    file = folder.find_own(written, machine.files.values())
    if file is None:
        raise MalformedArchive(
            f"disk {disk.key} is the file {written!r}, which is neither in {folder.label} nor in a folder beside it",
            hint="Copy all files of the VM, snapshots too, into one folder under the import root. Where two disks have one "
            "name, rename one of them there and in the .vmx.",
        )
    return files.disk_spec(file, folder.root, declared="vmdk", inner_root=folder.root)


def _snapshots(folder: Folder, name: str) -> tuple[Snapshot, ...]:
    beside = folder.find(str(PurePosixPath(name).with_suffix(".vmsd")))
    return () if beside is None else vmx.snapshots(files.read_all(beside, folder.root, vmx.FILE_MAX_BYTES), beside.name)


def _is_locked(folder: Folder) -> bool:
    """Workstation keeps `.lck` folders, ESX a lock file, while the VM runs."""
    return any(name.lower().endswith((".vmx.lck", ".vmdk.lck", ".vmx~")) for name in folder.names())
