"""A folder whose volumes are cloned by copying: for file systems of tests that share no bytes between files."""

import shutil
from pathlib import Path

from synvirt.destinations.directory import DirectoryDestination


class CopyingDirectory(DirectoryDestination):
    def why_no_clones(self) -> str | None:
        return None

    def clone(self, name: str, to: str) -> None:
        self.unclone(name, to)
        path = self._path(to)
        path.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(Path(self.device(name)), path)
