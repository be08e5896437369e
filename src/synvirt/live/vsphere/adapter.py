"""vSphere: vCenter 6.5 and later, and ESXi, by the vSphere Web Services API on port 443.

    session          login, keep-alive, properties, tasks, faults            pyvmomi, blocking
    versions         in which version of the API                             blocking
    privileges       what our user must be allowed                           blocking
    machines         VMs as manifests                                        no I/O
    disks            disks by their backings                                 no I/O
    changes          snapshots, change tracking                              blocking
    ways             by which way a disk is read                             no I/O
    files            the datastore's files, the second way                   blocking
    nvram            UEFI variables in VMware's form                         no I/O
    lease            the export lease, the third way                         blocking
    hosts            ESXi hosts as they are reached from here                blocking
    lease_guard      a process that ends it when the service is killed
    power            off, on, marked                                         blocking
    tap              what the platform answers, for `sources record`         blocking
    this file        the adapter: asyncio outside, threads inside; bytes by disks/{vddk,datastore,exported}

Without pyvmomi, or with SYNVIRT_MIGRATOR_SKIP_GO_SHIM=1, every method that would ask the platform raises Internal.
"""

import asyncio
import contextlib
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from typing import Annotated, Any, Final, Literal, NamedTuple, Self

import structlog
from pydantic import Field, SecretStr, StringConstraints, model_validator

from synvirt.disks.specs import ChangedSpec, ReaderSpec, VddkSpec
from synvirt.disks.vsphere.datastore import FileClosed, ReadForbidden
from synvirt.errors import (
    AuthFailed,
    CbtUnsupported,
    DiskReadFailed,
    Internal,
    SnapshotFailed,
    SourceUnreachable,
    SynvirtError,
    UnsupportedFormat,
    VmNotFound,
)
from synvirt.live import About, SnapshotRef, SourceAccess, VmRow
from synvirt.live.form import Form
from synvirt.live.vsphere import changes as vim_changes
from synvirt.live.vsphere import files as vim_files
from synvirt.live.vsphere import guest_facts as vim_guest
from synvirt.live.vsphere import hosts as vim_hosts
from synvirt.live.vsphere import nvram as vim_nvram
from synvirt.live.vsphere import power as vim_power
from synvirt.live.vsphere import privileges as vim_privileges
from synvirt.live.vsphere.disks import (
    OBJECT_STORES,
    allocated_of,
    capacity_of,
    chain,
    store_of,
    stores_of,
    type_name,
    virtual_disks,
)
from synvirt.live.vsphere.files import FOLDERS_DEEP_MAX
from synvirt.live.vsphere.lease import ExportLease
from synvirt.live.vsphere.machines import (
    INSPECTED,
    LISTED,
    NETWORK_PATHS,
    manifest,
    mostly_empty_disks,
    network_names,
    row,
    shown,
)
from synvirt.live.vsphere.session import KEEP_ALIVE_S, Login, VimSession, library
from synvirt.live.vsphere.ways import Way, mostly_empty, way
from synvirt.model.access import SourceOptions
from synvirt.model.kinds import LiveKind
from synvirt.model.machine import Disk, VmManifest
from synvirt.model.plan import Shutdown
from synvirt.model.sources import SourceCheck
from synvirt.model.values import Name, Received

log = structlog.get_logger(__name__)

# A lease that only saves bytes is not worth waiting until one that was left behind runs out: the guest may be off meanwhile.
SPARER_BUSY_S: Final = 30.0
# Before each new look at files that could be read before, and cannot be opened now.
FILES_PAUSES_S: Final = (5.0, 15.0, 30.0)


class VimCredentials(Received):
    """A vCenter user with its domain (`administrator@vsphere.local`), or a user of the ESXi host."""

    user: Name
    password: SecretStr


class VimOptions(SourceOptions):
    """`transport`: auto is VDDK where `vddk_libdir` says that it is there, else the datastore's files where they may and can
    be read, else an export lease. Files are asked of an ESXi host first, and of vCenter where that does not answer; `datastore`
    asks vCenter alone, `esxi` hosts alone. `vddk_transports`: VDDK's own list (`san:hotadd:nbdssl`). `shutdown_timeout_s`: how
    long a guest may take to shut itself down, before it is powered off."""

    transport: Literal["auto", "vddk", "datastore", "esxi", "lease"] = "auto"
    vddk_libdir: Annotated[str, StringConstraints(pattern=r"^/[^\x00-\x1f\x7f]*$", max_length=4096)] | None = None
    vddk_transports: Annotated[str, StringConstraints(pattern=r"^[a-z:]*$", max_length=100)] = ""
    shutdown_timeout_s: Annotated[float, Field(ge=0, le=86400)] = 300

    @model_validator(mode="after")
    def _vddk_lies_somewhere(self) -> Self:
        if self.transport == "vddk" and self.vddk_libdir is None:
            raise ValueError("transport vddk needs vddk_libdir: the folder of VMware's VDDK on this host")
        return self


FORM = Form(LiveKind.VIM_API, {"https": 443}, VimCredentials, VimOptions)
# How a deep test calls the way by a host, and how many hosts it tries: each is read from for some seconds.
_BY_HOST: Final = "esxi "
HOSTS_TRIED: Final = 16
# By options.transport; a host first where that is not set.
_FILES_ASKED: Final[Mapping[str, vim_files.Asked]] = {"datastore": "vcenter", "esxi": "host"}


class _Wanted(NamedTuple):
    """A disk in a snapshot: its device among the VM's `devices`, as the snapshot has them."""

    vm_id: str
    snapshot_id: str
    device: Any
    devices: Sequence[Any]


class VimApi:
    """The LiveAdapter of vSphere."""

    kind = LiveKind.VIM_API

    def __init__(self, access: SourceAccess) -> None:
        place, credentials, self._options = FORM.read(access)
        login = Login(credentials.user, credentials.password.get_secret_value())
        self._session = VimSession(place, login, self._options, access.recorder)
        self._keeping: asyncio.Task[None] | None = None
        # Of the snapshot that was opened last: the way to each of its disks.
        self._ways: tuple[str, Mapping[str, Way]] | None = None
        self._lease: ExportLease | None = None
        # The snapshot that could not be exported when it would have been better so.
        self._unexportable: str | None = None
        self._renewing: asyncio.Task[None] | None = None
        self._renewed: ExportLease | None = None

    # ── the session ──────────────────────────────────────────────────────────────────────────────────────────────────

    async def connect(self) -> None:
        await asyncio.to_thread(self._session.open)
        self._keeping = asyncio.create_task(self._keep_alive())

    async def _keep_alive(self) -> None:
        while True:
            await asyncio.sleep(KEEP_ALIVE_S)
            with contextlib.suppress(SynvirtError):  # who asks next learns it
                await asyncio.to_thread(self._session.keep_alive)

    async def rest(self) -> None:
        await self._end_lease()
        self._ways = self._unexportable = None

    async def close(self) -> None:
        await self._end_lease()
        if self._keeping is not None:
            self._keeping.cancel()
            self._keeping = None
        await asyncio.to_thread(self._session.close)

    # ── who is there ─────────────────────────────────────────────────────────────────────────────────────────────────

    async def about(self) -> About:
        return await asyncio.to_thread(self._about)

    def _about(self) -> About:
        library()
        about = self._session.call("say who it is", lambda content: content.about)
        version = f"{about.version} build {about.build}"
        options = self._options
        checks = vim_privileges.checks(self._session, options.transport, has_vddk=options.vddk_libdir is not None)
        return About(str(about.name), version, tuple(checks), str(about.instanceUuid or ""))

    async def supports_warm(self) -> bool:
        library()
        return True

    async def list_vms(self) -> list[VmRow]:
        return await asyncio.to_thread(self._list_vms)

    def _list_vms(self) -> list[VmRow]:
        vim = library().vim
        found = self._session.all_of([vim.VirtualMachine], LISTED, what="list its VMs")
        folders, hosts = self._folders(), self._host_names()
        return [
            row(
                one.id,
                one.properties,
                _path(folders, one.properties.get("parent")),
                hosts.get(getattr(one.properties.get("runtime.host"), "_moId", ""), ""),
            )
            for one in found
            if not one.properties.get("summary.config.template")
        ]

    def _folders(self) -> Mapping[str, tuple[str, Any]]:
        """Of each folder and datacenter its name and what it lies in. Without a name: the root, and the folder of VMs that each
        datacenter has; the platform made those."""
        vim = library().vim
        found = self._session.all_of([vim.Folder, vim.Datacenter], ("name", "parent"), what="list its folders")
        folders = {one.id: (str(one.properties.get("name", "")), one.properties.get("parent")) for one in found}
        of_vms = {id_: ("", lies_in) for id_, (name, lies_in) in folders.items() if name == "vm" and _is_datacenter(lies_in)}
        return folders | of_vms | {self._session.content.rootFolder._moId: ("", None)}  # noqa: SLF001

    def _host_names(self) -> Mapping[str, str]:
        found = self._session.all_of([library().vim.HostSystem], ("name",), what="list its hosts")
        return {one.id: shown(one.properties.get("name") or "") for one in found}

    async def inspect(self, vm_id: str) -> VmManifest:
        return await asyncio.to_thread(self._inspect, vm_id)

    def _inspect(self, vm_id: str) -> VmManifest:
        found = self._vm(vm_id, INSPECTED)
        stores = found.get("datastore") or ()
        types, space = self._facts_of_stores(stores)
        disks = virtual_disks(found.get("config.hardware.device") or ())
        ways = self._chosen_ways(disks, types)
        host, networks = self._surroundings(found.get("runtime.host"), found.get("network") or ())
        may_export = bool(mostly_empty_disks(found, ways)) and vim_privileges.may(
            self._session, vim_privileges.EXPORT[0], [self._session.machine(vm_id)]
        )
        moment = datetime.now(UTC)
        return manifest(vm_id, found, types, ways, host=host, networks=networks, may_export=may_export, space=space, now=moment)

    def _surroundings(self, host: Any, networks: Sequence[Any]) -> tuple[str, Mapping[str, str]]:
        """The name of the VM's host, and those of its networks by what its cards hold of them."""
        wanted = [(network, NETWORK_PATHS.get(type_name(network), ("name",))) for network in networks]
        found: Mapping[str, Mapping[str, Any]] = {}
        with contextlib.suppress(AuthFailed, VmNotFound):  # not for us to see, or removed meanwhile
            found = self._session.each([*wanted, *([] if host is None else [(host, ("name",))])], what="look at a VM's host")
        name = "" if host is None else shown(found.get(host._moId, {}).get("name") or "")  # noqa: SLF001
        return name, network_names([found[one._moId] for one in networks if one._moId in found])  # noqa: SLF001

    def _facts_of_stores(self, stores: Sequence[Any]) -> tuple[Mapping[str, str], Mapping[str, tuple[int, int]]]:
        """By their names: the datastores' types; and their free bytes and all that they have, where that is known."""
        paths = ("summary.name", "summary.type", "summary.freeSpace", "summary.capacity")
        found = self._session.each([(store, paths) for store in stores], what="look at datastores").values()
        types = {str(store.get("summary.name")): str(store.get("summary.type")) for store in found}
        bytes_ = [(str(one.get("summary.name")), one.get("summary.freeSpace"), one.get("summary.capacity")) for one in found]
        return types, {name: (int(free), int(has)) for name, free, has in bytes_ if free is not None and has}

    def _chosen_ways(self, disks: Sequence[Any], types: Mapping[str, str]) -> Mapping[str, Way]:
        """Of each disk, by its key."""
        wished, has_vddk = self._options.transport, self._options.vddk_libdir is not None
        # The VM has others, too, from which we read nothing: that of an ISO image in its drive.
        stores = stores_of(disks)
        asked = wished == "auto" and not has_vddk and stores
        missing = (
            vim_privileges.FILES if asked and not vim_privileges.may(self._session, vim_privileges.FILES, stores) else None
        )
        return {
            str(disk.key): way(wished, has_vddk=has_vddk, disk=disk, store_types=types, missing_privilege=missing)
            for disk in disks
        }

    def _vm(self, vm_id: str, paths: tuple[str, ...]) -> Mapping[str, Any]:
        found = self._session.properties(self._session.machine(vm_id), paths, what=f"inspect {vm_id}")
        if not found:
            raise VmNotFound(f"{self._session.host} has no VM {vm_id}", hint="list its VMs: it may have been registered again")
        return found

    async def guest_facts(self, vm_id: str) -> dict[str, str]:
        return await asyncio.to_thread(lambda: vim_guest.guest_facts(self._vm(vm_id, vim_guest.WANTED)))

    async def uefi_variables(self, vm_id: str) -> bytes | None:
        return await asyncio.to_thread(self._uefi_variables, vm_id)

    def _uefi_variables(self, vm_id: str) -> bytes | None:
        found = self._vm(vm_id, ("name", "layoutEx.file", "config.bootOptions"))
        name = next((str(one.name) for one in found.get("layoutEx.file") or () if one.type == "nvram"), None)
        if name is None:
            return None
        content = vim_files.small_file(self._session, vm_id, name, vim_nvram.BYTES_MAX)
        boot = found.get("config.bootOptions")
        return vim_nvram.as_store(content, secure_boot=bool(getattr(boot, "efiSecureBootEnabled", False)))

    # ── snapshots and bytes ──────────────────────────────────────────────────────────────────────────────────────────

    async def enable_cbt(self, vm_id: str, disks: Collection[str]) -> None:
        """Of the whole VM, the platform knows no less; and seen to be so of these disks."""
        await asyncio.to_thread(vim_changes.enable, self._session, vm_id, disks)

    async def is_tracked(self, vm_id: str) -> bool:
        return await asyncio.to_thread(vim_changes.is_tracked, self._session, vm_id)

    async def disable_cbt(self, vm_id: str) -> None:
        await asyncio.to_thread(vim_changes.disable, self._session, vm_id)

    async def snapshot(self, vm_id: str, name: str, disks: Collection[str] | None = None) -> SnapshotRef:
        """Of the whole VM: here, too, the platform knows no less."""
        return await asyncio.to_thread(vim_changes.take, self._session, vm_id, name)

    async def open_disk(self, vm_id: str, snapshot: SnapshotRef, disk: Disk, since: str | None) -> ReaderSpec:
        spec = await asyncio.to_thread(self._open_disk, vm_id, snapshot.id, disk, since)
        if self._lease is not self._renewed:
            self._renew_no_more()
        if self._lease is not None and self._renewing is None:
            self._renewed, self._renewing = self._lease, asyncio.create_task(self._renew(self._lease))
        return spec

    async def ways_to(self, vm_id: str, snapshot: SnapshotRef, disk: Disk) -> list[str]:
        return await asyncio.to_thread(self._ways_to, vm_id, snapshot.id, disk)

    def _ways_to(self, vm_id: str, snapshot_id: str, disk: Disk) -> list[str]:
        device = self._wanted(vm_id, snapshot_id, disk).device
        types, _ = self._facts_of_stores(stores_of([device]))
        in_files = chain(device.backing) is not None and types.get(store_of(device)) not in OBJECT_STORES
        hosts = vim_files.hosts_of(self._session, device)[:HOSTS_TRIED] if in_files else []
        return [
            *(["datastore"] if in_files else []),
            *(f"{_BY_HOST}{host}" for host in hosts),
            "lease",
            *(["vddk"] if self._options.vddk_libdir is not None else []),
        ]

    async def open_by(self, way: str, vm_id: str, snapshot: SnapshotRef, disk: Disk) -> ReaderSpec:
        return await asyncio.to_thread(self._open_by, way, vm_id, snapshot.id, disk)

    def _open_by(self, way: str, vm_id: str, snapshot_id: str, disk: Disk) -> ReaderSpec:
        wanted = self._wanted(vm_id, snapshot_id, disk)
        match way:
            case "lease":
                return self._leased(snapshot_id, SPARER_BUSY_S).disk(wanted.device, wanted.devices)
            case "vddk":
                return self._by_vddk(wanted)
            case _ if way.startswith(_BY_HOST):
                host = way.removeprefix(_BY_HOST)
                return vim_files.whole_disk(self._session, vm_id, wanted.device, None, asked="host", host=host)
            case _:
                return vim_files.whole_disk(self._session, vm_id, wanted.device, None)

    async def hosts(self) -> list[SourceCheck]:
        return await asyncio.to_thread(vim_hosts.checks, self._session, by_vddk=self._options.vddk_libdir is not None)

    def _wanted(self, vm_id: str, snapshot_id: str, disk: Disk) -> _Wanted:
        devices = vim_changes.devices_of(self._session, snapshot_id)
        device = next((one for one in virtual_disks(devices) if str(one.key) == disk.key), None)
        if device is None:
            raise SnapshotFailed(f"snapshot {snapshot_id} of {vm_id} has no disk {disk.key}")
        return _Wanted(vm_id, snapshot_id, device, devices)

    def _open_disk(self, vm_id: str, snapshot_id: str, disk: Disk, since: str | None) -> ReaderSpec:
        wanted = self._wanted(vm_id, snapshot_id, disk)
        device = wanted.device
        areas: tuple[tuple[int, int], ...] | None = None
        if since is not None and self._options.transport != "lease":
            # Before all else: the longer ago the snapshot, the likelier its tracking was reset meanwhile.
            areas = vim_changes.changed(self._session, vm_id, snapshot_id, device, since)
        match self._way_to(wanted):
            case Way("lease") as chosen:
                return self._exported(wanted, chosen, since)
            case Way("vddk"):
                whole = self._by_vddk(wanted)  # it knows by itself what is allocated
                return whole if areas is None else ChangedSpec(over=whole, areas=areas)
            case _:
                return self._by_files(wanted, since, areas)

    def _way_to(self, wanted: _Wanted) -> Way:
        """As it was shown when the job was planned, unless privileges or datastores have changed since."""
        if self._ways is None or self._ways[0] != wanted.snapshot_id:
            stores = self._vm(wanted.vm_id, ("name", "datastore")).get("datastore") or ()
            ways = self._chosen_ways(virtual_disks(wanted.devices), self._facts_of_stores(stores)[0])
            self._ways = (wanted.snapshot_id, ways)
        return self._ways[1][str(wanted.device.key)]

    def _by_files(self, wanted: _Wanted, since: str | None, areas: tuple[tuple[int, int], ...] | None) -> ReaderSpec:
        """By an export lease, where the host does not let us read the files though nothing said so before."""
        vm_id, snapshot_id, device, _ = wanted
        try:
            if areas is not None:
                return ChangedSpec(over=self._knocked(wanted), areas=areas)
            allocated = vim_changes.allocated(self._session, vm_id, snapshot_id, device)
            whole = vim_files.whole_disk(self._session, vm_id, device, allocated, asked=self._files_asked)
            return whole if allocated is not None else self._sparser(wanted, whole)
        except ReadForbidden as error:
            if self._options.transport != "auto":
                raise DiskReadFailed(error.detail, hint=error.hint) from error
            log.warning("a disk's files are not for us: by an export lease", vm=vm_id, disk=device.key, cause=error.detail)
            return self._exported(wanted, Way("lease", error.detail), since)

    def _knocked(self, wanted: _Wanted) -> ReaderSpec:
        """The files of a disk that was read before. To give them up costs all deltas to come: not for a minute's trouble."""
        for pause_s in FILES_PAUSES_S:
            try:
                return vim_files.whole_disk(self._session, wanted.vm_id, wanted.device, None, asked=self._files_asked)
            except FileClosed as error:
                log.warning("a disk's files are not opened; tried again", vm=wanted.vm_id, cause=error.detail)
                time.sleep(pause_s)
        return vim_files.whole_disk(self._session, wanted.vm_id, wanted.device, None, asked=self._files_asked)

    @property
    def _files_asked(self) -> vim_files.Asked:
        return _FILES_ASKED.get(self._options.transport, "host first")

    def _sparser(self, wanted: _Wanted, whole: ReaderSpec) -> ReaderSpec:
        """A disk whose allocation the platform does not list: by an export lease, where the plan expects that to save most of
        it; by its files from where the lease fails, as without a lease."""
        vm_id, snapshot_id, device, _ = wanted
        # A tracked disk whose host does not list what is allocated was planned to be read by its files.
        tracked = getattr(device.backing, "changeId", None)
        if tracked or self._options.transport != "auto" or self._unexportable == snapshot_id:
            return whole
        # Of the VM as it is, whose list of files is no snapshot's.
        found = self._vm(vm_id, ("name", "config.hardware.device", "layoutEx.file"))
        files = found.get("layoutEx.file") or ()
        disks = virtual_disks(found.get("config.hardware.device") or ())
        taken = next((allocated_of(disk, files) for disk in disks if disk.key == device.key), None)
        if not mostly_empty(capacity_of(device), taken):
            return whole
        try:
            return replace(self._leased(snapshot_id, SPARER_BUSY_S).disk(device, wanted.devices), instead=whole)
        except (AuthFailed, Internal, SourceUnreachable, UnsupportedFormat) as error:
            log.info("no export lease: the whole disk is read", vm=vm_id, disk=device.key, cause=error.detail)
            # It is waited for once, not by each disk.
            self._unexportable = snapshot_id
            return whole

    def _exported(self, wanted: _Wanted, chosen: Way, since: str | None) -> ReaderSpec:
        if since is not None:
            raise CbtUnsupported(f"disk {wanted.device.key} of {wanted.vm_id} {chosen.no_deltas}", hint="move the VM cold")
        try:
            return self._leased(wanted.snapshot_id).disk(wanted.device, wanted.devices)
        except AuthFailed as error:
            raise AuthFailed(f"{error.detail}{f'; no other way, as {chosen.why}' if chosen.why else ''}") from error

    def _leased(self, snapshot_id: str, busy_timeout_s: float | None = None) -> ExportLease:
        """One lease for all disks of a snapshot: a second one would be refused."""
        if self._lease is not None and self._lease.snapshot_id != snapshot_id:
            self._lease.end()
            self._lease = None
        if self._lease is None:
            # Known before it is ready, so that it is ended whatever comes.
            lease = self._lease = ExportLease(self._session, snapshot_id)
            try:
                lease.open(busy_timeout_s)
            except SynvirtError:
                self._lease = None
                lease.end()
                raise
        return self._lease

    async def _renew(self, lease: ExportLease) -> None:
        while True:
            await asyncio.sleep(lease.renewed_every_s)
            if not await asyncio.to_thread(lease.renew):
                return

    def _renew_no_more(self) -> None:
        if self._renewing is not None:
            self._renewing.cancel()
        self._renewed = self._renewing = None

    async def _end_lease(self) -> None:
        self._renew_no_more()
        lease, self._lease = self._lease, None
        if lease is not None:
            await asyncio.to_thread(lease.end)

    def _by_vddk(self, wanted: _Wanted) -> VddkSpec:
        session, options = self._session, self._options
        return VddkSpec(
            host=session.host,
            port=session.port,
            user=session.login_.user,
            password=session.login_.password,
            verify_tls=options.verify_tls,
            fingerprint_sha256=options.fingerprint_sha256,
            vm_id=wanted.vm_id,
            snapshot_id=wanted.snapshot_id,
            file=str(wanted.device.backing.fileName),
            libdir=str(options.vddk_libdir),
            transports=options.vddk_transports,
        )

    async def release(self, vm_id: str, name: str) -> None:
        """A change id outlives its snapshot: what held the data may go."""
        await self.cleanup(vm_id, name)

    async def cleanup(self, vm_id: str, name: str) -> None:
        await self._end_lease()
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


def _is_datacenter(thing: Any) -> bool:
    return isinstance(thing, library().vim.Datacenter)


def _path(folders: Mapping[str, tuple[str, Any]], parent: Any) -> str:
    """As people see it: datacenter and folders."""
    names: list[str] = []
    for _ in range(FOLDERS_DEEP_MAX):
        found = folders.get(parent._moId) if parent is not None else None  # noqa: SLF001
        if found is None:
            break
        names.insert(0, shown(found[0]))
        parent = found[1]
    return "/".join(filter(None, names))
