"""An OVF package as files: its folder, or the path of its .ovf."""

from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from synvirt.disks.roots import HOST, Root
from synvirt.model.kinds import OfflineKind
from synvirt.model.machine import VmManifest
from synvirt.offline import OpenedDisk, files
from synvirt.offline.ovf import package as ovf_package
from synvirt.offline.ovf.opening import Opened, description_name


@dataclass(frozen=True, slots=True)
class OvfFolder:
    """`vm`: the selected VM of a package with several (see `several`)."""

    kind: ClassVar[OfflineKind] = OfflineKind.OVF_FOLDER
    vm: str | None = None

    def of(self, vm: str) -> "OvfFolder":
        return OvfFolder(vm)

    def probe(self, path: Path, head: bytes, root: Root = HOST) -> bool:
        if files.holds(path, ".ovf", root):
            return True
        # UTF-16 has a NUL in every character.
        return files.has_suffix(path.name, ".ovf") and b"Envelope" in head.replace(b"\0", b"")

    def inspect(self, path: Path, root: Root) -> VmManifest:
        return ovf_package.inspect(self._opened(path, root))

    def open_disk(self, path: Path, root: Root, disk_key: str) -> OpenedDisk:
        return self._opened(path, root).open(disk_key)

    def _opened(self, path: Path, root: Root) -> Opened:
        package = _Folder(path, root)
        return Opened(package, package.chosen or description_name(package), self.vm)


class _Folder(files.Folder):
    """The folder as the files of a package: an image among them may name further files under the root."""

    @property
    def inner_root(self) -> Root | None:
        return self.root
