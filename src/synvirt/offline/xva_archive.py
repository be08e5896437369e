"""XVA: a VM as XenServer and XCP-ng export it, one tar archive with ova.xml first."""

import itertools
from contextlib import closing, suppress
from pathlib import Path
from typing import ClassVar

from synvirt.disks import tar
from synvirt.disks.raw import RawReader
from synvirt.disks.specs import RawSpec, XvaSpec
from synvirt.errors import MalformedArchive, NotFound, SynvirtError
from synvirt.model import OfflineKind, VmManifest
from synvirt.offline import OpenedDisk, files, ova_xml
from synvirt.offline.files import FileRange
from synvirt.offline.xml_document import DOCUMENT_MAX_BYTES

_DESCRIPTION = "ova.xml"
# xapi writes it first; who packs an archive anew may put it elsewhere, but not behind many thousand pieces of disks.
_MEMBERS_LOOKED_AT = 1000


class XvaArchive:
    kind: ClassVar[OfflineKind] = OfflineKind.XVA_ARCHIVE

    def probe(self, path: Path, head: bytes) -> bool:
        if not tar.is_tar(head):
            return False
        with suppress(SynvirtError, OSError), closing(RawReader(str(path))) as archive:
            return any(member.name == _DESCRIPTION for member in itertools.islice(tar.walk(archive), _MEMBERS_LOOKED_AT))
        return path.suffix.lower() == ".xva"

    def inspect(self, path: Path, root: Path) -> VmManifest:
        return ova_xml.parse(_description(path, root), f"{_DESCRIPTION} in {path.name}")

    def open_disk(self, path: Path, root: Path, disk_key: str) -> OpenedDisk:
        disk = next((disk for disk in self.inspect(path, root).disks if disk.key == disk_key), None)
        if disk is None:
            raise NotFound(f"{path.name} has no disk {disk_key!r}")
        # The digests lie in the archive, a piece each, and the reader checks them: there is no range to check here.
        return OpenedDisk(
            XvaSpec(over=RawSpec(path=str(path)), folder=disk.key, size_bytes=disk.capacity_bytes, name=path.name)
        )


def _description(path: Path, root: Path) -> bytes:
    whole = files.whole_file(path, root)
    with files.opened(whole, root) as archive:
        members = itertools.islice(tar.walk(archive), _MEMBERS_LOOKED_AT)
        found = next((member for member in members if member.name == _DESCRIPTION), None)
    if found is None or found.sort is not tar.Sort.FILE:
        raise MalformedArchive(f"{path.name} has no {_DESCRIPTION} among its first {_MEMBERS_LOOKED_AT} members")
    return files.read_all(FileRange(_DESCRIPTION, path, found.offset, found.size), root, DOCUMENT_MAX_BYTES)
