"""Live adapters: one file a platform. asyncio: a warm job waits for days, and thousands wait at once.

    registry.py   a line a platform: its form (what a source of it takes) and its adapter
    form.py       endpoints, credentials and options checked before anything is tried

Being in the registry enrols an adapter in the contract suite.
"""

from collections.abc import Collection, Mapping
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
    """A snapshot that an adapter made: `id` finds it again after a crash, `change_ids` are per disk key what
    `open_disk(since=…)` of a later snapshot takes. A disk without a change id cannot give a delta."""

    id: str
    change_ids: dict[str, str] = Field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class VmRow:
    """A line of discovery. `folder`: where the platform shows the VM; None is what the platform did not say. `host`: as its
    manifest has it; empty, where it runs on none, or on the only one."""

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
    """All that an adapter is made of. `folder` is the service's own, for sockets and scratch files: it may not be there yet.
    `recorder` is handed to the adapter's HttpClient: it writes down what the platform answers (`live/recording.py`)."""

    endpoint: str
    credentials: Mapping[str, str] = field(default_factory=dict, repr=False)
    options: Mapping[str, Any] = field(default_factory=dict)
    folder: Path = Path("/nonexistent")
    recorder: Recorder | None = field(default=None, repr=False)


@dataclass(frozen=True, slots=True)
class Reach:
    """Where a platform listens. `tls`: its certificate can be looked at before we log in; `own_authority`: who must have signed
    that is said by the credentials, and by nothing on this host."""

    host: str
    port: int
    tls: bool = False
    own_authority: bool = False


@dataclass(frozen=True, slots=True)
class About:
    """What a platform says of itself once it has let us in; `checks`: what our user may do there, one a privilege.
    `instance_id`: its own, as inventories write it beside a VM's (vSphere's instance UUID); empty where it has none."""

    product: str
    version: str
    checks: tuple[SourceCheck, ...] = ()
    instance_id: str = ""


@runtime_checkable
class KeepsUefiVariables(Protocol):
    """What an adapter is too whose platform keeps UEFI variables in the form that OVMF does (libvirt, Proxmox), or in one that
    can be turned into it (XenServer)."""

    async def uefi_variables(self, vm_id: str) -> bytes | None:
        """The variable store of a VM that is off, as its firmware reads it; None where there is none, or none to be had."""
        ...


@runtime_checkable
class TellsOfGuest(Protocol):
    """What an adapter is too whose platform says what runs inside a guest, by an agent or by tools in it: a table a platform,
    in its `guest_facts.py`."""

    async def guest_facts(self, vm_id: str) -> dict[str, str]:
        """By the names of `model/facts.py`. What the guest does not say is left out; none, where it runs no agent."""
        ...


@runtime_checkable
class SwitchesTracking(Protocol):
    """What an adapter is too whose platform tracks changes by a setting of the VM, which a job's snapshots do not take along
    when they go (vSphere)."""

    async def is_tracked(self, vm_id: str) -> bool:
        """Is the setting on? Asked before `enable_cbt`: what was off is switched off again when the job has ended."""
        ...

    async def disable_cbt(self, vm_id: str) -> None:
        """The setting off, and what the platform keeps for it gone; after the job's snapshots. Nothing to do where all is done,
        or where the VM is no more."""
        ...


@runtime_checkable
class HasWays(Protocol):
    """What an adapter is too that can read a disk by several ways: a deep test tries and measures each."""

    async def ways_to(self, vm_id: str, snapshot: SnapshotRef, disk: Disk) -> list[str]:
        """Those that are no nonsense for this disk, whatever the source's options say."""
        ...

    async def open_by(self, way: str, vm_id: str, snapshot: SnapshotRef, disk: Disk) -> ReaderSpec:
        """As `open_disk` of the whole disk, by this way."""
        ...

    async def hosts(self) -> list[SourceCheck]:
        """Those behind the platform that send disks themselves, as they are reached from here."""
        ...


class GuestStaysOn(Conflict):
    """The guest was asked to shut down, and runs on."""


def stays_on(vm: str, timeout_s: float) -> GuestStaysOn:
    """The error of a guest that still runs `timeout_s` seconds after it was asked to shut down."""
    return GuestStaysOn(
        f"{vm} was asked to shut down, and still runs after {timeout_s:.0f} s",
        hint="it may be installing updates, or not hear us; it is not powered off: shut it down, or cancel the job",
    )


class LiveAdapter(Protocol):
    """One platform, one session. Made of a SourceAccess, whose form it checks (BadRequest); `connect` reaches out first.

    Every method may be called again after a crash with the same arguments: `snapshot` finds the snapshot of that name,
    `shutdown`, `power_on`, `mark`, `release` and `cleanup` do nothing where all is done. Errors: SourceUnreachable, AuthFailed,
    VmNotFound, SnapshotFailed (from open_disk: the snapshot is no more, take it again), CbtReset (from open_disk, when `since`
    is no longer known to the platform), CbtUnsupported (from enable_cbt), Internal.

    The names of a job's snapshots differ in the number after their last dash alone, which ascends. What `open_disk` answers is
    good while the session lasts.

    - `about`: who answers, and each missing privilege by name.
    - `enable_cbt`: from now on the changes of these disks, named by key, are tracked.
    - `snapshot(vm_id, name, disks)`: the VM held still at one moment. `disks` are those that will be read, by key (None: all):
      a platform that can leaves the others alone, and one that has lost one of them leaves that out.
    - `open_disk(vm_id, snapshot, disk, since)`: the disk as it was in the snapshot; with `since`, a change id of an earlier
      snapshot, the reader's extents are the changed ones only.
    - `last_start`: names the VM's last start: another text, once it was started since. It may change for other reasons, too:
      then it is as if it had been started. A VM that is held for its disks to be read was not started by that, as long as it
      is the same holding: asked after `snapshot` of a VM that is off, and again before the copy takes over.
    - `shutdown`: the VM is off when it returns. `polite`: the guest is asked, and powered off after `timeout_s` (None: the
      source's own); `force`: it is powered off at once; `hold`: it is asked, and GuestStaysOn raised where it has not gone off
      by then.
    - `mark`: leaves a note on the source VM that it has moved.
    - `release`: the disks of that snapshot have been read. What holds its data goes, since it grows or slows the guest; what
      a later delta needs (a checkpoint, a change id) stays.
    - `cleanup`: removes the snapshot of that name and what belongs to it; released before or not.
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
