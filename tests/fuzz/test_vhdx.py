"""Hostile VHDX images: fields of headers, region table, metadata, BAT, bitmaps, locator and log, with right checksums."""

import struct
from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from synvirt.blocks import DiskReader
from synvirt.disks.raw.files import RawReader
from synvirt.disks.vhdx.reader import VhdxReader
from tests.cases import cases
from tests.disks.block_images import reads, scratch
from tests.disks.vhd.vhdx_images import (
    FULL,
    KIB,
    LOG_SECTOR,
    MIB,
    NOT_PRESENT,
    PARENT_IDENTITY,
    PARTIAL,
    Block,
    Vhdx,
    Written,
    checksummed,
    lose_power,
    write,
)
from tests.fuzz.block_formats import Area, Damage, assert_bounded, damages, outcome

LOCATOR = (("parent_linkage", f"{{{PARENT_IDENTITY}}}"), ("relative_path", ".\\base.vhdx"))
BLOCKS = (Block(PARTIAL, ((0, 40),), ((3, 60),)), Block(NOT_PRESENT), Block(FULL, ((5, 5),)))
CHILD, ALONE = Vhdx(3 * MIB - 512, BLOCKS, locator=LOCATOR), Vhdx(2 * MIB, BLOCKS[1:])


def areas(at: Written) -> list[Area]:
    """The current header is the second; the first region table counts. Metadata items lie from 64 KiB of their region on."""
    header = [Area(128 * KIB + offset, width) for offset, width in ((8, 8), (48, 8), (64, 2), (66, 2), (68, 4), (72, 8))]
    regions = [Area(192 * KIB + 8, 4), Area(192 * KIB + 32, 8, 2, 32), Area(192 * KIB + 40, 4, 4, 4), Area(192 * KIB, 80)]
    metadata = [Area(at.metadata + 8, 4), Area(at.metadata + 48, 4, 6 * 8, 4), Area(at.metadata, 256)]
    items = [Area(at.metadata + 64 * KIB, 4, 2, 4), Area(at.metadata + 64 * KIB + 8, 8), Area(at.metadata + 64 * KIB, 200)]
    table = [Area(at.bat, 8, 4, 8), Area(at.bat + 8192 * 8, 8), Area(at.bat + 4096 * 8, 8)]
    bitmaps = [Area(bitmap, 512) for bitmap in at.bitmaps.values()]
    return [*header, *regions, *metadata, *items, *table, *table, *bitmaps]


def put(path: Path, changes: list[Damage]) -> None:
    with path.open("r+b") as file:
        for change in changes:
            file.seek(change.at)
            file.write(change.content)


def mend(path: Path) -> None:
    """Right checksums for the headers and the region tables."""
    with path.open("r+b") as file:
        for at, length in ((64 * KIB, 4 * KIB), (128 * KIB, 4 * KIB), (192 * KIB, 64 * KIB), (256 * KIB, 64 * KIB)):
            file.seek(at)
            content = checksummed(file.read(length))
            file.seek(at)
            file.write(content)


def opened(path: Path) -> DiskReader:
    file = RawReader(str(path))
    try:
        return VhdxReader(file, root=str(path.parent), name=path.name)
    except BaseException:
        file.close()
        raise


def write_pair(folder: Path, image: Vhdx) -> Written:
    write(Vhdx(MIB, (Block(FULL, ((0, 9),)),), identity=PARENT_IDENTITY), folder / "base.vhdx")
    return write(image, folder / "disk.vhdx", parent_raw=folder / "base.raw")


@cases(70)
@given(data=st.data(), image=st.sampled_from([CHILD, ALONE]), cut=st.integers(0, 30), places=reads)
def test_hostile_images(data: st.DataObject, image: Vhdx, cut: int, places: list[tuple[float, int]]) -> None:
    with scratch() as folder:
        at = write_pair(folder, image)
        disk = folder / "disk.vhdx"
        put(disk, data.draw(st.lists(damages(areas(at), "little"), min_size=1, max_size=4), "damage"))
        mend(disk)
        if cut < 7:
            with disk.open("r+b") as file:
                file.truncate(cut * MIB - 512 if cut else 500)
        assert_bounded(lambda: outcome(lambda: opened(disk), places))


@cases(70)
@given(data=st.data(), image=st.sampled_from([CHILD, ALONE]), seed=st.integers(0, 99), places=reads)
def test_hostile_logs(data: st.DataObject, image: Vhdx, seed: int, places: list[tuple[float, int]]) -> None:
    """Fields of entries and descriptors are overwritten, and the entries' checksums put right."""
    with scratch() as folder:
        at = write_pair(folder, image)
        disk = folder / "disk.vhdx"
        lose_power(image, disk, at, seed=seed)
        ring = bytearray(disk.read_bytes()[at.log : at.log + image.log_bytes])
        entries = [start for start in range(0, len(ring), LOG_SECTOR) if ring[start : start + 4] == b"loge"]
        fields: list[Area] = []
        for start in entries:
            fields += [Area(start + 8, 4, 2, 4), Area(start + 16, 8), Area(start + 24, 4), Area(start + 48, 8, 2, 8)]
            fields += [
                Area(start + 64 + 8, 8, 9, 8),
                Area(start + 64, 4, 3, 32),
                Area(start, 300),
                Area(start + LOG_SECTOR, 16),
            ]
        for change in data.draw(st.lists(damages(fields, "little"), min_size=1, max_size=5), "damage"):
            ring[change.at : change.at + len(change.content)] = change.content
        # From the last to the first, since one that reaches over others sums their checksums too.
        for start in reversed(entries):
            (length,) = struct.unpack_from("<I", ring, start + 8)
            if 0 < length <= len(ring) and start + length <= len(ring):
                ring[start : start + length] = checksummed(bytes(ring[start : start + length]))
        put(disk, [Damage(at.log, bytes(ring[: image.log_bytes]))])
        assert_bounded(lambda: outcome(lambda: opened(disk), places))
