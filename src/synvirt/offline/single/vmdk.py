"""A single VMDK: one file, or a descriptor whose extents lie under the import root."""

from pathlib import Path
from typing import ClassVar

from synvirt.disks.roots import HOST, Root
from synvirt.model.kinds import OfflineKind
from synvirt.model.machine import VmManifest
from synvirt.offline import OpenedDisk, files
from synvirt.offline.single import disk as single_disk


class Vmdk:
    """Single VMDK images."""

    kind: ClassVar[OfflineKind] = OfflineKind.VMDK

    def probe(self, path: Path, head: bytes, root: Root = HOST) -> bool:
        return files.format_of(head) == "vmdk"

    def inspect(self, path: Path, root: Root) -> VmManifest:
        return single_disk.inspect(path, root, "vmdk")

    def open_disk(self, path: Path, root: Root, disk_key: str) -> OpenedDisk:
        return single_disk.open_disk(path, root, disk_key, "vmdk")
