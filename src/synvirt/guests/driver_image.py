"""A virtio driver image: an ISO 9660 file, or a folder with the same content. What its top level has, and all its files.

ISO 9660 (ECMA-119), sections 8 (volume descriptors) and 9.1 (directory records). Names, in the order of Linux: Rock Ridge's
(IEEE P1282, entries NM and CE), Joliet's (UCS-2, big-endian), the format's own in lower case.
"""

import os
import stat
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from synvirt.errors import V2vFailed

SECTOR_BYTES = 2048
FIRST_DESCRIPTOR = 16
# A real image has three or four descriptors, and a top folder of a few sectors.
DESCRIPTORS_MAX = 32
FOLDER_BYTES_MAX = 1 << 20
# A real image has some 3,000 files in 300 folders, five deep.
FILES_MAX = 100_000
FOLDERS_MAX = 10_000
DEPTH_MAX = 16
NAME_BYTES_MAX = 255
# Entries of Rock Ridge that one name may go on in.
CONTINUED_MAX = 8
PRIMARY, SUPPLEMENTARY, TERMINATOR = 1, 2, 255
# Flags of a directory record: a folder; a file's part, extended attributes or interleaving, which no driver image has.
FOLDER, ODD = 0x02, 0x04 | 0x80


class Unreadable(Exception):
    """Something in the image that drivers never need; the text says what."""


@dataclass(frozen=True, slots=True)
class Extent:
    """`path`: under the image's top, with slashes; `at`, `length`: where its bytes are in the image."""

    path: str
    at: int
    length: int


def top_names(image: Path) -> set[str]:
    """The names at the top of the image, in lower case. V2vFailed, where it is not such an image."""
    if image.is_dir():
        return {path.name.lower() for path in image.iterdir()}
    try:
        with image.open("rb") as file:
            found = _top_folders(file)
            folder = _folder(file, found[-1]) if found else b""
    except OSError as error:
        raise V2vFailed(f"the virtio driver image {image.name} cannot be read: {error.strerror}") from error
    if not found:
        raise V2vFailed(
            f"the virtio driver image {image.name} is not an ISO 9660 image",
            hint="fetch virtio-win.iso again and compare its size",
        )
    return {_plain(record.name.decode(found[-1].encoding, errors="replace")) for record in _records(folder)}


def extents(file: BinaryIO) -> Iterator[Extent]:
    """All files of the image, folder by folder. Unreadable, OSError."""
    found = _top_folders(file)
    if not found:
        raise Unreadable("it is no ISO 9660 image")
    skip = _rock_ridge(file, found[0])
    top = found[0] if skip is not None else found[-1]
    size, files, seen = os.fstat(file.fileno()).st_size, 0, {top.at}
    waiting = [("", top)]
    while waiting:
        prefix, folder = waiting.pop()
        if folder.length > FOLDER_BYTES_MAX:
            raise Unreadable(f"its folder {prefix} has too many names")
        names = set()
        for record in _records(_folder(file, folder)):
            if record.name in (b"\0", b"\1"):  # the folder itself, and the one above
                continue
            name = _name(file, record, top.encoding, skip)
            if name is None:
                continue
            if name in names or not _can_name_a_file(name):
                raise Unreadable("a name that no file can have, or two files have")
            names.add(name)
            path, at = f"{prefix}{name}", record.at * SECTOR_BYTES
            if record.flags & ODD or record.interleaved:
                raise Unreadable(f"{path} is not in one piece")
            if record.flags & FOLDER:
                if at in seen or len(seen) >= FOLDERS_MAX or path.count("/") >= DEPTH_MAX:
                    raise Unreadable("its folders are too many, too deep or in a circle")
                seen.add(at)
                waiting.append((f"{path}/", _Folder(at, record.length, top.encoding)))
                continue
            files += 1
            if files > FILES_MAX or at + record.length > size:
                raise Unreadable("it has too many files" if files > FILES_MAX else f"{path} lies behind its end")
            yield Extent(path, at, record.length)


def _can_name_a_file(name: str) -> bool:
    return name not in ("", ".", "..") and not {"/", "\0"} & set(name) and len(os.fsencode(name)) <= NAME_BYTES_MAX


# ── the structures ───────────────────────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True, slots=True)
class _Folder:
    """Where its records are, in bytes, and the encoding of their names."""

    at: int
    length: int
    encoding: str


@dataclass(frozen=True, slots=True)
class _Record:
    """A directory record; `at` in sectors, `system_use`: what follows the name."""

    at: int
    length: int
    flags: int
    interleaved: bool
    name: bytes
    system_use: bytes


def _top_folders(file: BinaryIO) -> list[_Folder]:
    """The format's own, then Joliet's, where they exist."""
    own: _Folder | None = None
    joliet: _Folder | None = None
    for number in range(DESCRIPTORS_MAX):
        file.seek((FIRST_DESCRIPTOR + number) * SECTOR_BYTES)
        descriptor = file.read(SECTOR_BYTES)
        if len(descriptor) < SECTOR_BYTES or descriptor[1:6] != b"CD001" or descriptor[0] == TERMINATOR:
            break
        at, length = (int.from_bytes(descriptor[156 + place : 160 + place], "little") for place in (2, 10))
        if descriptor[0] == PRIMARY:
            own = own or _Folder(at * SECTOR_BYTES, length, "latin-1")
        elif descriptor[0] == SUPPLEMENTARY and descriptor[88:91] in (b"%/@", b"%/C", b"%/E"):
            joliet = joliet or _Folder(at * SECTOR_BYTES, length, "utf-16-be")
    return [one for one in (own, joliet) if one is not None]


def _folder(file: BinaryIO, folder: _Folder) -> bytes:
    file.seek(folder.at)
    return file.read(min(folder.length, FOLDER_BYTES_MAX))


def _records(folder: bytes) -> Iterator[_Record]:
    for begin in range(0, len(folder), SECTOR_BYTES):
        sector, at = folder[begin : begin + SECTOR_BYTES], 0
        # A record never crosses a sector; a length of 0 means that the rest of the sector is empty.
        while at + 33 < len(sector) and sector[at]:
            record = sector[at : at + sector[at]]
            at += sector[at]
            if len(record) < 34:
                continue
            extent, length = struct.unpack_from("<I4xI", record, 2)
            named = 33 + record[32]
            name, rest = record[33:named], record[named + (record[32] + 1) % 2 :]
            yield _Record(extent + record[1], length, record[25], any(record[26:28]), name, rest)


def _name(file: BinaryIO, record: _Record, encoding: str, skip: int | None) -> str | None:
    """None: neither a file nor a folder."""
    if skip is None:
        name = record.name.decode(encoding, errors="replace")
        return _plain(name) if encoding == "latin-1" else name.split(";")[0]
    long, mode = b"", None
    for kind, data in _entries(file, record.system_use[skip:]):
        if kind == b"NM" and data:
            long += data[1:]
        elif kind == b"PX" and len(data) >= 4:
            mode = int.from_bytes(data[:4], "little")
        elif kind in (b"CL", b"RE", b"ZF", b"SF"):
            raise Unreadable("it has folders that are elsewhere, or compressed files")
    if mode is not None and not (stat.S_ISREG(mode) or stat.S_ISDIR(mode)):
        return None
    return os.fsdecode(long) if long else _plain(record.name.decode("latin-1"))


def _plain(name: str) -> str:
    """Without the version, in lower case, as Linux shows it."""
    return name.split(";", maxsplit=1)[0].rstrip(".").lower()


def _rock_ridge(file: BinaryIO, top: _Folder) -> int | None:
    """How many bytes come before its entries in each record; None, where the image has none (SUSP, 5.3: SP)."""
    first = next(_records(_folder(file, top)), None)
    use = first.system_use if first else b""
    if use[:2] != b"SP" or use[4:6] != b"\xbe\xef" or len(use) < 7:
        return None
    entries = _entries(file, use)
    return use[6] if any(kind in (b"RR", b"PX", b"ER") for kind, _ in entries) else None


def _entries(file: BinaryIO, use: bytes) -> Iterator[tuple[bytes, bytes]]:
    """The entries of a system use area and of those that it goes on in: signature, data (SUSP, 4 and 5.1)."""
    for _ in range(CONTINUED_MAX):
        further: tuple[int, int, int] | None = None
        at = 0
        while at + 4 <= len(use) and use[at + 2] >= 4:
            kind, data = use[at : at + 2], use[at + 4 : at + use[at + 2]]
            at += use[at + 2]
            if kind == b"CE" and len(data) >= 24:
                further = struct.unpack("<I4xI4xI4x", data[:24])
            elif kind == b"ST":
                break
            else:
                yield kind, data
        if further is None:
            return
        block, offset, length = further
        file.seek(block * SECTOR_BYTES + offset)
        use = file.read(min(length, SECTOR_BYTES))
    raise Unreadable("a name goes on too long")
