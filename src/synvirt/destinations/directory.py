"""Volumes as sparse raw files under a folder: the embedded destination, which works on any host.

{folder}/{job_id}/{sanitized label}.raw
"""

import contextlib
import errno
import os
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import ClassVar
from uuid import UUID

from synvirt.destinations.naming import sanitized_label
from synvirt.disks.raw.files import HINTS
from synvirt.disks.specs import FileWriterSpec, WriterSpec
from synvirt.durable import sync_folder
from synvirt.errors import DiskWriteFailed

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
            sync_folder(path.parent)
            sync_folder(self.folder)

    def open(self, name: str, size_bytes: int) -> WriterSpec:
        return FileWriterSpec(path=str(self._path(name)), size_bytes=size_bytes)

    def device(self, name: str) -> str:
        return str(self._path(name))

    def destroy(self, name: str) -> None:
        path = self._path(name)
        with _failing(f"volume {name} cannot be removed"):
            path.unlink(missing_ok=True)
            try:
                path.parent.rmdir()
            except OSError as error:
                if error.errno not in (errno.ENOENT, errno.ENOTEMPTY):  # another disk of the job is still there
                    raise

    def shared_id(self) -> str | None:
        return None

    def free_bytes(self) -> int:
        with _failing("the folder of the volumes cannot be looked at"):
            return shutil.disk_usage(self.folder).free

    def _path(self, name: str) -> Path:
        # Names come from volume_name by way of the store: this guards against a store that someone edited.
        if not NAME.fullmatch(name):
            raise DiskWriteFailed(f"{name!r} is no name of a volume in a folder")
        return self.folder / name


@contextlib.contextmanager
def _failing(what: str) -> Iterator[None]:
    """An OSError as the DiskWriteFailed it is."""
    try:
        yield
    except OSError as error:
        raise DiskWriteFailed(f"{what}: {error.strerror}", hint=HINTS.get(error.errno or 0)) from error
