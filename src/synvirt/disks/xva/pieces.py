"""The pieces of a disk in an XVA archive (`xva`), one by one in the order of its members, with the digest of each."""

import hashlib
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

import xxhash

from synvirt.blocks import DiskReader, bytes_of
from synvirt.disks import tar
from synvirt.errors import MalformedArchive

PIECE_BYTES: Final = 1 << 20
# Every exporter writes a mebibyte. A much larger member is no piece, as it would be read whole to be checked.
PIECE_MAX_BYTES: Final = 16 << 20
# A digest has 40 digits, and perhaps a line end.
_DIGEST_MAX_BYTES: Final = 256
_MEMBER: Final = re.compile(r"(\d{1,12})(\.checksum|\.xxhash)?", re.ASCII)


@dataclass(slots=True)
class Piece:
    """`length` bytes of the disk from `start` lie at `place` of the archive, their digest at `digest_at` (0: none)."""

    start: int
    place: int
    length: int
    digest_at: int = 0

    @property
    def end(self) -> int:
        return self.start + self.length


def pieces(members: Iterator[tar.Member], folder: str, size: int, name: str) -> Iterator[Piece]:
    """The pieces of the disk of `size` bytes in `folder`, ascending. Each comes once its digest and the member behind it were
    seen.

    MalformedArchive; `name` is the disk's name in it.
    """
    if not size:
        return
    prefix, walk = folder + "/", _Walk(size, name)
    for member in members:
        if not member.name.startswith(prefix):
            if walk.number >= 0:
                break
        elif member.sort is tar.Sort.FILE and (piece := walk.passed(member, member.name.removeprefix(prefix))):
            yield piece
    if walk.held is not None:
        yield walk.held
    if walk.end != size:
        raise MalformedArchive(
            f"{name} ends at byte {walk.end} of {size}: members are missing",
            hint="The archive is incomplete: compare its size with the original and copy it again.",
        )


class _Walk:
    def __init__(self, size: int, name: str) -> None:
        self._size, self._name = size, name
        self.held: Piece | None = None  # the next member may be its digest
        self.number = -1
        self.end = 0

    def passed(self, member: tar.Member, inner: str) -> Piece | None:
        """The piece that is now complete, if any."""
        match = _MEMBER.fullmatch(inner)
        if match is None:
            raise MalformedArchive(f"{self._name}: a member {member.name!r} is no piece of a disk")
        number = int(match[1])
        if match[2] is not None:
            if number != self.number or member.size > _DIGEST_MAX_BYTES:
                raise MalformedArchive(f"{self._name}: {member.name!r} is not a digest of the member before it")
            if self.held is not None:
                self.held.digest_at = member.offset
            return None
        if number <= self.number:
            raise MalformedArchive(f"{self._name}: member {member.name!r} comes after number {self.number}")
        start = self.end + (number - self.number - 1) * PIECE_BYTES
        if member.size > PIECE_MAX_BYTES or start + member.size > self._size:
            raise MalformedArchive(
                f"{self._name}: member {member.name!r} ({member.size} bytes for {start}) is outside the disk of {self._size}"
            )
        complete, self.held = self.held, Piece(start, member.offset, member.size) if member.size else None
        self.number, self.end = number, start + member.size
        return complete


def read_piece(archive: DiskReader, piece: Piece, buffer: memoryview, name: str) -> None:
    """Reads all of it into `buffer`, and checks its digest. MalformedArchive, and errors of the archive."""
    archive.read_into(piece.place, buffer)
    if not piece.digest_at:
        return
    text = bytes_of(archive, piece.digest_at, min(_DIGEST_MAX_BYTES, archive.size - piece.digest_at))
    expected = text.split(b"\0")[0].decode("latin-1").strip().lower()
    if _digest(buffer, expected) != expected.lstrip("0"):
        raise MalformedArchive(
            f"{name}: the {piece.length} bytes at offset {piece.start} do not have their digest {expected[:40]!r}",
            hint="The archive is damaged: copy it again, or export the VM again.",
        )


def _digest(data: memoryview, expected: str) -> str:
    """40 digits are SHA-1, 16 or fewer XXH64, without leading zeros, which xapi omits."""
    if len(expected) == 40:
        return hashlib.sha1(data, usedforsecurity=False).hexdigest().lstrip("0")
    return f"{xxhash.xxh64_intdigest(data):x}".lstrip("0")
