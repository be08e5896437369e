"""A single qcow2 image, or the newest of a chain: its backing files lie under the import root."""

from pathlib import Path
from typing import ClassVar

from synvirt.disks.roots import HOST, Root
from synvirt.model.kinds import OfflineKind
from synvirt.model.machine import VmManifest
from synvirt.offline import OpenedDisk, files
from synvirt.offline.single import disk as single_disk


class Qcow2:
    """Single qcow2 images."""

    kind: ClassVar[OfflineKind] = OfflineKind.QCOW2

    def probe(self, path: Path, head: bytes, root: Root = HOST) -> bool:
        return files.format_of(head) == "qcow2"

    def inspect(self, path: Path, root: Root) -> VmManifest:
        return single_disk.inspect(path, root, "qcow2")

    def open_disk(self, path: Path, root: Root, disk_key: str) -> OpenedDisk:
        return single_disk.open_disk(path, root, disk_key, "qcow2")
