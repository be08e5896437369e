"""The copy worker: a process of its own for each pass of a job. A bad image kills a worker, never the service.

    stdin   one line: the CopyOrder as JSON; then it stays open, and its end means that the service is gone
    stdout  a line a message: Moved, Flushed, DiskFinished, Broken as JSON
    SIGTERM stop at the next request

`python -m synvirt.migrations.worker`. Threads, no event loop.
"""

import contextlib
import fcntl
import os
import resource
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError

from synvirt.blocks import DiskReader, DiskWriter
from synvirt.copying import Copied, copy, default_threads
from synvirt.disks import open_reader, open_writer
from synvirt.disks.checking.checksum import Checksums
from synvirt.disks.checking.sampling import UNWRITTEN_BLOCKS, ChangesMissed, blocks_to_check, differing
from synvirt.disks.passing import PassingWriter
from synvirt.disks.raw.cloning import clone
from synvirt.disks.rewriting import ComparingWriter
from synvirt.disks.specs import (
    ChecksumSpec,
    FileWriterSpec,
    NbdSpec,
    RbdWriterSpec,
    ReaderSpec,
    WriterSpec,
    elsewhere,
    told_empty,
    written,
)
from synvirt.errors import Cancelled, DiskWriteFailed, Internal, SynvirtError
from synvirt.sizes import GIB

# An image that makes a reader take more than this is hostile; a 1 TiB disk takes less than 256 MiB. Address space, not
# resident memory: threads and mapped libraries count too.
ADDRESS_SPACE_BYTES = 8 * GIB
# A worker that the service lost with a kill -9 ends within milliseconds; this is how long the next one waits for it.
LOCK_WAIT_S = 15.0
# For a disk elsewhere, however few cores there are: half of them wait for what they read, half for what they write.
WAITING_THREADS = 8
# Twice what a client sees (2 a second), so that none of its figures is old.
PROGRESS_EVERY_S = 0.25


class Said(BaseModel):
    """What service and worker say to each other. None of `model`'s: to make those takes a tenth of a worker's start; and each
    is built when it is first used."""

    model_config = ConfigDict(frozen=True, extra="forbid", defer_build=True)


class DiskOrder(Said):
    """One disk of a pass. `since_bytes`: all before it is on the destination already. `fresh`: what is there reads as zeros,
    or as this same pass wrote it, so zeros need no writing. `compare`: what is there may be right already, and is then left as
    it is. `sample`: what the reader's extents leave out is looked at here and there, at places that hang on this text."""

    key: str
    reader: ReaderSpec
    writer: WriterSpec
    checksums: tuple[ChecksumSpec, ...] = ()
    since_bytes: int = 0
    fresh: bool = True
    compare: bool = False
    sample: str | None = None


class CopyOrder(Said):
    # What is wrong with an order is said without its content: it may hold credentials of a file elsewhere.
    model_config = ConfigDict(frozen=True, extra="forbid", hide_input_in_errors=True)

    disks: tuple[DiskOrder, ...]
    threads: int | None = None
    bandwidth_bps: int | None = None
    flush_every_s: float = 5.0


class Moved(Said):
    """Progress of a disk; not durable yet."""

    message: Literal["moved"] = "moved"
    key: str
    bytes_total: int
    bytes_done: int
    bytes_zero: int


class Flushed(Said):
    """Every byte before `offset_bytes` is durable on the destination; `finished`: all of the pass is, and of what should not
    have changed `bytes_checked` were compared."""

    message: Literal["flushed"] = "flushed"
    key: str
    offset_bytes: int
    bytes_total: int
    bytes_done: int
    bytes_zero: int
    finished: bool = False
    bytes_checked: int = 0


class Broken(Said):
    """`kind`: the error's class. Several have one code, and the pass answers some of them in ways of their own."""

    message: Literal["broken"] = "broken"
    kind: str
    key: str | None
    code: str
    detail: str
    hint: str | None


Message = Annotated[Moved | Flushed | Broken, Field(discriminator="message")]
MESSAGE: TypeAdapter[Moved | Flushed | Broken] = TypeAdapter(Message)


def carry_out(order: CopyOrder, say: Callable[[Moved | Flushed | Broken], None], stop: Callable[[], bool]) -> None:
    """Copy each disk of the order; SynvirtError as soon as one fails, told by `say` too."""
    key: str | None = None
    try:
        for disk in order.disks:
            key = disk.key
            _copy_disk(disk, order, say, stop)
    except SynvirtError as error:
        kind = type(error).__name__
        say(Broken(kind=kind, key=key, code=error.code, detail=_about(key, error.detail), hint=error.hint))
        raise
    except Exception as error:
        detail = f"the copy worker failed: {type(error).__name__}: {error}"
        say(Broken(kind=Internal.__name__, key=key, code=Internal.code, detail=_about(key, detail), hint=None))
        raise


def _copy_disk(
    disk: DiskOrder, order: CopyOrder, say: Callable[[Moved | Flushed | Broken], None], stop: Callable[[], bool]
) -> None:
    said_at = 0.0

    def moved(copied: Copied) -> None:
        nonlocal said_at
        if time.monotonic() - said_at >= PROGRESS_EVERY_S:
            said_at = time.monotonic()
            say(
                Moved(
                    key=disk.key,
                    bytes_total=copied.bytes_total,
                    bytes_done=copied.bytes_done,
                    bytes_zero=copied.bytes_zero,
                )
            )

    def flushed(copied: Copied, *, finished: bool = False, bytes_checked: int = 0) -> None:
        say(
            Flushed(
                key=disk.key,
                offset_bytes=copied.watermark,
                bytes_total=copied.bytes_total,
                bytes_done=copied.bytes_done,
                bytes_zero=copied.bytes_zero,
                finished=finished,
                bytes_checked=bytes_checked,
            )
        )

    with _exclusively(disk.writer), _opened(disk) as (reader, writer), Checksums(disk.checksums, stop=stop) as checksums:
        try:
            copied = copy(
                clone(reader, writer, stop),
                writer,
                since=disk.since_bytes,
                fresh=disk.fresh,
                threads=order.threads or (max(default_threads(), WAITING_THREADS) if elsewhere(disk.reader) else None),
                bandwidth_bps=order.bandwidth_bps,
                flush_every_s=order.flush_every_s,
                stop=checksums.stop,
                on_progress=moved,
                on_watermark=flushed,
            )
        except Cancelled:
            if not stop():
                checksums.verify()  # a wrong digest, found before the copy's end, is why it stopped
            raise
        # Not finished before the archive's own digest says that what was copied is what was exported.
        checksums.verify()
        flushed(copied, finished=True, bytes_checked=_sampled(disk, reader, copied.bytes_total))


def _sampled(disk: DiskOrder, reader: DiskReader, delta_bytes: int) -> int:
    """How many bytes were compared. ChangesMissed."""
    if disk.sample is None:
        return 0
    volume = open_reader(written(disk.writer))
    try:
        # A first pass leaves nothing out but what is said to be empty.
        empty = told_empty(disk.reader)
        blocks = UNWRITTEN_BLOCKS if empty else blocks_to_check(delta_bytes)
        offset, checked = differing(reader, volume, disk.sample, blocks, zeros=empty)
    finally:
        volume.close()
    if offset is not None:
        told = "empty, and it is not" if empty else "unchanged, and it has changed"
        raise ChangesMissed(
            f"the source called the block at offset {offset} {told}",
            hint="its change tracking cannot be trusted: look for a newer version of the platform, and check its disks",
        )
    return checked


@contextlib.contextmanager
def _opened(disk: DiskOrder) -> Iterator[tuple[DiskReader, DiskWriter]]:
    with contextlib.ExitStack() as stack:
        reader = open_reader(disk.reader)
        stack.callback(reader.close)
        writer = open_writer(disk.writer)
        stack.callback(writer.close)
        if disk.fresh and isinstance(disk.reader, NbdSpec) and isinstance(disk.writer, FileWriterSpec):
            writer = PassingWriter(writer, disk.writer.path)
            stack.callback(writer.close)
        if disk.compare:
            writer = ComparingWriter(writer, open_reader(written(disk.writer)))
            stack.callback(writer.close)
        yield reader, writer


@contextlib.contextmanager
def _exclusively(writer: WriterSpec) -> Iterator[None]:
    """One writer a volume: the lock of a worker goes with its process, however it ended."""
    if isinstance(writer, RbdWriterSpec):  # the cluster has a lock of its own, and its writer holds that
        yield
        return
    descriptor = os.open(writer.path, os.O_RDONLY | os.O_CLOEXEC)
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
                time.sleep(0.05)
        yield
    finally:
        os.close(descriptor)


def _about(key: str | None, detail: str) -> str:
    return detail if key is None else f"disk {key}: {detail}"


def _leave_with_the_service(stdin: int) -> None:
    """The service holds our stdin open: its end is the service's end, and nobody would hear us any more."""
    with contextlib.suppress(OSError):
        while os.read(stdin, 4096):
            pass
    os._exit(1)


def main() -> int:
    resource.setrlimit(resource.RLIMIT_AS, (ADDRESS_SPACE_BYTES, ADDRESS_SPACE_BYTES))
    stopping = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: stopping.set())
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the service's to hear
    # What a library prints must not look like a message.
    messages = os.fdopen(os.dup(1), "wb", buffering=0)
    os.dup2(2, 1)
    speaking = threading.Lock()

    def say(message: Moved | Flushed | Broken) -> None:
        with speaking:
            messages.write(message.model_dump_json().encode() + b"\n")

    try:
        order = CopyOrder.model_validate_json(_first_line(0))
    except ValidationError as error:
        # Without what was sent: an order may hold a password, and what is said here is logged.
        print(f"not a copy order: {error.errors(include_url=False, include_input=False)[:3]}", file=sys.stderr)  # noqa: T201 - the service keeps our stderr
        return 2
    threading.Thread(target=_leave_with_the_service, args=(0,), daemon=True).start()
    try:
        carry_out(order, say, stopping.is_set)
    except SynvirtError:
        return 1
    return 0


def _first_line(descriptor: int) -> bytes:
    line = b""
    while not line.endswith(b"\n"):
        part = os.read(descriptor, 1 << 16)
        if not part:
            break
        line += part
    return line


if __name__ == "__main__":
    # Everything is durable and said; to take an interpreter apart is 40 ms, for which the service, or a stopped guest, waits.
    os._exit(main())
