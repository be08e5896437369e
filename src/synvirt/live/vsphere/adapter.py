"""vSphere's LiveAdapter: asyncio outside, threads inside. `__init__` lists the files.

Without pyvmomi, or with SYNVIRT_MIGRATOR_SKIP_GO_SHIM=1, every method that would ask the platform raises Internal.
"""

import asyncio
from collections.abc import Collection

from synvirt.disks.specs import ReaderSpec
from synvirt.live import About, SnapshotRef, SourceAccess, VmRow
from synvirt.live.keeping_alive import KeptAlive
from synvirt.live.vsphere import changes as vim_changes
from synvirt.live.vsphere import files as vim_files
from synvirt.live.vsphere import guest_facts as vim_guest
from synvirt.live.vsphere import hosts as vim_hosts
from synvirt.live.vsphere import nvram as vim_nvram
from synvirt.live.vsphere import power as vim_power
from synvirt.live.vsphere.form import FORM
from synvirt.live.vsphere.inventory import Inventory
from synvirt.live.vsphere.reading import SnapshotDisks
from synvirt.live.vsphere.session import KEEP_ALIVE_S, Login, VimSession, library
from synvirt.model.kinds import LiveKind
from synvirt.model.machine import Disk, VmManifest
from synvirt.model.plan import Shutdown
from synvirt.model.sources import SourceCheck


class VimApi:
    """The LiveAdapter of vSphere."""

    kind = LiveKind.VIM_API

    def __init__(self, access: SourceAccess) -> None:
        place, credentials, self._options = FORM.read(access)
        login = Login(credentials.user, credentials.password.get_secret_value())
        self._session = VimSession(place, login, self._options, access.recorder)
        self._inventory = Inventory(self._session, self._options)
        self._disks = SnapshotDisks(self._session, self._options, self._inventory)
        self._keeping = KeptAlive(self._session.keep_alive, KEEP_ALIVE_S)

    # ── the session ──────────────────────────────────────────────────────────────────────────────────────────────────

    async def connect(self) -> None:
        await asyncio.to_thread(self._session.open)
        self._keeping.begin()

    async def rest(self) -> None:
        await self._disks.end()
        self._disks.forget()

    async def close(self) -> None:
        await self._disks.end()
        self._keeping.end()
        await asyncio.to_thread(self._session.close)

    # ── the inventory ────────────────────────────────────────────────────────────────────────────────────────────────

    async def about(self) -> About:
        return await asyncio.to_thread(self._inventory.about)

    async def supports_warm(self) -> bool:
        library()
        return True

    async def list_vms(self) -> list[VmRow]:
        return await asyncio.to_thread(self._inventory.vms)

    async def hosts(self) -> list[SourceCheck]:
        return await asyncio.to_thread(vim_hosts.checks, self._session, by_vddk=self._options.vddk_libdir is not None)

    async def inspect(self, vm_id: str) -> VmManifest:
        return await asyncio.to_thread(self._inventory.manifest, vm_id)

    async def guest_facts(self, vm_id: str) -> dict[str, str]:
        return await asyncio.to_thread(lambda: vim_guest.guest_facts(self._inventory.vm(vm_id, vim_guest.WANTED)))

    async def uefi_variables(self, vm_id: str) -> bytes | None:
        return await asyncio.to_thread(self._uefi_variables, vm_id)

    def _uefi_variables(self, vm_id: str) -> bytes | None:
        found = self._inventory.vm(vm_id, ("name", "layoutEx.file", "config.bootOptions"))
        name = next((str(one.name) for one in found.get("layoutEx.file") or () if one.type == "nvram"), None)
        if name is None:
            return None
        content = vim_files.small_file(self._session, vm_id, name, vim_nvram.BYTES_MAX)
        boot = found.get("config.bootOptions")
        return vim_nvram.as_store(content, secure_boot=bool(getattr(boot, "efiSecureBootEnabled", False)))

    # ── snapshots and bytes ──────────────────────────────────────────────────────────────────────────────────────────

    async def enable_cbt(self, vm_id: str, disks: Collection[str]) -> None:
        """For the whole VM, as vSphere has no other way; then it checks that `disks` are tracked."""
        await asyncio.to_thread(vim_changes.enable, self._session, vm_id, disks)

    async def is_tracked(self, vm_id: str) -> bool:
        return await asyncio.to_thread(vim_changes.is_tracked, self._session, vm_id)

    async def disable_cbt(self, vm_id: str) -> None:
        await asyncio.to_thread(vim_changes.disable, self._session, vm_id)

    async def snapshot(self, vm_id: str, name: str, disks: Collection[str] | None = None) -> SnapshotRef:
        """Of the whole VM, as vSphere has no other way."""
        return await asyncio.to_thread(vim_changes.take, self._session, vm_id, name)

    async def open_disk(self, vm_id: str, snapshot: SnapshotRef, disk: Disk, since: str | None) -> ReaderSpec:
        return await self._disks.open(vm_id, snapshot.id, disk, since)

    async def ways_to(self, vm_id: str, snapshot: SnapshotRef, disk: Disk) -> list[str]:
        return await asyncio.to_thread(self._disks.ways_to, vm_id, snapshot.id, disk)

    async def open_by(self, way: str, vm_id: str, snapshot: SnapshotRef, disk: Disk) -> ReaderSpec:
        return await asyncio.to_thread(self._disks.open_by, way, vm_id, snapshot.id, disk)

    async def release(self, vm_id: str, name: str) -> None:
        """Removes the snapshot: its change id stays valid without it."""
        await self.cleanup(vm_id, name)

    async def cleanup(self, vm_id: str, name: str) -> None:
        await self._disks.end()
        await asyncio.to_thread(vim_changes.remove, self._session, vm_id, (name, vim_changes.STUN))

    # ── off, on, marked ──────────────────────────────────────────────────────────────────────────────────────────────

    async def shutdown(self, vm_id: str, manner: Shutdown = "polite", timeout_s: float | None = None) -> None:
        off_s = self._options.shutdown_timeout_s if timeout_s is None else timeout_s
        await asyncio.to_thread(vim_power.shut_down, self._session, vm_id, off_s, manner)

    async def last_start(self, vm_id: str) -> str:
        return await asyncio.to_thread(vim_power.last_start, self._session, vm_id)

    async def power_on(self, vm_id: str) -> None:
        await asyncio.to_thread(vim_power.power_on, self._session, vm_id)

    async def mark(self, vm_id: str, note: str) -> None:
        await asyncio.to_thread(vim_power.mark, self._session, vm_id, note)
