"""VHDs as vhd-tool streams them: every bitmap full, blocks in the order of the disk. qemu-img judges them."""

import struct
from collections.abc import Iterator
from pathlib import Path
from uuid import uuid4

BLOCK_BYTES = 2 << 20
SECTOR = 512


def _checksummed(content: bytes, at: int) -> bytes:
    return content[:at] + struct.pack(">I", ~sum(content) & 0xFFFF_FFFF) + content[at + 4 :]


def _footer(size: int, kind: int) -> bytes:
    # A geometry at its largest: readers that go by it go by the size then.
    content = struct.pack(
        ">8sIIQI4sI4sQQHBBII16sB427x", b"conectix", 2, 0x1_0000, 512, 0, b"tap\0", 0x1_0003, b"\0" * 4, size, size, 65535, 16,
        255, kind, 0, uuid4().bytes, 0,
    )  # fmt: skip
    return _checksummed(content, 64)


def stream(disk: Path, base: Path | None = None, *, whole_blocks: bool = False) -> Iterator[bytes]:
    """A dynamic VHD of what is not zeros; with `base`, a differencing one of what differs. `whole_blocks`: the size rounded up,
    as vhd-tool does of a raw disk."""
    size = disk.stat().st_size
    count = -(-size // BLOCK_BYTES)
    with disk.open("rb") as new, base.open("rb") if base else disk.open("rb") as old:
        held = []
        for number in range(count):
            block = new.read(BLOCK_BYTES)
            than = old.read(BLOCK_BYTES) if base else bytes(len(block))
            if block != than:
                held.append(number)
        table_bytes = -(-count * 4 // SECTOR) * SECTOR
        table = [0xFFFF_FFFF] * (table_bytes // 4)
        first = 2048 + table_bytes
        for place, number in enumerate(held):
            table[number] = (first + place * (BLOCK_BYTES + SECTOR)) // SECTOR
        footer = _footer(count * BLOCK_BYTES if whole_blocks else size, 4 if base else 3)
        header = struct.pack(
            ">8sQQIIII16sII512s192s256x", b"cxsparse", (1 << 64) - 1, 2048, 0x1_0000, count, BLOCK_BYTES, 0,
            uuid4().bytes if base else bytes(16), 0, 0, "base.vhd".encode("utf-16-be") if base else b"", b"",
        )  # fmt: skip
        yield footer + _checksummed(header, 36) + bytes(SECTOR) + struct.pack(f">{len(table)}I", *table)
        for number in held:
            new.seek(number * BLOCK_BYTES)
            yield b"\xff" * SECTOR
            yield new.read(BLOCK_BYTES).ljust(BLOCK_BYTES, b"\0")
        yield footer
