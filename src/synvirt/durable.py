"""Files and folders that survive a power cut: a file is put in place whole, and the folder that names it is synced."""

import fcntl
import os
import pwd
import re
import secrets
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

# Of the name that a file has until it is complete.
_NAME_BYTES = 8
# The same in earlier versions, which kept these files so.
_BY_PROCESS = re.compile(r"\.(?:sessions|tls\.crt|tls\.key|users)\.([1-9][0-9]{0,6})")


def sync_file(path: Path) -> None:
    """Makes the file's bytes durable; another process may have written them. OSError, also for an
    error of an earlier write-back that nobody has seen yet (errseq_t: a descriptor that is opened later reports it)."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def sync_folder(folder: Path) -> None:
    """Makes what was created, renamed or removed in the folder survive a power cut (fsync(2), «Notes»)."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def make_open_folder(folder: Path) -> None:
    """Makes a folder, and missing folders above it, with any umask. Every user may pass through it, as QEMU may be another
    user; only ours may list it."""
    for path in [*reversed([above for above in folder.parents if not above.exists()]), folder]:
        path.mkdir(exist_ok=path != folder)  # another thread may make one above it at the same moment
        path.chmod(0o711)


def of_another_user(folders: Iterable[Path], files: Iterable[Path]) -> Path | None:
    """The first that is there and that this process cannot use: a folder of another user, as it may not change its mode, or a
    file that it may not read. root can use all."""
    if os.geteuid() == 0:
        return None
    for folder in folders:
        with suppress(FileNotFoundError):
            if folder.stat().st_uid != os.geteuid():
                return folder
    there = (file for file in files if file.exists())
    return next((file for file in there if not os.access(file, os.R_OK, effective_ids=True)), None)


def user_name(number: int) -> str:
    """A user's name; `user 1001`, where this host has no name for it."""
    try:
        return pwd.getpwuid(number).pw_name
    except KeyError:
        return f"user {number}"


def put_private_file(path: Path, content: bytes, *, replace: bool = True) -> None:
    """Writes a new file for its owner only, whole or not at all, even after kill -9: the next call and `sweep` remove what that
    left. In another user's folder, for example the service's, a file that root writes belongs to that user.

    FileExistsError: there is a file at `path`, and `replace` is False. OSError.
    """
    sweep(path.parent, path.name)
    with _folder_open(path.parent) as folder:
        with suppress(OSError):  # a file system without locks: there nothing is swept
            fcntl.flock(folder, fcntl.LOCK_SH)
        new = path.with_name(f".{path.name}.{secrets.token_hex(_NAME_BYTES)}")
        try:
            _write(new, content)
            if replace:
                new.replace(path)
            else:
                os.link(new, path)
        finally:
            new.unlink(missing_ok=True)
        os.fsync(folder)


def put_text(path: Path, text: Iterable[str]) -> None:
    """Writes a file of a person, whole or not at all: after an error an earlier one is as it was. OSError, with that path."""
    unfinished = path.with_name(f".{path.name}.{os.getpid()}.partial")
    try:
        with unfinished.open("x") as file:
            file.writelines(text)
            file.flush()
            os.fsync(file.fileno())
        unfinished.replace(path)
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(path)) from error
    finally:
        with suppress(OSError):
            unfinished.unlink(missing_ok=True)


def _write(new: Path, content: bytes) -> None:
    with os.fdopen(os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600), "wb") as file:
        file.write(content)
        folder = new.parent.stat()
        if os.geteuid() == 0 and folder.st_uid != 0:
            os.fchown(file.fileno(), folder.st_uid, folder.st_gid)
        file.flush()
        os.fsync(file.fileno())


def sweep(folder: Path, name: str | None = None) -> None:
    """Removes incomplete files that a crash left: each may be a key, and would stay after a change of keys. `name`: of the file
    that they were to become; None: of any.

    While one is made, its process locks the folder and nothing is swept; the next start sweeps. A failure here is ignored.
    """
    left = re.compile(rf"\.{'.+' if name is None else re.escape(name)}\.[0-9a-f]{{{2 * _NAME_BYTES}}}", re.DOTALL)
    with suppress(OSError), _folder_open(folder) as held:
        fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
        for found in os.scandir(folder):
            if left.fullmatch(found.name) or _left_before(found.name):
                Path(found.path).unlink(missing_ok=True)


def _left_before(name: str) -> bool:
    """Whether an earlier version left this file: it named them by its process, and held no folder."""
    found = _BY_PROCESS.fullmatch(name)
    return found is not None and not Path("/proc", found[1]).exists()


@contextmanager
def _folder_open(folder: Path) -> Iterator[int]:
    """A descriptor of the folder, for flock(2) and fsync(2). The lock ends with the descriptor or its process."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        yield descriptor
    finally:
        os.close(descriptor)
