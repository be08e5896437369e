"""VMDK disks: VMware «Virtual Disk Format 1.1», and additions of later products.

    VmdkReader ── Descriptor   descriptor        the text: extents, parent
               ── Sparse       sparse            headers of the three sparse extents
               ── Tables       tables            their directories and tables, or a stream's markers
               ── GrainMap     grains, windows   where grains lie, as runs
               ── Inflated     stream            compressed grains

It reads streamOptimized (with its tables, or by its markers), monolithicSparse, monolithicFlat, twoGbMaxExtentSparse and Flat,
vmfs, vmfsSparse, seSparse, and snapshots over any of them. Every part of a disk is a DiskReader: an extent is a MappedDisk or a
range of a raw file, a disk is its extents in sequence, and a snapshot's parent is a disk under the extents.
"""

import contextlib
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from itertools import accumulate
from typing import Any, Final

from synvirt.blocks import DiskReader, Extent, Place, Placed, coalesced, fill_zeros, piece_bytes
from synvirt.disks.blockmap import MappedDisk
from synvirt.disks.entries import WindowCache
from synvirt.disks.layers import Layer
from synvirt.disks.parents import Chain, Reference, open_parent
from synvirt.disks.roots import open_reference
from synvirt.disks.specs import ImageRoot
from synvirt.disks.vmdk.descriptor import ZERO, Descriptor, ExtentLine, parse_descriptor
from synvirt.disks.vmdk.grains import WINDOWS_KEPT, GrainMap
from synvirt.disks.vmdk.sparse import DESCRIPTOR_BYTES_MAX, MAGICS, TABLES_MAX, Sparse, read_at, read_sparse
from synvirt.disks.vmdk.tables import Tables, Walked
from synvirt.disks.vmdk.windows import Window
from synvirt.errors import DiskReadFailed, MalformedArchive, UnsupportedFormat
from synvirt.records import Record

# 64 files of the largest size would have 1 GiB of directories.
_CHAIN_TABLES_MAX: Final = 2 * TABLES_MAX


class _Opened:
    """Shared by the files of one disk while it is opened: their root, the cache of their tables, and the number of tables."""

    def __init__(self, root: ImageRoot | None) -> None:
        self.root, self.chain, self.cache, self.tables = root, Chain(), WindowCache[Window](WINDOWS_KEPT), 0

    def count(self, sparse: Sparse, name: str) -> None:
        self.tables += sparse.tables
        if self.tables > _CHAIN_TABLES_MAX:
            raise MalformedArchive(f"{name}: the extents of its chain have over {_CHAIN_TABLES_MAX} grain tables")


class VmdkReader:
    """The disk in the VMDK whose bytes are `over`, which it owns: close() closes it."""

    def __init__(
        self, over: DiskReader, *, root: ImageRoot | None = None, name: str = "", parent: DiskReader | None = None
    ) -> None:
        """`root` and `name` are ImageSpec's: the image's path under the import root. `parent` is the parent of a differencing
        image of VirtualBox, and is closed with it."""
        name = name or "the VMDK"
        if over.max_readers == 1:
            raise UnsupportedFormat(
                f"{name} lies in a stream that can only be read from front to back; a VMDK is read in any order",
                hint="Unpack the archive first.",
            )
        self._opened = _open_disk(over, name, _Opened(root), parent)
        self._disk = self._opened.disk
        self.size, self.max_readers = self._disk.size, self._disk.max_readers
        self.piece_bytes = piece_bytes(self._disk)

    def extents(self) -> Iterator[Extent]:
        return coalesced(self._disk.extents())

    def places(self) -> Iterator[Place]:
        return _places(self._disk)

    def read_into(self, offset: int, buffer: memoryview) -> None:
        self._disk.read_into(offset, buffer)

    def layer(self) -> Layer:
        return self._opened.layer()

    def close(self) -> None:
        self._disk.close()


def _places(reader: DiskReader) -> Iterator[Place]:
    return reader.places() if isinstance(reader, Placed) else iter(())


class _Disk(Record):
    """A disk, its descriptor, and its parent if it is a snapshot."""

    name: str
    disk: DiskReader
    descriptor: Descriptor | None
    sparse: Sparse | None
    parent: "_Disk | None"

    def layer(self) -> Layer:
        facts: dict[str, Any] = {}
        if self.descriptor is not None:
            facts["subformat"] = self.descriptor.create_type
            facts["cid"] = None if self.descriptor.cid is None else f"{self.descriptor.cid:08x}"
        if self.sparse is not None and self.sparse.size:
            facts["cluster_bytes"] = self.sparse.grain_bytes
            facts["compression"] = "deflate" if self.sparse.compressed else None
        elif self.descriptor is not None:
            facts["extent_files"] = [line.file or line.kind.lower() for line in self.descriptor.extents]
        beneath = self.parent.layer() if self.parent else None
        return Layer(name=self.name, format="vmdk", size_bytes=self.disk.size, facts=facts, beneath=beneath)


def described(over: DiskReader, name: str) -> Descriptor | None:
    """The VMDK's descriptor; None, for a stream without one."""
    head = read_at(over, 0, min(over.size, 4), name, "header")
    return _descriptor(over, name, read_sparse(over, name) if bytes(head) in MAGICS else None)


def _open_disk(over: DiskReader, name: str, opened: _Opened, given: DiskReader | None = None) -> _Disk:
    """The disk of a descriptor, or of a sparse extent with one in it. `over`, and the `given` parent, are closed with it, or by
    the caller if this raises.
    """
    head = read_at(over, 0, min(over.size, 4), name, "header")
    sparse = read_sparse(over, name) if bytes(head) in MAGICS else None
    descriptor = _descriptor(over, name, sparse)
    with contextlib.ExitStack() as closing:
        parent = None
        _require_parent(descriptor, name, given)
        if descriptor is not None and descriptor.has_parent:
            parent = _open_parent(descriptor, name, opened)
            closing.callback(parent.disk.close)
        beneath = given if parent is None else parent.disk
        if sparse is not None and sparse.size:
            disk: DiskReader = _sparse_disk(over, sparse, name, opened, beneath)
        else:
            parts = _open_extents(descriptor, name, opened, beneath, closing)
            disk = _Joined(parts, [over] if beneath is None else [over, beneath], name)
        closing.pop_all()
    return _Disk(name=name, disk=disk, descriptor=descriptor, sparse=sparse, parent=parent)


def open_delta(over: DiskReader, parent: DiskReader, name: str) -> DiskReader:
    """A snapshot's single sparse extent from a datastore, over the disk under it. Both are closed with it, or by the caller if
    this raises."""
    head = read_at(over, 0, min(over.size, 4), name, "header")
    sparse = read_sparse(over, name) if bytes(head) in MAGICS else None
    if sparse is None or sparse.kind == "hosted" or sparse.size != parent.size:
        raise MalformedArchive(f"{name} is not a snapshot's extent of a disk of {parent.size} bytes")
    return _sparse_disk(over, sparse, name, _Opened(None), parent)


def _descriptor(over: DiskReader, name: str, sparse: Sparse | None) -> Descriptor | None:
    if sparse is None:
        if over.size > DESCRIPTOR_BYTES_MAX:
            raise MalformedArchive(f"{name} is not a VMDK: it does not begin like one, and is too large for a descriptor")
        return parse_descriptor(read_at(over, 0, over.size, name, "descriptor"), name)
    at, length = sparse.descriptor
    if length > DESCRIPTOR_BYTES_MAX:
        raise MalformedArchive(f"{name}: a descriptor of {length} bytes; VMware's have 10 KiB")
    content = read_at(over, at, length, name, "descriptor") if at else b""
    if content.strip(b"\0"):
        return parse_descriptor(content, name)
    if sparse.compressed:  # a stream is a whole disk, even without a descriptor
        return None
    raise UnsupportedFormat(
        f"{name} is one extent of a disk, and does not say which part of it", hint="Choose the file that describes the disk."
    )


def _sparse_disk(over: DiskReader, sparse: Sparse, name: str, opened: _Opened, parent: DiskReader | None) -> DiskReader:
    opened.count(sparse, name)
    source = Walked(over, sparse, name) if sparse.directory_at is None else Tables(over, sparse, name)
    grains = GrainMap(source, sparse, over.size, name, opened.cache)
    return MappedDisk(_inflated(over, grains, name) if sparse.compressed else over, grains, name=name, parent=parent)


def _inflated(over: DiskReader, grains: GrainMap, name: str) -> DiskReader:
    # Loaded for compressed grains only: inflaters take a while.
    from synvirt.disks.vmdk.stream import Inflated

    return Inflated(over, grains, name)


def _require_parent(descriptor: Descriptor | None, name: str, given: DiskReader | None) -> None:
    """VirtualBox names a parent only by its UUID, and writes nothing into VMware's field."""
    wanted = "" if descriptor is None or descriptor.has_parent else descriptor.parent_uuid
    if wanted and given is None:
        raise UnsupportedFormat(
            f"{name} holds only what differs from another image, with UUID {wanted}",
            hint="Import the VirtualBox machine (its .vbox), or clone the disk in VirtualBox first.",
        )
    if given is not None and not wanted:
        raise MalformedArchive(f"{name} is to differ from another image, and names none")


# ── parents ──────────────────────────────────────────────────────────────────────────────────────────────────────────


def _open_parent(descriptor: Descriptor, name: str, opened: _Opened) -> _Disk:
    """The disk under a snapshot. MalformedArchive, where it has changed since the snapshot was made."""
    if not descriptor.parent_hint:
        raise MalformedArchive(f"{name} is a snapshot, and does not say what its parent is called")
    file, parent_name, opened.chain = open_parent(
        opened.root, name, [_reference(descriptor.parent_hint, opened.root)], opened.chain
    )
    try:
        parent = _open_disk(file, parent_name, opened)
    except BaseException:
        file.close()
        raise
    cid = parent.descriptor.cid if parent.descriptor else None
    if cid != descriptor.parent_cid:
        parent.disk.close()
        found = "none" if cid is None else f"{cid:08x}"
        raise MalformedArchive(
            f"{name} is a snapshot of {parent_name} when its CID was {descriptor.parent_cid:08x}; now it is {found}",
            hint="The parent was changed after the snapshot was made, or is another disk: copy all files of the disk again.",
        )
    return parent


def _reference(hint: str, root: ImageRoot | None) -> Reference:
    """An absolute hint is of the machine that wrote it, unless it lies under our root."""
    windows = hint.startswith("\\") or hint[1:3] in (":\\", ":/")
    ours = isinstance(root, str) and hint.startswith(root.rstrip("/") + "/")
    return Reference(hint, absolute=windows or (hint.startswith("/") and not ours))


# ── extents ──────────────────────────────────────────────────────────────────────────────────────────────────────────

_FLAT: Final = frozenset({"FLAT", "VMFS"})
_SPARSE: Final = frozenset({"SPARSE", "VMFSSPARSE", "SESPARSE"})


def _open_extents(
    descriptor: Descriptor | None, name: str, opened: _Opened, parent: DiskReader | None, closing: contextlib.ExitStack
) -> list[DiskReader]:
    parts: list[DiskReader] = []
    start = 0
    for line in descriptor.extents if descriptor else ():
        if line.size == 0:
            continue
        part = _open_extent(line, name, opened, None if parent is None else _Section(parent, start, line.size))
        closing.callback(part.close)
        parts.append(part)
        start += line.size
    if not parts:
        raise MalformedArchive(f"{name}: its descriptor names no extents")
    return parts


def _open_extent(line: ExtentLine, name: str, opened: _Opened, parent: DiskReader | None) -> DiskReader:
    if line.kind == ZERO:
        return _Zeros(line.size)
    if line.kind not in _FLAT | _SPARSE:
        raise UnsupportedFormat(
            f"{name} has an extent of type {line.kind}, which is a device of the host that wrote it, not a file",
            hint="Clone the disk on its host into a VMDK of its own, and import that.",
        )
    if line.kind in _FLAT:
        return open_reference(opened.root, name, line.file, line.offset, line.size)[0]
    file, file_name, _ = open_reference(opened.root, name, line.file)
    try:
        return _sparse_disk(file, _read_extent(file, file_name, line, name), file_name, opened, parent)
    except BaseException:
        file.close()
        raise


def _read_extent(file: DiskReader, file_name: str, line: ExtentLine, name: str) -> Sparse:
    """The descriptor gives the extent's part of the disk; its file may have space for more."""
    sparse = read_sparse(file, file_name)
    if sparse.size < line.size:
        raise MalformedArchive(f"{file_name} holds {sparse.size} bytes of {name}, whose descriptor states {line.size}")
    return sparse._replace(size=line.size)


class _Joined:
    """Disks in sequence as one. It owns them, and `others`, which are only closed with it."""

    def __init__(self, parts: Sequence[DiskReader], others: Sequence[DiskReader], name: str) -> None:
        self._parts, self._others, self._name = parts, others, name
        self._ends = list(accumulate(part.size for part in parts))
        self.size = self._ends[-1]
        self.max_readers = min(part.max_readers for part in [*parts, *others])

    def extents(self) -> Iterator[Extent]:
        for shift, part in self.parts(0, self.size):
            for extent in part.extents():
                yield Extent(shift + extent.start, extent.length, extent.zero)

    def places(self) -> Iterator[Place]:
        for shift, part in self.parts(0, self.size):
            for place in _places(part):
                yield place._replace(start=shift + place.start)

    def parts(self, start: int, end: int) -> Iterator[tuple[int, DiskReader]]:
        """The disks that overlap start to end, and where each begins."""
        for number in range(bisect_right(self._ends, start), len(self._parts)):
            part = self._parts[number]
            shift = self._ends[number] - part.size
            if shift >= end:
                return
            yield shift, part

    def read_into(self, offset: int, buffer: memoryview) -> None:
        end = offset + len(buffer)
        if offset < 0 or end > self.size:
            raise DiskReadFailed(f"{self._name}: {len(buffer)} bytes at offset {offset} are outside its {self.size}")
        for shift, part in self.parts(offset, end):
            start, stop = max(offset, shift), min(end, shift + part.size)
            part.read_into(start - shift, buffer[start - offset : stop - offset])

    def close(self) -> None:
        for reader in (*self._parts, *self._others):
            reader.close()


class _Section:
    """The part of a parent under one extent of its child. The parent ends it and owns it."""

    def __init__(self, parent: DiskReader, start: int, length: int) -> None:
        self._parent, self._start = parent, start
        self.size = max(0, min(length, parent.size - start))
        self.max_readers = parent.max_readers

    def extents(self) -> Iterator[Extent]:
        for shift, part in self._parts():
            for extent in part.extents():
                start, end = self._cut(shift + extent.start, extent.length)
                if start < end:
                    yield Extent(start, end - start, extent.zero)

    def places(self) -> Iterator[Place]:
        for shift, part in self._parts():
            for place in _places(part):
                start, end = self._cut(shift + place.start, place.length)
                if start < end:
                    skipped = self._start + start - shift - place.start
                    yield Place(start, end - start, place.descriptor, place.at + skipped)

    def _parts(self) -> Iterator[tuple[int, DiskReader]]:
        """Only the pieces of a split parent that lie here: else a thousand pieces would each search a thousand."""
        parent = self._parent
        return parent.parts(self._start, self._start + self.size) if isinstance(parent, _Joined) else iter([(0, parent)])

    def _cut(self, start: int, length: int) -> tuple[int, int]:
        """Translates a range of the parent to the part of it that lies here, counted from here."""
        return max(start - self._start, 0), min(start + length - self._start, self.size)

    def read_into(self, offset: int, buffer: memoryview) -> None:
        self._parent.read_into(self._start + offset, buffer)

    def close(self) -> None:
        pass


class _Zeros:
    """An extent without a file."""

    max_readers = 64

    def __init__(self, size: int) -> None:
        self.size = size

    def extents(self) -> Iterator[Extent]:
        yield Extent(0, self.size, zero=True)

    def read_into(self, offset: int, buffer: memoryview) -> None:
        fill_zeros(buffer)

    def close(self) -> None:
        pass
