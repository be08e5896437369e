"""Disks in memory, written as strings, and wrappers that make any disk fail, dawdle or lie.

A character is a block: a letter is data (its byte, repeated), `0` is data that is all zeros, `-` is a zero extent, and `.` is
in no extent at all (nothing to say: a delta). "AA0-B" is a disk of five blocks. Complete stand-ins: they pass the contract
suites, and check on their own that callers keep to `max_readers` and `max_writers`.
"""

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from itertools import groupby

from synvirt.blocks import DiskReader, DiskWriter, Extent
from synvirt.errors import DiskReadFailed, DiskWriteFailed

BLOCK_BYTES = 64 << 10


def content_of(blocks: str, block_bytes: int = BLOCK_BYTES) -> bytes:
    """What such a disk reads as; `.` reads as zeros."""
    return b"".join((block.encode() if block.isalpha() else b"\0") * block_bytes for block in blocks)


def blocks_of(content: bytes, block_bytes: int = BLOCK_BYTES) -> str:
    """The string that describes content, for a readable comparison; `?` where a block is not of one byte."""
    names = []
    for at in range(0, len(content), block_bytes):
        block = content[at : at + block_bytes]
        names.append("?" if block != block[:1] * len(block) else chr(block[0]) if block[0] else "0")
    return "".join(names)


def extents_of(blocks: str, block_bytes: int = BLOCK_BYTES) -> list[Extent]:
    extents, at = [], 0
    for sort, run in groupby(blocks, lambda block: block if block in "-." else "data"):
        length = len(list(run)) * block_bytes
        if sort != ".":
            extents.append(Extent(at, length, zero=sort == "-"))
        at += length
    return extents


class _Turnstile:
    """Counts calls under way, and fails the caller that comes in when all places are taken. Each takes `seconds`."""

    def __init__(self, places: int, seconds: float) -> None:
        self._places, self._seconds, self._taken, self._lock = places, seconds, 0, threading.Lock()

    @contextmanager
    def passing(self) -> Iterator[None]:
        with self._lock:
            self._taken += 1
            assert self._taken <= self._places, f"{self._taken} calls at once, where {self._places} are allowed"
        try:
            time.sleep(self._seconds)
            yield
        finally:
            with self._lock:
                self._taken -= 1


class MemoryReader:
    """A disk in memory. With `max_readers` 1 it is a stream: a read that goes back fails."""

    def __init__(self, blocks: str, *, block_bytes: int = BLOCK_BYTES, max_readers: int = 8, seconds: float = 0) -> None:
        self.content = content_of(blocks, block_bytes)
        self.size = len(self.content)
        self.max_readers = max_readers
        self.reads: list[tuple[int, int]] = []
        self.closed = False
        self._extents = extents_of(blocks, block_bytes)
        self._turnstile = _Turnstile(max_readers, seconds)

    def extents(self) -> Iterator[Extent]:
        yield from self._extents

    def read_into(self, offset: int, buffer: memoryview) -> None:
        with self._turnstile.passing():
            if offset < 0 or offset + len(buffer) > self.size:
                raise DiskReadFailed(f"{len(buffer)} bytes at offset {offset} are outside {self.size}")
            if self.max_readers == 1 and self.reads:
                last, length = self.reads[-1]
                assert offset >= last + length, f"a stream was asked for offset {offset} after {last + length}"
            self.reads.append((offset, len(buffer)))
            buffer[:] = self.content[offset : offset + len(buffer)]

    def close(self) -> None:
        self.closed = True


class MemoryWriter:
    """A volume in memory. `content` is what was written, `durable` what a power cut after the last flush would leave at least.

    `written` and `zeroed` are the ranges of each call, in the order in which they ended.
    """

    def __init__(self, content: bytes | int, *, max_writers: int = 8, seconds: float = 0) -> None:
        self.content = bytearray(content)  # an int is a fresh volume of that size
        self.durable = bytes(self.content)
        self.size = len(self.content)
        self.max_writers = max_writers
        self.written: list[tuple[int, int]] = []
        self.zeroed: list[tuple[int, int]] = []
        self.flushes = 0
        self.closed = False
        self._turnstile = _Turnstile(max_writers, seconds)

    def write(self, offset: int, buffer: memoryview) -> None:
        with self._turnstile.passing():
            self._check_range(offset, len(buffer))
            self.content[offset : offset + len(buffer)] = buffer
            self.written.append((offset, len(buffer)))

    def zero(self, offset: int, length: int) -> None:
        with self._turnstile.passing():
            self._check_range(offset, length)
            self.content[offset : offset + length] = bytes(length)
            self.zeroed.append((offset, length))

    def _check_range(self, offset: int, length: int) -> None:
        if offset < 0 or length < 0 or offset + length > self.size:
            raise DiskWriteFailed(f"{length} bytes at offset {offset} are outside {self.size}")

    def flush(self) -> None:
        # Beside writes only where more than one call at once is allowed.
        with self._turnstile.passing() if self.max_writers == 1 else nullcontext():
            self.durable = bytes(self.content)
            self.flushes += 1

    def close(self) -> None:
        self.closed = True


class ReaderWrapper:
    """All calls passed on: what the wrappers below start from."""

    def __init__(self, inner: DiskReader) -> None:
        self.inner = inner
        self.size, self.max_readers = inner.size, inner.max_readers

    def extents(self) -> Iterator[Extent]:
        return self.inner.extents()

    def read_into(self, offset: int, buffer: memoryview) -> None:
        self.inner.read_into(offset, buffer)

    def close(self) -> None:
        self.inner.close()


class WriterWrapper:
    def __init__(self, inner: DiskWriter) -> None:
        self.inner = inner
        self.size, self.max_writers = inner.size, inner.max_writers

    def write(self, offset: int, buffer: memoryview) -> None:
        self.inner.write(offset, buffer)

    def zero(self, offset: int, length: int) -> None:
        self.inner.zero(offset, length)

    def flush(self) -> None:
        self.inner.flush()

    def close(self) -> None:
        self.inner.close()


class FaultyReader(ReaderWrapper):
    """Fails each read that touches the byte at `offset`; with an error of its own, or any other that is given."""

    def __init__(self, inner: DiskReader, offset: int, error: BaseException | None = None) -> None:
        super().__init__(inner)
        self._offset, self._error = offset, error

    def read_into(self, offset: int, buffer: memoryview) -> None:
        if offset <= self._offset < offset + len(buffer):
            # A new one each time: it holds the frames that it goes through, and with them this reader.
            raise self._error or DiskReadFailed(f"the disk cannot be read at offset {self._offset}: bad sector")
        super().read_into(offset, buffer)


class FaultyWriter(WriterWrapper):
    """Fails each write or zero that touches the byte at `offset`, or every flush (`offset` None)."""

    def __init__(self, inner: DiskWriter, offset: int | None, error: BaseException | None = None) -> None:
        super().__init__(inner)
        self._offset, self._error = offset, error

    def _fail(self, offset: int, length: int) -> None:
        if self._offset is not None and offset <= self._offset < offset + length:
            raise self._error or DiskWriteFailed(f"the volume cannot be written at offset {self._offset}: full")

    def write(self, offset: int, buffer: memoryview) -> None:
        self._fail(offset, len(buffer))
        super().write(offset, buffer)

    def zero(self, offset: int, length: int) -> None:
        self._fail(offset, length)
        super().zero(offset, length)

    def flush(self) -> None:
        if self._offset is None:
            raise self._error or DiskWriteFailed(f"the volume cannot be written at offset {self._offset}: full")
        super().flush()


class ThrottledReader(ReaderWrapper):
    """Each read takes `seconds` longer."""

    def __init__(self, inner: DiskReader, seconds: float) -> None:
        super().__init__(inner)
        self._seconds = seconds

    def read_into(self, offset: int, buffer: memoryview) -> None:
        time.sleep(self._seconds)
        super().read_into(offset, buffer)


class ThrottledWriter(WriterWrapper):
    """Each write and each flush takes `seconds` longer."""

    def __init__(self, inner: DiskWriter, seconds: float) -> None:
        super().__init__(inner)
        self._seconds = seconds

    def write(self, offset: int, buffer: memoryview) -> None:
        time.sleep(self._seconds)
        super().write(offset, buffer)

    def flush(self) -> None:
        time.sleep(self._seconds)
        super().flush()


class LyingReader(ReaderWrapper):
    """A reader that breaks its laws: its extents go through `falsify`."""

    def __init__(self, inner: DiskReader, falsify: Callable[[list[Extent]], list[Extent]]) -> None:
        super().__init__(inner)
        self._falsify = falsify

    def extents(self) -> Iterator[Extent]:
        yield from self._falsify(list(super().extents()))


class LettersReader(LyingReader):
    """A disk of any size, of one letter all over, that takes no memory."""

    def __init__(self, size: int, extents: list[Extent]) -> None:
        super().__init__(MemoryReader(""), lambda _: extents)
        self.size = size
        self.reads: list[tuple[int, int]] = []

    def read_into(self, offset: int, buffer: memoryview) -> None:
        buffer[:] = b"x" * len(buffer)
        self.reads.append((offset, len(buffer)))


class ForgetfulWriter(MemoryWriter):
    """A volume of any size, that knows where it was written, and not what."""

    def __init__(self, size: int) -> None:
        super().__init__(0)
        self.size = size

    def write(self, offset: int, buffer: memoryview) -> None:
        self.written.append((offset, len(buffer)))

    def zero(self, offset: int, length: int) -> None:
        self.zeroed.append((offset, length))
