"""A disk in an XVA archive that is compressed as a whole (`xe vm-export compress=true`: gzip; XCP-ng's `compress=zstd`).

    file ─▶ Passing: unpacked, the last megabytes kept ─▶ tar.walk ─▶ pieces ─▶ read_into

The members of a disk ascend, so reading it in order needs neither an index nor a file to unpack to: one pass, and the first
byte comes at once. Gaps in the archive are known only when the pass reaches them: all of the disk is one extent of data, and
missing pieces are filled with zeros on the way. A resumed copy unpacks the part before its watermark again, and a disk behind
others unpacks those first: within its first read, or before it by `pass_others`.
"""

import threading
from collections.abc import Iterator
from typing import Final

from synvirt.blocks import DiskReader, Extent, fill_zeros
from synvirt.disks import tar
from synvirt.disks.layers import Layer
from synvirt.disks.packed.unpacking import Passing
from synvirt.disks.passed import Pace
from synvirt.disks.specs import Packing
from synvirt.disks.xva.pieces import PIECE_MAX_BYTES, Piece, pieces, read_piece
from synvirt.errors import DiskReadFailed, MalformedArchive, SynvirtError

# When a piece is complete, its digest and the next header have been passed, too: with pax headers a few KiB.
_KEPT_BYTES: Final = PIECE_MAX_BYTES + (4 << 20)
# tar pads to 10 KiB, or to 512 KiB on request.
_PADDING_MAX_BYTES: Final = 1 << 20


class XvaStream:
    """The disk in the folder `folder` of the compressed archive `over`, which it owns; `size_bytes` is from ova.xml.

    At the end of an archive's last disk the file is read to its own end, with its checksums. To go back is possible, and begins
    from the start.
    """

    max_readers = 1

    def __init__(self, over: DiskReader, packing: Packing, folder: str, size_bytes: int, name: str) -> None:
        self.size = size_bytes
        self._over, self._packing, self._folder = over, packing, folder
        self._archive_name, self._name = name, f"{folder} in {name}"
        self._lock = threading.Lock()
        self._failure: SynvirtError | None = None
        self._pace: Pace | None = None
        self._begin()

    def pass_others(self, pace: Pace) -> None:
        """Passes the disks before this one at that pace, in steps of a member. MalformedArchive, Cancelled, and errors of the
        archive."""
        with self._lock:
            self._pace = pace
            self._pass(0)
            self._pace = None

    def extents(self) -> Iterator[Extent]:
        return iter([Extent(0, self.size)] if self.size else [])

    def read_into(self, offset: int, buffer: memoryview) -> None:
        if offset < 0 or offset + len(buffer) > self.size:
            raise DiskReadFailed(f"{self._name}: {len(buffer)} bytes at offset {offset} are outside its {self.size}")
        with self._lock:
            if self._failure is not None:
                raise self._failure
            try:
                self._read(offset, buffer)
            except SynvirtError as failure:  # a failed walk cannot go on: the next caller gets the same error
                self._failure = failure
                raise

    def layer(self) -> Layer:
        return Layer(name=self._name, format="xva", size_bytes=self.size, facts={"compression": self._packing})

    def close(self) -> None:
        self._over.close()

    def _begin(self) -> None:
        self._archive = Passing(self._over, self._packing, self._archive_name, kept_bytes=_KEPT_BYTES)
        self._pieces = pieces(self._members(), self._folder, self.size, self._name)
        self._begun, self._at_end = False, False
        self._piece: Piece | None = None
        self._content: memoryview | None = None  # the piece's content, once a part of it was asked for
        self._floor = 0  # all before it has passed

    def _read(self, offset: int, buffer: memoryview) -> None:
        if offset < self._floor:
            self._begin()
        at, end = offset, offset + len(buffer)
        self._pass(at)
        while at < end and (piece := self._piece) is not None and piece.start < end:
            fill_zeros(buffer[at - offset : max(piece.start, at) - offset])
            at = max(piece.start, at)
            until = min(piece.end, end)
            self._fill(piece, at - piece.start, buffer[at - offset : until - offset])
            at = until
            self._pass(at)
        fill_zeros(buffer[at - offset :])

    def _fill(self, piece: Piece, inner: int, part: memoryview) -> None:
        if len(part) == piece.length:
            read_piece(self._archive, piece, part, self._name)
            return
        if self._content is None:
            self._content = memoryview(bytearray(piece.length))
            read_piece(self._archive, piece, self._content, self._name)
        part[:] = self._content[inner : inner + len(part)]

    def _pass(self, at: int) -> None:
        """Goes on to the piece that ends behind `at`, and to the file's end if there is none."""
        while not self._begun or (self._piece is not None and self._piece.end <= at):
            self._floor = self._piece.end if self._piece is not None else 0
            self._piece, self._content = next(self._pieces, None), None
            self._begun = True
            if self._piece is None and self._at_end:
                self._archive.finish(_PADDING_MAX_BYTES)

    def _members(self) -> Iterator[tar.Member]:
        for member in tar.walk(self._archive):
            # Other disks' pieces are unpacked to skip them: a member with petabytes of zeros takes a few megabytes when
            # compressed.
            if member.size > PIECE_MAX_BYTES:
                raise MalformedArchive(
                    f"{self._archive_name}: member {member.name!r} has {member.size} bytes at offset {member.offset} of the "
                    f"archive; none of an XVA has over {PIECE_MAX_BYTES}"
                )
            if self._pace is not None and not member.name.startswith(f"{self._folder}/"):
                self._pace.take(member.size)
            yield member
        self._at_end = True
