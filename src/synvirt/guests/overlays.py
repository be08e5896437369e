"""Copy-on-write files over the volumes of a job: a program may change them, and the volumes stay as they are.

    volume (raw; only read) ◀─ backing file ─ N.qcow2 (the changes)

A device may be an overlay itself, in qcow2 over a raw file: `backing` has that file by the device's path.

Overlays work on every destination, and need only space for what is changed. `qemu-img commit -d` commits them; it may run
twice, as a committed overlay still has all its data.
"""

import shutil
from collections.abc import Mapping
from pathlib import Path

from synvirt.cage.launch import image_tool
from synvirt.durable import sync_file, sync_folder
from synvirt.errors import V2vFailed
from synvirt.guests import AdoptFailed
from synvirt.programs import NO_SPACE, ProgramFailed, end_users, run

# Seconds for a commit: drivers, an agent and a changed registry are some 100 MB, which takes long only on a failing disk.
COMMAND_TIMEOUT_S = 600
# The most that a conversion may write: it needs 100 MB in the guest's own file system.
ROOM_BYTES = 1 << 30


def lay(folder: Path, devices: list[str], backing: Mapping[str, str]) -> list[Path]:
    """Makes new, empty overlays in `folder`, in the order of `devices`, and removes those of an earlier try. V2vFailed;
    OSError."""
    remove(folder)
    folder.mkdir(parents=True, mode=0o700)
    free = shutil.disk_usage(folder).free
    if free < ROOM_BYTES:
        raise V2vFailed(
            f"a conversion needs {ROOM_BYTES >> 20} MiB for what it changes; the service's folder has {free >> 20} MiB free",
            hint="make room on the file system of the service's folder and start the job again",
        )
    laid = []
    for number, device in enumerate(devices):
        overlay = folder / f"{number}.qcow2"
        form = "qcow2" if device in backing else "raw"
        create = ["qemu-img", "create", "-q", "-f", "qcow2", "-F", form, "-b", device, str(overlay)]
        try:
            _run(image_tool(create, reads=chain(device, backing), writes=[str(folder)]))
        except ProgramFailed as error:
            raise V2vFailed(f"the conversion's overlays cannot be made: {error.detail}") from error
        laid.append(overlay)
    return laid


def chain(device: str, backing: Mapping[str, str]) -> list[str]:
    """The device, and the file under it."""
    return [device, *([backing[device]] if device in backing else [])]


def keep(folder: Path, laid: list[Path]) -> None:
    """Makes overlays durable that a program has written: it writes them without flushing. OSError."""
    for overlay in laid:
        _flush(str(overlay))
    sync_folder(folder)
    sync_folder(folder.parent)


def take_over(folder: Path, devices: list[str], backing: Mapping[str, str]) -> None:
    """Commits the overlays into the devices; durable on return. AdoptFailed."""
    for number, device in enumerate(devices):
        overlay = folder / f"{number}.qcow2"
        if overlay.exists():
            commit = ["qemu-img", "commit", "-q", "-d", "-f", "qcow2", str(overlay)]
            try:
                _run(image_tool(commit, reads=chain(device, backing)[1:], writes=[str(overlay), device]))
                _flush(device)
            except (ProgramFailed, OSError) as error:
                cause = error.detail if isinstance(error, ProgramFailed) else error.strerror or type(error).__name__
                name = Path(device.partition(":conf=")[0]).name
                raise AdoptFailed(
                    f"the changes of the conversion cannot be written to {name}: {cause}",
                    hint="free space at the destination" if NO_SPACE in cause else None,
                ) from error


def remove(folder: Path) -> None:
    """Removes the overlays, and ends processes that have one of them open."""
    end_users(folder)
    shutil.rmtree(folder, ignore_errors=True)


def _flush(device: str) -> None:
    # qemu-img has flushed a device that is no path (rbd:pool/image) when it closed it; this host has no cache of it.
    if Path(device).is_absolute():
        sync_file(Path(device))


def _run(argv: list[str]) -> None:
    """Runs a program in a cage, as an overlay has data of a guest. ProgramFailed."""
    run(argv, timeout_s=COMMAND_TIMEOUT_S, guarded=True, name="qemu-img", missing=V2vFailed)
