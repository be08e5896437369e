"""The files that restores write: made by the service, filled by a worker."""

import os
from pathlib import Path

from synvirt.disks.specs import FileWriterSpec, Qcow2WriterSpec


def file_writer(path: Path, size: int, format_: str) -> FileWriterSpec | Qcow2WriterSpec:
    """How a worker writes it. A raw file is there when this returns, sparse, and holds what a run that was cut off wrote;
    qemu-img makes a qcow2 file itself. OSError."""
    if format_ == "qcow2":
        return Qcow2WriterSpec(path=str(path))
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    try:
        os.ftruncate(descriptor, size)
    finally:
        os.close(descriptor)
    return FileWriterSpec(path=str(path), size_bytes=size)
