"""Compressed clusters of a qcow2 image: QEMU's docs/interop/qcow2.txt, section «Compressed Clusters Descriptor».

A descriptor has the first compressed byte (at any offset) and the number of sectors that they touch; what follows the stream in
the last sector belongs to the next cluster. So only the inflater finds a stream's end, and must stop by itself.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Final, Literal, TypeAlias

from synvirt.blocks import DiskReader
from synvirt.disks.packed import Damaged
from synvirt.disks.packed.batches import Batches, Each
from synvirt.disks.qcow2.entries import DESCRIPTOR_MASK
from synvirt.disks.qcow2.errors import outside_the_file, read_for_guest, unreadable
from synvirt.disks.qcow2.header import Header
from synvirt.disks.qcow2.mapping import Mapping, Run

_SECTOR: Final = 512
# Compressed clusters are read in batches: those of one request are neighbours unless the image was rewritten. Larger batches
# would save no time, and each thread keeps the memory of one.
_BATCH_BYTES: Final = 1 << 20
# Reading over a gap costs less than another call.
_GAP_BYTES: Final = 64 << 10

# (host, length, guest): where a stream begins in the file, up to where it may reach, and its cluster's offset in the disk. A
# plain tuple, as a disk has millions.
_Cluster: TypeAlias = tuple[int, int, int]


class CompressedClusters:
    """Reads and inflates, in any number of threads at once, each with its own buffer and without the interpreter's lock."""

    def __init__(self, over: DiskReader, header: Header, mapping: Mapping, name: str) -> None:
        self._over, self._mapping, self._name = over, mapping, name
        self._cluster_size = header.cluster_size
        # How a descriptor's 62 bits are split depends only on the cluster size.
        self._offset_bits = 62 - (header.cluster_bits - 8)
        self._unpacking = Batches(_UNPACKERS[header.compression]())

    def refuse_cut(self, run: Run) -> None:
        """DiskReadFailed, where the file ends before the stream of one of the run's clusters. The last one need not fill its
        sector."""
        for host, length, guest in self._clusters(run):
            if host + length >= self._over.size + _SECTOR:
                raise outside_the_file(self._name, guest, max(host, self._over.size), self._over.size)

    def read(self, runs: Sequence[Run], offset: int, buffer: memoryview) -> None:
        """Reads and inflates these runs into their places of `buffer`, which begins at `offset` of the disk. DiskReadFailed."""
        clusters = [cluster for run in runs for cluster in self._clusters(run)]
        clusters.sort()
        for batch in _batches(clusters):
            self._read_batch(batch, offset, buffer)

    def _clusters(self, run: Run) -> Iterator[_Cluster]:
        """The clusters of a run, as long as their descriptors say."""
        entries, guest = self._mapping.clusters(run)
        offset_bits, offset_mask = self._offset_bits, (1 << self._offset_bits) - 1
        for entry in entries:
            host = entry & offset_mask
            sectors = ((entry & DESCRIPTOR_MASK) >> offset_bits) + 1
            yield host, sectors * _SECTOR - host % _SECTOR, guest
            guest += self._cluster_size

    def _read_batch(self, batch: Sequence[_Cluster], offset: int, buffer: memoryview) -> None:
        file_end, first, last = self._over.size, batch[0][0], max(host + length for host, length, _ in batch)
        if last > file_end:
            for host, _, guest in batch:
                if host >= file_end:
                    raise outside_the_file(self._name, guest, host, file_end)
            last = file_end  # the last stream of a file need not fill its sector
        packed = self._unpacking.buffer("packed", max(last - first, _BATCH_BYTES))[: last - first]
        read_for_guest(self._over.read_into, first, packed, name=self._name, guest=batch[0][2])
        size = self._cluster_size
        streams = [(host - first, min(length, last - host), guest - offset, size) for host, length, guest in batch]
        try:
            self._unpacking.unpack(packed, streams, buffer)
        except Damaged as error:
            raise unreadable(self._name, offset + error.at, f"its compressed cluster is damaged: {error}") from error


def _batches(clusters: Sequence[_Cluster]) -> Iterator[Sequence[_Cluster]]:
    """Ascending clusters in groups that one call reads; a group spans at most _BATCH_BYTES, or is one cluster."""
    begun, start, end = 0, 0, 0
    for number, (host, length, _) in enumerate(clusters):
        if number > begun and (host > end + _GAP_BYTES or host + length > start + _BATCH_BYTES):
            yield clusters[begun:number]
            begun = number
        if number == begun:
            start = host
        end = max(end, host + length)
    if clusters:
        yield clusters[begun:]


def _zlib() -> Each:
    from synvirt.disks.packed.inflate import inflate_each_raw

    return inflate_each_raw


def _zstd() -> Each:
    from synvirt.disks.packed.zstd import decompress_each

    return decompress_each


# An image needs one of them, and each takes a while to load.
_UNPACKERS: dict[Literal["zlib", "zstd"], Callable[[], Each]] = {"zlib": _zlib, "zstd": _zstd}
