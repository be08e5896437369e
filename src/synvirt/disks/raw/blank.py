"""A disk of zeros, which a description wants without a file."""

from collections.abc import Iterator

from synvirt.blocks import Extent, fill_zeros
from synvirt.errors import DiskReadFailed


class BlankReader:
    """A disk of `size` bytes that are all zeros."""

    max_readers = 64

    def __init__(self, size: int) -> None:
        self.size = size

    def extents(self) -> Iterator[Extent]:
        return iter([Extent(0, self.size, zero=True)] if self.size else [])

    def read_into(self, offset: int, buffer: memoryview) -> None:
        if offset < 0 or offset + len(buffer) > self.size:
            raise DiskReadFailed(f"{len(buffer)} bytes at offset {offset} are outside the blank disk's {self.size}")
        fill_zeros(buffer)

    def close(self) -> None:
        pass
