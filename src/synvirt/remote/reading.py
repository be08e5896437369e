"""A DiskReader of a file elsewhere: few large requests instead of many small ones, several at once, tried again when they fail.

What was fetched is kept as pieces, up to a bound for all files of a place together. Who reads in order, by however many threads
and in whatever small steps, finds the next pieces fetched already: the window ahead doubles as long as the order holds, as the
kernel's does for local files. Who jumps about, as the walk of an archive's headers does, costs 64 KiB a jump. Where as many
threads read large parts as the place takes at once, nothing is foreseen or kept: they keep it busy by themselves.
"""

import random
import threading
import time
from bisect import bisect_left, bisect_right, insort
from collections import OrderedDict
from collections.abc import Callable, Iterator
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Final, TypeVar

from synvirt.blocks import Extent
from synvirt.errors import DiskReadFailed, SourceUnreachable, SynvirtError
from synvirt.remote import Interrupted, Place, Remote, RemoteFile, urls
from synvirt.sizes import MIB

# Kept of all files of a place, and how far ahead of a reader is fetched. 4 copy threads of 4 MiB each fit in.
KEPT_BYTES: Final = 64 * MIB
AHEAD_MAX_BYTES: Final = 24 * MIB
PIECE_MAX_BYTES: Final = 4 * MIB
PIECE_MIN_BYTES: Final = 64 << 10
# From this on a read may go past the pieces.
STRAIGHT_BYTES: Final = MIB
# Places that a file is read in order from at once: the copy's, the checksum's, a table's or two.
_STREAMS_MAX: Final = 8
# Two that read the same file in order, the copy and its checksum, keep within this of one another, so that what the first one
# fetched is still there for the second. Who has not read for a while is not waited for, and nobody waits long.
TOGETHER_BYTES: Final = 16 * MIB
WAIT_FOR_S: Final = 5.0
# Attempts in a row that brought no byte. With these pauses a server may be away for half a minute; a job's pass then waits
# longer, and goes on from its watermark.
PAUSES_S: Final = (0.2, 0.5, 1.0, 2.0, 4.0, 8.0, 15.0)
# A server that asks for more patience than this is not there, as far as one read goes.
RETRY_AFTER_MAX_S: Final = 120.0

T = TypeVar("T")


def insisting(
    attempt: Callable[[], T], where: str, *, pause: Callable[[float], object] = time.sleep, moved: Callable[[], int] = lambda: 0
) -> T:
    """The result of an attempt that is not Interrupted. SourceUnreachable after too many in a row that moved nothing."""
    failures, before = 0, moved()
    while True:
        try:
            return attempt()
        except Interrupted as error:
            failures = 1 if moved() > before else failures + 1
            before = moved()
            if failures > len(PAUSES_S) or (error.after_s or 0) > RETRY_AFTER_MAX_S:
                raise SourceUnreachable(
                    f"{where}: {error.cause}" + (f", {failures} times in a row" if failures > 1 else ""),
                    hint="is the server overloaded, or the network in between unreliable? The job goes on from where it was.",
                ) from error
            # Spread: many readers that were cut off together shall not come back together.
            pause(max(PAUSES_S[failures - 1] * random.uniform(0.5, 1), error.after_s or 0))  # noqa: S311 - no secret


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
    """A place where somebody reads in order: the next read is expected at `at`; `window` bytes beyond are fetched."""

    at: int
    window: int = 0
    fetched: int = 0


@dataclass(slots=True, eq=False)
class Front:
    """Where one reader of a file read last, when, and how much it has read: who looks here and there waits for nobody."""

    at: int = 0
    moved_at: float = 0.0
    read_bytes: int = 0


class Kept:
    """Pieces of all files of a place by age, so that their bytes together stay below a bound."""

    def __init__(self, most: int = KEPT_BYTES) -> None:
        self._most = most
        self._lock = threading.Lock()
        self._bytes = 0
        self._pieces: OrderedDict[int, tuple[_Pieces, _Piece]] = OrderedDict()

    def add(self, owner: "_Pieces", piece: _Piece) -> list[tuple["_Pieces", _Piece]]:
        """Those that must go for it. One that is still being fetched stays: somebody waits for it."""
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
        """Counts a piece as used now."""
        with self._lock:
            if id(piece) in self._pieces:
                self._pieces.move_to_end(id(piece))

    def drop(self, piece: _Piece) -> None:
        """Lets go of a piece."""
        with self._lock:
            if self._pieces.pop(id(piece), None) is not None:
                self._bytes -= piece.length


class _Pieces:
    """One file's pieces: never overlapping, found by where they begin."""

    def __init__(self, file: RemoteFile, live: "_Live") -> None:
        self.file, self._kept, self._pool, self._closed = file, live.kept, live.pool, live.closed
        # As many readers at once as the place likes requests keep it busy by themselves.
        self._enough_readers = live.place.fetches_at_once
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
        front = Front()
        with self._moved:
            self._fronts.append(front)
        return front

    def left(self, front: Front) -> None:
        with self._moved:
            self._fronts.remove(front)
            self._moved.notify_all()

    def read_into(self, offset: int, buffer: memoryview, front: Front) -> None:
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
        """By pieces; or past them, where nobody gains by them: they cost a copy of every byte, and the processor's caches."""
        wanted: list[_Piece] | None = None
        straight: Future[None] | None = None
        try:
            with self._lock:
                large = len(buffer) >= STRAIGHT_BYTES and self._most_reading >= self._enough_readers and len(self._fronts) == 1
                if large and not self._has_pieces(at, at + len(buffer)):
                    self.requested_bytes += len(buffer)
                    straight = self._pool.submit(self._filled, at, buffer)
                else:
                    wanted = self._scheduled(at, at + len(buffer))
                if not large:
                    self._look_ahead(at, at + len(buffer))
        except RuntimeError as error:  # the pool takes nothing more
            raise self._was_closed() from error
        if straight is not None:
            straight.result()
        for piece in wanted or ():
            try:
                content = piece.future.result()
            except CancelledError:
                raise
            except BaseException:
                self._forget(piece)  # so that who tries later asks again
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

    def _scheduled(self, start: int, end: int, *, at_least: int = PIECE_MIN_BYTES) -> list[_Piece]:
        """The pieces that cover the range, those that were missing on their way."""
        found, at = [], start
        while at < end:
            number = bisect_right(self._starts, at) - 1
            piece = self._by_start[self._starts[number]] if number >= 0 else None
            if piece is not None and piece.failed:  # fetched ahead, while the server was away: it may be back
                self._remove(piece)
                self._kept.drop(piece)
                continue
            if piece is None or piece.end <= at:
                following = self._starts[number + 1] if number + 1 < len(self._starts) else self.file.size
                length = min(max(end - at, at_least), PIECE_MAX_BYTES, following - at, self.file.size - at)
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
                # Another file's: its own lock is not ours to take here. It finds the piece gone by its mark.
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

    # ── without it ───────────────────────────────────────────────────────────────────────────────────────────────────

    def let_go(self, piece: _Piece) -> None:
        """From another file's thread, which holds that file's lock: try, rather than wait in a circle."""
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

        insisting(attempt, f"{self.file.shown}, offset {start + got}", pause=self._closed.wait, moved=lambda: got)


class RemoteReader:
    """The bytes `offset … offset + length` of the file `name` under a Remote; `length` None means up to its end.

    `version`: the file must be at it still (what `RemoteReader.version` was before). NotFound, AuthFailed, SourceUnreachable,
    UnsupportedFormat (the server serves no ranges), DiskReadFailed (the file was changed).
    """

    max_readers = 64

    def __init__(
        self, remote: Remote, name: str, offset: int = 0, length: int | None = None, *, version: str | None = None
    ) -> None:
        self._remote = remote
        self._live = _acquire(remote)
        self._open = True
        self._front: Front | None = None
        try:
            self._pieces = self._live.pieces(name)
            self._front = self._pieces.entered()
            self._offset = offset
            self.size = max(self._pieces.file.size - offset, 0) if length is None else length
            self._check(version)
        except BaseException:
            self.close()
            raise

    def _check(self, version: str | None) -> None:
        file = self._pieces.file
        if version is not None and version != file.version:
            raise DiskReadFailed(
                f"{file.shown} is not the file that it was: it was changed or replaced",
                hint="let it be written to its end first, then submit again",
            )
        if self._offset + self.size > file.size:
            raise DiskReadFailed(
                f"{file.shown}: bytes {self._offset} to {self._offset + self.size} are wanted, but it ends at {file.size}",
                hint="the file is cut off: copy it again from where it came",
            )

    @property
    def version(self) -> str:
        return self._pieces.file.version

    def extents(self) -> Iterator[Extent]:
        return iter([Extent(0, self.size)] if self.size else [])

    def read_into(self, offset: int, buffer: memoryview) -> None:
        if offset < 0 or offset + len(buffer) > self.size:
            shown = self._pieces.file.shown
            raise DiskReadFailed(f"{shown}: {len(buffer)} bytes at offset {offset} are outside its {self.size}")
        self._pieces.read_into(self._offset + offset, buffer, self._front or Front())

    def close(self) -> None:
        if self._open:
            self._open = False
            if self._front is not None:
                self._pieces.left(self._front)
            _release(self._remote, self._live)


# ── places that are connected to ─────────────────────────────────────────────────────────────────────────────────────


@dataclass(slots=True)
class _Live:
    """A place, shared by all readers of the same Remote in this process: one login, one set of connections, one memory."""

    url: str
    place: Place
    pool: ThreadPoolExecutor
    users: int = 0
    closed: threading.Event = field(default_factory=threading.Event)
    kept: Kept = field(default_factory=Kept)
    files: dict[str, _Pieces] = field(default_factory=dict)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def pieces(self, name: str) -> _Pieces:
        with self.lock:
            if name not in self.files:
                file = insisting(lambda: self.place.open(name), f"{self.url}{name}", pause=self.closed.wait)
                self.files[name] = _Pieces(file, self)
            return self.files[name]

    def close(self) -> None:
        self.closed.set()
        self.place.close()
        self.pool.shutdown(wait=False, cancel_futures=True)
        for pieces in self.files.values():
            pieces.file.close()


_lives: dict[Remote, _Live] = {}
_lives_lock = threading.Lock()


def _acquire(remote: Remote) -> _Live:
    with _lives_lock:
        live = _lives.get(remote)
        if live is None or live.closed.is_set():
            place = _connected(remote)
            pool = ThreadPoolExecutor(place.fetches_at_once, thread_name_prefix="remote")
            live = _lives[remote] = _Live(remote.url, place, pool)
        live.users += 1
        return live


def _release(remote: Remote, live: _Live) -> None:
    with _lives_lock:
        live.users -= 1
        if live.users:
            return
        if _lives.get(remote) is live:
            del _lives[remote]
    live.close()


@contextmanager
def connected(remote: Remote, *, within_s: float | None = None) -> Iterator[None]:
    """What is opened under the Remote stays open within: inspecting an archive opens it many times, and logs in once.

    `within_s`: after so long it is closed, also during a read, which raises SourceUnreachable. A server that sends a byte now
    and then must not keep a caller waiting for ever.
    """
    live = _acquire(remote)
    timer = threading.Timer(within_s or 0, live.close)
    timer.daemon = True
    if within_s is not None:
        timer.start()
    try:
        yield
    except SynvirtError as error:
        if not live.closed.is_set():
            raise
        raise SourceUnreachable(
            f"{remote.url} did not bring what was needed within {within_s:.0f} s",
            hint="is the server, or the network in between, very slow?",
        ) from error
    finally:
        timer.cancel()
        _release(remote, live)


def names(remote: Remote, folder: str = "") -> list[str] | None:
    """What lies in a folder under the Remote, sorted; None where its protocol knows no folders."""
    live = _acquire(remote)
    try:
        found = insisting(lambda: live.place.names(folder), f"{remote.url}{folder}", pause=live.closed.wait)
        return None if found is None else sorted(found)
    finally:
        _release(remote, live)


def version_of(remote: Remote, name: str) -> str:
    """What tells this file from what it is after a change."""
    reader = RemoteReader(remote, name)
    try:
        return reader.version
    finally:
        reader.close()


def _connected(remote: Remote) -> Place:
    """The table of protocols. A module is imported when it is needed: SMB's is slow to load."""
    match urls.parse(remote.url).scheme:
        case "s3":
            from synvirt.remote.s3 import S3Place

            return S3Place(remote)
        case "smb":
            from synvirt.remote.smb import SmbPlace

            return SmbPlace(remote)
        case _:
            from synvirt.remote.http import HttpPlace

            return HttpPlace(remote)


def requested_bytes(remote: Remote, name: str) -> int:
    """How much was asked of the server for a file that is open, read-ahead included: what tests and benchmarks look at."""
    with _lives_lock:
        live = _lives[remote]
    return live.files[name].requested_bytes


__all__ = ["RemoteReader", "SynvirtError", "connected", "names", "requested_bytes", "version_of"]
