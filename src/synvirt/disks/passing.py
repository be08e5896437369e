"""A writer whose bytes are not kept in the page cache: a disk that comes over a network is larger than memory.

Kept, they would displace the data of guests and of the host. And on a virtual machine, memory that was never touched costs more
than the copy (a whole disk by NBD takes half as long without it).
"""

import contextlib
import ctypes
import os
import threading
from collections import deque

from synvirt.blocks import DiskWriter
from synvirt.sizes import MIB

# How much is being written to the disk while the copy goes on; what lies before it is on the disk, and is dropped.
WINDOW_BYTES = 32 * MIB
# The disk begins to write after this much; with pieces of 4 MiB it is idle a quarter of the time.
PIECE_BYTES = MIB

# sync_file_range(2), linux/fs.h: Python has no names for them.
WAIT_BEFORE, WRITE, WAIT_AFTER = 1, 2, 4

_libc = ctypes.CDLL(None, use_errno=True)
_libc.sync_file_range.argtypes = [ctypes.c_int, ctypes.c_int64, ctypes.c_int64, ctypes.c_uint]


class PassingWriter:
    """`inner`, whose file or device is at `path`."""

    def __init__(self, inner: DiskWriter, path: str) -> None:
        self._inner = inner
        self._descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        self._closed = False
        self._writing = threading.Lock()
        self._lock = threading.Lock()
        self._on_their_way: deque[tuple[int, int]] = deque()
        self._bytes = 0

    @property
    def size(self) -> int:
        return self._inner.size

    @property
    def max_writers(self) -> int:
        return self._inner.max_writers

    def write(self, offset: int, buffer: memoryview) -> None:
        if not 0 <= offset <= self.size - len(buffer):
            self._inner.write(offset, buffer)  # its refusal
            return
        for at in range(0, len(buffer), PIECE_BYTES):
            self._pass(offset + at, buffer[at : at + PIECE_BYTES])

    def _pass(self, offset: int, piece: memoryview) -> None:
        with self._writing:
            self._inner.write(offset, piece)
        _libc.sync_file_range(self._descriptor, offset, len(piece), WRITE)  # starts writing, without waiting
        arrived: list[tuple[int, int]] = []
        with self._lock:
            self._on_their_way.append((offset, len(piece)))
            self._bytes += len(piece)
            while self._bytes > WINDOW_BYTES:
                arrived.append(self._on_their_way.popleft())
                self._bytes -= arrived[-1][1]
        for start, length in arrived:
            self._let_go(start, length)

    def zero(self, offset: int, length: int) -> None:
        self._inner.zero(offset, length)

    def flush(self) -> None:
        self._inner.flush()

    def close(self) -> None:
        self._inner.close()
        if not self._closed:
            self._closed = True
            os.close(self._descriptor)

    def _let_go(self, offset: int, length: int) -> None:
        """Advice, not an order. It waits first, as pages that are being written stay; a flush() reports their errors."""
        _libc.sync_file_range(self._descriptor, offset, length, WAIT_BEFORE | WRITE | WAIT_AFTER)
        with contextlib.suppress(OSError):
            os.posix_fadvise(self._descriptor, offset, length, os.POSIX_FADV_DONTNEED)
