"""A VirtualBox machine as files: its folder, or the path of its .vbox."""

import re
from dataclasses import replace
from functools import partial, reduce
from pathlib import Path
from typing import ClassVar

from synvirt.blocks import bytes_of
from synvirt.disks.formats import image_format
from synvirt.disks.roots import HOST, Root
from synvirt.disks.specs import ImageSpec, ReaderSpec
from synvirt.errors import MalformedArchive, NotFound, SynvirtError, UnsupportedFormat
from synvirt.machines.texts import uuid_of
from synvirt.model.kinds import OfflineKind
from synvirt.model.machine import Disk, VmManifest
from synvirt.offline import OpenedDisk, facts_of_disks, files
from synvirt.offline.files import FileRange, Folder
from synvirt.offline.vbox import machine as virtualbox
from synvirt.offline.vbox.machine import Machine
from synvirt.xml_document import DOCUMENT_MAX_BYTES

# VirtualBox warns at 30 or more snapshots of a disk.
_CHAIN_MAX = 64
# The part with the descriptor, which has a VMDK's own UUID: `ddb.uuid.image="…"`.
_DESCRIPTOR_BYTES = 64 << 10
_UUID_LINE = re.compile(rb'ddb\.uuid\.image\s*=\s*"\{?([0-9a-f-]{36})', re.IGNORECASE)


class VboxFolder:
    """Folders of VirtualBox machines."""

    kind: ClassVar[OfflineKind] = OfflineKind.VBOX_FOLDER

    def probe(self, path: Path, head: bytes, root: Root = HOST) -> bool:
        return files.holds(path, ".vbox", root) or (
            files.has_suffix(path.name, ".vbox") and b"VirtualBox" in head.replace(b"\0", b"")
        )

    def inspect(self, path: Path, root: Root) -> VmManifest:
        folder, machine = _read(path, root)
        measured = [facts_of_disks.measured(disk, partial(_spec, folder, machine)) for disk in machine.manifest.disks]
        manifest = facts_of_disks.completed(machine.manifest, measured)
        disks = tuple(disk.model_copy(update={"source_path": _place(machine, disk)}) for disk in manifest.disks)
        return manifest.model_copy(update={"disks": disks})

    def open_disk(self, path: Path, root: Root, disk_key: str) -> OpenedDisk:
        folder, machine = _read(path, root)
        disk = next((disk for disk in machine.manifest.disks if disk.key == disk_key), None)
        if disk is None:
            raise NotFound(f"{path.name} has no disk {disk_key!r}")
        return OpenedDisk(_spec(folder, machine, disk))


def _read(path: Path, root: Root) -> tuple[Folder, Machine]:
    folder = Folder(path, root)
    name = folder.description(".vbox")
    file = folder.find(name)
    if file is None:
        raise MalformedArchive(f"{folder.label} lost its {name} while it was read")
    return folder, virtualbox.parse(files.read_all(file, root, DOCUMENT_MAX_BYTES), name)


def _place(machine: Machine, disk: Disk) -> str:
    medium = machine.media.get(machine.attached[disk.key])
    return "" if medium is None else Path(medium.location.replace("\\", "/")).name


def _spec(folder: Folder, machine: Machine, disk: Disk) -> ReaderSpec:
    """The attached image over its parents: VDI names a parent only by UUID."""
    chain: dict[str, ImageSpec] = {}
    uuid: str | None = machine.attached[disk.key]
    while uuid is not None:
        if uuid in chain or len(chain) >= _CHAIN_MAX:
            raise MalformedArchive(f"disk {disk.key} has over {_CHAIN_MAX} images, one over the other, or a loop of them")
        file = _medium_file(folder, machine, uuid, is_parent=bool(chain))
        spec = files.disk_spec(file, folder.root, declared="vdi", inner_root=folder.root)
        if not isinstance(spec, ImageSpec):
            raise MalformedArchive(f"medium {uuid} of disk {disk.key} is not a disk image")
        chain[uuid] = spec
        uuid = _parent(file, folder.root, spec.format)
    newest_last = list(reversed(chain.values()))
    return reduce(lambda parent, child: replace(child, parent=parent), newest_last)


def _parent(file: FileRange, root: Root, image_format: str) -> str | None:
    """The UUID of the image's parent; None for an image without one, and for a VHD, which has its parent's path."""
    if image_format not in ("vdi", "vmdk"):
        return None
    from synvirt.disks import vdi
    from synvirt.disks.vmdk import reader as vmdk

    with files.opened(file, root) as reader:
        if image_format == "vmdk":
            described = vmdk.described(reader, file.name)
            return uuid_of(described.parent_uuid) if described is not None else None
        header = vdi.read_header(reader, file.name)
    return header.parent_uuid if header.kind is vdi.Kind.DIFFERENCING else None


def _medium_file(folder: Folder, machine: Machine, uuid: str, *, is_parent: bool) -> FileRange:
    """The medium's file by the registry, else by its UUID. A parent must have its UUID, as another image of the same name would
    give a mixture of two disks; and no medium is the image with the UUID of another one."""
    medium = machine.media.get(uuid)
    if medium is not None and medium.encrypted:
        raise UnsupportedFormat(
            f"medium {uuid} is encrypted", hint="Remove the machine's disk encryption in VirtualBox, then import it again."
        )
    file = folder.find_written(medium.location) if medium is not None and medium.location else None
    its_own = None if file is None else _uuid_in(file, folder.root)
    if its_own not in (None, uuid) and (is_parent or its_own in machine.media):
        file = None
    # Before VirtualBox 4 the registry was in another file; and people rename disks.
    found = file or _by_uuid(folder, uuid)
    if found is None:
        where = f"the file {medium.location!r}" if medium is not None else "not in the media registry"
        raise MalformedArchive(
            f"medium {uuid} is {where}, and no image with that UUID is in {folder.label}",
            hint="Copy the disks, with the folder Snapshots, into the machine's folder under the import root.",
        )
    return found


def _by_uuid(folder: Folder, uuid: str) -> FileRange | None:
    """An image with the UUID in its header; or as its name, as snapshots have, if its header has none."""
    names = [*folder.names(), *folder.names("Snapshots")]
    images = [name for name in names if name.lower().endswith((".vdi", ".vmdk", ".vhd"))]
    for name in sorted(images, key=lambda name: uuid not in name.lower()):
        file = folder.find(name)
        if file is None:
            continue
        its_own = _uuid_in(file, folder.root)
        if its_own == uuid or (its_own is None and uuid in name.lower()):
            return file
    return None


def _uuid_in(file: FileRange, root: Root) -> str | None:
    """The UUID in a VDI's header, or in a VMDK's descriptor; None: it has none there, or cannot be read. The first bytes say
    what it is: VirtualBox makes images in files of any name, and a guest can write such a line into its fixed VHD."""
    from synvirt.disks.vdi import read_header

    try:
        with files.opened(file, root) as reader:
            found_format = image_format(reader)
            if found_format == "vdi":
                return read_header(reader, file.name).uuid
            if found_format != "vmdk":
                return None
            begin = bytes_of(reader, 0, min(_DESCRIPTOR_BYTES, reader.size))
    except SynvirtError:
        return None
    found = _UUID_LINE.search(begin)
    return None if found is None else found[1].decode().lower()
