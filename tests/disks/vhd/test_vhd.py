"""VHD images that QEMU makes, read as QEMU reads them; images from the specification; and what each field may not say."""

import struct
from dataclasses import replace
from pathlib import Path
from uuid import UUID

import pytest
from hypothesis import given
from hypothesis import strategies as st

from synvirt.disks.raw.files import RawReader
from synvirt.disks.vhd import VhdReader
from synvirt.errors import HostPathRejected, MalformedArchive, SynvirtError, UnsupportedFormat
from tests.cases import cases
from tests.disks.block_images import (
    MIB,
    Made,
    Write,
    assert_read_as_by_qemu,
    assert_same_disk,
    bytes_of,
    qemu,
    reads,
    scratch,
    writes,
)
from tests.disks.vhd.vhd_images import DIFFERENCING, DYNAMIC, FIXED, Block, Vhd, checksummed, vhds

PARENT = UUID(int=2)


def open_vhd(image: Path, root: Path | None = None) -> VhdReader:
    root = root or image.parent
    return VhdReader(RawReader(str(image)), root=str(root), name=str(image.relative_to(root)))


def open_written(folder: Path, content: bytes) -> VhdReader:
    (folder / "disk.vhd").write_bytes(content)
    return open_vhd(folder / "disk.vhd")


@cases(50)
@given(
    size=st.one_of(st.integers(1, 30 * MIB), st.sampled_from([3 * MIB, (6 << 30) + 1])),
    fixed=st.booleans(),
    force=st.booleans(),
    converted=st.booleans(),
    pieces=writes,
    places=reads,
)
def test_what_qemu_makes_reads_as_qemu_reads_it(
    size: int, fixed: bool, force: bool, converted: bool, pieces: list[Write], places: list[tuple[float, int]]
) -> None:
    options = f"subformat={'fixed' if fixed else 'dynamic'},force_size={'on' if force else 'off'}"
    made = Made("vpc", options, size, pieces, converted)
    assert_read_as_by_qemu(made, open_vhd, places, leaves_out=None if fixed else 2 * MIB)


@cases(80)
@given(image=vhds(), seed=st.integers(0, 9), beneath=vhds((FIXED, DYNAMIC)), places=reads)
def test_what_the_specification_allows_reads_as_it_says(
    image: Vhd, seed: int, beneath: Vhd, places: list[tuple[float, int]]
) -> None:
    """Blocks of any size with any bitmap, footers of both lengths, parents of any kind and size."""
    with scratch() as folder:
        beneath = replace(beneath, identity=PARENT)
        parent = beneath.file(seed + 1)
        image = replace(image, parent=PARENT, locators=((b"W2ru", ".\\base.vhd".encode("utf-16-le")),))
        file = image.file(seed)
        for name, content in (("disk.vhd", file), ("base.vhd", parent), ("raw", image.disk(file, beneath.disk(parent)))):
            (folder / name).write_bytes(content)
        reader = open_vhd(folder / "disk.vhd")
        try:
            assert_same_disk(reader, folder / "raw", places)
        finally:
            reader.close()
            reader.close()


def test_a_vast_and_empty_disk_is_one_extent(tmp_path: Path) -> None:
    qemu("qemu-img", "create", "-q", "-f", "vpc", "-o", "force_size=on", "disk.vhd", "2040G", cwd=tmp_path)
    reader = open_vhd(tmp_path / "disk.vhd")
    (extent,) = reader.extents()
    assert extent.zero
    assert extent.length == reader.size == 2040 << 30
    reader.close()


def test_the_holes_of_a_fixed_image_are_zeros(tmp_path: Path) -> None:
    qemu("qemu-img", "create", "-q", "-f", "vpc", "-o", "subformat=fixed", "disk.vhd", "100G", cwd=tmp_path)
    reader = open_vhd(tmp_path / "disk.vhd")
    assert sum(extent.length for extent in reader.extents() if not extent.zero) < MIB
    reader.close()


@pytest.mark.parametrize("creator", [b"vpc ", b"qemu", b"vbox", b"win ", b"tap\0", b"xyz "])
def test_current_size_is_the_size_for_images_of_any_program(tmp_path: Path, creator: bytes) -> None:
    """A geometry of 2 cylinders, 4 heads and 17 sectors is less than the disk, and no creator makes that the truth."""
    image = Vhd(100_352, kind=FIXED, creator=creator, geometry=0x0002_0411)
    (tmp_path / "disk.vhd").write_bytes(image.file(0))
    reader = open_vhd(tmp_path / "disk.vhd")
    assert reader.size == 100_352 > 2 * 4 * 17 * 512
    reader.close()


def test_a_guest_that_writes_a_footer_into_its_first_sector_changes_nothing(tmp_path: Path) -> None:
    image = Vhd(40_960, kind=FIXED)
    forged = replace(image, size=512, kind=DYNAMIC).footer()
    (tmp_path / "disk.vhd").write_bytes(forged + image.file(0)[512:])
    reader = open_vhd(tmp_path / "disk.vhd")
    assert reader.size == 40_960
    assert bytes_of(reader, 0, 512) == forged
    reader.close()


HONEST = Vhd(16_384, blocks=(Block(1, 0xFF), None, Block(0, 0x0F), None))
CHILD = replace(HONEST, kind=DIFFERENCING, parent=PARENT)


def test_a_damaged_footer_is_read_from_its_copy(tmp_path: Path) -> None:
    file = HONEST.file(0)
    (tmp_path / "raw").write_bytes(HONEST.disk(file))
    for damaged in (file[:-512] + bytes(512), file[:-20], file[:-512]):
        (tmp_path / "disk.vhd").write_bytes(damaged)
        reader = open_vhd(tmp_path / "disk.vhd")
        assert_same_disk(reader, tmp_path / "raw")
        reader.close()


@pytest.mark.parametrize("guests", [HONEST, replace(HONEST, blocks=(None,) * 4)])
def test_a_fixed_disk_that_was_cut_off_is_not_the_image_that_its_guest_has_written_there(tmp_path: Path, guests: Vhd) -> None:
    """The disk of a backup appliance, for example. Its beginning alone is no proof, where its end has no footer."""
    first = guests.file(0)
    whole = first + Vhd(MIB, kind=FIXED).file(1)[len(first) :]
    reader = open_written(tmp_path, whole)
    assert reader.size == MIB
    reader.close()
    for damaged in (whole[:-512], whole[:-20], whole[: -MIB // 2], whole[:-448] + bytes(448)):
        with pytest.raises(MalformedArchive, match="describes an image that ends at") as refused:
            open_written(tmp_path, damaged)
        assert "cut off" in str(refused.value.hint)


WRONG: list[tuple[Vhd, type[SynvirtError], str]] = [
    (replace(HONEST, version=0x0002_0000), UnsupportedFormat, "version 2.0"),
    (replace(HONEST, header_version=0x0002_0000), UnsupportedFormat, "header of version 2.0"),
    (replace(HONEST, kind=6), UnsupportedFormat, "type 6"),
    (replace(HONEST, size=16_385), MalformedArchive, "no whole sectors"),
    (replace(HONEST, size=1 << 63), MalformedArchive, "cannot map 9223372036854775808"),
    (replace(HONEST, size=(2**32 - 1) * 4096, entries=2**32 - 1), MalformedArchive, "a BAT of 4294967295 blocks"),
    (replace(HONEST, table_at=1 << 63), MalformedArchive, "a BAT of 4 blocks at 9223372036854775808"),
    (replace(HONEST, header_at=1 << 62), MalformedArchive, "its header lies at"),
    (replace(HONEST, header_at=1024), MalformedArchive, "damaged"),
    (replace(HONEST, block_bytes=3 * 512), MalformedArchive, "powers of two"),
    (replace(HONEST, entries=3), MalformedArchive, "a BAT of 3 blocks"),
]


@pytest.mark.parametrize(("image", "error", "words"), WRONG, ids=[words for _, _, words in WRONG])
def test_a_wrong_field_is_refused_by_name(tmp_path: Path, image: Vhd, error: type[SynvirtError], words: str) -> None:
    (tmp_path / "disk.vhd").write_bytes(image.file(0))
    with pytest.raises(error, match=words):
        open_vhd(tmp_path / "disk.vhd")


@pytest.mark.parametrize(
    ("block", "sector", "words"),
    [
        (0, 4, "block 0 and block 2"),
        (0, 3, "block 0 and the BAT"),
        (0, 1, "block 0 and the header"),
        (0, 0, "block 0 and the copy of the footer"),
        (1, 99, "ends at"),
    ],
)
def test_blocks_over_one_another_or_over_tables_are_refused(tmp_path: Path, block: int, sector: int, words: str) -> None:
    other = Block(0, 0xFF) if block == 1 or sector == 4 else None
    file = bytearray(replace(HONEST, blocks=(None, None, other, None)).file(0) + bytes(8192) + HONEST.footer())
    struct.pack_into(">I", file, 1536 + block * 4, sector)
    (tmp_path / "disk.vhd").write_bytes(file)
    with pytest.raises(MalformedArchive, match=words):
        open_vhd(tmp_path / "disk.vhd")


@pytest.mark.parametrize("at", [70, 200, 600])
def test_a_wrong_checksum_is_refused(tmp_path: Path, at: int) -> None:
    file = bytearray(HONEST.file(0))
    for place in (at, len(file) - 512 + at) if at < 512 else (at,):
        file[place] ^= 1
    (tmp_path / "disk.vhd").write_bytes(file)
    with pytest.raises(MalformedArchive, match=r"checksum|damaged"):
        open_vhd(tmp_path / "disk.vhd")


@pytest.mark.parametrize("kind", [FIXED, DYNAMIC])
def test_a_file_cut_off_anywhere_is_refused(tmp_path: Path, kind: int) -> None:
    file = replace(HONEST, kind=kind).file(0)
    for length in [0, 100, 511, 512, 513, 1000, 1536, 2047, 2048, 5000, 9000]:
        (tmp_path / "disk.vhd").write_bytes(file[:length])
        with pytest.raises(MalformedArchive):
            open_vhd(tmp_path / "disk.vhd")


def write_chain(folder: Path, *locators: tuple[bytes, bytes], name: str = "", identity: UUID = PARENT) -> bytes:
    """child.vhd in one/, base.vhd in two/; returns the bytes that the child must read as."""
    (folder / "one").mkdir(exist_ok=True)
    (folder / "two").mkdir(exist_ok=True)
    base = replace(HONEST, identity=identity)
    (folder / "two" / "base.vhd").write_bytes(base.file(1))
    child = replace(CHILD, locators=locators, parent_name=name)
    (folder / "one" / "child.vhd").write_bytes(child.file(0))
    return child.disk(child.file(0), base.disk(base.file(1)))


def wide(text: str) -> bytes:
    return text.encode("utf-16-le")


@pytest.mark.parametrize(
    "locators",
    [
        ((b"W2ru", wide("..\\two\\base.vhd")),),
        ((b"W2ku", wide("C:\\VMs\\gone.vhd")), (b"W2ru", wide("..\\two\\base.vhd"))),
        ((b"MacX", b"file://../two/base.vhd"),),
        ((b"MacX", b"file://./../two/b%61se.vhd"),),
        ((b"W2ru", wide(".\\gone.vhd")), (b"MacX", b"../two/base.vhd")),
    ],
    ids=["relative", "relative before absolute", "Xen's URL", "an escaped URL", "the second where the first is not there"],
)
def test_the_parent_is_found_by(tmp_path: Path, locators: tuple[tuple[bytes, bytes], ...]) -> None:
    expected = write_chain(tmp_path, *locators)
    reader = open_vhd(tmp_path / "one" / "child.vhd", tmp_path)
    assert bytes_of(reader, 0, reader.size) == expected
    reader.close()


@pytest.mark.parametrize(
    ("locators", "name"),
    [(((b"W2ku", wide("D:\\old\\base.vhd")),), ""), (((b"MacX", b"file:///old/base.vhd"),), ""), ((), "base.vhd")],
    ids=["a drive's path", "an absolute URL", "its bare name"],
)
def test_the_parent_beside_the_image_is_found_by(tmp_path: Path, locators: tuple[tuple[bytes, bytes], ...], name: str) -> None:
    expected = write_chain(tmp_path, *locators, name=name)
    (tmp_path / "two" / "base.vhd").rename(tmp_path / "one" / "base.vhd")
    reader = open_vhd(tmp_path / "one" / "child.vhd", tmp_path)
    assert bytes_of(reader, 0, reader.size) == expected
    reader.close()


@pytest.mark.parametrize(
    ("locator", "error"),
    [
        ((b"W2ru", wide("..\\..\\base.vhd")), HostPathRejected),
        ((b"W2ru", wide("\\etc\\passwd")), HostPathRejected),
        ((b"W2ru", wide("json:{}")), HostPathRejected),
        ((b"W2ru", wide("nbd://host/x")), HostPathRejected),
        ((b"W2ru", wide("a\0b")), HostPathRejected),
        ((b"W2ru", b"\0\xd8"), MalformedArchive),
        ((b"W2ku", wide("C:\\VMs\\base.vhd")), HostPathRejected),
        ((b"W2ku", wide("\\\\server\\share\\base.vhd")), HostPathRejected),
        ((b"MacX", b"file:///etc/passwd"), HostPathRejected),
        ((b"MacX", b"http://[/"), HostPathRejected),
        ((b"W2ru", wide(".\\link.vhd")), HostPathRejected),
        ((b"W2ru", wide(".\\gone.vhd")), MalformedArchive),
        ((b"W2ru", wide(".\\child.vhd")), MalformedArchive),
        ((b"Mac ", b"alias"), MalformedArchive),
    ],
    ids=str,
)
def test_a_parent_that_is_not_to_be_had_is_refused(
    tmp_path: Path, locator: tuple[bytes, bytes], error: type[SynvirtError]
) -> None:
    write_chain(tmp_path, locator)
    (tmp_path / "one" / "link.vhd").symlink_to("/etc/passwd")
    with pytest.raises(error):
        open_vhd(tmp_path / "one" / "child.vhd", tmp_path)


def test_without_a_root_no_parent_is_opened(tmp_path: Path) -> None:
    write_chain(tmp_path, (b"W2ru", wide("..\\two\\base.vhd")))
    with pytest.raises(HostPathRejected):
        VhdReader(RawReader(str(tmp_path / "one" / "child.vhd")), root=None, name="one/child.vhd")


def test_another_image_of_the_parents_name_is_refused(tmp_path: Path) -> None:
    write_chain(tmp_path, (b"W2ru", wide("..\\two\\base.vhd")), identity=UUID(int=9))
    with pytest.raises(MalformedArchive, match="00000009"):
        open_vhd(tmp_path / "one" / "child.vhd", tmp_path)


def test_a_chain_is_read_through_and_a_longer_one_refused(tmp_path: Path) -> None:
    """Each image writes one sector of its own; the disk has them all."""
    count, disk = 66, b""
    for number in range(count):
        image = Vhd(
            count * 512,
            kind=DIFFERENCING if number else DYNAMIC,
            block_bytes=512,
            blocks=tuple(Block(0, 1) if index == number else None for index in range(count)),
            identity=UUID(int=number + 1),
            parent=UUID(int=number),
            locators=((b"W2ru", wide(f"{number - 1}.vhd")),),
        )
        (tmp_path / f"{number}.vhd").write_bytes(image.file(number))
        disk = image.disk(image.file(number), disk)
        if number == 64:
            reader = open_vhd(tmp_path / "64.vhd")
            assert bytes_of(reader, 0, reader.size) == disk
            assert sum(extent.length for extent in reader.extents() if not extent.zero) == 65 * 512
            reader.close()
    with pytest.raises(MalformedArchive, match="more than 64 parents"):
        open_vhd(tmp_path / "65.vhd")


def test_a_locator_outside_the_file_is_refused(tmp_path: Path) -> None:
    write_chain(tmp_path, (b"W2ru", wide("base.vhd")))
    file = bytearray((tmp_path / "one" / "child.vhd").read_bytes())
    for length, at in ((1 << 31, 0), (100, 1 << 62), (100, len(file) - 50)):
        struct.pack_into(">IIQ", file, 512 + 576 + 8, length, 0, at)
        file[512:1536] = checksummed(bytes(file[512:1536]), 36)
        (tmp_path / "one" / "child.vhd").write_bytes(file)
        with pytest.raises(MalformedArchive, match="a parent locator of"):
            open_vhd(tmp_path / "one" / "child.vhd")
