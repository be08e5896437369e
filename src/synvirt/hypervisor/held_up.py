"""A guest that QEMU has paused because a disk cannot be read or written: which disk, and what has no room."""

import contextlib
import os
from pathlib import Path
from typing import Any
from xml.etree import ElementTree as ET  # of libvirt's own answers: a domain that we defined

from synvirt.hypervisor import Paused
from synvirt.kvm.connection import load


def is_held_up(domain: Any) -> bool:
    """Whether the guest is paused because a disk could not be read or written."""
    return says(domain.state())


def says(state: list[int]) -> bool:
    """The same of a state and its reason, as libvirt gave them."""
    libvirt = load()
    return state == [libvirt.VIR_DOMAIN_PAUSED, libvirt.VIR_DOMAIN_PAUSED_IOERROR]


def why(domain: Any) -> Paused:
    """Why a guest is held up. libvirt forgets the reason when the guest is resumed."""
    libvirt = load()
    full = [target for target, trouble in domain.diskErrors().items() if trouble == libvirt.VIR_DOMAIN_DISK_ERROR_NO_SPACE]
    if not full:
        return Paused()
    for disk in ET.fromstring(domain.XMLDesc()).iterfind("devices/disk"):  # noqa: S314 - libvirt's own
        target, source = disk.find("target"), disk.find("source")
        if target is not None and target.get("dev") in full and source is not None:
            return Paused(full=place_of(source.get("file") or source.get("dev") or source.get("name") or full[0]))
    return Paused(full=full[0])


def place_of(path: str) -> str:
    """What must get more room for this volume or overlay: for a file, its file system."""
    if not path.startswith("/") or path.startswith("/dev/"):
        return path
    with contextlib.suppress(OSError):
        folder = Path(path).parent.resolve()  # not the link by which the embedded driver reaches a long path
        while not os.path.ismount(folder):
            folder = folder.parent
        return f"the file system at {folder} ({Path(path).name})"
    return path
