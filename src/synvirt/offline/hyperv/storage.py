"""The binary key-value storage of Hyper-V's .vmcx and .vmrs files, as a tree of dicts.

    0x0000  header  ─▶ replay log             of the two headers the newer one with a right checksum counts
    0x1000  header
    0x2000  object table ─▶ object tables, key tables, large values
            key table: entries, each names its parent by (table, place); (0, 0) is the root

Sources: «HyperV Storage File Format» of Microsoft's OpenVMM project; for the entries of the replay log, which it does not
describe, files that Hyper-V wrote (their checksums confirm each field). All is little-endian and packed. Checksums are zlib's
CRC-32, with their own field as zeros. Strings are UTF-16, names of keys UTF-8. Format 4.0 is read, the newest in the document;
it does not describe the layout of older ones.
"""

import struct
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Union

from synvirt.blocks import DiskReader
from synvirt.errors import MalformedArchive, UnsupportedFormat

Value = Union[int, float, bool, str, bytes, "Tree"]
Tree = dict[str, Value]

MAGIC = b"\x14\x20\x28\x01"
_HEADER, _LOG, _LOG_ENTRY = struct.Struct("<4sIHIIIIQQI"), struct.Struct("<IIIBIBQII"), struct.Struct("<QIQII")
_OBJECTS, _OBJECT = struct.Struct("<II"), struct.Struct("<BIQIB")
_TABLE, _ENTRY, _POINTER = struct.Struct("<HHHI"), struct.Struct("<BBIHIIIB"), struct.Struct("<IQ")
_HEADER_PLACES, _FIRST_OBJECTS = (0x0000, 0x1000), 0x2000
_LOG_SIGNATURE, _OBJECTS_SIGNATURE, _TABLE_SIGNATURE = 0x01110003, 0x01110001, 2
_FORMAT = 0x0400

_OBJECT_TABLE, _KEY_TABLE = 1, 2
_STRING, _ARRAY, _NODE = 6, 7, 9
# The struct format for each kind of value of a fixed size.
_FIXED = {
    3: struct.Struct("<q"),
    4: struct.Struct("<Q"),
    5: struct.Struct("<d"),
    8: struct.Struct("<i"),
    _NODE: struct.Struct("<QI"),
}
_BOOL = 8
_POINTS_AT_VALUE = 0x01

# The largest machine, with 256 disks and 68 network cards, takes some 10,000 keys; one of 37 devices takes 600.
_ENTRIES_MAX, _TABLES_MAX = 100_000, 4096
# The most memory for a file's content: 4096 tables of 4 KiB, and as much text beside them.
_KEPT_BYTES_MAX = 32 << 20
# A saved state has one object per mebibyte of memory: this many directories with 227 each are 1.8 TiB. A directory of 64 KiB
# holds 3640.
_DIRECTORIES_MAX, _DIRECTORY_OBJECTS_MAX = 8192, 3640
# Tables have 4 KiB, and data is aligned to at most 64 KiB.
_TABLE_BYTES_MAX = 64 << 10
# For example a machine's notes. Larger arrays hold states of devices, which are not read.
_TEXT_BYTES_MAX = 1 << 20
# Pending changes: 145 entries fit the log's first page, and none is larger than a table.
_LOG_ENTRIES_MAX, _LOG_BYTES_MAX = 4096, 16 << 20


@dataclass(frozen=True, slots=True)
class _Entry:
    """An entry of a key table. `at` is its place in the file, for errors; `data` its value, or the value's place."""

    at: int
    place: tuple[int, int]
    parent: tuple[int, int]
    kind: int
    flags: int
    name: str
    data: bytes


def read(file: DiskReader, name: str) -> Tree:
    """The whole tree. MalformedArchive with the file and the offset, UnsupportedFormat for an older format."""
    source = _replayed(file, name)
    nodes: dict[tuple[int, int], Tree] = {(0, 0): {}}
    values: list[tuple[_Entry, Value]] = []
    for number, entry in enumerate(_entries(source)):
        if number >= _ENTRIES_MAX:
            raise MalformedArchive(f"{name} has over {_ENTRIES_MAX} keys; no virtual machine has")
        value = _value(source, entry)
        if isinstance(value, dict):
            nodes[entry.place] = value
        values.append((entry, value))
    for entry, value in values:
        if entry.parent not in nodes:
            raise source.malformed(entry.at, f"the key {entry.name!r} belongs to a node that is not there")
        # If several keys have one name (lists are written so), the first counts.
        nodes[entry.parent].setdefault(entry.name, value)
    return nodes[0, 0]


def has_key(file: DiskReader, name: str, keys: frozenset[str]) -> bool:
    """Whether one of `keys` is at the root. Reads until it finds one. A machine's saved memory has a key per mebibyte, so this
    is also true of a file with too many tables to read."""
    source = _replayed(file, name)
    for number, table in enumerate(_key_tables(source)):
        if number >= _TABLES_MAX:
            return True
        if any(entry.parent == (0, 0) and entry.name in keys for entry in _entries_of(source, table)):
            return True
    return False


@dataclass(frozen=True, slots=True)
class _Table:
    at: int
    index: int
    sequence: int
    content: bytes


class _Source:
    """The file's bytes, with the changes of its replay log applied."""

    def __init__(self, file: DiskReader, name: str, changes: tuple[tuple[int, bytes], ...] = ()) -> None:
        self.file, self.name, self.changes = file, name, changes
        self.size = max([file.size, *(place + len(data) for place, data in changes)])
        self.kept_bytes = 0

    def keep(self, place: int, length: int, what: str) -> bytes:
        """Like `read`, for what stays in memory: its total is limited, as a file may name one place many times."""
        self.kept_bytes += length
        if self.kept_bytes > _KEPT_BYTES_MAX:
            raise self.malformed(place, f"its keys take over {_KEPT_BYTES_MAX} bytes; no virtual machine's do")
        return self.read(place, length, what)

    def read(self, place: int, length: int, what: str) -> bytes:
        if place + length > self.size:
            raise self.malformed(place, f"{what} of {length} bytes ends beyond the file's {self.size}")
        content = bytearray(length)
        there = min(length, self.file.size - place)
        if there > 0:
            self.file.read_into(place, memoryview(content)[:there])
        for start, data in self.changes:
            first, last = max(place, start), min(place + length, start + len(data))
            if first < last:
                content[first - place : last - place] = data[first - start : last - start]
        return bytes(content)

    def checked(self, place: int, content: bytes, checksum_at: int, what: str) -> None:
        """Checks that the CRC-32 in `content` is that of `content`, with its own four bytes as zeros."""
        (expected,) = struct.unpack_from("<I", content, checksum_at)
        if zlib.crc32(content[:checksum_at] + bytes(4) + content[checksum_at + 4 :]) != expected:
            raise self.malformed(place, f"the checksum of {what} is wrong")

    def malformed(self, place: int, why: str) -> MalformedArchive:
        return MalformedArchive(
            f"{self.name}, offset {place}: {why}", hint="The file is damaged or cut short: export or copy the machine again."
        )


def _replayed(file: DiskReader, name: str) -> _Source:
    """If a machine was copied while it ran, or its host lost power, changes may be in the log and not yet in their place."""
    source = _Source(file, name)
    log_at, log_bytes = _header(source)
    content = source.read(log_at, _LOG.size, "the replay log")
    signature, _, count, *_ = _LOG.unpack(content)
    if signature != _LOG_SIGNATURE:
        raise source.malformed(log_at, "no replay log is there")
    source.checked(log_at, content, 4, "the replay log")
    if count > _LOG_ENTRIES_MAX:
        raise source.malformed(log_at, f"the replay log has {count} entries; more than {_LOG_ENTRIES_MAX} fit none")
    return _Source(file, name, tuple(_changes(source, log_at, log_bytes, count)))


def _header(source: _Source) -> tuple[int, int]:
    """The place of the replay log, and its length, by the newer header. Writers change them in turn: one is always complete."""
    found: list[tuple[int, int, int, int]] = []
    for place in _HEADER_PLACES:
        content = source.read(place, _HEADER.size, "the header")
        signature, checksum, sequence, version, _, _, _, log_at, log_bytes, _ = _HEADER.unpack(content)
        if signature == MAGIC and zlib.crc32(content[:4] + bytes(4) + content[8:]) == checksum:
            found.append((sequence, version, log_at, log_bytes))
    if not found:
        raise source.malformed(0, "neither of its two headers is whole")
    # The sequence has 16 bits and wraps: the newer of two numbers is less than half the range ahead.
    newest = found[-1] if (found[-1][0] - found[0][0]) & 0xFFFF < 0x8000 else found[0]
    _, version, log_at, log_bytes = newest
    if version != _FORMAT:
        raise UnsupportedFormat(
            f"{source.name} has the storage format {version >> 8}.{version & 0xFF}; 4.0 is read",
            hint="Upgrade the configuration version (Update-VMVersion), or import its disks separately.",
        )
    return log_at, log_bytes


def _changes(source: _Source, log_at: int, log_bytes: int, count: int) -> Iterator[tuple[int, bytes]]:
    total = 0
    for number in range(count):
        at = log_at + _LOG.size + number * _LOG_ENTRY.size
        content = source.read(at, _LOG_ENTRY.size, "an entry of the replay log")
        place, length, data_at, _, data_checksum = _LOG_ENTRY.unpack(content)
        source.checked(at, content, 20, "an entry of the replay log")
        total += length
        if data_at + length > log_bytes or total > _LOG_BYTES_MAX or place + length > source.size + _LOG_BYTES_MAX:
            raise source.malformed(at, "an entry of the replay log leads out of the log, or of the file")
        data = source.read(log_at + data_at, length, "data of the replay log")
        if zlib.crc32(data) != data_checksum:
            raise source.malformed(log_at + data_at, "the checksum of data in the replay log is wrong")
        yield place, data


def _entries(source: _Source) -> Iterator[_Entry]:
    """All entries in use. Of two tables with the same index the one with the higher sequence counts."""
    newest: dict[int, _Table] = {}
    for number, table in enumerate(_key_tables(source)):
        if number >= _TABLES_MAX:
            raise source.malformed(table.at, f"it has over {_TABLES_MAX} key tables; no virtual machine has")
        if table.index not in newest or newest[table.index].sequence < table.sequence:
            newest[table.index] = table
    for _, table in sorted(newest.items()):
        yield from _entries_of(source, table)


def _key_tables(source: _Source) -> Iterator[_Table]:
    """The last entry of a full object table leads to the next."""
    waiting, seen = [_FIRST_OBJECTS], set[int]()
    while waiting:
        place = waiting.pop()
        if place in seen or len(seen) >= _DIRECTORIES_MAX:
            raise source.malformed(place, f"the object tables lead in a circle, or are more than {_DIRECTORIES_MAX}")
        seen.add(place)
        signature, count = _OBJECTS.unpack(source.read(place, _OBJECTS.size, "an object table"))
        if signature != _OBJECTS_SIGNATURE or count > _DIRECTORY_OBJECTS_MAX:
            raise source.malformed(place, "no object table is there, or one of more objects than fit one")
        content = source.read(place + _OBJECTS.size, count * _OBJECT.size, "an object table")
        for number, (kind, _, at, size, _) in enumerate(_OBJECT.iter_unpack(content)):
            if kind not in (_OBJECT_TABLE, _KEY_TABLE):
                continue
            start = number * _OBJECT.size
            source.checked(place + _OBJECTS.size + start, content[start : start + _OBJECT.size], 1, "an object")
            if kind == _OBJECT_TABLE:
                waiting.append(at)
            else:
                yield _key_table(source, at, size)


def _key_table(source: _Source, at: int, size: int) -> _Table:
    if not _TABLE.size <= size <= _TABLE_BYTES_MAX:
        raise source.malformed(at, f"a key table of {size} bytes; {_TABLE_BYTES_MAX} are the most")
    content = source.keep(at, size, "a key table")
    signature, index, sequence, _ = _TABLE.unpack_from(content)
    if signature != _TABLE_SIGNATURE or index == 0:
        raise source.malformed(at, "no key table is there")
    source.checked(at, content[: _TABLE.size], 6, "a key table")
    return _Table(at, index, sequence, content)


def _entries_of(source: _Source, held: _Table) -> Iterator[_Entry]:
    at, index, table = held.at, held.index, held.content
    offset = _TABLE.size
    while offset + _ENTRY.size <= len(table):
        kind, flags, size, parent, parent_offset, _, _, name_bytes = _ENTRY.unpack_from(table, offset)
        if size == 0:
            return
        end = offset + size
        if size < _ENTRY.size + name_bytes or end > len(table):
            raise source.malformed(at + offset, f"an entry of {size} bytes does not fit its table")
        if kind in _FIXED or kind in (_STRING, _ARRAY):
            data_at = offset + _ENTRY.size + name_bytes
            length = _data_bytes(table, data_at, end, kind, flags)
            if data_at + length > end:
                raise source.malformed(at + offset, "an entry is too short for its value")
            # The space behind the value is not checked: it holds old data.
            source.checked(at + offset, table[offset : data_at + length], 12, "a key")
            name = table[offset + _ENTRY.size : data_at].rstrip(b"\0").decode(errors="replace")
            data = table[data_at : data_at + length]
            yield _Entry(at + offset, (index, offset), (parent, parent_offset), kind, flags, name, data)
        offset = end


def _data_bytes(table: bytes, data_at: int, end: int, kind: int, flags: int) -> int:
    """The number of bytes that the value takes in its entry; where it does not fit, a number that shows it."""
    if flags & _POINTS_AT_VALUE:
        return _POINTER.size
    if kind in _FIXED:
        return _FIXED[kind].size
    length: int = struct.unpack_from("<I", table, data_at)[0] if data_at + 4 <= end else len(table)
    return 4 + length


def _value(source: _Source, entry: _Entry) -> Value:
    if entry.kind == _NODE:
        return {}
    if entry.kind in _FIXED:
        if entry.flags & _POINTS_AT_VALUE:
            raise source.malformed(entry.at, f"the number {entry.name!r} is kept outside of its key")
        (number,) = _FIXED[entry.kind].unpack(entry.data)
        return bool(number) if entry.kind == _BOOL else number
    data = entry.data[4:]
    if entry.flags & _POINTS_AT_VALUE:
        length, place = _POINTER.unpack(entry.data)
        if entry.kind == _ARRAY:
            return b""
        if length > _TEXT_BYTES_MAX:
            raise source.malformed(
                entry.at, f"the text {entry.name!r} has {length} bytes; a text has at most {_TEXT_BYTES_MAX}"
            )
        data = source.keep(place, length, "a text")
    return data if entry.kind == _ARRAY else data.decode("utf-16-le", errors="replace").rstrip("\0")
