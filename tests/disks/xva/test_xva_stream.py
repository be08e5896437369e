"""Disks in packed XVA archives: what gzip, zstd and tar write, read in one pass; what is damaged or hostile, refused."""

import functools
import gc
import gzip
import io
import os
import random
import struct
import subprocess
import tarfile
import zlib
from contextlib import closing
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from synvirt.blocks import DiskReader
from synvirt.copying import Copied, copy
from synvirt.disks import open_reader
from synvirt.disks.layers import layer_of
from synvirt.disks.packed.unpacking import Unpacked, packing_of
from synvirt.disks.raw.files import RawReader, open_file_writer
from synvirt.disks.specs import Packing, RawSpec, XvaSpec
from synvirt.disks.xva.stream import XvaStream
from synvirt.errors import MalformedArchive, SynvirtError
from tests.contracts.readers import ReaderCase, ReaderContract, check_extents, read, read_all
from tests.contracts.spec_json import READER_SPEC
from tests.counted import bytes_read
from tests.disks.xva import xva_archives
from tests.disks.xva.test_xva import disk_of
from tests.disks.xva.xva_archives import MIB

PACKINGS: tuple[Packing, ...] = ("gzip", "zstd")
both = pytest.mark.parametrize("packing", PACKINGS)


def opened(path: Path, size: int, folder: str = "Ref:4") -> DiskReader:
    packing = packing_of(path.read_bytes()[:4])
    assert packing is not None
    spec = XvaSpec(over=RawSpec(path=str(path)), folder=folder, size_bytes=size, name="a.xva", packing=packing)
    reader = open_reader(READER_SPEC.validate_json(READER_SPEC.dump_json(spec)))
    assert isinstance(reader, XvaStream)
    return reader


def refused(path: Path, size: int, says: str, folder: str = "Ref:4") -> None:
    reader = opened(path, size, folder)
    for _ in range(2):  # the second time, too
        with pytest.raises(MalformedArchive, match=says):
            read_all(reader)
    reader.close()


class TestPackedXva(ReaderContract):
    @pytest.fixture(params=["gzip xxhash", "zstd checksum", "zstd none"])
    def case(self, request: pytest.FixtureRequest, tmp_path: Path) -> ReaderCase:
        packing, digest = request.param.split()
        disk = disk_of("A--B-CC-", 100_000)
        others = {"Ref:3": disk_of("xx"), "Ref:4": disk, "Ref:5": disk_of("y")}
        path = xva_archives.archive(tmp_path / "a.xva", b"<x/>", others, digest=digest, keepalives={3, 5})
        return ReaderCase(open=lambda: opened(xva_archives.packed(path, packing), len(disk)), content=disk)


@pytest.mark.timeout(300)
@settings(max_examples=60, deadline=None)
@given(
    blocks=st.lists(st.text("AB--", max_size=6), min_size=1, max_size=2),
    tail=st.sampled_from([0, 1, 512, 300_001]),
    noise=st.binary(max_size=40),
    keepalives=st.sets(st.integers(0, 6)),
    digest=st.sampled_from(["xxhash", "checksum", "none"]),
    packing=st.sampled_from([("gzip", "-1"), ("gzip", "-9"), ("zstd", "-3"), ("zstd", "--check"), ("zstd", "--long=24")]),
    since=st.integers(0, 7 * MIB),
    request_bytes=st.sampled_from([MIB, 64 << 10, 100_000, 3 * MIB + 5]),
)
def test_any_disk_reads_as_it_was(
    blocks: list[str],
    tail: int,
    noise: bytes,
    keepalives: set[int],
    digest: str,
    packing: tuple[str, str],
    since: int,
    request_bytes: int,
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    """One or two disks, from any place on, in requests of any size."""
    disks = {f"Ref:{number}": noise + disk_of(text, tail) for number, text in enumerate(blocks)}
    folder = tmp_path_factory.mktemp("xva")
    plain = xva_archives.archive(folder / "a.xva", b"<x/>", disks, digest=digest, keepalives=keepalives)
    path = xva_archives.packed(plain, *packing)
    for key, disk in disks.items():
        reader = opened(path, len(disk), key)
        check_extents(list(reader.extents()), disk)
        begin = min(since, len(disk))
        parts = [read(reader, at, min(request_bytes, len(disk) - at)) for at in range(begin, len(disk), request_bytes)]
        assert b"".join(parts) == disk[begin:]
        assert read_all(reader) == disk  # back at the beginning
        reader.close()
    plain.unlink()
    path.unlink()


@both
@pytest.mark.parametrize("bandwidth", [None, 1 << 30, 8 * MIB])
def test_a_copy_and_one_resumed_from_a_watermark_are_the_disk(packing: Packing, bandwidth: int | None, tmp_path: Path) -> None:
    disk = random.Random(1).randbytes(5 * MIB) + bytes(9 * MIB) + b"end" * 1000
    plain = xva_archives.archive(tmp_path / "a.xva", b"<x/>", {"Ref:3": disk_of("ab"), "Ref:4": disk})
    path = xva_archives.packed(plain, packing)
    for since in (0, 3 * MIB + 64 * 1024):
        target = tmp_path / f"from-{since}"
        target.write_bytes(disk[:since])
        os.truncate(target, len(disk))
        reader, writer = opened(path, len(disk)), open_file_writer(str(target), len(disk))
        marks: list[Copied] = []
        copied = copy(reader, writer, since=since, bandwidth_bps=bandwidth, flush_every_s=0.01, on_watermark=marks.append)
        assert target.read_bytes() == disk
        assert (copied.watermark, copied.bytes_done, copied.bytes_total) == (len(disk), len(disk), len(disk))
        assert all(since <= mark.watermark for mark in marks)
        reader.close()
        writer.close()


@both
def test_each_byte_of_the_file_is_read_once(packing: Packing, tmp_path: Path) -> None:
    disk = random.Random(2).randbytes(12 * MIB)
    path = xva_archives.packed(xva_archives.archive(tmp_path / "a.xva", b"<x/>", {"Ref:4": disk}), packing)
    reader = opened(path, len(disk))
    with bytes_read() as count:
        assert read_all(reader) == disk
    assert count.bytes < path.stat().st_size + 4096  # what counts is counted, too
    reader.close()


def test_what_gnu_tar_packs_is_read(tmp_path: Path) -> None:
    """Its own headers and padding; a piped `tar | gzip`, `tar | zstd`, several of them in a row, and pax."""
    disk = disk_of("AB", 77)
    folder = tmp_path / "folder"
    (folder / "Ref:4").mkdir(parents=True)
    (folder / "ova.xml").write_bytes(b"<x/>")
    for name, data in xva_archives.pieces("Ref:4", disk):
        (folder / name).write_bytes(data)
    names = ["ova.xml", *(name for name, _ in xva_archives.pieces("Ref:4", disk))]
    for number, option in enumerate(["--format=gnu", "--format=pax", "--blocking-factor=1024"]):
        path = tmp_path / f"{number}.xva"
        subprocess.run(["tar", "-C", folder, option, "-cf", path, *names], check=True, timeout=60)
        for packing in PACKINGS:
            reader = opened(xva_archives.packed(path, packing), len(disk))
            assert read_all(reader) == disk
            reader.close()


# ── several members and frames, and what lies behind them ────────────────────────────────────────────────────────────


def plain_bytes(tmp_path: Path, disk: bytes, **options: object) -> bytes:
    return xva_archives.archive(tmp_path / "plain.xva", b"<x/>", {"Ref:4": disk}, **options).read_bytes()


def pack(data: bytes, packing: Packing, tmp_path: Path) -> bytes:
    path = tmp_path / "part"
    path.write_bytes(data)
    return xva_archives.packed(path, packing).read_bytes()


@both
def test_several_in_a_row_are_one(packing: Packing, tmp_path: Path) -> None:
    """As pigz, pzstd and `cat` make them: cut anywhere, with empty ones between."""
    disk = disk_of("AB-C", 5)
    data = plain_bytes(tmp_path, disk)
    parts = [data[:100], data[100:600_000], b"", data[600_000:]]
    path = tmp_path / "a.xva"
    skippable = b"\x52\x2a\x4d\x18" + (5).to_bytes(4, "little") + b"hello" if packing == "zstd" else b""
    path.write_bytes(b"".join(skippable + pack(part, packing, tmp_path) for part in parts))
    reader = opened(path, len(disk))
    assert read_all(reader) == disk
    reader.close()


@settings(max_examples=80, deadline=None)
@given(
    parts=st.lists(st.tuples(st.integers(0, 300_000), st.booleans()), max_size=4),
    lengths=st.lists(st.sampled_from([1, 512, 65_536, 100_003, 262_144, 1 << 20]), min_size=1, max_size=4),
    packing=st.sampled_from(PACKINGS),
)
def test_the_content_comes_in_parts_of_any_length(
    parts: list[tuple[int, bool]], lengths: list[int], packing: Packing, tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = tmp_path_factory.mktemp("parts")
    contents = [random.Random(size).randbytes(size) if noisy else bytes(size) for size, noisy in parts]
    path = folder / "packed"
    path.write_bytes(b"".join(pack(content, packing, folder) for content in [*contents, b"end"]))
    source = RawReader(str(path))
    unpacked = Unpacked(source, packing, "packed")
    whole, found = b"".join(contents) + b"end", bytearray()
    while part := unpacked.read(lengths[len(found) % len(lengths)] if len(found) < 2000 else max(lengths[0], 4096)):
        found += part
    assert found == whole
    assert unpacked.read(1) == b""
    source.close()


@both
def test_it_says_how_it_is_packed(packing: Packing, tmp_path: Path) -> None:
    path = xva_archives.packed(xva_archives.archive(tmp_path / "a.xva", b"<x/>", {"Ref:4": disk_of("A")}), packing)
    reader = opened(path, MIB)
    layer = layer_of(reader)
    assert layer is not None
    assert (layer.format, layer.facts) == ("xva", {"compression": packing})
    reader.close()


def test_zeros_behind_a_gzip_file_are_padding(tmp_path: Path) -> None:
    path = tmp_path / "a.xva"
    path.write_bytes(gzip.compress(plain_bytes(tmp_path, disk_of("A"))) + bytes(500_000))
    reader = opened(path, MIB)
    assert read_all(reader) == disk_of("A")
    reader.close()


@both
def test_garbage_behind_the_file_is_named(packing: Packing, tmp_path: Path) -> None:
    path = tmp_path / "a.xva"
    path.write_bytes(pack(plain_bytes(tmp_path, disk_of("A")), packing, tmp_path) + b"garbage" * 100)
    refused(path, MIB, rf"a.xva is not {packing} data before byte {path.stat().st_size} of it: \w+")


@both
def test_an_archive_without_its_end_is_whole_if_the_disk_is(packing: Packing, tmp_path: Path) -> None:
    data = plain_bytes(tmp_path, disk_of("A"), digest="none").rstrip(b"\0")
    path = tmp_path / "a.xva"
    path.write_bytes(pack(data, packing, tmp_path))
    reader = opened(path, MIB)
    assert read_all(reader) == disk_of("A")
    reader.close()


@both
@pytest.mark.parametrize("missing", [1, MIB // 2, MIB + 100, MIB + 512])
def test_a_piece_that_is_not_all_there_never_becomes_zeros(packing: Packing, missing: int, tmp_path: Path) -> None:
    """A whole gzip or zstd file of an archive that was cut before it was packed."""
    data = plain_bytes(tmp_path, disk_of("AB"), digest="none").rstrip(b"\0")
    path = tmp_path / "a.xva"
    path.write_bytes(pack(data[:-missing], packing, tmp_path))
    refused(path, 2 * MIB, "a.xva is cut short|ends at byte 1048576 of 2097152")


# ── damage ───────────────────────────────────────────────────────────────────────────────────────────────────────────


@both
def test_a_file_that_is_cut_anywhere_says_where(packing: Packing, tmp_path: Path) -> None:
    disk = random.Random(3).randbytes(2 * MIB)
    whole = pack(plain_bytes(tmp_path, disk), packing, tmp_path)
    path = tmp_path / "a.xva"
    numbers = random.Random(4)
    for cut in [4, 5, 30, len(whole) - 1, len(whole) - 4, *(numbers.randrange(4, len(whole)) for _ in range(30))]:
        path.write_bytes(whole[:cut])
        gc.collect(1)  # an error's frames, which are young, hold what was unpacked
        refused(path, len(disk), f"a.xva is cut short: it ends within compressed data, at byte {cut}$")


@both
def test_a_piece_that_is_not_what_its_digest_says(packing: Packing, tmp_path: Path) -> None:
    """The archive was damaged before it was packed: gzip and zstd have nothing to complain of."""
    for digest in ("xxhash", "checksum"):
        data = bytearray(plain_bytes(tmp_path, disk_of("ABC"), digest=digest))
        data[data.index(b"B" * 100) + 5000] ^= 1
        path = tmp_path / "a.xva"
        path.write_bytes(pack(bytes(data), packing, tmp_path))
        says = "Ref:4 in a.xva: the 1048576 bytes at offset 1048576 do not have their digest"
        refused(path, 3 * MIB, says)
        with closing(opened(path, 3 * MIB)) as reader, pytest.raises(MalformedArchive, match=says):
            reader.read_into(MIB, memoryview(bytearray(512)))  # a part of it, and none that has changed


@both
def test_the_files_own_checksum_is_verified_at_the_end_of_the_last_disk(packing: Packing, tmp_path: Path) -> None:
    whole = bytearray(pack(plain_bytes(tmp_path, disk_of("AB"), digest="none"), packing, tmp_path))
    whole[-5 if packing == "gzip" else -1] ^= 1  # gzip's last four bytes are its length
    path = tmp_path / "a.xva"
    path.write_bytes(whole)
    refused(path, 2 * MIB, f"a.xva is not {packing} data before byte .*checksum")


@pytest.mark.timeout(300)
@settings(max_examples=150, deadline=None)
@given(data=st.data(), packing=st.sampled_from(PACKINGS))
def test_a_damaged_file_reads_or_is_refused(
    data: st.DataObject, packing: Packing, tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = tmp_path_factory.mktemp("xva")
    disk = random.Random(5).randbytes(3000)
    whole = bytearray(pack(plain_bytes(folder, disk, digest="checksum"), packing, folder))
    for _ in range(data.draw(st.integers(1, 4))):
        whole[data.draw(st.integers(4, len(whole) - 1))] ^= data.draw(st.integers(1, 255))
    path = folder / "a.xva"
    path.write_bytes(whole[: data.draw(st.integers(4, len(whole)))])
    reader = opened(path, len(disk))
    try:
        assert read_all(reader) == disk
    except SynvirtError as problem:
        assert problem.code == "E_MIG_MALFORMED_ARCHIVE"  # noqa: PT017 - either outcome is right
    reader.close()


# ── bombs ────────────────────────────────────────────────────────────────────────────────────────────────────────────


def _archive_of(*members: tuple[str, int]) -> bytes:
    """Headers of members of those sizes, each but the last with a mebibyte for its data."""
    out = io.BytesIO()
    for name, size in members:
        member = tarfile.TarInfo(name)
        member.size = size
        out.write(member.tobuf(tarfile.GNU_FORMAT) + bytes(min(size, MIB)))
    return out.getvalue()


@both
def test_a_member_of_petabytes_is_not_unpacked_to_be_passed_by(packing: Packing, tmp_path: Path) -> None:
    path = tmp_path / "a.xva"
    path.write_bytes(pack(_archive_of(("ova.xml", MIB), ("other/0", 1 << 50)) + bytes(20 * MIB), packing, tmp_path))
    with bytes_read() as count:
        refused(path, MIB, r"a.xva: member 'other/0' has 1125899906842624 bytes at offset \d+ .* over 16777216")
    assert count.bytes < 1 << 20


@both
def test_a_piece_larger_than_the_disk_is_refused_before_it_is_unpacked(packing: Packing, tmp_path: Path) -> None:
    path = tmp_path / "a.xva"
    path.write_bytes(pack(_archive_of(("ova.xml", MIB), ("Ref:4/00000000", 2 * MIB)), packing, tmp_path))
    refused(path, MIB, "is outside the disk of 1048576")


@both
def test_what_follows_the_archives_end_is_not_followed_for_long(packing: Packing, tmp_path: Path) -> None:
    path = tmp_path / "a.xva"
    data = plain_bytes(tmp_path, disk_of("A")) + bytes(20 * MIB)
    path.write_bytes(pack(data, packing, tmp_path))
    refused(path, MIB, "a.xva: over 1048576 bytes follow the end of the archive in it, at byte")


@both
def test_a_bomb_is_unpacked_a_little_at_a_time(packing: Packing, tmp_path: Path) -> None:
    """A gigabyte of zeros in a megabyte, or in a few KiB: what is asked for comes, and no more."""
    path, zeros = tmp_path / "bomb", bytes(MIB)
    if packing == "gzip":
        # RFC 1952 around RFC 1951: a mebibyte is packed once, and its blocks, which refer to nothing before them, are repeated.
        compressor = zlib.compressobj(9, wbits=-15)
        blocks = compressor.compress(bytes(MIB)) + compressor.flush(zlib.Z_FULL_FLUSH)
        sum_ = functools.reduce(lambda crc, _: zlib.crc32(zeros, crc), range(1024), 0)
        end = b"\x03\0" + struct.pack("<II", sum_, 1 << 30)
        path.write_bytes(b"\x1f\x8b\x08" + bytes(7) + blocks * 1024 + end)
    else:  # RFC 8878: a frame without content size, a window of 1 MiB, and blocks of one byte 131,072 times (type 1)
        block = (131072 << 3 | 1 << 1).to_bytes(3, "little") + b"\0"
        path.write_bytes(b"\x28\xb5\x2f\xfd\x00" + bytes([10 << 3]) + block * 8192 + b"\x01\0\0")
    source = RawReader(str(path))
    content = Unpacked(source, packing, "bomb")
    with bytes_read() as count:
        assert content.read(MIB) == zeros
    assert count.bytes < 256 << 10
    assert all(content.read(MIB) == zeros for _ in range(1023))
    assert content.read(1) == b""
    source.close()


def test_a_window_of_gigabytes_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "a.xva"
    path.write_bytes(b"\x28\xb5\x2f\xfd\x00" + bytes([20 << 3]) + b"\x01\0\0")  # 2^30
    refused(path, MIB, "not zstd data before byte 9 of it: .*memory")
