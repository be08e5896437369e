"""What qcow2's tables say, entry by entry and bit by bit, as the specification defines it; the readers look at runs alone."""

import struct
from itertools import pairwise

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from synvirt.blocks import coalesced
from synvirt.disks.entries import STRETCH, entries_of
from synvirt.disks.qcow2.bitmaps import _set_bits
from synvirt.disks.qcow2.entries import Begin, Entries, Kind
from synvirt.disks.qcow2.header import Header, Incompatible
from synvirt.errors import MalformedArchive
from tests.cases import cases

CLUSTER, SUBCLUSTERS = 64 << 10, 32
SUBCLUSTER = CLUSTER // SUBCLUSTERS
COPIED, COMPRESSED = 1 << 63, 1 << 62
OFFSET = (1 << 56) - (1 << 9)
ALL = (1 << SUBCLUSTERS) - 1

HEADER = Header(
    version=3,
    size=1 << 40,
    cluster_bits=16,
    encryption=0,
    l1_offset=CLUSTER,
    l1_entries=8,
    snapshots=0,
    header_length=104,
    incompatible=0,
    autoclear=0,
    compression="zlib",
)
EXTENDED = HEADER._replace(incompatible=Incompatible.EXTENDED_L2)
EXTERNAL = HEADER._replace(incompatible=Incompatible.DATA_FILE, data_file="disk.data")

# A stretch of entries: the first, what each adds to the one before, how many. Some reach the bits above an offset, and some
# are long: those are compared as one number.
PLACES = st.one_of(st.integers(0, 20), st.sampled_from([(1 << 39) - 1, (1 << 39) + 3, (1 << 40) - 2])).map(
    lambda n: n * CLUSTER
)
FLAGS = st.sampled_from([COPIED, COPIED, 0, COMPRESSED, COPIED | 1, 1, COPIED | 1 << 60, 0x3F << 56])
FIRSTS, STEPS = st.builds(int.__or__, PLACES, FLAGS), st.sampled_from([CLUSTER, CLUSTER, 0, 2 * CLUSTER])
STRETCHES = st.lists(st.tuples(FIRSTS, STEPS, st.integers(1, 5)), min_size=1, max_size=6)
LONG_COUNTS = st.one_of(st.integers(1, 5), st.sampled_from([STRETCH - 1, STRETCH, STRETCH + 1, 2 * STRETCH + 3]))
LONG_STRETCHES = st.lists(st.tuples(FIRSTS, STEPS, LONG_COUNTS), min_size=1, max_size=3)
BITMAPS = st.one_of(
    st.sampled_from([0, ALL, ALL << SUBCLUSTERS, 0xFF, 0xFFFF_0000 << SUBCLUSTERS | 0xFFFF, 1 << 31, 1 << 63]),
    st.builds(lambda data, zero: data | (zero & ~data) << SUBCLUSTERS, st.integers(0, ALL), st.integers(0, ALL)),
)


def numbers_of(stretches: list[tuple[int, int, int]]) -> list[int]:
    return [(first + step * number) % (1 << 64) for first, step, count in stretches for number in range(count)]


def begins(header: Header, words: list[int], guest: int = 0, end: int = HEADER.size) -> list[Begin]:
    return list(Entries(header, "the image").begins(entries_of(struct.pack(f">{len(words)}Q", *words), "Q", "big"), guest, end))


def pieces(found: list[Begin], end: int, unit: int) -> list[tuple[int, int]]:
    """Of each unit of the disk its kind, and its place, where the kind has one."""
    result: list[tuple[int, int]] = []
    before = -1
    for (start, kind, host), (following, _, _) in pairwise([*found, (end, Kind.BACKING, 0)]):
        assert start < following
        assert kind != before or kind == Kind.DATA, "a run ends where it goes on"
        before = kind
        for at in range(0, following - start, unit):
            result.append((kind, host + at if kind == Kind.DATA else 0))
    return result


def standard(entry: int) -> tuple[int, int]:
    if entry & COMPRESSED:
        return Kind.COMPRESSED, 0
    if entry & 1:
        return Kind.ZERO, 0
    return (Kind.DATA, entry & OFFSET) if entry & OFFSET else (Kind.BACKING, 0)


def subcluster(entry: int, bitmap: int, number: int) -> tuple[int, int]:
    if entry & COMPRESSED:
        return Kind.COMPRESSED, 0
    if bitmap >> number & 1:
        return Kind.DATA, (entry & OFFSET) + number * SUBCLUSTER
    return (Kind.ZERO if bitmap >> SUBCLUSTERS + number & 1 else Kind.BACKING), 0


@cases(300)
@given(stretches=st.one_of(STRETCHES, LONG_STRETCHES))
@example(stretches=[(COPIED | CLUSTER, CLUSTER, 2 * STRETCH), (0, 0, 2 * STRETCH), (1, 0, 2 * STRETCH)])
@example(stretches=[(COPIED | (1 << 56) - CLUSTER, CLUSTER, 3)])
def test_standard_entries(stretches: list[tuple[int, int, int]]) -> None:
    entries = numbers_of(stretches)
    assert pieces(begins(HEADER, entries), len(entries) * CLUSTER, CLUSTER) == [standard(entry) for entry in entries]


@cases(300)
@given(stretches=st.lists(st.tuples(STRETCHES, BITMAPS), min_size=1, max_size=4), cut=st.integers(0, SUBCLUSTERS - 1))
def test_extended_entries(stretches: list[tuple[list[tuple[int, int, int]], int]], cut: int) -> None:
    """`cut`: how many subclusters of the last cluster lie behind the disk's end."""
    clusters = [(entry, bitmap) for stretch, bitmap in stretches for entry in numbers_of(stretch)]
    # Allocated subclusters without a place are refused.
    clusters = [(entry, bitmap if entry & OFFSET else bitmap & ~ALL) for entry, bitmap in clusters]
    expected = [subcluster(entry, bitmap, number) for entry, bitmap in clusters for number in range(SUBCLUSTERS)]
    if clusters[-1][0] & COMPRESSED:
        cut = 0
    end = len(clusters) * CLUSTER - cut * SUBCLUSTER
    found = begins(EXTENDED, [word for cluster in clusters for word in cluster], end=end)
    assert pieces(found, end, SUBCLUSTER) == expected[: end // SUBCLUSTER]


@pytest.mark.parametrize(
    ("header", "entry", "message"),
    [
        (HEADER, (COPIED | 0x50200,), "boundary"),
        (HEADER._replace(version=2), (COPIED | 0x50001,), "version 2"),
        (EXTERNAL, (COPIED | 0x50000,), "elsewhere"),
        (EXTERNAL, (COMPRESSED,), "is compressed"),
        (EXTENDED, (COPIED | 0x50200, ALL), "boundary"),
        (EXTENDED, (COPIED, 1), "no place in the file"),
        (EXTENDED, (COPIED | 0x50000, 1 << 32 | 1), "both allocated and zeros"),
    ],
)
@pytest.mark.parametrize("before", [0, 1, 5, 2 * STRETCH])
def test_an_error_names_the_cluster(header: Header, entry: tuple[int, ...], message: str, before: int) -> None:
    guest = 1 << 30
    good = [(COPIED | guest + number * CLUSTER, ALL)[: len(entry)] for number in range(before)]
    words = [word for each in [*good, entry] for word in each]
    with pytest.raises(MalformedArchive, match=f"the cluster at guest offset {guest + before * CLUSTER} .*{message}"):
        begins(header, words, guest)


STRETCHES_OF_BITS = st.lists(
    st.one_of(
        st.tuples(st.sampled_from([b"\0", b"\xff"]), st.integers(1, 40)).map(lambda pair: pair[0] * pair[1]),
        st.binary(min_size=1, max_size=4),
    ),
    min_size=1,
    max_size=8,
).map(b"".join)


@cases(300)
@given(bits=STRETCHES_OF_BITS, start=st.integers(0, 5), end=st.integers(1, 400 * 8), odd=st.integers(0, 511))
def test_the_bits_of_a_bitmap(bits: bytes, start: int, end: int, odd: int) -> None:
    """`odd`: by how many bytes the disk is longer than whole granules."""
    granularity = 512
    begin = start * 8 * granularity
    disk_end = min(begin + end * granularity + odd, begin + len(bits) * 8 * granularity)
    found = list(coalesced(_set_bits(bits, begin, disk_end, granularity)))
    assert all(extent.length > 0 for extent in found)
    dirty = {number for number in range(len(bits) * 8) if bits[number // 8] >> number % 8 & 1}
    expected = {number for number in dirty if begin + number * granularity < disk_end}
    covered = [(extent.start - begin, extent.end - begin) for extent in found]
    assert {number for low, high in covered for number in range(low // granularity, -(-high // granularity))} == expected
    assert all(extent.end <= disk_end for extent in found)
    assert all(before.end < after.start for before, after in pairwise(found))
