"""pve_api: the virtual machines of a Proxmox VE node or cluster.

    adapter (asyncio, here) ─▶ threads ─▶ cluster   the API on port 8006: the VMs, off and on, marks
                                          reading   their disks, by SSH to the VM's node and NBD through it

The way to read a disk depends on whether its VM runs: docs/platforms/proxmox.md. A VM's id is its number, which is unique in
the cluster. Its node is requested again each time, as it may have moved. A change id is a snapshot's name.
"""

import asyncio
import contextlib
import re
import threading
from collections.abc import Callable, Collection
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Final, TypeVar

from synvirt.disks.specs import ReaderSpec
from synvirt.errors import CbtUnsupported, SourceUnreachable, SynvirtError, VmNotFound
from synvirt.live import About, SnapshotRef, SourceAccess, VmRow
from synvirt.live.folder import private_folder
from synvirt.live.odd import reading
from synvirt.live.proxmox import config as settings
from synvirt.live.proxmox import privileges
from synvirt.live.proxmox.api import Api
from synvirt.live.proxmox.cluster import Cluster
from synvirt.live.proxmox.farewell import Notes
from synvirt.live.proxmox.form import FORM, Login, Options
from synvirt.live.proxmox.freeze import frozen
from synvirt.live.proxmox.guest_facts import guest_facts
from synvirt.live.proxmox.manifest import manifest
from synvirt.live.proxmox.node import Node
from synvirt.live.proxmox.reading import Reading
from synvirt.live.proxmox.seen import Seen
from synvirt.live.ssh import Door
from synvirt.model.kinds import LiveKind
from synvirt.model.machine import Disk, VmManifest
from synvirt.model.plan import Shutdown
from synvirt.model.sources import SourceCheck

__all__ = ["FORM", "Login", "Options", "PveApi", "pve_api"]

NO_SSH: Final = "there is no SSH to its node: the API sends no disks"
SSH_HINT: Final = "give the source ssh_private_key or ssh_password; docs/platforms/proxmox.md has what it must allow"
# The limit for one call. A guest's shutdown has its own.
ANSWER_TIMEOUT_S: Final = 600.0

# `pveversion --verbose`: one package per line.
_VERSIONS: Final = re.compile(r"^(pve-qemu-kvm|qemu-server): ([0-9][0-9A-Za-z.+~-]{0,30})", re.MULTILINE)

T = TypeVar("T")


class PveApi:
    """The LiveAdapter of Proxmox VE."""

    def __init__(self, access: SourceAccess) -> None:
        self._access = access
        place, self._login, self._options = FORM.read(access)
        self._api = Api(place, self._login, self._options, access.recorder)
        self._cluster = Cluster(self._api)
        self._notes = Notes(access.folder / "proxmox")
        self._lock = threading.Lock()
        self._closing = contextlib.ExitStack()
        self._folder: Path | None = None
        self._nodes: dict[str, Node] = {}

    @property
    def kind(self) -> LiveKind:
        return LiveKind.PVE_API

    # ── the session ──────────────────────────────────────────────────────────────────────────────────────────────────

    async def connect(self) -> None:
        await self._asked(self._api.open)

    async def rest(self) -> None:
        """The API's login stays; a ticket that is too old is renewed. Each user logs in to nodes by SSH again."""
        await asyncio.shield(asyncio.to_thread(self._leave_nodes))

    async def close(self) -> None:
        await asyncio.shield(asyncio.to_thread(self._closed))

    def _closed(self) -> None:
        self._leave_nodes()
        self._api.close()

    def _leave_nodes(self) -> None:
        # Readers that use our tunnels end with them, whichever thread has the lock.
        for node in list(self._nodes.values()):
            node.close()
        self._nodes.clear()
        self._folder = None
        self._closing.close()

    async def about(self) -> About:
        return await self._asked(self._about)

    def _about(self) -> About:
        nodes = self._cluster.node_names()
        checks = [*privileges.checks(self._api), *(self._reach(name) for name in nodes), *self._storages(nodes)]
        return About("Proxmox VE", self._cluster.version(), tuple(checks))

    def _reach(self, name: str) -> SourceCheck:
        """With the node's versions, as they may differ within a cluster."""
        try:
            version = f"Proxmox VE {self._cluster.node_version(name)}"
            if not self._login.has_ssh:
                return SourceCheck(name=f"ssh {name}", ok=False, detail=f"{version}; {NO_SSH}", hint=SSH_HINT)
            versions = _VERSIONS.findall(self._node(name).run("version"))
        except SynvirtError as error:
            return SourceCheck(name=f"ssh {name}", ok=False, detail=error.detail, hint=error.hint or SSH_HINT)
        # A VM runs in the QEMU of the time when it was started: its version is in its inspection.
        return SourceCheck(name=f"ssh {name}", ok=True, detail=", ".join((version, *(" ".join(one) for one in versions)))[:200])

    def _storages(self, nodes: Collection[str]) -> list[SourceCheck]:
        """The ways to the disks on each; a storage of one name is the same on all nodes."""
        found: dict[str, tuple[str, list[str]]] = {}
        for node in nodes:
            with contextlib.suppress(SynvirtError):
                for storage, kind in self._cluster.storages(node).items():
                    found.setdefault(storage, (kind, []))[1].append(node)
        return [_storage_check(storage, kind, where) for storage, (kind, where) in sorted(found.items())]

    async def supports_warm(self) -> bool:
        return self._login.has_ssh

    # ── discovery ────────────────────────────────────────────────────────────────────────────────────────────────────

    async def list_vms(self) -> list[VmRow]:
        return await self._asked(self._cluster.vms)

    async def inspect(self, vm_id: str) -> VmManifest:
        return await self._asked(lambda: self._inspect(vm_id), vm_id)

    def _inspect(self, vm_id: str) -> VmManifest:
        with reading(self._cluster.api.host, f"for VM {vm_id[:60]}"):
            return manifest(self._seen(vm_id))

    def _seen(self, vm_id: str) -> Seen:
        """The VM as the cluster shows it. While it runs, also how its disks are reached, which only its QEMU knows."""
        seen = self._cluster.seen(vm_id, None if self._login.has_ssh else NO_SSH)
        if self._is_being_shut_down(seen):
            seen = replace(seen, status={**seen.status, "qmpstatus": "running"})
        if not self._login.has_ssh or seen.power_state != "on":
            return seen
        try:
            return replace(seen, way=self._reading(vm_id).way())
        except SynvirtError:
            return seen

    def _is_being_shut_down(self, seen: Seen) -> bool:
        """Whether `shutdown` has stopped the guest, and a service was killed before it was off. It counts as on: nobody has
        paused it, and `shutdown` goes on with it."""
        stopped = self._notes.stopped(seen.vm_id)
        if stopped is None or seen.status.get("status") != "running" or seen.power_state != "suspended":
            return False
        return stopped.last_start == self._cluster.last_start(dict(seen.row))

    async def guest_facts(self, vm_id: str) -> dict[str, str]:
        return await self._asked(lambda: guest_facts(self._cluster.agent_of(vm_id)), vm_id)

    async def uefi_variables(self, vm_id: str) -> bytes | None:
        return await self._asked(lambda: self._reading(vm_id).uefi_variables(f"synvirt-variables-{vm_id}"), vm_id)

    # ── change tracking and snapshots ────────────────────────────────────────────────────────────────────────────────

    async def enable_cbt(self, vm_id: str, disks: Collection[str]) -> None:
        """Nothing is switched on, as each snapshot makes its bitmaps. The VM's facts show whether it can."""
        found = await self.inspect(vm_id)
        reasons = [disk.cbt_reason for disk in found.disks if disk.key in disks and disk.cbt_reason is not None]
        if reasons:
            raise CbtUnsupported(f"{found.name}: {'; '.join(dict.fromkeys(reasons))}")

    async def snapshot(self, vm_id: str, name: str, disks: Collection[str] | None = None) -> SnapshotRef:
        return await self._asked(lambda: self._reading(vm_id).snapshot(name, disks), vm_id)

    async def open_disk(self, vm_id: str, snapshot: SnapshotRef, disk: Disk, since: str | None) -> ReaderSpec:
        return await self._asked(lambda: self._reading(vm_id).open(snapshot.id, disk.key, since), vm_id)

    async def release(self, vm_id: str, name: str) -> None:
        await self._unless_gone(lambda: self._reading(vm_id).release(name), vm_id)

    async def cleanup(self, vm_id: str, name: str) -> None:
        await self._unless_gone(lambda: self._reading(vm_id).cleanup(name), vm_id)

    # ── off, on, moved ───────────────────────────────────────────────────────────────────────────────────────────────

    async def last_start(self, vm_id: str) -> str:
        return await self._asked(lambda: self._cluster.last_start(self._cluster.row(vm_id)), vm_id)

    async def shutdown(self, vm_id: str, manner: Shutdown = "polite", timeout_s: float | None = None) -> None:
        off_s = self._options.shutdown_timeout_s if timeout_s is None else timeout_s
        await self._asked(lambda: self._reading(vm_id).shut_down(off_s, manner), vm_id, limit_s=off_s + ANSWER_TIMEOUT_S)

    async def power_on(self, vm_id: str) -> None:
        await self._asked(lambda: self._power_on(vm_id), vm_id)

    def _power_on(self, vm_id: str) -> None:
        self._cluster.start(vm_id)
        if self._login.has_ssh:  # only by SSH may it have been stopped
            self._reading(vm_id).resume()

    async def mark(self, vm_id: str, note: str) -> None:
        """A VM that is gone needs no mark, as it cannot start."""
        await self._unless_gone(lambda: self._cluster.mark(vm_id, note), vm_id)

    # ── helpers ──────────────────────────────────────────────────────────────────────────────────────────────────────

    def _reading(self, vm_id: str) -> Reading:
        row = self._cluster.row(vm_id)
        if not self._login.has_ssh:
            raise CbtUnsupported(f"VM {vm_id} cannot be read: {NO_SSH}", hint=SSH_HINT)
        node = self._node(str(row.get("node", "")))
        held = partial(frozen, self._access, vm_id)
        return Reading(self._cluster, node, row, notes=self._notes, other=self._node, options=self._options, frozen=held)

    def _node(self, name: str) -> Node:
        if name not in self._nodes:
            if self._folder is None:
                self._folder = self._closing.enter_context(private_folder())
            host = self._options.node_hosts.get(name) or self._cluster.addresses().get(name) or self._api.host
            folder = self._folder / str(len(self._nodes))
            folder.mkdir(mode=0o700)
            secret, key = self._login.ssh_secret, self._login.ssh_private_key
            door = Door(
                host,
                self._options.ssh_port,
                self._login.ssh_name,
                folder,
                private_key=None if key is None else key.get_secret_value(),
                secret=None if secret is None else secret.get_secret_value(),
                known_hosts=self._options.ssh_known_hosts,
                verify=self._options.verify_tls or self._options.ssh_known_hosts is not None,
            )
            self._nodes[name] = Node(name, door, folder, self._options.scratch_dir)
        return self._nodes[name]

    def _refuse_moved(self, vm_id: str) -> None:
        """SourceUnreachable, if a node of the cluster still has it."""
        try:
            node = str(self._cluster.row(vm_id).get("node", ""))
        except SynvirtError:
            return
        raise SourceUnreachable(
            f"VM {vm_id} was moved within the cluster while it was asked: it is on {node} now", hint="it is asked again there"
        )

    async def _unless_gone(self, use: Callable[[], None], vm_id: str) -> None:
        """A VM that is gone has nothing of ours left."""
        with contextlib.suppress(VmNotFound):
            await self._asked(use, vm_id)

    async def _asked(self, use: Callable[[], T], vm_id: str | None = None, *, limit_s: float = ANSWER_TIMEOUT_S) -> T:
        """`vm_id`: the VM of the call, which counts as gone only if no node of the cluster has it."""

        def guarded() -> T:
            with self._lock:
                try:
                    return use()
                except VmNotFound:
                    if vm_id is not None:
                        self._refuse_moved(vm_id)
                    raise

        try:
            async with asyncio.timeout(limit_s):
                return await asyncio.to_thread(guarded)
        except TimeoutError as error:
            raise SourceUnreachable(
                f"{self._api.host}: no answer within {limit_s:.0f} s", hint="is the cluster, or one of its nodes, overloaded?"
            ) from error


def _storage_check(storage: str, kind: str, nodes: Collection[str]) -> SourceCheck:
    name, where = f"storage {storage}", f"{kind} on {', '.join(nodes)}"
    if why := settings.unreadable(kind):
        return SourceCheck(name=name, ok=True, warning=True, detail=f"{where}: {why}: disks on it cannot be moved")
    if kind not in settings.OFF_WAYS:
        return SourceCheck(name=name, ok=True, warning=True, detail=f"{where}: not known here; tried as a path of the node")
    return SourceCheck(
        name=name,
        ok=True,
        detail=f"{where}: of running VMs from their QEMU, warm or cold; of others as {settings.OFF_WAYS[kind]}",
    )


def pve_api(access: SourceAccess) -> PveApi:
    return PveApi(access)
