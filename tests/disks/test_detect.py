"""What a file is, by its magic; and that the tables know every format there is a spec for."""

from contextlib import closing
from pathlib import Path
from typing import get_args

import pytest

from synvirt.blocks import bytes_of
from synvirt.disks import IMAGES, detect, open_reader
from synvirt.disks.formats import MAGICS
from synvirt.disks.nbd import fallback
from synvirt.disks.specs import NESTING_MAX, ImageFormat, ImageSpec, RawSpec, ReaderSpec
from synvirt.errors import MalformedArchive, UnsupportedFormat
from synvirt.offline import files, registry
from tests.disks.block_images import qemu
from tests.disks.vhd.vhd_images import DYNAMIC, FIXED, Vhd
from tests.running.processes import open_files

FORMATS = get_args(ImageFormat)


def test_every_format_has_a_magic_and_a_reader() -> None:
    assert {name for name, *_ in MAGICS} == set(FORMATS)
    assert set(IMAGES) == set(FORMATS)


@pytest.mark.parametrize(("name", "at", "magic"), MAGICS)
def test_a_magic_is_found_in_a_file_and_in_a_range_of_one(name: ImageFormat, at: int, magic: bytes, tmp_path: Path) -> None:
    content = bytearray(4096)
    start = at if at >= 0 else len(content) + at
    content[start : start + len(magic)] = magic
    path = tmp_path / "image"
    path.write_bytes(content)
    raw = RawSpec(path=str(path))
    assert detect(path) == ImageSpec(format=name, over=raw, root=str(tmp_path), name="image")
    path.write_bytes(b"x" * 777 + content + b"y" * 777)
    member = RawSpec(path=str(path), offset=777, length=4096)
    found = detect(path, offset=777, length=4096, name="disk1")
    assert found == ImageSpec(format=name, over=member, root=str(tmp_path), name="disk1")
    assert detect(path) == raw


@pytest.mark.parametrize(
    "first", ["# Disk DescriptorFile", "# Disk Descriptor File", "#Disk DescriptorFile", "#Disk Descriptor File"]
)
@pytest.mark.parametrize("line_end", ["\n", "\r\n"])
def test_a_vmdks_descriptor_in_the_words_of_each_program_that_writes_one(first: str, line_end: str, tmp_path: Path) -> None:
    """The second is dd2vmdk's, raw2vmdk's and Live View's; VirtualBox reads all four, and QEMU too."""
    lines = [first, "version=1", "CID=fffffffe", "parentCID=ffffffff", 'createType="monolithicFlat"', 'RW 4 FLAT "disk.dd" 0']
    (tmp_path / "disk.vmdk").write_bytes(line_end.join(lines).encode())
    (tmp_path / "disk.dd").write_bytes(content := b"\7" * 2048)
    spec = detect(tmp_path / "disk.vmdk")
    assert isinstance(spec, ImageSpec)
    with closing(open_reader(spec)) as reader:
        assert bytes_of(reader, 0, reader.size) == content
    assert registry.detect(tmp_path / "disk.vmdk", tmp_path).kind == "vmdk"


@pytest.mark.parametrize("content", [b"", b"Q", b"QFI", b"conectix", b"x" * 600])
def test_what_has_no_magic_is_raw_however_short(content: bytes, tmp_path: Path) -> None:
    path = tmp_path / "image"
    path.write_bytes(content)
    assert detect(path).format == ("vhd" if content == b"conectix" else "raw")


@pytest.mark.parametrize(
    ("at", "magic"), [(at, magic) for _, at, magic in (*MAGICS, *fallback.MAGICS) if at >= 0 and magic != b"conectix"]
)
def test_the_first_bytes_of_a_fixed_vhd_are_its_guests(at: int, magic: bytes, tmp_path: Path) -> None:
    """Only the footer at the end is not: a guest may write an image of any format onto its disk."""
    file = bytearray(Vhd(40_960, kind=FIXED).file(0))
    file[at : at + len(magic)] = magic
    path = tmp_path / "disk.vhd"
    path.write_bytes(file)
    found = files.disk_spec(files.whole_file(path, tmp_path), tmp_path, declared="vhd", inner_root=tmp_path)
    for spec in (found, detect(path)):
        assert isinstance(spec, ImageSpec)
        assert spec.format == "vhd"
        with closing(open_reader(spec)) as reader:
            assert bytes_of(reader, 0, reader.size) == file[:40_960]


def test_the_guest_of_a_fixed_vhd_chooses_no_file_of_the_import_root(tmp_path: Path) -> None:
    (tmp_path / "anothers.raw").write_bytes(b"another's" * 4096)
    qemu("qemu-img", "create", "-q", "-f", "qcow2", "-b", "anothers.raw", "-F", "raw", "overlay", cwd=tmp_path)
    overlay = (tmp_path / "overlay").read_bytes()
    image = Vhd(1 << 20, kind=FIXED)
    (tmp_path / "disk.vhd").write_bytes(overlay + image.file(0)[len(overlay) :])
    with closing(open_reader(detect(tmp_path / "disk.vhd"))) as reader:
        assert reader.size == image.size
        assert bytes_of(reader, 0, len(overlay)) == overlay


@pytest.mark.parametrize("footer", [Vhd(40_960, kind=DYNAMIC), Vhd(1 << 30, kind=FIXED), None])
def test_a_guest_that_writes_a_footer_where_its_image_ends_changes_nothing(footer: Vhd | None, tmp_path: Path) -> None:
    """The last cluster of a qcow2 image is the guest's. Neither a footer of blocks nor one of a larger disk, nor a damaged one,
    is that of a fixed VHD."""
    last = (b"conectix" if footer is None else footer.footer()).ljust(512, b"\0")
    (tmp_path / "disk.qcow2").write_bytes(b"QFI\xfb" + bytes(40_956) + last)
    found = detect(tmp_path / "disk.qcow2")
    assert isinstance(found, ImageSpec)
    assert found.format == "qcow2"


def test_images_lie_in_one_another_only_so_deep(tmp_path: Path) -> None:
    path = tmp_path / "image"
    path.write_bytes(bytes(4096))
    spec: ReaderSpec = RawSpec(path=str(path))
    for _ in range(NESTING_MAX):
        spec = ImageSpec(format="qcow2", over=spec)
    with pytest.raises(MalformedArchive, match=f"more than {NESTING_MAX} deep"):
        open_reader(spec)


def test_a_reader_that_refuses_its_image_leaves_no_descriptor(tmp_path: Path) -> None:
    path = tmp_path / "image"
    path.write_bytes(b"no image" * 1000)
    for name in FORMATS:
        with pytest.raises((MalformedArchive, UnsupportedFormat)):
            open_reader(ImageSpec(format=name, over=RawSpec(path=str(path)), name="image"))
    assert open_files(tmp_path) == []
