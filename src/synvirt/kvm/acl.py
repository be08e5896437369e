"""Lets one more user read and write a file or a device: an entry in its access control list, acl(5).

The list has the kernel's form: include/uapi/linux/posix_acl_xattr.h. A device's list is gone after the next boot.
"""

import os
import stat
import struct
from pathlib import Path

_XATTR = "system.posix_acl_access"
_VERSION = 2
_OWNER, _USER, _GROUP, _MASK, _OTHER = 0x01, 0x02, 0x04, 0x10, 0x20
_NOBODY = 0xFFFFFFFF
_READ_WRITE = 0o6
_HEADER, _ENTRY = struct.Struct("<I"), struct.Struct("<HHI")


def let(path: Path, uid: int) -> None:
    """OSError, where the file system has no such lists."""
    entries = {(tag, who): rights for tag, rights, who in _present(path)}
    entries[_USER, uid] = _READ_WRITE
    # The mask: the most that any user may do, except the owner and «others».
    entries[_MASK, _NOBODY] = entries.get((_MASK, _NOBODY), entries[_GROUP, _NOBODY]) | _READ_WRITE
    packed = b"".join(_ENTRY.pack(tag, rights, who) for (tag, who), rights in sorted(entries.items()))
    os.setxattr(path, _XATTR, _HEADER.pack(_VERSION) + packed)


def _present(path: Path) -> list[tuple[int, int, int]]:
    if _XATTR in os.listxattr(path):
        return list(_ENTRY.iter_unpack(os.getxattr(path, _XATTR)[_HEADER.size :]))
    mode = stat.S_IMODE(path.stat().st_mode)
    return [(_OWNER, mode >> 6 & 7, _NOBODY), (_GROUP, mode >> 3 & 7, _NOBODY), (_OTHER, mode & 7, _NOBODY)]
