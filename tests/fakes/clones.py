"""Folders of tests, whatever their file system: one whose volumes are cloned by copying, and one that shares no bytes."""

import shutil
from pathlib import Path

from synvirt.destinations.directory import DirectoryDestination


class OverlayingDirectory(DirectoryDestination):
    """As on a file system without reflinks: clones are overlays."""

    @staticmethod
    def _shares(source: int, target: int) -> bool:
        return False


class CopyingDirectory(DirectoryDestination):
    def why_no_clones(self) -> str | None:
        return None

    def clone(self, name: str, to: str) -> None:
        self.unclone(name, to)
        path = self._path(to)
        path.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(Path(self.device(name)), path)
