"""A sample against wrong change tracking: some blocks that the source calls unchanged are read there and here, and compared;
in a first pass some of those that it calls never written.

Change tracking has been wrong on every platform at some time (vSphere's after a disk was extended, others' after a crash). A
block that it left out would go unnoticed until the guest reads it. A sample in each pass finds a source that is often wrong.
"""

import random
from collections.abc import Iterator, Sequence

from synvirt.blocks import DiskReader, Extent
from synvirt.errors import CbtReset
from synvirt.sizes import KIB

# One page: an untruth about any of its bytes shows in it. More of them see more places than larger ones would.
BLOCK_BYTES = 4 * KIB
# The least that is looked at, and the share of a large delta: a pass reads no more than 2 % beyond what changed.
LEAST_BLOCKS = 64
SHARE = 0.01
# The most: each is a request of its own, one after the other, and at the end the guest is off meanwhile. Of a source that
# lies about one block in a thousand so many find one, all but always.
MOST_BLOCKS = 4096
# What a report says of a sample is right so often.
CONFIDENCE = 0.95
# Of what was never written: each is a question of its own over a network.
UNWRITTEN_BLOCKS = 64
# So many places are tried for each block that is wanted: where nearly all has changed, few are left.
TRIES_A_BLOCK = 4
# Of what was lost around a block that was found: each 4 KiB is a question over a network.
LOST_BYTES_MAX = 1024 * KIB


class ChangesMissed(CbtReset):
    """The source called a block unchanged that has changed."""


def blocks_to_check(delta_bytes: int) -> int:
    return min(max(LEAST_BLOCKS, int(delta_bytes * SHARE) // BLOCK_BYTES), MOST_BLOCKS)


def would_see(checked_bytes: int, confidence: float = CONFIDENCE) -> float:
    """The least share of wrong blocks, of those called unchanged, of which a sample of so many bytes finds at least one, with
    this confidence: n blocks drawn miss all of a share s with a chance of (1 - s)^n. Only those that are drawn evenly count,
    half of them at least: wrong blocks may lie anywhere. 0 to 1."""
    blocks = checked_bytes // BLOCK_BYTES // 2
    return float(1 - (1 - confidence) ** (1 / blocks)) if blocks else 1.0


def differing(source: DiskReader, copy: DiskReader, seed: str, blocks: int, *, zeros: bool = False) -> tuple[int | None, int]:
    """The offset of a block outside the source's extents that is not the same in the copy, or None; and how many bytes of such
    blocks were read. With `zeros`, those that the source says are zeros are doubted too, though the copy has no others. The
    same seed looks at the same places. Half of them, and never more, are where the copy has data."""
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
    """How far it goes on before and behind a block that differs; within LOST_BYTES_MAX to either side. What the source did tell
    of is the same on both by now, and ends it."""

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
    """Offsets of so many blocks that the source calls unchanged, in no order: all parts of the disk are seen early."""
    evenly = dict.fromkeys(_evenly(source, draw, blocks))
    data = dict.fromkeys(at for at in _where_data_is(source, copy, draw, blocks) if at not in evenly)
    unchanged = set(_unchanged(source, sorted([*evenly, *data]), zeros=zeros))
    everywhere, in_data = ([at for at in places if at in unchanged] for places in (evenly, data))
    even = min(len(everywhere), blocks - min(len(in_data), blocks // 2))
    found = everywhere[:even] + in_data[: min(even, blocks - even)]
    draw.shuffle(found)
    return found


def _evenly(source: DiskReader, draw: random.Random, blocks: int) -> list[int]:
    """More than are wanted, since some lie in what changed. Of a small disk all."""
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
    """Those that touch none of the source's extents (if `zeros`, of those with data). `places` ascend."""
    changed = (extent for extent in source.extents() if not (zeros and extent.zero))
    extent = next(changed, None)
    for start in places:
        while extent is not None and extent.end <= start:
            extent = next(changed, None)
        if extent is None or extent.start >= start + BLOCK_BYTES:
            yield start
