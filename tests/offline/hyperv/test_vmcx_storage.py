"""The storage of .vmcx and .vmrs files, against a writer of its own: what is written is read, through logs and damage."""

import math
import random
import struct
import sys
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from synvirt.disks.raw.files import RawReader
from synvirt.errors import MalformedArchive, UnsupportedFormat
from synvirt.offline.hyperv import storage as vmcx_storage
from synvirt.offline.hyperv import xml as vmcx_xml
from tests.offline.hyperv import hyperv_exports
from tests.offline.hyperv.hyperv_exports import PAGE, configuration, crc, storage

TREE = configuration({"ide0:0": "C:\\a.vhdx", "scsi0:0": "D:\\ü\\b.vhdx"})
FIRST_TABLE = 3 * PAGE


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("storage")


def read(content: bytes, folder: Path) -> Any:
    path = folder / "m.vmcx"
    path.write_bytes(content)
    with closing(RawReader(str(path))) as file:
        return vmcx_storage.read(file, "m.vmcx")


def has_key(content: bytes, folder: Path) -> bool:
    path = folder / "m.vmrs"
    path.write_bytes(content)
    with closing(RawReader(str(path))) as file:
        return vmcx_storage.has_key(file, "m.vmrs", frozenset({"savedstate"}))


# Characters of one to four bytes in UTF-8, of one and of two units in UTF-16; none is half of a pair.
LETTERS = ((1, 0x7F), (0x80, 0x7FF), (0x800, 0xD7FF), (0xE000, 0xFFFF), (0x10000, 0x10FFFF))
INTEGERS = (0, 1, -1, (1 << 31) - 1, 1 << 31, (1 << 32) - 1, -(1 << 63), (1 << 63) - 1, 1 << 63, (1 << 64) - 1)
FLOATS = (0.0, -0.0, 1.5, math.inf, -math.inf, sys.float_info.max, sys.float_info.min, 5e-324)


class Drawn:
    """A tree of a seed: up to 20 keys, each with up to 60 values in nodes of up to 8, which may be empty; names of up to 60
    characters; values of all kinds, texts and arrays within and beyond what a table holds. Hypothesis takes fifty times as long
    to draw such a tree as it takes to write and read it."""

    def __init__(self, seed: int) -> None:
        self.chance = random.Random(seed)
        self.left = 0

    def tree(self) -> dict[str, Any]:
        found = {}
        for _ in range(self.chance.randint(0, 20)):
            self.left = 60
            found[self.text(self.chance.randint(1, 60))] = self.value(0)
        return found

    def value(self, depth: int) -> Any:
        if depth < 12 and self.left > 0 and self.chance.random() < (0.5 if depth < 2 else 0.25):
            return {self.text(self.chance.randint(1, 60)): self.value(depth + 1) for _ in range(self.chance.randint(0, 8))}
        self.left -= 1
        return self.chance.choice((self.truth, self.integer, self.number, self.long_text, self.array))()

    def truth(self) -> bool:
        return self.chance.random() < 0.5

    def integer(self) -> int:
        small = self.chance.randint(-(1 << 63), (1 << 64) - 1) >> self.chance.randrange(64)
        return self.chance.choice((small, self.chance.choice(INTEGERS)))

    def number(self) -> float:
        (found,) = struct.unpack("<d", self.chance.randbytes(8))
        return self.chance.choice(FLOATS) if math.isnan(found) or self.chance.random() < 0.3 else float(found)

    def text(self, length: int) -> str:
        """By parts of a range: to draw a number of each was most of what the test took."""
        ranges, part = self.chance.choices(LETTERS, k=length), self.chance.random
        return "".join([chr(first + int(part() * (last + 1 - first))) for first, last in ranges])

    def long_text(self) -> str:
        length = self.chance.choice((0, 1, self.chance.randint(0, 1500), 1500))
        return (self.text(self.chance.randint(1, 20)) * length)[:length]

    def array(self) -> bytes:
        length = self.chance.choice((0, 1, self.chance.randint(0, 2047), 2047))
        return self.chance.randbytes(length)


@settings(max_examples=300)
@given(
    seed=st.integers(0, (1 << 32) - 1),
    objects_at_once=st.sampled_from([2, 5, 227]),
    sequences=st.sampled_from([(25, 24), (24, 25), (0xFFFF, 0)]),
)
def test_what_is_written_is_read(folder: Path, seed: int, objects_at_once: int, sequences: tuple[int, int]) -> None:
    tree = Drawn(seed).tree()
    assert read(storage(tree, objects_at_once=objects_at_once, sequences=sequences), folder) == tree


def test_an_array_too_long_for_its_key_is_left_where_it_is(folder: Path) -> None:
    assert read(storage({"nvram": bytes(5000), "notes": "n" * 5000}), folder) == {"nvram": b"", "notes": "n" * 5000}


def test_what_the_log_has_counts_before_it_is_in_place(folder: Path) -> None:
    """A new name, written to the log; the host lost power before it got to its place."""
    before, after = (storage({"configuration": {"properties": {"name": name}}}) for name in ("first", "other"))
    table = after[FIRST_TABLE : FIRST_TABLE + PAGE]
    assert read(storage({"configuration": {"properties": {"name": "first"}}}, replay={FIRST_TABLE: table}), folder) == {
        "configuration": {"properties": {"name": "other"}}
    }
    assert read(before, folder)["configuration"]["properties"]["name"] == "first"


def test_a_table_that_is_in_the_log_alone(folder: Path) -> None:
    """A file grows by its log: what lies beyond its end is in there."""
    whole = storage(TREE)
    at = -(-len(whole) // PAGE) * PAGE
    first = crc(struct.pack("<BIQIB", 2, 0, at, PAGE, 1), 1)
    changes = {at: whole[FIRST_TABLE : FIRST_TABLE + PAGE], 2 * PAGE + 8: first}
    assert read(storage(TREE, replay=changes), folder) == TREE


def test_a_table_that_is_in_the_log_alone_and_far_behind_the_end(folder: Path) -> None:
    whole = storage(TREE)
    at = -(-len(whole) // PAGE) * PAGE + 3 * PAGE
    first = crc(struct.pack("<BIQIB", 2, 0, at, PAGE, 1), 1)
    changes = {at: whole[FIRST_TABLE : FIRST_TABLE + PAGE], 2 * PAGE + 8: first}
    assert read(storage(TREE, replay=changes), folder) == TREE


def test_the_log_in_parts_of_a_table(folder: Path) -> None:
    table = storage({"a": {"b": "new!"}})[FIRST_TABLE : FIRST_TABLE + PAGE]
    changes = {FIRST_TABLE + start: table[start : start + 700] for start in range(0, PAGE, 700)}
    assert read(storage({"a": {"b": "old!"}}, replay=changes), folder) == {"a": {"b": "new!"}}


@pytest.mark.parametrize("place", [0, PAGE])
def test_one_damaged_header_is_as_good_as_none(folder: Path, place: int) -> None:
    content = bytearray(storage(TREE))
    content[place + 20] ^= 1
    assert read(bytes(content), folder) == TREE


def test_of_two_tables_of_one_index_the_newer_counts(folder: Path) -> None:
    old = bytearray(storage({"a": "old", "b": {"c": 1}}))
    new = storage({"a": "new", "b": {"c": 2}})[FIRST_TABLE : FIRST_TABLE + PAGE]
    newer = crc(struct.pack("<HHHI", 2, 1, 4, 0), 6) + new[10:]
    at = len(old)
    second = crc(struct.pack("<BIQIB", 2, 0, at, PAGE, 1), 1)
    old[2 * PAGE + 8 + 18 : 2 * PAGE + 8 + 36] = second
    assert read(bytes(old) + newer, folder) == {"a": "new", "b": {"c": 2}}


def test_of_keys_of_one_name_the_first_counts(folder: Path) -> None:
    writer = hyperv_exports.Writer()
    for value in ("first", "second"):
        writer.entry("name", value, 0, 0, 1)
    writer.close()
    content = bytearray(storage({"name": "x"}))
    content[FIRST_TABLE : FIRST_TABLE + PAGE] = writer.tables[0]
    assert read(bytes(content), folder) == {"name": "first"}


def test_a_saved_state_is_seen_and_its_absence_too(folder: Path) -> None:
    assert has_key(storage(hyperv_exports.runtime(saved=True)), folder)
    assert not has_key(storage(hyperv_exports.runtime()), folder)


# ── damage, and lies ─────────────────────────────────────────────────────────────────────────────────────────────────


def changed(place: int, content: bytes, *, summed: tuple[int, int, int] | None = None) -> bytes:
    """The file with `content` at `place`; `summed`: (start, length, checksum's place) of a structure to be put right again."""
    file = bytearray(storage(TREE))
    file[place : place + len(content)] = content
    if summed is not None:
        start, length, at = summed
        file[start : start + length] = crc(bytes(file[start : start + length]), at)
    return bytes(file)


def log_at() -> int:
    (place,) = struct.unpack_from("<Q", storage(TREE), 26)
    assert isinstance(place, int)
    return place


OBJECT, LOG = 2 * PAGE + 8, log_at()
DAMAGED = {
    "an empty file": b"",
    "another file": b"<configuration/>".ljust(40000),
    "both headers": bytes(2 * PAGE) + storage(TREE)[2 * PAGE :],
    "cut short": storage(TREE)[: 2 * PAGE + 10],
    "the log beyond the end": storage(TREE)[:LOG],
    "no log": changed(LOG, b"\0"),
    "the log's checksum": changed(LOG + 8, b"\1"),
    "more log entries than a log has": changed(LOG + 8, b"\xff\xff\xff\xff", summed=(LOG, 34, 4)),
    "no object table": changed(2 * PAGE, b"\0"),
    "an object table without end": changed(2 * PAGE + 4, b"\xff\xff\xff\xff"),
    "an object's checksum": changed(OBJECT + 5, b"\xff"),
    "a key table beyond the end": changed(OBJECT + 5, b"\xff" * 7, summed=(OBJECT, 18, 1)),
    "an enormous key table": changed(OBJECT + 13, b"\xff\xff\xff\x7f", summed=(OBJECT, 18, 1)),
    "a key table that is none": changed(OBJECT + 5, struct.pack("<Q", LOG), summed=(OBJECT, 18, 1)),
    "object tables in a circle": changed(OBJECT, struct.pack("<BIQIB", 1, 0, 2 * PAGE, PAGE, 1), summed=(OBJECT, 18, 1)),
    "a key table's checksum": changed(FIRST_TABLE + 4, b"\xff"),
    "a key's checksum": changed(FIRST_TABLE + 10 + 22, b"X"),
    "a key longer than its table": changed(FIRST_TABLE + 12, b"\xff\xff\xff\x7f"),
    "a key shorter than its name": changed(FIRST_TABLE + 12, struct.pack("<I", 22)),
    "a parent that is not there": changed(FIRST_TABLE + 10 + 6, b"\x07\0\x01", summed=(FIRST_TABLE + 10, 47, 12)),
}


@pytest.mark.parametrize("damage", DAMAGED)
def test_damage_is_reported_with_its_file_and_offset(folder: Path, damage: str) -> None:
    with pytest.raises(MalformedArchive, match=r"^m\.vmcx, offset [0-9]+: ") as problem:
        read(DAMAGED[damage], folder)
    assert problem.value.hint


@pytest.mark.parametrize(
    "entry",
    [
        pytest.param(lambda at: struct.pack("<QIQII", FIRST_TABLE, PAGE, 9 * PAGE, 0, 0), id="data outside of the log"),
        pytest.param(lambda at: struct.pack("<QIQII", 1 << 60, 16, PAGE, 0, 0), id="a place outside of the file"),
        pytest.param(lambda at: struct.pack("<QIQII", FIRST_TABLE, 16, PAGE, 0, 1), id="a wrong checksum of the data"),
    ],
)
def test_a_log_that_lies(folder: Path, entry: Callable[[int], bytes]) -> None:
    content = bytearray(storage(TREE, replay={FIRST_TABLE: b"x" * 16}))
    place = struct.unpack_from("<Q", content, 26)[0] + 34
    content[place : place + 28] = crc(entry(place), 20)
    with pytest.raises(MalformedArchive, match=r"^m\.vmcx, offset [0-9]+: "):
        read(bytes(content), folder)


def test_an_older_format_is_reported(folder: Path) -> None:
    with pytest.raises(UnsupportedFormat, match=r"m\.vmcx has the storage format 3\.1; 4\.0 is read"):
        read(storage(TREE, version=0x301), folder)


# ── the .xml before it ───────────────────────────────────────────────────────────────────────────────────────────────


def test_xml_and_storage_say_the_same(folder: Path) -> None:
    assert vmcx_xml.read(hyperv_exports.xml(TREE), "m.xml") == read(storage(TREE), folder) == TREE


WRONG_XML = (
    (b"<domain/>", "its root element is 'domain'"),
    (b'<configuration><a type="integer">two</a></configuration>', "m.xml: a is to be an integer, but is 'two'"),
    (b'<configuration><a type="integer">' + b"9" * 5000 + b"</a></configuration>", "m.xml: a is to be an integer"),
    (b'<configuration><a type="bytes">AA?A</a></configuration>', "m.xml: a is not base64"),
    (b"<configuration>", "m.xml is not well-formed XML: line 1"),
)


@pytest.mark.parametrize(("text", "why"), WRONG_XML)
def test_wrong_xml_is_reported(text: bytes, why: str) -> None:
    with pytest.raises(MalformedArchive) as problem:
        vmcx_xml.read(text, "m.xml")
    assert why in problem.value.detail
