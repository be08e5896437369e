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


def make_open_folder(folder: Path) -> None:
    """A new folder, and those above it where they are missing, that every user gets through and none but ours lists, since QEMU
    may be another user. Whatever the umask is."""
    for path in [*reversed([above for above in folder.parents if not above.exists()]), folder]:
        path.mkdir()
        path.chmod(0o711)


def put_private_file(path: Path, content: bytes) -> None:
    """A new file for its owner alone, in place of what was there: whole or not at all. What root puts into the folder of
    another user, the service's say, is that user's."""
    new = path.with_name(f".{path.name}.{os.getpid()}")
    with os.fdopen(os.open(new, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb") as file:
        file.write(content)
        folder = path.parent.stat()
        if os.geteuid() == 0 and folder.st_uid != 0:
            os.fchown(file.fileno(), folder.st_uid, folder.st_gid)
        file.flush()
        os.fsync(file.fileno())
    new.replace(path)
