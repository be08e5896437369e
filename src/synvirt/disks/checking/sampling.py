"""A sample against wrong change tracking: some blocks that the source reports as unchanged are read on both sides and compared;
in a first pass some that it reports as never written.

Change tracking has been wrong on every platform at some time (vSphere's after a disk was extended, others' after a crash).
Nothing would show a block that it left out until the guest reads it. A sample in each pass finds a source that is often wrong.
"""

import random
from collections.abc import Iterator, Sequence

from synvirt.blocks import DiskReader, Extent
from synvirt.errors import CbtReset
from synvirt.sizes import KIB

# One page: an error in any of its bytes shows. Many small blocks sample more places than few large ones.
BLOCK_BYTES = 4 * KIB
# The smallest sample, and its share of a large delta: a pass reads at most 2 % more than what changed.
LEAST_BLOCKS = 64
SHARE = 0.01
# The largest sample: each block is a request of its own, one after the other, and in the last pass the guest is off meanwhile.
# If a source is wrong about one block in a thousand, this many samples almost always find one.
MOST_BLOCKS = 4096
# How often a report about a sample is right.
CONFIDENCE = 0.95
# For parts that were never written: each block is a request of its own over a network.
UNWRITTEN_BLOCKS = 64
# This many places are tried per wanted block: where nearly all has changed, few are left.
TRIES_A_BLOCK = 4
# The search around a block that was found: each 4 KiB is a request over a network.
LOST_BYTES_MAX = 1024 * KIB


class ChangesMissed(CbtReset):
    """The source reported a block as unchanged that has changed."""


def blocks_to_check(delta_bytes: int) -> int:
    return min(max(LEAST_BLOCKS, int(delta_bytes * SHARE) // BLOCK_BYTES), MOST_BLOCKS)


def would_see(checked_bytes: int, confidence: float = CONFIDENCE) -> float:
    """The smallest share of wrong blocks that a sample of this many bytes finds with this confidence, 0 to 1. The share is of
    the blocks reported as unchanged; to find it means to find one wrong block. n blocks miss a share s with a chance of
    (1 - s)^n. Only evenly drawn blocks count, at least half of them, as wrong blocks may be anywhere."""
    blocks = checked_bytes // BLOCK_BYTES // 2
    return float(1 - (1 - confidence) ** (1 / blocks)) if blocks else 1.0


def differing(source: DiskReader, copy: DiskReader, seed: str, blocks: int, *, zeros: bool = False) -> tuple[int | None, int]:
    """The offset of a block outside the source's extents that differs in the copy, or None; and how many bytes of such blocks
    were read. With `zeros`, reported zeros are checked too, though the copy has no others. The same seed reads the same places.
    At most half of them are where the copy has data."""
    draw = random.Random(seed)  # noqa: S311 - an attacker gains nothing by knowing it
    mine, theirs = bytearray(BLOCK_BYTES), bytearray(BLOCK_BYTES)
    done = 0
    for start in _chosen(source, copy, draw, blocks, zeros=zeros):
        length = min(BLOCK_BYTES, source.size - start)
        source.read_into(start, memoryview(theirs)[:length])
        copy.read_into(start, memoryview(mine)[:length])
        done += length
        if mine[:length] != theirs[:length]:
            return start, done
    return None, done


def lost_around(source: DiskReader, copy: DiskReader, at: int) -> Extent:
    """How far the difference extends before and behind the block, at most LOST_BYTES_MAX to each side. Ranges that the source
    reported are equal on both sides by now, and end it."""

    def differs(start: int) -> bool:
        length = min(BLOCK_BYTES, source.size - start)
        mine, theirs = memoryview(bytearray(length)), memoryview(bytearray(length))
        source.read_into(start, theirs)
        copy.read_into(start, mine)
        return mine != theirs

    start, end = at, min(at + BLOCK_BYTES, source.size)
    while start > max(0, at - LOST_BYTES_MAX) and differs(start - BLOCK_BYTES):
        start -= BLOCK_BYTES
    while end < min(source.size, at + LOST_BYTES_MAX) and differs(end):
        end = min(end + BLOCK_BYTES, source.size)
    return Extent(start, end - start)


def _chosen(source: DiskReader, copy: DiskReader, draw: random.Random, blocks: int, *, zeros: bool) -> list[int]:
    """Offsets of this many blocks that the source reports as unchanged, in random order: all parts are read early."""
    evenly = dict.fromkeys(_evenly(source, draw, blocks))
    data = dict.fromkeys(at for at in _where_data_is(source, copy, draw, blocks) if at not in evenly)
    unchanged = set(_unchanged(source, sorted([*evenly, *data]), zeros=zeros))
    everywhere, in_data = ([at for at in places if at in unchanged] for places in (evenly, data))
    even = min(len(everywhere), blocks - min(len(in_data), blocks // 2))
    found = everywhere[:even] + in_data[: min(even, blocks - even)]
    draw.shuffle(found)
    return found


def _evenly(source: DiskReader, draw: random.Random, blocks: int) -> list[int]:
    """More than are wanted, since some are in changed parts. For a small disk all."""
    count = -(-source.size // BLOCK_BYTES)
    if count <= blocks * TRIES_A_BLOCK:
        return draw.sample(range(0, source.size, BLOCK_BYTES), count)
    return [draw.randrange(count) * BLOCK_BYTES for _ in range(blocks * TRIES_A_BLOCK // 2)]


def _where_data_is(source: DiskReader, copy: DiskReader, draw: random.Random, blocks: int) -> Iterator[int]:
    data = [extent for extent in copy.extents() if not extent.zero and extent.start < source.size]
    if data:
        for extent in draw.choices(data, weights=[extent.length for extent in data], k=blocks * TRIES_A_BLOCK // 2):
            at = min(draw.randrange(extent.start, extent.end), source.size - 1)
            yield at // BLOCK_BYTES * BLOCK_BYTES


def _unchanged(source: DiskReader, places: Sequence[int], *, zeros: bool) -> Iterator[int]:
    """Those places that touch none of the source's extents (with `zeros`, none with data). `places` ascend."""
    changed = (extent for extent in source.extents() if not (zeros and extent.zero))
    extent = next(changed, None)
    for start in places:
        while extent is not None and extent.end <= start:
            extent = next(changed, None)
        if extent is None or extent.start >= start + BLOCK_BYTES:
            yield start
