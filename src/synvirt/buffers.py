"""Memory for the bytes of disks.

It begins at a page. What the kernel copies into or out of a `bytearray`, which begins some bytes into one, takes a sixth more
processor time, since each page of a file then lies over two.
"""

import mmap


def new_buffer(length: int) -> memoryview:
    """Zeros; the kernel's until they are touched, and again once nothing refers to them."""
    return memoryview(mmap.mmap(-1, max(length, 1), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS))[:length]
