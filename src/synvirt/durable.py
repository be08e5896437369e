"""What is on the disk when it is said to be: files put in place whole, and the folders that name them."""

import os
from pathlib import Path


def sync_folder(folder: Path) -> None:
    """What was made, renamed or removed in the folder is so after a power cut too (fsync(2), «Notes»)."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def put_private_file(path: Path, content: bytes) -> None:
    """A new file for its owner alone, in place of what was there: whole or not at all."""
    new = path.with_name(f".{path.name}.{os.getpid()}")
    with os.fdopen(os.open(new, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    new.replace(path)
