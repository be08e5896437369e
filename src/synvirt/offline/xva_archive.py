"""XVA: a VM as XenServer and XCP-ng export it, one tar archive with ova.xml first; of version 1, a folder (`geneva`)."""

import itertools
from contextlib import closing, suppress
from pathlib import Path
from typing import ClassVar

from synvirt.disks import open_reader, tar
from synvirt.disks.roots import HOST, Root, is_folder, open_file, raw_spec, resolve
from synvirt.disks.specs import XvaSpec
from synvirt.errors import MalformedArchive, NotFound, SynvirtError
from synvirt.model import Disk, OfflineKind, VmManifest
from synvirt.offline import OpenedDisk, concerns, files, geneva, ova_xml, partitions, told_by_disks
from synvirt.offline.files import FileRange, Measured
from synvirt.offline.ova_archive import Members
from synvirt.offline.xml_document import DOCUMENT_MAX_BYTES, local, parse

_DESCRIPTION = "ova.xml"
# xapi writes it first; who packs an archive anew may put it elsewhere, but not behind many thousand pieces of disks.
_MEMBERS_LOOKED_AT = 1000
# Of a disk, to see its partitions: a thousand members more, and the start of a Windows or a Linux system partition.
_LOOKED_AT_BYTES = 512 << 20


class XvaArchive:
    kind: ClassVar[OfflineKind] = OfflineKind.XVA_ARCHIVE

    def probe(self, path: Path, head: bytes, root: Root = HOST) -> bool:
        if not tar.is_tar(head):
            return geneva.probe(path, head, root)
        with suppress(SynvirtError, OSError), closing(open_file(root, str(path))) as archive:
            return any(member.name == _DESCRIPTION for member in itertools.islice(tar.walk(archive), _MEMBERS_LOOKED_AT))
        return path.suffix.lower() == ".xva"

    def inspect(self, path: Path, root: Root) -> VmManifest:
        described = _described(path, root)
        if isinstance(described, geneva.Appliance):
            return described.manifest
        near = _folders(path, root)
        return told_by_disks.completed(described, [_measured(disk, path, root, near) for disk in described.disks])

    def open_disk(self, path: Path, root: Root, disk_key: str) -> OpenedDisk:
        described = _described(path, root)
        manifest = described.manifest if isinstance(described, geneva.Appliance) else described
        disk = next((disk for disk in manifest.disks if disk.key == disk_key), None)
        if disk is None:
            raise NotFound(f"{path.name} has no disk {disk_key!r}")
        if isinstance(described, geneva.Appliance):
            return OpenedDisk(described.disk_spec(disk, root))
        # The digests lie in the archive, a piece each, and the reader checks them: there is no range to check here.
        return OpenedDisk(_spec(disk, path, root))


def _described(path: Path, root: Root) -> VmManifest | geneva.Appliance:
    """What ova.xml says: of an archive, or beside the folders of version 1."""
    if is_folder(root, resolve(root, str(path))) or path.name.lower() == _DESCRIPTION:
        return geneva.of_folder(path, root)
    name = f"{_DESCRIPTION} in {path.name}"
    described = parse(_description(path, root), name)
    if local(described.tag) == geneva.ROOT_TAG:
        return geneva.described(described, name, Members(path, root).find)
    return ova_xml.parse(described, name)


def _spec(disk: Disk, path: Path, root: Root) -> XvaSpec:
    return XvaSpec(over=raw_spec(root, path), folder=disk.key, size_bytes=disk.capacity_bytes, name=path.name)


def _folders(path: Path, root: Root) -> frozenset[str]:
    """The disks that begin near the archive's own beginning: a disk is found by walking over all before it, piece by piece."""
    with files.opened(files.whole_file(path, root), root) as archive:
        return frozenset(member.name.partition("/")[0] for member in itertools.islice(tar.walk(archive), _MEMBERS_LOOKED_AT))


def _measured(disk: Disk, path: Path, root: Root, near: frozenset[str]) -> Measured:
    """Its size is ova.xml's word; its partitions are looked at where that costs no walk over gigabytes."""
    if disk.key not in near:
        return Measured(disk)
    with closing(open_reader(_spec(disk, path, root))) as reader:
        layout = partitions.look(reader, within=_LOOKED_AT_BYTES)
    return Measured(disk, layout, tuple(concerns.of_layout(disk.key, layout)))


def _description(path: Path, root: Root) -> bytes:
    whole = files.whole_file(path, root)
    with files.opened(whole, root) as archive:
        members = itertools.islice(tar.walk(archive), _MEMBERS_LOOKED_AT)
        found = next((member for member in members if member.name == _DESCRIPTION), None)
    if found is None or found.sort is not tar.Sort.FILE:
        raise MalformedArchive(f"{path.name} has no {_DESCRIPTION} among its first {_MEMBERS_LOOKED_AT} members")
    return files.read_all(FileRange(_DESCRIPTION, path, found.offset, found.size), root, DOCUMENT_MAX_BYTES)
