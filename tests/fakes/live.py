"""A fake platform with real disks: VMs run, write, are snapshot and shut down; changes are tracked; faults are asked for.

Everything lies in a folder, so that a service that was killed finds the platform as it left it, and the copy worker reads its
disks as files. `FakePlatform` is the platform with its guests, `FakeAdapter` a session with it: the LiveAdapter under test.
"""

import fcntl
import json
import os
import shutil
import time
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, ClassVar
from uuid import UUID, uuid4

from synvirt.disks.specs import ChangedSpec, RawSpec, ReaderSpec
from synvirt.errors import AuthFailed, CbtReset, CbtUnsupported, Internal, SnapshotFailed, SourceUnreachable, VmNotFound
from synvirt.live import About, SnapshotRef, VmRow, refuse_power_off
from synvirt.model.kinds import LiveKind
from synvirt.model.machine import Disk, GuestOs, VmManifest
from synvirt.model.plan import Shutdown
from synvirt.sizes import KIB
from tests.fakes.contents import Content, fill, size_of

# The granularity at which this platform tracks changes, as QEMU's bitmaps and vSphere's do.
TRACKED_BYTES = 64 * KIB


class FakePlatform:
    """`faults` (set them with `fault`): how often each of them is still to happen.

    unreachable, wrong_password, snapshot_failed: the next calls fail so.
    stays_on: the guest does not shut down though it is asked.
    no_change_ids: snapshots come without change ids, as before a stun.
    cannot_track: it shows by trying that this VM's changes cannot be tracked.
    cannot_mark: the note that the VM has moved cannot be left.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.logins = self.sessions = 0
        folder.mkdir(parents=True, exist_ok=True)
        with self._state() as state:
            state.setdefault("vms", {})
            state.setdefault("faults", {})
            state.setdefault("supports_warm", True)

    def add_vm(
        self, vm_id: str, disks: Mapping[str, Content], *, family: str = "linux", cbt: bool = True, uuid: UUID | None = None
    ) -> None:
        with self._state() as state:
            state["vms"][vm_id] = {
                "power": "on",
                "starts": 1,
                "powered": [],
                "family": family,
                "uuid": uuid and str(uuid),
                "hardware": {},
                "cbt": cbt,
                "cbt_enabled": False,
                "cbt_epoch": str(uuid4()),
                "sequence": 0,
                "journal": [],
                "sizes": {key: size_of(content) for key, content in disks.items()},
                "snapshots": {},
                "marks": [],
            }
        for key, content in disks.items():
            self.disk_path(vm_id, key).parent.mkdir(parents=True, exist_ok=True)
            fill(self.disk_path(vm_id, key), content)

    def remove_vm(self, vm_id: str) -> None:
        with self._state() as state:
            del state["vms"][vm_id]

    def disk_path(self, vm_id: str, key: str) -> Path:
        return self.folder / vm_id / f"{key}.raw"

    def guest_writes(self, vm_id: str, key: str, offset: int, data: bytes, *, tracked: bool = True) -> bool:
        """The guest writes to its disk; false when it is off. `tracked=False`: the platform lies about this one."""
        with self._state() as state:
            vm = state["vms"][vm_id]
            if vm["power"] != "on":
                return False
            with self.disk_path(vm_id, key).open("r+b") as disk:
                disk.seek(offset)
                disk.write(data)
            if tracked and vm["cbt_enabled"]:
                vm["sequence"] += 1
                vm["journal"].append([vm["sequence"], key, offset, len(data)])
        return True

    def fault(self, name: str, times: int) -> None:
        with self._state() as state:
            state["faults"][name] = times

    def lose_change_ids(self, vm_id: str) -> None:
        """The host crashed: change tracking starts over, and what older change ids refer to is forgotten."""
        with self._state() as state:
            state["vms"][vm_id]["cbt_epoch"] = str(uuid4())
            state["vms"][vm_id]["journal"] = []

    def lose_snapshots(self, vm_id: str) -> None:
        """The host was restarted: what its snapshots held is gone; change ids are known as before."""
        with self._state() as state:
            names, state["vms"][vm_id]["snapshots"] = state["vms"][vm_id]["snapshots"], {}
        for name in names:
            shutil.rmtree(self.folder / vm_id / "snapshots" / name, ignore_errors=True)

    def lose_vm(self, vm_id: str) -> None:
        """It was removed, or migrated to a host that this platform does not see."""
        with self._state() as state:
            del state["vms"][vm_id]

    def resize(self, vm_id: str, key: str, content: bytes | None) -> None:
        """A disk of that key is added, resized or (None) removed."""
        with self._state() as state:
            state["vms"][vm_id]["sizes"].pop(key, None)
            if content is not None:
                state["vms"][vm_id]["sizes"][key] = len(content)
                self.disk_path(vm_id, key).write_bytes(content)

    def reconfigure(self, vm_id: str, **hardware: Any) -> None:
        """Its owner gives the VM other processors, memory or cards: fields of its manifest."""
        with self._state() as state:
            state["vms"][vm_id]["hardware"] = hardware

    def power(self, vm_id: str, power: str) -> None:
        with self._state() as state:
            vm = state["vms"][vm_id]
            vm["starts"] += (vm["power"], power) == ("off", "on")
            if vm["power"] != power:
                vm["powered"].append([power, time.time()])
            vm["power"] = power

    def set_supports_warm(self, supported: bool) -> None:
        with self._state() as state:
            state["supports_warm"] = supported

    def vm(self, vm_id: str) -> dict[str, Any]:
        vms = self._seen()["vms"]
        if vm_id not in vms:
            raise VmNotFound(f"there is no VM {vm_id}")
        found: dict[str, Any] = vms[vm_id]
        return found

    def logged_in(self, by: int) -> None:
        """`logins`: how often somebody logged in; `sessions`: how many are."""
        self.logins += max(by, 0)
        self.sessions += by

    def strike(self, name: str) -> bool:
        """Does this fault happen now?"""
        if f'"{name}"'.encode() not in _content(self._path):  # nearly always, and a job asks seventy times
            return False
        with self._state() as state:
            left = state["faults"].get(name, 0)
            if left > 0:
                state["faults"][name] = left - 1
            return bool(left > 0)

    @contextmanager
    def change(self, vm_id: str) -> Iterator[dict[str, Any]]:
        with self._state() as state:
            if vm_id not in state["vms"]:
                raise VmNotFound(f"there is no VM {vm_id}")
            yield state["vms"][vm_id]

    @property
    def supports_warm(self) -> bool:
        return bool(self._seen()["supports_warm"])

    def vm_ids(self) -> list[str]:
        return list(self._seen()["vms"])

    @contextmanager
    def _state(self) -> Iterator[dict[str, Any]]:
        """One at a time, over threads and processes; written whole or not at all."""
        lock = os.open(f"{self.folder}/lock", os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o666)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX)
            path = self._path
            before = _content(path)
            state = json.loads(before)
            yield state
            after = json.dumps(state).encode()
            if after != before:
                Path(f"{path}.new").write_bytes(after)
                Path(f"{path}.new").rename(path)
        finally:
            os.close(lock)

    def _seen(self) -> dict[str, Any]:
        """For those who only look: the last state that was written whole. A job asks more than a hundred times: by the system's
        own calls, which take half of what pathlib does, and without the lock."""
        found: dict[str, Any] = json.loads(_content(self._path))
        return found

    @property
    def _path(self) -> str:
        return f"{self.folder}/state.json"


def _content(path: str) -> bytes:
    """Of a state; of none yet."""
    try:
        file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        return b"{}"
    try:
        return os.read(file, os.fstat(file).st_size)
    finally:
        os.close(file)


class FakeAdapter:
    kind: ClassVar[LiveKind] = LiveKind.LIBVIRT_REMOTE

    def __init__(self, platform: FakePlatform) -> None:
        self.platform = platform
        self._closed = False

    async def connect(self) -> None:
        self._closed = False
        self._faults()
        if self.platform.strike("wrong_password"):
            raise AuthFailed("the fake platform refused the password")
        self.platform.logged_in(+1)

    async def rest(self) -> None:
        self._faults()

    async def about(self) -> About:
        return About("the fake platform", "1.0")

    async def supports_warm(self) -> bool:
        return self.platform.supports_warm

    async def list_vms(self) -> list[VmRow]:
        return [VmRow(vm_id, vm_id, self.platform.vm(vm_id)["power"]) for vm_id in self.platform.vm_ids()]

    async def inspect(self, vm_id: str) -> VmManifest:
        self._faults()
        vm = self.platform.vm(vm_id)
        cards = [{"key": "nic-0", "mac": f"52:54:00:00:00:{self.platform.vm_ids().index(vm_id) + 1:02x}"}]
        hardware = {"memory_bytes": 512 << 20, "nics": cards, **vm["hardware"]}
        return VmManifest(
            vm_id=vm_id,
            name=vm_id,
            uuid=vm["uuid"],
            power_state=vm["power"],
            **hardware,
            guest_os=GuestOs(family=vm["family"]),
            cbt_available=vm["cbt"],
            cbt_reason=None if vm["cbt"] else "its disks cannot hold bitmaps",
            disks=tuple(
                Disk(key=key, label=key, capacity_bytes=size, boot_order=number + 1, cbt_enabled=vm["cbt_enabled"])
                for number, (key, size) in enumerate(vm["sizes"].items())
            ),
        )

    async def enable_cbt(self, vm_id: str, disks: Collection[str]) -> None:
        if self.platform.strike("cannot_track"):
            raise CbtUnsupported(f"the fake platform cannot track {vm_id}")
        with self.platform.change(vm_id) as vm:
            vm["cbt_enabled"] = True

    async def is_tracked(self, vm_id: str) -> bool:
        return bool(self.platform.vm(vm_id)["cbt_enabled"])

    async def disable_cbt(self, vm_id: str) -> None:
        self._faults()
        with self.platform.change(vm_id) as vm:
            if vm["snapshots"]:
                raise Internal(f"{vm_id} has snapshots that are made of its tracking")
            vm["cbt_enabled"] = False

    async def snapshot(self, vm_id: str, name: str, disks: Collection[str] | None = None) -> SnapshotRef:
        self._faults()
        with self.platform.change(vm_id) as vm:
            wanted = [key for key in vm["sizes"] if disks is None or key in disks]
            if name not in vm["snapshots"]:
                folder = self._snapshot_folder(vm_id, name)
                folder.mkdir(parents=True, exist_ok=True)
                for key in wanted:
                    shutil.copyfile(self.platform.disk_path(vm_id, key), folder / f"{key}.raw")
                vm["snapshots"][name] = f"{vm['cbt_epoch']}/{vm['sequence']}"
            change_id = vm["snapshots"][name]
            keys = wanted if vm["cbt_enabled"] else []
        if self.platform.strike("snapshot_failed"):
            raise SnapshotFailed(f"the fake platform could not snapshot {vm_id}")
        if self.platform.strike("no_change_ids"):
            keys = []
        return SnapshotRef(id=name, change_ids=dict.fromkeys(keys, change_id))

    async def open_disk(self, vm_id: str, snapshot: SnapshotRef, disk: Disk, since: str | None) -> ReaderSpec:
        self._faults()
        whole = RawSpec(path=str(self._snapshot_folder(vm_id, snapshot.id) / f"{disk.key}.raw"))
        if snapshot.id not in self.platform.vm(vm_id)["snapshots"]:
            raise SnapshotFailed(f"snapshot {snapshot.id} of {vm_id} no longer exists")
        if since is None:
            return whole
        vm = self.platform.vm(vm_id)
        epoch, sequence = since.split("/")
        until = vm["snapshots"][snapshot.id].split("/")
        if epoch != vm["cbt_epoch"] or until[0] != epoch:
            raise CbtReset(f"disk {disk.key}: change id {since} is unknown")
        areas = {
            block
            for number, key, offset, length in vm["journal"]
            if key == disk.key and int(sequence) < number <= int(until[1])
            for block in range(offset // TRACKED_BYTES, (offset + length - 1) // TRACKED_BYTES + 1)
        }
        size = vm["sizes"][disk.key]
        starts = sorted(block * TRACKED_BYTES for block in areas)
        return ChangedSpec(over=whole, areas=tuple((start, min(TRACKED_BYTES, size - start)) for start in starts))

    async def release(self, vm_id: str, name: str) -> None:
        """Change ids stay good: they are numbers in the journal."""
        self._faults()
        self._let_go(vm_id, name)

    async def guest_facts(self, vm_id: str) -> dict[str, str]:
        """What the test says that the guest says."""
        return dict(self.platform.vm(vm_id).get("facts", {}))

    async def last_start(self, vm_id: str) -> str:
        self._faults()
        return str(self.platform.vm(vm_id)["starts"])

    async def shutdown(self, vm_id: str, manner: Shutdown = "polite", timeout_s: float | None = None) -> None:
        self._faults()
        if manner != "force" and self.platform.strike("stays_on"):
            refuse_power_off(vm_id, manner, 300 if timeout_s is None else timeout_s, lambda: False)
        self.platform.power(vm_id, "off")

    async def power_on(self, vm_id: str) -> None:
        self._faults()
        self.platform.power(vm_id, "on")

    async def mark(self, vm_id: str, note: str) -> None:
        if self.platform.strike("cannot_mark"):
            raise SourceUnreachable("the fake platform does not take notes")
        with self.platform.change(vm_id) as vm:
            if note not in vm["marks"]:
                vm["marks"].append(note)

    async def cleanup(self, vm_id: str, name: str) -> None:
        self._faults()
        self._let_go(vm_id, name)

    def _let_go(self, vm_id: str, name: str) -> None:
        with self.platform.change(vm_id) as vm:
            vm["snapshots"].pop(name, None)
        shutil.rmtree(self._snapshot_folder(vm_id, name), ignore_errors=True)

    async def close(self) -> None:
        self._closed = True
        self.platform.logged_in(-1)

    def _snapshot_folder(self, vm_id: str, name: str) -> Path:
        return self.platform.folder / vm_id / "snapshots" / os.path.basename(name)  # noqa: PTH119 - a name, not a path

    def _faults(self) -> None:
        if self._closed:
            raise SourceUnreachable("the session with the fake platform is closed")
        if self.platform.strike("unreachable"):
            raise SourceUnreachable("the fake platform does not answer")
