"""Disks in XVA archives, as XenServer and XCP-ng export VMs (xapi, `ocaml/xapi/stream_vdi.ml`).

    ova.xml · Ref:4/00000000 · Ref:4/00000000.xxhash · Ref:4/00000007 · Ref:4/00000007.xxhash · …

A disk is a folder of the tar, a member a mebibyte, in order. Mebibytes of zeros are left out, but never the first and the last.
While it looks for data xapi writes an empty member now and then, to keep the connection alive: that takes a number, but no
place on the disk. Behind each member may lie its digest, SHA-1 (`.checksum`) or XXH64 (`.xxhash`); it is checked as it is read.

The archive is walked as far as is asked for, so that the first bytes of 1 TiB do not wait for its last header.
"""

import hashlib
import re
import threading
from array import array
from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

import xxhash

from synvirt.blocks import DiskReader, Extent
from synvirt.disks import tar
from synvirt.errors import DiskReadFailed, MalformedArchive, SynvirtError, UnsupportedFormat

PIECE_BYTES: Final = 1 << 20
# 32 bytes of memory a piece: 128 MiB for 4 TiB without a zero.
_PIECES_MAX: Final = 4 << 20
# A mebibyte by every exporter there is; a member of many more is no piece, and is read whole to be checked.
_PIECE_MAX_BYTES: Final = 16 << 20
# A digest is 40 digits and perhaps a line end.
_DIGEST_MAX_BYTES: Final = 256
# Extents are handed out at this length at the latest, so that a disk without zeros begins to be copied at once.
_RUN_MAX_BYTES: Final = 64 << 20
_ZEROS: Final = bytes(PIECE_BYTES)
_MEMBER: Final = re.compile(r"(\d{1,12})(\.checksum|\.xxhash)?", re.ASCII)


@dataclass(slots=True)
class _Piece:
    """`length` bytes of the disk from `start` lie at `place` of the archive, their digest at `digest_at` (0: there is none)."""

    start: int
    place: int
    length: int
    digest_at: int = 0


class XvaReader:
    """The disk in the folder `folder` of the archive `over`; `size_bytes` is what ova.xml says."""

    def __init__(self, over: DiskReader, folder: str, size_bytes: int, name: str) -> None:
        self.size = size_bytes
        self.max_readers = over.max_readers
        self._over = over
        self._name = f"{folder} in {name}"
        self._pieces = _Pieces(over, folder, size_bytes, self._name)

    def extents(self) -> Iterator[Extent]:
        run = Extent(0, 0)
        for piece in self._pieces.from_start():
            if piece.start > run.end:
                if run.length:
                    yield run
                yield Extent(run.end, piece.start - run.end, zero=True)
                run = Extent(piece.start, 0)
            run = Extent(run.start, run.length + piece.length)
            if run.length >= _RUN_MAX_BYTES:
                yield run
                run = Extent(run.end, 0)
        if run.length:
            yield run

    def read_into(self, offset: int, buffer: memoryview) -> None:
        end = offset + len(buffer)
        if offset < 0 or end > self.size:
            raise DiskReadFailed(f"{self._name}: {len(buffer)} bytes at offset {offset} are outside its {self.size}")
        at = offset
        for piece in self._pieces.between(offset, end):
            _zero(buffer[at - offset : max(piece.start, at) - offset])
            at = max(piece.start, at)
            until = min(piece.start + piece.length, end)
            part = buffer[at - offset : until - offset]
            if len(part) == piece.length:
                self._read_piece(piece, part)
            else:
                whole = memoryview(bytearray(piece.length))
                self._read_piece(piece, whole)
                part[:] = whole[at - piece.start : until - piece.start]
            at = until
        _zero(buffer[at - offset :])

    def close(self) -> None:
        self._over.close()

    def _read_piece(self, piece: _Piece, buffer: memoryview) -> None:
        self._over.read_into(piece.place, buffer)
        if not piece.digest_at:
            return
        length = min(_DIGEST_MAX_BYTES, self._over.size - piece.digest_at)
        text = bytearray(length)
        self._over.read_into(piece.digest_at, memoryview(text))
        expected = text.split(b"\0")[0].decode("latin-1").strip().lower()
        if _digest(buffer, expected) != expected.lstrip("0"):
            raise MalformedArchive(
                f"{self._name}: the {piece.length} bytes at offset {piece.start} do not have their digest {expected[:40]!r}",
                hint="The archive is damaged: copy it again, or export the VM again.",
            )


class _Pieces:
    """The pieces of one disk, found by walking the archive as far as anybody has asked. Safe from many threads."""

    def __init__(self, archive: DiskReader, folder: str, size: int, name: str) -> None:
        self._members = tar.walk(archive)
        self._prefix, self._size, self._name = folder + "/", size, name
        self._lock = threading.Lock()
        self._starts, self._places, self._lengths, self._digests = array("q"), array("q"), array("q"), array("q")
        self._held: _Piece | None = None  # its digest may be the next member
        self._number = -1
        self._end = 0
        self._complete = size == 0
        self._failure: SynvirtError | None = None

    def from_start(self) -> Iterator[_Piece]:
        at = 0
        while self._known(at):
            yield self._piece(at)
            at += 1

    def between(self, start: int, end: int) -> Iterator[_Piece]:
        """The pieces that have a byte in `start … end`."""
        with self._lock:
            while not self._complete and not self._reaches(end):
                self._step()
        at = max(0, bisect_right(self._starts, start) - 1)
        while at < len(self._starts) and self._starts[at] < end:
            piece = self._piece(at)
            if piece.start + piece.length > start:
                yield piece
            at += 1

    def _reaches(self, end: int) -> bool:
        if self._held is not None and self._held.start >= end:
            return True
        return bool(self._starts) and self._starts[-1] + self._lengths[-1] >= end

    def _known(self, at: int) -> bool:
        with self._lock:
            while not self._complete and len(self._starts) <= at:
                self._step()
        return at < len(self._starts)

    def _piece(self, at: int) -> _Piece:
        return _Piece(self._starts[at], self._places[at], self._lengths[at], self._digests[at])

    def _step(self) -> None:
        """One member more. A walk that failed cannot go on: whoever asks again is told the same."""
        if self._failure is not None:
            raise self._failure
        try:
            self._walk_on()
        except SynvirtError as failure:
            self._failure = failure
            raise

    def _walk_on(self) -> None:
        member = next(self._members, None)
        if member is not None and member.name.startswith(self._prefix):
            if member.sort is tar.Sort.FILE:
                self._take(member)
        elif member is None or self._number >= 0:
            self._keep_held()
            if self._end != self._size:
                raise MalformedArchive(
                    f"{self._name} ends at byte {self._end} of {self._size}: members are missing",
                    hint="The archive is incomplete: compare its size with the original and copy it again.",
                )
            self._complete = True

    def _take(self, member: tar.Member) -> None:
        match = _MEMBER.fullmatch(member.name.removeprefix(self._prefix))
        if match is None:
            raise MalformedArchive(f"{self._name}: a member {member.name!r} is no piece of a disk")
        number = int(match[1])
        if match[2] is not None:
            if number != self._number or member.size > _DIGEST_MAX_BYTES:
                raise MalformedArchive(f"{self._name}: {member.name!r} is no digest of the member before it")
            if self._held is not None:
                self._held.digest_at = member.offset
            return
        self._keep_held()
        if number <= self._number:
            raise MalformedArchive(f"{self._name}: member {member.name!r} comes after number {self._number}")
        start = self._end + (number - self._number - 1) * PIECE_BYTES
        if member.size > _PIECE_MAX_BYTES or start + member.size > self._size:
            raise MalformedArchive(
                f"{self._name}: member {member.name!r} ({member.size} bytes for {start}) is outside the disk of {self._size}"
            )
        self._number = number
        self._end = start + member.size
        self._held = _Piece(start, member.offset, member.size) if member.size else None

    def _keep_held(self) -> None:
        if self._held is None:
            return
        if len(self._starts) >= _PIECES_MAX:
            raise UnsupportedFormat(f"{self._name} has over {_PIECES_MAX} pieces, more than are kept in memory")
        self._starts.append(self._held.start)
        self._places.append(self._held.place)
        self._lengths.append(self._held.length)
        self._digests.append(self._held.digest_at)
        self._held = None


def _digest(data: memoryview, expected: str) -> str:
    """40 digits are SHA-1, 16 or fewer XXH64: as digits without leading zeros, which xapi leaves out."""
    if len(expected) == 40:
        return hashlib.sha1(data, usedforsecurity=False).hexdigest().lstrip("0")
    return f"{xxhash.xxh64_intdigest(data):x}".lstrip("0")


def _zero(buffer: memoryview) -> None:
    for at in range(0, len(buffer), PIECE_BYTES):
        part = buffer[at : at + PIECE_BYTES]
        part[:] = _ZEROS[: len(part)]
