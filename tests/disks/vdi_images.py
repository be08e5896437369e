"""VDI images from their specification: what no tool here can make, with the disk they must read as."""

import random
import struct
from dataclasses import dataclass, replace
from uuid import UUID

from hypothesis import strategies as st

FREE, DISCARDED = 0xFFFF_FFFF, 0xFFFF_FFFE
DYNAMIC, STATIC, UNDO, DIFFERENCING = 1, 2, 3, 4


@dataclass(frozen=True)
class Vdi:
    """An image's fields. `entries`: one a block; blocks lie in the file in the order of their numbers."""

    entries: tuple[int, ...]
    size: int
    kind: int = DYNAMIC
    block_bytes: int = 64 << 10
    extra_bytes: int = 0
    map_at: int = 512
    data_at: int = 4096
    sector_bytes: int = 512
    signature: int = 0xBEDA107F
    version: int = 0x0001_0001
    blocks: int | None = None

    def header(self) -> bytes:
        blocks = len(self.entries) if self.blocks is None else self.blocks
        return struct.pack(
            "<64sIIIII256sIIIIIIIQIIII16s16s16s16s",
            b"<<< Oracle VM VirtualBox Disk Image >>>\n", self.signature, self.version, 400, self.kind, 0, b"", self.map_at,
            self.data_at, 0, 0, 0, self.sector_bytes, 0, self.size, self.block_bytes, self.extra_bytes, blocks, 0,
            UUID(int=1).bytes_le, UUID(int=2).bytes_le, UUID(int=3).bytes_le, UUID(int=4).bytes_le,
        )  # fmt: skip

    def file(self, seed: int) -> bytes:
        """The image, its blocks of noise."""
        content = bytearray(max(self.data_at, self.map_at + 4 * len(self.entries)))
        content[: len(self.header())] = self.header()
        struct.pack_into(f"<{len(self.entries)}I", content, self.map_at, *self.entries)
        held = [entry for entry in self.entries if entry < DISCARDED]
        noise = random.Random(seed)
        for _ in range(max(held, default=-1) + 1):
            content += noise.randbytes(self.extra_bytes + self.block_bytes)
        return bytes(content)

    def disk(self, file: bytes, parent: bytes = b"") -> bytes:
        """What the file must read as; its size is rounded up to a sector."""
        size = -(-self.size // 512) * 512
        parent = parent.ljust(size, b"\0")
        disk = bytearray()
        for number, entry in enumerate(self.entries):
            if entry == DISCARDED or (entry == FREE and self.kind != DIFFERENCING):
                disk += bytes(self.block_bytes)
            elif entry == FREE:
                disk += parent[number * self.block_bytes : (number + 1) * self.block_bytes].ljust(self.block_bytes, b"\0")
            else:
                at = self.data_at + entry * (self.extra_bytes + self.block_bytes) + self.extra_bytes
                disk += file[at : at + self.block_bytes]
        return bytes(disk[:size])


@st.composite
def vdis(draw: st.DrawFn, kinds: tuple[int, ...] = (DYNAMIC, STATIC, DIFFERENCING)) -> Vdi:
    blocks = draw(st.integers(0, 12))
    in_order = draw(st.booleans())  # as they are written first: neighbours of the disk are neighbours in the file
    places = range(1, blocks + 1) if in_order else draw(st.permutations(range(blocks + 2)))[:blocks]
    entries = tuple(draw(st.sampled_from([place, place, FREE, DISCARDED])) for place in places)
    block_bytes = 64 << draw(st.integers(10, 12))
    image = Vdi(
        entries,
        size=max(0, blocks * block_bytes - draw(st.integers(0, block_bytes - 1))),
        kind=draw(st.sampled_from(kinds)),
        block_bytes=block_bytes,
        extra_bytes=draw(st.sampled_from([0, 0, 512, 4096])),
        map_at=draw(st.sampled_from([456, 512, 1000])),
    )
    return replace(image, data_at=draw(st.sampled_from([1100, 4096, 70000])))
