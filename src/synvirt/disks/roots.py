"""The only module that opens a VM's files: in a folder of this host (`beneath`), or in a remote one (`synvirt.remote`).

A description, an image and a plan are hostile input. Each file that they name is looked for under a root, only by this module.
In a folder of this host names are paths under it, relative or absolute; in a Remote they are relative to its URL.
"""

import os
import posixpath
from collections.abc import Hashable
from contextlib import AbstractContextManager, nullcontext
from itertools import islice
from pathlib import Path, PurePosixPath

from synvirt.blocks import DiskReader
from synvirt.disks.beneath import open_beneath, resolve_beneath
from synvirt.disks.beneath import open_reference as open_reference_beneath
from synvirt.disks.raw.changes import opened_remote
from synvirt.disks.raw.files import RawReader
from synvirt.disks.specs import RawSpec
from synvirt.errors import AuthFailed, DiskReadFailed, HostPathRejected, MalformedArchive, NotFound
from synvirt.remote import Remote

# Remote readers (`synvirt.remote.reading`) are imported on demand, so that a copy of a local disk starts sooner.
Root = Path | Remote

# The root for paths on this host that were already resolved under another one.
HOST = Path("/")


def resolve(root: Root, name: str) -> Path:
    """The real place of the file or folder (see `resolve_beneath`). In a Remote only the name is checked: NotFound, where it
    leads out."""
    if not isinstance(root, Remote):
        return resolve_beneath(root, name)
    inner = posixpath.normpath(name)
    if inner.startswith(("../", "/")) or inner == ".." or "\0" in inner:
        raise NotFound(f"{name!r} does not lie below {root.url}")
    return Path(inner)


def open_file(root: Root, name: str, offset: int = 0, length: int | None = None, *, shown: str = "") -> DiskReader:
    """The bytes of a plain file, or a range of them. HostPathRejected, NotFound, DiskReadFailed; for a Remote the errors of
    `RemoteReader`."""
    if isinstance(root, Remote):
        return _open_remote(root, str(resolve(root, name)), offset, length)
    return RawReader(shown or name, offset, length, descriptor=open_beneath(root, name))


def size_of(root: Root, name: str) -> int | None:
    """None, where there is no such file. HostPathRejected."""
    try:
        reader = open_file(root, name)
    except NotFound:
        return None
    except AuthFailed:
        # Without the right to list a bucket, S3 says «forbidden» for missing files; and a signed URL is for one file only.
        if not isinstance(root, Remote):
            raise
        return None
    try:
        return reader.size
    finally:
        reader.close()


def connected(root: Root, *, within_s: float | None = None) -> AbstractContextManager[None]:
    """In the block, a Remote is logged in to once, however many files are opened; SourceUnreachable after `within_s`."""
    if not isinstance(root, Remote):
        return nullcontext()
    from synvirt.remote.places import connected as connected_remote

    return connected_remote(root, within_s=within_s)


def is_folder(root: Root, path: Path) -> bool:
    """In a Remote, only the URL itself is a folder, and all in it are files."""
    return path == Path() if isinstance(root, Remote) else path.is_dir()


def listed(root: Root, path: Path, most: int | None = None) -> list[str] | None:
    """The names in a folder, in no order, `most` of them; None, where its place cannot list (HTTP). OSError."""
    if isinstance(root, Remote):
        from synvirt.remote.reading import names

        inner = "" if path == Path() else str(path)
        found = names(root, inner)
        return None if found is None else [PurePosixPath(name).name for name in found[:most]]
    with os.scandir(path) as entries:
        return [entry.name for entry in islice(entries, most)]


def raw_spec(root: Root, path: Path, offset: int = 0, length: int | None = None) -> RawSpec:
    """How another process reads the file's range later; for a Remote, in its present version."""
    if isinstance(root, Remote):
        from synvirt.remote.reading import version_of

        return RawSpec(path=str(path), offset=offset, length=length, remote=root, version=version_of(root, str(path)))
    return RawSpec(path=str(path), offset=offset, length=length, beneath=None if root == HOST else str(root.absolute()))


def open_spec(spec: RawSpec) -> DiskReader:
    """The file of a raw spec: on this host, or remote. HostPathRejected, FileGone."""
    if spec.remote is not None:
        return _open_remote(spec.remote, spec.path, spec.offset, spec.length, version=spec.version)
    return open_here(spec.path, spec.offset, spec.length, spec.beneath)


def _open_remote(root: Remote, name: str, offset: int, length: int | None, *, version: str | None = None) -> DiskReader:
    from synvirt.remote.reading import RemoteReader

    reader = RemoteReader(root, name, offset, length, version=version)
    opened_remote(reader.name, reader.version)
    return reader


def open_here(path: str, offset: int, length: int | None, beneath: str | None) -> RawReader:
    """A file of this host by a spec's path. HostPathRejected, where it now leads out of `beneath`."""
    return RawReader(path, offset, length, descriptor=None if beneath is None else opened_beneath(beneath, path))


def opened_beneath(root: str, path: str) -> int:
    """Like `open_beneath`, for a file that existed before."""
    name = Path(path).name
    try:
        return open_beneath(root, path)
    except NotFound as problem:
        raise DiskReadFailed(
            f"{name} cannot be opened: it is not there", hint="it was removed or renamed meanwhile"
        ) from problem
    except HostPathRejected as problem:
        raise HostPathRejected(
            f"{name} leads out of the import root, or is not a plain file, and was one when it was looked at",
            hint="somebody changed it meanwhile: who may write to the import root?",
        ) from problem


def open_reference(
    root: Root | str | None, image: str, reference: str, offset: int = 0, length: int | None = None
) -> tuple[DiskReader, str, Hashable]:
    """The file that `image` (a path under `root`) names as `reference`: its bytes, its own path under `root`, and its identity.
    `root` None refuses all; a missing file is MalformedArchive: the image is incomplete."""
    if not isinstance(root, Remote):
        descriptor, name = open_reference_beneath(root, image, reference)
        status = os.fstat(descriptor)
        return RawReader(name, offset, length, descriptor=descriptor), name, (status.st_dev, status.st_ino)
    if ":" in reference.split("/", 1)[0]:
        raise HostPathRejected(f"{image} names {reference[:200]!r}, which is a protocol or a drive, not a file beside it")
    try:
        name = str(resolve(root, posixpath.join(posixpath.dirname(image), reference)))
        return _open_remote(root, name, offset, length), name, (root.url, name)
    except NotFound as problem:
        raise MalformedArchive(
            f"{image} needs the file {reference!r}, which is not there",
            hint=f"Copy all files of the disk into one folder below {root.url}",
        ) from problem
