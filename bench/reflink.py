"""A file system with reflinks (XFS) in a file, for rows whose source and target lie on one."""

import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from synvirt.programs import find


class NoReflinks(Exception):
    """They cannot be had here, and why."""


@contextmanager
def reflink_folder(beside: Path, size: int) -> Iterator[Path]:
    """A folder on a new file system of `size` bytes, kept in the folder `beside`; unmounted and gone at the end."""
    mkfs = find("mkfs.xfs")
    if mkfs is None or os.geteuid() != 0:
        raise NoReflinks("needs root" if mkfs else "needs mkfs.xfs (apt-get install xfsprogs)")
    image, place = beside / "xfs", beside / "mounted"
    place.mkdir()
    with image.open("wb") as file:
        file.truncate(size)
    try:
        subprocess.run([mkfs, "-q", "-m", "reflink=1", image], check=True)
        subprocess.run(["mount", "-o", "loop", image, place], check=True)
        try:
            yield place
        finally:
            subprocess.run(["umount", place], check=True)
    finally:
        place.rmdir()
        image.unlink()
