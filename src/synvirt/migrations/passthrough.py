"""A whole VM imported by an outside tool: a pass of its own, and a second one onto the volumes. asyncio.

    the tool's own folder, in the ledger ─▶ pass 1: the tool fills it ─▶ its files are told apart ─▶ pass 2: onto the volumes

Pass 1 cannot go on where it was left: after a crash the tool begins anew, in an empty folder. Once it has ended well it does
not run again.
"""

import asyncio
import time
from collections.abc import Sequence
from pathlib import Path

from synvirt.disks import open_reader
from synvirt.disks.specs import RawSpec, ReaderSpec, paths
from synvirt.errors import DiskReadFailed
from synvirt.migrations.job import Job
from synvirt.migrations.passes import PassDisk, Tally, run_pass
from synvirt.migrations.worker import Moved
from synvirt.model import Pass, Progress, now
from synvirt.offline.passthrough import Passthrough
from synvirt.store import Watermark

# What tells disks of one size apart: signature and partition tables, and the labels that whole-disk volumes have instead. The
# boot loader, which a conversion may change, lies before.
_MARK_FROM, _MARK_TO = 440, 4096


async def chosen(job: Job) -> Passthrough | None:
    """The tool that imports this job's VM, or None: decided once, since half of it by a tool is no import."""
    offline = job.migration.plan.source.Offline
    tool = None if offline is None else job.rooms.passthroughs.get(offline)
    if tool is None:
        return None
    way = await job.in_thread(job.rooms.store.noted, job.id, "way")
    if way is None:
        way = "tool" if await job.in_thread(tool.serves) else "own"
        await job.in_thread(job.rooms.store.note, job.id, "way", way)
    return tool if way == "tool" else None


async def pass_through(job: Job, tool: Passthrough, source: Path, disks: Sequence[PassDisk]) -> None:
    """The disks on their volumes, as the tool has them. `disks` have the export's own readers, by which its files are known."""
    name = str(job.id)
    await job.record("passthrough", name)
    if not any(one.number == 1 and one.finished_at is not None for one in job.migration.passes):
        await _by_tool(job, tool, source, disks)
    files = await job.in_thread(_told_apart, disks, await job.in_thread(tool.disks, name))
    copies = [
        PassDisk(disk.key, RawSpec(path=str(file)), disk.volume, disk.size_bytes)
        for disk, file in zip(disks, files, strict=True)
    ]
    await run_pass(job, 2, "full", copies, fresh=True)
    await job.in_thread(tool.discard, name)
    await job.strike("passthrough", name)


async def _by_tool(job: Job, tool: Passthrough, source: Path, disks: Sequence[PassDisk]) -> None:
    """Pass 1. Its bytes are those of the disks, all of which the tool has gone through."""
    whole = sum(disk.size_bytes for disk in disks)
    started, tally = time.monotonic(), Tally(before=Progress())
    await job.change(passes=(Pass(number=1, kind="full"),))

    def moved(part: float) -> None:
        done = int(part * whole)
        # Twice as much will be read: from the export by the tool, and from its files by us.
        tally.take(Moved(key="", bytes_total=2 * whole, bytes_done=done, bytes_zero=0))
        job.rooms.board.pin(job.id, job.migration.state, tally.progress())

    moved(0)
    wanted = await asyncio.to_thread(_sizes, disks)
    await job.in_thread(tool.import_into, str(job.id), source, wanted, moved, job.stop.is_set)
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
    """About what the tool will write: what the export's files hold."""
    return sum(Path(path).stat().st_blocks * 512 for disk in disks for path in paths(disk.reader))


def _told_apart(disks: Sequence[PassDisk], files: Sequence[Path]) -> list[Path]:
    """The file of each disk: the first of its size that begins as it does. DiskReadFailed for a disk without one."""
    left = [(file, file.stat().st_size, _mark(RawSpec(path=str(file)))) for file in files]
    found = []
    for disk in disks:
        mark = _mark(disk.reader)
        match = next((one for one in left if one[1:] == (disk.size_bytes, mark)), None)
        if match is None:
            have = ", ".join(f"{file.name} of {size} bytes" for file, size, _ in left) or "nothing"
            raise DiskReadFailed(
                f"the conversion tool ended well, but made no raw disk of {disk.size_bytes} bytes that begins like disk "
                f"{disk.key}; it made {have}",
                hint="set its arguments so that it writes each disk whole and raw, or set vmcx_way to own",
            )
        left.remove(match)
        found.append(match[0])
    return found


def _mark(spec: ReaderSpec) -> bytes:
    reader = open_reader(spec)
    try:
        content = bytearray(max(0, min(_MARK_TO, reader.size) - _MARK_FROM))
        reader.read_into(_MARK_FROM if content else 0, memoryview(content))
    finally:
        reader.close()
    return bytes(content)
