"""What a repository needs of its place, call by call; and a folder of this host, local or an NFS mount.

There are few calls, so that tests can fail, tear and lose each of them. `put` builds one promise from several: a file is whole
and durable under its name, or has no name. Names are relative, folders one deep. Errors name files, never paths of the host.
"""

import errno
import os
import secrets
import time
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass
from io import FileIO
from pathlib import Path
from typing import NoReturn, Protocol

from synvirt.errors import RepositoryDamaged, RepositoryFull, RepositoryUnreachable, StoreWriteFailed, SynvirtError
from synvirt.sizes import WRITE_BYTES

# The folder for files that are being written and have no valid name. Garbage collection removes a crash's leftovers.
UNFINISHED = "tmp"
MOUNTS = Path("/proc/self/mountinfo")
# The most of a folder's path in a message: a path that is too long for the kernel is too long for a person.
PATH_CHARS_SHOWN = 200
_NFS = frozenset({"nfs", "nfs4"})
# The errors of a mount whose server is away, or has exported another folder meanwhile.
_AWAY = frozenset({errno.ESTALE, errno.ENOTCONN, errno.EHOSTDOWN, errno.EHOSTUNREACH, errno.ETIMEDOUT})
# This host's own: they say nothing of a file.
_OURS = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOMEM})


@dataclass(frozen=True, slots=True)
class Entry:
    """`modified_at`: seconds since 1970, by the clock of the host that stores the file."""

    name: str
    size_bytes: int
    modified_at: float


class Folder(Protocol):
    """- `write`: makes a new file, not durable yet; `sync` makes its bytes durable, `sync_folder` the names in a folder.
    - `rename`: atomic; it replaces.
    - `read`: exactly the range asked for. RepositoryDamaged, where the file is missing or shorter.
    - `entries`: of one folder, by name. `delete`: idempotent.
    - `clock`: seconds since 1970 now, by the clock that dates the files. Where that cannot be asked, this host's.
    - `close`: closes connections; the folder may be used again.
    - Every failure is a SynvirtError of a backup.
    """

    def make_folders(self, names: Iterable[str]) -> None: ...
    def write(self, name: str, pieces: Iterable[bytes | bytearray | memoryview]) -> None: ...
    def sync(self, name: str) -> None: ...
    def rename(self, old: str, new: str) -> None: ...
    def sync_folder(self, folder: str) -> None: ...
    def read(self, name: str, offset: int = 0, length: int | None = None) -> bytes: ...
    def entries(self, folder: str) -> list[Entry]: ...
    def delete(self, name: str) -> None: ...
    def clock(self) -> float: ...
    def close(self) -> None: ...


def put(folder: Folder, name: str, pieces: Iterable[bytes | bytearray | memoryview]) -> None:
    """When this returns, the file is whole and durable under its name. When it raises or the host dies, it may have no name.
    Only a host that dies leaves a part of it: on a full disk, that would take the space which the next try needs."""
    unfinished = f"{UNFINISHED}/{secrets.token_hex(8)}"
    try:
        folder.write(unfinished, pieces)
        folder.sync(unfinished)
        folder.rename(unfinished, name)
    except SynvirtError:
        with suppress(SynvirtError):
            folder.delete(unfinished)
        raise
    folder.sync_folder(name.rpartition("/")[0])


def file_system_of(path: Path, mounts: Path = MOUNTS) -> str | None:
    """The kind of file system, from proc_pid_mountinfo(5), by the device of the path; None: it is not listed. A line: `36 35
    0:51 / /mnt rw,noatime master:1 - nfs4 server:/export rw,vers=4.2`. RepositoryUnreachable."""
    with _as_ours(str(path)):
        device = path.stat().st_dev
        lines = mounts.read_text(errors="replace").splitlines()
    wanted = f"{os.major(device)}:{os.minor(device)}"
    for line in lines:
        mount, separator, file_system = line.partition(" - ")
        if separator and mount.split(" ")[2:3] == [wanted]:
            return file_system.partition(" ")[0]
    return None


class HostFolder:
    """A folder of this host. `is_nfs`: refused while no NFS export is mounted there, as backups would fill the host's own disk.

    NFS promises enough: one host writes a file once, and it is found by its name. No access times or locks are needed.
    """

    def __init__(self, path: Path, *, is_nfs: bool = False, mounts: Path = MOUNTS) -> None:
        self._path, self._is_nfs, self._mounts = path, is_nfs, mounts
        self.check()

    def check(self) -> None:
        """RepositoryUnreachable."""
        try:
            present = self._path.is_dir()
        except OSError as error:  # a name that is too long, or a folder above it that we may not enter
            why = os.strerror(error.errno or 0)
            raise RepositoryUnreachable(
                f"{str(self._path)[:PATH_CHARS_SHOWN]}: {why}", hint="name a folder that this host has"
            ) from error
        if not present:
            if os.path.lexists(self._path):
                raise RepositoryUnreachable(f"{self._path} is there, and is no folder", hint="name a folder, an empty one")
            raise RepositoryUnreachable(f"there is no folder {self._path}", hint="make it, or mount what it should hold")
        if not self._is_nfs:
            return
        kind = file_system_of(self._path, self._mounts)
        if kind not in _NFS:
            raise RepositoryUnreachable(
                f"no NFS export is mounted at {self._path}: it lies on {kind or 'a file system that is not known'}",
                hint=f"mount the export there: mount {self._path}",
            )

    def room(self) -> tuple[int, int]:
        """The size of the file system, and how much of it is used, in bytes."""
        with self._as_ours("the repository's free space"):
            found = os.statvfs(self._path)
        return found.f_frsize * found.f_blocks, found.f_frsize * (found.f_blocks - found.f_bavail)

    def make_folders(self, names: Iterable[str]) -> None:
        """Makes missing folders with mode 0700, durably."""
        for name in names:
            with self._as_ours(name):
                (self._path / name).mkdir(mode=0o700, exist_ok=True)
        self.sync_folder("")

    def write(self, name: str, pieces: Iterable[bytes | bytearray | memoryview]) -> None:
        with self._as_ours(name), (self._path / name).open("xb", buffering=0) as file:
            for piece in pieces:
                _write_all(file, piece)

    def append(self, name: str, piece: bytes) -> None:
        """Appends to a file that was made here."""
        with self._as_ours(name), (self._path / name).open("ab", buffering=0) as file:
            _write_all(file, piece)

    def sync(self, name: str) -> None:
        self._fsync(name, os.O_RDONLY)

    def sync_folder(self, folder: str) -> None:
        self._fsync(folder, os.O_RDONLY | os.O_DIRECTORY)

    def _fsync(self, name: str, flags: int) -> None:
        with self._as_ours(name or "the repository"):
            descriptor = os.open(self._path / name, flags | os.O_CLOEXEC)
            try:
                os.fsync(descriptor)
            finally:
                os.close(descriptor)

    def rename(self, old: str, new: str) -> None:
        with self._as_ours(new):
            (self._path / old).rename(self._path / new)

    def read(self, name: str, offset: int = 0, length: int | None = None) -> bytes:
        try:
            descriptor = os.open(self._path / name, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
            try:
                wanted = max(os.fstat(descriptor).st_size - offset, 0) if length is None else length
                found = os.pread(descriptor, wanted, offset)
                while len(found) < wanted and (more := os.pread(descriptor, wanted - len(found), offset + len(found))):
                    found += more
            finally:
                os.close(descriptor)
        except OSError as error:
            self._unread(name, error)
        if len(found) < wanted:
            raise RepositoryDamaged(
                f"{name} ends at {offset + len(found)}, where bytes {offset} to {offset + wanted} are needed"
            )
        return found

    def size(self, name: str) -> int:
        """The file's size. RepositoryDamaged, where it is missing."""
        try:
            return (self._path / name).lstat().st_size
        except OSError as error:
            self._unread(name, error)

    def _unread(self, name: str, error: OSError) -> NoReturn:
        """RepositoryDamaged; another error, where not the file is the cause: then it must not be condemned."""
        if error.errno in _AWAY | _OURS:
            _failed(name, error, self._path)
        if error.errno == errno.EIO:  # so says a bad sector, and a soft mount whose server is away
            self.room()
        if isinstance(error, FileNotFoundError):
            self.check()
            # A file beside the folders is no evidence by itself: where its file system is not mounted, all are missing.
            beside = self._path / name if "/" in name else self._path / UNFINISHED / name
            if not beside.parent.is_dir():
                _failed(name, error, self._path)
            raise RepositoryDamaged(f"{name} is missing from the repository") from error
        raise RepositoryDamaged(f"{name} cannot be read: {error.strerror}") from error

    def entries(self, folder: str) -> list[Entry]:
        found = []
        with self._as_ours(folder), os.scandir(self._path / folder) as listed:
            for entry in listed:
                try:
                    status = entry.stat(follow_symlinks=False)
                except FileNotFoundError:  # it was removed meanwhile
                    continue
                found.append(Entry(entry.name, status.st_size, status.st_mtime))
        return sorted(found, key=lambda entry: entry.name)

    def delete(self, name: str) -> None:
        with self._as_ours(name):
            (self._path / name).unlink(missing_ok=True)

    def clock(self) -> float:
        """NFS files are dated by their server. A file is made for it, without content: it must work in a full folder too."""
        name = f"{UNFINISHED}/{secrets.token_hex(8)}"
        try:
            self.write(name, [])
            with self._as_ours(name):
                os.utime(self._path / name)
                return (self._path / name).lstat().st_mtime
        except SynvirtError:
            return time.time()
        finally:
            with suppress(SynvirtError):
                self.delete(name)

    def _as_ours(self, name: str) -> AbstractContextManager[None]:
        return _as_ours(name, self._path)

    def close(self) -> None:
        """Does nothing, as nothing is open."""


def _write_all(file: FileIO, piece: bytes | bytearray | memoryview) -> None:
    left = memoryview(piece)
    while left:
        left = left[file.write(left[:WRITE_BYTES]) :]


@contextmanager
def _as_ours(name: str, folder: Path | None = None) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        _failed(name, error, folder)


def _failed(name: str, error: OSError, folder: Path | None) -> NoReturn:
    why = os.strerror(error.errno or 0)
    what = "a new file" if name.startswith(f"{UNFINISHED}/") else name  # it has a name drawn at random
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        hint = "free space there, or let retention remove points and collect the garbage; then run the job again"
        raise RepositoryFull(f"the repository is full: {what} cannot be written: {why}", hint=hint) from error
    if error.errno == errno.ENOENT or error.errno in _AWAY:
        where = "" if folder is None else f" in the repository's folder {folder}"
        raise RepositoryUnreachable(
            f"{what} cannot be reached{where}: {why}", hint="mount what the folder should hold; then run it again"
        ) from error
    if error.errno == errno.EROFS:
        hint = "mount it for writing; where it became read-only by itself, the kernel's log says why"
        raise StoreWriteFailed(f"{what} cannot be written: {why}", hint=hint) from error
    raise StoreWriteFailed(f"{what}: {why}", hint="look at the disk's health, and at who owns the folder") from error
