"""The ledger of hashes: the same for the same disk in any format, by any reader; and what it finds when bytes change."""

import hashlib
import json
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from synvirt.blocks import DiskReader, Extent
from synvirt.copying import copy
from synvirt.disks import detect, open_reader
from synvirt.disks.changed import ChangedReader
from synvirt.disks.checking import ledger as ledger_module
from synvirt.disks.checking.digests import SHA256, Digest, for_accidents
from synvirt.disks.checking.ledger import Hashing, Ledger, Row, verify
from synvirt.errors import Cancelled, DiskReadFailed, DiskWriteFailed, MalformedArchive
from synvirt.sizes import KIB, MIB
from tests.cases import cases
from tests.contracts.readers import ReaderCase, ReaderContract
from tests.disks.block_images import Write, make_by_writes, raw_of, scratch, writes

# Smaller than in earnest, so that a disk of many blocks is compared in no time.
BLOCK_BYTES = 256 * KIB


@pytest.fixture(autouse=True, scope="module")
def small_blocks() -> Iterator[None]:
    before = ledger_module.BLOCK_BYTES
    ledger_module.BLOCK_BYTES = BLOCK_BYTES  # type: ignore[misc]
    yield
    ledger_module.BLOCK_BYTES = before  # type: ignore[misc]


class Content:
    """A disk whose bytes and extents are given; zero extents must be zeros."""

    max_readers = 64

    def __init__(self, content: bytes, extents: list[Extent] | None = None) -> None:
        self._content = content
        self._extents = [Extent(0, len(content))] if extents is None else extents
        self.size = len(content)

    def extents(self) -> Iterator[Extent]:
        return iter(self._extents)

    def read_into(self, offset: int, buffer: memoryview) -> None:
        if offset < 0 or offset + len(buffer) > self.size:
            raise DiskReadFailed(f"{len(buffer)} bytes at {offset}")
        buffer[:] = self._content[offset : offset + len(buffer)]

    def close(self) -> None:
        pass


class Nowhere:
    """A writer that keeps nothing."""

    max_writers = 64

    def __init__(self, size: int) -> None:
        self.size = size

    def write(self, offset: int, buffer: memoryview) -> None:
        pass

    def zero(self, offset: int, length: int) -> None:
        pass

    def flush(self) -> None:
        pass

    def close(self) -> None:
        pass


def ledger_of(
    reader: DiskReader,
    *,
    threads: int = 3,
    disk: str = "disk0",
    bandwidth_bps: int | None = None,
    digest: Digest = SHA256,
) -> Ledger:
    hashing = Hashing(reader, digest)
    copy(hashing, Nowhere(reader.size), threads=threads, bandwidth_bps=bandwidth_bps)
    return hashing.ledger(disk)


def by_hand(content: bytes) -> list[Row]:
    """What the docstring says, the slow way."""
    rows: list[Row] = []
    for start in range(0, len(content), BLOCK_BYTES):
        block = content[start : start + BLOCK_BYTES]
        if block != bytes(len(block)):
            rows.append(Row(start, len(block), hashlib.sha256(block).digest()))
        elif rows and rows[-1].digest is None:
            rows[-1] = Row(rows[-1].start, rows[-1].length + len(block), None)
        else:
            rows.append(Row(start, len(block), None))
    return rows


@st.composite
def disks(draw: st.DrawFn) -> tuple[bytes, list[Extent]]:
    """Some MiB with data here and there, and extents that know some of the zeros."""
    size = draw(st.integers(1, 4 * BLOCK_BYTES + 5000))
    content = bytearray(size)
    edges = sorted({0, size, *draw(st.lists(st.integers(0, size), max_size=10))})
    extents = []
    for start, end in pairwise(edges):
        sort = draw(st.sampled_from(["data", "known zeros", "zeros"]))
        if sort == "data":
            content[start:end] = (
                draw(st.binary(min_size=1, max_size=8))
                .ljust(min(end - start, 9), b"x")[: end - start]
                .ljust(end - start, b"\0")
            )
        extents.append(Extent(start, end - start, zero=sort == "known zeros"))
    return bytes(content), extents


class TestHashing(ReaderContract):
    """The wrapper is a reader like any other."""

    @pytest.fixture
    def case(self) -> ReaderCase:
        content = bytes(range(256)) * 4 * KIB + bytes(9 * MIB) + b"end" * 1000
        zeros = Extent(MIB, 9 * MIB, zero=True)
        extents = [Extent(0, MIB), zeros, Extent(zeros.end, len(content) - zeros.end)]
        return ReaderCase(open=lambda: Hashing(Content(content, extents)), content=content)


@given(disk=disks(), threads=st.integers(1, 4))
@cases(60)
def test_the_ledger_is_of_the_content_only(disk: tuple[bytes, list[Extent]], threads: int) -> None:
    content, extents = disk
    ledger = ledger_of(Content(content, extents), threads=threads)
    assert list(ledger.rows) == by_hand(content)
    assert ledger == ledger_of(Content(content, [Extent(0, len(content))]))
    assert Ledger.from_lines(ledger.lines()) == ledger
    assert verify(ledger, Content(content, extents), threads=threads) <= len(content)


@given(size=st.integers(1, 6 * MIB), pieces=writes)
@cases(8)
@pytest.mark.timeout(300)
def test_all_formats_of_a_disk_have_one_ledger(size: int, pieces: list[Write]) -> None:
    size = -(-size // 512) * 512
    with scratch() as folder:
        lines: dict[str, list[str]] = {}
        image = folder / "disk.qcow2"
        make_by_writes(image, "qcow2", "", size, pieces)
        raw = raw_of(image, "qcow2")
        for path in (image, raw):
            reader = open_reader(detect(path))
            lines[path.name] = list(ledger_of(reader).lines())
            reader.close()
        assert lines["disk.qcow2"] == lines["raw"]


@given(areas=st.lists(st.tuples(st.integers(0, MIB), st.integers(1, 200 * KIB)), max_size=6), where=st.integers(0, 2 * MIB - 1))
@cases(40)
def test_of_a_delta_only_its_bytes_are_in_the_ledger(areas: list[tuple[int, int]], where: int) -> None:
    content = bytes(300 * KIB) + b"data" * 100 * KIB + bytes(1348 * KIB)
    ledger = ledger_of(ChangedReader(Content(content), areas))
    covered = [any(start <= at < start + length for start, length in areas) for at in (where, 0, len(content) - 1)]
    assert covered == [any(row.start <= at < row.end for row in ledger.rows) for at in (where, 0, len(content) - 1)]
    verify(ledger, Content(content))
    changed = bytearray(content)
    changed[where] ^= 1
    if covered[0]:
        with pytest.raises(DiskWriteFailed):
            verify(ledger, Content(bytes(changed)))
    else:
        verify(ledger, Content(bytes(changed)))


@pytest.mark.parametrize("digest", [SHA256, for_accidents()], ids=lambda digest: digest.name)
@given(disk=disks(), where=st.floats(0, 1), threads=st.integers(1, 4))
@cases(60)
def test_one_wrong_byte_anywhere_is_found_and_named(
    digest: Digest, disk: tuple[bytes, list[Extent]], where: float, threads: int
) -> None:
    content, extents = disk
    ledger = ledger_of(Content(content, extents), disk="system", digest=digest)
    verify(ledger, Content(content), threads=threads)
    at = min(int(where * len(content)), len(content) - 1)
    changed = bytearray(content)
    changed[at] ^= 0x80
    block = at - at % BLOCK_BYTES
    expected = next(row for row in ledger.rows if row.start <= at < row.end)
    found = digest.of(memoryview(changed)[block : block + BLOCK_BYTES])
    with pytest.raises(DiskWriteFailed) as failure:
        verify(ledger, Content(bytes(changed)), threads=threads)
    message = failure.value.detail
    assert message.startswith("system: ")
    assert ledger.described(expected) in message
    assert "are zeros" in message or f"as {digest.name.upper()} " in message or "as zeros" in message
    if expected.digest is not None:
        assert f"bytes at offset {block} " in message
        assert found.hex() in message or "as zeros" in message


def test_a_ledger_that_proves_nothing_to_others_has_no_written_form() -> None:
    ledger = ledger_of(Content(b"x" * 100), digest=for_accidents())
    assert ledger != ledger_of(Content(b"x" * 100))
    with pytest.raises(ValueError, match="xxh3-128 is not written"):
        list(ledger.lines())


def test_at_a_low_rate_rows_are_shorter_and_as_good() -> None:
    content = b"x" * 300_000 + bytes(200_000) + b"y" * 100_000
    ledger = ledger_of(Content(content, [Extent(0, len(content))]), bandwidth_bps=10 * MIB)
    assert sum(row.length for row in ledger.rows) == len(content)
    verify(ledger, Content(content))


def test_a_target_that_is_too_short_or_unreadable() -> None:
    ledger = ledger_of(Content(b"x" * 100))
    with pytest.raises(DiskWriteFailed, match="99 bytes"):
        verify(ledger, Content(b"x" * 99))

    class Broken(Content):
        def read_into(self, offset: int, buffer: memoryview) -> None:
            raise DiskReadFailed("at offset 0: broken")

    with pytest.raises(DiskReadFailed):
        verify(ledger, Broken(b"x" * 100))
    with pytest.raises(Cancelled):
        verify(ledger, Content(b"x" * 100), stop=lambda: True)


def test_two_ledgers_say_where_they_differ() -> None:
    content = bytearray(b"a" * (3 * BLOCK_BYTES))
    content[BLOCK_BYTES : 2 * BLOCK_BYTES] = bytes(BLOCK_BYTES)
    one = ledger_of(Content(bytes(content)), disk="one")
    assert one.difference(ledger_of(Content(bytes(content)), disk="other")) is None
    content[BLOCK_BYTES + 7] = 1
    difference = one.difference(ledger_of(Content(bytes(content))))
    assert difference is not None
    assert (difference.start, difference.length, difference.expected) == (BLOCK_BYTES, BLOCK_BYTES, "zeros")
    assert difference.found == f"SHA256 {hashlib.sha256(content[BLOCK_BYTES : 2 * BLOCK_BYTES]).hexdigest()}"
    shorter = one.difference(ledger_of(Content(bytes(content[:-1]))))
    assert shorter is not None
    assert shorter.start == len(content) - 1
    part = Ledger("part", len(content), one.rows[:1])
    missing = one.difference(part)
    assert missing is not None
    assert (missing.start, missing.expected, missing.found) == (BLOCK_BYTES, "zeros", "nothing")


DIGEST = hashlib.sha256(b"a" * 10 + bytes(4 * MIB - 10)).hexdigest()
LINES = [
    '{"ledger":"synvirt","version":1,"disk":"disk0","pass":1,"size_bytes":8388618,"block_bytes":4194304}',
    f'{{"start":0,"length":4194304,"algorithm":"sha256","digest":"{DIGEST}"}}',
    '{"start":4194304,"length":4194314,"algorithm":"zero","digest":""}',
    '{"rows":2}',
]


def test_its_file_is_what_it_is_documented_to_be(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ledger_module, "BLOCK_BYTES", 4 * MIB)
    assert list(ledger_of(Content(b"a" * 10 + bytes(8 * MIB))).lines()) == LINES


@pytest.mark.parametrize(
    "lines",
    [
        [],
        LINES[:-1],
        LINES[:2] + LINES[3:],
        [LINES[0], LINES[2], LINES[1], LINES[3]],
        ["x", *LINES[1:]],
        ["[]", *LINES[1:]],
        [LINES[0].replace('"version":1', '"version":2'), *LINES[1:]],
        [LINES[0].replace("8388618", "-1"), *LINES[1:]],
        [LINES[0].replace("8388618", "8388617"), *LINES[1:]],
        [LINES[0], LINES[1].replace("sha256", "md5"), *LINES[2:]],
        [LINES[0], LINES[1][:-10] + "zz" + LINES[1][-8:], *LINES[2:]],
        [LINES[0], LINES[1].replace("4194304", "true"), *LINES[2:]],
        [LINES[0], "[" * 100_000, *LINES[2:]],
        [LINES[0], " " * 1_000_000 + LINES[1], *LINES[2:]],
    ],
)
def test_what_is_no_ledger_is_refused(lines: list[str]) -> None:
    with pytest.raises(MalformedArchive):
        Ledger.from_lines(lines)


@given(
    st.lists(
        st.one_of(
            st.sampled_from(LINES),
            st.recursive(
                st.one_of(st.none(), st.integers(), st.text(max_size=5)),
                lambda inner: st.dictionaries(st.text(max_size=6), inner),
            ).map(json.dumps),
        ),
        max_size=6,
    )
)
@cases(200)
def test_any_lines_are_a_ledger_or_refused(lines: list[str]) -> None:
    try:
        ledger = Ledger.from_lines(lines)
    except MalformedArchive:
        return
    assert list(Ledger.from_lines(ledger.lines()).rows) == list(ledger.rows)


def test_the_file_survives_being_a_file(tmp_path: Path) -> None:
    path = tmp_path / "ledger.jsonl"
    path.write_text("".join(f"{line}\n" for line in LINES))
    with path.open() as file:
        assert list(Ledger.from_lines(file).lines())[1:] == LINES[1:]
