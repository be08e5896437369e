"""VHD images from their specification: what no tool here can make, with the disk they must read as."""

import random
import struct
from dataclasses import dataclass
from functools import cache
from uuid import UUID

from hypothesis import strategies as st

FIXED, DYNAMIC, DIFFERENCING = 2, 3, 4
SECTOR = 512
_IDENTITY, _NOBODY = UUID(int=1), UUID(int=0)


def checksummed(content: bytes, at: int) -> bytes:
    """The ones' complement of the sum of all bytes, put in its place."""
    blank = content[:at] + bytes(4) + content[at + 4 :]
    return blank[:at] + struct.pack(">I", ~sum(blank) & 0xFFFF_FFFF) + blank[at + 4 :]


@dataclass(frozen=True)
class Block:
    """A block that is here: its place in the order of the file, and its sectors that are here, one bit each."""

    place: int
    present: int


@dataclass(frozen=True)
class Vhd:
    """An image's fields. `locators`: platform code and what it says."""

    size: int
    kind: int = DYNAMIC
    block_bytes: int = 4096
    blocks: tuple[Block | None, ...] = ()
    identity: UUID = _IDENTITY
    parent: UUID = _NOBODY
    parent_name: str = ""
    locators: tuple[tuple[bytes, bytes], ...] = ()
    creator: bytes = b"win "
    version: int = 0x0001_0000
    header_version: int = 0x0001_0000
    header_at: int = SECTOR
    table_at: int | None = None
    entries: int | None = None
    geometry: int = 0
    footer_bytes: int = 512

    def footer(self) -> bytes:
        header_at = (1 << 64) - 1 if self.kind == FIXED else self.header_at
        content = struct.pack(
            ">8sIIQI4sI4sQQIII16sB427x",
            b"conectix", 2, self.version, header_at, 0, self.creator, 0, b"Wi2k", self.size, self.size, self.geometry,
            self.kind, 0, self.identity.bytes, 0,
        )  # fmt: skip
        return checksummed(content, 64)

    @property
    def bitmap_bytes(self) -> int:
        return -(-self.block_bytes // SECTOR // 8 // SECTOR) * SECTOR

    def header(self, table_at: int, locators_at: int) -> bytes:
        locators = b""
        for code, text in self.locators:
            locators += struct.pack(">4sIIIQ", code, -(-len(text) // SECTOR), len(text), 0, locators_at)
            locators_at += -(-len(text) // SECTOR) * SECTOR
        content = struct.pack(
            ">8sQQIIII16sII512s192s256x",
            b"cxsparse", (1 << 64) - 1, table_at, self.header_version,
            len(self.blocks) if self.entries is None else self.entries, self.block_bytes, 0, self.parent.bytes, 0, 0,
            self.parent_name.encode("utf-16-be"), locators,
        )  # fmt: skip
        return checksummed(content, 36)

    def file(self, seed: int, *, footer: bool = True) -> bytes:
        noise = random.Random(seed)
        end = self.footer()[: self.footer_bytes] if footer else b""
        if self.kind == FIXED:
            return noise.randbytes(self.size) + end
        table_at = SECTOR + 1024
        table_bytes = -(-len(self.blocks) * 4 // SECTOR) * SECTOR
        locators_at = table_at + table_bytes
        content = bytearray(
            self.footer()
            + self.header(table_at if self.table_at is None else self.table_at, locators_at)
            + b"\xff" * table_bytes
        )
        for _, text in self.locators:
            content += text.ljust(-(-len(text) // SECTOR) * SECTOR, b"\0")
        held = [(block.place, number, block) for number, block in enumerate(self.blocks) if block is not None]
        for _, number, block in sorted(held):
            struct.pack_into(">I", content, table_at + number * 4, len(content) // SECTOR)
            bits = f"{block.present:0{self.bitmap_bytes * 8}b}"[::-1]
            content += int(bits, 2).to_bytes(self.bitmap_bytes)
            content += noise.randbytes(self.block_bytes)
        return bytes(content) + end

    def disk(self, file: bytes, parent: bytes = b"") -> bytes:
        """What the file must read as, by the letter: sector by sector."""
        if self.kind == FIXED:
            return file[: self.size]
        beneath = parent.ljust(self.size, b"\0") if self.kind == DIFFERENCING else bytes(self.size)
        disk = bytearray(beneath[: self.size])
        for number, block in enumerate(self.blocks):
            if block is None:
                continue
            (sector,) = struct.unpack_from(">I", file, SECTOR + 1024 + number * 4)
            data = sector * SECTOR + self.bitmap_bytes
            for index in range(self.block_bytes // SECTOR):
                to = number * self.block_bytes + index * SECTOR
                if block.present >> index & 1 and to < self.size:
                    disk[to : to + SECTOR] = file[data + index * SECTOR : data + (index + 1) * SECTOR]
        return bytes(disk)


@cache
def _present(sectors: int) -> st.SearchStrategy[tuple[int] | None]:
    """The sectors of a block that is here. Made once: to make it takes Hypothesis longer than to draw of it."""
    full = (1 << sectors) - 1
    return st.one_of(st.none(), st.tuples(st.one_of(st.just(full), st.integers(0, full))))


@st.composite
def vhds(draw: st.DrawFn, kinds: tuple[int, ...] = (FIXED, DYNAMIC, DIFFERENCING)) -> Vhd:
    kind = draw(st.sampled_from(kinds))
    block_bytes = SECTOR << draw(st.integers(0, 9))
    count = draw(st.integers(0, 10))
    cut = draw(st.integers(0, max(0, block_bytes // SECTOR - 1))) * SECTOR if count else 0
    places = draw(st.permutations(range(count)))
    present = _present(block_bytes // SECTOR)
    found = [(place, draw(present)) for place in places]
    blocks = tuple(None if here is None else Block(place, *here) for place, here in found)
    return Vhd(
        size=count * block_bytes - cut,
        kind=kind,
        block_bytes=block_bytes,
        blocks=() if kind == FIXED else blocks,
        footer_bytes=draw(st.sampled_from([512, 512, 511])),
    )
