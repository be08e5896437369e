"""The head of a VHDX file: [MS-VHDX] sections 2.2 (header section) and 2.6 (metadata region).

    header 1, header 2 ─▶ Header        the log, and the identity of the data
    region table       ─▶ Regions       where the BAT and the metadata lie
    metadata table     ─▶ Metadata      sizes, and how the parent is found

All results have been checked, so that each field can be relied on. Errors are MalformedArchive; valid but unknown parts are
UnsupportedFormat.
"""

import struct
from itertools import pairwise
from typing import Final, NamedTuple

import google_crc32c

from synvirt.blocks import DiskReader, bytes_of
from synvirt.disks.guids import guid_le
from synvirt.errors import MalformedArchive, UnsupportedFormat
from synvirt.sizes import KIB, MIB, TIB

FILE_SIGNATURE: Final = b"vhdxfile"
# Section 2.2: five structures of 64 KiB, then nothing before 1 MiB.
HEADER_SECTION_BYTES: Final = MIB
_HEADERS_AT: Final = (64 * KIB, 128 * KIB)
_REGION_TABLES_AT: Final = (192 * KIB, 256 * KIB)
_HEADER_BYTES, _TABLE_BYTES = 4 * KIB, 64 * KIB

_HEADER = struct.Struct("<4sIQ16s16s16sHHIQ")
_REGION_TABLE = struct.Struct("<4sIII")
_REGION = struct.Struct("<16sQII")
_METADATA_TABLE = struct.Struct("<8sHH20x")
_ITEM = struct.Struct("<16sIIII")
_LOCATOR = struct.Struct("<16sHH")
_LOCATOR_ENTRY = struct.Struct("<IIHH")

_ENTRIES_MAX: Final = 2047
_ITEM_BYTES_MAX: Final = MIB
_BLOCK_BYTES_MIN, _BLOCK_BYTES_MAX = MIB, 256 * MIB
_DISK_BYTES_MAX: Final = 64 * TIB
_SECTORS: Final = (512, 4096)
# A locator has five known keys (section 2.6.2.6.3); other makers may add some.
_LOCATOR_ENTRIES_MAX: Final = 64

_REGION_REQUIRED: Final = 1
_ITEM_REQUIRED: Final = 4
_LEAVE_BLOCKS_ALLOCATED, _HAS_PARENT = 1, 2

_BAT_REGION: Final = "2dc27766-f623-4200-9d64-115e9bfd4a08"
_METADATA_REGION: Final = "8b7ca206-4790-4b9a-b8fe-575f050f886e"
_FILE_PARAMETERS: Final = "caa16737-fa36-4d43-b3b6-33f0aa44e76b"
_DISK_SIZE: Final = "2fa54224-cd1b-4876-b211-5dbed83bf4b8"
_DISK_ID: Final = "beca12ab-b2e6-4523-93ef-c309e000c746"
_LOGICAL_SECTOR: Final = "8141bf1d-a96f-4709-ba47-f233a8faab5f"
_PHYSICAL_SECTOR: Final = "cda348c7-445d-4471-9cc9-e9885251c556"
_PARENT_LOCATOR: Final = "a8d35f2d-b30b-454d-abf7-d3d84834ab0c"
_VHDX_LOCATOR: Final = "b04aefb7-d19e-4a81-b789-25b8e9445913"
# Section 2.6.2: the items that every image has, and their lengths.
_ITEM_LENGTHS: Final = {_FILE_PARAMETERS: 8, _DISK_SIZE: 8, _DISK_ID: 16, _LOGICAL_SECTOR: 4, _PHYSICAL_SECTOR: 4}

DAMAGED: Final = "The file is damaged or cut off: copy it again from where it came, or open it once on its host."


class Region(NamedTuple):
    """Bytes `start` to `end` of the file, and their purpose."""

    start: int
    end: int
    what: str


class Header(NamedTuple):
    """The current header. `log_guid` None: there is nothing to replay."""

    sequence: int
    data_write_guid: str
    log_guid: bytes | None
    log: Region


class Regions(NamedTuple):
    """The places of the two regions that every image has; `others` are unknown optional ones."""

    bat: Region
    metadata: Region
    others: tuple[Region, ...] = ()


class Metadata(NamedTuple):
    """Sizes in bytes. `parent`: the keys and values of the parent locator, None where there is no parent."""

    size: int
    block_bytes: int
    sector_bytes: int
    physical_sector_bytes: int
    fixed: bool
    disk_id: str
    parent: dict[str, str] | None = None

    @property
    def blocks(self) -> int:
        return -(-self.size // self.block_bytes)

    @property
    def chunk_blocks(self) -> int:
        """Payload blocks that share a sector bitmap block of 2^23 bits (section 2.4, the chunk ratio)."""
        return (self.sector_bytes << 23) // self.block_bytes

    @property
    def table_entries(self) -> int:
        """Entries that the BAT must have (section 2.5)."""
        if self.parent is not None:
            return -(-self.blocks // self.chunk_blocks) * (self.chunk_blocks + 1)
        return self.blocks + (self.blocks - 1) // self.chunk_blocks if self.blocks else 0


def read_bytes(over: DiskReader, start: int, length: int, what: str, name: str) -> bytes:
    """Bytes of the file. MalformedArchive names them, if the file is too short."""
    if start + length > over.size:
        raise MalformedArchive(
            f"{name}: {what} lies at {start} to {start + length}, the file ends at {over.size}", hint=DAMAGED
        )
    return bytes_of(over, start, length)


def read_header(over: DiskReader, name: str) -> Header:
    """The valid header with the higher sequence number (section 2.2.2)."""
    if read_bytes(over, 0, len(FILE_SIGNATURE), "the file type identifier", name) != FILE_SIGNATURE:
        raise MalformedArchive(f"{name} is not a VHDX image: it does not begin with {FILE_SIGNATURE.decode()}")
    found = []
    for at in _HEADERS_AT:
        content = read_bytes(over, at, _HEADER_BYTES, "a header", name)
        if content.startswith(b"head") and checksum_is_right(content):
            found.append(content)
    if not found:
        raise MalformedArchive(f"{name}: neither header has its signature and the right checksum", hint=DAMAGED)
    current = max(found, key=_sequence)
    if len({content for content in found if _sequence(content) == _sequence(current)}) > 1:
        raise MalformedArchive(f"{name}: two different headers have sequence number {_sequence(current)}", hint=DAMAGED)
    _, _, sequence, _, data_write, log_guid, log_version, version, log_bytes, log_at = _HEADER.unpack_from(current)
    if version != 1:
        raise UnsupportedFormat(f"{name} is a VHDX image of version {version}; version 1 is read")
    if any(log_guid) and log_version != 0:
        raise UnsupportedFormat(
            f"{name} has a log of version {log_version}; version 0 is replayed",
            hint="Open it once on its host, which replays the log.",
        )
    if log_bytes % MIB or log_at % MIB or (log_bytes and log_at < HEADER_SECTION_BYTES):
        raise MalformedArchive(
            f"{name}: a log of {log_bytes} bytes at {log_at} is not on boundaries of 1 MiB after the headers"
        )
    return Header(
        sequence=sequence,
        data_write_guid=guid_le(data_write),
        log_guid=log_guid if any(log_guid) else None,
        log=Region(log_at, log_at + log_bytes, "the log"),
    )


def _sequence(header: bytes) -> int:
    return int.from_bytes(header[8:16], "little")


def checksum_is_right(content: bytes) -> bool:
    """For a header, a region table or a log entry: a signature, then the checksum, which counts as zero itself."""
    found: int = google_crc32c.value(content[:4] + bytes(4) + content[8:])
    return found == int.from_bytes(content[4:8], "little")


def read_regions(over: DiskReader, header: Header, name: str) -> Regions:
    """The regions of the first valid region table (section 2.2.3), without overlaps, all in the file."""
    for at in _REGION_TABLES_AT:
        content = read_bytes(over, at, _TABLE_BYTES, "a region table", name)
        if content.startswith(b"regi") and checksum_is_right(content):
            break
    else:
        raise MalformedArchive(f"{name}: neither region table has its signature and the right checksum", hint=DAMAGED)
    count = _REGION_TABLE.unpack_from(content)[2]
    if count > _ENTRIES_MAX:
        raise MalformedArchive(f"{name}: {count} regions; a table holds {_ENTRIES_MAX}")
    known = {_BAT_REGION: "the BAT", _METADATA_REGION: "the metadata region"}
    found: dict[str, Region] = {}
    for entry in range(count):
        guid_bytes, start, length, flags = _REGION.unpack_from(content, _REGION_TABLE.size + entry * _REGION.size)
        guid = guid_le(guid_bytes)
        if guid in found:
            raise MalformedArchive(f"{name}: two regions have the GUID {guid}")
        if guid not in known and flags & _REGION_REQUIRED:
            raise UnsupportedFormat(f"{name} has a region {guid} that must be understood, and is unknown here")
        found[guid] = Region(start, start + length, known.get(guid, f"the region {guid}"))
    for guid, what in known.items():
        if guid not in found:
            raise MalformedArchive(f"{name}: the region table does not say where {what} lies")
    _check_regions([*found.values(), header.log], over.size, name)
    return Regions(found.pop(_BAT_REGION), found.pop(_METADATA_REGION), tuple(found.values()))


def _check_regions(regions: list[Region], file_bytes: int, name: str) -> None:
    regions = sorted(region for region in regions if region.end > region.start)
    for start, end, what in regions:
        if start % MIB or end % MIB or start < HEADER_SECTION_BYTES:
            raise MalformedArchive(f"{name}: {what} lies at {start} to {end}, not on boundaries of 1 MiB after the headers")
        if end > file_bytes:
            raise MalformedArchive(f"{name}: {what} lies at {start} to {end}, the file ends at {file_bytes}", hint=DAMAGED)
    for one, other in pairwise(regions):
        if other.start < one.end:
            raise MalformedArchive(f"{name}: {one.what} and {other.what} both lie at {other.start} of the file")


def read_metadata(over: DiskReader, region: Region, name: str) -> Metadata:
    """The system items of the metadata region (section 2.6.2); user items are ignored."""
    items = _Items(over, region, name)
    values = {
        item: int.from_bytes(items.content(item, length), "little")
        for item, length in _ITEM_LENGTHS.items()
        if item != _DISK_ID
    }
    block_bytes, flags = values[_FILE_PARAMETERS] & 0xFFFFFFFF, values[_FILE_PARAMETERS] >> 32
    size, sector_bytes = values[_DISK_SIZE], values[_LOGICAL_SECTOR]
    if not _BLOCK_BYTES_MIN <= block_bytes <= _BLOCK_BYTES_MAX or block_bytes & (block_bytes - 1):
        raise MalformedArchive(f"{name}: blocks of {block_bytes} bytes; powers of two from 1 to 256 MiB exist")
    for what, bytes_ in (("logical", sector_bytes), ("physical", values[_PHYSICAL_SECTOR])):
        if bytes_ not in _SECTORS:
            raise MalformedArchive(f"{name}: {what} sectors of {bytes_} bytes; 512 and 4096 exist")
    if size > _DISK_BYTES_MAX or size % sector_bytes:
        raise MalformedArchive(f"{name}: a disk of {size} bytes; whole sectors of {sector_bytes} up to 64 TiB are possible")
    return Metadata(
        size=size,
        block_bytes=block_bytes,
        sector_bytes=sector_bytes,
        physical_sector_bytes=values[_PHYSICAL_SECTOR],
        fixed=bool(flags & _LEAVE_BLOCKS_ALLOCATED) and not flags & _HAS_PARENT,
        disk_id=guid_le(items.content(_DISK_ID, 16)),
        parent=_read_locator(items.content(_PARENT_LOCATOR), name) if flags & _HAS_PARENT else None,
    )


class _Items:
    """The metadata table (section 2.6.1): the present items, and their contents."""

    def __init__(self, over: DiskReader, region: Region, name: str) -> None:
        self._over, self._region, self._name = over, region, name
        table = read_bytes(over, region.start, _TABLE_BYTES, "the metadata table", name)
        signature, _, count = _METADATA_TABLE.unpack_from(table)
        if signature != b"metadata" or count > _ENTRIES_MAX:
            raise MalformedArchive(
                f"{name}: the metadata table begins with {signature!r} and has {count} entries", hint=DAMAGED
            )
        self._places: dict[str, tuple[int, int]] = {}
        for entry in range(count):
            self._add(*_ITEM.unpack_from(table, _METADATA_TABLE.size + entry * _ITEM.size))
        places = sorted(place for place in self._places.values() if place[1])
        for (start, length), (other, _) in pairwise(places):
            if other < start + length:
                raise MalformedArchive(f"{name}: two metadata items both lie at {other} of their region")

    def _add(self, guid_bytes: bytes, offset: int, length: int, flags: int, _reserved: int) -> None:
        guid, name = guid_le(guid_bytes), self._name
        if guid not in _ITEM_LENGTHS and guid != _PARENT_LOCATOR:
            if flags & _ITEM_REQUIRED:
                raise UnsupportedFormat(f"{name} has a metadata item {guid} that must be understood, and is unknown here")
            return
        if guid in self._places:
            raise MalformedArchive(f"{name}: two metadata items have the GUID {guid}")
        if length > _ITEM_BYTES_MAX or offset + length > self._region.end - self._region.start or 0 < offset < _TABLE_BYTES:
            raise MalformedArchive(f"{name}: a metadata item of {length} bytes at {offset} does not fit its region")
        self._places[guid] = (offset, length)

    def content(self, guid: str, length: int | None = None) -> bytes:
        """An item; MalformedArchive if it is missing or has another length."""
        if guid not in self._places:
            raise MalformedArchive(f"{self._name}: the metadata item {guid} is missing", hint=DAMAGED)
        offset, found = self._places[guid]
        if length is not None and found != length:
            raise MalformedArchive(f"{self._name}: the metadata item {guid} has {found} bytes, not {length}")
        return read_bytes(self._over, self._region.start + offset, found, "a metadata item", self._name)


def _read_locator(content: bytes, name: str) -> dict[str, str]:
    """Keys and values of a parent locator of VHDX's own type (section 2.6.2.6)."""
    if len(content) < _LOCATOR.size:
        raise MalformedArchive(f"{name}: a parent locator of {len(content)} bytes")
    guid_bytes, _, count = _LOCATOR.unpack_from(content)
    if guid_le(guid_bytes) != _VHDX_LOCATOR:
        raise UnsupportedFormat(f"{name}: its parent is not a VHDX image, but of type {guid_le(guid_bytes)}")
    if count > _LOCATOR_ENTRIES_MAX or _LOCATOR.size + count * _LOCATOR_ENTRY.size > len(content):
        raise MalformedArchive(f"{name}: a parent locator of {len(content)} bytes with {count} entries")
    found: dict[str, str] = {}
    for entry in range(count):
        key_at, value_at, key_bytes, value_bytes = _LOCATOR_ENTRY.unpack_from(
            content, _LOCATOR.size + entry * _LOCATOR_ENTRY.size
        )
        if max(key_at + key_bytes, value_at + value_bytes) > len(content):
            raise MalformedArchive(f"{name}: an entry of the parent locator lies outside it")
        key, value = content[key_at : key_at + key_bytes], content[value_at : value_at + value_bytes]
        try:
            found[key.decode("utf-16-le")] = value.decode("utf-16-le")
        except UnicodeDecodeError as problem:
            raise MalformedArchive(f"{name}: the parent locator has text that is not UTF-16") from problem
    return found
