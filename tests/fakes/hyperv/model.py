"""What our scripts find and do on a Hyper-V host, without one: shapes and codes from Microsoft's class pages.

A guess where those are silent: that a reference point lists disks by their VHDX' identifiers, and that a snapshot has the
VM's notes.
"""

import re
import threading
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any
from uuid import UUID, uuid4

from tests.fakes.contents import Content
from tests.fakes.hyperv.files import DiskFiles
from tests.fakes.hyperv.wsman import Refusal

RUNNING, OFF, SAVED = 2, 3, 6
FAILED, INVALID_STATE, NOT_FOUND = 32768, 32775, 404
# Which part of a question about changes is answered at once.
ANSWERED_BYTES = 1 << 20
GRAIN = 4096


@dataclass
class FakeDisk:
    """`journal`: (number, offset, length) of each write. `tracker`: changes with everything that loses change tracking."""

    bus: int
    controller: int
    location: int
    files: DiskFiles
    identifier: UUID = field(default_factory=uuid4)
    tracker: str = field(default_factory=lambda: uuid4().hex)
    writes: int = 0
    journal: list[tuple[int, int, int]] = field(default_factory=list)
    physical: bool = False
    shared: bool = False
    sector_bytes: int = 512

    def grains(self, since: int, until: int) -> list[int]:
        """Which were written after the write `since`, up to `until`."""
        written = ((at, count) for number, at, count in self.journal if since < number <= until)
        return sorted({grain for at, count in written for grain in range(at // GRAIN, (at + count - 1) // GRAIN + 1)})


@dataclass
class Taken:
    """A recovery snapshot: of each disk the file that was frozen, and how many writes came before."""

    id: str
    notes: str
    frozen: list[tuple[Path, int]]
    level: int


@dataclass
class FakeVm:
    id: str
    name: str
    disks: list[FakeDisk] = field(default_factory=list)
    state: int = RUNNING
    notes: str = ""
    generation: int = 2
    version: str = "9.0"
    checkpoint_type: int = 3
    changed: datetime = field(default_factory=lambda: datetime(2026, 11, 1, tzinfo=UTC))
    snapshots: list[Taken] = field(default_factory=list)
    points: list[dict[str, Any]] = field(default_factory=list)
    checkpoints: list[dict[str, Any]] = field(default_factory=list)
    node: str = ""
    status: str = "None"
    extra: dict[str, Any] = field(default_factory=dict)
    hears: bool = True


class HyperV:
    """`drive`: the Windows path that the shared folder is. `faults`: (script, times, Refusal), in `refuse`."""

    def __init__(self, shared: Path, scratch: Path, drive: str = "D:\\") -> None:
        self.shared, self.scratch, self.drive = shared, scratch, drive
        self.vms: dict[str, FakeVm] = {}
        self.nodes: dict[str, bool] = {}
        self.lock = threading.RLock()
        self.refusals: list[tuple[str, dict[str, Any], Refusal]] = []
        self.about: dict[str, Any] = {}
        self.quiet_fails = False
        # Of exports: how often a job is asked for until it is done; where to, and by what changed; how jobs fail.
        self.job_asks = 1
        self.jobs: dict[str, int] = {}
        self.exported: list[tuple[str, bool]] = []
        self.job_fails: tuple[int, str] | None = None

    def add_vm(self, name: str, *contents: Content, vm_id: str | None = None) -> FakeVm:
        vm = FakeVm(vm_id or str(uuid4()), name)
        folder = self.shared / "VMs" / name
        folder.mkdir(parents=True)
        for number, content in enumerate(contents):
            vm.disks.append(FakeDisk(1, 0, number, DiskFiles.made(folder, f"{name}-{number}", content, self.scratch)))
        self.vms[vm.id] = vm
        return vm

    def guest_writes(self, vm: FakeVm, offset: int, data: bytes, *, disk: int = 0, tracked: bool = True) -> bool:
        with self.lock:
            if vm.state != RUNNING:
                return False
            one = vm.disks[disk]
            one.files.guest_writes(offset, data)
            if tracked:
                one.writes += 1
                one.journal.append((one.writes, offset, len(data)))
            return True

    def content(self, vm: FakeVm, disk: int = 0) -> bytes:
        with self.lock:
            return vm.disks[disk].files.raw.read_bytes()

    def power(self, vm: FakeVm, state: int) -> None:
        with self.lock:
            if vm.state != state:
                vm.state = state
                vm.changed += timedelta(seconds=1)

    def lose_tracking(self, vm: FakeVm) -> None:
        with self.lock:
            for disk in vm.disks:
                disk.tracker = uuid4().hex

    def refuse(self, script: str, refusal: Refusal, **parameters: Any) -> None:
        """The next call of that script, with these parameters, throws so."""
        self.refusals.append((script, parameters, refusal))

    # ── scripts ──────────────────────────────────────────────────────────────────────────────────────────────────────

    def answers(self, node: str = "") -> Any:
        """What a host, or one node of a cluster, answers."""

        def answer(name: str, parameters: dict[str, Any]) -> Any:
            with self.lock:
                for number, (script, wanted, refusal) in enumerate(self.refusals):
                    if script == name and all(parameters.get(key) == value for key, value in wanted.items()):
                        del self.refusals[number]
                        raise refusal
                found = {_lower(key): value for key, value in parameters.items()}
                return getattr(self, f"_{name}")(node, **found)

        return answer

    def _vm(self, node: str, vm_id: str) -> FakeVm:
        found = self.vms.get(vm_id.lower())
        if found is None or found.node != node:
            raise Refusal("Get-VM", NOT_FOUND, f"there is no VM {vm_id}")
        return found

    def _about(self, node: str) -> Any:
        return {
            "name": node or "HV01", "product": "Microsoft Windows Server 2022 Datacenter", "version": "10.0.20348",
            "vm_versions": ["5.0", "8.0", "9.0", "10.0"], "domain": "lab.example", "in_domain": False,
            "user": "HV01\\mover", "nodes": [{"name": name, "up": up} for name, up in self.nodes.items()],
            "administrator": True, "hyperv_administrator": False, **self.about,
        }  # fmt: skip

    def _list(self, node: str) -> Any:
        return {
            "vms": [
                {"id": vm.id, "name": vm.name, "state": vm.state, "cpus": 2, "memory": 512 << 20}
                for vm in self.vms.values()
                if vm.node == node
            ]
        }

    def _inspect(self, node: str, vm_id: str) -> Any:
        vm = self._vm(node, vm_id)
        return {
            "id": vm.id, "name": vm.name, "host": node or "HV01", "state": vm.state, "generation": vm.generation,
            "version": vm.version, "clustered": bool(self.nodes), "checkpoint_type": vm.checkpoint_type, "replication": 0,
            "notes": vm.notes, "status": vm.status, "cpus": 2, "cpus_per_socket": 2, "memory": 512 << 20,
            "memory_dynamic": False, "memory_least": 512 << 20, "memory_most": 1 << 40,
            "firmware": {"secure_boot": False, "template": "", "boot": [{"bus": 1, "controller": 0, "location": 0}]},
            "security": {"tpm": False, "shielded": False},
            "nics": [{
                "id": f"Microsoft:{vm.id}\\aaaa", "mac": "00155D0A0B0C", "legacy": False, "connected": True,
                "switch": "LAN", "addresses": ["192.0.2.7"], "vlan_mode": 0, "vlan": 0,
            }],
            "services": [], "checkpoints": vm.checkpoints, "kvp": [None], "dvds": [], "floppies": [],
            "pci": 0, "gpus": 0, "fibre_channel": 0, "ports": [],
            "drives": self._drives(vm), **vm.extra,
        }  # fmt: skip

    def _state(self, node: str, vm_id: str) -> Any:
        vm = self._vm(node, vm_id)
        return {
            "state": vm.state, "status": vm.status, "version": vm.version, "changed": vm.changed.isoformat(),
            "checkpoint_type": vm.checkpoint_type, "notes": vm.notes, "drives": self._drives(vm),
            "snapshots": [
                {"id": one.id, "notes": one.notes, "drives": self._drives(vm, [path for path, _ in one.frozen])}
                for one in vm.snapshots
            ],
            "points": vm.points,
        }  # fmt: skip

    def _take(self, node: str, vm_id: str, level: int) -> Any:
        vm = self._vm(node, vm_id)
        if vm.checkpoint_type == 2:
            raise Refusal("CreateSnapshot", FAILED, "Checkpoints have been disabled for the virtual machine.")
        if level == 1 and self.quiet_fails:
            raise Refusal("CreateSnapshot", FAILED, "VSS writers inside the virtual machine failed.")
        if vm.snapshots:
            raise Refusal("CreateSnapshot", INVALID_STATE, "a backup of this virtual machine is under way")
        frozen = []
        for disk in vm.disks:
            disk.files.settled()
            frozen.append((disk.files.chain[0], disk.writes))
        vm.snapshots.append(Taken(str(uuid4()), vm.notes, frozen, level))
        for disk in vm.disks:
            disk.files.checkpoint()
        return {"taken": True}

    def _convert(self, node: str, vm_id: str, snapshot_id: str) -> Any:
        vm = self._vm(node, vm_id)
        taken = next((one for one in vm.snapshots if one.id == snapshot_id), None)
        if taken is None:
            raise Refusal("Msvm_VirtualSystemSettingData", NOT_FOUND, "there is no recovery snapshot")
        self._gone(vm, taken)
        point = {
            "id": f"Microsoft:{uuid4()}", "type": 2, "level": taken.level,
            "disks": [str(disk.identifier).upper() for disk in vm.disks],
            "trackings": [
                f"rctX:{disk.tracker}:{writes:08x}" for disk, (_, writes) in zip(vm.disks, taken.frozen, strict=True)
            ],
        }  # fmt: skip
        vm.points.append(point)
        return {"points": [point["id"]]}

    def _gone(self, vm: FakeVm, taken: Taken) -> None:
        vm.snapshots.remove(taken)
        for disk in vm.disks:
            disk.files.merged()

    def _destroy(self, node: str, vm_id: str, snapshot_id: str, point_id: str) -> Any:
        vm = self._vm(node, vm_id)
        for taken in [one for one in vm.snapshots if one.id == snapshot_id]:
            self._gone(vm, taken)
        vm.points = [one for one in vm.points if one["id"] != point_id]
        return {"destroyed": True}

    def _export(self, node: str, vm_id: str, snapshot_id: str, point_id: str, folder: str) -> Any:
        vm = self._vm(node, vm_id)
        taken = next((one for one in vm.snapshots if one.id == snapshot_id), None)
        if taken is None:
            raise Refusal("Msvm_VirtualSystemSettingData", NOT_FOUND, "there is no recovery snapshot")
        point = next((one for one in vm.points if one["id"] == point_id), None)
        if point_id and point is None:
            raise Refusal("Msvm_VirtualSystemReferencePoint", NOT_FOUND, "there is no reference point")
        to = self.shared / folder.removeprefix(self.drive).replace("\\", "/")
        assert to.is_dir(), f"{folder} is not there"
        assert not list(to.iterdir()), f"{folder} is not empty"
        self.exported.append((folder, bool(point_id)))
        written = to / "Virtual Hard Disks"
        written.mkdir()
        (to / "Virtual Machines").mkdir()
        (to / "Virtual Machines" / f"{vm.id.upper()}.vmcx").write_bytes(b"configuration")
        for number, disk in enumerate(vm.disks):
            if disk.physical:
                continue
            frozen, until = taken.frozen[number]
            if point is None:
                disk.files.exported(written / frozen.with_suffix(".vhdx").name)
                continue
            tracker, since = str(point["trackings"][number]).split(":")[1:]
            if tracker != disk.tracker:
                raise Refusal("ExportSystemDefinition", FAILED, "The change tracking identifier is invalid.")
            disk.files.exported(written / frozen.name, disk.grains(int(since, 16), until))
        job = f"{uuid4()}".upper()
        self.jobs[job] = self.job_asks
        return {"job": job}

    def _job(self, node: str, job_id: str) -> Any:
        if job_id not in self.jobs:
            return {"state": 0, "percent": 0, "code": 0, "text": ""}
        if self.job_fails is not None:
            return {"state": 10, "percent": 40, "code": self.job_fails[0], "text": self.job_fails[1]}
        self.jobs[job_id] -= 1
        done = self.jobs[job_id] <= 0
        return {"state": 7 if done else 4, "percent": 100 if done else 50, "code": 0, "text": ""}

    def _changes(self, node: str, path: str, limit_id: str, offset: int, length: int) -> Any:
        for vm in self.vms.values():
            for number, disk in enumerate(vm.disks):
                until = {self._windows(file): writes for one in vm.snapshots for file, writes in [one.frozen[number]]}
                if vm.state == OFF:
                    until.setdefault(self._windows(disk.files.chain[0]), disk.writes)
                if vm.node == node and path in until:
                    return self._changed(disk, limit_id, until[path], offset, length)
        raise Refusal("GetVirtualDiskChanges", 32779, f"{path} is not found")

    def _changed(self, disk: FakeDisk, limit: str, until: int, offset: int, length: int) -> Any:
        if not limit.startswith(f"rctX:{disk.tracker}:"):
            raise Refusal("GetVirtualDiskChanges", FAILED, "The change tracking identifier is invalid.")
        assert offset + length <= disk.files.size
        since, processed = int(limit.rpartition(":")[2], 16), min(length, ANSWERED_BYTES)
        found = [grain for grain in disk.grains(since, until) if offset <= grain * GRAIN < offset + processed]
        return {
            "processed": processed,
            "offsets": [grain * GRAIN for grain in found] or None,
            "lengths": [min(GRAIN, disk.files.size - grain * GRAIN) for grain in found] or None,
        }

    def _power(self, node: str, vm_id: str, wish: str) -> Any:
        vm = self._vm(node, vm_id)
        if wish == "shutdown" and not vm.hears:
            return {"heard": False}
        self.power(vm, RUNNING if wish == "start" else OFF)
        return {"heard": True}

    def _notes(self, node: str, vm_id: str, checked: int, before: str, notes: str) -> Any:
        vm = self._vm(node, vm_id)
        present, written = vm.notes, not checked or vm.notes == before
        if written:
            vm.notes = notes
        return {"written": written, "notes": present}

    # ── disks ────────────────────────────────────────────────────────────────────────────────────────────────────────

    def _windows(self, path: Path) -> str:
        return self.drive + str(path.relative_to(self.shared)).replace("/", "\\")

    def _drives(self, vm: FakeVm, tops: list[Path] | None = None) -> list[dict[str, Any]]:
        found = []
        for number, disk in enumerate(vm.disks):
            disk.files.settled()
            chain = disk.files.chain
            files = chain if tops is None else chain[chain.index(tops[number]) :]
            found.append({
                "bus": disk.bus, "controller": disk.controller, "location": disk.location, "shared": disk.shared,
                "path": self._windows(files[0]), "physical": disk.physical,
                "chain": [] if disk.physical else [
                    {
                        "path": self._windows(path), "format": 3, "type": 3 if path is chain[-1] else 4,
                        "size": disk.files.size, "file_size": path.stat().st_size,
                        "parent": self._windows(files[place + 1]) if place + 1 < len(files) else "",
                        "id": str(disk.identifier).upper(), "sector": disk.sector_bytes,
                    }
                    for place, path in enumerate(files)
                ],
            })  # fmt: skip
        return found


def _lower(name: str) -> str:
    """VmId is vm_id."""
    return re.sub("(?<!^)(?=[A-Z])", "_", name).lower()
