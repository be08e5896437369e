"""Ranges of files, joined to one file that an exporter cut into chunks (`ovf:chunkSize`)."""

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import accumulate
from typing import Final

from synvirt.blocks import DiskReader, Extent
from synvirt.disks.raw.files import CALLS_AT_ONCE
from synvirt.disks.roots import open_spec
from synvirt.disks.specs import RawSpec
from synvirt.errors import DiskReadFailed, UnsupportedFormat

# Each file stays open: a service may have 1024 of them open by default, and other jobs have some, too.
FILES_MAX: Final = 400


class JoinedReader:
    """The bytes of `parts`, in order. Ranges of one file (the members of an archive) share its descriptor."""

    max_readers = CALLS_AT_ONCE

    def __init__(self, parts: Sequence[RawSpec]) -> None:
        self._files: dict[RawSpec, DiskReader] = {}
        self._ranges: list[tuple[DiskReader, int]] = []
        sizes = []
        try:
            for part in parts:
                file = self._opened(replace(part, offset=0, length=None))
                self._ranges.append((file, part.offset))
                sizes.append(file.size - part.offset if part.length is None else part.length)
        except BaseException:
            self.close()
            raise
        self._starts = [0, *accumulate(sizes)]
        self.size = self._starts[-1]

    def _opened(self, whole: RawSpec) -> DiskReader:
        if whole not in self._files:
            if len(self._files) >= FILES_MAX:
                raise UnsupportedFormat(
                    f"the file is cut into over {FILES_MAX} chunks",
                    hint="Join them with cat, in order, and correct the description.",
                )
            self._files[whole] = open_spec(whole)
        return self._files[whole]

    def extents(self) -> Iterator[Extent]:
        return iter([Extent(0, self.size)] if self.size else [])

    def read_into(self, offset: int, buffer: memoryview) -> None:
        if offset < 0 or offset + len(buffer) > self.size:
            raise DiskReadFailed(f"{len(buffer)} bytes at offset {offset} are outside the {self.size} of the file's chunks")
        at = 0
        while at < len(buffer):
            # The last part that begins at or before the offset; an empty one begins where the next does, and is skipped.
            number = bisect_right(self._starts, offset + at) - 1
            file, place = self._ranges[number]
            inner = offset + at - self._starts[number]
            length = min(len(buffer) - at, self._starts[number + 1] - offset - at)
            file.read_into(place + inner, buffer[at : at + length])
            at += length

    def close(self) -> None:
        for file in self._files.values():
            file.close()
