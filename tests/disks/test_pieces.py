"""What a copy asks its two sides for, and how often: pieces of requests, and the list of extents."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from synvirt import copying
from synvirt.blocks import Extent, piece_bytes
from synvirt.copying import copy
from synvirt.disks import detect, open_reader
from synvirt.disks.raw.cloning import Rest
from synvirt.sizes import KIB, WRITE_BYTES
from tests.disks.qcow2.qcow2_images import qemu
from tests.fakes.disks import BLOCK_BYTES, MemoryReader, MemoryWriter

REQUEST_BYTES = 4 * BLOCK_BYTES


@pytest.fixture(autouse=True)
def small_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(copying, "REQUEST_BYTES", REQUEST_BYTES)


class CachedReader(MemoryReader):
    piece_bytes = BLOCK_BYTES


class CachedWriter(MemoryWriter):
    piece_bytes = 2 * BLOCK_BYTES


class CountedReader(MemoryReader):
    """How often its extents were asked for."""

    asked = 0

    def extents(self) -> Iterator[Extent]:
        self.asked += 1
        yield from super().extents()


@given(
    blocks=st.text("AB0-.", max_size=24),
    block_bytes=st.sampled_from([512, 10_000, BLOCK_BYTES, 100_000]),
    threads=st.integers(1, 3),
    fresh=st.booleans(),
)
@settings(deadline=None)
def test_a_copy_in_pieces_does_what_one_in_whole_requests_does(
    blocks: str, block_bytes: int, threads: int, fresh: bool
) -> None:
    reader = CachedReader(blocks, block_bytes=block_bytes)
    old = bytes(reader.size) if fresh else b"z" * reader.size
    writer, other = CachedWriter(old), MemoryWriter(old)
    copied = copy(reader, writer, threads=threads, fresh=fresh)
    whole = copy(MemoryReader(blocks, block_bytes=block_bytes), other, threads=threads, fresh=fresh)
    assert writer.durable == other.durable
    # A block that an edge cuts is looked at for zeros on both sides of it by itself.
    assert copied._replace(bytes_zero=0) == whole._replace(bytes_zero=0)
    assert copied.bytes_zero >= whole.bytes_zero
    # The larger of the two sides' pieces.
    for start, length in reader.reads:
        assert start // (2 * BLOCK_BYTES) == (start + length - 1) // (2 * BLOCK_BYTES)


def test_whole_requests_are_moved_where_one_side_has_no_piece() -> None:
    whole = [(0, REQUEST_BYTES), (REQUEST_BYTES, REQUEST_BYTES)]
    for reader, writer in ((CachedReader("A" * 8), MemoryWriter), (MemoryReader("A" * 8), CachedWriter)):
        copy(reader, writer(reader.size), threads=1)
        assert reader.reads == whole


def test_a_short_list_of_extents_is_made_once() -> None:
    reader = CountedReader("A--B")
    copy(reader, MemoryWriter(reader.size))
    assert reader.asked == 1


def test_a_long_list_of_extents_is_not_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(copying, "KEPT_EXTENTS_MAX", 2)
    reader = CountedReader("A--B")
    writer = MemoryWriter(reader.size)
    copy(reader, writer)
    assert writer.durable == reader.content
    assert reader.asked == 2


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (("raw",), WRITE_BYTES),
        (("qcow2",), WRITE_BYTES),
        (("vhdx",), WRITE_BYTES),
        (("vpc",), WRITE_BYTES),
        (("vdi",), WRITE_BYTES),
        (("vmdk",), WRITE_BYTES),
        (("qcow2", "-c"), 0),
        (("vmdk", "-o", "subformat=streamOptimized"), 0),
    ],
)
def test_readers_that_only_read_a_file_have_a_piece(tmp_path: Path, options: tuple[str, ...], expected: int) -> None:
    content = b"\1" * 300 * KIB + bytes(300 * KIB)
    (tmp_path / "disk.raw").write_bytes(content)
    qemu("qemu-img", "convert", "-f", "raw", "-O", *options, "disk.raw", "image", cwd=tmp_path)
    reader = open_reader(detect(tmp_path / "image"))
    assert piece_bytes(reader) == piece_bytes(Rest(reader, [])) == expected
    reader.close()
