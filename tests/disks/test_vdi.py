"""VDI images that QEMU makes, read as QEMU reads them; images from the specification; and what each field may not say."""

import random
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from synvirt.blocks import DiskReader
from synvirt.disks.raw.files import RawReader
from synvirt.disks.vdi import VdiReader
from synvirt.errors import MalformedArchive, SynvirtError, UnsupportedFormat
from tests.cases import cases
from tests.disks.block_images import (
    MIB,
    Made,
    Write,
    assert_read_as_by_qemu,
    assert_same_disk,
    make_by_conversion,
    qemu,
    reads,
    scratch,
    writes,
)
from tests.disks.vdi_images import DIFFERENCING, DISCARDED, DYNAMIC, FREE, UNDO, Vdi, vdis


def open_vdi(image: Path, parent: DiskReader | None = None) -> VdiReader:
    return VdiReader(RawReader(str(image)), name=image.name, parent=parent)


@cases(50)
@given(
    size=st.one_of(st.integers(1, 30 * MIB), st.sampled_from([3 * MIB, (6 << 30) + 1])),
    static=st.booleans(),
    converted=st.booleans(),
    pieces=writes,
    places=reads,
)
def test_what_qemu_makes_reads_as_qemu_reads_it(
    size: int, static: bool, converted: bool, pieces: list[Write], places: list[tuple[float, int]]
) -> None:
    options = f"static={'on' if static else 'off'}"
    made = Made("vdi", options, size, pieces, converted)
    assert_read_as_by_qemu(made, open_vdi, places, leaves_out=None if static else MIB)


@cases(80)
@given(image=vdis(), seed=st.integers(0, 9), beneath=st.integers(0, 2 * MIB), places=reads)
def test_what_the_specification_allows_reads_as_it_says(
    image: Vdi, seed: int, beneath: int, places: list[tuple[float, int]]
) -> None:
    """Every block size and extra bytes, discarded blocks, and parents of any size."""
    with scratch() as folder:
        file, parent = image.file(seed), random.Random(seed + 1).randbytes(beneath)
        for name, content in (("disk.vdi", file), ("parent", parent), ("raw", image.disk(file, parent))):
            (folder / name).write_bytes(content)
        lower = RawReader(str(folder / "parent")) if image.kind == DIFFERENCING else None
        reader = open_vdi(folder / "disk.vdi", lower)
        try:
            assert_same_disk(reader, folder / "raw", places)
        finally:
            reader.close()


def test_the_holes_of_a_static_image_are_zeros(tmp_path: Path) -> None:
    qemu("qemu-img", "create", "-q", "-f", "vdi", "-o", "static=on", "disk.vdi", "1T", cwd=tmp_path)
    reader = open_vdi(tmp_path / "disk.vdi")
    assert sum(extent.length for extent in reader.extents() if not extent.zero) < MIB
    reader.close()


def test_most_of_an_image_can_be_shared_with_a_volume(tmp_path: Path) -> None:
    make_by_conversion(tmp_path / "disk.vdi", "vdi", "", 4 * MIB, [Write(0, 3 * MIB, 7)])
    reader = open_vdi(tmp_path / "disk.vdi")
    assert sum(place.length for place in reader.places()) == 3 * MIB
    reader.close()


def test_a_differencing_image_needs_its_parent(tmp_path: Path) -> None:
    image = Vdi((FREE,), 65536, kind=DIFFERENCING)
    (tmp_path / "snapshot.vdi").write_bytes(image.file(0))
    with pytest.raises(UnsupportedFormat, match="00000003") as caught:
        open_vdi(tmp_path / "snapshot.vdi")
    assert caught.value.hint is not None
    assert ".vbox" in caught.value.hint


HONEST = Vdi((1, FREE, 0, DISCARDED), 4 * 65536)
WRONG: list[tuple[Vdi, type[SynvirtError], str]] = [
    (replace(HONEST, signature=1), MalformedArchive, "signature"),
    (replace(HONEST, version=0x0001_0000), UnsupportedFormat, "version 1.0"),
    (replace(HONEST, kind=UNDO), UnsupportedFormat, "type 3"),
    (replace(HONEST, block_bytes=4096), MalformedArchive, "blocks of 4096"),
    (replace(HONEST, block_bytes=3 << 20), MalformedArchive, "powers of two"),
    (replace(HONEST, sector_bytes=4096), UnsupportedFormat, "sectors of 4096"),
    (replace(HONEST, size=1 << 63), MalformedArchive, "cannot hold a disk of 9223372036854775808"),
    (replace(HONEST, size=1 << 63, blocks=FREE), MalformedArchive, "cannot hold"),
    (replace(HONEST, size=(2**32 - 1) * 65536, blocks=FREE), MalformedArchive, "does not fit"),
    (replace(HONEST, extra_bytes=100), MalformedArchive, "before each block"),
    (replace(HONEST, map_at=100), MalformedArchive, "does not fit"),
    (replace(HONEST, entries=(1, FREE, 1, 0)), MalformedArchive, "block 0 and block 2"),
    (replace(HONEST, entries=(FREE, FREE, FREE, 0), data_at=520), MalformedArchive, "block 3 and the map"),
]


@pytest.mark.parametrize(("image", "error", "words"), WRONG, ids=[words for _, _, words in WRONG])
def test_a_wrong_field_is_refused_by_name(tmp_path: Path, image: Vdi, error: type[SynvirtError], words: str) -> None:
    (tmp_path / "disk.vdi").write_bytes(image.file(0)[: 1 << 20])
    with pytest.raises(error, match=words):
        open_vdi(tmp_path / "disk.vdi")


@pytest.mark.parametrize("length", [0, 100, 456, 520, 4096, 4096 + 65536, 4096 + 2 * 65536 - 1])
def test_a_file_cut_off_anywhere_is_refused(tmp_path: Path, length: int) -> None:
    (tmp_path / "disk.vdi").write_bytes(HONEST.file(0)[:length])
    with pytest.raises(MalformedArchive):
        open_vdi(tmp_path / "disk.vdi")


def test_the_last_block_may_end_with_the_disk(tmp_path: Path) -> None:
    """Some writers cut the file where the disk ends, in the middle of its last block."""
    image = replace(HONEST, entries=(0,), size=10_240, kind=DYNAMIC)
    file = image.file(0)
    (tmp_path / "disk.vdi").write_bytes(file[: 4096 + 10_240])
    (tmp_path / "raw").write_bytes(image.disk(file))
    reader = open_vdi(tmp_path / "disk.vdi")
    assert_same_disk(reader, tmp_path / "raw")
    reader.close()
