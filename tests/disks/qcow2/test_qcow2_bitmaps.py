"""Persistent dirty bitmaps: what is listed, what is dirty, what cannot be relied on; qemu-nbd says the same."""

import json
import struct
from collections.abc import Iterable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from synvirt.blocks import Extent
from synvirt.disks.qcow2.reader import Qcow2Reader
from synvirt.disks.raw.files import RawReader
from synvirt.errors import CbtReset, MalformedArchive, NotFound
from synvirt.programs import run
from tests.cases import cases
from tests.disks.block_images import scratch
from tests.disks.qcow2.qcow2_images import qemu
from tests.needs import need
from tests.servers.nbd_servers import qemu_nbd

MIB = 1 << 20


def opened(image: Path) -> Qcow2Reader:
    return Qcow2Reader(RawReader(str(image)), name=image.name)


def made(folder: Path, size: int = 10 * MIB, cluster: int = 65536) -> Path:
    need("qemu-img", "qemu-utils")
    qemu("qemu-img", "create", "-q", "-f", "qcow2", "-o", f"cluster_size={cluster}", "disk.qcow2", str(size), cwd=folder)
    return folder / "disk.qcow2"


def written(image: Path, *commands: str) -> None:
    arguments = [word for command in commands for word in ("-c", command)]
    qemu("qemu-io", "-f", "qcow2", *arguments, image.name, cwd=image.parent)


def add(image: Path, name: str, granularity: int) -> None:
    qemu("qemu-img", "bitmap", "--add", "-g", str(granularity), image.name, name, cwd=image.parent)


def dirty_by_qemu(image: Path, bitmap: str) -> list[tuple[int, int]]:
    """(start, end) of what qemu-nbd exports as dirty."""
    with qemu_nbd(image, "qcow2", "-B", bitmap) as uri:
        nbdinfo = need("nbdinfo", "libnbd-bin")
        reported = run([nbdinfo, f"--map=qemu:dirty-bitmap:{bitmap}", "--json", uri], timeout_s=30).stdout
    return joined((entry["offset"], entry["offset"] + entry["length"]) for entry in json.loads(reported) if entry["type"] & 1)


def joined(areas: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    result: list[tuple[int, int]] = []
    for start, end in areas:
        begin = result.pop()[0] if result and result[-1][1] == start else start
        result.append((begin, end))
    return result


def areas_of(extents: Iterable[Extent]) -> list[tuple[int, int]]:
    return joined((extent.start, extent.end) for extent in extents)


WRITES = st.lists(st.tuples(st.integers(0, 999), st.integers(1, 300)), max_size=5)


@cases(25)
@given(
    size=st.integers(1, 12 * MIB),
    cluster_bits=st.sampled_from([9, 12, 16, 21]),
    granularity_bits=st.sampled_from([9, 12, 16, 20, 31]),
    before=WRITES,
    after=WRITES,
)
def test_what_is_dirty_is_what_qemu_nbd_exports(
    size: int, cluster_bits: int, granularity_bits: int, before: list[tuple[int, int]], after: list[tuple[int, int]]
) -> None:
    with scratch() as folder:
        image = made(folder, size, 1 << cluster_bits)
        sectors = opened(image).size
        for name, writes in (("first", before), ("second", after)):
            add(image, name, 1 << granularity_bits)
            for offset, length in writes:
                at = offset * sectors // 1000
                written(image, f"write -P 7 {at} {min(sectors - at, 1 + length * sectors // 1000)}")
        reader = opened(image)
        for bitmap in reader.bitmaps():
            assert bitmap.granularity_bytes == 1 << granularity_bits
            assert not bitmap.in_use
            assert areas_of(reader.dirty_extents(bitmap.name)) == dirty_by_qemu(image, bitmap.name)
        assert {bitmap.name for bitmap in reader.bitmaps()} == {"first", "second"}
        reader.close()


def test_dirty_zeros_are_zero_extents(tmp_path: Path) -> None:
    image = made(tmp_path)
    add(image, "since", 65536)
    written(image, "write -P 1 0 128k", "write -z 1M 64k", "write -z 128k 64k")
    reader = opened(image)
    assert list(reader.dirty_extents("since")) == [
        Extent(0, 131072), Extent(131072, 65536, zero=True), Extent(MIB, 65536, zero=True),
    ]  # fmt: skip
    reader.close()


def test_stretches_whose_bits_are_all_set_or_all_clear_have_none_in_the_file(tmp_path: Path) -> None:
    """QEMU reads such entries of a bitmap's table; it does not write those of set bits itself."""
    size = 5 * MIB - 7 * 512
    image = made(tmp_path, size, cluster=512)
    add(image, "b", 512)
    written(image, f"write 0 {4 * MIB}")
    reader = opened(image)
    (bitmap,) = reader.bitmaps()
    reader.close()
    with image.open("r+b") as file:  # a cluster of bits is of 2 MiB
        file.seek(bitmap.table_offset)
        file.write(struct.pack(">QQQ", 0, 1, 1))
    reader = opened(image)
    assert areas_of(reader.dirty_extents("b")) == [(2 * MIB, size)] == dirty_by_qemu(image, "b")
    reader.close()


def test_an_image_without_bitmaps_has_none(tmp_path: Path) -> None:
    reader = opened(made(tmp_path))
    assert reader.bitmaps() == ()
    with pytest.raises(NotFound, match="'since'"):
        reader.dirty_extents("since")
    reader.close()


def test_a_bitmap_in_use_is_listed_and_not_relied_on(tmp_path: Path) -> None:
    image = made(tmp_path)
    add(image, "since", 65536)
    directory = opened(image).header.bitmaps
    assert directory is not None
    with image.open("r+b") as file:
        file.seek(directory.directory_offset + 12)
        file.write(struct.pack(">I", 1))  # the flag in_use
    reader = opened(image)
    assert [bitmap.in_use for bitmap in reader.bitmaps()] == [True]
    with pytest.raises(CbtReset, match="'since'"):
        reader.dirty_extents("since")
    reader.close()


def test_bitmaps_are_gone_once_an_older_writer_has_written(tmp_path: Path) -> None:
    """A writer that knows no bitmaps clears the autoclear bit, and what they say is then untrue."""
    image = made(tmp_path)
    add(image, "since", 65536)
    with image.open("r+b") as file:
        file.seek(88)
        file.write(struct.pack(">Q", 0))
    reader = opened(image)
    assert reader.bitmaps() == ()
    reader.close()


@pytest.mark.parametrize(
    ("at", "layout", "value", "message"),
    [
        (0, ">Q", 1 << 40, "outside the file"),  # the table
        (0, ">Q", 77, "boundary"),
        (8, ">I", 0, "clusters of bits"),  # its entries
        (17, ">B", 40, "granules"),
        (18, ">H", 60000, "name"),
        (20, ">I", 1 << 31, "name"),  # extra data
    ],
)
def test_a_directory_of_nonsense_is_refused(tmp_path: Path, at: int, layout: str, value: int, message: str) -> None:
    image = made(tmp_path)
    add(image, "since", 65536)
    directory = opened(image).header.bitmaps
    assert directory is not None
    with image.open("r+b") as file:
        file.seek(directory.directory_offset + at)
        file.write(struct.pack(layout, value))
    reader = opened(image)
    with pytest.raises(MalformedArchive, match=message):
        list(reader.dirty_extents("since"))
    reader.close()
