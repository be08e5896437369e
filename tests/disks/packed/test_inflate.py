"""Inflating into the caller's buffer: whatever zlib makes, cut, padded or damaged; by libdeflate and by isal alike."""

import contextlib
import zlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from synvirt.disks.packed import Damaged, inflate
from synvirt.disks.packed.inflate import inflate_raw, inflate_zlib
from tests.cases import cases


@pytest.fixture(params=["libdeflate", "isal"])
def engine(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    assert inflate.LIBDEFLATE is not None, "this build of the deflate package hides its library: isal would do all the work"
    if request.param == "isal":
        monkeypatch.setattr(inflate, "LIBDEFLATE", None)
    return str(request.param)


def deflated(data: bytes, level: int, wbits: int) -> bytes:
    stream = zlib.compressobj(level, zlib.DEFLATED, wbits)
    return stream.compress(data) + stream.flush()


def framed(length: int) -> tuple[bytearray, memoryview]:
    """A buffer of `length` bytes between two marks, to see what is written beside it."""
    frame = bytearray(b"\xa5" * (length + 32))
    return frame, memoryview(frame)[16 : 16 + length]


LONG_PIECES = st.builds(lambda piece, times: piece * times, st.binary(min_size=1, max_size=9), st.integers(1, 9000))
PIECES = st.one_of(st.binary(min_size=1, max_size=5000), LONG_PIECES)


@cases(100)
@given(data=PIECES, level=st.integers(0, 9), tail=st.binary(max_size=600), room=st.integers(-3, 3))
def test_it_gives_what_was_deflated_and_stops_by_itself(engine: str, data: bytes, level: int, tail: bytes, room: int) -> None:
    for function, wbits in ((inflate_raw, -12), (inflate_zlib, 15)):
        frame, into = framed(max(1, len(data) + room))
        filled = function(memoryview(bytearray(deflated(data, level, wbits) + tail)), into)
        assert filled == min(len(data), len(into))
        assert into[:filled] == data[:filled]
        assert frame[:16] == frame[-16:] == b"\xa5" * 16


@cases(200)
@given(stream=st.binary(max_size=300), length=st.integers(0, 2000))
def test_garbage_is_inflated_or_damaged_and_nothing_else(engine: str, stream: bytes, length: int) -> None:
    for function in (inflate_raw, inflate_zlib):
        frame, into = framed(length)
        with contextlib.suppress(Damaged):
            assert 0 <= function(memoryview(bytearray(stream)), into) <= length
        assert frame[:16] == frame[-16:] == b"\xa5" * 16


def test_a_bomb_fills_the_buffer_and_no_more(engine: str) -> None:
    bomb = deflated(bytes(64 << 20), 9, -15)
    frame, into = framed(65536)
    assert inflate_raw(memoryview(bytearray(bomb)), into) == 65536
    assert not any(into)
    assert frame[:16] == frame[-16:] == b"\xa5" * 16


def test_a_wrong_checksum_is_damage(engine: str) -> None:
    stream = bytearray(deflated(b"data" * 1000, 6, 15))
    stream[-1] ^= 1
    with pytest.raises(Damaged):
        inflate_zlib(memoryview(stream), memoryview(bytearray(4000)))


def test_a_stream_that_is_cut_off_is_short_or_damage(engine: str) -> None:
    stream = bytearray(deflated(b"data" * 1000, 6, -15))
    with contextlib.suppress(Damaged):
        assert inflate_raw(memoryview(stream[:-4]), memoryview(bytearray(4000))) < 4000
