"""Memory for the bytes of disks.

It begins at a page boundary. A `bytearray` does not, so each page of a file would lie across two pages of memory, and copying
between the two would take the kernel a sixth more processor time.
"""

import mmap


def new_buffer(length: int) -> memoryview:
    """Zeros; the kernel's until they are touched, and again once nothing refers to them."""
    return memoryview(mmap.mmap(-1, max(length, 1), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS))[:length]
