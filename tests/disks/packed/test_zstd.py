"""Decompressing zstd frames into a buffer: by libzstd and by the package, with the same answers."""

import contextlib
from collections.abc import Iterator

import pytest
import zstandard
from hypothesis import given
from hypothesis import strategies as st

from synvirt.disks.packed import Damaged, zstd
from tests.cases import cases


@pytest.fixture(params=["libzstd", "package"], autouse=True, scope="module")
def _way(request: pytest.FixtureRequest) -> Iterator[None]:
    before = zstd.LIBZSTD
    if request.param == "package":
        zstd.LIBZSTD = None
    elif before is None:
        pytest.fail("needs the library libzstd.so.1: apt-get install libzstd1")
    yield
    zstd.LIBZSTD = before


def decompressed(stream: bytes, room: int) -> bytes:
    into = bytearray(b"\xa5" * (room + 64))
    filled = zstd.decompress(memoryview(bytearray(stream)), memoryview(into)[:room])
    assert filled <= room
    assert into[room:] == b"\xa5" * 64, "it wrote past the buffer"
    return bytes(into[:filled])


@given(
    content=st.binary(min_size=1, max_size=5000), times=st.integers(1, 40), after=st.binary(max_size=600), sized=st.booleans()
)
@cases(100)
def test_a_frame_is_decompressed_and_what_follows_ignored(content: bytes, times: int, after: bytes, sized: bool) -> None:
    content *= times
    if sized:
        stream = zstandard.ZstdCompressor().compress(content)
    else:
        compressor = zstandard.ZstdCompressor().compressobj()
        stream = compressor.compress(content) + compressor.flush()
    assert decompressed(stream + after, len(content)) == content
    assert decompressed(stream + after, len(content) + 1000) == content


@given(stream=st.binary(max_size=300), cut=st.integers(0, 100), at=st.integers(0, 99), flip=st.integers(0, 255))
@cases(200)
def test_garbage_is_damaged_or_fits(stream: bytes, cut: int, at: int, flip: int) -> None:
    good = bytearray(zstandard.ZstdCompressor().compress(b"content " * 100))
    good[at % len(good)] ^= flip
    for each in (stream, bytes(good), bytes(good[:cut])):
        with contextlib.suppress(Damaged):
            assert len(decompressed(each, 800)) <= 800


def test_a_frame_that_holds_more_than_there_is_room_is_damaged() -> None:
    bomb = zstandard.ZstdCompressor().compress(bytes(100 << 20))
    with pytest.raises(Damaged):
        decompressed(bomb, 65536)
