"""Way `nfs`: a vm_snapshot on Prism Element, its files read from their container's NFS export. Blocking code.

A snapshot names each disk's file twice: `/CONTAINER/.acropolis/vmdisk/ID`, and its frozen copy,
`/CONTAINER/.snapshot/…/.acropolis/vmdisk/ID`. A change id is the snapshot's id and that second path: changed_regions compares
two such paths, so a snapshot stays until a later one is read.
"""

import time
from collections.abc import Collection, Iterable, Mapping
from typing import Any, Final

import structlog

from synvirt.disks.nfs import knock
from synvirt.disks.specs import NfsSpec, ReaderSpec
from synvirt.errors import AuthFailed, CbtReset, Internal, SnapshotFailed, SourceUnreachable
from synvirt.live import SnapshotRef
from synvirt.live.nutanix.allow_list import AllowList
from synvirt.live.nutanix.element import Element
from synvirt.live.nutanix.form import Options
from synvirt.live.nutanix.machines import FoundVm
from synvirt.live.nutanix.prism import Refused, dig, listed, text
from synvirt.live.nutanix.regions import laid_over
from synvirt.model.machine import Disk

PREFIX: Final = "snapshot:"
_DAY_MS: Final = 86_400_000

log = structlog.get_logger(__name__)


class Snapshots:
    """The way `nfs`: snapshots of Prism Element, read by NFS."""

    def __init__(self, element: Element, options: Options, allow_list: AllowList) -> None:
        self._element, self._options, self._allow_list = element, options, allow_list

    def closed(self, containers: Collection[str]) -> str | None:
        """Why this host cannot mount these containers' exports; None: it can, or may add itself to their lists."""
        if self._options.extend_allow_list:
            return None
        for container in containers:
            try:
                knock(self._spec(f"/{container}/", "", None, container))
            except (AuthFailed, Internal, SourceUnreachable) as error:
                return error.detail
        return None

    def began(self, vm_id: str, stem: str) -> bool:
        """Whether there is a snapshot of this job, with any number."""
        return any(text(one, "status", "name").rpartition("-")[0] == stem for one in self._named(vm_id))

    def take(self, vm: FoundVm, name: str, disks: Collection[str] | None) -> SnapshotRef:
        """Makes the snapshot, or finds the one of that name; with the change ids of these disks (None: all)."""
        if self._options.extend_allow_list:
            self._allow_list.note(name)
        found = [one for one in self._named(vm.id) if text(one, "status", "name") == name]
        snapshot_id = text(found[0], "metadata", "uuid") if found else self._made(vm, name)
        files = self._files(self._element.snapshot(snapshot_id), vm.id)
        wanted = {disk.key for disk in vm.disks} if disks is None else set(disks)
        return SnapshotRef(
            id=PREFIX + snapshot_id,
            change_ids={key: f"{snapshot_id} {path}" for key, path in files.items() if key in wanted},
        )

    def _made(self, vm: FoundVm, name: str) -> str:
        """With a quiet file system where the guest's tools can; else as after a crash."""
        expires_ms = int(time.time() * 1000) + self._options.expire_days * _DAY_MS
        if vm.power == "on" and vm.quiescible:
            try:
                snapshot_id = self._element.take(vm.id, name, expires_ms, quiesce=True)
                self._element.snapshot(snapshot_id)
            except SnapshotFailed as error:
                log.warning("the guest could not be quiesced; its snapshot is as after a crash", vm=vm.id, cause=error.detail)
                self.cleanup(vm.id, name)
            else:
                return snapshot_id
        return self._element.take(vm.id, name, expires_ms, quiesce=False)

    def _named(self, vm_id: str) -> list[dict[str, Any]]:
        return [one for one in self._element.snapshots() if text(one, "status", "resources", "entity_uuid") == vm_id]

    def _files(self, snapshot: Mapping[str, Any], vm_id: str) -> dict[str, str]:
        """The files of the VM's disks, by their addresses. The snapshot also has a CD-ROM's file, which is no disk of the
        VM."""
        found: dict[str, str] = {}
        for one in listed(dig(snapshot, "status", "snapshot_file_list")):
            path, kept = text(one, "file_path"), text(one, "snapshot_file_path")
            disk = self._element.virtual_disk(path.rpartition("/")[2])
            if disk is not None and text(disk, "attached_vm_uuid") in ("", vm_id) and kept:
                found[text(disk, "disk_address").lower()] = kept
        return found

    def open(self, vm: FoundVm, snapshot: SnapshotRef, disk: Disk, since: str | None) -> ReaderSpec:
        """A disk of the snapshot as a spec: whole, or what changed since a change id. SnapshotFailed, CbtReset."""
        snapshot_id = snapshot.id.removeprefix(PREFIX)
        path = snapshot.change_ids.get(disk.key, "").partition(" ")[2]
        if not path:
            raise SnapshotFailed(f"snapshot {snapshot_id} of {vm.name} has no disk {disk.key}")
        self._element.snapshot(snapshot_id)  # raises SnapshotFailed, where it is gone
        spec = self._spec(path, disk.label, disk.capacity_bytes, f"{disk.key} of {vm.name}")
        read = self._whole(spec, path, disk) if since is None else self._delta(spec, path, disk, since, vm)
        self._let_in(spec)
        return read

    def _whole(self, spec: NfsSpec, path: str, disk: Disk) -> ReaderSpec:
        try:
            return laid_over(spec, disk.capacity_bytes, self._element.regions(path, None), delta=False)
        except Refused as error:
            log.warning("the cluster does not say what is allocated: the whole disk is read", disk=disk.key, cause=error.detail)
            return spec

    def _delta(self, spec: NfsSpec, path: str, disk: Disk, since: str, vm: FoundVm) -> ReaderSpec:
        before = since.partition(" ")[2]
        if before.rpartition("/")[2] != path.rpartition("/")[2]:
            raise CbtReset(f"disk {disk.key} of {vm.name} is not the same file as before: the whole disk is compared once")
        try:
            return laid_over(spec, disk.capacity_bytes, self._element.regions(path, before), delta=True)
        except Refused as error:
            raise CbtReset(
                f"disk {disk.key} of {vm.name}: {error.detail}",
                hint="the snapshot it was compared with is gone: the whole disk is compared once",
            ) from error

    def _spec(self, path: str, label: str, size: int | None, name: str) -> NfsSpec:
        parts = path.split("/")
        if len(parts) < 3 or parts[0] or not parts[1] or ".." in parts:
            raise Internal(f"{self._element.host} names a file outside of any container: {path[:200]!r}")
        options = self._options
        return NfsSpec(
            host=options.nfs_host or self._element.host,
            export=f"/{parts[1]}",
            path="/" + "/".join(parts[2:]) if parts[2] else "",
            size_bytes=size,
            name=name or label,
            nfs_port=options.nfs_port,
            mount_port=options.mount_port,
        )

    def _let_in(self, spec: NfsSpec) -> None:
        """Checks the access here, where it can be repaired, instead of failing in the worker an hour later."""
        try:
            knock(spec)
        except AuthFailed:
            if not self._options.extend_allow_list:
                raise
            self._allow_list.extend(spec.export.strip("/"))
            knock(spec)

    def cleanup(self, vm_id: str, name: str) -> None:
        """Removes the VM's snapshot of that name; after the last one that this host reads, it restores the allow-lists."""
        of_vms = self._element.snapshots()
        for one in of_vms:
            if text(one, "status", "name") == name and text(one, "status", "resources", "entity_uuid") == vm_id:
                self._element.remove(text(one, "metadata", "uuid"))
        self._allow_list.forget(name)
        # And as it is now: another job may have begun since, and found this host on the list.
        if not self._others(of_vms, name) and not self._others(self._element.snapshots(), name):
            self._allow_list.restore()

    def _others(self, of_vms: Iterable[Mapping[str, Any]], name: str) -> bool:
        """Whether this host reads a snapshot beside those of that name. Those of other hosts have their own entries."""
        read_here = self._allow_list.read_here()
        return any(one in read_here and one != name for one in (text(each, "status", "name") for each in of_vms))
