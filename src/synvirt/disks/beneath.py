"""Opens files that hostile input names, only if they lie under a given folder.

A backing file, an extent, a parent or a plan's path is resolved by the kernel (`openat2` with RESOLVE_BENEATH and
RESOLVE_NO_MAGICLINKS, Linux 5.6), so a rename between a check and an open cannot lead out of the folder. Where the kernel or a
sandbox refuses that call, the same walk is done here, one component at a time on open folders.

`..` and relative symbolic links are followed if they stay in the folder; all else that leaves it is HostPathRejected. Only
plain files in the folder (and folders, for `resolve_beneath`) are opened. A named pipe or a device node is opened with O_PATH,
without side effects, and refused. Mounts in the folder are part of it, as imports may be on shares.
"""

import contextlib
import errno
import os
import stat
import struct
from collections.abc import Callable, Iterator, Mapping
from functools import cache, lru_cache
from itertools import islice
from pathlib import Path, PurePosixPath

from synvirt.errors import DiskReadFailed, HostPathRejected, MalformedArchive, NotFound, SynvirtError

# include/uapi/linux/openat2.h; the number is the same on every architecture that Debian 12 ships.
_SYS_OPENAT2 = 437
_RESOLVE_NO_MAGICLINKS, _RESOLVE_BENEATH = 0x02, 0x08
_O_PATH = os.O_PATH | os.O_CLOEXEC

# PATH_MAX with its NUL: a longer name cannot be opened, so it is refused.
_NAME_MAX_BYTES = 4095
_NAMES_HINT = "a path has at most 4095 bytes, each name on it 255, and no null byte"
# Of a path that leads out of the root. The command line has another hint.
LEADS_OUT = "only files under the import root are opened"
# The kernel's limit for one walk (MAXSYMLINKS).
_LINKS_MAX = 40
# openat2 answers EAGAIN while something in the tree is renamed; a walk that loses this often is under attack.
_RACES_MAX = 128
# A deeper path gets no suggestion in the hint, and is taken as it is spelled.
_TYPED_PARTS_MAX = 32

_HINTS = {
    errno.EACCES: "Let the service's user read the file and its folders.",
    errno.EMFILE: "Raise the limit of open files (LimitNOFILE): each piece of a split disk is one.",
}

# struct open_how: flags, mode, resolve.
_OPEN_HOW = struct.Struct("=QQQ")


def open_beneath(root: Path | str, name: str) -> int:
    """A descriptor, for reading, of the plain file `name` under `root`; the caller closes it.

    `name` is relative to `root`, or absolute and within it. HostPathRejected: it leads out, or is no plain file; NotFound: it
    does not exist; DiskReadFailed: the system does not let us read it.
    """
    with _found(Path(root), name) as (descriptor, found):
        if not stat.S_ISREG(found.st_mode):
            raise HostPathRejected(f"{name!r} is not a plain file")
        # The O_PATH descriptor pins the inode, so this opens the checked file, whatever its name means by now.
        try:
            return os.open(f"/proc/self/fd/{descriptor}", os.O_RDONLY | os.O_CLOEXEC)
        except OSError as problem:
            raise _translated(problem, name) from problem


def pinned_beneath(root: Path | str, name: str) -> int | None:
    """A descriptor (O_PATH) of the plain file `name` under `root`: it stays this file, whatever happens to its name. The caller
    closes it. None, where `open_beneath` would raise."""
    try:
        with _found(Path(root), name) as (descriptor, found):
            return os.dup(descriptor) if stat.S_ISREG(found.st_mode) else None
    except SynvirtError:
        return None


def open_folder_beneath(root: Path | str, name: str) -> tuple[int, Path]:
    """A descriptor, for listing, of the folder `name` under `root`, and the folder's real path; the caller closes it.

    Raises the errors of `open_beneath`; HostPathRejected, where it is no folder.
    """
    with _named(Path(root), name) as (descriptor, found):
        if not stat.S_ISDIR(found.st_mode):
            raise HostPathRejected(f"{name!r} is not a folder")
        path = _real_path(descriptor, Path(root), name)
        try:
            return os.open(f"/proc/self/fd/{descriptor}", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC), path
        except OSError as problem:
            raise _translated(problem, name) from problem


def stat_beneath(root: Path | str, name: str) -> os.stat_result:
    """The status of what `name` leads to under `root`, of any type. Raises the errors of `open_beneath`."""
    with _found(Path(root), name) as (_, found):
        return found


def resolve_beneath(root: Path | str, name: str) -> Path:
    """The real path of the file or folder `name`: absolute, without symbolic links, under `root`.

    Takes the arguments and raises the errors of `open_beneath`. The path is for showing, storing and comparing. To open it
    later, call `open_beneath` again, since the tree may have changed.
    """
    with _named(Path(root), name) as (descriptor, found):
        if not (stat.S_ISREG(found.st_mode) or stat.S_ISDIR(found.st_mode)):
            raise HostPathRejected(f"{name!r} is neither a plain file nor a folder")
        return _real_path(descriptor, Path(root), name)


def open_reference(root: Path | str | None, image: str, reference: str) -> tuple[int, str]:
    """The file that `image` (a path under `root`) names as `reference`: its descriptor and its own path under `root`.

    A relative reference is relative to the image's folder. If there is no such file, one of another spelling is taken (see
    `spelled`). `root` None refuses all; a missing file is MalformedArchive, since the image is incomplete without it.
    """
    if root is None:
        raise HostPathRejected(
            f"{image} needs another file, {reference!r}, and this import may open no other",
            hint="Import the folder that holds all files of the disk, or convert the disk to a single file first.",
        )
    _refuse_name(reference)
    name = _relative(Path(root), reference)
    if not reference.startswith("/"):
        name = str(PurePosixPath(image).parent / reference)
    try:
        try:
            return open_beneath(root, name), name
        except NotFound:
            if (alike := spelled(root, name)) is None:
                raise
            return open_beneath(root, alike), alike
    except NotFound as problem:
        raise MalformedArchive(
            f"{image} needs the file {reference!r}, which is not there",
            hint="Copy all files of the disk into one folder under the import root.",
        ) from problem


def spelled(root: Path | str, name: str) -> str | None:
    """`name`, which does not exist so, with each part as its folder has it, relative to `root`. Images and descriptions come
    from Windows and macOS, where capitals make no difference (see `nearest.folded`).

    None, where a part is not there, or several files could be meant. It is a name only: to open it, call `open_beneath`.
    """
    from synvirt.nearest import folded

    parts, found = PurePosixPath(_relative(Path(root), name)).parts, PurePosixPath()
    if len(parts) > _TYPED_PARTS_MAX:
        return None
    try:
        for part in parts:
            try:
                stat_beneath(root, str(found / part))
            except NotFound:
                descriptor, folder = open_folder_beneath(root, str(found))
                status = os.fstat(descriptor)
                os.close(descriptor)
                names = _spellings(folder, (status.st_dev, status.st_ino, status.st_mtime_ns))
                alike = names.get(folded(part))
                if alike is None or alike == part:  # a link to nothing is there under its own name
                    return None
                part = alike  # noqa: PLW2901 - the same part, as its folder has it
            found /= part
    except (OSError, SynvirtError):
        return None
    return str(found)


@lru_cache(maxsize=8)
def _spellings(folder: Path, _version: tuple[int, int, int]) -> Mapping[str, str | None]:
    """A folder's names by their folded texts; none, where it has too many. Kept for the hundreds of extents of one disk."""
    from synvirt.nearest import LOOKED_AT_MAX, by_folded

    with os.scandir(folder) as entries:
        names = [entry.name for entry in islice(entries, LOOKED_AT_MAX + 1)]
    return by_folded(names) if len(names) <= LOOKED_AT_MAX else {}


@contextlib.contextmanager
def _named(root: Path, name: str) -> Iterator[tuple[int, os.stat_result]]:
    """Like `_found`, for a name that a person may have typed: the hint of NotFound has the nearest name."""
    try:
        with _found(root, name) as found:
            yield found
    except NotFound as error:
        raise NotFound(error.detail, hint=_meant(root, name)) from error


def _meant(root: Path, name: str) -> str | None:
    from synvirt.nearest import LEADS_NOWHERE, most_like  # a copy without errors does not need it

    path = PurePosixPath(name)
    if path.name in ("", "..") or len(path.parts) > _TYPED_PARTS_MAX:
        return None
    try:
        descriptor, _ = open_folder_beneath(root, str(path.parent))
    except SynvirtError as error:
        return error.hint if isinstance(error, NotFound) else None
    try:
        with os.scandir(descriptor) as entries:
            near = most_like(path.name, (entry.name for entry in entries if not entry.name.startswith(".")))
    except OSError:
        return None
    finally:
        os.close(descriptor)
    if near == path.name:
        return LEADS_NOWHERE
    shown = os.fsencode(near or "").decode(errors="replace")
    if near is not None and shown != near:  # lists show it so, and nobody can type it
        return f"the name {shown} is not UTF-8: rename the file first"
    return None if near is None else f"did you mean {path.parent / near}?"


@contextlib.contextmanager
def _found(root: Path, name: str) -> Iterator[tuple[int, os.stat_result]]:
    """An O_PATH descriptor for `name` under `root`, and its status."""
    _refuse_name(name)
    parts = _parts(_relative(root, name))
    try:
        folder = os.open(root, _O_PATH | os.O_DIRECTORY)
    except OSError as problem:
        raise _translated(problem, str(root)) from problem
    try:
        try:
            descriptor = _walk(folder, parts)
        except OSError as problem:
            raise _translated(problem, name) from problem
        try:
            yield descriptor, os.fstat(descriptor)
        finally:
            os.close(descriptor)
    finally:
        os.close(folder)


def _real_path(descriptor: int, root: Path, name: str) -> Path:
    path = Path(f"/proc/self/fd/{descriptor}").readlink()
    if not path.is_relative_to(root.resolve()):  # it was moved out, or removed, since it was found
        raise HostPathRejected(f"{name!r} left the import root while it was looked at")
    return path


def _refuse_name(name: str) -> None:
    """Refuses names that some program reads as something other than a path: URLs, `json:` and the like, drive letters, NUL."""
    try:
        fits = 0 < len(os.fsencode(name)) <= _NAME_MAX_BYTES and "\0" not in name
    except UnicodeEncodeError:  # half of a surrogate pair, from a damaged descriptor
        fits = False
    if not fits:
        raise HostPathRejected(f"{name[:80]!r} is not a file name", hint=_NAMES_HINT)
    # qemu reads a colon before the first slash as a protocol.
    head = name.split("/", 1)[0]
    if ":" in head:
        raise HostPathRejected(
            f"{name[:200]!r} names a protocol or a drive, not a file",
            hint="Only files under the import root are opened; a file with a colon in its name is written ./name.",
        )


def _relative(root: Path, name: str) -> str:
    if not name.startswith("/"):
        return name
    name = f"/{name.lstrip('/')}"  # for Linux `//` is `/`; for PurePosixPath it is another root
    # To resolve a root takes a system call for each of its folders: it is done only where the name has no such root as it is.
    for prefix in (root.absolute, root.resolve):
        with contextlib.suppress(ValueError):
            return str(PurePosixPath(name).relative_to(prefix()))
    raise HostPathRejected(
        f"{name!r} is outside the import root {str(root)!r}", hint="Copy or move the file into the import root."
    )


def _parts(name: str) -> list[str]:
    return [part for part in name.split("/") if part not in ("", ".")]


def _translated(problem: OSError, name: str) -> Exception:
    """XDEV and LOOP are the kernel's errors for «leads out» and «too many, or forbidden, links»."""
    match problem.errno:
        case errno.ENOENT | errno.ENOTDIR:
            return NotFound(f"there is no file {name!r}")
        case errno.ENAMETOOLONG:
            return HostPathRejected(f"{name!r} is longer than a file's name may be", hint=_NAMES_HINT)
        case errno.ELOOP:
            return HostPathRejected(
                f"the links of {name!r} lead in a circle, or to no file of this host", hint="put the file itself there"
            )
        case errno.EXDEV | errno.EAGAIN:
            return HostPathRejected(f"{name!r} leads out of the import root", hint=LEADS_OUT)
        case number:
            return DiskReadFailed(f"{name!r} cannot be opened: {problem.strerror}", hint=_HINTS.get(number or 0))


def _walk(folder: int, parts: list[str]) -> int:
    for _ in range(_RACES_MAX):
        try:
            return _openat2(folder, "/".join(parts) or ".")
        except OSError as problem:
            if problem.errno in (errno.ENOSYS, errno.EPERM, errno.E2BIG):  # an old kernel, or a sandbox without openat2
                return _walk_by_steps(folder, parts)
            if problem.errno != errno.EAGAIN:
                raise
    raise OSError(errno.EAGAIN, os.strerror(errno.EAGAIN))


@cache
def _syscall() -> tuple[Callable[..., int], Callable[[], int]]:
    """The C library's function, and what gives its errno."""
    import ctypes  # takes a millisecond to load; most images name no other file

    return ctypes.CDLL(None, use_errno=True).syscall, ctypes.get_errno


def _openat2(folder: int, name: str) -> int:
    how = _OPEN_HOW.pack(_O_PATH, 0, _RESOLVE_BENEATH | _RESOLVE_NO_MAGICLINKS)
    syscall, get_errno = _syscall()
    descriptor = syscall(_SYS_OPENAT2, folder, os.fsencode(name), how, len(how))
    if descriptor < 0:
        number = get_errno()
        raise OSError(number, os.strerror(number))
    return descriptor


def _walk_by_steps(folder: int, parts: list[str]) -> int:
    """The same walk by hand: each component is opened without following, links are expanded, `..` comes from the stack."""
    stack = [os.dup(folder)]
    todo, links = list(reversed(parts)), 0
    try:
        while todo:
            part = todo.pop()
            if part == "..":
                if not stat.S_ISDIR(os.fstat(stack[-1]).st_mode):
                    raise OSError(errno.ENOTDIR, os.strerror(errno.ENOTDIR))
                if len(stack) == 1:
                    raise OSError(errno.EXDEV, os.strerror(errno.EXDEV))
                os.close(stack.pop())
                continue
            step = os.open(part, _O_PATH | os.O_NOFOLLOW, dir_fd=stack[-1])
            if not stat.S_ISLNK(os.fstat(step).st_mode):
                stack.append(step)
                continue
            try:
                target = os.readlink("", dir_fd=step)
            finally:
                os.close(step)
            links += 1
            if target.startswith("/") or links > _LINKS_MAX:
                number = errno.EXDEV if target.startswith("/") else errno.ELOOP
                raise OSError(number, os.strerror(number))
            todo.extend(reversed(_parts(target)))
        return stack.pop()
    finally:
        for descriptor in stack:
            os.close(descriptor)
