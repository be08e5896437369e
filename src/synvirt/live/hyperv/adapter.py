"""Hyper-V hosts and clusters of Windows Server 2016 and later: scripts by WinRM, disks in place by SMB.

    adapter (asyncio, here) ─▶ threads ─▶ hosts      the host, or the nodes of a cluster: the one with a VM
                                            session   one PowerShell session: scripts/*.ps1, parameters as data, JSON back
                                            machines  VMs as manifests, concerns          no I/O
                                            tracking  recovery snapshots, reference points, RCT
                                            journal   those of them that are ours, in the VM's notes   no I/O
                                            places    Windows paths as shares             no I/O
                                            exporting the second way: Hyper-V writes disks to a share
                                            power     off, on, marked

Never run against Windows: docs/platforms/hyper-v.md.
"""

import asyncio
import threading
from collections.abc import Callable, Collection
from typing import Any, TypeVar

import structlog

from synvirt.disks.specs import ChangedSpec, ReaderSpec
from synvirt.errors import CbtUnsupported, VmNotFound
from synvirt.live import About, SnapshotRef, SourceAccess, VmRow
from synvirt.live.hyperv import exporting, machines, power, tracking, ways
from synvirt.live.hyperv.exporting import Exporting
from synvirt.live.hyperv.form import FORM
from synvirt.live.hyperv.hosts import Host, Hosts
from synvirt.machines.texts import whole_number
from synvirt.model.kinds import LiveKind
from synvirt.model.machine import Disk, VmManifest
from synvirt.model.plan import Shutdown
from synvirt.model.sources import SourceCheck

__all__ = ["FORM", "WmiApi"]

log = structlog.get_logger(__name__)

T = TypeVar("T")


class WmiApi:
    """The LiveAdapter of Hyper-V. A VM's id is its GUID; a change id: see `tracking._reference`."""

    kind = LiveKind.WMI_API

    def __init__(self, access: SourceAccess) -> None:
        place, login, self._options = FORM.read(access)
        # A recorder gets each script that was run: its name as a path, its parameters, its answer.
        self._hosts = Hosts(place, login, self._options, access.recorder)
        self._closed = threading.Event()

    async def connect(self) -> None:
        self._closed.clear()
        await asyncio.to_thread(self._hosts.open)

    async def rest(self) -> None:
        """The shells stay open; one that its host has ended is opened again."""
        self._closed.set()
        self._closed = threading.Event()

    async def close(self) -> None:
        self._closed.set()
        await asyncio.shield(asyncio.to_thread(self._hosts.close))

    async def about(self) -> About:
        return await asyncio.to_thread(self._about)

    def _about(self) -> About:
        found = self._hosts.first.run("about")
        versions = [str(one) for one in found["vm_versions"] or () if one]
        allowed = bool(found["administrator"] or found["hyperv_administrator"])
        checks = [
            SourceCheck(
                name="privileges",
                ok=allowed,
                detail=f"{found['user']} may manage Hyper-V"
                if allowed
                else f"{found['user']} is neither in Hyper-V Administrators nor an administrator",
                hint=None if allowed else "add the user to the group Hyper-V Administrators of each host",
            ),
            _share_check(found, named=bool(self._options.shares)),
        ]
        nodes = f", cluster of {len(found['nodes'])}" if found["nodes"] else ""
        version = f"{found['version']} (VM versions up to {versions[-1] if versions else 'not known'}){nodes}"
        return About(f"Hyper-V on {found['name']}, {found['product']}", version, tuple(checks))

    async def supports_warm(self) -> bool:
        return await asyncio.to_thread(self._supports_warm)

    def _supports_warm(self) -> bool:
        versions = [str(one).partition(".")[0] for one in self._hosts.first.run("about")["vm_versions"] or () if one]
        return any((whole_number(one) or 0) >= machines.TRACKED_VERSION for one in versions)

    async def list_vms(self) -> list[VmRow]:
        return await asyncio.to_thread(self._hosts.list_vms)

    async def inspect(self, vm_id: str) -> VmManifest:
        def inspected(host: Host) -> VmManifest:
            found = host.run("inspect", VmId=vm_id)
            return machines.manifest(vm_id, found, ways.read_by(host, found["drives"]), node=host.node)

        return await self._at(vm_id, inspected)

    async def guest_facts(self, vm_id: str) -> dict[str, str]:
        return await self._at(vm_id, lambda host: machines.facts_of_guest(host.run("inspect", VmId=vm_id)))

    # ── snapshots and bytes ──────────────────────────────────────────────────────────────────────────────────────────

    async def enable_cbt(self, vm_id: str, disks: Collection[str]) -> None:
        """Hyper-V tracks changes from the first reference point on: this checks that it can."""
        manifest = await self.inspect(vm_id)
        reasons = [disk.cbt_reason for disk in manifest.disks if disk.key in disks and disk.cbt_reason]
        if reasons:
            raise CbtUnsupported(f"{manifest.name}: {'; '.join(dict.fromkeys(reasons))}")

    async def snapshot(self, vm_id: str, name: str, disks: Collection[str] | None = None) -> SnapshotRef:
        """Of the whole VM, as Hyper-V cannot do less."""

        def taken(host: Host) -> SnapshotRef:
            return tracking.take(host, vm_id, name, lambda state: ways.exports_of(host, state["drives"]) is None)

        return await self._at(vm_id, taken)

    async def open_disk(self, vm_id: str, snapshot: SnapshotRef, disk: Disk, since: str | None) -> ReaderSpec:
        return await self._at(vm_id, lambda host: self._opened(host, vm_id, snapshot, disk, since))

    def _opened(self, host: Host, vm_id: str, snapshot: SnapshotRef, disk: Disk, since: str | None) -> ReaderSpec:
        state, drive = tracking.drive_in(host, vm_id, snapshot, disk.key)
        if since is not None:
            since = tracking.snapshot_of(vm_id, drive, since)
        exports = ways.exports_of(host, state["drives"])
        # A VM that is off has no snapshot, if it was decided then to read its files in place.
        if exports is not None and snapshot.id != tracking.OFF:
            return Exporting(host, exports, vm_id, self._closed).opened(snapshot, disk, since)
        whole = host.shares.reader(drive["chain"], frozen=snapshot.id != tracking.OFF)
        if since is None:
            return whole
        return ChangedSpec(over=whole, areas=tracking.areas(host, vm_id, state, drive, since))

    async def release(self, vm_id: str, name: str) -> None:
        await self._at(vm_id, lambda host: tracking.release(host, vm_id, name))

    async def cleanup(self, vm_id: str, name: str) -> None:
        try:
            await self._at(vm_id, lambda host: tracking.cleanup(host, vm_id, name))
        except VmNotFound:
            log.info("a VM no longer exists, and neither does what was made of it", vm=vm_id)
            # Nothing on a share is removed unless we remove it.
            if (exports := self._hosts.first.exports) is not None:
                await asyncio.to_thread(exporting.remove, exports, exports.path(name))

    # ── off, on, marked ──────────────────────────────────────────────────────────────────────────────────────────────

    async def last_start(self, vm_id: str) -> str:
        return await self._at(vm_id, lambda host: power.last_start(host, vm_id))

    async def shutdown(self, vm_id: str, manner: Shutdown = "polite", timeout_s: float | None = None) -> None:
        off_s = self._options.shutdown_timeout_s if timeout_s is None else timeout_s
        await self._at(vm_id, lambda host: power.shut_down(host, vm_id, off_s, manner))

    async def power_on(self, vm_id: str) -> None:
        await self._at(vm_id, lambda host: power.power_on(host, vm_id))

    async def mark(self, vm_id: str, note: str) -> None:
        await self._at(vm_id, lambda host: power.mark(host, vm_id, note))

    async def _at(self, vm_id: str, use: Callable[[Host], T]) -> T:
        """Calls `use` with the host that has the VM."""
        return await asyncio.to_thread(lambda: self._hosts.at(vm_id, use))


def _share_check(found: Any, *, named: bool) -> SourceCheck:
    if found["administrator"] or named:
        how = "named shares" if named else "administrative shares"
        return SourceCheck(name="shares", ok=True, detail=f"disks are read by {how}")
    return SourceCheck(
        name="shares",
        ok=True,
        warning=True,
        detail=f"{found['user']} is not an administrator of {found['name']}: administrative shares (D$) are closed to it",
        hint="share the folders of the disks for this user, and name them in options.shares: D:\\VMs=vms",
    )
