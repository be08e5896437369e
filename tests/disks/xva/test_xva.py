"""The XVA reader: the contract, drawn disks, and what damaged archives say."""

import gzip
import tarfile
import time
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from synvirt.disks import open_reader
from synvirt.disks.raw.files import RawReader
from synvirt.disks.specs import GzipSpec, RawSpec, XvaSpec
from synvirt.disks.xva.reader import XvaReader
from synvirt.errors import MalformedArchive, SynvirtError
from tests.contracts.readers import ReaderCase, ReaderContract, check_extents, read, read_all
from tests.contracts.spec_json import READER_SPEC
from tests.disks.xva import xva_archives
from tests.disks.xva.xva_archives import MIB

# One for all parameters, which are held as long as the process lives.
PIECE = b"A" * MIB


def disk_of(blocks: str, tail: int = 0) -> bytes:
    """A letter is a mebibyte of it, `-` one of zeros; `tail` bytes of `z` end the disk."""
    return b"".join((block.encode() if block != "-" else b"\0") * MIB for block in blocks) + b"z" * tail


def opened(path: Path, size: int, folder: str = "Ref:4") -> XvaReader:
    return XvaReader(RawReader(str(path)), folder, size, path.name)


class TestXva(ReaderContract):
    @pytest.fixture(params=["xxhash", "checksum", "none"])
    def case(self, request: pytest.FixtureRequest, tmp_path: Path) -> ReaderCase:
        disk = disk_of("A--B-CC-", 100_000)
        others = {"Ref:3": disk_of("xx"), "Ref:4": disk, "Ref:5": disk_of("y")}
        path = xva_archives.archive(tmp_path / "a.xva", b"<x/>", others, digest=request.param, keepalives={3, 5})
        return ReaderCase(open=lambda: opened(path, len(disk)), content=disk)


@settings(max_examples=60, deadline=None)
@given(
    blocks=st.text("AB--", max_size=12),
    tail=st.sampled_from([0, 1, 512, 300_001]),
    keepalives=st.sets(st.integers(0, 12)),
    digest=st.sampled_from(["xxhash", "checksum", "none"]),
    spans=st.lists(st.tuples(st.integers(0, 13 * MIB), st.integers(0, 3 * MIB)), max_size=6),
)
def test_any_disk_reads_as_it_was(
    blocks: str,
    tail: int,
    keepalives: set[int],
    digest: str,
    spans: list[tuple[int, int]],
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    disk = disk_of(blocks, tail)
    path = tmp_path_factory.mktemp("xva") / "a.xva"
    xva_archives.archive(path, b"<x/>", {"Ref:4": disk}, digest=digest, keepalives=keepalives)
    reader = opened(path, len(disk))
    for start, length in spans:
        at = min(start, len(disk))
        until = min(at + length, len(disk))
        assert read(reader, at, until - at) == disk[at:until]
    check_extents(list(reader.extents()), disk)
    assert read_all(reader) == disk
    reader.close()
    path.unlink()


def test_an_archive_in_gzip_reads_as_it_was(tmp_path: Path) -> None:
    """A disk in a tar in a gzip."""
    disk = disk_of("A--B-CC-", 100_000)
    path = xva_archives.archive(tmp_path / "a.xva", b"<x/>", {"Ref:3": disk_of("xx"), "Ref:4": disk}, digest="xxhash")
    packed = tmp_path / "a.xva.gz"
    packed.write_bytes(gzip.compress(path.read_bytes(), 1))
    over = GzipSpec(over=RawSpec(path=str(packed)), size_max_bytes=1 << 30, name="a.xva.gz")
    reader = open_reader(XvaSpec(over=over, folder="Ref:4", size_bytes=len(disk), name="a.xva.gz"))
    check_extents(list(reader.extents()), disk)
    assert read_all(reader) == disk
    reader.close()


def test_the_spec_opens_it(tmp_path: Path) -> None:
    disk = disk_of("A-B")
    path = xva_archives.archive(tmp_path / "a.xva", b"<x/>", {"Ref:4": disk})
    spec = XvaSpec(over=RawSpec(path=str(path)), folder="Ref:4", size_bytes=len(disk), name="a.xva")
    reader = open_reader(READER_SPEC.validate_json(READER_SPEC.dump_json(spec)))
    assert read_all(reader) == disk
    reader.close()


def test_the_first_bytes_do_not_wait_for_the_last_header(tmp_path: Path) -> None:
    """A sparse archive of 64 GiB, broken behind its first piece: nothing behind it is looked at."""
    path = xva_archives.archive(tmp_path / "a.xva", b"<x/>", {"Ref:4": disk_of("AB")}, digest="none")
    with path.open("r+b") as file:
        file.seek(1024 + 512 + MIB + 512 + MIB)
        file.write(b"garbage" * 100)
        file.truncate(64 << 30)
    reader = opened(path, 64 << 30)
    began = time.monotonic()
    assert read(reader, 0, MIB) == b"A" * MIB
    assert time.monotonic() - began < 30
    with pytest.raises(MalformedArchive, match="no tar header"):
        read(reader, 2 * MIB, 1)
    reader.close()


@pytest.mark.parametrize("digest", ["xxhash", "checksum"])
@pytest.mark.parametrize("length", [100, MIB])
def test_a_flipped_bit_is_found_by_its_digest(length: int, digest: str, tmp_path: Path) -> None:
    path = xva_archives.archive(tmp_path / "a.xva", b"<x/>", {"Ref:4": disk_of("ABC")}, digest=digest)
    data = bytearray(path.read_bytes())
    data[data.index(b"B" * 100) + 5000] ^= 1
    path.write_bytes(data)
    reader = opened(path, 3 * MIB)
    with pytest.raises(MalformedArchive, match=r"Ref:4 in a.xva: the 1048576 bytes at offset 1048576 do not have their digest"):
        read(reader, MIB, length)
    assert read(reader, 0, MIB) == b"A" * MIB
    reader.close()


def test_digests_are_compared_as_numbers(tmp_path: Path) -> None:
    """xapi wrote XXH64 with and without leading zeros, in capitals and not."""
    path = xva_archives.archive(tmp_path / "a.xva", b"<x/>", {"Ref:4": disk_of("A")})
    data = path.read_bytes()
    digest = next(member for member in xva_archives.pieces("Ref:4", disk_of("A")) if member[0].endswith(".xxhash"))[1]
    assert data.count(digest.ljust(512, b"\0")) == 1
    for spelled in (digest.lower(), digest.rjust(16, b"0")):
        path.write_bytes(data.replace(digest.ljust(512, b"\0"), spelled.ljust(512, b"\0")))
        reader = opened(path, MIB)
        assert read_all(reader) == disk_of("A")
        reader.close()


def _members(path: Path, *members: tuple[str, bytes]) -> Path:
    with tarfile.open(path, "w") as tar:
        for name, data in members:
            xva_archives._add(tar, name, data)
    return path


@pytest.mark.parametrize(
    ("members", "says"),
    [
        ([], "ends at byte 0 of 2097152: members are missing"),
        ([("Ref:4/00000000", PIECE)], "ends at byte 1048576 of 2097152"),
        ([("Ref:4/00000000", PIECE), ("Ref:5/00000000", b"A")], "ends at byte 1048576 of 2097152"),
        ([("Ref:4/00000005", PIECE)], "is outside the disk of 2097152"),
        ([("Ref:4/00000001", PIECE), ("Ref:4/00000000", PIECE)], "comes after number 1"),
        ([("Ref:4/00000000", PIECE), ("Ref:4/00000000", PIECE)], "comes after number 0"),
        ([("Ref:4/00000000", b"A" * (2 * MIB + 1))], "is outside the disk"),
        ([("Ref:4/what", b"A")], "is no piece of a disk"),
        ([("Ref:4/00000000.checksum", b"A")], "is not a digest of the member before it"),
        ([("Ref:4/00000000", PIECE), ("Ref:4/00000001.xxhash", b"A")], "is not a digest of the member before it"),
        ([("Ref:4/00000000", PIECE), ("Ref:4/00000000.xxhash", b"A" * 300)], "is not a digest of the member before it"),
        ([("Ref:4/00000000", b""), ("Ref:4/00000001", b"A")], "ends at byte 1 of 2097152"),
    ],
)
def test_damage_is_named(members: list[tuple[str, bytes]], says: str, tmp_path: Path) -> None:
    reader = opened(_members(tmp_path / "a.xva", *members), 2 * MIB)
    for _ in range(2):  # the second time, too
        with pytest.raises(MalformedArchive, match=says):
            list(reader.extents())
    reader.close()


@settings(max_examples=100, deadline=None)
@given(data=st.data())
def test_a_damaged_archive_reads_or_is_refused(data: st.DataObject, tmp_path_factory: pytest.TempPathFactory) -> None:
    path = xva_archives.archive(tmp_path_factory.mktemp("xva") / "a.xva", b"<x/>", {"Ref:4": b"A" * 3000}, digest="checksum")
    whole = bytearray(path.read_bytes())
    for _ in range(data.draw(st.integers(1, 4))):
        whole[data.draw(st.integers(0, len(whole) - 1))] ^= data.draw(st.integers(1, 255))
    path.write_bytes(whole)
    reader = opened(path, 3000)
    try:
        content = read_all(reader)
    except SynvirtError as problem:
        assert problem.code != "E_MIG_INTERNAL"  # noqa: PT017 - either outcome is right
    else:
        assert content == b"A" * 3000
    reader.close()
