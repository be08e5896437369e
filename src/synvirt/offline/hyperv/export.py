"""A Hyper-V machine as files: the output of Export-VM, a machine's folder, or the path of its configuration.

    NAME/Virtual Machines/GUID.vmcx   the configuration; before Windows Server 2016 GUID.xml
                         /GUID.vmrs   its runtime state, with its memory if it was saved; before 2016 GUID/*.bin, *.vsv
        /Virtual Hard Disks/          .vhdx, .avhdx, .vhd, .avhd
        /Snapshots/                   a configuration of each checkpoint

The configuration has the paths of the host that wrote it, so disks are found by their names in the folders of the export. Each
disk is read over its parents, as far as they lie under the import root. A checkpoint's configuration, imported by its own path,
gives the machine at that moment.
"""

import math
import re
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path, PurePosixPath, PureWindowsPath
from typing import ClassVar

from synvirt.disks.beneath import resolve_beneath
from synvirt.disks.roots import HOST, Root
from synvirt.disks.specs import ReaderSpec
from synvirt.errors import HostPathRejected, MalformedArchive, NotFound, SynvirtError, UnsupportedFormat
from synvirt.machines import concerns
from synvirt.machines.texts import clean
from synvirt.model.kinds import OfflineKind
from synvirt.model.machine import Disk, Snapshot, VmManifest
from synvirt.nearest import in_short
from synvirt.offline import OpenedDisk, facts_of_disks, files
from synvirt.offline.facts_of_disks import Measured
from synvirt.offline.files import FileRange, Folder
from synvirt.offline.hyperv import machine as vmcx_machine
from synvirt.offline.hyperv import storage as vmcx_storage
from synvirt.offline.hyperv import xml as vmcx_xml
from synvirt.offline.hyperv.machine import Drive, Machine
from synvirt.offline.hyperv.storage import Tree
from synvirt.xml_document import DOCUMENT_MAX_BYTES

_MACHINES, _CHECKPOINTS = "virtual machines", "snapshots"
# The folders of an export with disks, in lower case, as Windows ignores case in names.
_HELD_IN = (_MACHINES, _CHECKPOINTS, "virtual hard disks")
_GUID = re.compile(r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}", re.IGNORECASE)
# Hyper-V allows 50 per machine.
_CHECKPOINTS_MAX = 200
# The newest format first: a machine whose version was raised may still have its old configuration.
_SUFFIXES = (".vmcx", ".xml", ".exp")
_SAVED_KEYS = frozenset({"savedstate", "savedVM"})
_SAVED_SUFFIXES = (".bin", ".vsv")


class VmcxExport:
    """Exports of Hyper-V."""

    kind: ClassVar[OfflineKind] = OfflineKind.VMCX_EXPORT

    def probe(self, path: Path, head: bytes, root: Root = HOST) -> bool:
        if files.has_suffix(path.name, ".vmcx") and head[:4] == vmcx_storage.MAGIC:
            return True
        if files.has_suffix(path.name, ".xml"):
            plain = head.replace(b"\0", b"")
            return b"<configuration" in plain and b"VDEVVersion" in plain
        return not head and isinstance(root, Path) and _holds_machine(path)

    def inspect(self, path: Path, root: Root) -> VmManifest:
        export = _opened(path, root)
        saved = _is_saved(export.folder, export.name) or vmcx_machine.saved_state_files(export.tree)
        checkpoints = sorted(_checkpoints(export.folder, besides=export.name), key=_age)
        machine = export.machine(snapshots=tuple(checkpoints), saved=saved)
        measured = [_measured(export, disk, machine.drives) for disk in machine.manifest.disks]
        manifest = facts_of_disks.completed(machine.manifest, measured)
        disks = tuple(disk.model_copy(update={"source_path": machine.drives[disk.key].file_name}) for disk in manifest.disks)
        return manifest.model_copy(update={"disks": disks})

    def open_disk(self, path: Path, root: Root, disk_key: str) -> OpenedDisk:
        export = _opened(path, root)
        drives = export.machine().drives
        if disk_key not in drives:
            raise NotFound(f"{path.name} has no disk {disk_key!r}")
        return OpenedDisk(_spec(export, disk_key, drives))


@dataclass(frozen=True, slots=True)
class _Export:
    """`name` is the configuration's; `names` those of all files that may be its disks. Both are relative to the folder."""

    folder: Folder
    name: str
    tree: Tree
    names: tuple[str, ...]

    def machine(self, *, snapshots: tuple[Snapshot, ...] = (), saved: bool = False) -> Machine:
        return vmcx_machine.machine(self.tree, PurePosixPath(self.name).name, snapshots=snapshots, saved=saved)


def _holds_machine(path: Path) -> bool:
    """Whether the folder, or its folder Virtual Machines, has a configuration. Never raises, as it is for probing."""
    try:
        return any(_is_configuration(entry.name) or _is_machines(entry) for entry in path.iterdir())
    except (OSError, ValueError):
        return False


def _is_machines(path: Path) -> bool:
    return path.name.lower() == _MACHINES and path.is_dir() and any(_is_configuration(entry.name) for entry in path.iterdir())


def _is_configuration(name: str) -> bool:
    """A .vmcx file; or a file with a more general suffix whose name is a GUID."""
    path = PurePosixPath(name.lower())
    return files.has_suffix(name, ".vmcx") or (path.suffix in _SUFFIXES and _GUID.fullmatch(path.stem) is not None)


# ── finding the files ────────────────────────────────────────────────────────────────────────────────────────────────


def _opened(path: Path, root: Root) -> _Export:
    if not isinstance(root, Path):
        raise UnsupportedFormat(
            f"{path.name} is an export of Hyper-V, whose files lie in folders beside it",
            hint="Copy the export into the import root; or import its .vhdx from where it lies.",
        )
    found = resolve_beneath(root, str(path))
    place = found if found.is_dir() else found.parent
    inside = place.name.lower() in (_MACHINES, _CHECKPOINTS) and place != root.resolve()
    folder = Folder(place.parent if inside else place, root)
    name = str(found.relative_to(folder.path)) if found.is_file() else _configuration(folder)
    names = (*folder.names(), *(inner for held_in in _HELD_IN for inner in _inside(folder, held_in)))
    return _Export(folder, name, _tree(folder, name), names)


def _inside(folder: Folder, wanted: str) -> list[str]:
    """The names in the subfolder of that name, whatever its case."""
    return [name for inner in folder.names() if inner.lower() == wanted for name in folder.names(inner)]


def _configuration(folder: Folder) -> str:
    names = _inside(folder, _MACHINES) or folder.names()
    of_suffix = (
        [name for name in names if _is_configuration(PurePosixPath(name).name) and files.has_suffix(name, suffix)]
        for suffix in _SUFFIXES
    )
    found = next((names for names in of_suffix if names), [])
    if len(found) != 1:
        raise MalformedArchive(
            f"{folder.label} has {len(found)} configurations of machines: {in_short(found)}",
            hint="Import the machine's .vmcx by its own path.",
        )
    return found[0]


def _tree(folder: Folder, name: str) -> Tree:
    file = folder.find(name)
    if file is None:
        raise MalformedArchive(f"{folder.label} lost its {name} while it was read")
    if files.has_suffix(name, ".exp"):
        raise UnsupportedFormat(
            f"{name} was exported by Windows Server 2008, whose exports hold no configuration that can be read",
            hint="Import it into Hyper-V of 2008 R2 or 2012, and copy the machine's folder from there; or import its disks.",
        )
    if files.has_suffix(name, ".xml"):
        return vmcx_xml.read(files.read_all(file, folder.root, DOCUMENT_MAX_BYTES), name)
    with files.opened(file, folder.root) as reader:
        return vmcx_storage.read(reader, name)


def _checkpoints(folder: Folder, *, besides: str) -> Iterator[Snapshot]:
    """A checkpoint with a damaged configuration is named after its file, as the present state does not need it."""
    names = [name for name in _inside(folder, _CHECKPOINTS) if _is_configuration(PurePosixPath(name).name) and name != besides]
    if len(names) > _CHECKPOINTS_MAX:
        raise MalformedArchive(f"{folder.label} has {len(names)} checkpoints; Hyper-V allows 50")
    for name in names:
        try:
            found = vmcx_machine.checkpoint(_tree(folder, name))
        except SynvirtError:
            found = None
        yield found or Snapshot(id=clean(PurePosixPath(name).stem.lower()))


def _age(checkpoint: Snapshot) -> tuple[float, str]:
    """The oldest first; before them those of unknown time, in a stable order."""
    return (-math.inf if checkpoint.created_at is None else checkpoint.created_at.timestamp(), checkpoint.id)


def _is_saved(folder: Folder, configuration: str) -> bool:
    """Whether the machine's memory is beside its configuration. If its runtime state cannot be read, it may be."""
    stem = configuration.rpartition(".")[0]
    if any(files.has_suffix(name, suffix) for name in folder.names(stem) for suffix in _SAVED_SUFFIXES):
        return True
    siblings = folder.names(str(PurePosixPath(stem).parent)) if "/" in stem else folder.names()
    state = next((name for name in siblings if name.lower() == f"{stem}.vmrs".lower()), None)
    try:
        file = None if state is None else folder.find(state)
        if file is None:
            return False
        with files.opened(file, folder.root) as reader:
            return vmcx_storage.has_key(reader, file.name, _SAVED_KEYS)
    except (MalformedArchive, UnsupportedFormat):
        return True


# ── disks ────────────────────────────────────────────────────────────────────────────────────────────────────────────


def _measured(export: _Export, disk: Disk, drives: Mapping[str, Drive]) -> Measured:
    if drives[disk.key].physical:
        return Measured(disk, concerns=(concerns.raw_device(disk.key, "a disk that the Hyper-V host passed through"),))
    return facts_of_disks.measured(disk, lambda _: _spec(export, disk.key, drives))


def _spec(export: _Export, key: str, drives: Mapping[str, Drive]) -> ReaderSpec:
    drive = drives[key]
    if drive.physical:
        raise UnsupportedFormat(
            f"disk {key} is a disk of its Hyper-V host ({drive.path[:200]!r}), which an export does not hold",
            hint="Copy it into a .vhdx on the host (New-VHD -SourceDisk) and attach that, or skip the disk in the plan.",
        )
    if drive.path.lower().endswith(".vhds"):
        raise UnsupportedFormat(
            f"disk {key} is a VHD set ({drive.file_name!r}), which machines of a cluster share",
            hint="Convert it on the host (Convert-VHD to .vhdx) and attach that instead, or skip the disk in the plan.",
        )
    file = _file(export, drive.path)
    if file is None:
        raise MalformedArchive(
            f"disk {key} is the file {drive.path!r}, and none of its name is in {export.folder.label} or its folders",
            hint="Export the machine again, or copy its disks, those of checkpoints too, into its folder Virtual Hard Disks.",
        )
    if other := _other_of(export, drive, drives, file):
        raise MalformedArchive(
            f"disks {key} and {other} are two files of one name, {drive.path!r} and {drives[other].path!r}, and {file.name} is "
            "the only one that was found",
            hint="Rename one of them on the host and in the machine (Set-VMHardDiskDrive -Path), and export it again.",
        )
    declared = "vhd" if drive.path.lower().endswith("vhd") else "vhdx"
    return files.disk_spec(file, export.folder.root, declared=declared, inner_root=export.folder.root)


def _other_of(export: _Export, drive: Drive, drives: Mapping[str, Drive], file: FileRange) -> str | None:
    """Another disk that means `file` as well as this drive does, or better: the folder's name decides, as for `_file`. A path
    that both name is one disk."""

    def is_in_its_folder(path: str) -> bool:
        return PurePosixPath(file.name.lower()).parent.name == PureWindowsPath(path.lower()).parent.name

    for key, other in drives.items():
        if other.physical or other.path.lower() == drive.path.lower() or other.file_name.lower() != drive.file_name.lower():
            continue
        same = _file(export, other.path)
        if same is not None and same.path == file.path and is_in_its_folder(other.path) >= is_in_its_folder(drive.path):
            return key
    return None


def _file(export: _Export, written: str) -> FileRange | None:
    """The file by its name; if several files have it, the one in a folder of the same name too."""
    path = PureWindowsPath(written.lower())
    found = [name for name in export.names if PurePosixPath(name.lower()).name == path.name]
    found.sort(key=lambda name: PurePosixPath(name.lower()).parent.name != path.parent.name)
    if found:
        return export.folder.find(found[0])
    # A path of the host that wrote it may lead anywhere here. It only matters that the export has no file of the name.
    with suppress(HostPathRejected):
        return export.folder.find_written(written)
    return None
