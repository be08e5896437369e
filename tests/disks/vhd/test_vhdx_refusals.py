"""What a VHDX image may not say, field by field, and what is read all the same where one copy of two is damaged."""

import random
import struct
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from uuid import UUID

import pytest

from synvirt.disks.vhdx.reader import VhdxReader
from synvirt.errors import HostPathRejected, MalformedArchive, SynvirtError, UnsupportedFormat
from tests.disks.block_images import assert_same_disk
from tests.disks.vhd.test_vhdx import locator, open_vhdx
from tests.disks.vhd.vhdx_images import (
    FULL,
    KIB,
    LOG_GUID,
    LOG_SECTOR,
    MIB,
    NOT_PRESENT,
    PARENT_IDENTITY,
    PARTIAL,
    UNMAPPED,
    Block,
    Change,
    Ring,
    Vhdx,
    Written,
    checksummed,
    header,
    log_entry,
    lose_power,
    parent_locator,
    region_table,
    write,
)

BLOCK = Block(FULL, noise=((0, 9), (100, 3)))
HONEST = Vhdx(3 * MIB - 512, (BLOCK, Block(NOT_PRESENT), BLOCK))
BAT = UUID("2DC27766-F623-4200-9D64-115E9BFD4A08")
METADATA = UUID("8B7CA206-4790-4B9A-B8FE-575F050F886E")
SOMETHING = UUID(int=77)
HUGE = 1 << 62


@dataclass
class Image:
    """An honest image that a test then spoils."""

    path: Path
    at: Written
    what: Vhdx

    def put(self, at: int, content: bytes) -> None:
        with self.path.open("r+b") as file:
            file.seek(at)
            file.write(content)

    def read(self, at: int, length: int) -> bytes:
        with self.path.open("rb") as file:
            file.seek(at)
            return file.read(length)

    def put_twice(self, at: int, content: bytes) -> None:
        """In both headers, or both region tables."""
        self.put(at, content)
        self.put(at + 64 * KIB, content)

    def headers(self, **fields: object) -> None:
        for number in (0, 1):
            content = header(self.what, self.at, sequence=9 + number, **fields)  # type: ignore[arg-type]
            self.put((64 + 64 * number) * KIB, content)

    def regions(self, regions: list[tuple[UUID, int, int, int]], count: int | None = None) -> None:
        for number in (0, 1):
            self.put((192 + 64 * number) * KIB, region_table(regions, count))

    def usual_regions(self) -> list[tuple[UUID, int, int, int]]:
        return [(BAT, self.at.bat, self.at.bat_bytes, 1), (METADATA, self.at.metadata, MIB, 1)]

    def item(self, number: int, content: bytes) -> None:
        """The content of a metadata item: 0 file parameters, 1 size, 2 id, 3 and 4 sectors, 5 parent locator."""
        (offset,) = struct.unpack("<I", self.read(self.at.metadata + 32 + number * 32 + 16, 4))
        self.put(self.at.metadata + offset, content)

    def entry(self, number: int, content: bytes, within: int = 0) -> None:
        """Fields of the metadata table's entries."""
        self.put(self.at.metadata + 32 + number * 32 + within, content)

    def block(self, number: int, state: int, offset: int) -> None:
        self.put(self.at.bat + number * 8, struct.pack("<Q", state | offset))

    def log(self, entry: bytes, at: int = 0) -> None:
        ring = Ring(self.what.log_bytes, at)
        ring.add(entry)
        self.put(self.at.log, bytes(ring.content))
        self.headers(log_guid=LOG_GUID)


def make(folder: Path, what: Vhdx = HONEST) -> Image:
    path = folder / "disk.vhdx"
    return Image(path, write(what, path, raw=folder / "raw"), what)


def cut(image: Image, length: int) -> None:
    with image.path.open("r+b") as file:
        file.truncate(length)


def entry(sequence: int = 5, *, tail: int = 0, flushed: int = 2 * MIB) -> bytes:
    return log_entry(sequence, [Change(4 * MIB, bytes(LOG_SECTOR))], tail=tail, flushed=flushed, last=2 * MIB)


def same_sequence(image: Image) -> None:
    image.put(128 * KIB, header(image.what, image.at, sequence=1, log_guid=LOG_GUID))


def move_log(image: Image, *, at: int | None = None, length: int = MIB, guid: UUID | None = None) -> None:
    places = replace(image.at, log=image.at.log if at is None else at)
    what = replace(image.what, log_bytes=length)
    for number in (0, 1):
        image.put((64 + 64 * number) * KIB, header(what, places, sequence=9 + number, log_guid=guid or UUID(int=0)))


Spoil = Callable[[Image], None]
WRONG: dict[str, tuple[Spoil, type[SynvirtError], str]] = {
    "the file's signature": (lambda i: i.put(0, b"vhdxfilf"), MalformedArchive, "does not begin with vhdxfile"),
    "both headers": (lambda i: i.put_twice(64 * KIB + 50, b"x"), MalformedArchive, "neither header"),
    "two headers of one number": (same_sequence, MalformedArchive, "two different headers have sequence number 1"),
    "version": (lambda i: i.headers(version=2), UnsupportedFormat, "version 2"),
    "log version": (lambda i: i.headers(log_version=1, log_guid=LOG_GUID), UnsupportedFormat, "log of version 1"),
    "log over the headers": (lambda i: move_log(i, at=0), MalformedArchive, "bytes at 0 is not on boundaries"),
    "log on no boundary": (lambda i: move_log(i, at=MIB + 512), MalformedArchive, "boundaries"),
    "log outside the file": (lambda i: move_log(i, at=HUGE), MalformedArchive, "the log lies at"),
    "log of 4 GiB": (lambda i: move_log(i, length=4095 * MIB), MalformedArchive, "the log lies at"),
    "log over a region": (lambda i: move_log(i, at=i.at.bat), MalformedArchive, "both lie at"),
    "both region tables": (lambda i: i.put_twice(192 * KIB + 90, b"x"), MalformedArchive, "region table"),
    "too many regions": (lambda i: i.regions(i.usual_regions(), 2048), MalformedArchive, "2048 regions"),
    "a region that must be known": (
        lambda i: i.regions([*i.usual_regions(), (SOMETHING, 90 * MIB, MIB, 1)]), UnsupportedFormat, "must be understood"),
    "a region twice": (lambda i: i.regions(i.usual_regions() * 2), MalformedArchive, "two regions"),
    "no BAT": (lambda i: i.regions(i.usual_regions()[1:]), MalformedArchive, "where the BAT lies"),
    "no metadata": (lambda i: i.regions(i.usual_regions()[:1]), MalformedArchive, "where the metadata region lies"),
    "regions over one another": (
        lambda i: i.regions([(BAT, i.at.bat, MIB, 1), (METADATA, i.at.bat, MIB, 1)]), MalformedArchive, "both lie at"),
    "a region over the headers": (
        lambda i: i.regions([(BAT, 0, MIB, 1), i.usual_regions()[1]]), MalformedArchive, "after the headers"),
    "a region outside the file": (
        lambda i: i.regions([(BAT, HUGE, MIB, 1), i.usual_regions()[1]]), MalformedArchive, "the file ends at"),
    "a region of no length": (
        lambda i: i.regions([i.usual_regions()[0], (METADATA, i.at.metadata, 0, 1)]), MalformedArchive, "does not fit"),
    "the metadata's signature": (lambda i: i.put(i.at.metadata, b"x"), MalformedArchive, "metadata table"),
    "too many items": (lambda i: i.put(i.at.metadata + 10, b"\xff\xff"), MalformedArchive, "65535 entries"),
    "an item that must be known": (lambda i: i.entry(2, SOMETHING.bytes_le), UnsupportedFormat, "must be understood"),
    "an item twice": (lambda i: i.entry(4, i.read(i.at.metadata + 32 + 96, 16)), MalformedArchive, "two metadata items"),
    "items over one another": (lambda i: i.entry(1, struct.pack("<I", 64 * KIB), 16), MalformedArchive, "two metadata items"),
    "an item in the table": (lambda i: i.entry(1, struct.pack("<I", 512), 16), MalformedArchive, "does not fit its region"),
    "an item outside": (lambda i: i.entry(1, struct.pack("<I", MIB), 16), MalformedArchive, "does not fit its region"),
    "an item's length": (lambda i: i.entry(0, struct.pack("<I", 4), 20), MalformedArchive, "has 4 bytes, not 8"),
    "a missing item": (lambda i: i.put(i.at.metadata + 10, b"\4\0"), MalformedArchive, "is missing"),
    "small blocks": (lambda i: i.item(0, struct.pack("<I", MIB // 2)), MalformedArchive, "blocks of 524288"),
    "odd blocks": (lambda i: i.item(0, struct.pack("<I", 3 * MIB)), MalformedArchive, "powers of two"),
    "vast blocks": (lambda i: i.item(0, struct.pack("<I", 1 << 31)), MalformedArchive, "powers of two"),
    "a vast disk": (lambda i: i.item(1, struct.pack("<Q", 1 << 63)), MalformedArchive, "a disk of 9223372036854775808"),
    "more blocks than entries": (lambda i: i.item(1, struct.pack("<Q", 1 << 38)), MalformedArchive, "cannot map 262144 blocks"),
    "half a sector": (lambda i: i.item(1, struct.pack("<Q", 1000)), MalformedArchive, "whole sectors"),
    "logical sectors": (lambda i: i.item(3, struct.pack("<I", 1024)), MalformedArchive, "logical sectors of 1024"),
    "physical sectors": (lambda i: i.item(4, struct.pack("<I", 0)), MalformedArchive, "physical sectors of 0"),
    "a parent without a locator": (lambda i: i.item(0, struct.pack("<II", MIB, 2)), MalformedArchive, "is missing"),
    "reserved state 4": (lambda i: i.block(1, 4, 0), MalformedArchive, "block 1 is in state 4"),
    "reserved state 5": (lambda i: i.block(1, 5, 0), MalformedArchive, "block 1 is in state 5"),
    "a partial block without a parent": (lambda i: i.block(1, 7, i.at.log), MalformedArchive, "only a differencing image"),
    "a block outside": (lambda i: i.block(1, 6, 1 << 40), MalformedArchive, "block 1 .*beyond the end"),
    "a block far outside": (lambda i: i.block(1, 6, (1 << 64) - MIB), MalformedArchive, "block 1 .*beyond the end"),
    "a block over the headers": (lambda i: i.block(1, 6, 0), MalformedArchive, "block 1 and the headers"),
    "a block over the log": (lambda i: i.block(1, 6, i.at.log), MalformedArchive, "block 1 and the log"),
    "a block over the BAT": (lambda i: i.block(1, 6, i.at.bat), MalformedArchive, "block 1 and the BAT"),
    "a block over a block": (lambda i: i.block(1, 6, i.at.blocks[0]), MalformedArchive, "block [01] and block [01]"),
    "an empty log": (lambda i: i.headers(log_guid=LOG_GUID), MalformedArchive, "no sequence that is whole"),
    "a log of no length": (lambda i: move_log(i, length=0, guid=LOG_GUID), MalformedArchive, "no sequence that is whole"),
    "a torn entry": (lambda i: i.log(entry()[:-1] + b"x"), MalformedArchive, "no sequence that is whole"),
    "a changed byte within an entry": (
        lambda i: i.log(entry()[: LOG_SECTOR + 99] + b"x" + entry()[LOG_SECTOR + 100 :]), MalformedArchive, "no sequence"),
    "a descriptor of another entry": (
        lambda i: i.log(checksummed(entry()[:88] + struct.pack("<Q", 99) + entry()[96:])), MalformedArchive, "no sequence"),
    "a data sector of another entry": (
        lambda i: i.log(checksummed(entry()[:-4] + struct.pack("<I", 99))), MalformedArchive, "no sequence"),
    "an entry whose tail is gone": (lambda i: i.log(entry(tail=64 * KIB)), MalformedArchive, "no sequence that is whole"),
    "an entry of another session": (
        lambda i: i.log(log_entry(5, [], tail=0, flushed=0, last=0, guid=SOMETHING)), MalformedArchive, "no sequence"),
    "a file shorter than the log knew": (lambda i: i.log(entry(flushed=99 * MIB)), MalformedArchive, "had 103809024 bytes"),
}  # fmt: skip


@pytest.mark.parametrize("what", WRONG)
def test_refused_is(tmp_path: Path, what: str) -> None:
    spoil, error, words = WRONG[what]
    image = make(tmp_path)
    spoil(image)
    with pytest.raises(error, match=words):
        open_vhdx(image.path)


MENDED: dict[str, Spoil] = {
    "the first header damaged": lambda i: i.put(64 * KIB + 30, b"damage"),
    "the second header damaged": lambda i: i.put(128 * KIB, bytes(4 * KIB)),
    "the first region table damaged": lambda i: i.put(192 * KIB + 30, b"damage"),
    "a region that need not be known": lambda i: i.regions([*i.usual_regions(), (SOMETHING, i.at.end - MIB, 0, 0)]),
    "reserved bits set in the BAT": lambda i: i.block(1, NOT_PRESENT, 0xFFFF8),
    "offsets left in absent blocks": lambda i: i.block(1, UNMAPPED, 1 << 50),
    "bitmap entries that mean nothing": lambda i: i.put(i.at.bat + 4096 * 8, b"\xff" * 8),
    "a file type identifier with a creator": lambda i: i.put(8, b"x" * 512),
    "an old log without a GUID": lambda i: i.put(i.at.log, random.Random(0).randbytes(MIB)),
    "a log version where there is no log": lambda i: i.headers(log_version=7),
    "a log that changes nothing": lambda i: i.log(log_entry(1, [], tail=0, flushed=0, last=0)),
}


@pytest.mark.parametrize("what", MENDED)
def test_read_nevertheless_is(tmp_path: Path, what: str) -> None:
    image = make(tmp_path)
    MENDED[what](image)
    reader = open_vhdx(image.path)
    assert_same_disk(reader, tmp_path / "raw")
    reader.close()


def test_the_header_of_the_higher_number_counts(tmp_path: Path) -> None:
    image = make(tmp_path)
    for newer in (0, 1):
        for number in (0, 1):
            what = replace(image.what, identity=UUID(int=number))
            content = header(what, image.at, sequence=9 if number == newer else 8)
            image.put((64 + 64 * number) * KIB, content)
        reader = open_vhdx(image.path)
        assert reader.header.data_write_guid == str(UUID(int=newer))
        reader.close()


@pytest.mark.parametrize("length", [0, 7, 64 * KIB, 130 * KIB, 200 * KIB, MIB, 2 * MIB, 3 * MIB, 4 * MIB, 5 * MIB, 6 * MIB - 1])
def test_a_file_cut_off_anywhere_is_refused(tmp_path: Path, length: int) -> None:
    image = make(tmp_path)
    assert image.at.end == 6 * MIB
    cut(image, length)
    with pytest.raises(MalformedArchive):
        open_vhdx(image.path)


def test_a_log_says_how_long_the_file_was_to_be(tmp_path: Path) -> None:
    """Power was lost before the file grew: the blocks at its end are zeros."""
    image = make(tmp_path, replace(HONEST, blocks=(BLOCK, Block(FULL), BLOCK), order=3))
    last = max(image.at.blocks, key=lambda number: image.at.blocks[number])
    order = next(
        order
        for order in range(99)
        if write(replace(image.what, order=order), image.path, raw=tmp_path / "raw").blocks[1] == 6 * MIB
    )
    image = make(tmp_path, replace(image.what, order=order))
    assert image.at.blocks[1] + MIB == image.at.end, last
    image.log(log_entry(1, [], tail=0, flushed=4 * MIB, last=image.at.end))
    cut(image, image.at.end - MIB)
    reader = open_vhdx(image.path)
    assert_same_disk(reader, tmp_path / "raw")
    reader.close()
    image.log(log_entry(1, [], tail=0, flushed=4 * MIB, last=image.at.end - MIB))
    with pytest.raises(MalformedArchive, match=r"beyond the end|ends at"):
        open_vhdx(image.path)


def test_the_newest_whole_sequence_is_replayed(tmp_path: Path) -> None:
    """An older one whose entries are whole is passed over, even where it lies before the newer one in the ring."""
    image = make(tmp_path)
    right = image.read(image.at.bat, LOG_SECTOR)
    ring = Ring(MIB, 8 * LOG_SECTOR)
    wrong = [Change(image.at.bat, b"\xff" * LOG_SECTOR)]
    at = ring.add(log_entry(7, [Change(image.at.bat, right)], tail=8 * LOG_SECTOR, flushed=0, last=0))
    assert at == 8 * LOG_SECTOR
    ring.add(log_entry(3, wrong, tail=ring.at, flushed=0, last=0))
    ring.at = 0
    ring.add(log_entry(2, wrong, tail=0, flushed=0, last=0))
    image.put(image.at.log, bytes(ring.content))
    image.put(image.at.bat, b"\xff" * LOG_SECTOR)
    image.headers(log_guid=LOG_GUID)
    reader = open_vhdx(image.path)
    assert reader.replayed == 1
    assert_same_disk(reader, tmp_path / "raw")
    reader.close()


# Entries of one sector of data: where each begins in sectors, its number, where its tail is said to be, and whether what it
# changes is right; then how many are to be replayed.
SEQUENCES = {
    "what lies before the tail was applied long ago": ([(8, 5, 8, False), (10, 6, 8, False), (12, 7, 10, True)], 2),
    "it goes on at the ring's beginning": ([(254, 5, 254, False), (0, 6, 254, True)], 2),
    "a number is missing between two neighbours": ([(8, 5, 8, True), (10, 9, 8, False)], 1),
    "the newest entry's tail begins another sequence": ([(8, 9, 20, False), (20, 3, 20, False), (30, 5, 30, True)], 1),
}


@pytest.mark.parametrize("name", SEQUENCES)
def test_a_sequence_is_from_the_tail_that_its_head_names_to_the_head(tmp_path: Path, name: str) -> None:
    entries, replayed = SEQUENCES[name]
    image = make(tmp_path)
    right = image.read(image.at.bat, LOG_SECTOR)
    ring = Ring(MIB, 0)
    for at, number, tail, is_right in entries:
        ring.at = at * LOG_SECTOR
        change = Change(image.at.bat, right if is_right else b"\xff" * LOG_SECTOR)
        ring.add(log_entry(number, [change], tail=tail * LOG_SECTOR, flushed=0, last=0))
    image.put(image.at.log, bytes(ring.content))
    image.put(image.at.bat, b"\xff" * LOG_SECTOR)
    image.headers(log_guid=LOG_GUID)
    reader = open_vhdx(image.path)
    assert reader.replayed == replayed
    assert_same_disk(reader, tmp_path / "raw")
    reader.close()


def test_entries_over_one_another_are_not_summed_for_ever(tmp_path: Path) -> None:
    image = make(tmp_path)
    ring = bytearray(MIB)
    for at in range(0, MIB, LOG_SECTOR):
        head = struct.pack("<4sIIIQII16sQQ", b"loge", 0, MIB, 0, 1, 0, 0, LOG_GUID.bytes_le, 0, 0)
        ring[at : at + 64] = head
    image.put(image.at.log, bytes(ring))
    image.headers(log_guid=LOG_GUID)
    with pytest.raises(MalformedArchive, match="over one another"):
        open_vhdx(image.path)


# ── parents ──────────────────────────────────────────────────────────────────────────────────────────────────────────


def make_pair(folder: Path, child: Vhdx, base: Vhdx | None = None) -> Path:
    """one/child.vhdx over two/base.vhdx; raw is the disk that the child must read as."""
    for name in ("one", "two"):
        (folder / name).mkdir(exist_ok=True)
    base = base or Vhdx(2 * MIB, (BLOCK, BLOCK), identity=PARENT_IDENTITY, order=2)
    write(base, folder / "two" / "base.vhdx", seed=7)
    write(child, folder / "one" / "child.vhdx", raw=folder / "raw", parent_raw=folder / "two" / "base.raw")
    return folder / "one" / "child.vhdx"


PIECE = Block(PARTIAL, noise=((0, 50),), present=((3, 9), (2000, 48)))
CHILD = Vhdx(3 * MIB, (Block(NOT_PRESENT), PIECE, PIECE), locator=locator("..\\two\\base.vhdx"))
LINK = f"{{{PARENT_IDENTITY}}}"


@pytest.mark.parametrize(
    "keys",
    [
        (("parent_linkage", LINK), ("relative_path", "..\\two\\base.vhdx")),
        (
            ("parent_linkage", LINK.upper()),
            ("absolute_win32_path", "\\\\?\\C:\\gone.vhdx"),
            ("relative_path", "..\\two\\base.vhdx"),
        ),
        (("parent_linkage", str(SOMETHING)), ("parent_linkage2", LINK), ("relative_path", "../two/base.vhdx")),
    ],
    ids=["its relative path", "its relative path before others", "the second linkage"],
)  # fmt: skip
def test_the_parent_is_found_by(tmp_path: Path, keys: tuple[tuple[str, str], ...]) -> None:
    child = make_pair(tmp_path, replace(CHILD, locator=keys))
    reader = open_vhdx(child, tmp_path)
    assert_same_disk(reader, tmp_path / "raw")
    reader.close()


@pytest.mark.parametrize(
    "keys",
    [
        (("parent_linkage", LINK), ("absolute_win32_path", "\\\\?\\d:\\path\\base.vhdx")),
        (("parent_linkage", LINK), ("volume_path", "\\\\?\\Volume{26A21BDA-A627-11D7-9931-806E6F6E6963}\\path\\base.vhdx")),
        (("parent_linkage", LINK), ("relative_path", ".\\gone.vhdx"), ("absolute_win32_path", "\\\\server\\share\\base.vhdx")),
    ],
    ids=["a drive's path", "a volume's path", "a share's path where the relative one is not there"],
)
def test_the_parent_beside_the_image_is_found_by(tmp_path: Path, keys: tuple[tuple[str, str], ...]) -> None:
    child = make_pair(tmp_path, replace(CHILD, locator=keys))
    (tmp_path / "two" / "base.vhdx").rename(tmp_path / "one" / "base.vhdx")
    reader = open_vhdx(child, tmp_path)
    assert_same_disk(reader, tmp_path / "raw")
    reader.close()


@pytest.mark.parametrize(
    ("keys", "error", "words"),
    [
        ((("relative_path", "..\\..\\base.vhdx"),), HostPathRejected, "leads out"),
        ((("relative_path", "\\etc\\passwd"),), HostPathRejected, "outside"),
        ((("relative_path", "json:{}"),), HostPathRejected, "protocol"),
        ((("relative_path", "C:base.vhdx"),), HostPathRejected, "drive"),
        ((("relative_path", "nbd://host/disk"),), HostPathRejected, "protocol"),
        ((("relative_path", "link.vhdx"),), HostPathRejected, "leads out"),
        ((("relative_path", "a\0b"),), HostPathRejected, "not a file name"),
        ((("relative_path", ""),), HostPathRejected, "not a file name"),
        ((("absolute_win32_path", "\\\\?\\C:\\VMs\\base.vhdx"),), HostPathRejected, "outside the import root"),
        ((("volume_path", "\\\\?\\Volume{0}\\base.vhdx"),), HostPathRejected, "outside the import root"),
        ((("relative_path", ".\\gone.vhdx"),), MalformedArchive, "not there"),
        ((("relative_path", ".\\child.vhdx"),), MalformedArchive, "loop"),
        ((("something", "else"),), MalformedArchive, "does not say"),
        ((), MalformedArchive, "does not say"),
        ((("parent_linkage", LINK), ("relative_path", ".\\text")), MalformedArchive, "the file ends at 4"),
    ],
    ids=str,
)
def test_a_parent_that_is_not_to_be_had_is_refused(
    tmp_path: Path, keys: tuple[tuple[str, str], ...], error: type[SynvirtError], words: str
) -> None:
    child = make_pair(tmp_path, replace(CHILD, locator=keys))
    (tmp_path / "one" / "link.vhdx").symlink_to("/etc/passwd")
    (tmp_path / "one" / "text").write_bytes(b"text")
    with pytest.raises(error, match=words):
        open_vhdx(child, tmp_path)


def test_without_a_root_no_parent_is_opened(tmp_path: Path) -> None:
    child = make_pair(tmp_path, CHILD)
    reader = open_vhdx(tmp_path / "two" / "base.vhdx")
    with pytest.raises(HostPathRejected):
        VhdxReader(open_vhdx(child, tmp_path)._file, root=None, name="one/child.vhdx")
    reader.close()


def test_a_parent_that_was_changed_since_is_refused(tmp_path: Path) -> None:
    child = make_pair(tmp_path, CHILD, Vhdx(2 * MIB, (BLOCK, BLOCK), identity=SOMETHING))
    with pytest.raises(MalformedArchive, match="another state of its parent") as caught:
        open_vhdx(child, tmp_path)
    assert caught.value.hint is not None


def test_a_parent_with_other_sectors_is_refused(tmp_path: Path) -> None:
    base = Vhdx(2 * MIB, (BLOCK, BLOCK), identity=PARENT_IDENTITY, sector_bytes=4096)
    child = make_pair(tmp_path, CHILD, base)
    with pytest.raises(MalformedArchive, match=r"sectors of 512 bytes, its parent one/../two/base\.vhdx of 4096"):
        open_vhdx(child, tmp_path)


LOCATORS: dict[str, tuple[bytes, type[SynvirtError], str]] = {
    "of another type": (parent_locator([], SOMETHING), UnsupportedFormat, "not a VHDX image, but of type"),
    "too short": (b"short", MalformedArchive, "locator of 5 bytes"),
    "with too many entries": (parent_locator([])[:18] + b"\xff\xff", MalformedArchive, "65535 entries"),
    "with an entry outside": (
        parent_locator([("a", "b")])[:20] + struct.pack("<IIHH", 20, 1 << 31, 2, 2), MalformedArchive, "lies outside"),
    "with half a character": (
        parent_locator([("a", "b")])[:20] + struct.pack("<IIHH", 32, 32, 2, 2) + b"\0\xd8", MalformedArchive, "not UTF-16"),
}  # fmt: skip


@pytest.mark.parametrize("what", LOCATORS)
def test_refused_is_a_locator(tmp_path: Path, what: str) -> None:
    content, error, words = LOCATORS[what]
    image = make(tmp_path, CHILD)
    image.entry(5, struct.pack("<II", 512 * KIB, len(content)), 16)
    image.item(5, content)
    with pytest.raises(error, match=words):
        open_vhdx(image.path)


@pytest.mark.parametrize(
    ("entry", "words"),
    [
        (0, "its chunk has no bitmap"),
        (6 | 1 << 40, "the bitmap of chunk 0 lies at"),
        (6 | MIB, "and the bitmap of chunk 0|the bitmap of chunk 0 and"),
    ],
)  # fmt: skip
def test_a_bitmap_that_is_not_there_is_refused(tmp_path: Path, entry: int, words: str) -> None:
    child = make_pair(tmp_path, CHILD)
    image = Image(child, write(CHILD, child, raw=tmp_path / "raw", parent_raw=tmp_path / "two" / "base.raw"), CHILD)
    image.put(image.at.bat + CHILD.chunk_blocks * 8, struct.pack("<Q", entry))
    with pytest.raises(MalformedArchive, match=words):
        open_vhdx(child, tmp_path)


def test_a_chain_is_read_through_and_a_longer_one_refused(tmp_path: Path) -> None:
    """Each image writes one sector of its own; the disk has them all. One of them has a log to replay."""
    for number in range(66):
        piece = Block(PARTIAL, noise=((number, 1),), present=((number, 1),))
        image = Vhdx(
            MIB,
            (piece if number else Block(FULL, noise=((0, 1),)),),
            identity=UUID(int=number + 1),
            locator=locator(f"{number - 1}.vhdx", UUID(int=number)) if number else None,
        )
        path = tmp_path / f"{number}.vhdx"
        places = write(image, path, seed=number, parent_raw=tmp_path / f"{number - 1}.raw" if number else None)
        if number == 30:
            lose_power(image, path, places, seed=3)
    reader = open_vhdx(tmp_path / "64.vhdx")
    assert_same_disk(reader, tmp_path / "64.raw")
    assert sum(extent.length for extent in reader.extents() if not extent.zero) <= 65 * 4096
    reader.close()
    with pytest.raises(MalformedArchive, match="more than 64 parents"):
        open_vhdx(tmp_path / "65.vhdx")
