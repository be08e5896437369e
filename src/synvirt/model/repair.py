"""A repair: the volumes of a job that completed, compared with its receipt, and repaired from their source."""

from collections.abc import Iterable
from typing import Final
from uuid import UUID

from synvirt.model.values import Bytes, Model

# How many spans of each disk are listed: the document is written again and again.
SPANS_LISTED: Final = 200


class Span(Model):
    """A number of bytes from an offset of a disk."""

    start: Bytes
    length: Bytes


class DiskRepair(Model):
    """`volume`: its name at the destination; it belongs to the job that is repaired. `differs`: what was not as the receipt
    says, in pieces of 4 MiB at most, those that touch as one. `left`: the part of it that the source does not hold either.
    `more`: there is more of both than is listed."""

    key: str
    volume: str
    differs: tuple[Span, ...] = ()
    left: tuple[Span, ...] = ()
    more: bool = False


class Repair(Model):
    """`of`: the job whose volumes they are. `check_only`: nothing is written, and the source is not read. `disks`: those that
    the receipt has hashes of."""

    of: UUID
    check_only: bool = False
    disks: tuple[DiskRepair, ...] = ()

    @property
    def is_right(self) -> bool:
        """Whether the volumes are as the receipt says, as far as they were looked at."""
        return not any(disk.differs if self.check_only else disk.left for disk in self.disks)


def listed(before: Iterable[Span], found: Iterable[tuple[int, int]]) -> tuple[tuple[Span, ...], bool]:
    """`before` and what was `found` (start and length) in one, ascending, joined where they touch; and whether some are left
    out. What was found again changes nothing."""
    spans = sorted([*((one.start, one.start + one.length) for one in before), *((at, at + length) for at, length in found)])
    joined: list[tuple[int, int]] = []
    for start, end in spans:
        if joined and start <= joined[-1][1]:
            joined[-1] = joined[-1][0], max(end, joined[-1][1])
        else:
            joined.append((start, end))
    return tuple(Span(start=start, length=end - start) for start, end in joined[:SPANS_LISTED]), len(joined) > SPANS_LISTED
