"""A volume is mended from its source, row by row, and nothing else is written; where one of them is shorter or lost, too."""

import hashlib
from collections.abc import Iterator
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from synvirt.blocks import Extent
from synvirt.disks.checking.ledger import Ledger, Row
from synvirt.disks.checking.repairing import UNIT_BYTES, Repaired, differing_rows, repair
from synvirt.errors import DiskReadFailed, DiskWriteFailed
from tests.cases import cases

ROW_BYTES = 2 * UNIT_BYTES
ROWS = 5


class Disk:
    """What is written is there after a flush, not before; `lost`: rows that cannot be read until they are written whole."""

    max_readers = max_writers = 1

    def __init__(self, content: bytes, lost: frozenset[int] = frozenset()) -> None:
        self.content, self.lost = bytearray(content), set(lost)
        self.written: list[tuple[int, bytes]] = []

    @property
    def size(self) -> int:
        return len(self.content)

    def extents(self) -> Iterator[Extent]:
        yield Extent(0, self.size)

    def read_into(self, offset: int, buffer: memoryview) -> None:
        if offset // ROW_BYTES in self.lost or offset + len(buffer) > self.size:
            raise DiskReadFailed(f"offset {offset} cannot be read")
        buffer[:] = self.content[offset : offset + len(buffer)]

    def write(self, offset: int, buffer: memoryview) -> None:
        self.written.append((offset, bytes(buffer)))

    def zero(self, offset: int, length: int) -> None:
        self.written.append((offset, bytes(length)))

    def flush(self) -> None:
        for offset, content in self.written:
            self.content[offset : offset + len(content)] = content
            if len(content) == ROW_BYTES:
                self.lost.discard(offset // ROW_BYTES)

    def close(self) -> None:
        pass


def rows_of(content: bytes) -> list[Row]:
    pieces = [(at, content[at : at + ROW_BYTES]) for at in range(0, len(content), ROW_BYTES)]
    return [Row(at, len(piece), hashlib.sha256(piece).digest() if any(piece) else None) for at, piece in pieces]


row_numbers = st.frozensets(st.integers(0, ROWS - 1))


@cases(60)
@given(row_numbers, row_numbers, row_numbers, row_numbers, st.integers(0, ROWS * ROW_BYTES))
def test_each_row_is_mended_or_named_and_left(
    zeros: frozenset[int], damaged: frozenset[int], lost: frozenset[int], changed: frozenset[int], source_bytes: int
) -> None:
    whole = b"".join(bytes(ROW_BYTES) if at in zeros else Random(at).randbytes(ROW_BYTES) for at in range(ROWS))
    volume, source = Disk(whole, lost), Disk(whole[:source_bytes])
    for at in damaged:
        volume.content[at * ROW_BYTES + UNIT_BYTES] ^= 1
    for at in changed:
        source.content[at * ROW_BYTES : at * ROW_BYTES + 1] = b"\xa5" if at * ROW_BYTES < source.size else b""
    ledger = Ledger("disk", len(whole), rows_of(whole))
    wrong = [row for row in rows_of(whole) if row.start // ROW_BYTES in damaged | lost]
    before = bytes(volume.content)
    left = [row for row in wrong if row.start // ROW_BYTES in changed or row.end > source.size]
    assert repair(wrong, source, volume, volume).left == tuple(left)
    for row in rows_of(whole):
        kept = before if row in left or row not in wrong else whole
        assert volume.content[row.start : row.end] == kept[row.start : row.end]
    if not left:
        assert differing_rows(ledger, volume) == []


def test_a_volume_that_does_not_keep_what_is_written_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = Random(1).randbytes(ROW_BYTES)
    volume = Disk(bytes(ROW_BYTES))
    monkeypatch.setattr(volume, "flush", lambda: None)
    with pytest.raises(DiskWriteFailed, match="read back differently"):
        repair(rows_of(whole), Disk(whole), volume, volume)


def test_a_volume_that_is_smaller_than_its_disk_is_refused() -> None:
    whole = Random(1).randbytes(ROW_BYTES)
    with pytest.raises(DiskWriteFailed, match="the volume has 8191 bytes, the disk 8192"):
        differing_rows(Ledger("disk", ROW_BYTES, rows_of(whole)), Disk(whole[:-1]))
    assert repair([], Disk(b""), Disk(b""), Disk(b"")) == Repaired((), ())
