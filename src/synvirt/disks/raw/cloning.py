"""Avoids the copy of bytes that lie in a file of the volume's own file system: they are shared by reflink.

    rest = clone(reader, writer)      # milliseconds, whatever the size
    copy(rest, writer)                # what could not be cloned

`ioctl_ficlonerange(2)`: XFS (reflink=1), Btrfs, bcachefs, overlays of them, and servers of NFS 4.2 or SMB 3 that offer it. The
volume keeps its shared bytes when the source is removed. Elsewhere nothing is cloned, and the rest is everything.
"""

import errno
import fcntl
import os
import struct
from collections.abc import Callable, Iterator

from synvirt.blocks import DiskReader, DiskWriter, Extent, Place, Placed, piece_bytes
from synvirt.disks.changed import Over
from synvirt.disks.raw.files import RawWriter
from synvirt.errors import Cancelled
from synvirt.sizes import GIB

# linux/fs.h: _IOW(0x94, 13, struct file_clone_range), which is four 64-bit numbers.
FICLONERANGE = 0x4020940D
# linux/fs.h: _IOW(0x94, 9, int).
FICLONE = 0x40049409
# The errors of a file or a kernel without FICLONERANGE, whatever the range.
NOT_KNOWN = frozenset({errno.EOPNOTSUPP, errno.ENOTTY, errno.ENOSYS})
# The kernel holds both files' locks during a call: this limits how long a cancel waits.
STEP_BYTES = 4 * GIB
# A range behind any disk's end.
_NOTHING = (1 << 64, 1 << 64)


def clone(reader: DiskReader, writer: DiskWriter, stop: Callable[[], bool] = lambda: False) -> "Rest":
    """Lets the writer share what it can with the files that the reader reads from; gives a reader of what is left to copy.

    May be called again after a crash: the same is cloned again. Cancelled, once `stop()` is True.
    """
    cloned: list[tuple[int, int]] = []
    if isinstance(reader, Placed) and isinstance(writer, RawWriter) and _may_clone(writer.descriptor):
        for piece in _pieces(reader.places(), os.fstatvfs(writer.descriptor).f_bsize):
            if stop():
                raise Cancelled
            try:
                _clone(writer.descriptor, piece)
            except OSError:
                break  # no reflinks here, or no room for them: the copy works, or gives a better error
            if cloned and cloned[-1][1] == piece.start:
                cloned[-1] = (cloned[-1][0], piece.start + piece.length)
            else:
                cloned.append((piece.start, piece.start + piece.length))
    return Rest(reader, cloned)


def _may_clone(descriptor: int) -> bool:
    """Whether the file's own file system may know reflinks. It is asked to share a byte with itself, which none does: to look
    for the places of data first would take a walk over each page of a file in memory."""
    try:
        _clone(descriptor, Place(start=1, length=1, descriptor=descriptor, at=1))
    except OSError as error:
        return error.errno not in NOT_KNOWN
    return True


def clone_file(source: int, target: int) -> None:
    """The file behind `target` shares all bytes of that behind `source` from then on. OSError, where their file system cannot
    do that, or they are in two."""
    fcntl.ioctl(target, FICLONE, source)


def _pieces(places: Iterator[Place], block_bytes: int) -> Iterator[Place]:
    """The whole blocks of places: both offsets must be multiples of the file system's block size."""
    for place in places:
        if (place.start - place.at) % block_bytes:
            continue
        start = -(-place.start // block_bytes) * block_bytes
        end = (place.start + place.length) // block_bytes * block_bytes
        for at in range(start, end, STEP_BYTES):
            yield Place(at, min(STEP_BYTES, end - at), place.descriptor, place.at + at - place.start)


def _clone(descriptor: int, piece: Place) -> None:
    fcntl.ioctl(descriptor, FICLONERANGE, struct.pack("=qQQQ", piece.descriptor, piece.at, piece.length, piece.start))


class Rest(Over):
    """A reader without the cloned extents, which are ascending ranges (start, end)."""

    def __init__(self, over: DiskReader, cloned: list[tuple[int, int]]) -> None:
        super().__init__(over)
        self._cloned = cloned
        self.piece_bytes = piece_bytes(over)
        self.bytes_cloned = sum(end - start for start, end in cloned)

    def extents(self) -> Iterator[Extent]:
        cloned = iter(self._cloned)
        start, end = next(cloned, _NOTHING)
        for extent in self._over.extents():
            at = extent.start
            while at < extent.end:
                while end <= at:
                    start, end = next(cloned, _NOTHING)
                upto = min(start if at < start else end, extent.end)
                if at < start:
                    yield Extent(at, upto - at, extent.zero)
                at = upto
