"""Prism's regions as areas of a disk. Both of its ways give them: REGULAR is data, ZEROED reads as zeros."""

from collections.abc import Iterable
from typing import Any, Final, NamedTuple

from synvirt.disks.changed import AREAS_MAX, coarser
from synvirt.disks.specs import AllocatedSpec, ChangedSpec, ReaderSpec
from synvirt.live.nutanix.prism import Refused, number

# The most answers to one request; an answer has some thousand regions, and a disk of 64 TiB has 2^30 blocks of 64 KiB.
QUESTIONS_MAX: Final = 1 << 20


class Region(NamedTuple):
    """A range of a disk in bytes; `zero`: it reads as zeros."""

    start: int
    length: int
    zero: bool


def answered(host: str, rows: Any, following: Any, start: int) -> tuple[list[Region], int | None]:
    """The regions in the answer to a question from `start` on, and where the next question begins; None: this was the last.
    Refused, where it is no such answer, or a part of it is none: else that part would count as unchanged."""
    at = number(following)
    lost = f"{host} does not say what changed from {start} on, "
    if not isinstance(rows, list) or 0 < at <= start or str(following or 0) != str(at):
        raise Refused(f"{lost}and goes on at {following!r:.50}", http=200, message="")
    regions = [_region(one) for one in rows]
    if None in regions:
        raise Refused(f"{lost}but {rows[regions.index(None)]!r:.100}", http=200, message="")
    return [one for one in regions if one is not None], at if at > 0 else None


def _region(row: Any) -> Region | None:
    """None: it is no region. Prism Central calls the type `regionType`, Prism Element `type`."""
    try:
        found = Region(int(row["offset"]), int(row["length"]), "ZEROED" in (row.get("regionType"), row.get("type")))
    except (TypeError, ValueError, KeyError, AttributeError):
        return None
    return found if found.start >= 0 and found.length >= 0 else None


def laid_over(disk: ReaderSpec, size: int, regions: Iterable[Region], *, delta: bool) -> ReaderSpec:
    """The disk by its regions. For a whole disk, all outside of them was never written. For a delta, only the regions count.
    ZEROED ranges are never read."""
    data: list[tuple[int, int]] = []
    zeros: list[tuple[int, int]] = []
    for start, length, zero in regions:
        end = min(start + length, size)
        if 0 <= start < end:
            (zeros if zero else data).append((start, end - start))
        if len(data) > 2 * AREAS_MAX:
            data = list(coarser(data, AREAS_MAX))
        if len(zeros) > 2 * AREAS_MAX:
            # Then they are read like data: that only costs time.
            data, zeros = list(coarser([*data, *zeros], AREAS_MAX)), []
    read = coarser(data, AREAS_MAX)
    if not delta:
        return AllocatedSpec(over=disk, areas=read)
    changed = coarser([*read, *zeros], AREAS_MAX)
    return ChangedSpec(over=AllocatedSpec(over=disk, areas=_outside(zeros, read, size)), areas=changed)


def _outside(zeros: list[tuple[int, int]], data: Iterable[tuple[int, int]], size: int) -> tuple[tuple[int, int], ...]:
    """All of the disk except its zeros; where both are reported, data has priority."""
    kept: list[tuple[int, int]] = list(data)
    at = 0
    for start, length in sorted(zeros):
        if start > at:
            kept.append((at, start - at))
        at = max(at, start + length)
    if at < size:
        kept.append((at, size - at))
    return coarser(kept, AREAS_MAX)
