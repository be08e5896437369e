"""The headers of VMware's three sparse extents, checked and brought to one form.

- hosted, «KDMV»: VMware «Virtual Disk Format 1.1», sections «Hosted Sparse Extents» and «Stream-Optimized Compressed Sparse
  Extents»; the form of Workstation and of every OVA.
- COWD: the same document, section «ESX Server Sparse Extents»; vmfsSparse, snapshots of disks up to 2 TiB.
- seSparse: VMware publishes no description; the facts are those of QEMU's reader. Snapshots from 2 TiB, and all on VMFS 6.

All numbers are little-endian, all addresses in sectors of 512 bytes:

    header ─▶ grain directory ─▶ grain table ─▶ grain, or nothing here, or zeros
"""

import struct
from typing import Final, Literal, NamedTuple

from synvirt.blocks import DiskReader
from synvirt.errors import MalformedArchive, UnsupportedFormat
from synvirt.sizes import MIB, TIB

SECTOR: Final = 512

# VMware's largest disk has 62 TiB.
SIZE_MAX: Final = 64 * TIB
# VMware writes grains of 64 KiB (hosted), 4 KiB (seSparse), 512 bytes to 64 KiB (COWD). Each thread inflates a compressed grain
# into memory, so a header may not choose its size freely.
GRAIN_BYTES_MAX: Final = 16 * MIB
COMPRESSED_GRAIN_BYTES_MAX: Final = MIB
# The directory is kept in memory, 4 bytes per entry: 64 TiB of seSparse have 4 Mi tables, hosted ones half as many.
TABLES_MAX: Final = 4 << 20
# VMware's embedded descriptor has 20 sectors.
DESCRIPTOR_BYTES_MAX: Final = MIB

Kind = Literal["hosted", "cowd", "sesparse"]
# The first bytes of each.
MAGICS: Final = frozenset({b"KDMV", b"COWD", b"\xbe\xba\xfe\xca"})


class Sparse(NamedTuple):
    """A sparse extent of `size` bytes in grains of `grain_bytes`, found through tables of `table_entries`. All in bytes.

    `directory_at` None: a compressed stream that should have its directory at its end and does not; its markers give its
    grains.
    `descriptor`: (offset, length) of the text in a hosted extent; `overhead`: the part before its first grain.
    `tables_at`, `grains_at`: the origins for seSparse's tables and grains; elsewhere both are 0.
    """

    kind: Kind
    size: int
    grain_bytes: int
    table_entries: int
    directory_at: int | None
    compressed: bool = False
    zeroed_grains: bool = False
    overhead: int = 0
    descriptor: tuple[int, int] = (0, 0)
    tables_at: int = 0
    grains_at: int = 0

    @property
    def entry(self) -> Literal["I", "Q"]:
        """The type of an entry of the directory and of a table, as `array` calls it."""
        return "Q" if self.kind == "sesparse" else "I"

    @property
    def entry_bytes(self) -> int:
        return 8 if self.kind == "sesparse" else 4

    @property
    def grains(self) -> int:
        return -(-self.size // self.grain_bytes)

    @property
    def tables(self) -> int:
        return -(-self.grains // self.table_entries)

    @property
    def directory_bytes(self) -> int:
        return self.tables * self.entry_bytes

    @property
    def table_bytes(self) -> int:
        return self.table_entries * self.entry_bytes


def read_sparse(over: DiskReader, name: str) -> Sparse:
    """The extent of the header in the file's first sector. MalformedArchive, UnsupportedFormat."""
    head = read_at(over, 0, SECTOR, name, "header")
    match bytes(head[:4]):
        case b"KDMV":
            return _read_hosted(over, head, name)
        case b"COWD":
            return _checked(_cowd(head, name), over.size, name)
        case _ if _SE_CONSTANT.unpack_from(head)[0] == _SE_MAGIC:
            return _checked(_read_se_sparse(over, head, name), over.size, name)
        case _:
            raise MalformedArchive(f"{name}: its first bytes are those of no sparse VMDK extent")


def stream_header(head: memoryview, name: str) -> Sparse:
    """The header of a stream from front to back: `head` is its first sector, and its length is unknown.

    MalformedArchive; UnsupportedFormat, where the header is not that of such a stream."""
    if bytes(head[:4]) != b"KDMV":
        raise MalformedArchive(f"{name}: its first bytes are those of no stream-optimized VMDK")
    sparse = _hosted(bytearray(head), _LENGTH_UNKNOWN, name)._replace(directory_at=None)
    if not sparse.compressed:
        raise UnsupportedFormat(f"{name} is a sparse VMDK that is not compressed, so no stream")
    return _checked(sparse, _LENGTH_UNKNOWN, name)


def read_at(over: DiskReader, offset: int, length: int, name: str, what: str) -> bytearray:
    """`length` bytes of the file. MalformedArchive, where it does not have them."""
    if offset < 0 or offset + length > over.size:
        raise cut_off(name, what, offset, offset + length, over.size)
    data = bytearray(length)
    over.read_into(offset, memoryview(data))
    return data


def cut_off(name: str, what: str, start: int, end: int, file_bytes: int) -> MalformedArchive:
    """The error for a file that ends before `what` does. Offsets in bytes."""
    return MalformedArchive(
        f"{name}: its {what} lies at {start} to {end}, the file ends at {file_bytes}",
        hint="The file seems to be cut off: compare its size with the original's.",
    )


def _checked(sparse: Sparse, file_bytes: int, name: str) -> Sparse:
    """Checks sizes against the limits, and tables against the file."""
    if not 0 < sparse.size <= SIZE_MAX:
        raise MalformedArchive(f"{name}: a disk of {sparse.size} bytes; VMware's have at most 62 TiB")
    if not 0 < sparse.grain_bytes <= (COMPRESSED_GRAIN_BYTES_MAX if sparse.compressed else GRAIN_BYTES_MAX):
        raise MalformedArchive(f"{name}: grains of {sparse.grain_bytes} bytes; VMware's have 64 KiB")
    if sparse.tables > TABLES_MAX:
        raise MalformedArchive(f"{name}: {sparse.tables} grain tables; the largest disk needs {TABLES_MAX}")
    if sparse.overhead > file_bytes:
        raise cut_off(name, "metadata", 0, sparse.overhead, file_bytes)
    for what, begin in (("grain tables", sparse.tables_at), ("grains", sparse.grains_at)):
        if begin > file_bytes:
            raise cut_off(name, what, begin, begin, file_bytes)
    at = sparse.directory_at
    if at is None:
        if not sparse.compressed:
            raise MalformedArchive(f"{name}: it does not say where its grain directory is")
    elif not SECTOR <= at <= file_bytes - sparse.directory_bytes:
        raise cut_off(name, "grain directory", at, at + sparse.directory_bytes, file_bytes)
    return sparse


# ── hosted ───────────────────────────────────────────────────────────────────────────────────────────────────────────

# magic version flags | capacity grain_size descriptor_offset descriptor_size | entries_per_table | redundant_directory
# directory overhead | unclean_shutdown line_ends compression
_HOSTED = struct.Struct("<4sII4QI3QB4sH")
_DIRECTORY_AT_END: Final = 0xFFFF_FFFF_FFFF_FFFF
_HAS_REDUNDANT_TABLES, _HAS_ZEROED_GRAINS, _HAS_MARKERS = 1 << 1, 1 << 2, 1 << 17
_DEFLATE: Final = 1
# Longer than any file: for a stream that is still coming.
_LENGTH_UNKNOWN: Final = 1 << 62
# "\n", " ", "\r\n": in every header, to show a transfer as text. Some writers omit them.
_LINE_ENDS: Final = (b"\n \r\n", bytes(4))
# How many zeros after the end of a stream count as padding.
_PADDING_BYTES_MAX: Final = 64 << 10


class Marker:
    """A marker of a stream with `size` 0: (value: u64, size: u32, type: u32), a sector."""

    END, TABLE, DIRECTORY, FOOTER = range(4)


# A marker that is not a grain's: (sectors that follow: u64, 0: u32, type: u32).
MARKER = struct.Struct("<QII")
# A compressed grain's record: (first sector of the grain: u64, length of the data: u32), the data.
RECORD = struct.Struct("<QI")


def record_bytes_max(grain_bytes: int) -> int:
    """The largest size of a compressed grain: deflate's worst coding of a byte has 9 bits (RFC 1951, 3.2.6)."""
    return RECORD.size + grain_bytes + grain_bytes // 8 + SECTOR


def _read_hosted(over: DiskReader, head: bytearray, name: str) -> Sparse:
    at_end = _HOSTED.unpack_from(head)[9] == _DIRECTORY_AT_END
    footer = _footer(over, name) if at_end else None
    sparse = _hosted(footer or head, over.size, name)
    if at_end and footer is None:  # the markers show whether the stream is complete
        sparse = sparse._replace(directory_at=None)
    # No size: only a descriptor in the form of a sparse extent.
    return sparse if sparse.size == 0 and sparse.descriptor[0] else _checked(sparse, over.size, name)


def _footer(over: DiskReader, name: str) -> bytearray | None:
    """The header's final form: a stream's last sector but one. Before it is its marker, after it the end marker, all zeros."""
    end = over.size // SECTOR * SECTOR
    start = max(end - _PADDING_BYTES_MAX, 0)
    tail = read_at(over, start, end - start, name, "footer")
    at = (len(tail.rstrip(b"\0")) - 1) // SECTOR * SECTOR
    if not SECTOR <= at <= len(tail) - 2 * SECTOR or tail[at : at + 4] != b"KDMV":
        return None
    _, size, marker = MARKER.unpack_from(tail, at - SECTOR)
    return tail[at : at + SECTOR] if (size, marker) == (0, Marker.FOOTER) else None


def _hosted(head: bytearray, file_bytes: int, name: str) -> Sparse:
    (
        _,
        version,
        flags,
        capacity,
        grain,
        text_at,
        text_length,
        entries,
        redundant,
        directory,
        overhead,
        _,
        line_ends,
        method,
    ) = _HOSTED.unpack_from(head)
    if not 1 <= version <= 3:
        raise UnsupportedFormat(f"{name} is a VMDK of version {version}; known are 1 to 3")
    if line_ends not in _LINE_ENDS:
        raise MalformedArchive(
            f"{name}: its line ends were changed, so it was transferred as text", hint="Transfer the file again, as binary."
        )
    if method not in (0, _DEFLATE):
        raise UnsupportedFormat(f"{name} is compressed by the unknown method {method}")
    if method == _DEFLATE and not flags & _HAS_MARKERS:
        raise UnsupportedFormat(f"{name} has compressed grains without markers, which VMware never writes")
    if not 1 <= entries <= 512:
        raise MalformedArchive(f"{name}: grain tables of {entries} entries; VMware's have 512")
    sparse = Sparse(
        "hosted",
        size=capacity * SECTOR,
        grain_bytes=grain * SECTOR,
        table_entries=entries,
        directory_at=None,
        compressed=method == _DEFLATE,
        zeroed_grains=bool(flags & _HAS_ZEROED_GRAINS),
        overhead=overhead * SECTOR,
        descriptor=(text_at * SECTOR, text_length * SECTOR),
    )
    if capacity == 0 or grain == 0:
        return sparse
    # The redundant directory is used when the first is damaged.
    candidates = [directory, redundant] if flags & _HAS_REDUNDANT_TABLES else [directory]
    inside = (at * SECTOR for at in candidates if 0 < at * SECTOR <= file_bytes - sparse.directory_bytes)
    return sparse._replace(directory_at=next(inside, directory * SECTOR))


# ── COWD ─────────────────────────────────────────────────────────────────────────────────────────────────────────────

# magic version flags sectors grain_size directory directory_entries
_COWD = struct.Struct("<4sIIIIII")
_COWD_TABLE_ENTRIES: Final = 4096


def _cowd(head: bytearray, name: str) -> Sparse:
    _, version, _, sectors, grain, directory, entries = _COWD.unpack_from(head)
    if version != 1:
        raise UnsupportedFormat(f"{name} is a COWD extent of version {version}; known is 1")
    sparse = Sparse("cowd", sectors * SECTOR, grain * SECTOR, _COWD_TABLE_ENTRIES, directory * SECTOR)
    if grain and entries < sparse.tables:
        raise MalformedArchive(f"{name}: a grain directory of {entries} entries; {sparse.tables} are needed")
    return sparse


# ── seSparse ─────────────────────────────────────────────────────────────────────────────────────────────────────────

# magic version capacity grain_size table_size flags, reserved; then (offset, size) of: volatile header, journal header,
# journal, grain directory, grain tables, free bitmap, back map, grains
_SE_CONSTANT = struct.Struct("<6Q32x16Q")
# magic free_table_number next_transaction replay_journal
_SE_VOLATILE = struct.Struct("<4Q")
_SE_MAGIC, _SE_VOLATILE_MAGIC, _SE_VERSION = 0xCAFEBABE, 0xCAFECAFE, 0x2_0000_0001
_SE_GRAIN_SECTORS, _SE_TABLE_SECTORS = 8, 64


def _read_se_sparse(over: DiskReader, head: bytearray, name: str) -> Sparse:
    _, version, capacity, grain, table, flags, *areas = _SE_CONSTANT.unpack_from(head)
    if (version, grain, table, flags) != (_SE_VERSION, _SE_GRAIN_SECTORS, _SE_TABLE_SECTORS, 0):
        raise UnsupportedFormat(
            f"{name} is a seSparse extent of version {version:#x}, flags {flags:#x}, grains of {grain} and tables of {table}"
            f" sectors; known are {_SE_VERSION:#x}, 0, {_SE_GRAIN_SECTORS} and {_SE_TABLE_SECTORS}"
        )
    volatile_at, directory_at, directory_length, tables_at, grains_at = (areas[at] for at in (0, 6, 7, 8, 14))
    volatile = read_at(over, volatile_at * SECTOR, SECTOR, name, "volatile header")
    magic, _, _, replay = _SE_VOLATILE.unpack_from(volatile)
    if magic != _SE_VOLATILE_MAGIC:
        raise MalformedArchive(f"{name}: no volatile header at {volatile_at * SECTOR}")
    if replay:
        raise UnsupportedFormat(
            f"{name} was not closed cleanly: its journal must be replayed first",
            hint="Start and stop the machine on ESXi, or consolidate its snapshots, then export it again.",
        )
    sparse = Sparse(
        "sesparse",
        size=capacity * SECTOR,
        grain_bytes=_SE_GRAIN_SECTORS * SECTOR,
        table_entries=_SE_TABLE_SECTORS * SECTOR // 8,
        directory_at=directory_at * SECTOR,
        tables_at=tables_at * SECTOR,
        grains_at=grains_at * SECTOR,
    )
    if directory_length * SECTOR < sparse.directory_bytes:
        raise MalformedArchive(
            f"{name}: a grain directory of {directory_length * SECTOR} bytes; {sparse.directory_bytes} are needed"
        )
    return sparse
