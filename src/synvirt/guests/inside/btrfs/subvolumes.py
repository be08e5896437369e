"""Files and folders of a Btrfs: names ─▶ inodes ─▶ extents, in a subvolume; and the subvolumes that may hold a system."""

import struct
from collections.abc import Iterator, Sequence
from functools import cached_property
from itertools import islice
from typing import Final

import google_crc32c

from synvirt.errors import DiskReadFailed, UnsupportedFormat
from synvirt.guests.inside.btrfs.trees import MOST, ROOT_ITEM, Tree, Trees, unpacked
from synvirt.guests.inside.files import NAMES_MAX
from synvirt.guests.inside.seekable import Bytes

# The number of the top-level tree; the first and the last number of subvolumes; the inode of their root folder.
_TOP, _FIRST, _LAST, _ROOT_INODE = 5, 256, MOST - 255, 256
SUBVOLUMES_MAX = 64
# Where the default subvolume has no system: names that installers use (Ubuntu, Arch; Fedora; Debian).
_USUAL: Final = (b"@", b"root", b"@rootfs")
# Types of items.
_INODE_ITEM, _DIR_ITEM, _DIR_INDEX, _EXTENT_DATA = 1, 84, 96, 108
_NAME = struct.Struct("<QBQQHHB")
_EXTENT, _PLACE = struct.Struct("<QQBBHB"), struct.Struct("<QQQQ")
_INLINE, _REGULAR = 0, 1
# BTRFS_MAX_UNCOMPRESSED; data that compression does not shrink is not compressed.
_PACKED_MAX = 128 << 10
_LINK_BYTES_MAX = 4096
_SIZE, _MODE, _REFERENCES, _LEVEL = (struct.Struct(form) for form in ("<Q", "<I", "<I", "<B"))


class Btrfs:
    """A file system, on all of its devices that are present."""

    def __init__(self, volumes: Sequence[Bytes]) -> None:
        self.trees = Trees(volumes)

    def subvolumes(self) -> Iterator["Subvolume"]:
        """The subvolumes that may hold a system, the most likely one first."""
        seen: set[int] = set()
        for number in self._numbers():
            if number not in seen:
                seen.add(number)
                yield Subvolume(self, number)

    def _numbers(self) -> Iterator[int]:
        default = self._named(self.trees.superblock.root, self.trees.superblock.root_folder, b"default")
        yield _TOP if default is None else default[0]
        top = self.tree(_TOP)
        for name in _USUAL:
            if (found := self._named(top, _ROOT_INODE, name)) and found[1] == ROOT_ITEM:
                yield found[0]
        first, last = (_FIRST, ROOT_ITEM, 0), (_LAST, ROOT_ITEM, MOST)
        items = self.trees.items(self.trees.superblock.root, first, last)
        # A subvolume without references is being deleted.
        others = (key[0] for key, data in items if key[1] == ROOT_ITEM and unpacked(_REFERENCES, data, 216)[0])
        yield from islice(others, SUBVOLUMES_MAX)

    def tree(self, number: int) -> Tree:
        """The tree of a subvolume."""
        found = self.trees.item(self.trees.superblock.root, (number, ROOT_ITEM, 0), (number, ROOT_ITEM, MOST))
        if found is None:
            raise DiskReadFailed(f"its subvolume {number} is not there")
        return Tree(unpacked(_SIZE, found[1], 176)[0], unpacked(_LEVEL, found[1], 238)[0])

    def _named(self, tree: Tree, folder: int, name: bytes) -> tuple[int, int] | None:
        """The target of a name in a folder: a number, and ROOT_ITEM where that is a subvolume's."""
        # btrfs_name_hash: a CRC-32C that begins with ~1 and is not inverted at the end.
        digest = google_crc32c.value(bytes([name[0] ^ 1]) + name[1:]) ^ 0xFFFFFFFF
        found = self.trees.item(tree, (folder, _DIR_ITEM, digest))
        return next((where for each, where in _names(found[1]) if each == name), None) if found else None

    def child(self, tree: Tree, folder: int, name: bytes) -> tuple[Tree, int] | None:
        """The inode of a name in a folder, with its tree."""
        found = self._named(tree, folder, name)
        if found is None:
            return None
        return (self.tree(found[0]), _ROOT_INODE) if found[1] == ROOT_ITEM else (tree, found[0])


def _names(data: bytes) -> Iterator[tuple[bytes, tuple[int, int]]]:
    """Names with the same hash share an item."""
    at = 0
    while at < len(data):
        number, kind, _, _, data_bytes, name_bytes, _ = unpacked(_NAME, data, at)
        at += _NAME.size
        yield data[at : at + name_bytes], (number, kind)
        at += name_bytes + data_bytes


def _length(data: bytes) -> int:
    """The bytes of a file that an extent is for."""
    plain_bytes, kind = (unpacked(_EXTENT, data)[place] for place in (1, 5))
    return int(plain_bytes if kind == _INLINE else unpacked(_PLACE, data, _EXTENT.size)[3])


class Subvolume:
    """Has libfsext's method names, so that UnixFiles accepts it as one of its volumes."""

    def __init__(self, volume: Btrfs, number: int) -> None:
        self._volume, self._tree = volume, volume.tree(number)

    def get_file_entry_by_path(self, path: str) -> "Entry | None":
        """None, where there is none. Links are not followed."""
        tree, inode = self._tree, _ROOT_INODE
        for word in path.split("/"):
            if word:
                found = self._volume.child(tree, inode, word.encode(errors="surrogateescape"))
                if found is None:
                    return None
                tree, inode = found
        return Entry(self._volume, tree, inode)


class Entry:
    """A file, a folder or a link, with libfsext's method names."""

    def __init__(self, volume: Btrfs, tree: Tree, inode: int, name: str = "") -> None:
        self.name, self._volume, self._tree, self._inode = name, volume, tree, inode
        self._trees = volume.trees

    @cached_property
    def _item(self) -> bytes:
        found = self._trees.item(self._tree, (self._inode, _INODE_ITEM, 0))
        if found is None:
            raise DiskReadFailed(f"its inode {self._inode} is not there")
        return found[1]

    @property
    def file_mode(self) -> int:
        return int(unpacked(_MODE, self._item, 52)[0])

    def get_size(self) -> int:
        return int(unpacked(_SIZE, self._item, 16)[0])

    @property
    def symbolic_link_target(self) -> str:
        return self.read_buffer_at_offset(min(self.get_size(), _LINK_BYTES_MAX), 0).decode(errors="surrogateescape")

    @cached_property
    def _children(self) -> list["Entry"]:
        found: list[Entry] = []
        for _, data in self._trees.items(self._tree, (self._inode, _DIR_INDEX, 0), (self._inode, _DIR_INDEX, MOST)):
            for name, (inode, _) in _names(data):
                found.append(Entry(self._volume, self._tree, inode, name.decode(errors="surrogateescape")))
            if len(found) >= NAMES_MAX:
                break
        return found

    @property
    def number_of_sub_file_entries(self) -> int:
        return len(self._children)

    def get_sub_file_entry(self, number: int) -> "Entry":
        """The entry by its name: it may be the root of another subvolume."""
        return self._children[number]

    def read_buffer_at_offset(self, size: int, offset: int) -> bytes:
        """`size` bytes of a file from `offset` on; holes are zeros."""
        content = bytearray(size)
        for key, data in self._trees.items(self._tree, (self._inode, _EXTENT_DATA, 0), (self._inode, _EXTENT_DATA, MOST)):
            begin = key[2] - offset
            if begin >= size:
                break
            if begin + _length(data) <= 0:
                continue  # unpacked, each one before the offset would cost as much as those behind it
            piece, at = self._extent(data, size - begin)[max(-begin, 0) :], max(begin, 0)
            content[at : at + len(piece)] = piece
        return bytes(content)

    def _extent(self, data: bytes, most: int) -> bytes:
        """The extent's first `most` bytes; none for a hole or for space that is only reserved."""
        _, plain_bytes, compression, encryption, other, kind = unpacked(_EXTENT, data)
        if encryption or other:
            raise UnsupportedFormat("its files are encrypted")
        if kind == _INLINE:
            return self._plain(compression, data[_EXTENT.size :], plain_bytes)[:most]
        at, packed_bytes, skipped, length = unpacked(_PLACE, data, _EXTENT.size)
        if kind != _REGULAR or not at:
            return b""
        if not compression:
            return self._trees.read(at + skipped, min(length, most))
        if packed_bytes > _PACKED_MAX:
            raise DiskReadFailed(f"an extent of it has {packed_bytes} compressed bytes")
        return self._plain(compression, self._trees.read(at, packed_bytes), plain_bytes)[skipped:][: min(length, most)]

    def _plain(self, compression: int, packed: bytes, plain_bytes: int) -> bytes:
        if not compression:
            return packed
        if plain_bytes > _PACKED_MAX:
            raise DiskReadFailed(f"an extent of {plain_bytes} bytes, compressed by {compression}, is none of Btrfs")
        # A MiB of the slowest method, LZO, takes a third of a second.
        self._trees.spend(plain_bytes // 64)
        # Loaded only here: most systems have no compressed file that is looked at.
        from synvirt.guests.inside.btrfs.compressed import plain

        return plain(compression, packed, plain_bytes, self._trees.superblock.sector_bytes)
