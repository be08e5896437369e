"""A preparer that writes its mark into the boot disk, so that a test can see that it ran, and how often."""

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import ClassVar

from synvirt.errors import Cancelled, V2vFailed
from synvirt.guests import Tell
from synvirt.model.machine import VmManifest

MARK = b"virtio drivers are here"


class FakePreparer:
    """`folder` holds what a conversion changed, until it is adopted; House says where."""

    tool: ClassVar[str] = "fake"

    def __init__(self, *, missing: bool = False, fails: bool = False) -> None:
        self.folder: Path = Path("/nonexistent")
        self.missing = missing
        self.fails = fails
        self.prepared: list[str] = []

    def wants(self, manifest: VmManifest) -> bool:
        return manifest.guest_os.family == "windows"

    def check(self) -> None:
        if self.missing:
            raise V2vFailed("virt-v2v-in-place is not installed", hint="apt-get install virt-v2v")

    def convert(self, name: str, manifest: VmManifest, devices: list[str], tell: Tell, stop: Callable[[], bool]) -> None:
        self.discard(name)
        (self.folder / name).mkdir(parents=True)
        assert all(Path(device).exists() for device in devices)
        tell("message", "Opening the source")
        if stop():
            raise Cancelled
        if self.fails:
            raise V2vFailed("there is no driver for this Windows")
        tell("info", "This guest has virtio drivers installed.")
        (self.folder / name / "0").write_bytes(MARK)
        self.prepared.append(manifest.name)

    def adopt(self, name: str, devices: list[str]) -> None:
        changed = self.folder / name / "0"
        if changed.exists():
            with Path(devices[0]).open("r+b") as disk:
                disk.write(changed.read_bytes())

    def discard(self, name: str) -> None:
        shutil.rmtree(self.folder / name, ignore_errors=True)
