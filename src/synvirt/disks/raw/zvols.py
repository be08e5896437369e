"""The device of a zfs volume, found by the volume's name.

udev makes a link for each volume, /dev/zvol/NAME. It takes the link away when it looks at the device again and cannot open it
at that moment, which happens while a pool is made, imported or destroyed (OpenZFS' issue 12301). The device itself stays.
"""

import contextlib
import fcntl
import os
from pathlib import Path

LINKS = "/dev/zvol/"
NODES = Path("/dev")
# The kernel's list of block devices.
BLOCKS = Path("/sys/class/block")
# _IOR(0x12, 125, char[256]) of include/sys/fs/zfs.h; what zfs' own zvol_id(8) asks.
BLKZNAME, BLKZNAME_BYTES = 0x8100127D, 256


def zvol_name(descriptor: int) -> str:
    """The volume that an open block device is. OSError, if the device is no volume."""
    answer = fcntl.ioctl(descriptor, BLKZNAME, bytes(BLKZNAME_BYTES))
    return answer.partition(b"\0")[0].decode(errors="replace")


def device_of(path: str) -> str:
    """The device that a volume's link leads to; if the link is gone, the device that zfs calls by that name. `path` itself, if
    there is none, or if it is no volume's link."""
    if not path.startswith(LINKS):
        return path
    with contextlib.suppress(OSError):
        return os.path.realpath(path, strict=True)
    name = path.removeprefix(LINKS)
    for block in BLOCKS.glob("zd*"):
        node = NODES / block.name
        # In a cage only the volume's own device may be opened.
        with contextlib.suppress(OSError):
            descriptor = os.open(node, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
            try:
                if zvol_name(descriptor) == name:
                    return str(node)
            finally:
                os.close(descriptor)
    return path
