"""OVA: an OVF package as one tar archive (`members`)."""

from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from synvirt.disks.roots import HOST, Root
from synvirt.model.kinds import OfflineKind
from synvirt.model.machine import VmManifest
from synvirt.offline import OpenedDisk
from synvirt.offline.ovf import package as ovf_package
from synvirt.offline.ovf.members import is_ova, opened_archive


@dataclass(frozen=True, slots=True)
class OvaArchive:
    """`vm`: the selected VM of a package with several (see `several`)."""

    kind: ClassVar[OfflineKind] = OfflineKind.OVA_ARCHIVE
    vm: str | None = None

    def of(self, vm: str) -> "OvaArchive":
        return OvaArchive(vm)

    def probe(self, path: Path, head: bytes, root: Root = HOST) -> bool:
        return is_ova(path, head, root)

    def inspect(self, path: Path, root: Root) -> VmManifest:
        return ovf_package.inspect(opened_archive(path, root, self.vm))

    def open_disk(self, path: Path, root: Root, disk_key: str) -> OpenedDisk:
        return opened_archive(path, root, self.vm).open(disk_key)
