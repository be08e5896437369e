"""XenServer and XCP-ng pools by XenAPI on port 443. asyncio outside, threads inside; __init__.py describes its parts."""

import asyncio
import contextlib
from collections.abc import Collection, Mapping
from typing import Annotated, Final

import structlog
from pydantic import Field, SecretStr

from synvirt.disks.specs import ChangedSpec, ReaderSpec
from synvirt.errors import AuthFailed, CbtReset, CbtUnsupported, SourceUnreachable, VmNotFound
from synvirt.live import About, SnapshotRef, SourceAccess, VmRow
from synvirt.live.form import Form
from synvirt.live.keeping_alive import KeptAlive
from synvirt.live.xen import exports, machines, nvram, power, roles, snapshots
from synvirt.live.xen.machines import Machine
from synvirt.live.xen.session import KEEP_ALIVE_S, OURSELVES, Login, XenSession
from synvirt.live.xen.ways import Transport, Way
from synvirt.machines.texts import clean, is_true
from synvirt.machines.xenapi import Record, listed, table, text
from synvirt.model.access import SourceOptions
from synvirt.model.kinds import LiveKind
from synvirt.model.machine import Disk, VmManifest
from synvirt.model.plan import Shutdown
from synvirt.model.sources import SourceCheck
from synvirt.model.values import Name, Received

log = structlog.get_logger(__name__)

_NO_WARM: Final = "move the VM cold"


class XenCredentials(Received):
    """A user of the pool: root, or one of its directory."""

    user: Name
    password: SecretStr


class XenOptions(SourceOptions):
    """`transport`: auto is NBD where the pool offers it, else exports; deltas by changed block tracking where there is NBD,
    else by comparing VHDs. `shutdown_timeout_s`: how long a guest may take to shut itself down, before it is powered off."""

    transport: Transport = "auto"
    shutdown_timeout_s: Annotated[float, Field(ge=0, le=86400)] = 300


FORM = Form(LiveKind.XEN_API, {"https": 443}, XenCredentials, XenOptions)


class XenApi:
    """The LiveAdapter of XenServer and XCP-ng."""

    kind = LiveKind.XEN_API

    def __init__(self, access: SourceAccess) -> None:
        place, credentials, self._options = FORM.read(access)
        login = Login(credentials.user, credentials.password.get_secret_value())
        self._folder = access.folder
        self._session = XenSession(place, login, self._options, access.folder, access.recorder)
        self._keeping = KeptAlive(self._session.keep_alive, KEEP_ALIVE_S)

    # ── the session ──────────────────────────────────────────────────────────────────────────────────────────────────

    async def connect(self) -> None:
        await asyncio.to_thread(self._session.open)
        self._keeping.begin()

    async def rest(self) -> None:
        """Only the session stays open: all readers that use it have ended."""

    async def close(self) -> None:
        self._keeping.end()
        await asyncio.to_thread(self._session.close)

    # ── the inventory ────────────────────────────────────────────────────────────────────────────────────────────────

    async def about(self) -> About:
        return await asyncio.to_thread(self._about)

    def _about(self) -> About:
        session = self._session
        hosts: Mapping[str, Record] = session.call("say who it is", "host.get_all_records")
        version = next((table(host, "software_version") for host in hosts.values()), {})
        product = clean(text(version, "product_brand")) or "XenServer"
        number = " ".join(filter(None, (text(version, "product_version"), text(version, "build_number"))))
        own: Record = session.call("say what we may do", "session.get_record", OURSELVES)
        if is_true(text(own, "is_local_superuser")):
            allowed = SourceCheck(name="role", ok=True, detail=f"{session.login_.user} may do everything: root of the pool")
            return About(product, clean(number), (allowed,))
        return About(product, clean(number), roles.checks(session.login_.user, listed(own, "rbac_permissions")))

    async def supports_warm(self) -> bool:
        return True

    async def list_vms(self) -> list[VmRow]:
        return await asyncio.to_thread(machines.rows, self._session)

    async def inspect(self, vm_id: str) -> VmManifest:
        return await asyncio.to_thread(self._inspect, vm_id)

    def _inspect(self, vm_id: str) -> VmManifest:
        vm = machines.machine(self._session, vm_id)
        return machines.manifest(vm_id, vm, self._ways(vm), machines.chain_lengths(self._session, vm))

    def _ways(self, vm: Machine) -> dict[str, Way]:
        return machines.ways(self._session, vm, self._options.transport)

    async def guest_facts(self, vm_id: str) -> dict[str, str]:
        return await asyncio.to_thread(machines.guest_facts, self._session, vm_id)

    async def uefi_variables(self, vm_id: str) -> bytes | None:
        return await asyncio.to_thread(lambda: nvram.as_store(machines.vm_record(self._session, vm_id)))

    # ── snapshots and bytes ──────────────────────────────────────────────────────────────────────────────────────────

    async def enable_cbt(self, vm_id: str, disks: Collection[str]) -> None:
        def enable() -> None:
            vm = machines.machine(self._session, vm_id)
            snapshots.enable(self._session, vm, disks, self._ways(vm))

        await asyncio.to_thread(enable)

    async def snapshot(self, vm_id: str, name: str, disks: Collection[str] | None = None) -> SnapshotRef:
        def take() -> SnapshotRef:
            vm = machines.machine(self._session, vm_id)
            return snapshots.take(self._session, vm, name, disks, self._ways(vm))

        return await asyncio.to_thread(take)

    async def open_disk(self, vm_id: str, snapshot: SnapshotRef, disk: Disk, since: str | None) -> ReaderSpec:
        return await asyncio.to_thread(self._open_disk, vm_id, snapshot.id, disk.key, since)

    def _open_disk(self, vm_id: str, snapshot_id: str, key: str, since: str | None) -> ReaderSpec:
        session = self._session
        vm = machines.machine(session, vm_id)
        reference, vdi = snapshots.disk_in(session, vm, snapshot_id, key)
        way = self._ways(vm)[key]
        if since is None:
            return self._whole(vm, key, reference, vdi, way)
        by, _, uuid = since.partition(":")
        if by == "cbt":
            areas = exports.changed(session, uuid, reference, vdi, key)
            return ChangedSpec(over=exports.by_nbd(session, reference, vdi, self._folder), areas=areas)
        if by != "vhd":
            raise CbtReset(f"disk {key}: {since[:60]!r} is no change id of a pool", hint="the whole disk is compared once")
        if way.deltas != "vhd" and self._options.transport == "nbd":
            raise CbtUnsupported(f"disk {key}: options.transport nbd forbids the deltas that it had so far", hint=_NO_WARM)
        base = exports.base_of(session, uuid, vdi, key)
        return exports.by_export(session, reference, vdi, raw=False, base=base)

    def _whole(self, vm: Machine, key: str, reference: str, vdi: Record, way: Way) -> ReaderSpec:
        if way.bytes == "nbd":
            try:
                return exports.by_nbd(self._session, reference, vdi, self._folder)
            except (SourceUnreachable, AuthFailed) as error:
                if self._options.transport != "auto":
                    raise
                log.warning("a disk is not served by NBD: it is exported", vdi=text(vdi, "uuid"), cause=error.detail)
                way = machines.ways(self._session, vm, "export")[key]
        return exports.by_export(self._session, reference, vdi, raw=way.bytes == "raw")

    async def release(self, vm_id: str, name: str) -> None:
        await asyncio.to_thread(snapshots.release, self._session, name)

    async def cleanup(self, vm_id: str, name: str) -> None:
        await asyncio.to_thread(snapshots.cleanup, self._session, vm_id, name)

    # ── off, on, marked ──────────────────────────────────────────────────────────────────────────────────────────────

    async def shutdown(self, vm_id: str, manner: Shutdown = "polite", timeout_s: float | None = None) -> None:
        off_s = self._options.shutdown_timeout_s if timeout_s is None else timeout_s
        await asyncio.to_thread(power.shut_down, self._session, vm_id, off_s, manner)

    async def last_start(self, vm_id: str) -> str:
        return await asyncio.to_thread(power.last_start, self._session, vm_id)

    async def power_on(self, vm_id: str) -> None:
        await asyncio.to_thread(power.power_on, self._session, vm_id)

    async def mark(self, vm_id: str, note: str) -> None:
        with contextlib.suppress(VmNotFound):  # a VM that is gone needs no mark, as it cannot start
            await asyncio.to_thread(power.mark, self._session, vm_id, note)
