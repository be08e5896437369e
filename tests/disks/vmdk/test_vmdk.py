"""VMDK images that QEMU makes, read as QEMU reads them: every subformat, any geometry, chains."""

from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from synvirt.blocks import Extent
from synvirt.disks.raw.files import RawReader
from synvirt.disks.vmdk.reader import VmdkReader
from tests.cases import cases
from tests.disks.block_images import (
    KIB,
    MIB,
    Made,
    Write,
    assert_knows_zeros_of_qemu,
    assert_read_as_by_qemu,
    assert_same_disk,
    assert_same_file,
    make_by_conversion,
    make_by_writes,
    qemu,
    raw_of,
    reads,
    scratch,
    write_to,
    writes,
)
from tests.disks.vmdk.vmdk_images import NO_PARENT, Cowd, Grain, Hosted, Image, SeSparse, Stream, images, open_vmdk, write_image

SUBFORMATS = ("monolithicSparse", "monolithicFlat", "twoGbMaxExtentSparse", "twoGbMaxExtentFlat", "streamOptimized")
FLAT = ("monolithicFlat", "twoGbMaxExtentFlat")


sizes = st.one_of(st.integers(1, 40 * MIB), st.sampled_from([32 * MIB, 64 * KIB, (2 << 30) + 65537, (5 << 30) + 512]))


@cases(100)
@given(
    subformat=st.sampled_from(SUBFORMATS),
    size=sizes,
    zeroed_grain=st.booleans(),
    converted=st.booleans(),
    pieces=writes,
    places=reads,
)
def test_what_qemu_makes_reads_as_qemu_reads_it(
    subformat: str, size: int, zeroed_grain: bool, converted: bool, pieces: list[Write], places: list[tuple[float, int]]
) -> None:
    # qemu-io cannot write part of a compressed grain, so streams are converted.
    converted = converted or subformat == "streamOptimized"
    options = f"subformat={subformat},zeroed_grain={'on' if zeroed_grain and subformat not in FLAT else 'off'}"
    made = Made("vmdk", options, size, pieces, converted)
    assert_read_as_by_qemu(made, open_vmdk, places, leaves_out=None if subformat in FLAT else 64 * KIB)


@cases(40)
@given(
    layers=st.lists(
        st.tuples(st.sampled_from(SUBFORMATS[:1] + SUBFORMATS[2:3]), st.booleans(), writes), min_size=1, max_size=4
    ),
    base=st.sampled_from(SUBFORMATS[:4]),
    size=st.one_of(st.integers(1, 20 * MIB), st.just((2 << 30) + 512)),
    pieces=writes,
    places=reads,
)
def test_a_chain_of_snapshots_reads_as_qemu_reads_it(
    layers: list[tuple[str, bool, list[Write]]],
    base: str,
    size: int,
    pieces: list[Write],
    places: list[tuple[float, int]],
) -> None:
    with scratch() as folder:
        image = folder / "base.vmdk"
        make_by_writes(image, "vmdk", f"subformat={base}", size, pieces)
        for number, (subformat, zeroed_grain, written) in enumerate(layers):
            parent, image = image, folder / f"snapshot-{number}.vmdk"
            options = f"subformat={subformat},zeroed_grain={'on' if zeroed_grain else 'off'}"
            qemu(
                *("qemu-img", "create", "-q", "-f", "vmdk", "-o", options, "-b", parent.name, "-F", "vmdk", image.name),
                cwd=folder,
            )
            write_to(image, "vmdk", written)
        raw = raw_of(image, "vmdk")
        reader = open_vmdk(image)
        try:
            assert_same_disk(reader, raw, places)
            assert_knows_zeros_of_qemu(reader, image, "vmdk")
        finally:
            reader.close()


@cases(120)
@given(image=images(), places=reads)
def test_what_the_specification_allows_reads_as_it_says(image: Image, places: list[tuple[float, int]]) -> None:
    """Grains and tables of any size, in any order, in all four formats."""
    with scratch() as folder:
        write_image(folder, "disk", image)
        image.lay_over(folder / "raw")
        reader = open_vmdk(folder / "disk.vmdk")
        try:
            assert_same_disk(reader, folder / "raw", places)
        finally:
            reader.close()


@cases(60)
@given(image=images())
def test_qemu_reads_these_images_as_we_say(image: Image) -> None:
    """The generator is no judge of its own: QEMU's reader is asked too."""
    image = replace(image, padding=0) if isinstance(image, Stream) else image
    with scratch() as folder:
        write_image(folder, "disk", image)
        image.lay_over(folder / "expected")
        assert_same_file(raw_of(folder / "disk.vmdk", "vmdk"), folder / "expected")
        reader = open_vmdk(folder / "disk.vmdk")
        assert_knows_zeros_of_qemu(reader, folder / "disk.vmdk", "vmdk")
        reader.close()


@cases(60)
@given(layers=st.lists(images((Hosted, Cowd, SeSparse)), min_size=2, max_size=4), places=reads)
def test_snapshots_of_any_format_over_any_other(layers: list[Image], places: list[tuple[float, int]]) -> None:
    """Also where a parent is larger or smaller than its child."""
    with scratch() as folder:
        for number, image in enumerate(layers):
            below = f"disk-{number - 1}.vmdk" if number else None
            write_image(
                folder, f"disk-{number}", image, cid=number, parent_cid=number - 1 if number else NO_PARENT, parent=below
            )
            image.lay_over(folder / "raw")
        reader = open_vmdk(folder / f"disk-{len(layers) - 1}.vmdk")
        try:
            assert_same_disk(reader, folder / "raw", places)
        finally:
            reader.close()


@cases(40)
@given(image=images((Stream,)), places=reads)
def test_a_stream_without_tables_is_read_by_its_markers(image: Stream, places: list[tuple[float, int]]) -> None:
    with scratch() as folder:
        write_image(folder, "disk", replace(image, directory=False))
        image.lay_over(folder / "raw")
        reader = open_vmdk(folder / "disk.vmdk")
        try:
            assert_same_disk(reader, folder / "raw", places)
        finally:
            reader.close()


def test_a_window_of_tables_may_begin_in_the_middle_of_one(tmp_path: Path) -> None:
    """32 Ki grains are looked at together, and tables of 100 entries do not divide them."""
    grains: dict[int, Grain] = {number: number % 50 for number in (0, 32767, 32768, 32769, 65535, 65536, 69999)}
    image = Hosted(capacity=70_000, grain=1, table_entries=100, grains=grains)
    write_image(tmp_path, "disk", image)
    image.lay_over(tmp_path / "raw")
    reader = open_vmdk(tmp_path / "disk.vmdk")
    assert_same_disk(reader, tmp_path / "raw", [(0.4, MIB)])
    reader.close()


class Counting(RawReader):
    """How often the file was read, and how much of it."""

    calls = read = 0

    def read_into(self, offset: int, buffer: memoryview) -> None:
        self.calls += 1
        self.read += len(buffer)
        super().read_into(offset, buffer)


@pytest.mark.parametrize("subformat", ["monolithicSparse", "streamOptimized"])
def test_what_lies_side_by_side_is_read_at_once(tmp_path: Path, subformat: str) -> None:
    """A request of copy() is one read of the file, and reads nothing that it does not need."""
    make_by_conversion(tmp_path / "disk.vmdk", "vmdk", f"subformat={subformat}", 64 * MIB, [Write(0, 64 * MIB, 7)])
    over = Counting(str(tmp_path / "disk.vmdk"))
    reader = VmdkReader(over, root=None, name="disk.vmdk")
    assert list(reader.extents()) == [Extent(0, 64 * MIB)]
    reader.read_into(0, memoryview(bytearray(MIB)))
    over.calls = over.read = 0
    for start in range(0, 64 * MIB, 4 * MIB):
        reader.read_into(start, memoryview(bytearray(4 * MIB)))
    assert over.calls == 16
    assert over.read <= min(over.size, 64 * MIB) + 128 * KIB
    reader.close()
