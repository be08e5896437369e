"""A preparer that writes its mark into the boot disk, so that a test can see that it ran, and how often."""

from collections.abc import Callable
from pathlib import Path

from synvirt.errors import Cancelled, V2vFailed
from synvirt.model import VmManifest

MARK = b"virtio drivers are here"


class FakePreparer:
    def __init__(self, *, missing: bool = False, fails: bool = False) -> None:
        self.missing = missing
        self.fails = fails
        self.prepared: list[str] = []

    def needed(self, manifest: VmManifest) -> bool:
        return manifest.guest_os.family == "windows"

    def check(self) -> None:
        if self.missing:
            raise V2vFailed("virt-v2v-in-place is not installed", hint="apt-get install virt-v2v")

    def prepare(self, manifest: VmManifest, devices: list[str], stop: Callable[[], bool]) -> None:
        if stop():
            raise Cancelled
        if self.fails:
            raise V2vFailed("there is no driver for this Windows")
        with Path(devices[0]).open("r+b") as disk:
            disk.write(MARK)
        self.prepared.append(manifest.name)
