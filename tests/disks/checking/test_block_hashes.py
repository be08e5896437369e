"""Hashes of a volume, kept while passes write it: the same however the passes went, were cut off, or were killed."""

import contextlib
import hashlib
import os
import random
from collections.abc import Iterator
from pathlib import Path
from uuid import uuid4

import pytest

from synvirt import copying
from synvirt.blocks import Extent
from synvirt.copying import copy
from synvirt.disks.checking import block_hashes
from synvirt.disks.checking.block_hashes import BlockHashes, known_digests
from synvirt.disks.checking.ledger import BLOCK_BYTES
from synvirt.errors import DiskReadFailed
from synvirt.sizes import KIB

BLOCK = 256 * KIB
OF_ZEROS = block_hashes.zero_digest(BLOCK_BYTES)
TOKEN = uuid4()


@pytest.fixture(autouse=True, scope="module")
def small_blocks() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(block_hashes, "BLOCK_BYTES", BLOCK)
        patch.setattr(copying, "REQUEST_BYTES", BLOCK)
        patch.setattr(block_hashes, "_ZERO", hashlib.sha256(bytes(BLOCK)).digest())
        yield


def test_the_digest_of_zeros_that_is_written_out_is_theirs() -> None:
    assert hashlib.sha256(bytes(BLOCK_BYTES)).digest() == OF_ZEROS


class Disk:
    """A source: its content, and which extents a pass gets. It fails at `fails_at`."""

    max_readers = 4

    def __init__(self, content: bytes, extents: list[Extent], fails_at: int | None = None) -> None:
        self.content, self._extents, self._fails_at = content, extents, fails_at
        self.size = len(content)

    def extents(self) -> Iterator[Extent]:
        return iter(self._extents)

    def read_into(self, offset: int, buffer: memoryview) -> None:
        if self._fails_at is not None and offset + len(buffer) > self._fails_at:
            raise DiskReadFailed(f"at {offset}")
        buffer[:] = self.content[offset : offset + len(buffer)]

    def close(self) -> None:
        pass


class Volume:
    """Both sides of a volume in memory."""

    max_readers = max_writers = 4

    def __init__(self, size: int) -> None:
        self.content, self.size, self.bytes_read = bytearray(size), size, 0

    def extents(self) -> Iterator[Extent]:
        return iter([Extent(0, self.size)])

    def read_into(self, offset: int, buffer: memoryview) -> None:
        self.bytes_read += len(buffer)
        buffer[:] = self.content[offset : offset + len(buffer)]

    def write(self, offset: int, buffer: memoryview) -> None:
        self.content[offset : offset + len(buffer)] = buffer

    def zero(self, offset: int, length: int) -> None:
        self.content[offset : offset + length] = bytes(length)

    def flush(self) -> None:
        pass

    def close(self) -> None:
        pass


def digests(content: bytes | bytearray) -> list[bytes]:
    return [hashlib.sha256(content[at : at + BLOCK]).digest() for at in range(0, len(content), BLOCK)]


def known(path: Path, size: int) -> list[bytes] | None:
    found = known_digests(path, size, TOKEN)
    return None if found is None else list(found)


def one_pass(
    path: Path, disk: Disk, volume: Volume, *, fresh: bool, since: int = 0, last: bool = True, kill: bool = False
) -> int:
    """The watermark. `kill`: the worker is gone before it can close anything."""
    hashes, watermark = BlockHashes(path, disk.size, TOKEN), since

    def on_watermark(copied: object) -> None:
        nonlocal watermark
        watermark = copied.watermark  # type: ignore[attr-defined]
        hashes.settle(watermark)

    try:
        copy(
            hashes.reading(disk, fresh=fresh, since=since),
            hashes.writing(volume),
            since=since,
            fresh=fresh,
            flush_every_s=0,
            on_watermark=on_watermark,
        )
        if last:
            hashes.fill(volume)
    finally:
        if not kill:
            hashes.close()
    return watermark


def extents_of(seed: random.Random, content: bytearray, *, whole: bool) -> list[Extent]:
    """Random ones over random content; data may be zeros. Of a delta, some is left out."""
    found, at = [], 0
    while at < len(content):
        length = min(seed.choice([4 * KIB, 68 * KIB, BLOCK, 2 * BLOCK, 5 * BLOCK]), len(content) - at)
        kind = seed.choice(["data", "zeros", "zero"] + ([] if whole else ["unchanged"] * 3))
        if kind == "data":
            content[at : at + length] = seed.randbytes(length)
        elif kind != "unchanged":
            content[at : at + length] = bytes(length)
        if kind != "unchanged":
            found.append(Extent(at, length, kind == "zero"))
        at += length
    return found


def test_a_file_is_called_closed_only_while_its_hashes_are_durable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """After a power cut: the header that is on the disk is never of hashes that are not."""
    path, fsync, synced = tmp_path / "0.hashes", os.fsync, list[tuple[int, bool]]()

    def noted(descriptor: int) -> None:
        fsync(descriptor)
        header = block_hashes._header(descriptor, 2 * BLOCK, TOKEN)
        assert header is not None
        synced.append((header[1], path.read_bytes()[block_hashes.HEADER_BYTES :] != bytes(2 * 32)))

    monkeypatch.setattr(os, "fsync", noted)
    begun, closed = block_hashes._OPEN, block_hashes._CLOSED
    disk = Disk(b"x" * 2 * BLOCK, [Extent(0, 2 * BLOCK)])
    one_pass(path, disk, Volume(2 * BLOCK), fresh=True)
    assert synced == [(begun, False), (begun, True), (closed, True)]
    synced.clear()
    one_pass(path, disk, Volume(2 * BLOCK), fresh=False)
    assert synced == [(begun, True), (begun, True), (closed, True)]


@pytest.mark.parametrize("seed", range(12))
def test_hashes_are_of_what_the_volume_holds_whatever_the_passes_were(tmp_path: Path, seed: int) -> None:
    chance, path = random.Random(seed), tmp_path / "0.hashes"
    content = bytearray(chance.randrange(9 * BLOCK, 14 * BLOCK, 512))
    volume = Volume(len(content))
    for number in range(4):
        extents = extents_of(chance, content, whole=number == 0)
        while True:
            # Cut off, maybe more than once, by an error or by a kill.
            fails_at = chance.choice([None, chance.randrange(len(content))])
            disk = Disk(bytes(content), extents, fails_at)
            kill = fails_at is not None and chance.random() < 0.5
            try:
                one_pass(path, disk, volume, fresh=number == 0, last=number == 3, kill=kill)
            except DiskReadFailed:
                continue
            if not (kill and number == 3):
                break
    assert volume.content == content
    assert known(path, len(content)) == digests(content)


def test_zeros_that_begin_or_end_within_a_block_are_not_all_of_it(tmp_path: Path) -> None:
    """A fresh volume is not written there: what is known of them is known by the extents alone."""
    content = bytes(2 * BLOCK + 4 * KIB) + random.Random(4).randbytes(2 * BLOCK + 60 * KIB) + bytes(3 * BLOCK - 64 * KIB)
    begin, end = 2 * BLOCK + 4 * KIB, 4 * BLOCK + 64 * KIB
    extents = [Extent(0, begin, zero=True), Extent(begin, end - begin), Extent(end, len(content) - end, zero=True)]
    one_pass(tmp_path / "h", Disk(content, extents), Volume(len(content)), fresh=True)
    assert known(tmp_path / "h", len(content)) == digests(content)


def test_whole_blocks_are_not_read_back(tmp_path: Path) -> None:
    content = random.Random(1).randbytes(6 * BLOCK) + bytes(10 * BLOCK + 512)
    volume = Volume(len(content))
    one_pass(
        tmp_path / "h",
        Disk(content, [Extent(0, 6 * BLOCK), Extent(6 * BLOCK, 10 * BLOCK + 512, zero=True)]),
        volume,
        fresh=True,
    )
    assert volume.bytes_read == 0
    assert known(tmp_path / "h", len(content)) == digests(content)
    changed = bytearray(content)
    changed[BLOCK + 5000 : BLOCK + 9096] = bytes(4096)
    one_pass(tmp_path / "h", Disk(bytes(changed), [Extent(BLOCK + 4096, 8 * KIB)]), volume, fresh=False)
    assert volume.bytes_read == BLOCK
    assert known(tmp_path / "h", len(content)) == digests(changed)


def test_a_block_that_is_being_written_has_no_hash(tmp_path: Path) -> None:
    content = random.Random(2).randbytes(4 * BLOCK)
    volume = Volume(len(content))
    one_pass(tmp_path / "h", Disk(content, [Extent(0, 4 * BLOCK)]), volume, fresh=True)
    after = random.Random(3).randbytes(4 * BLOCK)
    with contextlib.suppress(DiskReadFailed):
        one_pass(tmp_path / "h", Disk(after, [Extent(0, 4 * BLOCK)], fails_at=2 * BLOCK), volume, fresh=False)
    assert known(tmp_path / "h", len(content)) is None, "blocks that may be half written are known"


def test_a_hash_is_stored_once_its_block_is_durable_and_not_before(tmp_path: Path) -> None:
    """`watermark` bytes are. A hash that came earlier would be of bytes that a power cut takes away."""
    size, token = 5 * BLOCK, uuid4()
    hashes = BlockHashes(tmp_path / "h", size, token)
    content = random.Random(6).randbytes(3 * BLOCK)
    hashes.has_read(0, memoryview(bytearray(content)))
    hashes.is_zero_from(3 * BLOCK, size)
    for watermark in (0, BLOCK - 1, BLOCK, 2 * BLOCK + 5, 4 * BLOCK, 5 * BLOCK - 1, size):
        hashes.settle(watermark)
        stored = [hashes.known(block) is not None for block in range(5)]
        zeros = watermark == size  # they are stored together
        assert stored == [BLOCK * (block + 1) <= watermark for block in range(3)] + [zeros, zeros], watermark
    hashes.close()


def test_a_file_that_was_open_when_its_host_went_down_is_started_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    content = random.Random(4).randbytes(3 * BLOCK)
    volume = Volume(len(content))
    one_pass(tmp_path / "h", Disk(content, [Extent(0, 3 * BLOCK)]), volume, fresh=True, kill=True)
    assert known(tmp_path / "h", len(content)) is None, "it was not closed"
    # What the volume holds by now the file does not know: a power cut has lost what was struck out.
    volume.content[BLOCK : BLOCK + 10] = b"0123456789"
    boot = tmp_path / "boot"
    boot.write_text(str(uuid4()))
    monkeypatch.setattr(block_hashes, "_BOOT_ID", boot)
    one_pass(tmp_path / "h", Disk(content, []), volume, fresh=False)
    assert known(tmp_path / "h", len(content)) == digests(volume.content)


def test_another_token_or_size_starts_over(tmp_path: Path) -> None:
    content = random.Random(5).randbytes(3 * BLOCK)
    one_pass(tmp_path / "h", Disk(content, [Extent(0, 3 * BLOCK)]), Volume(len(content)), fresh=True)
    assert known_digests(tmp_path / "h", len(content), uuid4()) is None
    assert known_digests(tmp_path / "h", len(content) - 1, TOKEN) is None
    BlockHashes(tmp_path / "h", len(content), other := uuid4()).close()
    assert known_digests(tmp_path / "h", len(content), other) is None, "nothing is known yet"
    assert known(tmp_path / "h", len(content)) is None


def test_a_full_disk_costs_the_hashes_and_not_the_copy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    content = random.Random(6).randbytes(3 * BLOCK)
    volume = Volume(len(content))

    def full(_file: int, _content: bytes, at: int) -> None:
        if at > 0:
            raise OSError(28, "No space left on device")

    monkeypatch.setattr(block_hashes, "_write", full)
    one_pass(tmp_path / "h", Disk(content, [Extent(0, 3 * BLOCK)]), volume, fresh=True)
    assert volume.content == content
    assert not (tmp_path / "h").exists()
