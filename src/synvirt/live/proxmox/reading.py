"""Specs for the disks of a VM: through its QEMU if it runs, through qemu-nbd if it is off. Blocking code."""

import contextlib
import re
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import AbstractContextManager
from typing import Any, Final
from urllib.parse import quote

import structlog

from synvirt.disks import open_reader
from synvirt.disks.specs import ChangedSpec, NbdSpec, ReaderSpec
from synvirt.errors import (
    AuthFailed,
    BadRequest,
    CbtReset,
    DiskReadFailed,
    Internal,
    SnapshotFailed,
    SourceUnreachable,
)
from synvirt.kvm.qmp import NoQemu, Qmp
from synvirt.live import SnapshotRef, refuse_power_off
from synvirt.live.holding import FROZEN_MOST_S, Hold
from synvirt.live.proxmox import backup_access, bitmaps, farewell
from synvirt.live.proxmox.cluster import SETTLE_S, Cluster
from synvirt.live.proxmox.config import Drive, drives, may_freeze, volume_of
from synvirt.live.proxmox.farewell import Notes
from synvirt.live.proxmox.form import Options
from synvirt.live.proxmox.manifest import disk_format, untracked, untracked_vm
from synvirt.live.proxmox.node import GAPS, QMP_SOCKET, Node
from synvirt.live.proxmox.seen import Seen, ha_state, power_state
from synvirt.machines.texts import clean
from synvirt.model.plan import Shutdown
from synvirt.sizes import MIB

log = structlog.get_logger(__name__)

# More than a guest usually overwrites while its disks are read; never more than the disks' size.
LEAST_FREE_BYTES: Final = 512 * MIB
# UEFI variables: a volume of 528 KiB or 4 MiB.
VARIABLES_BYTES_MAX: Final = 4 * MIB
_STORAGES_TO_ACTIVATE: Final = frozenset({"lvm", "lvmthin"})
_NAME: Final = re.compile(r"synvirt-[A-Za-z0-9-]{1,80}")
_LV: Final = re.compile(r"/dev/([A-Za-z0-9._+-]+/[A-Za-z0-9._+-]+)")
_POLL_S: Final = 0.5
# As long as a job waits for a guest that it may not power off.
HELD_S: Final = 86_400.0


def image(path: str, volume: str) -> str:
    """The output of `pvesm path`, in the form for qemu-nbd. SnapshotFailed, where a part of it has a meaning for a shell."""
    if not path.startswith("rbd:"):
        return path
    # Monitors of a Ceph cluster on other hosts (PVE::Storage::RBDPlugin separates them by semicolons); librados accepts commas,
    # too.
    named = path.replace(";", ",")
    if not GAPS["image"].fullmatch(named):
        raise SnapshotFailed(
            f"{volume}: its path on the node has characters that are not passed to a shell: {clean(path)[:200]!r}",
            hint="name the storage's monitors by IPv4 addresses or names, without ports, or move the VM while it runs",
        )
    return named


class Reading:
    """One VM in one session, on its present node."""

    def __init__(
        self,
        cluster: Cluster,
        node: Node,
        row: dict[str, Any],
        *,
        notes: Notes,
        other: Callable[[str], Node],
        options: Options,
        frozen: Callable[[], AbstractContextManager[Hold]],
    ) -> None:
        """`other`: another node of the cluster, by name. `frozen`: freezes the guest's file systems during the block."""
        self._cluster, self._node, self._row = cluster, node, row
        self._notes, self._other, self._options, self._frozen = notes, other, options, frozen
        self.vm_id = str(row.get("vmid", ""))
        self.what = f"VM {self.vm_id} ({row.get('name', '')})"

    # ── freezing ─────────────────────────────────────────────────────────────────────────────────────────────────────

    def snapshot(self, name: str, disks: Collection[str] | None) -> SnapshotRef:
        """Freezes these disks (None: all) at one moment, or finds that this is done already. SnapshotFailed,
        SourceUnreachable."""
        _check_name(name)
        seen = self._seen()
        self._cluster.refuse_locked(self._row, dict(seen.config))
        self._notes.held_on(name, self._node.name)
        there = [drive for drive in drives(seen.config) if disks is None or drive.key in disks]
        if seen.power_state == "off":
            return SnapshotRef(id=name)
        if seen.power_state != "on":
            raise SnapshotFailed(f"{self.what} is {seen.power_state}", hint="resume it or shut it down at the source")
        reasons = [*untracked_vm(seen), *(reason for drive in there if (reason := untracked(drive, seen)))]
        if reasons:
            raise SnapshotFailed(f"{self.what} cannot be read while it runs: {'; '.join(reasons)}", hint="move it cold")
        self._hold(name, there, seen.config)
        return SnapshotRef(id=name, change_ids={drive.key: name for drive in there})

    def _hold(self, name: str, there: Collection[Drive], config: Mapping[str, Any]) -> None:
        with self.qmp() as qmp:
            if all(bitmaps.is_held(qmp, name, drive.key) for drive in there):
                return
            job = name.rpartition("-")[0]
            for other in bitmaps.held(qmp):
                if other != name and other.rpartition("-")[0] != job:
                    raise SnapshotFailed(f"{self.what} is read by another job ({other})", hint="wait until it is over")
                if other != name or name in backup_access.held(qmp).values():
                    # The pass of that snapshot is done, and its bitmap stays: its frozen data is not needed any more. The same
                    # is true of a snapshot of this name that was cut off before any reader had its nodes' names.
                    self._end(qmp, other, forget=False)
            by_access = self._options.backup_access and backup_access.offered(qmp)
        overlays = self._overlays(name, there)
        try:
            with self._quiet(config), self.qmp() as qmp:
                bitmaps.begin(qmp, name, overlays, self._socket(name), by_access=by_access)
        except BaseException:
            with contextlib.suppress(Exception):
                self.release(name)
            raise

    @contextlib.contextmanager
    def _quiet(self, config: Mapping[str, Any]) -> Iterator[None]:
        """The guest's file systems are frozen, where its agent can; they are thawed again in any case."""
        quiesce = self._options.quiesce
        if quiesce == "off":
            yield
            return
        holding = self._frozen() if may_freeze(config) else contextlib.nullcontext(Hold())
        with contextlib.ExitStack() as after, holding as hold:
            after.callback(self._thaw_if_killed, hold)
            if quiesce == "require" and not hold.quiet:
                raise SnapshotFailed(
                    f"{self.what} cannot be quiesced: its guest agent does not answer, or our user may not ask it to freeze",
                    hint="install qemu-guest-agent in it and switch it on in its options, or set options.quiesce to try",
                )
            yield
            if hold.quiet and not hold.lasted():
                log.warning("guest was thawed before its disks were frozen", vm=self.vm_id)
                if quiesce == "require":
                    raise SnapshotFailed(
                        f"{self.what} was thawed after {FROZEN_MOST_S:.0f} s, before its disks were frozen",
                        hint="its node is busy: it is tried again; or set options.quiesce to try",
                    )

    def _thaw_if_killed(self, hold: Hold) -> None:
        """The process that was to thaw it is gone."""
        if hold.killed:
            self._cluster.thaw(self.vm_id)

    def way(self) -> str | None:
        """What freezes its disks while it runs: `backup-access` or `qemu`; None, where its QEMU does not say."""
        try:
            with self.qmp() as qmp:
                return "backup-access" if self._options.backup_access and backup_access.offered(qmp) else "qemu"
        except (SourceUnreachable, Internal):
            return None

    def _overlays(self, name: str, there: Collection[Drive]) -> dict[str, str]:
        """Files on the node for data that the guest overwrites. SnapshotFailed, where there is no room."""
        with self.qmp() as qmp:
            sizes = {key: device.size_bytes for key, device in bitmaps.devices(qmp).items()}
            saving = bitmaps.saving(qmp, name, [drive.key for drive in there])
        free, capacity = self._node.make_scratch(), sum(sizes.get(drive.key, 0) for drive in there)
        if free < (wanted := min(LEAST_FREE_BYTES, capacity)):
            raise SnapshotFailed(
                f"{self._node.scratch} on {self._node.where} has {free} bytes free, and {wanted} are needed: "
                "it holds what the guest overwrites while it is read",
                hint="make room there, or set options.scratch_dir to a folder with more",
            )
        overlays = {drive.key: self._node.file(bitmaps.overlay_file(name, drive.key)) for drive in there}
        for key, file in overlays.items():
            # A file that QEMU has open already contains what the guest overwrote.
            if key not in saving:
                self._node.run("overlay", file=file, bytes=str(sizes.get(key, 0)), failing=SnapshotFailed)
        return overlays

    def release(self, name: str) -> None:
        self._let_go(name, forget=False)

    def cleanup(self, name: str) -> None:
        """Removes all of the snapshot on nodes and in this host's notes."""
        self._let_go(name, forget=True)
        made_on = self._notes.held_on(name, None)
        if made_on is not None and made_on != self._node.name:
            # The VM has moved. A node that is off must be cleaned by hand, or at its next start.
            with contextlib.suppress(AuthFailed, SourceUnreachable):
                self._other(made_on).clear(f"{name}.")
        self._notes.forget(self.vm_id, name)
        self._notes.let_go(name)

    def _let_go(self, name: str, *, forget: bool) -> None:
        _check_name(name)
        try:
            with self.qmp() as qmp:
                self._end(qmp, name, forget=forget)
        except NoQemu:
            self._node.clear(f"{name}.")
        self._deactivate()

    def _end(self, qmp: Qmp, name: str, *, forget: bool) -> None:
        bitmaps.end(qmp, name, forget=forget)
        self._node.clear(f"{name}.")

    # ── reading ──────────────────────────────────────────────────────────────────────────────────────────────────────

    def open(self, name: str, key: str, since: str | None) -> ReaderSpec:
        """A disk of the snapshot `name` as a spec: whole, or what changed since a change id. SnapshotFailed, CbtReset."""
        _check_name(name)
        config = self._cluster.config(self._row)
        drive = next((one for one in drives(config) if one.key == key), None)
        if drive is None:
            raise SnapshotFailed(f"{self.what} has no disk {key} any more")
        if power_state(self._cluster.status(self._row)) == "off":
            return self._open_off(name, drive, since)
        return self._open_running(name, key, since)

    def _open_running(self, name: str, key: str, since: str | None) -> ReaderSpec:
        with self.qmp() as qmp:
            if not bitmaps.is_held(qmp, name, key):
                raise SnapshotFailed(
                    f"disk {key} of {self.what} is no longer frozen by {name}: its QEMU was ended, restarted or "
                    "moved to another node, or the scratch folder had no room",
                )
            if since is not None and not bitmaps.has_changes(qmp, name, key, since):
                raise self._reset(key, since)
        bitmap = None if since is None else f"qemu:dirty-bitmap:{bitmaps.since_bitmap(name, key, since)}"
        remote = self._socket(name)
        return self._knocked(NbdSpec(uri=self._uri(bitmaps.export_name(name, key), remote), bitmap=bitmap), remote)

    def _open_off(self, name: str, drive: Drive, since: str | None) -> ReaderSpec:
        areas: tuple[tuple[int, int], ...] | None = None
        if since is not None:
            last_start = self._cluster.last_start(self._row)
            areas = self._notes.since(self.vm_id, last_start, bitmaps.export_name(since, drive.key), drive.volume)
            if areas is None:
                raise self._reset(drive.key, since)
        spec = self._served(name, drive)
        return spec if areas is None else ChangedSpec(over=spec, areas=areas)

    def _reset(self, key: str, since: str) -> CbtReset:
        return CbtReset(
            f"disk {key} of {self.what}: what changed since {since} is not known any more: bitmaps are in QEMU's memory, and "
            "it was ended, started again or moved to another node since, or the disk to another volume"
        )

    def _served(self, name: str, drive: Drive) -> NbdSpec:
        """By qemu-nbd on its node, read-only. If an image has QEMU's own locks, they keep the VM from starting meanwhile."""
        export = bitmaps.export_name(name, drive.key)
        self._node.make_scratch()
        remote = self._socket(export)
        spec = NbdSpec(uri=self._uri(export, remote))
        if f"{export}.pid" in self._node.files(f"{export}."):
            try:
                return self._knocked(spec, remote)
            except (SourceUnreachable, DiskReadFailed):
                self._node.clear(f"{export}.")
        path = self._path(drive)
        volumes = self._seen_volumes({drive.key: f"{drive.volume},size=0"})
        form = disk_format(drive, volumes.get(drive.volume))
        self._node.run(
            "serve",
            failing=SnapshotFailed,
            hint="is the storage active on that node, and is the volume in use by something else?",
            format=form,
            export=export,
            file=self._node.file(export),
            image=path,
        )
        return self._knocked(spec, remote)

    def _path(self, drive: Drive) -> str:
        """The volume's path on its node. It exists on return: LVM's volumes are not active while the VM is off."""
        path = self._node.run("path", volume=drive.volume, failing=SnapshotFailed).strip().splitlines()[-1:]
        if not path:
            raise SnapshotFailed(f"{self._node.where} does not say where {drive.volume} lies")
        if self._is_lvm(drive) and (found := _LV.fullmatch(path[0])):
            self._node.run("activate", lv=found.group(1), failing=SnapshotFailed)
        return image(path[0], drive.volume)

    def _is_lvm(self, drive: Drive) -> bool:
        return self._cluster.storage_types(self._row).get(drive.storage) in _STORAGES_TO_ACTIVATE

    def _deactivate(self) -> None:
        """Deactivates it again. A volume in use stays active: the VM was started."""
        config = self._cluster.config(self._row)
        if self._cluster.status(self._row).get("status") != "stopped":
            return
        for drive in drives(config):
            if not drive.storage or not self._is_lvm(drive):
                continue
            with contextlib.suppress(Internal):
                found = _LV.fullmatch(self._node.run("path", volume=drive.volume).strip())
                if found:
                    self._node.run("deactivate", lv=found.group(1))

    def uefi_variables(self, name: str) -> bytes | None:
        """Only while the VM is off."""
        config = self._cluster.config(self._row)
        drive = volume_of(config, "efidisk0")
        if drive is None or power_state(self._cluster.status(self._row)) != "off":
            return None
        try:
            reader = open_reader(self._served(name, drive))
            try:
                if reader.size > VARIABLES_BYTES_MAX:
                    raise Internal(f"{self.what}: its UEFI variables have {reader.size} bytes: that is not a variable store")
                content = bytearray(reader.size)
                reader.read_into(0, memoryview(content))
            finally:
                reader.close()
        finally:
            self._node.clear(f"{name}.")
        return bytes(content)

    # ── off ──────────────────────────────────────────────────────────────────────────────────────────────────────────

    def shut_down(self, timeout_s: float, manner: Shutdown = "polite") -> None:
        """Off on return, and what changed until then is noted."""
        status = self._cluster.status(self._row)
        if status.get("status") == "stopped":
            self._notes.forget_stop(self.vm_id)
            return
        # The cluster's manager itself powers its VMs off after the time that it is given.
        asked_s = HELD_S if manner == "hold" and ha_state(status) else timeout_s + SETTLE_S
        # From before: a start during this invalidates the notes.
        last_start = self._cluster.last_start(self._row)
        volumes = {drive.key: drive.volume for drive in drives(self._cluster.config(self._row))}
        stopped = self._stopped_before(status, last_start)
        with self._kept_alive() as watched:
            if stopped is not None:
                upid, polite = stopped.asked, False
            else:
                upid = None if manner == "force" else self._cluster.ask_off(self._row, asked_s)
                polite = upid is not None and self._gone_off(upid, timeout_s, watched=watched)
                if not polite:
                    refuse_power_off(self.what, manner, timeout_s, self._is_suspended)
            if not polite and watched:
                self._notes.stop(self.vm_id, last_start, upid)
            areas = self._farewell(polite=polite) if watched else {}
        with self._or_resumed():
            if not polite:
                log.warning("guest is powered off by force", vm=self.vm_id, waited_s=timeout_s)
                self._cluster.off_by_force(self._row, upid)
            # The cluster's manager stops no VM before its earlier request has ended.
            if not self._cluster.await_state(self._row, "stopped", 2 * SETTLE_S):
                failed = None if upid is None else self._cluster.failed(upid)
                raise Internal(f"{self.what} does not shut down{f': {failed.detail}' if failed else ''}")
        if areas:
            self._notes.put(self.vm_id, last_start, areas, volumes)
        self._notes.forget_stop(self.vm_id)

    def _is_suspended(self) -> bool:
        return power_state(self._cluster.status(self._row)) == "suspended"

    def _stopped_before(self, status: Mapping[str, Any], last_start: str) -> farewell.Stopped | None:
        """The note of an earlier shutdown that had stopped the guest, and did not end. A guest that runs on, or was started
        since, is asked like any other."""
        stopped = self._notes.stopped(self.vm_id)
        if stopped is None:
            return None
        if status.get("qmpstatus") == "paused" and stopped.last_start == last_start:
            return stopped
        self._notes.forget_stop(self.vm_id)
        return None

    def resume(self) -> None:
        """Lets a guest run on that `shut_down` stopped, and that was not powered off then. Does nothing, where it runs."""
        with contextlib.suppress(NoQemu), self.qmp() as qmp:
            if qmp.ask("query-status").get("status") == "paused":
                qmp.ask("cont")
        self._notes.forget_stop(self.vm_id)

    @contextlib.contextmanager
    def _or_resumed(self) -> Iterator[None]:
        """If the block fails, the guest runs on."""
        try:
            yield
        except BaseException:
            with contextlib.suppress(Exception):
                self.resume()
            raise

    @contextlib.contextmanager
    def _kept_alive(self) -> Iterator[bool]:
        """Whether its QEMU has a bitmap of ours: then it stays alive after its guest's end, during the block."""
        try:
            with self.qmp() as qmp:
                marked = bool(bitmaps.marked(qmp))
                for name in bitmaps.held(qmp):
                    self._end(qmp, name, forget=False)
        except (AuthFailed, SourceUnreachable, Internal) as error:
            log.warning("what changed until the end will not be known", vm=self.vm_id, cause=error.detail)
            marked = False
        if not marked:
            yield False
            return
        with farewell.kept_alive(self._node, self.vm_id):
            yield True

    def _gone_off(self, upid: str, timeout_s: float, *, watched: bool) -> bool:
        """Whether the guest has shut down within that time."""
        deadline = time.monotonic() + timeout_s
        while True:
            if self._cluster.status(self._row).get("status") == "stopped":
                return True
            if watched:
                with contextlib.suppress(NoQemu), self.qmp() as qmp:
                    if qmp.ask("query-status").get("status") == "shutdown":
                        return True
            if time.monotonic() > deadline or self._cluster.failed(upid) is not None:
                return False
            time.sleep(_POLL_S)

    def _farewell(self, *, polite: bool) -> farewell.Areas:
        """A guest that does not shut down is stopped first: from here on it writes nothing."""
        try:
            with self.qmp() as qmp:
                if not polite:
                    qmp.ask("stop")
                return farewell.changes(qmp, self._node)
        except (SourceUnreachable, DiskReadFailed, CbtReset, Internal) as error:
            log.warning("what changed until the end is not known", vm=self.vm_id, cause=error.detail)
            return {}

    # ── helpers ──────────────────────────────────────────────────────────────────────────────────────────────────────

    def qmp(self) -> Qmp:
        return Qmp(self._node.socket(QMP_SOCKET.format(self.vm_id)), self.what)

    def _seen(self) -> Seen:
        return Seen(self.vm_id, self._row, self._cluster.config(self._row), self._cluster.status(self._row))

    def _seen_volumes(self, config: Mapping[str, Any]) -> Mapping[str, Any]:
        return self._cluster.volumes(self._row, dict(config))

    def _socket(self, name: str) -> str:
        return self._node.file(f"{name}.sock")

    def _uri(self, export: str, remote: str) -> str:
        local = self._node.tunnel(remote)
        return f"nbd+unix:///{quote(export, safe='')}?socket={quote(str(local), safe='/')}"

    def _knocked(self, spec: NbdSpec, remote: str) -> NbdSpec:
        """Tests the way to a disk, by the socket there, before anything relies on it."""
        try:
            open_reader(spec).close()
        except SourceUnreachable as error:
            if cause := self._node.tunnel_cause(remote):
                raise SourceUnreachable(f"{error.detail}: {cause}", hint=error.hint) from error
            raise
        return spec


def _check_name(name: str) -> None:
    if not _NAME.fullmatch(name):
        raise BadRequest(f"a snapshot is not called {name[:100]!r}")
