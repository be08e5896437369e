"""The task of kind `copy`: one disk after another, reader ─▶ copy() ─▶ writer, each watermark after its flush."""

import contextlib
import fcntl
import os
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from synvirt.blocks import DiskReader, DiskWriter
from synvirt.copying import Copied, copy, default_threads
from synvirt.disks.checking.block_hashes import BlockHashes
from synvirt.disks.checking.checksum import Checksums
from synvirt.disks.checking.sampling import (
    BLOCK_BYTES,
    UNWRITTEN_BLOCKS,
    ChangesMissed,
    blocks_to_check,
    differing,
    lost_around,
)
from synvirt.disks.checking.unchanged import Differing, all_unchanged
from synvirt.disks.passed import Pace, pass_over
from synvirt.disks.passing import PassingWriter
from synvirt.disks.raw.changes import Files, opening
from synvirt.disks.raw.cloning import clone
from synvirt.disks.raw.zvols import device_of
from synvirt.disks.rewriting import ComparingWriter
from synvirt.disks.specs import (
    AsideWriterSpec,
    FileWriterSpec,
    NbdSpec,
    NbdTlsSpec,
    Qcow2WriterSpec,
    RbdWriterSpec,
    ReaderSpec,
    WriterSpec,
    begins_anew,
    elsewhere,
    leaves_unwritten_out,
    written,
)
from synvirt.errors import Cancelled, DiskWriteFailed, Internal, SynvirtError
from synvirt.jobs import dataclass_json
from synvirt.jobs.activity import Yielding
from synvirt.jobs.orders import PREPARING, SOURCE_FILES, WANTED_RATE, CopyOrder, DiskOrder, GivenRate, SourceFiles
from synvirt.jobs.wire import Flushed, Moved, Result, Wire
from synvirt.repository.specs import PointSpec

# How long a worker waits for the one before it. When a service was killed, its worker ends within milliseconds.
LOCK_WAIT_S, LOCK_LOOK_S = 15.0, 0.05
# Threads for a remote disk, for any number of cores: half of them wait for reads, half for writes.
WAITING_THREADS = 8
# Messages a second: twice what a client gets (2 a second), so that its figures are fresh.
PROGRESS_EVERY_S = 0.25
# The most time that a pass spends to read back what its hashes lack, as a share of its copying. A later pass does the rest.
FILL_SHARE, FILL_LEAST_S = 0.1, 1.0
TRACKING_HINT = "its change tracking cannot be trusted: look for a newer version of the platform, and check its disks"


class OpenReader(Protocol):
    """`pace`: of what must be read before the disk's first byte (disks.open_reader)."""

    def __call__(self, spec: ReaderSpec | PointSpec, pace: Pace | None = None, /) -> DiskReader: ...


@dataclass(frozen=True)
class Openers:
    """How a worker opens what an order names; `synvirt.worker` puts them together."""

    reader: OpenReader
    writer: Callable[[WriterSpec], DiskWriter]


def copy_disks(order: CopyOrder, wire: Wire, openers: Openers) -> None:
    """Copies every disk of the order. SynvirtError as soon as one fails, with the disk's name."""
    shared = _turns(order, wire)
    for disk in order.disks:
        with about(disk.key):
            _copy_disk(disk, order, wire, openers, shared)


def _turns(order: CopyOrder, wire: Wire) -> Callable[[int], None] | None:
    """What each read waits for: first a guest that boots from the same disks, then the copies that share a rate."""
    share = None if order.shared_bytes is None else Share(wire, order.shared_bytes).take
    if order.yields_to is None:
        return share
    guest_first = Yielding(Path(order.yields_to), wire.stop).take

    def taken(amount: int) -> None:
        guest_first(amount)
        if share is not None:
            share(amount)

    return taken


@contextlib.contextmanager
def about(key: str) -> Iterator[None]:
    """Errors that are raised within the block name the disk."""
    try:
        yield
    except SynvirtError as error:
        error.detail = f"disk {key}: {error.detail}"
        raise
    except Exception as error:
        raise Internal(f"disk {key}: the worker failed: {type(error).__name__}: {error}") from error


class Share:
    """A rate that several copies share: the service gives a piece of it in turn. All threads of a copy wait for the same piece,
    so one of them asks. Pieces grow with what was given: a delta of a few blocks takes little from the others."""

    def __init__(self, wire: Wire, piece_bytes: int) -> None:
        self._wire, self._piece_bytes = wire, piece_bytes
        self._left = self._given = 0
        self._lock = threading.Lock()

    def take(self, amount: int) -> None:
        """Waits for `amount` bytes. Cancelled, when the service ends the copy."""
        with self._lock:
            while self._left < amount:
                if self._wire.stop():
                    raise Cancelled
                wanted = max(amount - self._left, min(self._piece_bytes, self._given))
                self._wire.say(Result(name=WANTED_RATE, content={"bytes": wanted}, waits=True))
                given = GivenRate.from_line(self._wire.next_line()).bytes
                self._left += given
                self._given += given
            self._left -= amount


class Progress:
    """Sends the messages of one disk's copy, only as often as they are read."""

    def __init__(self, key: str, wire: Wire) -> None:
        self._key, self._wire, self._reported_at = key, wire, 0.0

    def moved(self, copied: Copied) -> None:
        """Sends the figures of the copy, at most once in PROGRESS_EVERY_S."""
        if time.monotonic() - self._reported_at >= PROGRESS_EVERY_S:
            self._reported_at = time.monotonic()
            self._wire.say(
                Moved(
                    key=self._key,
                    bytes_total=copied.bytes_total,
                    bytes_done=copied.bytes_done,
                    bytes_zero=copied.bytes_zero,
                )
            )

    def flushed(self, copied: Copied, *, finished: bool = False, bytes_checked: int = 0) -> None:
        """Sends a watermark: all bytes before `copied.watermark` are durable. `bytes_checked`: compared in verification."""
        self._wire.say(
            Flushed(
                key=self._key,
                offset_bytes=copied.watermark,
                bytes_total=copied.bytes_total,
                bytes_done=copied.bytes_done,
                bytes_zero=copied.bytes_zero,
                finished=finished,
                bytes_checked=bytes_checked,
            )
        )


class Preparing:
    """Reports that the worker is at work before a copy: it folds what lies beside a volume, or reads what comes before the
    first byte that is wanted. That may take hours, and is no progress of a pass."""

    def __init__(self, wire: Wire) -> None:
        self._wire, self._reported_at, self._done = wire, 0.0, 0

    def moved(self, bytes_done: int) -> None:
        """Sends a message where bytes were moved, at most once in PROGRESS_EVERY_S."""
        if bytes_done > self._done and time.monotonic() - self._reported_at >= PROGRESS_EVERY_S:
            self._reported_at, self._done = time.monotonic(), bytes_done
            self._wire.say(Result(name=PREPARING, content={}))


def _copy_disk(disk: DiskOrder, order: CopyOrder, wire: Wire, openers: Openers, shared: Callable[[int], None] | None) -> None:
    if isinstance(disk.writer, Qcow2WriterSpec):
        _as_qcow2(disk, Path(disk.writer.path), order.bandwidth_bps, wire, openers)
        return
    pace = Pace(bandwidth_bps=order.bandwidth_bps, shared=shared, stop=wire.stop, on_progress=Preparing(wire).moved)
    with (
        exclusively(disk.writer),
        _opened(disk, openers, wire, pace) as (reader, writer, files),
        Checksums(disk.checksums, stop=wire.stop) as checksums,
        _hashed(disk, writer.size) as hashes,
    ):
        _DiskCopy(disk, order, wire, openers, shared, reader, writer, files, checksums, hashes).carry_out(pace)


@dataclass(frozen=True, slots=True)
class _DiskCopy:
    """The copy of one disk, whose reader and writer are open."""

    disk: DiskOrder
    order: CopyOrder
    wire: Wire
    openers: Openers
    shared: Callable[[int], None] | None
    reader: DiskReader
    writer: DiskWriter
    files: Files
    checksums: Checksums
    hashes: BlockHashes | None

    def carry_out(self, pace: Pace) -> None:
        """Copies, then checks what was copied and what was left out, and reports the disk as finished."""
        disk, hashes, progress = self.disk, self.hashes, Progress(self.disk.key, self.wire)
        rest = clone(self.reader, self.writer, self.wire.stop)
        began_at = time.monotonic()
        try:
            if disk.since_bytes and not isinstance(disk.reader, PointSpec) and begins_anew(disk.reader):
                pass_over(self.reader, disk.since_bytes, pace)
            copied = self._copied(rest, progress)
        except Cancelled:
            if not self.wire.stop():
                self.checksums.verify()  # a wrong digest, found before the copy's end, is why it stopped
            raise
        if disk.zero_rest:
            self.writer.zero(self.reader.size, self.writer.size - self.reader.size)
            self.writer.flush()
        # Finished only when the archive's own digest has shown that the copy is what was exported.
        self.checksums.verify()
        self.files.refuse_changed()
        # Shared blocks were not read. Reading them for the hashes would take longer than the copy.
        if hashes is not None and not rest.bytes_cloned:
            _filled(hashes, disk, self.openers, time.monotonic() - began_at, self.wire)
        if disk.verify and disk.sample is not None:
            checked = self._verified(copied, progress)
        else:
            checked = _sampled(disk, self.reader, copied.bytes_total, self.openers)
        if hashes is not None:
            hashes.close()  # before the disk is reported as finished: it is not opened again, even after a kill
        progress.flushed(copied, finished=True, bytes_checked=checked)

    def _copied(self, rest: DiskReader, progress: Progress) -> Copied:
        """Copies `rest`: what could not be shared."""
        disk, order, hashes = self.disk, self.order, self.hashes

        def flushed(copied: Copied) -> None:
            self.files.refuse_changed()
            if hashes is not None:
                hashes.settle(copied.watermark)
            progress.flushed(copied)

        return copy(
            rest if hashes is None else hashes.reading(rest, fresh=disk.fresh, since=disk.since_bytes),
            self.writer if hashes is None else hashes.writing(self.writer),
            since=disk.since_bytes,
            fresh=disk.fresh,
            threads=order.threads or (max(default_threads(), WAITING_THREADS) if _waits(disk.reader) else None),
            bandwidth_bps=order.bandwidth_bps,
            shared=self.shared,
            flush_every_s=order.flush_every_s,
            stop=self.checksums.stop,
            on_progress=progress.moved,
            on_watermark=flushed,
        )

    def _verified(self, copied: Copied, progress: Progress) -> int:
        """Compares all that the source calls unchanged. The number of bytes compared. ChangesMissed."""
        assert not isinstance(self.disk.writer, Qcow2WriterSpec)
        with contextlib.closing(self.openers.reader(written(self.disk.writer))) as volume:
            found = all_unchanged(
                self.reader,
                volume,
                known=(lambda _: None) if self.hashes is None else self.hashes.known,
                threads=self.order.threads,
                bandwidth_bps=self.order.bandwidth_bps,
                shared=self.shared,
                stop=self.wire.stop,
                on_progress=lambda done: progress.moved(_together(copied, done)),
            )
        if found.blocks:
            missed = found.missed_by_sample(copied.bytes_total)
            raise ChangesMissed(
                f"the source called {found.blocks} blocks of {BLOCK_BYTES} bytes unchanged that have changed: {_named(found)}; "
                f"the chance that a sample misses them all is {missed:.0%}",
                hint=TRACKING_HINT,
            )
        return found.checked_bytes


@contextlib.contextmanager
def _hashed(disk: DiskOrder, size: int) -> Iterator[BlockHashes | None]:
    if disk.hashes is None:
        yield None
        return
    hashes = BlockHashes(Path(disk.hashes.path), size, disk.hashes.token)
    try:
        yield hashes
    finally:
        hashes.close()


def _filled(hashes: BlockHashes, disk: DiskOrder, openers: Openers, copied_for_s: float, wire: Wire) -> None:
    assert disk.hashes is not None
    assert not isinstance(disk.writer, Qcow2WriterSpec)
    within_s = None if disk.hashes.last else max(FILL_SHARE * copied_for_s, FILL_LEAST_S)
    with contextlib.closing(openers.reader(written(disk.writer))) as volume:
        hashes.fill(volume, within_s=within_s, stop=wire.stop)
    if wire.stop():
        raise Cancelled


def _together(copied: Copied, compared: Copied) -> Copied:
    """The totals of a pass that copies and then compares."""
    return copied._replace(
        bytes_total=copied.bytes_total + compared.bytes_total, bytes_done=copied.bytes_done + compared.bytes_done
    )


def _as_qcow2(disk: DiskOrder, path: Path, bandwidth_bps: int | None, wire: Wire, openers: Openers) -> None:
    from synvirt.disks.nbd.qcow2_writer import write_qcow2

    progress, last = Progress(disk.key, wire), Copied(0, 0, 0, 0)

    def moved(copied: Copied) -> None:
        nonlocal last
        last = copied
        progress.moved(copied)

    with contextlib.closing(openers.reader(disk.reader)) as reader:
        # A killed worker left it: qemu-img starts again.
        path.unlink(missing_ok=True)
        write_qcow2(reader, path, bandwidth_bps=bandwidth_bps, stop=wire.stop, on_progress=moved)
        progress.flushed(last._replace(watermark=reader.size), finished=True)


def _waits(spec: ReaderSpec | PointSpec) -> bool:
    return not isinstance(spec, PointSpec) and elsewhere(spec)


def _named(found: Differing) -> str:
    """The differing ranges as text, by offset and length."""
    each = ", ".join(f"{extent.start}+{extent.length}" for extent in found.extents)
    return each if sum(extent.length for extent in found.extents) >= found.blocks * BLOCK_BYTES else f"{each} and more"


def _sampled(disk: DiskOrder, reader: DiskReader, delta_bytes: int, openers: Openers) -> int:
    """Compares samples. The number of bytes compared. ChangesMissed."""
    if disk.sample is None or isinstance(disk.reader, PointSpec) or isinstance(disk.writer, Qcow2WriterSpec):
        return 0
    volume = openers.reader(written(disk.writer))
    try:
        # A first pass leaves out only what the source calls empty.
        empty = leaves_unwritten_out(disk.reader)
        blocks = UNWRITTEN_BLOCKS if empty else blocks_to_check(delta_bytes)
        offset, checked = differing(reader, volume, disk.sample, blocks, zeros=empty)
        lost = None if offset is None else lost_around(reader, volume, offset)
    finally:
        volume.close()
    if lost is not None:
        claimed = "empty, and they are not" if empty else "unchanged, and they have changed"
        raise ChangesMissed(f"the source called {lost.length} bytes at offset {lost.start} {claimed}", hint=TRACKING_HINT)
    return checked


@contextlib.contextmanager
def _opened(disk: DiskOrder, openers: Openers, wire: Wire, pace: Pace) -> Iterator[tuple[DiskReader, DiskWriter, Files]]:
    assert not isinstance(disk.writer, Qcow2WriterSpec)
    with contextlib.ExitStack() as stack:
        fold_aside(disk.writer, wire)
        with opening() as files:
            reader = openers.reader(disk.reader, pace)
        stack.callback(reader.close)
        if not disk.still:
            files = Files()
        elif files.found:
            opened = SourceFiles(key=disk.key, files=files.found)
            wire.say(Result(name=SOURCE_FILES, content=dataclass_json.plain(opened)))
        writer = openers.writer(disk.writer)
        stack.callback(writer.close)
        if disk.fresh and isinstance(disk.reader, NbdSpec | NbdTlsSpec) and isinstance(disk.writer, FileWriterSpec):
            writer = PassingWriter(writer, disk.writer.path)
            stack.callback(writer.close)
        if disk.compare:
            writer = ComparingWriter(writer, openers.reader(written(disk.writer)))
            stack.callback(writer.close)
        yield reader, writer, files


def fold_aside(writer: WriterSpec, wire: Wire) -> None:
    """Folds what lies beside the volume into it, once nobody needs the volume as it is. Call it before the volume is opened: a
    reader that was opened before it looks for what was folded where it lay. DiskWriteFailed, Cancelled."""
    if isinstance(writer, AsideWriterSpec) and writer.folds:
        from synvirt.disks.raw.aside import fold

        preparing = Preparing(wire)
        # No limit of the pass holds for it: it reads nothing of the source, and nothing over a network.
        fold(writer, stop=wire.stop, on_progress=lambda copied: preparing.moved(copied.bytes_done))


@contextlib.contextmanager
def exclusively(writer: WriterSpec) -> Iterator[None]:
    """One writer a volume: the lock of a worker goes with its process, however it ended."""
    if isinstance(writer, RbdWriterSpec):  # the cluster has a lock of its own, and its writer holds that
        yield
        return
    try:
        # As the writer finds it: a volume's link may be gone for a moment.
        descriptor = os.open(device_of(writer.path), os.O_RDONLY | os.O_CLOEXEC)
    except OSError as error:
        raise DiskWriteFailed(
            f"volume {writer.path} cannot be opened: {error.strerror}",
            hint="where somebody has removed it, begin again: what was copied onto it is gone",
        ) from error
    try:
        deadline = time.monotonic() + LOCK_WAIT_S
        while True:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() >= deadline:
                    raise DiskWriteFailed(
                        "another process is writing the volume",
                        hint="end the other copy worker of this volume, or the second service on this data_dir",
                    ) from None
                time.sleep(LOCK_LOOK_S)
        yield
    finally:
        os.close(descriptor)
