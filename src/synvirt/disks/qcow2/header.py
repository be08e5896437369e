"""The first cluster of a qcow2 image: QEMU's docs/interop/qcow2.txt, sections «Header», «Header extensions».

    0            72 (v2)  104 (v3)  header_length            backing_file_offset         cluster_size
    │ header v2   │ header v3 │ …     │ extensions … end      │ backing file's name        │

Everything is big-endian. Nothing outside the first cluster is read here, except the bounds of the file.
"""

import struct
from collections.abc import Mapping
from types import MappingProxyType
from typing import Final, Literal, NamedTuple

from synvirt.blocks import DiskReader, bytes_of
from synvirt.errors import MalformedArchive, UnsupportedFormat

MAGIC = b"QFI\xfb"
_V2 = struct.Struct(">4sIQIIQIIQQIIQ")
_V3 = struct.Struct(">QQQII")
V2_HEADER_BYTES, V3_HEADER_BYTES = _V2.size, _V2.size + _V3.size
_COMPRESSION_TYPE_AT = V3_HEADER_BYTES

CLUSTER_BITS_MIN, CLUSTER_BITS_MAX = 9, 21
# With extended L2 entries a cluster has 32 subclusters of at least one sector.
_EXTENDED_CLUSTER_BITS_MIN = 14
# QEMU's own limits (block/qcow2.h), so that we open all that it opens: 32 MiB of L1 table, 65536 snapshots, 1023 bytes of name.
L1_BYTES_MAX = 32 << 20
_SNAPSHOTS_MAX = 65536
_BACKING_NAME_MAX = 1023
# Sizes are signed 64-bit in every tool that will use the disk later.
_SIZE_MAX = (1 << 63) - 1
# A first cluster has room for more; known writers make a few.
_EXTENSIONS_MAX = 1024

_FEATURE_NAME = struct.Struct(">BB46s")
_BITMAPS = struct.Struct(">IIQQ")


# Plain numbers: each enumeration would take half a million instructions to make, and looking up its members takes longer.
class _Extension:
    END: Final = 0
    BACKING_FORMAT: Final = 0xE2792ACA
    FEATURE_NAMES: Final = 0x6803F857
    BITMAPS: Final = 0x23852875
    DATA_FILE: Final = 0x44415441


class Incompatible:
    """Bits of incompatible features: a reader that does not know one of them cannot read the image."""

    DIRTY: Final = 1 << 0
    CORRUPT: Final = 1 << 1
    DATA_FILE: Final = 1 << 2
    COMPRESSION_TYPE: Final = 1 << 3
    EXTENDED_L2: Final = 1 << 4
    KNOWN: Final = DIRTY | CORRUPT | DATA_FILE | COMPRESSION_TYPE | EXTENDED_L2


class Autoclear:
    """Bits of autoclear features: a writer that does not know them clears them, so a set one is still true."""

    BITMAPS: Final = 1 << 0
    DATA_FILE_RAW: Final = 1 << 1


COMPRESSIONS: dict[int, Literal["zlib", "zstd"]] = {0: "zlib", 1: "zstd"}
ENCRYPTIONS = {1: "AES", 2: "LUKS"}


class BitmapsExtension(NamedTuple):
    """Where the directory of persistent dirty bitmaps lies."""

    bitmaps: int
    directory_offset: int
    directory_bytes: int


class Header(NamedTuple):
    """The first cluster's fields, checked, so that each can be relied on. Offsets and sizes in bytes."""

    version: int
    size: int
    cluster_bits: int
    encryption: int
    l1_offset: int
    l1_entries: int
    snapshots: int
    header_length: int
    incompatible: int
    autoclear: int
    compression: Literal["zlib", "zstd"]
    backing_file: str | None = None
    backing_format: str | None = None
    data_file: str | None = None
    bitmaps: BitmapsExtension | None = None
    feature_names: Mapping[tuple[int, int], str] = MappingProxyType({})

    @property
    def cluster_size(self) -> int:
        return 1 << self.cluster_bits

    @property
    def extended_l2(self) -> bool:
        return bool(self.incompatible & Incompatible.EXTENDED_L2)

    @property
    def external_data(self) -> bool:
        return bool(self.incompatible & Incompatible.DATA_FILE)

    @property
    def l2_entry_bytes(self) -> int:
        return 16 if self.extended_l2 else 8

    @property
    def l2_entries(self) -> int:
        """Entries of one L2 table, which is one cluster long."""
        return self.cluster_size // self.l2_entry_bytes

    @property
    def l1_entries_needed(self) -> int:
        """Entries of the L1 table that map `size` bytes; further entries have no meaning."""
        return -(-self.size // (self.cluster_size * self.l2_entries))


def read_backing_name(over: DiskReader, name: str) -> str | None:
    """The name of the image's backing file: no more of the file is read. MalformedArchive."""
    if over.size < V2_HEADER_BYTES:
        raise MalformedArchive(f"{name} is not a qcow2 image: it has only {over.size} bytes")
    offset, length = _V2.unpack(bytes_of(over, 0, V2_HEADER_BYTES))[2:4]
    if not 0 < length <= _BACKING_NAME_MAX or not 0 < offset <= over.size - length:
        return None
    return _text(bytes_of(over, offset, length), f"{name}: backing file")


def read_header(over: DiskReader, name: str, *, encrypted_too: bool = False) -> Header:
    """The header of the image in `over`. MalformedArchive or UnsupportedFormat names the field and the error.  `encrypted_too`:
    for a caller that can decrypt the image, or wants to know which files it names.
    """
    if over.size < V2_HEADER_BYTES:
        raise MalformedArchive(f"{name} is not a qcow2 image: it has only {over.size} bytes")
    first = bytes_of(over, 0, min(over.size, 1 << CLUSTER_BITS_MAX))
    magic, version, backing_offset, backing_length, cluster_bits, size, crypt, l1_entries, l1_offset, *_, snapshots, _ = (
        _V2.unpack_from(first)
    )
    if magic != MAGIC:
        raise MalformedArchive(f"{name} is not a qcow2 image: it begins with {magic.hex()}, not {MAGIC.hex()}")
    if version not in (2, 3):
        raise UnsupportedFormat(
            f"{name} is a qcow image of version {version}; versions 2 and 3 are read",
            hint="Convert it first: qemu-img convert -O qcow2 OLD NEW",
        )
    if not CLUSTER_BITS_MIN <= cluster_bits <= CLUSTER_BITS_MAX:
        raise MalformedArchive(
            f"{name}: clusters of 2^{cluster_bits} bytes; 2^{CLUSTER_BITS_MIN} to 2^{CLUSTER_BITS_MAX} exist"
        )
    first = first[: 1 << cluster_bits]
    incompatible, autoclear, header_length, compression = _version_3_fields(first, version, name)
    extensions_end = backing_offset if 0 < backing_offset <= len(first) else len(first)
    found = _Extensions(first[header_length:extensions_end], name)
    _refuse_what_cannot_be_read(incompatible, 0 if encrypted_too else crypt, found.feature_names, name)
    header = Header(
        version=version,
        size=size,
        cluster_bits=cluster_bits,
        encryption=crypt,
        l1_offset=l1_offset,
        l1_entries=l1_entries,
        snapshots=snapshots,
        header_length=header_length,
        incompatible=incompatible,
        autoclear=autoclear & (Autoclear.BITMAPS | Autoclear.DATA_FILE_RAW),
        compression=compression,
        backing_file=_backing_name(first, backing_offset, backing_length, name),
        backing_format=found.backing_format,
        data_file=found.data_file,
        bitmaps=found.bitmaps,
        feature_names=found.feature_names,
    )
    _check_sizes(header, over.size, name)
    return header


def _version_3_fields(first: bytes, version: int, name: str) -> tuple[int, int, int, Literal["zlib", "zstd"]]:
    if version == 2:
        return 0, 0, V2_HEADER_BYTES, "zlib"
    if len(first) < V3_HEADER_BYTES:
        raise MalformedArchive(f"{name}: a header of version 3 has {V3_HEADER_BYTES} bytes, the file {len(first)}")
    incompatible, _, autoclear, refcount_order, header_length = _V3.unpack_from(first, V2_HEADER_BYTES)
    if not V3_HEADER_BYTES <= header_length <= len(first):
        raise MalformedArchive(f"{name}: header length {header_length} is not between {V3_HEADER_BYTES} and {len(first)}")
    if refcount_order > 6:
        raise MalformedArchive(f"{name}: refcounts of 2^{refcount_order} bits; at most 2^6 exist")
    compression_type = first[_COMPRESSION_TYPE_AT] if header_length > _COMPRESSION_TYPE_AT else 0
    if bool(compression_type) != bool(incompatible & Incompatible.COMPRESSION_TYPE):
        raise MalformedArchive(f"{name}: compression type {compression_type} contradicts the header's incompatible features")
    if compression_type not in COMPRESSIONS:
        raise UnsupportedFormat(f"{name}: compression type {compression_type} is unknown; known are {COMPRESSIONS}")
    return incompatible, autoclear, header_length, COMPRESSIONS[compression_type]


class _Extensions:
    """The header extensions that change how the image is read; unknown ones are skipped, as the format demands."""

    def __init__(self, area: bytes, name: str) -> None:
        self.backing_format: str | None = None
        self.data_file: str | None = None
        self.bitmaps: BitmapsExtension | None = None
        self.feature_names: dict[tuple[int, int], str] = {}
        at = 0
        for _ in range(_EXTENSIONS_MAX):
            if at + 8 > len(area):
                return
            kind, length = struct.unpack_from(">II", area, at)
            if kind == _Extension.END:
                return
            at += 8
            if length > len(area) - at:
                raise MalformedArchive(f"{name}: header extension {kind:#x} of {length} bytes does not fit the header")
            self._take(kind, area[at : at + length], name)
            at += -(-length // 8) * 8
        raise MalformedArchive(f"{name}: more than {_EXTENSIONS_MAX} header extensions")

    def _take(self, kind: int, data: bytes, name: str) -> None:
        match kind:
            case _Extension.BACKING_FORMAT:
                self.backing_format = _text(data, f"{name}: backing format")
            case _Extension.DATA_FILE:
                self.data_file = _text(data, f"{name}: data file")
            case _Extension.FEATURE_NAMES:
                # If this table is cut off, only names are lost.
                for feature, bit, label in _FEATURE_NAME.iter_unpack(data[: len(data) // 48 * 48]):
                    self.feature_names[feature, bit] = label.rstrip(b"\0").decode("ascii", "replace")
            case _Extension.BITMAPS:
                if len(data) < _BITMAPS.size:
                    raise MalformedArchive(f"{name}: the bitmaps extension has {len(data)} bytes, not {_BITMAPS.size}")
                count, _, directory_bytes, directory_offset = _BITMAPS.unpack_from(data)
                self.bitmaps = BitmapsExtension(count, directory_offset, directory_bytes)
            case _:
                pass


def _refuse_what_cannot_be_read(incompatible: int, crypt: int, names: dict[tuple[int, int], str], name: str) -> None:
    unknown = incompatible & ~Incompatible.KNOWN
    if unknown:
        labels = [names.get((0, bit), f"bit {bit}") for bit in range(64) if unknown >> bit & 1]
        raise UnsupportedFormat(
            f"{name} uses incompatible features that are not known here: {', '.join(labels)}",
            hint="Convert it with the program that made it: qemu-img convert -O qcow2 OLD NEW",
        )
    if incompatible & Incompatible.CORRUPT:
        raise MalformedArchive(
            f"{name} is marked corrupt by the program that wrote it last",
            hint="Repair a copy of it first: qemu-img check -r all",
        )
    if crypt:
        raise UnsupportedFormat(
            f"{name} is encrypted ({ENCRYPTIONS.get(crypt, f'method {crypt}')})",
            hint="Give its passphrase by a key file, or decrypt it first with qemu-img convert.",
        )


def _backing_name(first: bytes, offset: int, length: int, name: str) -> str | None:
    # An empty name is no backing file: the format allows the offset to stay.
    if not offset or not length:
        return None
    if length > _BACKING_NAME_MAX or offset + length > len(first):
        raise MalformedArchive(f"{name}: the backing file's name ({length} bytes at {offset}) does not fit the header")
    return _text(first[offset : offset + length], f"{name}: backing file")


def _check_sizes(header: Header, file_size: int, name: str) -> None:
    if header.size > _SIZE_MAX:
        raise MalformedArchive(f"{name}: a virtual size of {header.size} bytes")
    if header.extended_l2 and header.cluster_bits < _EXTENDED_CLUSTER_BITS_MIN:
        raise MalformedArchive(f"{name}: extended L2 entries need clusters of 16 KiB, these have {header.cluster_size} bytes")
    if header.snapshots > _SNAPSHOTS_MAX:
        raise MalformedArchive(f"{name}: {header.snapshots} snapshots; at most {_SNAPSHOTS_MAX} can be")
    if header.l1_entries * 8 > L1_BYTES_MAX:
        raise MalformedArchive(f"{name}: an L1 table of {header.l1_entries} entries is over the limit of {L1_BYTES_MAX // 8}")
    if header.l1_entries < header.l1_entries_needed:
        raise MalformedArchive(
            f"{name}: an L1 table of {header.l1_entries} entries cannot map {header.size} bytes,"
            f" which need {header.l1_entries_needed}"
        )
    if header.l1_entries and (
        header.l1_offset % header.cluster_size
        or not header.l1_offset
        or header.l1_offset + header.l1_entries_needed * 8 > file_size
    ):
        raise MalformedArchive(
            f"{name}: the L1 table ({header.l1_entries} entries at {header.l1_offset}) is not on a cluster's boundary within"
            f" the file's {file_size} bytes"
        )
    if header.external_data and header.data_file is None:
        raise MalformedArchive(f"{name} keeps its data in another file and does not name it")


def _text(data: bytes, what: str) -> str:
    """A name in the file system's form; bytes that are no UTF-8 become surrogates."""
    if b"\0" in data:
        raise MalformedArchive(f"{what}: {data[:80]!r} is not a name")
    return data.decode("utf-8", "surrogateescape")
