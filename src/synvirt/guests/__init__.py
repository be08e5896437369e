"""What is done with a guest's own content. Blocking code.

A **preparer** changes in it what must change before it runs here (`virt_v2v.py`). `inside/` only reads it.
"""

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, ClassVar, Protocol

from synvirt.errors import V2vFailed

if TYPE_CHECKING:  # they load pydantic, which what reads a guest's disks in a cage does not need
    from synvirt.model.job import MessageKind
    from synvirt.model.machine import VmManifest

# Gets the tool's messages as they come.
OnMessage = Callable[["MessageKind", str], None]


class AdoptFailed(V2vFailed):
    """A conversion succeeded, and could not be written to the volumes, which may have a part of it. `adopt` may be called
    again."""


def in_order(manifest: "VmManifest", devices: Mapping[str, str]) -> list[str]:
    """The devices in the order in which a preparer gets them. `devices`: by the keys of their disks.

    Of several systems the first is prepared, so with Windows the disk that it boots from comes first, whichever it is. A Linux
    keeps the order of its disks: it names them by that (/dev/sdb), and what names them is rewritten to the names that they get
    here, in the same order."""
    disks = [disk for disk in manifest.disks if disk.key in devices]
    if manifest.guest_os.family == "windows":
        disks.sort(key=lambda disk: disk.boot_place)
    return [devices[disk.key] for disk in disks]


class GuestPreparer(Protocol):
    """Prepares a guest in two steps, so that a failure never costs a new copy of the disks:

        volumes ◀── read only ── convert ──▶ overlays, by the name of the job ── adopt ──▶ volumes

    - `wants(manifest)`: whether this guest needs preparing: a Windows does, and a Linux whose initramfs has no driver for disks
      here.
    - `check(manifest)`: V2vFailed with the cause, when what this guest's conversion needs is missing on this host: the tool,
      or the driver image.
    - `convert(name, ...)`: installs the drivers (`devices` as `in_order` has them). The changes are in overlays of that name,
      which each call makes again, and which are durable on return. V2vFailed with the cause; Cancelled. The volumes are not
      changed. `backing`: for each device that is an overlay in qcow2 itself, its raw backing file.
    - `adopt(name, devices)`: commits the overlays into the volumes; durable on return. May run again after a crash or
      AdoptFailed; does nothing where there are no overlays.
    - `discard(name)`: removes the overlays of that name. Idempotent.
    """

    tool: ClassVar[str]

    def wants(self, manifest: "VmManifest") -> bool: ...
    def check(self, manifest: "VmManifest") -> None: ...
    def convert(
        self,
        name: str,
        manifest: "VmManifest",
        devices: list[str],
        on_message: OnMessage,
        stop: Callable[[], bool],
        *,
        backing: Mapping[str, str] = ...,
    ) -> None: ...
    def adopt(self, name: str, devices: list[str], *, backing: Mapping[str, str] = ...) -> None: ...
    def discard(self, name: str) -> None: ...
