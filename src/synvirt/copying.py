"""copy(): the one loop that moves a disk.

    extents ─▶ _Plan ─▶ requests of a few MiB, ascending ─▶ threads ─▶ read_into ─▶ leave out zero runs ─▶ write
                                                              │
    the caller's thread: counts, reports, flushes, and says what is durable ◀── low mark

A full copy, a delta, a cut-over, an import, a backup and a restore are this one function. Python runs a few times for each MiB,
and apart from one memcmp never for each 64 KiB block of data. The memory is one buffer for each thread, for any disk size.
"""

import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import NamedTuple

from synvirt.blocks import DiskReader, DiskWriter, Extent, coalesced, new_buffer, piece_bytes
from synvirt.errors import Cancelled, DiskReadFailed, DiskWriteFailed, Internal, SynvirtError
from synvirt.sizes import KIB, MIB

# Large enough that the time in Python does not count, small enough that 64 threads stay under 256 MiB (`make bench` measures
# it).
REQUEST_BYTES = 4 * MIB
# A zero() may be written as zeros, at 100 MiB/s. The step limits how long a cancel waits for it.
ZERO_STEP_BYTES = 256 * MIB
# A zero extent shorter than this is read together with its neighbours, as two requests cost more.
ZERO_GAP_BYTES = 256 * KIB
# The granularity at which zeros are left out: a zvol's block (specification part 1), and qcow2's usual cluster.
ZERO_RUN_BYTES = 64 * KIB
ZEROS = bytes(ZERO_RUN_BYTES)
THREADS_MAX = 64
PROGRESS_EVERY_S = 0.1
# How long extents are counted before the copy starts. The rest is counted in small slices while the copy runs: so a disk of a
# million extents, or one that needs a network's round trip for each, starts as soon as one with ten, and the copying threads
# get the interpreter often enough.
COUNT_AHEAD_S = 0.05
COUNT_SLICE_S = 0.001
COUNT_PAUSE_S = 0.01
KEPT_EXTENTS_MAX = 10_000  # extents of a list that are kept for the copy: a megabyte


class Copied(NamedTuple):
    """Running totals of a pass.

    `bytes_total` is what the pass really reads: its data extents, or those counted so far while a very long list is still being
    counted. `bytes_done` is how much of it was read. Both include what lies before `since`. `bytes_zero` was not written
    because it is zero: zero extents, and zero runs found in data. Every byte before `watermark` is done, and is durable when
    on_watermark gets it.
    """

    bytes_total: int
    bytes_done: int
    bytes_zero: int
    watermark: int


def default_threads(cores: int | None = None) -> int:
    """One thread for each core, which `make bench` found best: copying waits for inflating or memory, not for disks."""
    return max(2, min(len(os.sched_getaffinity(0)) if cores is None else cores, THREADS_MAX))


def copy(
    reader: DiskReader,
    writer: DiskWriter,
    *,
    since: int = 0,
    fresh: bool = True,
    threads: int | None = None,
    bandwidth_bps: int | None = None,
    shared: Callable[[int], None] | None = None,
    flush_every_s: float = 5.0,
    stop: Callable[[], bool] = lambda: False,
    on_progress: Callable[[Copied], None] = lambda copied: None,
    on_watermark: Callable[[Copied], None] = lambda copied: None,
) -> Copied:
    """Copies the reader's extents to the writer. What no extent covers stays as it is: a delta is a reader with fewer extents.

    - `fresh`: the writer has only data of this disk in its present state, and zeros elsewhere; so zeros are left out. With
      False, for a delta or a resumed pass over a source that has changed, zeros are made by `writer.zero()`.
    - `since`: a watermark of an interrupted pass; everything before it counts as done.
    - `threads`: the most threads; by default one for each core. A reader or writer that allows only one call at a time gets one
      at a time, and the other side still overlaps with it.
    - `shared` is called, from any thread, with the number of bytes to be read next; it returns when they may be read.
    - `stop` is asked before every request, from any thread. Cancelled, once it returns True.
    - `on_progress` and `on_watermark` are called in the caller's thread; what they raise ends the copy and is raised.

    The first failure ends the copy and is raised, with the offset; a failure that is not a SynvirtError becomes Internal. When
    this returns or raises, none of its threads is left. When it returns, everything is durable.
    """
    if writer.size < reader.size:
        raise DiskWriteFailed(f"the volume has {writer.size} bytes, the disk {reader.size}", hint="make the volume larger")
    count = _Count(reader)
    one_pass = _Pass(
        reader,
        writer,
        plan=_Plan(count.extents(), size=reader.size, since=since, fresh=fresh, request_bytes=request_bytes(bandwidth_bps)),
        count=count,
        bucket=Bucket(bandwidth_bps) if bandwidth_bps else None,
        shared=shared,
        stop=stop,
        threads=_threads(threads, reader, writer),
    )
    try:
        with _Crew(one_pass) as crew:
            return _oversee(one_pass, crew, flush_every_s, on_progress, on_watermark)
    finally:
        # Both refer to themselves again, by their frames: cycles, which would keep the reader and the writer.
        one_pass.error = None
        one_pass.plan.end()


def _threads(wanted: int | None, reader: DiskReader, writer: DiskWriter) -> int:
    # A lock lets a side that takes one call at a time have only one. The other side still overlaps.
    limits = [limit for limit in (reader.max_readers, writer.max_writers) if limit > 1]
    return max(1, min([wanted or default_threads(), THREADS_MAX, *limits]))


def request_bytes(bandwidth_bps: int | None) -> int:
    """Bytes of a request. With a low limit, what takes a quarter of a second: so the rate is even, and a cancel prompt."""
    if not bandwidth_bps:
        return REQUEST_BYTES
    return max(ZERO_RUN_BYTES, min(REQUEST_BYTES, bandwidth_bps // 4 // ZERO_RUN_BYTES * ZERO_RUN_BYTES))


def _oversee(
    one_pass: "_Pass",
    crew: "_Crew",
    flush_every_s: float,
    on_progress: Callable[[Copied], None],
    on_watermark: Callable[[Copied], None],
) -> Copied:
    """Runs in the caller's thread while the others copy."""
    counted = one_pass.count.advance(COUNT_AHEAD_S)
    if one_pass.plan.reached:
        on_progress(one_pass.copied())
    crew.begin()
    flushing: _Flush | None = None
    flushed, flush_at = one_pass.copied(), time.monotonic() + flush_every_s
    report_at = time.monotonic() + PROGRESS_EVERY_S
    while crew.works_on(COUNT_PAUSE_S if not counted else PROGRESS_EVERY_S):
        counted = counted or one_pass.count.advance(COUNT_SLICE_S)
        now = time.monotonic()
        if now >= report_at and one_pass.plan.reached:
            on_progress(one_pass.copied())
            report_at = now + PROGRESS_EVERY_S
        if flushing is not None and not flushing.is_alive():
            flushed, flushing, flush_at = flushing.done(), None, now + flush_every_s
            on_watermark(flushed)
        if flushing is None and now >= flush_at and one_pass.copied().watermark > flushed.watermark:
            flushing = crew.flush()
    if one_pass.error is not None:
        raise one_pass.error
    if flushing is not None:
        flushing.done()
    while not counted:
        counted = one_pass.count.advance(COUNT_SLICE_S)
    copied = one_pass.copied()
    one_pass.flush()
    on_watermark(copied)
    on_progress(copied)
    return copied


class _Flush(threading.Thread):
    """One flush, in parallel to the copy."""

    def __init__(self, one_pass: "_Pass") -> None:
        super().__init__(name="copy-flush")
        # The watermark is taken before the flush begins: only what was written by then is durable when it ends.
        self._mark, self._flush = one_pass.copied(), one_pass.flush
        self._error: BaseException | None = None

    def run(self) -> None:
        try:
            self._flush()
        except BaseException as error:
            self._error = error

    def done(self) -> Copied:
        """What is durable, after the flush has ended. Raises what the flush raised."""
        self.join()
        if self._error is not None:
            raise self._error
        return self._mark


class _Crew:
    """The threads of one pass. All of them have ended when its context ends. (Python's executor would serve, but it imports
    logging, which takes as long as the copy of a small disk.)"""

    def __init__(self, one_pass: "_Pass") -> None:
        self._pass = one_pass
        self._workers: list[threading.Thread] = []
        self._flushes: list[_Flush] = []

    def __enter__(self) -> "_Crew":
        return self

    def __exit__(self, *_: object) -> None:
        self._pass.ended.set()
        for thread in (*self._workers, *self._flushes):
            thread.join()

    def begin(self) -> None:
        for slot in range(len(self._pass.busy)):
            worker = threading.Thread(target=self._pass.work, args=(slot,), name=f"copy-{slot}")
            worker.start()
            self._workers.append(worker)

    def works_on(self, within_s: float) -> bool:
        """Waits for `within_s`. False, as soon as all workers have ended; else True."""
        until = time.monotonic() + within_s
        for worker in self._workers:
            worker.join(max(0.0, until - time.monotonic()))
        return any(worker.is_alive() for worker in self._workers)

    def flush(self) -> _Flush:
        flush = _Flush(self._pass)
        flush.start()
        self._flushes = [flush]  # the one before it has ended
        return flush


class _Request(NamedTuple):
    """`length` bytes from `start` to copy, of which `data_bytes` lie in data extents; or to make zero."""

    start: int
    length: int
    data_bytes: int
    zero: bool = False

    def pieces(self, most: int) -> Iterator[Extent]:
        """The request in pieces of `most` bytes at most, which end at multiples of it; zeros in one."""
        at, end = self.start, self.start + self.length
        while at < end:
            cut = end if self.zero else min(end, at - at % most + most)
            yield Extent(at, cut - at, self.zero)
            at = cut


class _Plan:
    """Cuts extents into requests, lazily and in ascending order. `take()` is for any thread."""

    def __init__(self, extents: Iterator[Extent], *, size: int, since: int, fresh: bool, request_bytes: int) -> None:
        self._size, self._since, self.fresh, self.request_bytes = size, since, fresh, request_bytes
        self._requests = self._cut(extents)
        self._lock = threading.Lock()
        # Everything before it was handed out, or needs no copying.
        self.position = since
        # What lies before `since` is counted: earlier figures would be less than what an interrupted pass reported.
        self.reached = since == 0
        self.zero_bytes_passed = 0
        self.data_bytes_behind = 0

    def take(self) -> _Request | None:
        with self._lock:
            request = next(self._requests, None)
            self.reached = True
            self.position = self._size if request is None else request.start + request.length
            return request

    def end(self) -> None:
        """There are no more requests: the reader's extents are let go of, where a failure left some."""
        self._requests = iter(())

    def _cut(self, extents: Iterator[Extent]) -> Iterator[_Request]:
        start = end = data_bytes = 0  # the open span: bytes to copy in one request, small zero extents included
        for extent in coalesced(self._from_since(extents)):
            large_zero = extent.zero and extent.length >= ZERO_GAP_BYTES
            if start == end or extent.start != end or large_zero:
                if start < end:
                    yield _Request(start, end - start, data_bytes)
                start, end, data_bytes = extent.start, extent.start, 0
                if extent.zero:
                    yield from self._zeros(extent)
                    continue
            while end < extent.end:
                # Requests end at multiples of their size, which is fast for readers and file systems.
                cut = min(extent.end, start - start % self.request_bytes + self.request_bytes)
                data_bytes += 0 if extent.zero else cut - end
                end = cut
                if end % self.request_bytes == 0:
                    yield _Request(start, end - start, data_bytes)
                    start, data_bytes = end, 0
        if start < end:
            yield _Request(start, end - start, data_bytes)

    def _zeros(self, extent: Extent) -> Iterator[_Request]:
        self.zero_bytes_passed += extent.length if self.fresh else 0
        if not self.fresh:
            for start in range(extent.start, extent.end, ZERO_STEP_BYTES):
                yield _Request(start, min(ZERO_STEP_BYTES, extent.end - start), 0, zero=True)

    def _from_since(self, extents: Iterator[Extent]) -> Iterator[Extent]:
        """The extents at or after `since`. Raises where a reader breaks the laws of extents: watermarks would be wrong."""
        end = 0
        for extent in extents:
            if extent.start < end or extent.length <= 0 or extent.end > self._size:
                raise Internal(
                    f"the reader's extent at offset {extent.start} of {extent.length} bytes is out of order or range"
                )
            end = extent.end
            behind = min(max(self._since - extent.start, 0), extent.length)
            if extent.zero:
                self.zero_bytes_passed += behind
            else:
                self.data_bytes_behind += behind
            if behind < extent.length:
                yield Extent(extent.start + behind, extent.length - behind, extent.zero) if behind else extent


class _Count:
    """Adds up the data extents, a little at a time."""

    def __init__(self, reader: DiskReader) -> None:
        self._reader, self._left = reader, reader.extents()
        self._seen: list[Extent] = []
        self._ended = False
        self.data_bytes = 0

    def advance(self, seconds: float) -> bool:
        """Counts for `seconds` at most; True when there are no more extents."""
        until = time.monotonic() + seconds
        for extent in self._left:
            if not extent.zero:
                self.data_bytes += extent.length
            if len(self._seen) <= KEPT_EXTENTS_MAX:
                self._seen.append(extent)
            if time.monotonic() >= until:
                return False
        self._ended = True
        return True

    def extents(self) -> Iterator[Extent]:
        """The extents, from the first one. A short list that was counted to its end is not made again: to find a hole, a file
        system may look at each page of the data before it."""
        yield from self._seen if self._ended and len(self._seen) <= KEPT_EXTENTS_MAX else self._reader.extents()


class _Pass:
    """One running copy: what its threads share."""

    def __init__(
        self,
        reader: DiskReader,
        writer: DiskWriter,
        *,
        plan: _Plan,
        count: _Count,
        bucket: "Bucket | None",
        shared: Callable[[int], None] | None,
        stop: Callable[[], bool],
        threads: int,
    ) -> None:
        self.reader, self.writer, self.plan, self.count = reader, writer, plan, count
        self.ended = threading.Event()
        self.error: SynvirtError | None = None
        # The start of the request that each thread works on: the lowest of them is the low mark.
        self.busy: list[int | None] = [None] * threads
        self._bucket, self._shared, self._stop = bucket, shared, stop
        self._bytes_done = self._bytes_zero = 0
        self._lock = threading.Lock()
        # For a side that allows one call at a time. The request is taken under the lock too, which keeps the order.
        self._reading = threading.Lock() if reader.max_readers <= 1 else nullcontext()
        self._writing = threading.Lock() if writer.max_writers <= 1 else nullcontext()
        self._piece_bytes = min(piece_bytes(reader, writer) or plan.request_bytes, plan.request_bytes)

    def work(self, slot: int) -> None:
        """What each thread does: take a request, read it, write what is not zero."""
        buffer = memoryview(b"")
        try:
            buffer = new_buffer(self._piece_bytes)
            while True:
                with self._reading:
                    request = self._take(slot)
                    if request is None:
                        return
                    pieces = request.pieces(self._piece_bytes)
                    first = next(pieces)
                    if not request.zero:
                        self.reader.read_into(first.start, buffer[: first.length])
                bytes_zero = self._write(first, buffer)
                for piece in pieces:  # only between sides that take several calls at a time
                    self.reader.read_into(piece.start, buffer[: piece.length])
                    bytes_zero += self._write(piece, buffer)
                with self._lock:
                    self._bytes_done += request.data_bytes
                    self._bytes_zero += bytes_zero
                    self.busy[slot] = None
        except BaseException as error:
            # An error keeps the frames that it went through, and so the megabytes that they read into.
            del buffer
            from traceback import clear_frames  # a copy that ends well does not load it

            clear_frames(error.__traceback__)
            self._fail(error, self.busy[slot])

    def flush(self) -> None:
        with self._writing:
            self.writer.flush()

    def copied(self) -> Copied:
        with self._lock:
            # The position first: a thread says that it is busy before it moves the position on.
            watermark = min([self.plan.position, *(start for start in self.busy if start is not None)])
            done = self._bytes_done + self.plan.data_bytes_behind
            zero = self._bytes_zero + self.plan.zero_bytes_passed
        return Copied(max(self.count.data_bytes, done), done, zero, watermark)

    def _take(self, slot: int) -> _Request | None:
        if self._stop():
            raise Cancelled
        if self.ended.is_set():
            return None
        with self._lock:
            self.busy[slot] = self.plan.position
        request = self.plan.take()
        with self._lock:
            self.busy[slot] = None if request is None else request.start
        if request is not None and self._bucket is not None:
            self._bucket.take(request.data_bytes, self._stop, self.ended)
        if request is not None and self._shared is not None and not self.ended.is_set():
            self._shared(request.data_bytes)
        return None if self.ended.is_set() else request

    def _write(self, piece: Extent, buffer: memoryview) -> int:
        """Writes a piece's data. The number of bytes that were left out or made zero."""
        if piece.zero:
            with self._writing:
                self.writer.zero(piece.start, piece.length)
            return piece.length
        bytes_zero = 0
        for at, end, zero in zero_runs(buffer, piece.start, piece.length):
            if zero:
                bytes_zero += end - at
                if self.plan.fresh:
                    continue
            with self._writing:
                if zero:
                    self.writer.zero(piece.start + at, end - at)
                else:
                    self.writer.write(piece.start + at, buffer[at:end])
        return bytes_zero

    def _fail(self, error: BaseException, offset: int | None) -> None:
        if not isinstance(error, SynvirtError):
            where = "" if offset is None else f" at offset {offset}"
            ours: SynvirtError = Internal(f"the copy broke{where}: {type(error).__name__}")
            if isinstance(error, MemoryError):
                ours = DiskReadFailed(
                    f"the disk takes more memory{where} than its reader may have", hint="is the image damaged?"
                )
            ours.__cause__ = error
            error = ours
        with self._lock:
            if self.error is None:
                self.error = error
        self.ended.set()


def zero_runs(buffer: memoryview, offset: int, length: int) -> Iterator[tuple[int, int, bool]]:
    """The buffer's first `length` bytes, which lie at `offset` of the disk, as runs `(at, end, zero)` that alternate.

    Runs change only where the disk's 64 KiB blocks do; a block cut off by the buffer's edge counts as a block.
    """
    run_at = at = 0
    run_zero: bool | None = None
    while at < length:
        end = min(at - (offset + at) % ZERO_RUN_BYTES + ZERO_RUN_BYTES, length)
        # One memcmp. `buffer[at:end] == ZEROS` would compare item by item, a hundred times slower.
        zero = ZEROS.startswith(buffer[at:end])
        if zero is not run_zero:
            if run_zero is not None:
                yield run_at, at, run_zero
            run_at, run_zero = at, zero
        at = end
    if run_zero is not None:
        yield run_at, length, run_zero


class Bucket:
    """Lets bytes pass at a rate, in the order in which they are asked for."""

    def __init__(self, rate_bps: int) -> None:
        self._rate_bps = rate_bps
        self._free_at = time.monotonic()
        self._lock = threading.Lock()

    def take(self, amount: int, stop: Callable[[], bool], ended: threading.Event | None = None) -> None:
        """Waits until `amount` bytes may pass, or `ended` is set. Cancelled, once `stop()` is True."""
        ended = ended or threading.Event()
        with self._lock:
            now = time.monotonic()
            # Unused bytes stay usable for a second, so that a reader that stalled may catch up a little.
            self._free_at = max(self._free_at, now - 1.0) + amount / self._rate_bps
            turn_at = self._free_at
        while (left := turn_at - time.monotonic()) > 0 and not ended.wait(min(left, 0.1)):
            if stop():
                raise Cancelled
