"""Opens the disks of a snapshot by one of the ways in ways.py. Blocking code; only the lease's renewal is asyncio.

adapter ─▶ SnapshotDisks.open ─▶ VddkSpec │ DatastoreSpec (files.py) │ LeaseSpec (lease.py)
"""

import asyncio
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Final, NamedTuple

import structlog

from synvirt.disks.specs import ChangedSpec, ReaderSpec, VddkSpec
from synvirt.disks.vsphere.datastore import FileClosed, ReadForbidden
from synvirt.errors import (
    AuthFailed,
    CbtUnsupported,
    DiskReadFailed,
    Internal,
    SnapshotFailed,
    SourceUnreachable,
    UnsupportedFormat,
)
from synvirt.live.vsphere import changes as vim_changes
from synvirt.live.vsphere import files as vim_files
from synvirt.live.vsphere.disks import OBJECT_STORES, allocated_of, capacity_of, chain, store_of, stores_of, virtual_disks
from synvirt.live.vsphere.form import VimOptions
from synvirt.live.vsphere.inventory import Inventory
from synvirt.live.vsphere.lease import ExportLease
from synvirt.live.vsphere.session import VimSession
from synvirt.live.vsphere.ways import Way, mostly_empty
from synvirt.model.machine import Disk

log = structlog.get_logger(__name__)

# How long to wait for a lease that only saves bytes. An old lease may be in the way, and the guest may be off meanwhile.
SPARER_BUSY_S: Final = 30.0
# The pauses before files are tried again that could be read before, and cannot be opened now.
FILES_PAUSES_S: Final = (5.0, 15.0, 30.0)
# A deep test's name of the way by a host, and how many hosts it tries: each takes some seconds.
_BY_HOST: Final = "esxi "
HOSTS_TRIED: Final = 16
# The source of files by options.transport; a host first, where it names neither.
_FILES_ASKED: Final[Mapping[str, vim_files.Asked]] = {"datastore": "vcenter", "esxi": "host"}


class _Wanted(NamedTuple):
    """A disk in a snapshot: its device among the VM's `devices`, both from the snapshot."""

    vm_id: str
    snapshot_id: str
    device: Any
    devices: Sequence[Any]


class SnapshotDisks:
    """The disks of the snapshot that was opened last. It has that snapshot's export lease, if there is one; `end` ends it."""

    def __init__(self, session: VimSession, options: VimOptions, inventory: Inventory) -> None:
        self._session, self._options, self._inventory = session, options, inventory
        # The id of the snapshot, and the way to each of its disks.
        self._ways: tuple[str, Mapping[str, Way]] | None = None
        self._lease: ExportLease | None = None
        # The snapshot whose lease was refused, where a lease would only have saved bytes.
        self._unexportable: str | None = None
        self._renewing: asyncio.Task[None] | None = None
        self._renewed: ExportLease | None = None

    async def open(self, vm_id: str, snapshot_id: str, disk: Disk, since: str | None) -> ReaderSpec:
        """Like LiveAdapter.open_disk. While a lease is held, it is renewed."""
        spec = await asyncio.to_thread(self._open, vm_id, snapshot_id, disk, since)
        if self._lease is not self._renewed:
            self._stop_renewing()
        if self._lease is not None and self._renewing is None:
            self._renewed, self._renewing = self._lease, asyncio.create_task(self._renew(self._lease))
        return spec

    async def end(self) -> None:
        """Ends the lease. Idempotent."""
        self._stop_renewing()
        lease, self._lease = self._lease, None
        if lease is not None:
            await asyncio.to_thread(lease.end)

    def forget(self) -> None:
        """The next disk is opened by the platform's state at that time."""
        self._ways = self._unexportable = None

    def ways_to(self, vm_id: str, snapshot_id: str, disk: Disk) -> list[str]:
        """Like LiveAdapter.ways_to."""
        device = self._wanted(vm_id, snapshot_id, disk).device
        types, _ = self._inventory.stores(stores_of([device]))
        in_files = chain(device.backing) is not None and types.get(store_of(device, types)) not in OBJECT_STORES
        hosts = vim_files.hosts_of(self._session, device)[:HOSTS_TRIED] if in_files else []
        return [
            *(["datastore"] if in_files else []),
            *(f"{_BY_HOST}{host}" for host in hosts),
            "lease",
            *(["vddk"] if self._options.vddk_libdir is not None else []),
        ]

    def open_by(self, way: str, vm_id: str, snapshot_id: str, disk: Disk) -> ReaderSpec:
        """Like LiveAdapter.open_by."""
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

    def _wanted(self, vm_id: str, snapshot_id: str, disk: Disk) -> _Wanted:
        devices = vim_changes.devices_of(self._session, snapshot_id)
        device = next((one for one in virtual_disks(devices) if str(one.key) == disk.key), None)
        if device is None:
            raise SnapshotFailed(f"snapshot {snapshot_id} of {vm_id} has no disk {disk.key}")
        return _Wanted(vm_id, snapshot_id, device, devices)

    def _open(self, vm_id: str, snapshot_id: str, disk: Disk, since: str | None) -> ReaderSpec:
        wanted = self._wanted(vm_id, snapshot_id, disk)
        device = wanted.device
        areas: tuple[tuple[int, int], ...] | None = None
        if since is not None and self._options.transport != "lease":
            # First of all: the more time has passed since the snapshot, the likelier its tracking was reset meanwhile.
            areas = vim_changes.changed(self._session, vm_id, snapshot_id, device, since)
        match self._way_to(wanted):
            case Way("lease") as chosen:
                return self._exported(wanted, chosen, since)
            case Way("vddk"):
                whole = self._by_vddk(wanted)  # VDDK itself knows what is allocated
                return whole if areas is None else ChangedSpec(over=whole, areas=areas)
            case _:
                return self._by_files(wanted, since, areas)

    def _way_to(self, wanted: _Wanted) -> Way:
        """The way that the plan showed, unless privileges or datastores have changed since."""
        if self._ways is None or self._ways[0] != wanted.snapshot_id:
            stores = self._inventory.vm(wanted.vm_id, ("name", "datastore")).get("datastore") or ()
            ways = self._inventory.ways(virtual_disks(wanted.devices), self._inventory.stores(stores)[0])
            self._ways = (wanted.snapshot_id, ways)
        return self._ways[1][str(wanted.device.key)]

    # ── by files ─────────────────────────────────────────────────────────────────────────────────────────────────────

    def _by_files(self, wanted: _Wanted, since: str | None, areas: tuple[tuple[int, int], ...] | None) -> ReaderSpec:
        """By an export lease instead, where the host forbids us to read the files."""
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
            log.warning(
                "a disk's files are forbidden; it is read by an export lease", vm=vm_id, disk=device.key, cause=error.detail
            )
            return self._exported(wanted, Way("lease", error.detail), since)

    def _knocked(self, wanted: _Wanted) -> ReaderSpec:
        """The files of a disk that was read before. Another way has no deltas, so a short fault is waited for."""
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
        """A disk whose allocated parts the platform does not list. By an export lease, where the plan expects that to save most
        of it; if the lease fails during the read, `whole` goes on from there."""
        vm_id, snapshot_id, device, _ = wanted
        # The plan of a tracked disk says «by its files», even where its host does not list what is allocated.
        tracked = getattr(device.backing, "changeId", None)
        if tracked or self._options.transport != "auto" or self._unexportable == snapshot_id:
            return whole
        # From the VM's present state, as a snapshot has no list of files.
        found = self._inventory.vm(vm_id, ("name", "config.hardware.device", "layoutEx.file"))
        files = found.get("layoutEx.file") or ()
        disks = virtual_disks(found.get("config.hardware.device") or ())
        taken = next((allocated_of(disk, files) for disk in disks if disk.key == device.key), None)
        if not mostly_empty(capacity_of(device), taken):
            return whole
        try:
            return replace(self._leased(snapshot_id, SPARER_BUSY_S).disk(device, wanted.devices), instead=whole)
        except (AuthFailed, Internal, SourceUnreachable, UnsupportedFormat) as error:
            log.info("no export lease: the whole disk is read", vm=vm_id, disk=device.key, cause=error.detail)
            # Waited for once, and not again by each disk.
            self._unexportable = snapshot_id
            return whole

    # ── by an export lease ───────────────────────────────────────────────────────────────────────────────────────────

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
            # Stored before it is ready, so that `end` ends it in any case.
            lease = self._lease = ExportLease(self._session, snapshot_id)
            try:
                lease.open(busy_timeout_s)
            except BaseException:
                self._lease = None
                lease.end()
                raise
        return self._lease

    async def _renew(self, lease: ExportLease) -> None:
        while True:
            await asyncio.sleep(lease.renewed_every_s)
            if not await asyncio.to_thread(lease.renew):
                return

    def _stop_renewing(self) -> None:
        if self._renewing is not None:
            self._renewing.cancel()
        self._renewed = self._renewing = None

    # ── by VDDK ──────────────────────────────────────────────────────────────────────────────────────────────────────

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
