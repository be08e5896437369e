"""Finds images for QEMU's readers that end before their own tables say.

QEMU reads data behind the end of a file as zeros, so an incomplete copy would become a disk with holes, and nothing would show
it. The layouts are those of QEMU's block/parallels.c, block/qcow.c and docs/interop/qed_spec.txt.
"""

import struct
import sys
from array import array
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import chain, count
from typing import Final, Literal

from synvirt.blocks import DiskReader
from synvirt.errors import MalformedArchive

_SECTOR: Final = 512
# magic version heads cylinders tracks entries | sectors in_use data_at flags extension_at; then the table, 4 bytes an entry.
_PARALLELS: Final = struct.Struct("<16sIIIIIQIIIQ")
_PARALLELS_EXTENDED: Final = b"WithouFreSpacExt"
# magic version backing_at backing_length mtime size cluster_bits table_bits padding encryption directory_at; big-endian.
_QCOW: Final = struct.Struct(">4sIQIIQBBHIQ")
_QCOW_COMPRESSED: Final = 1 << 63
_QCOW_CLUSTER_BITS: Final = range(9, 17)
_QCOW_TABLE_BITS: Final = range(6, 14)
# magic cluster_bytes table_clusters header_clusters features compatible_features autoclear_features directory_at size.
_QED: Final = struct.Struct("<4sIIIQQQQQ")
_QED_CLUSTER_MOST, _QED_TABLE_MOST = 64 << 20, 16
# The most of a table in memory at once.
_READ_BYTES: Final = 1 << 20


@dataclass(frozen=True, slots=True)
class _File:
    reader: DiskReader
    name: str

    def read(self, at: int, length: int) -> bytearray:
        self.require(0, at, length)
        content = bytearray(length)
        self.reader.read_into(at, memoryview(content))
        return content

    def numbers(self, at: int, count: int, code: Literal["I", "Q"], order: Literal["little", "big"]) -> Iterator["array[int]"]:
        """`count` numbers of a table at `at`, in parts of 1 MiB."""
        length = count * array(code).itemsize
        self.require(0, at, length)
        for start in range(0, length, _READ_BYTES):
            part = array(code, bytes(self.read(at + start, min(_READ_BYTES, length - start))))
            if order != sys.byteorder:
                part.byteswap()
            yield part

    def require(self, guest: int, at: int, length: int) -> None:
        if at + length > self.reader.size:
            raise MalformedArchive(
                f"{self.name} ends at {self.reader.size}, and what guest offset {guest} reads lies at {at} to {at + length}",
                hint="The file seems to be cut off: copy it again from where it came.",
            )


def require_whole_parallels(image: DiskReader, name: str) -> None:
    """MalformedArchive, where a cluster of the disk lies behind the end of the file."""
    file = _File(image, name)
    magic, _, _, _, tracks, entries, sectors, *_ = _PARALLELS.unpack(file.read(0, _PARALLELS.size))
    if magic not in (b"WithoutFreeSpace", _PARALLELS_EXTENDED):
        return  # QEMU reports what is wrong
    extended = magic == _PARALLELS_EXTENDED
    disk_bytes = (sectors if extended else sectors & 0xFFFF_FFFF) * _SECTOR
    unit, cluster_bytes = (tracks if extended else 1) * _SECTOR, tracks * _SECTOR
    guest = 0
    for table in file.numbers(_PARALLELS.size, entries, "I", "little"):
        for entry in table:
            if entry and guest < disk_bytes:
                file.require(guest, entry * unit, min(cluster_bytes, disk_bytes - guest))
            guest += cluster_bytes


def require_whole_qcow(image: DiskReader, name: str) -> None:
    """The same for version 1 of qcow."""
    file = _File(image, name)
    *_, size, cluster_bits, table_bits, _, _, directory_at = _QCOW.unpack(file.read(0, _QCOW.size))
    if cluster_bits not in _QCOW_CLUSTER_BITS or table_bits not in _QCOW_TABLE_BITS:
        raise MalformedArchive(
            f"{name} has clusters of 2^{cluster_bits} bytes and tables of 2^{table_bits}, which no qcow image has"
        )
    cluster_bytes = 1 << cluster_bits

    def place(entry: int) -> tuple[int, int]:
        if entry & _QCOW_COMPRESSED:
            return entry & ((1 << 63 - cluster_bits) - 1), entry >> 63 - cluster_bits & cluster_bytes - 1
        return entry, cluster_bytes

    _walk(file, _Tables(directory_at, 1 << table_bits, cluster_bytes, size, "big"), place)


def require_whole_qed(image: DiskReader, name: str) -> None:
    """The same for QED."""
    file = _File(image, name)
    _, cluster_bytes, table_clusters, _, _, _, _, directory_at, size = _QED.unpack(file.read(0, _QED.size))
    if not (_QED_CLUSTER_MOST >= cluster_bytes > 0 and 0 < table_clusters <= _QED_TABLE_MOST):
        raise MalformedArchive(f"{name} has clusters of {cluster_bytes} bytes, tables of {table_clusters}; no QED image has")
    entries = table_clusters * cluster_bytes // 8
    _walk(file, _Tables(directory_at, entries, cluster_bytes, size, "little"), lambda entry: (entry, cluster_bytes))


@dataclass(frozen=True, slots=True)
class _Tables:
    """A directory of tables of `entries` clusters each, with 8 bytes per entry."""

    at: int
    entries: int
    cluster_bytes: int
    disk_bytes: int
    order: Literal["little", "big"]


def _walk(file: _File, tables: _Tables, place: Callable[[int], tuple[int, int]]) -> None:
    """`place`: the offset of an entry's cluster, and how much of it is used. No cluster is in the first 16 bytes, a header's: 0
    and 1 mean zeros. Together the tables are no larger than the file: if tables could be shared, a small file would have any
    number of entries to look at."""
    covered = tables.entries * tables.cluster_bytes
    directory = chain.from_iterable(file.numbers(tables.at, -(-tables.disk_bytes // covered), "Q", tables.order))
    left = file.reader.size
    for first, table_at in zip(count(0, covered), directory):
        if not table_at:
            continue
        left -= tables.entries * 8
        if left < 0:
            raise MalformedArchive(
                f"{file.name}: its tables have more entries than a file of {file.reader.size} bytes holds",
                hint="The file seems to be cut off: copy it again from where it came.",
            )
        table = chain.from_iterable(file.numbers(table_at, tables.entries, "Q", tables.order))
        for at, entry in zip(range(first, tables.disk_bytes, tables.cluster_bytes), table, strict=False):
            if entry > 1:
                start, length = place(entry)
                file.require(at, start, min(length, tables.disk_bytes - at))


def require_whole_qcow2(image: DiskReader, name: str) -> None:
    """The same for an encrypted qcow2 image. `Qcow2Reader` reads the others, and checks them itself."""
    from synvirt.disks.entries import WindowCache
    from synvirt.disks.qcow2.entries import Kind
    from synvirt.disks.qcow2.header import read_header
    from synvirt.disks.qcow2.mapping import WINDOWS_KEPT, Mapping

    file = _File(image, name)
    header = read_header(image, name, encrypted_too=True)
    for run in Mapping(image, header, name, WindowCache(WINDOWS_KEPT)).all_runs():
        if run.kind == Kind.DATA:
            file.require(run.start, run.host, run.end - run.start)
