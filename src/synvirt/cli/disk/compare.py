"""synvirt disk map and synvirt disk compare: results and exit codes are those of `qemu-img map` and `qemu-img compare`."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Final

from synvirt.blocks import DiskReader, Extent, coalesced
from synvirt.cli.disk.images import Found
from synvirt.disks import open_reader
from synvirt.disks.checking.comparing import SECTOR_BYTES, first_difference

# qemu-img(1), compare.
IDENTICAL, DIFFERENT, CANNOT_OPEN, CANNOT_READ = 0, 1, 2, 4
_NUMBER_WIDTH: Final = 16


@contextmanager
def opened(found: Found) -> Iterator[DiskReader]:
    """The disk, open within the block."""
    reader = open_reader(found.reader)
    try:
        yield reader
    finally:
        reader.close()


def print_map(found: Found, *, as_json: bool) -> None:
    """Prints line by line, so that a disk of a million extents takes no memory. The JSON is one array, like qemu-img's."""
    with opened(found) as reader:
        extents = coalesced(reader.extents())
        if as_json:
            _print_array(extents)
            return
        print(f"{'Offset':{_NUMBER_WIDTH}}{'Length':{_NUMBER_WIDTH}}Content")
        for extent in extents:
            print(f"{extent.start:<#{_NUMBER_WIDTH}x}{extent.length:<#{_NUMBER_WIDTH}x}{'zero' if extent.zero else 'data'}")


def _print_array(extents: Iterator[Extent]) -> None:
    before = "["
    for extent in extents:
        row = {"start": extent.start, "length": extent.length, "zero": extent.zero, "data": not extent.zero}
        print(before + json.dumps(row), end="")
        before = ",\n"
    print("[]" if before == "[" else "]")


@dataclass(frozen=True, slots=True)
class Compared:
    """`offset` of the first sector that differs; None, if the content is the same."""

    first_bytes: int
    second_bytes: int
    offset: int | None
    strict: bool

    @property
    def exit_code(self) -> int:
        return DIFFERENT if self.offset is not None or (self.strict and self._sizes_differ) else IDENTICAL

    @property
    def _sizes_differ(self) -> bool:
        """Disks have whole sectors: a raw file that ends within one continues with zeros, for QEMU and for its guests."""
        return _sectors(self.first_bytes) != _sectors(self.second_bytes)

    def lines(self) -> list[str]:
        """The result in the words of `qemu-img compare`."""
        if self.strict and self._sizes_differ:
            return ["Strict mode: Image size mismatch!"]
        verdict = "Images are identical." if self.offset is None else f"Content mismatch at offset {self.offset}!"
        # Like QEMU: sizes matter only if the common part is the same.
        in_both = self.offset is not None and self.offset < min(self.first_bytes, self.second_bytes)
        return ["Warning: Image size mismatch!", verdict] if self._sizes_differ and not in_both else [verdict]

    def as_json(self) -> dict[str, Any]:
        """The result for --json. `mismatch_offset`: in bytes, null if they are the same."""
        return {
            "identical": self.exit_code == IDENTICAL,
            "first_size_bytes": self.first_bytes,
            "second_size_bytes": self.second_bytes,
            "mismatch_offset": self.offset,
        }


def _sectors(size: int) -> int:
    return -(-size // SECTOR_BYTES)


def compared(first: DiskReader, second: DiskReader, *, strict: bool, threads: int | None) -> Compared:
    """Compares two disks. `strict`: different sizes are a difference. DiskReadFailed."""
    # With `strict`, different sizes already decide: nothing is read.
    read = not strict or _sectors(first.size) == _sectors(second.size)
    offset = first_difference(first, second, threads=threads) if read else None
    return Compared(first.size, second.size, offset, strict)
