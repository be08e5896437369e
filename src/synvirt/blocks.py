"""The two interfaces of the data path, and their laws.

    DiskReader ── extents ──▶ copy() ──▶ DiskWriter

A full copy is the extents of the whole disk; a delta, the extents changed since a watermark; a restore uses the same two
interfaces in the other direction. An image reader (qcow2, vmdk, …) is a DiskReader that reads from another DiskReader, which
has the bytes of its file. So any format may lie in any other.

All offsets and lengths are bytes. All methods block; call them from plain threads, never from an event loop.
"""

import mmap
from collections.abc import Iterable, Iterator
from typing import NamedTuple, Protocol, runtime_checkable

_ZEROS = bytes(1 << 20)


class Extent(NamedTuple):
    """`length` bytes from `start`; `zero` means that they read as zeros and need not be read."""

    start: int
    length: int
    zero: bool = False

    @property
    def end(self) -> int:
        return self.start + self.length


@runtime_checkable
class DiskReader(Protocol):
    """A disk at one point in time.

    Laws:
    - `extents()` ascends, never overlaps, lies within `size`, and has no extent of length 0. The copy leaves a byte that is in
      no extent as it is (a delta). A whole disk's extents leave no gap.
    - `extents()` may be called again, from any thread, with the same answer. It is lazy, so that 64 TiB cost no memory.
    - `read_into()` is positional and fills the whole buffer or raises; it may be called from `max_readers` threads at once.
      It may cross extents of both kinds, at any alignment; zero extents fill with zeros.
    - `max_readers == 1` promises that reads come in ascending order, each byte at most once, so a stream qualifies.
    - Every failure is a SynvirtError: DiskReadFailed (with the offset) or, where the image itself is wrong, MalformedArchive.
    - `close()` may be called twice.
    """

    @property
    def size(self) -> int: ...
    @property
    def max_readers(self) -> int: ...
    def extents(self) -> Iterator[Extent]: ...
    def read_into(self, offset: int, buffer: memoryview) -> None: ...
    def close(self) -> None: ...


@runtime_checkable
class DiskWriter(Protocol):
    """A volume being written.

    Laws:
    - `write()` and `zero()` are positional, take any alignment, and may be called from `max_writers` threads at once on ranges
      that do not overlap. The buffer is not kept after `write()` returns.
    - `zero()` makes the range read as zeros, by discard where the volume can, else by writing them.
    - What was written before `flush()` began is durable when it returns.
    - Writing outside `0 ≤ offset, offset + length ≤ size` raises and writes nothing.
    - Every failure is a DiskWriteFailed that names the offset.
    - `close()` may be called twice, and does not flush.
    """

    @property
    def size(self) -> int: ...
    @property
    def max_writers(self) -> int: ...
    def write(self, offset: int, buffer: memoryview) -> None: ...
    def zero(self, offset: int, length: int) -> None: ...
    def flush(self) -> None: ...
    def close(self) -> None: ...


def piece_bytes(*sides: object) -> int:
    """The bytes that a copy between these readers and writers moves at a time; 0: a whole request.

    Where all of them have the page cache on their other side, they say so by an attribute `piece_bytes`: a piece that was read
    is written while it is in the processor's own cache, and a piece more costs one call. A reader that inflates, or asks a
    server, has no such attribute: it is fastest with much at a time.
    """
    return max(pieces) if all(pieces := [getattr(side, "piece_bytes", 0) for side in sides]) else 0


def bytes_of(reader: DiskReader, offset: int, length: int) -> bytes:
    """A few bytes of a disk or file, for a header. Raises what the reader raises."""
    content = bytearray(length)
    reader.read_into(offset, memoryview(content))
    return bytes(content)


def fill_zeros(into: memoryview) -> None:
    """Overwrites the memory with zeros."""
    for at in range(0, len(into), len(_ZEROS)):
        into[at : at + len(_ZEROS)] = _ZEROS[: len(into) - at]


class ExtentCursor:
    """Gives the extents in ascending ranges. It walks the extents once, and keeps one at a time."""

    def __init__(self, extents: Iterable[Extent]) -> None:
        self._extents = iter(extents)
        self._held: Extent | None = None

    def between(self, start: int, end: int) -> Iterator[Extent]:
        """The parts of the extents that lie in start to end. Ranges must ascend from call to call."""
        while True:
            if self._held is None or self._held.end <= start:
                self._held = next(self._extents, None)
                if self._held is None:
                    return
                continue
            if self._held.start >= end:
                return
            first, last = max(start, self._held.start), min(end, self._held.end)
            yield Extent(first, last - first, self._held.zero)
            if self._held.end >= end:
                return
            start = last


class Place(NamedTuple):
    """The disk's `length` bytes from `start` on are, unchanged, at offset `at` of an open file."""

    start: int
    length: int
    descriptor: int
    at: int


@runtime_checkable
class Placed(Protocol):
    """A DiskReader that can also say where in a file its bytes lie, so that a volume may share them (`disks.raw.cloning`).

    Places ascend, never overlap, and lie in data extents. Compressed data, and data in no file, have none.
    """

    def places(self) -> Iterator[Place]: ...


def coalesced(extents: Iterable[Extent]) -> Iterator[Extent]:
    """The same extents, with neighbours of the same kind joined, so that the caller sees few long runs."""
    held: Extent | None = None
    for extent in extents:
        if held is not None and held.end == extent.start and held.zero == extent.zero:
            held = Extent(held.start, held.length + extent.length, held.zero)
            continue
        if held is not None:
            yield held
        held = extent
    if held is not None:
        yield held


def new_buffer(length: int) -> memoryview:
    """A buffer of zeros for the bytes of disks. The kernel gives its pages when they are first used, and takes them back when
    nothing refers to it. It begins at a page boundary. A `bytearray` does not: each page of a file would lie across two pages
    of memory, and the kernel would need a sixth more processor time to copy between them."""
    return memoryview(mmap.mmap(-1, max(length, 1), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS))[:length]
