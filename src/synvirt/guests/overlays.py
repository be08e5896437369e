"""Copy-on-write files over the volumes of a job: a program may change them at will, and the volumes stay as they are.

    volume (raw; only read) ◀─ backing file ─ N.qcow2 (what was changed)

Such an overlay serves over every destination alike, costs what is changed, and is taken over by `qemu-img commit`, which may
run twice: an overlay that was taken over still holds all that it held (-d).
"""

import os
import shutil
from pathlib import Path

from synvirt.cage.launch import image_tool
from synvirt.errors import V2vFailed
from synvirt.programs import ProgramFailed, end_users, run

# Drivers, an agent and a changed registry are some 100 MB; more than a few seconds of work only on a dying disk.
COMMAND_TIMEOUT_S = 600
# What a conversion writes, with room to spare: it asks for 100 MB in the guest's own file system.
ROOM_BYTES = 1 << 30


def lay(folder: Path, devices: list[str]) -> list[Path]:
    """New, empty overlays in `folder`, in the order of `devices`; what an earlier try left is gone."""
    remove(folder)
    folder.mkdir(parents=True, mode=0o700)
    free = shutil.disk_usage(folder).free
    if free < ROOM_BYTES:
        raise V2vFailed(
            f"a conversion needs {ROOM_BYTES >> 20} MiB for what it changes, and {{data_dir}} has {free >> 20} MiB free",
            hint="make room on the file system of {data_dir} and start the job again",
        )
    laid = []
    for number, device in enumerate(devices):
        overlay = folder / f"{number}.qcow2"
        create = ["qemu-img", "create", "-q", "-f", "qcow2", "-F", "raw", "-b", device, str(overlay)]
        _run(image_tool(create, reads=[device], writes=[str(folder)]))
        laid.append(overlay)
    return laid


def take_over(folder: Path, devices: list[str]) -> None:
    """What the overlays hold goes into the devices, durable on return."""
    for number, device in enumerate(devices):
        overlay = folder / f"{number}.qcow2"
        if overlay.exists():
            _run(image_tool(["qemu-img", "commit", "-q", "-d", "-f", "qcow2", str(overlay)], writes=[str(overlay), device]))
            _flush(device)


def remove(folder: Path) -> None:
    """Removes the overlays, and ends what has one of them open."""
    end_users(folder)
    shutil.rmtree(folder, ignore_errors=True)


def _flush(device: str) -> None:
    # A device that is no path (rbd:pool/image) was flushed by qemu-img as it closed it, and has no cache of this host's.
    if Path(device).is_absolute():
        descriptor = os.open(device, os.O_RDWR | os.O_CLOEXEC)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def _run(argv: list[str]) -> None:
    """Confined: what a conversion wrote into the overlay is a guest's."""
    try:
        run(argv, timeout_s=COMMAND_TIMEOUT_S, guarded=True, name="qemu-img", missing=V2vFailed)
    except ProgramFailed as error:
        raise V2vFailed(f"the changes of the conversion cannot be kept: {error.detail}") from error
