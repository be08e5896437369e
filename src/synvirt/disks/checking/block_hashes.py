"""The SHA-256 of each 4 MiB block of a volume while passes write it: a file next to the watermarks.

    hashes = BlockHashes(path, size, token)
    copy(hashes.reading(reader, ...), hashes.writing(writer), on_watermark=… hashes.settle(…) …)
    hashes.fill(volume)            # blocks that no single request covered are read back
    hashes.close()

Before a block is written, its hash is removed; the new hash is stored once the volume was flushed. So a hash in the file is
never older than the volume's bytes. A killed worker leaves blocks without a hash, which are copied again or read back: the file
is the same in the end. A power cut may keep writes to the volume and lose the removal of a hash: so a file that was open when
its host went down is started over. So is one with another `token`: then another host has written the volume meanwhile.

    128 bytes   magic, token (16 bytes), boot id of the host (36), size of the disk, open or closed
    32 bytes per block of 4 MiB; zeros: not known

A disk of 1 TiB has 8 MiB of hashes. An error of the file loses the file, but never the copy.
"""

import contextlib
import hashlib
import logging
import os
import struct
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache
from pathlib import Path
from typing import Final
from uuid import UUID

from synvirt.blocks import DiskReader, DiskWriter, Extent, new_buffer
from synvirt.copying import default_threads
from synvirt.disks.changed import Over
from synvirt.disks.checking.ledger import BLOCK_BYTES
from synvirt.disks.memory import is_zero

log = logging.getLogger(__name__)  # structlog would load rich into each worker

DIGEST_BYTES: Final = hashlib.sha256().digest_size
HEADER_BYTES: Final = 128
MAGIC: Final = b"SVHASH\x00\x01"
_HEADER: Final = struct.Struct("<8s16s36sQB")
_OPEN, _CLOSED = 1, 2
_UNKNOWN: Final = bytes(DIGEST_BYTES)
# The part of the file that is searched at once: 1 MiB, for 128 GiB of the disk.
_BLOCKS_AT_ONCE: Final = 1 << 15
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


def digest_of(view: memoryview) -> bytes:
    """The digest of a block's bytes. That of zeros, which are most of many disks, is stored in advance."""
    if is_zero(view):
        return zero_digest(len(view))
    return hashlib.sha256(view, usedforsecurity=False).digest()


# The last block of a disk is shorter, and read in each pass.
@lru_cache(64)
def zero_digest(length: int) -> bytes:
    return _ZERO if length == BLOCK_BYTES else hashlib.sha256(bytes(length), usedforsecurity=False).digest()


# Written out: to hash 4 MiB took a tenth of each worker's start.
_ZERO: Final = bytes.fromhex("bb9f8df61474d25e71fa00722318cd387396ca1736605e1248821cc0de3d3af8")


def blocks_of(size: int) -> int:
    return -(-size // BLOCK_BYTES)


class BlockHashes:
    """One disk's file, open for one pass. `token`: identifies the writer of the volume so far, see above."""

    def __init__(self, path: Path, size: int, token: UUID) -> None:
        self._path, self._size, self._token = path, size, token
        self._file: int | None = None
        self._lock = threading.Lock()
        # Blocks that were read whole, or are zeros, and wait for the volume's flush.
        self._pending: dict[int, bytes] = {}
        self._zeros: list[tuple[int, int]] = []
        with self._trying():
            self._open()

    # ── while the copy goes ──

    def reading(self, reader: DiskReader, *, fresh: bool, since: int) -> DiskReader:
        """A reader for the copy instead of `reader`, which it does not own. `fresh`, `since`: the copy's."""
        return _Reading(self, reader, fresh=fresh, since=since)

    def writing(self, writer: DiskWriter) -> DiskWriter:
        """A writer for the copy instead of `writer`, which it does not own."""
        return _Writing(self, writer)

    def about_to_write(self, offset: int, length: int) -> None:
        """Forgets the hashes of all blocks that these bytes touch, before they are written."""
        first, end = offset // BLOCK_BYTES, blocks_of(offset + length)
        for block in range(first, end):
            self._pending.pop(block, None)
        with self._trying() as file:
            if file is not None:
                known = os.pread(file, (end - first) * DIGEST_BYTES, _place(first))
                if known.strip(b"\0"):
                    _write(file, bytes((end - first) * DIGEST_BYTES), _place(first))

    def about_to_zero(self, offset: int, length: int) -> None:
        """Blocks that were read whole and wait already have these zeros in their hash."""
        for block in range(offset // BLOCK_BYTES, blocks_of(offset + length)):
            if block in self._pending:
                continue
            start, end = block * BLOCK_BYTES, self._end(block)
            self.about_to_write(start, end - start)
            if offset <= start and end <= offset + length:
                self._pending[block] = zero_digest(end - start)

    def has_read(self, offset: int, view: memoryview) -> None:
        """Takes bytes that are about to be written there."""
        self.about_to_write(offset, len(view))
        if self._file is None:
            return
        at = -offset % BLOCK_BYTES
        while at < len(view):
            start = offset + at
            length = min(BLOCK_BYTES, self._size - start)
            if at + length > len(view):
                break
            self._pending[start // BLOCK_BYTES] = digest_of(view[at : at + length])
            at += length

    def is_zero_from(self, start: int, end: int) -> None:
        """Notes the whole blocks of the range; `end` may be the disk's end."""
        first = blocks_of(start)
        last = blocks_of(end) if end == self._size else end // BLOCK_BYTES
        if first < last:
            self._zeros.append((first, last))

    def settle(self, watermark: int) -> None:
        """All before `watermark` is durable on the volume. Only from one thread."""
        with self._trying() as file:
            if file is None:
                return
            for block in sorted(block for block in list(self._pending) if self._end(block) <= watermark):
                if (digest := self._pending.pop(block, None)) is not None:
                    _write(file, digest, _place(block))
            left: list[tuple[int, int]] = []
            for first, last in self._zeros:
                if self._end(last - 1) > watermark:
                    left.append((first, last))
                else:
                    self._write_zeros(file, first, last)
            self._zeros = left

    # ── at its end ──

    def known(self, block: int) -> bytes | None:
        """A block's hash, as of the volume now; None, where it must be read back. For any thread, after the copy."""
        digest = _UNKNOWN
        with self._trying() as file:
            if file is not None:
                digest = os.pread(file, DIGEST_BYTES, _place(block))
        return None if digest == _UNKNOWN or len(digest) != DIGEST_BYTES else digest

    def fill(
        self,
        volume: DiskReader,
        *,
        within_s: float | None = None,
        stop: Callable[[], bool] = lambda: False,
    ) -> None:
        """Reads back the unknown blocks, as many as time permits. DiskReadFailed; stops early where `stop()` is true."""
        until = None if within_s is None else time.monotonic() + within_s
        buffers = threading.local()

        def looked_at(block: int) -> tuple[int, bytes] | None:
            if stop() or (until is not None and time.monotonic() > until):
                return None
            if not hasattr(buffers, "held"):
                buffers.held = new_buffer(BLOCK_BYTES)
            view = buffers.held[: self._end(block) - block * BLOCK_BYTES]
            volume.read_into(block * BLOCK_BYTES, view)
            return block, digest_of(view)

        with ThreadPoolExecutor(max(1, min(default_threads(), volume.max_readers))) as pool:
            for blocks in self._unknown():
                for found in pool.map(looked_at, blocks):
                    with self._trying() as file:
                        if found is not None and file is not None:
                            _write(file, found[1], _place(found[0]))

    def close(self) -> None:
        """Makes the file's content durable."""
        with self._trying() as file:
            if file is not None:
                os.fsync(file)
                self._say(file, _CLOSED)
                os.fsync(file)
        if self._file is not None:
            os.close(self._file)
            self._file = None

    # ── the file ──

    def _open(self) -> None:
        self._file = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        if not self._is_good():
            os.ftruncate(self._file, 0)
            os.ftruncate(self._file, HEADER_BYTES + blocks_of(self._size) * DIGEST_BYTES)
        self._say(self._file, _OPEN)
        os.fsync(self._file)

    def _is_good(self) -> bool:
        assert self._file is not None
        found = _header(self._file, self._size, self._token)
        return found is not None and (found[1] == _CLOSED or found[0] == _boot_id())

    def _say(self, file: int, state: int) -> None:
        header = _HEADER.pack(MAGIC, self._token.bytes, _boot_id(), self._size, state)
        _write(file, header.ljust(HEADER_BYTES, b"\0"), 0)

    def _unknown(self) -> Iterator[list[int]]:
        for start in range(0, blocks_of(self._size), _BLOCKS_AT_ONCE):
            digests = b""
            with self._trying() as file:
                if file is not None:
                    digests = os.pread(file, _BLOCKS_AT_ONCE * DIGEST_BYTES, _place(start))
            unknown = [start + at for at, digest in enumerate(_cut(digests)) if digest == _UNKNOWN]
            if unknown:
                yield unknown

    def _write_zeros(self, file: int, first: int, last: int) -> None:
        for start in range(first, last, _BLOCKS_AT_ONCE):
            end = min(last, start + _BLOCKS_AT_ONCE)
            digests = zero_digest(BLOCK_BYTES) * (end - start - 1) + zero_digest(self._end(end - 1) - (end - 1) * BLOCK_BYTES)
            _write(file, digests, _place(start))

    def _end(self, block: int) -> int:
        return min((block + 1) * BLOCK_BYTES, self._size)

    @contextlib.contextmanager
    def _trying(self) -> Iterator[int | None]:
        """The file, if there is one. A full or bad disk loses it, as a file that may be wrong must not stay."""
        try:
            with self._lock:
                file = self._file
            yield file
        except OSError as error:
            log.warning("the hashes of a volume are given up: %s", error.strerror)
            with self._lock:
                file, self._file = self._file, None
            with contextlib.suppress(OSError):
                self._path.unlink()
            if file is not None:
                with contextlib.suppress(OSError):
                    os.ftruncate(file, 0)  # if it could not be removed


class _Reading(Over):
    def __init__(self, hashes: BlockHashes, over: DiskReader, *, fresh: bool, since: int) -> None:
        super().__init__(over)
        self._hashes, self._fresh, self._since = hashes, fresh, since
        self._extents_asked = 0

    def extents(self) -> Iterator[Extent]:
        self._extents_asked += 1
        # The first caller is the copy; others count, and may be ahead of it.
        if not self._fresh or self._extents_asked > 1:
            return self._over.extents()
        return self._noting_zeros()

    def _noting_zeros(self) -> Iterator[Extent]:
        """Zeros of a fresh volume are never written."""
        start = end = 0
        for extent in self._over.extents():
            if not extent.zero or extent.start != end:
                self._note(start, end)
                start = extent.start if extent.zero else extent.end
            end = extent.end
            yield extent
        self._note(start, end)

    def _note(self, start: int, end: int) -> None:
        if (start := max(start, self._since)) < end:
            self._hashes.is_zero_from(start, end)

    def read_into(self, offset: int, buffer: memoryview) -> None:
        super().read_into(offset, buffer)
        self._hashes.has_read(offset, buffer)

    def close(self) -> None:
        """Does nothing: the owner closes it."""


class _Writing:
    """For zeros that are made without a read."""

    def __init__(self, hashes: BlockHashes, inner: DiskWriter) -> None:
        self._hashes, self._inner = hashes, inner

    @property
    def size(self) -> int:
        return self._inner.size

    @property
    def max_writers(self) -> int:
        return self._inner.max_writers

    def write(self, offset: int, buffer: memoryview) -> None:
        self._inner.write(offset, buffer)

    def zero(self, offset: int, length: int) -> None:
        self._hashes.about_to_zero(offset, length)
        self._inner.zero(offset, length)

    def flush(self) -> None:
        self._inner.flush()

    def close(self) -> None:
        """Does nothing: the owner closes it."""


def known_digests(path: Path, size: int, token: UUID) -> Iterator[bytes] | None:
    """The digest of each block, in order, if all are known; else None."""
    try:
        with path.open("rb") as file:
            found = _header(file.fileno(), size, token)
            if found is None or found[1] != _CLOSED or any(_UNKNOWN in _cut(part) for part in _parts(path, size)):
                return None
    except OSError:
        return None
    return (digest for part in _parts(path, size) for digest in _cut(part))


def _parts(path: Path, size: int) -> Iterator[bytes]:
    with path.open("rb") as file:
        file.seek(HEADER_BYTES)
        left = blocks_of(size) * DIGEST_BYTES
        while left:
            part = file.read(min(left, _BLOCKS_AT_ONCE * DIGEST_BYTES))
            if not part:
                raise OSError("the file of hashes is cut off")
            left -= len(part)
            yield part


def _header(file: int, size: int, token: UUID) -> tuple[bytes, int] | None:
    """The boot id of its writing, and its state; None, where the file belongs to something else."""
    header = os.pread(file, HEADER_BYTES, 0)
    whole = os.fstat(file).st_size == HEADER_BYTES + blocks_of(size) * DIGEST_BYTES
    if len(header) != HEADER_BYTES or not whole:
        return None
    magic, found_token, boot_id, found_size, state = _HEADER.unpack_from(header)
    return (boot_id, state) if (magic, found_token, found_size) == (MAGIC, token.bytes, size) else None


def _boot_id() -> bytes:
    return _BOOT_ID.read_bytes().strip()[:36]


def _place(block: int) -> int:
    return HEADER_BYTES + block * DIGEST_BYTES


def _cut(digests: bytes) -> Iterator[bytes]:
    return (digests[at : at + DIGEST_BYTES] for at in range(0, len(digests), DIGEST_BYTES))


def _write(file: int, content: bytes, at: int) -> None:
    if os.pwrite(file, content, at) != len(content):
        raise OSError(28, "a short write")
