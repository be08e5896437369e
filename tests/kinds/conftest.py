"""Where the laws of kinds have their files."""

import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

MEMORY = Path("/dev/shm")
# Each worker has some tens of MiB there at a time.
FREE_BYTES = 1 << 30


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    """In memory, where there is room: the laws make and copy thousands of small files, and a third of what that costs on a disk
    is its file system. No law here asks what a loss of power leaves."""
    if not os.access(MEMORY, os.W_OK) or _free_bytes() < FREE_BYTES:
        yield tmp_path
        return
    with tempfile.TemporaryDirectory(prefix="synvirt-laws-", dir=MEMORY) as made:
        yield Path(made)


def _free_bytes() -> int:
    found = os.statvfs(MEMORY)
    return found.f_bavail * found.f_frsize
