"""The copy loop's laws: whatever the extents, zeros, threads and faults, the volume equals the disk, or the error says why."""

import gc
import threading
import time
import weakref
import zlib
from collections.abc import Callable, Iterator
from itertools import pairwise

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from synvirt import copying
from synvirt.blocks import DiskReader, Extent, new_buffer
from synvirt.copying import Copied, copy, default_threads
from synvirt.errors import Cancelled, DiskReadFailed, DiskWriteFailed, Internal, SynvirtError
from tests.fakes.disks import (
    BLOCK_BYTES,
    FaultyReader,
    FaultyWriter,
    ForgetfulWriter,
    LettersReader,
    LyingReader,
    MemoryReader,
    MemoryWriter,
    ThrottledReader,
    ThrottledWriter,
    blocks_of,
    content_of,
    extents_of,
)
from tests.running.processes import until

MIB, TIB = 1 << 20, 1 << 40
# Runs of blocks, so that gaps, requests and zero runs of every length meet. At most twelve requests: three for each thread.
DISKS = st.lists(st.tuples(st.sampled_from("AB0-."), st.integers(1, 12)), max_size=12).map(
    lambda runs: "".join(block * count for block, count in runs)[:48]
)
# Smaller and larger than the 64 KiB at which zeros are found, and no multiple of it.
BLOCK_SIZES = st.sampled_from([512, 4096, 10_000, 65536, 100_000])


@pytest.fixture(autouse=True)
def small_requests(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Requests of four blocks and a quick overseer, so that small disks have many of each. No thread outlives a test."""
    monkeypatch.setattr(copying, "REQUEST_BYTES", 4 * BLOCK_BYTES)
    monkeypatch.setattr(copying, "ZERO_STEP_BYTES", 3 * BLOCK_BYTES)
    monkeypatch.setattr(copying, "PROGRESS_EVERY_S", 0.002)
    before = set(threading.enumerate())
    yield
    assert set(threading.enumerate()) <= before


def merged(old: bytes, blocks: str, block_bytes: int = BLOCK_BYTES) -> bytes:
    """What a volume of content `old` holds after a copy: its own bytes where the disk says nothing."""
    new = content_of(blocks, block_bytes)
    kept = bytearray(old)
    for extent in extents_of(blocks, block_bytes):
        kept[extent.start : extent.end] = new[extent.start : extent.end]
    return bytes(kept)


@given(blocks=DISKS, block_bytes=BLOCK_SIZES, threads=st.integers(1, 4), readers=st.integers(1, 4), writers=st.integers(1, 4))
@settings(deadline=None, max_examples=300)
def test_a_fresh_volume_becomes_the_disk(blocks: str, block_bytes: int, threads: int, readers: int, writers: int) -> None:
    reader = MemoryReader(blocks, block_bytes=block_bytes, max_readers=readers)
    writer = MemoryWriter(reader.size, max_writers=writers)
    copied = copy(reader, writer, threads=threads)
    assert writer.durable == reader.content
    assert writer.zeroed == []
    written = sum(length for _, length in writer.written)
    data = sum(extent.length for extent in reader.extents() if not extent.zero)
    covered = sum(extent.length for extent in reader.extents())
    assert copied == Copied(bytes_total=data, bytes_done=data, bytes_zero=covered - written, watermark=reader.size)


@given(blocks=DISKS, block_bytes=BLOCK_SIZES, threads=st.integers(1, 4), writers=st.integers(1, 4))
@settings(deadline=None, max_examples=300)
# A small zero extent that the end of a request cuts in two, before a gap: its second half must not be forgotten.
@example(blocks="AAA--.B", block_bytes=BLOCK_BYTES, threads=1, writers=1)
def test_a_used_volume_becomes_the_disk_where_the_disk_says_something(
    blocks: str, block_bytes: int, threads: int, writers: int
) -> None:
    reader = MemoryReader(blocks, block_bytes=block_bytes)
    old = b"z" * reader.size
    writer = MemoryWriter(old, max_writers=writers)
    copy(reader, writer, fresh=False, threads=threads)
    assert writer.durable == merged(old, blocks, block_bytes)


@given(blocks=DISKS, since=st.floats(0, 1), block_bytes=BLOCK_SIZES, fresh=st.booleans())
@settings(deadline=None)
def test_resuming_touches_nothing_before_the_watermark(blocks: str, since: float, block_bytes: int, fresh: bool) -> None:
    reader = MemoryReader(blocks, block_bytes=block_bytes)
    at = int(since * reader.size)
    old = b"z" * at + bytes(reader.size - at)
    writer = MemoryWriter(old)
    seen: list[Copied] = []
    copied = copy(reader, writer, since=at, fresh=fresh, on_progress=seen.append)
    assert writer.durable == old[:at] + merged(old, blocks, block_bytes)[at:]
    assert all(start >= at for start, _ in [*writer.written, *writer.zeroed, *reader.reads])
    # The totals are those of the whole pass, as if it had never been interrupted.
    data = [extent for extent in reader.extents() if not extent.zero]
    assert copied.bytes_total == copied.bytes_done == sum(extent.length for extent in data)
    assert seen[-1] == copied
    # Of the data before the watermark nobody knows any more how much of it was zeros.
    covered = sum(extent.length for extent in reader.extents())
    behind = sum(min(max(at - extent.start, 0), extent.length) for extent in data)
    assert copied.bytes_zero == covered - behind - sum(length for _, length in writer.written)
    # No report falls behind what was copied before: a rate would count that as copied now.
    assert all(each.bytes_done >= behind for each in seen)


@given(blocks=DISKS.filter(bool), threads=st.integers(1, 4), fresh=st.booleans())
@settings(deadline=None, max_examples=30)
def test_after_a_crash_at_any_watermark_a_resumed_copy_ends_in_the_disk(blocks: str, threads: int, fresh: bool) -> None:
    """A power cut right after each report leaves at least what was flushed; what was being written may be there in part."""
    reader = MemoryReader(blocks)
    old = bytes(reader.size) if fresh else b"z" * reader.size
    writer = MemoryWriter(old)
    # Packed: each is a whole disk, and all of them are kept until the copy ends.
    crashes: list[tuple[Copied, bytes, bytes]] = []
    copy(
        ThrottledReader(reader, 0.001),
        ThrottledWriter(writer, 0.0005),
        fresh=fresh,
        threads=threads,
        flush_every_s=0,
        on_watermark=lambda copied: crashes.append(
            (copied, zlib.compress(writer.durable, 1), zlib.compress(writer.content, 1))
        ),
    )
    assert [copied.watermark for copied, *_ in crashes] == sorted(copied.watermark for copied, *_ in crashes)
    assert crashes[-1][0].watermark == reader.size
    expected = merged(old, blocks)
    for copied, *packed in crashes:
        durable, volatile = map(zlib.decompress, packed)
        assert durable[: copied.watermark] == expected[: copied.watermark]
        for left in (durable, volatile):
            again = MemoryWriter(left)
            copy(reader, again, since=copied.watermark, fresh=fresh)
            assert blocks_of(again.durable) == blocks_of(expected)


def test_what_is_reported_durable_was_flushed_after_it_was_written() -> None:
    """The low mark is taken before the flush: a mark taken after it would count bytes that the flush did not wait for."""
    reader, writer = MemoryReader("ABCD" * 45), MemoryWriter(180 * BLOCK_BYTES)
    durable_at_mark: list[bool] = []

    def check(copied: Copied) -> None:
        durable_at_mark.append(reader.content.startswith(writer.durable[: copied.watermark]))

    copy(ThrottledReader(reader, 0.01), ThrottledWriter(writer, 0.005), threads=4, flush_every_s=0.005, on_watermark=check)
    assert len(durable_at_mark) > 3
    assert all(durable_at_mark)


def test_a_flush_that_is_done_at_once_counts_for_nothing_that_is_written_after_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its thread may run before the one that asked for it goes on."""
    reader, writer = MemoryReader("ABCD" * 15), MemoryWriter(60 * BLOCK_BYTES)
    marks: list[bool] = []

    class Hasty(copying._Flush):
        def start(self) -> None:
            super().start()
            self.join()
            written = len(writer.written)
            until(lambda: len(writer.written) > written or sum(length for _, length in writer.written) == writer.size)

    def check(copied: Copied) -> None:
        marks.append(writer.durable[: copied.watermark] == reader.content[: copied.watermark])

    monkeypatch.setattr(copying, "_Flush", Hasty)
    copy(ThrottledReader(reader, 0.05), writer, threads=2, flush_every_s=0, on_watermark=check)
    assert len(marks) > 2
    assert all(marks)


@given(blocks=DISKS.filter(lambda blocks: "A" in blocks), threads=st.integers(1, 4), data=st.data())
@settings(deadline=None)
def test_the_first_read_error_ends_the_copy_and_names_its_offset(blocks: str, threads: int, data: st.DataObject) -> None:
    reader = MemoryReader(blocks)
    block = data.draw(st.sampled_from([at for at, sort in enumerate(blocks) if sort == "A"]))
    offset = block * BLOCK_BYTES + data.draw(st.integers(0, BLOCK_BYTES - 1))
    writer = MemoryWriter(reader.size)
    with pytest.raises(DiskReadFailed, match=f"offset {offset}:"):
        copy(FaultyReader(reader, offset), writer, threads=threads)
    assert not any(start <= offset < start + length for start, length in writer.written)


@given(blocks=DISKS.filter(lambda blocks: "A" in blocks or "-" in blocks), threads=st.integers(1, 4), data=st.data())
@settings(deadline=None)
def test_the_first_write_error_ends_the_copy_and_names_its_offset(blocks: str, threads: int, data: st.DataObject) -> None:
    block = data.draw(st.sampled_from([at for at, sort in enumerate(blocks) if sort in "A-"]))
    offset = block * BLOCK_BYTES + data.draw(st.integers(0, BLOCK_BYTES - 1))
    with pytest.raises(DiskWriteFailed, match=f"offset {offset}:"):
        copy(MemoryReader(blocks), FaultyWriter(MemoryWriter(len(blocks) * BLOCK_BYTES), offset), fresh=False, threads=threads)


def test_a_failed_flush_is_no_success() -> None:
    with pytest.raises(DiskWriteFailed, match="full"):
        copy(MemoryReader("AB"), FaultyWriter(MemoryWriter(2 * BLOCK_BYTES), None, DiskWriteFailed("full")))
    marks: list[Copied] = []
    with pytest.raises(DiskWriteFailed, match="full"):
        copy(
            ThrottledReader(MemoryReader("AB" * 100), 0.005),
            FaultyWriter(MemoryWriter(200 * BLOCK_BYTES), None, DiskWriteFailed("full")),
            flush_every_s=0,
            on_watermark=marks.append,
        )
    assert marks == []


def test_a_reader_that_takes_too_much_memory_says_where() -> None:
    reader = FaultyReader(MemoryReader("A" * 20), 9 * BLOCK_BYTES, MemoryError())
    with pytest.raises(DiskReadFailed, match=f"more memory at offset {8 * BLOCK_BYTES} than its reader may have"):
        copy(reader, MemoryWriter(20 * BLOCK_BYTES), threads=1)


def test_without_memory_for_its_buffers_a_copy_does_not_count_as_done(monkeypatch: pytest.MonkeyPatch) -> None:
    def refusing(length: int) -> memoryview:
        raise MemoryError

    monkeypatch.setattr(copying, "new_buffer", refusing)
    writer = MemoryWriter(20 * BLOCK_BYTES)
    with pytest.raises(DiskReadFailed, match="more memory"):
        copy(MemoryReader("A" * 20), writer)
    assert writer.written == []


@pytest.mark.parametrize("foreign", [OSError(5, "Input/output error"), ValueError("x"), KeyError("/secret/path")])
def test_an_error_that_is_not_ours_becomes_internal_with_offset_and_cause(foreign: Exception) -> None:
    at = 9 * BLOCK_BYTES
    with pytest.raises(Internal, match=f"offset {8 * BLOCK_BYTES}: {type(foreign).__name__}") as caught:
        copy(FaultyReader(MemoryReader("A" * 20), at, foreign), MemoryWriter(20 * BLOCK_BYTES), threads=1)
    assert caught.value.__cause__ is foreign
    assert "secret" not in caught.value.detail


LIES: dict[str, Callable[[list[Extent]], list[Extent]]] = {
    "overlap": lambda extents: [*extents, extents[-1]],
    "descend": lambda extents: extents[::-1],
    "empty": lambda extents: [Extent(0, 0), *extents],
    "negative": lambda extents: [Extent(-BLOCK_BYTES, BLOCK_BYTES), *extents],
    "outside": lambda extents: [*extents, Extent(extents[-1].end, 1)],
    "far outside": lambda extents: [*extents, Extent(1 << 70, 1 << 70)],
}


@pytest.mark.parametrize("lie", LIES)
def test_a_reader_that_breaks_its_laws_is_refused(lie: str) -> None:
    reader = LyingReader(MemoryReader("A-B"), LIES[lie])
    with pytest.raises(Internal, match="out of order or range"):
        copy(reader, MemoryWriter(reader.size))


@pytest.mark.parametrize("callback", ["on_progress", "on_watermark"])
def test_what_a_callback_raises_ends_the_copy(callback: str) -> None:
    class Enough(Exception):
        pass

    def enough(copied: Copied) -> None:
        raise Enough

    callbacks: dict[str, Callable[[Copied], None]] = {callback: enough}
    with pytest.raises(Enough):
        copy(
            ThrottledReader(MemoryReader("A" * 80), 0.001),
            MemoryWriter(80 * BLOCK_BYTES),
            flush_every_s=0,
            on_progress=callbacks.get("on_progress", lambda copied: None),
            on_watermark=callbacks.get("on_watermark", lambda copied: None),
        )


def test_a_cancel_is_looked_at_before_each_request() -> None:
    reader = MemoryReader("A" * 80)
    writer = MemoryWriter(reader.size)
    with pytest.raises(Cancelled):
        copy(reader, writer, threads=1, stop=lambda: len(reader.reads) >= 3)
    assert len(reader.reads) == 3


def test_a_cancel_is_prompt_however_slow_the_limit() -> None:
    began = time.monotonic()
    with pytest.raises(Cancelled):
        copy(
            MemoryReader("A" * 80),
            MemoryWriter(80 * BLOCK_BYTES),
            bandwidth_bps=1 << 10,
            stop=lambda: time.monotonic() - began > 0.1,
        )
    assert time.monotonic() - began < 60  # one request alone would wait for four minutes


def test_a_cancel_ends_a_delta_of_endless_zeros() -> None:
    reader, writer = LettersReader(64 * TIB, [Extent(0, 64 * TIB, zero=True)]), ForgetfulWriter(64 * TIB)
    with pytest.raises(Cancelled):
        copy(reader, writer, fresh=False, stop=lambda: len(writer.zeroed) > 1000)


def test_a_stream_is_read_in_order_while_the_writer_works() -> None:
    """A stream allows one read at a time, but writing one request overlaps with reading the next."""
    next_is_read = threading.Event()

    class Reader(MemoryReader):
        def read_into(self, offset: int, buffer: memoryview) -> None:
            if self.reads:
                next_is_read.set()
            super().read_into(offset, buffer)

    class Writer(MemoryWriter):
        def write(self, offset: int, buffer: memoryview) -> None:
            assert next_is_read.wait(30), "reading and writing took turns"
            super().write(offset, buffer)

    blocks = "AB" * 40
    reader, writer = Reader(blocks, max_readers=1), Writer(len(blocks) * BLOCK_BYTES)
    copy(reader, writer, threads=2)
    assert writer.durable == reader.content
    assert [at for at, _ in reader.reads] == sorted(at for at, _ in reader.reads)


@pytest.mark.parametrize("allowed", [1, 2, 3])
@pytest.mark.parametrize("side", ["reader", "writer"])
def test_no_more_calls_at_once_than_a_side_allows(side: str, allowed: int) -> None:
    """The fakes fail the call that is one too many; each call dawdles, so that all threads are in one."""
    reader = MemoryReader("AB" * 40, max_readers=allowed if side == "reader" else 8, seconds=0.003)
    writer = MemoryWriter(reader.size, max_writers=allowed if side == "writer" else 8, seconds=0.003)
    copy(reader, writer, threads=6, flush_every_s=0)
    assert writer.durable == reader.content


def test_the_bandwidth_limit_holds_and_is_used() -> None:
    blocks = "A" * 64
    began = time.monotonic()
    copy(MemoryReader(blocks), MemoryWriter(64 * BLOCK_BYTES), bandwidth_bps=2 * MIB, threads=3)
    took = time.monotonic() - began
    assert 0.9 < took < 30  # 4 MiB at 2 MiB/s, of which a second's worth is allowed at once


def test_progress_never_goes_back_and_ends_complete() -> None:
    reader = MemoryReader("AB0-" * 50)
    seen: list[Copied] = []
    copied = copy(ThrottledReader(reader, 0.01), MemoryWriter(reader.size), on_progress=seen.append)
    assert len(seen) > 3
    for earlier, later in pairwise(seen):
        assert later.bytes_done >= earlier.bytes_done
        assert later.bytes_zero >= earlier.bytes_zero
        assert later.watermark >= earlier.watermark
        assert later.bytes_total == earlier.bytes_total
    assert seen[0].bytes_done == 0
    assert seen[-1] == copied
    assert copied.bytes_done == copied.bytes_total == 150 * BLOCK_BYTES


def test_many_extents_are_counted_beside_the_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    """The copy starts before the list is counted; the total only grows, and is true at the end."""
    monkeypatch.setattr(copying, "COUNT_AHEAD_S", 0)
    extents = [Extent(at * 2 * 512, 512) for at in range(50_000)]
    reader = LettersReader(extents[-1].end, extents)
    seen: list[Copied] = []
    copied = copy(reader, ForgetfulWriter(reader.size), on_progress=seen.append)
    assert seen[0].bytes_total == 512
    assert [each.bytes_total for each in seen] == sorted(each.bytes_total for each in seen)
    assert all(each.bytes_done <= each.bytes_total for each in seen)
    assert copied.bytes_done == copied.bytes_total == 50_000 * 512


def test_extents_that_are_slow_to_tell_do_not_hold_the_copy_up() -> None:
    reported = 0

    class Slow(MemoryReader):
        def extents(self) -> Iterator[Extent]:
            nonlocal reported
            for extent in [Extent(at * 2 * BLOCK_BYTES, BLOCK_BYTES) for at in range(100)]:
                time.sleep(0.005)
                reported += 1
                yield extent

        def read_into(self, offset: int, buffer: memoryview) -> None:
            told_before_reads.append(reported)
            super().read_into(offset, buffer)

    told_before_reads: list[int] = []
    reader = Slow("A" * 200)
    copied = copy(reader, MemoryWriter(reader.size))
    assert told_before_reads[0] < 100  # all are told twice: once to be counted, once to be read
    assert copied.bytes_done == copied.bytes_total == 100 * BLOCK_BYTES


def test_small_holes_do_not_make_small_requests() -> None:
    """64 KiB of data, 64 KiB of nothing, over and over: Python must not run once for each."""
    reader, writer = MemoryReader("A-" * 60), MemoryWriter(120 * BLOCK_BYTES)
    copy(reader, writer, threads=1)
    assert len(reader.reads) == 30
    assert writer.durable == reader.content
    assert len(writer.written) == 60


def test_64_tib_of_nothing_cost_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(copying, "REQUEST_BYTES", 4 * MIB)
    data = Extent(40 * TIB + 5 * BLOCK_BYTES, BLOCK_BYTES)
    extents = [Extent(0, data.start, zero=True), data, Extent(data.end, 64 * TIB - data.end, zero=True)]

    reader, writer = LettersReader(64 * TIB, extents), ForgetfulWriter(64 * TIB)
    began = time.monotonic()
    copied = copy(reader, writer)
    assert time.monotonic() - began < 30
    assert reader.reads == writer.written == [(data.start, data.length)]
    assert copied == Copied(BLOCK_BYTES, BLOCK_BYTES, 64 * TIB - BLOCK_BYTES, 64 * TIB)


def test_a_volume_that_is_too_small_is_refused_before_the_first_byte() -> None:
    writer = MemoryWriter(2 * BLOCK_BYTES - 1)
    with pytest.raises(DiskWriteFailed, match=f"has {writer.size} bytes, the disk {2 * BLOCK_BYTES}"):
        copy(MemoryReader("AB"), writer)
    assert writer.written == []


def test_a_larger_volume_keeps_what_lies_behind_the_disk() -> None:
    writer = MemoryWriter(b"z" * 4 * BLOCK_BYTES)
    copy(MemoryReader("A-"), writer, fresh=False)
    assert blocks_of(writer.durable) == "A0zz"


def test_an_empty_disk_is_copied() -> None:
    assert copy(MemoryReader(""), MemoryWriter(0)) == Copied(0, 0, 0, 0)


@pytest.mark.parametrize(("cores", "threads"), [(1, 2), (2, 2), (16, 16), (256, 64)])
def test_threads_follow_the_cores(cores: int, threads: int) -> None:
    assert default_threads(cores) == threads


def test_no_deadlock_when_everything_fails_at_once() -> None:
    def code_of(reader: DiskReader) -> str:
        try:
            copy(
                reader,
                FaultyWriter(MemoryWriter(reader.size), 5 * BLOCK_BYTES),
                fresh=False,
                threads=4,
                flush_every_s=0,
                stop=lambda: time.monotonic() % 0.01 < 0.001,
            )
        except SynvirtError as error:
            return error.code
        return "it did not fail"

    for _ in range(100):
        assert code_of(FaultyReader(MemoryReader("A-0B" * 6, max_readers=4), 7 * BLOCK_BYTES)) in {
            "E_MIG_DISK_READ_FAILED",
            "E_MIG_DISK_WRITE_FAILED",
            "E_MIG_CANCELLED",
        }


def test_a_failure_that_is_kept_keeps_no_memory_of_the_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    """And what nobody keeps goes at once, without Python's garbage collector, which does not see how large it is."""
    maps: list[weakref.ref[object]] = []

    def watched(length: int) -> memoryview:
        buffer = new_buffer(length)
        maps.append(weakref.ref(buffer.obj))
        return buffer

    monkeypatch.setattr(copying, "new_buffer", watched)
    gc.disable()
    try:
        reader = FaultyReader(MemoryReader("A-" * 40, max_readers=4), 6 * BLOCK_BYTES)
        # The inner one has extents left when the copy ends.
        disks = weakref.ref(reader), weakref.ref(reader.inner)
        with pytest.raises(DiskReadFailed) as kept:
            copy(reader, MemoryWriter(reader.size), threads=4)
        assert maps
        assert [one() for one in maps] == [None] * len(maps)
        del reader, kept
        assert [disk() for disk in disks] == [None, None]
    finally:
        gc.enable()
