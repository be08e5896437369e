"""The files that restores write: the service makes them, a worker fills them."""

import os
import shutil
from pathlib import Path
from typing import Final

from synvirt.disks.specs import FileWriterSpec, Qcow2WriterSpec
from synvirt.errors import DiskWriteFailed

# The path of a socket may have 107 bytes.
NAME_CHARS_MAX: Final = 16


def file_name_of(target: str) -> str:
    """The ASCII letters and digits of a disk's target, which comes from a domain's XML: NAME_CHARS_MAX at most, or none."""
    return "".join(letter for letter in target if letter.isascii() and letter.isalnum())[:NAME_CHARS_MAX]


def file_writer(path: Path, size: int, format_: str) -> FileWriterSpec | Qcow2WriterSpec:
    """The writer of the file for a worker. A raw file exists on return, sparse, with what an interrupted run wrote; qemu-img
    makes a qcow2 file itself. OSError."""
    if format_ == "qcow2":
        return Qcow2WriterSpec(path=str(path))
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    try:
        os.ftruncate(descriptor, size)
    finally:
        os.close(descriptor)
    return FileWriterSpec(path=str(path), size_bytes=size)


def remove_folder(folder: Path) -> None:
    """Removes a folder with all that is in it, if it is there. DiskWriteFailed, where anything of it stays."""
    shutil.rmtree(folder, ignore_errors=True)
    if os.path.lexists(folder):
        raise DiskWriteFailed(f"{folder.name} cannot be removed")
