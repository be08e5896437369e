"""How the store notes a file that a disk is read from: its name, and its version on a line of its own.

A name may have line breaks, a version has none. Notes of the same file at the same version are the same text in each process.
"""

import os
from collections.abc import Iterable
from typing import NamedTuple


class NotedFile(NamedTuple):
    """A file at one version."""

    name: str
    version: str

    @property
    def text(self) -> str:
        return f"{self.name}\n{self.version}"


def noted(text: str) -> NotedFile:
    """The file that was noted as `text`."""
    name, _, version = text.rpartition("\n")
    return NotedFile(name, version)


def local(name: str, status: os.stat_result) -> NotedFile:
    """A file of this host. Its version is its size, the time of its last change and its inode."""
    return NotedFile(name, f"{status.st_size} {status.st_mtime_ns} {status.st_ino}")


def names_of_changed(before: Iterable[str], present: Iterable[str]) -> list[str]:
    """The names of the files of one list of texts that are not as they are in the other."""
    return sorted({noted(text).name for text in set(before) ^ set(present)})
