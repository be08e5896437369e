"""The task of kind `repair`: volumes compared with the ledgers of a receipt, and repaired from their sources, batch by batch.

    a batch of the ledger ─▶ the volume is read ─▶ what differs is reported ─▶ Noted ─▶ repaired ─▶ flushed ─▶ the watermark

What differs is in the store before it is written: a worker that is killed in between leaves no unknown repair.
"""

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

from synvirt.blocks import DiskReader, DiskWriter
from synvirt.copying import Copied
from synvirt.disks.checking.ledger import Row
from synvirt.disks.checking.receipt_rows import read_ledger
from synvirt.disks.checking.repairing import batches, differing, refuse_in_use, repair, rows_to_read
from synvirt.disks.passed import Pace, pass_over
from synvirt.disks.specs import RbdWriterSpec, WriterSpec, begins_anew, written
from synvirt.errors import Cancelled, DiskWriteFailed
from synvirt.jobs import dataclass_json
from synvirt.jobs.copying_disks import Openers, Preparing, Progress, about, exclusively, fold_aside
from synvirt.jobs.orders import DIFFERING, LEFT, DiskRepairOrder, DiskSpans, Noted, RepairOrder
from synvirt.jobs.wire import Result, Wire


def repair_disks(order: RepairOrder, wire: Wire, openers: Openers) -> None:
    """Every disk of the order, or SynvirtError as soon as one fails, which names the disk."""
    for disk in order.disks:
        with about(disk.key):
            _repair_disk(disk, order, wire, openers)


def _repair_disk(disk: DiskRepairOrder, order: RepairOrder, wire: Wire, openers: Openers) -> None:
    ledger = read_ledger(disk.ledger)
    progress = Progress(disk.key, wire)
    pace = Pace(stop=wire.stop, on_progress=Preparing(wire).moved)

    def at(offset: int) -> Copied:
        return Copied(bytes_total=ledger.size, bytes_done=offset, bytes_zero=0, watermark=offset)

    with contextlib.ExitStack() as stack:
        stack.enter_context(exclusively(disk.volume))
        if disk.source is not None:
            stack.enter_context(_no_guest(disk.volume))
            fold_aside(disk.volume, wire)
        volume = stack.enter_context(contextlib.closing(openers.reader(written(disk.volume))))
        mending = None if disk.source is None else stack.enter_context(_opened(disk, openers, pace))
        compared, passed = disk.since_bytes, 0
        for batch in batches(rows_to_read(ledger, volume, since=compared)):
            begins = compared
            found = differing(
                batch,
                volume,
                threads=order.threads,
                stop=wire.stop,
                on_progress=lambda read: progress.moved(at(begins + read)),  # noqa: B023
            )
            if found:
                _note(disk.key, found, wire)
                if mending is not None:
                    source, writer = mending
                    if disk.source is not None and begins_anew(disk.source):
                        pass_over(source, found[0].start, pace, since=passed)
                        passed = found[-1].end
                    _say(LEFT, disk.key, repair(found, source, volume, writer, stop=wire.stop).left, wire)
            compared = batch[-1].end
            progress.flushed(at(compared))
        progress.flushed(at(ledger.size), finished=True)


@contextlib.contextmanager
def _opened(disk: DiskRepairOrder, openers: Openers, pace: Pace) -> Iterator[tuple[DiskReader, DiskWriter]]:
    """The source, and the volume to write."""
    assert disk.source is not None
    with contextlib.ExitStack() as stack:
        source = stack.enter_context(contextlib.closing(openers.reader(disk.source, pace)))
        writer = stack.enter_context(contextlib.closing(openers.writer(disk.volume)))
        yield source, writer


@contextlib.contextmanager
def _no_guest(volume: WriterSpec) -> Iterator[None]:
    """No guest can open the volume meanwhile."""
    if isinstance(volume, RbdWriterSpec):  # the cluster has a lock of its own, and its writer holds that
        yield
        return
    path = Path(volume.path)
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    except OSError as error:
        raise DiskWriteFailed(f"{path.name} cannot be opened: {error.strerror}") from error
    try:
        refuse_in_use(descriptor, path.name)
        yield
    finally:
        os.close(descriptor)


def _note(key: str, found: list[Row], wire: Wire) -> None:
    """Cancelled."""
    _say(DIFFERING, key, found, wire, waits=True)
    Noted.from_line(wire.next_line())
    if wire.stop():
        raise Cancelled


def _say(name: str, key: str, rows: list[Row] | tuple[Row, ...], wire: Wire, *, waits: bool = False) -> None:
    if rows:
        spans = DiskSpans(key=key, spans=tuple((row.start, row.length) for row in rows))
        wire.say(Result(name=name, content=dataclass_json.plain(spans), waits=waits))
