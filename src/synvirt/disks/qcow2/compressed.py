"""Compressed clusters of a qcow2 image: QEMU's docs/interop/qcow2.txt, section «Compressed Clusters Descriptor».

A descriptor has the first compressed byte (at any offset) and the number of sectors that they touch; what follows the stream in
the last sector belongs to the next cluster. So only the inflater finds a stream's end, and must stop by itself.
"""

import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Literal, NamedTuple

from synvirt.blocks import DiskReader, new_buffer
from synvirt.disks.packed import Damaged
from synvirt.disks.qcow2.errors import outside_the_file, read_for_guest, unreadable
from synvirt.disks.qcow2.header import Header

_SECTOR = 512
# Compressed clusters are read in batches: those of one request are neighbours unless the image was rewritten. Larger batches
# would save no time, and each thread keeps the memory of one.
_BATCH_BYTES = 1 << 20
# Reading over a gap costs less than another call.
_GAP_BYTES = 64 << 10

# (compressed bytes and what follows them, a cluster to fill) → how many bytes were filled; Damaged. Nothing is written past the
# cluster, so this limits the cost of any hostile stream.
Inflate = Callable[[memoryview, memoryview], int]


class Wanted(NamedTuple):
    """A compressed cluster and the target of its bytes: from `skip` on, as many as fit `into`."""

    host: int
    length: int
    guest: int
    skip: int
    into: memoryview


class _Descriptor(NamedTuple):
    """How a descriptor's 62 bits are split; it depends only on the cluster size."""

    offset_bits: int

    def split(self, entry: int) -> tuple[int, int]:
        """(offset, length): up to the end of the last sector that the stream touches."""
        offset = entry & ((1 << self.offset_bits) - 1)
        sectors = (entry >> self.offset_bits) + 1
        return offset, sectors * _SECTOR - offset % _SECTOR


class CompressedClusters:
    """Reads and inflates, in any number of threads at once, each with its own buffer and without the interpreter's lock."""

    def __init__(self, over: DiskReader, header: Header, name: str) -> None:
        self._over, self._name = over, name
        self._cluster_size = header.cluster_size
        self._descriptor = _Descriptor(62 - (header.cluster_bits - 8))
        self._decompress = _DECOMPRESSORS[header.compression]()
        self._own = threading.local()

    def refuse_cut(self, entry: int, guest: int) -> None:
        """DiskReadFailed, where the file ends before the stream of that L2 entry. The last one need not fill its sector."""
        offset, length = self._descriptor.split(entry)
        if offset + length >= self._over.size + _SECTOR:
            raise outside_the_file(self._name, guest, max(offset, self._over.size), self._over.size)

    def wanted(self, entry: int, guest: int, skip: int, into: memoryview) -> Wanted:
        """`entry`: the L2 entry without its flags; `guest`: the guest offset of the first wanted byte, for errors."""
        offset, length = self._descriptor.split(entry)
        if offset >= self._over.size:
            raise outside_the_file(self._name, guest, offset, self._over.size)
        # The last stream of a file need not fill its sector.
        return Wanted(offset, min(length, self._over.size - offset), guest, skip, into)

    def read(self, clusters: Sequence[Wanted]) -> None:
        """Reads and inflates these clusters into their places. DiskReadFailed."""
        for batch in _batches(sorted(clusters, key=_host)):
            first, last = batch[0].host, max(cluster.host + cluster.length for cluster in batch)
            view = self._buffer("batch", max(last - first, _BATCH_BYTES))[: last - first]
            read_for_guest(self._over.read_into, first, view, name=self._name, guest=batch[0].guest)
            for host, length, guest, skip, into in batch:
                self._inflate(view[host - first : host - first + length], guest, skip, into)

    def _inflate(self, stream: memoryview, guest: int, skip: int, into: memoryview) -> None:
        # For a cluster at the edge of the range, only a part is wanted.
        whole = into if len(into) == self._cluster_size else self._buffer("cluster", self._cluster_size)
        try:
            filled = self._decompress(stream, whole)
        except Damaged as error:
            raise unreadable(self._name, guest, f"its compressed cluster is damaged ({error})") from error
        if filled < skip + len(into):
            cause = f"its compressed cluster holds {filled} bytes, not {self._cluster_size}"
            raise unreadable(self._name, guest, cause)
        if whole is not into:
            into[:] = whole[skip : skip + len(into)]

    def _buffer(self, use: str, length: int) -> memoryview:
        """A buffer of this thread, which is kept: new memory for each batch would cost as much as reading it."""
        held: memoryview | None = getattr(self._own, use, None)
        if held is None or len(held) < length:
            held = new_buffer(length)
            setattr(self._own, use, held)
        return held[:length]


def _host(cluster: Wanted) -> int:
    return cluster.host


def _batches(clusters: Sequence[Wanted]) -> Iterator[list[Wanted]]:
    """Ascending clusters in groups that one call reads; a group spans at most _BATCH_BYTES, or is one cluster."""
    batch: list[Wanted] = []
    end = 0
    for cluster in clusters:
        cluster_end = cluster.host + cluster.length
        if batch and (cluster.host > end + _GAP_BYTES or cluster_end > batch[0].host + _BATCH_BYTES):
            yield batch
            batch = []
        batch.append(cluster)
        end = max(end, cluster_end)
    if batch:
        yield batch


def _zlib() -> Inflate:
    from synvirt.disks.packed.inflate import inflate_raw

    return inflate_raw


def _zstd() -> Inflate:
    from synvirt.disks.packed.zstd import decompress

    return decompress


# An image needs one of them, and each takes a while to load.
_DECOMPRESSORS: dict[Literal["zlib", "zstd"], Callable[[], Inflate]] = {"zlib": _zlib, "zstd": _zstd}
