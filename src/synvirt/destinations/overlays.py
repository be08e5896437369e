"""Clones of volumes in folders whose file system shares no bytes between files: overlays, over a volume that stays as it is.

    {job}/disk.raw             the volume, raw: not written while an overlay of it exists
    {job}/.disk.raw.{id}.held  says so: it is there before the overlay, and goes after it
    {job}/.disk.raw.aside      what passes write meanwhile, and
    {job}/.disk.raw.marks      which blocks of it (disks/raw/aside.py)
    {id}/disk.raw              the clone: an overlay in qcow2

These files are all that is known of it: their names come from the volume's, and they go with it. No volume's name begins with
a dot.
"""

import contextlib
import fcntl
import os
import re
import struct
import tempfile
from pathlib import Path
from typing import NoReturn

from synvirt.disks.raw.aside import marks_bytes
from synvirt.disks.specs import AsideWriterSpec, FileWriterSpec
from synvirt.durable import sync_folder
from synvirt.errors import DiskWriteFailed
from synvirt.programs import ProgramFailed, find, run

# An overlay is a few clusters. This is for a disk that hardly answers.
CREATE_TIMEOUT_S = 60
FILE_MODE = 0o640
NO_CLONES_HINT = "keep the volumes on XFS or Btrfs, on zfs, or in Ceph; qemu-img is in qemu-utils"


def why_none(folder: Path) -> str | None:
    """Why volumes in this folder cannot have overlays, as a sentence; None: they can."""
    if find("qemu-img") is None:
        return "their file system cannot share bytes between files (reflinks), and qemu-img is not installed"
    # QEMU locks ranges of an overlay's volume, and the copy worker the whole file. Where both are one kind of lock (NFS), a
    # rehearsal would stop the copy.
    with tempfile.NamedTemporaryFile(dir=folder) as one, Path(one.name).open("rb") as other:
        fcntl.fcntl(other.fileno(), fcntl.F_OFD_SETLK, struct.pack("hhqqi4x", fcntl.F_RDLCK, os.SEEK_SET, 100, 1, 0))
        try:
            fcntl.flock(one.fileno(), fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return "their file system has one lock a file for QEMU and for the copy"
    return None


def refuse(name: str, lacks: str) -> NoReturn:
    """DiskWriteFailed. `lacks`: why there are no overlays."""
    raise DiskWriteFailed(f"volume {name} cannot be cloned: {lacks}", hint=NO_CLONES_HINT)


def make(volume: Path, clone: Path) -> None:
    """Makes an empty overlay; the volume stays as it is from then on. DiskWriteFailed, OSError."""
    _tidy(volume)
    if _is_aside(volume):
        raise DiskWriteFailed(
            f"volume {volume.name} cannot be cloned: what was written beside it is not folded into it yet",
            hint="rehearse again after the job's next pass",
        )
    _held(volume, clone).touch(mode=FILE_MODE)
    sync_folder(volume.parent)
    clone.touch(mode=FILE_MODE)
    try:
        run(
            ["qemu-img", "create", "-q", "-f", "qcow2", "-F", "raw", "-b", str(volume), str(clone)],
            timeout_s=CREATE_TIMEOUT_S,
            guarded=True,
            missing=DiskWriteFailed,
        )
    except ProgramFailed as error:
        raise DiskWriteFailed(f"volume {volume.name} cannot be cloned: {error.detail}") from error


def is_overlay(volume: Path, clone: Path) -> bool:
    """Whether that clone is an overlay of the volume."""
    return _held(volume, clone).exists()


def let_go(volume: Path, clone: Path) -> None:
    """The overlay is gone: the volume need not stay for it. Idempotent."""
    if is_overlay(volume, clone):
        if _all_held(volume) == [_held(volume, clone)]:
            _take_back(volume)
        _held(volume, clone).unlink(missing_ok=True)
        sync_folder(volume.parent)


def release(volume: Path) -> None:
    """The volume need not stay for any overlay; and a side file that is folded is removed. Idempotent."""
    for held in _all_held(volume):
        held.unlink(missing_ok=True)
    _tidy(volume)


def remove(volume: Path) -> None:
    """Removes all that is kept beside the volume. Idempotent."""
    for held in _all_held(volume):
        held.unlink(missing_ok=True)
    _forget(volume)


def writer(volume: Path, size_bytes: int) -> FileWriterSpec | AsideWriterSpec:
    """How the volume is written now: beside it, while it must stay as it is."""
    # Looked at once: what holds the volume goes at any moment, and its side file must be there for this writer all the same.
    held = bool(_all_held(volume))
    if not held:
        _tidy(volume)
    if not _is_there(volume):
        if not held:
            return FileWriterSpec(path=str(volume), size_bytes=size_bytes)
        for path, length in ((_marks(volume), marks_bytes(size_bytes)), (_aside(volume), size_bytes)):
            _make_file(path, length)
        sync_folder(volume.parent)
    return AsideWriterSpec(
        path=str(volume), aside=str(_aside(volume)), marks=str(_marks(volume)), size_bytes=size_bytes, folds=not held
    )


def _take_back(volume: Path) -> None:
    """libvirt gives all files of a guest to QEMU's user, and takes back only the overlay."""
    folder = volume.parent.stat()
    with contextlib.suppress(FileNotFoundError, PermissionError):  # without the right, its owner was not changed
        if volume.stat().st_uid != folder.st_uid:
            os.chown(volume, folder.st_uid, folder.st_gid, follow_symlinks=False)


def _is_aside(volume: Path) -> bool:
    """Whether a part of the disk is in the side file."""
    return _is_there(volume) and any(_marks(volume).read_bytes())


def _tidy(volume: Path) -> None:
    """Removes a side file that is folded, where nothing more may come into it."""
    if _is_there(volume) and not _all_held(volume) and not _is_aside(volume):
        _forget(volume)


def _is_there(volume: Path) -> bool:
    return _aside(volume).exists() and _marks(volume).exists()


def _forget(volume: Path) -> None:
    for path in (_aside(volume), _marks(volume)):
        for one in (path, _partial(path)):
            one.unlink(missing_ok=True)


def _make_file(path: Path, length: int) -> None:
    """A file of zeros: complete, or not there."""
    partial = _partial(path)
    partial.unlink(missing_ok=True)
    descriptor = os.open(partial, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW, FILE_MODE)
    try:
        os.ftruncate(descriptor, length)
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
    partial.rename(path)


def _held(volume: Path, clone: Path) -> Path:
    return volume.with_name(f".{volume.name}.{clone.parent.name}.held")


def _all_held(volume: Path) -> list[Path]:
    name = re.compile(rf"\.{re.escape(volume.name)}\.[0-9a-f-]{{36}}\.held", re.ASCII)
    try:
        return [path for path in volume.parent.iterdir() if name.fullmatch(path.name)]
    except FileNotFoundError:  # the folder goes with the job's last volume, which may be removed at the same time
        return []


def _aside(volume: Path) -> Path:
    return volume.with_name(f".{volume.name}.aside")


def _marks(volume: Path) -> Path:
    return volume.with_name(f".{volume.name}.marks")


def _partial(path: Path) -> Path:
    return path.with_name(f"{path.name}.partial")
