"""Windows guests get their virtio drivers from virt-v2v-in-place, which knows every Windows there is.

    manifest ─▶ a libvirt domain of the volumes ─▶ virt-v2v-in-place -i libvirtxml ─▶ the volumes, with drivers

The tool runs the guest's disks in an appliance of its own (libguestfs); nothing of the guest runs on the host.
"""

import tempfile
from collections.abc import Callable
from pathlib import Path
from xml.etree import ElementTree as ET

from synvirt.errors import V2vFailed
from synvirt.model import VmManifest
from synvirt.programs import ProgramFailed, find, run

PROGRAM = "virt-v2v-in-place"
# A conversion takes 2 to 5 minutes; one on a slow pool without KVM was seen to take 20.
TIMEOUT_S = 3600


class VirtV2vInPlace:
    """`iso` is the virtio driver image; the default is where Fedora's virtio-win package puts it (specification part 1)."""

    def __init__(self, iso: Path = Path("/usr/share/virtio-win/virtio-win.iso"), *, kvm: Callable[[], bool]) -> None:
        self._iso = iso
        self._kvm = kvm

    def needed(self, manifest: VmManifest) -> bool:
        return manifest.guest_os.family == "windows"

    def check(self) -> None:
        if find(PROGRAM) is None:
            raise V2vFailed(f"{PROGRAM} is not installed, and {self._what()}", hint="apt-get install virt-v2v")
        if not self._iso.exists():
            raise V2vFailed(
                f"the virtio driver image {self._iso.name} is missing, and {self._what()}",
                hint="put virtio-win.iso where the setting virtio_win_iso says",
            )

    def prepare(self, manifest: VmManifest, devices: list[str], stop: Callable[[], bool]) -> None:
        self.check()
        env = {"VIRTIO_WIN": str(self._iso), "LIBGUESTFS_BACKEND": "direct"}
        if not self._kvm():
            env["LIBGUESTFS_BACKEND_SETTINGS"] = "force_tcg"
        with tempfile.TemporaryDirectory(prefix="synvirt-v2v-") as folder:
            domain = Path(folder, "guest.xml")
            domain.write_bytes(_domain(manifest, devices))
            try:
                run([PROGRAM, "-i", "libvirtxml", str(domain)], timeout_s=TIMEOUT_S, env=env, stop=stop, missing=V2vFailed)
            except ProgramFailed as error:
                raise V2vFailed(f"{manifest.name}: {error.detail}", hint=_hint(error.stderr)) from error

    @staticmethod
    def _what() -> str:
        return "a Windows guest cannot start without virtio drivers"


# What the tool says, and what it means to an operator. First match wins.
_CAUSES = (
    ("hibernated", "start Windows on the source, turn Fast Startup off (powercfg /h off), shut it down and try again"),
    ("BitLocker", "suspend BitLocker on the source before the export"),
    ("there are no virtio drivers available", "this virtio-win.iso has no driver for this Windows: use a newer or older one"),
    ("read-only", "the file system was not shut down cleanly: start Windows on the source and shut it down"),
)


def _hint(stderr: str) -> str | None:
    return next((hint for words, hint in _CAUSES if words.lower() in stderr.lower()), None)


def _domain(manifest: VmManifest, devices: list[str]) -> bytes:
    """What the tool must know of the guest: its disks in order, its memory and its firmware."""
    domain = ET.Element("domain", type="kvm")
    ET.SubElement(domain, "name").text = manifest.name
    ET.SubElement(domain, "memory", unit="b").text = str(manifest.memory_bytes)
    ET.SubElement(domain, "vcpu").text = str(manifest.cpu_count)
    os_element = ET.SubElement(domain, "os", firmware="efi") if manifest.firmware == "uefi" else ET.SubElement(domain, "os")
    ET.SubElement(os_element, "type", arch="x86_64").text = "hvm"
    devices_element = ET.SubElement(domain, "devices")
    for number, device in enumerate(devices):
        disk = ET.SubElement(devices_element, "disk", type="file", device="disk")
        ET.SubElement(disk, "driver", name="qemu", type="raw")
        ET.SubElement(disk, "source", file=device)
        ET.SubElement(disk, "target", dev=f"sd{chr(ord('a') + number % 26)}", bus="sata")
    return ET.tostring(domain)
