"""Live adapters: one file a platform. asyncio: a warm job waits for days, and thousands wait at once.

`ADAPTERS` (in main.py's table) is the literal registry; being in it enrols an adapter in the contract suite.
"""

from dataclasses import dataclass
from typing import ClassVar, Protocol

from pydantic import Field

from synvirt.disks.specs import ReaderSpec
from synvirt.model import Disk, LiveKind, Model, VmManifest


class SnapshotRef(Model):
    """A snapshot that an adapter made: `id` finds it again after a crash, `change_ids` are per disk key what
    `open_disk(since=…)` of a later snapshot takes. A disk without a change id cannot give a delta."""

    id: str
    change_ids: dict[str, str] = Field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class VmRow:
    """A line of discovery."""

    vm_id: str
    name: str
    power_state: str


class LiveAdapter(Protocol):
    """One platform, one session.

    Every method may be called again after a crash with the same arguments: `snapshot(vm_id, name)` finds the snapshot of that
    name, `shutdown`, `power_on`, `mark` and `cleanup` do nothing where all is done. Errors: SourceUnreachable, AuthFailed,
    VmNotFound, SnapshotFailed, CbtReset (from open_disk, when `since` is no longer known to the platform), Internal.

    - `open_disk(vm_id, snapshot, disk, since)`: the disk as it was in the snapshot; with `since`, a change id of an earlier
      snapshot, the reader's extents are the changed ones only.
    - `shutdown`: politely, then by force after a deadline; the VM is off when it returns.
    - `mark`: leaves a note on the source VM that it has moved.
    - `cleanup`: removes the snapshot of that name and what belongs to it.
    """

    kind: ClassVar[LiveKind]

    async def connect(self) -> None: ...
    async def supports_warm(self) -> bool: ...
    async def list_vms(self) -> list[VmRow]: ...
    async def inspect(self, vm_id: str) -> VmManifest: ...
    async def enable_cbt(self, vm_id: str) -> None: ...
    async def snapshot(self, vm_id: str, name: str) -> SnapshotRef: ...
    async def open_disk(self, vm_id: str, snapshot: SnapshotRef, disk: Disk, since: str | None) -> ReaderSpec: ...
    async def shutdown(self, vm_id: str) -> None: ...
    async def power_on(self, vm_id: str) -> None: ...
    async def mark(self, vm_id: str, note: str) -> None: ...
    async def cleanup(self, vm_id: str, name: str) -> None: ...
    async def close(self) -> None: ...
