"""Batches of packed streams: what one read gets of an image, and the places of its blocks in a buffer.

A stream is unpacked in a tenth of a millisecond, so what Python does for each of them counts: plain tuples, and addresses
instead of views. A loop in C was measured: a copy of zstd took 3 % less time, one of deflate the same.
"""

import ctypes
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import TypeAlias

from synvirt.blocks import new_buffer
from synvirt.disks.packed import Damaged

# (start, length, at, size): the `length` bytes from `start` of the packed bytes hold `size` bytes for `at` of the buffer. What
# follows the stream within its bytes is ignored.
Stream: TypeAlias = tuple[int, int, int, int]
# (a packed stream, a buffer): unpacks it, and gives how many bytes of the buffer it filled; Damaged. Nothing is written past
# the buffer, which limits the cost of any hostile stream.
One: TypeAlias = Callable[[memoryview, memoryview], int]
# (packed bytes, their streams, the buffer): unpacks each stream into its place. Damaged.
Each: TypeAlias = Callable[[memoryview, Sequence[Stream], memoryview], None]


class Batches:
    """Unpacks an image's batches, in any number of threads at once, each with its own buffers."""

    def __init__(self, each: Each) -> None:
        self._each = each
        self._own = threading.local()

    def buffer(self, use: str, length: int) -> memoryview:
        """A buffer of this thread, which is kept: new memory for each batch would cost as much as reading it."""
        held: memoryview | None = getattr(self._own, use, None)
        if held is None or len(held) < length:
            held = new_buffer(length)
            setattr(self._own, use, held)
        return held[:length]

    def unpack(self, packed: memoryview, streams: Sequence[Stream], into: memoryview) -> None:
        """Unpacks each stream into its place, which may begin before `into` or end behind it: then that part is left out.
        Damaged."""
        room, whole, parts = len(into), list[Stream](), list[Stream]()
        for stream in streams:
            (whole if 0 <= stream[2] <= room - stream[3] else parts).append(stream)
        self._each(packed, whole, into)
        for start, length, at, size in parts:
            block = self.buffer("block", size)
            try:
                self._each(packed, [(start, length, 0, size)], block)
            except Damaged as damaged:
                damaged.at = at
                raise
            into[max(0, at) : at + size] = block[max(0, -at) : room - at]


def unpack_one(one: One, packed: memoryview, stream: Stream, into: memoryview) -> None:
    """Unpacks a stream of a batch by `one`. Damaged."""
    start, length, at, size = stream
    try:
        filled = one(packed[start : start + length], into[at : at + size])
        if filled < size:
            raise Damaged(f"it holds {filled} bytes, not {size}")  # noqa: TRY301
    except Damaged as damaged:
        damaged.at = at
        raise


def unpack_each(one: One, packed: memoryview, streams: Sequence[Stream], into: memoryview) -> None:
    """An `Each` that calls `one` for each stream. Damaged."""
    for stream in streams:
        unpack_one(one, packed, stream, into)


def addresses(packed: memoryview, streams: Sequence[Stream], into: memoryview) -> Iterator[tuple[int, int, int, int]]:
    """Of each stream its address, its length, the address of its place, and its size. ValueError for one outside of its buffer:
    a library would read or write memory of others."""
    source, held, target, room = address(packed), packed.nbytes, address(into), into.nbytes
    for start, length, at, size in streams:
        if not (0 <= start < start + length <= held and 0 <= at < at + size <= room):
            raise ValueError(f"{length} bytes from {start} of {held}, for {size} at {at} of {room}")
        yield source + start, length, target + at, size


def address(view: memoryview) -> int:
    """Of a view's first byte. It is writable, contiguous, and not empty."""
    return ctypes.addressof(ctypes.c_char.from_buffer(view))
