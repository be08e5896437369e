"""An importer of the simplest kind there is: a folder of raw files, one a disk. It says it is ovf_folder."""

import hashlib
from pathlib import Path
from typing import ClassVar

from synvirt.disks.roots import HOST, Root
from synvirt.disks.specs import ChecksumSpec, RawSpec
from synvirt.errors import MalformedArchive
from synvirt.model.kinds import OfflineKind
from synvirt.model.machine import Disk, GuestOs, VmManifest
from synvirt.offline import OpenedDisk


class FakeImporter:
    """`family` is the guest's. A file `wrong` in the folder makes its checksums wrong; a file
    `boots-last` makes the last disk the one that the guest boots from."""

    kind: ClassVar[OfflineKind] = OfflineKind.OVF_FOLDER

    def __init__(self, family: str = "linux") -> None:
        self.family = family

    def probe(self, path: Path, head: bytes, root: Root = HOST) -> bool:
        return path.is_dir() and any(path.glob("*.raw"))

    def inspect(self, path: Path, root: Root) -> VmManifest:
        disks = sorted(path.glob("*.raw"))
        if not disks:
            raise MalformedArchive(f"{path.name} holds no disk")
        orders = range(len(disks))[:: -1 if (path / "boots-last").exists() else 1]
        return VmManifest(
            vm_id=path.name,
            name=path.name,
            memory_bytes=512 << 20,
            guest_os=GuestOs.model_validate({"family": self.family}),
            disks=tuple(
                Disk(key=disk.stem, label=disk.stem, capacity_bytes=disk.stat().st_size, boot_order=order + 1)
                for disk, order in zip(disks, orders, strict=True)
            ),
        )

    def open_disk(self, path: Path, root: Root, disk_key: str) -> OpenedDisk:
        disk = path / f"{disk_key}.raw"
        digest = hashlib.sha256(b"" if (path / "wrong").exists() else disk.read_bytes()).hexdigest()
        checksum = ChecksumSpec(path=str(disk), length=disk.stat().st_size, algorithm="sha256", expected=digest, name=disk.name)
        return OpenedDisk(RawSpec(path=str(disk)), (checksum,))
