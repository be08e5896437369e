"""A file for the libraries and for our own readers: a disk, a part of one, or a volume that LVM puts together."""

import io
from abc import ABC, abstractmethod
from typing import Protocol


class Bytes(Protocol):
    """The part of a file's interface that is needed to read it."""

    def read(self, size: int = -1) -> bytes: ...
    def seek(self, offset: int, whence: int = 0) -> int: ...
    def tell(self) -> int: ...
    def get_size(self) -> int: ...


def read_at(volume: Bytes, offset: int, length: int) -> bytes:
    """Short at the end, empty behind it."""
    if offset >= volume.get_size():
        return b""
    volume.seek(offset)
    return volume.read(length)


class Seekable(ABC):
    """Bytes with a position."""

    def __init__(self, size: int) -> None:
        self._size, self._at = max(size, 0), 0

    @abstractmethod
    def _bytes(self, offset: int, length: int) -> bytes:
        """Bytes within the size; short where the disk is."""

    def read(self, size: int = -1) -> bytes:
        left = max(self._size - self._at, 0)
        length = left if size < 0 else min(size, left)
        content = self._bytes(self._at, length) if length else b""
        self._at += len(content)
        return content

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        self._at = offset + {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self._size}[whence]
        return self._at

    def tell(self) -> int:
        return self._at

    def get_size(self) -> int:
        return self._size


class Positional(Protocol):
    """A disk that is read at any place."""

    @property
    def size(self) -> int: ...
    def pread(self, length: int, offset: int) -> bytes:
        """Short at the end."""


class Window(Seekable):
    """The bytes of a disk from `start` on. A file system knows its own length."""

    def __init__(self, disk: Positional, start: int) -> None:
        super().__init__(disk.size - start)
        self._disk, self.start = disk, start

    def _bytes(self, offset: int, length: int) -> bytes:
        return self._disk.pread(length, self.start + offset)

    def behind(self, offset: int) -> "Window":
        """The same without the first `offset` bytes."""
        return Window(self._disk, self.start + offset)
