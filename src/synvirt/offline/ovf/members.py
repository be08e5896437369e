"""The members of an OVA as the files of a package: it is one tar archive, its members in any order, folders and tar dialect."""

import contextlib
import itertools
from collections.abc import Iterable, Mapping
from functools import cached_property
from pathlib import Path

from synvirt.disks import tar
from synvirt.disks.roots import HOST, Root, open_file
from synvirt.errors import MalformedArchive, SynvirtError
from synvirt.nearest import by_folded, folded
from synvirt.offline import OpenedDisk, files
from synvirt.offline.files import FileRange
from synvirt.offline.ovf.opening import Opened, description_name

# The standard puts a description first, and at worst it is last; probing looks at this many headers.
_PROBED_MEMBERS = 1000


def is_ova(path: Path, head: bytes, root: Root = HOST) -> bool:
    """Whether the file at `path` is an OVA; `head`: its first bytes. Never raises."""
    if not tar.is_tar(head):
        return False
    with contextlib.suppress(SynvirtError, OSError), contextlib.closing(open_file(root, str(path))) as archive:
        return any(_is_description(member) for member in itertools.islice(tar.walk(archive), _PROBED_MEMBERS))
    # Damaged, but an OVA by its name: then `inspect` says what is wrong.
    return path.suffix.lower() == ".ova"


def disks(path: Path, root: Root) -> Mapping[str, OpenedDisk]:
    """All disks of the OVA's only machine by their keys, as its importer has them. MalformedArchive, UnsupportedFormat."""
    opened = opened_archive(path, root, None)
    return {key: opened.open(key) for key in opened.disks}


def opened_archive(path: Path, root: Root, vm: str | None) -> Opened:
    """The package in the archive. `vm`: one machine of several. MalformedArchive, UnsupportedFormat, VmNotFound."""
    package = Members(path, root)
    return Opened(package, description_name(package), vm)


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
        """The member of that name, else the one of another spelling (see `nearest.folded`), as a range of the archive; None,
        where it is missing. MalformedArchive, where it is no file."""
        found = name if name in self._members else self._by_folded.get(folded(name))
        if found is None:
            return None
        member = self._members[found]
        if member.sort is not tar.Sort.FILE:
            raise MalformedArchive(f"{found!r} is a {member.sort.value} in {self.label}, not a file")
        return FileRange(found, self._path, member.offset, member.size)

    @cached_property
    def _by_folded(self) -> Mapping[str, str | None]:
        return by_folded(self._members)


def _is_description(member: tar.Member) -> bool:
    return member.sort is tar.Sort.FILE and files.has_suffix(member.name, ".ovf")
