"""Software RAID of level 1: each half has the whole content of the array. Pure, over seekable bytes.

A half that fell out of its array is not erased: it keeps a whole, old file system. As the kernel does, halves are compared by
the counts in their superblocks, and by what the newest superblock says of the others: Linux, include/uapi/linux/raid/md_p.h
(mdp_superblock_1) and drivers/md/md.c (super_1_validate). Superblocks at a half's end (0.90, 1.0) are not looked for: its data
is in its place without them.
"""

import struct
from collections.abc import Iterable, Sequence
from typing import Final, NamedTuple

from synvirt.guests.inside.seekable import Window, read_at

MAGIC: Final = b"\xfc\x4e\x2b\xa9"
# Versions 1.1 and 1.2.
PLACES: Final = (0, 0x1000)
AWAY: Final = "its software RAID does not rely on it: it is older than another part, a spare, or just being rebuilt"
_HEAD_BYTES, _BYTES_MAX = 256, 4096
_SECTOR: Final = 512
_LEVEL_1: Final = 1
# MD_FEATURE_RECOVERY_OFFSET: it is valid up to that place only.
_REBUILT: Final = 2
# MD_DISK_ROLE_MAX: greater ones are a spare's, a faulty one's, a journal's.
_ROLE_MAX: Final = 0xFF00
# Superblocks are written one after the other: the kernel, too, believes one that is older by one.
_EVENTS_APART: Final = 1


class Half(NamedTuple):
    """A half with its superblock. `number`: its place in the `roles` of any half of its `array`."""

    data: Window
    array: bytes
    events: int
    number: int
    roles: Sequence[int]
    rebuilt: bool


def half(part: Window) -> Half | None:
    """None, where this part is none of a RAID of level 1."""
    for at in PLACES:
        block = read_at(part, at, _BYTES_MAX)
        if not block.startswith(MAGIC) or len(block) < _HEAD_BYTES:
            continue
        features, array, level = struct.unpack_from("<8xI4x16s40xI", block)
        data_offset, number, events, count = struct.unpack_from("<Q24xI36xQ12xI", block, 0x80)
        if level != _LEVEL_1:
            continue
        count = min(count, (len(block) - _HEAD_BYTES) // 2)
        roles = struct.unpack_from(f"<{count}H", block, _HEAD_BYTES)
        return Half(part.behind(data_offset * _SECTOR), array, events, number, roles, bool(features & _REBUILT))
    return None


def is_away(one: Half, halves: Iterable[Half]) -> bool:
    """Whether its array does not rely on it any more, or not yet, by all of the array's halves that are there."""
    newest = max((each for each in halves if each.array == one.array), key=lambda each: each.events, default=one)
    role = newest.roles[one.number] if one.number < len(newest.roles) else _ROLE_MAX
    return one.rebuilt or role >= _ROLE_MAX or one.events + _EVENTS_APART < newest.events
