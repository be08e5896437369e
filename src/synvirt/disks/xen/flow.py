"""A VHD that comes once and from front to back, sent by XenServer's vhd-tool: Microsoft's Virtual Hard Disk Image Format.

    footer's copy │ header │ BAT │ bitmap, block │ bitmap, block │ … │ footer

Blocks ascend in the stream as on the disk, so their order is known once the BAT has come. A dynamic VHD is a whole disk; a
differencing one has only the blocks that differ from the base disk.
"""

import re
from array import array
from bisect import bisect_left
from collections.abc import Callable, Iterator
from itertools import compress
from typing import Final

from synvirt.blocks import Extent
from synvirt.disks.entries import entries_of
from synvirt.disks.vhd import (
    COOKIE,
    FOOTER_BYTES,
    FOOTER_CHECKSUM_AT,
    HEADER_BYTES,
    Kind,
    checksum_is_right,
    parse_footer,
    parse_header,
)
from synvirt.errors import DiskReadFailed, MalformedArchive, UnsupportedFormat
from synvirt.sizes import MIB

# Fills the whole buffer with the next bytes, or raises.
Fill = Callable[[memoryview], None]

_SECTOR: Final = 512
_UNUSED: Final = 0xFFFF_FFFF
# The part before the blocks: the BAT of 2 TiB takes 4 MiB, and a sender may leave some space.
_HEAD_BYTES_MAX: Final = 64 * MIB
_PIECE_BYTES: Final = MIB


class VhdFlow:
    """Reads ascend, and each byte is read at most once. `size`: the disk's own; the image may be a little larger, as vhd-tool
    rounds up to whole blocks."""

    def __init__(self, fill: Fill, size: int, name: str) -> None:
        """MalformedArchive, UnsupportedFormat; what `fill` raises."""
        self._fill, self._name, self.size = fill, name, size
        self._at = 0  # of the stream
        self._done = 0  # of the disk
        self._scratch = memoryview(bytearray(_PIECE_BYTES))
        content = self._take(FOOTER_BYTES)
        if not content.startswith(COOKIE) or not checksum_is_right(content, FOOTER_CHECKSUM_AT):
            raise MalformedArchive(f"{name}: what was sent does not begin as a VHD does")
        footer = parse_footer(content, name)
        if footer.kind is Kind.FIXED:
            raise UnsupportedFormat(f"{name}: a fixed VHD was sent; dynamic and differencing ones are read")
        self._skip_to(footer.header_at, "its header")
        header, _ = parse_header(self._take(HEADER_BYTES), footer, name)
        if not size <= footer.size < size + header.block_bytes:
            raise MalformedArchive(f"{name}: a VHD of {footer.size} bytes was sent for a disk of {size}")
        self.whole = footer.kind is Kind.DYNAMIC
        self._block_bytes, self._bitmap_bytes = header.block_bytes, header.bitmap_bytes
        self._skip_to(header.table_at, "its BAT")
        if header.blocks * 4 > _HEAD_BYTES_MAX:
            raise MalformedArchive(f"{name}: a BAT of {header.blocks} blocks; 2 TiB have a million")
        sectors = entries_of(self._take(header.blocks * 4), "I", "big")
        here = bytes(map(_UNUSED.__ne__, sectors))
        # The blocks that are sent, and the sector where each begins.
        self._blocks, self._sectors = array("I", compress(range(len(sectors)), here)), array("I", compress(sectors, here))
        self._check()
        self._entered = -1  # the block whose bitmap was read
        self._absent: tuple[tuple[int, int], ...] = ()

    def _check(self) -> None:
        length = self._bitmap_bytes + self._block_bytes
        reached = self._at
        for sector in self._sectors:
            if sector * _SECTOR < reached:
                raise MalformedArchive(
                    f"{self._name}: its blocks are not sent in the order of the disk",
                    hint="options.transport nbd reads the disk another way",
                )
            reached = sector * _SECTOR + length

    def extents(self) -> Iterator[Extent]:
        """For a whole disk all of it, with zeros for missing blocks; for a difference only the present blocks."""
        at = 0
        for first, last in self._runs():
            start, end = first * self._block_bytes, min(last * self._block_bytes, self.size)
            if self.whole and start > at:
                yield Extent(at, start - at, zero=True)
            if start < end:
                yield Extent(start, end - start)
            at = end
        if self.whole and at < self.size:
            yield Extent(at, self.size - at, zero=True)

    def _runs(self) -> Iterator[tuple[int, int]]:
        """Present blocks without a gap: the first, and the one behind the last."""
        if not self._blocks:
            return
        first = following = self._blocks[0]
        for block in self._blocks:
            if block != following:
                yield first, following
                first = block
            following = block + 1
        yield first, following

    def read_into(self, offset: int, buffer: memoryview) -> None:
        """DiskReadFailed, MalformedArchive; errors of `fill`."""
        if offset < self._done:
            raise DiskReadFailed(f"{self._name}: offset {offset} was passed already, at {self._done} of a stream")
        end = offset + len(buffer)
        at = offset
        while at < end:
            block, within = divmod(at, self._block_bytes)
            stop = min(end, (block + 1) * self._block_bytes)
            self._read(block, within, buffer[at - offset : stop - offset])
            at = stop
        self._done = end

    def _read(self, block: int, within: int, into: memoryview) -> None:
        index = bisect_left(self._blocks, block)
        if index == len(self._blocks) or self._blocks[index] != block:
            if not self.whole:
                raise DiskReadFailed(f"{self._name}: offset {block * self._block_bytes + within} is not in the difference")
            into[:] = bytes(len(into))
            return
        place = self._sectors[index] * _SECTOR
        if self._entered != block:
            self._pass_to(place)
            self._absent = self._absent_in(self._take(self._bitmap_bytes), block)
            self._entered = block
        self._pass_to(place + self._bitmap_bytes + within)
        self._fill(into)
        self._at += len(into)
        for start, stop in self._absent:
            first, last = max(start - within, 0), min(stop - within, len(into))
            if first < last:
                into[first:last] = bytes(last - first)

    def _absent_in(self, bitmap: bytes, block: int) -> tuple[tuple[int, int], ...]:
        """The ranges of the block that its bitmap marks as missing: zeros of a whole disk."""
        sectors = min(self._block_bytes, self.size - block * self._block_bytes + _SECTOR - 1) // _SECTOR
        bits = f"{int.from_bytes(bitmap, 'big'):0{8 * len(bitmap)}b}"[:sectors]
        if "0" not in bits:
            return ()
        if not self.whole:
            raise MalformedArchive(
                f"{self._name}: the difference has a part of the block at {block * self._block_bytes} only",
                hint="vhd-tool sends whole blocks: is something in between?",
            )
        return tuple((run.start() * _SECTOR, run.end() * _SECTOR) for run in re.finditer("0+", bits))

    # ── the stream ───────────────────────────────────────────────────────────────────────────────────────────────────

    def _take(self, length: int) -> bytes:
        content = bytearray(length)
        self._fill(memoryview(content))
        self._at += length
        return bytes(content)

    def _skip_to(self, at: int, what: str) -> None:
        """Only in the part before the blocks."""
        if not self._at <= at <= _HEAD_BYTES_MAX:
            raise MalformedArchive(f"{self._name}: {what} lies at {at}, which is no place in a stream that is at {self._at}")
        self._pass_to(at)

    def _pass_to(self, at: int) -> None:
        while self._at < at:
            part = min(at - self._at, len(self._scratch))
            self._fill(self._scratch[:part])
            self._at += part
