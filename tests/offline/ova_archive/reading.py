"""Helpers of the tests of OvaArchive: what it finds in an archive, and what it opens."""

from pathlib import Path

from synvirt.disks.specs import ImageSpec, RawSpec
from synvirt.model.machine import VmManifest
from synvirt.offline import OpenedDisk
from synvirt.offline.ovf.archive import OvaArchive
from synvirt.offline.registry import detect

OVA = OvaArchive()


def inspected(path: Path) -> VmManifest:
    assert detect(path, path.parent).kind == "ova_archive"
    return OVA.inspect(path, path.parent)


def opened(path: Path, key: str = "vmdisk1") -> OpenedDisk:
    return OVA.open_disk(path, path.parent, key)


def concern_ids(vm: VmManifest) -> set[str]:
    return {concern.id for concern in vm.concerns}


def member_bytes(path: Path, disk: OpenedDisk) -> bytes:
    """The bytes of the archive that the disk's spec points at."""
    spec = disk.reader.over if isinstance(disk.reader, ImageSpec) else disk.reader
    assert isinstance(spec, RawSpec)
    assert spec.length is not None
    with path.open("rb") as file:
        file.seek(spec.offset)
        return file.read(spec.length)
