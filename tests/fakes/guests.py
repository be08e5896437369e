"""A preparer that writes its mark into the boot disk, so that a test can see that it ran, and how often."""

import shutil
import subprocess
from collections.abc import Callable, Mapping
from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import ClassVar

from synvirt.errors import Cancelled, V2vFailed
from synvirt.guests import AdoptFailed, OnMessage
from synvirt.guests.virt_v2v import ALONE
from synvirt.machines.disk_drivers import finds_no_disk
from synvirt.model.machine import VmManifest

MARK = b"virtio drivers are here"


def overlay_write(overlay: Path, data: bytes) -> None:
    """At the beginning of the disk of an overlay in qcow2."""
    with NamedTemporaryFile() as file:
        file.write(data)
        file.flush()
        put = f"write -q -s {file.name} 0 {len(data)}"
        subprocess.run(["qemu-io", "-f", "qcow2", "-c", put, str(overlay)], check=True)


def overlay_read(overlay: Path) -> bytes:
    """All of the disk, as a guest would see it."""
    with NamedTemporaryFile() as file:
        convert = ["qemu-img", "convert", "-U", "-f", "qcow2", "-O", "raw", str(overlay), file.name]
        subprocess.run(convert, check=True)
        return Path(file.name).read_bytes()


class FakePreparer:
    """`folder` holds what a conversion changed, until it is adopted; House says where."""

    tool: ClassVar[str] = "fake"

    def __init__(self, *, missing: bool = False, fails: bool = False, full_for: int = 0) -> None:
        """`full_for`: so many times the volumes have no room for what is adopted, of which a part is written."""
        self.folder: Path = Path("/nonexistent")
        self.missing = missing
        self.fails = fails
        self.full_for = full_for
        self.prepared: list[str] = []

    def wants(self, manifest: VmManifest) -> bool:
        return manifest.guest_os.family == "windows" or (finds_no_disk(manifest) and not self.missing)

    def check(self, manifest: VmManifest) -> None:
        if self.missing:
            raise V2vFailed("virt-v2v-in-place is not installed", hint="apt-get install virt-v2v")

    def convert(
        self,
        name: str,
        manifest: VmManifest,
        devices: list[str],
        on_message: OnMessage,
        stop: Callable[[], bool],
        *,
        backing: Mapping[str, str] = ALONE,
    ) -> None:
        self.discard(name)
        (self.folder / name).mkdir(parents=True)
        assert all(Path(device).exists() for device in devices)
        on_message("message", "Opening the source")
        if stop():
            raise Cancelled
        if self.fails:
            raise V2vFailed("there is no driver for this Windows")
        on_message("info", "This guest has virtio drivers installed.")
        (self.folder / name / "0").write_bytes(MARK)
        self.prepared.append(manifest.name)

    def adopt(self, name: str, devices: list[str], *, backing: Mapping[str, str] = ALONE) -> None:
        changed = self.folder / name / "0"
        if changed.exists() and devices[0] in backing:
            overlay_write(Path(devices[0]), changed.read_bytes())
        elif changed.exists():
            with Path(devices[0]).open("r+b") as disk:
                disk.write(changed.read_bytes()[: 4 if self.full_for else None])
        if self.full_for:
            self.full_for -= 1
            raise AdoptFailed("there is no space", hint="make some")

    def discard(self, name: str) -> None:
        shutil.rmtree(self.folder / name, ignore_errors=True)
