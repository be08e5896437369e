"""The import root as callers see it: folders in pages, and what is in a file. Blocking code.

A page of a folder with many thousand entries costs one reading of its names; only the page's own entries are opened, to find
their kind. A cursor is the place of the last entry shown, so new and removed entries do not shift the pages.
"""

import base64
import binascii
import errno
import heapq
import os
import stat
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from synvirt.disks.beneath import open_folder_beneath, stat_beneath
from synvirt.disks.roots import Root, connected, resolve
from synvirt.errors import BadRequest, DiskWriteFailed, NotFound, SynvirtError
from synvirt.machines.concerns import with_room
from synvirt.model.files import HostEntry, HostFolder, Inspection
from synvirt.model.kinds import OfflineKind
from synvirt.offline.registry import detect
from synvirt.offline.several import choosing
from synvirt.settings import UPLOADS_FOLDER

# A few pieces of a file on a slow server take seconds; no caller waits longer than this.
ELSEWHERE_WITHIN_S = 120.0
# The last second of year 9999, the end of the calendar: an archive may have any file time.
_LATEST_S = 253402300799

# (0 for a folder, 1 for a file; the name's bytes): folders first, each by name.
Place = tuple[int, bytes]


@dataclass(frozen=True, slots=True)
class _Entry:
    place: Place
    name: str
    found: os.stat_result | None


# Errors of a name that was removed since it was read, and of a mount whose server is gone: the others are shown all the same.
_GONE = frozenset({errno.ENOENT, errno.ENOTCONN, errno.ESTALE, errno.EIO, errno.EHOSTDOWN, errno.ETIMEDOUT})


def browse(root: Path, path: str = "", *, limit: int, cursor: str | None = None) -> HostFolder:
    """The folder `path` under `root`, or `root` itself. HostPathRejected, NotFound; BadRequest for a foreign cursor."""
    after = _place(cursor) if cursor is not None else None
    top = root.resolve()
    with _opened(root, path or ".") as (descriptor, folder):
        if folder.is_relative_to(top / UPLOADS_FOLDER):
            raise NotFound(f"there is no folder {path!r}", hint="uploads have a list of their own")
        hidden = UPLOADS_FOLDER if folder == top else None
        ahead = (
            entry
            for entry in _entries(descriptor, folder, root)
            if entry.name != hidden and (after is None or entry.place > after)
        )
        shown = heapq.nsmallest(limit + 1, ahead, key=lambda entry: entry.place)
        more = len(shown) > limit
        entries = tuple(made for entry in shown[:limit] if (made := _shown(entry, descriptor, folder, root)) is not None)
    return HostFolder(
        path=_text(str(folder)),
        parent=None if folder == top else _text(str(folder.parent)),
        entries=entries,
        next_cursor=_cursor(shown[limit - 1].place) if more else None,
    )


def inspect(root: Root, path: str, *, vm: str | None = None, free_bytes: Callable[[], int] | None = None) -> Inspection:
    """The file or folder at `path`, and the VM in it; `vm` selects one of several. Reads what it needs, but no disks.
    `free_bytes`: the destination's."""
    with connected(root, within_s=ELSEWHERE_WITHIN_S):
        importer = choosing(detect(path, root), vm)
        manifest = importer.inspect(resolve(root, path), root)
    return with_free_bytes(Inspection(offline_kind=importer.kind, manifest=manifest), free_bytes)


def with_free_bytes(found: Inspection, free_bytes: Callable[[], int] | None) -> Inspection:
    """Adds a concern, where the VM does not fit the destination."""
    if free_bytes is not None:
        with suppress(DiskWriteFailed):  # a destination that is away does not concern the file: the plan reports it
            return found.model_copy(update={"manifest": with_room(found.manifest, free_bytes())})
    return found


@contextmanager
def _opened(root: Path, path: str) -> Iterator[tuple[int, Path]]:
    descriptor, folder = open_folder_beneath(root, path)
    try:
        yield descriptor, folder
    finally:
        os.close(descriptor)


def _entries(descriptor: int, folder: Path, root: Path) -> Iterator[_Entry]:
    """Files and folders, and targets of links. Other things, and links that lead out of the root, cannot be imported and are
    not shown."""
    with os.scandir(descriptor) as listing:
        for entry in listing:
            found = None
            if entry.is_symlink():
                try:
                    found = stat_beneath(root, str(folder / entry.name))
                except SynvirtError:
                    continue
                is_folder, is_file = stat.S_ISDIR(found.st_mode), stat.S_ISREG(found.st_mode)
            else:
                is_folder, is_file = entry.is_dir(follow_symlinks=False), entry.is_file(follow_symlinks=False)
            if is_folder or is_file:
                yield _Entry((0 if is_folder else 1, os.fsencode(entry.name)), entry.name, found)


def _shown(entry: _Entry, descriptor: int, folder: Path, root: Path) -> HostEntry | None:
    try:
        found = entry.found or os.stat(entry.name, dir_fd=descriptor, follow_symlinks=False)
    except OSError as error:
        if error.errno in _GONE:
            return None
        raise
    path = str(folder / entry.name)
    is_folder = entry.place[0] == 0
    return HostEntry(
        name=_text(entry.name),
        path=_text(path),
        type="directory" if is_folder else "file",
        size_bytes=None if is_folder else found.st_size,
        modified_at=datetime.fromtimestamp(min(max(found.st_mtime, 0), _LATEST_S), UTC),
        offline_kind=_kind(path, root),
    )


def _kind(path: str, root: Path) -> OfflineKind | None:
    try:
        return detect(path, root).kind
    except (SynvirtError, OSError):
        return None


def _text(name: str) -> str:
    """File names are bytes, JSON is text: bytes that are not UTF-8 show as U+FFFD; to import the file, rename it."""
    return os.fsencode(name).decode(errors="replace")


def _cursor(place: Place) -> str:
    return base64.urlsafe_b64encode(b"%d%s" % place).decode()


def _place(cursor: str) -> Place:
    try:
        decoded = base64.b64decode(cursor, altchars=b"-_", validate=True)
    except (binascii.Error, ValueError):
        decoded = b""
    if decoded[:1] not in (b"0", b"1"):
        raise BadRequest(f"cursor: {cursor[:100]!r} is not one of this service", hint="begin again without one")
    return int(decoded[:1]), decoded[1:]
