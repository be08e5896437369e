"""Where the members of a tar archive lie, without unpacking it: headers are read, data is skipped.

    ┌──────────┬───────────────┬──────────┬──────────── … ┬──────┬──────┐
    │ header   │ data          │ header   │ data          │ zero │ zero │      all in blocks of 512 bytes
    └──────────┴───────────────┴──────────┴──────────── … ┴──────┴──────┘

It reads v7, ustar (POSIX.1-1988), pax (POSIX.1-2001, `pax` section «pax Interchange Format») and GNU tar's long names and
base-256 sizes (GNU tar manual, «Basic Tar Format»). Sparse members are refused: their bytes are not a range of the archive. An
archive may be hostile: every failure is MalformedArchive with the member and the offset of its header.
"""

import struct
from collections.abc import Iterator
from enum import Enum
from typing import NamedTuple

from synvirt.blocks import DiskReader, bytes_of
from synvirt.errors import MalformedArchive

BLOCK_BYTES = 512
# name, mode, uid, gid, size, mtime, chksum, typeflag, linkname, magic+version, uname…devminor, prefix
_HEADER = struct.Struct("100s 8s 8s 8s 12s 12s 8s c 100s 8s 80s 155s 12x")
_CHECKSUM_FIELD = slice(148, 156)
_USTAR = b"ustar\x0000"

# A pax header has names and a few numbers. A longer one was made to fill memory.
_EXTENSION_MAX_BYTES = 1 << 20
# Each extension describes the member after it. Real archives have at most a long name, a long link and a pax header before one.
_EXTENSIONS_IN_A_ROW_MAX = 8
# A pax header has about ten records, an archive one global header (`git archive`). Many small ones were made to cost time.
_RECORDS_MAX, _GLOBAL_HEADERS_MAX = 200, 100
# The pax keys that are needed: all others are dropped, however many there are.
_ASKED_FOR, _SPARSE_KEYS = frozenset({"path", "size"}), "GNU.sparse."
# PATH_MAX: no file can have a longer name.
_NAME_MAX_BYTES = 4096
# An appliance has a descriptor, a manifest and some disks or chunks; two disks of 2 TiB in 100 MiB chunks are 42,000.
INDEX_MEMBERS_MAX = 100_000


class Sort(Enum):
    """The type of a tar archive's member."""

    FILE = "file"
    FOLDER = "folder"
    OTHER = "link or device"


_SORTS = {
    b"0": Sort.FILE,
    b"\0": Sort.FILE,  # v7
    b"7": Sort.FILE,  # contiguous: read as a plain file, as POSIX demands
    b"5": Sort.FOLDER,
    b"1": Sort.OTHER,
    b"2": Sort.OTHER,
    b"3": Sort.OTHER,
    b"4": Sort.OTHER,
    b"6": Sort.OTHER,
}
_GNU_LONG_NAME, _GNU_LONG_LINK, _GNU_VOLUME_LABEL = b"L", b"K", b"V"
_PAX_NEXT, _PAX_GLOBAL, _SOLARIS_PAX_NEXT = b"x", b"g", b"X"
_SPARSE_HINT = "Pack the archive again without --sparse (-S): the disk images inside are sparse by themselves."


class Member(NamedTuple):
    """`size` bytes at `offset` of the archive are the member's data. `name` is relative and has no `..`."""

    name: str
    offset: int
    size: int
    sort: Sort = Sort.FILE


def is_tar(head: bytes) -> bool:
    """Whether a file that begins with `head` begins with a tar header. An empty archive (only zeros) does not count."""
    block = head[:BLOCK_BYTES]
    return len(block) == BLOCK_BYTES and any(block) and _checksum_holds(block)


def index(archive: DiskReader, *, members_max: int = INDEX_MEMBERS_MAX) -> dict[str, Member]:
    """All members by name. Two members of one name are refused, as readers differ in which one they use."""
    members: dict[str, Member] = {}
    for count, member in enumerate(walk(archive)):
        if count >= members_max:
            raise MalformedArchive(f"the archive has more than {members_max} members; an appliance never has")
        if member.name in members and member.sort is not Sort.FOLDER:
            first = members[member.name].offset
            raise MalformedArchive(f"two members are named {member.name!r}: data at offset {first} and {member.offset}")
        members[member.name] = member
    return members


def walk(archive: DiskReader) -> Iterator[Member]:
    """The members in the archive's order, lazily: nothing behind the last wanted one is read."""
    at, extensions = 0, _Extensions()
    while at < archive.size:
        block = bytes_of(archive, at, min(BLOCK_BYTES, archive.size - at))
        if not any(block):
            break  # one zero block ends the archive; some writers omit the second
        if len(block) < BLOCK_BYTES:
            raise MalformedArchive(f"the archive is cut short: {len(block)} bytes of a member's header at offset {at}")
        header = _Header.parse(block, at)
        data = at + BLOCK_BYTES
        if extensions.take(archive, header, data):
            size = header.size
        else:
            member = extensions.applied_to(header, data)
            size = member.size
            _require_inside(member.name, data, size, archive.size)
            extensions = extensions.next_member()
            yield member
        at = data + -(-size // BLOCK_BYTES) * BLOCK_BYTES
    if extensions.pending:
        raise MalformedArchive(f"the archive ends after an extended header, at offset {at}: the member it describes is missing")


class _Header(NamedTuple):
    at: int
    name: bytes
    size: int
    typeflag: bytes

    @classmethod
    def parse(cls, block: bytes, at: int) -> "_Header":
        if not _checksum_holds(block):
            raise MalformedArchive(
                f"no tar header at offset {at}: its checksum is wrong",
                hint="The file is damaged or incomplete. Compare its size and checksum with the original and copy it again.",
            )
        name, _, _, _, size, _, _, typeflag, _, magic, _, prefix = _HEADER.unpack(block)
        full = _until_nul(name)
        if magic == _USTAR and _until_nul(prefix):  # GNU's own magic has times in place of the prefix
            full = _until_nul(prefix) + b"/" + full
        return cls(at, full, _number(size, at), typeflag)


class _Extensions:
    """The contents of pax and GNU headers for the next member (`_next`) or for all that follow (`_all`)."""

    def __init__(self, kept: dict[str, str] | None = None, global_headers: int = 0) -> None:
        self._all = kept or {}
        self._next: dict[str, str] = {}
        self._global_headers = global_headers
        self._count = 0

    @property
    def pending(self) -> bool:
        return bool(self._next)

    def next_member(self) -> "_Extensions":
        return _Extensions(self._all, self._global_headers)

    def take(self, archive: DiskReader, header: _Header, data: int) -> bool:
        """Whether this header is an extension; then its content is remembered."""
        if header.typeflag not in (
            _GNU_LONG_NAME,
            _GNU_LONG_LINK,
            _GNU_VOLUME_LABEL,
            _PAX_NEXT,
            _PAX_GLOBAL,
            _SOLARIS_PAX_NEXT,
        ):
            return False
        self._count += 1
        if self._count > _EXTENSIONS_IN_A_ROW_MAX or header.size > _EXTENSION_MAX_BYTES:
            raise MalformedArchive(f"an extended header of {header.size} bytes at offset {header.at} is no real one")
        _require_inside("an extended header", data, header.size, archive.size)
        if header.typeflag in (_GNU_LONG_LINK, _GNU_VOLUME_LABEL):
            return True  # does not affect where data lies
        content = bytes_of(archive, data, header.size)
        if header.typeflag == _GNU_LONG_NAME:
            self._next["path"] = _text(_until_nul(content))
        elif header.typeflag == _PAX_GLOBAL:
            self._global_headers += 1
            if self._global_headers > _GLOBAL_HEADERS_MAX:
                raise MalformedArchive(f"over {_GLOBAL_HEADERS_MAX} global headers, at offset {header.at}: no real archive has")
            self._all.update(_pax_records(content, header.at))
        else:
            self._next.update(_pax_records(content, header.at))
        return True

    def applied_to(self, header: _Header, data: int) -> Member:
        records = {**self._all, **self._next}
        name = _safe_name(records.get("path") or _text(header.name), header.at)
        if header.typeflag == b"S" or any(key.startswith(_SPARSE_KEYS) for key in records):
            raise MalformedArchive(f"member {name!r} at offset {header.at} is sparse", hint=_SPARSE_HINT)
        if header.typeflag == b"M":
            raise MalformedArchive(f"member {name!r} at offset {header.at} is continued from another volume of the archive")
        # POSIX: an unknown type is read as a plain file, so that its data is skipped.
        sort = _SORTS.get(header.typeflag, Sort.FILE)
        if header.typeflag == b"\0" and header.name.endswith(b"/"):
            sort = Sort.FOLDER  # v7 had no type for folders
        # Links and folders sometimes have a size, but never data: GNU tar and Python's tarfile do not skip any, either.
        size = _pax_size(records, name, header) if sort is Sort.FILE else 0
        return Member(name, data, size, sort)


def _pax_size(records: dict[str, str], name: str, header: _Header) -> int:
    size = records.get("size")
    if size is None:
        return header.size
    if not (size.isascii() and size.isdigit() and len(size) <= 20):
        raise MalformedArchive(f"member {name!r} at offset {header.at}: its size {size[:40]!r} is not a number")
    return int(size)


def _pax_records(content: bytes, at: int) -> dict[str, str]:
    """Records of the form «30 path=folder/disk.vmdk\\n», the number is the record's whole length; only the needed ones."""
    records: dict[str, str] = {}
    start = count = 0
    while start < len(content) and content[start]:
        count += 1
        if count > _RECORDS_MAX:
            raise MalformedArchive(f"the extended header at offset {at} has over {_RECORDS_MAX} records; no real one has")
        digits, space, _ = content[start : start + 20].partition(b" ")
        length = int(digits) if space and digits.isdigit() else 0
        record = content[start : start + length]
        key, equals, value = record[len(digits) + 1 : -1].partition(b"=")
        if len(record) != length or record[-1:] != b"\n" or not equals:
            raise MalformedArchive(f"the extended header at offset {at} has a damaged record at its byte {start}")
        if (name := _text(key)) in _ASKED_FOR:
            records[name] = _text(value)
        elif name.startswith(_SPARSE_KEYS):
            records[_SPARSE_KEYS] = ""
        start += length
    return records


def _checksum_holds(block: bytes) -> bool:
    try:
        stored = _number(block[_CHECKSUM_FIELD], 0)
    except MalformedArchive:
        return False
    field = block[_CHECKSUM_FIELD]
    unsigned = sum(block) - sum(field) + 8 * ord(" ")
    # Early Suns, and some later writers, summed signed characters.
    return stored == unsigned or stored == unsigned - 256 * sum(
        byte >= 0x80 for byte in block[: _CHECKSUM_FIELD.start] + block[_CHECKSUM_FIELD.stop :]
    )


def _number(field: bytes, at: int) -> int:
    """Octal digits, ended by NUL, space or the field's end; or GNU's base 256, marked by the first byte."""
    if field[0] == 0x80:
        return int.from_bytes(field[1:], "big")
    digits = field.split(b"\0", 1)[0].strip(b" ")
    if not digits:
        return 0
    # int() alone would also take signs, underscores and prefixes.
    if digits.translate(None, b"01234567"):
        raise MalformedArchive(f"the tar header at offset {at} has {field!r} where a number belongs")
    return int(digits, 8)


def _require_inside(name: str, data: int, size: int, archive_bytes: int) -> None:
    if data + size > archive_bytes:
        raise MalformedArchive(
            f"the archive is cut short: member {name!r} has {size} bytes at offset {data}, the archive only {archive_bytes}",
            hint="The file is incomplete. Compare its size with the original and copy it again.",
        )


def _safe_name(name: str, at: int) -> str:
    """`./a//b/` becomes `a/b`; a name outside the archive is refused."""
    if len(name.encode("utf-8", "replace")) > _NAME_MAX_BYTES:
        raise MalformedArchive(f"the member at offset {at} has a name of over {_NAME_MAX_BYTES} bytes")
    if any(character < " " or character == "\x7f" for character in name):
        raise MalformedArchive(f"the member at offset {at} has control characters in its name {name!r}")
    parts = [part for part in name.split("/") if part not in ("", ".")]
    if name.startswith("/") or ".." in parts:
        raise MalformedArchive(
            f"member {name!r} at offset {at} would lie outside the archive", hint="Pack the archive with relative names."
        )
    return "/".join(parts)


def _text(raw: bytes) -> str:
    """UTF-8, by POSIX; else Latin-1, which never fails and keeps different names different."""
    try:
        return raw.decode("utf-8")
    except UnicodeDecodeError:
        return raw.decode("latin-1")


def _until_nul(raw: bytes) -> bytes:
    return raw.split(b"\0", 1)[0]
