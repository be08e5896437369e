"""The entries of qcow2's L2 tables: QEMU's docs/interop/qcow2.txt, sections «L2 table entry», «Extended L2 Entries».

Most clusters lie behind the cluster before, or are missing like it. Their entries are known beforehand: whole stretches are
compared as one long number, and elsewhere each costs a comparison and an addition. Only the others, where runs begin, are
looked at.
"""

from array import array
from collections.abc import Iterator
from itertools import takewhile
from typing import Final, TypeAlias

from synvirt.disks.entries import STRETCH, goes_on
from synvirt.disks.qcow2.header import Header
from synvirt.errors import MalformedArchive

# L1 and L2 entries, bits 9 to 55; the rest is reserved or a flag, and is ignored as in QEMU.
OFFSET_MASK: Final = 0x00FF_FFFF_FFFF_FE00
_COPIED: Final = 1 << 63
_COMPRESSED: Final = 1 << 62
# Of a compressed cluster's entry: offset and length, without the flags.
DESCRIPTOR_MASK: Final = _COMPRESSED - 1
_READS_AS_ZERO: Final = 1
_WORD: Final = (1 << 64) - 1
# An extended entry's bitmap: a bit for each allocated subcluster, and 32 bits above these one for each that is zeros.
_SUBCLUSTERS: Final = 32
_ALL: Final = (1 << _SUBCLUSTERS) - 1
_OF_ONE_KIND: Final = (0, _ALL, _ALL << _SUBCLUSTERS)
# Of greater offsets (32 PiB) nothing is expected: no sum reaches the bits above an offset.
_EXPECTED_BELOW: Final = 1 << 55
_NOTHING: Final = -1


class Kind:
    """What a run is: not in this image (so the backing file's, or zeros), zeros, plain bytes, or compressed clusters."""

    # Plain numbers: to look up a member of an enumeration takes longer than what else is done for a run.
    BACKING: Final = 0
    ZERO: Final = 1
    DATA: Final = 2
    COMPRESSED: Final = 3


BACKING, ZERO, DATA, COMPRESSED = Kind.BACKING, Kind.ZERO, Kind.DATA, Kind.COMPRESSED

# A table or a part of one, 8 bytes a number.
Words: TypeAlias = "array[int]"
# Where a run begins in the guest's disk, its kind, and its host: the offset in the data file (DATA), or any number.
Begin = tuple[int, int, int]


class Entries:
    """Finds the runs among one image's L2 entries, and checks the entries. MalformedArchive names the guest's offset."""

    def __init__(self, header: Header, name: str) -> None:
        self._cluster_size, self._external, self._version = header.cluster_size, header.external_data, header.version
        self._name = name
        # The bits that are 0 in the entry of a plain cluster. All, where places must be compared with the guest's offsets.
        self._odd = _WORD if self._external else ~(_COPIED | OFFSET_MASK & -self._cluster_size) & _WORD
        self._has_subclusters = header.extended_l2

    def begins(self, words: Words, guest: int, end: int) -> Iterator[Begin]:
        """The beginnings of the runs below `end` in the L2 entries `words`, the first of which is the cluster of `guest`."""
        if self._has_subclusters:
            return takewhile(lambda begin: begin[0] < end, self._extended(words, guest))
        return self._standard(words, guest)

    def _standard(self, words: Words, guest: int) -> Iterator[Begin]:
        cluster_size, odd = self._cluster_size, self._odd
        expected, step, last = _NOTHING, 0, _NOTHING
        for first in range(0, len(words), STRETCH):
            stretch, start = words[first : first + STRETCH], guest + first * cluster_size
            if goes_on(stretch, expected, step):
                expected += STRETCH * step
                continue
            for at, entry in zip(range(start, start + len(stretch) * cluster_size, cluster_size), stretch, strict=True):
                if entry == expected:
                    expected += step
                    continue
                host = entry & OFFSET_MASK
                if host and not entry & odd:
                    kind = DATA
                elif entry & _COMPRESSED and last == COMPRESSED:
                    continue
                elif entry:
                    kind, host = self._odd_cluster(entry, at)
                else:
                    kind = BACKING
                if kind != last or kind == DATA:
                    yield at, kind, host
                    last = kind
                step = cluster_size if host or kind == DATA else 0
                expected = entry + step if host < _EXPECTED_BELOW and kind != COMPRESSED else _NOTHING

    def _odd_cluster(self, entry: int, guest: int) -> tuple[int, int]:
        """Kind and host of any standard entry."""
        host = entry & OFFSET_MASK
        if entry & _COMPRESSED:
            self._check_compressed(guest)
            return COMPRESSED, host
        if entry & _READS_AS_ZERO:
            if self._version == 2:
                raise self._refused(guest, "is marked as zeros, which a version 2 image cannot")
            return ZERO, host
        if not self._allocated(entry):
            return BACKING, 0
        self._check_place(host, guest)
        return DATA, host

    def _extended(self, words: Words, guest: int) -> Iterator[Begin]:
        cluster_size = self._cluster_size
        subcluster_size = cluster_size // _SUBCLUSTERS
        entries, bitmaps = words[0::2], words[1::2]
        expected, step, alike, last = _NOTHING, 0, _NOTHING, _NOTHING
        for at, entry, bitmap in zip(
            range(guest, guest + len(entries) * cluster_size, cluster_size), entries, bitmaps, strict=True
        ):
            if entry == expected and bitmap == alike:
                expected += step
                continue
            if entry & _COMPRESSED:  # its bitmap has no meaning
                if last != COMPRESSED:
                    self._check_compressed(at)
                    yield at, COMPRESSED, 0
                last, expected = COMPRESSED, _NOTHING
                continue
            host, data, zero = entry & OFFSET_MASK, bitmap & _ALL, bitmap >> _SUBCLUSTERS
            if data:
                self._check_subclusters(entry, data & zero, at)
            # The first subcluster, and each that is of another kind than the one before.
            edges = ((data ^ data << 1) | (zero ^ zero << 1)) & _ALL | 1
            while edges:
                edge = edges & -edges
                edges ^= edge
                kind = DATA if data & edge else ZERO if zero & edge else BACKING
                if kind != last or kind == DATA:
                    skip = (edge.bit_length() - 1) * subcluster_size
                    yield at + skip, kind, host + skip
                    last = kind
            alike = bitmap if bitmap in _OF_ONE_KIND else _NOTHING
            step = cluster_size if host or data else 0
            expected = entry + step if host < _EXPECTED_BELOW else _NOTHING

    def _check_subclusters(self, entry: int, both: int, guest: int) -> None:
        """Of a cluster with allocated subclusters. `both`: those that are zeros too."""
        if both:
            raise self._refused(guest, "has subclusters that are both allocated and zeros")
        if not self._allocated(entry):
            raise self._refused(guest, "has allocated subclusters and no place in the file")
        self._check_place(entry & OFFSET_MASK, guest)

    def _allocated(self, entry: int) -> bool:
        """Whether a cluster has a place in the file. In an external data file that may be 0; there the copied flag decides."""
        return bool(entry & (OFFSET_MASK | _COPIED if self._external else OFFSET_MASK))

    def _check_place(self, host: int, guest: int) -> None:
        if host % self._cluster_size:
            raise self._refused(guest, "lies on no cluster's boundary")
        if self._external and host != guest:
            raise self._refused(guest, "lies elsewhere in the external data file")

    def _check_compressed(self, guest: int) -> None:
        if self._external:
            raise self._refused(guest, "is compressed, which an external data file's cannot be")

    def _refused(self, guest: int, what: str) -> MalformedArchive:
        return MalformedArchive(f"{self._name}: the cluster at guest offset {guest} {what}")
