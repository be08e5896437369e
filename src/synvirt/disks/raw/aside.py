"""A volume that must stay as it is for a while: what is written to it goes to a side file, and is folded into it later.

    volume ◀─ read ── an overlay's user (a rehearsed guest)
       ▲
       │ fold, when no reader needs the old bytes       block marked? its bytes are the side file's, else the volume's
    side file + marks ◀─ AsideWriter (passes)

The side file is sparse and has the volume's size. The file of marks has a byte for each block: 1, if the side file has it. A
block is marked only after it is in the side file completely; and marks are written after the side file was flushed, so a crash
leaves marks that are true. The volume and its side file together are the disk at any moment: fold() may be interrupted
anywhere, and is done again.
"""

import contextlib
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

from synvirt.blocks import Extent, ExtentCursor, coalesced
from synvirt.copying import Copied, copy
from synvirt.disks.raw.files import CALLS_AT_ONCE, HINTS, RawReader, open_file_writer, punch_hole
from synvirt.disks.specs import AsideSpec, AsideWriterSpec
from synvirt.errors import DiskReadFailed, DiskWriteFailed
from synvirt.sizes import KIB

# A block is read from the volume once, when a part of it is written.
BLOCK_BYTES = 64 * KIB
# Blocks of a larger disk are larger, so that its marks need at most 16 MiB.
BLOCKS_MAX = 1 << 24
_MARK = b"\1"


def block_bytes(size: int) -> int:
    """The bytes of a block, for a disk of this size."""
    found = BLOCK_BYTES
    while found * BLOCKS_MAX < size:
        found *= 2
    return found


def marks_bytes(size: int) -> int:
    """How large the file of marks is."""
    return -(-size // block_bytes(size))


class Marks:
    """Which blocks of a disk of `size` bytes are in the side file. Thread-safe."""

    def __init__(self, path: str, size: int) -> None:
        self.block = block_bytes(size)
        self.lock = threading.Lock()
        # The blocks that were marked since the last flush.
        self._since: tuple[int, int] | None = None
        try:
            found = Path(path).read_bytes()
        except OSError as error:
            raise _failed(path, "be read", error) from error
        self._path, self._marks = path, bytearray(found.ljust(marks_bytes(size), b"\0"))

    def __contains__(self, number: int) -> bool:
        return self._marks[number] == 1

    def add(self, first: int, end: int) -> None:
        """Marks blocks. Call it with the lock."""
        self._marks[first:end] = _MARK * (end - first)
        since = self._since or (first, end)
        self._since = min(since[0], first), max(since[1], end)

    def runs(self, start: int, end: int) -> Iterator[tuple[int, int, bool]]:
        """The bytes from start to end in ascending ranges (start, end, in the side file)."""
        at = start
        while at < end:
            number = at // self.block
            aside = self._marks[number]
            other = self._marks.find(1 - aside, number, -(-end // self.block))
            upto = end if other < 0 else min(end, other * self.block)
            yield at, upto, aside == 1
            at = upto

    def has_some(self) -> bool:
        """Whether a block is in the side file."""
        return _MARK in self._marks

    def taken(self) -> tuple[int, bytes] | None:
        """Where marks have changed since the last call, and how they are now."""
        with self.lock:
            since, self._since = self._since, None
            return None if since is None else (since[0], bytes(self._marks[since[0] : since[1]]))

    def keep(self, first: int, marks: bytes) -> None:
        """Writes marks; durable on return."""
        try:
            descriptor = os.open(self._path, os.O_RDWR | os.O_CLOEXEC)
            try:
                os.pwrite(descriptor, marks, first)
                os.fdatasync(descriptor)
            finally:
                os.close(descriptor)
        except OSError as error:
            raise _failed(self._path, "be written", error) from error

    def forget(self) -> None:
        """No block is in the side file any more."""
        self._marks = bytearray(len(self._marks))
        self.keep(0, bytes(self._marks))


def _failed(path: str, what: str, error: OSError) -> DiskWriteFailed:
    number = error.errno or 0
    return DiskWriteFailed(f"{Path(path).name} cannot {what}: {os.strerror(number)}", hint=HINTS.get(number))


class AsideReader:
    """The disk: the volume with what is in the side file in its place. `only_aside`: its extents are only those in the side
    file."""

    max_readers = CALLS_AT_ONCE

    def __init__(self, spec: AsideSpec, *, only_aside: bool = False) -> None:
        self.size, self._only_aside = spec.size_bytes, only_aside
        self.marks = Marks(spec.marks, spec.size_bytes)
        with ExitStack() as opened:
            self._volume = RawReader(spec.path, length=spec.size_bytes)
            opened.callback(self._volume.close)
            self._side = RawReader(spec.aside, length=spec.size_bytes)
            opened.pop_all()

    def extents(self) -> Iterator[Extent]:
        return coalesced(self._extents())

    def _extents(self) -> Iterator[Extent]:
        volume, side = ExtentCursor(self._volume.extents()), ExtentCursor(self._side.extents())
        for start, end, aside in self.marks.runs(0, self.size):
            if aside:
                yield from side.between(start, end)
            elif not self._only_aside:
                yield from volume.between(start, end)

    def read_into(self, offset: int, buffer: memoryview) -> None:
        if offset < 0 or offset + len(buffer) > self.size:
            self._volume.read_into(offset, buffer)  # its refusal
            return
        for start, end, aside in self.marks.runs(offset, offset + len(buffer)):
            (self._side if aside else self._volume).read_into(start, buffer[start - offset : end - offset])

    def close(self) -> None:
        self._volume.close()
        self._side.close()


class AsideWriter:
    """Writes to the side file, and never to the volume."""

    max_writers = CALLS_AT_ONCE

    def __init__(self, spec: AsideWriterSpec) -> None:
        self.size, self._name = spec.size_bytes, Path(spec.path).name
        self._marks = Marks(spec.marks, spec.size_bytes)
        with ExitStack() as opened:
            self._volume = RawReader(spec.path, length=spec.size_bytes)
            opened.callback(self._volume.close)
            self._side = open_file_writer(spec.aside, spec.size_bytes)
            opened.pop_all()

    def write(self, offset: int, buffer: memoryview) -> None:
        if self._is_some(offset, len(buffer)):
            self._lift(offset, offset + len(buffer))
            self._side.write(offset, buffer)
            self._mark(offset, offset + len(buffer))

    def zero(self, offset: int, length: int) -> None:
        if self._is_some(offset, length):
            self._lift(offset, offset + length)
            self._side.zero(offset, length)
            self._mark(offset, offset + length)

    def _is_some(self, offset: int, length: int) -> bool:
        if offset < 0 or length < 0 or offset + length > self.size:
            raise DiskWriteFailed(f"{self._name}: {length} bytes at offset {offset} are outside its {self.size}")
        return length > 0

    def _lift(self, start: int, end: int) -> None:
        """Takes the blocks at the edges, of which only a part is written, to the side file."""
        block = self._marks.block
        for number in {start // block, (end - 1) // block}:
            first, last = number * block, min((number + 1) * block, self.size)
            if start <= first and last <= end:
                continue
            with self._marks.lock:
                if number not in self._marks:
                    content = memoryview(bytearray(last - first))
                    try:
                        self._volume.read_into(first, content)
                    except DiskReadFailed as error:  # it is the volume that fails, and not the source
                        raise DiskWriteFailed(
                            f"{self._name}: the block at offset {first} is written in part, and the rest of it {error.detail}",
                            hint=error.hint,
                        ) from error
                    self._side.write(first, content)
                    self._marks.add(number, number + 1)

    def _mark(self, start: int, end: int) -> None:
        with self._marks.lock:
            self._marks.add(start // self._marks.block, -(-end // self._marks.block))

    def flush(self) -> None:
        taken = self._marks.taken()
        self._side.flush()
        if taken is not None:
            self._marks.keep(*taken)

    def close(self) -> None:
        self._volume.close()
        self._side.close()


def fold(
    spec: AsideWriterSpec,
    *,
    stop: Callable[[], bool] = lambda: False,
    on_progress: Callable[[Copied], None] = lambda copied: None,
) -> None:
    """Copies what is in the side file into the volume, and forgets it there; durable on return. Cancelled, once `stop()` is
    True; then, and after a crash, it is called again. `on_progress`: see `copy`."""
    with ExitStack() as opened:
        read = AsideSpec(path=spec.path, aside=spec.aside, marks=spec.marks, size_bytes=spec.size_bytes)
        reader = AsideReader(read, only_aside=True)
        opened.callback(reader.close)
        if not reader.marks.has_some():  # folded already
            return
        writer = open_file_writer(spec.path, spec.size_bytes)
        opened.callback(writer.close)
        copy(reader, writer, fresh=False, stop=stop, on_progress=on_progress)
        reader.marks.forget()
        side = open_file_writer(spec.aside, spec.size_bytes)
        opened.callback(side.close)
        with contextlib.suppress(OSError):  # its room is given back when it is removed
            punch_hole(side.descriptor, 0, spec.size_bytes)
