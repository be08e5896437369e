"""Memory for the bytes of disks.

It begins at a page boundary. A `bytearray` does not: each page of a file would lie across two pages of memory, and the kernel
would need a sixth more processor time to copy between them.
"""

import mmap


def new_buffer(length: int) -> memoryview:
    """A buffer of zeros. The kernel gives its pages when they are first used, and takes them back when nothing refers to it."""
    return memoryview(mmap.mmap(-1, max(length, 1), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS))[:length]
