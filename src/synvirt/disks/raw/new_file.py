"""A raw file that gets its name only when it is complete: after an error nothing is left of it, not even after kill -9."""

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from synvirt.disks.raw.files import HINTS, RawWriter, punch_hole
from synvirt.errors import Conflict, DiskWriteFailed

# fcntl.h, linux/fs.h: Python has no names for them.
_AT_FDCWD, _RENAME_NOREPLACE = -100, 1
# The errors of a file system without nameless files: it reads O_TMPFILE as the O_DIRECTORY that it contains.
NAMELESS_NOT_OFFERED = frozenset({errno.EOPNOTSUPP, errno.EISDIR, errno.ENOENT, errno.EINVAL})


@contextmanager
def new_file(path: Path, size: int, *, replace: bool = False) -> Iterator[RawWriter]:
    """A writer of a sparse file of `size` bytes, which is named `path` once the block ends without an error.

    Conflict: a file of that name exists, and `replace` is False. DiskWriteFailed: the folder takes no file.
    """
    if not replace and os.path.lexists(path):
        raise _exists(path)
    try:
        fd, hidden = _unnamed(path.parent)
    except OSError as error:
        raise _failed(path, error) from error
    try:
        writer = RawWriter(fd, path.name, size, zeroings=(punch_hole,))
        try:
            os.ftruncate(fd, size)
            yield writer
            _give_name(fd, hidden, path, replace=replace)
        except FileExistsError as error:
            raise _exists(path) from error
        except OSError as error:
            raise _failed(path, error) from error
        finally:
            writer.close()
    except BaseException:
        if hidden is not None:
            hidden.unlink(missing_ok=True)
        raise


def _unnamed(folder: Path) -> tuple[int, Path | None]:
    """A file without a name; where the file system has none, one with a hidden name."""
    flags, mode = os.O_RDWR | os.O_CLOEXEC, 0o666  # the umask decides, as for any file of a person
    try:
        return os.open(folder, flags | os.O_TMPFILE, mode), None
    except OSError as error:
        if error.errno not in NAMELESS_NOT_OFFERED:
            raise
    hidden = _hidden_name(folder)
    return os.open(hidden, flags | os.O_CREAT | os.O_EXCL, mode), hidden


def _give_name(fd: int, hidden: Path | None, path: Path, *, replace: bool) -> None:
    """In one step: `path` always opens either the earlier file or the complete new one."""
    folder = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        if hidden is None and replace:
            hidden = _hidden_name(path.parent)
            _link(fd, hidden, folder)
        if hidden is None:
            _link(fd, path, folder)
        elif replace:
            hidden.replace(path)
        else:
            _rename_to_new(hidden, path)
        os.fsync(folder)
    except BaseException:
        if hidden is not None:
            hidden.unlink(missing_ok=True)
        raise
    finally:
        os.close(folder)


def _link(fd: int, path: Path, folder: int) -> None:
    # open(2): the way to name an O_TMPFILE. Only with a folder's descriptor Python calls linkat(2) with AT_SYMLINK_FOLLOW.
    os.link(f"/proc/self/fd/{fd}", path.name, src_dir_fd=folder, dst_dir_fd=folder, follow_symlinks=True)


def _rename_to_new(hidden: Path, path: Path) -> None:
    """FileExistsError, where `path` exists. By a hard link, or renameat2(2), as NFS has only the former and FAT only the
    latter."""
    try:
        os.link(hidden, path)
    except PermissionError:
        import ctypes  # takes a millisecond to load, and is seldom needed

        library = ctypes.CDLL(None, use_errno=True)
        if library.renameat2(_AT_FDCWD, os.fsencode(hidden), _AT_FDCWD, os.fsencode(path), _RENAME_NOREPLACE) != 0:
            number = ctypes.get_errno()
            raise OSError(number, os.strerror(number)) from None
    else:
        hidden.unlink()


def _hidden_name(folder: Path) -> Path:
    return folder / f".{os.urandom(8).hex()}.partial"


def _exists(path: Path) -> Conflict:
    return Conflict(f"{path.name} already exists", hint="--force replaces it")


def _failed(path: Path, error: OSError) -> DiskWriteFailed:
    number = error.errno or 0
    return DiskWriteFailed(f"{path.name} cannot be made: {os.strerror(number)}", hint=HINTS.get(number))
