"""VHDX images that QEMU makes, read as QEMU reads them; and what each field may not say."""

import contextlib
import os
import random
import shutil
from dataclasses import replace
from pathlib import Path
from uuid import UUID

import pytest
from hypothesis import given
from hypothesis import strategies as st

from synvirt.disks import open_reader
from synvirt.disks.raw.files import RawReader, punch_hole
from synvirt.disks.specs import ImageSpec, RawSpec
from synvirt.disks.vhdx.log import _changes
from synvirt.disks.vhdx.reader import VhdxReader
from synvirt.errors import MalformedArchive, UnsupportedFormat
from synvirt.programs import ProgramFailed, run
from tests.cases import cases
from tests.disks.block_images import (
    GIB,
    KIB,
    MIB,
    Made,
    Write,
    assert_read_as_by_qemu,
    assert_same_disk,
    assert_same_file,
    bytes_of,
    make_by_writes,
    qemu,
    raw_of,
    reads,
    scratch,
    writes,
)
from tests.disks.vhd.vhdx_images import (
    LOG_SECTOR,
    PARENT_IDENTITY,
    SURROUNDINGS,
    Change,
    Vhdx,
    log_entry,
    lose_power,
    vhdxs,
    write,
)


def open_vhdx(image: Path, root: Path | None = None) -> VhdxReader:
    root = root or image.parent
    return VhdxReader(RawReader(str(image)), root=str(root), name=str(image.relative_to(root)))


def locator(relative: str, linkage: UUID = PARENT_IDENTITY) -> tuple[tuple[str, str], ...]:
    return (("parent_linkage", f"{{{linkage}}}"), ("relative_path", relative))


@cases(30)
@given(
    size=st.one_of(st.integers(1, 12 * MIB), st.integers(1, 40 * MIB), st.sampled_from([3 * MIB, 4 * GIB + 512, 9 * GIB + 1])),
    block=st.sampled_from([1, 1, 2, 8, 32, 256]),
    log=st.sampled_from([1, 2, 5]),
    fixed=st.booleans(),
    converted=st.booleans(),
    pieces=writes,
    places=reads,
)
def test_what_qemu_makes_reads_as_qemu_reads_it(
    size: int, block: int, log: int, fixed: bool, converted: bool, pieces: list[Write], places: list[tuple[float, int]]
) -> None:
    options = f"subformat={'fixed' if fixed else 'dynamic'},block_size={block * MIB},log_size={log * MIB}"

    def opened(image: Path) -> VhdxReader:
        reader = open_vhdx(image)
        assert (reader.metadata.fixed, reader.metadata.block_bytes) == (fixed, block * MIB)
        return reader

    made = Made("vhdx", options, size, pieces, converted)
    assert_read_as_by_qemu(made, opened, places, leaves_out=None if fixed else block * MIB)


def read_as_specified(folder: Path, image: Vhdx, parent: Vhdx | None, seed: int, places: list[tuple[float, int]]) -> None:
    """Write the image (and its parent), lose power where the seed says so, and compare with the disk that was meant."""
    if parent is not None:
        parent_at = write(parent, folder / "base.vhdx", seed=seed + 1)
        if seed % 3 == 1:
            lose_power(parent, folder / "base.vhdx", parent_at, seed=seed)
    beneath = folder / "base.raw" if parent is not None else None
    written = write(image, folder / "disk.vhdx", seed=seed, raw=folder / "raw", parent_raw=beneath)
    replayed = lose_power(image, folder / "disk.vhdx", written, seed=seed) if seed % 2 else 0
    reader = open_vhdx(folder / "disk.vhdx")
    try:
        assert reader.replayed == replayed
        assert_same_disk(reader, folder / "raw", places)
    finally:
        reader.close()
        reader.close()


@cases(30)
@given(image=vhdxs(differencing=False), seed=st.integers(0, 99), places=reads)
def test_what_the_specification_allows_reads_as_it_says(image: Vhdx, seed: int, places: list[tuple[float, int]]) -> None:
    """Both sector sizes, every state of a block, regions in any order, several chunks; with a log to replay and without."""
    with scratch() as folder:
        read_as_specified(folder, image, None, seed, places)


@cases(30)
@given(data=st.data(), seed=st.integers(0, 99), places=reads)
def test_differencing_images_read_as_the_specification_says(
    data: st.DataObject, seed: int, places: list[tuple[float, int]]
) -> None:
    """Partly present blocks with any bitmap, over parents of any block size and disk size."""
    image = data.draw(vhdxs(differencing=True), "image")
    parent = data.draw(vhdxs(differencing=False, sector_bytes=image.sector_bytes), "parent")
    image = replace(image, locator=locator("base.vhdx"))
    with scratch() as folder:
        read_as_specified(folder, image, replace(parent, identity=PARENT_IDENTITY), seed, places)


@cases(20)
@given(data=st.data(), seed=st.integers(0, 99))
def test_a_differencing_image_alone_is_what_its_disk_has_over_its_parents(data: st.DataObject, seed: int) -> None:
    """The parent is not looked for: it is not there. What is in no extent is the parent's."""
    image = data.draw(vhdxs(differencing=True), "image")
    parent = data.draw(vhdxs(differencing=False, sector_bytes=image.sector_bytes), "parent")
    image = replace(image, locator=locator("gone.vhdx"))
    with scratch() as folder:
        write(parent, folder / "base.vhdx", seed=seed + 1)
        write(image, folder / "disk.vhdx", seed=seed, raw=folder / "raw", parent_raw=folder / "base.raw")
        reader = VhdxReader(RawReader(str(folder / "disk.vhdx")), name="disk.vhdx", alone=True)
        try:
            assert reader.size == image.size
            with (folder / "base.raw").open("r+b") as disk:
                disk.truncate(image.size)
                for extent in reader.extents():
                    if extent.zero:
                        punch_hole(disk.fileno(), extent.start, extent.length)
                        continue
                    for at in range(extent.start, extent.end, MIB):
                        os.pwrite(disk.fileno(), bytes_of(reader, at, min(MIB, extent.end - at)), at)
            assert_same_file(folder / "base.raw", folder / "raw")
        finally:
            reader.close()


def test_only_a_differencing_image_can_be_read_alone(tmp_path: Path) -> None:
    """Of any other its empty blocks are zeros, and no silence."""
    run(["qemu-img", "create", "-q", "-f", "vhdx", str(tmp_path / "disk.vhdx"), "4M"], timeout_s=60)
    with pytest.raises(MalformedArchive, match="not a differencing image"):
        VhdxReader(RawReader(str(tmp_path / "disk.vhdx")), name="disk.vhdx", alone=True)
    spec = ImageSpec(format="qcow2", over=RawSpec(path=str(tmp_path / "disk.vhdx")), alone=True)
    with pytest.raises(UnsupportedFormat, match="without its parent"):
        open_reader(spec)


@cases(15)
@given(image=vhdxs(differencing=False, sector_bytes=512), seed=st.integers(0, 999))
def test_a_log_is_replayed_as_qemu_replays_it(image: Vhdx, seed: int) -> None:
    """QEMU replays a copy of the file, for good; ours is read as it is. QEMU cannot take an entry longer than it needs, and
    replays what lies before the sequence's tail, which may write over payload blocks: neither is asked of it."""
    if not image.size:
        return
    with scratch() as folder:
        written = write(image, folder / "disk.vhdx", seed=seed)
        lose_power(image, folder / "disk.vhdx", written, seed=seed, around=SURROUNDINGS - {"padding", "applied"})
        run(["cp", "--sparse=always", str(folder / "disk.vhdx"), str(folder / "copy.vhdx")], timeout_s=60)
        qemu("qemu-img", "check", "-q", "-r", "all", "-f", "vhdx", "copy.vhdx", cwd=folder)
        raw = raw_of(folder / "copy.vhdx", "vhdx")
        reader = open_vhdx(folder / "disk.vhdx")
        try:
            assert_same_disk(reader, raw)
        finally:
            reader.close()


def test_a_logged_sector_comes_back_whole() -> None:
    """Its first eight bytes and its last four are in the descriptor; those of the tables that QEMU logs are mostly zeros."""
    sectors = [random.Random(number).randbytes(LOG_SECTOR) for number in range(3)]
    changes = [Change(number * LOG_SECTOR, sector) for number, sector in enumerate(sectors)]
    found = _changes(log_entry(7, changes, tail=0, flushed=0, last=0), 3, 7)
    assert found == tuple((change.offset, LOG_SECTOR, change.sector) for change in changes)


@cases(15)
@given(before=writes, at=st.integers(0, 39), block=st.sampled_from([1, 2, 8]))
def test_the_log_of_a_qemu_that_died_is_replayed(before: list[Write], at: int, block: int) -> None:
    """QEMU writes a change of the BAT to the log, fails to write it to its place, and is killed."""
    bat = 2 * MIB + at // block * 8 // LOG_SECTOR * LOG_SECTOR
    fails = f"file.inject-error.0.event=none,file.inject-error.0.iotype=write,file.inject-error.0.sector={bat // 512}"
    opened = f"driver=vhdx,file.driver=blkdebug,file.image.driver=file,file.image.filename=disk.vhdx,{fails}"
    with scratch() as folder:
        image = folder / "disk.vhdx"
        make_by_writes(image, "vhdx", f"block_size={block * MIB}", 40 * MIB, before)
        with contextlib.suppress(ProgramFailed):
            run(["qemu-io", "--image-opts", opened, "-c", f"write -P 7 {at}M 5000", "-c", "abort"], timeout_s=60, cwd=folder)
        shutil.copyfile(image, folder / "copy.vhdx")
        qemu("qemu-img", "check", "-q", "-r", "all", "-f", "vhdx", "copy.vhdx", cwd=folder)
        raw = raw_of(folder / "copy.vhdx", "vhdx")
        reader = open_vhdx(image)
        try:
            # A block that an earlier write made needs no change of the BAT.
            assert reader.replayed or before
            assert_same_disk(reader, raw)
        finally:
            reader.close()


@pytest.mark.parametrize(("size", "block"), [("64T", "0"), ("1T", "1M")])
def test_a_vast_and_empty_disk_is_one_extent(tmp_path: Path, size: str, block: str) -> None:
    qemu("qemu-img", "create", "-q", "-f", "vhdx", "-o", f"block_size={block}", "disk.vhdx", size, cwd=tmp_path)
    reader = open_vhdx(tmp_path / "disk.vhdx")
    (extent,) = reader.extents()
    assert extent.zero
    assert extent.length == reader.size >= 1 << 40
    assert not any(bytes_of(reader, reader.size - KIB, KIB))
    reader.close()
