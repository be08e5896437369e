"""Files of a guest's file system, read without mounting it. No path here leads out of it."""

import contextlib
from abc import ABC, abstractmethod
from collections.abc import Iterator
from typing import Any, Final, Protocol

from synvirt.errors import DiskReadFailed

# Configuration is small. A registry has a hundred MiB, and is read in place.
FILE_BYTES_MAX = 1 << 20
# The longest chain of links to links.
LINKS_MAX = 8
NAMES_MAX = 5000
_LINK = 0o120000
# The exceptions for damage: of the libraries, and of our own reader.
_DAMAGE: Final = (OSError, DiskReadFailed)


class Files(Protocol):
    """The file system of a guest, read-only. `is_ntfs`: names are compared without case."""

    is_ntfs: bool

    def read(self, path: str) -> str | None:
        """A text of at most FILE_BYTES_MAX; None, where there is none."""
        ...

    def names(self, path: str) -> list[str]:
        """The names in a folder; none, where there is no such folder."""
        ...

    def target(self, path: str) -> str | None:
        """The target of a link, as stored; None, where it is no link."""
        ...

    def entry(self, path: str) -> Any:
        """The library's own file object; None, where there is none."""
        ...


class _OfLibrary(ABC):
    """By the file objects of a library, which `entry` finds."""

    def __init__(self, volume: Any) -> None:
        self._volume = volume

    def read(self, path: str) -> str | None:
        return _text(self.entry(path))

    def names(self, path: str) -> list[str]:
        return _names(self.entry(path))

    @abstractmethod
    def entry(self, path: str) -> Any: ...


class UnixFiles(_OfLibrary):
    """For libfsext, libfsxfs and our own reader of Btrfs."""

    is_ntfs = False

    def target(self, path: str) -> str | None:
        folder, _, name = path.rpartition("/")
        way = self._resolved(folder)
        entry = None if way is None else self._at([*way, name])
        return entry.symbolic_link_target if entry is not None and _is_link(entry) else None

    def entry(self, path: str) -> Any:
        """Follows links within this file system."""
        way = self._resolved(path)
        return None if way is None else self._at(way)

    def _resolved(self, path: str) -> list[str] | None:
        """The path without links; None, where it leads nowhere."""
        left, way, links = [word for word in path.split("/") if word], list[str](), 0
        while left:
            word = left.pop(0)
            if word in (".", ".."):
                way = way[:-1] if word == ".." else way
                continue
            entry = self._at([*way, word])
            if entry is None:
                return None
            if not _is_link(entry):
                way.append(word)
                continue
            links += 1
            if links > LINKS_MAX:
                return None
            target = entry.symbolic_link_target or ""
            way = [] if target.startswith("/") else way
            left = [part for part in target.split("/") if part] + left
        return way

    def _at(self, way: list[str]) -> Any:
        with contextlib.suppress(*_DAMAGE):  # a damaged link counts as none
            return self._volume.get_file_entry_by_path("/" + "/".join(way))
        return None


class NtfsFiles(_OfLibrary):
    """For libfsntfs: names there are compared without case."""

    is_ntfs = True

    def target(self, path: str) -> str | None:
        return None

    def entry(self, path: str) -> Any:
        """The entry at a path, whatever its case; None, where there is none."""
        entry = self._volume.get_root_directory()
        for word in (word for word in path.split("/") if word):
            entry = next((one for one in _children(entry) if (one.name or "").casefold() == word.casefold()), None)
            if entry is None:
                return None
        return entry


def _is_link(entry: Any) -> bool:
    return bool(entry.file_mode & 0o170000 == _LINK)


def _children(entry: Any) -> Iterator[Any]:
    for number in range(min(entry.number_of_sub_file_entries, NAMES_MAX) if entry is not None else 0):
        with contextlib.suppress(*_DAMAGE):  # skips a damaged one
            yield entry.get_sub_file_entry(number)


def _names(entry: Any) -> list[str]:
    return list(filter(None, (one.name for one in _children(entry))))


def _text(entry: Any) -> str | None:
    if entry is None:
        return None
    with contextlib.suppress(*_DAMAGE):
        size = entry.get_size()
        content: bytes = entry.read_buffer_at_offset(min(size, FILE_BYTES_MAX), 0) if size else b""
        return content.decode(errors="replace")
    return None
