"""The facts in a file system's superblock: its kind, its name and number, and how much of it is used. Pure.

Formats: Linux, Documentation/filesystems/ext4/globals.rst; «XFS Algorithms & Data Structures», «Allocation Groups»;
btrfs.readthedocs.io, «On-disk format»; NTFS: its boot sector, and its file $Bitmap. ext4 and XFS store the total of free space
only when they are unmounted, so it is summed up from their groups.
"""

import struct
from uuid import UUID

from synvirt.errors import DiskReadFailed
from synvirt.guests.inside.seekable import Bytes, read_at
from synvirt.model.facts import file_system, short
from synvirt.sizes import MIB

# With more groups than this, or a larger bitmap, free space is not counted: 128 TiB of ext4 in groups of 128 MiB, 16 TiB of
# NTFS in clusters of 4 KiB, and an XFS that has grown a thousandfold.
EXT4_GROUPS_MAX, XFS_GROUPS_MAX, BITMAP_BYTES_MAX = 1 << 20, 100_000, 512 * MIB
# Feature bits of ext4: compatible ones, and incompatible ones.
_JOURNAL, _EXTENTS, _META_GROUPS, _LARGE = 0x4, 0x40, 0x10, 0x80


def _fields(form: str, block: bytes, at: int = 0) -> tuple[int, ...]:
    if len(block) < at + struct.calcsize(form):
        raise DiskReadFailed("it ends within its superblock")
    return struct.unpack_from(form, block, at)


def _described(kind: str, number: str, label: bytes, used: int | None, total: int) -> str:
    name = short(label.partition(b"\0")[0].decode(errors="replace"))
    return file_system(" ".join(filter(None, (kind, name and f"«{name}»", number))), used, total)


def ext4(volume: Bytes) -> str:
    """Also ext2 and ext3."""
    block = read_at(volume, 1024, 1024)
    blocks, _, _, _, first, size, cluster = _fields("<IIIIIII", block, 4)
    (per_group,) = _fields("<I", block, 0x20)
    compatible, incompatible = _fields("<II", block, 0x5C)
    (descriptor_bytes,) = _fields("<H", block, 0xFE)
    large = bool(incompatible & _LARGE)
    if large:
        blocks += _fields("<I", block, 0x150)[0] << 32
    if max(size, cluster) > 20 or not per_group:
        raise DiskReadFailed("its superblock is none of ext4")
    block_bytes = 1024 << size
    groups, each = -(-(blocks - first) // per_group), max(descriptor_bytes, 64) if large else 32
    used = None
    # All descriptors lie behind the superblock, unless the file system may grow without a limit.
    if not incompatible & _META_GROUPS and 0 < groups <= EXT4_GROUPS_MAX and each <= 1024:
        table = read_at(volume, (1024 // block_bytes + 1) * block_bytes, groups * each)
        free = sum(_free(table, at, large=large) for at in range(0, len(table) - each + 1, each))
        # Free space is counted in clusters, which mostly are blocks.
        used = max(blocks * block_bytes - free * (1024 << cluster), 0)
    kind = "ext4" if incompatible & _EXTENTS else "ext3" if compatible & _JOURNAL else "ext2"
    return _described(kind, str(UUID(bytes=block[0x68:0x78])), block[0x78:0x88], used, blocks * block_bytes)


def _free(table: bytes, at: int, *, large: bool) -> int:
    """The free blocks of a group, by its descriptor."""
    low = int.from_bytes(table[at + 12 : at + 14], "little")
    return low | int.from_bytes(table[at + 44 : at + 46], "little") << 16 if large else low


def xfs(volume: Bytes) -> str:
    """Its allocation groups begin at equal distances."""
    block = read_at(volume, 0, 512)
    block_bytes, blocks = _fields(">IQ", block, 4)
    group_blocks, groups = _fields(">II", block, 84)
    (sector_bytes,) = _fields(">H", block, 102)
    used = 0
    for number in range(min(groups, XFS_GROUPS_MAX + 1)):
        group = read_at(volume, number * group_blocks * block_bytes + sector_bytes, 64)
        if len(group) < 64 or not group.startswith(b"XAGF") or number == XFS_GROUPS_MAX:
            room = None
            break
        in_list, free, _, in_trees = _fields(">IIII", group, 48)
        used += _fields(">I", group, 12)[0] - in_list - free - in_trees
    else:
        room = max(used, 0) * block_bytes
    return _described("xfs", str(UUID(bytes=block[32:48])), block[108:120], room, blocks * block_bytes)


def btrfs(volume: Bytes) -> str:
    """The sum over all its devices."""
    block = read_at(volume, 0x10000, 4096)
    total, used = _fields("<QQ", block, 0x70)
    return _described("btrfs", str(UUID(bytes=block[0x20:0x30])), block[0x12B:0x22B], used, total)


def ntfs(volume: Bytes, label: str, bitmap: Bytes | None) -> str:
    """`bitmap`: the file $Bitmap, one bit per cluster. `label`: from another file, too."""
    block = read_at(volume, 0, 512)
    sector_bytes, sectors = _fields("<HB", block, 11)
    (total,) = _fields("<Q", block, 0x28)
    cluster_bytes = sector_bytes * (sectors if sectors <= 128 else 1 << 256 - sectors)
    used = None
    if bitmap is not None and bitmap.get_size() <= BITMAP_BYTES_MAX:
        clusters, used, at = total * sector_bytes // max(cluster_bytes, 1), 0, 0
        # The bitmap has a few bits more than there are clusters.
        while at * 8 < clusters and (piece := read_at(bitmap, at, MIB)):
            bits = int.from_bytes(piece, "little") & (1 << min(clusters - at * 8, len(piece) * 8)) - 1
            used += bits.bit_count() * cluster_bytes
            at += len(piece)
    return _described("ntfs", block[0x48:0x50][::-1].hex(), label.encode(errors="replace"), used, total * sector_bytes)
