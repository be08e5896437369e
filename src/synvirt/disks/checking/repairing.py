"""Compares a volume with its ledger, and repairs every row that differs from the source.

    ledger ─▶ threads read the volume ─▶ rows that differ ─▶ the source, if its hash is the ledger's ─▶ what differs is written
                                                                     flush ─▶ read again

The source is read only where the volume differs, and only the differing units of 4 KiB are written. A source that has changed
since repairs nothing, as the ledger says what the volume had. After a crash the next run finds what is left. A long run works
in batches of rows, and may go on behind the last durable one.
"""

import contextlib
import fcntl
import hashlib
import os
import struct
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import islice
from typing import Final

from synvirt.blocks import DiskReader, DiskWriter, Extent, new_buffer
from synvirt.copying import default_threads
from synvirt.disks.checking.ledger import Ledger, Row, to_look_at
from synvirt.disks.checking.looking import PIECE_BYTES, Tally, first_found
from synvirt.disks.memory import equal, is_zero
from synvirt.disks.raw.files import RawReader
from synvirt.errors import Cancelled, Conflict, DiskReadFailed, DiskWriteFailed
from synvirt.sizes import KIB

UNIT_BYTES: Final = 4 * KIB
# At most 256 MiB: a second of reading, or less.
ROWS_A_BATCH: Final = 64
# struct flock of 64-bit Linux (fcntl(2)): type, whence, start, length, pid.
_FLOCK: Final = struct.Struct("hhqqi4x")
# The bytes that QEMU locks to show who uses an image (block/file-posix.c: RAW_LOCK_PERM_BASE, RAW_LOCK_SHARED_BASE).
_QEMU_FIRST, _QEMU_BYTES = 100, 200
# The one of these that QEMU locks while it may write (BLK_PERM_WRITE).
_QEMU_WRITES = _QEMU_FIRST + 1


@dataclass(frozen=True, slots=True)
class Repaired:
    """`written`: bytes written to the volume. `left`: rows for which the source does not match the ledger."""

    written: tuple[Extent, ...]
    left: tuple[Row, ...]


def differing_rows(ledger: Ledger, volume: DiskReader, *, threads: int | None = None) -> list[Row]:
    """All rows that the volume does not match, ascending, with unreadable ones. DiskWriteFailed: the volume is smaller than the
    disk."""
    return differing(rows_to_read(ledger, volume), volume, threads=threads)


def rows_to_read(ledger: Ledger, volume: DiskReader, *, since: int = 0) -> Iterator[Row]:
    """The rows of the ledger from `since` on (the start of a row, or in zeros), without those that the volume reports as zeros.
    DiskWriteFailed: the volume is smaller than the disk."""
    if volume.size < ledger.size:
        raise DiskWriteFailed(f"{ledger.disk}: the volume has {volume.size} bytes, the disk {ledger.size}")
    rest = (Row(max(row.start, since), row.end - max(row.start, since), row.digest) for row in ledger.rows if row.end > since)
    return to_look_at(Ledger(ledger.disk, ledger.size, rest), volume)


def batches(rows: Iterator[Row]) -> Iterator[list[Row]]:
    """Batches of ROWS_A_BATCH."""
    while batch := list(islice(rows, ROWS_A_BATCH)):
        yield batch


def differing(
    rows: Iterable[Row],
    volume: DiskReader,
    *,
    threads: int | None = None,
    stop: Callable[[], bool] = lambda: False,
    on_progress: Callable[[int], None] = lambda bytes_read: None,
) -> list[Row]:
    """Those of the rows that the volume does not match, ascending. Cancelled."""
    read, found = Tally(), list[Row]()

    def look(row: Row, buffer: memoryview, _: memoryview) -> None:
        view = buffer[: row.length]
        if not (_reads(volume, row, view) and _holds(row, view)):
            found.append(row)
        read.add(row.length)

    first_found(
        iter(rows),
        look,
        threads=1 if volume.max_readers <= 1 else min(threads or default_threads(), volume.max_readers),
        stop=stop,
        on_progress=lambda: on_progress(read.total),
    )
    return sorted(found)


def repair(
    rows: Iterable[Row],
    source: DiskReader,
    volume: DiskReader,
    writer: DiskWriter,
    *,
    stop: Callable[[], bool] = lambda: False,
) -> Repaired:
    """Writes what differs in these rows, each from the source. DiskReadFailed: the source cannot be read; DiskWriteFailed: the
    volume does not keep what is written; Cancelled: each row is as it was, or repaired."""
    wanted, present = new_buffer(PIECE_BYTES), new_buffer(PIECE_BYTES)
    written: list[Extent] = []
    done: list[Row] = []
    left: list[Row] = []
    for row in rows:
        if stop():
            raise Cancelled
        good, view = wanted[: row.length], present[: row.length]
        if row.end > source.size:
            left.append(row)
            continue
        source.read_into(row.start, good)
        if not _holds(row, good):
            left.append(row)
            continue
        runs = _differing(good, view) if _reads(volume, row, view) else [(0, row.length)]
        for start, end in runs:
            if is_zero(good[start:end]):
                writer.zero(row.start + start, end - start)
            else:
                writer.write(row.start + start, good[start:end])
            written.append(Extent(row.start + start, end - start))
        done.append(row)
    writer.flush()
    if isinstance(volume, RawReader):
        os.posix_fadvise(volume.descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
    for row in done:
        volume.read_into(row.start, view := present[: row.length])
        if not _holds(row, view):
            raise DiskWriteFailed(
                f"the {row.length} bytes at offset {row.start} were repaired, and read back differently",
                hint="the target's storage does not keep what is written to it: look at the kernel's log, and at its health",
            )
    return Repaired(tuple(written), tuple(left))


def refuse_in_use(descriptor: int, name: str) -> None:
    """Conflict, where QEMU has the volume open. QEMU cannot open it until this writable descriptor is closed: a guest's disk
    must not change while the guest uses it."""
    lock = _FLOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, _QEMU_FIRST, _QEMU_BYTES, 0)
    try:
        fcntl.fcntl(descriptor, fcntl.F_OFD_SETLK, lock)
    except OSError as error:
        raise _in_use(name) from error


def refuse_written(descriptor: int, name: str) -> None:
    """Conflict, where QEMU has the volume open to write. The descriptor may be one for reading; nothing is locked."""
    asked = _FLOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, _QEMU_WRITES, 1, 0)
    kind, *_ = _FLOCK.unpack(fcntl.fcntl(descriptor, fcntl.F_OFD_GETLK, asked))
    if kind != fcntl.F_UNLCK:
        raise _in_use(name)


def _in_use(name: str) -> Conflict:
    return Conflict(f"{name} is in use by a guest", hint="shut the guest down")


def _reads(volume: DiskReader, row: Row, view: memoryview) -> bool:
    with contextlib.suppress(DiskReadFailed):
        volume.read_into(row.start, view)
        return True
    return False


def _holds(row: Row, view: memoryview) -> bool:
    digest = None if is_zero(view) else hashlib.sha256(view, usedforsecurity=False).digest()
    return digest == row.digest


def _differing(one: memoryview, other: memoryview) -> Iterator[tuple[int, int]]:
    """The runs of units that differ: start and end."""
    begun: int | None = None
    for start in range(0, len(one), UNIT_BYTES):
        same = equal(one[start : start + UNIT_BYTES], other[start : start + UNIT_BYTES])
        if same and begun is not None:
            yield begun, start
            begun = None
        elif not same and begun is None:
            begun = start
    if begun is not None:
        yield begun, len(one)
