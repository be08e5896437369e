"""XVA: a VM that XenServer or XCP-ng exported, one tar archive with ova.xml first; in version 1 a folder (`geneva`).

The archive may be packed by gzip or zstd as a whole (`xe vm-export compress=true`, `compress=zstd`).
"""

import itertools
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from typing import ClassVar

from synvirt.blocks import DiskReader, bytes_of
from synvirt.disks import tar
from synvirt.disks.packed.unpacking import Passing, packing_of
from synvirt.disks.roots import HOST, Root, is_folder, open_file, raw_spec, resolve
from synvirt.disks.specs import Packing, XvaSpec
from synvirt.disks.xva.reader import XvaReader
from synvirt.errors import MalformedArchive, NotFound, SynvirtError, UnsupportedFormat
from synvirt.machines import concerns, partitions
from synvirt.model.kinds import OfflineKind
from synvirt.model.machine import Disk, VmManifest
from synvirt.offline import OpenedDisk, facts_of_disks
from synvirt.offline.facts_of_disks import Measured
from synvirt.offline.ovf.members import Members
from synvirt.offline.xva import geneva, ova_xml
from synvirt.xml_document import DOCUMENT_MAX_BYTES, local, parse

_DESCRIPTION = "ova.xml"
# xapi writes it first. After repacking it may be elsewhere, but not behind many thousand pieces of disks.
_MEMBERS_LOOKED_AT = 1000
# How much of a disk is read for its partitions: a thousand members more, and the start of a Windows or a Linux system
# partition.
_LOOKED_AT_BYTES = 512 << 20
# How much of a packed archive is unpacked: to find ova.xml, and the partitions of a disk that begins right behind it.
_UNPACKED_BYTES = 16 << 20
_UNPACKED_FOR_DISKS_BYTES = 3 << 20
# .xva; or .xva.gz and .xva.zst, if it was packed afterwards.
_SUFFIXES = (".xva", ".xva.gz", ".xva.zst")


class XvaArchive:
    """Archives of XenServer and XCP-ng."""

    kind: ClassVar[OfflineKind] = OfflineKind.XVA_ARCHIVE

    def probe(self, path: Path, head: bytes, root: Root = HOST) -> bool:
        if not tar.is_tar(head) and packing_of(head) is None:
            return geneva.probe(path, head, root)
        with suppress(SynvirtError, OSError), _archive(path, root) as archive:
            return any(member.name == _DESCRIPTION for member in itertools.islice(tar.walk(archive), _MEMBERS_LOOKED_AT))
        return path.name.lower().endswith(_SUFFIXES)

    def inspect(self, path: Path, root: Root) -> VmManifest:
        described = _described(path, root)
        if isinstance(described, geneva.Appliance):
            return described.manifest
        with _archive(path, root, _UNPACKED_FOR_DISKS_BYTES) as archive:
            near = _folders(archive)
            measured = [_measured(disk, archive, path.name, near) for disk in described.disks]
        return facts_of_disks.completed(described, measured)

    def open_disk(self, path: Path, root: Root, disk_key: str) -> OpenedDisk:
        described = _described(path, root)
        manifest = described.manifest if isinstance(described, geneva.Appliance) else described
        disk = next((disk for disk in manifest.disks if disk.key == disk_key), None)
        if disk is None:
            raise NotFound(f"{path.name} has no disk {disk_key!r}")
        if isinstance(described, geneva.Appliance):
            return OpenedDisk(described.disk_spec(disk, root))
        # The archive has a digest for each piece, and the reader checks them: there is no range to check here.
        return OpenedDisk(_spec(disk, path, root))


def _described(path: Path, root: Root) -> VmManifest | geneva.Appliance:
    """The content of ova.xml: in an archive, or beside the folders of version 1."""
    if is_folder(root, resolve(root, str(path))) or path.name.lower() == _DESCRIPTION:
        return geneva.of_folder(path, root)
    name = f"{_DESCRIPTION} in {path.name}"
    text, packing = _description(path, root)
    described = parse(text, name)
    if local(described.tag) == geneva.ROOT_TAG:
        if packing is not None:
            raise UnsupportedFormat(
                f"{path.name} is a {packing} file of an export of version 1", hint="Unpack it, and import what is in it."
            )
        return geneva.described(described, name, Members(path, root).find)
    return ova_xml.parse(described, name)


def _packing(file: DiskReader) -> Packing | None:
    return packing_of(bytes_of(file, 0, min(4, file.size)))


@contextmanager
def _archive(path: Path, root: Root, most_bytes: int = _UNPACKED_BYTES) -> Iterator[DiskReader]:
    """The archive's bytes; of a packed one only the first `most_bytes` (then UnsupportedFormat). HostPathRejected, NotFound."""
    with closing(open_file(root, str(path), shown=path.name)) as file:
        packing = _packing(file)
        yield file if packing is None else Passing(file, packing, path.name, kept_bytes=most_bytes, most_bytes=most_bytes)


def _spec(disk: Disk, path: Path, root: Root) -> XvaSpec:
    with closing(open_file(root, str(path), shown=path.name)) as file:
        packing = _packing(file)
    over = raw_spec(root, path)
    return XvaSpec(over=over, folder=disk.key, size_bytes=disk.capacity_bytes, name=path.name, packing=packing)


def _folders(archive: DiskReader) -> frozenset[str]:
    """The disks that begin near the archive's beginning: to find a disk, all pieces before it are walked over."""
    found: set[str] = set()
    with suppress(UnsupportedFormat):  # of a packed archive no more is read
        found.update(member.name.partition("/")[0] for member in itertools.islice(tar.walk(archive), _MEMBERS_LOOKED_AT))
    return frozenset(found)


def _measured(disk: Disk, archive: DiskReader, name: str, near: frozenset[str]) -> Measured:
    """Its size is from ova.xml; its partitions are read, if that needs no walk over gigabytes."""
    if disk.key not in near:
        return Measured(disk)
    layout = partitions.look(XvaReader(archive, disk.key, disk.capacity_bytes, name), within=_LOOKED_AT_BYTES)
    return Measured(disk, layout, tuple(concerns.of_layout(disk.key, layout)))


def _description(path: Path, root: Root) -> tuple[bytes, Packing | None]:
    """ova.xml, and the packing of its archive."""
    with _archive(path, root) as archive:
        members = itertools.islice(tar.walk(archive), _MEMBERS_LOOKED_AT)
        found = next((member for member in members if member.name == _DESCRIPTION), None)
        if found is None or found.sort is not tar.Sort.FILE:
            raise MalformedArchive(f"{path.name} has no {_DESCRIPTION} among its first {_MEMBERS_LOOKED_AT} members")
        if found.size > DOCUMENT_MAX_BYTES:
            raise MalformedArchive(f"{_DESCRIPTION} in {path.name} has {found.size} bytes; that is not a description of a VM")
        text = bytes_of(archive, found.offset, found.size)
        return text, archive.packing if isinstance(archive, Passing) else None
