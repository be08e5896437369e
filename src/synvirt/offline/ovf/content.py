"""Where the bytes of an OVF disk's file are: whole, in chunks (DSP0243 clause 7.1), in gzip, or nowhere (a blank disk)."""

import zlib
from collections.abc import Callable, Sequence
from typing import NamedTuple

from synvirt.disks.roots import Root, raw_spec
from synvirt.disks.specs import BlankSpec, GzipSpec, JoinedSpec, ReaderSpec
from synvirt.errors import MalformedArchive, UnsupportedFormat
from synvirt.offline import files
from synvirt.offline.files import FileRange
from synvirt.offline.ovf.disks import Declared, FileReference

# More chunks than any appliance has, and fewer than the 9 digits of their names can count.
_CHUNKS_MAX = 100_000
_HEAD_BYTES = 64 << 10
# The size of an image beside its disk's bytes: tables and headers, a few per mille of it, and a little more for a small one.
_OVERHEAD_SHARE, _OVERHEAD_BYTES = 64, 64 << 20


class Content(NamedTuple):
    """The bytes of a disk's file: how to read them, and the ranges of host files with them (for their digests). `head` is their
    beginning, if only inflating gives it; `measurable` is false, where their length is unknown."""

    spec: ReaderSpec
    parts: tuple[FileRange, ...] = ()
    head: bytes | None = None
    measurable: bool = True


Find = Callable[[str], FileRange | None]


def content_of(disk: Declared, find: Find, *, root: Root, label: str) -> Content:
    """`find` finds a file of the package `label` by its href. UnsupportedFormat, MalformedArchive."""
    source = disk.source
    if source.parent:
        raise UnsupportedFormat(
            f"disk {disk.key!r} holds only what differs from disk {source.parent!r}",
            hint="Consolidate the VM's snapshots and export it again.",
        )
    if source.is_lun:
        raise UnsupportedFormat(
            f"disk {disk.key!r} is a LUN of its storage, which an export does not hold",
            hint="Copy it into an image on a storage domain and export the VM again, or skip the disk in the plan.",
        )
    if source.file is None:
        if not disk.capacity_bytes:
            raise UnsupportedFormat(f"disk {disk.key!r} has neither a file nor a size", hint="Skip it in the plan.")
        return Content(BlankSpec(size_bytes=disk.capacity_bytes))
    parts = _chunks(source.file, find) if source.file.chunk_bytes else (_whole(source.file, find, label),)
    ranges = tuple(raw_spec(root, part.path, part.offset, part.length) for part in parts)
    spec = ranges[0] if len(ranges) == 1 else JoinedSpec(parts=ranges)
    if not source.file.compression:
        return Content(spec, parts)
    if source.file.compression != "gzip":
        raise UnsupportedFormat(f"{source.file.href} is compressed by {source.file.compression[:40]!r}; gzip is read")
    if not disk.capacity_bytes:
        raise UnsupportedFormat(
            f"disk {disk.key!r} is compressed, and its size is not given", hint="Unpack it, and correct the OVF."
        )
    most = disk.capacity_bytes + disk.capacity_bytes // _OVERHEAD_SHARE + _OVERHEAD_BYTES
    return Content(
        GzipSpec(over=spec, size_max_bytes=most, name=source.file.href),
        parts,
        head=_inflated_head(parts, root),
        measurable=False,
    )


def _whole(file: FileReference, find: Find, label: str) -> FileRange:
    found = find(file.href)
    if found is None:
        raise MalformedArchive(
            f"{label} has no file {file.href!r}, which its description needs",
            hint="The package is incomplete, or a file was renamed: copy all of its files under their own names.",
        )
    return found


def _chunks(file: FileReference, find: Find) -> tuple[FileRange, ...]:
    """`href.000000000`, `href.000000001`, …: all have `chunk_bytes`, except the last."""
    found: list[FileRange] = []
    while (part := find(f"{file.href}.{len(found):09d}")) is not None:
        if found and found[-1].length != file.chunk_bytes:
            raise MalformedArchive(f"{found[-1].name} has {found[-1].length} bytes, where a chunk has {file.chunk_bytes}")
        found.append(part)
        if len(found) > _CHUNKS_MAX:
            raise MalformedArchive(f"{file.href} is cut into over {_CHUNKS_MAX} chunks; no appliance is")
    size = sum(part.length for part in found)
    if not found or (file.size_bytes and size != file.size_bytes):
        raise MalformedArchive(
            f"{file.href} is cut into chunks, of which {len(found)} are there with {size} bytes of {file.size_bytes or 'some'}",
            hint="The package is incomplete: copy all of its files.",
        )
    return tuple(found)


def refuse_missing_chunk(disk: Declared, content: Content) -> None:
    """MalformedArchive, where a raw disk is too small and its last chunk could have a next one: images of other formats know
    their own ends, a raw disk has its description's size alone. The last chunk may be shorter than the others, but need not."""
    file = disk.source.file
    if file is None or not file.chunk_bytes or not content.measurable or not disk.capacity_bytes:
        return
    size = sum(part.length for part in content.parts)
    if size < disk.capacity_bytes and content.parts[-1].length == file.chunk_bytes:
        raise MalformedArchive(
            f"{file.href} is cut into chunks, of which {len(content.parts)} are there, all of {file.chunk_bytes} bytes; the "
            f"disk has {disk.capacity_bytes}",
            hint="The package is incomplete: copy all of its files.",
        )


def _inflated_head(parts: Sequence[FileRange], root: Root) -> bytes:
    try:
        return zlib.decompressobj(16 + zlib.MAX_WBITS).decompress(files.head_of(parts[0], root), _HEAD_BYTES)
    except zlib.error as problem:
        raise MalformedArchive(f"{parts[0].name} is to be a gzip file: {problem}") from problem
