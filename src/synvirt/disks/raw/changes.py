"""Whether the files that a disk is read from change meanwhile: also those that an image names, as a backing file or an extent.

    with opening() as files:
        reader = open_reader(spec)     # each plain file that is opened for it, here or elsewhere, is noted
    copy(reader, …)
    files.refuse_changed()

Two halves of two exports are no disk. A file that is replaced under its name is no change for a reader that has it open; one
that opens it later sees other `found`.
"""

import contextlib
import os
import stat
from collections.abc import Iterator
from contextvars import ContextVar
from typing import Protocol

from synvirt.disks.noted_files import NotedFile, local
from synvirt.errors import DiskReadFailed

HINT = "nothing may write to it while it is read: let its copying end, or shut the VM off that runs from it; then start again"


class OpenFile(Protocol):
    """A reader of a file. `descriptor`: negative, once it is closed."""

    @property
    def descriptor(self) -> int: ...
    @property
    def name(self) -> str: ...


class Files:
    """The plain files that were opened, in this order."""

    def __init__(self) -> None:
        self._files: list[tuple[OpenFile, os.stat_result]] = []
        self._found: dict[str, None] = {}

    def add(self, file: OpenFile) -> None:
        """Notes how an open file is now; a device is left out."""
        status = os.fstat(file.descriptor)
        if stat.S_ISREG(status.st_mode):
            self._files.append((file, status))
            self.note(local(file.name, status))

    def note(self, file: NotedFile) -> None:
        """Notes a file by its version only: a remote one's reader itself refuses another version."""
        self._found[file.text] = None

    @property
    def found(self) -> tuple[str, ...]:
        """Each file as it was when it was opened, by its text (`disks.noted_files`)."""
        return tuple(self._found)

    def name_of(self, status: os.stat_result) -> str | None:
        """What the file of that status is called, if it is one of them."""
        return next((file.name for file, found in self._files if os.path.samestat(found, status)), None)

    def refuse_changed(self) -> None:
        """DiskReadFailed, where one of the files was written to since it was opened."""
        for file, before in self._files:
            if file.descriptor < 0:
                continue
            present = os.fstat(file.descriptor)
            if present.st_size != before.st_size:
                how = f"it had {before.st_size} bytes, and has {present.st_size}"
            elif present.st_mtime_ns != before.st_mtime_ns:
                how = "it was written to"
            else:
                continue
            raise DiskReadFailed(f"{file.name} was changed while it was read: {how}", hint=HINT)


_OPENING: ContextVar[Files | None] = ContextVar("opening", default=None)


@contextlib.contextmanager
def opening() -> Iterator[Files]:
    """The files that are opened for reading within the block, by this thread."""
    files = Files()
    token = _OPENING.set(files)
    try:
        yield files
    finally:
        _OPENING.reset(token)


def opened(file: OpenFile) -> None:
    """Called for each file that is opened for reading."""
    if (files := _OPENING.get()) is not None:
        files.add(file)


def opened_remote(name: str, version: str) -> None:
    """Called for each remote file that is opened for reading, with the version that it is read at."""
    if (files := _OPENING.get()) is not None:
        files.note(NotedFile(name, version))
