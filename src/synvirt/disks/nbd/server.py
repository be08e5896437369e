"""A DiskReader as an NBD export, read-only: NetworkBlockDevice/nbd's doc/proto.md.

    listen (Unix socket, loopback port) ─▶ a thread a connection: handshake, then requests ─▶ threads that read and answer

The fixed newstyle handshake, structured replies, and base:allocation for zeros; writes are refused. The client may be anybody
who can open the socket: each length from it is limited before anything is allocated.
"""

import contextlib
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from enum import IntEnum
from pathlib import Path
from typing import Protocol, runtime_checkable

from synvirt.blocks import DiskReader, Extent, ExtentCursor
from synvirt.errors import DiskReadFailed, Internal, SynvirtError
from synvirt.sizes import MIB

# The default limit of a request («Block size constraints»).
REQUEST_BYTES_MAX = 32 * MIB
# This many requests are read in parallel, over all connections, each with its own buffer.
THREADS = 4
CONNECTIONS_MAX = 64
# The pause after a connection that could not be accepted: its client has gone, or this process has too many files open.
ACCEPT_AGAIN_S = 0.1
# The largest option: an export's name has at most 4096 bytes, and a client asks for a few contexts.
OPTION_BYTES_MAX = 64 << 10
HANDSHAKE_TIMEOUT_S = 20.0
# A client that takes no byte of an answer for this long is disconnected: it holds a thread that others need.
SEND_TIMEOUT_S = 60
# Extents in one answer; the client asks again from its end.
EXTENTS_MAX = 8192
ALLOCATION = b"base:allocation"
ALLOCATION_ID = 1

_MAGIC, _OPTION_MAGIC, _OPTION_REPLY_MAGIC = b"NBDMAGIC", b"IHAVEOPT", 0x3E889045565A9
_REQUEST_MAGIC, _SIMPLE_MAGIC, _CHUNK_MAGIC = 0x25609513, 0x67446698, 0x668E33EF
_FIXED_NEWSTYLE, _NO_ZEROES = 1, 2
_HAS_FLAGS, _READ_ONLY, _SEND_DF, _MULTI_CONN = 1, 2, 1 << 7, 1 << 8
# Answers to options.
_ACK, _SERVER, _INFO_REPLY, _CONTEXT = 1, 2, 3, 4
_UNSUPPORTED, _INVALID, _UNKNOWN = (1 << 31) + 1, (1 << 31) + 3, (1 << 31) + 6
_INFO_EXPORT, _INFO_BLOCK_SIZE = 0, 3
# A command's flag, and the types of answers' chunks.
_ONE_EXTENT = 1 << 3
_DONE = 1
_CHUNK_NONE, _CHUNK_DATA, _CHUNK_STATUS, _CHUNK_ERROR = 0, 1, 5, (1 << 15) + 1
_HOLE, _ZERO = 1, 2
_EPERM, _EIO, _EINVAL = 1, 5, 22


class _Option(IntEnum):
    EXPORT_NAME = 1
    ABORT = 2
    LIST = 3
    INFO = 6
    GO = 7
    STRUCTURED_REPLY = 8
    LIST_META_CONTEXT = 9
    SET_META_CONTEXT = 10


class _Command(IntEnum):
    READ = 0
    WRITE = 1
    DISCONNECT = 2
    FLUSH = 3
    TRIM = 4
    CACHE = 5
    WRITE_ZEROES = 6
    BLOCK_STATUS = 7


class _Gone(Exception):
    """The client has closed the connection, or breaks the protocol."""


class NbdServer:
    """Serves from `listen` or `serve` on until `close`. The reader stays the caller's. `failure`: the first error of a read;
    `on_read` is called after each successful read, in any thread."""

    def __init__(self, reader: DiskReader, *, on_read: Callable[[int], None] = lambda length: None) -> None:
        if reader.max_readers <= 1:
            raise ValueError("an NBD export is read in any order")
        self.reader, self.on_read = reader, on_read
        self.failure: SynvirtError | None = None
        self._listening: list[socket.socket] = []
        self._connections: set[socket.socket] = set()
        self._threads: list[threading.Thread] = []
        self._lock = threading.Lock()
        self._closed = False
        self.pool = ThreadPoolExecutor(min(THREADS, reader.max_readers), thread_name_prefix="nbd-read")
        # For requests without an answer yet: a client that asks for more has to wait.
        self.room = threading.Semaphore(2 * THREADS)

    def listen(self, path: Path) -> str:
        """Listens on a new Unix socket, which only its folder's owner should reach; its URI."""
        listening = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._begin(listening, str(path))
        return f"nbd+unix:///?socket={path}"

    def listen_loopback(self, port: int) -> str:
        """Listens on 127.0.0.1, where each user of this host can read the disk; port 0 means any free one. Its URI."""
        listening = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self._begin(listening, ("127.0.0.1", port))
        return f"nbd://127.0.0.1:{listening.getsockname()[1]}"

    def serve(self, connected: socket.socket) -> None:
        """Serves a client that is connected already, until it leaves."""
        with self._lock:
            self._connections.add(connected)
        self._serve(connected)

    def _begin(self, listening: socket.socket, address: str | tuple[str, int]) -> None:
        try:
            listening.bind(address)
            listening.listen()
        except OSError as error:
            listening.close()
            raise DiskReadFailed(f"the NBD server cannot listen: {error.strerror or error}") from error
        self._listening.append(listening)
        self._run(self._accept, listening)

    def _run(self, what: Callable[[socket.socket], None], one: socket.socket) -> None:
        thread = threading.Thread(target=what, args=(one,), name="nbd-server", daemon=True)
        self._threads.append(thread)
        thread.start()

    def _accept(self, listening: socket.socket) -> None:
        while True:
            try:
                connected, _ = listening.accept()
            except OSError:
                if self._closed:
                    return
                time.sleep(ACCEPT_AGAIN_S)
                continue
            with self._lock:
                if self._closed or len(self._connections) >= CONNECTIONS_MAX:
                    connected.close()
                    continue
                self._connections.add(connected)
                self._threads = [thread for thread in self._threads if thread.is_alive()]
                self._run(self._serve, connected)

    def _serve(self, connected: socket.socket) -> None:
        try:
            with contextlib.suppress(_Gone, OSError):
                _Connection(self, connected).serve()
        finally:
            with self._lock:
                self._connections.discard(connected)
            connected.close()

    def failed(self, error: SynvirtError) -> None:
        """Keeps the first error of a read: NBD itself carries only an error number."""
        with self._lock:
            self.failure = self.failure or error

    def close(self) -> None:
        """No thread is left when this returns. May be called twice."""
        with self._lock:
            self._closed = True
            open_ = [*self._listening, *self._connections]
            threads = list(self._threads)
        for one in open_:
            with contextlib.suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)
        for thread in threads:
            thread.join()
        for one in self._listening:
            one.close()
        self.pool.shutdown(wait=True)


class _Connection:
    """One client. Answers are written one at a time, in any order: each has the cookie of its request."""

    def __init__(self, server: NbdServer, connected: socket.socket) -> None:
        self._server, self._socket = server, connected
        self._reader, self._size = server.reader, server.reader.size
        self._writing = threading.Lock()
        self._structured = self._allocation = False

    def serve(self) -> None:
        self._socket.settimeout(HANDSHAKE_TIMEOUT_S)
        self._socket.sendall(_MAGIC + _OPTION_MAGIC + struct.pack(">H", _FIXED_NEWSTYLE | _NO_ZEROES))
        (flags,) = struct.unpack(">I", self._received(4))
        while not self._agreed(pad=not flags & _NO_ZEROES):
            pass
        self._socket.settimeout(None)  # an idle client may stay
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, struct.pack("ll", SEND_TIMEOUT_S, 0))
        while self._next_request():
            pass

    # ── the handshake ────────────────────────────────────────────────────────────────────────────────────────────────

    def _agreed(self, *, pad: bool) -> bool:
        """Handles one option. True: the client goes on to its requests."""
        magic, option, length = struct.unpack(">8sII", self._received(16))
        if magic != _OPTION_MAGIC or length > OPTION_BYTES_MAX:
            raise _Gone
        content = self._received(length)
        match option:
            case _Option.EXPORT_NAME:  # there is only one export, whatever the name
                self._socket.sendall(struct.pack(">QH", self._size, self._flags()) + (bytes(124) if pad else b""))
                return True
            case _Option.ABORT:
                self._answer_option(option, _ACK)
                raise _Gone
            case _Option.LIST:
                self._answer_option(option, _SERVER, struct.pack(">I", 0))
                self._answer_option(option, _ACK)
            case _Option.INFO | _Option.GO:
                self._answer_option(option, _INFO_REPLY, struct.pack(">HQH", _INFO_EXPORT, self._size, self._flags()))
                sizes = struct.pack(">HIII", _INFO_BLOCK_SIZE, 1, 4096, REQUEST_BYTES_MAX)
                self._answer_option(option, _INFO_REPLY, sizes)
                self._answer_option(option, _ACK)
                return bool(option == _Option.GO)
            case _Option.STRUCTURED_REPLY:
                self._structured = not content
                self._answer_option(option, _INVALID if content else _ACK)
            case _Option.LIST_META_CONTEXT | _Option.SET_META_CONTEXT:
                self._contexts(option, content)
            case _:
                self._answer_option(option, _UNSUPPORTED)
        return False

    def _flags(self) -> int:
        return _HAS_FLAGS | _READ_ONLY | _MULTI_CONN | (_SEND_DF if self._structured else 0)

    def _contexts(self, option: int, content: bytes) -> None:
        queries = _queries(content)
        if queries is None or (option == _Option.SET_META_CONTEXT and not self._structured):
            self._answer_option(option, _INVALID)
            return
        wanted = ALLOCATION in queries or (option == _Option.LIST_META_CONTEXT and (not queries or b"base:" in queries))
        if option == _Option.SET_META_CONTEXT:
            self._allocation = wanted
        if wanted:
            self._answer_option(option, _CONTEXT, struct.pack(">I", ALLOCATION_ID) + ALLOCATION)
        self._answer_option(option, _ACK)

    def _answer_option(self, option: int, kind: int, content: bytes = b"") -> None:
        self._socket.sendall(struct.pack(">QIII", _OPTION_REPLY_MAGIC, option, kind, len(content)) + content)

    # ── requests ─────────────────────────────────────────────────────────────────────────────────────────────────────

    def _next_request(self) -> bool:
        magic, flags, command, cookie, offset, length = struct.unpack(">IHHQQI", self._received(28))
        if magic != _REQUEST_MAGIC or command == _Command.DISCONNECT:
            return False
        if command == _Command.WRITE:  # its data follows, and the next request cannot be found
            if length > REQUEST_BYTES_MAX:
                return False
            self._received(length)
        refusal = self._refused(command, offset, length)
        if refusal is not None:
            self._refuse(cookie, *refusal)
        elif command in (_Command.FLUSH, _Command.CACHE):
            self._answer(cookie, _CHUNK_NONE, b"")
        else:
            self._server.room.acquire()
            try:
                self._server.pool.submit(self._do, command, flags, cookie, offset, length)
            except RuntimeError:  # the server is being closed
                self._server.room.release()
                return False
        return True

    def _refused(self, command: int, offset: int, length: int) -> tuple[int, str] | None:
        """The error for a request that is refused at once."""
        if command in (_Command.WRITE, _Command.TRIM, _Command.WRITE_ZEROES):
            return _EPERM, "the export is read-only"
        if command not in (_Command.READ, _Command.FLUSH, _Command.CACHE, _Command.BLOCK_STATUS):
            return _EINVAL, f"there is no command {command}"
        if command == _Command.BLOCK_STATUS and not self._allocation:
            return _EINVAL, "no context was agreed on"
        too_long = command == _Command.READ and length > REQUEST_BYTES_MAX
        if command in (_Command.READ, _Command.BLOCK_STATUS) and (too_long or length == 0 or offset + length > self._size):
            return _EINVAL, f"{length} bytes at offset {offset} cannot be asked for: the disk has {self._size}"
        return None

    def _do(self, command: int, flags: int, cookie: int, offset: int, length: int) -> None:
        try:
            if command == _Command.READ:
                self._read(cookie, offset, length)
            else:
                self._tell_status(cookie, offset, length, one=bool(flags & _ONE_EXTENT))
        except SynvirtError as error:
            self._fail(cookie, error)
        except OSError:  # the client is gone, or takes nothing: the rest of a started answer cannot follow
            with contextlib.suppress(OSError):
                self._socket.shutdown(socket.SHUT_RDWR)
        except Exception as error:  # without an answer, the client would wait for ever
            failure = Internal(f"a read of the disk broke: {type(error).__name__}")
            failure.__cause__ = error
            self._fail(cookie, failure)
        finally:
            self._server.room.release()

    def _fail(self, cookie: int, error: SynvirtError) -> None:
        self._server.failed(error)
        with contextlib.suppress(OSError):
            self._refuse(cookie, _EIO, error.detail)

    def _read(self, cookie: int, offset: int, length: int) -> None:
        content = bytearray(length)
        self._reader.read_into(offset, memoryview(content))
        self._server.on_read(length)
        self._answer(cookie, _CHUNK_DATA, content, offset)

    def _tell_status(self, cookie: int, offset: int, length: int, *, one: bool) -> None:
        status = bytearray(struct.pack(">I", ALLOCATION_ID))
        for number, extent in enumerate(_between(self._reader, offset, offset + length)):
            if number and (one or number >= EXTENTS_MAX):
                break
            status += struct.pack(">II", extent.length, (_HOLE | _ZERO) if extent.zero else 0)
        self._answer(cookie, _CHUNK_STATUS, status)

    def _answer(self, cookie: int, kind: int, content: bytes | bytearray, offset: int | None = None) -> None:
        head = b"" if offset is None else struct.pack(">Q", offset)
        if self._structured:
            first = struct.pack(">IHHQI", _CHUNK_MAGIC, _DONE, kind, cookie, len(head) + len(content)) + head
        else:
            first = struct.pack(">IIQ", _SIMPLE_MAGIC, 0, cookie)
        with self._writing:
            self._socket.sendall(first)
            self._socket.sendall(content)

    def _refuse(self, cookie: int, number: int, why: str) -> None:
        text = why.encode()[:1024]
        if self._structured:
            self._answer(cookie, _CHUNK_ERROR, struct.pack(">IH", number, len(text)) + text)
            return
        with self._writing:
            self._socket.sendall(struct.pack(">IIQ", _SIMPLE_MAGIC, number, cookie))

    def _received(self, length: int) -> bytes:
        content = bytearray(length)
        at = 0
        while at < length:
            got = self._socket.recv_into(memoryview(content)[at:])
            if got == 0:
                raise _Gone
            at += got
        return bytes(content)


def _queries(content: bytes) -> list[bytes] | None:
    """From an option about contexts: u32 length, the export's name, u32 count, and each as u32 length, text."""
    try:
        (length,) = struct.unpack_from(">I", content)
        at = 4 + length
        (count,) = struct.unpack_from(">I", content, at)
        at += 4
        found = []
        for _ in range(min(count, OPTION_BYTES_MAX)):
            (length,) = struct.unpack_from(">I", content, at)
            if at + 4 + length > len(content):
                return None
            found.append(content[at + 4 : at + 4 + length])
            at += 4 + length
    except struct.error:
        return None
    return found if at == len(content) else None


@runtime_checkable
class ListsRanges(Protocol):
    """A reader that can give the extents of a range without walking the disk's from the start."""

    def extents_between(self, start: int, end: int) -> Iterator[Extent]: ...


def _between(reader: DiskReader, start: int, end: int) -> Iterator[Extent]:
    """The reader's extents of that range, without a gap: where it has none, the bytes are read."""
    at = start
    for extent in (
        reader.extents_between(start, end)
        if isinstance(reader, ListsRanges)
        else ExtentCursor(reader.extents()).between(start, end)
    ):
        if at < extent.start:
            yield Extent(at, extent.start - at)
        yield extent
        at = extent.end
    if at < end:
        yield Extent(at, end - at)
