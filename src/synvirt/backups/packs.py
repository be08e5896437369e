"""A pack: frames in a row, and a footer that says what they are. Its name is the BLAKE3 of all its bytes.

    "SVPACK1\\n" │ frames │ footer: an entry a frame │ footer's length (4) │ BLAKE3 of the footer (32) │ "SVPEND1\\n"

So anyone can tell a pack that has changed, without a key, and which frames of it have; and a pack under another's name is
found out. Integers are little-endian. docs/backup-format.md.
"""

import struct
from collections.abc import Callable
from dataclasses import dataclass

from blake3 import blake3

from synvirt.backups.folder import Folder
from synvirt.backups.keys import FRAME_BYTES_MAX
from synvirt.errors import RepositoryDamaged
from synvirt.sizes import MIB

FOLDER = "packs"
SUFFIX = ".pack"
# Large: an NFS server has 16,000 files a TiB stored. Not larger: two of them are in memory while a run goes on.
PACK_BYTES = 64 * MIB
MAGIC, END_MAGIC = b"SVPACK1\n", b"SVPEND1\n"
CHUNK, PAGE = 0, 1

# name (32), kind, offset, length of the frame, length of the content, BLAKE3 of the frame (32)
_ENTRY = struct.Struct("<32sBQII32s")
_END = struct.Struct("<I32s8s")
# A pack full of frames of 4 KiB, which no chunk of a disk gives: what has more entries is not ours.
ENTRIES_MAX = PACK_BYTES // 4096


@dataclass(frozen=True, slots=True)
class Entry:
    name: bytes
    kind: int
    offset: int
    length: int
    content_length: int
    hash: bytes


class Pack:
    """One being filled, in memory."""

    def __init__(self) -> None:
        self._bytes = bytearray(MAGIC)
        self.entries: list[Entry] = []

    def fits(self, length: int) -> bool:
        return len(self._bytes) + length + (len(self.entries) + 1) * _ENTRY.size + _END.size <= PACK_BYTES and (
            len(self.entries) < ENTRIES_MAX
        )

    def add(self, name: bytes, kind: int, frame: bytes, content_length: int) -> None:
        self.entries.append(Entry(name, kind, len(self._bytes), len(frame), content_length, blake3(frame).digest()))
        self._bytes += frame

    def read(self, entry: Entry) -> bytes:
        return bytes(self._bytes[entry.offset : entry.offset + entry.length])

    def closed(self) -> tuple[str, bytearray]:
        """The pack's name and all its bytes. Nothing can be added from here on."""
        footer = b"".join(
            _ENTRY.pack(one.name, one.kind, one.offset, one.length, one.content_length, one.hash) for one in self.entries
        )
        self._bytes += footer + _END.pack(len(footer), blake3(footer).digest(), END_MAGIC)
        return f"{blake3(self._bytes).hexdigest()}{SUFFIX}", self._bytes


def read_footer(folder: Folder, name: str, size_bytes: int) -> list[Entry]:
    """RepositoryDamaged, where the footer is not whole; the frames themselves are not looked at."""
    if size_bytes < len(MAGIC) + _END.size:
        raise RepositoryDamaged(f"pack {name} has {size_bytes} bytes: it is cut off")
    length, digest, magic = _END.unpack(folder.read(f"{FOLDER}/{name}", size_bytes - _END.size, _END.size))
    start = size_bytes - _END.size - length
    if magic != END_MAGIC or length % _ENTRY.size or length // _ENTRY.size > ENTRIES_MAX or start < len(MAGIC):
        raise RepositoryDamaged(f"pack {name} has no footer: it is cut off or overwritten")
    footer = folder.read(f"{FOLDER}/{name}", start, length)
    if blake3(footer).digest() != digest:
        raise RepositoryDamaged(f"the footer of pack {name} has changed")
    entries = [Entry(*fields) for fields in _ENTRY.iter_unpack(footer)]
    for entry in entries:
        if entry.length > FRAME_BYTES_MAX or not len(MAGIC) <= entry.offset <= start - entry.length:
            raise RepositoryDamaged(f"the footer of pack {name} names bytes that are not in it")
    return entries


def read_frame(folder: Folder, name: str, entry: Entry) -> bytes:
    """RepositoryDamaged, where its bytes have changed."""
    frame = folder.read(f"{FOLDER}/{name}", entry.offset, entry.length)
    if blake3(frame).digest() != entry.hash:
        raise RepositoryDamaged(f"pack {name} has changed at bytes {entry.offset} to {entry.offset + entry.length}")
    return frame


def check_whole(folder: Folder, name: str, size_bytes: int, *, on_read: Callable[[int], None] = lambda count: None) -> None:
    """The pack's bytes are those that its name was made of. RepositoryDamaged."""
    digest, at = blake3(), 0
    while at < size_bytes:
        piece = folder.read(f"{FOLDER}/{name}", at, min(4 * MIB, size_bytes - at))
        digest.update(piece)
        at += len(piece)
        on_read(len(piece))
    if f"{digest.hexdigest()}{SUFFIX}" != name:
        raise RepositoryDamaged(f"pack {name} has changed: its bytes are not those that its name was made of")
