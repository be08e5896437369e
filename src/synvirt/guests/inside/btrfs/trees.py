"""A Btrfs as its trees: superblock ─▶ chunks (where logical addresses lie) ─▶ blocks of a tree ─▶ items, by their keys.

All profiles are read, on one device or several: of mirrors the newest copy with a right checksum; of RAID 5 and 6 only the
data, as no parity is needed while all devices are present. The log tree is not replayed: data that was synced since the last
commit (30 s) is not seen. Checksums are checked for blocks of trees, not for contents of files.
"""

import hashlib
import struct
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Final, NamedTuple

import google_crc32c
import xxhash

from synvirt.errors import DiskReadFailed, UnsupportedFormat
from synvirt.guests.inside.seekable import Bytes, read_at

# Where the superblock lies, and its magic in it.
SUPERBLOCK_AT, MAGIC_AT, MAGIC = 0x10000, 0x40, b"_BHRfS_M"
_GENERATION_AT = 0x48
# The most blocks and items to look at, and KiB of files: many times what a large system takes. A hostile tree leads to the same
# block again and again.
STEPS_MAX = 300_000
_BLOCKS_KEPT = 256
_SUPERBLOCK_BYTES, _SIZES, _LEVELS = 4096, (4096, 65536), 8
# Features up to METADATA_UUID, and SIMPLE_QUOTA: these do not move files. RAID1C34 is a profile below.
_FEATURES_READ: Final = 0xFFF | 1 << 16
# Types of chunks: the bits that mean striped data, the number of copies, and the number of parity stripes.
_RAID0, _RAID10, _RAID5, _RAID6 = 1 << 3, 1 << 6, 1 << 7, 1 << 8
_PARITY: Final = {_RAID5: 1, _RAID6: 2}
_COPIES_MAX = 4
_KEY, _POINTER, _ITEM = struct.Struct("<QBQ"), struct.Struct("<Q"), struct.Struct("<II")
_HEADER_BYTES, _POINTER_BYTES, _ITEM_BYTES = 101, 33, 25
_CHUNK, _STRIPE = struct.Struct("<QQQQIIIHH"), struct.Struct("<QQ16s")
# Types of items.
ROOT_ITEM, _CHUNK_ITEM = 132, 228
MOST = (1 << 64) - 1

Key = tuple[int, int, int]

# By the superblock's number for it: the digest of bytes, in its stored form.
CHECKSUMS: Mapping[int, Callable[[bytes], bytes]] = MappingProxyType(
    {
        0: lambda content: google_crc32c.value(content).to_bytes(4, "little"),
        1: lambda content: xxhash.xxh64_intdigest(content).to_bytes(8, "little"),
        2: lambda content: hashlib.sha256(content).digest(),
        3: lambda content: hashlib.blake2b(content, digest_size=32).digest(),
    }
)


class Tree(NamedTuple):
    """Where its root block lies, and the block's height above the leaves."""

    at: int
    level: int


@dataclass(frozen=True, slots=True)
class Superblock:
    """`fsid`: the file system's, the same on all its devices. `generation`: the number of its last commit. `root_folder`: the
    folder with the name of the default subvolume."""

    fsid: bytes
    generation: int
    device: int
    root: Tree
    chunks: Tree
    first_chunks: bytes
    root_folder: int
    node_bytes: int
    sector_bytes: int
    checksum: int


def newest(volumes: Sequence[Bytes]) -> Bytes:
    """Of the devices of a file system the first of those that have its last commit."""
    return max(volumes, key=lambda volume: int.from_bytes(read_at(volume, SUPERBLOCK_AT + _GENERATION_AT, 8), "little"))


def superblock(volume: Bytes) -> Superblock | None:
    """None, where there is no Btrfs. DiskReadFailed, UnsupportedFormat."""
    block = read_at(volume, SUPERBLOCK_AT, _SUPERBLOCK_BYTES)
    if len(block) < _SUPERBLOCK_BYTES or block[MAGIC_AT:][: len(MAGIC)] != MAGIC:
        return None
    root, chunk_root = struct.unpack_from("<QQ", block, 0x50)
    (root_folder,) = struct.unpack_from("<Q", block, 0x80)
    sector_bytes, node_bytes = struct.unpack_from("<II", block, 0x90)
    (chunks_bytes,) = struct.unpack_from("<I", block, 0xA0)
    features, checksum, root_level, chunk_level = struct.unpack_from("<QHBB", block, 0xBC)
    (device,) = struct.unpack_from("<Q", block, 0xC9)
    if unknown := features & ~_FEATURES_READ:
        raise UnsupportedFormat(f"it has features of Btrfs that are not read ({unknown:#x})")
    if not all(_SIZES[0] <= size <= _SIZES[1] and size.bit_count() == 1 for size in (sector_bytes, node_bytes)):
        raise DiskReadFailed(f"its blocks of {sector_bytes} and {node_bytes} bytes are none of Btrfs")
    return Superblock(
        fsid=block[0x20:0x30],
        generation=struct.unpack_from("<Q", block, _GENERATION_AT)[0],
        device=device,
        root=Tree(root, root_level),
        chunks=Tree(chunk_root, chunk_level),
        first_chunks=block[0x32B:][: min(chunks_bytes, 2048)],
        root_folder=root_folder,
        node_bytes=node_bytes,
        sector_bytes=sector_bytes,
        checksum=checksum,
    )


@dataclass(frozen=True, slots=True)
class Chunk:
    """A run of logical addresses. `stripes`: device and offset of each. Of the stripes side by side (RAID 0, 10, 5, 6)
    `mirrors` is the number of copies and `parity` the number with parity."""

    start: int
    length: int
    is_striped: bool
    stripe_bytes: int
    mirrors: int
    parity: int
    stripes: tuple[tuple[int, int], ...]

    def copies(self, offset: int) -> tuple[list[tuple[int, int]], int]:
        """Where the bytes from `offset` on lie: the place of each copy, and how many bytes are contiguous there."""
        if not self.is_striped:
            return [(device, at + offset) for device, at in self.stripes], self.length - offset
        number, within = divmod(offset, self.stripe_bytes)
        row, column = divmod(number, len(self.stripes) // self.mirrors - self.parity)
        # Each row has its parity on another device.
        first = (column + row) % len(self.stripes) if self.parity else column * self.mirrors
        here = self.stripes[first : first + self.mirrors]
        return [(device, at + row * self.stripe_bytes + within) for device, at in here], self.stripe_bytes - within


def _chunk(start: int, data: bytes) -> tuple[Chunk, int]:
    """The chunk, and how many bytes describe it."""
    length, _, stripe_bytes, kind, _, _, _, count, mirrors = unpacked(_CHUNK, data)
    end = _CHUNK.size + count * _STRIPE.size
    if len(data) < end:
        raise DiskReadFailed(f"its chunk at {start} is damaged")
    stripes = tuple((device, at) for device, at, _ in _STRIPE.iter_unpack(data[_CHUNK.size : end]))
    mirrors = max(mirrors, 1) if kind & _RAID10 else 1
    parity = max((number for bit, number in _PARITY.items() if kind & bit), default=0)
    if not length or not stripe_bytes or count // mirrors <= parity:
        raise DiskReadFailed(f"its chunk at {start} is damaged")
    is_striped = bool(kind & (_RAID0 | _RAID10 | _RAID5 | _RAID6))
    return Chunk(start, length, is_striped, stripe_bytes, mirrors, parity, stripes), end


class Trees:
    """The trees of one file system, on all of its devices that are present. Damage raises DiskReadFailed."""

    def __init__(self, volumes: Sequence[Bytes]) -> None:
        """`volumes`: each has a superblock of the same file system."""
        found = [(block, volume) for volume in volumes if (block := superblock(volume))]
        if not found:
            raise DiskReadFailed("no Btrfs lies there")
        # A device that was away for a while missed commits: what it has is old, and its checksums are right all the same.
        found.sort(key=lambda one: one[0].generation, reverse=True)
        self.superblock = found[0][0]
        self._devices = {block.device: (block.generation, volume) for block, volume in reversed(found)}
        self._steps = STEPS_MAX
        self._blocks: dict[int, bytes] = {}
        self._chunks = sorted(self._first_chunks(), key=lambda chunk: chunk.start)
        items = self.items(self.superblock.chunks, (0, 0, 0), (MOST, 255, MOST))
        every = [_chunk(key[2], data)[0] for key, data in items if key[1] == _CHUNK_ITEM]
        self._chunks = sorted(every, key=lambda chunk: chunk.start)

    def _first_chunks(self) -> Iterator[Chunk]:
        """The chunks that hold the chunk tree itself."""
        left = self.superblock.first_chunks
        while len(left) > _KEY.size:
            chunk, length = _chunk(_KEY.unpack_from(left)[2], left[_KEY.size :])
            yield chunk
            left = left[_KEY.size + length :]

    def spend(self, steps: int) -> None:
        """Counts what was looked at. UnsupportedFormat, once it is more than STEPS_MAX."""
        self._steps -= steps
        if self._steps < 0:
            raise UnsupportedFormat("there is more in it than is read")

    def items(self, tree: Tree, first: Key, last: Key) -> Iterator[tuple[Key, bytes]]:
        """The items of a tree with keys from `first` to `last`, in their order."""
        if tree.level >= _LEVELS:
            raise DiskReadFailed(f"a tree of {tree.level} levels is none of Btrfs")
        block = self._block(tree)
        (count,) = struct.unpack_from("<I", block, 0x60)
        size = _POINTER_BYTES if tree.level else _ITEM_BYTES
        if count > (len(block) - _HEADER_BYTES) // size:
            raise DiskReadFailed(f"its block at {tree.at} cannot have {count} items")

        def key(number: int) -> Key:
            return _KEY.unpack_from(block, _HEADER_BYTES + number * size)

        begin = (
            max(bisect_right(range(count), first, key=key) - 1, 0) if tree.level else bisect_left(range(count), first, key=key)
        )
        for number in range(begin, count):
            if (found := key(number)) > last:
                return
            self.spend(1)
            at = _HEADER_BYTES + number * size + _KEY.size
            if tree.level:
                yield from self.items(Tree(_POINTER.unpack_from(block, at)[0], tree.level - 1), first, last)
            else:
                begins, length = _ITEM.unpack_from(block, at)
                yield found, block[_HEADER_BYTES + begins :][:length]

    def item(self, tree: Tree, first: Key, last: Key | None = None) -> tuple[Key, bytes] | None:
        """The first of these items."""
        return next(self.items(tree, first, last or first), None)

    def read(self, logical: int, length: int, copy: int = 0) -> bytes:
        """`copy`: the copy to read, where there are several."""
        content = bytearray()
        while len(content) < length:
            chunk = self._chunk_of(logical + len(content))
            places, together = chunk.copies(logical + len(content) - chunk.start)
            here = [(self._devices[device], at) for device, at in places if device in self._devices]
            if not here:
                raise DiskReadFailed(f"device {places[0][0]} of it is missing")
            here.sort(key=lambda one: one[0][0], reverse=True)
            (_, volume), at = here[copy % len(here)]
            piece = read_at(volume, at, min(together, length - len(content)))
            if not piece:
                raise DiskReadFailed(f"its address {logical} lies beyond the end of its device")
            content += piece
            self.spend(len(places) + len(piece) // 1024)
        return bytes(content)

    def _chunk_of(self, logical: int) -> Chunk:
        index = bisect_right(self._chunks, logical, key=lambda chunk: chunk.start) - 1
        if index < 0 or logical >= self._chunks[index].start + self._chunks[index].length:
            raise DiskReadFailed(f"its address {logical} lies nowhere")
        return self._chunks[index]

    def _block(self, tree: Tree) -> bytes:
        self.spend(1)
        block = self._blocks.get(tree.at)
        if block is None:
            block = self._checked(tree.at)
            if len(self._blocks) >= _BLOCKS_KEPT:
                self._blocks.clear()
            self._blocks[tree.at] = block
        if block[0x64] != tree.level:
            raise DiskReadFailed(f"its block at {tree.at} is of level {block[0x64]}, not {tree.level}")
        return block

    def _checked(self, at: int) -> bytes:
        checksum = CHECKSUMS.get(self.superblock.checksum)
        for copy in range(_COPIES_MAX):
            block = self.read(at, self.superblock.node_bytes, copy)
            digest = b"" if checksum is None else checksum(block[32:])
            if block.startswith(digest) and _POINTER.unpack_from(block, 0x30)[0] == at:
                return block
        raise DiskReadFailed(f"its block at {at} is damaged")


def unpacked(form: struct.Struct, data: bytes, at: int = 0) -> tuple[Any, ...]:
    """Fields of an item, which may be too short for them."""
    if len(data) < at + form.size:
        raise DiskReadFailed(f"an item of it ends before {at + form.size} bytes")
    return form.unpack_from(data, at)
