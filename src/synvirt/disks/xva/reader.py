"""Disks in XVA archives of XenServer and XCP-ng (xapi, `ocaml/xapi/stream_vdi.ml`).

    ova.xml · Ref:4/00000000 · Ref:4/00000000.xxhash · Ref:4/00000007 · Ref:4/00000007.xxhash · …

A disk is a folder of the tar, with one member per mebibyte, in order. Mebibytes of zeros are left out, except the first and the
last. While xapi looks for data it sometimes writes an empty member, to keep the connection alive: that takes a number, but no
place on the disk. A member's digest may follow it, SHA-1 (`.checksum`) or XXH64 (`.xxhash`); it is checked on reading.

The archive is walked only as far as is needed, so that the first bytes of 1 TiB do not wait for its last header.
"""

import threading
from array import array
from bisect import bisect_right
from collections.abc import Iterator
from typing import Final

from synvirt.blocks import DiskReader, Extent, fill_zeros
from synvirt.disks import tar
from synvirt.disks.xva.pieces import Piece, pieces, read_piece
from synvirt.errors import DiskReadFailed, SynvirtError, UnsupportedFormat

# 32 bytes of memory per piece: 128 MiB for 4 TiB without zeros.
_PIECES_MAX: Final = 4 << 20
# The longest extent, so that the copy of a disk without zeros begins at once.
_RUN_MAX_BYTES: Final = 64 << 20


class XvaReader:
    """The disk in the folder `folder` of the archive `over`; `size_bytes` is from ova.xml."""

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
            fill_zeros(buffer[at - offset : max(piece.start, at) - offset])
            at = max(piece.start, at)
            until = min(piece.end, end)
            part = buffer[at - offset : until - offset]
            if len(part) == piece.length:
                read_piece(self._over, piece, part, self._name)
            else:
                whole = memoryview(bytearray(piece.length))
                read_piece(self._over, piece, whole, self._name)
                part[:] = whole[at - piece.start : until - piece.start]
            at = until
        fill_zeros(buffer[at - offset :])

    def close(self) -> None:
        self._over.close()


class _Pieces:
    """The pieces of one disk, found by walking the archive as far as needed. Safe from many threads."""

    def __init__(self, archive: DiskReader, folder: str, size: int, name: str) -> None:
        self._walk = pieces(tar.walk(archive), folder, size, name)
        self._name = name
        self._lock = threading.Lock()
        self._starts, self._places, self._lengths, self._digests = array("q"), array("q"), array("q"), array("q")
        self._complete = False
        self._failure: SynvirtError | None = None

    def from_start(self) -> Iterator[Piece]:
        at = 0
        while self._known(at):
            yield self._piece(at)
            at += 1

    def between(self, start: int, end: int) -> Iterator[Piece]:
        """The pieces that have a byte in `start … end`."""
        with self._lock:
            while not self._complete and not self._reaches(end):
                self._step()
        at = max(0, bisect_right(self._starts, start) - 1)
        while at < len(self._starts) and self._starts[at] < end:
            piece = self._piece(at)
            if piece.end > start:
                yield piece
            at += 1

    def _reaches(self, end: int) -> bool:
        return bool(self._starts) and self._starts[-1] + self._lengths[-1] >= end

    def _known(self, at: int) -> bool:
        with self._lock:
            while not self._complete and len(self._starts) <= at:
                self._step()
        return at < len(self._starts)

    def _piece(self, at: int) -> Piece:
        return Piece(self._starts[at], self._places[at], self._lengths[at], self._digests[at])

    def _step(self) -> None:
        """Finds one more piece. A failed walk cannot go on: the next call raises the same error."""
        if self._failure is not None:
            raise self._failure
        try:
            piece = next(self._walk, None)
            if piece is not None and len(self._starts) >= _PIECES_MAX:
                raise UnsupportedFormat(f"{self._name} has over {_PIECES_MAX} pieces, more than are kept in memory")
        except SynvirtError as failure:
            self._failure = failure
            raise
        if piece is None:
            self._complete = True
            return
        self._starts.append(piece.start)
        self._places.append(piece.place)
        self._lengths.append(piece.length)
        self._digests.append(piece.digest_at)
