"""Volumes as sparse raw files under a folder: the embedded destination, which works on any host.

    {folder}/{job_id}/{sanitized label}.raw             the volume
    {folder}/{job_id}/{sanitized label}.raw.protected   what it held when it was protected: a reflink, which takes no room

Reflinks are a matter of the file system: XFS, Btrfs, bcachefs (ioctl_ficlonerange(2)). Elsewhere nothing can be protected.
"""

import contextlib
import errno
import fcntl
import os
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import ClassVar
from uuid import UUID

from synvirt.destinations.naming import sanitized_label
from synvirt.disks.raw import HINTS
from synvirt.disks.specs import FileWriterSpec, WriterSpec
from synvirt.errors import DiskWriteFailed

# linux/fs.h: _IOW(0x94, 9, int)
FICLONE = 0x40049409
# What a file system without reflinks answers, and one whose files cannot share here (two mounts, a swap file, NFS before 4.2).
NO_REFLINKS = frozenset({errno.EOPNOTSUPP, errno.ENOTTY, errno.ENOSYS, errno.EINVAL, errno.EXDEV})
# What volume_name gives: no path leaves the folder.
NAME = re.compile(r"[0-9a-f-]{36}/\w[\w.-]*\.raw", re.ASCII)


class DirectoryDestination:
    kind: ClassVar[str] = "directory"
    device_type: ClassVar[str] = "file"

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def volume_name(self, job_id: UUID, label: str) -> str:
        return f"{job_id}/{sanitized_label(label)}.raw"

    def create(self, name: str, size_bytes: int) -> None:
        path = self._path(name)
        with _failing(f"volume {name} cannot be made"):
            path.parent.mkdir(parents=True, exist_ok=True, mode=0o750)
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o640)
            try:
                # The size comes last, so a file that has it was made whole; ftruncate leaves bytes that are there alone.
                present = os.fstat(descriptor).st_size
                if present not in (0, size_bytes):
                    raise DiskWriteFailed(
                        f"volume {name} is there already with {present} bytes, not {size_bytes}",
                        hint="it was made for another disk: remove it, or cancel the job that owns it",
                    )
                os.ftruncate(descriptor, size_bytes)
                os.fsync(descriptor)
            finally:
                os.close(descriptor)
            _sync_folder(path.parent)
            _sync_folder(self.folder)

    def open(self, name: str, size_bytes: int) -> WriterSpec:
        return FileWriterSpec(path=str(self._path(name)), size_bytes=size_bytes)

    def device(self, name: str) -> str:
        return str(self._path(name))

    def destroy(self, name: str) -> None:
        path = self._path(name)
        with _failing(f"volume {name} cannot be removed"):
            for one in (path, _protected(path), _unfinished(path)):
                one.unlink(missing_ok=True)
            try:
                path.parent.rmdir()
            except OSError as error:
                if error.errno not in (errno.ENOENT, errno.ENOTEMPTY):  # another disk of the job is still there
                    raise

    def free_bytes(self) -> int:
        with _failing("the folder of the volumes cannot be looked at"):
            return shutil.disk_usage(self.folder).free

    def protect(self, name: str) -> bool:
        path = self._path(name)
        with _failing(f"volume {name} cannot be protected"):
            return _protected(path).exists() or _shared(path, _protected(path))

    def roll_back(self, name: str) -> None:
        path = self._path(name)
        with _failing(f"volume {name} cannot be rolled back"):
            if not (_protected(path).exists() and _shared(_protected(path), path)):
                raise DiskWriteFailed(f"volume {name} is not protected: there is nothing to roll it back to")

    def release(self, name: str) -> None:
        path = self._path(name)
        with _failing(f"volume {name} cannot be released"):
            for one in (_protected(path), _unfinished(path)):
                one.unlink(missing_ok=True)

    def _path(self, name: str) -> Path:
        # Names come from volume_name by way of the store: this guards against a store that someone edited.
        if not NAME.fullmatch(name):
            raise DiskWriteFailed(f"{name!r} is no name of a volume in a folder")
        return self.folder / name


def _protected(path: Path) -> Path:
    return path.with_name(f"{path.name}.protected")


def _unfinished(path: Path) -> Path:
    return path.with_name(f"{path.name}.unfinished")


def _shared(path: Path, twin: Path) -> bool:
    """Make `twin` a file of the same bytes, on the same blocks, whole or not at all; False where there are no reflinks."""
    unfinished = _unfinished(twin.with_name(twin.name.removesuffix(".protected")))
    try:
        with path.open("rb") as source, unfinished.open("wb") as target:
            os.fchmod(target.fileno(), path.stat().st_mode & 0o777)
            fcntl.ioctl(target.fileno(), FICLONE, source.fileno())
            os.fsync(target.fileno())
    except OSError as error:
        unfinished.unlink(missing_ok=True)
        if error.errno in NO_REFLINKS:
            return False
        raise
    unfinished.replace(twin)
    _sync_folder(twin.parent)
    return True


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def _failing(what: str) -> Iterator[None]:
    """An OSError as the DiskWriteFailed it is."""
    try:
        yield
    except OSError as error:
        raise DiskWriteFailed(f"{what}: {error.strerror}", hint=HINTS.get(error.errno or 0)) from error
