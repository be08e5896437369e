"""Guest preparers: what must change inside a guest before it runs here. Blocking code."""

from collections.abc import Callable
from typing import Protocol

from synvirt.model import VmManifest


class GuestPreparer(Protocol):
    """- `needed(manifest)`: does this guest need preparing (Windows does)?
    - `check()`: V2vFailed with the cause, when the tool or the driver image is missing on this host.
    - `prepare(manifest, devices, stop)`: injects the drivers into the volumes at `devices` (boot disk first); V2vFailed.
    """

    def needed(self, manifest: VmManifest) -> bool: ...
    def check(self) -> None: ...
    def prepare(self, manifest: VmManifest, devices: list[str], stop: Callable[[], bool]) -> None: ...
