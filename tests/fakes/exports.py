"""Exports without a process: what is asked of them is there, or fails where a test wants it to fail."""

import shutil
from collections.abc import Sequence
from pathlib import Path

from synvirt.jobs.exporting import ACTIVITY, Exported


class FakeExports:
    """`failing`: what `serve` raises. `served`: how often it was asked."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self.failing: Exception | None = None
        self.served = 0

    def folder(self, name: str) -> Path:
        return self._root / name / "served"

    def serve(self, name: str, disks: Sequence[Exported]) -> None:
        self.served += 1
        if self.failing is not None:
            raise self.failing
        folder = self.folder(name)
        folder.mkdir(parents=True, exist_ok=True)
        if not (folder / ACTIVITY).exists():
            (folder / ACTIVITY).write_bytes(bytes(16))

    def renew(self, name: str) -> None:
        """Nothing of it wears out."""

    def end(self, name: str) -> None:
        shutil.rmtree(self._root / name, ignore_errors=True)
