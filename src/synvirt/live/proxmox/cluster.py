"""The cluster's VMs and nodes, and requests to them: the API in our terms. Blocking code."""

import contextlib
import re
import time
from collections.abc import Callable
from typing import Any, Final, TypeVar
from urllib.parse import quote

import structlog

from synvirt.errors import AuthFailed, Internal, SourceUnreachable, SynvirtError, VmNotFound
from synvirt.live import VmRow
from synvirt.live.proxmox import config as settings
from synvirt.live.proxmox.api import BUSY_HINT, Api, mapping, refuse_failed, rows
from synvirt.live.proxmox.seen import Seen, Volume, power_state
from synvirt.repeating import tried_again

T = TypeVar("T")
log = structlog.get_logger(__name__)

# Tasks after which a VM has run: PVE::API2::Qemu's worker types, and those of the HA manager.
STARTS: Final = frozenset({"qmstart", "qmreboot", "qmreset", "qmresume", "qmrollback", "qmrestore", "qmigrate", "hastart"})
TASKS_MOST: Final = 500
# Added to the guest's time to shut down: for the cluster's manager, and for QEMU to close its disks.
SETTLE_S: Final = 120.0
START_TIMEOUT_S: Final = 300.0
TASK_TIMEOUT_S: Final = 120.0
_POLL_S: Final = 0.5
# How long the API waits for the agent of a guest that hangs.
AGENT_TIMEOUT_S: Final = 10.0
DESCRIPTION_CHARS_MAX: Final = 8192
# How often a note is tried, where somebody else changes the configuration at the same time.
MARK_TRIES: Final = 5
# PVE::Tools::assert_if_modified.
_MODIFIED: Final = re.compile("detected modified configuration")
# PVE::QemuServer::Agent, agent_available: before it says the first, it has waited some seconds for the agent.
_NO_AGENT: Final = re.compile("QEMU guest agent is not running|No QEMU guest agent configured")


class Cluster:
    """A Proxmox VE cluster by its API."""

    def __init__(self, api: Api) -> None:
        self.api = api

    # ── discovery ────────────────────────────────────────────────────────────────────────────────────────────────────

    def vms(self) -> list[VmRow]:
        """One request for the whole cluster."""
        return [_row(one) for one in self._resources() if one.get("type") == "qemu"]

    def version(self) -> str:
        return str(mapping(self.api.get("/version"), "its version").get("version", ""))

    def node_names(self) -> list[str]:
        """The nodes that are on."""
        found = rows(self.api.get("/nodes"), "its nodes")
        return sorted(str(one.get("node", "")) for one in found if one.get("status") == "online")

    def node_version(self, node: str) -> str:
        return str(mapping(self.api.get(f"/nodes/{quote(node, safe='')}/version"), "a node's version").get("version", ""))

    def storages(self, node: str) -> dict[str, str]:
        """The type of each storage that has disks of VMs there."""
        listed = rows(self.api.get(f"/nodes/{quote(node, safe='')}/storage", content="images"), "its storages")
        return {str(one.get("storage", "")): str(one.get("type", "")) for one in listed}

    def addresses(self) -> dict[str, str]:
        """Of each node in the cluster's own network; empty, where our user may not see them."""
        try:
            found = rows(self.api.get("/cluster/status"), "its nodes")
        except AuthFailed:
            return {}
        return {str(one["name"]): str(one["ip"]) for one in found if one.get("type") == "node" and one.get("ip")}

    def row(self, vm_id: str) -> dict[str, Any]:
        """Its row in the cluster's resources, with its present node. VmNotFound."""
        if vm_id.isdecimal():
            for one in self._resources():
                if str(one.get("vmid")) == vm_id:
                    if one.get("type") != "qemu":
                        raise VmNotFound(
                            f"{vm_id} is a container (LXC) on {self.api.host}, not a virtual machine",
                            hint="containers have no disks and no kernel of their own: move what is in them by their own tools",
                        )
                    return one
        raise VmNotFound(f"{self.api.host} has no VM {vm_id[:60]!r}", hint="its ids are numbers, from 100 on")

    def _resources(self) -> list[dict[str, Any]]:
        return rows(self.api.get("/cluster/resources", type="vm"), "its VMs")

    # ── one VM ───────────────────────────────────────────────────────────────────────────────────────────────────────

    def path(self, row: dict[str, Any]) -> str:
        return f"/nodes/{quote(str(row.get('node', '')), safe='')}/qemu/{row.get('vmid')}"

    def status(self, row: dict[str, Any]) -> dict[str, Any]:
        return mapping(self.api.get(f"{self.path(row)}/status/current"), "a VM's status")

    def config(self, row: dict[str, Any]) -> dict[str, Any]:
        """The present configuration, not the one after its next start."""
        return mapping(self.api.get(f"{self.path(row)}/config", current=1), "a VM's configuration")

    def seen(self, vm_id: str, no_reading: str | None) -> Seen:
        """All facts of a VM. `no_reading`: why its disks cannot be read, or None. VmNotFound."""
        row = self.row(vm_id)
        config, status = self.config(row), self.status(row)
        asks = power_state(status) == "on" and settings.is_on(settings.options(config.get("agent", "0"), "enabled")["enabled"])
        os_info = self._agent(row, "get-osinfo") if asks else None
        cards = self._agent(row, "network-get-interfaces") if os_info is not None else None
        return Seen(
            vm_id=vm_id,
            row=row,
            config=config,
            status=status,
            volumes=self.volumes(row, config),
            snapshots=rows(self.api.get(f"{self.path(row)}/snapshot"), "a VM's snapshots"),
            os_info=os_info if isinstance(os_info, dict) else {},
            interfaces=[one for one in cards if isinstance(one, dict)] if isinstance(cards, list) else [],
            storages=self._unless_refused(lambda: self.storage_types(row)) or {},
            replicated_to=self._unless_refused(lambda: self._replicated_to(vm_id)) or (),
            no_reading=no_reading,
        )

    def _unless_refused(self, ask: Callable[[], T]) -> T | None:
        """Facts that are only useful: a user without the right to ask for them can still move the VM."""
        with contextlib.suppress(SynvirtError):
            return ask()
        return None

    def _replicated_to(self, vm_id: str) -> list[str]:
        """Its storage's replication jobs have names like `100-0`."""
        listed = rows(self.api.get("/cluster/replication"), "its replication jobs")
        return [
            str(one.get("target") or one.get("id"))
            for one in listed
            if str(one.get("guest") or str(one.get("id", "")).partition("-")[0]) == vm_id
        ]

    def agent_of(self, vm_id: str) -> Callable[[str], Any]:
        """The agent's answer to a command, by name; None, where it gives none. An agent that is not there is asked once."""
        row = self.row(vm_id)
        silent = False

        def ask(question: str) -> Any:
            nonlocal silent
            try:
                return None if silent else self._agent_answer(row, question)
            except SynvirtError as error:
                silent = _NO_AGENT.search(error.detail) is not None
                return None

        return ask

    def _agent(self, row: dict[str, Any], question: str) -> Any:
        """None, where the agent does not answer or may not be asked."""
        return self._unless_refused(lambda: self._agent_answer(row, question))

    def _agent_answer(self, row: dict[str, Any], question: str) -> Any:
        return mapping(self.api.get(f"{self.path(row)}/agent/{question}"), "the agent's answer").get("result")

    def freeze(self, vm_id: str) -> None:
        """Freezes its file systems, by its agent. Internal, where the agent refuses."""
        self._ask_agent(vm_id, "fsfreeze-freeze")

    def thaw(self, vm_id: str) -> None:
        self._ask_agent(vm_id, "fsfreeze-thaw")

    def _ask_agent(self, vm_id: str, command: str) -> None:
        row = self.row(vm_id)
        result = mapping(self.api.post(f"{self.path(row)}/agent/{command}"), "the agent's answer").get("result")
        if isinstance(result, dict) and isinstance(result.get("error"), dict):
            raise Internal(f"VM {vm_id}: its agent refuses {command}: {str(result['error'].get('desc', ''))[:200]}")

    def volumes(self, row: dict[str, Any], config: dict[str, Any]) -> dict[str, Volume]:
        """Where our user may not see a storage, the size comes from the configuration."""
        found: dict[str, Volume] = {}
        node = quote(str(row.get("node", "")), safe="")
        for storage in sorted({drive.storage for drive in settings.drives(config) if drive.storage}):
            try:
                listed = self.api.get(f"/nodes/{node}/storage/{quote(storage, safe='')}/content", vmid=row.get("vmid"))
            except SynvirtError as error:
                log.info("a storage is not looked into", storage=storage, cause=error.detail)
                continue
            for one in rows(listed, "a storage's content"):
                used = settings.number(one.get("used"), -1)
                size = settings.number(one.get("size"), 0)
                volume = Volume(size, used if used >= 0 else None, str(one.get("format", "")))
                found[str(one.get("volid", ""))] = volume
        return found

    def storage_types(self, row: dict[str, Any]) -> dict[str, str]:
        """The types of the storages on the VM's node, by name (`zfspool`, `lvmthin`)."""
        node = quote(str(row.get("node", "")), safe="")
        listed = rows(self.api.get(f"/nodes/{node}/storage"), "its storages")
        return {str(one.get("storage", "")): str(one.get("type", "")) for one in listed}

    def last_start(self, row: dict[str, Any]) -> str:
        """The newest task by which it was started, and its node: tasks on another node belong to that node. Also the one that
        ended last, where that is another one: the node's clock was set back between them."""
        node = quote(str(row.get("node", "")), safe="")
        listed = rows(
            self.api.get(f"/nodes/{node}/tasks", vmid=row.get("vmid"), source="all", limit=TASKS_MOST), "a node's tasks"
        )
        started = [str(one.get("upid", "")) for one in listed if one.get("type") in STARTS]
        newest = max(started, key=_started_at, default="never")
        # The node lists them by their ends, the last one first.
        return " ".join(dict.fromkeys([str(row.get("node", "")), newest, *started[:1]]))

    def refuse_locked(self, row: dict[str, Any], config: dict[str, Any]) -> None:
        """SourceUnreachable, while Proxmox VE has the VM locked: it is tried again later."""
        if lock := config.get("lock"):
            raise SourceUnreachable(
                f"VM {row.get('vmid')} is locked by Proxmox VE ({lock}): a backup, snapshot or migration is under way",
                hint=BUSY_HINT,
            )

    # ── off, on, marked ──────────────────────────────────────────────────────────────────────────────────────────────

    def ask_off(self, row: dict[str, Any], timeout_s: float) -> str:
        """Asks the guest to shut down; gives the task for it. The cluster's manager stops a VM that is managed for high
        availability, and then leaves it off; it powers it off itself after `timeout_s` (PVE::HA::Resources::PVEVM)."""
        return str(self.api.post(f"{self.path(row)}/status/shutdown", timeout=max(int(timeout_s), 1), forceStop=False))

    def off_by_force(self, row: dict[str, Any], asked: str | None = None) -> None:
        """Powers the VM off, and waits for the task. `asked`: the task of an earlier `ask_off`, which is ended first: it holds
        the lock of the VM's configuration until its own timeout, and no other task gets it (PVE::QemuServer, vm_stop; newer
        versions have `overrule-shutdown` for it)."""
        if asked is not None:
            with contextlib.suppress(Internal, SourceUnreachable, AuthFailed):  # it may have ended
                self.api.end_task(asked)
        upid = self.api.post(f"{self.path(row)}/status/stop", timeout=30)
        self.api.wait(upid, TASK_TIMEOUT_S)

    def await_state(self, row: dict[str, Any], state: str, limit_s: float) -> bool:
        """Whether the VM is in that state within `limit_s` seconds."""
        deadline = time.monotonic() + limit_s
        while self.status(row).get("status") != state:
            if time.monotonic() > deadline:
                return False
            time.sleep(_POLL_S)
        return True

    def failed(self, upid: str) -> SynvirtError | None:
        """Why a task has failed; None, while it runs or when it went well."""
        status = self.api.task(upid)
        try:
            if status.get("status") == "stopped":
                refuse_failed(upid, status)
        except (Internal, SourceUnreachable) as error:
            return error
        return None

    def start(self, vm_id: str) -> None:
        """Starts the VM, and waits until it runs. Internal, where it does not."""
        row = self.row(vm_id)
        if self.status(row).get("status") == "running":
            return
        self.api.wait(self.api.post(f"{self.path(row)}/status/start"), START_TIMEOUT_S)
        # The task only asked the cluster's manager.
        if not self.await_state(row, "running", START_TIMEOUT_S):
            raise Internal(f"VM {vm_id} was started, and does not run after {START_TIMEOUT_S:.0f} s")

    def mark(self, vm_id: str, note: str) -> None:
        """Adds a note for people, and switches off its start with the node. What somebody else writes meanwhile stays: the
        digest is of the configuration that the note is added to."""
        row = self.row(vm_id)

        def change() -> None:
            config = self.config(row)
            description = str(config.get("description", ""))
            if note in description and not settings.is_on(config.get("onboot")):
                return
            wanted: dict[str, object] = {"onboot": False, **({"digest": config["digest"]} if "digest" in config else {})}
            added = f"{description.rstrip()}\n\n{note}".strip()
            # Its owner's text goes first: where there is no room, there is no note.
            if note not in description and len(added) <= DESCRIPTION_CHARS_MAX:
                wanted["description"] = added
            self.api.put(f"{self.path(row)}/config", **wanted)

        tried_again(
            change, tries=MARK_TRIES, after=lambda error: isinstance(error, Internal) and _MODIFIED.search(error.detail)
        )


def _row(one: dict[str, Any]) -> VmRow:
    return VmRow(
        vm_id=str(one.get("vmid", "")),
        name=str(one.get("name", "")),
        power_state="suspended" if one.get("lock") == "suspended" else _POWER.get(str(one.get("status")), "unknown"),
        folder="/".join(filter(None, (str(one.get("node", "")), str(one.get("pool", ""))))),
        cpu_count=settings.number(one.get("maxcpu"), 0) or None,
        memory_bytes=settings.number(one.get("maxmem"), 0) or None,
        capacity_bytes=settings.number(one.get("maxdisk"), 0) or None,
        host=str(one.get("node", "")),
    )


_POWER: Final = {"running": "on", "stopped": "off", "paused": "suspended", "suspended": "suspended"}


def _started_at(upid: str) -> tuple[int, str]:
    """UPID:node:pid:pstart:starttime:type:id:user:, numbers in hex."""
    parts = upid.split(":")
    try:
        return int(parts[4], 16), upid
    except (IndexError, ValueError):
        return 0, upid
