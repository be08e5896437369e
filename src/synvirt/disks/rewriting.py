"""A writer that skips what is right already: a comparison of whole disks writes only the differences.

Volumes may have snapshots and copies, for which rewritten blocks would cost space; and an SSD lives longer.
"""

import threading
from contextlib import suppress

from synvirt.blocks import DiskReader, DiskWriter
from synvirt.errors import DiskReadFailed


class ComparingWriter:
    """`inner`, with `written`, a reader of the same volume, for the present bytes. Closes both."""

    def __init__(self, inner: DiskWriter, written: DiskReader) -> None:
        self._inner, self._written = inner, written
        self._buffers = threading.local()

    @property
    def size(self) -> int:
        return self._inner.size

    @property
    def max_writers(self) -> int:
        return self._inner.max_writers if self._written.max_readers > 1 else 1

    def write(self, offset: int, buffer: memoryview) -> None:
        if 0 <= offset <= self.size - len(buffer):
            present = self._buffer(len(buffer))
            with suppress(DiskReadFailed):  # it may be writable: a disk puts another sector in the place of a bad one
                self._written.read_into(offset, memoryview(present)[: len(buffer)])
                if present.startswith(buffer):  # one memcmp
                    return
        self._inner.write(offset, buffer)

    def zero(self, offset: int, length: int) -> None:
        self._inner.zero(offset, length)

    def flush(self) -> None:
        self._inner.flush()

    def close(self) -> None:
        self._written.close()
        self._inner.close()

    def _buffer(self, length: int) -> bytearray:
        """This thread's buffer, as large as its largest request so far."""
        held: bytearray | None = getattr(self._buffers, "held", None)
        if held is None or len(held) < length:
            held = self._buffers.held = bytearray(length)
        return held
