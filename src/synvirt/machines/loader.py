"""A loader of a system on an EFI system partition, as a line between processes. Pure."""

import re
from typing import Final, NamedTuple
from uuid import UUID

_PATH: Final = re.compile(r"(\\[^\\/:*?\"<>|\x00-\x1f\x7f]{1,64}){2,4}")
_LINE: Final = re.compile(r"(\d{1,3}) (\d{1,18}) (\d{1,18}) ([0-9a-f-]{36}) (.{1,300})")


class Loader(NamedTuple):
    """A loader on a partition of a GPT: its number from 1, its first sector and how many it has, its GUID, and the file."""

    number: int
    first: int
    sectors: int
    partition: UUID
    path: str

    def line(self) -> str:
        """As `from_line` reads it."""
        return f"{self.number} {self.first} {self.sectors} {self.partition} {self.path}"


def from_line(line: str) -> Loader | None:
    """None, where the line is none of a loader: it comes from a process that reads what a guest has written."""
    found = _LINE.fullmatch(line)
    if found is None or _PATH.fullmatch(found[5]) is None:
        return None
    try:
        return Loader(int(found[1]), int(found[2]), int(found[3]), UUID(found[4]), found[5])
    except ValueError:
        return None
