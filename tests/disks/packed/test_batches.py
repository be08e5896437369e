"""Batches of streams, by each library and by what replaces it: each stream comes to its place, and nothing beside it."""

import random
import zlib
from collections.abc import Callable
from contextlib import nullcontext
from typing import NamedTuple

import pytest
import zstandard
from hypothesis import given
from hypothesis import strategies as st

from synvirt.disks.packed import Damaged, inflate, zstd
from synvirt.disks.packed.batches import Batches, Each, Stream
from tests.cases import cases


def _deflated(wbits: int) -> Callable[[bytes], bytes]:
    def packed(content: bytes) -> bytes:
        stream = zlib.compressobj(6, zlib.DEFLATED, wbits)
        return stream.compress(content) + stream.flush()

    return packed


class _Kind(NamedTuple):
    each: Each
    pack: Callable[[bytes], bytes]


KINDS = {
    "raw": _Kind(inflate.inflate_each_raw, _deflated(-15)),
    "zlib": _Kind(inflate.inflate_each_zlib, _deflated(15)),
    "zstd": _Kind(zstd.decompress_each, zstandard.ZstdCompressor().compress),
}
ROOM = 4000
MARK = b"\xa5" * 16
Harm = Callable[[bytes], bytes]


@pytest.fixture(params=["library", "substitute"], autouse=True)
def _way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    assert inflate.LIBDEFLATE is not None, "this build of the deflate package hides its library"
    assert zstd.LIBZSTD is not None, "needs the library libzstd.so.1: apt-get install libzstd1"
    if request.param == "substitute":
        monkeypatch.setattr(inflate, "LIBDEFLATE", None)
        monkeypatch.setattr(zstd, "LIBZSTD", None)


class _Batch(NamedTuple):
    """Streams in any order in their bytes, one behind the other in the buffer; and what the buffer must hold."""

    packed: bytearray
    streams: list[Stream]
    content: bytes


def batch_of(kind: _Kind, sizes: list[int], first_at: int, seed: int) -> _Batch:
    """The first stream is for `first_at` of the buffer. Behind each stream is garbage."""
    rng = random.Random(seed)
    packed, places, contents = bytearray(b"before"), [0] * len(sizes), [rng.randbytes(9) * (size // 9 + 1) for size in sizes]
    lengths = list(places)
    for number in rng.sample(range(len(sizes)), len(sizes)):
        stream = kind.pack(contents[number][: sizes[number]])
        places[number], lengths[number] = len(packed), len(stream) + rng.randrange(20)
        packed += stream.ljust(lengths[number], b"\x55")
    at, streams, content = first_at, [], bytearray(MARK * (ROOM // len(MARK)))
    for number, size in enumerate(sizes):
        streams.append((places[number], lengths[number], at, size))
        begin, end = max(0, at), min(at + size, ROOM)
        if begin < end:
            content[begin:end] = contents[number][begin - at : end - at]
        at += size
    return _Batch(packed, streams, bytes(content))


@pytest.mark.parametrize("kind", KINDS)
@cases(60)
@given(data=st.data())
def test_each_stream_comes_to_its_place(kind: str, data: st.DataObject) -> None:
    """The first and the last may lie partly outside the buffer."""
    first_at = data.draw(st.integers(-300, 200))
    sizes = [300]
    while first_at + sum(sizes) < ROOM and data.draw(st.booleans()):
        sizes.append(data.draw(st.integers(1, 1500)))
    batch = batch_of(KINDS[kind], sizes, first_at, data.draw(st.integers(0, 99)))
    streams = [stream for stream in batch.streams if -stream[3] < stream[2] < ROOM]
    frame = bytearray(MARK + MARK * (ROOM // len(MARK)) + MARK)
    Batches(KINDS[kind].each).unpack(memoryview(batch.packed), streams, memoryview(frame)[len(MARK) : -len(MARK)])
    assert frame == MARK + batch.content + MARK


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("number", [0, 1, 3])
@pytest.mark.parametrize(
    ("harm", "words"),
    [
        (lambda stream: b"\xff" * len(stream), None),
        (lambda stream: stream[:5], None),
        (lambda stream: b"", "it holds 7 bytes, not 1000"),
    ],
)
def test_a_damaged_stream_is_named_by_its_place(kind: str, number: int, harm: Harm, words: str | None) -> None:
    """The first one begins before the buffer, and the last one ends behind it."""
    batch = batch_of(KINDS[kind], [1000] * 4, -10, 3)
    start, length, at, _ = batch.streams[number]
    there = bytes(batch.packed[start : start + length])
    batch.packed[start : start + length] = (harm(there) or KINDS[kind].pack(b"shorter")).ljust(length, b"\0")[:length]
    with pytest.raises(Damaged, match=words) as error:
        Batches(KINDS[kind].each).unpack(memoryview(batch.packed), batch.streams, memoryview(bytearray(3500)))
    assert error.value.at == at


@pytest.mark.parametrize("kind", KINDS)
def test_a_stream_that_goes_on_past_its_place_is_cut_there_or_damaged(kind: str) -> None:
    packed = memoryview(bytearray(KINDS[kind].pack(bytes(1 << 20))))
    into = bytearray(MARK * 100)
    with pytest.raises(Damaged) if kind == "zstd" else nullcontext():
        KINDS[kind].each(packed, [(0, len(packed), 16, 800)], memoryview(into))
    assert kind == "zstd" or into[16:816] == bytes(800)
    assert into[:16] == MARK
    assert into[816:] == MARK * 49


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "stream", [(-1, 9, 0, 50), (0, 0, 0, 50), (3, 99, 0, 50), (0, 9, -1, 50), (0, 9, 60, 50), (0, 9, 0, 0)]
)
def test_no_stream_lies_outside_of_its_buffers(kind: str, stream: Stream) -> None:
    """Here a library would read or write what is not its own."""
    with pytest.raises((ValueError, Damaged)):
        KINDS[kind].each(memoryview(bytearray(KINDS[kind].pack(b"x"))), [stream], memoryview(bytearray(100)))
