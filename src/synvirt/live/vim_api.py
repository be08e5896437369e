"""vSphere: vCenter 6.5 and later, and ESXi, by the vSphere Web Services API on port 443.

    vim_session    login, keep-alive, properties, tasks, faults            pyvmomi, blocking
    vim_machines   VMs as manifests                                        no I/O
    vim_changes    snapshots, change tracking                              blocking
    vim_ways       by which way disks are read                             no I/O
    vim_lease      the export lease, the third way                         blocking
    this file      the adapter: asyncio outside, threads inside; bytes by disks/{vddk,datastore,exported}

Without pyvmomi, or with SYNVIRT_MIGRATOR_SKIP_GO_SHIM=1, every method that would speak to the platform raises Internal.
"""

import asyncio
import contextlib
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import Annotated, Any, Final, Literal, Self

from pydantic import Field, SecretStr, StringConstraints, model_validator

from synvirt.disks.specs import ChangedSpec, DatastoreSpec, DeltaSpec, ReaderSpec, VddkSpec
from synvirt.errors import CbtUnsupported, Internal, SnapshotFailed, SynvirtError, UnsupportedFormat, VmNotFound
from synvirt.live import About, SnapshotRef, SourceAccess, VmRow, vim_changes, vim_machines
from synvirt.live.form import Form
from synvirt.live.vim_lease import ExportLease
from synvirt.live.vim_machines import INSPECTED, LISTED, manifest, row
from synvirt.live.vim_session import KEEP_ALIVE_S, Login, VimSession, library
from synvirt.live.vim_ways import Way, way
from synvirt.model import Disk, LiveKind, Name, Received, SourceCheck, SourceOptions, VmManifest

OFF_POLL_S: Final = 2.0
POWER_TIMEOUT_S: Final = 300.0
# Folders may lie in one another; a loop in what a platform says must have an end.
FOLDERS_DEEP_MAX: Final = 64

# What our user must be allowed, and what for. Held on the root folder, or on the VMs and datastores themselves.
PRIVILEGES: Final[tuple[tuple[str, str], ...]] = (
    ("System.View", "see the VMs"),
    ("VirtualMachine.State.CreateSnapshot", "take snapshots"),
    ("VirtualMachine.State.RemoveSnapshot", "remove them again"),
    ("VirtualMachine.Config.ChangeTracking", "switch change tracking on"),
    ("VirtualMachine.Provisioning.DiskRandomRead", "ask what changed"),
    ("VirtualMachine.Interact.PowerOff", "shut the VM down at the cut-over"),
    ("VirtualMachine.Interact.PowerOn", "start it again when a cut-over fails"),
    ("VirtualMachine.Config.Annotation", "note on the VM that it has moved"),
    ("Datastore.Browse", "read its disks"),
    ("Datastore.FileManagement", "read its disks"),
)
# And what for a way besides: without it there is no such way.
FILES: Final = "Datastore.Browse"
EXPORT: Final = ("VApp.Export", "read its disks by an export lease")


class VimCredentials(Received):
    """A vCenter user with its domain (`administrator@vsphere.local`), or a user of the ESXi host."""

    user: Name
    password: SecretStr


class VimOptions(SourceOptions):
    """`transport`: auto is VDDK where `vddk_libdir` says that it is there, else the datastore's files where they may and can
    be read, else an export lease. `vddk_transports`: VDDK's own list (`san:hotadd:nbdssl`). `shutdown_timeout_s`: how long a
    guest may take to shut itself down, before it is powered off."""

    transport: Literal["auto", "vddk", "datastore", "lease"] = "auto"
    vddk_libdir: Annotated[str, StringConstraints(pattern=r"^/[^\x00-\x1f\x7f]*$", max_length=4096)] | None = None
    vddk_transports: Annotated[str, StringConstraints(pattern=r"^[a-z:]*$", max_length=100)] = ""
    shutdown_timeout_s: Annotated[float, Field(ge=0, le=86400)] = 300

    @model_validator(mode="after")
    def _vddk_lies_somewhere(self) -> Self:
        if self.transport == "vddk" and self.vddk_libdir is None:
            raise ValueError("transport vddk needs vddk_libdir: the folder of VMware's VDDK on this host")
        return self


FORM = Form(LiveKind.VIM_API, {"https": 443}, VimCredentials, VimOptions)


class VimApi:
    kind = LiveKind.VIM_API

    def __init__(self, access: SourceAccess) -> None:
        place, credentials, self._options = FORM.read(access)
        login = Login(credentials.user, credentials.password.get_secret_value())
        self._session = VimSession(place, login, self._options)
        self._keeping: asyncio.Task[None] | None = None
        # Of the snapshot that was opened last.
        self._way: tuple[str, Way] | None = None
        self._lease: ExportLease | None = None
        self._renewing: asyncio.Task[None] | None = None

    # ── the session ──────────────────────────────────────────────────────────────────────────────────────────────────

    async def connect(self) -> None:
        await asyncio.to_thread(self._session.open)
        self._keeping = asyncio.create_task(self._keep_alive())

    async def _keep_alive(self) -> None:
        while True:
            await asyncio.sleep(KEEP_ALIVE_S)
            with contextlib.suppress(SynvirtError):  # whoever asks next learns it
                await asyncio.to_thread(self._session.keep_alive)

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
        return About(str(about.name), version, tuple(self._privileges()))

    def _privileges(self) -> list[SourceCheck]:
        """A privilege may be given on a part of the inventory alone: then a VM or a datastore of that part has it."""
        vim = library().vim
        needed = self._needed_privileges()
        samples = [one.id for one in self._session.all_of([vim.VirtualMachine], ("name",), what="look for VMs")[:1]]
        stores = [one.id for one in self._session.all_of([vim.Datastore], ("name",), what="look for datastores")[:1]]

        def ask(content: Any) -> Any:
            entities = [
                content.rootFolder,
                *(self._session.managed(vim.VirtualMachine, one) for one in samples),
                *(self._session.managed(vim.Datastore, one) for one in stores),
            ]
            key = content.sessionManager.currentSession.key
            wanted = [privilege for privilege, _ in needed]
            return content.authorizationManager.HasPrivilegeOnEntities(entities, key, wanted)

        try:
            answer = self._session.call("say what we may do", ask)
        except Internal as error:  # hosts of some versions do not know the question
            return [SourceCheck(name="privileges", ok=True, detail=f"not known: {error.detail}")]
        granted = {one.privId for entity in answer for one in entity.privAvailability if one.isGranted}
        user = self._session.login_.user
        return [
            SourceCheck(name=f"privilege {privilege}", ok=True, detail=f"to {what_for}")
            if privilege in granted
            else SourceCheck(
                name=f"privilege {privilege}",
                ok=False,
                detail=f"{user} lacks it; it is needed to {what_for}",
                hint="give the user a role with it, on the root folder or on the VMs that are to move",
            )
            for privilege, what_for in needed
        ]

    def _needed_privileges(self) -> list[tuple[str, str]]:
        if self._options.transport != "lease":
            return list(PRIVILEGES)
        return [*(one for one in PRIVILEGES if not one[0].startswith("Datastore.")), EXPORT]

    async def supports_warm(self) -> bool:
        library()
        return True

    async def list_vms(self) -> list[VmRow]:
        return await asyncio.to_thread(self._list_vms)

    def _list_vms(self) -> list[VmRow]:
        vim = library().vim
        found = self._session.all_of([vim.VirtualMachine], LISTED, what="list its VMs")
        folders = self._folders()
        return [
            row(one.id, one.properties, _path(folders, one.properties.get("parent")))
            for one in found
            if not one.properties.get("summary.config.template")
        ]

    def _folders(self) -> Mapping[str, tuple[str, Any]]:
        """Of each folder and datacenter its name and what it lies in."""
        vim = library().vim
        found = self._session.all_of([vim.Folder, vim.Datacenter], ("name", "parent"), what="list its folders")
        return {one.id: (str(one.properties.get("name", "")), one.properties.get("parent")) for one in found}

    async def inspect(self, vm_id: str) -> VmManifest:
        return await asyncio.to_thread(self._inspect, vm_id)

    def _inspect(self, vm_id: str) -> VmManifest:
        found = self._vm(vm_id, INSPECTED)
        stores = found.get("datastore") or ()
        types = self._store_types(stores)
        chosen = self._chosen_way(found.get("config.hardware.device") or (), stores, types)
        return manifest(
            vm_id,
            found,
            types,
            whole_chains=chosen.name != "datastore",
            read_by=chosen.told,
            no_deltas=chosen.no_deltas,
        )

    def _store_types(self, stores: Sequence[Any]) -> Mapping[str, str]:
        found = [
            self._session.properties(store, ("summary.name", "summary.type"), what="look at a datastore") for store in stores
        ]
        return {str(store.get("summary.name")): str(store.get("summary.type")) for store in found}

    def _chosen_way(self, devices: Sequence[Any], stores: Sequence[Any], types: Mapping[str, str]) -> Way:
        has_vddk = self._options.vddk_libdir is not None
        asked = self._options.transport == "auto" and not has_vddk
        missing = FILES if asked and stores and not self._may_read_files(stores) else None
        return way(self._options.transport, has_vddk=has_vddk, devices=devices, store_types=types, missing_privilege=missing)

    def _may_read_files(self, stores: Sequence[Any]) -> bool:
        """Of all these datastores; where the platform does not say, it is tried."""

        def ask(content: Any) -> Any:
            key = content.sessionManager.currentSession.key
            return content.authorizationManager.HasPrivilegeOnEntities(list(stores), key, [FILES])

        try:
            answer = self._session.call("say what we may do", ask)
        except Internal:
            return True
        return all(one.isGranted for entity in answer for one in entity.privAvailability)

    def _vm(self, vm_id: str, paths: tuple[str, ...]) -> Mapping[str, Any]:
        found = self._session.properties(self._session.machine(vm_id), paths, what=f"inspect {vm_id}")
        if not found:
            raise VmNotFound(f"{self._session.host} has no VM {vm_id}", hint="list its VMs: it may have been registered anew")
        return found

    # ── snapshots and bytes ──────────────────────────────────────────────────────────────────────────────────────────

    async def enable_cbt(self, vm_id: str, disks: Collection[str]) -> None:
        """Of the whole VM: the platform knows no less."""
        await asyncio.to_thread(vim_changes.enable, self._session, vm_id)

    async def snapshot(self, vm_id: str, name: str) -> SnapshotRef:
        return await asyncio.to_thread(vim_changes.take, self._session, vm_id, name)

    async def open_disk(self, vm_id: str, snapshot: SnapshotRef, disk: Disk, since: str | None) -> ReaderSpec:
        spec = await asyncio.to_thread(self._open_disk, vm_id, snapshot.id, disk, since)
        if self._lease is not None and self._renewing is None:
            self._renewing = asyncio.create_task(self._renew(self._lease))
        return spec

    def _open_disk(self, vm_id: str, snapshot_id: str, disk: Disk, since: str | None) -> ReaderSpec:
        devices = vim_changes.devices_of(self._session, snapshot_id)
        device = next((one for one in vim_machines.virtual_disks(devices) if str(one.key) == disk.key), None)
        if device is None:
            raise SnapshotFailed(f"snapshot {snapshot_id} of {vm_id} has no disk {disk.key}")
        areas: tuple[tuple[int, int], ...] | None = None
        if since is not None and self._options.transport != "lease":
            # Before all else: the longer ago the snapshot, the likelier its tracking was reset meanwhile.
            areas = vim_changes.changed(self._session, vm_id, snapshot_id, device, since)
        chosen = self._way_to(vm_id, snapshot_id, devices)
        if chosen.name == "lease":
            if since is not None:
                raise CbtUnsupported(f"disk {disk.key} of {vm_id}: {chosen.no_deltas}", hint="move the VM cold")
            return self._leased(snapshot_id).disk(device, devices)
        if areas is not None:
            return ChangedSpec(over=self._whole(vm_id, snapshot_id, device, chosen), areas=areas)
        if chosen.name == "vddk":
            return self._whole(vm_id, snapshot_id, device, chosen)  # VDDK knows by itself what is allocated
        return self._files(vm_id, device, vim_changes.allocated(self._session, vm_id, snapshot_id, device))

    def _way_to(self, vm_id: str, snapshot_id: str, devices: Sequence[Any]) -> Way:
        """As it was shown when the job was planned, unless privileges or datastores have changed since."""
        if self._way is None or self._way[0] != snapshot_id:
            stores = self._vm(vm_id, ("name", "datastore")).get("datastore") or ()
            self._way = (snapshot_id, self._chosen_way(devices, stores, self._store_types(stores)))
        return self._way[1]

    def _leased(self, snapshot_id: str) -> ExportLease:
        """One lease for all disks of a snapshot: a second one would be refused."""
        if self._lease is not None and self._lease.snapshot_id != snapshot_id:
            self._lease.end()
            self._lease = None
        if self._lease is None:
            # Known before it is ready, so that it is ended whatever comes.
            self._lease = ExportLease(self._session, snapshot_id)
            self._lease.open()
        return self._lease

    async def _renew(self, lease: ExportLease) -> None:
        while True:
            await asyncio.sleep(lease.renewed_every_s)
            if not await asyncio.to_thread(lease.renew):
                return

    async def _end_lease(self) -> None:
        if self._renewing is not None:
            self._renewing.cancel()
            self._renewing = None
        lease, self._lease = self._lease, None
        if lease is not None:
            await asyncio.to_thread(lease.end)

    def _whole(self, vm_id: str, snapshot_id: str, device: Any, chosen: Way) -> ReaderSpec:
        session, options = self._session, self._options
        if chosen.name == "datastore" or options.vddk_libdir is None:
            return self._files(vm_id, device, None)
        return VddkSpec(
            host=session.host,
            port=session.port,
            user=session.login_.user,
            password=session.login_.password,
            verify_tls=options.verify_tls,
            fingerprint_sha256=options.fingerprint_sha256,
            vm_id=vm_id,
            snapshot_id=snapshot_id,
            file=str(device.backing.fileName),
            libdir=options.vddk_libdir,
            transports=options.vddk_transports,
        )

    def _files(self, vm_id: str, device: Any, areas: tuple[tuple[int, int], ...] | None) -> ReaderSpec:
        """The disk from the datastore's files: the flat one, and what snapshots of the operator's have laid over it."""
        layers = vim_machines.chain(device.backing)
        if layers is None:
            raise UnsupportedFormat(
                f"disk {device.key} of {vm_id} is not kept in files that we read",
                hint="move it to another datastore as a thick or thin disk, or install VDDK and set options.vddk_libdir",
            )
        *deltas, base = layers
        flat = self._file(vm_id, base, int(device.capacityInBytes))
        flat = replace(flat, path=flat.path.removesuffix(".vmdk") + "-flat.vmdk")
        if not deltas:
            return replace(flat, areas=areas)
        disk: ReaderSpec = flat
        for delta in reversed(deltas):
            described = self._file(vm_id, delta, None)
            extent = vim_changes.sparse_extent(described)
            disk = DeltaSpec(over=replace(described, path=extent), parent=disk, name=extent)
        return disk

    def _file(self, vm_id: str, backing: Any, size: int | None) -> DatastoreSpec:
        store, _, path = str(backing.fileName).removeprefix("[").partition("] ")
        session, options = self._session, self._options
        return DatastoreSpec(
            host=session.host,
            port=session.port,
            user=session.login_.user,
            password=session.login_.password,
            session_manager=session.session_manager,
            verify_tls=options.verify_tls,
            fingerprint_sha256=options.fingerprint_sha256,
            datacenter=self._datacenter(vm_id, getattr(backing, "datastore", None)),
            datastore=store,
            path=path,
            size_bytes=size,
        )

    def _datacenter(self, vm_id: str, store: Any) -> str:
        """The inventory path of the datacenter that the disk's datastore lies in: /folder names datastores by it."""
        vim = library().vim
        within = self._session.machine(vm_id) if store is None else store
        found = self._session.properties(within, ("name", "parent"), what="look at a datastore")
        parent, names = found.get("parent"), list[str]()
        for _ in range(FOLDERS_DEEP_MAX):
            if parent is None:
                break
            found = self._session.properties(parent, ("name", "parent"), what="look at a folder")
            if isinstance(parent, vim.Datacenter) or names:
                names.insert(0, str(found.get("name", "")))
            parent = found.get("parent")
        if not names:
            raise Internal(f"{vm_id} lies in no datacenter that {self._session.login_.user} may see")
        return "/".join(names[1:] if len(names) > 1 else names)  # the root folder has no place in a path

    async def release(self, vm_id: str, name: str) -> None:
        """A change id outlives its snapshot: what held the data may go."""
        await self.cleanup(vm_id, name)

    async def cleanup(self, vm_id: str, name: str) -> None:
        await self._end_lease()
        await asyncio.to_thread(vim_changes.remove, self._session, vm_id, (name, vim_changes.STUN))

    # ── off, on, marked ──────────────────────────────────────────────────────────────────────────────────────────────

    async def shutdown(self, vm_id: str) -> None:
        await asyncio.to_thread(self._shutdown, vm_id)

    def _shutdown(self, vm_id: str) -> None:
        if self._is_off(vm_id):
            return
        if self._asked_to_shut_down(vm_id):
            deadline = time.monotonic() + self._options.shutdown_timeout_s
            while time.monotonic() < deadline:
                if self._is_off(vm_id):
                    return
                time.sleep(OFF_POLL_S)
        self._power(vm_id, "power it off", "PowerOffVM_Task", wanted="poweredOff")

    def _asked_to_shut_down(self, vm_id: str) -> bool:
        """False: nobody in the guest heard it."""
        vim = library().vim
        deaf = (
            vim.fault.ToolsUnavailable,
            vim.fault.InvalidState,
            vim.fault.TaskInProgress,
            library().vmodl.fault.NotSupported,
        )

        def ask(_: Any) -> bool:
            try:
                self._session.machine(vm_id).ShutdownGuest()
            except deaf:
                return False
            return True

        return self._session.call(f"shut {vm_id} down", ask)

    def _is_off(self, vm_id: str) -> bool:
        return self._vm(vm_id, ("runtime.powerState",)).get("runtime.powerState") == "poweredOff"

    async def power_on(self, vm_id: str) -> None:
        await asyncio.to_thread(self._power, vm_id, "power it on", "PowerOnVM_Task", wanted="poweredOn")

    def _power(self, vm_id: str, what: str, task_name: str, *, wanted: str) -> None:
        def state() -> Any:
            return self._vm(vm_id, ("runtime.powerState",)).get("runtime.powerState")

        if state() == wanted:
            return
        try:
            task = self._session.call(what, lambda _: getattr(self._session.machine(vm_id), task_name)())
            self._session.wait(task, what=what, timeout_s=POWER_TIMEOUT_S)
        except Internal:
            if state() != wanted:  # else it came there by itself meanwhile
                raise

    async def mark(self, vm_id: str, note: str) -> None:
        await asyncio.to_thread(self._mark, vm_id, note)

    def _mark(self, vm_id: str, note: str) -> None:
        present = str(self._vm(vm_id, ("name", "config.annotation")).get("config.annotation") or "")
        if note in present:
            return
        spec = library().vim.vm.ConfigSpec(annotation="\n".join(filter(None, (present, note))))
        what = "note that it has moved"
        task = self._session.call(what, lambda _: self._session.machine(vm_id).ReconfigVM_Task(spec))
        self._session.wait(task, what=what, timeout_s=POWER_TIMEOUT_S)


def _path(folders: Mapping[str, tuple[str, Any]], parent: Any) -> str:
    """As people see it: datacenter and folders, without the folder `vm` that each datacenter has."""
    names: list[str] = []
    for _ in range(FOLDERS_DEEP_MAX):
        found = folders.get(parent._moId) if parent is not None else None  # noqa: SLF001
        if found is None:
            break
        names.insert(0, found[0])
        parent = found[1]
    return "/".join(name for name in names if name not in ("vm", "Datacenters"))
