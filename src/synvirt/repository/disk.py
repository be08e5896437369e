"""The data path's two interfaces for a repository: a disk that is written to it, and the disk of a restore point.

ChunkWriter   pieces of any size, from any thread ─▶ whole chunks ─▶ session.add ─▶ names ─▶ pages
PointReader   pages ─▶ names ─▶ chunks, each checked against its name
"""

import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from synvirt.blocks import Extent, coalesced
from synvirt.disks.layers import Layer
from synvirt.errors import DiskReadFailed, DiskWriteFailed, RepositoryDamaged
from synvirt.repository.keys import CHUNK_BYTES, NAME_BYTES
from synvirt.repository.manifest import NONE, PAGE_BYTES, PAGE_CHUNKS, DiskMap, chunks_of
from synvirt.repository.repository import Repository
from synvirt.repository.session import Session

CALLS_AT_ONCE = 64
# 16 MiB: what a file system reads again while it is read.
CHUNKS_KEPT = 16


class ChunkWriter:
    """Takes each byte of a disk exactly once, as from a copy of a whole disk that is not `fresh`.

    With `before`, the disk of an earlier point, only the `changed` chunks come. The others keep their names from there, and
    pages without a changed chunk are not looked at.

    It holds in memory each chunk that is begun and not full (a few per thread of copy()), and the names of pages that are
    begun. `flush` promises nothing: a whole restore point becomes durable, and visible, with its manifest. `on_named` gets each
    chunk's name, in any thread.
    """

    max_writers = CALLS_AT_ONCE

    def __init__(
        self,
        session: Session,
        size: int,
        *,
        before: "Before | None" = None,
        changed: "Chunks | None" = None,
        on_named: Callable[[int, bytes], None] = lambda number, name: None,
    ) -> None:
        self.size, self._on_named = size, on_named
        self._session = session
        self._before, self._changed = before, changed
        pages = -(-chunks_of(size) // PAGE_CHUNKS)
        self._pages: list[str | None] = [None] * pages
        if before is not None and changed is not None:
            self._pages = [None if number in changed.pages else before.disk.pages[number] for number in range(pages)]
        self._open: dict[int, _Page] = {}
        self._begun: dict[int, tuple[bytearray, int]] = {}
        self._lock = threading.Lock()

    def write(self, offset: int, buffer: memoryview) -> None:
        self._check_range(offset, len(buffer))
        for number, within, at, length in self._cut(offset, len(buffer)):
            piece = buffer[at : at + length]
            if length == self._length(number):
                self._finish(number, piece)
            else:
                self._gather(number, within, length, piece)

    def zero(self, offset: int, length: int) -> None:
        self._check_range(offset, length)
        for number, within, _, part in self._cut(offset, length):
            if part == self._length(number):
                self._name(number, NONE)
                self._on_named(number, NONE)
            else:
                self._gather(number, within, part, None)

    def _cut(self, offset: int, length: int) -> Iterator[tuple[int, int, int, int]]:
        """(chunk's number, offset within it, offset within the range, length) of each chunk that the range touches."""
        at = 0
        while at < length:
            number, within = divmod(offset + at, CHUNK_BYTES)
            part = min(CHUNK_BYTES - within, length - at)
            yield number, within, at, part
            at += part

    def _length(self, number: int) -> int:
        return min(CHUNK_BYTES, self.size - number * CHUNK_BYTES)

    def _gather(self, number: int, within: int, length: int, piece: memoryview | None) -> None:
        with self._lock:
            content, filled = self._begun.get(number) or (bytearray(self._length(number)), 0)
            if piece is not None:
                content[within : within + length] = piece
            filled += length
            if filled < len(content):
                self._begun[number] = content, filled
                return
            self._begun.pop(number, None)
        self._finish(number, content)

    def stored(self, number: int, name: bytes) -> None:
        """The chunk has that name and its bytes do not come, as the session relies on the stored one."""
        self._name(number, name)

    def _finish(self, number: int, content: bytearray | memoryview) -> None:
        name = self._session.add(content)
        self._name(number, name)
        self._on_named(number, name)

    def _name(self, number: int, name: bytes) -> None:
        which, within = divmod(number, PAGE_CHUNKS)
        with self._lock:
            page = self._open.get(which)
            if page is None and self._pages[which] is None:
                page = self._open[which] = self._opened(which)
            if page is None or not page.waits[within]:
                raise DiskWriteFailed(f"chunk {number} of the disk came twice: at offset {number * CHUNK_BYTES}")
            page.names[within * NAME_BYTES : (within + 1) * NAME_BYTES] = name
            page.waits[within] = 0
            if any(page.waits):
                return
            del self._open[which]
            self._pages[which] = ""  # taken: its name follows soon
        self._pages[which] = self._session.add_page(bytes(page.names)).hex()

    def _opened(self, which: int) -> "_Page":
        if self._before is not None and self._changed is not None:
            return _Page(bytearray(self._before.page(which)), bytearray(self._changed.pages[which]))
        count = min(PAGE_CHUNKS, chunks_of(self.size) - which * PAGE_CHUNKS)
        return _Page(bytearray(PAGE_BYTES), bytearray(b"\1" * count))

    def _check_range(self, offset: int, length: int) -> None:
        if offset < 0 or length < 0 or offset + length > self.size:
            raise DiskWriteFailed(f"{length} bytes at offset {offset} are outside the disk's {self.size}")

    def flush(self) -> None:
        pass

    def close(self) -> None:
        self._begun.clear()

    def finish(self) -> DiskMap:
        """The disk for a manifest. DiskWriteFailed, where a byte of it never came."""
        for which, name in enumerate(self._pages):
            if not name:
                waits = self._open[which].waits if which in self._open else b"\1"
                missing = which * PAGE_CHUNKS + waits.index(1)
                raise DiskWriteFailed(f"nothing came for the disk's bytes from offset {missing * CHUNK_BYTES} on")
        return DiskMap(size_bytes=self.size, pages=tuple(filter(None, self._pages)))


@dataclass
class _Page:
    """`waits`: one byte per chunk, 1 where it has not come yet."""

    names: bytearray
    waits: bytearray


class Before:
    """A disk of an earlier point, page by page."""

    def __init__(self, repository: Repository, disk: DiskMap) -> None:
        self._repository, self.disk = repository, disk
        self._last: tuple[int, bytes] = (-1, b"")

    def page(self, which: int) -> bytes:
        """The earlier point's page of number `which` (1,024 chunk names, 32 KiB). RepositoryDamaged."""
        known, page = self._last
        if known != which:
            page = self._repository.read_page(bytes.fromhex(self.disk.pages[which]))
            self._last = which, page
        return page

    def name(self, number: int) -> bytes:
        """The name of a chunk (32 bytes) in the earlier point."""
        which, within = divmod(number, PAGE_CHUNKS)
        return self.page(which)[within * NAME_BYTES : (within + 1) * NAME_BYTES]


class Chunks:
    """Some of the chunks of a disk. `pages`: for each page that has any, one byte per chunk, 1 for those."""

    def __init__(self, size: int) -> None:
        self._size = size
        self.pages: dict[int, bytearray] = {}

    def add(self, start: int, length: int) -> None:
        """Adds the chunks that the bytes touch. DiskReadFailed, where they are not all in the disk."""
        for which, within, until in self._cut(start, length):
            self._page(which)[within:until] = b"\1" * (until - within)

    def add_zeros(self, start: int, length: int, before: "Before") -> None:
        """Adds the chunks that the bytes touch, which are zeros now. It leaves out chunks that were all zeros before, as they
        still are. So a disk that is mostly holes is not read for them."""
        for which, within, until in self._cut(start, length):
            if bytes.fromhex(before.disk.pages[which]) == NONE:
                continue
            names = before.page(which)
            for at in range(within, until):
                if names[at * NAME_BYTES : (at + 1) * NAME_BYTES] != NONE:
                    self._page(which)[at] = 1

    def _cut(self, start: int, length: int) -> Iterator[tuple[int, int, int]]:
        """(page, first of its chunks, that after the last) of the chunks that the bytes touch."""
        if start < 0 or length < 0 or start + length > self._size:
            raise DiskReadFailed(f"a changed area at {start}, {length} bytes, leaves the disk of {self._size} bytes")
        number, end = start // CHUNK_BYTES, -(-(start + length) // CHUNK_BYTES)
        while number < end:
            which, within = divmod(number, PAGE_CHUNKS)
            until = min(PAGE_CHUNKS, within + end - number)
            yield which, within, until
            number += until - within

    def _page(self, which: int) -> bytearray:
        return self.pages.setdefault(which, bytearray(min(PAGE_CHUNKS, chunks_of(self._size) - which * PAGE_CHUNKS)))

    def discard(self, number: int) -> None:
        """Forgets the chunk."""
        which, within = divmod(number, PAGE_CHUNKS)
        if which in self.pages:
            self.pages[which][within] = 0

    def __contains__(self, number: int) -> bool:
        which, within = divmod(number, PAGE_CHUNKS)
        return which in self.pages and bool(self.pages[which][within])

    def areas(self) -> Iterator[tuple[int, int]]:
        """(start, length) in bytes: whole chunks, ascending, neighbours joined within a page."""
        for which in sorted(self.pages):
            page, at = self.pages[which], -1
            while (at := page.find(1, at + 1)) >= 0:
                end = page.find(0, at)
                end = len(page) if end < 0 else end
                start = (which * PAGE_CHUNKS + at) * CHUNK_BYTES
                yield start, min((end - at) * CHUNK_BYTES, self._size - start)
                at = end


class PointReader:
    """A disk of a restore point. It gives what was backed up, or RepositoryDamaged."""

    max_readers = CALLS_AT_ONCE

    def __init__(self, repository: Repository, disk: DiskMap) -> None:
        self.size = disk.size_bytes
        self._repository = repository
        self._names = repository.chunk_names(disk)
        # The chunks that were read last, the newest at the end: small reads, in any order, unpack each once.
        self._recent: OrderedDict[bytes, memoryview] = OrderedDict()
        self._lock = threading.Lock()

    def extents(self) -> Iterator[Extent]:
        return self.extents_between(0, self.size)

    def extents_between(self, start: int, end: int) -> Iterator[Extent]:
        """The extents of a range, cut at its ends, as a server is asked for them piece by piece."""
        numbers = range(start // CHUNK_BYTES, chunks_of(end))
        return coalesced(
            Extent(at, min((number + 1) * CHUNK_BYTES, end) - at, zero=self._name(number) == NONE)
            for number, at in ((number, max(number * CHUNK_BYTES, start)) for number in numbers)
        )

    def read_into(self, offset: int, buffer: memoryview) -> None:
        if offset < 0 or offset + len(buffer) > self.size:
            raise DiskReadFailed(f"{len(buffer)} bytes at offset {offset} are outside the disk's {self.size}")
        at = 0
        while at < len(buffer):
            number, within = divmod(offset + at, CHUNK_BYTES)
            part = min(CHUNK_BYTES - within, len(buffer) - at)
            self._read_part(number, within, buffer[at : at + part])
            at += part

    def _read_part(self, number: int, within: int, into: memoryview) -> None:
        """Reads a part of one chunk. A whole chunk is unpacked directly into the target; a copy reads only whole ones."""
        name = self._name(number)
        if name == NONE:
            into[:] = bytes(len(into))
        elif (content := self._known(name)) is not None:
            into[:] = content[within : within + len(into)]
        elif len(into) == self._length(number):
            self._read(number, name, into)
        else:
            content = memoryview(bytearray(self._length(number)))
            self._read(number, name, content)
            with self._lock:
                self._recent[name] = content
                if len(self._recent) > CHUNKS_KEPT:
                    self._recent.popitem(last=False)
            into[:] = content[within : within + len(into)]

    def _known(self, name: bytes) -> memoryview | None:
        with self._lock:
            content = self._recent.get(name)
            if content is not None:
                self._recent.move_to_end(name)
            return content

    def _read(self, number: int, name: bytes, into: memoryview) -> None:
        try:
            self._repository.read_chunk(name, into)
        except RepositoryDamaged as error:
            raise RepositoryDamaged(
                f"{error.detail}: the disk cannot be read at offset {number * CHUNK_BYTES}", hint=error.hint
            ) from error

    def _length(self, number: int) -> int:
        return min(CHUNK_BYTES, self.size - number * CHUNK_BYTES)

    def _name(self, number: int) -> bytes:
        return self._names[number * NAME_BYTES : (number + 1) * NAME_BYTES]

    def layer(self) -> Layer:
        return Layer(name="restore point", format="backup", size_bytes=self.size)

    def close(self) -> None:
        with self._lock:
            self._recent.clear()
