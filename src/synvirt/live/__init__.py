"""Live adapters: a package for each platform. asyncio, as a warm job waits for days, and thousands wait at once.

    registry.py       a line for each platform: its form (the settings of a source) and its adapter
    form.py           endpoints, credentials and options, checked before anything is tried
    sessions.py       logins that one job after another uses
    keeping_alive.py  sessions that end without requests
    holding.py        a guest frozen for a moment by a process of its own
    folder.py         the folder with a session's secrets and sockets
    ssh.py            sockets of another host, by SSH
    recording.py      records a platform's answers for tests
    odd.py            the error of an answer that has another form than the platform's

An adapter in the registry is also in the contract suite.
"""

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from pydantic import Field

from synvirt.disks.specs import ReaderSpec
from synvirt.errors import Conflict
from synvirt.model.kinds import LiveKind
from synvirt.model.machine import Disk, VmManifest
from synvirt.model.plan import Shutdown
from synvirt.model.sources import SourceCheck
from synvirt.model.values import Model
from synvirt.transport import Recorder


class SnapshotRef(Model):
    """A snapshot that an adapter made. `id` finds it again after a crash. `change_ids`: by disk key, the value for
    `open_disk(since=…)` of a later snapshot. A disk without a change id cannot give a delta."""

    id: str
    change_ids: dict[str, str] = Field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class VmRow:
    """A VM in a source's list. `folder`: its folder at the platform; None: the platform reports none. `host`: as in its
    manifest; empty, where it runs on no host, or on the only one."""

    vm_id: str
    name: str
    power_state: str
    folder: str = ""
    cpu_count: int | None = None
    memory_bytes: int | None = None
    capacity_bytes: int | None = None
    guest_os: str = ""
    host: str = ""


@dataclass(frozen=True, slots=True)
class SourceAccess:
    """What an adapter needs. `folder`: the service's own, for sockets and scratch files; it may not exist yet. `recorder`: for
    the adapter's HttpClient; it records the platform's answers (`live/recording.py`)."""

    endpoint: str
    credentials: Mapping[str, str] = field(default_factory=dict, repr=False)
    options: Mapping[str, Any] = field(default_factory=dict)
    folder: Path = Path("/nonexistent")
    recorder: Recorder | None = field(default=None, repr=False)


@dataclass(frozen=True, slots=True)
class Reach:
    """The address of a platform. `tls`: its certificate can be checked before the login; `own_authority`: the authority is in
    the credentials, and this host has no other for it."""

    host: str
    port: int
    tls: bool = False
    own_authority: bool = False


@dataclass(frozen=True, slots=True)
class About:
    """A platform's facts after the login. `checks`: what our user may do there, one per privilege. `instance_id`: the
    platform's own id, which inventories write beside a VM's (vSphere's instance UUID); empty, where it has none."""

    product: str
    version: str
    checks: tuple[SourceCheck, ...] = ()
    instance_id: str = ""


@runtime_checkable
class KeepsUefiVariables(Protocol):
    """Also implemented by adapters whose platform keeps UEFI variables in OVMF's form (libvirt, Proxmox), or in one that can be
    converted to it (XenServer)."""

    async def uefi_variables(self, vm_id: str) -> bytes | None:
        """The variable store of a VM that is off, in the form of its firmware. None, where there is none, or none can be
        read."""
        ...


@runtime_checkable
class ReportsGuestFacts(Protocol):
    """Also implemented by adapters whose platform knows what runs inside a guest, from an agent or tools in it. Each platform
    has a table, in its `guest_facts.py`."""

    async def guest_facts(self, vm_id: str) -> dict[str, str]:
        """Facts of the guest, by the names of `model/facts.py`. Unknown facts are left out; none, where it runs no agent."""
        ...


@runtime_checkable
class SwitchesTracking(Protocol):
    """Also implemented by adapters whose platform tracks changes by a setting of the VM, which stays when a job's snapshots are
    removed (vSphere)."""

    async def is_tracked(self, vm_id: str) -> bool:
        """Whether the setting is on. Asked before `enable_cbt`: if it was off, it is switched off again after the job."""
        ...

    async def disable_cbt(self, vm_id: str) -> None:
        """Switches the setting off, and removes what the platform keeps for it. Called after the job's snapshots are removed.
        Idempotent; nothing to do where the VM is gone."""
        ...


@runtime_checkable
class HasWays(Protocol):
    """Also implemented by adapters that can read a disk in several ways: a deep test tries and measures each."""

    async def ways_to(self, vm_id: str, snapshot: SnapshotRef, disk: Disk) -> list[str]:
        """The ways that are possible for this disk, whatever the source's options say."""
        ...

    async def open_by(self, way: str, vm_id: str, snapshot: SnapshotRef, disk: Disk) -> ReaderSpec:
        """Opens the whole disk, as `open_disk`, by this way."""
        ...

    async def hosts(self) -> list[SourceCheck]:
        """Whether the platform's hosts, which send disks themselves, can be reached from here."""
        ...


class GuestStaysOn(Conflict):
    """The guest was asked to shut down, but still runs."""


class GuestElsewhere(Conflict):
    """The guest was moved to another host, or may have been, and its platform does not follow it there."""


def refuse_power_off(vm: str, manner: Shutdown, timeout_s: float, is_suspended: Callable[[], bool]) -> None:
    """Call it before a guest is powered off that is not off `timeout_s` seconds after it was asked, or could not be asked.
    GuestStaysOn, where the manner is to hold; Conflict, where it is polite, and the guest was suspended meanwhile: what it has
    in memory would be lost."""
    if manner == "hold":
        raise GuestStaysOn(
            f"{vm} was asked to shut down, and still runs after {timeout_s:.0f} s",
            hint="it may be installing updates, or may ignore the request; it is not powered off: shut it down, or cancel the "
            "job",
        )
    if manner == "polite" and is_suspended():
        raise Conflict(
            f"{vm} was asked to shut down, and is suspended: to power it off would lose what it has in memory",
            hint="resume it or shut it down at the source, then submit it again",
        )


class LiveAdapter(Protocol):
    """One session with one platform. It is made from a SourceAccess, whose form it checks (BadRequest); only `connect`
    connects.

    Every method may be called again after a crash with the same arguments: `snapshot` finds the snapshot of that name;
    `shutdown`, `power_on`, `mark`, `release` and `cleanup` do nothing where all is done. Errors: SourceUnreachable, AuthFailed,
    VmNotFound, SnapshotFailed (from open_disk: the snapshot is gone, take it again), CbtReset (from open_disk, when the
    platform does not know `since` any more), CbtUnsupported (from enable_cbt), Internal.

    The names of a job's snapshots differ only in the number after their last dash, which ascends. A spec that `open_disk` gives
    is good while the session lasts.

    - `about`: the platform's name and version, and each missing privilege by name.
    - `enable_cbt`: from now on the changes of these disks, named by key, are tracked.
    - `snapshot(vm_id, name, disks)`: a snapshot of the VM at one moment. `disks`: the disks that will be read, by key (None:
      all). If the platform can, the snapshot leaves out the others; a disk that the VM has lost is left out, too.
    - `open_disk(vm_id, snapshot, disk, since)`: the disk as it was in the snapshot. With `since`, a change id of an earlier
      snapshot, the reader's extents are only the changed ones.
    - `last_start`: a text that identifies the VM's last start, and changes with each start. If it changes for another reason,
      that counts as a start. Starting a VM only to read its disks does not count, as long as the text then stays the same.
      Asked after `snapshot` of a VM that is off, and again before the guest starts here.
    - `shutdown`: the VM is off on return. `polite`: the guest is asked, and powered off after `timeout_s` (None: the source's
      own); `force`: it is powered off at once; `hold`: it is asked, and GuestStaysOn is raised if it is not off by then.
    - `mark`: leaves a note on the source VM that it has moved.
    - `release`: the disks of that snapshot have been read. The snapshot's data is removed, as it grows or slows the guest; what
      a later delta needs (a checkpoint, a change id) stays.
    - `cleanup`: removes the snapshot of that name and all that belongs to it, released or not.
    """

    @property
    def kind(self) -> LiveKind: ...
    async def connect(self) -> None: ...
    async def about(self) -> About: ...
    async def supports_warm(self) -> bool: ...
    async def list_vms(self) -> list[VmRow]: ...
    async def inspect(self, vm_id: str) -> VmManifest: ...
    async def enable_cbt(self, vm_id: str, disks: Collection[str]) -> None: ...
    async def snapshot(self, vm_id: str, name: str, disks: Collection[str] | None = None) -> SnapshotRef: ...
    async def open_disk(self, vm_id: str, snapshot: SnapshotRef, disk: Disk, since: str | None) -> ReaderSpec: ...
    async def release(self, vm_id: str, name: str) -> None: ...
    async def last_start(self, vm_id: str) -> str: ...
    async def shutdown(self, vm_id: str, manner: Shutdown = "polite", timeout_s: float | None = None) -> None: ...
    async def power_on(self, vm_id: str) -> None: ...
    async def mark(self, vm_id: str, note: str) -> None: ...
    async def cleanup(self, vm_id: str, name: str) -> None: ...
    async def close(self) -> None: ...
