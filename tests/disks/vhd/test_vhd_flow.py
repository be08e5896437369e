"""VHDs that come once: whole disks and differences, cut at any byte, out of order, and larger than their disk."""

import random
import struct
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from synvirt.disks.xen.flow import VhdFlow
from synvirt.errors import DiskReadFailed, MalformedArchive, SourceUnreachable, SynvirtError, UnsupportedFormat
from tests.disks.vhd.vhd_images import DIFFERENCING, DYNAMIC, FIXED, Block, Vhd, vhds
from tests.fakes.xenserver import vhd


class Sent:
    """A stream that ends where the bytes do."""

    def __init__(self, content: bytes) -> None:
        self._content, self._at = content, 0

    def fill(self, buffer: memoryview) -> None:
        piece = self._content[self._at : self._at + len(buffer)]
        if len(piece) < len(buffer):
            raise SourceUnreachable("the stream ended")
        buffer[:] = piece
        self._at += len(buffer)


def read(flow: VhdFlow, onto: bytes, steps: Iterator[int]) -> bytes:
    disk = bytearray(onto)
    for extent in flow.extents():
        at = extent.start
        while at < extent.end:
            length = min(next(steps), extent.end - at)
            buffer = bytearray(b"\xa5" * length)
            flow.read_into(at, memoryview(buffer))
            disk[at : at + length] = buffer
            at += length
    return bytes(disk)


def steps(seed: int) -> Iterator[int]:
    generator = random.Random(seed)
    while True:
        yield generator.choice([1, 511, 512, 4096, 65536, 3 << 20])


def ascending(image: Vhd, present: int | None = None) -> Vhd:
    """As it is streamed: blocks in the order of the disk. `present`: all of each block is there."""
    blocks = tuple(
        None if block is None else Block(number, block.present if present is None else present)
        for number, block in enumerate(image.blocks)
    )
    return replace(image, blocks=blocks)


@settings(max_examples=60, deadline=None)
@given(vhds((DYNAMIC,)), st.integers(0, 99))
def test_a_whole_disk_reads_as_the_specification_says(image: Vhd, seed: int) -> None:
    """Also one whose bitmaps have gaps, which vhd-tool does not send."""
    image = ascending(image)
    file = image.file(seed)
    flow = VhdFlow(Sent(file).fill, image.size, "disk")
    assert sum(extent.length for extent in flow.extents()) == image.size
    disk = image.disk(file)
    assert read(flow, b"\xff" * image.size, steps(seed)) == disk
    # A pass that goes on from a watermark does not read what lies before it, nor what is not asked for.
    flow, taken, at = VhdFlow(Sent(file).fill, image.size, "disk"), random.Random(seed), 0
    for length in steps(seed):
        buffer = memoryview(bytearray(min(length, image.size - at)))
        if taken.random() < 0.5:
            flow.read_into(at, buffer)
            assert buffer == disk[at : at + len(buffer)]
        at += len(buffer)
        if at == image.size:
            break


def disks(folder: Path) -> tuple[Path, Path]:
    generator = random.Random(1)
    old, new = folder / "old.raw", folder / "new.raw"
    content = bytearray(generator.randbytes(7 << 20) + bytes(3 << 20) + generator.randbytes(777 * 512))
    old.write_bytes(content)
    for at in (5, (4 << 20) - 2, (8 << 20) + 9, len(content) - 3):
        content[at : at + 3] = b"new"
    new.write_bytes(content)
    return old, new


def test_a_difference_makes_the_older_disk_the_newer_one(tmp_path: Path) -> None:
    old, new = disks(tmp_path)
    flow = VhdFlow(Sent(b"".join(vhd.stream(new, old))).fill, new.stat().st_size, "disk")
    found = list(flow.extents())
    assert sum(extent.length for extent in found) < new.stat().st_size
    assert not any(extent.zero for extent in found)
    assert read(flow, old.read_bytes(), steps(2)) == new.read_bytes()


def test_one_whose_size_was_rounded_up_is_the_disk(tmp_path: Path) -> None:
    _, new = disks(tmp_path)
    flow = VhdFlow(Sent(b"".join(vhd.stream(new, whole_blocks=True))).fill, new.stat().st_size, "disk")
    assert read(flow, bytes(new.stat().st_size), steps(3)) == new.read_bytes()


def test_cut_at_any_byte_it_is_never_taken_for_the_disk(tmp_path: Path) -> None:
    _, new = disks(tmp_path)
    content = b"".join(vhd.stream(new))
    for length in [*range(0, 4096, 61), *random.Random(4).sample(range(4096, len(content) - (3 << 20)), 20)]:
        with pytest.raises(SourceUnreachable, match="ended"):
            read(VhdFlow(Sent(content[:length]).fill, new.stat().st_size, "disk"), bytes(new.stat().st_size), steps(4))


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_garbage_is_refused_by_an_error_of_ours(data: st.DataObject) -> None:
    image = ascending(data.draw(vhds((DYNAMIC, DIFFERENCING))))
    file = bytearray(image.file(1))
    for _ in range(data.draw(st.integers(1, 4))):
        file[data.draw(st.integers(0, min(len(file), 4096) - 1))] = data.draw(st.integers(0, 255))
    with suppress(SynvirtError):
        read(VhdFlow(Sent(bytes(file)).fill, image.size, "disk"), bytes(image.size), steps(5))


WHOLE = (1 << 8) - 1


@pytest.mark.parametrize(
    ("image", "size", "error", "words"),
    [
        (Vhd(8192, FIXED), 8192, UnsupportedFormat, "a fixed VHD"),
        (Vhd(8192, blocks=(Block(1, WHOLE), Block(0, WHOLE))), 8192, MalformedArchive, "order"),
        (Vhd(8192, DIFFERENCING, blocks=(Block(0, 1), None)), 8192, MalformedArchive, "a part of the block at 0 only"),
        (Vhd(8192, blocks=(None, None)), 12288, MalformedArchive, "8192 bytes was sent for a disk of 12288"),
        (Vhd(12288, blocks=(None, None, None)), 8192, MalformedArchive, "12288 bytes was sent for a disk of 8192"),
        (Vhd(8192, header_at=1 << 40, blocks=(None, None)), 8192, MalformedArchive, "its header lies at"),
        (Vhd(8192, table_at=512, blocks=(None, None)), 8192, MalformedArchive, "its BAT lies at 512"),
    ],
)
def test_refused_by_name(image: Vhd, size: int, error: type[SynvirtError], words: str) -> None:
    content = image.footer() + image.file(1) if image.kind == FIXED else image.file(1)
    with pytest.raises(error, match=words):
        read(VhdFlow(Sent(content).fill, size, "disk"), bytes(size), steps(6))


def test_a_block_over_what_was_sent_before_it_is_refused() -> None:
    image = Vhd(8192, blocks=(Block(0, WHOLE), None))
    content = bytearray(image.file(1))
    struct.pack_into(">I", content, 512 + 1024, 1)  # in the BAT, behind the copy of the footer and the header
    with pytest.raises(MalformedArchive, match="order"):
        VhdFlow(Sent(bytes(content)).fill, 8192, "disk")


def test_a_footer_without_its_checksum_is_none() -> None:
    content = bytearray(Vhd(8192, blocks=(None, None)).file(1))
    content[55] ^= 1  # the size of the disk
    with pytest.raises(MalformedArchive, match="does not begin as a VHD does"):
        VhdFlow(Sent(bytes(content)).fill, 8192, "disk")


def test_what_was_passed_or_is_not_there_is_not_read(tmp_path: Path) -> None:
    old, new = disks(tmp_path)
    flow = VhdFlow(Sent(b"".join(vhd.stream(new, old))).fill, new.stat().st_size, "disk")
    buffer = memoryview(bytearray(512))
    flow.read_into(4096, buffer)
    with pytest.raises(DiskReadFailed, match="was passed already"):
        flow.read_into(0, buffer)
    with pytest.raises(DiskReadFailed, match="not in the difference"):
        flow.read_into(7 << 20, buffer)
