"""When a guest last read from an export, seen by other processes of this host: a copy of the same disk waits meanwhile.

exporter ─▶ Noticed(reader) ─▶ 16 bytes of a shared file ─▶ Yielding ─▶ the copy of the same disk
"""

import mmap
import os
import struct
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from synvirt.blocks import DiskReader, Extent
from synvirt.errors import Cancelled, DiskReadFailed

# The moment of the last read's begin or end (CLOCK_MONOTONIC, one for the whole host), and how many reads are under way.
_FORM = struct.Struct("=QQ")
# A guest that boots reads again within this time, mostly.
QUIET_S = 0.03
# A guest that never stops reading must not stop the copy, as only the copy makes its reads fast. Each piece (some MiB) waits
# this long at most.
WAIT_MOST_S = 0.5
_LOOK_EVERY_S = 0.005


class Activity:
    """The writer's end. Safe from several threads. It is written by calls and not by a map: a page of a map that a full disk
    does not take, as on Btrfs, would end the process, and with it the disks of a guest (SIGBUS)."""

    def __init__(self, path: Path) -> None:
        # A file that is there is not cut off first: a copy that has mapped it would be killed at its next look (SIGBUS).
        self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        weakref.finalize(self, os.close, self._file)
        self._lock, self._under_way = threading.Lock(), 0
        try:
            os.pwrite(self._file, bytes(_FORM.size), 0)
        except OSError:
            if os.fstat(self._file).st_size < _FORM.size:
                raise

    @contextmanager
    def reading(self) -> Iterator[None]:
        """Marks that the guest reads, for the length of the block."""
        self._note(1)
        try:
            yield
        finally:
            self._note(-1)

    def _note(self, more: int) -> None:
        with self._lock:
            self._under_way += more
            with suppress(OSError):  # the copy only does not see it
                os.pwrite(self._file, _FORM.pack(time.monotonic_ns(), self._under_way), 0)


class Noticed:
    """The same reader; its reads are noted."""

    def __init__(self, reader: DiskReader, activity: Activity) -> None:
        self._reader, self._activity = reader, activity
        self.size, self.max_readers = reader.size, reader.max_readers

    def extents(self) -> Iterator[Extent]:
        return self._reader.extents()

    def read_into(self, offset: int, buffer: memoryview) -> None:
        with self._activity.reading():
            self._reader.read_into(offset, buffer)

    def close(self) -> None:
        self._reader.close()


class Yielding:
    """`take` is called before each read of a copy: it lets a guest's reads go first. Cancelled, once `stop()` is true."""

    def __init__(self, path: Path, stop: Callable[[], bool]) -> None:
        try:
            with path.open("rb") as file:
                self._shared = mmap.mmap(file.fileno(), _FORM.size, prot=mmap.PROT_READ)
        except (OSError, ValueError) as error:
            raise DiskReadFailed(
                "what the guest reads cannot be seen: its export is not there", hint="it is made again"
            ) from error
        self._stop = stop

    def take(self, _amount: int) -> None:
        """Waits while the guest reads, WAIT_MOST_S at most. Cancelled."""
        until = time.monotonic() + WAIT_MOST_S
        while self._guest_reads() and time.monotonic() < until:
            if self._stop():
                raise Cancelled
            time.sleep(_LOOK_EVERY_S)

    def _guest_reads(self) -> bool:
        at_ns, under_way = _FORM.unpack_from(self._shared)
        return bool(under_way > 0 or time.monotonic_ns() - at_ns < QUIET_S * 1e9)
