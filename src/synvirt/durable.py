"""Files and folders that survive a power cut: a file is put in place whole, and the folder that names it is synced."""

import os
from pathlib import Path


def sync_folder(folder: Path) -> None:
    """Makes what was created, renamed or removed in the folder survive a power cut (fsync(2), «Notes»)."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def make_open_folder(folder: Path) -> None:
    """Makes a folder, and missing folders above it, with any umask. Every user may pass through it, as QEMU may be another
    user; only ours may list it."""
    for path in [*reversed([above for above in folder.parents if not above.exists()]), folder]:
        path.mkdir()
        path.chmod(0o711)


def put_private_file(path: Path, content: bytes) -> None:
    """Writes a new file for its owner only, whole or not at all; it replaces an existing one. In another user's folder, for
    example the service's, a file that root writes belongs to that user."""
    new = path.with_name(f".{path.name}.{os.getpid()}")
    with os.fdopen(os.open(new, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb") as file:
        file.write(content)
        folder = path.parent.stat()
        if os.geteuid() == 0 and folder.st_uid != 0:
            os.fchown(file.fileno(), folder.st_uid, folder.st_gid)
        file.flush()
        os.fsync(file.fileno())
    new.replace(path)
