"""Pieces of a copy's buffers as libnbd takes them, each made once.

libnbd's Python library (seen in 1.14.2) never lets go of a buffer that an asynchronous read filled: 200 bytes for each
request, which is 800 MiB for each TiB copied; and the memory itself, where that is not used again. So a buffer that is used
again and again (`synvirt.buffers`) is given to it as the same objects each time, and any other is read into synchronously.
"""

import ctypes
import mmap

import nbd

# Of 256 KiB each in the buffers of a copy's threads, and one of another length at an extent's end. What is more is forgotten:
# some megabytes.
_PIECES_MAX = 1 << 14


def lasts(buffer: memoryview) -> bool:
    """It is one that a copy uses again."""
    return isinstance(buffer.obj, mmap.mmap)


class Pieces:
    """Of one reader, for any thread."""

    def __init__(self) -> None:
        self._made: dict[tuple[int, int], nbd.Buffer] = {}

    def of(self, piece: memoryview) -> nbd.Buffer:
        """`piece`, which `lasts`. A piece that is known keeps its memory, so its address is nobody else's."""
        place = ctypes.addressof(ctypes.c_char.from_buffer(piece)), len(piece)
        found = self._made.get(place)
        if found is None:
            if len(self._made) >= _PIECES_MAX:
                self._made.clear()
            found = self._made[place] = nbd.Buffer.from_buffer(piece)
        return found
