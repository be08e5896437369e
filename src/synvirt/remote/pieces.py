"""The bytes of one remote file, as pieces in memory: few large requests instead of many small ones, and several at once.

Fetched pieces are kept, up to a limit for all files of a place together. A reader that reads in order, with any number of
threads and in small steps, finds the next pieces already fetched. The window ahead doubles while reads stay in order, like the
kernel's for local files. A reader that jumps, for example from header to header of an archive, costs 64 KiB per jump. Where
enough threads read large parts at once to keep the place busy, nothing is fetched ahead or kept.
"""

import threading
import time
from bisect import bisect_left, bisect_right, insort
from collections import OrderedDict
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Final

from synvirt.errors import SourceUnreachable
from synvirt.remote import Interrupted, RemoteFile
from synvirt.remote.retrying import retried
from synvirt.sizes import MIB

# How much is kept of all files of a place, which also limits how far ahead of a reader is fetched. 4 copy threads of 4 MiB each
# fit in.
KEPT_BYTES: Final = 64 * MIB
AHEAD_MAX_BYTES: Final = 24 * MIB
PIECE_MAX_BYTES: Final = 4 * MIB
PIECE_MIN_BYTES: Final = 64 << 10
# A read of this size or more may bypass the pieces.
STRAIGHT_BYTES: Final = MIB
# Places in a file that are read in order at the same time: by the copy, by the checksum, and in a table or two.
_STREAMS_MAX: Final = 8
# Two readers of the same file in order, the copy and its checksum, stay within this distance, so that the second one still
# finds what the first one fetched. No reader waits for one that has not read for a while, and none waits long.
# The pieces that were not used for longest go first. While one waits for the second reader, younger are those that this reader
# uses on its way to it, and those that the first one uses and fetches ahead: twice this distance, AHEAD_MAX_BYTES, a read and a
# piece. All of these must fit into KEPT_BYTES.
TOGETHER_BYTES: Final = 12 * MIB
WAIT_FOR_S: Final = 5.0


@dataclass(slots=True)
class _Piece:
    """Bytes from `start` of a file, as they come."""

    start: int
    length: int
    future: "Future[bytes | bytearray]"

    @property
    def end(self) -> int:
        return self.start + self.length

    @property
    def failed(self) -> bool:
        return self.future.done() and (self.future.cancelled() or self.future.exception() is not None)


@dataclass(slots=True)
class _Stream:
    """A run of reads in order: the next one is expected at `at`; `window` bytes ahead of it are fetched."""

    at: int
    window: int = 0
    fetched: int = 0


@dataclass(slots=True, eq=False)
class Front:
    """Where and when one reader of a file last read, and how much it has read. After little reading it waits for no other."""

    at: int = 0
    moved_at: float = 0.0
    read_bytes: int = 0


class Kept:
    """The pieces of all files of a place by age. It keeps their total size below a limit."""

    def __init__(self, most: int = KEPT_BYTES) -> None:
        self._most = most
        self._lock = threading.Lock()
        self._bytes = 0
        self._pieces: OrderedDict[int, tuple[Pieces, _Piece]] = OrderedDict()

    def add(self, owner: "Pieces", piece: _Piece) -> list[tuple["Pieces", _Piece]]:
        """Adds a piece, and gives the pieces that must go for it, with their files. A piece that is still being fetched stays,
        as a reader waits for it."""
        with self._lock:
            self._pieces[id(piece)] = owner, piece
            self._bytes += piece.length
            gone = []
            for key, (its_owner, old) in list(self._pieces.items()):
                if self._bytes <= self._most:
                    break
                if old is not piece and old.future.done():
                    del self._pieces[key]
                    self._bytes -= old.length
                    gone.append((its_owner, old))
            return gone

    def used(self, piece: _Piece) -> None:
        """Marks a piece as used now."""
        with self._lock:
            if id(piece) in self._pieces:
                self._pieces.move_to_end(id(piece))

    def drop(self, piece: _Piece) -> None:
        """Forgets a piece."""
        with self._lock:
            if self._pieces.pop(id(piece), None) is not None:
                self._bytes -= piece.length


class Pieces:
    """One file's pieces. They never overlap, and are found by their start.

    `readers_enough`: this many readers at once keep the place busy without read-ahead. `closed`: set when the place is
    closed."""

    def __init__(
        self, file: RemoteFile, *, kept: Kept, pool: ThreadPoolExecutor, closed: threading.Event, readers_enough: int
    ) -> None:
        self.file, self._kept, self._pool, self._closed = file, kept, pool, closed
        self._readers_enough = readers_enough
        self._reading, self._most_reading = 0, 0
        self._lock = threading.Lock()
        self._starts: list[int] = []
        self._by_start: dict[int, _Piece] = {}
        self._streams: list[_Stream] = []
        self._fronts: list[Front] = []
        self._moved = threading.Condition()
        self.requested_bytes = len(file.head)
        if file.head:
            ready: Future[bytes | bytearray] = Future()
            ready.set_result(file.head)
            self._insert(_Piece(0, len(file.head), ready))

    def entered(self) -> Front:
        """Registers a reader."""
        front = Front()
        with self._moved:
            self._fronts.append(front)
        return front

    def left(self, front: Front) -> None:
        """Removes a reader: the others do not wait for it any more."""
        with self._moved:
            self._fronts.remove(front)
            self._moved.notify_all()

    def read_into(self, offset: int, buffer: memoryview, front: Front) -> None:
        """Fills `buffer` from `offset` of the file on. SourceUnreachable, if the place is closed meanwhile."""
        at, end = offset, offset + len(buffer)
        if at == end:
            return
        self._keep_together(front, end, end - at)
        with self._lock:
            self._reading += 1
            self._most_reading = max(self._most_reading, self._reading)
        try:
            self._read(offset, buffer)
        except CancelledError as error:
            raise self._was_closed() from error
        finally:
            with self._lock:
                self._reading -= 1

    def _read(self, at: int, buffer: memoryview) -> None:
        """Reads through the pieces, or bypasses them where they help no reader: they cost a copy of every byte, and space in
        the processor's caches."""
        wanted: list[_Piece] | None = None
        straight: Future[None] | None = None
        try:
            with self._lock:
                large = len(buffer) >= STRAIGHT_BYTES and self._most_reading >= self._readers_enough and len(self._fronts) == 1
                if large and not self._has_pieces(at, at + len(buffer)):
                    self.requested_bytes += len(buffer)
                    straight = self._pool.submit(self._filled, at, buffer)
                else:
                    wanted = self._scheduled(at, at + len(buffer))
                if not large:
                    self._look_ahead(at, at + len(buffer))
        except RuntimeError as error:  # the pool accepts nothing more
            raise self._was_closed() from error
        if straight is not None:
            straight.result()
        for piece in wanted or ():
            try:
                content = piece.future.result()
            except CancelledError:
                raise
            except BaseException:
                self._forget(piece)  # so that a later attempt fetches it again
                raise
            self._kept.used(piece)
            first, last = max(at, piece.start), min(at + len(buffer), piece.end)
            buffer[first - at : last - at] = memoryview(content)[first - piece.start : last - piece.start]

    def _was_closed(self) -> SourceUnreachable:
        return SourceUnreachable(f"{self.file.shown} was closed while it was read")

    def _keep_together(self, front: Front, end: int, length: int) -> None:
        with self._moved:
            front.at, front.moved_at = end, time.monotonic()
            front.read_bytes += length
            self._moved.notify_all()
            until = front.moved_at + WAIT_FOR_S
            while (now := time.monotonic()) < until and front.read_bytes > TOGETHER_BYTES and self._is_ahead(front, end, now):
                self._moved.wait(min(until - now, 1.0))
                front.moved_at = time.monotonic()

    def _is_ahead(self, front: Front, end: int, now: float) -> bool:
        return any(
            other.read_bytes >= MIB and other.at < end - TOGETHER_BYTES and now - other.moved_at < WAIT_FOR_S
            for other in self._fronts
            if other is not front
        )

    # ── under the lock ───────────────────────────────────────────────────────────────────────────────────────────────

    def _scheduled(self, start: int, end: int) -> list[_Piece]:
        """The pieces that cover the range. It starts to fetch missing ones."""
        found, at = [], start
        while at < end:
            number = bisect_right(self._starts, at) - 1
            piece = self._by_start[self._starts[number]] if number >= 0 else None
            if piece is not None and piece.failed:  # it was fetched ahead while the server was away; the server may be back
                self._remove(piece)
                self._kept.drop(piece)
                continue
            if piece is None or piece.end <= at:
                following = self._starts[number + 1] if number + 1 < len(self._starts) else self.file.size
                length = min(max(end - at, PIECE_MIN_BYTES), PIECE_MAX_BYTES, following - at, self.file.size - at)
                piece = self._fetched(at, length)
            found.append(piece)
            at = piece.end
        return found

    def _has_pieces(self, start: int, end: int) -> bool:
        number = bisect_left(self._starts, end) - 1
        return number >= 0 and self._by_start[self._starts[number]].end > start

    def _fetched(self, start: int, length: int) -> _Piece:
        self.requested_bytes += length
        piece = _Piece(start, length, self._pool.submit(self._fetch, start, length))
        self._insert(piece)
        return piece

    def _insert(self, piece: _Piece) -> None:
        insort(self._starts, piece.start)
        self._by_start[piece.start] = piece
        for owner, old in self._kept.add(self, piece):
            if owner is self:
                self._remove(old)
            else:
                # The piece of another file. To wait for that file's lock while we hold ours could be a deadlock.
                owner.let_go(old)

    def _remove(self, piece: _Piece) -> None:
        if self._by_start.get(piece.start) is piece:
            del self._by_start[piece.start]
            self._starts.pop(bisect_right(self._starts, piece.start) - 1)

    def _look_ahead(self, start: int, end: int) -> None:
        near = max(4 * (end - start), PIECE_MIN_BYTES)
        stream = next((one for one in self._streams if abs(start - one.at) <= near), None)
        if stream is None:
            self._streams = [*self._streams[1 - _STREAMS_MAX :], _Stream(end, 0, end)]
            return
        stream.at, stream.fetched = max(stream.at, end), max(stream.fetched, end)
        ahead = stream.fetched - stream.at
        if ahead * 2 > stream.window or stream.fetched >= self.file.size:
            return
        stream.window = min(max(2 * stream.window, 2 * (end - start), PIECE_MIN_BYTES), AHEAD_MAX_BYTES)
        until = min(stream.at + stream.window, self.file.size)
        if until > stream.fetched:
            self._scheduled(stream.fetched, until)
            stream.fetched = until

    # ── not under the lock ───────────────────────────────────────────────────────────────────────────────────────────────────

    def let_go(self, piece: _Piece) -> None:
        """Called by another file's thread, which holds that file's lock. It only tries our lock, as two files that wait for
        each other's lock are a deadlock."""
        if self._lock.acquire(blocking=False):
            try:
                self._remove(piece)
            finally:
                self._lock.release()
        else:
            self._pool.submit(self._forget, piece)

    def _forget(self, piece: _Piece) -> None:
        with self._lock:
            self._remove(piece)
        self._kept.drop(piece)

    def _fetch(self, start: int, length: int) -> bytearray:
        content = bytearray(length)
        self._filled(start, memoryview(content))
        return content

    def _filled(self, start: int, view: memoryview) -> None:
        got = 0

        def attempt() -> None:
            nonlocal got
            if self._closed.is_set():
                raise self._was_closed()
            try:
                self.file.fetch(start + got, view[got:])
            except Interrupted as error:
                got += error.got
                raise
            except SourceUnreachable as error:
                if self._closed.is_set():
                    raise
                # The server answered when the file was opened: it, or its name server, is restarted now.
                raise Interrupted(error.detail) from error

        retried(attempt, f"{self.file.shown}, offset {start + got}", pause=self._closed.wait, moved=lambda: got)
