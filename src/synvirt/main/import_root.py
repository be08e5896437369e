"""Paths under the import root, which may be on a file system whose server is silent."""

import os
from collections.abc import Callable
from functools import partial
from pathlib import Path

from synvirt.disks.beneath import resolve_beneath
from synvirt.errors import SourceUnreachable
from synvirt.kvm import limit


def resolving(root: Path) -> Callable[[str], Path]:
    """Finds the real path of a plan's path under `root`: NotFound, HostPathRejected, or SourceUnreachable after
    FOLDER_ANSWERS_S, as the tick of all waves asks, too. While the root is silent, one thread waits for it."""
    looked_at = limit.Single(partial(os.path.exists, root))

    def resolve(path: str) -> Path:
        try:
            looked_at.within(limit.FOLDER_ANSWERS_S)
            return limit.within(limit.FOLDER_ANSWERS_S, partial(resolve_beneath, root, path))
        except TimeoutError as error:
            raise SourceUnreachable(
                f"the file system of the import root does not answer; it was asked for {path}",
                hint="see whether its server is up: list the folder that the setting imports_dir names",
            ) from error

    return resolve
