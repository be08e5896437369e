"""Volumes as sparse raw files under a folder: the embedded destination, which works on any host.

{folder}/{job_id}/{sanitized label}.raw
"""

import contextlib
import errno
import hashlib
import os
import re
import shutil
from pathlib import Path
from typing import ClassVar
from uuid import UUID

from synvirt.disks.specs import FileWriterSpec, WriterSpec
from synvirt.errors import DiskWriteFailed

# A file name holds 255 bytes; the job's folder is separate. Room is left for the digest and the suffix.
LABEL_CHARS_MAX = 100
# 6 bytes of digest: two labels of one job that sanitize alike collide once in 10^14 jobs.
DIGEST_BYTES = 6


def sanitized_label(label: str) -> str:
    """A label as a name of letters, digits, `-`, `_` and `.`: itself where it is one already, else with a digest of the
    original behind it, so that «a b» and «a_b» stay two disks."""
    safe = re.sub(r"[^A-Za-z0-9._-]", "_", label).lstrip(".-")[:LABEL_CHARS_MAX]
    # A label that ends as if it had a digest gets one of its own: else it could be made to collide.
    if safe == label and safe and not re.search(r"-[0-9a-f]{12}$", safe):
        return safe
    digest = hashlib.blake2b(label.encode(errors="surrogatepass"), digest_size=DIGEST_BYTES).hexdigest()
    return f"{safe or 'disk'}-{digest}"


class DirectoryDestination:
    kind: ClassVar[str] = "directory"
    device_type: ClassVar[str] = "file"

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def volume_name(self, job_id: UUID, label: str) -> str:
        return f"{job_id}/{sanitized_label(label)}.raw"

    def create(self, name: str, size_bytes: int) -> None:
        path = self._path(name)
        try:
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
        except OSError as error:
            raise _failed(name, "cannot be made", error) from error

    def open(self, name: str, size_bytes: int) -> WriterSpec:
        return FileWriterSpec(path=str(self._path(name)), size_bytes=size_bytes)

    def device(self, name: str) -> str:
        return str(self._path(name))

    def destroy(self, name: str) -> None:
        path = self._path(name)
        try:
            path.unlink(missing_ok=True)
            with contextlib.suppress(FileNotFoundError):
                path.parent.rmdir()
        except OSError as error:
            if error.errno != errno.ENOTEMPTY:  # another disk of the job is still there
                raise _failed(name, "cannot be removed", error) from error

    def free_bytes(self) -> int:
        return shutil.disk_usage(self.folder).free

    def _path(self, name: str) -> Path:
        path = self.folder / name
        # Names come from volume_name by way of the store: this guards against a store that someone edited.
        if ".." in path.parts or not path.is_relative_to(self.folder):
            raise DiskWriteFailed(f"volume name {name!r} leaves the destination folder")
        return path


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _failed(name: str, what: str, error: OSError) -> DiskWriteFailed:
    hint = "free space on the destination, or choose another" if error.errno in (errno.ENOSPC, errno.EDQUOT) else None
    return DiskWriteFailed(f"volume {name} {what}: {error.strerror}", hint=hint)
