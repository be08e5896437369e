"""A whole VM imported by an outside tool, in a first pass; a second pass copies it onto the volumes. asyncio.

    the tool's own folder, in the ledger ─▶ pass 1: the tool fills it ─▶ its files are matched ─▶ pass 2: onto the volumes

Pass 1 cannot be resumed: after a crash the tool starts again, in an empty folder. Once it has succeeded it does not run again.
"""

import asyncio
import itertools
import time
from collections.abc import Iterator, Sequence
from contextlib import closing
from functools import partial
from pathlib import Path

from synvirt.blocks import DiskReader
from synvirt.disks import open_reader
from synvirt.disks.specs import RawSpec, ReaderSpec, paths
from synvirt.errors import DiskReadFailed
from synvirt.jobs.wire import Moved
from synvirt.migrations.hearing import Tally
from synvirt.migrations.job import Job
from synvirt.migrations.passes import PassDisk, run_pass
from synvirt.model.job import Pass
from synvirt.model.values import now
from synvirt.offline.passthrough import Passthrough
from synvirt.store import Watermark

# Where a disk must be unchanged: the signature and the partition tables, or the labels of whole-disk volumes. The boot loader,
# which a conversion may change, comes before.
_TABLE = (440, 4096 - 440)
# Behind that, pages with data: one in each of these windows, spread over the first extents. 64 MiB take a moment, and no two
# disks agree in all of them.
_WINDOWS, _WINDOW_BYTES, _EXTENTS_LOOKED_AT, _PAGE_BYTES = 64, 1 << 20, 4096, 4096


async def chosen(job: Job) -> Passthrough | None:
    """The tool that imports this job's VM; None: our own readers do. Decided once for the whole import."""
    offline = job.migration.plan.source.Offline
    tool = None if offline is None else job.rooms.passthroughs.get(offline)
    if tool is None:
        return None
    way = (await job.memory()).way
    if way is None:
        way = "tool" if await job.in_thread(tool.serves) else "own"
        await job.note(way=way)
    return tool if way == "tool" else None


async def pass_through(job: Job, tool: Passthrough, source: Path, disks: Sequence[PassDisk]) -> None:
    """Imports by the tool, and copies its files onto the volumes. `disks` have the readers of the export itself, by which the
    tool's files are matched."""
    name = str(job.id)
    await job.record("passthrough", name)
    if not _finished(job, 1):
        await _by_tool(job, tool, source, disks)
    if not _finished(job, 2):
        files = await job.in_thread(_matched, disks, await job.in_thread(tool.disks, name))
        copies = [
            PassDisk(disk.key, RawSpec(path=str(file), beneath=str(file.parent)), disk.volume, disk.size_bytes)
            for disk, file in zip(disks, files, strict=True)
        ]
        await run_pass(job, Pass(number=2, kind="full"), copies)
    await job.in_thread(tool.discard, name)
    await job.strike("passthrough", name)


def _finished(job: Job, number: int) -> bool:
    return any(one.number == number and one.finished_at is not None for one in job.migration.passes)


async def _by_tool(job: Job, tool: Passthrough, source: Path, disks: Sequence[PassDisk]) -> None:
    """Pass 1. Its bytes are those of the disks, as the tool has read them all."""
    whole = sum(disk.size_bytes for disk in disks)
    started, tally = time.monotonic(), Tally(before={})
    await job.change(passes=(Pass(number=1, kind="full"),))

    def moved(part: float) -> None:
        done = int(part * whole)
        # Twice as much is read: by the tool from the export, and by us from the tool's files.
        tally.take(Moved(key="", bytes_total=2 * whole, bytes_done=done, bytes_zero=0))
        job.rooms.board.pin(job.id, job.migration.state, tally.progress())

    moved(0)
    wanted = await asyncio.to_thread(_sizes, disks)
    await job.in_stoppable_thread(partial(tool.import_into, str(job.id), source, wanted, moved))
    for disk in disks:
        mark = Watermark(
            disk_key=disk.key,
            pass_number=1,
            offset_bytes=disk.size_bytes,
            bytes_total=disk.size_bytes,
            bytes_done=disk.size_bytes,
            bytes_zero=0,
            finished=True,
        )
        await job.in_thread(job.rooms.store.put_watermark, job.id, mark)
    seconds = round(time.monotonic() - started, 3)
    await job.change(passes=(Pass(number=1, kind="full", bytes=whole, seconds=seconds, finished_at=now()),))


def _sizes(disks: Sequence[PassDisk]) -> int:
    """About how much the tool will write: the data in the export's files."""
    return sum(Path(path).stat().st_blocks * 512 for disk in disks for path in paths(disk.reader))


def _matched(disks: Sequence[PassDisk], files: Sequence[Path]) -> list[Path]:
    """The file of each disk. It has the disk's size and partition table, and of such files it agrees in the most places where
    disks of that size have data. At least half of the places must agree, as a conversion changes some. DiskReadFailed, for a
    disk without a file."""
    places: dict[int, set[tuple[int, int]]] = {}
    for disk in disks:
        places.setdefault(disk.size_bytes, set()).update(_places(disk.reader))
    left, found = list(files), []
    for disk in disks:
        looked_at = sorted(places[disk.size_bytes])
        samples = _read(disk.reader, looked_at)
        likes = [
            (_alike(samples, _read(RawSpec(path=str(file), beneath=str(file.parent)), looked_at)), file)
            for file in left
            if file.stat().st_size == disk.size_bytes
        ]
        best, match = max(likes, key=lambda like: like[0], default=(0, None))
        if match is None or 2 * best < len(samples):
            raise _not_made(disk, left)
        left.remove(match)
        found.append(match)
    return found


def _alike(samples: list[bytes], others: list[bytes]) -> int:
    """In how many places both agree; 0, where the partition tables differ. These are the first place."""
    return sum(one == other for one, other in zip(samples, others, strict=True)) if samples[:1] == others[:1] else 0


def _not_made(disk: PassDisk, files: list[Path]) -> DiskReadFailed:
    have = ", ".join(f"{file.name} of {file.stat().st_size} bytes" for file in files) or "nothing"
    return DiskReadFailed(
        f"the conversion tool ended well, but made no raw disk of {disk.size_bytes} bytes with the content of disk {disk.key}; "
        f"it made {have}",
        hint="set its arguments so that it writes each disk whole and raw, or set vmcx_way to own",
    )


def _places(spec: ReaderSpec) -> list[tuple[int, int]]:
    """(start, length) of the partition table, and of some pages with data."""
    with closing(open_reader(spec)) as reader:
        table = (_TABLE[0], max(0, min(_TABLE[1], reader.size - _TABLE[0])))
        found = [table]
        for start, length in _windows(reader):
            content = bytearray(length)
            reader.read_into(start, memoryview(content))
            pages = (at for at in range(0, length, _PAGE_BYTES) if any(content[at : at + _PAGE_BYTES]))
            first = next(pages, None)
            if first is not None:
                found.append((start + first, min(_PAGE_BYTES, length - first)))
        return found


def _windows(reader: DiskReader) -> Iterator[tuple[int, int]]:
    """Parts of the extents with data, behind the partition table, at equal distances in the data."""
    behind = sum(_TABLE)
    data = [
        (max(extent.start, behind), extent.start + extent.length)
        for extent in itertools.islice(reader.extents(), _EXTENTS_LOOKED_AT)
        if not extent.zero and extent.start + extent.length > behind
    ]
    distance = max(_PAGE_BYTES, sum(end - start for start, end in data) // _WINDOWS)
    ahead = 0
    for start, end in data:
        at = start + ahead
        while at < end:
            yield at, min(distance, _WINDOW_BYTES, end - at)
            at += distance
        ahead = at - end


def _read(spec: ReaderSpec, places: Sequence[tuple[int, int]]) -> list[bytes]:
    with closing(open_reader(spec)) as reader:
        found = []
        for start, length in places:
            content = bytearray(length)
            if length:
                reader.read_into(start, memoryview(content))
            found.append(bytes(content))
        return found
