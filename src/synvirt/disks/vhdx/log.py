"""The log of a VHDX file, replayed in memory: [MS-VHDX] section 2.3.

    ring of 4 KiB sectors:  … │ header, descriptors │ data │ data │ header, descriptors │ data │ …
                                └────── an entry, sequence n ──────┘└─────── n + 1 ──────┘

If a host lost power, the log has changes of the metadata that may be missing, or half written, in their places. They are never
ignored: the log's content covers the file's, and everything is read so. The file is not changed.
"""

import struct
from bisect import bisect_left, bisect_right
from collections.abc import Iterator
from typing import Final, NamedTuple

from synvirt.blocks import DiskReader, Extent, ExtentCursor, coalesced, fill_zeros
from synvirt.disks.vhdx.header import Header, checksum_is_right, read_bytes
from synvirt.errors import DiskReadFailed, MalformedArchive, UnsupportedFormat
from synvirt.sizes import KIB, MIB

SECTOR: Final = 4 * KIB
# Hyper-V makes logs of 1 MiB. The whole ring is in memory while it is replayed, three times while it is checked.
_LOG_BYTES_MAX: Final = 32 * MIB
# Honest entries do not overlap, so all their checksums need one pass over the ring; hostile entries could need one pass each.
_CHECKED_PASSES_MAX: Final = 4
# The largest log needs 8192, one per sector; zero descriptors could be millions.
_DESCRIPTORS_MAX: Final = 64 << 10
# Sizes are signed 64-bit in every program that reads the file.
_OFFSET_MAX: Final = (1 << 63) - 1

_ENTRY = struct.Struct("<4sIIIQII16sQQ")
_DESCRIPTOR = struct.Struct("<4s4s8sQQ")
_OPEN_ON_HOST: Final = (
    "Attach the disk once on its host (or open it there) and detach it: the host repairs it. Then copy it again."
)


class Entry(NamedTuple):
    """A valid log entry. `tail` is where its sequence begins; `changes` are (offset in the file, length, sector or zeros)."""

    at: int
    length: int
    tail: int
    sequence: int
    flushed_bytes: int
    last_bytes: int
    changes: tuple[tuple[int, int, bytes | None], ...]


def replay(over: DiskReader, header: Header, name: str) -> "ReplayedFile":
    """The file with its active log sequence applied. MalformedArchive: there is none, or the file was cut off later."""
    length = header.log.end - header.log.start
    if length > _LOG_BYTES_MAX:
        raise UnsupportedFormat(
            f"{name}: a log of {length} bytes is to be replayed; up to {_LOG_BYTES_MAX} are", hint=_OPEN_ON_HOST
        )
    assert header.log_guid is not None
    ring = read_bytes(over, header.log.start, length, "the log", name)
    sequence = _active_sequence(_Ring(ring, header.log_guid, name).entries())
    if not sequence:
        raise MalformedArchive(f"{name} was not closed, and its log has no sequence that is whole", hint=_OPEN_ON_HOST)
    head = sequence[-1]
    if over.size < head.flushed_bytes:
        raise MalformedArchive(
            f"{name} was not closed, and by its log had {head.flushed_bytes} bytes then; it has {over.size}",
            hint="The file was cut off: copy it again from where it came.",
        )
    file = ReplayedFile(over, entries=len(sequence), size=max(over.size, head.last_bytes))
    for entry in sequence:
        for offset, count, sector in entry.changes:
            file.put(offset, count, sector)
    return file


def _active_sequence(entries: dict[int, Entry]) -> list[Entry]:
    """The newest complete sequence (sections 2.3.2 and 2.3.3): from the tail that its head names to the head."""
    heads: dict[int, Entry] = {}  # by an entry's start: the last entry of the sequence that begins there
    for entry in sorted(entries.values(), key=lambda entry: entry.sequence, reverse=True):
        following = _next(entries, entry)
        heads[entry.at] = heads[following.at] if following else entry
    for head in sorted(heads.values(), key=lambda entry: entry.sequence, reverse=True):
        if heads.get(head.tail) is head:
            sequence = [entries[head.tail]]
            while (following := _next(entries, sequence[-1])) is not None:
                sequence.append(following)
            return sequence
    return []


def _next(entries: dict[int, Entry], entry: Entry) -> Entry | None:
    """The entry written after this one, if it still exists. `entries` has them by their starts."""
    following = entries.get(entry.at + entry.length)
    return following if following is not None and following.sequence == entry.sequence + 1 else None


class _Ring:
    """The log's sectors, and the valid entries among them."""

    def __init__(self, ring: bytes, guid: bytes, name: str) -> None:
        self._ring, self._guid, self._name = ring, guid, name

    def entries(self) -> dict[int, Entry]:
        """All valid entries by their starts; an entry at the ring's end is followed by the one at its beginning."""
        found: dict[int, Entry] = {}
        checked = descriptors = 0
        for at in range(0, len(self._ring), SECTOR):
            if not self._ring.startswith(b"loge", at):
                continue
            length, count = self._plausible(at)
            checked, descriptors = checked + length, descriptors + count
            if checked > _CHECKED_PASSES_MAX * len(self._ring):
                raise MalformedArchive(f"{self._name}: the entries of its log lie over one another", hint=_OPEN_ON_HOST)
            if descriptors > _DESCRIPTORS_MAX:
                raise UnsupportedFormat(f"{self._name}: its log has more than {_DESCRIPTORS_MAX} changes", hint=_OPEN_ON_HOST)
            entry = self._entry(at, length) if length else None
            if entry is not None:
                found[at] = entry
        # The ring wraps: an offset behind its end means the same distance from its beginning.
        return found | {at + len(self._ring): entry for at, entry in found.items()}

    def _slice(self, at: int, length: int) -> bytes:
        return self._ring[at : at + length] + self._ring[: max(0, at + length - len(self._ring))]

    def _plausible(self, at: int) -> tuple[int, int]:
        """The length of the entry at `at`, and its number of descriptors; zeros, if its header alone shows no entry."""
        _, _, length, tail, sequence, count, _, guid, flushed, last = _ENTRY.unpack_from(self._ring, at)
        fits = 0 < length <= len(self._ring) and length % SECTOR == 0 and _descriptor_bytes(count) <= length
        sane = tail % SECTOR == 0 and tail < len(self._ring) and sequence > 0 and max(flushed, last) <= _OFFSET_MAX
        return (length, count) if fits and sane and guid == self._guid else (0, 0)

    def _entry(self, at: int, length: int) -> Entry | None:
        content = self._slice(at, length)
        if not checksum_is_right(content):
            return None
        _, _, _, tail, sequence, count, _, _, flushed, last = _ENTRY.unpack_from(content)
        changes = _changes(content, count, sequence)
        return None if changes is None else Entry(at, length, tail, sequence, flushed, last, changes)


def _descriptor_bytes(count: int) -> int:
    """The size of the sectors with the header and the descriptors."""
    return -(-(_ENTRY.size + count * _DESCRIPTOR.size) // SECTOR) * SECTOR


def _changes(content: bytes, count: int, sequence: int) -> tuple[tuple[int, int, bytes | None], ...] | None:
    """The changes of an entry; None, if a descriptor or a data sector is not of this entry (section 2.3.1)."""
    found: list[tuple[int, int, bytes | None]] = []
    data_at = _descriptor_bytes(count)
    for number in range(count):
        signature, trailing, leading, offset, of_sequence = _DESCRIPTOR.unpack_from(
            content, _ENTRY.size + number * _DESCRIPTOR.size
        )
        length = SECTOR if signature == b"desc" else int.from_bytes(leading, "little")
        if of_sequence != sequence or offset % SECTOR or length % SECTOR or offset + length > _OFFSET_MAX:
            return None
        if signature == b"zero":
            found.append((offset, length, None))
            continue
        data = content[data_at : data_at + SECTOR]
        data_at += SECTOR
        if signature != b"desc" or len(data) < SECTOR or data[:4] != b"data" or data[4:8] + data[-4:] != _halves(sequence):
            return None
        found.append((offset, SECTOR, leading + data[8:-4] + trailing))
    return tuple(found)


def _halves(sequence: int) -> bytes:
    """The high half of a sequence number and then the low one, in the form of a data sector's ends."""
    return struct.pack("<II", sequence >> 32, sequence & 0xFFFF_FFFF)


class ReplayedFile:
    """A file with changes over it: a DiskReader that owns `over`. `entries`: how many log entries were replayed.

    Behind the file's end, up to `size`, are zeros: the log has the length that the file was to get.
    """

    def __init__(self, over: DiskReader, *, entries: int, size: int) -> None:
        self._over, self.entries, self.size = over, entries, size
        # Ranges without overlaps, ascending: starts, ends, and content (None: zeros).
        self._starts: list[int] = []
        self._ends: list[int] = []
        self._contents: list[bytes | None] = []

    @property
    def max_readers(self) -> int:
        return self._over.max_readers

    def put(self, start: int, length: int, content: bytes | None) -> None:
        """Puts a range over what is there, over earlier ranges too. Only while the log is replayed."""
        if not length:
            return
        end = start + length
        first, last = bisect_right(self._ends, start), bisect_left(self._starts, end)
        kept: list[tuple[int, int, bytes | None]] = []
        if first < last:
            before, after = self._part(first, self._starts[first], start), self._part(last - 1, end, self._ends[last - 1])
            kept = [part for part in (before, after) if part[0] < part[1]]
        parts = sorted([*kept, (start, end, content)], key=lambda part: part[0])
        self._starts[first:last] = [part[0] for part in parts]
        self._ends[first:last] = [part[1] for part in parts]
        self._contents[first:last] = [part[2] for part in parts]
        self.size = max(self.size, end)

    def _part(self, number: int, start: int, end: int) -> tuple[int, int, bytes | None]:
        content, at = self._contents[number], self._starts[number]
        return start, end, content[start - at : end - at] if content is not None and start < end else None

    def extents(self) -> Iterator[Extent]:
        return coalesced(self._extents())

    def _extents(self) -> Iterator[Extent]:
        file, at = ExtentCursor(self._over.extents()), 0
        for start, end, content in zip(self._starts, self._ends, self._contents, strict=True):
            yield from self._of_file(file, at, start)
            yield Extent(start, end - start, content is None)
            at = end
        yield from self._of_file(file, at, self.size)

    def _of_file(self, file: ExtentCursor, start: int, end: int) -> Iterator[Extent]:
        held = max(start, min(end, self._over.size))
        yield from file.between(start, held)
        if held < end:
            yield Extent(held, end - held, zero=True)

    def read_into(self, offset: int, buffer: memoryview) -> None:
        end = offset + len(buffer)
        if offset < 0 or end > self.size:
            raise DiskReadFailed(f"{len(buffer)} bytes at offset {offset} are outside the file's {self.size}")
        at = offset
        for number in range(bisect_right(self._ends, offset), bisect_left(self._starts, end)):
            start, stop = max(self._starts[number], offset), min(self._ends[number], end)
            self._read_file(at, buffer[at - offset : start - offset])
            into, content = buffer[start - offset : stop - offset], self._contents[number]
            if content is None:
                fill_zeros(into)
            else:
                into[:] = content[start - self._starts[number] : stop - self._starts[number]]
            at = stop
        self._read_file(at, buffer[at - offset :])

    def _read_file(self, offset: int, into: memoryview) -> None:
        held = max(0, min(len(into), self._over.size - offset))
        if held:
            self._over.read_into(offset, into[:held])
        fill_zeros(into[held:])

    def close(self) -> None:
        self._over.close()
