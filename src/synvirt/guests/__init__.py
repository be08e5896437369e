"""Guest preparers: what must change inside a guest before it runs here. Blocking code."""

from collections.abc import Callable
from typing import ClassVar, Protocol

from synvirt.model.job import MessageKind
from synvirt.model.machine import VmManifest

# Gets what the tool says, as it says it.
Tell = Callable[[MessageKind, str], None]


class GuestPreparer(Protocol):
    """Prepares a guest in two halves, so that one that goes wrong never costs a new copy of the disks:

        volumes ◀── read only ── convert ──▶ overlays, by the name of the job ── adopt ──▶ volumes

    - `wants(manifest)`: does this guest need preparing by itself (Windows does)?
    - `check()`: V2vFailed with the cause, when the tool or the driver image is missing on this host.
    - `convert(name, ...)`: injects the drivers (boot disk first in `devices`); what changes is in overlays of that name, made
      again by each call. V2vFailed with the cause; Cancelled. The volumes are as they were.
    - `adopt(name, devices)`: what the overlays hold goes into the volumes, durable on return. May run again after a crash in
      the middle; nothing to do where there are none.
    - `discard(name)`: no overlays of that name are left. Idempotent.
    """

    tool: ClassVar[str]

    def wants(self, manifest: VmManifest) -> bool: ...
    def check(self) -> None: ...
    def convert(self, name: str, manifest: VmManifest, devices: list[str], tell: Tell, stop: Callable[[], bool]) -> None: ...
    def adopt(self, name: str, devices: list[str]) -> None: ...
    def discard(self, name: str) -> None: ...
