"""The state of a Proxmox VE cluster, and what its API does to it. Machines run elsewhere: `Machines` says where."""

import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

PRIVILEGES = frozenset(
    {
        *("VM.Audit", "VM.PowerMgmt", "VM.Config.Options", "VM.GuestAgent.Audit", "VM.GuestAgent.FileSystemMgmt"),
        *("Sys.Audit", "Datastore.Audit"),
    }
)
# How long a task waits for the lock of a VM's configuration; on a node 10 s (PVE::QemuConfig, lock_config).
LOCK_TIMEOUT_S = 0.5


class Refused(Exception):
    """What the API answers instead: a status, and its cause."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status, self.message = status, message


class Machines(Protocol):
    """What really happens to a VM."""

    def is_running(self, vmid: int) -> bool: ...
    def status(self, vmid: int) -> str: ...
    def start(self, vmid: int) -> None: ...
    def power_button(self, vmid: int) -> None: ...
    def kill(self, vmid: int) -> None: ...
    def agent(self, vmid: int, command: str) -> Any: ...


class Paper:
    """Machines that are only on paper: off as soon as they are asked."""

    def __init__(self) -> None:
        self.on: set[int] = set()
        self.answers: dict[str, Any] = {}

    def is_running(self, vmid: int) -> bool:
        return vmid in self.on

    def status(self, vmid: int) -> str:
        return "running" if vmid in self.on else "stopped"

    def start(self, vmid: int) -> None:
        self.on.add(vmid)

    def power_button(self, vmid: int) -> None:
        self.on.discard(vmid)

    def kill(self, vmid: int) -> None:
        self.on.discard(vmid)

    def agent(self, _vmid: int, command: str) -> Any:
        if command not in self.answers:
            raise Refused(
                500, "Agent error: the command has not been found" if self.answers else "QEMU guest agent is not running"
            )
        return self.answers[command]


@dataclass
class Vm:
    vmid: int
    node: str
    config: dict[str, Any]
    snapshots: list[dict[str, Any]] = field(default_factory=list)
    ha: str | None = None
    qemu: str = "9.2.0"
    # Held by each task that starts or stops the VM, a shutdown's for as long as it waits (PVE::QemuServer, vm_stop).
    lock_file: threading.Lock = field(default_factory=threading.Lock)


@dataclass
class Task:
    upid: str
    node: str
    kind: str
    vmid: str
    user: str
    began: int
    status: str | None = None
    killed: threading.Event = field(default_factory=threading.Event)


@dataclass
class User:
    """`acl`: privileges by path; each is inherited below."""

    secret: str
    acl: dict[str, frozenset[str]] = field(default_factory=lambda: {"/": PRIVILEGES})

    def may(self, path: str, names: list[str]) -> bool:
        """Any of them; on the path or above."""
        return any(
            name in granted and (path == where or where == "/" or path.startswith(f"{where}/"))
            for where, granted in self.acl.items()
            for name in names
        )


class Cluster:
    def __init__(self, machines: Machines, *, version: str = "8.4.1", nodes: Mapping[str, str] | None = None) -> None:
        self.machines, self.version = machines, version
        self.nodes = dict(nodes or {"pve1": "127.0.0.1"})
        self.users: dict[str, User] = {"root@pam": User("s3cret"), "mover@pve!synvirt": User("t0ken")}
        self.vms: dict[int, Vm] = {}
        self.containers: dict[int, str] = {}
        self.storages: dict[str, str] = {"local": "dir", "local-lvm": "dir"}
        self.volumes: dict[str, dict[str, Any]] = {}
        self.replications: dict[str, str] = {}
        self.tasks: list[Task] = []
        self._workers: list[threading.Thread] = []
        self.away: set[str] = set()
        self._lock = threading.RLock()

    def add(self, vmid: int, node: str = "pve1", **config: Any) -> Vm:
        vm = Vm(vmid, node, {"name": f"vm{vmid}", "digest": "0" * 40, "memory": "512", **config})
        self.vms[vmid] = vm
        return vm

    # ── what is asked ────────────────────────────────────────────────────────────────────────────────────────────────

    def answer(self, user: str, method: str, path: str, gaps: Mapping[str, str], given: Mapping[str, str]) -> Any:
        if (node := gaps.get("node")) is not None and node not in self.nodes:
            raise Refused(
                500, f"hostname lookup '{node}' failed - failed to get address info for: {node}: Name or service not known"
            )
        if node in self.away:
            raise Refused(595, "No route to host")
        found: dict[tuple[str, str], Callable[[], Any]] = {
            ("GET", "/version"): lambda: {"version": self.version, "release": self.version[:3], "repoid": "deadbeef"},
            ("GET", "/access/permissions"): lambda: {
                where: dict.fromkeys(sorted(names), 1) for where, names in self.users[user].acl.items()
            },
            ("GET", "/cluster/resources"): lambda: self._resources(user),
            ("GET", "/cluster/status"): self._status,
            ("GET", "/nodes"): lambda: [
                {"node": name, "status": "offline" if name in self.away else "online"} for name in self.nodes
            ],
            ("GET", "/nodes/{node}/version"): lambda: {
                "version": self.version,
                "release": self.version[:3],
                "repoid": "deadbeef",
            },
            ("GET", "/cluster/replication"): lambda: [
                {"id": job, "guest": int(job.partition("-")[0]), "target": target} for job, target in self.replications.items()
            ],
            ("GET", "/nodes/{node}/storage"): lambda: [
                {"storage": name, "type": kind, "content": "images"} for name, kind in self.storages.items()
            ],
            ("GET", "/nodes/{node}/storage/{storage}/content"): lambda: self._content(gaps["storage"], given.get("vmid")),
            ("GET", "/nodes/{node}/tasks"): lambda: self._tasks(gaps["node"], given),
            ("GET", "/nodes/{node}/tasks/{upid}/status"): lambda: self._task(gaps["upid"]),
            ("DELETE", "/nodes/{node}/tasks/{upid}"): lambda: self._end_task(user, gaps["upid"]),
        }
        if (method, path) in found:
            return found[method, path]()
        return self._of_vm(user, method, path.rpartition("/{vmid}/")[2], self._vm(gaps), given)

    def _vm(self, gaps: Mapping[str, str]) -> Vm:
        vm = self.vms.get(int(gaps["vmid"]))
        if vm is None or vm.node != gaps["node"]:
            name = f"nodes/{gaps['node']}/qemu-server/{gaps['vmid']}.conf"
            raise Refused(500, f"Configuration file '{name}' does not exist")
        return vm

    def _of_vm(self, user: str, method: str, what: str, vm: Vm, given: Mapping[str, str]) -> Any:
        if (method, what) == ("GET", "config"):
            return dict(vm.config)
        if (method, what) == ("PUT", "config"):
            self._refuse_locked(vm)
            if given.get("digest", vm.config["digest"]) != vm.config["digest"]:
                raise Refused(500, "detected modified configuration - file changed by other user? Try again.")
            given_keys = {key: value for key, value in given.items() if key not in ("node", "vmid", "digest")}
            vm.config["digest"] = f"{int(vm.config['digest'], 16) + 1:040x}"
            vm.config.update({key: int(value) if key == "onboot" else value for key, value in given_keys.items()})
            return None
        if what == "status/current":
            return self._current(vm)
        if what == "snapshot":
            return [*vm.snapshots, {"name": "current", "description": "You are here!"}]
        if what.startswith("agent/"):
            if str(vm.config.get("agent", "0")).removeprefix("enabled=")[:1] != "1":
                raise Refused(500, "No QEMU guest agent configured")
            return {"result": self.machines.agent(vm.vmid, what.removeprefix("agent/"))}
        action = what.removeprefix("status/")
        self._refuse_locked(vm)
        return self._begin(user, vm, action, given)

    def _refuse_locked(self, vm: Vm) -> None:
        if "lock" in vm.config:
            raise Refused(500, f"VM is locked ({vm.config['lock']})")

    def _resources(self, user: str) -> list[dict[str, Any]]:
        rows = [self._row(vm) for vm in self.vms.values() if self.users[user].may(f"/vms/{vm.vmid}", ["VM.Audit"])]
        rows += [
            {"id": f"lxc/{vmid}", "type": "lxc", "vmid": vmid, "node": node, "status": "running", "name": f"ct{vmid}"}
            for vmid, node in self.containers.items()
        ]
        return rows

    def _row(self, vm: Vm) -> dict[str, Any]:
        running = self.machines.is_running(vm.vmid)
        row = {"id": f"qemu/{vm.vmid}", "type": "qemu", "vmid": vm.vmid, "node": vm.node, "name": vm.config["name"]}
        row |= {"status": "running" if running else "stopped", "template": int(vm.config.get("template", 0)), "maxcpu": 1}
        return row | ({"lock": vm.config["lock"]} if "lock" in vm.config else {}) | {"maxmem": 512 << 20, "maxdisk": 1 << 30}

    def _current(self, vm: Vm) -> dict[str, Any]:
        running = self.machines.is_running(vm.vmid)
        state = {"status": "running" if running else "stopped", "vmid": vm.vmid, "name": vm.config["name"]}
        state["qmpstatus"] = self.machines.status(vm.vmid)
        state["ha"] = {"managed": int(vm.ha is not None)} | ({"state": vm.ha} if vm.ha is not None else {})
        if "lock" in vm.config:
            state["lock"] = vm.config["lock"]
        return state | ({"running-qemu": vm.qemu, "pid": 4711, "uptime": 1} if running else {})

    def _status(self) -> list[dict[str, Any]]:
        rows: list[dict[str, Any]] = [
            {"id": "cluster", "name": "lab", "type": "cluster", "nodes": len(self.nodes), "quorate": 1}
        ]
        for number, (name, address) in enumerate(self.nodes.items(), 1):
            rows.append({"id": f"node/{name}", "name": name, "type": "node", "ip": address, "nodeid": number, "online": 1})
        return rows

    def _content(self, storage: str, vmid: str | None) -> list[dict[str, Any]]:
        return [
            {"volid": volid, **about}
            for volid, about in self.volumes.items()
            if volid.startswith(f"{storage}:") and vmid in (None, str(about.get("vmid")))
        ]

    # ── tasks ────────────────────────────────────────────────────────────────────────────────────────────────────────

    def note(self, kind: str, vm: Vm, user: str = "root@pam", status: str | None = "OK") -> Task:
        """A task in the node's list; of one that was over at once, `status` is its last word."""
        with self._lock:
            began = int(time.time()) + len(self.tasks)  # two of one second could not be told apart
            upid = f"UPID:{vm.node}:{4711 + len(self.tasks):08X}:{0:08X}:{began:08X}:{kind}:{vm.vmid}:{user}:"
            task = Task(upid, vm.node, kind, str(vm.vmid), user, began, status)
            self.tasks.append(task)
            return task

    def _begin(self, user: str, vm: Vm, action: str, given: Mapping[str, str]) -> str:
        # A VM that is managed is the manager's to start and stop: the task only asks it to, and sets the wished state.
        managed = vm.ha is not None
        if managed:
            vm.ha = "started" if action == "start" else "stopped"
        task = self.note(f"{'ha' if managed else 'qm'}{action}", vm, user, None)
        worker = threading.Thread(target=self._run, args=(task, vm, action, given), daemon=True)
        self._workers.append(worker)
        worker.start()
        return task.upid

    def close(self) -> None:
        """Ends the tasks: one waits for its guest for minutes."""
        for task in self.tasks:
            task.killed.set()
        for worker in self._workers:
            worker.join()

    def _run(self, task: Task, vm: Vm, action: str, given: Mapping[str, str]) -> None:
        try:
            if vm.ha is not None:
                task.status = "OK"
                own = self.note(f"qm{action}", vm, "root@pam", None)
                # The manager powers it off after that time (PVE::HA::Resources::PVEVM, shutdown).
                self._act(own, vm, action, {**given, "forceStop": "1"})
                own.status = "OK"
            else:
                self._act(task, vm, action, given)
                task.status = "OK"
        except Exception as error:  # a worker's last word
            task.status = str(error)

    def _act(self, task: Task, vm: Vm, action: str, given: Mapping[str, str]) -> None:
        if not vm.lock_file.acquire(timeout=LOCK_TIMEOUT_S):
            raise RuntimeError(f"can't lock file '/var/lock/qemu-server/lock-{vm.vmid}.conf' - got timeout")
        try:
            self._act_locked(task, vm, action, given)
        finally:
            vm.lock_file.release()

    def _act_locked(self, task: Task, vm: Vm, action: str, given: Mapping[str, str]) -> None:
        if action == "start":
            self.machines.start(vm.vmid)
            return
        if action == "stop":
            self.machines.kill(vm.vmid)
            return
        self.machines.power_button(vm.vmid)
        deadline = time.monotonic() + int(given.get("timeout", 180))
        while self.machines.is_running(vm.vmid):
            if task.killed.is_set():
                raise RuntimeError("unexpected status")
            if time.monotonic() > deadline:
                if given.get("forceStop", "0") == "1":
                    self.machines.kill(vm.vmid)
                    return
                raise RuntimeError("VM quit/powerdown failed - got timeout")
            time.sleep(0.1)

    def _tasks(self, node: str, given: Mapping[str, str]) -> list[dict[str, Any]]:
        found = [task for task in self.tasks if task.node == node and given.get("vmid") in (None, task.vmid)]
        return [
            {
                "upid": task.upid,
                "node": task.node,
                "pid": 4711,
                "pstart": 0,
                "starttime": task.began,
                "type": task.kind,
                "id": task.vmid,
                "user": task.user,
                **({"status": task.status, "endtime": task.began} if task.status is not None else {}),
            }
            for task in reversed(found)
        ][: int(given.get("limit", 50))]

    def _end_task(self, user: str, upid: str) -> None:
        task = next((task for task in self.tasks if task.upid == upid), None)
        if task is None:
            raise Refused(500, f"unable to parse worker upid '{upid}'")
        if task.user != user and not self.users[user].may(f"/nodes/{task.node}", ["Sys.Modify"]):
            raise Refused(403, f"Permission check failed (/nodes/{task.node}, Sys.Modify)")
        task.killed.set()

    def _task(self, upid: str) -> dict[str, Any]:
        task = next((task for task in self.tasks if task.upid == upid), None)
        if task is None:
            raise Refused(500, f"unable to parse worker upid '{upid}'")
        state = {"status": "running"} if task.status is None else {"status": "stopped", "exitstatus": task.status}
        known = {"upid": upid, "node": task.node, "pid": 4711, "pstart": 0, "starttime": task.began}
        return {**known, "type": task.kind, "id": task.vmid, "user": task.user, **state}
