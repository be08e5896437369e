"""NBD exports, through libnbd: the protocol is NetworkBlockDevice/nbd's doc/proto.md, URIs are its doc/uri.md.

    read_into ─▶ a connection of the pool ─▶ requests in flight together ─▶ straight into the caller's buffer
    extents   ─▶ base:allocation, or a dirty-bitmap context, and base:allocation in the dirty parts

A lost connection is made again, a few times, so that a short fault of the network does not lose a terabyte. Every wait has a
limit: a silent server counts as gone.

With TLS libnbd returns from each poll with one record of 16 KiB. Polls from Python would each take the interpreter's lock, and
threads that contend for it cost a third of a copy's speed. So libnbd itself waits for a read, and `silence.py` ends the wait.
"""

import contextlib
import os
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import TypeVar
from urllib.parse import unquote, urlsplit

import nbd

from synvirt import outgoing
from synvirt.blocks import Extent, ExtentCursor, coalesced
from synvirt.disks.nbd import held
from synvirt.disks.nbd.silence import Watch
from synvirt.disks.specs import NbdTlsSpec
from synvirt.errors import CbtReset, DiskReadFailed, SourceUnreachable
from synvirt.sizes import GIB, KIB

ALLOCATION = nbd.CONTEXT_BASE_ALLOCATION
_DIRTY = 1
# A read of the copy loop is many requests of this size at once, which hides a network's delay. QEMU has memory ready for this
# size; for 1 MiB it asks the kernel for new memory each time, and takes a quarter longer.
_REQUEST_BYTES = 256 * KIB
# A hint for how much one request about extents may cover; some servers cannot answer for 4 GiB.
_STATUS_BYTES = GIB

CONNECT_TIMEOUT_S = 20.0
_NBD_PORT = 10809
MORE_CONNECTIONS_TIMEOUT_S = 5.0
# The pause before another connection is tried after one was refused: some servers never allow more, others were busy for a
# moment. Then twice as long each time.
MORE_AGAIN_S = 10.0
MORE_AGAIN_MOST_S = 300.0
# With no byte for this long, a server counts as gone.
SILENCE_TIMEOUT_S = 60.0
# Pauses before each new connection after a lost one.
RECONNECT_DELAYS_S = (0.1, 1.0, 5.0)
_POLL_MS = 500

# More connections than cores only wait for each other: deciphering is most of the work, on both sides.
TLS_CONNECTIONS = max(2, len(os.sched_getaffinity(0)))

Answer = TypeVar("Answer")
# Begins a connection of the handle; libnbd waits for the rest.
Dial = Callable[[nbd.NBD], None]


def by_uri(uri: str) -> Dial:
    """How to connect to an NBD URI: through the outgoing guard where it names a host."""
    parts = urlsplit(uri)
    host, port = parts.hostname, parts.port or _NBD_PORT

    def dial(handle: nbd.NBD) -> None:
        if parts.scheme == "nbd" and host:
            handle.set_export_name(unquote(parts.path.removeprefix("/")))
            handle.aio_connect_socket(outgoing.sources().dial(host, port, timeout_s=CONNECT_TIMEOUT_S).detach())
            return
        if parts.scheme == "nbds" and host:
            outgoing.sources().check(host, port)  # by name, as below
        handle.set_uri_allow_local_file(True)  # for tls-psk-file in the URI, which is the caller's own text
        handle.aio_connect_uri(uri)

    return dial


def by_tls(spec: NbdTlsSpec) -> Dial:
    """By name: if libnbd gets a connected socket, it checks no certificate."""

    def dial(handle: nbd.NBD) -> None:
        handle.set_tls(nbd.TLS_REQUIRE)
        handle.set_tls_certificates(spec.trusted)
        handle.set_tls_verify_peer(True)
        handle.set_export_name(spec.export)
        outgoing.sources().check(spec.host, spec.port)
        handle.aio_connect_tcp(spec.host, str(spec.port))

    return dial


class _Lost(Exception):
    """The connection is gone, or its server is silent."""


class NbdReader:
    """An export. With `bitmap` (`qemu:dirty-bitmap:…`), its extents are only the bitmap's dirty ranges."""

    def __init__(
        self,
        server: str | Dial,
        *,
        bitmap: str | None = None,
        connections: int = 4,
        name: str = "",
        connect_timeout_s: float = CONNECT_TIMEOUT_S,
    ) -> None:
        """`server`: a URI, or how to connect and the time limit for it. `name` is the export's name in errors; by default the
        URI's address and name."""
        self._bitmap = bitmap
        contexts = [ALLOCATION] if bitmap is None else [ALLOCATION, bitmap]
        dial, called = (by_uri(server), _named(server)) if isinstance(server, str) else (server, "the NBD server")
        called = f"{called} of {name}" if name and callable(server) else name or called
        self._pool = _Pool(dial, contexts, connections, called, connect_timeout_s)
        self.size: int = self._pool.export_size
        offered = self._pool.ask(lambda handle: [handle.can_meta_context(context) for context in contexts], "offset 0")
        self._has_allocation = offered[0]
        if not offered[-1] and bitmap is not None:
            self._pool.close()
            raise CbtReset(
                f"{self._pool.server} does not offer the dirty bitmap {bitmap!r}",
                hint="Make a full copy: what has changed since the last one is not known.",
            )

    @property
    def max_readers(self) -> int:
        # Two threads per connection, in turns: one uses it while the other writes what it read.
        return 2 * self._pool.most

    def read_into(self, offset: int, buffer: memoryview) -> None:
        if offset < 0 or offset + len(buffer) > self.size:
            raise DiskReadFailed(f"{len(buffer)} bytes at offset {offset} are outside the NBD export of {self.size}")
        if len(buffer):
            self._pool.ask(partial(_read, offset=offset, buffer=buffer, size=self.size, pool=self._pool), f"offset {offset}")

    def extents(self) -> Iterator[Extent]:
        return coalesced(self._extents())

    def _extents(self) -> Iterator[Extent]:
        if self._bitmap is None and not self._has_allocation:
            yield Extent(0, self.size)
            return
        asked = [context for context, has in ((ALLOCATION, self._has_allocation), (self._bitmap, True)) if has and context]
        at = 0
        while at < self.size:
            # Both in one request: over a network a request for each dirty range would take longer than to read them all.
            found = self._pool.ask(partial(_status, contexts=asked, start=at, end=self.size), f"offset {at}")
            known = min(statuses[-1][1] if statuses else at for statuses in found)
            if known <= at:
                raise DiskReadFailed(f"the NBD server has no answer about the extents at offset {at}")
            whole = [(at, known, 0)]
            allocated = ExtentCursor(
                Extent(start, end - start, zero=bool(flags & nbd.STATE_ZERO))
                for start, end, flags in (found[0] if self._has_allocation else whole)
            )
            for start, end, flags in whole if self._bitmap is None else found[-1]:
                if self._bitmap is None or flags & _DIRTY:
                    yield from allocated.between(start, min(end, known))
            at = known

    def close(self) -> None:
        self._pool.close()


def _read(handle: nbd.NBD, offset: int, buffer: memoryview, size: int, pool: "_Pool") -> None:
    unit = max(1, handle.get_block_size(nbd.SIZE_MINIMUM))
    most = handle.get_block_size(nbd.SIZE_MAXIMUM) or _REQUEST_BYTES
    step = max(unit, min(_REQUEST_BYTES, most) // unit * unit)
    first, last = offset // unit * unit, min(size, -(-(offset + len(buffer)) // unit) * unit)
    aligned = (first, last) == (offset, offset + len(buffer))
    if aligned and held.lasts(buffer):
        _read_at_once(handle, offset, buffer, step, pool)
        return
    # Some servers accept only whole blocks; the copy loop asks for such anyway.
    whole = buffer if aligned else memoryview(bytearray(last - first))
    for at in range(0, len(whole), step):
        _read_last(handle, first + at, whole[at : at + step], pool.watch)
    if not aligned:
        buffer[:] = whole[offset - first :][: len(buffer)]


def _read_at_once(handle: nbd.NBD, offset: int, buffer: memoryview, step: int, pool: "_Pool") -> None:
    last = (len(buffer) - 1) // step * step if handle.get_tls_negotiated() else len(buffer)
    pieces = (buffer[at : min(at + step, last)] for at in range(0, last, step))
    cookies = [handle.aio_pread(pool.pieces.of(piece), offset + number * step) for number, piece in enumerate(pieces)]
    failure: nbd.Error | _Lost | None = None
    if last < len(buffer):
        try:
            _read_last(handle, offset + last, buffer[last:], pool.watch)
        except (nbd.Error, _Lost) as error:
            failure = error
    _await(handle, cookies)
    if failure is not None:
        raise failure


def _read_last(handle: nbd.NBD, offset: int, buffer: memoryview, watch: Watch) -> None:
    """The last request of a read: while libnbd waits for it, it also takes the answers to those before it."""
    with watch.over(handle.aio_get_fd()) as silent:
        try:
            buffer[:] = handle.pread(len(buffer), offset)
        except nbd.Error:
            if silent():
                raise _Lost(f"it has sent nothing for {SILENCE_TIMEOUT_S:.0f} s") from None
            raise


# (start, end, flags), ascending, without a gap.
_Status = tuple[int, int, int]


def _status(handle: nbd.NBD, contexts: list[str], start: int, end: int) -> list[list[_Status]]:
    """The status by each context from `start` on; one may cover less than another."""
    unit = max(1, handle.get_block_size(nbd.SIZE_MINIMUM))
    first = start // unit * unit
    found: dict[str, list[_Status]] = {}

    def take(name: str, offset: int, entries: list[int], error: object) -> int:
        if name not in found:
            found[name] = list(_ranges(entries, offset, start, end))
        return 0

    length = min(_STATUS_BYTES, -(-(end - first) // unit) * unit, handle.get_size() - first)
    _await(handle, [handle.aio_block_status(length, first, take)])
    return [found.get(context, []) for context in contexts]


def _ranges(entries: list[int], offset: int, start: int, end: int) -> Iterator[_Status]:
    """A server's answer, (length, flags) in sequence from `offset` on, cut to start and end."""
    at = offset
    for length, flags in zip(entries[0::2], entries[1::2], strict=False):
        first, last = max(at, start), min(at + length, end)
        if first < last:
            yield first, last, flags
        at += length


def _await(handle: nbd.NBD, cookies: list[int]) -> None:
    """Waits until all are done, and then raises the first error, so that no answer can still come for the buffer.

    One call per turn, however many requests are open: each takes the interpreter's lock, which the other threads need too.
    """
    deadline = time.monotonic() + SILENCE_TIMEOUT_S
    while handle.aio_in_flight():
        if handle.poll(_POLL_MS):
            deadline = time.monotonic() + SILENCE_TIMEOUT_S
        elif time.monotonic() > deadline:
            raise _Lost(f"it has sent nothing for {SILENCE_TIMEOUT_S:.0f} s")
    failure: nbd.Error | None = None
    for cookie in cookies:
        try:
            handle.aio_command_completed(cookie)
        except nbd.Error as error:
            failure = failure or error
    if failure is not None:
        raise failure


def _connected(dial: Dial, contexts: list[str], timeout_s: float) -> nbd.NBD:
    handle = nbd.NBD()
    try:
        for context in contexts:
            handle.add_meta_context(context)
        handle.set_pread_initialize(False)  # what could not be read is never used
        dial(handle)
        deadline = time.monotonic() + timeout_s
        while handle.aio_is_connecting() or handle.aio_is_negotiating():
            handle.poll(_POLL_MS)
            if time.monotonic() > deadline:
                raise _Lost(f"it has not answered for {timeout_s:.0f} s")
    except nbd.Error as error:
        raise _Lost(error.string) from error
    except OSError as error:
        raise _Lost(error.strerror or str(error) or "no answer") from error
    if not handle.aio_is_ready():
        raise _Lost("it closed the connection")
    return handle


def _is_lost(handle: nbd.NBD) -> bool:
    return bool(handle.aio_is_dead() or handle.aio_is_closed())


def _named(uri: str) -> str:
    """The server's name in errors: without user, socket and files with keys."""
    parts = urlsplit(uri)
    export = parts.path.strip("/")
    where = f" at {parts.hostname}:{parts.port or _NBD_PORT}" if parts.hostname else ""
    return f"the NBD server{where}" + (f" (export {export!r})" if export else "")


class _Pool:
    """The connections to one export, made when they are first needed: as many as asked for, if the server allows several."""

    def __init__(self, dial: Dial, contexts: list[str], connections: int, server: str, connect_timeout_s: float) -> None:
        self._dial, self._contexts = dial, contexts
        self.server, self._connect_timeout_s = server, connect_timeout_s
        self.watch, self.pieces = Watch(SILENCE_TIMEOUT_S), held.Pieces()
        self._changed = threading.Condition()
        self._open = 1
        self._closed = False
        try:
            first = _connected(dial, contexts, connect_timeout_s)
            self.export_size: int = first.get_size()
            self.most = connections if first.can_multi_conn() else 1
        except (_Lost, nbd.Error) as lost:
            raise self._unreachable("", lost) from lost
        self._free = [first]
        # Until `_more_at`, at most `_limit` are open.
        self._limit, self._more_at, self._pause_s = self.most, 0.0, MORE_AGAIN_S

    def ask(self, question: Callable[[nbd.NBD], Answer], where: str) -> Answer:
        """Sends a request on any connection, twice if necessary; a lost connection is made again. DiskReadFailed,
        SourceUnreachable."""
        delays = iter(RECONNECT_DELAYS_S)
        while True:
            handle: nbd.NBD | None = None
            try:
                handle = self._take()
                answer = question(handle)
            except (_Lost, nbd.Error) as error:
                if handle is not None and isinstance(error, nbd.Error) and not _is_lost(handle):
                    self._give_back(handle)
                    raise DiskReadFailed(f"{self.server} cannot read at {where}: {error.string}") from error
                if handle is not None:
                    self._drop()
                delay = next(delays, None)
                if delay is None:
                    raise self._unreachable(f" at {where}", error) from error
                time.sleep(delay)
            except BaseException:
                if handle is not None:
                    self._drop()  # it may still expect an answer
                raise
            else:
                self._give_back(handle)
                return answer

    def _take(self) -> nbd.NBD:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._closed or self._free or self._open < self._allowed())
                if self._closed:
                    raise DiskReadFailed(f"{self.server}: the reader is closed")
                if self._free:
                    return self._free.pop()
                self._open += 1
                timeout_s = self._connect_timeout_s if self._open == 1 else MORE_CONNECTIONS_TIMEOUT_S
            try:
                handle = self._another(timeout_s)
            except BaseException as error:
                with self._changed:
                    self._open -= 1
                    self._changed.notify_all()
                    if isinstance(error, _Lost) and self._open > 0:
                        # Some servers allow fewer connections than they announce: use the open ones for now.
                        self._limit, self._more_at = self._open, time.monotonic() + self._pause_s
                        self._pause_s = min(2 * self._pause_s, MORE_AGAIN_MOST_S)
                        continue
                raise
            self._pause_s = MORE_AGAIN_S
            return handle

    def _allowed(self) -> int:
        return self._limit if time.monotonic() < self._more_at else self.most

    def _another(self, timeout_s: float) -> nbd.NBD:
        handle = _connected(self._dial, self._contexts, timeout_s)
        if handle.get_size() != self.export_size:
            raise SourceUnreachable(
                f"{self.server} has another disk now: {handle.get_size()} bytes, not {self.export_size}",
                hint="The export was changed or restarted during the copy: begin the job again.",
            )
        return handle

    def _give_back(self, handle: nbd.NBD) -> None:
        with self._changed:
            if self._closed:
                _disconnect(handle)
            else:
                self._free.append(handle)
            self._changed.notify_all()

    def _drop(self) -> None:
        """One is lost; the idle ones are most likely lost, too."""
        with self._changed:
            self._open -= 1 + len(self._free)
            self._free.clear()
            self._changed.notify_all()

    def _unreachable(self, where: str, error: Exception) -> SourceUnreachable:
        detail = error.string if isinstance(error, nbd.Error) else str(error)
        return SourceUnreachable(
            f"{self.server} is not to be reached{where}: {detail}", hint="Is it running, and does a firewall let it be reached?"
        )

    def close(self) -> None:
        with self._changed:
            self._closed = True
            handles, self._free = self._free, []
            self._changed.notify_all()
        for handle in handles:
            _disconnect(handle)
        self.watch.close()


def _disconnect(handle: nbd.NBD) -> None:
    """Says good-bye, without waiting for an answer."""
    with contextlib.suppress(nbd.Error):
        handle.aio_disconnect()
