"""Volumes as sparse raw files under a folder: the embedded destination, which works on any host.

{folder}/{job_id}/{sanitized label}.raw
"""

import contextlib
import errno
import os
import re
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import ClassVar
from uuid import UUID

from synvirt.destinations import DestinationAway, overlays
from synvirt.destinations.naming import sanitized_label
from synvirt.disks.raw.cloning import clone_file
from synvirt.disks.raw.files import HINTS
from synvirt.disks.specs import WriterSpec
from synvirt.durable import sync_folder
from synvirt.errors import DiskWriteFailed

# The errors of a file system that cannot share bytes between files, ioctl_ficlone(2).
NO_REFLINKS = frozenset({errno.EOPNOTSUPP, errno.ENOTTY, errno.EINVAL, errno.EXDEV, errno.ENOSYS})

# QEMU of libvirtd is another user. It must reach its own volume, but need not list the folder.
FOLDER_MODE = 0o751

# The names that volume_name gives: no such path leaves the folder.
NAME = re.compile(r"[0-9a-f-]{36}/\w[\w.-]*\.raw", re.ASCII)


class DirectoryDestination:
    """Volumes as sparse raw files in a folder of this host."""

    kind: ClassVar[str] = "directory"
    device_type: ClassVar[str] = "file"

    def __init__(self, folder: Path, *, mount_point: Path | None = None, shut_out: bool = False) -> None:
        """`mount_point`: nothing is done in the folder while no file system is mounted there; None: it is not checked.
        `shut_out`: this process may not open the files of a guest that runs."""
        self.folder, self._mount_point, self._shut_out = folder, mount_point, shut_out

    def why_away(self) -> str | None:
        """Why the folder's file system is not there; None, if it is. What is made before it is mounted would lie below it,
        unseen."""
        if self._mount_point is None:
            return None
        try:
            if self._mount_point.is_mount():
                return None
        except OSError as error:  # its server is away, or what serves it has ended
            return f"the file system at {self._mount_point}, which the volumes of {self.folder} lie on, fails: {error.strerror}"
        return f"nothing is mounted at {self._mount_point}, where the volumes of {self.folder} lie"

    def volume_name(self, job_id: UUID, label: str) -> str:
        return f"{job_id}/{sanitized_label(label)}.raw"

    def create(self, name: str, size_bytes: int) -> None:
        path = self._path(name)
        with _failing(f"volume {name} cannot be made"):
            if not self.folder.exists():  # its file system was mounted after the service had started
                self._make_folder(self.folder)
            self._make_folder(path.parent)
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o640)
            try:
                # The size is set last, so a file that has it is complete. ftruncate does not change existing bytes.
                present = os.fstat(descriptor).st_size
                if present not in (0, size_bytes):
                    raise DiskWriteFailed(
                        f"volume {name} already exists with {present} bytes, not {size_bytes}",
                        hint="it was made for another disk: remove it, or cancel the job that owns it",
                    )
                os.ftruncate(descriptor, size_bytes)
                os.fsync(descriptor)
            finally:
                os.close(descriptor)
            sync_folder(path.parent)
            sync_folder(self.folder)

    def is_there(self, name: str) -> bool:
        with _failing(f"volume {name} cannot be inspected"):
            try:
                return self._path(name).lstat().st_size > 0  # see `create`
            except FileNotFoundError:
                return False

    def open(self, name: str, size_bytes: int) -> WriterSpec:
        path = self._path(name)
        with _failing(f"volume {name} cannot be opened"):
            return overlays.writer(path, size_bytes)

    def device(self, name: str) -> str:
        return str(self._path(name))

    def destroy(self, name: str) -> None:
        path = self._path(name)
        with _failing(f"volume {name} cannot be removed"):
            path.unlink(missing_ok=True)
            overlays.remove(path)
            try:
                path.parent.rmdir()
            except OSError as error:
                if error.errno not in (errno.ENOENT, errno.ENOTEMPTY):  # another disk of the job is still there
                    raise
            with contextlib.suppress(FileNotFoundError):
                # Before its ledger entry goes: a file that a power cut brought back would belong to nobody.
                sync_folder(path.parent if path.parent.is_dir() else self.folder)

    def why_no_clones(self) -> str | None:
        """It tries with two unnamed files, as the type of a mount does not say what it can do."""
        self._refuse_unmounted()
        with (
            _failing(f"nothing can be made in the folder of the volumes, {self.folder}"),
            tempfile.TemporaryFile(dir=self.folder) as one,
            tempfile.TemporaryFile(dir=self.folder) as other,
        ):
            one.write(b"x" * 4096)
            one.flush()
            return None if self._shares(one.fileno(), other.fileno()) else self._why_no_overlays()

    def clone(self, name: str, to: str) -> None:
        volume, path = self._path(name), self._path(to)
        self.unclone(name, to)
        try:
            with _failing(f"volume {name} cannot be cloned"):
                self._make_folder(path.parent)
                flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW
                with (
                    open(os.open(volume, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW), "rb") as original,
                    open(os.open(path, flags, 0o640), "rb+") as cloned,
                ):
                    if self._shares(original.fileno(), cloned.fileno()):
                        return
                if (lacks := self._why_no_overlays()) is None:
                    overlays.make(volume, path)
                else:
                    overlays.refuse(name, lacks)
        except BaseException:
            self.unclone(name, to)
            raise

    def _why_no_overlays(self) -> str | None:
        if self._shut_out:
            return (
                "their file system cannot share bytes between files (reflinks); and a volume under an overlay is QEMU's user's "
                "while its guest runs, whose files this service may not open"
            )
        return overlays.why_none(self.folder)

    def backing_file(self, name: str, to: str) -> str | None:
        volume = self._path(name)
        return str(volume) if overlays.is_overlay(volume, self._path(to)) else None

    def unclone(self, name: str, to: str) -> None:
        volume = self._path(name)
        self.destroy(to)
        with _failing(f"the clone of volume {name} cannot be removed"):
            overlays.let_go(volume, self._path(to))

    def release(self, name: str) -> None:
        with _failing(f"volume {name} cannot be written"):
            overlays.release(self._path(name))

    def shared_id(self) -> str | None:
        return None

    def free_bytes(self) -> int:
        self._refuse_unmounted()
        with _failing(f"the folder of the volumes, {self.folder}, cannot be used"):
            # Where its file system was mounted after the service had started, `create` makes the folder.
            there = next(folder for folder in (self.folder, *self.folder.parents) if folder.exists())
            if os.statvfs(there).f_flag & os.ST_RDONLY:
                raise OSError(errno.EROFS, os.strerror(errno.EROFS))
            return shutil.disk_usage(there).free

    @staticmethod
    def _shares(source: int, target: int) -> bool:
        """Makes `target` share all bytes of `source`. False, where the file system cannot."""
        try:
            clone_file(source, target)
        except OSError as error:
            if error.errno not in NO_REFLINKS:
                raise
            return False
        return True

    def _make_folder(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        if folder.stat().st_uid == os.geteuid():
            folder.chmod(FOLDER_MODE)  # mkdir's mode is subject to the umask

    def _path(self, name: str) -> Path:
        # Names come from volume_name by way of the store: this guards against a store that someone edited.
        if not NAME.fullmatch(name):
            raise DiskWriteFailed(f"{name!r} is not a name of a volume in a folder")
        self._refuse_unmounted()
        return self.folder / name

    def _refuse_unmounted(self) -> None:
        if (why := self.why_away()) is not None:
            raise DestinationAway(why, hint="mount it: what is in its volumes is there again then")


@contextlib.contextmanager
def _failing(what: str) -> Iterator[None]:
    """Raises an OSError of the block as DiskWriteFailed."""
    try:
        yield
    except OSError as error:
        raise DiskWriteFailed(f"{what}: {error.strerror}", hint=HINTS.get(error.errno or 0)) from error
