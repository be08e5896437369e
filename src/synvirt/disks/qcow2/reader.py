"""qcow2 images, versions 2 and 3: QEMU's docs/interop/qcow2.txt.

    Qcow2Reader ── Header        header            the first cluster, checked
                ── Mapping       mapping, entries  L1 and L2 tables as runs
                ── Compressed…   compressed        batches of compressed clusters
                ── Bitmap        bitmaps           persistent dirty bitmaps
                ── Chain         named_files       the backing file (any reader) and the external data file

It reads all cluster sizes, zlib and zstd compressed clusters, zero clusters, extended L2 entries, and the active layer of an
image with internal snapshots. It never writes or repairs. It ignores refcounts, as they only say what may be overwritten.
"""

import contextlib
from collections.abc import Iterator
from functools import cached_property
from itertools import islice
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from synvirt.blocks import DiskReader, Extent, ExtentCursor, Place, coalesced, fill_zeros, piece_bytes
from synvirt.disks.entries import WindowCache
from synvirt.disks.formats import ImageOpeners
from synvirt.disks.layers import Layer, check_whole, layer_of
from synvirt.disks.places import FilePlaces
from synvirt.disks.qcow2.bitmaps import Bitmap, bitmaps, dirty_extents, named
from synvirt.disks.qcow2.entries import Kind
from synvirt.disks.qcow2.errors import outside_the_file, read_for_guest
from synvirt.disks.qcow2.header import ENCRYPTIONS, Header, Incompatible, read_header
from synvirt.disks.qcow2.mapping import WINDOWS_KEPT, Mapping, Run
from synvirt.disks.qcow2.named_files import Chain, open_backing_file, open_data_file
from synvirt.disks.raw.holes import Holes
from synvirt.disks.roots import Root
from synvirt.errors import DiskReadFailed, UnsupportedFormat

if TYPE_CHECKING:  # loaded for images that need it
    from synvirt.disks.qcow2.compressed import CompressedClusters

# For a disk's first data: an image may have a million runs without any.
_RUNS_LOOKED_AT = 1000


class Qcow2Reader:
    """The guest's disk in the qcow2 image whose bytes are `over`, which it owns: close() closes it."""

    def __init__(
        self,
        over: DiskReader,
        *,
        root: Root | str | None = None,
        name: str = "",
        images: ImageOpeners = MappingProxyType({}),
        chain: Chain | None = None,
    ) -> None:
        """`root` and `name` are ImageSpec's: the image's path under the import root. `images` opens a backing file of another
        format. `chain` is for images in a chain."""
        chain = chain or Chain(WindowCache(WINDOWS_KEPT), root, name, images=images)
        self._name = chain.name or "the qcow2 image"
        _refuse_streams(over, self._name)
        self.header: Header = read_header(over, self._name)
        chain = chain.within(self.header)
        self._mapping = Mapping(over, self.header, self._name, chain.cache)
        with contextlib.ExitStack() as opened:
            external = open_data_file(chain, self.header)
            if external is not None:
                opened.callback(external.close)
            self._backing = open_backing_file(chain, self.header, _open_in_chain)
            if self._backing is not None:
                opened.callback(self._backing.close)
                _refuse_streams(self._backing, self._name)
            opened.pop_all()
        self._over, self._data = over, external or over
        self._files = [reader for reader in (over, external, self._backing) if reader is not None]

    @property
    def size(self) -> int:
        return self.header.size

    @property
    def max_readers(self) -> int:
        return min(reader.max_readers for reader in self._files)

    @property
    def piece_bytes(self) -> int:
        """0, if the first cluster with data is compressed: so are most of the others then."""
        kinds = (kind for _, _, kind, _ in islice(self._mapping.all_runs(), _RUNS_LOOKED_AT))
        compressed = next((kind for kind in kinds if kind in (Kind.DATA, Kind.COMPRESSED)), None) == Kind.COMPRESSED
        return 0 if compressed else piece_bytes(*self._files)

    def extents(self) -> Iterator[Extent]:
        return coalesced(self._extents())

    def _extents(self) -> Iterator[Extent]:
        backing = self._backing
        cursor = None if backing is None else ExtentCursor(backing.extents())
        for start, end, kind in self._mapping.spans(Holes(self._data)):
            at = start
            if kind == Kind.BACKING and backing is not None and cursor is not None:
                # A backing file may be shorter than the disk: behind its end the disk is zeros.
                at = max(start, min(end, backing.size))
                yield from cursor.between(start, at)
            if at < end:
                yield Extent(at, end - at, zero=kind != Kind.DATA)

    def places(self) -> Iterator[Place]:
        """Plain clusters lie unchanged in the file, and so may parts of the backing file (see `disks.raw.cloning`)."""
        data, backing = FilePlaces(self._data), FilePlaces(self._backing)
        for start, end, kind, host in self._mapping.all_runs():
            if kind == Kind.DATA:
                yield from data.between(host, host + end - start, start)
            elif kind == Kind.BACKING:
                yield from backing.between(start, end, start)

    def bitmaps(self) -> tuple[Bitmap, ...]:
        """The image's dirty bitmaps."""
        return bitmaps(self._over, self.header, self._name)

    def dirty_extents(self, bitmap: str) -> Iterator[Extent]:
        """What was written since the bitmap of that name was made; zeros where `extents()` has them. NotFound, CbtReset."""
        found = named(self.bitmaps(), bitmap, self._name)
        dirty = dirty_extents(self._over, self.header, found, self._name)
        cursor = ExtentCursor(self.extents())
        return coalesced(part for extent in dirty for part in cursor.between(extent.start, extent.end))

    def read_into(self, offset: int, buffer: memoryview) -> None:
        if offset < 0 or offset + len(buffer) > self.size:
            raise DiskReadFailed(f"{self._name}: {len(buffer)} bytes at offset {offset} are outside its {self.size}")
        compressed: list[Run] = []
        for run in self._mapping.runs(offset, len(buffer)):
            start, end, kind, host = run
            into = buffer[start - offset : end - offset]
            match kind:
                case Kind.DATA:
                    self._read_data(host, into, start)
                case Kind.COMPRESSED:
                    compressed.append(run)
                case Kind.BACKING:
                    self._read_backing(start, into)
                case _:
                    fill_zeros(into)
        if compressed:
            self._compressed.read(compressed, offset, buffer)

    @cached_property
    def _compressed(self) -> "CompressedClusters":
        """Made for the first compressed cluster: most images have none, and inflaters take a while to load."""
        from synvirt.disks.qcow2.compressed import CompressedClusters

        return CompressedClusters(self._over, self.header, self._mapping, self._name)

    def _read_data(self, host: int, into: memoryview, guest: int) -> None:
        self._refuse_cut(host, len(into), guest)
        read_for_guest(self._data.read_into, host, into, name=self._name, guest=guest)

    def _refuse_cut(self, host: int, length: int, guest: int) -> None:
        """DiskReadFailed, where the file ends before these bytes of a plain cluster. QEMU reads what is missing as zeros, and
        nobody notices that the file was cut off."""
        if host + length > self._data.size:
            missing = max(host, self._data.size)
            raise outside_the_file(self._name, guest + missing - host, missing, self._data.size)

    def check_whole(self) -> None:
        """DiskReadFailed, where the file, or its backing file, ends before a cluster of the disk. It reads only the tables."""
        for run in self._mapping.all_runs():
            if run.kind == Kind.DATA:
                self._refuse_cut(run.host, run.end - run.start, run.start)
            elif run.kind == Kind.COMPRESSED:
                self._compressed.refuse_cut(run)
        check_whole(self._backing)

    def _read_backing(self, guest: int, into: memoryview) -> None:
        held = 0 if self._backing is None else max(0, min(len(into), self._backing.size - guest))
        if held and self._backing is not None:
            self._backing.read_into(guest, into[:held])
        fill_zeros(into[held:])

    def layer(self) -> Layer:
        header = self.header
        facts = {**facts_of(header), "bitmaps": [_bitmap_facts(bitmap) for bitmap in self.bitmaps()]}
        beneath = layer_of(self._backing, header.backing_file or "")
        return Layer(name=self._name, format="qcow2", size_bytes=self.size, facts=facts, beneath=beneath)

    def close(self) -> None:
        for reader in self._files:
            reader.close()


def facts_of(header: Header) -> dict[str, Any]:
    """The header's facts, for an encrypted image too."""
    facts: dict[str, Any] = {
        "version": header.version,
        "cluster_bytes": header.cluster_size,
        "compression": header.compression,
        "extended_l2": header.extended_l2,
        "dirty": bool(header.incompatible & Incompatible.DIRTY),
        "corrupt": bool(header.incompatible & Incompatible.CORRUPT),
        "internal_snapshots": header.snapshots,
        "encryption": ENCRYPTIONS.get(header.encryption, f"method {header.encryption}") if header.encryption else None,
    }
    if header.data_file is not None:
        facts["data_file"] = header.data_file
    return facts


def _bitmap_facts(bitmap: Bitmap) -> dict[str, Any]:
    return {"name": bitmap.name, "granularity_bytes": bitmap.granularity_bytes, "in_use": bitmap.in_use}


def _refuse_streams(reader: DiskReader, name: str) -> None:
    if reader.max_readers == 1:
        raise UnsupportedFormat(
            f"{name} lies in, or over, a stream that is read from front to back; a qcow2 image is read in any order",
            hint="Unpack the archive first.",
        )


def _open_in_chain(over: DiskReader, chain: Chain) -> DiskReader:
    return Qcow2Reader(over, chain=chain)
