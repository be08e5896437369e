"""Way `iscsi`: a recovery point on Prism Central, its disks cloned into a volume group that this host reads. Blocking code.

    recovery point ─▶ volume group of our own ─▶ a disk in it for each one to read ─▶ our initiator attached ─▶ LUN

The volume group is removed when the pass is read; the recovery point stays until a later one was compared with it.
"""

from collections.abc import Collection, Mapping
from datetime import UTC, datetime, timedelta
from typing import Any, Final

import structlog

from synvirt.disks.specs import IscsiSpec, ReaderSpec
from synvirt.errors import AuthFailed, CbtReset, SnapshotFailed, SourceUnreachable
from synvirt.live import SnapshotRef
from synvirt.live.nutanix.central import Central, DiskPoint
from synvirt.live.nutanix.form import Options
from synvirt.live.nutanix.machines import FoundVm
from synvirt.live.nutanix.making import Making, Noted
from synvirt.live.nutanix.prism import Absent, Refused, dig, listed, number, quoted, text
from synvirt.live.nutanix.regions import laid_over
from synvirt.model.machine import Disk

PREFIX: Final = "recovery-point:"
ISCSI_PORT: Final = 3260
TARGET_PREFIX: Final = "iqn.2010-06.com.nutanix:"

log = structlog.get_logger(__name__)


class Volumes:
    """The way `iscsi`: recovery points of Prism Central, read by iSCSI."""

    def __init__(self, central: Central, options: Options, making: Making) -> None:
        self._central, self._options, self._making = central, options, making

    def closed(self, vm: FoundVm) -> str | None:
        """Why this way is closed; None: it seems to be open."""
        for namespace in ("dataprotection", "volumes"):
            if self._central.serves(namespace) is None:
                return f"{self._central.host} serves no v4 API of {namespace}"
        try:
            self.portal(vm.cluster_id)
        except SourceUnreachable as error:
            return error.detail
        return None

    def portal(self, cluster_id: str) -> str:
        """HOST:PORT of the cluster's iSCSI data services. SourceUnreachable, where it has none."""
        address = self._options.data_services
        if address is None:
            found = dig(self._central.cluster(cluster_id), "network", "externalDataServiceIp")
            address = text(found, "ipv4", "value") or text(found, "ipv6", "value")
        if not address:
            raise SourceUnreachable(
                "the cluster has no data services address for iSCSI", hint="set one in its details, or options.data_services"
            )
        host, colon, port = address.rpartition(":")
        if colon and port.isdecimal() and (":" not in host or host.startswith("[")):
            return address
        return f"[{address}]:{ISCSI_PORT}" if ":" in address else f"{address}:{ISCSI_PORT}"

    def take(self, vm: FoundVm, name: str, disks: Collection[str] | None) -> SnapshotRef:
        """Makes the recovery point, or finds the one of that name; with the change ids of these disks (None: all)."""
        points = self._central.points(name) or self._made(vm, name)
        point = self._central.point(text(points[0], "extId"))
        known = self._disks_of(point, vm)
        wanted = set(known) if disks is None else set(disks)
        return SnapshotRef(
            id=PREFIX + text(point, "extId"), change_ids={key: one.id for key, one in known.items() if key in wanted}
        )

    def _made(self, vm: FoundVm, name: str) -> list[dict[str, Any]]:
        expires = (datetime.now(UTC) + timedelta(days=self._options.expire_days)).strftime("%Y-%m-%dT%H:%M:%SZ")
        if vm.power == "on" and vm.quiescible:
            try:
                self._take(vm, name, expires, quiesce=True)
            except SnapshotFailed as error:
                log.warning("the guest could not be quiesced; its snapshot is as after a crash", vm=vm.id, cause=error.detail)
                self._remove_points(name)
            else:
                return self._found(name)
        self._take(vm, name, expires, quiesce=False)
        return self._found(name)

    def _take(self, vm: FoundVm, name: str, expires: str, *, quiesce: bool) -> None:
        self._central.take(vm.id, name, expires, quiesce=quiesce, noted=Noted(self._making, name))
        self._making.forget(name)

    def _found(self, name: str) -> list[dict[str, Any]]:
        found = self._central.points(name)
        if not found:
            raise SnapshotFailed(f"{self._central.host} made recovery point {name} and does not list it")
        return found

    def _disks_of(self, point: Mapping[str, Any], vm: FoundVm) -> dict[str, DiskPoint]:
        """By the disks' keys. A disk that was added since the VM was inspected is not in the result."""
        by_id = {id_: disk.key for disk in vm.disks for id_ in (disk.id, disk.file_id) if id_}
        found: dict[str, DiskPoint] = {}
        for held in listed(point.get("vmRecoveryPoints")):
            if text(held, "vmExtId") != vm.id:
                continue
            for one in listed(held.get("diskRecoveryPoints")):
                key = by_id.get(text(one, "diskExtId"))
                if key is not None:
                    found[key] = DiskPoint(text(point, "extId"), text(held, "extId"), text(one, "diskRecoveryPointExtId"))
        return found

    def began(self, name: str) -> bool:
        """Whether there is a recovery point of this name."""
        return self._central.serves("dataprotection") is not None and bool(self._central.points(name))

    # ── reading ──────────────────────────────────────────────────────────────────────────────────────────────────────

    def open(self, vm: FoundVm, name: str, snapshot: SnapshotRef, disk: Disk, since: str | None) -> ReaderSpec:
        """A disk of the recovery point as a spec: whole, or what changed since a change id. SnapshotFailed, CbtReset."""
        self._central.point(snapshot.id.removeprefix(PREFIX))  # raises SnapshotFailed, where it is gone
        point = DiskPoint.of(snapshot.change_ids.get(disk.key, ""))
        if point is None:
            raise SnapshotFailed(f"{snapshot.id} of {vm.name} has no disk {disk.key}")
        before = None if since is None else DiskPoint.of(since)
        if since is not None and before is None:
            raise CbtReset(f"disk {disk.key} of {vm.name}: {since[:100]!r} is not a recovery point of its disk")
        # First of all: the older the earlier recovery point, the likelier it is that its schedule removed it.
        asked = _Asked(self._central, point, before, disk, vm)
        group_id = self._group(vm, name)
        lun = self._lun(group_id, disk, point)
        spec = IscsiSpec(
            portal=self.portal(vm.cluster_id),
            target=self._target(group_id),
            lun=lun,
            initiator=self._options.initiator,
            size_bytes=disk.capacity_bytes,
            name=f"{disk.key} of {vm.name}",
        )
        return asked.laid_over(spec)

    def _groups(self, name: str) -> list[str]:
        found = self._central.all("volumes", "config/volume-groups", "list volume groups", filter=f"name eq '{name}'")
        return [text(one, "extId") for one in found if one.get("name") == name]

    def _group(self, vm: FoundVm, name: str) -> str:
        if found := self._groups(name):
            # A killed service had not attached its initiator yet.
            return found[0] if self._clients(found[0]) else self._opened(found[0], vm)
        wanted = {
            "$objectType": "volumes.v4.config.VolumeGroup",
            "name": name,
            "description": "SynVirt reads a recovery point's disks",
            "clusterReference": vm.cluster_id,
            "sharingStatus": "NOT_SHARED",
            "usageType": "TEMPORARY",
        }
        noted = Noted(self._making, name)
        self._central.do("POST", "volumes", "config/volume-groups", "make a volume group", json=wanted, noted=noted)
        self._making.forget(name)
        found = self._groups(name)
        if not found:
            raise SnapshotFailed(f"{self._central.host} made volume group {name} and does not list it")
        return self._opened(found[0], vm)

    def _clients(self, group_id: str) -> list[dict[str, Any]]:
        rest = f"config/volume-groups/{quoted(group_id)}/external-iscsi-attachments"
        return self._central.all("volumes", rest, "list iSCSI clients")

    def _opened(self, group_id: str, vm: FoundVm) -> str:
        client = {
            "$objectType": "volumes.v4.config.IscsiClient",
            "iscsiInitiatorName": self._options.initiator,
            "clusterReference": vm.cluster_id,
        }
        rest = f"config/volume-groups/{quoted(group_id)}/$actions/attach-iscsi-client"
        self._central.do("POST", "volumes", rest, "let this host in by iSCSI", json=client)
        return group_id

    def _lun(self, group_id: str, disk: Disk, point: DiskPoint) -> int:
        rest = f"config/volume-groups/{quoted(group_id)}/disks"
        for _ in range(2):
            there = self._central.all("volumes", rest, "list a volume group's disks")
            for one in there:
                if one.get("description") == disk.key:
                    return number(one.get("index"))
            # From 1 on: some initiators use LUN 0 for the target itself.
            index = max((number(one.get("index")) for one in there), default=0) + 1
            wanted = {
                "$objectType": "volumes.v4.config.VolumeDisk",
                "index": index,
                "description": disk.key,
                "diskDataSourceReference": {
                    "$objectType": "common.v1.config.EntityReference",
                    "extId": point.disk_recovery_point,
                    "entityType": "DISK_RECOVERY_POINT",
                },
            }
            self._central.do("POST", "volumes", rest, f"clone disk {disk.key} of a recovery point", json=wanted)
        raise SnapshotFailed(f"{self._central.host} cloned disk {disk.key} and does not list it")

    def _target(self, group_id: str) -> str:
        group, _ = self._central.get("volumes", f"config/volume-groups/{quoted(group_id)}", "look at a volume group")
        name = text(group, "targetName")
        if not name:
            raise SourceUnreachable(f"{self._central.host} names no iSCSI target of volume group {group_id}")
        return name if name.startswith("iqn.") else TARGET_PREFIX + name

    # ── removal ──────────────────────────────────────────────────────────────────────────────────────────────────────

    def release(self, name: str) -> None:
        """Detaches and removes the volume groups of that name. The recovery point stays."""
        for group_id in self._groups(name):
            rest = f"config/volume-groups/{quoted(group_id)}"
            for client in self._clients(group_id):
                wanted = {
                    "$objectType": "volumes.v4.config.IscsiClientAttachment",
                    "extId": text(client, "extId"),
                    "clusterReference": text(client, "clusterReference"),
                }
                try:
                    action = f"{rest}/$actions/detach-iscsi-client"
                    self._central.do("POST", "volumes", action, "shut this host out again", json=wanted)
                except Absent:
                    continue
            self._central.remove("volumes", rest, "remove a volume group")

    def cleanup(self, name: str) -> None:
        """Removes the volume groups and recovery points of that name."""
        self.release(name)
        self._remove_points(name)

    def _remove_points(self, name: str) -> None:
        for point in self._central.points(name):
            rest = f"config/recovery-points/{quoted(text(point, 'extId'))}"
            self._central.remove("dataprotection", rest, "remove a recovery point")


class _Asked:
    """The changes, requested before the disk is cloned."""

    def __init__(self, central: Central, point: DiskPoint, before: DiskPoint | None, disk: Disk, vm: FoundVm) -> None:
        self._size, self._delta = disk.capacity_bytes, before is not None
        try:
            self._regions = None if not disk.capacity_bytes else list(central.regions(point, before, disk.capacity_bytes))
        except (Refused, AuthFailed, SourceUnreachable) as error:
            # A running guest is moved warm, and this is its first pass: its deltas could not be listed either.
            if isinstance(error, SourceUnreachable) and vm.power == "on":
                raise SourceUnreachable(
                    error.detail, hint="the cluster itself reports what changed: let this host reach TCP 9440 there"
                ) from error
            if before is None:
                log.warning("the cluster does not say what is allocated: the whole disk is read", cause=error.detail)
                self._regions = None
            elif isinstance(error, Refused):
                raise CbtReset(
                    f"disk {disk.key} of {vm.name}: {error.detail}",
                    hint="the recovery point it was compared with is gone: the whole disk is compared once",
                ) from error
            else:
                raise

    def laid_over(self, spec: IscsiSpec) -> ReaderSpec:
        return spec if self._regions is None else laid_over(spec, self._size, self._regions, delta=self._delta)
