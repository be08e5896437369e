"""Finds the disks of a file or folder that the command line names."""

import errno
import os
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from synvirt.disks import detect
from synvirt.disks.nbd.fallback import with_key
from synvirt.disks.specs import ChecksumSpec, RawSpec, ReaderSpec
from synvirt.errors import BadRequest, MalformedArchive, unreadable
from synvirt.offline.known_by import HEAD_BYTES, may_be_appliance, promised, root_of

if TYPE_CHECKING:
    from collections.abc import Mapping

    from synvirt.offline import OpenedDisk


class Found(NamedTuple):
    """A disk of an image or an appliance, how it is read, and its further checks."""

    name: str
    reader: ReaderSpec
    checksums: tuple[ChecksumSpec, ...] = ()


def resolved(path: Path) -> Path:
    """The file that a person named, without links. BadRequest, where a link leads to itself or to nothing."""
    try:
        return path.resolve(strict=True)
    except RuntimeError as error:  # Python 3.11 to 3.12; later ones say ELOOP
        raise unreadable(path, OSError(errno.ELOOP, os.strerror(errno.ELOOP))) from error
    except OSError as error:
        raise unreadable(path, error) from error


def disks_in(image: Path, key_file: Path | None = None, *, root: Path | None = None, key_needed: bool = True) -> list[Found]:
    """The disks of an appliance, or the image itself. Files that it names must be under `root`; None: next to it.

    `key_needed`: BadRequest, if nothing is encrypted with the key.
    """
    where = resolved(image)
    top = None if root is None else _above(root, where)
    key = None if key_file is None else str(resolved(key_file))
    if where.is_file() and not where.stat().st_size:
        raise MalformedArchive(f"{image.name} is empty", hint="copy it again from where it comes from")
    alone: ReaderSpec = detect(where, root=top) if not where.is_dir() else RawSpec(path=str(where))
    found = None
    if isinstance(alone, RawSpec) and not where.is_block_device() and _may_be_appliance(where, head := _head(where)):
        found = _disks_of_appliance(where, head, top or root_of(where))
    if found is None and key is None and isinstance(alone, RawSpec) and (what := promised(where.name)) is not None:
        raise MalformedArchive(
            f"{image.name} is called {what}, and its content is not",
            hint="The file seems to be cut off: copy it again. The name of a raw disk must end in .raw or .img.",
        )
    return [Found(image.name, with_key(alone, key, needed=key_needed))] if found is None else found


def _above(root: Path, where: Path) -> Path:
    """The folder that a person named as the root. BadRequest: the image is not in it."""
    top = resolved(root)
    if not top.is_dir() or not where.is_relative_to(top):
        raise BadRequest(f"{where.name} is not under {root}", hint="--root takes a folder above the image")
    return top


def chosen(disks: list[Found], wanted: str | None, image: Path) -> Found:
    """The disk of that name, or the only one. BadRequest."""
    names = ", ".join(disk.name for disk in disks) or "none"
    if wanted is None and len(disks) == 1:
        return disks[0]
    if wanted is None:
        raise BadRequest(f"{image.name} has {len(disks)} disks: {names}", hint="choose one with --disk")
    for disk in disks:
        if disk.name == wanted:
            return disk
    raise BadRequest(f"{image.name} has no disk {wanted}; it has {names}")


def _head(where: Path) -> bytes:
    """A file's first bytes; none of a folder."""
    if where.is_dir():
        return b""
    with where.open("rb") as file:
        return file.read(HEAD_BYTES)


def _may_be_appliance(where: Path, head: bytes) -> bool:
    """Whether the importers must be loaded. A disk with a partition table (MBR, or GPT's protective one) is no appliance."""
    return where.is_dir() or (head[510:512] != b"\x55\xaa" and may_be_appliance(where.name, head))


def _disks_of_appliance(where: Path, head: bytes, root: Path) -> list[Found] | None:
    """None, if it is no appliance: then a file is a raw disk."""
    opened = _disks_of_ova(where, head, root)
    if opened is None:
        from synvirt.offline.registry import UnknownKind
        from synvirt.offline.registry import detect as detect_appliance

        try:
            importer = detect_appliance(where, root)
        except UnknownKind:  # a file of another known kind, for example a packed one, is refused: a copy of it would be no disk
            return None
        keys = [disk.key for disk in importer.inspect(where, root).disks]
        opened = {key: importer.open_disk(where, root, key) for key in keys}
    return [Found(key, disk.reader, disk.checksums) for key, disk in opened.items()]


def _disks_of_ova(where: Path, head: bytes, root: Path) -> "Mapping[str, OpenedDisk] | None":
    """As its importer gives them; to load all importers takes a fifth of a second. None, if it is no OVA."""
    from synvirt.disks.tar import is_tar

    if not is_tar(head):
        return None
    from synvirt.offline.ovf import members

    return members.disks(where, root) if members.is_ova(where, head, root) else None
