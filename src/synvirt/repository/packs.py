"""A pack: frames in a row, and a footer that describes them. Its name is the BLAKE3 of all its bytes.

    "SVPACK1\\n" │ frames │ footer: an entry a frame │ footer's length (4) │ BLAKE3 of the footer (32) │ "SVPEND1\\n"

So anyone can find a changed pack and its changed frames without a key, and also a pack under a wrong name. Integers are
little-endian. docs/backup-format.md.
"""

import struct
from collections.abc import Callable
from dataclasses import dataclass

from blake3 import blake3

from synvirt.blocks import new_buffer
from synvirt.errors import RepositoryDamaged
from synvirt.repository.folder import Folder
from synvirt.repository.keys import FRAME_BYTES_MAX
from synvirt.sizes import KIB, MIB

FOLDER = "packs"
SUFFIX = ".pack"
# Large: an NFS server gets 16,000 files per TiB. Not larger: two packs are in memory during a run.
PACK_BYTES = 64 * MIB
MAGIC, END_MAGIC = b"SVPACK1\n", b"SVPEND1\n"
CHUNK, PAGE = 0, 1

# name (32), kind, offset, length of the frame, length of the content, BLAKE3 of the frame (32)
_ENTRY = struct.Struct("<32sBQII32s")
_END = struct.Struct("<I32s8s")
ENTRY_BYTES = _ENTRY.size
# Enough for most footers, in one request to remote storage.
_TAIL_BYTES = 64 * KIB
# A pack full of frames of 4 KiB, smaller than those of any disk: a pack with more entries is not ours.
ENTRIES_MAX = PACK_BYTES // 4096
# The longest frame has a place in any pack.
_HELD_BYTES_MIN = len(MAGIC) + FRAME_BYTES_MAX + ENTRY_BYTES + _END.size


@dataclass(frozen=True, slots=True)
class Entry:
    """The place of a frame in its pack: offset and length in bytes; `content_length`: before it was packed and sealed."""

    name: bytes
    kind: int
    offset: int
    length: int
    content_length: int
    hash: bytes


class Pack:
    """A pack that is being filled, in memory: in `held`, that of a pack which has been stored, or in new memory. For new memory
    the kernel clears each page, which takes a tenth of a full backup's time."""

    def __init__(self, held: memoryview | None = None) -> None:
        self.held = new_buffer(max(PACK_BYTES, _HELD_BYTES_MIN)) if held is None else held
        self._length = len(MAGIC)
        self.held[: self._length] = MAGIC
        self._footer = bytearray()
        self.names: list[bytes] = []

    def fits(self, length: int) -> bool:
        """Whether a frame of `length` bytes still fits into the pack."""
        return self._length + length + len(self._footer) + ENTRY_BYTES + _END.size <= PACK_BYTES and (
            len(self.names) < ENTRIES_MAX
        )

    def add(self, name: bytes, kind: int, frame: bytes | memoryview, content_length: int) -> None:
        """Appends a frame. `content_length`: of its chunk or page in bytes, before it was packed."""
        at, end = self._length, self._length + len(frame)
        self.held[at:end] = frame
        # The length last: without memory for the entry the pack is as it was, as other threads fill it further.
        self._footer += _ENTRY.pack(name, kind, at, len(frame), content_length, blake3(frame).digest())
        self._length = end
        self.names.append(name)

    def closed(self) -> tuple[str, memoryview, bytes]:
        """The pack's name, all its bytes, and its tail. It takes no more frames."""
        tail = bytes(self._footer) + _END.pack(len(self._footer), blake3(self._footer).digest(), END_MAGIC)
        content = self.held[: self._length + len(tail)]
        content[self._length :] = tail
        return f"{blake3(content).hexdigest()}{SUFFIX}", content, tail


def read_tail(folder: Folder, name: str, size_bytes: int, *, file: str | None = None) -> bytes:
    """The footer and what follows it. RepositoryDamaged, where it is not whole; the frames themselves are not checked. `file`:
    of a pack without its name yet. `entries_in` has its entries."""
    file = file or f"{FOLDER}/{name}"
    _require(size_bytes >= len(MAGIC) + _END.size, f"pack {name} has {size_bytes} bytes: it is cut off")
    at_once = min(size_bytes, _TAIL_BYTES)
    tail = folder.read(file, size_bytes - at_once, at_once)
    wanted = _END.unpack(tail[-_END.size :])[0] + _END.size
    if at_once < wanted <= size_bytes and wanted <= ENTRIES_MAX * ENTRY_BYTES + _END.size:
        tail = folder.read(file, size_bytes - wanted, wanted)
    tail = tail[-wanted:]
    footer_of(name, size_bytes, tail)
    return tail


def footer_of(name: str, size_bytes: int, tail: bytes) -> bytes:
    """The entries of a pack of that size and with that tail, in their stored form. RepositoryDamaged."""
    _require(len(tail) >= _END.size, f"pack {name} has no footer: it is cut off")
    length, digest, magic = _END.unpack(tail[-_END.size :])
    start = size_bytes - _END.size - length
    sound = magic == END_MAGIC and length % ENTRY_BYTES == 0 and length // ENTRY_BYTES <= ENTRIES_MAX and start >= len(MAGIC)
    _require(sound and length == len(tail) - _END.size, f"pack {name} has no footer: it is cut off or overwritten")
    footer = tail[:length]
    _require(blake3(footer).digest() == digest, f"the footer of pack {name} has changed")
    for _, _, offset, frame_length, _, _ in _ENTRY.iter_unpack(footer):
        inside = frame_length <= FRAME_BYTES_MAX and len(MAGIC) <= offset <= start - frame_length
        _require(inside, f"the footer of pack {name} names bytes that are not in it")
    return footer


def _require(sound: bool, what: str) -> None:
    if not sound:
        raise RepositoryDamaged(what)


def entries_in(tail: bytes) -> bytes:
    """Of a tail that was found whole: its entries, in their stored form."""
    return tail[: -_END.size]


def entries_of(footer: bytes) -> list[Entry]:
    return [Entry(*fields) for fields in _ENTRY.iter_unpack(footer)]


def entry_of(footer: bytes, number: int) -> Entry:
    return Entry(*_ENTRY.unpack_from(footer, number * ENTRY_BYTES))


def bytes_of_frame(folder: Folder, name: str, entry: Entry) -> bytes:
    """The frame's stored bytes. RepositoryDamaged, where the pack is missing or shorter."""
    return folder.read(f"{FOLDER}/{name}", entry.offset, entry.length)


def check_frame(name: str, entry: Entry, frame: bytes) -> None:
    """RepositoryDamaged, where its bytes have changed."""
    if blake3(frame).digest() != entry.hash:
        raise RepositoryDamaged(f"pack {name} has changed at bytes {entry.offset} to {entry.offset + entry.length}")


def read_frame(folder: Folder, name: str, entry: Entry) -> bytes:
    """RepositoryDamaged, where its bytes have changed."""
    frame = bytes_of_frame(folder, name, entry)
    check_frame(name, entry, frame)
    return frame


def check_whole(folder: Folder, name: str, size_bytes: int, *, on_read: Callable[[int], None] = lambda count: None) -> None:
    """Checks the pack's bytes against its name. RepositoryDamaged."""
    digest, at = blake3(), 0
    while at < size_bytes:
        piece = folder.read(f"{FOLDER}/{name}", at, min(4 * MIB, size_bytes - at))
        digest.update(piece)
        at += len(piece)
        on_read(len(piece))
    if f"{digest.hexdigest()}{SUFFIX}" != name:
        raise RepositoryDamaged(f"pack {name} has changed: its bytes are not those that its name was made of")
