"""Folders that break: in memory, with a power cut that takes what was not made durable; and wrappers that fail a call.

A cut leaves, of names that were not synced with their folder: none (`lost`), all (`kept`), or some of them (`torn`); and of a
file whose bytes were not synced, a part. That is what POSIX allows, and what file systems do.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from random import Random
from typing import Literal

from synvirt.errors import RepositoryDamaged, StoreWriteFailed, SynvirtError
from synvirt.repository.folder import Entry, Folder

Cut = Literal["lost", "kept", "torn"]


@dataclass
class _File:
    content: bytes
    durable: bytes | None = None
    at: float = 0


class MemoryFolder:
    """`now`: what files that are written are dated by."""

    def __init__(self) -> None:
        self.files: dict[str, _File] = {}
        self._durable: dict[str, _File] = {}
        self._folders: set[str] = set()
        self.now = 1_000_000.0

    def make_folders(self, names: Iterable[str]) -> None:
        self._folders.update(names)

    def write(self, name: str, pieces: Iterable[bytes | bytearray | memoryview]) -> None:
        assert name not in self.files
        assert name.partition("/")[0] in self._folders
        self.files[name] = _File(b"".join(bytes(piece) for piece in pieces), at=self.now)

    def sync(self, name: str) -> None:
        self.files[name].durable = self.files[name].content

    def rename(self, old: str, new: str) -> None:
        self.files[new] = self.files.pop(old)

    def sync_folder(self, folder: str) -> None:
        there = {name: file for name, file in self.files.items() if _in(name, folder)}
        self._durable = {name: file for name, file in self._durable.items() if not _in(name, folder)} | there

    def read(self, name: str, offset: int = 0, length: int | None = None) -> bytes:
        if name not in self.files:
            raise RepositoryDamaged(f"{name} is missing from the repository")
        content = self.files[name].content[offset : None if length is None else offset + length]
        if length is not None and len(content) < length:
            raise RepositoryDamaged(f"{name} ends at {offset + len(content)}, where {length} bytes are wanted")
        return content

    def entries(self, folder: str) -> list[Entry]:
        if not folder:
            names = sorted({name.partition("/")[0] for name in self.files} | self._folders)
            return [Entry(name, len(self.files[name].content) if name in self.files else 0, self.now) for name in names]
        # Thousands of runs ask for it thousands of times: no call for each file.
        inside = sorted([(name, file) for name, file in self.files.items() if name.rpartition("/")[0] == folder])
        return [Entry(name[len(folder) + 1 :], len(file.content), file.at) for name, file in inside]

    def delete(self, name: str) -> None:
        self.files.pop(name, None)

    def clock(self) -> float:
        return self.now

    def close(self) -> None: ...

    def cut(self, how: Cut, random: Random) -> "MemoryFolder":
        """What is found when the power is back."""
        after = MemoryFolder()
        after._folders, after.now = set(self._folders), self.now
        for name in sorted(self.files.keys() | self._durable.keys()):
            volatile, durable = self.files.get(name), self._durable.get(name)
            same = volatile is durable
            chosen = durable if not same and (how == "lost" or (how == "torn" and random.random() < 0.5)) else volatile
            if chosen is not None:
                part = chosen.content[: random.randrange(len(chosen.content) + 1)]
                after.files[name] = _File(part if chosen.durable is None else chosen.durable, at=chosen.at)
        for file in after.files.values():
            file.durable = file.content
        after._durable = dict(after.files)
        return after

    def copied(self) -> "MemoryFolder":
        return self.cut("kept", Random(0))


def _in(name: str, folder: str) -> bool:
    return name.rpartition("/")[0] == folder


class Died(BaseException):
    """kill -9, or the power: nothing of ours runs after it."""


class Counted:
    """Passes calls on, and counts them; at number `stop_at` raises `error` instead of (or, with `after`, after) the call."""

    def __init__(
        self,
        inner: Folder,
        *,
        stop_at: int | None = None,
        error: Callable[[], BaseException] = Died,
        after: bool = False,
        again: bool = True,
    ) -> None:
        self.inner, self.calls = inner, 0
        self._stop_at, self._error, self._after, self._again = stop_at, error, after, again

    def _pass(self, call: Callable[[], object]) -> None:
        if self._stop_at is not None and (self.calls == self._stop_at or (self._again and self.calls > self._stop_at)):
            if self._after and self.calls == self._stop_at:
                call()
            self.calls += 1
            raise self._error()
        self.calls += 1
        call()

    def make_folders(self, names: Iterable[str]) -> None:
        self._pass(lambda: self.inner.make_folders(names))

    def write(self, name: str, pieces: Iterable[bytes | bytearray | memoryview]) -> None:
        self._pass(lambda: self.inner.write(name, pieces))

    def sync(self, name: str) -> None:
        self._pass(lambda: self.inner.sync(name))

    def rename(self, old: str, new: str) -> None:
        self._pass(lambda: self.inner.rename(old, new))

    def sync_folder(self, folder: str) -> None:
        self._pass(lambda: self.inner.sync_folder(folder))

    def delete(self, name: str) -> None:
        self._pass(lambda: self.inner.delete(name))

    def read(self, name: str, offset: int = 0, length: int | None = None) -> bytes:
        found: list[bytes] = []
        self._pass(lambda: found.append(self.inner.read(name, offset, length)))
        return found[0]

    def entries(self, folder: str) -> list[Entry]:
        found: list[list[Entry]] = []
        self._pass(lambda: found.append(self.inner.entries(folder)))
        return found[0]

    def clock(self) -> float:
        return self.inner.clock()

    def close(self) -> None:
        self.inner.close()


def io_error() -> SynvirtError:
    return StoreWriteFailed("the disk: Input/output error")


class Stale(Counted):
    """A host's look at a folder that shows what was there before: until its call number `fresh_at` it sees nothing of what
    others change, as NFS may show it for a while; what it changes itself it sees at once."""

    def __init__(self, inner: MemoryFolder, *, fresh_at: int) -> None:
        super().__init__(inner)
        self._real, self._fresh_at = inner, fresh_at
        self._seen = MemoryFolder()
        self._seen.files, self._seen.now = dict(inner.files), inner.now

    def _own(self, name: str) -> None:
        if name in self._real.files:
            self._seen.files[name] = self._real.files[name]
        else:
            self._seen.files.pop(name, None)

    def write(self, name: str, pieces: Iterable[bytes | bytearray | memoryview]) -> None:
        super().write(name, pieces)
        self._own(name)

    def rename(self, old: str, new: str) -> None:
        super().rename(old, new)
        self._own(old)
        self._own(new)

    def delete(self, name: str) -> None:
        super().delete(name)
        self._own(name)

    def read(self, name: str, offset: int = 0, length: int | None = None) -> bytes:
        if self.calls >= self._fresh_at:
            return super().read(name, offset, length)
        self.calls += 1
        return self._seen.read(name, offset, length)

    def entries(self, folder: str) -> list[Entry]:
        if self.calls >= self._fresh_at:
            return super().entries(folder)
        self.calls += 1
        return self._seen.entries(folder)
