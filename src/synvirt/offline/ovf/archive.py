"""OVA: an OVF package as one tar archive, its members in any order, folders and tar dialect."""

import contextlib
import itertools
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from synvirt.disks import tar
from synvirt.disks.roots import HOST, Root, open_file
from synvirt.errors import MalformedArchive, SynvirtError
from synvirt.model.kinds import OfflineKind
from synvirt.model.machine import VmManifest
from synvirt.offline import OpenedDisk, files
from synvirt.offline.files import FileRange
from synvirt.offline.ovf import package as ovf_package

# The standard puts a description first, and at worst it is last; probing looks at this many headers.
_PROBED_MEMBERS = 1000


@dataclass(frozen=True, slots=True)
class OvaArchive:
    """`vm`: the selected VM of a package with several (see `several`)."""

    kind: ClassVar[OfflineKind] = OfflineKind.OVA_ARCHIVE
    vm: str | None = None

    def of(self, vm: str) -> "OvaArchive":
        return OvaArchive(vm)

    def probe(self, path: Path, head: bytes, root: Root = HOST) -> bool:
        if not tar.is_tar(head):
            return False
        with contextlib.suppress(SynvirtError, OSError), contextlib.closing(open_file(root, str(path))) as archive:
            return any(_is_description(member) for member in itertools.islice(tar.walk(archive), _PROBED_MEMBERS))
        # Damaged, but an OVA by its name: then `inspect` says what is wrong.
        return path.suffix.lower() == ".ova"

    def inspect(self, path: Path, root: Root) -> VmManifest:
        package = Members(path, root)
        return ovf_package.inspect(package, ovf_package.description_name(package), self.vm)

    def open_disk(self, path: Path, root: Root, disk_key: str) -> OpenedDisk:
        package = Members(path, root)
        return ovf_package.open_disk(package, ovf_package.description_name(package), disk_key, self.vm)


class Members:
    """The members of a tar archive as the files of a package."""

    # An image inside an archive has no neighbour files that it could name.
    inner_root: Root | None = None

    def __init__(self, path: Path, root: Root) -> None:
        self.label = path.name
        self.root = root
        self._path = path
        with files.opened(files.whole_file(path, root), root) as archive:
            self._members = tar.index(archive)

    def names(self) -> Iterable[str]:
        return (member.name for member in self._members.values() if member.sort is tar.Sort.FILE)

    def find(self, name: str) -> FileRange | None:
        """The member of that name as a range of the archive; None, where it is missing. MalformedArchive, where it is no
        file."""
        member = self._members.get(name)
        if member is None:
            return None
        if member.sort is not tar.Sort.FILE:
            raise MalformedArchive(f"{name!r} is a {member.sort.value} in {self.label}, not a file")
        return FileRange(name, self._path, member.offset, member.size)


def _is_description(member: tar.Member) -> bool:
    return member.sort is tar.Sort.FILE and files.has_suffix(member.name, ".ovf")
