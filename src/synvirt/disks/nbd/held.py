"""Pieces of a copy's buffers in libnbd's form, each made only once.

libnbd's Python library (seen in 1.14.2) never frees the buffer of an asynchronous read: 200 bytes per request, which is 800 MiB
per TiB copied, and the memory itself, unless it is reused. So a reused buffer (`new_buffer`) is given to it as the same
objects each time, and any other is read synchronously.
"""

import ctypes
import mmap

import nbd

# Pieces of 256 KiB in the buffers of a copy's threads, and one of another length at an extent's end. More are forgotten: some
# megabytes.
_PIECES_MAX = 1 << 14


def lasts(buffer: memoryview) -> bool:
    """Whether a copy uses the buffer again."""
    return isinstance(buffer.obj, mmap.mmap)


class Pieces:
    """The pieces of one reader, for any thread."""

    def __init__(self) -> None:
        self._made: dict[tuple[int, int], nbd.Buffer] = {}

    def of(self, piece: memoryview) -> nbd.Buffer:
        """`piece` must be one that `lasts`. A known piece keeps its memory, so no other has its address."""
        place = ctypes.addressof(ctypes.c_char.from_buffer(piece)), len(piece)
        found = self._made.get(place)
        if found is None:
            if len(self._made) >= _PIECES_MAX:
                self._made.clear()
            found = self._made[place] = nbd.Buffer.from_buffer(piece)
        return found
