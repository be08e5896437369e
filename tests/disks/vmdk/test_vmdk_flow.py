"""Streams read from front to back: as ESXi writes them, cut anywhere, damaged anywhere."""

import io
import random
import struct
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from synvirt.disks.vmdk.flow import VmdkFlow
from synvirt.errors import DiskReadFailed, MalformedArchive, SourceUnreachable, SynvirtError, UnsupportedFormat
from tests.cases import cases
from tests.disks.vmdk.vmdk_images import Hosted, Stream, images, marker

GRAIN = 65536


def flow(content: bytes) -> VmdkFlow:
    source = io.BytesIO(content)

    def fill(buffer: memoryview) -> None:
        if source.readinto(buffer) < len(buffer):
            raise SourceUnreachable("the stream ended")

    return VmdkFlow(fill, "a stream")


def read(opened: VmdkFlow, pieces: list[int]) -> bytes:
    """Piece by piece, and the rest in one; into a buffer that was used before."""
    found, at = bytearray(b"\xa5" * opened.size), 0
    for piece in [*pieces, opened.size]:
        stop = min(at + piece, opened.size)
        opened.read_into(at, memoryview(found)[at:stop])
        at = stop
    return bytes(found)


def stream(**fields: object) -> Stream:
    return replace(Stream(capacity=2048, grain=128, grains={1: 2, 2: 3, 9: 5, 15: 4}), **fields)  # type: ignore[arg-type]


@given(images((Stream,)), st.lists(st.integers(0, 3 * GRAIN), max_size=12))
@cases(150)
def test_it_reads_as_the_disk_in_whatever_pieces(image: Stream, pieces: list[int]) -> None:
    assert read(flow(replace(image, ended=True).file()), pieces) == image.disk()


@given(images((Stream,)), st.data())
@cases(150)
def test_a_stream_that_is_cut_never_reads_as_zeros(image: Stream, data: st.DataObject) -> None:
    content = replace(image, ended=False).file()
    cut = data.draw(st.integers(0, len(content)))
    try:
        found = read(flow(content[:cut]), [])
    except SourceUnreachable:
        return
    # Behind the last grain nothing is known before the end has come; where that grain is the disk's last, nothing is behind it.
    assert max(image.grains) == -(-image.size // image.grain_bytes) - 1
    assert found == image.disk()


@given(st.integers(0, 2**32), st.integers(1, 40))
@cases(150)
def test_a_damaged_stream_is_refused_or_read(seed: int, flips: int) -> None:
    generator = random.Random(seed)
    content = bytearray(stream().file())
    for _ in range(flips):
        content[generator.randrange(len(content))] = generator.randrange(256)
    try:
        opened = flow(bytes(content))
        if opened.size <= 1 << 24:  # a damaged header may tell of terabytes
            read(opened, [])
    except SynvirtError:
        pass


@pytest.mark.parametrize("again", [1, 2])
def test_grains_that_do_not_ascend_are_refused(again: int) -> None:
    content = stream(grains={1: 2, 2: 3}, ended=False, directory=False).file()
    record = stream().record(again, 2)
    with pytest.raises(MalformedArchive, match="must ascend"):
        read(flow(content + record + bytes(-len(record) % 512) + marker(0, 0)), [])


@pytest.mark.parametrize(
    ("bad", "reported"),
    [
        (struct.pack("<QII496x", 5, 10, 0), "where no grain"),
        (struct.pack("<QII496x", 1 << 40, 10, 0), "where no grain"),
        (struct.pack("<QII496x", 0, 1 << 30, 0), "more than it can"),
        (struct.pack("<QII496x", 0, 0, 7), "type 7"),
        (struct.pack("<QII496x", 1 << 50, 0, 1), "sectors, which no stream has"),
    ],
)
def test_a_marker_that_lies_is_refused(bad: bytes, reported: str) -> None:
    head = stream(grains={}).file()[: 128 * 512]
    with pytest.raises(MalformedArchive, match=reported):
        read(flow(head + bad), [])


def test_a_grain_that_inflates_to_less_is_refused() -> None:
    import zlib

    packed = zlib.compress(b"short")
    head = stream(grains={}).file()[: 128 * 512]
    record = struct.pack("<QI", 0, len(packed)) + packed
    with pytest.raises(DiskReadFailed, match="offset 0"):
        read(flow(head + record.ljust(512, b"\0") + marker(0, 0)), [])


def test_what_is_no_stream_is_refused() -> None:
    with pytest.raises(MalformedArchive, match="no stream-optimized"):
        flow(b"# Disk DescriptorFile".ljust(512, b"\n"))
    with pytest.raises(UnsupportedFormat, match="not compressed"):
        flow(Hosted(capacity=2048, grain=128, grains={0: 1}).file())


def test_no_byte_is_read_twice() -> None:
    opened = flow(stream().file())
    opened.read_into(100, memoryview(bytearray(100)))
    with pytest.raises(DiskReadFailed, match="passed already"):
        opened.read_into(199, memoryview(bytearray(1)))
