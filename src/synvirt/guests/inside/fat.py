"""Folders and small files of a FAT file system, as on an EFI system partition. Pure, over seekable bytes.

Microsoft, «FAT: General Overview of On-Disk Format», version 1.03; UEFI 2.10, section 13.3. FAT12, FAT16 and FAT32.
"""

import struct
from collections.abc import Iterator
from typing import Final, NamedTuple

from synvirt.errors import DiskReadFailed
from synvirt.guests.inside.seekable import Bytes, read_at

# A folder has at most 65,536 entries, most have a dozen; of a file no more is read. A chain that leads into itself ends here,
# too.
_BYTES_MAX: Final = 256 * 1024
_ENTRY: Final = 32
_LONG_NAME, _VOLUME_LABEL, _FOLDER = 0x0F, 0x08, 0x10
_FREE, _END = 0xE5, 0x00
# Below so many clusters it is FAT12, below the second number FAT16.
_FAT12_BELOW, _FAT16_BELOW = 4085, 65525


class Entry(NamedTuple):
    """`cluster`: where it begins; 0 is the root folder, or a file without content. `size`: a file's bytes."""

    name: str
    is_folder: bool
    cluster: int
    size: int = 0


class Fat:
    """`folder(cluster)`: its entries; `read(file)`: its bytes. DiskReadFailed, if this is no such file system, or the disk
    cannot be read."""

    def __init__(self, volume: Bytes) -> None:
        self._volume = volume
        head = read_at(volume, 0, 512)
        if len(head) < 512 or head[510:] != b"\x55\xaa":
            raise DiskReadFailed("it is no FAT file system")
        sector, in_cluster, reserved, copies, roots, few, _, short = struct.unpack_from("<HBHBHHBH", head, 11)
        many, long, self._root = struct.unpack_from("<I I 4x I", head, 32)
        fat, total = short or long, few or many
        if sector not in (512, 1024, 2048, 4096) or not in_cluster or not reserved or not copies or not fat:
            raise DiskReadFailed("it is no FAT file system")
        root_sectors = -(-roots * _ENTRY // sector)
        self._fat_at, self._root_at = reserved * sector, (reserved + copies * fat) * sector
        self._data_at = self._root_at + root_sectors * sector
        self._cluster_bytes, self._root_bytes = in_cluster * sector, roots * _ENTRY
        clusters = max(total * sector - self._data_at, 0) // self._cluster_bytes
        self._bits = 12 if clusters < _FAT12_BELOW else 16 if clusters < _FAT16_BELOW else 32

    def folder(self, cluster: int = 0) -> Iterator[Entry]:
        """The entries of the folder that begins there, without those that are free."""
        content, long = self._content(cluster), dict[int, str]()
        for at in range(0, len(content) - _ENTRY + 1, _ENTRY):
            entry = content[at : at + _ENTRY]
            kind = entry[11]
            if entry[0] == _END:
                return
            if entry[0] == _FREE:
                long.clear()
            elif kind & 0x3F == _LONG_NAME:
                long[entry[0] & 0x1F] = (entry[1:11] + entry[14:26] + entry[28:32]).decode("utf-16-le", "replace")
            else:
                name = "".join(long[number] for number in sorted(long)).partition("\0")[0] or _short_name(entry)
                long.clear()
                first = int.from_bytes(entry[26:28], "little") | (int.from_bytes(entry[20:22], "little") << 16)
                if not kind & _VOLUME_LABEL:
                    size = int.from_bytes(entry[28:32], "little")
                    yield Entry(name, bool(kind & _FOLDER), first if self._bits == 32 else first & 0xFFFF, size)

    def read(self, file: Entry) -> bytes:
        """The file's content; of a long one only the beginning."""
        return self._content(file.cluster)[: file.size] if file.cluster else b""

    def _content(self, cluster: int) -> bytes:
        if cluster == 0 and self._bits != 32:
            return read_at(self._volume, self._root_at, self._root_bytes)
        cluster, found = cluster or self._root, bytearray()
        while 2 <= cluster < (1 << min(self._bits, 28)) - 8 and len(found) < _BYTES_MAX:
            piece = read_at(self._volume, self._data_at + (cluster - 2) * self._cluster_bytes, self._cluster_bytes)
            if not piece:
                break
            found += piece
            cluster = self._next(cluster)
        return bytes(found)

    def _next(self, cluster: int) -> int:
        at = cluster * self._bits // 8
        value = int.from_bytes(read_at(self._volume, self._fat_at + at, 4), "little")
        if self._bits == 12 and cluster % 2:
            value >>= 4
        return value & ((1 << min(self._bits, 28)) - 1)


def _short_name(entry: bytes) -> str:
    """As Windows and Linux show it: two bits say that a part is in small letters."""
    stem, end = (part.decode("ascii", "replace").rstrip() for part in (entry[:8], entry[8:11]))
    stem, end = stem.lower() if entry[12] & 0x08 else stem, end.lower() if entry[12] & 0x10 else end
    return f"{stem}.{end}" if end else stem
