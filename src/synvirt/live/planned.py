"""A platform that is registered and not served yet: its sources are kept and their form is checked, and nothing more.

Specification part 1, item 8: `connect` validates the endpoint, there is no warm mode, and every other method refuses:
SnapshotFailed from `snapshot`, Internal from the rest.
"""

from collections.abc import Collection
from typing import Any, NoReturn

from synvirt.disks.specs import ReaderSpec
from synvirt.errors import Internal, SnapshotFailed
from synvirt.live import About, SnapshotRef, SourceAccess, VmRow
from synvirt.live.form import Form
from synvirt.model import Disk, LiveKind, VmManifest

HINT = "until then, export the VM and import the files: synvirt import PATH"


class Planned:
    """`coming`: what is to come, as the end of a sentence about the platform."""

    def __init__(self, access: SourceAccess, form: Form[Any, Any], coming: str) -> None:
        self._access, self._form, self._coming = access, form, coming
        form.read(access)

    @property
    def kind(self) -> LiveKind:
        return self._form.kind

    async def connect(self) -> None:
        """Nothing is reached: endpoint and credentials have the right form, or BadRequest."""
        self._form.read(self._access)

    async def about(self) -> About:
        self._refuse("say who answers")

    async def supports_warm(self) -> bool:
        return False

    async def list_vms(self) -> list[VmRow]:
        self._refuse("list virtual machines")

    async def inspect(self, vm_id: str) -> VmManifest:
        self._refuse(f"inspect {vm_id}")

    async def enable_cbt(self, vm_id: str, disks: Collection[str]) -> None:
        self._refuse(f"track the changes of {vm_id}")

    async def snapshot(self, vm_id: str, name: str, disks: Collection[str] | None = None) -> SnapshotRef:
        raise SnapshotFailed(f"{self._cannot(f'snapshot {vm_id}')}", hint=HINT)

    async def open_disk(self, vm_id: str, snapshot: SnapshotRef, disk: Disk, since: str | None) -> ReaderSpec:
        self._refuse(f"read disk {disk.key} of {vm_id}")

    async def release(self, vm_id: str, name: str) -> None:
        self._refuse(f"release {vm_id}")

    async def last_start(self, vm_id: str) -> str:
        self._refuse(f"say when {vm_id} was started")

    async def shutdown(self, vm_id: str) -> None:
        self._refuse(f"shut {vm_id} down")

    async def power_on(self, vm_id: str) -> None:
        self._refuse(f"power {vm_id} on")

    async def mark(self, vm_id: str, note: str) -> None:
        self._refuse(f"mark {vm_id}")

    async def cleanup(self, vm_id: str, name: str) -> None:
        self._refuse(f"clean up {vm_id}")

    async def close(self) -> None:
        pass

    def _cannot(self, what: str) -> str:
        return f"{self.kind} cannot {what} in this version: {self._coming}"

    def _refuse(self, what: str) -> NoReturn:
        raise Internal(self._cannot(what), hint=HINT)
