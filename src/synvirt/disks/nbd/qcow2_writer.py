"""A disk as a new qcow2 file, written by qemu-img: reader ─▶ NbdServer ─▶ qemu-img convert ─▶ file.

Version 3, clusters of 64 KiB, none for zeros. The program gets only the file that it writes and both formats, and ends with
this process.
"""

import contextlib
import os
import threading
from collections.abc import Callable
from pathlib import Path

from synvirt.blocks import DiskReader
from synvirt.cage.scratch import scratch_folder
from synvirt.copying import Bucket, Copied
from synvirt.disks.nbd.server import NbdServer
from synvirt.disks.raw.files import HINTS
from synvirt.durable import sync_file, sync_folder
from synvirt.errors import DiskWriteFailed
from synvirt.programs import ENDED_HINT, ProgramFailed, run

# A disk of 16 TiB at 100 MiB/s takes two days.
TIMEOUT_S = 4 * 86400


def write_qcow2(
    reader: DiskReader,
    path: Path,
    *,
    bandwidth_bps: int | None = None,
    stop: Callable[[], bool] = lambda: False,
    on_progress: Callable[[Copied], None] = lambda copied: None,
) -> None:
    """Writes all of the disk, durable when this returns. After an error the file stays with what was written; its maker removes
    it.

    `bandwidth_bps`: the most bytes per second that are read. `stop` is called often; Cancelled, once it is true. `on_progress`
    is called from several threads, one at a time. Errors of the reader are raised; else DiskWriteFailed.
    """
    count, bucket = _Count(reader, on_progress), Bucket(bandwidth_bps) if bandwidth_bps else None

    def read(length: int) -> None:
        """Before qemu-img gets it: what it waits for, it cannot write."""
        if bucket is not None:
            bucket.take(length, stop)
        count.add(length)

    server = NbdServer(reader, on_read=read)
    try:
        with scratch_folder("qcow2") as folder, contextlib.closing(server):
            _convert(server.listen(folder / "socket"), path, stop)
        sync_file(path)
        sync_folder(path.parent)
    except ProgramFailed as failed:
        if server.failure is not None:
            raise server.failure from failed
        if failed.from_outside:
            raise DiskWriteFailed(f"{path.name} cannot be written: qemu-img {failed.cut_off}", hint=ENDED_HINT) from failed
        raise _failed(path, failed.stderr.replace(f"{path.parent}/", "")) from failed
    except OSError as error:
        raise _failed(path, os.strerror(error.errno or 0)) from error


def _failed(path: Path, messages: str) -> DiskWriteFailed:
    """By the first message: on a full disk, each of qemu-img's writes that are under way gives one."""
    reason = messages.partition("\n")[0].removeprefix("qemu-img: ").strip() or "qemu-img gives no reason"
    hint = next((hint for number, hint in HINTS.items() if os.strerror(number) in reason), None)
    return DiskWriteFailed(f"{path.name} cannot be written: {reason}", hint=hint)


def _convert(source: str, path: Path, stop: Callable[[], bool]) -> None:
    argv = ["qemu-img", "convert", "-q", "-W", "-f", "raw", "-O", "qcow2", source, str(path)]
    # Made here, so that it is ours: in a worker's cage qemu-img may run as another user (`files_as_service`).
    path.touch(mode=0o644)
    try:
        run(argv, timeout_s=TIMEOUT_S, stop=stop, guarded=True, missing=DiskWriteFailed)
    except ProgramFailed as failed:
        raise ProgramFailed("qemu-img", failed.returncode, failed.stderr.replace(source, "the disk")) from failed


class _Count:
    """How much of the disk was read."""

    def __init__(self, reader: DiskReader, on_progress: Callable[[Copied], None]) -> None:
        self._on_progress = on_progress
        self._total = sum(extent.length for extent in reader.extents() if not extent.zero)
        self._done = 0
        self._lock = threading.Lock()

    def add(self, length: int) -> None:
        with self._lock:
            self._done += length
            self._on_progress(Copied(max(self._total, self._done), self._done, 0, 0))
