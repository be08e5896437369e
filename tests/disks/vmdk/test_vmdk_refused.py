"""VMDK files that are damaged, or lie, or are cut off: refused with the reason, in little memory and time."""

import struct
import tracemalloc
import zlib
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from synvirt.errors import DiskReadFailed, MalformedArchive, SynvirtError, UnsupportedFormat
from synvirt.sizes import KIB, MIB, TIB
from tests.disks.block_images import assert_same_disk, bytes_of, qemu
from tests.disks.vmdk.vmdk_images import (
    AT_END,
    COWD,
    HOSTED,
    SE_SPARSE,
    SECTOR,
    STREAM,
    TEXT,
    Cowd,
    Hosted,
    Image,
    SeSparse,
    Stream,
    marker,
    open_vmdk,
    write_image,
)


def read_through(image: Path) -> None:
    reader = open_vmdk(image)
    try:
        for extent in reader.extents():
            for at in range(extent.start, extent.end, MIB):
                reader.read_into(at, memoryview(bytearray(min(MIB, extent.end - at))))
    finally:
        reader.close()


# ── wrong fields ─────────────────────────────────────────────────────────────────────────────────────────────────────


def poked(content: bytes, at: int, form: str, value: int) -> bytes:
    changed = bytearray(content)
    struct.pack_into(form, changed, at, value)
    return bytes(changed)


# Fields of the hosted header, by offset: Virtual Disk Format 1.1, «Hosted Sparse Extent Header».
WRONG_FIELDS: list[tuple[int, str, int, type[SynvirtError], str]] = [
    (4, "<I", 4, UnsupportedFormat, "version 4"),
    (4, "<I", 0, UnsupportedFormat, "version 0"),
    (12, "<Q", 1 << 54, MalformedArchive, "a disk of 9223372036854775808 bytes"),
    (12, "<Q", (64 << 40) // 512, MalformedArchive, "33554432 grain tables"),
    (12, "<Q", 1 << 30, MalformedArchive, "its grain directory lies at"),
    (20, "<Q", 0, MalformedArchive, "grains of 0 bytes"),
    (20, "<Q", 1 << 63, MalformedArchive, "grains of"),
    (20, "<Q", 1 << 16, MalformedArchive, "grains of 33554432 bytes"),
    (28, "<Q", 1 << 50, MalformedArchive, "its descriptor lies at"),
    (36, "<Q", 1 << 50, MalformedArchive, "a descriptor of"),
    (44, "<I", 0, MalformedArchive, "grain tables of 0 entries"),
    (44, "<I", 513, MalformedArchive, "grain tables of 513 entries"),
    (64, "<Q", 1 << 50, MalformedArchive, "its metadata lies at"),
    (73, "<I", 0x0D0A0D0A, MalformedArchive, "transferred as text"),
    (77, "<H", 2, UnsupportedFormat, "method 2"),
    (77, "<H", 1, UnsupportedFormat, "without markers"),
]


@pytest.mark.parametrize(("at", "form", "value", "error", "words"), WRONG_FIELDS)
def test_a_wrong_header_is_refused_by_name(
    tmp_path: Path, at: int, form: str, value: int, error: type[SynvirtError], words: str
) -> None:
    (tmp_path / "disk.vmdk").write_bytes(poked(replace(HOSTED, text=TEXT).file(), at, form, value))
    with pytest.raises(error, match=words):
        open_vmdk(tmp_path / "disk.vmdk")


def test_the_redundant_directory_serves_when_the_first_lies_outside(tmp_path: Path) -> None:
    write_image(tmp_path, "disk", replace(HOSTED, damaged_directory=True))
    (tmp_path / "raw").write_bytes(HOSTED.disk())
    reader = open_vmdk(tmp_path / "disk.vmdk")
    assert_same_disk(reader, tmp_path / "raw")
    reader.close()


def test_without_either_directory_it_is_refused(tmp_path: Path) -> None:
    file = replace(HOSTED, text=TEXT, damaged_directory=True).file()
    (tmp_path / "disk.vmdk").write_bytes(poked(file, 48, "<Q", 1 << 40))
    with pytest.raises(MalformedArchive, match="its grain directory lies at"):
        open_vmdk(tmp_path / "disk.vmdk")
    # The other one is not meant where the header's flags do not tell of it.
    (flags,) = struct.unpack_from("<I", file, 8)
    (tmp_path / "disk.vmdk").write_bytes(poked(file, 8, "<I", flags & ~2))
    with pytest.raises(MalformedArchive, match="its grain directory lies at"):
        open_vmdk(tmp_path / "disk.vmdk")
    (tmp_path / "disk.vmdk").write_bytes(poked(file, 56, "<Q", AT_END))
    with pytest.raises(MalformedArchive, match="does not say where its grain directory is"):
        open_vmdk(tmp_path / "disk.vmdk")


def _table_of(file: bytes) -> int:
    """Where the first table lies."""
    (directory,) = struct.unpack_from("<Q", file, 56)
    (table,) = struct.unpack_from("<I", file, directory * SECTOR)
    return int(table) * SECTOR


@pytest.mark.parametrize(
    ("entry", "value", "words"),
    [
        (9, 1 << 31, "grain 9 lies at"),
        (9, 0xFFFF_FFFF, "grain 9 lies at"),
        (9, "of grain 4", r"grains 4 and 9 both lie at|grains 9 and 4 both lie at"),
        (9, "of grain 4, a sector later", "both lie at"),
    ],
)
def test_a_wrong_entry_of_a_table_is_refused(tmp_path: Path, entry: int, value: int | str, words: str) -> None:
    file = replace(HOSTED, text=TEXT).file()
    table = _table_of(file)
    (of_grain_4,) = struct.unpack_from("<I", file, table + 4 * 4)
    place = value if isinstance(value, int) else of_grain_4 + ("later" in value)
    (tmp_path / "disk.vmdk").write_bytes(poked(file, table + entry * 4, "<I", place))
    reader = open_vmdk(tmp_path / "disk.vmdk")
    with pytest.raises(MalformedArchive, match=words):
        list(reader.extents())
    with pytest.raises(MalformedArchive, match=words):
        reader.read_into(0, memoryview(bytearray(1)))
    reader.close()


def test_a_table_outside_the_file_is_refused(tmp_path: Path) -> None:
    file = replace(HOSTED, text=TEXT).file()
    (directory,) = struct.unpack_from("<Q", file, 56)
    (tmp_path / "disk.vmdk").write_bytes(poked(file, directory * SECTOR, "<I", 1 << 20))
    reader = open_vmdk(tmp_path / "disk.vmdk")
    with pytest.raises(MalformedArchive, match="its grain table 0 lies at"):
        list(reader.extents())
    reader.close()


@pytest.mark.parametrize(("every", "words"), [(1, "both lie at"), (64, "more grains than a file")])
def test_one_table_for_all_of_a_disk_is_no_way_to_grow_it(tmp_path: Path, every: int, words: str) -> None:
    """2 MiB of file that would be terabytes of data: the directory names the same table again and again."""
    small = Hosted(capacity=512 * 8, grain=8, grains={at: at for at in range(512)}, text=TEXT)
    file = small.file()
    entries = 65536
    table = _table_of(file) // SECTOR
    directory = struct.pack(f"<{entries}I", *(table if at % every == 0 else 0 for at in range(entries)))
    header = poked(poked(file[:SECTOR], 56, "<Q", len(file) // SECTOR), 12, "<Q", small.capacity * entries)
    (tmp_path / "disk.vmdk").write_bytes(header + file[SECTOR:] + directory)
    reader = open_vmdk(tmp_path / "disk.vmdk")
    with pytest.raises(MalformedArchive, match=words):
        list(reader.extents())
    reader.close()


@pytest.mark.parametrize(
    ("image", "at", "form", "value", "error", "words"),
    [
        (COWD, 4, "<I", 2, UnsupportedFormat, "version 2"),
        (COWD, 16, "<I", 0, MalformedArchive, "grains of 0 bytes"),
        (COWD, 20, "<I", 1 << 31, MalformedArchive, "its grain directory lies at"),
        (COWD, 24, "<I", 0, MalformedArchive, "a grain directory of 0 entries"),
        (COWD, 12, "<I", 9, MalformedArchive, "holds 4608 bytes"),
        (SE_SPARSE, 8, "<Q", 1, UnsupportedFormat, "version 0x1"),
        (SE_SPARSE, 24, "<Q", 16, UnsupportedFormat, "grains of 16"),
        (SE_SPARSE, 40, "<Q", 1, UnsupportedFormat, "flags 0x1"),
        (SE_SPARSE, 80, "<Q", 1 << 60, MalformedArchive, "volatile header lies at"),
        (SE_SPARSE, 80, "<Q", 0, MalformedArchive, "no volatile header"),
        (SE_SPARSE, 512 + 24, "<Q", 1, UnsupportedFormat, "journal"),
        (SE_SPARSE, 128, "<Q", 1 << 60, MalformedArchive, "grain directory lies at"),
        (SE_SPARSE, 136, "<Q", 0, MalformedArchive, "a grain directory of 0 bytes"),
        (SE_SPARSE, 144, "<Q", 1 << 60, MalformedArchive, "its grain tables lies at"),
        (SE_SPARSE, 192, "<Q", 1 << 60, MalformedArchive, "its grains lies at"),
        (SE_SPARSE, 2048, "<Q", 0x2000_0000 << 32, MalformedArchive, "0x2000000000000000 in its grain directory"),
        (SE_SPARSE, 2560, "<Q", 4 << 60, MalformedArchive, "0x4000000000000000 in a grain table"),
        (SE_SPARSE, 2560, "<Q", 1, MalformedArchive, "0x1 in a grain table"),
        (SE_SPARSE, 2560, "<Q", (3 << 60) | (1 << 47), MalformedArchive, "in a grain table"),
        (SE_SPARSE, 2560, "<Q", (3 << 60) | (1 << 20), MalformedArchive, "grain 0 lies at"),
    ],
)
def test_a_wrong_field_of_an_esx_extent_is_refused(
    tmp_path: Path, image: Image, at: int, form: str, value: int, error: type[SynvirtError], words: str
) -> None:
    write_image(tmp_path, "disk", image)
    extent = tmp_path / "disk-delta.vmdk"
    extent.write_bytes(poked(extent.read_bytes(), at, form, value))
    with pytest.raises(error, match=words):
        read_through(tmp_path / "disk.vmdk")


@pytest.mark.parametrize(
    "image", [HOSTED, STREAM, replace(STREAM, directory=False), COWD, SE_SPARSE], ids=lambda image: type(image).__name__
)
def test_a_file_cut_off_anywhere_is_refused(tmp_path: Path, image: Image) -> None:
    write_image(tmp_path, "disk", image)
    extent = tmp_path / ("disk-delta.vmdk" if isinstance(image, Cowd | SeSparse) else "disk.vmdk")
    whole = extent.read_bytes()
    for length in {0, 1, 3, 4, 511, 512, 513, 1024, *(len(whole) * part // 20 for part in range(20)), len(whole) - SECTOR}:
        extent.write_bytes(whole[:length])
        with pytest.raises(SynvirtError):
            read_through(tmp_path / "disk.vmdk")


# ── streams ──────────────────────────────────────────────────────────────────────────────────────────────────────────


def stream_with(folder: Path, number: int, record: Callable[[bytes], bytes]) -> Path:
    """STREAM, in which the record of a grain is another of the same length."""
    write_image(folder, "disk", STREAM)
    image = folder / "disk.vmdk"
    old = STREAM.record(number, int(STREAM.grains[number]))
    content = image.read_bytes()
    assert content.count(old) == 1
    new = record(old)
    assert len(new) == len(old)
    image.write_bytes(content.replace(old, new))
    return image


@pytest.mark.parametrize(
    ("record", "words"),
    [
        (lambda old: struct.pack("<Q", 99) + old[8:], "marker is of sector 99"),
        (lambda old: old[:8] + struct.pack("<I", 0) + old[12:], "marker announces 0 bytes"),
        (lambda old: old[:8] + struct.pack("<I", 0xFFFF_FFFF) + old[12:], "marker announces 4294967295 bytes"),
        (lambda old: old[:8] + struct.pack("<I", 100) + old[12:], "is damaged: "),
        (lambda old: old[:12] + bytes(len(old) - 12), "is damaged: "),
        (lambda old: old[:200] + bytes([old[200] ^ 1]) + old[201:], "is damaged: "),
        (lambda old: old[:-1] + bytes([old[-1] ^ 1]), "is damaged: "),
        (lambda old: old[:12] + zlib.compress(b"short").ljust(len(old) - 12, b"\0"), "it holds 5 bytes, not 8192"),
    ],
)
def test_a_damaged_grain_is_named_by_its_offset(tmp_path: Path, record: Callable[[bytes], bytes], words: str) -> None:
    image = stream_with(tmp_path, 1, record)
    reader = open_vmdk(image)
    for offset, length in ((0, reader.size), (8192, 8192), (9000, 5)):
        with pytest.raises(DiskReadFailed, match=rf"disk.vmdk cannot be read at .* its grain for offset 8192, .*{words}"):
            reader.read_into(offset, memoryview(bytearray(length)))
    assert bytes_of(reader, 0, 8192) == STREAM.disk()[:8192]
    reader.close()


def test_a_deflate_bomb_yields_a_grain_and_no_more(tmp_path: Path) -> None:
    """16 MiB of zeros in 16 KiB: the grain that it is in has 8 KiB."""

    image = Stream(capacity=48, grain=16, grains={0: 2, 1: 4, 2: 6}, level=0)
    packed = zlib.compress(bytes(8 * MIB), 9)
    old = image.record(1, 4)
    assert len(packed) + 12 <= len(old)
    write_image(tmp_path, "disk", image)
    content = (tmp_path / "disk.vmdk").read_bytes()
    new = (struct.pack("<QI", 16, len(packed)) + packed).ljust(len(old), b"\0")
    (tmp_path / "disk.vmdk").write_bytes(content.replace(old, new))
    reader = open_vmdk(tmp_path / "disk.vmdk")
    tracemalloc.start()
    try:
        assert bytes_of(reader, 0, 3 * 8192) == image.disk()[:8192] + bytes(8192) + image.disk()[16384:]
        assert tracemalloc.get_traced_memory()[1] < 6 * MIB
    finally:
        tracemalloc.stop()
    reader.close()


@pytest.mark.parametrize(
    ("image", "words"),
    [
        (replace(STREAM, ended=False), "its end-of-stream marker lies at"),
        (replace(STREAM, directory=False, ended=False), "its end-of-stream marker lies at"),
    ],
)
def test_a_stream_that_does_not_end_was_cut_off(tmp_path: Path, image: Stream, words: str) -> None:
    write_image(tmp_path, "disk", image)
    with pytest.raises(MalformedArchive, match=words):
        open_vmdk(tmp_path / "disk.vmdk")


@pytest.mark.parametrize(
    ("piece", "words"),
    [
        (marker(0, 7), "a marker of unknown type 7"),
        (marker(1 << 60, 1), "its end-of-stream marker lies at"),
        (struct.pack("<QI500x", 17, 1), "sector 17, which begins no grain"),
        (struct.pack("<QI500x", 1 << 40, 1), "begins no grain"),
        (struct.pack("<QI500x", 0, 0xFFFF_FFFF), "its end-of-stream marker lies at"),
        (struct.pack("<QI500x", 32, 1) * 2, "grain 2 is in the stream twice"),
    ],
)
def test_wrong_markers_of_a_stream_without_tables_are_refused(tmp_path: Path, piece: bytes, words: str) -> None:
    write_image(tmp_path, "disk", replace(STREAM, grains={}, directory=False, ended=False))
    with (tmp_path / "disk.vmdk").open("ab") as file:
        file.write(piece + marker(0, 0))
    with pytest.raises(MalformedArchive, match=words):
        open_vmdk(tmp_path / "disk.vmdk")


# ── limits ───────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_a_small_file_that_claims_the_moon_is_refused_at_once(tmp_path: Path) -> None:
    for capacity in (1 << 63, 1 << 54, (62 << 40) // SECTOR, (1 << 40) // SECTOR):
        header = poked(replace(HOSTED, text=TEXT).file()[:KIB], 12, "<Q", capacity)
        (tmp_path / "disk.vmdk").write_bytes(header)
        tracemalloc.start()
        with pytest.raises(MalformedArchive):
            open_vmdk(tmp_path / "disk.vmdk")
        assert tracemalloc.get_traced_memory()[1] < 2 * MIB
        tracemalloc.stop()


def test_a_vast_and_empty_disk_is_one_extent_in_little_memory(tmp_path: Path) -> None:
    qemu("qemu-img", "create", "-q", "-f", "vmdk", "disk.vmdk", "1T", cwd=tmp_path)
    reader = open_vmdk(tmp_path / "disk.vmdk")
    tracemalloc.start()
    (extent,) = reader.extents()
    assert tracemalloc.get_traced_memory()[1] < 40 * MIB
    tracemalloc.stop()
    assert extent.zero
    assert extent.length == reader.size == TIB
    reader.close()
