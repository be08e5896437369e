"""The folder with a session's secrets and sockets: only the session uses it, and it is removed with it. Blocking code."""

import contextlib
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

from synvirt.cage.scratch import scratch_folder, sweep


@contextlib.contextmanager
def private_folder() -> Iterator[Path]:
    """A new folder with a short path, for Unix sockets."""
    with scratch_folder("live", _folders()) as folder:
        yield folder


def sweep_folders() -> None:
    """Removes the folders that killed services have left. Called at the start of a service."""
    sweep(_folders(), "live")


def _folders() -> Path:
    """In memory, where that is possible: secrets must not be on a disk."""
    if os.geteuid() == 0 and os.access("/run", os.W_OK):
        return Path("/run")
    return Path(os.environ.get("XDG_RUNTIME_DIR") or tempfile.gettempdir())
