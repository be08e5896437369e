"""VHDX images from their specification: what QEMU cannot make, with the disk that they must read as.

Image and disk are written as sparse files, so that a case may have many GiB. Noise is put where somebody must look, and other
noise where nobody may: under zero states, under sectors that a bitmap calls the parent's, under what the log replaces.
"""

import random
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import BinaryIO
from uuid import UUID

import google_crc32c
from hypothesis import strategies as st

from synvirt.disks.raw.files import punch_hole
from synvirt.programs import run

KIB, MIB = 1 << 10, 1 << 20
NOT_PRESENT, UNDEFINED, ZERO, UNMAPPED, FULL, PARTIAL = 0, 1, 2, 3, 6, 7
_BAT = UUID("2DC27766-F623-4200-9D64-115E9BFD4A08")
_METADATA = UUID("8B7CA206-4790-4B9A-B8FE-575F050F886E")
_FILE_PARAMETERS = UUID("CAA16737-FA36-4D43-B3B6-33F0AA44E76B")
_DISK_SIZE = UUID("2FA54224-CD1B-4876-B211-5DBED83BF4B8")
_DISK_ID = UUID("BECA12AB-B2E6-4523-93EF-C309E000C746")
_LOGICAL_SECTOR = UUID("8141BF1D-A96F-4709-BA47-F233A8FAAB5F")
_PHYSICAL_SECTOR = UUID("CDA348C7-445D-4471-9CC9-E9885251C556")
_PARENT_LOCATOR = UUID("A8D35F2D-B30B-454D-ABF7-D3D84834AB0C")
_VHDX_LOCATOR = UUID("B04AEFB7-D19E-4A81-B789-25B8E9445913")
NO_LOG, LOG_GUID, IDENTITY, PARENT_IDENTITY = UUID(int=0), UUID(int=0x10), UUID(int=0x20), UUID(int=0x30)
LOG_SECTOR = 4 * KIB


def checksummed(content: bytes) -> bytes:
    """A structure whose CRC-32C lies in bytes 4 to 8 and counts as zero itself."""
    return content[:4] + struct.pack("<I", google_crc32c.value(content[:4] + bytes(4) + content[8:])) + content[8:]


@dataclass(frozen=True)
class Block:
    """A payload block. `noise`: (where, how long), and `present`: which sectors of a partial one are here, both in sectors."""

    state: int
    noise: tuple[tuple[int, int], ...] = ()
    present: tuple[tuple[int, int], ...] = ()


@dataclass(frozen=True)
class Vhdx:
    """An image. `order`: shuffles where regions and blocks lie in the file."""

    size: int
    blocks: tuple[Block, ...] = ()
    block_bytes: int = MIB
    sector_bytes: int = 512
    identity: UUID = IDENTITY
    locator: tuple[tuple[str, str], ...] | None = None
    order: int = 0
    fixed: bool = False
    log_bytes: int = MIB

    @property
    def chunk_blocks(self) -> int:
        return (self.sector_bytes << 23) // self.block_bytes

    @property
    def chunks(self) -> int:
        return -(-len(self.blocks) // self.chunk_blocks)


@dataclass(frozen=True)
class Written:
    """Where things lie in the image's file."""

    log: int
    metadata: int
    bat: int
    bat_bytes: int
    blocks: dict[int, int]
    bitmaps: dict[int, int]
    end: int


def write(image: Vhdx, path: Path, *, seed: int = 0, raw: Path | None = None, parent_raw: Path | None = None) -> Written:
    """Write the image to `path`, and to `raw` the disk that it must read as, over the parent's."""
    places = _place(image)
    with path.open("wb") as file:
        file.truncate(places.end)
        _put(file, 0, b"vhdxfile" + "synvirt tests".encode("utf-16-le"))
        for number in (0, 1):
            _put(file, (64 + 64 * number) * KIB, header(image, places, sequence=number + 1))
            _put(
                file,
                (192 + 64 * number) * KIB,
                region_table([(_BAT, places.bat, places.bat_bytes, 1), (_METADATA, places.metadata, MIB, 1)]),
            )
        _put(file, places.metadata, metadata(image))
        _put(file, places.bat, bat(image, places))
        for chunk, at in places.bitmaps.items():
            _put_bitmap(image, file, chunk, at)
        raw = raw or path.with_suffix(".raw")
        if parent_raw is not None:
            run(["cp", "--sparse=always", str(parent_raw), str(raw)], timeout_s=60)
        with raw.open("r+b" if parent_raw is not None else "w+b") as disk:
            disk.truncate(image.size)
            for number, block in enumerate(image.blocks):
                _put_block(image, number, block, places.blocks.get(number), file, disk, random.Random(f"{seed} {number}"))
    return places


def _place(image: Vhdx) -> Written:
    """Everything after the first MiB, on boundaries of 1 MiB, in a drawn order."""
    entries = image.chunks * (image.chunk_blocks + 1)
    bat_bytes = max(1, -(-entries * 8 // MIB)) * MIB
    held = [number for number, block in enumerate(image.blocks) if block.state in (FULL, PARTIAL)]
    partial = {number // image.chunk_blocks for number in held if image.blocks[number].state == PARTIAL}
    things = [("log", 0, image.log_bytes), ("metadata", 0, MIB), ("bat", 0, bat_bytes)]
    things += [("block", number, image.block_bytes) for number in held]
    things += [("bitmap", chunk, MIB) for chunk in sorted(partial)]
    random.Random(image.order).shuffle(things)
    at, found = MIB, {}
    for what, number, length in things:
        found[what, number] = at
        at += length
    return Written(
        log=found["log", 0],
        metadata=found["metadata", 0],
        bat=found["bat", 0],
        bat_bytes=bat_bytes,
        blocks={number: found["block", number] for number in held},
        bitmaps={chunk: found["bitmap", chunk] for chunk in sorted(partial)},
        end=at,
    )


def header(
    image: Vhdx, places: Written, *, sequence: int, log_guid: UUID = NO_LOG, version: int = 1, log_version: int = 0
) -> bytes:
    content = struct.pack(
        "<4sIQ16s16s16sHHIQ",
        b"head", 0, sequence, UUID(int=5).bytes_le, image.identity.bytes_le, log_guid.bytes_le, log_version, version,
        image.log_bytes, places.log,
    )  # fmt: skip
    return checksummed(content.ljust(4 * KIB, b"\0"))


def region_table(regions: Sequence[tuple[UUID, int, int, int]], count: int | None = None) -> bytes:
    content = struct.pack("<4sIII", b"regi", 0, len(regions) if count is None else count, 0)
    content += b"".join(struct.pack("<16sQII", guid.bytes_le, *rest) for guid, *rest in regions)
    return checksummed(content.ljust(64 * KIB, b"\0"))


def metadata(image: Vhdx) -> bytes:
    flags = (2 if image.locator is not None else 0) | (1 if image.fixed else 0)
    items = [
        (_FILE_PARAMETERS, struct.pack("<II", image.block_bytes, flags), 4),
        (_DISK_SIZE, struct.pack("<Q", image.size), 6),
        (_DISK_ID, UUID(int=7).bytes_le, 6),
        (_LOGICAL_SECTOR, struct.pack("<I", image.sector_bytes), 6),
        (_PHYSICAL_SECTOR, struct.pack("<I", 4096), 6),
    ]
    if image.locator is not None:
        items.append((_PARENT_LOCATOR, parent_locator(image.locator), 4))
    table, contents, at = struct.pack("<8sHH20x", b"metadata", 0, len(items)), b"", 64 * KIB
    for guid, content, item_flags in items:
        table += struct.pack("<16sIIII", guid.bytes_le, at, len(content), item_flags, 0)
        contents, at = contents + content, at + len(content)
    return table.ljust(64 * KIB, b"\0") + contents


def parent_locator(pairs: Sequence[tuple[str, str]], guid: UUID = _VHDX_LOCATOR) -> bytes:
    at = 20 + 12 * len(pairs)
    table, texts = struct.pack("<16sHH", guid.bytes_le, 0, len(pairs)), b""
    for key, value in pairs:
        wide = [text.encode("utf-16-le") for text in (key, value)]
        table += struct.pack("<IIHH", at, at + len(wide[0]), len(wide[0]), len(wide[1]))
        texts, at = texts + b"".join(wide), at + len(wide[0]) + len(wide[1])
    return table + texts


def bat(image: Vhdx, places: Written) -> bytes:
    entries = [0] * (image.chunks * (image.chunk_blocks + 1))
    for number, block in enumerate(image.blocks):
        entries[number + number // image.chunk_blocks] = block.state | places.blocks.get(number, 0)
    for chunk, at in places.bitmaps.items():
        entries[(chunk + 1) * (image.chunk_blocks + 1) - 1] = 6 | at
    return struct.pack(f"<{len(entries)}Q", *entries)


def _put(file: BinaryIO, at: int, content: bytes) -> None:
    file.seek(at)
    file.write(content)


def _put_bitmap(image: Vhdx, file: BinaryIO, chunk: int, at: int) -> None:
    sectors = image.block_bytes // image.sector_bytes
    for number, block in enumerate(image.blocks):
        if block.state == PARTIAL and number // image.chunk_blocks == chunk:
            bits = 0
            for first, count in block.present:
                bits |= ((1 << count) - 1) << first
            _put(file, at + number % image.chunk_blocks * sectors // 8, bits.to_bytes(-(-sectors // 8), "little"))


def _put_block(
    image: Vhdx, number: int, block: Block, at: int | None, file: BinaryIO, disk: BinaryIO, noise: random.Random
) -> None:
    """The block's noise in the image, and what of it can be seen on the disk."""
    start, end = number * image.block_bytes, min((number + 1) * image.block_bytes, image.size)
    disk.flush()
    if image.locator is not None and block.state in (ZERO, UNDEFINED, UNMAPPED):
        punch_hole(disk.fileno(), start, end - start)
    if at is None:
        return
    sectors = image.block_bytes // image.sector_bytes
    seen = block.present if block.state == PARTIAL else ((0, sectors),)
    for first, count in seen:
        if start + first * image.sector_bytes < end:
            length = min(count * image.sector_bytes, end - start - first * image.sector_bytes)
            punch_hole(disk.fileno(), start + first * image.sector_bytes, length)
    for first, count in block.noise:
        content = noise.randbytes(count * image.sector_bytes)
        _put(file, at + first * image.sector_bytes, content)
        for seen_first, seen_count in seen:
            begin, stop = max(first, seen_first), min(first + count, seen_first + seen_count)
            visible = content[(begin - first) * image.sector_bytes : (stop - first) * image.sector_bytes]
            to = start + begin * image.sector_bytes
            if begin < stop and to < end:
                _put(disk, to, visible[: end - to])
    disk.flush()


@dataclass(frozen=True)
class Change:
    """A change in the log: one sector, or `zeros` bytes of them."""

    offset: int
    sector: bytes = b""
    zeros: int = 0


def log_entry(
    sequence: int, changes: Sequence[Change], *, tail: int, flushed: int, last: int, guid: UUID = LOG_GUID, padding: int = 0
) -> bytes:
    """A log entry; `padding` sectors more than it needs, as a host with large sectors would write."""
    content = b""
    for change in changes:
        if change.sector:
            content += b"desc" + change.sector[-4:] + change.sector[:8] + struct.pack("<QQ", change.offset, sequence)
        else:
            content += struct.pack("<4sIQQQ", b"zero", 0, change.zeros, change.offset, sequence)
    content = bytes(64) + content
    content = content.ljust(-(-len(content) // LOG_SECTOR) * LOG_SECTOR, b"\0")
    for change in changes:
        if change.sector:
            content += (
                struct.pack("<4sI", b"data", sequence >> 32) + change.sector[8:-4] + struct.pack("<I", sequence & 0xFFFF_FFFF)
            )
    content += bytes(padding * LOG_SECTOR)
    head = struct.pack(
        "<4sIIIQII16sQQ", b"loge", 0, len(content), tail, sequence, len(changes), 0, guid.bytes_le, flushed, last
    )
    return checksummed(head + content[64:])


class Ring:
    """The log being written: entries one after the other, round and round."""

    def __init__(self, length: int, at: int) -> None:
        self.content, self.at = bytearray(length), at

    def add(self, entry: bytes) -> int:
        """Write an entry; returns where it begins."""
        begun = self.at
        for start in range(0, len(entry), LOG_SECTOR):
            to = (begun + start) % len(self.content)
            self.content[to : to + LOG_SECTOR] = entry[start : start + LOG_SECTOR]
        self.at = (begun + len(entry)) % len(self.content)
        return begun


SURROUNDINGS = frozenset({"another session", "older", "applied", "torn", "padding", "wrapped", "several"})


def lose_power(image: Vhdx, path: Path, places: Written, *, seed: int, around: frozenset[str] = SURROUNDINGS) -> int:
    """Make the image one of a host that lost power: metadata in its place is wrong, and the log has what is right.

    Around the active sequence lies what a ring has: an older sequence, entries of another session, entries that were applied
    long ago, a newer entry that was not written to its end. Returns how many entries must be replayed.
    """
    draw = random.Random(seed)
    with path.open("r+b") as file:
        truth = _metadata_sectors(image, file, places, draw)
        ring = Ring(image.log_bytes, draw.randrange(image.log_bytes // LOG_SECTOR) * LOG_SECTOR if "wrapped" in around else 0)
        sequence = draw.choice([1, 100, (1 << 32) - 2, 1 << 40])
        garbage = [Change(offset, draw.randbytes(LOG_SECTOR)) for offset in truth]
        end = places.end

        def add(changes: Sequence[Change], tail: int | None, number: int, guid: UUID = LOG_GUID) -> int:
            entry = log_entry(
                number,
                changes,
                tail=ring.at if tail is None else tail,
                flushed=end,
                last=end,
                guid=guid,
                padding=draw.choice([0, 0, 1]) if "padding" in around else 0,
            )
            return ring.add(entry)

        if draw.random() < 0.5 and "another session" in around:  # another session's, with higher numbers
            add(garbage, None, sequence + 1000, UUID(int=0x99))
        if draw.random() < 0.5 and "older" in around:  # an older sequence, complete
            add(garbage, None, sequence)
            sequence += draw.choice([5, 500])
        if (
            draw.random() < 0.5 and "applied" in around
        ):  # just before the tail: applied, and its place may be a payload block's by now
            add([Change(at, draw.randbytes(LOG_SECTOR)) for at in places.blocks.values()], None, sequence)
            sequence += 1
        tail, count = ring.at, draw.randint(1, 4) if "several" in around else 1
        for number in range(count):
            add(_changes(truth, garbage, draw, last=number == count - 1), tail, sequence + number)
        if draw.random() < 0.5 and "torn" in around:  # torn: its last sector was not written
            torn = log_entry(sequence + count, garbage, tail=tail, flushed=end, last=end)
            ring.add(torn[:-LOG_SECTOR])
        _put(file, places.log, bytes(ring.content))
        for offset in truth:
            _put(file, offset, draw.randbytes(LOG_SECTOR))
        for number in (0, 1):
            _put(file, (64 + 64 * number) * KIB, header(image, places, sequence=number + 8, log_guid=LOG_GUID))
    return count


def _changes(truth: dict[int, bytes], garbage: list[Change], draw: random.Random, *, last: bool) -> list[Change]:
    """Some wrong and some right sectors; in the last entry all are right. Zeros are sometimes written in the short form."""
    changes = []
    for wrong, (offset, sector) in zip(garbage, truth.items(), strict=True):
        if last or draw.random() < 0.3:
            zeros = not any(sector) and draw.random() < 0.7
            changes.append(Change(offset, zeros=LOG_SECTOR) if zeros else Change(offset, sector))
        elif draw.random() < 0.3:
            changes.append(wrong)
        elif draw.random() < 0.1:
            changes.append(Change(offset, zeros=LOG_SECTOR))
    return changes


def _metadata_sectors(image: Vhdx, file: BinaryIO, places: Written, draw: random.Random) -> dict[int, bytes]:
    """Some sectors of what a host changes through the log, with their true content."""
    areas = [192 * KIB, places.metadata, places.metadata + 64 * KIB, places.bat, places.bat + places.bat_bytes - LOG_SECTOR]
    areas += [places.bat + at // LOG_SECTOR * LOG_SECTOR for at in range(0, 8 * len(image.blocks), LOG_SECTOR)]
    for chunk, at in places.bitmaps.items():
        for number in range(chunk * image.chunk_blocks, min((chunk + 1) * image.chunk_blocks, len(image.blocks))):
            bit = number % image.chunk_blocks * image.block_bytes // image.sector_bytes
            areas.append(at + bit // 8 // LOG_SECTOR * LOG_SECTOR)
    found = {}
    for offset in draw.sample(sorted(set(areas)), k=draw.randint(1, min(40, len(set(areas))))):
        file.seek(offset)
        found[offset] = file.read(LOG_SECTOR)
    return found


@cache
def _areas(sectors: int) -> tuple[st.SearchStrategy[list[tuple[int, int]]], st.SearchStrategy[list[tuple[int, int]]]]:
    """Those of noise, and those that are present. Made once: to make them takes Hypothesis longer than to draw of them."""
    ranges = st.tuples(st.integers(0, sectors - 1), st.integers(1, 64)).map(lambda r: (r[0], min(r[1], sectors - r[0])))
    long_ranges = st.tuples(st.integers(0, sectors - 1), st.integers(1, sectors)).map(
        lambda r: (r[0], min(r[1], sectors - r[0]))
    )
    edges = st.sampled_from([(0, 1), (sectors - 1, 1), (0, sectors)])
    noise = st.lists(st.one_of(ranges, edges.filter(lambda r: r[1] <= 4096)), max_size=4)
    return noise, st.lists(st.one_of(ranges, long_ranges, edges), max_size=4)


@st.composite
def _blocks(draw: st.DrawFn, sectors: int, states: tuple[int, ...]) -> Block:
    noise, present = _areas(sectors)
    return Block(state=draw(st.sampled_from(states)), noise=tuple(draw(noise)), present=tuple(draw(present)))


@st.composite
def vhdxs(draw: st.DrawFn, *, differencing: bool, sector_bytes: int | None = None) -> Vhdx:
    """Images of a few blocks, of which some span chunks: 16 blocks of 256 MiB at 512-byte sectors are one."""
    sector_bytes = sector_bytes or draw(st.sampled_from([512, 4096]))
    block_bytes = draw(st.sampled_from([1, 1, 2, 8, 256])) * MIB
    sectors = block_bytes // sector_bytes
    states = (NOT_PRESENT, UNDEFINED, ZERO, UNMAPPED, FULL, FULL, *((PARTIAL, PARTIAL, PARTIAL) if differencing else ()))
    count = draw(st.integers(0, 8) if block_bytes < 256 * MIB else st.sampled_from([1, 16, 17, 35, 130]))
    some = draw(st.dictionaries(st.integers(0, max(0, count - 1)), _blocks(sectors, states), max_size=8 if count else 0))
    cut = draw(st.integers(0, sectors - 1)) if count else 0
    return Vhdx(
        size=count * block_bytes - cut * sector_bytes,
        blocks=tuple(some.get(number, Block(NOT_PRESENT)) for number in range(count)),
        block_bytes=block_bytes,
        sector_bytes=sector_bytes,
        order=draw(st.integers(0, 5)),
        fixed=draw(st.booleans()),
        log_bytes=draw(st.sampled_from([1, 1, 3])) * MIB,
    )
