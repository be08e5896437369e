"""The requested facts of a VM of Proxmox VE, unchanged. No I/O; all of them come from outside."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Literal

from synvirt.live.proxmox import config as settings

PowerState = Literal["on", "off", "suspended", "unknown"]
_STATES: Final[Mapping[str, PowerState]] = {
    "running": "on",
    "io-error": "on",
    "internal-error": "on",
    "guest-panicked": "on",
    # QEMU runs for a moment after its guest's end.
    "shutdown": "on",
    "paused": "suspended",
    "suspended": "suspended",
    "prelaunch": "suspended",
    "inmigrate": "unknown",
    "postmigrate": "unknown",
}


@dataclass(frozen=True, slots=True)
class Volume:
    """A storage's facts of a volume."""

    size_bytes: int
    used_bytes: int | None
    format: str


@dataclass(frozen=True, slots=True)
class Seen:
    """The requested facts of a VM. `row`: its row in the cluster's resources; `storages`: the type of each; `replicated_to`:
    nodes; `no_reading`: why its disks cannot be read at all; `way`: how QEMU freezes them (Reading.way); `tracked`: keys of
    disks whose changes are already tracked."""

    vm_id: str
    row: Mapping[str, Any]
    config: Mapping[str, Any]
    status: Mapping[str, Any]
    volumes: Mapping[str, Volume] = field(default_factory=dict)
    snapshots: Sequence[Mapping[str, Any]] = ()
    os_info: Mapping[str, Any] = field(default_factory=dict)
    interfaces: Sequence[Mapping[str, Any]] = ()
    tracked: frozenset[str] = frozenset()
    storages: Mapping[str, str] = field(default_factory=dict)
    replicated_to: Sequence[str] = ()
    no_reading: str | None = None
    way: str | None = None

    @property
    def power_state(self) -> PowerState:
        return power_state(self.status)

    @property
    def qemu(self) -> tuple[int, ...]:
        """The running version, or none."""
        return tuple(int(part) for part in re.findall(r"[0-9]+", str(self.status.get("running-qemu", "")))[:3])


def power_state(status: Mapping[str, Any]) -> PowerState:
    """The power state by the VM's status; a hibernated VM counts as suspended."""
    if status.get("status") == "running":
        return _STATES.get(str(status.get("qmpstatus", "running")), "on")
    if status.get("status") == "stopped":
        # Its memory is in a separate volume: it is hibernated (`qm suspend --todisk`).
        return "suspended" if status.get("lock") == "suspended" else "off"
    return "unknown"


def ha_state(status: Mapping[str, Any]) -> str | None:
    """The state in which the cluster's manager keeps the VM for high availability; None, where it is not managed."""
    ha = status.get("ha")
    managed = isinstance(ha, dict) and settings.is_on(ha.get("managed"))
    return str(ha.get("state") or "managed") if isinstance(ha, dict) and managed else None
