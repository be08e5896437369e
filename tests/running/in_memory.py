"""A place for many small files that live as long as a test: in memory, where there is room."""

import os
from pathlib import Path

MEMORY = Path("/dev/shm")
# Each worker has some tens of MiB there at a time.
FREE_BYTES = 1 << 30


def place() -> Path | None:
    """None: there is none, or no room in it."""
    if not os.access(MEMORY, os.W_OK):
        return None
    found = os.statvfs(MEMORY)
    return MEMORY if found.f_bavail * found.f_frsize >= FREE_BYTES else None
