"""Way `image`: an image of each disk of a VM that is off, downloaded whole. Blocking code.

An image is a copy of the disk at the time when it is made. So a running guest is refused, as its disks would be from different
moments.
"""

from collections.abc import Collection
from typing import Final, Protocol

from synvirt.disks.specs import DownloadSpec, ReaderSpec
from synvirt.errors import CbtUnsupported, SnapshotFailed
from synvirt.live import SnapshotRef
from synvirt.live.nutanix.machines import FoundDisk, FoundVm
from synvirt.live.nutanix.making import Making, Noted
from synvirt.live.nutanix.prism import Prism
from synvirt.model.machine import Disk

PREFIX: Final = "images:"


class MakesImages(Protocol):
    """Either Prism. `images`: (id, name, size) of those with that prefix; an incomplete one has another size. `noted`: what
    makes it is noted."""

    @property
    def prism(self) -> Prism: ...
    def images(self, name: str) -> list[tuple[str, str, int]]: ...
    def make_image(self, name: str, vm_id: str, disk_id: str, noted: Noted) -> None: ...
    def remove_image(self, image_id: str) -> None: ...
    def image_path(self, image_id: str) -> str: ...


class Images:
    """The way `image`: snapshots that are images of disks."""

    def __init__(self, maker: MakesImages, making: Making) -> None:
        self._maker, self._making = maker, making

    def take(self, vm: FoundVm, name: str, disks: Collection[str] | None) -> SnapshotRef:
        """Makes an image of each of these disks (None: all). SnapshotFailed, where the VM is not off."""
        if vm.power != "off":
            raise SnapshotFailed(
                f"{vm.name} is {vm.power}, and an image of a running VM's disk is not of one moment",
                hint="move it cold, which shuts it down first; or let the source be read by NFS or iSCSI",
            )
        for disk in vm.disks:
            if disks is None or disk.key in disks:
                self._make(vm, name, disk)
        return SnapshotRef(id=PREFIX + name)

    def _make(self, vm: FoundVm, name: str, disk: FoundDisk) -> None:
        for image_id, _, size in self._of(name, disk.key):
            if size == disk.size:
                return
            self._maker.remove_image(image_id)  # incomplete: a killed service did not see its end
        self._maker.make_image(f"{name} {disk.key}", vm.id, disk.id, Noted(self._making, name))
        self._making.forget(name)

    def _of(self, name: str, key: str) -> list[tuple[str, str, int]]:
        return [one for one in self._maker.images(f"{name} ") if one[1] == f"{name} {key}"]

    def open(self, vm: FoundVm, snapshot: SnapshotRef, disk: Disk, since: str | None) -> ReaderSpec:
        """The image of a disk as a spec. CbtUnsupported for a delta, SnapshotFailed, where the image is gone."""
        if since is not None:
            raise CbtUnsupported(f"disk {disk.key} of {vm.name} is read by an image download, which cannot report changes")
        found = self._of(snapshot.id.removeprefix(PREFIX), disk.key)
        if not found:
            raise SnapshotFailed(f"the image of disk {disk.key} of {vm.name} no longer exists")
        where = self._maker.prism.where
        return DownloadSpec(
            origin=where.origin,
            path=self._maker.image_path(found[0][0]),
            user=where.user,
            password=where.password,
            verify_tls=where.trust.verify,
            fingerprint_sha256=where.trust.fingerprint_sha256,
            size_bytes=disk.capacity_bytes,
            name=f"{disk.key} of {vm.name}",
        )

    def cleanup(self, name: str) -> None:
        """Removes the images of that snapshot."""
        for image_id, _, _ in self._maker.images(f"{name} "):
            self._maker.remove_image(image_id)
