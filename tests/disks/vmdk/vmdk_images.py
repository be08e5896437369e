"""VMDK files from their specification: what qemu-img cannot write, with the disk that each must read as."""

import random
import struct
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal

from hypothesis import strategies as st

from synvirt.disks.raw.files import RawReader
from synvirt.disks.vmdk.reader import VmdkReader

SECTOR = 512
AT_END = (1 << 64) - 1
NO_PARENT = 0xFFFF_FFFF
END, TABLE, DIRECTORY, FOOTER = range(4)

# What a grain may be: data, made from a seed, or zeros that hide the parent's.
Grain = int | Literal["zeros"]


def descriptor(
    *lines: str, create_type: str, cid: int = 1, parent_cid: int = NO_PARENT, parent: str | None = None, encoding: str = "UTF-8"
) -> bytes:
    hint = [] if parent is None else [f'parentFileNameHint="{parent}"']
    text = [
        "# Disk DescriptorFile",
        "version=1",
        f'encoding="{encoding}"',
        f"CID={cid:08x}",
        f"parentCID={parent_cid:08x}",
        f'createType="{create_type}"',
        *hint,
        "# Extent description",
        *lines,
        "# The Disk Data Base",
        'ddb.adapterType = "lsilogic"',
    ]
    return "\n".join([*text, ""]).encode()


def grain_data(seed: int, length: int) -> bytes:
    """Some of it compresses, some does not."""
    noise = random.Random(seed)
    half = length // 2
    return noise.randbytes(half) + (b"%d " % seed * length)[: length - half]


def padded(content: bytes, to: int = SECTOR) -> bytes:
    return content + bytes(-len(content) % to)


@dataclass(frozen=True)
class Sparse:
    """A sparse extent's fields; `capacity` and `grain` in sectors. `grains` in the order of the file."""

    capacity: int
    grain: int
    grains: Mapping[int, Grain] = field(default_factory=dict)
    table_entries: int = 512
    text: bytes = b""
    version: int = 1
    flags: int = 0b111
    line_ends: bytes = b"\n \r\n"

    def file(self) -> bytes:
        raise NotImplementedError

    @property
    def size(self) -> int:
        return self.capacity * SECTOR

    @property
    def grain_bytes(self) -> int:
        return self.grain * SECTOR

    @property
    def grain_count(self) -> int:
        return -(-self.capacity // self.grain)

    @property
    def tables(self) -> int:
        return -(-self.grain_count // self.table_entries)

    def data(self, number: int, seed: int) -> bytes:
        return grain_data(seed, self.grain_bytes)

    def disk(self, parent: bytes = b"") -> bytes:
        content = bytearray(parent[: self.size].ljust(self.size, b"\0"))
        for at, what in self.written():
            content[at : at + len(what)] = what
        return bytes(content)

    def lay_over(self, raw: Path) -> None:
        """Makes of the file, what the parent reads as, what this reads as; none there: no parent. It has holes, and no more of
        it than a grain is in memory: some of these disks have half a GiB."""
        with raw.open("r+b" if raw.exists() else "xb") as file:
            file.truncate(self.size)
            for at, what in self.written():
                file.seek(at)
                file.write(what)

    def written(self) -> Iterator[tuple[int, bytes]]:
        """What is not the parent's, and where."""
        for number, grain in self.grains.items():
            at = number * self.grain_bytes
            what = bytes(self.grain_bytes) if grain == "zeros" else self.data(number, grain)
            yield at, what[: max(self.size - at, 0)]


def hosted_header(image: Sparse, *, directory: int, redundant: int = 0, overhead: int, method: int = 0, flags: int) -> bytes:
    return struct.pack(
        "<4sII4QI3QB4sH433x",
        b"KDMV", image.version, flags, image.capacity, image.grain, 1 if image.text else 0, 20 if image.text else 0,
        image.table_entries, redundant, directory, overhead, 0, image.line_ends, method,
    )  # fmt: skip


@dataclass(frozen=True)
class Hosted(Sparse):
    """Directory and tables in front, twice, as VMware and QEMU write them."""

    damaged_directory: bool = False

    def file(self) -> bytes:
        text = self.text.ljust(20 * SECTOR, b"\0") if self.text else b""
        directory_bytes = -(-self.tables * 4 // SECTOR) * SECTOR
        table_bytes = -(-self.table_entries * 4 // SECTOR) * SECTOR
        redundant = SECTOR + len(text)
        directory = redundant + directory_bytes + self.tables * table_bytes
        overhead = directory + directory_bytes + self.tables * table_bytes
        overhead = -(-overhead // self.grain_bytes) * self.grain_bytes
        entries = [0] * (self.tables * self.table_entries)
        # Thousands of pieces: bytes would be copied whole for each.
        data, both = bytearray(), bytearray()
        for number, grain in self.grains.items():
            if grain == "zeros":
                entries[number] = 1
            else:
                entries[number] = (overhead + len(data)) // SECTOR
                data += self.data(number, grain)
        for at in (redundant, directory):
            first = (at + directory_bytes) // SECTOR
            places = [first + number * table_bytes // SECTOR for number in range(self.tables)]
            both += padded(struct.pack(f"<{self.tables}I", *places))
            for number in range(self.tables):
                table = entries[number * self.table_entries :][: self.table_entries]
                both += struct.pack(f"<{self.table_entries}I", *table).ljust(table_bytes, b"\0")
        header = hosted_header(
            self,
            directory=1 << 40 if self.damaged_directory else directory // SECTOR,
            redundant=redundant // SECTOR,
            overhead=overhead // SECTOR,
            flags=self.flags,
        )
        return (header + text + both).ljust(overhead, b"\0") + data


@dataclass(frozen=True)
class Stream(Sparse):
    """As ESXi and ovftool write it: header, grains with their markers, tables between them, directory and footer at the end."""

    level: int = 1
    padding: int = 0
    directory: bool = True
    ended: bool = True

    def file(self) -> bytes:
        overhead = 128
        flags = 0x30001
        first = hosted_header(self, directory=AT_END, overhead=overhead, method=1, flags=flags)
        content = bytearray((first + self.text).ljust(overhead * SECTOR, b"\0"))
        tables: dict[int, dict[int, int]] = {}
        for number, grain in sorted(self.grains.items()):
            assert grain != "zeros", "a stream has no such entries"
            tables.setdefault(number // self.table_entries, {})[number] = len(content) // SECTOR
            content += padded(self.record(number, grain))
        directory = [0] * self.tables
        for table, places in tables.items() if self.directory else ():
            content += marker(-(-self.table_entries * 4 // SECTOR), TABLE)
            directory[table] = len(content) // SECTOR
            entries = [places.get(table * self.table_entries + at, 0) for at in range(self.table_entries)]
            content += padded(struct.pack(f"<{self.table_entries}I", *entries))
        if self.directory:
            entries_bytes = padded(struct.pack(f"<{self.tables}I", *directory))
            content += marker(len(entries_bytes) // SECTOR, DIRECTORY)
            at = len(content) // SECTOR
            content += entries_bytes + marker(1, FOOTER)
            content += hosted_header(self, directory=at, overhead=overhead, method=1, flags=flags)
        return bytes(content) + (marker(0, END) + bytes(self.padding) if self.ended else b"")

    def record(self, number: int, seed: int) -> bytes:
        data = self.data(number, seed)
        # The last grain of a disk may be whole, or cut to the disk: both are seen.
        if seed % 2:
            data = data[: self.size - number * self.grain_bytes]
        packed = zlib.compress(data, self.level)
        return struct.pack("<QI", number * self.grain, len(packed)) + packed


def marker(sectors: int, kind: int) -> bytes:
    return struct.pack("<QII496x", sectors, 0, kind)


@dataclass(frozen=True)
class Cowd(Sparse):
    """vmfsSparse: «COWD», a directory, tables of 4096 entries."""

    def file(self) -> bytes:
        tables = -(-self.grain_count // 4096)
        directory_sectors = -(-tables * 4 // SECTOR)
        tables_at = 4 + directory_sectors
        begin = tables_at + tables * 32
        entries = [0] * (tables * 4096)
        data = bytearray()
        for number, grain in self.grains.items():
            assert grain != "zeros", "COWD has no such entries"
            entries[number] = begin + len(data) // SECTOR
            data += self.data(number, grain)
        used = [any(entries[at * 4096 : at * 4096 + 4096]) for at in range(tables)]
        directory = [tables_at + at * 32 if used[at] else 0 for at in range(tables)]
        header = struct.pack(
            "<4sIIIIIII", b"COWD", 1, 3, self.capacity, self.grain, 4, tables, begin + len(data) // SECTOR
        ).ljust(4 * SECTOR, b"\0")
        return header + padded(struct.pack(f"<{tables}I", *directory)) + struct.pack(f"<{len(entries)}I", *entries) + data


@dataclass(frozen=True)
class SeSparse(Sparse):
    """Grains of 4 KiB, tables of 4096 entries of 64 bits, kept apart; `replay`: the journal was not replayed.

    `free`: places for grains that are not used, before those that are.
    """

    grain: int = 8
    replay: int = 0
    free: int = 0
    flags: int = 0

    def file(self) -> bytes:
        tables = -(-self.grain_count // 4096)
        directory_at, directory_sectors = 4, -(-tables * 8 // SECTOR)
        tables_at = directory_at + directory_sectors
        grains_at = tables_at + tables * 64
        # Tables lie in the file in another order than in the disk.
        places = {table: tables - 1 - table for table in range(tables)}
        entries: dict[int, list[int]] = {table: [0] * 4096 for table in range(tables)}
        data = bytearray(self.free * self.grain_bytes)
        for number, grain in self.grains.items():
            if grain == "zeros":
                entry = (1 + number % 2) << 60
            else:
                at = len(data) // self.grain_bytes
                entry = 3 << 60 | (at & 0xFFF) << 48 | at >> 12
                data += self.data(number, grain)
            entries[number // 4096][number % 4096] = entry
        directory = [0x1000_0000 << 32 | places[table] if any(entries[table]) else 0 for table in range(tables)]
        by_place = sorted(range(tables), key=places.__getitem__)
        areas = [1, 1, 2, 1, 3, 1, directory_at, directory_sectors, tables_at, tables * 64, 0, 0, 0, 0, grains_at, len(data)]
        header = struct.pack("<6Q32x16Q304x", 0xCAFEBABE, 0x2_0000_0001, self.capacity, self.grain, 64, self.flags, *areas)
        volatile = struct.pack("<4Q480x", 0xCAFECAFE, 0, 0, self.replay)
        content = (header + volatile).ljust(directory_at * SECTOR, b"\0") + padded(struct.pack(f"<{tables}Q", *directory))
        return content + b"".join(struct.pack("<4096Q", *entries[table]) for table in by_place) + data


Image = Hosted | Stream | Cowd | SeSparse
# createType and the word of the extent's line; None: the file describes itself.
WORDS: dict[type[Image], tuple[str, str | None]] = {
    Hosted: ("monolithicSparse", None),
    Stream: ("streamOptimized", None),
    Cowd: ("vmfsSparse", "VMFSSPARSE"),
    SeSparse: ("seSparse", "SESPARSE"),
}


def open_vmdk(image: Path, root: Path | None = None) -> VmdkReader:
    """As the importers open it: its name is its path under the root."""
    root = root or image.parent
    file = RawReader(str(image))
    try:
        return VmdkReader(file, root=str(root), name=str(image.relative_to(root)))
    except BaseException:
        file.close()
        raise


def write_image(
    folder: Path, name: str, image: Image, *, cid: int = 1, parent_cid: int = NO_PARENT, parent: str | None = None
) -> None:
    """`name`.vmdk, and the extent beside it if the format has one."""
    create_type, word = WORDS[type(image)]
    line = f'RW {image.capacity} {word or "SPARSE"} "{name}{"-delta" if word else ""}.vmdk"'
    text = descriptor(line, create_type=create_type, cid=cid, parent_cid=parent_cid, parent=parent)
    if word is None:
        (folder / f"{name}.vmdk").write_bytes(with_text(image, text).file())
    else:
        (folder / f"{name}.vmdk").write_bytes(text)
        (folder / f"{name}-delta.vmdk").write_bytes(image.file())


def with_text(image: Image, text: bytes) -> Image:
    return replace(image, text=text)


# Tests hold such a disk in memory: 32 MiB, several tables of all sizes.
DRAWN_SECTORS_MAX = 65536


@st.composite
def images(draw: st.DrawFn, kinds: tuple[type[Image], ...] = tuple(WORDS)) -> Image:
    kind = draw(st.sampled_from(kinds))
    grain = 8 if kind is SeSparse else draw(st.sampled_from([1, 2, 8, 16, 24, 128]))
    entries = draw(st.sampled_from([512, 512, 1, 7, 100])) if kind in (Hosted, Stream) else 512
    most = min(3000 if kind in (Hosted, Stream) else 9000, DRAWN_SECTORS_MAX // grain)
    count = draw(st.one_of(st.integers(1, 40), st.integers(1, most)))
    capacity = count * grain - draw(st.integers(0, grain - 1))
    some = st.integers(0, 99) if kind in (Stream, Cowd) else st.one_of(st.integers(0, 99), st.just("zeros"))
    here = draw(st.dictionaries(st.one_of(st.integers(0, count - 1), st.integers(0, min(count, 20) - 1)), some, max_size=30))
    fields: dict[str, object] = {}
    if kind is Stream:
        fields = {"level": draw(st.sampled_from([0, 1, 6])), "padding": draw(st.sampled_from([0, 0, 512, 4096]))}
    if kind is SeSparse:
        fields = {"free": draw(st.sampled_from([0, 1, 4095, 4096]))}
    return kind(capacity=capacity, grain=grain, grains=here, table_entries=entries, **fields)  # type: ignore[arg-type]


# One of each, small.
HOSTED = Hosted(capacity=2048, grain=8, grains={0: 1, 3: "zeros", 4: 2, 5: 3, 255: 4})
STREAM = Stream(capacity=2048, grain=16, grains={0: 1, 1: 2, 2: 4, 70: 6, 127: 8})
COWD = Cowd(capacity=2048, grain=1, grains={0: 1, 9: 2, 2047: 3})
SE_SPARSE = SeSparse(capacity=2048, grains={0: 1, 3: "zeros", 4: 2, 255: 4})
TEXT = descriptor('RW 2048 SPARSE "disk.vmdk"', create_type="monolithicSparse")
