"""What a cluster has: VMs with their disks' files, snapshots, recovery points, volume groups, images, tasks.

    containers/NAME/.acropolis/vmdisk/ID                    a disk, as its guest writes it
    containers/NAME/.snapshot/NN/…/.acropolis/vmdisk/ID     the same, kept

What changed between two files is found by comparing them, 64 KiB at a time: nobody has to remember what a guest wrote.
"""

import shutil
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any
from uuid import UUID, uuid4

from tests.fakes.contents import Content, fill, size_of

BLOCK = 65536


class Refusal(Exception):
    """A status and what it says."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status, self.message = status, message


def stamp() -> str:
    return datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")


@dataclass
class DiskState:
    """`device` is what v3 and v4 call the disk, `id` the file that holds it."""

    id: str
    device: str
    bus: str
    index: int
    container: str
    size: int
    group: str | None = None


@dataclass
class VmState:
    id: str
    name: str
    disks: list[DiskState]
    power: str = "ON"
    uefi: bool = False
    secure_boot: bool = False
    tpm: bool = False
    tools: bool = False
    holds_still: bool = True  # as far as its tools go
    passed_through: int = 0
    guest: str = ""
    bios_uuid: str = ""
    description: str = ""
    gpus: int = 0
    version: int = 1
    updated: str = field(default_factory=stamp)
    deaf: bool = False  # to a polite shutdown

    @property
    def etag(self) -> str:
        return f'W/"{self.version}"'

    def touch(self) -> None:
        self.version += 1
        self.updated = stamp()


@dataclass
class Kept:
    """A vm_snapshot or a recovery point: of each disk its file as it was, and an id of its own."""

    id: str
    name: str
    vm: str
    kind: str
    files: dict[str, str]
    disk_points: dict[str, str] = field(default_factory=dict)
    vm_point: str = ""
    expires: Any = None
    created: str = field(default_factory=stamp)


@dataclass
class GroupDisk:
    id: str
    index: int
    description: str
    source: str
    size: int
    path: Path


@dataclass
class Group:
    id: str
    name: str
    cluster: str
    disks: list[GroupDisk] = field(default_factory=list)
    clients: dict[str, str] = field(default_factory=dict)
    usage: str = "USER"

    @property
    def target(self) -> str:
        return f"{self.name}-{self.id}"


@dataclass
class Image:
    id: str
    name: str
    path: Path


class State:
    """One lock for all: a request sees no half of another."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.lock = threading.RLock()
        self.cluster_id, self.subnet_id = str(uuid4()), str(uuid4())
        self.containers: dict[str, dict[str, Any]] = {}
        self.cluster_list: list[str] = []
        self.vms: dict[str, VmState] = {}
        self.kept: dict[str, Kept] = {}
        self.groups: dict[str, Group] = {}
        self.images: dict[str, Image] = {}
        self.tasks: dict[str, dict[str, Any]] = {}
        self.requests: dict[str, str] = {}
        # Told of volume groups: a real iSCSI target, where there is one.
        self.on_group: Callable[[str, Group], None] = lambda _what, _group: None
        # Told of allow-lists: a real NFS server, where there is one.
        self.on_list: Callable[[], None] = lambda: None
        # A real NFS server says nothing any more, or goes on (signal.SIGSTOP, SIGCONT).
        self.signal_nfs: Callable[[int], None] = lambda _number: None
        self.data_services: str | None = None
        self.snapshot_number = 0
        self.add_container("default")

    def add_container(self, name: str) -> None:
        (self.folder / name / ".acropolis" / "vmdisk").mkdir(parents=True)
        self.containers[name] = {
            "id": f"0005::{len(self.containers)}",
            "storage_container_uuid": str(uuid4()),
            "name": name,
            "nfs_whitelist": [],
            "nfs_whitelist_inherited": True,
        }

    def listed(self, container: str) -> list[str]:
        """Who is let in."""
        kept = self.containers[container]
        return self.cluster_list if kept["nfs_whitelist_inherited"] else list(kept["nfs_whitelist"])

    # ── VMs ──────────────────────────────────────────────────────────────────────────────────────────────────────────

    def add_vm(self, name: str, disks: Mapping[str, Content], *, container: str = "default", **fields: Any) -> VmState:
        """`disks`: by address, `scsi.0`."""
        made = []
        for address, content in disks.items():
            bus, _, index = address.partition(".")
            disk = DiskState(str(uuid4()), str(uuid4()), bus.upper(), int(index), container, size_of(content))
            fill(self.path(disk), content)
            made.append(disk)
        vm = VmState(str(uuid4()), name, made, **fields)
        self.vms[vm.id] = vm
        return vm

    def path(self, disk: DiskState) -> Path:
        return self.folder / disk.container / ".acropolis" / "vmdisk" / disk.id

    def vm(self, vm_id: str) -> VmState:
        try:
            UUID(vm_id)
        except ValueError:
            raise Refusal(400, f"{vm_id} is no UUID") from None
        if vm_id not in self.vms:
            raise Refusal(404, f"Failed to find the VM {vm_id}")
        return self.vms[vm_id]

    def guest_writes(self, vm_id: str, address: str, offset: int, data: bytes) -> bool:
        """False when the VM is off: a guest that does not run writes nothing."""
        with self.lock:
            vm = self.vms[vm_id]
            if vm.power != "ON":
                return False
            disk = next(one for one in vm.disks if f"{one.bus.lower()}.{one.index}" == address)
            with self.path(disk).open("r+b") as file:
                file.seek(offset)
                file.write(data)
            return True

    # ── kept ─────────────────────────────────────────────────────────────────────────────────────────────────────────

    def keep(self, vm: VmState, name: str, kind: str, expires: Any) -> Kept:
        self.snapshot_number += 1
        number, files = self.snapshot_number, {}
        for disk in vm.disks:
            if disk.group is None:
                beneath = f".snapshot/{number % 100:02}/1-2-{number}/.acropolis/vmdisk/{disk.id}"
                kept = self.folder / disk.container / beneath
                kept.parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(self.path(disk), kept)
                files[disk.id] = f"/{disk.container}/{beneath}"
        one = Kept(str(uuid4()), name, vm.id, kind, files, {id_: str(uuid4()) for id_ in files}, str(uuid4()), expires)
        self.kept[one.id] = one
        return one

    def forget(self, kept: Kept) -> None:
        for path in kept.files.values():
            shutil.rmtree((self.folder / path[1:]).parents[2], ignore_errors=True)
        del self.kept[kept.id]

    def file(self, path: str) -> Path:
        """Of a snapshot; a live path is none."""
        if not any(path in one.files.values() for one in self.kept.values()):
            raise Refusal(400, f"{path} is not a known snapshot file")
        return self.folder / path[1:]

    def file_of_point(self, kept: Kept, vm_point: str, disk_point: str) -> Path:
        for disk, point in kept.disk_points.items():
            if point == disk_point and kept.vm_point == vm_point:
                return self.folder / kept.files[disk][1:]
        raise Refusal(404, f"there is no disk recovery point {disk_point} in {kept.id}")

    # ── tasks ────────────────────────────────────────────────────────────────────────────────────────────────────────

    def task(self, operation: str, failure: str | None = None) -> str:
        """Begun now; the second look finds it ended."""
        id_ = str(uuid4())
        self.tasks[id_] = {"operation": operation, "looks": 0, "failure": failure, "created": stamp()}
        return id_


def regions(new: Path, old: Path | None, start: int, most: int) -> tuple[list[tuple[int, int, bool]], int | None]:
    """(offset, length, zero) of the blocks that differ, or that were ever written; and where the next answer begins."""
    found: list[tuple[int, int, bool]] = []
    zeros = bytes(BLOCK)
    with new.open("rb") as mine:
        theirs = old.open("rb") if old is not None else None
        try:
            mine.seek(start)
            if theirs is not None:
                theirs.seek(start)
            at = start
            while block := mine.read(BLOCK):
                before = theirs.read(BLOCK) if theirs is not None else None
                zero = block == zeros[: len(block)]
                if before is None or block != before:
                    if found and found[-1][0] + found[-1][1] == at and found[-1][2] == zero:
                        found[-1] = (found[-1][0], found[-1][1] + len(block), zero)
                    elif len(found) == most:
                        return found, at
                    else:
                        found.append((at, len(block), zero))
                at += len(block)
        finally:
            if theirs is not None:
                theirs.close()
    return found, None
